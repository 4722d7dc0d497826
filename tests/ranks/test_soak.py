"""Thousands of steps on real ranks: memory does not grow, replicas keep equal bits, and nothing is
lost."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiers import rarely
from torch import nn

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
WARM = 300


class Summed(torch.autograd.Function):
    """The identity, whose gradient is the mean over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ops.wait_tensor(ops.all_reduce(gradient, "avg", dist.group.WORLD.group_name))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))

    def forward(self, x):
        y = (x @ Summed.apply(self.first)).tanh()
        y = (
            ops.wait_tensor(ops.all_reduce(y.detach(), "avg", dist.group.WORLD.group_name)) * 0.1
            + y
        )
        return y @ Summed.apply(self.second)


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(steps: int) -> tuple[float, float, int, int, str]:
    rank = dist.get_rank()
    policy = Policy(
        rules=[
            Rule(direction="backward", codec="topk(density=0.1)", force=True),
            Rule(direction="forward", codec="int8", force=True),
        ]
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = torch.compile(model, backend=commpass.backend(policy, inner="aot_eager", strict=True))
    seen, losses = len(commpass.plans()), []
    generator = torch.Generator().manual_seed(rank)
    before = tensors = 0
    for number in range(steps):
        x = torch.randn(16, 32, generator=generator)
        loss = (step(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == WARM:
            gc.collect()
            before, tensors = (
                resident(),
                sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
            )
    gc.collect()
    more = sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) - tensors
    assert {site.codec for plan in commpass.plans()[seen:] for site in plan} == {
        "int8",
        "segments(inner=topk(density=0.1), lengths=n1024_1024)",
    }
    assert len(commpass.state_dict(model)) == 2
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return (
        sum(losses[:50]) / 50,
        sum(losses[-50:]) / 50,
        resident() - before,
        more,
        hashlib.sha256(bits).hexdigest(),
    )


@pytest.mark.every
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [400, rarely(3000)])
def test_many_steps_keep_replicas_alike_and_memory_as_it_is(steps, ranks2):
    (first, last, grown, more, bits), (*_, other_grown, other_more, other_bits) = ranks2.run(
        soak, steps, timeout=800
    )
    assert bits == other_bits
    assert last < 0.8 * first  # it was trained, including what was held back
    assert max(grown, other_grown) < 16 * 2**20
    assert max(more, other_more) <= 10
