"""Sums, means, extremes, products and bit operations on every dtype that gloo supports.

Everything except a sum or a mean of floats arrives unchanged, under every policy, beside compressed
sums.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import commpass
from commpass import Policy, Rule

pytestmark = pytest.mark.xdist_group("ranks")

N = 3000
FORCED = Policy(name="int8", rules=[Rule(codec="int8", force=True)])
REDUCE = {
    "sum": lambda all_ranks: all_ranks.sum(0),
    "avg": lambda all_ranks: all_ranks.mean(0),
    "min": lambda all_ranks: all_ranks.amin(0),
    "max": lambda all_ranks: all_ranks.amax(0),
    "product": lambda all_ranks: all_ranks.prod(0),
    "band": lambda all_ranks: all_ranks[0] & all_ranks[1],
    "bor": lambda all_ranks: all_ranks[0] | all_ranks[1],
    "bxor": lambda all_ranks: all_ranks[0] ^ all_ranks[1],
}
BITS = ("band", "bor", "bxor")


def values(dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(N, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (N,), generator=generator).to(dtype)


def has(dtype: torch.dtype, op: str) -> bool:
    """Return whether torch supports this op for a dtype: no bit operations on floats, no mean of
    integers."""
    return op not in BITS if dtype.is_floating_point else op != "avg"


def expected(dtype: torch.dtype, op: str) -> Tensor:
    """Return the result from the definition: in float64, and for integers and bools modulo their
    size."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    reduced = REDUCE[op](torch.stack([values(dtype, rank).to(wide) for rank in range(2)]))
    return reduced.to(dtype)


def summed(x: Tensor, op: str) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, op, dist.group.WORLD))


def summed_in_place(x: Tensor, op: str) -> Tensor:
    names = {"product": "PRODUCT"}
    held = x.clone()
    dist.all_reduce(held, op=getattr(dist.ReduceOp, names.get(op, op.upper())))
    return held


def own_part(x: Tensor, op: str) -> Tensor:
    """Becomes a reduce_scatter."""
    return summed(x, op).chunk(2)[dist.get_rank()].clone()


def of_equal(x: Tensor, op: str) -> Tensor:
    """May be sent as one number."""
    return summed(x[:1].expand(N).contiguous(), op)


FORMS: dict[Callable[[Tensor, str], Tensor], Callable[[Tensor], Tensor]] = {
    summed: lambda whole: whole,
    summed_in_place: lambda whole: whole,
    own_part: lambda whole: whole.chunk(2)[dist.get_rank()],
    of_equal: lambda whole: whole[:1].expand(N),
}


def check(name: str, policy: Policy | str) -> int:
    """Return how many sites were compressed; check that all of them are sums or means of floats."""
    dtype = getattr(torch, name)
    cases = [(form, op) for op in REDUCE if has(dtype, op) for form in FORMS]

    def step(x: Tensor) -> list[Tensor]:
        return [form(x, op) for form, op in cases]

    seen = len(commpass.plans())
    profile = commpass.ethernet(0.01)
    backend = commpass.backend(policy, inner="aot_eager", profile=profile, strict=True)
    found = torch.compile(step, backend=backend, fullgraph=True)(values(dtype, dist.get_rank()))
    (plan,) = commpass.plans()[seen:]
    for site in plan.compressed:
        assert site.reduce_op in ("sum", "avg")
        assert dtype.is_floating_point
    for (form, op), got in zip(cases, found, strict=True):
        wanted = FORMS[form](expected(dtype, op))
        assert got.dtype == dtype
        if dtype.is_floating_point and op in ("sum", "avg", "product"):
            allowed = 0.02 if plan.compressed and op != "product" else torch.finfo(dtype).eps
            apart = (got.double() - wanted.double()).norm() / wanted.double().norm()
            assert apart <= allowed, (form.__name__, op, apart)
        else:
            assert torch.equal(got, wanted), (form.__name__, op)
    return len(plan.compressed)


FLOATS = ["float32", "bfloat16", "float16", "float64"]
INTEGERS = ["int64", "int32", "int8", "uint8", "bool"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_and_means_alone_are_compressed_of_floats(dtype, ranks2):
    assert min(ranks2.run(check, dtype, FORCED)) >= 4


@pytest.mark.every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("policy", ["lossless", "balanced"])
def test_reductions_of_floats_under_presets(dtype, policy, ranks2):
    sites = ranks2.run(check, dtype, policy)
    assert (max(sites) == 0) == (policy == "lossless")


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_reductions_of_integers_are_exact_where_codecs_are_forced(dtype, ranks2):
    assert ranks2.run(check, dtype, FORCED) == [0, 0]


@pytest.mark.every
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("policy", ["lossless", "balanced"])
def test_reductions_of_integers_under_presets(dtype, policy, ranks2):
    assert ranks2.run(check, dtype, policy) == [0, 0]
