"""C++ kernels of chains give the bits of the aten form."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import cache

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, rarely, sampled
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

import commpass
from commpass.codecs import codec, operators
from commpass.codecs.block.domain import Domain
from commpass.codecs.block.transforms import Hadamard
from commpass.errors import CommpassError
from commpass.lowering import Form, Generated, KernelInput, Piece, cpu, form_of, make
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Sum,
)
from commpass.lowering.cpu import build, rotation

INT8 = codec("int8")
F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
PLAIN = ("int8", "int8(stored=bf16,block=64)", "int4(stored=pow2)", "int6(block=48)")
FLOATS = (
    ("fp8", F32),
    ("fp8(form=e5m2,stored=pow2,block=48)", BF16),
    pytest.param("fp8(stored=bf16,block=1024)", F16, marks=pytest.mark.every),
    rarely("fp8(static=0.3)", F16),
    pytest.param("fp8(form=e5m2,static=3.0)", F32, marks=pytest.mark.every),
    pytest.param("int8(static=0.02)", BF16, marks=pytest.mark.every),
)
CASES = [
    (PLAIN[0], F32),
    (PLAIN[0], BF16),
    rarely(PLAIN[0], F16),
    rarely(PLAIN[1], BF16),
    (PLAIN[2], BF16),
    rarely(PLAIN[3], BF16),
    *FLOATS,
]
HARDWARE = (
    ("mxfp8", BF16),
    rarely("mxfp8(form=e5m2, scale=ceil)", F32),
    ("mxfp6", F32),
    ("mxfp6(form=e3m2, scale=ceil)", F16),
    ("mxfp4", F32),
    rarely("mxfp4", BF16),
    ("nvfp4", F32),
    ("nvfp4", BF16),
)
CASES += HARDWARE
SIZES = (1, 2, 63, 256, 1000, 2049)
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -3e-45, 3.3e38, -3.3e38)


def values(rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return rows of values, some of which are hard for kernels.

    The first row has none of these, so that all its scales are finite. The second has blocks of
    zeros, and subnormals.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    if rows > 1:
        x[1, : n // 2] = 0
        x[1, n // 2 :] *= 1e-38
    for row in range(2, rows):
        for place in torch.randint(0, n, (2,), generator=generator).tolist():
            x[row, place] = SPECIAL[(place + row) % len(SPECIAL)]
    return x.to(dtype)


def apart(x: torch.Tensor, more: int = 5) -> torch.Tensor:
    """Return the same rows with larger strides, and not at the start of a storage."""
    wide = torch.full((x.shape[0], x.shape[1] + more), 77, dtype=x.dtype)
    part = wide[:, 3 : 3 + x.shape[1]]
    return part.copy_(x)


def run(chain: Chain, inputs: list[torch.Tensor], numel: int) -> torch.Tensor:
    """Run a kernel on inputs; its output lies between values that it must not touch."""
    rows = inputs[0].shape[0] // chain.ranks
    last = chain.steps[-1]
    dtype = chain.input_dtype if chain.decodes is None else chain.decodes.dtype
    width = last.codec.wire_bytes(numel, dtype) if isinstance(last, Encode) else numel
    made = F32
    for step in chain.steps:
        made = step.dtype if isinstance(step, (Cast, Add)) else made
    if isinstance(last, Encode):
        made = U8
    if isinstance(last, Decode) and last.codec.lossless:
        made = last.dtype
    whole = torch.full((rows, width + 7), 55, dtype=made)
    output = whole[:, 2 : 2 + width]
    cpu.compile_chain(chain)([apart(x) for x in inputs], output, numel)
    assert (whole[:, :2] == 55).all()
    assert (whole[:, 2 + width :] == 55).all()
    return output.clone(memory_format=torch.contiguous_format)


def same(made: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether values are equal; all NaNs are equal, and so are both zeros."""
    return (
        made.dtype == right.dtype
        and torch.equal(made.nan_to_num(nan=7.5), right.nan_to_num(nan=7.5))
        and torch.equal(made.isnan(), right.isnan())
    )


def sent(coder, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> list[bytes]:
    """Return the bytes of each row that its exchange sends."""
    used = coder.used_bytes(wire, numel, dtype).tolist()
    return [bytes(row[:length].numpy()) for row, length in zip(wire, used, strict=True)]


def wires(coder, made: torch.Tensor, right: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    """Compare two wires, except for codes of blocks that decode to NaN."""
    decoded = coder.decode_rows(right, numel, dtype)
    assert same(coder.decode_rows(made, numel, dtype), decoded)
    finite = ~decoded.isnan().any(1)
    assert finite[0]
    assert torch.equal(made[finite], right[finite])


# --- codecs without a rotation: bit for bit -------------------------------------------------------


@pytest.mark.parametrize(("spec", "dtype"), CASES, ids=str)
def test_wire_has_the_bytes_of_the_aten_form(spec, dtype):
    coder = codec(spec)
    chain = Chain(dtype, (Encode(coder),))
    for n in SIZES:
        x = values(5, n, dtype, n)
        wires(coder, run(chain, [x], n), coder.encode_rows(x), n, dtype)


@pytest.mark.parametrize(("spec", "dtype"), CASES, ids=str)
def test_wire_is_decoded_to_the_values_of_the_aten_form(spec, dtype):
    coder = codec(spec)
    chain = Chain(U8, (Decode(coder, dtype), Cast(dtype)))
    for n in SIZES:
        wire = coder.encode_rows(values(5, n, dtype, n))
        assert same(run(chain, [wire], n), coder.decode_rows(wire, n, dtype).to(dtype))


@pytest.mark.parametrize("spec", ["int2(stored=pow2)", rarely("int2")])
def test_values_above_the_largest_scale_are_cut_to_the_grid(spec):
    """The largest power of two is half the largest float32: a number of the grid may be 2."""
    coder, n = codec(spec), 1000
    signs = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).sign()
    for dtype in (F32, BF16):
        for size in (torch.finfo(dtype).max, 1.625 * 2.0**127, 1.5 * 2.0**127, 2.0**127):
            x = (signs * size).to(dtype)
            assert torch.equal(run(Chain(dtype, (Encode(coder),)), [x], n), coder.encode_rows(x))


RANKS = 3


@pytest.mark.parametrize("spec", [PLAIN[1], rarely("fp8(block=64)"), rarely("mxfp4"), "nvfp4"])
def test_sum_is_in_rank_order_and_goes_on_as_a_wire_or_as_values(spec):
    coder, n = codec(spec), 1000
    wire = coder.encode_rows(torch.cat([values(1, n, BF16, seed) for seed in range(RANKS)]))
    total = operators.sum_rows(coder.decode_rows(wire, n, BF16))
    start = (Decode(coder, BF16), Sum(RANKS))
    assert same(run(Chain(U8, start), [wire], n), total)
    halved = run(Chain(U8, (*start, Divide(3.0), Cast(BF16))), [wire], n)
    assert same(halved, (total / 3.0).to(BF16))
    again = run(Chain(U8, (*start, Divide(3.0), Encode(coder))), [wire], n)
    wires(coder, again, coder.encode_rows(total / 3.0), n, F32)
    many = coder.encode_rows(values(2 * RANKS, n, BF16, 2))
    sums = coder.decode_rows(many, n, BF16).unflatten(0, (2, RANKS))
    right = torch.cat([operators.sum_rows(part) for part in sums])
    assert same(run(Chain(U8, start), [many], n), right)


def test_casts_and_residuals_are_rounded_as_torch_rounds():
    coder, n = codec("int8"), 700
    x, other = values(4, n, F32), values(4, n, BF16, 1)[:, :n]
    narrow = run(Chain(F32, (Cast(F16), Encode(coder))), [x], n)
    wires(coder, narrow, coder.encode_rows(x.to(F16)), n, F16)
    wire = coder.encode_rows(x)
    chain = Chain(U8, (Decode(coder, F32), Cast(BF16), Add(BF16)))
    right = coder.decode_rows(wire, n, F32).to(BF16) + other
    assert same(run(chain, [wire, other], n), right)


@settings(max_examples=examples(13, 40), deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.integers(1, 900),
    st.sampled_from(
        ["int8", "rotated(bits=4)", "taco", "int4(stored=pow2)", "tahquant(block=32)", "fp8"][
            : examples(3, 6)
        ]
    ),
)
def test_kernels_keep_what_is_not_finite_and_make_nothing_else_so(some, n, spec):
    """Law 2, for any bits."""
    coder = codec(spec)
    x = torch.tensor((some * n)[:n]).reshape(1, -1)
    wire = run(Chain(F32, (Encode(coder),)), [x], n)
    made = run(Chain(U8, (Decode(coder, F32), Cast(F32))), [wire], n)
    assert not made[~x.isfinite()].isfinite().any()
    blocks = torch.nn.functional.pad(x.isfinite(), (0, -n % coder.block), value=True)
    clean = blocks.unflatten(1, (-1, coder.block)).all(2, keepdim=True).expand(-1, -1, coder.block)
    assert made[clean.flatten(1)[:, :n]].isfinite().all()


def test_no_rows_and_no_values_are_nothing():
    coder = codec("int8")
    for shape in [(0, 300), (3, 0)]:
        wire = torch.empty((shape[0], coder.wire_bytes(shape[1], BF16)), dtype=U8)
        wire.fill_(0xAB)
        cpu.compile_chain(Chain(BF16, (Encode(coder),)))(
            [torch.empty(shape, dtype=BF16)], wire, shape[1]
        )
        assert (wire == 0xAB).all()


# --- 8-bit floats: every number -------------------------------------------------------------------

FORMS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def all_numbers(form: torch.dtype) -> torch.Tensor:
    """Return every bfloat16 and every float16 as float32, and float32 values around the numbers of
    a form.

    These are the midpoints of two neighbours, and the float32 values before and after each
    midpoint.
    """
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = [bits.view(BF16).float(), bits.view(F16).float()]
    levels = torch.arange(256).to(U8).view(form).float()
    levels = levels[levels.isfinite()].sort().values
    near = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    inf = torch.full_like(near, math.inf)
    return torch.cat([*every, near, near.nextafter(inf), near.nextafter(-inf)])


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_rounded_to_8_bit_floats_as_torch_casts_them(form):
    """Values above the largest number are clipped; non-finite ones become NaN."""
    dtype, largest = FORMS[form]
    x = all_numbers(dtype)
    coder, n = codec(f"fp8(form={form},static=1.0,block=16)"), x.numel()
    made = run(Chain(F32, (Encode(coder),)), [x[None]], n)[0, :n]
    right = x.clamp(-largest, largest).to(dtype).view(U8)
    finite = x.isfinite()
    assert torch.equal(made[finite], right[finite])
    assert (made[~finite] == 0x7F).all()


@pytest.mark.parametrize("form", FORMS)
def test_all_8_bit_floats_are_decoded_as_torch_casts_them(form):
    """This includes those that no encoder makes."""
    dtype, _ = FORMS[form]
    coder, codes = codec(f"fp8(form={form},static=1.0)"), torch.arange(256).to(U8)
    made = run(Chain(U8, (Decode(coder, F32),)), [codes[None]], 256)[0]
    right = codes.view(dtype).float().clamp(-3.4e38, 3.4e38)
    finite = right.isfinite() & (right.abs() < 1e38)
    assert torch.equal(made[finite].view(torch.int32), right[finite].view(torch.int32))
    assert torch.equal(made.isnan(), right.isnan())
    assert (made[~finite & ~right.isnan()].abs() == torch.finfo(F32).max).all()


# --- root mean squares: against float64 -----------------------------------------------------------


def numbers_of(wire: torch.Tensor, coder, n: int) -> list[torch.Tensor]:
    """Return the numbers of each block, ``[rows, blocks, 1]``, in float64.

    They are read as float32 or bfloat16 from regions that each begin at a multiple of 128 bytes.
    """
    blocks, kind = -(-n // coder.block), {"fp32": F32, "bf16": BF16}[coder.scale.stored]
    place, size, found = -(-blocks * coder.block // 128) * 128, blocks * kind.itemsize, []
    for _ in range(coder.scale.numbers):
        found.append(wire[:, place : place + size].contiguous().view(kind).double().unsqueeze(-1))
        padded = -(-size // 128) * 128
        assert not wire[:, place + size : place + padded].any()
        place += padded
    assert place == wire.shape[1]
    return found


LEVELS = {"e4m3": (448.0, 56.0, 2**-4, 2**-10), "e5m2": (57344.0, 7168.0, 2**-3, 2**-17)}
"""For each form: its largest number, an eighth of it, the relative rounding error, and the least
absolute one."""


def check_roots(wire: torch.Tensor, coder, z: torch.Tensor) -> None:
    """Check a wire of finite values z, float64, against the formulas.

    The tolerance is the roundings of a sum of squares of that many values, and of a few products.
    With a rotation, each of its sums may also be off by the steps of subnormal numbers.
    """
    form, (rows, n) = coder.grid.form, z.shape
    largest, eighth, part, least = LEVELS[form]
    blocks = torch.nn.functional.pad(z, (0, -n % coder.block)).unflatten(1, (-1, coder.block))
    numbers, eps, tiny = numbers_of(wire, coder, n), 2.0**-24, torch.finfo(F32).tiny
    steps = coder.transform.sums * 2.0**-149 if coder.transform.sums > 1 else 0.0
    root = blocks.square().mean(-1, keepdim=True).sqrt()
    peak = blocks.abs().amax(-1, keepdim=True)
    near = (coder.block / 16 + 16) * eps + steps / peak.clamp_min(2.0**-149)
    if coder.scale.numbers == 2:
        first = root.clamp_min(tiny)
        second = (peak / first / largest).clamp_min(tiny)
    else:
        first, second = (root / eighth).clamp_min(tiny), torch.ones_like(root)
    up = 2.0**-7 if coder.scale.stored == "bf16" else 0.0
    for number, right in zip(numbers, [first, second], strict=False):
        assert ((number / right - 1) >= -near).all()
        assert ((number / right - 1) <= near + up).all()
    scale = math.prod(numbers[1:], start=numbers[0])
    codes = wire[:, : blocks.shape[1] * coder.block].reshape(rows, -1, coder.block)
    units = codes.contiguous().view(FORMS[form][0]).double()
    cut = (blocks / scale).clamp(-largest, largest)
    assert ((units - cut).abs() <= cut.abs() * (part + 1e-5) + least + steps / scale).all()
    if coder.scale.numbers == 2:  # the peak is scaled to the largest number
        assert ((units.abs() == largest).any(-1) | (peak.squeeze(-1) < tiny * largest)).all()


def finite_values(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of usual values; with a block of zeros, -0.0 and an outlier; of subnormals;
    small; and among the largest numbers."""
    limits, g = torch.finfo(dtype), torch.Generator().manual_seed(n)
    x = torch.randn(5, n, generator=g)
    x[1, : n // 2] = -0.0
    x[1, -1] = 1000.0
    x[2] *= limits.tiny / 4
    x[3] *= max(limits.tiny * 2.0**20, 1e-25)
    x[4] *= limits.max / 16
    return x.to(dtype)


ROOTS = (
    ("taco", BF16),
    ("taco(form=e5m2,block=64,rotate=False)", F32),
    pytest.param("taco(block=512)", F32, marks=pytest.mark.every),
    pytest.param("fp8(scale=dual,block=48)", F16, marks=pytest.mark.every),
    ("fp8(scale=rms,stored=bf16)", F16),
    pytest.param("fp8(scale=dual,block=4096)", BF16, marks=pytest.mark.every),
)


@pytest.mark.parametrize(("spec", "dtype"), ROOTS, ids=str)
def test_root_mean_squares_are_those_of_float64(spec, dtype):
    """The codes are those of the nearest numbers. What is decoded are the wire's own numbers."""
    coder = codec(spec)
    encode, decode = Chain(dtype, (Encode(coder),)), Chain(U8, (Decode(coder, dtype),))
    width = coder.transform.sums
    for n in (1, 63, 1000, 4097):
        x = finite_values(n, dtype)
        wire = run(encode, [x], n)
        padded = torch.nn.functional.pad(x.double(), (0, -n % coder.block))
        z = padded if width == 1 else forward(padded, width, False, torch.float64)
        check_roots(wire, coder, z)
        numbers = numbers_of(wire, coder, n)
        codes = wire[:, : padded.shape[1]].reshape(len(x), -1, coder.block).contiguous()
        units = codes.view(FORMS[coder.grid.form][0]).double()
        right = (units * math.prod(numbers[1:], start=numbers[0])).flatten(1) / width
        if width > 1:
            right = inverse(right, width, False, torch.float64)
        limit = torch.finfo(dtype).max
        right = right.clamp(-limit, limit)[:, :n]
        made = run(decode, [wire], n).double()
        bound = (4 + width) * 2.0**-24 * right.abs().amax(1, keepdim=True) + 1e-38 * width
        assert ((made - right).abs() <= bound).all()


@pytest.mark.parametrize("spec", ["taco", "taco(rotate=False)"])
def test_blocks_scaled_by_a_root_that_are_not_finite_stay_so(spec):
    coder, n = codec(spec), 3000
    x = values(6, n, F32)
    wire = run(Chain(F32, (Encode(coder),)), [x], n)
    made = run(Chain(U8, (Decode(coder, F32), Cast(F32))), [wire], n)
    blocks = torch.nn.functional.pad(x, (0, -n % 256)).unflatten(1, (-1, 256)).isfinite().all(2)
    assert not blocks.all()
    clean = blocks.repeat_interleave(256, 1)[:, :n]
    assert torch.equal(made.isfinite(), clean)


def test_sums_of_values_scaled_by_roots_go_on_as_a_wire():
    """The decoded sums are bit for bit those of the aten form; each scale that is passed on is that
    of float64."""
    coder, n = codec("taco").domain_codec, 1024
    rows = torch.randn(RANKS, n, generator=torch.Generator().manual_seed(5))
    rows[:, 256:512] *= 1e-30
    wire = coder.encode_rows(rows)
    total = operators.sum_rows(coder.decode_rows(wire, n, F32))
    start = (Decode(coder, F32), Sum(RANKS))
    assert same(run(Chain(U8, start), [wire], n), total)
    check_roots(run(Chain(U8, (*start, Encode(coder))), [wire], n), coder, total.double())


def test_roots_do_not_depend_on_the_width_of_vectors():
    """The sum of squares uses 16 alternating sums, then halves."""
    coder, n = codec("taco(rotate=False)"), 1 << 13
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(1))
    found = numbers_of(run(Chain(F32, (Encode(coder),)), [x], n), coder, n)[0].flatten()
    blocks = x.view(-1, 256)
    power = torch.exp2(blocks.abs().amax(1, keepdim=True).log2().floor())
    squares = (blocks / power).square().view(-1, 16, 16)
    sums = torch.zeros(len(blocks), 16)
    for turn in squares.unbind(1):
        sums = sums + turn
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, 1)
        sums = low + high
    right = (sums / 256).double().sqrt().float() * power
    assert torch.equal(found.float(), right.flatten())


# --- rotated codecs: the butterfly's bits ---------------------------------------------------------


@cache
def signs(width: int) -> torch.Tensor:
    return torch.from_numpy(reference.signs(width)).float()


def stages(x: torch.Tensor, distances: list[int]) -> torch.Tensor:
    """Compute a + b and a - b for values of the last dimension at each of the distances, in
    float32."""
    for distance in distances:
        pair = x.unflatten(-1, (-1, 2, distance))
        a, b = pair[..., 0, :], pair[..., 1, :]
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x


def forward(
    x: torch.Tensor, width: int, signed: bool = True, dtype: torch.dtype = F32
) -> torch.Tensor:
    down = [1 << bit for bit in reversed(range(width.bit_length() - 1))]
    factors = (signs(width) if signed else torch.ones(width)).to(dtype) / width
    return stages(x.unflatten(-1, (-1, width)) * factors, down).flatten(-2)


def inverse(
    x: torch.Tensor, width: int, signed: bool = True, dtype: torch.dtype = F32
) -> torch.Tensor:
    """Return the inverse for values divided by the width."""
    up = [1 << bit for bit in range(width.bit_length() - 1)]
    factors = (signs(width) if signed else torch.ones(width)).to(dtype) * width
    return (stages(x.unflatten(-1, (-1, width)), up) * factors).flatten(-2)


ROTATED = ("rotated", "rotated(bits=4,block=32)", "rotated(form=int,block=512)")
WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize("spec", sampled([*ROTATED, "sdp4bit"], [ROTATED[1], "sdp4bit"]))
def test_rotation_has_the_bits_of_its_butterfly(spec):
    coder = codec(spec)
    width, signed = coder.transform.width, coder.transform.signed
    inside, dtype = coder.domain_codec if spec != "sdp4bit" else codec("int4"), BF16
    for n in (coder.block, 4 * coder.block, 3072):
        x = values(5, n, dtype, n)
        wire = run(Chain(dtype, (Encode(coder),)), [x], n)
        wires(coder, wire, inside.encode_rows(forward(x.float(), width, signed)), n, dtype)
        made = run(Chain(U8, (Decode(coder, dtype), Cast(dtype))), [wire], n)
        right = inverse(inside.decode_rows(wire, n, F32) / width, width, signed)
        limit = torch.finfo(dtype).max
        assert same(made, right.clamp(-limit, limit).to(dtype))


@pytest.mark.parametrize("spec", sampled(ROTATED, ROTATED[:1]))
def test_rotation_is_close_to_the_aten_form(spec):
    check_close_to_aten(codec(spec))


@pytest.mark.parametrize("width", sampled(WIDTHS, (64, 1024)))
def test_rotation_of_any_width_has_the_signs_of_the_aten_form(width):
    """A wire of one form is read by the other, for instance on a rank without vectors."""
    check_close_to_aten(codec(f"rotated(block={width})"))


def check_close_to_aten(coder) -> None:
    n = 1 << 14
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    wire, right = run(Chain(F32, (Encode(coder),)), [x], n), coder.encode_rows(x)
    assert (wire != right).float().mean() < 1e-3
    if coder.grid.bits == 8:
        size = coder.parts(n, F32)[0]
        assert (wire[:, :size].int() - right[:, :size].int()).abs().max() <= 1
    made = run(Chain(U8, (Decode(coder, F32),)), [right], n)
    torch.testing.assert_close(made, coder.decode_rows(right, n, F32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("tahquant", BF16),
        ("tahquant(bits=3, block=32, stored=fp32)", F32),
        rarely("tahquant", F32),
        rarely("tahquant(bits=3, block=32, stored=fp32)", BF16),
    ],
    ids=str,
)
def test_pivots_and_offsets_are_those_of_the_aten_form(spec, dtype):
    """Positions of pivots and padding are equal byte for byte; the rest is as close as a rotation
    allows.

    One row has a value far above all others in some blocks, one has zeros, and one the largest
    numbers.
    """
    coder = codec(spec)
    encode = Chain(dtype, (Encode(coder),))
    decode = Chain(U8, (Decode(coder, dtype), Cast(dtype)))
    for n in (1, 63, 1000, 1 << 14):
        x = torch.randn(4, n, generator=torch.Generator().manual_seed(n))
        x[1, 5 :: 2 * coder.block] = 300.0
        x[2] = 0
        x[3] = x[3].sign() * 3.3e38
        x = x.to(dtype)
        wire, right = run(encode, [x], n), coder.encode_rows(x)
        codes = coder.parts(n, dtype)[0]
        assert (wire[:, :codes] != right[:, :codes]).float().mean() < 0.01
        blocks = -(-n // coder.block)
        places = right.shape[1] - 128 * -(-blocks // 128)
        assert torch.equal(wire[:, places:], right[:, places:])
        assert (right[1, places:] == 5).any() == (n > 5)
        made, wanted = run(decode, [right], n), coder.decode_rows(right, n, dtype).to(dtype)
        for row, other in zip(made.double(), wanted.double(), strict=True):
            near = 1e-5 if dtype == F32 else 1e-3  # a value may be cast to a neighbour
            assert (row - other).norm() <= near * other.norm()


def test_wire_with_places_that_are_none_is_read_within_bounds():
    coder, n = codec("tahquant(block=32)"), 5000
    g = torch.Generator().manual_seed(3)
    wire = torch.randint(0, 256, (9, coder.wire_bytes(n, BF16)), generator=g).to(U8)
    run(Chain(U8, (Decode(coder, BF16), Cast(BF16))), [wire], n)


def test_domains_are_entered_and_left_on_the_way():
    outer, n = codec("rotated"), 1024
    inner, domain = outer.domain_codec, outer.domain
    x = values(RANKS, n, F32)[:1]
    entered = run(Chain(F32, (Enter(domain), Encode(inner))), [x], n)
    assert torch.equal(entered, inner.encode_rows(forward(x, 256)))
    three = inner.encode_rows(torch.randn(RANKS, n, generator=torch.Generator().manual_seed(1)))
    total = operators.sum_rows(inner.decode_rows(three, n, F32))
    chain = Chain(U8, (Decode(inner, F32), Sum(RANKS), Leave(domain), Cast(BF16)))
    assert same(run(chain, [three], n), inverse(total * (1 / 256), 256).to(BF16))
    again = run(Chain(U8, (Decode(inner, F32), Sum(RANKS), Encode(inner))), [three], n)
    assert torch.equal(again, inner.encode_rows(total))


@pytest.mark.parametrize("dtype", [BF16, rarely(F32)], ids=str)
def test_subnormal_numbers_and_nans_are_decoded_as_in_the_aten_form(dtype):
    """A processor's own conversion to bfloat16 may not keep their bits."""
    coder, n, tiny = codec("fp8"), 2049, torch.finfo(dtype).tiny
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(1)) * tiny
    x[1, 700] = math.nan
    x[2] *= 1e3
    wire = coder.encode_rows(x.to(dtype))
    right = coder.decode_rows(wire, n, dtype).to(dtype)
    assert ((right != 0) & (right.abs() < tiny)).sum() > n
    made = run(Chain(U8, (Decode(coder, dtype), Cast(dtype))), [wire], n)
    assert same(made, right)


# --- exponents: any bits --------------------------------------------------------------------------


KINDS = 6


def raw(seed: int, n: int, dtype: torch.dtype, kind: int) -> torch.Tensor:
    """Return rows of any bits: those of a Gaussian; with many zeros; random; mixed; of a magnitude
    that changes, with zeros in between; of one value."""
    g = torch.Generator().manual_seed(seed)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = torch.randint(-(2**15), 2**15, (n,), generator=g).to(whole)
    if dtype.itemsize == 4:
        bits = bits << 16 | torch.randint(0, 2**16, (n,), generator=g).to(whole)
    gaussian = (torch.randn(n, generator=g) * 10.0 ** (seed % 7 - 3)).to(dtype)
    if kind == 0:
        return gaussian
    if kind == 1:
        return gaussian.relu()
    if kind == 2:
        return bits.view(dtype)
    if kind == 3:
        wild = (torch.arange(n) // 700) % 3 == 1
        return torch.where(wild, bits, gaussian.view(whole)).view(dtype)
    if kind == 4:
        part = torch.arange(n) // 1024  # a chunk
        return torch.where(part % 5 == 3, 0.0, gaussian.float() * 10.0 ** (part * 4 % 9 - 4)).to(
            dtype
        )
    return gaussian[:1].expand(n).contiguous()


@pytest.mark.parametrize(
    ("dtype", "planes"), [(BF16, 2), rarely(F16, 2), (F32, 2), rarely(BF16, 3)], ids=str
)
def test_exponents_travel_in_the_same_bytes(dtype, planes):
    coder = codec(f"exponent(planes={planes})")
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    encode, decode = Chain(dtype, (Encode(coder),)), Chain(U8, (Decode(coder, dtype),))
    for n in (1, 33, 1024, 1025, 9000):
        x = torch.stack([raw(n + kind, n, dtype, kind) for kind in range(KINDS)])
        wire = run(encode, [x], n)
        assert sent(coder, wire, n, dtype) == sent(coder, coder.encode_rows(x), n, dtype), n
        assert torch.equal(run(decode, [wire], n).view(whole), x.view(whole)), n


INSTRUCTIONS = re.compile(r"#if defined\(__(?:BMI2|AVX512VPOPCNTDQ)__\).*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "planes"),
    [(BF16, 2), *(pytest.param(*each, marks=pytest.mark.every) for each in ((F32, 2), (BF16, 3)))],
    ids=str,
)
def test_exponents_have_the_same_bytes_without_instructions_for_bits(dtype, planes, monkeypatch):
    """The forms for processors without BMI2 or a count of bits in AVX-512."""
    coder, source = codec(f"exponent(planes={planes})"), build.source
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    monkeypatch.setattr(build, "source", lambda chain: INSTRUCTIONS.sub("#if 0", source(chain)))
    encode, decode = Chain(dtype, (Encode(coder),)), Chain(U8, (Decode(coder, dtype),))
    for chain, forms in ((encode, 3), (decode, 3)):
        assert len(INSTRUCTIONS.findall(source(chain))) == forms
        assert not INSTRUCTIONS.findall(build.source(chain))
    encoder, decoder = (build.compile_chain.__wrapped__(each) for each in (encode, decode))
    for n in (33, 1025, 9000):
        x = torch.stack([raw(n + kind, n, dtype, kind) for kind in range(KINDS)])
        wire = torch.full((KINDS, coder.wire_bytes(n, dtype)), 55, dtype=U8)
        encoder([x], wire, n)
        assert sent(coder, wire, n, dtype) == sent(coder, coder.encode_rows(x), n, dtype), n
        decoder([wire], back := torch.empty_like(x), n)
        assert torch.equal(back.view(whole), x.view(whole)), n


def test_wire_of_exponents_that_holds_anything_is_read_within_bounds():
    coder, n = codec("exponent"), 5000
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        wire = torch.randint(0, 256, (2, coder.wire_bytes(n, BF16)), generator=g).to(U8)
        run(Chain(U8, (Decode(coder, BF16),)), [wire], n)


# --- threads, errors, and the operator ------------------------------------------------------------


def test_chains_say_whether_they_have_the_bits_of_the_aten_form():
    inner = codec("rotated").domain_codec
    assert cpu.is_exact(Chain(BF16, (Encode(INT8),)))
    assert cpu.is_exact(Chain(U8, (Decode(inner, BF16), Sum(2), Encode(inner))))
    assert not cpu.is_exact(Chain(BF16, (Encode(codec("rotated")),)))
    assert not cpu.is_exact(Chain(U8, (Decode(inner, BF16), Leave(codec("rotated").domain))))
    dual = codec("taco").domain_codec
    assert not cpu.is_exact(Chain(BF16, (Encode(dual),)))
    assert cpu.is_exact(Chain(U8, (Decode(dual, BF16), Sum(2), Encode(codec("fp8")))))


@pytest.mark.parametrize("spec", ["rotated", "exponent", rarely("int8"), rarely("taco")])
def test_number_of_threads_changes_nothing(spec):
    coder, n = codec(spec), 300_001
    x = values(2, n, BF16)
    encode = Chain(BF16, (Encode(coder),))
    decode = Chain(U8, (Decode(coder, BF16), Cast(BF16)))
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            wire = run(encode, [x], n)
            made.append((sent(coder, wire, n, BF16), run(decode, [wire], n)))
    finally:
        torch.set_num_threads(before)
    for wire, decoded in made[1:]:
        assert wire == made[0][0]
        assert same(decoded, made[0][1])


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (Chain(BF16, (Encode(codec("table")),)), "no C\\+\\+ for TableGrid"),
        (Chain(BF16, (Encode(codec("topk")),)), "no block codec"),
        (Chain(BF16, (Encode(codec("int8(rounding=stochastic)")),)), "stochastic rounding"),
        (Chain(BF16, (Encode(codec("fp8(scale=lsq)")),)), "LeastSquares scales"),
        (Chain(BF16, (Encode(codec("equarx")),)), "Lanes"),
        (Chain(BF16, (Encode(codec("int8(block=8)")),)), "multiples of 16"),
        (Chain(torch.float64, (Encode(INT8),)), "float64"),
        (Chain(U8, (Decode(INT8, BF16), Sum(17))), "sums up to 16 in rank order"),
        (Chain(BF16, (Enter(Domain(Hadamard(64))), Encode(INT8))), "only float32"),
        (Chain(U8, (Decode(codec("exponent"), BF16), Cast(F32), Sum(2))), "supports no other step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_kernels_say_why(chain, reason):
    with pytest.raises(CommpassError, match=reason):
        cpu.compile_chain(chain)
    assert cpu.unsupported_reason(chain)


def test_no_kernel_measures_a_row_before_it_is_rotated():
    rotated = replace(codec("nvfp4"), transform=Hadamard(16))
    reason = cpu.unsupported_reason(Chain(BF16, (Encode(rotated),)))
    assert reason == "there is no C++ for a transform or an offset with a scale of the row"


def test_unknown_steps_and_transforms_have_no_kernel():
    @dataclass(frozen=True)
    class Doubled:
        pass

    assert cpu.unsupported_reason(Chain(F32, (Doubled(),))) == "there is no C++ for Doubled"
    assert rotation.unsupported_reason(Doubled()) == "there is no C++ for Doubled"
    assert rotation.unsupported_reason(Hadamard(64)) == ""


def test_codecs_of_every_width_have_kernels():
    for spec in (
        *("int8", "int6", "int4", "int2", "int4(scale=rms)", "taco", "fp8", "mxfp4", "mxfp6"),
        *("fp8(form=e5m2,scale=dual)", "nvfp4", "rotated(bits=4)", "rotated(bits=3)"),
    ):
        assert not cpu.unsupported_reason(Chain(BF16, (Encode(codec(spec)),)))


def test_kernel_refuses_tensors_that_it_would_read_wrongly():
    chain, x = Chain(F32, (Encode(INT8),)), torch.randn(2, 512)
    kernel, wire = cpu.compile_chain(chain), torch.empty(2, INT8.wire_bytes(512, F32), dtype=U8)
    kernel([x], wire, 512)
    for wrong in ([x.t()], [x[:, :500]], [x.to(BF16)], [x, x], [torch.randn(2, 1024)[:, ::2]]):
        with pytest.raises(CommpassError):
            kernel(wrong, wire, 512)
    with pytest.raises(CommpassError):
        kernel([x], wire[:, 1:], 512)


def test_operator_calls_a_generated_kernel_by_name():
    """Rows are in a larger buffer, and the wire is a part of one."""
    n, size = 512, INT8.wire_bytes(512, BF16)
    buffer, joined = torch.randn(2, 3 * n).to(BF16), torch.zeros(2, 2 * size, dtype=U8)
    part = buffer[:, n : 2 * n]
    taken = KernelInput(form_of(buffer), form_of(part))
    piece = Piece(0, size, Form(U8, part.device, (2, size), (2 * size, 1)))
    kernel = Generated(Chain(BF16, (Encode(INT8),)), n, (taken,), (piece,))
    assert kernel == Generated(Chain(BF16, (Encode(codec("int8")),)), n, (taken,), (piece,))
    make([kernel])
    torch.ops.commpass.kernel_([buffer], [joined], [part.storage_offset(), 0], kernel.name)
    assert torch.equal(joined[:, size:], INT8.encode_rows(part))
    assert not joined[:, :size].any()


def test_no_kernel_where_inductor_finds_no_vector_instructions(monkeypatch):
    chains = [Chain(BF16, (Encode(codec(name)),)) for name in ("int8", "taco", "exponent")]
    assert [cpu.unsupported_reason(chain) for chain in chains] == [""] * 3
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa)
    assert all("vector instructions" in cpu.unsupported_reason(chain) for chain in chains)
    cpu.compile_chain.cache_clear()
    with pytest.raises(CommpassError, match="vector instructions"):
        cpu.compile_chain(chains[0])


BITS = """
import hashlib, sys, torch
from commpass.codecs import codec
from commpass.lowering import cpu
from commpass.lowering.chain import Cast, Chain, Decode, Encode
digest, n = hashlib.sha256(), 5000
x = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
x[1, :700], x[2, 9], x[2, 600] = 0, float("inf"), float("nan")
for each in map(codec, sys.argv[1:]):
    wire = torch.zeros(3, each.wire_bytes(n, x.dtype), dtype=torch.uint8)
    cpu.compile_chain(Chain(x.dtype, (Encode(each),)))([x], wire, n)
    decode = Chain(torch.uint8, (Decode(each, x.dtype), Cast(x.dtype)))
    cpu.compile_chain(decode)([wire], back := torch.empty_like(x), n)
    digest.update(wire.numpy().tobytes() + back.view(torch.int16).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not any(isinstance(isa, cpu_vec_isa.VecAVX512) for isa in cpu_vec_isa.valid_vec_isa_list()),
    reason="this processor has no AVX-512, so there is one set of instructions to try",
)
def test_kernels_give_the_same_bits_with_vectors_of_either_width():
    codecs = ("int8", "int4", "fp8", "mxfp4", "rotated", "rotated(bits=5)", "exponent")
    printed = [
        subprocess.run(
            [sys.executable, "-c", BITS, *codecs],
            env={**os.environ, "ATEN_CPU_CAPABILITY": width},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for width in ("avx2", "avx512")
    ]
    assert len(printed[0]) == 65
    assert printed[0] == printed[1]


def chains_not_compiled_before() -> list[Chain]:
    """Static scales are in the source, so these are new sources in each run."""
    scales = [0.5 + random.random() for _ in range(3)]
    return [Chain(F32, (Encode(codec("int8", static=scale)),)) for scale in scales]


def test_several_chains_are_compiled_at_once_and_each_result_is_its_own(monkeypatch):
    builders, at_once = [0], []
    run = cpp_builder.CppBuilder.build

    def counted(self):
        builders[0] += 1
        at_once.append(builders[0])
        try:
            return run(self)
        finally:
            builders[0] -= 1

    chains = chains_not_compiled_before()
    with fresh_cache():
        monkeypatch.setattr(cpp_builder.CppBuilder, "build", counted)
        cpu.start_compiling(chains)
        x = torch.randn(2, 700)
        for chain in chains:
            (step,) = chain.steps
            wire = torch.empty(2, step.codec.wire_bytes(700, F32), dtype=U8)
            cpu.compile_chain(chain)([x], wire, 700)
            assert torch.equal(wire, step.codec.encode_rows(x))
    assert len(at_once) >= len(chains)
    assert max(at_once) > 1


def test_error_of_a_chain_that_was_started_is_raised_where_it_is_needed(monkeypatch):
    first, second, third = chains_not_compiled_before()
    source, wrong = build.source, "#error this chain does not compile\n"
    monkeypatch.setattr(build, "source", lambda c: (wrong if c == second else "") + source(c))
    with fresh_cache():
        cpu.start_compiling([first, second, third])
        assert cpu.compile_chain(first).chain == first
        for _ in range(2):
            with pytest.raises(CppCompileError, match="this chain does not compile"):
                cpu.compile_chain(second)
        assert cpu.compile_chain(third).chain == third
        monkeypatch.undo()
        assert cpu.compile_chain(second).chain == second


def test_error_at_the_start_is_raised_where_the_chain_is_needed(monkeypatch):
    chains = chains_not_compiled_before()

    def fails(chain):
        raise OSError("no space left on device")

    monkeypatch.setattr(build, "source", fails)
    cpu.start_compiling(chains)
    for chain in chains:
        with pytest.raises(OSError, match="no space left"):
            cpu.compile_chain(chain)


def test_headers_are_precompiled_once_in_a_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(build, "_with_headers", lambda: threads.append(threading.current_thread()))
    build.precompile_headers.cache_clear()
    for _ in range(2):
        cpu.precompile_headers()
    deadline = time.monotonic() + 60
    while not threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each.name for each in threads] == ["commpass headers"]
    assert threads[0].daemon


def test_headers_that_do_not_compile_are_left_to_the_first_kernel(monkeypatch):
    monkeypatch.setattr(build, "NOTHING", "#error no header\n")
    build._with_headers()


@pytest.mark.parametrize("inner", ["inductor", "eager"])
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_headers_are_precompiled_where_inductor_compiles(monkeypatch, inner, cuda):
    """At once where torch has no CUDA, else for a graph on a CPU."""
    calls = []
    monkeypatch.setattr(cpu, "precompile_headers", lambda: calls.append(inner))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    made = commpass.backend(inner=inner)
    assert bool(calls) == (inner == "inductor" and cuda is None)
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "precompile_headers", lambda: calls.append(inner))
    calls.clear()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=made)(torch.ones(4))
    assert bool(calls) == (inner == "inductor")


def test_chains_that_are_compiled_are_not_started_again():
    chains = [Chain(F32, (Encode(codec(name)),)) for name in ("int8", "fp8")]
    for chain in chains:
        cpu.compile_chain(chain)
    cpu.start_compiling(chains)
    assert not build._started.keys() & set(chains)
