"""Codes are gathered instead of the values that they are computed from: the same bits, fewer bytes,
and similar graphs that must not change."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from functional_ops import ag, ops
from graphs import as_rank, code, collectives, trace, trace_sizes
from lockstep import run_in_lockstep
from tiers import rarely, sampled

import commpass
from commpass.passes.discover import discover
from commpass.passes.simplify import simplify
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
SLOW = commpass.ethernet(0.001)
"""A link on which bytes take time, and messages hardly any."""
RANKS, ROWS, WIDTH = 4, 6, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAME = "quantised before gather"
SIZE = torch.ops.aten.sym_size.int


def of(value, function):
    """Return a function of a value that it uses several times."""
    return function(value)


def a2a(x):
    rows = [x.shape[0] // RANKS] * RANKS
    return wait(ops.all_to_all_single(x, rows, rows, "0"))


def rank_programs(function, inputs, tracer=trace):
    """Trace and simplify a function on each rank separately.

    Return the plain graphs, the simplified ones, and the steps of each rank.
    """
    plain, simple, steps = [], [], []
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            gm = tracer(function, *inputs[rank])
            plain.append(copy.deepcopy(gm))
            steps.append(simplify(gm, discover(gm), Policy(), SLOW))
            simple.append(gm)
    return plain, simple, steps


def bits(value):
    """Return the bits of a value. All NaN are one: torch does not specify their payload."""
    whole = value.float() if value.dtype.itemsize == 1 and value.is_floating_point() else value
    if not whole.is_floating_point():
        return whole
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.dtype.itemsize]
    return torch.where(whole.isnan(), -1, whole.contiguous().view(ints).long())


def hostile(dtype, seed=0):
    """Return values of each rank: heavy-tailed, with rows of zeros, -0.0, NaN and Inf, each on one
    rank."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(RANKS):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        x = x * torch.randn(ROWS, WIDTH, generator=generator).abs().pow(4).exp().clamp(max=1e4)
        x[0] = 0.0
        x[1] = -0.0
        x[1, ::2] = 0.0
        if rank == 1:
            x[2, 3] = torch.nan
        if rank == 2:
            x[3, 5] = -torch.inf
        found.append([x.to(dtype)])
    return found


def finite(dtype, seed=0):
    """Return values of each rank without NaN and Inf, of very different sizes."""
    return [
        [torch.nan_to_num(x.float(), 1.0, 9.0, -9.0).to(dtype)] for (x,) in hostile(dtype, seed)
    ]


# --- quantisers, as libraries write them ---


def scale_of(amax, dtype):
    scale = torch.finfo(dtype).max / amax.double().clamp(min=1e-12)
    return scale.float()


def saturated(x, scale, dtype):
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype)


def tensorwise(x, dtype=E4M3):
    scale = scale_of(x.abs().max(), dtype)
    return saturated(x, scale, dtype), scale.reciprocal()


def rowwise(x):
    scale = scale_of(x.abs().amax(-1, keepdim=True), E4M3)
    return saturated(x, scale, E4M3), scale.reciprocal()


def rowwise_power_of_two(x):
    scale = scale_of(x.abs().amax(-1, keepdim=True), E4M3)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return saturated(x, scale, E4M3), scale.reciprocal()


def columnwise(x):
    scale = scale_of(x.abs().amax(0, keepdim=True), E4M3)
    return saturated(x, scale, E4M3), scale.reciprocal()


def blockwise(x):
    blocks = x.reshape(-1, 32)
    scale = scale_of(blocks.abs().amax(-1, keepdim=True), E4M3)
    return saturated(blocks, scale, E4M3).view(x.shape), scale.reciprocal()


def int8_symmetric(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127.5
    scale = scale.clamp(min=1e-5)
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def int8_asymmetric(x):
    x = x.float()
    low = torch.minimum(x.amin(-1, keepdim=True), torch.zeros(()))
    high = torch.maximum(x.amax(-1, keepdim=True), torch.zeros(()))
    scale = ((high - low) / 255.0).clamp(min=1e-5)
    zero = (-128 - torch.round(low / scale)).clamp(-128, 127).to(torch.int8)
    codes = (torch.round(x / scale) + zero.float()).clamp(-128, 127).to(torch.int8)
    return codes, scale, zero


def power_of_two_exponents(x):
    """Codes with a scale from an exponent of 8 bits, as in microscaling formats."""
    ratio = x.abs().amax(-1, keepdim=True).float() / 448.0
    biased = ((ratio.view(torch.int32) >> 23) & 255).clamp(max=254).to(torch.uint8)
    scale = torch.exp2(127 - biased.to(torch.float32))
    return saturated(x, scale, E4M3), biased


def marked(x):
    top = x.abs().amax(-1, keepdim=True)
    rounded = ((top.view(torch.int32) + 524_288) & -8_388_608).view(torch.float32)
    return torch.index_put(rounded, [top.isnan()], torch.full((), torch.nan))


def int4_codes(x):
    return ((x.float().nan_to_num(0) * 4).round().clamp(-8, 7).to(torch.int8) & 15).flatten()


def in_pairs(codes):
    """Two codes in a byte."""
    return codes[::2] | (codes[1::2] << 4)


def static(x):
    return saturated(x, 0.125, E4M3)


ROW, TENSOR = ROWS * WIDTH, 1
FITS = {
    # name: (function of x, input dtype, [(dtype sent, bytes)])
    "rowwise": (
        lambda x: rowwise(ag(x)),
        torch.bfloat16,
        [(torch.uint8, ROWS * 2), (torch.uint8, ROW)],
    ),
    "rowwise with powers of two": (
        lambda x: rowwise_power_of_two(ag(x)),
        torch.bfloat16,
        [(torch.uint8, ROWS * 2), (torch.uint8, ROW)],
    ),
    "rowwise of float32": (
        lambda x: rowwise(ag(x)),
        torch.float32,
        [(torch.int32, ROWS * 4), (torch.uint8, ROW)],
    ),
    "tensorwise": (
        lambda x: tensorwise(ag(x)),
        torch.bfloat16,
        [(torch.uint8, 2), (torch.uint8, ROW)],
    ),
    "tensorwise e5m2": (
        lambda x: tensorwise(ag(x), E5M2),
        torch.float32,
        [(torch.int32, 4), (torch.uint8, ROW)],
    ),
    "tensorwise of a product": (
        lambda x: tensorwise(ag(x * 3)),
        torch.bfloat16,
        [(torch.uint8, 2), (torch.uint8, ROW)],
    ),
    "tensorwise of the transpose": (
        lambda x: tensorwise(ag(x).t()),
        torch.bfloat16,
        [(torch.uint8, 2), (torch.uint8, ROW)],
    ),
    "twice, once of a view": (
        lambda x: of(ag(x), lambda y: (*tensorwise(y), *tensorwise(y.view(-1, WIDTH)))),
        torch.bfloat16,
        [(torch.uint8, 2), (torch.uint8, ROW)],
    ),
    "codes with a scale of columns": (
        lambda x: columnwise(ag(x)),
        torch.float32,
        [(torch.int32, WIDTH * 4), (torch.uint8, ROW)],
    ),
    "blocks": (
        lambda x: blockwise(ag(x)),
        torch.bfloat16,
        [(torch.uint8, ROW // 32 * 2), (torch.uint8, ROW)],
    ),
    "gathered along the second dimension": (
        lambda x: rowwise(torch.cat(ag(x.t().contiguous()).chunk(RANKS), 1)),
        torch.float32,
        [(torch.int32, WIDTH * 4), (torch.uint8, ROW)],
    ),
    "sequences in a batch": (
        lambda x: rowwise(ag(x).view(RANKS, 2, x.shape[0] // 2, WIDTH).transpose(0, 1)),
        torch.bfloat16,
        [(torch.uint8, ROWS * 2), (torch.uint8, ROW)],
    ),
    "padded": (
        lambda x: rowwise(torch.nn.functional.pad(ag(x), (0, 1))),
        torch.float32,
        [(torch.int32, ROWS * 4), (torch.uint8, ROWS * (WIDTH + 1))],
    ),
    "int8": (
        lambda x: int8_symmetric(ag(x)),
        torch.bfloat16,
        [(torch.int32, ROWS * 4), (torch.int8, ROW)],
    ),
    "scales from exponents": (
        lambda x: power_of_two_exponents(ag(x)),
        torch.bfloat16,
        [(torch.uint8, ROWS), (torch.uint8, ROW)],
    ),
    "scales with NaN by an indexed write": (
        lambda x: of(ag(x), lambda y: saturated(y, marked(y), E4M3)),
        torch.float32,
        [(torch.uint8, ROW)],
    ),
    "two codes in a byte": (
        lambda x: in_pairs(int4_codes(ag(x))),
        torch.bfloat16,
        [(torch.int8, ROW // 2)],
    ),
    "every fifth code, across the ranks": (
        lambda x: int4_codes(ag(x))[::5],
        torch.bfloat16,
        [(torch.int8, ROW)],
    ),
    "pairs without the last one": (
        lambda x: int4_codes(ag(x))[:-2:2],
        torch.bfloat16,
        [(torch.int8, ROW)],
    ),
    "static scale": (lambda x: static(ag(x)), torch.bfloat16, [(torch.uint8, ROW)]),
    "cast that does not saturate": (
        lambda x: (ag(x) * 0.5).to(E4M3),
        torch.float32,
        [(torch.uint8, ROW)],
    ),
    "a maximum that needs another one": (
        lambda x: of(ag(x), lambda y: tensorwise(y.float() / (y.abs().max().float() + 1))),
        torch.bfloat16,
        [(torch.uint8, 2), (torch.int32, 4), (torch.uint8, ROW)],
    ),
    "int16, which gloo does not carry": (
        lambda x: (ag(x.nan_to_num(0, 1, -1)) * 100).to(torch.int16),
        torch.float32,
        [(torch.uint8, 2 * ROW)],
    ),
    "maximum alone": (lambda x: ag(x).abs().max(), torch.float32, [(torch.int32, 4)]),
    "all_to_all": (
        lambda x: rowwise(a2a(x[:4])),
        torch.bfloat16,
        [(torch.uint8, 4 * 2), (torch.uint8, 4 * WIDTH)],
    ),
}


QUICK = ("tensorwise", "rowwise", "int8", "every fifth code, across the ranks")


@pytest.mark.parametrize("name", sampled(FITS, QUICK, "slow"))
def test_codes_are_gathered_with_the_same_bits(name):
    function, dtype, sent = FITS[name]
    inputs = hostile(dtype)
    plain, simple, steps = rank_programs(function, inputs)
    assert [step.rule for step in steps[0]] == [NAME]
    assert all(each == steps[0] for each in steps)
    got = [(kind, size) for _, kind, size in collectives(simple[0])]
    assert sorted(got, key=str) == sorted(sent, key=str)
    check_bits(plain, simple, inputs, finite(dtype))


OFTEN = ("tensorwise", "two codes in a byte")
DYNAMIC = [
    *((name, False) if name in OFTEN else rarely(name, False) for name in FITS),
    pytest.param("scales with NaN by an indexed write", True, marks=pytest.mark.slow),
    rarely("codes with a scale of columns", True),
    rarely("tensorwise of the transpose", True),
]


@pytest.mark.parametrize(("name", "all_dims"), DYNAMIC)
def test_codes_are_gathered_for_all_sizes(name, all_dims):
    """A size that is read from the gathered tensor is computed from the inputs."""
    function, dtype, sent = FITS[name]
    inputs = hostile(dtype)
    tracer = functools.partial(trace_sizes, all_dims=all_dims)
    plain, simple, steps = rank_programs(function, inputs, tracer)
    assert [step.rule for step in steps[0]] == [NAME]
    assert all(each == steps[0] for each in steps)
    assert sorted(str(kind) for _, kind, _ in collectives(simple[0])) == sorted(
        str(kind) for kind, _ in sent
    )
    assert not [
        node
        for node in simple[0].graph.find_nodes(op="call_function", target=SIZE)
        if node.args[0].op != "placeholder"
    ]
    check_bits(plain, simple, inputs, [[x.repeat(2, 1)] for (x,) in finite(dtype)])


def check_bits(plain, simple, *several):
    ranks_of = {"0": tuple(range(RANKS))}.__getitem__
    for values in several:
        expected = run_in_lockstep(plain, values, ranks_of)
        for a, b in zip(run_in_lockstep(simple, values, ranks_of), expected, strict=True):
            for one, other in zip(leaves(a), leaves(b), strict=True):
                assert (one.dtype, one.shape, one.stride()) == (
                    other.dtype,
                    other.shape,
                    other.stride(),
                )
                assert torch.equal(bits(one), bits(other))


def leaves(values):
    return torch.utils._pytree.tree_leaves(values)


def stochastic(x):
    _, scale = tensorwise(x)
    return (x + torch.rand_like(x)).to(E4M3), scale


def written(x):
    y = ag(x)
    codes, scale = rowwise(y)
    y.add_(1)
    return codes, scale, y


MUST_NOT = {
    "the value is an output": lambda x: of(ag(x), lambda y: (*rowwise(y), y)),
    "the value is multiplied": lambda x: of(ag(x), lambda y: (*rowwise(y), y @ y.t())),
    "the scale is a sum": lambda x: of(
        ag(x), lambda y: saturated(y, y.float().sum(-1, keepdim=True), E4M3)
    ),
    "rounding is random": lambda x: stochastic(ag(x)),
    "the value is written to": written,
    "both codes are no fewer bytes": lambda x: of(ag(x), lambda y: (*rowwise(y), *columnwise(y))),
    "codes are computed along the other rows": lambda x: (ag(x).float().cumsum(0)).to(E4M3),
    "the scale is an input": lambda x, s: saturated(ag(x), s, E4M3),
    "an inexact function": lambda x: ag(x).float().exp().to(E4M3),
    "a power that is no whole number": lambda x: (ag(x).float() - 0.5).exp2().to(E4M3),
    "the maximum of rows from other ranks": lambda x: tensorwise(a2a(x[:4])),
    "the sign of a zero may leave": lambda x: of(ag(x), lambda y: (rowwise(y), y.amax())),
    "a zero of either sign divides": lambda x: of(ag(x), lambda y: 1 / y.amax()),
    "a mask writes several numbers": lambda x: of(
        ag(x), lambda y: static(torch.index_put(y, [y.isnan()], y.abs().amax(0)))
    ),
    "blocks cross the ranks": lambda x: rowwise(ag(x[:4]).view(2, -1)),
    "wide codes": lambda x: ag(x).float() * 2,
}


@pytest.mark.parametrize("name", MUST_NOT)
def test_similar_graphs_stay(name):
    function = MUST_NOT[name]
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    inputs = (x, torch.ones(())) if "input" in name else (x,)
    with as_rank(0, RANKS):
        gm = trace(function, *inputs)
        before = code(gm)
        policy = Policy()
        assert simplify(gm, discover(gm), policy, SLOW) == ()
        assert code(gm) == before


def test_a_forced_codec_stays():
    policy = Policy(rules=[Rule(codec="int8", force=True)])
    with as_rank(0, RANKS):
        gm = trace(lambda x: rowwise(ag(x)), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
        plan = commpass.rewrite(gm, [], policy, profile=SLOW, strict=True)
    assert plan.simplified == ()
    assert [site.codec for site in plan.sites] == ["int8"]


@pytest.mark.parametrize("reassociate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantisers_in_16_bits_round_as_kernels_do(dtype, reassociate):
    def rounded(x):
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return (x / scale).round().clamp(-128, 127).to(torch.int8), scale

    with as_rank(0, RANKS):
        gm = trace(lambda x: of(ag(x), rounded), torch.randn(ROWS, WIDTH).to(dtype))
        policy = Policy(reassociate=reassociate)
        steps = [step.rule for step in simplify(gm, discover(gm), policy, SLOW)]
    in_16_bits = ["quantised in 16 bits before gather"] if reassociate else []
    assert steps == ([NAME] if dtype == torch.float32 else in_16_bits)


def saturated_at(top, x):
    return ag(x).clamp(-top, top).to(E4M3)


def test_numbers_that_16_bits_hold_clamp_exactly():
    with as_rank(0, RANKS):
        x = torch.randn(ROWS, WIDTH).bfloat16()
        for top, names in ((448.0, [NAME]), (0.3, [])):
            gm = trace(functools.partial(saturated_at, top), x)
            done = simplify(gm, discover(gm), Policy(reassociate=False), SLOW)
            assert [step.rule for step in done] == names


def test_off_changes_nothing():
    with as_rank(0, RANKS):
        gm = trace(lambda x: rowwise(ag(x)), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
        assert simplify(gm, (), Policy(off=True), SLOW) == ()


def test_numbers_of_quantisers_are_compared_between_ranks():
    _, _, steps = rank_programs(lambda x: static(ag(x)), hostile(torch.bfloat16))
    assert steps[0][0].moved == (
        "convert_element_type float32",
        "mul 0.125",
        "clamp_min -448.0",
        "clamp_max 448.0",
        "convert_element_type float8_e4m3fn",
    )


def test_scales_and_codes_are_sent_exactly_under_a_lossy_policy():
    with as_rank(0, RANKS):
        x = torch.ones(512, 4 * WIDTH, dtype=torch.bfloat16)
        gm = trace(lambda x: rowwise(ag(x)), x)
        plan = commpass.rewrite(gm, [], "aggressive", profile=SLOW, strict=True)
    assert [site.codec for site in plan.sites] == ["none"] * len(plan.sites)
    assert NAME in [step.rule for step in plan.simplified]


def test_maxima_of_several_weights_are_one_exchange():
    def layers(*weights):
        return [tensorwise(ag(weight).t()) for weight in weights]

    shards = [torch.ones(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    with as_rank(0, RANKS):
        gm = trace(layers, *shards)
        plan = commpass.rewrite(gm, [], "lossless", profile=SLOW, strict=True)
    assert [step.rule for step in plan.simplified] == [NAME] * 3
    assert (2, 2, 2) in [group.bytes for group in plan.grouped]
    assert min(size for _, _, size in collectives(gm)) == 6


def test_uneven_rows_of_experts_keep_their_splits():
    def dispatched(x, sent, received):
        rows, back = sent.tolist(), received.tolist()
        for each in (*rows, *back):
            torch._check(each >= 0)
        return rowwise(wait(ops.all_to_all_single(x, back, rows, "0")))

    counts = torch.ones(RANKS, dtype=torch.int64)
    with as_rank(0, RANKS):
        gm = trace(dispatched, torch.ones(ROWS, WIDTH), counts, counts, dynamic=True)
        policy = Policy()
        steps = simplify(gm, discover(gm), policy, SLOW)
    assert [step.rule for step in steps] == [NAME]
    assert [kind for _, kind, _ in collectives(gm)] == [torch.int32, torch.uint8]


def filled(x):
    return saturated(torch.where(x > 0, x, torch.full((1, x.shape[1]), 0.5)), 3.0, E4M3)


def scaled_by_rows(x):
    return saturated(x * x.shape[0], 3.0, E4M3)


CASES = [(rowwise, [NAME]), (filled, [NAME]), (scaled_by_rows, [])]


@pytest.mark.slow
@pytest.mark.parametrize(("quantiser", "names"), CASES)
def test_rows_may_be_known_when_the_graph_runs(quantiser, names):
    """But they are no number of the program, to scale by."""
    torch._dynamo.reset()
    backend = commpass.backend("lossless", inner="eager", profile=SLOW, strict=True)
    with as_rank(0, RANKS), torch.no_grad():
        layer = torch.compile(lambda x: of(ag(x), quantiser), backend=backend, dynamic=True)
        layer(torch.randn(ROWS, WIDTH))
        layer(torch.randn(ROWS + 2, WIDTH))
    plan = commpass.plans()[-1]
    assert [step.rule for step in plan.simplified] == names
    sent = ["int32", "uint8"] if quantiser is rowwise else ["uint8"] if names else ["float32"]
    assert [site.dtype for site in plan.sites] == sent
