"""A decode with the addition and the norm after it, as one kernel, in a compiled training step on
ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import ops
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
WIDTH = 320


class Block(nn.Module):
    """The end of a row-parallel layer, with the residual stream, a norm and what reads it."""

    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(WIDTH)
        self.norm.weight.data.copy_(torch.linspace(0.5, 2, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        random = torch.Generator().manual_seed(1)
        self.linear.weight.data.copy_(torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5)

    def after(self, h):
        return self.linear(self.norm(h))

    def forward(self, x, residual):
        total = ops.wait_tensor(ops.all_reduce(torch.sin(x), "sum", "0"))
        h = residual + total.view(residual.shape)
        return h, self.after(h)


def check() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(rank))
    residual = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(9))
    model = Block()
    rule = commpass.Rule(codec="int8", algorithm="two_shot", lowering="kernel", force=True)
    backend = commpass.backend(commpass.Policy(rules=[rule]), strict=True)
    torch._dynamo.reset()
    seen = len(commpass.plans())
    h, y = torch.compile(model, backend=backend, dynamic=False)(x, residual.requires_grad_())
    (site,) = (site for plan in commpass.plans()[seen:] for site in plan if "norm" in site.reason)
    assert "in one kernel each: encode, decode+sum+encode, decode+add+norm" in site.reason
    for each in (h, y):
        gathered = [torch.empty_like(each) for _ in range(ranks)]
        dist.all_gather(gathered, each.detach().contiguous())
        assert all(torch.equal(each, other) for other in gathered)
    total = torch.sin(x).double()
    dist.all_reduce(total)
    error = (h.double() - residual.double() - total.view(h.shape)).norm() / total.norm()
    assert error < 0.05
    y.sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    plain = h.detach().requires_grad_()
    right = model.after(plain)
    torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4)
    right.sum().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(residual.grad, plain.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_norm_in_the_kernel_that_decodes_gives_the_numbers_of_the_model(ranks2):
    ranks2.run(check, timeout=280)


def sequence_parallel(x, residual, weight):
    """The end of a row-parallel layer on a rank's tokens, and the gather for the next layer."""
    ranks = dist.get_world_size()
    own = ops.wait_tensor(ops.reduce_scatter_tensor(torch.relu(x), "sum", ranks, "0"))
    h = residual + own
    factor = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return h, ops.wait_tensor(ops.all_gather_into_tensor(weight * (h * factor), ranks, "0"))


def check_one_kernel_between_exchanges() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(64, WIDTH, generator=random)
    residual = torch.randn(64 // ranks, WIDTH, generator=random)
    weight = torch.linspace(0.5, 2, WIDTH)
    found = {}
    for lowering, checks in (("kernel", 0), ("kernel", 2), ("inline", 0)):
        rule = commpass.Rule(codec="int8(block=64)", lowering=lowering, force=True, max_error=0.1)
        policy = commpass.Policy(rules=[rule], check_calls=checks)
        torch._dynamo.reset()
        compiled = torch.compile(
            sequence_parallel, backend=commpass.backend(policy, strict=True), dynamic=False
        )
        found[lowering, checks] = compiled(x, residual, weight)
        reason = commpass.plans()[-1].sites[0].reason
        assert ("+norm+encode" in reason) == (lowering == "kernel"), reason
    h, y = found["inline", 0]
    for each, (stream, normed) in found.items():
        assert torch.equal(stream, h), each
        apart, step = (normed - y).abs(), y.abs().max() / 127
        assert (apart <= step).all(), each  # a code at a tie
        assert (apart > 1e-3 * step).float().mean() < 0.01, each
        assert torch.equal(normed, found["kernel", 0][1]) or each == ("inline", 0)
    gathered = [torch.empty_like(y) for _ in range(ranks)]
    dist.all_gather(gathered, found["kernel", 0][1])
    assert all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.slow
def test_one_kernel_between_two_exchanges_gives_the_bits_of_separate_ones(ranks2):
    ranks2.run(check_one_kernel_between_exchanges, timeout=280)
