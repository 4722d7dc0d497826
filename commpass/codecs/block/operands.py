"""Wires of MX and NVFP4 codecs as operands of scaled matmuls: codes, scales, and the scale of the
row.

The codes of a wire are views of it. Tensor cores read the scales of blocks in another order, tile
by tile (``swizzle``), so these are copied: 1/32 of the bytes of MXFP8, 1/8 of those of NVFP4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from commpass.codecs.block import scales
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import FP8, Fp8Grid, MiniFloatGrid
from commpass.codecs.block.layouts import Flat, Pairs
from commpass.codecs.block.transforms import NoTransform
from commpass.codecs.codec import Codec, Wire
from commpass.codecs.rows import aligned, ceil_to
from commpass.errors import PolicyError

TILE_ROWS, TILE_COLUMNS, LANES = 128, 4, 32
"""A tile of scales is 128 rows by 4 blocks, stored as 32 groups of 16 bytes."""


@dataclass(frozen=True)
class ScaledOperand:
    """The first operand of ``torch._scaled_mm``, for a matrix ``[m, k]``.

    ``codes`` are ``[m, k]`` of an 8-bit float, or ``[m, k / 2]`` of ``float4_e2m1fn_x2``.
    ``scales`` are those of the blocks, e8m0 or e4m3, swizzled. ``row_scale`` is a float32 by which
    the product is multiplied, None for MX.
    """

    codes: Tensor
    scales: Tensor
    row_scale: Tensor | None


def scaled_operand(codec: Codec, wire: Wire) -> ScaledOperand:
    """Return the operand that a wire of a matrix holds.

    Raises PolicyError if no scaled matmul takes the format, or if blocks cross rows.
    """
    block_codec = _block_codec(codec)
    if len(wire.shape) != 2 or wire.shape[1] % block_codec.block:
        raise PolicyError(
            f"{list(wire.shape)}: must be a matrix of rows of whole blocks of {block_codec.block}"
            " values"
        )
    if wire.dtype == torch.float64:
        raise PolicyError("float64 values: their scales have 8 bytes, and no matmul takes them")
    rows, columns = wire.shape
    length, *lengths = block_codec.regions(rows * columns, wire.dtype)
    codes = wire.payload[:length].view(_element(block_codec.grid)).reshape(rows, -1)
    at = aligned(length)
    numbers = wire.payload[at : at + lengths[0]].reshape(rows, columns // block_codec.block)
    two_level = isinstance(block_codec.scale, scales.TwoLevel)
    form = torch.float8_e4m3fn if two_level else torch.float8_e8m0fnu
    at += aligned(lengths[0])
    row = wire.payload[at : at + 4].view(torch.float32) if two_level else None
    return ScaledOperand(codes, swizzle(numbers).view(form), row)


def _block_codec(codec: Codec) -> BlockCodec:
    """Return a codec whose wires are operands."""
    if isinstance(codec, BlockCodec) and isinstance(codec.transform, NoTransform):
        four_bits = codec.grid == MiniFloatGrid("e2m1")
        codes = isinstance(codec.layout, Pairs if four_bits else Flat)
        mx = codec.scale.stored == "pow2" and codec.scale.numbers == 1 and codec.block == 32
        nv = isinstance(codec.scale, scales.TwoLevel) and codec.block == 16 and four_bits
        if codes and (four_bits or isinstance(codec.grid, Fp8Grid)) and (mx or nv):
            return codec
    raise PolicyError(f"{codec.spec}: torch's scaled matmuls take mxfp8, mxfp4 and nvfp4")


def _element(grid: object) -> torch.dtype:
    return FP8[grid.form] if isinstance(grid, Fp8Grid) else torch.float4_e2m1fn_x2


def swizzle(numbers: Tensor) -> Tensor:
    """Return the scales of blocks ``[m, k]`` in the order in which tensor cores read them, one
    dimension.

    They are cut into tiles of 128 x 4, row by row of tiles; zeros fill the last ones. In a tile,
    the scale of row r and column c is at ``16 (r mod 32) + 4 (r div 32) + c`` (cuBLAS, 1D block
    scaling factors layout).
    """
    rows, columns = numbers.shape
    down, along = (ceil_to(rows, TILE_ROWS), ceil_to(columns, TILE_COLUMNS))
    padded = F.pad(numbers, (0, along - columns, 0, down - rows))
    tiles = padded.reshape(-1, TILE_ROWS // LANES, LANES, along // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def unswizzle(numbers: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of ``swizzle``: ``[rows, columns]``."""
    down, along = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    tiles = numbers.reshape(down, along, LANES, TILE_ROWS // LANES, TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, along * TILE_COLUMNS)
    return whole[:rows, :columns]
