"""A matmul that decodes its left operand.

The rows of ``a [m, k]`` arrive as the wires ``[ranks, wire_bytes]`` of an all_gather: rank r's are
``m / ranks`` of them. Each program computes one tile of the result. In each step along k it loads a
part of a block of codes for each of its rows, and multiplies the values in registers by the scale.
They are rounded to the dtype of the gathered tensor, which is never stored.

Byte i of a block has a code for each of ``PARTS`` parts of the block. A step thus multiplies
``PARTS`` tiles, with rows of ``b`` that lie a part of a block apart. No value is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.packing import widths
from commpass.codecs.block.scales import row_numbers
from commpass.codecs.block.transforms import NoTransform
from commpass.lowering.chain import Chain, Decode
from commpass.lowering.gpu import generate, grid_parts, supported, wires
from commpass.lowering.gpu.matmul_encode import Kernel
from commpass.lowering.gpu.matmul_sizes import SHARED
from commpass.lowering.gpu.matmul_supported import OPERANDS, TOO_MANY
from commpass.lowering.gpu.source import constant, function_text, indent, of_text
from commpass.lowering.gpu.supported import TYPES
from commpass.lowering.gpu.tiles import decode_matmul as own_tiles
from commpass.lowering.gpu.tiles import matmul as matmul_tiles

CONSTANTS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "SIZE", "PARTS", "CASTS", "FP8")
BLOCK_N = 128
"""The columns of a tile. Each tile of columns decodes its rows again."""
SMALLEST_K = 16
"""The fewest values along k that the tensor cores multiply."""


@dataclass(frozen=True)
class Problem:
    """The sizes of ``a [m, k] @ b [k, n]``, with ``m / ranks`` rows in each wire."""

    m: int
    n: int
    k: int
    ranks: int

    @property
    def rows(self) -> int:
        """Rows of a wire."""
        return self.m // self.ranks

    @property
    def numel(self) -> int:
        """Values of a wire."""
        return self.rows * self.k


@dataclass(frozen=True)
class Matmul:
    """The dtype of values, of ``b`` and of the result; whether ``b`` is stored by rows; and the
    dtype of a bias."""

    dtype: torch.dtype
    b_by_rows: bool = True
    bias: torch.dtype | None = None


@dataclass(frozen=True)
class Tile:
    """A tile of the result, and the bytes of codes that a step along k loads for each row."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8

    def count(self, problem: Problem) -> int:
        """Return the number of tiles."""
        down = problem.ranks * -(-problem.rows // self.block_m)
        return down * -(-problem.n // self.block_n)


def tile_of(codec: BlockCodec, problem: Problem, arch: str) -> Tile:
    """Return the static tile. It holds 64 results and at most 32 decoded values in each thread.

    On sm_80, four warps of 64 rows share the columns, and each decodes all rows. Where a step
    multiplies several parts, their addresses and those decoded values spill. Eight warps of 128
    rows decode each row once, and need fewer instructions even if half of the rows are missing.
    """
    narrow = codec.grid.bits < 8
    low = arch == "sm_80" and not narrow
    short = problem.rows <= 64 and not (arch == "sm_80" and narrow)
    return Tile(
        block_m=64 if short or low else 128,
        block_n=BLOCK_N,
        block_k=min(part_of_block(codec), 32 if arch in ("sm_80", "gfx942") else 64),
        num_warps=4 if low else 8,
        num_stages=2 if arch == "gfx942" else 3,
    )


def part_of_block(codec: BlockCodec) -> int:
    """Return the bytes of codes of a block of fixed size, which are also the values of a part."""
    return codec.block * codec.grid.bits // 8


# --- what is supported ----------------------------------------------------------------------------


def unsupported_reason(codec: Codec, matmul: Matmul, problem: Problem, *, arch: str) -> str:
    """Return why a matmul cannot decode its left operand, or "" if it can."""
    if why := _unsupported_codec(codec):
        return f"{codec.spec}: {why}"
    assert isinstance(codec, BlockCodec)
    if arch not in SHARED:
        return f"{arch}: no kernels for it"
    for dtype in (matmul.dtype, matmul.bias or matmul.dtype):
        if dtype not in OPERANDS:
            return f"{str(dtype).removeprefix('torch.')} operands: bfloat16 and float16 are decoded"
    if min(problem.m, problem.n, problem.k) < 1:
        return "nothing to multiply"
    if problem.m % problem.ranks:
        return f"{problem.m} rows of {problem.ranks} ranks: wires begin inside a row"
    if problem.k % codec.block:
        blocks = f"{codec.spec}'s blocks of {codec.block}"
        return f"rows of {problem.k} values are no multiple of {blocks}: blocks cross rows"
    chain = Chain(torch.uint8, (Decode(codec, matmul.dtype),))
    if why := supported.unsupported_reason(chain, problem.numel):
        return why
    largest = max(problem.m * problem.k, problem.k * problem.n, problem.m * problem.n)
    return f"{largest:,} values in a tensor: kernels count to 2^31" if largest >= TOO_MANY else ""


def _unsupported_codec(codec: Codec) -> str:
    """Return why a part of a block along k cannot be decoded by itself."""
    if not isinstance(codec, BlockCodec):
        return "no block codec, and kernels are made of the parts of one"
    if not isinstance(codec.layout, Flat):
        return "the values of its blocks are stored in another order"
    if not isinstance(codec.transform, NoTransform):
        return "a rotated block is decoded as a whole, and a step of a matmul has a part of it"
    if row_numbers(codec.scale):
        return "its scales have a scale for each row in addition"
    if len(widths(codec.grid.bits)) > 1:
        return f"codes of {codec.grid.bits} bits are stored in several parts"
    if part_of_block(codec) < SMALLEST_K:
        return f"blocks of {part_of_block(codec)} bytes: a step of a matmul has {SMALLEST_K}"
    return ""


# --- the kernel -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def kernel(codec: BlockCodec, matmul: Matmul) -> Kernel:
    """Return the kernel for a codec and a matmul."""
    body = wires.Body(codec.block, codec.layout)
    body.add_argument("input", "*u8")
    body.add_argument("b", TYPES[matmul.dtype])
    if matmul.bias is not None:
        body.add_argument("bias", TYPES[matmul.bias])
    body.add_argument("output", TYPES[matmul.dtype])
    body.add_argument("input_stride", "i64")
    for name in ("rows", "columns", "row_bytes", "ranks", "b_step"):
        body.add_argument(name, "i32")
    short, (width,) = wires.short_name(matmul.dtype), widths(codec.grid.bits)
    down, along = ("b_step", "1") if matmul.b_by_rows else ("1", "b_step")
    decoded = grid_parts.decode(codec.grid, f"codes_of(raw, part, {width})")
    step = [
        "inside = step * BLOCK_K + tl.arange(0, BLOCK_K)",
        "block = lines * along_blocks + step * BLOCK_K // LENGTH",
        "block = block[:, None]",
        "raw = tl.load(wire + (lines * row_bytes)[:, None] + inside[None, :])",
        *wires.load_number_lines(codec, body, mask="block >= 0"),
        "first_deep = step * BLOCK_K // LENGTH * SIZE + step * BLOCK_K % LENGTH",
        # Triton does not see this itself, and would load single values of b.
        "first_deep = tl.multiple_of(first_deep, BLOCK_K)",
        "for part in tl.static_range(PARTS):",
        *indent(
            [
                *wires.value_lines(codec, matmul.dtype, decoded),
                f"left = left_{short}(x, CASTS)",
                "deep = first_deep + part * LENGTH + tl.arange(0, BLOCK_K)",
                f"right = tl.load(b + deep[:, None] * {down} + along[None, :] * {along})",
                "total = multiply_add(left, right, total, CASTS)",
            ]
        ),
    ]
    lines = [
        "LENGTH: tl.constexpr = SIZE // PARTS",
        "row, line, column = tile_place(",
        "    tl.program_id(0), ranks, rows, columns, BLOCK_M, BLOCK_N, GROUP",
        ")",
        "row = row.to(tl.int64)",
        "wire = input + row * input_stride",
        "along_blocks = row_bytes // LENGTH",
        "down = line + tl.arange(0, BLOCK_M)",
        "columns_here = column + tl.arange(0, BLOCK_N)",
        "stored = (down < rows)[:, None] & (columns_here < columns)[None, :]",
        "lines = tl.where(down < rows, down, 0)",
        "along = tl.where(columns_here < columns, columns_here, 0)",
        "along = tl.max_contiguous(tl.multiple_of(along, BLOCK_N), BLOCK_N)",
        "total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        "for step in range(0, row_bytes // BLOCK_K):",
        *indent([line.replace("CUT", "True") for line in step]),
    ]
    if matmul.bias is not None:
        lines.append("total = total + to_float32(tl.load(bias + along), FP8)[None, :]")
    lines += [
        "place = output + row * rows * columns",
        "place = place + down[:, None] * columns + columns_here[None, :]",
        f"store_values_{short}(place, total, stored, CASTS)",
    ]
    signature = dict(sorted(body.signature.items(), key=lambda each: not each[1].startswith("*")))
    text = function_text("decode_matmul", [*signature, *map(constant, CONSTANTS)], lines)
    known = {**generate.KNOWN, **vars(matmul_tiles), **vars(own_tiles)}
    fuses = isinstance(codec.grid, CompandedGrid)
    return Kernel(of_text("decode_matmul", text, known), signature, CONSTANTS, fuses)


def constants_of(codec: BlockCodec, by: Tile) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel, without those of ``launch.casts``."""
    return {
        "BLOCK_M": by.block_m,
        "BLOCK_N": by.block_n,
        "BLOCK_K": by.block_k,
        "GROUP": by.group,
        "SIZE": codec.block,
        "PARTS": 8 // codec.grid.bits,
    }
