"""A second implementation of the block codecs, from their formulas, in float64 and NumPy.

The tests compare the package with it. It uses neither commpass, torch nor any library's 8-bit
float. ``encode`` and ``decode`` are the codec itself. ``verify`` reads a wire that the package
made, and checks each number and each code independently, so that no error hides another. A code
must represent the cell that its value lies in, up to the rounding of the arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np

SINGLE, DOUBLE = 2.0**-24, 2.0**-53
"""Unit roundoff of float32 and float64."""
SMALLEST = {SINGLE: (2.0**-126, 2.0**-149), DOUBLE: (2.0**-1022, 2.0**-1074)}
"""The smallest normal and the smallest subnormal number by unit roundoff."""


@dataclass(frozen=True)
class Setting:
    """The definition of a block codec.

    ``rotation`` is "", "plain", "signed" or "pivot", of ``width`` values (0: of a block).
    ``layout`` is "flat", "lanes" (``block`` is the depth, 0 for all) or "tiles" (of a matrix with
    ``columns``).
    """

    grid: str
    scale: str = "absmax"
    stored: str = "fp32"
    rotation: str = ""
    width: int = 0
    block: int = 256
    offset: bool = False
    static: float = 0.0
    layout: str = "flat"
    columns: int = 0
    seed: int | None = None


# --- the names ------------------------------------------------------------------------------------


def _family() -> dict[str, Setting]:
    """Return every setting of every block codec that changes more than the block, by its text."""
    scales, forms = ("absmax", "rms", "lsq"), ("fp32", "bf16", "pow2")
    found: dict[str, Setting] = {}

    def add(name: str, setting: Setting, **parameters: object) -> None:
        text = ", ".join(f"{key}={value}" for key, value in parameters.items())
        found[f"{name}({text})" if text else name] = setting

    for bits in (8, 6, 4, 2):
        name, plain = (
            f"int{bits}",
            Setting(f"int{bits}", block={8: 256, 6: 128, 4: 128, 2: 64}[bits]),
        )
        add(name, plain)
        for scale, stored in itertools.product(scales, forms):
            if (scale, stored) != ("absmax", "fp32"):
                add(name, replace(plain, scale=scale, stored=stored), scale=scale, stored=stored)
            if scale != "lsq":
                rounded = replace(plain, scale=scale, stored=stored, seed=7)
                add(name, rounded, scale=scale, stored=stored, rounding="stochastic", seed=7)
        add(name, replace(plain, seed=0), rounding="stochastic")
        add(name, replace(plain, scale="static", static=0.05), static=0.05)
        add(
            name,
            replace(plain, scale="static", static=0.5, seed=3),
            scale="static",
            static=0.5,
            rounding="stochastic",
            seed=3,
        )
    for form in ("e4m3", "e5m2"):
        add("fp8", Setting(form), form=form)
        for scale, stored in itertools.product(scales, forms):
            add("fp8", Setting(form, scale, stored), form=form, scale=scale, stored=stored)
        add("fp8", Setting(form, "static", static=1.0), form=form, static=1.0)
    add("fp8", Setting("e4m3"))
    for scale, rule in (("floor", "floor"), ("ceil", "absmax")):
        for form in ("e4m3", "e5m2"):
            mx = Setting(form, rule, "pow2", block=32)
            add("mxfp8", mx, form=form, scale=scale)
        for form in ("e2m3", "e3m2"):
            mx = Setting(form, rule, "pow2", block=32)
            add("mxfp6", mx, form=form, scale=scale)
        add("mxfp4", Setting("e2m1", rule, "pow2", block=32, layout="pairs"), scale=scale)
    add("mxfp8", Setting("e4m3", "floor", "pow2", block=32))
    add("mxfp6", Setting("e2m3", "floor", "pow2", block=32))
    add("mxfp6", Setting("e3m2", "floor", "pow2", block=32), form="e3m2")
    add("mxfp4", Setting("e2m1", "floor", "pow2", block=32, layout="pairs"))
    widths = {
        "companded": range(2, 9),
        "int": range(2, 9),
        "table": range(2, 7),
        "e4m3": (8,),
        "e5m2": (8,),
    }
    for form, bits in ((form, bits) for form, every in widths.items() for bits in every):
        grid = form if form in ("e4m3", "e5m2") else f"{form}{bits}"
        rotated = Setting(grid, "lsq" if form == "table" else "absmax", "bf16", "signed")
        add("rotated", rotated, form=form, bits=bits)
        for scale, stored in itertools.product(scales, forms):
            add(
                "rotated",
                replace(rotated, scale=scale, stored=stored),
                form=form,
                bits=bits,
                scale=scale,
                stored=stored,
            )
    add("rotated", Setting("companded8", "absmax", "bf16", "signed"))
    for bits in range(2, 7):
        for scale, stored in itertools.product(("rms", "lsq"), forms):
            add(
                "table",
                Setting(f"table{bits}", scale, stored, "signed"),
                bits=bits,
                scale=scale,
                stored=stored,
            )
    add("table", Setting("table4", "rms", "bf16", "signed"))
    add("taco", Setting("e4m3", "dual", rotation="plain"))
    for form, scale, rotate in itertools.product(
        ("e4m3", "e5m2", "int8"), ("dual", "absmax"), (True, False)
    ):
        add(
            "taco",
            Setting(form, scale, rotation="plain" if rotate else ""),
            form=form,
            scale=scale,
            rotate=rotate,
        )
    add("equarx", Setting("int8", layout="lanes", block=0))
    for columns in (1, 96, 128, 300):
        add("equarx", Setting("int8", layout="tiles", columns=columns), width=columns)
    add("sdp4bit", Setting("int4", rotation="plain", width=32, block=128))
    add("sdp4bit", Setting("int8", rotation="plain", width=32, block=128), bits=8)
    add("sdp4bit", Setting("int4", block=2048), part="weight")
    add("sdp4bit", Setting("int8", block=2048), part="weight", bits=8)
    add("tahquant", Setting("level4", stored="bf16", rotation="pivot", offset=True, block=128))
    for bits, stored in itertools.product((3, 4), ("bf16", "fp32")):
        setting = Setting(f"level{bits}", stored=stored, rotation="pivot", offset=True, block=128)
        add("tahquant", setting, bits=bits, stored=stored)
    return found


FAMILY = _family()


def blocks_for(text: str) -> list[int]:
    """Return the blocks that a codec can have; [] if it has no such parameter."""
    setting = FAMILY[text]
    if setting.layout == "tiles" or text.startswith("mx"):
        return []
    sizes = [8, 16, 24, 32, 64, 128, 256, 512, 1000]
    if setting.width:
        return [size for size in sizes if size % setting.width == 0]
    power = setting.rotation or text.startswith("taco")
    return [
        size
        for size in sizes
        if (not power or size & (size - 1) == 0) and not (setting.offset and size > 128)
    ]


# --- grids ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A grid of levels.

    ``levels`` are in ascending order, with ``edges`` between them. ``codes`` are those of the
    levels, and ``rank`` is the level of each code (-1 for none). A number on an edge goes to the
    even code if ``ties_to_even``, else up.
    """

    bits: int
    levels: np.ndarray
    edges: np.ndarray
    codes: np.ndarray
    largest: float
    sigma: float
    ties_to_even: bool
    precision: float = 0.0
    floats: bool = False

    @functools.cached_property
    def rank(self) -> np.ndarray:
        table = np.full(2**self.bits, -1)
        table[self.codes] = np.arange(len(self.codes))
        if self.floats:  # minus zero
            table[2 ** (self.bits - 1)] = table[0]
        return table

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """Return the rank of the level that each number is coded as."""
        below = np.searchsorted(self.edges, values, side="left")
        above = np.searchsorted(self.edges, values, side="right")
        return np.where(self.ties_to_even & (self.codes[below] % 2 == 0), below, above)


LOAD = {2: 1.2, 3: 1.9, 4: 2.5, 5: 2.9, 6: 3.2, 7: 3.6, 8: 3.9}
"""Standard deviations of a Gaussian at the largest of ``2^b - 1`` even levels, for scales from the
root mean square."""


def _even(levels: np.ndarray, first_code: int, bits: int) -> Grid:
    codes = np.arange(len(levels)) + first_code
    largest = float(levels[-1])
    return Grid(
        bits, levels, (levels[1:] + levels[:-1]) / 2, codes, largest, largest / LOAD[bits], True
    )


def small_floats(exponent_bits: int, mantissa_bits: int, special: str) -> np.ndarray:
    """Return all finite values of a small float from zero up.

    They are ``m / 2^M 2^(1-bias)`` if e = 0, else ``(1 + m / 2^M) 2^(e-bias)``. With ``special``
    "inf" (e5m2) the whole last exponent is Inf and NaN. With "nan" (e4m3fn) only its last mantissa
    is. With "" (the formats of 4 and 6 bits of OCP MX v1.0) all are numbers.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    steps, last = 2**mantissa_bits, 2**exponent_bits - 1
    values = [
        m / steps * 2.0 ** (1 - bias) if e == 0 else (1 + m / steps) * 2.0 ** (e - bias)
        for e in range(last + 1)
        for m in range(steps)
        if not (e == last and (special == "inf" or (special == "nan" and m == steps - 1)))
    ]
    return np.array(values)


def _floats(bits: int, positive: np.ndarray, load: float) -> Grid:
    levels = np.concatenate([-positive[:0:-1], positive])
    ranks, sign = np.arange(len(positive)), 2 ** (bits - 1)
    codes = np.concatenate([sign + ranks[:0:-1], ranks])
    edges = (levels[1:] + levels[:-1]) / 2
    largest = float(positive[-1])
    return Grid(bits, levels, edges, codes, largest, largest / load, True, SINGLE, floats=True)


COMPANDED_PEAK = 8.0
"""The value that the peak of a block is scaled to on a companded grid; only stored scales show
it."""


def _companded(bits: int, block: int) -> Grid:
    """Cells of equal width in ``c(z) = z sqrt(1 + k) / sqrt(1 + k z^2)``. The root of k is that of
    ``2 ln(block) / 9``, rounded to 15 bits.

    The level of a cell is the number whose ``c`` is its middle, inverted by bisection. The peak of
    a block, ``z = 1``, is 8.
    """
    root = math.sqrt(2 * math.log(block) / 9)
    unit = 2.0 ** (math.floor(math.log2(root)) - 14)
    k = (round(root / unit) * unit) ** 2

    def inverse(target: np.ndarray) -> np.ndarray:
        low, high = np.full_like(target, -1.0), np.full_like(target, 1.0)
        for _ in range(80):
            z = (low + high) / 2
            under = z * np.sqrt(1 + k) / np.sqrt(1 + k * z * z) < target
            low, high = np.where(under, z, low), np.where(under, high, z)
        return (low + high) / 2 * 8

    cells = np.arange(2**bits)
    middles = inverse((cells + 0.5) / 2 ** (bits - 1) - 1)
    edges = inverse(cells[1:] / 2 ** (bits - 1) - 1)
    return Grid(bits, middles, edges, cells, 8.0, 8.0 / math.sqrt(9 * k), False)


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
    """Return the positive levels of least square error for a Gaussian.

    They come from Newton's method on ``level = mean of its cell``.
    """
    erfc, count = np.vectorize(math.erfc), 2 ** (bits - 1)

    def off(levels: np.ndarray) -> np.ndarray:
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-(edges**2) / 2) * math.sqrt(2 / math.pi)
        tail = erfc(edges / math.sqrt(2))
        return levels - (density[:-1] - density[1:]) / (tail[:-1] - tail[1:])

    normal = statistics.NormalDist(
        sigma=math.sqrt(3)
    )  # the best density of levels is the cube root of a Gaussian's
    levels = np.array([normal.inv_cdf(0.5 + (i + 0.5) / (2 * count)) for i in range(count)])
    for _ in range(60):
        slope = np.stack(
            [(off(levels + step) - off(levels - step)) / 2e-5 for step in 1e-5 * np.eye(count)],
            axis=1,
        )
        levels = np.sort(np.abs(levels - 0.7 * np.linalg.solve(slope, off(levels))))
    for _ in range(4):
        levels = levels - np.linalg.solve(slope, off(levels))
    assert np.abs(off(levels)).max() < 1e-12
    return levels


def _table(bits: int) -> Grid:
    positive = lloyd_max(bits)
    levels = np.concatenate([-positive[::-1], positive])
    return Grid(
        bits,
        levels,
        (levels[1:] + levels[:-1]) / 2,
        np.arange(2**bits),
        positive[-1],
        1.0,
        False,
        1e-11,
    )


FLOAT_FORMS = {
    **{"e4m3": (4, 3, "nan"), "e5m2": (5, 2, "inf")},
    **{"e2m1": (2, 1, ""), "e2m3": (2, 3, ""), "e3m2": (3, 2, "")},
}
"""Bits of the exponent and of the mantissa, and what the last exponent holds besides numbers."""


@functools.cache
def grid_of(name: str, block: int) -> Grid:
    kind, bits = name.rstrip("0123456789"), int(name[-1])
    if name in FLOAT_FORMS:
        exponent, mantissa, special = FLOAT_FORMS[name]
        bits = 1 + exponent + mantissa
        load = 8 if bits == 8 else LOAD[bits]
        return _floats(bits, small_floats(exponent, mantissa, special), load)
    if kind == "int":
        largest = 2 ** (bits - 1) - 1
        return _even(np.arange(-largest, largest + 1.0), 1, bits)
    if kind == "level":
        return _even(np.arange(2.0**bits) - (2**bits - 1) / 2, 0, bits)
    return {"companded": lambda: _companded(bits, block), "table": lambda: _table(bits)}[kind]()


# --- layouts --------------------------------------------------------------------------------------


def places(numel: int, setting: Setting) -> np.ndarray:
    """Return ``[blocks, size]``: the index in a row of ``numel`` values for each position of each
    block.

    A padding zero has -1.
    """
    if setting.layout == "flat":
        found = np.arange(-(-numel // setting.block) * setting.block).reshape(-1, setting.block)
    elif setting.layout == "pairs":
        found = np.arange(-(-numel // setting.block) * setting.block).reshape(-1, setting.block)
        found = np.concatenate([found[:, 0::2], found[:, 1::2]], axis=1)
    elif setting.layout == "lanes":
        chunks = -(-numel // 1024)
        groups = -(-chunks // (setting.block or max(chunks, 1)))
        depth = -(-chunks // groups) if groups else 1
        group, lane, chunk = np.ogrid[:groups, :1024, :depth]
        found = ((group * depth + chunk) * 1024 + lane).reshape(groups * 1024, depth)
    else:
        lines = -(-numel // setting.columns)
        down, along, line, column = np.ogrid[
            : -(-lines // 8), : -(-setting.columns // 128), :8, :128
        ]
        at = along * 128 + column
        found = np.where(at < setting.columns, (down * 8 + line) * setting.columns + at, -1)
        found = found.reshape(found.shape[0] * found.shape[1], 1024)
    return np.where(found < numel, found, -1)


def blocks_of(x: np.ndarray, setting: Setting) -> np.ndarray:
    """Return a flat row in blocks, ``[blocks, size]``."""
    where = places(len(x), setting)
    return np.where(where >= 0, x[where], 0.0) if len(x) else np.zeros(where.shape)


def row_of(blocks: np.ndarray, numel: int, setting: Setting) -> np.ndarray:
    """The inverse of ``blocks_of``."""
    where = places(numel, setting)
    row = np.zeros(numel)
    row[where[where >= 0]] = blocks[where >= 0]
    return row


# --- transforms -----------------------------------------------------------------------------------


@functools.cache
def hadamard(width: int, signed: bool = False) -> np.ndarray:
    """Sylvester's construction: ``H(1) = 1``, ``H(2n) = [[H(n), H(n)], [H(n), -H(n)]]``; ``signed``
    times the signs."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * signs(width) if signed else matrix


def signs(width: int) -> np.ndarray:
    """Return a bent function of each of the two halves of the bits of a position.

    It is ``(-1)^(i0 i1 + i2 i3 + ...)``, with an odd last bit of a half alone. For an odd number of
    bits the upper half has one more.
    """
    bits = int(width).bit_length() - 1
    low = bits // 2
    found = []
    for place in range(width):
        digits = [place >> bit & 1 for bit in range(bits)]
        pairs = 0
        for half in (digits[:low], digits[low:]):
            pairs += sum(half[i] * half[i + 1] for i in range(0, len(half) - 1, 2))
        found.append((-1.0) ** pairs)
    return np.array(found)


def swapped(blocks: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    """Swap element 0 and the pivot of each block."""
    found, rows = blocks.copy(), np.arange(len(blocks))
    found[rows, 0], found[rows, pivots] = blocks[rows, pivots], blocks[:, 0]
    return found


def pivots_of(blocks: np.ndarray) -> np.ndarray:
    """Return the position of the value that is more than twice as large as all others of its block;
    0 for none."""
    size = np.sort(np.abs(blocks), axis=1)
    return np.where(size[:, -1] > 2 * size[:, -2], np.abs(blocks).argmax(axis=1), 0)


def forward(blocks: np.ndarray, setting: Setting) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``H (signs x) / width`` of each ``width`` values, and the pivots."""
    if not setting.rotation:
        return blocks, None
    pivots = pivots_of(blocks) if setting.rotation == "pivot" else None
    moved = blocks if pivots is None else swapped(blocks, pivots)
    width = setting.width or setting.block
    matrix = hadamard(width, setting.rotation == "signed") / width
    return (moved.reshape(-1, width) @ matrix.T).reshape(blocks.shape), pivots


def backward(values: np.ndarray, pivots: np.ndarray | None, setting: Setting) -> np.ndarray:
    """The inverse of ``forward``: ``signs H y``."""
    if not setting.rotation:
        return values
    width = setting.width or setting.block
    matrix = hadamard(width, setting.rotation == "signed")
    found = (values.reshape(-1, width) @ matrix).reshape(values.shape)
    return found if pivots is None else swapped(found, pivots)


# --- scales ---------------------------------------------------------------------------------------


def stored_up(number: np.ndarray, stored: str, roundoff: float) -> np.ndarray:
    """Return the least number of the stored form that is not below a number, at most the form's
    largest.

    The number is 0 or normal.
    """
    if roundoff == DOUBLE or stored == "fp32":
        return number
    mantissa, exponent = np.frexp(number)  # in [1/2, 1)
    if stored == "bf16":
        return np.minimum(
            np.ldexp(np.ceil(mantissa * 256) / 256, exponent), np.ldexp(255.0 / 256, 128)
        )
    return np.where(
        number == 0,
        0.0,
        np.minimum(np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent)), 2.0**127),
    )


def stored_nearest(number: np.ndarray, stored: str, roundoff: float) -> np.ndarray:
    """Return the nearest number of the stored form; on a tie the even one (the larger power of
    two)."""
    if roundoff == DOUBLE or stored == "fp32":
        return number
    smallest = SMALLEST[SINGLE][0]
    if stored == "bf16":
        mantissa, exponent = np.frexp(number)
        unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)  # subnormals have fewer digits
        limit = np.ldexp(255.0 / 256, 128)
        return np.clip(np.rint(number / unit) * unit, -limit, limit)
    mantissa, exponent = np.frexp(number)
    power = np.minimum(np.ldexp(1.0, np.where(mantissa >= 0.75, exponent, exponent - 1)), 2.0**127)
    return np.where(number < smallest / 2, 0.0, np.maximum(power, smallest))


@dataclass(frozen=True)
class Coded:
    """Codes ``[blocks, size]``, the numbers of each block ``[blocks]`` in wire order, and the
    pivots."""

    codes: np.ndarray
    numbers: list[np.ndarray]
    pivots: np.ndarray | None


def root_mean_square(t: np.ndarray, roundoff: float) -> np.ndarray:
    """Return the root mean square of each block, from values divided by the peak to avoid
    overflow."""
    peak = np.abs(t).max(axis=1, initial=0.0)
    return (
        np.sqrt(np.mean((t / np.maximum(peak, SMALLEST[roundoff][0])[:, None]) ** 2, axis=1)) * peak
    )


def _first_scale(
    t: np.ndarray,
    setting: Setting,
    grid: Grid,
    roundoff: float,
    *,
    shift: np.ndarray | float = 0.0,
    more: float = 0.0,
) -> np.ndarray:
    """Return the stored scale by absmax or by the root mean square.

    The block's peak may be larger by ``shift`` and ``more`` times itself. A grid without a zero has
    scale 0 for a block whose scale would be below the smallest normal number. Every other scale is
    at least that number.
    """
    smallest = SMALLEST[roundoff][0]
    peak = np.abs(t).max(axis=1, initial=0.0)
    if setting.scale == "rms" or (setting.scale == "lsq" and grid.sigma == 1.0):
        made = root_mean_square(t, roundoff) / grid.sigma * (1 + more) + shift / grid.sigma
    elif setting.scale == "floor":  # 2^(floor(log2 peak) - emax): OCP MX v1.0, section 6.3
        emax = math.floor(math.log2(grid.largest))
        with np.errstate(over="ignore"):
            largest = np.clip(peak * (1 + more) + shift, 1e-320, np.finfo(np.float64).max)
        made = np.ldexp(1.0, np.frexp(largest)[1] - 1 - emax)
    else:
        made = peak / grid.largest * (1 + more) + shift / grid.largest
    found = stored_up(np.maximum(made, smallest), setting.stored, roundoff)
    found = np.minimum(found, np.finfo(np.float64).max)
    has_zero = 0.0 in grid.levels
    return (
        found
        if has_zero
        else np.where(peak * (1 + more) + shift < grid.largest * smallest, 0.0, found)
    )


def encode(x: np.ndarray, setting: Setting, roundoff: float) -> Coded:
    """Encode a flat row, all finite, into codes and numbers, rounded to the nearest."""
    grid = grid_of(setting.grid, setting.block)
    t, pivots = forward(blocks_of(x, setting), setting)
    numbers = []
    if setting.offset:
        numbers.append(
            stored_nearest(t.min(axis=1) / 2 + t.max(axis=1) / 2, setting.stored, roundoff)
        )
        t = t - numbers[0][:, None]
    if setting.scale == "static":
        return Coded(grid.codes[grid.nearest(t / setting.static)], [], pivots)
    if setting.scale == "dual":
        sigma = np.maximum(root_mean_square(t, roundoff), SMALLEST[roundoff][0])
        numbers += [sigma, _first_scale(t / sigma[:, None], Setting(setting.grid), grid, roundoff)]
        ranks = grid.nearest(t / sigma[:, None] / numbers[1][:, None])
        return Coded(grid.codes[ranks], numbers, pivots)
    first = _first_scale(t, setting, grid, roundoff)
    ranks = grid.nearest(t / np.where(first == 0, 1.0, first)[:, None])
    if setting.scale == "lsq":
        q = grid.levels[ranks]
        best = (t * q).sum(axis=1) / np.maximum((q * q).sum(axis=1), 1e-300)
        best = np.where((q * q).sum(axis=1) > 0, np.clip(best, 0.0, 2 * first), first)
        first = stored_nearest(best, setting.stored, roundoff)
    return Coded(grid.codes[ranks], [*numbers, first], pivots)


def decode(coded: Coded, numel: int, setting: Setting) -> np.ndarray:
    """Return the decoded flat row."""
    grid = grid_of(setting.grid, setting.block)
    return row_of(backward(_scaled(coded, setting, grid), coded.pivots, setting), numel, setting)


def _scaled(coded: Coded, setting: Setting, grid: Grid) -> np.ndarray:
    """Return what the codes stand for, before the transform is undone."""
    values = grid.levels[grid.rank[coded.codes]]
    numbers = list(coded.numbers)
    middle = numbers.pop(0)[:, None] if setting.offset else 0.0
    if setting.scale == "static":
        values = values * setting.static
    for number in reversed(numbers):
        values = values * number[:, None]
    return values + middle


# --- the wire -------------------------------------------------------------------------------------

WIDTHS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}
"""How codes of each number of bits are split, low bits first. Part p of a block's codes is stored
at the p-th bits of the bytes."""


def unpacked(raw: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Unpack bytes ``[blocks, size * bits / 8]`` into codes ``[blocks, size]``."""
    codes, start, low = np.zeros((len(raw), size), dtype=np.int64), 0, 0
    for width in WIDTHS[bits]:
        length = size * width // 8
        for place in range(size):
            byte = raw[:, start + place % length].astype(np.int64)
            codes[:, place] |= (byte >> (place // length * width)) % 2**width << low
        start, low = start + length, low + width
    return codes


def regions(numel: int, setting: Setting, roundoff: float) -> list[int]:
    """Return the bytes of codes, of each number and of pivots, without the padding."""
    blocks, size = places(numel, setting).shape
    itemsize = 8 if roundoff == DOUBLE else {"fp32": 4, "bf16": 2, "pow2": 1}[setting.stored]
    count = {"static": 0, "dual": 2}.get(setting.scale, 1) + setting.offset
    codes = blocks * size * grid_of(setting.grid, setting.block).bits // 8
    return [codes, *[blocks * itemsize] * count, *([blocks] if setting.rotation == "pivot" else [])]


def read(wire: np.ndarray, numel: int, setting: Setting, roundoff: float) -> Coded:
    """Read the bytes of a row: codes, numbers, pivots, each from a multiple of 128 bytes on."""
    blocks, size = places(numel, setting).shape
    parts, start = [], 0
    for length in regions(numel, setting, roundoff):
        parts.append(wire[start : start + length])
        start += -(-length // 128) * 128
    assert start == len(wire), "padding"
    bits = grid_of(setting.grid, setting.block).bits
    codes = unpacked(parts.pop(0).reshape(blocks, size * bits // 8), size, bits)
    pivots = parts.pop().astype(np.int64) if setting.rotation == "pivot" else None
    return Coded(codes, [_number(part, setting.stored, roundoff) for part in parts], pivots)


def _number(raw: np.ndarray, stored: str, roundoff: float) -> np.ndarray:
    if roundoff == DOUBLE:
        return raw.copy().view("<f8")
    if stored == "fp32":
        return raw.copy().view("<f4").astype(np.float64)
    if stored == "bf16":
        return (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.where(raw == 0, 0.0, np.ldexp(1.0, raw.astype(np.int64) - 127))


def noise(blocks: np.ndarray, seed: int, salt: tuple[int, ...] = ()) -> np.ndarray:
    """Return noise in [0, 1) for ``[blocks, size]``.

    It is a hash of seed, salt, position and the bfloat16 bits of the block's values, in whole
    numbers modulo 2^32.
    """
    whole, key = 2**32, 0
    for number in (seed, seed // whole, *salt):
        key = int(_lowbias32(np.array((key + number * 0x9E3779B1 + 1) % whole, dtype=object)))
    with np.errstate(over="ignore"):
        bits = blocks.astype(np.float32).view(np.uint32).astype(object)
    bits = (bits + 0x7FFF + bits // 2**16 % 2) % whole // 2**16
    bits = bits - (bits >= 2**15) * 2**16
    inside = np.arange(blocks.shape[1], dtype=object)
    terms = bits + (inside + 1) * 0x9E3779B1
    digest = (terms * (2 * terms + 1)).sum(axis=1)
    start = digest + np.arange(len(blocks), dtype=object) * 0x2C1B3C6D + key
    number = _lowbias32((start[:, None] + inside * 0x85EBCA6B) % whole)
    return (number // 2**8).astype(np.float64) / 2**24


def _lowbias32(number: np.ndarray) -> np.ndarray:
    number = (number ^ (number // 2**16)) * 0x7FEB352D % 2**32
    number = (number ^ (number // 2**15)) * 0x846CA68B % 2**32
    return number ^ (number // 2**16)


def verify(
    x: np.ndarray,
    wire: np.ndarray,
    decoded: np.ndarray,
    setting: Setting,
    roundoff: float,
    limit: float,
) -> None:
    """Assert that a wire and its decoded values are right for a flat row of finite values.

    Each number of a block is compared with the one made from the block, and from the numbers and
    codes before it on the wire. Each code is compared with the cell of its value divided by those
    numbers, and each decoded value with the level of its code. ``roundoff`` is that of the
    arithmetic. ``limit`` is the largest number of the tensor's dtype, at which values are clipped.
    """
    grid = grid_of(setting.grid, setting.block)
    smallest_normal, smallest = SMALLEST[roundoff]
    got = read(wire, len(x), setting, roundoff)
    blocks = blocks_of(x, setting)
    if not blocks.size:
        return
    size = blocks.shape[1]
    width = (setting.width or setting.block) if setting.rotation else 1
    t, pivots = forward(blocks, setting)
    if pivots is not None:
        assert (got.pivots == pivots).all(), "pivots"
    # Two sums of about sqrt(width) numbers each, with a generous bound.
    blur = (8 * math.sqrt(width) * roundoff * np.abs(blocks).max(axis=1) + width * smallest) * (
        width > 1
    ) + 2 * smallest
    eps = (32 + 2 * math.sqrt(size)) * roundoff + 2 * grid.precision
    numbers = list(got.numbers)
    if setting.offset:
        middle = t.min(axis=1) / 2 + t.max(axis=1) / 2
        low, high = (
            stored_nearest(middle + by * (blur + eps * np.abs(middle)), setting.stored, roundoff)
            for by in (-1, 1)
        )
        actual = numbers.pop(0)
        assert ((low <= actual) & (actual <= high)).all(), "middle"
        t = t - actual[:, None]
        blur = blur + 2 * roundoff * (np.abs(t).max(axis=1) + np.abs(actual))
    if setting.scale == "static":
        low = high = np.full(len(t), setting.static)
    elif setting.scale == "dual":
        rms = [root_mean_square(t, roundoff) * (1 + by * eps) + by * blur for by in (-1, 1)]
        assert (np.maximum(rms[0], smallest_normal) <= numbers[0]).all(), (
            "root mean square too small"
        )
        assert (numbers[0] <= np.maximum(rms[1], smallest_normal)).all(), (
            "root mean square too large"
        )
        t, blur = t / numbers[0][:, None], blur / numbers[0]
    if setting.scale != "static":
        low, high = (
            _first_scale(t, replace_dual(setting), grid, roundoff, shift=by * blur, more=by * eps)
            for by in (-1, 1)
        )
        if setting.scale != "lsq":
            assert ((low <= numbers[-1]) & (numbers[-1] <= high)).all(), (
                f"scale {numbers[-1]} not in {low} ... {high}"
            )
            low = high = numbers[-1]
    ranks = grid.rank[got.codes]
    assert (ranks >= 0).all(), "codes without a level"
    _codes_fit(t, ranks, low, high, blur, eps, setting, grid, blocks)
    if setting.scale == "lsq":
        q = grid.levels[ranks]
        norm = np.maximum((q * q).sum(axis=1), 1e-300)
        part = q / norm[:, None]  # so that no sum of the largest float64 values overflows
        off = (
            np.abs(t * part).sum(axis=1) * 2 * eps + np.abs(part).sum(axis=1) * blur + 4 * smallest
        )
        best = (t * part).sum(axis=1)
        flat = (q * q).sum(axis=1) == 0
        low, high = (
            stored_nearest(
                np.where(flat, edge, np.clip(best + by * off, 0, 2 * edge * (1 + eps))),
                setting.stored,
                roundoff,
            )
            for by, edge in ((-1, low), (1, high))
        )
        assert ((low <= numbers[-1]) & (numbers[-1] <= high)).all(), (
            f"least squares: {numbers[-1]} not in {low} ... {high}"
        )
    with np.errstate(over="ignore"):
        values = _scaled(got, setting, grid)
        want = backward(values, pivots, setting)
        rounding = eps * np.abs(values) + 4 * smallest
        if setting.offset:
            rounding = rounding + 4 * roundoff * np.abs(got.numbers[0])[:, None]
        if width > 1:
            summed = (
                np.abs(values).reshape(len(values), -1, width).sum(axis=2)
                * 8
                * math.sqrt(width)
                * roundoff
            )
            # The sums are of numbers divided by their count: each loses up to a subnormal, which is
            # multiplied again.
            rounding = (
                rounding.reshape(len(values), -1, width).sum(axis=2)
                + summed
                + 4 * width * width * smallest
            )
            rounding = np.repeat(rounding, width, axis=1)
        if (
            pivots is not None
        ):  # a value and the bound of its error are swapped; all get the largest
            rounding = np.broadcast_to(rounding.max(axis=1, keepdims=True), rounding.shape)
        want, rounding = row_of(want, len(x), setting), row_of(rounding, len(x), setting)
    off = np.abs(decoded - np.clip(want, -limit, limit))
    assert (off <= rounding + 4 * roundoff * np.abs(want)).all(), (
        f"a value off by {off.max()} at {off.argmax()}"
    )


def replace_dual(setting: Setting) -> Setting:
    """Return the setting of the second of two scales, an absmax one."""
    return (
        Setting(setting.grid, "absmax", block=setting.block) if setting.scale == "dual" else setting
    )


def _codes_fit(
    t: np.ndarray,
    ranks: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    blur: np.ndarray,
    eps: float,
    setting: Setting,
    grid: Grid,
    blocks: np.ndarray,
) -> None:
    """Check that each value divided by a scale between ``low`` and ``high`` lies in the cell of its
    code, up to rounding."""
    some = high > 0
    t, ranks, blur = t[some], ranks[some], blur[some]
    divisor = np.stack([np.maximum(low[some], high[some] * 1e-9), high[some]])[:, :, None]
    with np.errstate(over="ignore"):
        ratios = np.clip(t / divisor, -1e300, 1e300)
        slack = np.abs(ratios).max(axis=0) * eps + blur[:, None] / divisor[0]
    least, most = ratios.min(axis=0) - slack, ratios.max(axis=0) + slack
    if setting.seed is not None:
        whole = grid.levels[ranks]
        added = noise(blocks, setting.seed)[some]
        bottom, top = (
            np.clip(np.floor(edge + added), -grid.largest, grid.largest) for edge in (least, most)
        )
        assert ((bottom <= whole) & (whole <= top)).all(), "stochastic codes"
        return
    fences = np.concatenate([[-np.inf], grid.edges, [np.inf]])
    slip = grid.precision * np.abs(grid.levels[ranks])
    wrong = (most < fences[ranks] - slip) | (least > fences[ranks + 1] + slip)
    assert not wrong.any(), (
        f"{wrong.sum()} codes of values outside their cells, such as {np.argwhere(wrong)[0]}"
    )


# --- theory ---------------------------------------------------------------------------------------


def gaussian_error(grid: Grid, block: int, points: int = 200) -> float:
    """Return the root mean square error of a unit Gaussian with absmax scales.

    It is ``sqrt(E[step^2] / 12)``, by numeric integration. ``P(max|x| < m) = (2 Phi(m) - 1)^block``
    gives the scales. An error is uniform within the cell of its code, and the largest value of a
    block has none. A Hadamard transform of a Gaussian is Gaussian, so this holds for rotated codecs
    as well.
    """
    normal = statistics.NormalDist()
    shares = (np.arange(points) + 0.5) / points
    x = np.array([normal.inv_cdf((1 + share) / 2) for share in (np.arange(4000) + 0.5) / 4000])
    fences = np.concatenate([[-grid.largest], grid.edges, [grid.largest]])
    total = 0.0
    for share in shares:
        scale = normal.inv_cdf((1 + share ** (1 / block)) / 2) / grid.largest
        inside = x[x < scale * grid.largest]
        above = np.clip(np.searchsorted(fences, inside / scale), 1, len(fences) - 1)
        total += np.mean(((fences[above] - fences[above - 1]) * scale) ** 2 / 12)
    return float(np.sqrt(total / points * (block - 1) / block))
