"""Lines of a generated kernel for each part of a block codec, which call its tile functions. Those
of grids are in ``grid_parts``.

In these lines ``x`` is the tile ``[BLOCKS, PARTS, SIZE / PARTS]`` of float32 values, and ``codes``
the tile of int32 codes. ``number_0``, ``number_1`` are the scales ``[BLOCKS, 1, 1]``. ``block`` and
``inside`` are the indices of blocks in the row and of values in a block. Each function is
dispatched on the type of its part: a new part only needs its lines here to be supported in all
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import Grid, IntGrid, largest_power
from commpass.codecs.block.layouts import LANES, Flat, Lanes, Layout, Pairs, Tiles
from commpass.codecs.block.noise import Nearest, Rounding, Stochastic
from commpass.codecs.block.packing import widths
from commpass.codecs.block.scales import (
    LEAST_E4M3,
    LEAST_ROW_SCALE,
    Absmax,
    Dual,
    LeastSquares,
    Rms,
    Scale,
    SharedExponent,
    Static,
    TwoLevel,
    start_of,
)
from commpass.codecs.block.storage import LARGEST_E4M3
from commpass.codecs.block.transforms import Hadamard, NoTransform, Transform, low_bits
from commpass.codecs.dispatch import by_type
from commpass.lowering.gpu.grid_parts import (
    Lines,
    decode,
    decode_searched,
    encode,
    input_scale,
    output_scale,
    significant_bits,
)


@dataclass(frozen=True)
class Group:
    """The form of a tile in which a thread holds every value of a block that is a multiple of
    ``part`` apart: see ``tiles.transforms.halves``. ``blocks`` are side by side, and
    ``blocks * part`` threads hold them."""

    blocks: int
    part: int


# --- layouts --------------------------------------------------------------------------------------


@by_type
def place(layout: Layout, size: int) -> str:
    """Return an expression for the positions of a tile's values in their row, in the order in which
    memory is accessed: see ``split``."""
    raise NotImplementedError(layout)


@place.register
def _flat(layout: Flat, size: int) -> str:
    return f"flat(block, inside, {size})"


@place.register
def _pairs(layout: Pairs, size: int) -> str:
    return f"flat(block, tl.arange(0, {size})[None, None, :], {size})"


@place.register
def _lanes(layout: Lanes, size: int) -> str:
    return f"lanes(block, inside, {size}, {LANES})"


@place.register
def _tiles(layout: Tiles, size: int) -> str:
    return f"rectangles(block, inside, numel, {layout.height}, {layout.across}, {layout.width})"


@by_type
def split(layout: Layout, values: str) -> str:
    """Return an expression for the tile of values that were read at ``place``."""
    raise NotImplementedError(layout)


@by_type
def join(layout: Layout, values: str) -> str:
    """The inverse of ``split``: the values of a tile, to be written at ``place``."""
    raise NotImplementedError(layout)


@split.register
@join.register
def _as_placed(layout: Flat | Lanes | Tiles, values: str) -> str:
    return values


@split.register
def _split_pairs(layout: Pairs, values: str) -> str:
    return f"split_pairs({values})"


@join.register
def _join_pairs(layout: Pairs, values: str) -> str:
    return f"join_pairs({values})"


# --- transforms -----------------------------------------------------------------------------------


@by_type
def forward(transform: Transform) -> Lines:
    """Return lines that transform ``x`` and set ``side``, if there is side data."""
    raise NotImplementedError(transform)


@by_type
def inverse(transform: Transform, times: float, group: Group | None = None) -> Lines:
    """Return lines of the inverse: from values divided by ``sums`` to blocks divided by ``sums``,
    multiplied by ``times``."""
    raise NotImplementedError(transform)


@forward.register
def _identity(transform: NoTransform) -> Lines:
    return []


@inverse.register
def _identity_inverse(transform: NoTransform, times: float, group: Group | None = None) -> Lines:
    return [f"x = x * {times!r}"] if times != 1 else []


@forward.register
def _rotated(transform: Hadamard) -> Lines:
    return [*_before_rotation(transform), f"x = hadamard(x, {transform.width})"]


def _before_rotation(transform: Hadamard) -> Lines:
    lines = ["side = pivot_of(x, inside)", "x = swapped(x, inside, side)"]
    scaled = f"x = x * {_scale(transform, 1 / transform.width)}"
    return [*lines, scaled] if transform.pivot else [scaled]


def rotated_and_peak(transform: Hadamard, group: Group) -> Lines:
    """Return the lines of ``forward``, which also find the ``peak`` of each block, and leave ``x``
    grouped."""
    call = f"x, peak = hadamard_and_peak(x, {transform.width}, {group.blocks}, {group.part})"
    return [*_before_rotation(transform), call]


@inverse.register
def _rotated_back(transform: Hadamard, times: float, group: Group | None = None) -> Lines:
    width, scale = transform.width, _scale(transform, times)
    lines = [f"x = hadamard(x, {width})", f"x = x * {scale}"]
    if group:
        signs = f"grouped({scale}, 1, {group.part})" if transform.signed else scale
        lines = [
            f"x = hadamard_grouped(x, {width}, {group.blocks}, {group.part})",
            f"x = ungrouped(x * {signs}, PARTS)",
        ]
    return lines + (["x = swapped(x, inside, side)"] if transform.pivot else [])


def _scale(transform: Hadamard, number: float) -> str:
    """Return a number multiplied by the signs of the Kronecker product of two signed matrices: see
    ``codecs.block.transforms``."""
    split = low_bits(transform.width)
    signed = f"fixed_signs(inside, {number!r}, {transform.width}, {split})"
    return signed if transform.signed else repr(number)


# --- scales ---------------------------------------------------------------------------------------


@by_type
def measure(scale: Scale, grid: Grid) -> Lines:
    """Return lines that compute ``number_i``, before rounding, from ``x`` and its ``peak``, and
    ``row_0`` from ``row_peak``."""
    raise NotImplementedError(scale)


@measure.register
def _absmax(scale: Absmax, grid: Grid) -> Lines:
    return [f"number_0 = absmax(peak, {grid.largest!r})"]


@measure.register
def _rms(scale: Rms, grid: Grid) -> Lines:
    return [f"number_0 = rms(x, peak, {grid.sigma!r})"]


@measure.register
def _first(scale: LeastSquares, grid: Grid) -> Lines:
    return measure(start_of(scale, grid), grid)


@measure.register
def _dual(scale: Dual, grid: Grid) -> Lines:
    return [
        "number_0 = dual_sigma(x, peak)",
        f"number_1 = dual_peak(peak, number_0, {grid.largest!r})",
    ]


@measure.register
def _shared_exponent(scale: SharedExponent, grid: Grid) -> Lines:
    return [f"number_0 = shared_exponent(peak, {largest_power(grid)!r})"]


@measure.register
def _two_level(scale: TwoLevel, grid: Grid) -> Lines:
    limits = f"{LEAST_E4M3!r}, {LARGEST_E4M3!r}"
    return [
        f"row_0 = row_scale(row_peak, {grid.largest * LARGEST_E4M3!r}, {LEAST_ROW_SCALE!r})",
        f"number_0 = two_level(peak, row_0, {grid.largest!r}, {limits})",
    ]


@measure.register
def _static(scale: Static, grid: Grid) -> Lines:
    return []


@by_type
def divide(scale: Scale, grid: Grid) -> Lines:
    """Return lines that compute ``z``, which is ``x`` in units of the grid."""
    raise NotImplementedError(scale)


@divide.register
def _by_numbers(scale: Absmax | Rms | LeastSquares | Dual | SharedExponent, grid: Grid) -> Lines:
    if scale.stored == "pow2" and grid.has_zero:
        lines = ["z = x", *(f"z = in_units_of_power(z, number_{i})" for i in range(scale.numbers))]
        return lines + _times(grid)
    zeros = not grid.has_zero and not isinstance(scale, Absmax)  # see ``wires.encode_lines``
    function = "in_units_of_some" if zeros else "in_units"
    short = "False" if scale.stored == "fp32" else "FP8"  # on NVIDIA, if it has few bits
    # A peak over 4 is below 2^126. It was rounded up to a normal number.
    normal = isinstance(scale, Absmax) and grid.largest >= 4
    calls = list[str]()
    for i in range(scale.numbers):
        times = (input_scale(grid) if i == scale.numbers - 1 else "") or "1.0"
        calls.append(f"z = {function}(z, number_{i}, {short}, {normal}, {times}, FP8)")
    if isinstance(scale, Dual):
        # On NVIDIA, shares of the peak, which the root mean square needs too, are multiplied once.
        first = "z = safe_peak(peak) if FP8 else x"
        return [first, *calls, "if FP8:", "    z = shares(x, safe_peak(peak)) * z"]
    return [calls[0].replace("(z,", "(x,"), *calls[1:]]


@divide.register
def _by_two_levels(scale: TwoLevel, grid: Grid) -> Lines:
    return ["z = in_two_units(x, number_0, row_0)", *_times(grid)]


@divide.register
def _by_value(scale: Static, grid: Grid) -> Lines:
    return [f"z = in_units_static(x, {scale.value!r}, {2 * grid.largest!r})", *_times(grid)]


def _times(grid: Grid) -> Lines:
    times = input_scale(grid)
    return [f"z = z * {times}"] if times else []


@by_type
def refit(scale: Scale, grid: Grid) -> Lines:
    """Return lines that update ``number_0`` once ``codes`` are known."""
    raise NotImplementedError(scale)


@refit.register
def _unchanged(
    scale: Absmax | Rms | Dual | Static | SharedExponent | TwoLevel, grid: Grid
) -> Lines:
    return []


@refit.register
def _least_squares(scale: LeastSquares, grid: Grid) -> Lines:
    numbers = decode_searched(grid) or decode(grid, "codes")
    if (times := output_scale(grid)) != 1:
        numbers = f"of_companded({numbers}, {times!r}, FP8)"
    back = f"least_squares(x, {numbers}, number_0)"
    return [f"number_0 = nearest_{scale.stored}({back})"]


@by_type
def multiply(scale: Scale, first: str) -> Lines:
    """Return lines from ``x`` in grid units to values; ``first`` is the name of the first scale."""
    raise NotImplementedError(scale)


@multiply.register
def _numbers_again(scale: Absmax | Rms | LeastSquares | Dual | SharedExponent, first: str) -> Lines:
    return [f"x = x * number_{i}" for i in range(scale.numbers - 1, 0, -1)] + [f"x = x * {first}"]


@multiply.register
def _two_levels_again(scale: TwoLevel, first: str) -> Lines:
    return [f"x = x * ({first} * row_0)"]


@multiply.register
def _value_again(scale: Static, first: str) -> Lines:
    return [f"x = x * {scale.value!r}"]


def has_exact_products(codec: BlockCodec) -> bool:
    """Whether a decoded value is one product of a grid's number and a scale, and float32 holds all
    its bits."""
    scale = {"bf16": 8, "pow2": 1, "e4m3": 4}.get(codec.scale.stored, 24)
    simple = isinstance(codec.scale, (Absmax, Rms, LeastSquares, SharedExponent))
    plain = isinstance(codec.transform, NoTransform) and codec.offset is None
    return simple and plain and significant_bits(codec.grid) + scale <= 24


MOST_OF_SCALED = 2.0**100
"""The bound of scales for ``scaled_bytes``."""


def scaled_bytes(codec: BlockCodec, paired: bool) -> str:
    """Return an expression of values from bytes with two codes each, whose scales are positive and
    below MOST_OF_SCALED; "" if there is none that is faster than to decode and to multiply.

    ``paired``: also if the products are of pairs. A rotation of the sum pairs other values, and
    moves between registers would take longer.
    """
    simple = isinstance(codec.scale, Absmax) and isinstance(codec.transform, NoTransform)
    if simple and codec.offset is None and codec.grid == IntGrid(4):
        return f"scaled_int4(raw_0, number_0, {paired}, FP8)"
    return ""


def never_exceeds(scale: Scale) -> bool:
    """Whether no value in grid units exceeds the largest number: the scale is the peak, rounded
    up."""
    return isinstance(scale, (Absmax, Dual))


# --- rounding -------------------------------------------------------------------------------------


@by_type
def noise(rounding: Rounding) -> str:
    """Return an expression for what is added before a value is rounded down; "None" for rounding to
    nearest."""
    raise NotImplementedError(rounding)


@noise.register
def _nearest(rounding: Nearest) -> str:
    return "None"


@noise.register
def _stochastic(rounding: Stochastic) -> str:
    return "uniform(x, row.to(tl.int32) * blocks + block, inside, key)"


# --- packing --------------------------------------------------------------------------------------


def packs(bits: int, size: int) -> Sequence[tuple[int, int, int, int]]:
    """Return the parts in which the codes of a block of ``size`` values are stored: lowest bit,
    width, first byte within the block, bytes."""
    parts, low, first = [], 0, 0
    for width in widths(bits):
        length = size * width // 8
        parts.append((low, width, first, length))
        low, first = low + width, first + length
    return parts


PARTS: tuple[Any, ...] = (
    *(place, split, join, forward, inverse, measure, divide, refit, multiply),
    *(encode, decode, noise, significant_bits),
)
"""The functions that must be registered for every part of their kind."""
