"""Lines of a generated kernel for each grid, as ``parts`` has them for the other parts of a codec.

In these lines ``z`` is the tile of values in units of the grid, float32, and ``codes`` the tile of
int32 codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from commpass.codecs.block.grids import (
    LARGEST,
    CompandedGrid,
    Fp8Grid,
    Grid,
    IntGrid,
    LevelGrid,
    MiniFloatGrid,
    TableGrid,
    companding_of,
)
from commpass.codecs.dispatch import by_type

Lines = list[str]

WITHIN = 1 - 2.0**-19
"""What the codes of a companded grid are multiplied by, to move the largest number into a cell."""


@by_type
def encode(grid: Grid, in_range: bool) -> Lines:
    """Return lines that compute ``codes`` from ``z`` and ``noise``."""
    raise NotImplementedError(grid)


@by_type
def decode(grid: Grid, codes: str) -> str:
    """Return an expression that decodes codes to numbers in grid units."""
    raise NotImplementedError(grid)


def decode_bytes(grid: Grid, raw: str) -> str:
    """Return an expression that decodes bytes with two codes each; "" if there is none, and codes
    are unpacked first."""
    if grid == IntGrid(4):
        return f"decode_int4({raw}, FP8)"
    if isinstance(grid, CompandedGrid) and grid.bits == 4:
        return f"decode_companded4({raw}, {_uncompanding(grid)}, FP8)"
    return ""


def input_scale(grid: Grid) -> str:
    """Return an expression of what ``encode`` expects numbers in grid units to be multiplied by; ""
    if they are not."""
    if isinstance(grid, CompandedGrid):
        number = companding_of(grid)[0] / 2**grid.bits
        return f"({_root(grid)!r} if FP8 else {number!r})"
    return ""


def output_scale(grid: Grid) -> float:
    """Return what numbers that ``decode`` returns on NVIDIA are to be multiplied by; by nothing on
    other GPUs. It is at most the largest number, so the product with a scale is finite."""
    return 1 / _root(grid) if isinstance(grid, CompandedGrid) and grid.k >= 1 else 1.0


def _root(grid: CompandedGrid) -> float:
    return math.sqrt(grid.k) / LARGEST


@encode.register
def _encode_int(grid: IntGrid, in_range: bool) -> Lines:
    lines = [f"codes = encode_int(z, noise, {grid.bits}, {not in_range}, {grid.marks})"]
    return [*lines, "codes = marked(codes, z)"] if grid.marks else lines


@decode.register
def _decode_int(grid: IntGrid, codes: str) -> str:
    return f"decode_int({codes}, {grid.bits}, {grid.marks}, FP8)"


@encode.register
def _encode_level(grid: LevelGrid, in_range: bool) -> Lines:
    return [f"codes = encode_level(z, noise, {grid.bits}, {grid.largest!r})"]


@decode.register
def _decode_level(grid: LevelGrid, codes: str) -> str:
    return f"decode_level({codes}, {grid.largest!r})"


@encode.register
def _encode_fp8(grid: Fp8Grid, in_range: bool) -> Lines:
    return [f"codes = encode_{grid.form}(z, {grid.largest!r}, {grid.marks}, FP8)"]


@decode.register
def _decode_fp8(grid: Fp8Grid, codes: str) -> str:
    hardware = ", FP8" if grid.form == "e4m3" else ""
    return f"decode_{grid.form}({codes}{hardware})"


@encode.register
def _encode_minifloat(grid: MiniFloatGrid, in_range: bool) -> Lines:
    power = 1 - grid.bias - grid.mantissa
    return [f"codes = encode_minifloat(z, {grid.bits}, {grid.mantissa}, {power})"]


@decode.register
def _decode_minifloat(grid: MiniFloatGrid, codes: str) -> str:
    return f"decode_minifloat({codes}, {grid.bits}, {23 - grid.mantissa}, {127 - grid.bias})"


@encode.register
def _encode_companded(grid: CompandedGrid, in_range: bool) -> Lines:
    cells = 2 ** (grid.bits - 1)
    _, k = companding_of(grid)
    gain = cells * math.sqrt((1 + grid.k) / grid.k) * WITHIN
    return [f"codes = encode_companded(z, {k!r}, {gain!r}, {cells}, {not in_range}, FP8)"]


@decode.register
def _decode_companded(grid: CompandedGrid, codes: str) -> str:
    return f"decode_companded({codes}, {_uncompanding(grid)}, {grid.bits}, FP8)"


def _uncompanding(grid: CompandedGrid) -> str:
    """Return the constants of ``tiles.grids.decode_companded``: the power of two that is the
    distance of two levels, 1 + k, k in their unit, and the unit and k on NVIDIA."""
    power = (LARGEST / 2 ** (grid.bits - 1)).hex().partition("p")[2]
    k, times = grid.k / LARGEST**2, output_scale(grid)
    numbers = (1 + grid.k, k, LARGEST / times / 128, k if times == 1 else 1.0)
    return ", ".join([power.lstrip("+"), *map(repr, numbers)])


@encode.register
def _encode_table(grid: TableGrid, in_range: bool) -> Lines:
    """Search the rank of a size among the levels, one bit after the other."""
    edges = [(low + high) / 2 for low, high in pairwise(grid.levels)]
    lines, bits = ["size = tl.abs(z)"], list[str]()
    for bit in reversed(range(grid.bits - 1)):
        edge = _selected(bits, edges[2**bit - 1 :: 2 ** (bit + 1)])
        lines.append(f"above_{bit} = size >= {edge}")
        bits.append(f"above_{bit}")
    rank = " + ".join(f"tl.where(above_{bit}, {2**bit}, 0)" for bit in range(grid.bits - 1))
    return [*lines, f"codes = encode_rank({rank}, z, {grid.bits})"]


@decode.register
def _decode_table(grid: TableGrid, codes: str) -> str:
    bits = [f"((rank_of({codes}, {grid.bits}) >> {bit}) & 1) != 0" for bit in range(grid.bits - 1)]
    return f"signed({_selected(bits[::-1], grid.levels)}, {codes}, {grid.bits})"


def decode_searched(grid: Grid) -> str:
    """Return an expression that decodes what ``encode`` has searched last; "" if it searches
    nothing."""
    if not isinstance(grid, TableGrid):
        return ""
    bits = [f"above_{bit}" for bit in reversed(range(grid.bits - 1))]
    return f"signed({_selected(bits, grid.levels)}, codes, {grid.bits})"


def _selected(bits: Sequence[str], numbers: Sequence[float]) -> str:
    """Return an expression for the number whose index has these bits, the highest first."""
    if not bits:
        return repr(numbers[0])
    half = len(numbers) // 2
    high, low = _selected(bits[1:], numbers[half:]), _selected(bits[1:], numbers[:half])
    return f"tl.where({bits[0]}, {high}, {low})"


# --- how many bits their numbers have -------------------------------------------------------------


@by_type
def significant_bits(grid: Grid) -> int:
    """Return the most significant bits of a grid's numbers."""
    raise NotImplementedError(grid)


@significant_bits.register
def _of_integers(grid: IntGrid) -> int:
    return grid.bits - 1


@significant_bits.register
def _of_halves(grid: LevelGrid) -> int:
    return grid.bits


@significant_bits.register
def _of_fp8(grid: Fp8Grid) -> int:
    return 4 if grid.form == "e4m3" else 3


@significant_bits.register
def _of_minifloats(grid: MiniFloatGrid) -> int:
    return grid.mantissa + 1


@significant_bits.register
def _of_floats(grid: CompandedGrid | TableGrid) -> int:
    return 24
