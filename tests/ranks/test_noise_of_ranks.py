"""Stochastic rounding over ranks, hops and steps: errors are independent, and the same if they are
recomputed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from fabric import lockstep
from tiers import rarely, runs_again
from torch.utils.checkpoint import checkpoint

import commpass
from commpass.collectives import Request, algorithm

pytestmark = pytest.mark.xdist_group("ranks")
RANKS = 64
STORED = ["pow2", "bf16", "fp32"]


def values(rank: int, shape=(24, 256), step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


def coder(stored: str, bits: int = 4) -> commpass.Codec:
    return commpass.codec(f"int{bits}", block=256, stored=stored, rounding="stochastic", seed=5)


def sums(inputs, codec, name, monkeypatch, kind="all_reduce"):
    chosen, ranks = algorithm(kind, name), len(inputs)
    run = lambda rank: chosen.run(inputs[rank], Request("0", ranks, rank), codec)  # noqa: E731
    return lockstep(run, ranks, monkeypatch)[0]


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def error(inputs, codec, name, monkeypatch) -> torch.Tensor:
    total = torch.stack([each.double() for each in inputs]).sum(0)
    return sums(inputs, codec, name, monkeypatch)[0].double() - total


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("name", ["one_shot", "two_shot(stage=rs)", "one_shot(shards=2)"])
def test_error_of_a_sum_of_64_is_8_times_that_of_one(name, equal, stored, monkeypatch):
    inputs = [values(0 if equal else rank) for rank in range(RANKS)]
    some = inputs[: 1 if equal else 4]
    one = [error([each], coder(stored), "one_shot", monkeypatch) for each in some]
    ratio = rms(error(inputs, coder(stored), name, monkeypatch)) / rms(torch.stack(one))
    assert 0.9 * math.sqrt(RANKS) <= ratio <= 1.1 * math.sqrt(RANKS)


@pytest.mark.parametrize(
    ("name", "rows"), [("one_shot(chunks=2)", 1), ("two_shot(chunks=2)", 4), ("ring(chunks=2)", 4)]
)
def test_chunks_of_equal_values_have_noise_of_their_own(name, rows, monkeypatch):
    """The exchanged tensor has ``rows``, which are split by columns."""
    half = values(0, (rows, 1024))
    inputs = [torch.cat([half, half], dim=1).flatten()] * 4
    one, other = error(inputs, coder("fp32"), name, monkeypatch).reshape(rows, 2, -1).unbind(1)
    assert not torch.equal(one, other)


@pytest.mark.rest_slow(1)
@pytest.mark.few(6)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["two_shot", "ring", "semi_ring", "hierarchical(node=4)"])
def test_errors_of_all_hops_add_up_as_variances(name, stored, monkeypatch):
    ranks, codec, shape = 16, coder(stored, bits=8), (64, 256)

    def lost(addends: int) -> float:
        """Return the mean square error of one encode of a sum of some addends."""
        x = sum(values(500 + each, shape) for each in range(addends))
        return rms(codec.decode(codec.encode(x)).double() - x.double()) ** 2

    hops = {
        "two_shot": lambda: ranks * lost(1),
        "ring": lambda: sum(map(lost, range(1, ranks))),
        "semi_ring": lambda: sum(map(lost, range(1, 9))) + sum(map(lost, range(1, 8))),
        "hierarchical(node=4)": lambda: ranks * lost(1) + 4 * lost(4),
    }
    expected = hops[name]() + lost(ranks)
    inputs = [values(rank, shape) for rank in range(ranks)]
    found = rms(error(inputs, codec, name, monkeypatch))
    # A sum of coded values lies on a grid itself: its codes may have a smaller error than those of
    # others.
    assert 0.85 * math.sqrt(expected) <= found <= 1.1 * math.sqrt(expected)


def test_next_step_makes_errors_of_its_own(monkeypatch):
    """Scales that are powers of two are equal from step to step; values are not."""
    inputs = [[values(rank, step=step) for rank in range(4)] for step in range(16)]
    found = [error(each, coder("pow2"), "two_shot", monkeypatch) for each in inputs]
    assert rms(torch.stack(found).sum(0)) <= 1.1 * 4 * rms(torch.stack(found))


@pytest.mark.slow
def test_one_value_that_stays_while_the_others_of_its_block_change_is_right_on_average(monkeypatch):
    steps = 400
    x = torch.stack([values(step, (256,)) for step in range(steps)])
    x[:, 0], x[:, 1] = 4.0, 0.3  # the peak, which makes the scale 1, and a fraction of one step
    x = x.clamp(-4, 4)
    codec = coder("pow2")
    mean = torch.stack([codec.decode(codec.encode(each))[1].double() for each in x]).mean()
    assert abs(mean - 0.3) <= 4 * math.sqrt(0.3 * 0.7 / steps)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("stored", STORED)
def test_mean_error_over_ranks_is_none(stored, monkeypatch):
    """Unbiased: each value's mean over 256 ranks with the same input, within five standard
    errors."""
    ranks, x = 256, values(0, (2048,))
    codec = coder(stored)
    each = [codec.salted(rank, 0) for rank in range(ranks)]
    found = sum(coder.decode(coder.encode(x)).double() for coder in each) / ranks
    peak = x.double().reshape(-1, 256).abs().amax(1) / 7
    step = {"fp32": peak, "bf16": peak * (1 + 2**-7), "pow2": 2.0 ** peak.log2().ceil()}[stored]
    step = step.repeat_interleave(256)
    assert ((found - x.double()).abs() <= 5 * step * 0.5 / math.sqrt(ranks)).all()


def test_recomputed_values_have_the_same_bits(monkeypatch):
    inputs = [values(rank) for rank in range(5)]
    for name in ("one_shot", "two_shot", "ring(shards=2)", "semi_ring"):
        first, second = (sums(inputs, coder("pow2"), name, monkeypatch) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(each, first[0]) for each in first)  # law 1


# --- on real ranks, in graphs ---------------------------------------------------------------------


def check_recomputed(inner: str) -> None:
    """Backward recomputes forward's sum, and gets the same bits.

    Its gradient is 2 y for the recomputed y, and forward's result is y * y.
    """
    rank, group, ops = dist.get_rank(), dist.group.WORLD.group_name, torch.ops._c10d_functional

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ops.wait_tensor(ops.all_reduce(x, "sum", group))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def block(x):
        y = Sum.apply(torch.nn.functional.gelu(x) + x)
        return y * y

    def model(x, bias):
        again = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(lambda x: block(x) + bias, x, **again)

    rule = commpass.Rule(codec=coder("pow2").spec, algorithm="two_shot", force=True)
    backend = commpass.backend(commpass.Policy(rules=[rule]), inner=inner, strict=True)
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        seen = len(commpass.plans())
        x = values(rank, (3000,)).to(dtype).requires_grad_()
        bias = torch.zeros(3000, dtype=dtype)
        out = torch.compile(model, backend=backend, fullgraph=True)(x, bias)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert [len(plan.compressed) for plan in commpass.plans()[seen:]] == [1, 1]
        other = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((torch.nn.functional.gelu(other) + other).sum(), other)
        slope, found = slope.double(), gradient.double() / 2
        y = out.detach().double().sqrt()
        off = (found.abs() - (y * slope).abs()).abs()
        # Each step of 4 bits is 1/4 or more of a sum; bfloat16 rounds four times in between.
        assert (off <= (1e-5 if dtype == torch.float32 else 2**-6) * (1 + (y * slope).abs())).all()


@pytest.mark.every
@runs_again
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_sum_that_is_computed_again_in_backward_has_the_same_noise(inner, ranks2):
    ranks2.run(check_recomputed, inner, timeout=400)


def check_eager_and_compiled(backend: str) -> None:
    """The noise of a compiled call is that of an eager one; equal values get different noise on
    each rank."""
    x, codec = values(dist.get_rank(), (3000,)), coder("pow2").spec
    call = lambda x: commpass.all_reduce(x * 2, codec=codec)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend=backend)(x), call(x))
    wires = [None] * dist.get_world_size()
    peaked = torch.full((256,), 0.3).index_fill(0, torch.tensor([0]), 7.0)
    mine = commpass.all_gather(peaked, codec=codec)
    dist.all_gather_object(wires, mine)
    assert all(torch.equal(each, mine) for each in wires)  # law 1
    first, second = mine.chunk(2)
    assert not torch.equal(first, second)  # equal values, rounded by two ranks


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", rarely("inductor")])
def test_compiled_and_eager_noise_are_one_and_ranks_draw_their_own(backend, ranks2):
    ranks2.run(check_eager_and_compiled, backend, timeout=400)
