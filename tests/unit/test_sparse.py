"""Index codes against a bit writer in plain Python, and the sparse codecs: laws 2 and 4, bounds,
exact sizes, residuals."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import crossed, examples, rarely, sampled, thinned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from values import bits, gaussian

from commpass.codecs import FLOATS, accumulation_dtype, codec, sparse
from commpass.codecs.raw import raw
from commpass.codecs.registry import NAMES as BUILDERS
from commpass.codecs.sparse import indices as index_codes
from commpass.codecs.sparse.indices import (
    Bitmap,
    Blocks16,
    EliasFano,
    IndexCode,
    index_code,
    pack_bits,
    unpack_bits,
)
from commpass.errors import PolicyError

NAMES = ["topk", "randomk", "dgc", "gaussiank", "redsync", "sidco"]
tried = settings(max_examples=examples(20, 60), deadline=None)


def made(name: str, **parameters) -> sparse.SparseCodec:
    text = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return BUILDERS[name](f"{name}({text})" if text else name, **parameters)


# --- index codes ----------------------------------------------------------------------------------


def as_bytes(ones: list[int]) -> bytes:
    """Pack bits into bytes, least significant bit first."""
    return np.packbits(np.array(ones, dtype=np.uint8), bitorder="little").tobytes() if ones else b""


def number(value: int, width: int) -> list[int]:
    return [value >> place & 1 for place in range(width)]


def written(code: IndexCode, slots: list[int], n: int) -> bytes:
    """Return the code of a row of slots, from its definition."""
    if code == Bitmap():
        return as_bytes([int(i in set(slots)) for i in range(n)])
    if code == Blocks16():
        ends = [
            sum(slot < min(n, (block + 1) << 16) for slot in slots) for block in range(-(-n >> 16))
        ]
        return b"".join((slot & 65535).to_bytes(2, "little") for slot in slots) + b"".join(
            end.to_bytes(4, "little") for end in ends
        )
    low = [bit for slot in slots for bit in number(slot & (1 << code.low) - 1, code.low)]
    high, before = [], 0
    for slot in slots:  # each high part in unary: as many zeros as it increased, then a one
        high += [0] * ((slot >> code.low) - before) + [1]
        before = slot >> code.low
    high += [0] * (len(slots) + (n >> code.low) - len(high))
    return as_bytes(low) + as_bytes(high)


@st.composite
def slots_of(draw: st.DrawFn) -> tuple[int, list[list[int]], IndexCode]:
    n = draw(
        st.one_of(
            st.integers(1, 70),
            st.integers(1, 3000),
            st.sampled_from([65535, 65536, 65537, 200_000]),
        )
    )
    k = draw(st.integers(1, min(n, draw(st.sampled_from([3, 200, 3000])))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.one_of(st.just(k), st.integers(0, k)))
        span = draw(st.sampled_from([n, max(used, n // 50)]))  # spread out, or all at one end
        start = draw(st.sampled_from([0, n - span]))
        rows.append(
            sorted((rng.choice(span, used, replace=False) + start).tolist()) + [n] * (k - used)
        )
    code = draw(
        st.one_of(
            st.sampled_from([Bitmap(), Blocks16()]),
            st.builds(EliasFano, st.integers(0, 18)),
            st.builds(lambda k: index_code(Fraction(k, n)), st.just(k)),
        )
    )
    return n, rows, code


@pytest.mark.parametrize("examples", [10, rarely(100)])
def test_index_codes_write_what_their_definition_says_and_read_it_back(examples):
    settings(max_examples=examples, deadline=None)(given(slots_of())(check_index_code))()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65536, 65537])
@pytest.mark.parametrize("code", [Bitmap(), Blocks16(), EliasFano(0), EliasFano(4)], ids=str)
def test_slots_not_used_lie_one_past_the_last_entry(code, n):
    k = min(n, 5)
    check_index_code((n, [[n] * k, [*range(n - k, n)], [n - 1] + [n] * (k - 1)], code))


def check_index_code(drawn):
    n, rows, code = drawn
    k = len(rows[0])
    raw = index_codes.encode(code, torch.tensor(rows), n)
    assert raw.shape == (len(rows), index_codes.nbytes(code, n, k))
    assert raw.dtype == torch.uint8
    for row, slots in zip(raw, rows, strict=True):
        assert bits(row) == written(code, slots, n)
    assert index_codes.decode(code, raw, n, k).tolist() == rows


@tried
@given(slots_of(), st.integers(0, 2**32 - 1))
def test_no_bytes_are_read_as_an_index_outside_of_the_row(drawn, seed):
    n, rows, code = drawn
    k = len(rows[0])
    raw = torch.from_numpy(
        np.random.default_rng(seed).integers(
            0, 256, (2, index_codes.nbytes(code, n, k)), dtype=np.uint8
        )
    )
    read = index_codes.decode(code, raw, n, k)
    assert read.shape == (2, k)
    assert int(read.min()) >= 0
    assert int(read.max()) <= n


@pytest.mark.parametrize(
    "density", [1.0, 0.9, 0.5, 0.3, 0.25, 0.2, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6]
)
def test_least_code_is_chosen_for_every_density(density):
    n = 10**7
    k = math.ceil(density * n)
    code = index_code(Fraction(density).limit_denominator(10**6))
    others = [
        Bitmap(),
        Blocks16(),
        *(EliasFano(low) for low in range(25)),
    ]
    assert (
        index_codes.nbytes(code, n, k)
        <= min(index_codes.nbytes(other, n, k) for other in others) + 1
    )
    assert isinstance(code, Bitmap if density >= 0.25 else EliasFano)
    entropy = k * math.log2(n / k) + (n - k) * math.log2(n / (n - k)) if k < n else 0
    assert (
        8 * index_codes.nbytes(code, n, k) <= entropy + (0.6 if density <= 0.1 else 0.8) * k + 16
        or code == Bitmap()
    )


def test_one_percent_takes_8_56_bits_an_index():
    """``k*l + k + n/2^l`` with l = 6; the entropy is 8.08."""
    assert 8 * index_codes.nbytes(
        index_code(Fraction(1, 100)), 10**6, 10**4
    ) / 10**4 == pytest.approx(8.5625, abs=1e-3)


@tried
@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_bits_are_packed_without_gaps(width, count, seed):
    values = np.random.default_rng(seed).integers(0, 2**width, (2, count))
    raw = pack_bits(torch.from_numpy(values), width)
    for row, numbers in zip(raw, values.tolist(), strict=True):
        assert bits(row) == as_bytes([bit for value in numbers for bit in number(value, width)])
    assert unpack_bits(raw, count, width).tolist() == values.tolist()


@pytest.mark.parametrize("kind", ["bitmaps", "delta", ""])
def test_unknown_index_codes_are_refused(kind):
    with pytest.raises(PolicyError, match=r"indices=.*Known: .*elias-fano"):
        made("topk", indices=kind)


# --- the codecs -----------------------------------------------------------------------------------

VALUES = ["raw", "int8", "rotated"]


@st.composite
def coders(draw: st.DrawFn) -> sparse.SparseCodec:
    density, indices = (
        draw(st.sampled_from([0.001, 0.01, 0.1, 0.3, 1.0])),
        draw(st.sampled_from(["least", "bitmap", "blocks16"])),
    )
    return made(
        draw(st.sampled_from(NAMES)),
        density=density,
        values=draw(st.sampled_from(VALUES)),
        indices=indices,
    )


CONTENTS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "zeros": lambda rng, n: np.zeros(n),
    "negative zeros": lambda rng, n: np.full(n, -0.0),
    "ties": lambda rng, n: rng.integers(-2, 3, n) / 2.0,
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02),
    "many magnitudes": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-30, 0, n),
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 3)),
            st.tuples(st.integers(0, 1500)),
            st.tuples(st.integers(0, 7), st.integers(0, 90)),
        )
    )
    dtype = draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = CONTENTS[draw(st.sampled_from(sorted(CONTENTS)))](rng, math.prod(shape))
    values = values * 10.0 ** draw(st.sampled_from([0, 0, 0, -45, -38, -20, 20, 38]))
    limit = torch.finfo(dtype).max
    return (
        torch.from_numpy(np.clip(values, -limit, limit).reshape(shape))
        .to(dtype)
        .clamp(-limit, limit)
    )


@settings(max_examples=examples(50, 150), deadline=None)
@given(coders(), tensors())
def test_chosen_entries_arrive_and_all_others_are_zero(coder, x):
    wire = coder.encode(x)
    n = x.numel()
    assert wire.payload.numel() == coder.wire_bytes(n, x.dtype)
    back = coder.decode(wire, x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert back.isfinite().all()
    if not n:
        return
    indices, values = coder.decode_sparse(wire.payload[None], n, x.dtype)
    assert indices.shape == values.shape == (1, coder.slots(n))
    assert values.dtype == accumulation_dtype(x.dtype)
    used = indices[0][indices[0] < n].tolist()
    picked = torch.zeros(n, dtype=torch.bool)
    picked[used] = True
    assert (back.reshape(-1)[~picked] == 0).all()
    assert (values[indices == n] == 0).all()
    # the values are those of the inner codec, of the selected entries followed by zeros
    inner = torch.zeros(1, coder.slots(n), dtype=x.dtype)
    inner[0, : len(used)] = x.reshape(-1)[used]
    want = coder.inner.decode_rows(coder.inner.encode_rows(inner), coder.slots(n), x.dtype).to(
        values.dtype
    )
    assert bits(values[0, : len(used)]) == bits(want[0, : len(used)])
    if coder.inner.lossless:
        assert bits(back.reshape(-1)[used]) == bits(x.reshape(-1)[used])


@tried
@given(coders(), tensors())
def test_error_is_within_the_stated_bound(coder, x):
    values = x.double().reshape(-1).numpy()
    back = (
        coder.decode_rows(coder.encode(x).payload[None], x.numel(), x.dtype)
        .double()
        .reshape(-1)
        .numpy()
    )
    largest = np.abs(values).max(initial=1e-300)
    error, norm = np.linalg.norm((back - values) / largest), np.linalg.norm(values / largest)
    floor = coder.floor(x.dtype) * math.sqrt(len(values)) / largest
    assert error <= coder.bound * norm * (1 + 1e-5) + floor


def test_bounds_are_those_of_theory():
    assert made("topk", density=0.01).bound == pytest.approx(math.sqrt(0.99))
    assert made("topk", density=1.0).bound == 0
    assert {made(name).bound for name in NAMES[1:]} == {1.0}
    inner = codec("int8", block=64)
    assert made("topk", values="int8").bound == pytest.approx(
        math.sqrt(0.99 + 0.01 * codec("int8").bound ** 2)
    )
    assert inner.bound < 1
    flat = torch.ones(10_000)  # the worst case for top-k
    coder = made("topk", density=0.01)
    assert float((coder.decode(coder.encode(flat)) - flat).norm() / flat.norm()) == pytest.approx(
        coder.bound
    )


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_so(name, bad, values):
    """Law 2, for one entry, for as many as there are slots, and for more."""
    coder = made(name, values=values)
    x = gaussian(1, 2000)
    for places in ([1234], list(range(0, 2000, 100)), list(range(0, 2000, 7))):
        broken = x.clone()
        broken[0, places] = bad
        back = coder.decode(coder.encode(broken))
        assert not back[0, places].isfinite().any(), places
        if (
            name != "randomk" and values == "raw" and len(places) <= 20
        ):  # nothing else changes, and Inf stays Inf
            others = [i for i in range(2000) if i not in places]
            assert back[0, others].isfinite().all()
            assert torch.equal(back[0, places], broken[0, places]) or math.isnan(bad)


def test_lost_row_leaves_the_others_alone():
    coder = made("topk")
    rows = gaussian(3, 1000)
    rows[1, :500] = math.nan
    back = coder.decode_rows(coder.encode_rows(rows), 1000, torch.float32)
    assert back[1].isnan().all()
    assert bits(back[[0, 2]]) == bits(
        coder.decode_rows(coder.encode_rows(rows[[0, 2]]), 1000, torch.float32)
    )
    assert int((back[0] != 0).sum()) == 10


@pytest.mark.parametrize(("name", "dtype"), thinned(NAMES, FLOATS, one_in=4), ids=str)
def test_wire_bytes_are_values_and_indices_and_padding_to_16(name, dtype):
    for n in (0, 1, 7, 100, 4097, 70_000):
        k = math.ceil(n / 100)
        low, high = math.ceil(k * 6 / 8), math.ceil((k + n // 64) / 8)
        want = -(-(k * dtype.itemsize + low + high) // 16) * 16
        assert made(name).wire_bytes(n, dtype) == want
        assert made(name).encode_rows(gaussian(3, n, dtype=dtype)).shape == (3, want)
    assert made(name).bits_per_value(10**6, torch.float32) == pytest.approx(
        0.01 * (32 + 8.5625), abs=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_encoded_and_decoded_on_its_own(name):
    coder = made(name, density=0.05)
    rows = gaussian(5, 700)
    wires = coder.encode_rows(rows)
    values = coder.decode_rows(wires, 700, torch.float32)
    for row in range(5):
        assert bits(coder.encode_rows(rows[row : row + 1])) == bits(wires[row])
        assert bits(coder.decode_rows(wires[row : row + 1], 700, torch.float32)) == bits(
            values[row]
        )


@tried
@given(
    st.integers(1, 6),
    st.integers(1, 400),
    st.sampled_from(FLOATS),
    st.sampled_from(NAMES),
    st.integers(0, 99),
)
def test_sums_by_index_are_sums_of_rows_in_order(count, n, dtype, name, seed):
    coder = made(name, density=0.1)
    wires = coder.encode_rows(gaussian(count, n, seed=seed, dtype=dtype))
    total = torch.zeros(n, dtype=accumulation_dtype(dtype))
    for row in coder.decode_rows(wires, n, dtype):
        total = total + row
    indices, values = coder.decode_sparse(wires, n, dtype)
    assert torch.equal(sparse.sum_by_index(indices, values, n), total)
    assert torch.equal(sparse.dense(indices, values, n), coder.decode_rows(wires, n, dtype))


def test_sum_by_index_with_a_lost_row_is_nan():
    coder = made("topk", density=0.1)
    rows = gaussian(2, 50)
    rows[1, :30] = math.inf
    indices, values = coder.decode_sparse(coder.encode_rows(rows), 50, torch.float32)
    assert sparse.sum_by_index(indices, values, 50).isnan().all()


# --- error feedback -------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["raw", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_sent_and_remaining_values_add_up(name, values):
    coder = made(name, density=0.05, values=values)
    assert coder.state == "error feedback"
    x = gaussian(40, 50, dtype=torch.bfloat16)
    wire, left = sparse.residual(x, coder)
    assert left.dtype == torch.float32
    sent = coder.decode_rows(wire.payload[None], x.numel(), x.dtype).reshape(x.shape)
    assert torch.allclose(sent + left, x.float(), rtol=1e-6, atol=0)
    if values == "raw":
        assert torch.equal(left[sent != 0], torch.zeros(int((sent != 0).sum())))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", NAMES)
def test_feedback_sends_everything_in_time(name):
    """100 steps of one gradient: what has arrived is 100 times the gradient, up to what is still
    held back."""
    coder = made(name, density=0.05)
    x, left, arrived = gaussian(2000).abs() + 0.1, torch.zeros(2000), torch.zeros(2000)
    for _ in range(100):
        wire, left = sparse.residual(x + left, coder)
        arrived += coder.decode(wire)
    assert torch.allclose(arrived + left, 100 * x, rtol=1e-4)
    assert float((arrived / 100 - x).norm() / x.norm()) < 0.35
    assert (arrived > 0).float().mean() > 0.9


def test_residual_keeps_nothing_that_is_not_finite():
    x = gaussian(500)
    x[3] = math.nan
    _, left = sparse.residual(x, made("topk"))
    assert left.isfinite().all()


# --- uncoded values -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_raw_keeps_all_16_bit_patterns(dtype):
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    coder = raw("raw")
    assert coder.lossless
    wire = coder.encode(x)
    assert wire.payload.numel() == 131_072 == coder.wire_bytes(65_536, dtype)
    assert bits(wire.payload) == bits(x)
    assert bits(coder.decode(wire)) == bits(x)
    assert (
        coder.decode_rows(wire.payload[None], 65_536, dtype).dtype == dtype
    )  # a wider one would not keep NaNs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_raw_keeps_wide_patterns(dtype):
    noise = np.random.default_rng(0).integers(0, 256, 80_000, dtype=np.uint8)
    x = torch.from_numpy(noise).view(dtype)
    coder = raw("raw")
    assert bits(coder.encode(x).payload) == bits(coder.decode(coder.encode(x))) == noise.tobytes()


def test_raw_refuses_another_wire_as_others_do():
    coder = raw("raw")
    wire = coder.encode(torch.ones(8))
    with pytest.raises(PolicyError, match="31 bytes"):
        coder.decode(dataclasses.replace(wire, payload=wire.payload[:-1]))


# --- compiled, fake and symbolic; errors ----------------------------------------------------------


BOTH = [("topk", "int8", 0.3), ("randomk", "raw", 0.01)]


@pytest.mark.parametrize("how", [rarely(BOTH[:1]), rarely(BOTH)], ids=["one", "both"])
def test_eager_and_compiled_calls_agree_bit_for_bit(how):
    # all selectors are compiled in test_select; here are two index codes and two kinds of values
    coders = [made(name, values=values, density=density) for name, values, density in how]
    x = gaussian(4, 3000)
    x[1], x[2, ::3], x[3, 40] = 0.0, x[2, ::3] * 1e30, math.nan

    def all_of_them(rows):
        wires = [coder.encode_rows(rows) for coder in coders]
        return [
            (wire, coder.decode_rows(wire, 3000, torch.float32))
            for coder, wire in zip(coders, wires, strict=True)
        ]

    compiled = torch.compile(all_of_them, dynamic=False, fullgraph=True)(x)
    for coder, eager, other in zip(coders, all_of_them(x), compiled, strict=True):
        rows = (
            slice(0, 3) if coder.inner.spec == "int8" else slice(None)
        )  # codes of non-finite values may differ
        assert bits(eager[0][rows]) == bits(other[0][rows]), coder.spec
        assert bits(eager[1][rows]) == bits(other[1][rows]), coder.spec


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rows"), [("topk", 1), rarely("randomk", 5), rarely("dgc", 1), ("sidco", 5)]
)
def test_one_graph_with_symbolic_sizes_is_right_for_all_sizes(name, rows):
    coder = made(name)

    def run(x):
        wire = coder.encode_rows(x)
        return wire, coder.decode_rows(wire, x.shape[1], x.dtype)

    graph = make_fx(run, tracing_mode="symbolic")(gaussian(rows, 61_003))
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"], (
        "a constant was captured"
    )
    for n in (61_003, 131_072, 7001):
        x = gaussian(rows, n, seed=n)
        for eager, traced in zip(run(x), graph(x), strict=True):
            assert bits(eager) == bits(traced)


EACH = [*NAMES, "raw"], FLOATS


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "dtype"), sampled(crossed(*EACH), list(crossed(*EACH, one_in=4))), ids=str
)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(name, dtype):
    coder = raw("raw") if name == "raw" else made(name)
    for count, numel in ((1, 1), (3, 64), (2, 1000), (1, 0)):
        rows = gaussian(count, numel, dtype=dtype)
        wire = coder.encode_rows(rows)
        back = coder.decode_rows(wire, numel, dtype)
        with FakeTensorMode() as mode:
            fake_wire = coder.encode_rows(mode.from_tensor(rows))
            fake_back = coder.decode_rows(fake_wire, numel, dtype)
        assert wire.shape == (count, coder.wire_bytes(numel, dtype))
        assert (fake_wire.shape, fake_wire.dtype) == (wire.shape, wire.dtype)
        assert (fake_back.shape, fake_back.dtype) == (back.shape, back.dtype)


@pytest.mark.parametrize(
    "parameters",
    [{"density": 0.0}, {"density": 2.0}, {"values": "int9"}, {"values": "int8(block=7)"}],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_parameters_are_refused(name, parameters):
    with pytest.raises(PolicyError):
        made(name, **parameters)


def test_seed_outside_of_32_bits_is_refused():
    with pytest.raises(PolicyError, match="seed=-1"):
        made("randomk", seed=-1)
