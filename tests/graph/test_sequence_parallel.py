"""Row-wise operators after sums run on a part of the rows of each rank, and less is gathered;
similar graphs must not change."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from functional_ops import ag, ar
from graphs import as_rank, code, collectives, trace
from lockstep import run_in_lockstep

import commpass
from commpass.costmodel import Link, Profile
from commpass.passes.discover import discover
from commpass.passes.simplify import simplify
from commpass.policy import Policy

SLOW = Profile("slow", Link(1.0, 1e-4))
"""A link on which bytes take time, messages hardly any, and no kind is slower than its formula."""
NAME = "sequence parallel"
RANKS, ROWS, WIDTH = 4, 8, 64
POLICY = Policy(sequence_parallel=True)
E4M3 = torch.float8_e4m3fn


def rms_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * weight


def gemma_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def layer_norm(x, weight):
    return torch.nn.functional.layer_norm(x, (WIDTH,), weight, weight * 0.5)


def coded(x, amax):
    scale = 448.0 / amax.clamp(min=1e-12)
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3), scale


def rowwise(x):
    return coded(x, x.float().abs().amax(-1, keepdim=True))


def tensorwise(x):
    return coded(x, x.float().abs().max())


def static(x):
    return coded(x, torch.ones((), dtype=torch.float32))


def last(x, r, w, m, norm=rms_norm, quantise=rowwise):
    """The last layer: a sum, a residual, a norm and a quantiser."""
    return quantise(norm(ar(x) + r, w))


def layers(x, r, w, m, norm=rms_norm, quantise=rowwise):
    """Two layers, whose matrices ``m`` differ between ranks, and a residual stream."""
    h = ar(x) + r
    codes, scale = quantise(norm(h, w))
    h = h + ar((codes.to(m.dtype) @ m) / scale.to(m.dtype))
    codes, scale = quantise(norm(h, w))
    return (codes.to(m.dtype) @ m) / scale


def after_norms(x, r, w, m):
    """Layers that normalize the sums, and not only the stream, as Gemma 2 does."""
    h = r + gemma_norm(ar(x), w)
    codes, scale = rowwise(gemma_norm(h, w))
    h = h + gemma_norm(ar((codes.to(m.dtype) @ m) / scale.to(m.dtype)), w)
    return rowwise(gemma_norm(h, w))


def gated(x, r, w, m):
    """A softmax over the columns, a gate, and joined columns."""
    h = ar(x) + r
    return rowwise(torch.cat([h.softmax(-1), torch.sigmoid(h) * h], -1))


def averaged(x, r, w, m):
    ops = torch.ops._c10d_functional
    mean = ops.wait_tensor(ops.all_reduce(x.view(-1, WIDTH), "avg", "0"))
    return rowwise(rms_norm(mean.view(x.shape) + r, w))


FLAT, ONE, MANY = (ROWS, WIDTH), (1, ROWS, WIDTH), (ROWS, 2, WIDTH)
AR, RS, AG = "all_reduce", "reduce_scatter", "all_gather"
VALUES = ROWS * WIDTH
CODES = (AG, torch.uint8, VALUES // RANKS)
MAXIMA = (AG, torch.int32, ROWS // RANKS * 4)
BF16, F32 = torch.bfloat16, torch.float32
SCALES = (AG, torch.uint8, ROWS // RANKS * 2)
SUM = {BF16: (RS, BF16, VALUES * 2), F32: (RS, F32, VALUES * 4)}
FITS = {
    # name: (function, dtype, shape, [(kind, dtype, bytes)])
    "last layer": (last, BF16, FLAT, [SUM[BF16], MAXIMA, CODES]),
    "layers, the first of which needs scales of bfloat16": (
        layers,
        BF16,
        FLAT,
        [SUM[BF16], CODES, SCALES, SUM[BF16], MAXIMA, CODES],
    ),
    "layers of float32, one sequence": (layers, F32, ONE, [SUM[F32], MAXIMA, CODES] * 2),
    "layer norms, sequences, maxima of tensors": (
        partial(layers, norm=layer_norm, quantise=tensorwise),
        F32,
        MANY,
        [(RS, F32, VALUES * 8), (AG, torch.int32, 4), (AG, torch.uint8, VALUES // 2)] * 2,
    ),
    "static scales": (
        partial(layers, norm=gemma_norm, quantise=static),
        BF16,
        FLAT,
        [SUM[BF16], CODES] * 2,
    ),
    "norms of sums": (after_norms, F32, FLAT, [SUM[F32], MAXIMA, CODES] * 2),
    "gates": (
        gated,
        F32,
        FLAT,
        [SUM[F32], MAXIMA, (AG, torch.uint8, 2 * VALUES // RANKS)],
    ),
    "mean of flat rows": (averaged, BF16, ONE, [SUM[BF16], MAXIMA, CODES]),
    "no norm": (lambda x, r, w, m: rowwise(ar(x)), F32, FLAT, [SUM[F32], MAXIMA, CODES]),
}


def inputs_of(rank, dtype, shape):
    """Return a rank's addend, a residual and a weight that all ranks have, and the rank's matrix.

    Rows of the sums are zeros, or have NaN or Inf.
    """
    own, same = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
    x = torch.randn(shape, generator=own) * torch.randn(shape, generator=own).exp()
    r, w = torch.randn(shape, generator=same), torch.rand(WIDTH, generator=same)
    rows = x.view(-1, WIDTH)
    rows[0] = r.view(-1, WIDTH)[0] = -0.0
    rows[3, 5] = torch.nan if rank == 1 else 1.0
    rows[6, 7] = torch.inf if rank == 2 else 1.0
    return [each.to(dtype) for each in (x, r, w, torch.randn(WIDTH, WIDTH, generator=own))]


def layout(value):
    """Return dtype, sizes and strides. That of a dimension of size 1 has no meaning."""
    steps = zip(value.shape, value.stride(), strict=True)
    return value.dtype, value.shape, [step for size, step in steps if size != 1]


def traced(function, inputs):
    def program(x, r, w, m):
        return function(x, r, w, m)

    return trace(program, *inputs)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", FITS)
def test_rows_of_sums_are_computed_by_one_rank_with_the_same_bits(name):
    function, dtype, shape, sent = FITS[name]
    inputs = [inputs_of(rank, dtype, shape) for rank in range(RANKS)]
    plain, simple, steps = [], [], []
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            gm = traced(function, inputs[rank])
            plain.append(copy.deepcopy(gm))
            steps.append(simplify(gm, discover(gm), POLICY, SLOW))
            simple.append(gm)
    assert [step.rule for step in steps[0]] == [NAME]
    assert all(each == steps[0] for each in steps)
    assert all(collectives(gm) == sent for gm in simple)
    ranks_of = {"0": tuple(range(RANKS))}.__getitem__
    expected = run_in_lockstep(plain, inputs, ranks_of)
    for a, b in zip(run_in_lockstep(simple, inputs, ranks_of), expected, strict=True):
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (a, b)), strict=True):
            assert layout(one) == layout(other)
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(*(each.float().nan_to_num(0.0) for each in (one, other)))


def written(x, r, w, m):
    h = ar(x) + r
    codes, scale = rowwise(rms_norm(h, w))
    h.add_(1)
    return codes, scale, h


MUST_NOT = {
    "the sum is an output": lambda x, r, w, m: (*rowwise(rms_norm(h := ar(x) + r, w)), h),
    "the sum is multiplied": lambda x, r, w, m: (*rowwise(h := ar(x) + r), h @ m),
    "the norm is multiplied": lambda x, r, w, m: rms_norm(ar(x) + r, w) @ m,
    "a residual from the matrix of a rank": lambda x, r, w, m: rowwise(ar(x) + r @ m),
    "the addend of a rank": lambda x, r, w, m: rowwise(ar(x) - x),
    "a random residual": lambda x, r, w, m: rowwise(ar(x) + torch.rand_like(r)),
    "the values are written to": written,
    "a maximum over ranks": lambda x, r, w, m: rowwise(ar(x, "max") + r),
    "rows depend on other rows": lambda x, r, w, m: rowwise((ar(x) + r).cumsum(0)),
    "a softmax over the rows": lambda x, r, w, m: rowwise((ar(x) + r).softmax(0)),
    "a mean over the rows": lambda x, r, w, m: rowwise((h := ar(x)) - h.mean(0, keepdim=True)),
    "maxima of columns, which are as many": lambda x, r, w, m: rowwise((ar(x) + r).t()),
    "fewer rows than ranks": lambda x, r, w, m: rowwise(ar(x[:6]) + r[:6]),
    "the sum of each rank's rest": lambda x, r, w, m: ar(ar(x) / 4 + r @ m),
    "integers": lambda x, r, w, m: ar(x.int()).to(torch.int8),
}


def steps_of(function, policy=POLICY, profile=SLOW, dtype=torch.bfloat16):
    """Return the rules that were applied to a function, which must else stay as it is."""
    with as_rank(1, RANKS):
        gm = traced(function, inputs_of(1, dtype, FLAT))
        before = code(gm)
        steps = [step.rule for step in simplify(gm, discover(gm), policy, profile)]
        assert steps or code(gm) == before
    return steps


@pytest.mark.parametrize("name", MUST_NOT)
def test_similar_graphs_stay(name):
    assert NAME not in steps_of(MUST_NOT[name])


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(sequence_parallel=True, reassociate=False),
        Policy(sequence_parallel=True, off=True),
        Policy.from_preset("balanced", sequence_parallel=True),
    ],
    ids=["not promised", "exact", "off", "lossy"],
)
def test_sums_stay_under_other_policies(policy):
    with as_rank(0, RANKS):
        gm = traced(layers, inputs_of(0, torch.bfloat16, FLAT))
        plan = commpass.rewrite(gm, [], policy, profile=SLOW, strict=True)
    assert plan.simplified == ()
    assert [site.kind for site in plan.sites] == [AR, AR]


@pytest.mark.parametrize("profile", [Profile("late", Link(1e3, 100.0)), commpass.ethernet(0.001)])
def test_sums_stay_where_more_messages_or_a_slow_reduce_scatter_cost_more(profile):
    assert steps_of(layers, profile=profile) == []


def test_the_plan_has_the_new_exchanges_and_numbers():
    with as_rank(2, RANKS):
        gm = traced(last, inputs_of(2, torch.bfloat16, FLAT))
        plan = commpass.rewrite(gm, [], POLICY, profile=SLOW, strict=True)
    (step,) = plan.simplified
    sent = 2 * 3 / 4 * VALUES * 2
    now = 3 / 4 * VALUES * 2 + 3 * (ROWS // RANKS * 4 + VALUES // RANKS)
    assert step.saved_bytes == sent - now
    assert step.numbers == (0,)
    assert {"mean [-1] True", "add 1e-06", "mul 448.0"} <= {*step.moved}
    assert [(site.kind, site.bytes) for site in plan.sites] == [
        (RS, VALUES * 2),
        (AG, ROWS // RANKS * 4),
        (AG, VALUES // RANKS),
    ]


def deep(x, r, w, m, number=40):
    h = ar(x) + r
    for _ in range(number):
        codes, scale = rowwise(rms_norm(h, w))
        h = h + ar((codes.to(m.dtype) @ m) / scale.to(m.dtype))
    return rowwise(rms_norm(h, w))


@pytest.mark.every
def test_a_stream_of_many_layers_is_sharded_as_a_whole():
    with as_rank(0, RANKS):
        gm = traced(deep, inputs_of(0, torch.bfloat16, FLAT))
        steps = simplify(gm, discover(gm), POLICY, SLOW)
        kinds = [kind for kind, _, _ in collectives(gm)]
    assert {step.rule for step in steps} == {NAME}
    assert sum(len(step.numbers) for step in steps) == kinds.count(RS) == 41
    assert AR not in kinds


def test_a_gathered_residual_is_equal_on_all_ranks_and_need_not_be_sent():
    rules = steps_of(lambda x, r, w, m: rowwise(ar(x) + ag(r[:2])))
    assert rules == [NAME, "own part"]
