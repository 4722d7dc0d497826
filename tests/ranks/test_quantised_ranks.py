"""Codes are gathered between real ranks under Inductor: the numbers of the plain graph, to the
bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tiers import rarely
from torch.utils.checkpoint import checkpoint

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
wait = ops.wait_tensor
E4M3 = torch.float8_e4m3fn
NAME = "quantised before gather"


def quantised(x, dim):
    """Codes and inverse scales of float8 training: tensorwise if ``dim`` is None, else rowwise."""
    top = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (448.0 / top.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3), scale.reciprocal()


def sequence_parallel(x, gain, weight, dim):
    """A norm on a rank's tokens, their gather, and a float8 linear layer."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    tokens = (wide * gain.float()).bfloat16()
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    gathered = wait(ops.all_gather_into_tensor(tokens, size, group))
    codes, scale = quantised(gathered, dim)
    other, other_scale = quantised(weight, None)
    columns = torch.ones(1, weight.shape[0]) * other_scale
    scales = (scale, columns) if dim is not None else (scale, other_scale)
    result = torch._scaled_mm(codes, other.t(), *scales, out_dtype=torch.bfloat16)
    return result, codes


def compare(dim) -> list[str]:
    """Run the layer on ordinary and on hostile tokens, plain and simplified."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(24, 96, generator=generator).pow(5).bfloat16()
    hostile = x.clone()
    hostile[0] = 0.0
    hostile[1] = -0.0
    hostile[2, 5] = torch.nan if rank == 0 else 1.0
    hostile[3, 6] = torch.inf
    same = torch.Generator().manual_seed(7)
    gain = torch.randn(96, generator=same).bfloat16()
    weight = torch.randn(64, 96, generator=same).bfloat16()
    results = []
    for policy in ("off", "lossless"):
        torch._dynamo.reset()
        backend = commpass.backend(policy, profile=commpass.ethernet(0.001), strict=True)
        layer = torch.compile(sequence_parallel, backend=backend, fullgraph=True)
        with torch.no_grad():
            results.append([*layer(x, gain, weight, dim), *layer(hostile, gain, weight, dim)])
    for plain, simple in zip(*results, strict=True):
        assert (plain.dtype, plain.shape) == (simple.dtype, simple.shape)
        assert torch.equal(plain.isnan(), simple.isnan())  # torch specifies no sign of a NaN
        assert torch.equal(plain.float().nan_to_num(), simple.float().nan_to_num())
    plan = commpass.plans()[-1]
    sent = sorted((site.dtype, site.bytes) for site in plan.sites)
    assert sent[-1] == ("uint8", 24 * 96)
    assert sum(size for _, size in sent) <= 0.55 * x.nbytes
    return [step.rule for step in plan.simplified]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dim", [None, -1])
def test_float8_tokens_are_gathered_with_the_same_bits_under_inductor(ranks2, dim):
    first, second = ranks2.run(compare, dim)
    assert first == second == [NAME]


class Float8Linear(torch.autograd.Function):
    """A float8 linear layer, whose backward quantises its input again.

    Scales are of rows in forward and of columns in backward, or of whole tensors if not ``rows``.
    """

    @staticmethod
    def forward(ctx, x, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        (codes, scale), (other, other_scale) = (
            quantised(each, -1 if rows else None) for each in (x, weight)
        )
        other_scale = other_scale.reshape(1, -1) if rows else other_scale
        return torch._scaled_mm(codes, other.t(), scale, other_scale, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        (codes, scale), (other, other_scale) = (
            quantised(each, 0 if ctx.rows else None) for each in (gradient, x)
        )
        codes, other = codes.t().contiguous(), other.t().contiguous().t()
        scale = scale.reshape(-1, 1) if ctx.rows else scale
        of_weight = torch._scaled_mm(codes, other, scale, other_scale, out_dtype=x.dtype)
        return (gradient.float() @ weight.float()).to(x.dtype), of_weight, None


def train(rows, dtype, checkpointed, inner) -> tuple:
    """Differentiate a float8 layer of gathered tokens, plain and simplified.

    Return the rules and the bytes sent of the forward graph, and (dtype, values) of what is saved
    for backward.
    """
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(24, 96, generator=generator).pow(3).to(dtype)
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(7)).to(dtype)

    def layer(x, weight):
        gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        if not checkpointed:
            return Float8Linear.apply(gathered, weight, rows)
        return checkpoint(Float8Linear.apply, gathered, weight, rows, use_reentrant=False)

    results, saved = [], []
    for policy in ("off", "lossless"):
        torch._dynamo.reset()
        saved.clear()
        link = commpass.ethernet(0.001)
        backend = commpass.backend(policy, inner=inner, profile=link, strict=True)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        leaf = weight.clone().requires_grad_()

        def pack(value):
            saved.append((str(value.dtype).removeprefix("torch."), value.numel()))
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            result = compiled(x, leaf)
        result.float().square().sum().backward()
        results.append((result.detach(), leaf.grad))
    for plain, simple in zip(*results, strict=True):
        assert torch.equal(plain, simple)
    forward, _ = commpass.plans()[-2:]
    steps = [step.rule for step in forward.simplified]
    return steps, sum(site.bytes for site in forward.sites), sorted(saved)


TRAINED = [
    (False, torch.bfloat16, True, "eager"),
    rarely(True, torch.float32, False, "eager"),
    rarely(False, torch.bfloat16, True, "inductor"),
    rarely(False, torch.bfloat16, False, "inductor"),
    rarely(True, torch.float32, False, "inductor"),
    rarely(True, torch.float32, True, "inductor"),
]


@pytest.mark.parametrize(("rows", "dtype", "checkpointed", "inner"), TRAINED)
def test_training_saves_codes_with_the_same_gradients(ranks2, rows, dtype, checkpointed, inner):
    first, second = ranks2.run(train, rows, dtype, checkpointed, inner)
    assert first == second
    steps, nbytes, saved = first
    assert steps == [NAME]
    assert nbytes <= 0.56 * 24 * 96 * dtype.itemsize
    assert ("float8_e4m3fn", 2 * 24 * 96) in saved
    assert (str(dtype).removeprefix("torch."), 2 * 24 * 96) not in saved
