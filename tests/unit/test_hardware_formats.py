"""MX and NVFP4: the wires are those of the published formats, and of torchao, and are operands of
scaled matmuls.

``test_codec_family.py`` compares MX codecs with the reference of all block codecs. Here are tests
of bytes, of NVFP4, whose rows share a scale, and of the layouts of hardware.
"""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codecs import bits, gaussian, one_thread, wide
from tiers import VERSION, examples
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import codec
from commpass.codecs.block import operands, packing, storage
from commpass.codecs.rows import aligned
from commpass.errors import PolicyError

__all__ = ["one_thread"]  # a fixture that works by its presence

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MX = ["mxfp8", "mxfp8(form=e5m2)", "mxfp6", "mxfp6(form=e3m2)", "mxfp4"]
EMAX = {"e4m3": 8, "e5m2": 15, "e2m3": 2, "e3m2": 4, "e2m1": 2}
"""OCP MX v1.0, section 5.3: the exponent of the largest normal number."""
DATA = {
    "gaussian": lambda random, n: random.standard_normal(n),
    "heavy tails": lambda random, n: random.standard_t(2, n),
    "outlier channels": lambda random, n: (
        random.standard_normal(n) * np.where(np.arange(n) % 64 == 11, 50.0, 1.0)
    ),
    "many magnitudes": lambda random, n: (
        random.standard_normal(n) * 10.0 ** random.uniform(-6, 6, n)
    ),
    "subnormal blocks": lambda random, n: (
        random.standard_normal(n) * np.where(np.arange(n) // 32 % 3 == 1, 1e-41, 1.0)
    ),
    "zero blocks": lambda random, n: random.standard_normal(n) * (np.arange(n) // 32 % 3 != 1),
}


def made(content: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    values = DATA[content](np.random.default_rng(seed), math.prod(shape))
    return torch.from_numpy(values.reshape(shape)).to(dtype)


def regions(coder, x: torch.Tensor) -> list[np.ndarray]:
    """Return the bytes of the regions of a wire: codes, scales of blocks, scale of the row."""
    payload, start, found = coder.encode(x).payload.numpy(), 0, []
    for length in coder.regions(x.numel(), x.dtype):
        found.append(payload[start : start + length])
        start += aligned(length)
    assert start == len(payload)
    return found


def nibbles(raw: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of bytes, the low one of each byte first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1).astype(np.int64)


def value_of(codes: np.ndarray) -> np.ndarray:
    return np.array(E2M1)[codes & 7] * np.where(codes & 8, -1.0, 1.0)


# --- MX -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", MX)
@pytest.mark.parametrize("content", DATA)
def test_scale_is_the_power_of_two_of_the_standard(text, content):
    """``2^(floor(log2 max|x|) - emax)``, from the smallest normal float32 on, as biased byte."""
    coder, x = codec(text), made(content, 4096)
    raw = regions(coder, x)[1]
    peak = np.abs(wide(x).reshape(-1, 32)).max(axis=1)
    with np.errstate(divide="ignore"):
        power = np.floor(np.log2(peak)) - EMAX[coder.grid.form]
    assert raw.tolist() == (np.maximum(power, -126) + 127).astype(int).tolist()


@pytest.mark.parametrize("text", MX)
def test_bytes_are_codes_then_one_scale_per_32_values(text):
    coder, numel = codec(text), 32 * 100
    width = {"mxfp8": 8, "mxfp6": 6, "mxfp4": 4}[text.partition("(")[0]]
    assert coder.regions(numel, torch.bfloat16) == [numel * width // 8, 100]
    assert coder.wire_bytes(numel, torch.bfloat16) == aligned(numel * width // 8) + aligned(100)


@pytest.mark.parametrize(("text", "block"), [("mxfp4", 32), ("nvfp4", 16)])
def test_byte_of_4_bit_codes_holds_two_neighbours(text, block):
    """``float4_e2m1fn_x2``: the first of two values is in the low bits."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)] * 4)  # peak 6: all scales are powers of two
    raw = regions(codec(text), values)[0]
    assert nibbles(raw).tolist() == [*range(8), *range(8, 16)] * 4
    if text == "mxfp4":
        assert value_of(nibbles(raw)).tolist() == values.tolist()


@pytest.mark.parametrize("text", ["mxfp8", "mxfp6", "mxfp4"])
def test_values_above_the_largest_number_are_clamped_unless_the_scale_is_rounded_up(text):
    floor, ceil = codec(text), codec(text, scale="ceil")
    x = torch.full((32,), 1.0)
    x[3], x[4] = 1.999, -1.999  # 2^0 is the largest power of two below
    largest = floor.grid.largest / 2.0 ** EMAX[floor.grid.form]
    back = floor.decode(floor.encode(x))
    assert (back[3], back[4], back[0]) == (largest, -largest, 1.0)
    gap = 2 * 2 * ceil.grid.half / 2.0 ** EMAX[ceil.grid.form]
    assert abs(ceil.decode(ceil.encode(x))[3] - x[3]) <= gap / 2


@pytest.mark.parametrize("text", [*MX, "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_signs_of_zeros_and_sizes_that_divide_nothing(text, dtype):
    coder = codec(text)
    for numel in (1, 2, 15, 17, 31, 33, 100):
        x = gaussian(numel, dtype=dtype)
        x[0] = -0.0
        back = coder.decode(coder.encode(x))
        assert back.shape == x.shape
        assert back[0] == 0
        assert math.copysign(1, back[0].item()) == -1
        assert (back - x).abs().max() <= 0.3 * x.abs().max()


@pytest.mark.parametrize("text", [*MX, "nvfp4"])
def test_no_values_make_a_wire_of_no_bytes(text):
    coder = codec(text)
    wire = coder.encode(torch.zeros(0))
    assert wire.payload.numel() == coder.wire_bytes(0, torch.float32) == 0
    assert coder.decode(wire).shape == (0,)


# --- NVFP4 ----------------------------------------------------------------------------------------

E4M3 = reference.small_floats(4, 3, "nan")


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the index of the nearest of ascending levels, ties to the even index."""
    edges = (levels[1:] + levels[:-1]) / 2
    below = np.searchsorted(edges, x, side="left")
    return np.where(below % 2 == 0, below, np.searchsorted(edges, x, side="right"))


def close_to_an_edge(levels: np.ndarray, x: np.ndarray, by: float = 1e-5) -> np.ndarray:
    edges = (levels[1:] + levels[:-1]) / 2
    return (np.abs(x[..., None] - edges) <= by * np.abs(edges)).any(axis=-1)


@pytest.mark.slow
@settings(max_examples=examples(60, 200), deadline=None)
@given(st.sampled_from(sorted(DATA)), st.integers(1, 700), st.integers(0, 10**6))
def test_nvfp4_is_the_formula_in_float64(content, numel, seed):
    """The row's scale is ``max|x| / (6 * 448)``.

    A block's is ``max|x| / 6`` over that, as e4m3 from 2^-6 to 448. A code is the nearest of e2m1,
    and all three numbers are multiplied again.
    """
    coder, x = codec("nvfp4"), made(content, numel, seed=seed)
    codes, raw, row = regions(coder, x)
    (row,) = row.view("<f4").astype(np.float64)
    blocks = np.pad(wide(x), (0, -numel % 16)).reshape(-1, 16)
    assert row == pytest.approx(max(np.abs(blocks).max() / (6 * 448), 2.0**-119), rel=1e-6)
    assert (raw < 0x7F).all()
    want = np.clip(np.abs(blocks).max(axis=1) / 6 / row, 2.0**-6, 448)
    clear = ~close_to_an_edge(E4M3, want)
    assert (raw == nearest(E4M3, want))[clear].all()
    units = np.clip(blocks / (E4M3[raw] * row)[:, None], -6, 6)
    found = nibbles(codes.reshape(-1, 8))
    clear = ~close_to_an_edge(np.array(E2M1), np.abs(units))
    assert (found & 7 == nearest(np.array(E2M1), np.abs(units)))[clear].all()
    assert ((found >> 3 == 1) == np.signbit(blocks)).all()
    back = coder.decode(coder.encode(x))
    values = (value_of(found) * (E4M3[raw] * row)[:, None]).reshape(-1)[:numel]
    assert wide(back) == pytest.approx(values, rel=1e-6, abs=1e-44)


def test_nvfp4_has_one_scale_for_each_row_of_a_message():
    x = gaussian(3, 64) * torch.tensor([[1.0], [1e-3], [1e3]])
    wires = codec("nvfp4").encode_rows(x)
    rows = wires[:, 256:260].contiguous().view(torch.float32).flatten()
    assert rows.tolist() == pytest.approx((x.abs().amax(dim=1) / 2688).tolist(), rel=1e-6)
    for row, wire in zip(x, wires, strict=True):
        assert bits(codec("nvfp4").encode(row).payload) == bits(wire)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_nvfp4_block_that_is_not_finite_leaves_others_and_their_scale_alone(bad):
    coder, x = codec("nvfp4"), gaussian(200)
    x[70:80] *= 0.5
    x[100] = 4.5  # the peak of the row
    clean = coder.decode(coder.encode(x))
    x[75] = bad
    back = coder.decode(coder.encode(x))
    assert back.isnan().tolist() == [64 <= place < 80 for place in range(200)]
    others = ~back.isnan()
    assert bits(back[others]) == bits(clean[others])


@pytest.mark.parametrize("largest", [3.3e38, 1e-30, 1e-36, 1e-38, 1e-44])
def test_nvfp4_of_huge_and_tiny_rows(largest):
    """Products of the two scales and their reciprocals stay normal numbers."""
    coder, x = codec("nvfp4"), gaussian(500)
    x = x / x.abs().max() * largest
    x[480:] = 0
    back = coder.decode(coder.encode(x))
    assert back.isfinite().all()
    assert (back[480:] == 0).all()
    assert ((back - x).abs() <= x.abs() + coder.floor(x.dtype)).all()
    if largest > 1e-33:
        assert (back.double() - x.double()).norm() / x.double().norm() < 0.12


@pytest.mark.parametrize("content", ["gaussian", "heavy tails", "outlier channels"])
def test_nvfp4_has_less_error_than_mxfp4_and_mxfp4_than_int4_beside_outliers(content):
    x = made(content, 64, 1024)
    error = {
        text: float((codec(text).decode(codec(text).encode(x)) - x).norm() / x.norm())
        for text in ("nvfp4", "mxfp4", "mxfp6", "mxfp8")
    }
    assert error["mxfp8"] < error["mxfp4"]
    assert error["mxfp6"] < error["nvfp4"] < error["mxfp4"]


def test_stored_e4m3_is_rounded_to_nearest_even_and_keeps_nan():
    levels = E4M3[E4M3 >= 2.0**-6]
    ties = (levels[1:] + levels[:-1]) / 2
    even = np.where(np.arange(len(ties)) % 2 == 0, levels[:-1], levels[1:])
    x = torch.tensor(np.concatenate([levels, ties]), dtype=torch.float32)
    found = storage.round_nearest(x, "e4m3")
    assert found.tolist() == np.concatenate([levels, even]).tolist()
    raw = storage.store(found, "e4m3")
    assert raw.view(torch.float8_e4m3fn).float().tolist() == found.tolist()
    assert bits(storage.load(raw, "e4m3", torch.float32)) == bits(found)
    every = torch.arange(127, dtype=torch.uint8)
    want = every.view(torch.float8_e4m3fn).float()
    assert storage.load(every, "e4m3", torch.float32).tolist() == want.tolist()
    for nan in (math.nan, -math.nan):
        made_ = storage.round_nearest(torch.tensor([nan]), "e4m3")
        assert storage.store(made_, "e4m3").tolist() == [0x7F]
        assert storage.load(storage.store(made_, "e4m3"), "e4m3", torch.float32).isnan().all()


# --- graphs ---------------------------------------------------------------------------------------


TRACED = [codec(text) for text in ("mxfp6", "mxfp4", "nvfp4")]


def round_trips(rows: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for each in TRACED:
        wire = each.encode_rows(rows)
        found += [wire, each.decode_rows(wire, rows.shape[1], rows.dtype)]
    return found


def hard_rows(dtype: torch.dtype, numel: int = 700) -> torch.Tensor:
    x = gaussian(3, numel)
    x[1, 40:200] = 0
    x[1, 300:] *= 1e-6
    x[2, ::37] *= 1e4
    x[2, 5] = -0.0
    return x.to(dtype)


@pytest.mark.every
def test_compiled_calls_give_the_bits_of_eager_ones():
    torch._dynamo.reset()
    x = hard_rows(torch.bfloat16)
    compiled = torch.compile(round_trips, fullgraph=True)
    for found, want in zip(compiled(x), round_trips(x), strict=True):
        assert bits(found) == bits(want)


@pytest.mark.slow
def test_graph_of_symbolic_sizes_gives_the_bits_of_real_ones():
    graph = make_fx(round_trips, tracing_mode="symbolic")(gaussian(3, 300))
    for numel in (300, 517, 64, 3000):
        x = hard_rows(torch.float32, numel)
        for found, want in zip(graph(x), round_trips(x), strict=True):
            assert bits(found) == bits(want)


# --- torchao --------------------------------------------------------------------------------------


def torchao(module: str):
    return pytest.importorskip(f"torchao.prototype.mx_formats.{module}", reason="no torchao")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [*MX, "mxfp8(scale=ceil)", "mxfp8(form=e5m2, scale=ceil)"])
@pytest.mark.parametrize("content", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_wire_is_that_of_torchao(text, content, dtype):
    """Except for a scale of 2^-127, which torchao writes where it divides by 2^-126: the codec
    writes what it divides by. Rounded up, torchao divides such a block by 2^-127."""
    tensor, constants = torchao("mx_tensor"), torchao("constants")
    form = {
        **{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
        **{"e2m3": constants.DTYPE_FP6_E2M3, "e3m2": constants.DTYPE_FP6_E3M2},
        "e2m1": torch.float4_e2m1fn_x2,
    }
    coder, x = codec(text), made(content, 16, 256, dtype=dtype)
    modes = tensor.ScaleCalculationMode
    mode = modes.RCEIL if "ceil" in text else modes.FLOOR
    wanted, data = tensor.to_mx(x, form[coder.grid.form], 32, mode)
    if "ceil" in text:
        subnormal = wanted.view(torch.uint8) == 0
        assert subnormal.any() == (content in ("subnormal blocks", "zero blocks"))
        x[subnormal.repeat_interleave(32, 1)] = 0
        wanted, data = tensor.to_mx(x, form[coder.grid.form], 32, mode)
    codes, raw = regions(coder, x)
    wanted = wanted.view(torch.uint8).numpy().reshape(-1)
    assert raw.tolist() == np.maximum(wanted, 1).tolist()
    if coder.grid.bits == 6:
        packed = torch.from_numpy(codes.reshape(-1, 24))
        codes = packing.unpack(packed, 6).numpy()
    assert codes.reshape(-1).tolist() == data.view(torch.uint8).numpy().reshape(-1).tolist()
    back = tensor.to_dtype(
        data.contiguous(),
        torch.from_numpy(raw.copy()).view(torch.float8_e8m0fnu).reshape(16, 8),
        form[coder.grid.form],
        32,
        torch.float32,
    )
    assert coder.decode_rows(coder.encode(x).payload[None], 4096, dtype).tolist() == [
        back.flatten().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).tolist()
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_wire_is_that_of_torchao(content, dtype):
    tensor = torchao("nvfp4_tensor")
    coder, x = codec("nvfp4"), made(content, 16, 256, dtype=dtype)
    row = tensor.per_tensor_amax_to_scale(x.abs().max())
    wanted, data = tensor.nvfp4_quantize(x, 16, row)
    codes, raw, found = regions(coder, x)
    assert found.view("<f4").tolist() == [row.item()]
    assert raw.tolist() == wanted.view(torch.uint8).flatten().tolist()
    assert codes.tolist() == data.view(torch.uint8).flatten().tolist()


# --- operands of scaled matmuls -------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 7), (300, 12), (31, 5)])
def test_swizzled_scales_lie_where_tensor_cores_read_them(rows, columns):
    """The published index, for each scale by itself; zeros elsewhere."""
    numbers = torch.arange(1, rows * columns + 1, dtype=torch.int32).reshape(rows, columns)
    found = operands.swizzle(numbers)
    along = math.ceil(columns / 4)
    assert found.numel() == math.ceil(rows / 128) * along * 512
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * along + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert found[place] == numbers[r, c]
    assert int((found != 0).sum()) == rows * columns
    assert torch.equal(operands.unswizzle(found, rows, columns), numbers)


@pytest.mark.filterwarnings("ignore")
def test_swizzled_scales_are_those_of_torchao():
    utils = torchao("utils")
    numbers = torch.randint(0, 255, (200, 10), dtype=torch.uint8)
    assert torch.equal(operands.swizzle(numbers), utils.to_blocked(numbers))


TAKEN = ["mxfp8", "mxfp8(scale=ceil)", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("text", TAKEN)
def test_operand_views_the_codes_and_stands_for_the_decoded_matrix(text):
    coder, x = codec(text), gaussian(48, 128, dtype=torch.bfloat16)
    wire = coder.encode(x)
    operand = operands.scaled_operand(coder, wire)
    assert operand.codes.data_ptr() == wire.payload.data_ptr()
    raw = operand.codes.view(torch.uint8)
    values = (
        torch.from_numpy(value_of(nibbles(raw.numpy())))
        if coder.grid.bits == 4
        else operand.codes.double()
    )
    assert values.shape == (48, 128)
    numbers = operands.unswizzle(operand.scales.view(torch.uint8), 48, 128 // coder.block)
    numbers = numbers.contiguous().view(operand.scales.dtype).float().double()
    if operand.row_scale is not None:
        numbers = numbers * operand.row_scale.double()
    want = (values.unflatten(1, (-1, coder.block)) * numbers[:, :, None]).flatten(1)
    back = coder.decode_rows(wire.payload[None], x.numel(), x.dtype).reshape(48, 128).double()
    assert torch.allclose(back, want, rtol=1e-6, atol=0)


OLD = "torch 2.11 refuses 4-bit MX scales"
MXFP4 = pytest.param("mxfp4", marks=pytest.mark.skipif(VERSION < (2, 12), reason=OLD))


@pytest.mark.parametrize("text", ["mxfp8", MXFP4, "nvfp4"])
def test_operands_are_those_that_scaled_mm_takes(text):
    """Its own checks of shapes, strides and types, without a device."""
    made_ = [
        operands.scaled_operand(codec(text), codec(text).encode(gaussian(n, 256))) for n in (48, 64)
    ]
    a, b = ((each.codes.to("meta"), each.scales.to("meta")) for each in made_)
    out = torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=torch.bfloat16)
    assert (out.shape, out.dtype) == ((48, 64), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scal"):
        torch._scaled_mm(a[0], b[0].t(), a[1][:-16], b[1], out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "shape", "said"),
    [
        ("mxfp6", (32, 64), "take mxfp8, mxfp4 and nvfp4"),
        ("int8", (32, 64), "take mxfp8, mxfp4 and nvfp4"),
        ("fp8(block=32)", (32, 64), "take mxfp8, mxfp4 and nvfp4"),
        ("mxfp8", (32, 48), "whole blocks of 32"),
        ("nvfp4", (2, 4, 16), "must be a matrix"),
    ],
)
def test_what_no_scaled_matmul_takes_is_refused(text, shape, said):
    with pytest.raises(PolicyError, match=said):
        operands.scaled_operand(codec(text), codec(text).encode(gaussian(*shape)))
    with pytest.raises(PolicyError, match="float64"):
        operands.scaled_operand(
            codec("mxfp8"), codec("mxfp8").encode(gaussian(2, 32, dtype=torch.float64))
        )


def test_modules_of_torchao_are_named_as_here():
    """A renamed module of torchao must not skip the comparison."""
    pytest.importorskip("torchao", reason="no torchao")
    for module in ("mx_tensor", "nvfp4_tensor", "constants", "utils"):
        importlib.import_module(f"torchao.prototype.mx_formats.{module}")
