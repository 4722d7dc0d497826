"""Run kernels in Triton's interpreter as an NVIDIA GPU with 8-bit floats runs them.

    with as_on_nvidia(ulps=1): ...

Kernels then take the branches with inline PTX, whose instructions are followed here. Approximations
are off by up to as many units in the last place as PTX's manual permits: ``ulps`` is -1, 0 or 1,
times the most. Of a NaN and a number, ``min`` and ``max`` take the number. With ``contracted``, a
product that is added is not rounded, as in graphs. A cast to bfloat16 stays the interpreter's own.
Only in a process that interprets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

TINY = np.float32(2.0**-126)
Words = np.ndarray
"""Registers as uint32."""


def floats(words: Words) -> np.ndarray:
    return words.view(np.float32)


def words(numbers: np.ndarray) -> Words:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)


# --- arithmetic -----------------------------------------------------------------------------------


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers become zero, with their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def moved(x: np.ndarray, ulps: int) -> np.ndarray:
    """Finite numbers other than zero, moved away from zero by units in the last place."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    size = bits & 0x7FFFFFFF
    moves = (size > 8) & (size < 0x7F7FFFF0)
    return np.where(moves, bits + ulps, bits).astype(np.int32).view(np.float32)


def odd_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 as a float64 whose last bit is one if it is not exact: rounding it
    to float32 again gives what the exact number is rounded to."""
    product = a.astype(np.float64) * b.astype(np.float64)
    other = c.astype(np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    toward_zero = np.signbit(error) != np.signbit(total)
    nudged = np.where(toward_zero, bits - 1, bits + 1)
    wrong = np.isfinite(total) & (error != 0) & even
    return np.where(wrong, nudged, bits).view(np.float64)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return odd_sum(a, b, c).astype(np.float32)


def inverse(x: np.ndarray, ulps: int) -> np.ndarray:
    """``rcp.approx.ftz.f32``: off by one unit at most, and no number is subnormal."""
    whole = np.frexp(np.abs(x))[0] == 0.5  # powers of two are exact
    near = np.float32(1) / flushed(x)
    return flushed(np.where(whole, near, moved(near, ulps)))


def nearest_bf16(x: Words) -> Words:
    """The bits of the nearest bfloat16, ties to even; NaN becomes 0x7FFF."""
    rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(floats(x)), np.uint32(0x7FFF), rounded)


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Each of four bytes is one of the eight of a and b."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for place in range(4):
        pick = (selector >> np.uint32(4 * place)) & np.uint32(15)
        assert (pick < 8).all(), "a selector that repeats a sign is not followed"
        byte = (both >> (pick.astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def instructions(ulps: int) -> dict[str, Callable[..., Words]]:
    """Return the instructions that kernels use, as functions of registers."""

    def of_floats(function: Callable[..., np.ndarray]) -> Callable[..., Words]:
        return lambda *taken: words(function(*map(floats, taken)))

    return {
        "shl.b32": lambda a, by: a << by,
        "shr.b32": lambda a, by: a >> by,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "prmt.b32": prmt,
        "cvt.f32.f16": lambda a: words(a.astype(np.uint16).view(np.float16).astype(np.float32)),
        "fma.rn.f32x2": lambda *pairs: tuple(map(of_floats(fma), *pairs)),
        "cvt.rn.bf16x2.f32": lambda a, b: (nearest_bf16(a) << 16) | nearest_bf16(b),
        "rcp.approx.ftz.f32": of_floats(lambda x: inverse(x, ulps)),
    }


# --- inline PTX -----------------------------------------------------------------------------------


def follow(asm: str, taken: list[Words], outputs: int, ulps: int) -> list[Words]:
    """Return the output registers of inline PTX, whose first operands they are."""
    known = instructions(ulps)
    held: dict[str, Any] = {
        f"${outputs + number}": register for number, register in enumerate(taken)
    }
    for line in asm.replace("{", "").replace("}", "").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        to, *others = (each.strip() for each in rest.split(","))
        if name.startswith("mov") and len(others) == 2:
            held |= moved_parts(name, held, to, *others)
            continue
        values = [held[each] if each in held else number(each, taken[0]) for each in others]
        held[to] = known[name](*values)
    return [held[f"${number}"] for number in range(outputs)]


def moved_parts(name: str, held: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the two parts of a register, or two registers as a pair of them."""
    first, second, third = names
    if name == "mov.b32":
        return {first: held[third] & np.uint32(0xFFFF), second: held[third] >> np.uint32(16)}
    if third in held and isinstance(held[third], tuple):
        return dict(zip((first, second), held[third], strict=True))
    return {first: (held[second], held[third])}


def number(text: str, like: Words) -> Words:
    assert re.fullmatch(r"\d+|0x[0-9A-Fa-f]+", text), text
    return np.full_like(like, int(text, 0))


def elementwise(
    asm: str, constraints: str, values: list[np.ndarray], results: int, pack: int, ulps: int
) -> list[np.ndarray]:
    """Return the float32 results of inline PTX on values of the same shape. Values of less than 4
    bytes lie in a register together, the first in its lowest bits."""
    outputs = sum(each.strip().startswith("=") for each in constraints.split(","))
    assert outputs == results * pack
    shape, count = values[0].shape, values[0].size
    whole = -(-count // pack) * pack  # Triton fills up what a thread has less
    registers = list[Words]()
    for value in values:
        flat = np.zeros(whole, value.dtype)
        flat[:count] = value.reshape(-1)
        held = min(pack, 4 // value.itemsize)
        packed = np.ascontiguousarray(flat.reshape(-1, pack // held, held)).view(np.uint32)
        registers += [np.ascontiguousarray(packed[:, each, 0]) for each in range(pack // held)]
    found = follow(asm, registers, outputs, ulps)
    split = [np.stack(found[each * pack :][:pack], 1) for each in range(results)]
    return [floats(each.reshape(-1)[:count].copy()).reshape(shape) for each in split]


# --- the interpreter ------------------------------------------------------------------------------


@contextmanager
def as_on_nvidia(ulps: int = 0, contracted: bool = False, pairs: bool = False) -> Iterator[None]:
    """Let kernels run as on an NVIDIA GPU with 8-bit floats, and with ``pairs`` also instructions
    on pairs of float32."""
    import triton.language as tl
    from triton.runtime import interpreter

    from commpass.lowering.gpu import decode_matmul_launch, exchange, launch, matmul_launch

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    casts = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    plain = builder.create_fp_to_fp

    class Call:
        def __init__(self, results: list[np.ndarray]) -> None:
            self.results = results

        def get_result(self, place: int) -> Any:
            return handle(self.results[place], tl.float32)

    def inline_asm(self: Any, asm: Any, constraints: Any, values: Any, types: Any, *more: Any):
        shape = np.broadcast_shapes(*(each.data.shape for each in values))
        data = [np.broadcast_to(each.data, shape) for each in values]
        return Call(elementwise(asm, constraints, data, len(types), more[1], ulps))

    def divided(self: Any, x: Any, y: Any) -> Any:
        return handle(moved(x.data / y.data, 2 * ulps), tl.float32)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        return handle(fma(*np.broadcast_arrays(x.data, y.data, z.data)), tl.float32)

    def multiplied(self: Any, x: Any, y: Any) -> Any:
        product = handle(x.data * y.data, x.dtype.scalar)
        if contracted and x.data.dtype == np.float32:
            product.set_attr("factors", (x.data, y.data))
        return product

    def added(self: Any, x: Any, y: Any) -> Any:
        return contraction(x, y, 1) or handle(x.data + y.data, x.dtype.scalar)

    def subtracted(self: Any, x: Any, y: Any) -> Any:
        return contraction(x, y, -1) or handle(x.data - y.data, x.dtype.scalar)

    def contraction(x: Any, y: Any, sign: int) -> Any:
        """Return ``x + sign * y`` rounded once, or None if neither is a product."""
        one = np.float32(sign)
        if "factors" in x.attr:
            terms = (*x.attr["factors"], one * y.data)
        elif "factors" in y.attr:
            a, b = y.attr["factors"]
            terms = (one * a, b, x.data)
        else:
            return None
        return handle(fma(*np.broadcast_arrays(*terms)), x.dtype.scalar)

    def exponential(self: Any, x: Any) -> Any:
        """``ex2.approx.f32`` of a rounded product, off by two units."""
        return handle(moved(np.exp2(x.data * np.float32(1.4426950408889634)), 2 * ulps), tl.float32)

    def least(self: Any, x: Any, y: Any) -> Any:
        return handle(np.fmin(x.data, y.data), x.dtype.scalar)

    def most(self: Any, x: Any, y: Any) -> Any:
        return handle(np.fmax(x.data, y.data), x.dtype.scalar)

    def root(self: Any, x: Any) -> Any:
        near = (1 / np.sqrt(flushed(x.data).astype(np.float64))).astype(np.float32)
        return handle(moved(near, ulps), tl.float32)

    def cast(self: Any, x: Any, to: Any, mode: Any) -> Any:
        """Cut at the largest number, as NVIDIA's casts do."""
        form = casts.get(to.scalar)
        if form is None:
            return plain(self, x, to, mode)
        if x.data.dtype == np.float32:
            limit = torch.finfo(form).max
            cut = torch.from_numpy(np.ascontiguousarray(x.data)).clamp(-limit, limit)
            return handle(cut.to(form).view(torch.uint8).numpy(), to.scalar)
        raise AssertionError("only float32 is cast to 8 bits")

    def widened(self: Any, x: Any, to: Any) -> Any:
        form = casts.get(x.dtype.scalar)
        if form is None:
            return builder.cast_impl(self, x, to)
        raw = torch.from_numpy(np.ascontiguousarray(x.data))
        return handle(raw.view(form).to(torch.float32).numpy(), tl.float32)

    def cuts(device: torch.device) -> dict[str, int]:
        return {"CASTS": False, "FP8": 1 + pairs}

    def either(self: Any, x: Any, to: Any, mode: Any) -> Any:
        return widened(self, x, to) if x.dtype.scalar in casts else cast(self, x, to, mode)

    with (
        patch.object(builder, "create_inline_asm", inline_asm),
        patch.object(builder, "create_fdiv", divided),
        patch.object(builder, "create_fma", fused),
        patch.object(builder, "create_rsqrt", root),
        patch.object(builder, "create_fp_to_fp", either),
        patch.object(builder, "create_fmul", multiplied),
        patch.object(builder, "create_fadd", added),
        patch.object(builder, "create_fsub", subtracted),
        patch.object(builder, "create_exp", exponential),
        patch.object(builder, "create_minnumf", least),
        patch.object(builder, "create_maxnumf", most),
        patch.object(launch, "casts", cuts),
        patch.object(exchange, "casts", cuts),
        patch.object(matmul_launch, "casts", cuts),
        patch.object(decode_matmul_launch, "casts", cuts),
    ):
        yield
