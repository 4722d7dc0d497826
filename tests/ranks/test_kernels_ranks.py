"""Generated kernels on real ranks give the numbers of the inline form, the same on every rank.

This holds for any number of threads, any strides of rows, and any addend.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import ops
from tiers import rarely

import commpass
from commpass.codecs import codec as codec_named

pytestmark = pytest.mark.xdist_group("ranks")
wait = ops.wait_tensor
EXACT = ("int8",)
"""Codecs whose kernels have the bits of the inline form; a rotation adds in another order."""


def step(x, residual):
    """Compute sums with a residual, of rows with gaps, and of what is summed already."""
    first = wait(ops.all_reduce(torch.sin(x), "sum", "0")) + residual
    second = wait(ops.all_reduce(x[:, ::2], "sum", "0"))
    third = wait(ops.all_reduce(first, "avg", "0"))
    return first, second, third


def compiled(text: str, algorithm: str, lowering: str, *inputs: torch.Tensor):
    torch._dynamo.reset()
    rule = commpass.Rule(codec=text, algorithm=algorithm, lowering=lowering, force=True)
    backend = commpass.backend(commpass.Policy(rules=[rule]), strict=True)
    with torch.no_grad():
        made = torch.compile(step, backend=backend, dynamic=False)(*inputs)
    return made, commpass.plans()[-1]


def check(text: str, algorithm: str, dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + rank % 2)
    try:
        random = torch.Generator().manual_seed(rank)
        x = torch.randn(37, 74, generator=random).to(dtype)
        same = torch.randn(37, 74, generator=torch.Generator().manual_seed(9)).to(dtype)
        inline, _ = compiled(text, algorithm, "inline", x, same)
        found, plan = compiled(text, algorithm, "kernel", x, same)
        assert {site.lowering for site in plan} == {"kernel"}
        assert all("in one kernel each" in site.reason for site in plan)
        if text in EXACT:
            # These are input values: computed values are coded by Inductor before they are rounded,
            # if inline.
            assert torch.equal(found[1], inline[1])
        for each in found:
            gathered = [torch.empty_like(each) for _ in range(ranks)]
            dist.all_gather(gathered, each.contiguous())
            assert all(torch.equal(each, other) for other in gathered)  # law 1
        total = torch.sin(x).double()
        dist.all_reduce(total)
        error = (found[0].double() - same.double() - total).norm() / total.norm()
        assert error < (2 + ranks) * codec_named(text).relative_error() + 2**-6
        x[5, 3] = float("nan")
        spoiled, _ = compiled(text, algorithm, "kernel", x, same)
        assert not spoiled[0][5, 3].isfinite()  # law 2
    finally:
        torch.set_num_threads(threads)


CASES = [
    rarely("int8", "two_shot", torch.bfloat16),
    rarely("rotated", "two_shot", torch.bfloat16),
    rarely("int8", "ring", torch.float16),
    rarely("rotated", "one_shot", torch.float32),
]


@pytest.mark.parametrize(("text", "algorithm", "dtype"), CASES, ids=str)
def test_kernels_on_three_ranks(text, algorithm, dtype, ranks3):
    ranks3.run(check, text, algorithm, dtype, timeout=280)
