"""Codecs against references written separately, and what holds for each of them: laws 2 and 4, error bounds, exact sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import commpass
from commpass.codecs import FLOATS, NAMES, Codec, accumulation_dtype, codec
from commpass.errors import PolicyError

GRID = {
    "int8": ("int8", False),
    "int4": ("int4", False),
    "fp8": ("e4m3", False),
    "fp8(form=e5m2)": ("e5m2", False),
    "rotated": ("int8", True),
    "rotated(bits=4)": ("int4", True),
    "rotated(form=e4m3)": ("e4m3", True),
    "rotated(form=e5m2)": ("e5m2", True),
}
"""Every setting of the named codecs that changes more than the block: (grid, whether rotated)."""
BITS = {"int8": 8, "int4": 4, "e4m3": 8, "e5m2": 8}
LARGEST = {"int8": 127, "int4": 7, "e4m3": 448, "e5m2": 57344}

examples = settings(max_examples=100, deadline=None)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy().reshape(-1)


def decoded(coder: Codec, x: torch.Tensor) -> np.ndarray:
    """decode(encode(x)) before it is rounded to the dtype of x."""
    wire = coder.encode(x)
    return wide(coder.decode_rows(wire.payload.reshape(1, -1), x.numel(), x.dtype))


def expected(coder: Codec, name: str, x: torch.Tensor) -> reference.Expected:
    grid, rotate = GRID[name]
    roundoff = reference.DOUBLE if x.dtype == torch.float64 else reference.SINGLE
    limit = torch.finfo(x.dtype).max
    return reference.round_trip(wide(x), grid, coder.block, rotate=rotate, roundoff=roundoff, limit=limit)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- strategies -------------------------------------------------------------------------------------------------------

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 3)),
    st.tuples(st.integers(0, 1100)),
    st.tuples(st.integers(0, 7), st.integers(0, 90)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
)
CONTENTS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "zeros": lambda rng, n: np.zeros(n),
    "negative zeros": lambda rng, n: np.full(n, -0.0),
    "constant": lambda rng, n: np.ones(n),
    "one sign": lambda rng, n: -rng.random(n),
    "outliers": lambda rng, n: rng.standard_normal(n) * np.where(rng.random(n) < 0.02, 1e4, 1),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.05),
    "many magnitudes": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-30, 0, n),
    "few levels": lambda rng, n: rng.integers(-8, 9, n) / 2.0,
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Float tensors of any shape, dtype and magnitude; all finite."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(FLOATS))
    content = CONTENTS[draw(st.sampled_from(sorted(CONTENTS)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = content(rng, math.prod(shape)) * 10.0 ** draw(
        st.sampled_from([0, 0, 0, -45, -40, -38, -37, -20, -5, 4, 20, 37, 38])
    )
    limit = torch.finfo(dtype).max
    return torch.from_numpy(np.clip(values, -limit, limit).reshape(shape)).to(dtype).clamp(-limit, limit)


@st.composite
def codecs(draw: st.DrawFn) -> tuple[str, Codec]:
    name = draw(st.sampled_from(sorted(GRID)))
    sizes = [8, 16, 64, 128, 256, 512] + ([] if GRID[name][1] else [24, 1000])
    return name, codec(name, block=draw(st.sampled_from(sizes)))


# --- values -----------------------------------------------------------------------------------------------------------


@examples
@given(codecs(), tensors())
def test_decoded_values_are_those_of_the_reference(named, x):
    name, coder = named
    want = expected(coder, name, x)
    off = np.abs(decoded(coder, x) - want.values)
    assert (off <= want.tolerance).all(), f"{(off - want.tolerance).max()} too far at {(off - want.tolerance).argmax()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GRID)
def test_values_far_from_ties_are_exact_and_ties_are_rare(name, dtype):
    """What makes the comparison above mean something: the reference allows more than rounding for few values only."""
    coder = codec(name, block=32)
    x = gaussian(50, 64, dtype=dtype)
    want = expected(coder, name, x)
    rounding = want.scale * LARGEST[GRID[name][0]] * 1e-3
    assert want.near_ties < 0.01
    assert (want.tolerance < rounding).mean() > 0.8
    assert (np.abs(decoded(coder, x) - want.values) < rounding).mean() > 0.99


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_round_half_to_even(name):
    largest = LARGEST[name]
    halves = torch.arange(-largest, largest) + 0.5  # with a peak of `largest` the scale is 1: every value is a tie
    x = torch.cat([halves, torch.tensor([float(largest)])])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 8))
    coder = codec(name, block=x.numel())
    want = [2 * round(value / 2) for value in halves.tolist()]
    want = [max(-largest, min(largest, value)) for value in want]  # 7.5 would be 8: above the grid
    assert coder.decode(coder.encode(x))[: len(halves)].tolist() == want
    assert want[:4] != sorted(set(want))[:4]  # some neighbours met


@pytest.mark.parametrize(("name", "grid"), [("fp8", "e4m3"), ("fp8(form=e5m2)", "e5m2")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_8_bit_floats_keep_every_value_of_their_grid_and_round_ties_to_even(name, grid, dtype):
    levels = reference.GRIDS[grid]
    ties = (levels[1:] + levels[:-1]) / 2  # exact in float32
    even = np.where(np.arange(len(ties)) % 2 == 0, levels[:-1], levels[1:])
    x = torch.tensor(np.concatenate([levels, -levels, ties, -ties]), dtype=dtype)
    coder = codec(name, block=math.ceil(x.numel() / 8) * 8)  # one block, whose peak is the largest level: scale 1
    assert decoded(coder, x).tolist() == np.concatenate([levels, -levels, even, -even]).tolist()


@pytest.mark.parametrize("width", [8, 64, 512])
@pytest.mark.parametrize("bits_", [8, 4])
def test_a_rotation_spreads_an_outlier_over_its_block_without_loss(width, bits_):
    """``H e_i`` is all plus and minus one: every code is a largest one, and the way back is exact."""
    for place in (0, 3, width - 1):
        x = torch.zeros(width)
        x[place] = 1000.0
        coder = codec("rotated", bits=bits_, block=width)
        assert torch.allclose(coder.decode(coder.encode(x)), x, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("bits_", [8, 4])
def test_a_rotation_helps_the_values_beside_an_outlier(bits_):
    x = gaussian(4096)
    x[::256] = 50.0
    plain, rotated = codec(f"int{bits_}", block=256), codec("rotated", bits=bits_, block=256)
    errors = [(coder.decode(coder.encode(x)) - x).square().mean().sqrt() for coder in (plain, rotated)]
    assert errors[1] < 0.7 * errors[0]


@examples
@given(codecs(), tensors())
def test_the_stated_error_bound_is_never_exceeded(named, x):
    """Half a grid step of the block, or half the smallest normal number where that is more; see BlockCodec."""
    name, coder = named
    grid, rotate = GRID[name]
    smallest_normal = torch.finfo(accumulation_dtype(x.dtype)).tiny
    values = reference.blocks_of(wide(x), coder.block)
    errors = np.abs(reference.blocks_of(decoded(coder, x), coder.block) - values)
    peak = np.abs(values).max(axis=1, keepdims=True, initial=0)
    scale = np.maximum(peak / LARGEST[grid], smallest_normal)
    rounding = 1 + 1e-4  # of the arithmetic: 127 codes of 2^-23 each
    if rotate:  # each code is off by half a step at most; H with its rows of norm sqrt(width) adds them up
        # the gap of e4m3 is 1/8 of a number in its largest binade, that of e5m2 1/4
        step = {"int8": 1, "int4": 1, "e4m3": 32, "e5m2": 8192}[grid]
        assert (np.sqrt((errors**2).sum(axis=1)) <= coder.block * scale[:, 0] * step / 2 * rounding).all()
    elif grid.startswith("int"):
        assert (errors <= scale / 2 * rounding).all()
    else:  # half a step of a float is 2^-(mantissa bits + 1) of its binade, which starts at or below the number
        mantissa, least = {"e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}[grid]
        assert (errors <= np.maximum(np.abs(values) * 2.0 ** -(mantissa + 1), scale * least / 2) * rounding).all()


@examples
@given(codecs(), tensors())
def test_decode_gives_the_shape_and_dtype_back_rounded_once_and_all_finite(named, x):
    _, coder = named
    wire = coder.encode(x)
    back = coder.decode(wire, x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert back.isfinite().all()
    rows = coder.decode_rows(wire.payload.reshape(1, -1), x.numel(), x.dtype)
    assert rows.dtype == accumulation_dtype(x.dtype)
    assert bits(rows.to(x.dtype)) == bits(back)


@examples
@given(codecs(), tensors(), st.data())
def test_what_is_not_finite_stays_so_at_its_place_and_leaves_other_blocks_alone(named, x, data):
    """Law 2."""
    _, coder = named
    flat = x.reshape(-1)
    if not flat.numel():
        return
    place = data.draw(st.integers(0, flat.numel() - 1))
    bad = data.draw(st.sampled_from([math.nan, -math.nan, math.inf, -math.inf]))
    broken = flat.clone()
    broken[place] = bad
    clean = coder.decode(coder.encode(flat))
    back = coder.decode(coder.encode(broken))
    assert not back[place].isfinite()
    others = torch.arange(flat.numel()) // coder.block != place // coder.block
    assert back[others].isfinite().all()
    assert bits(back[others]) == bits(clean[others])


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_and_the_smallest_numbers_decode_to_at_most_the_smallest_normal_one(name, dtype):
    coder = codec(name, block=8)
    work = np.finfo(np.float64 if dtype == torch.float64 else np.float32)
    for value in (0.0, -0.0, work.smallest_subnormal, -work.smallest_subnormal, work.tiny / 3):
        x = torch.full((19,), value, dtype=dtype)
        back = coder.decode(coder.encode(x)).double().abs()
        assert (back == 0).all() if value == 0 else (back <= work.tiny).all(), value


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_numbers_stay_finite_and_large(name, dtype):
    limit = torch.finfo(dtype).max
    signs = torch.where(gaussian(300) > 0, 1.0, -1.0).to(dtype)
    for x in (torch.full((300,), limit, dtype=dtype), torch.full((300,), -limit, dtype=dtype), signs * limit):
        coder = codec(name)
        back = coder.decode(coder.encode(x))
        assert back.isfinite().all()
        off = back.double() / limit - x.double() / limit
        assert off.square().mean().sqrt() < (0.3 if "4)" in name else 0.1)
        assert (back.sign() == x.sign()).all()


# --- the wire ---------------------------------------------------------------------------------------------------------


@examples
@given(codecs(), tensors())
def test_the_payload_is_bytes_of_exactly_the_stated_number_and_the_same_each_time(named, x):
    _, coder = named
    before = bits(x)
    wire = coder.encode(x)
    assert wire.payload.dtype == torch.uint8
    assert wire.payload.ndim == 1
    assert wire.payload.numel() == coder.wire_bytes(x.numel(), x.dtype)
    assert (wire.codec, wire.shape, wire.dtype) == (coder.spec, tuple(x.shape), x.dtype)
    assert bits(coder.encode(x.clone()).payload) == bits(wire.payload)
    assert bits(coder.decode(wire)) == bits(coder.decode(dataclasses.replace(wire, payload=wire.payload.clone())))
    assert bits(x) == before, "encode changed its input"


@examples
@given(codecs(), st.integers(0, 10**9), st.sampled_from(FLOATS))
def test_the_wire_holds_codes_and_one_scale_a_block_and_little_more(named, numel, dtype):
    name, coder = named
    blocks = -(-numel // coder.block)
    codes, scales = blocks * coder.block * BITS[GRID[name][0]] // 8, blocks * accumulation_dtype(dtype).itemsize
    padding = coder.wire_bytes(numel, dtype) - codes - scales
    assert 0 <= padding < 2 * 128


@pytest.mark.parametrize("name", GRID)
def test_nothing_takes_no_bytes(name):
    wire = codec(name).encode(torch.empty(3, 0))
    assert wire.payload.numel() == 0
    assert codec(name).decode(wire).shape == (3, 0)


@pytest.mark.parametrize("name", GRID)
def test_each_row_is_encoded_and_decoded_on_its_own(name):
    coder = codec(name, block=64)
    rows = gaussian(5, 333)
    rows[2, 7] = math.nan  # of one row, which must not reach another
    wires = coder.encode_rows(rows)
    values = coder.decode_rows(wires, 333, torch.float32)
    assert values[[0, 1, 3, 4]].isfinite().all()
    for row in (0, 1, 3, 4):
        assert bits(coder.encode_rows(rows[row : row + 1])) == bits(wires[row])
        assert bits(coder.decode_rows(wires[row : row + 1], 333, torch.float32)) == bits(values[row])


@pytest.mark.parametrize("name", GRID)
def test_strides_do_not_matter(name):
    x = gaussian(40, 30)
    assert bits(codec(name).encode(x.t()).payload) == bits(codec(name).encode(x.t().contiguous()).payload)
    assert bits(codec(name).encode(x[:, ::2]).payload) == bits(codec(name).encode(x[:, ::2].clone()).payload)


@pytest.mark.parametrize("name", GRID)
def test_other_data_makes_another_wire(name):
    assert bits(codec(name).encode(gaussian(300)).payload) != bits(codec(name).encode(gaussian(300, seed=1)).payload)


def test_eager_and_compiled_calls_agree_bit_for_bit():
    coders = [codec(name, block=64) for name in NAMES]  # one graph for all: starting the compiler is what takes time
    x = gaussian(4, 150)
    x[1] = 0.0
    x[2, ::3] *= 1e30
    x[3, 140] = math.inf

    def all_of_them(rows):
        wires = [coder.encode_rows(rows) for coder in coders]
        return [(wire, coder.decode_rows(wire, 150, torch.float32)) for coder, wire in zip(coders, wires, strict=True)]

    compiled = torch.compile(all_of_them, dynamic=False, fullgraph=True)(x)
    for coder, eager, made in zip(coders, all_of_them(x), compiled, strict=True):
        (wire, values), (compiled_wire, compiled_values) = eager, made
        assert bits(wire[:3]) == bits(compiled_wire[:3]), coder.spec
        assert bits(values[:3]) == bits(compiled_values[:3]), coder.spec
        assert bits(values[3, :128]) == bits(compiled_values[3, :128]), coder.spec
        for found in (values[3], compiled_values[3]):  # codes of what is not finite may differ; what comes out may not
            assert found.isfinite().tolist() == [True] * 128 + [False] * 22, coder.spec


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GRID)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(name, dtype):
    coder = codec(name, block=64)
    for count, numel in ((1, 1), (3, 64), (2, 300), (1, 0)):
        rows = gaussian(count, numel, dtype=dtype)
        wire = coder.encode_rows(rows)
        back = coder.decode_rows(wire, numel, dtype)
        with FakeTensorMode() as mode:
            fake_wire = coder.encode_rows(mode.from_tensor(rows))
            fake_back = coder.decode_rows(fake_wire, numel, dtype)
        assert wire.shape == (count, coder.wire_bytes(numel, dtype))
        assert (fake_wire.shape, fake_wire.dtype) == (wire.shape, wire.dtype)
        assert (fake_back.shape, fake_back.dtype) == (back.shape, back.dtype)


# --- what is said about a codec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("name", GRID)
def test_the_relative_error_is_that_of_theory_on_a_gaussian(name, block):
    theory = reference.gaussian_error(GRID[name][0], block)
    assert codec(name, block=block).relative_error() == pytest.approx(theory, rel=0.04)


def test_the_relative_error_is_measured_for_real_under_fake_tensors():
    real = codec("int8", block=40).relative_error()
    with FakeTensorMode():
        assert codec("int8", block=48).relative_error() == pytest.approx(real, rel=0.1)


def test_lossy_codecs_say_so():
    assert {coder.lossless for coder in map(codec, GRID)} == {False}


@examples
@given(codecs())
def test_the_spec_of_a_codec_makes_an_equal_one(named):
    _, coder = named
    again = codec(coder.spec)
    assert again == coder
    assert again.spec == coder.spec
    assert hash(again) == hash(coder)


@pytest.mark.parametrize("text", ["int8(block=256)", "int4(block=128)", "fp8(form=e4m3)", "rotated(bits=8)", " int8 ()"])
def test_parameters_that_are_the_defaults_make_an_equal_codec(text):
    coder = codec(text)
    assert coder.spec == text.partition("(")[0].strip()
    assert codec(coder.spec) == coder


def test_codecs_stay_equal_when_many_others_were_made_in_between():
    coder = codec("int8", block=64)
    for block in range(8, 8 * 400, 8):
        codec("int4", block=block)
    assert codec("int8", block=64) == coder


def test_codecs_that_do_something_else_are_not_equal():
    different = [codec(name, block=block) for name in GRID for block in (64, 128)]
    assert all(one != other for one, other in itertools.combinations(different, 2))
    assert len(set(different)) == len(different)
    assert len({coder.spec for coder in different}) == len(different)


def test_parameters_may_be_text_or_keywords_and_keywords_win():
    assert codec("int8(block=64)").block == 64
    assert codec("int8", block=64) == codec("int8(block=64)") == codec(" int8( block = 64 ) ")
    assert codec("int8(block=64)", block=128).block == 128
    assert codec("fp8(form='e5m2', block=64)") == codec("fp8", block=64, form="e5m2")
    assert commpass.codec(codec("fp8")) is codec("fp8")


def test_every_named_codec_is_covered_here():
    assert {name.partition("(")[0] for name in GRID} == set(NAMES)


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "int9": ["unknown codec 'int9'", "did you mean 'int8'?", "rotated"],
    "": ["unknown codec ''", "int8"],
    "int8(blok=64)": ["int8", "no parameter 'blok'", "did you mean 'block'?"],
    "int8(form=e4m3)": ["int8", "no parameter 'form'", "block"],
    "int8(block=100)": ["int8", "block=100", "multiple of 8"],
    "int8(block=0)": ["block=0", "multiple of 8"],
    "int8(block=-8)": ["block=-8", "multiple of 8"],
    "int8(block=131072)": ["block=131072", "65536"],
    "int8(block=64.0)": ["block=64.0", "block=256"],
    "int8(block=True)": ["block=True", "block=256"],
    "int8(block=big)": ["block='big'", "block=256"],
    "int8(block=[64])": ["block=[64]", "block=256"],
    "fp8(form=e4m2)": ["fp8", "form='e4m2'", "'e5m2'"],
    "fp8(form=8)": ["form=8", "form='e4m3'"],
    "rotated(block=96)": ["rotated", "block=96", "power of two"],
    "rotated(bits=6)": ["rotated", "bits=6", "4 or 8"],
    "rotated(form=e4m3, bits=4)": ["rotated", "bits=4", "form='e4m3'", "leave bits out"],
}
MALFORMED = [
    "int8(", "int8(128)", "int8(block=)", "int8(block)", "int8(block=64", "int8(block=64))", "int8(block=64)x",
    "int8(block==64)", "int8(block=64 form=e4m3)", "int8(block=f(64))", "int8(block=1/0)", "int8(block=64)(block=128)",
    "int8(block=64).x()", "int8(block=64, block=128)", "int8(**block)", "int8(block=64\0)",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_unknown_names_parameters_and_values_are_refused_with_what_is_valid(text):
    codec("int8(block=64)")  # which 64.0 must not be taken for
    with pytest.raises(PolicyError) as error:
        codec(text)
    for part in REFUSED[text]:
        assert part in str(error.value)


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_text_is_refused_as_a_whole(text):
    with pytest.raises(PolicyError) as error:
        codec(text)
    assert "int8" in str(error.value)


@pytest.mark.parametrize("value", [[64], {"a": 1}, {64}, None, "64", 64.5], ids=str)
def test_keywords_of_the_wrong_type_are_refused(value):
    with pytest.raises(PolicyError, match="block=256"):
        codec("int8", block=value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_what_is_no_float_is_refused(dtype):
    with pytest.raises(PolicyError) as error:
        codec("int8").encode(torch.ones(8, dtype=dtype))
    for part in ("'int8'", str(dtype), "float32", "bfloat16", "float16", "float64"):
        assert part in str(error.value)


def test_a_wire_is_decoded_by_its_own_codec_only():
    wire = codec("int8").encode(torch.ones(8))
    for other in ("fp8", "int8(block=64)"):
        with pytest.raises(PolicyError, match="'int8'") as error:
            codec(other).decode(wire)
        assert repr(other) in str(error.value)


@pytest.mark.parametrize("like", [torch.ones(7), torch.ones(2, 4), torch.ones(8, 1), torch.ones(8).bfloat16()])
def test_a_wire_is_decoded_into_its_own_shape_and_dtype_only(like):
    wire = codec("int8").encode(torch.ones(8))
    with pytest.raises(PolicyError) as error:
        codec("int8").decode(wire, like)
    for part in ("[8]", "torch.float32", str(list(like.shape)), str(like.dtype)):
        assert part in str(error.value)


def test_a_wire_of_another_size_is_refused_and_both_sizes_are_named():
    coder = codec("int8")
    wire = coder.encode(torch.ones(300))
    for changes in ({"payload": wire.payload[:-1]}, {"payload": wire.payload.repeat(2)}, {"shape": (1000,)}, {"shape": (3,)}):
        other = dataclasses.replace(wire, **changes)
        with pytest.raises(PolicyError) as error:
            coder.decode(other)
        for part in (other.payload.numel(), coder.wire_bytes(math.prod(other.shape), torch.float32), "'int8'"):
            assert str(part) in str(error.value)
