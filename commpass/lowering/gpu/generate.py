"""Generate the text of a Triton kernel from a chain, composed of the tile functions of its parts.

A program processes some blocks of a row as a tile ``[BLOCKS, PARTS, SIZE / PARTS]`` of float32
values. All values stay in registers between the first and the last step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import ModuleType
from typing import Any

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import VALUES
from commpass.codecs.block.grids import CompandedGrid, IntGrid, MiniFloatGrid, TableGrid
from commpass.codecs.block.layouts import Flat, Layout
from commpass.codecs.block.noise import Stochastic
from commpass.codecs.block.packing import widths
from commpass.codecs.block.scales import ITEMSIZE, Static, TwoLevel, row_numbers
from commpass.codecs.block.transforms import NoTransform
from commpass.codecs.dispatch import by_type
from commpass.codecs.rows import is_power_of_two
from commpass.lowering.chain import (
    BY_WIDTH,
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Normalize,
    Scale,
    Shift,
    Step,
    Store,
    Sum,
    dtype_after,
)
from commpass.lowering.gpu import parts
from commpass.lowering.gpu.source import Kernel, constant, function_text, indent, of_text
from commpass.lowering.gpu.tiles import (
    grids,
    layouts,
    noise,
    numbers,
    packing,
    scales,
    transforms,
)

TILE = 2048
"""The most values of a tile: 64 per thread of a warp."""
DECODED = 1024
"""Bytes of codes in a tile that is decoded, 32 for each thread."""
WARPS = 1
"""Warps of a program. A block is within one warp, so its peak is found without a barrier."""
LARGEST_BLOCK = 4096
LARGEST_NORM = 32768
"""The most values of a norm: a program holds all of them, ``TILE`` per warp."""
SUMMED = 512
"""Bytes of codes in a tile of a sum, 16 for each thread. With fewer values than ``TILE``, more
registers hold what was loaded, and more programs run at once."""
HELD = 8192
"""Bytes of codes that a warp loads before it decodes the first, in 64 registers per thread, of at
most ``RANKS`` rows. A sum waits for memory once for so many, and is a loop over groups of them."""
RANKS = 8
PROGRAMS = 512
"""The fewest programs of a sum, about four for each multiprocessor; rows of fewer have smaller
tiles, down to ``LEAST`` values, or 8 per thread of a warp."""
LEAST = 256
CONSTANTS = ("SIZE", "PARTS", "BLOCKS", "CASTS", "FP8", "CHECKS")
"""Compile-time arguments of kernels.

- ``SIZE``: values of a block.
- ``PARTS``: parts of a block, which is the number of values that share a byte.
- ``BLOCKS``: blocks of a tile.
- ``CASTS``, ``FP8``: whether the GPU's casts to 16 and to 8 bits give the required bits.
- ``CHECKS``: whether sums check for values that must be clamped to the largest number. The usual
  cost is that without the check.
"""
INSIDE = (
    "inside = tl.arange(0, SIZE // PARTS)[None, None, :]",
    "inside += tl.arange(0, PARTS)[None, :, None] * (SIZE // PARTS)",
)
"""Lines that number the values of a block, parts of a byte apart."""
LARGEST_GRID = 65535
"""The most programs along the second and the third axis of a grid."""
ROW_LINES = (
    "row = tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)",
    "row = tl.minimum(row, rows - 1)",
)
"""Lines that number the row of a program. Programs beyond the last row write it again."""
STRIDE = "tl.cast(input_stride, tl.int64)"
"""The stride of a wire's rows: Triton passes a small one in 32 bits, which a product may exceed."""
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""Triton's names of pointers to values."""


@dataclass(frozen=True, kw_only=True)
class Generated(Kernel):
    """The kernel of a chain. One program processes ``blocks`` blocks of one row; the grid is
    ``(programs of a row, y, z)`` with at least as many programs ``y * z`` as rows."""

    chain: Chain
    blocks: int


MOST = 2**31 - 2**16
"""The most values, or bytes of a wire, of a row: kernels count them in 32 bits, including those of
a tile that extends beyond the row."""


# --- supported chains -----------------------------------------------------------------------------


def unsupported_reason(chain: Chain, numel: int) -> str:
    """Return why no kernel can be generated for rows of ``numel`` values, or "" if one can."""
    codecs = codecs_of(chain)
    if not codecs:
        return "nothing is encoded or decoded"
    for codec in codecs:
        if why := _unsupported_codec(codec, numel):
            return f"{codec.spec}: {why}"
    sizes = {_block_codec(codec).layout.size(numel) for codec in codecs}
    layouts_ = {_block_codec(codec).layout for codec in codecs}
    if len(sizes) > 1 or len(layouts_) > 1:
        return "codecs of different blocks: no tile holds whole blocks of both"
    counted = {"values": numel}
    counted["bytes of a wire"] = max(codec.wire_bytes(numel, torch.float32) for codec in codecs)
    if what := next((name for name, many in counted.items() if many >= MOST), ""):
        return f"{counted[what]:,} {what} in a row: kernels count to 2^31"
    dtypes = {
        chain.input_dtype,
        *(s.dtype for s in chain.steps if isinstance(s, (Cast, Add, Decode))),
    }
    if unknown := dtypes - {*TYPES, torch.uint8}:
        return f"{str(unknown.pop()).removeprefix('torch.')} values: kernels compute in float32"
    if why := _unsupported_norm(chain, numel, next(iter(sizes)), next(iter(layouts_))):
        return why
    if needs_row_peaks(chain) and any(_has_effect(step) for step in chain.steps[:-1]):
        return f"{codecs[-1].spec}: the peak of a row must be known before its values are read"
    for step in chain.steps:
        width = step.domain.width if isinstance(step, (Enter, Leave)) else 1
        if next(iter(sizes)) % width:
            return f"a domain of width {width} in blocks of {next(iter(sizes))}"
    return ""


def _unsupported_norm(chain: Chain, numel: int, size: int, layout: Layout) -> str:
    if not chain.width:
        return ""
    if len({step.width for step in chain.steps if isinstance(step, BY_WIDTH)}) > 1:
        return "norms of different widths"
    if chain.width % size or numel % chain.width or not isinstance(layout, Flat):
        return f"norms of {chain.width} values begin inside blocks of {size}"
    if chain.width > LARGEST_NORM:
        return f"norms of {chain.width} values: more than a tile of {LARGEST_NORM}"
    return ""


def needs_row_peaks(chain: Chain) -> bool:
    """Whether the kernel of a chain takes the peak of each row, float32 ``[rows]``, as its last
    input: to encode with a scale for each row."""
    return chain.encodes is not None and bool(row_numbers(_block_codec(chain.encodes.codec).scale))


def _has_effect(step: Step) -> bool:
    """Whether a step may change values. A cast to float32 widens them."""
    if isinstance(step, Cast):
        return step.dtype != torch.float32
    return not (isinstance(step, (Enter, Leave)) and step.domain == VALUES)


def codecs_of(chain: Chain) -> list[Codec]:
    """Return the codecs that a chain decodes and encodes."""
    return [step.codec for step in chain.steps if isinstance(step, (Decode, Encode))]


def _unsupported_codec(codec: Codec, numel: int) -> str:
    if not isinstance(codec, BlockCodec):
        return "no block codec, and kernels are made of the parts of one"
    size = codec.layout.size(numel)
    if not is_power_of_two(size):
        return f"blocks of {size} values: kernels take powers of two"
    if size > LARGEST_BLOCK:
        return f"blocks of {size} values: more than a tile of {LARGEST_BLOCK}"
    if size * codec.grid.bits % 8 or size < 8:
        return f"blocks of {size} values"
    return ""


def _block_codec(codec: Codec) -> BlockCodec:
    assert isinstance(codec, BlockCodec)
    return codec


# --- kernel text ----------------------------------------------------------------------------------


@dataclass
class Body:
    """The lines of an entry function, and the arguments that they use."""

    size: int
    layout: Layout
    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    signature: dict[str, str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    results: Iterator[int] = field(default_factory=count)

    def add(self, *lines: str) -> None:
        self.lines += lines

    def add_argument(self, name: str, declaration: str) -> str:
        """Add an argument of the entry and return its name."""
        self.signature[name] = declaration
        return name

    def load(self, address: str) -> str:
        """Return an expression that reads a tile of values, as float32."""
        values = f"tl.load({address}, mask=value_mask, other=0.0)"
        return f"to_float32({parts.split(self.layout, values)})"

    def store(self, dtype: torch.dtype, address: str) -> None:
        """Add a line that writes ``x`` in a dtype."""
        function = f"store_values_{_short(dtype)}"
        self.add(f"{function}({address}, {parts.join(self.layout, 'x')}, value_mask, CASTS)")


@lru_cache(maxsize=1024)
def kernel(chain: Chain, numel: int = 1 << 20, lanes: int = 32) -> Generated:
    """Return the kernel of a chain for rows of ``numel`` values (``unsupported_reason`` must return
    "") on a GPU whose warps have ``lanes`` threads.

    It depends on ``numel`` if the size of a block does, or if the last block is not full.
    """
    layout = _block_codec(codecs_of(chain)[0]).layout
    size = layout.size(numel)
    body = Body(size, layout)
    body.add(*ROW_LINES)
    norm_blocks = chain.width // size
    if norm_blocks:  # a program has the blocks of one norm, and idle lanes up to a power of two
        body.add("lane = tl.arange(0, BLOCKS)[:, None, None]")
        body.add(f"block = tl.program_id(0) * {norm_blocks} + lane")
    else:
        body.add("block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None, None]")
    body.add(*INSIDE)
    body.add(f"place = {parts.place(layout, size)}")
    body.add("value_mask = place < numel", "block_mask = block < blocks")
    if norm_blocks:
        body.add(f"value_mask = value_mask & (lane < {norm_blocks})")
        body.add(f"block_mask = block_mask & (lane < {norm_blocks})")
        body.add(f"along = place - tl.program_id(0) * {chain.width}")
    if chain.decodes is None:
        body.add_argument("input", TYPES[chain.input_dtype])
        body.add(f"x = {body.load('input + row * input_stride + place')}")
    else:
        body.add_argument("input", "*u8")
    dtype = chain.input_dtype if chain.decodes is None else torch.float32
    for step in chain.steps:
        if isinstance(step, Encode) and chain.decodes and layout.blocks(numel) * size != numel:
            padded = f"tl.where({parts.split(layout, 'value_mask')}, x, 0.0)"
            body.add(f"x = {padded}")  # clear the padding of the last block
        if isinstance(step, Store):
            _write_store(dtype, body)
            continue
        dtype = dtype_after(step, dtype)
        _write(step, body, chain)
        if isinstance(step, (Scale, Shift)) and step is not chain.steps[-1]:
            body.add(*([] if dtype == torch.float32 else [_through(dtype)]))
    if chain.encodes is None:
        body.add_argument("output", TYPES[dtype])
        body.store(dtype, "output + row * output_stride + place")
    for name in ("input_stride", "output_stride"):
        body.add_argument(name, "i64")
    for name in ("numel", "blocks", "rows"):
        body.add_argument(name, "i32")
    blocks = norm_blocks or max(1, _tile(chain, numel, lanes) // size)
    padded_blocks = 1 << (blocks - 1).bit_length()
    split = max(8 // widths(_block_codec(each).grid.bits)[0] for each in codecs_of(chain))
    grids_ = [_block_codec(each).grid for each in codecs_of(chain)]
    fuses = any(isinstance(grid, CompandedGrid) for grid in grids_)
    entry = _name(chain)
    text = _entry(entry, body)
    constants = dict(zip(CONSTANTS, (size, split, padded_blocks, True, True, True), strict=True))
    return Generated(
        chain=chain,
        source=of_text(entry, text, KNOWN),
        signature=body.signature,
        constants=constants,
        blocks=blocks,
        num_warps=max(WARPS, padded_blocks * size // TILE) if norm_blocks else WARPS,
        fuses=fuses,
    )


def _tile(chain: Chain, numel: int, lanes: int) -> int:
    """Return the values of a tile, as many per thread as were measured as the fastest on an H200.
    AMD GPUs have warps of 64 threads."""
    codec = _block_codec(codecs_of(chain)[-1])
    times = lanes // 32
    if chain.encodes is not None and not _is_sum(chain):
        many = isinstance(codec.grid, (TableGrid, MiniFloatGrid)) or codec.offset  # registers
        return min(TILE // 2 * times, TILE) if many else TILE
    if not _is_sum(chain):
        return _power_below(DECODED * times * 8 // codec.grid.bits)
    tile = min(_summed(chain) * times, TILE)
    while tile > LEAST and numel < PROGRAMS * tile:
        tile //= 2
    return tile


def _power_below(values: int) -> int:
    return min(1 << (values.bit_length() - 1), TILE)


def _summed(chain: Chain) -> int:
    """Return the values of a tile of a long row of a sum, a power of two."""
    assert chain.decodes is not None
    codec = _block_codec(chain.decodes.codec)
    return _power_below(SUMMED * 8 // codec.grid.bits // (2 if codec.offset else 1))


def _is_sum(chain: Chain) -> bool:
    return any(isinstance(step, Sum) for step in chain.steps)


def _entry(name: str, body: Body) -> str:
    pointers = [each for each in body.signature if body.signature[each].startswith("*")]
    # The outputs come last of the pointers: the result, then the further results.
    order = sorted(pointers, key=lambda each: 2 * each.startswith("further") + (each == "output"))
    order += [each for each in body.signature if each not in pointers]
    body.signature = {each: body.signature[each] for each in order}
    functions = "".join(f"{text}\n\n@triton.jit\n" for text in body.functions)
    return functions + function_text(name, [*order, *map(constant, CONSTANTS)], body.lines)


UNNAMED = (Cast, Store, Scale, Shift)
"""Steps that the names of kernels omit."""


def _name(chain: Chain) -> str:
    named = (step for step in chain.steps if not isinstance(step, UNNAMED))
    words = ("norm" if isinstance(s, Normalize) else type(s).__name__.lower() for s in named)
    return "_".join(words)


# --- steps ----------------------------------------------------------------------------------------


def lines_of(step: Divide | Enter | Leave, size: int) -> list[str]:
    """Return the lines of a step without further inputs; they update ``x``."""
    body = Body(size, Flat(size))
    _write(step, body, Chain(torch.float32, (step,)))
    return body.lines


@by_type
def _write(step: Step, body: Body, chain: Chain) -> None:
    """Write the lines of a step, which updates ``x``."""
    raise NotImplementedError(step)


@_write.register
def _encode(step: Encode, body: Body, chain: Chain) -> None:
    ends = write_encode(_block_codec(step.codec), body)
    fills = (f"    filled({region}, {length})" for region, length in ends)
    body.add("if tl.program_id(0) == 0:", *fills)


def write_encode(codec: BlockCodec, body: Body) -> list[tuple[str, str]]:
    """Write ``x`` to the wire ``output``. Return its regions and their lengths, after which padding
    must still be written."""
    body.add_argument("output", "*u8")
    if isinstance(codec.rounding, Stochastic):
        body.add_argument("key", "i32")
    if row_numbers(codec.scale):
        peaks = body.add_argument("row_peaks", "*fp32")
        body.add(f"row_peak = load_row({peaks} + row, block)")
    body.add(*encode_lines(codec))
    body.add("wire = output + row * output_stride")
    for low, width, first, length in parts.packs(codec.grid.bits, body.size):
        row = body.size * codec.grid.bits // 8
        body.add(f"bytes = block * {row} + {first} + tl.arange(0, {length})[None, None, :]")
        codes = f"packed(codes, {low}, {width}, {codec.grid.bits}).to(tl.uint8)"
        body.add(f"tl.store(wire + bytes, {codes}, mask=block_mask)")
    ends = [("wire", f"blocks * {body.size * codec.grid.bits // 8}")]
    for name, stored, at in _regions(codec, body, "output"):
        itemsize = ITEMSIZE[stored]
        body.add(f"store_{stored}(wire + {at} + block * {itemsize}, {name}, block_mask)")
        ends.append((f"wire + {at}", f"blocks * {itemsize}"))
    for name, at in _row_regions(codec, body, "output"):
        body.add(f"store_row(wire + {at}, {name}, block)")
        ends.append((f"wire + {at}", "4"))
    if codec.transform.side:
        at = body.add_argument("output_side_at", "i32")
        body.add(f"tl.store(wire + {at} + block, side.to(tl.uint8), mask=block_mask)")
        ends.append((f"wire + {at}", "blocks"))
    return ends


def encode_lines(codec: BlockCodec) -> list[str]:
    """Return lines from ``x`` to ``codes``, ``number_i`` (in storage format) and ``side``."""
    grid, scale = codec.grid, codec.scale
    lines = list(parts.forward(codec.transform))
    if codec.offset:
        lines += [f"middle = nearest_{codec.offset.stored}(middle_of(x))", "x = x - middle"]
    rounding = "nearest" if isinstance(scale, TwoLevel) else "up"
    if scale.numbers:
        lines += ["peak = peak_of(x)", *parts.measure(scale, grid)]
        last = f"number_{scale.numbers - 1}"
        if not grid.has_zero:
            lines.append(f"{last} = without_zero({last}, peak, {grid.largest!r})")
        for i in range(scale.numbers):
            number = f"propagate_nonfinite(number_{i}, peak)"
            lines.append(f"number_{i} = {rounding}_{scale.stored}({number})")
    lines += parts.divide(scale, grid)
    lines.append(f"noise = {parts.noise(codec.rounding)}")
    lines += parts.encode(grid, parts.never_exceeds(scale))
    return lines + parts.refit(scale, grid)


@_write.register
def _decode(step: Decode, body: Body, chain: Chain) -> None:
    codec = _block_codec(step.codec)
    if _is_sum(chain):
        _write_sum(codec, step.dtype, body, chain)
        return
    call = write_decode(codec, step.dtype, body, "decoded")
    body.add("wire = input + row * input_stride", f"x = {call}")


def _write_sum(codec: BlockCodec, dtype: torch.dtype, body: Body, chain: Chain) -> None:
    """Write lines that set ``x`` to the sum of rows, in rank order. It starts with the first row,
    not with zero, to keep minus zero."""
    add = _write_group(codec, dtype, body)
    ranks, group = chain.ranks, ranks_of_group(chain, body.size)
    whole, left = divmod(ranks, group)
    body.add(f"wire = input + row * {ranks} * input_stride")
    body.add(f"x = {add('None', 'wire', min(ranks, group))}")
    if whole > 1:
        body.add(f"for first in range({group}, {whole * group}, {group}):")
        body.add(f"    x = {add('x', f'(wire + first * {STRIDE})', group)}")
    if whole and left:
        body.add(f"x = {add('x', f'(wire + {whole * group} * {STRIDE})', left)}")


def ranks_of_group(chain: Chain, size: int) -> int:
    """Return how many rows of a sum, in blocks of ``size`` values, are loaded before the first is
    decoded."""
    if chain.decodes is None:
        return 1
    codec = _block_codec(chain.decodes.codec)
    values = TILE if chain.width else max(_summed(chain), size)
    parts_ = len(widths(codec.grid.bits))
    # These need more registers to decode: with eight ranks, up to 5,104 bytes were spilled.
    most = 2 if codec.offset else RANKS // 2 // parts_ if parts_ > 1 else RANKS
    held = HELD // 2 if chain.width else HELD  # a norm holds its residual and weight, too
    return max(min(held * 8 // (values * codec.grid.bits), most, chain.ranks), 1)


def _write_group(
    codec: BlockCodec, dtype: torch.dtype, body: Body
) -> Callable[[str, str, int], str]:
    """Write a function that adds rows to ``x``; return a function from ``x``, the wire of the first
    row and their number to a call.

    Values that must be clamped are rare, and clamping costs a third of the time of a rank. There
    are two branches, of which the usual one does not clamp.
    """
    names, loads, arguments = _loads(codec, body)
    load = _write_function(body, "loaded", arguments, loads, f"({', '.join(names)},)")
    load = load.replace("wire", f"wire + one * {STRIDE}", 1)
    unpack = [f"{', '.join(names)}, = held", *decode_lines(codec, dtype, body.size)]
    decode = _write_function(body, "decoded", ["held", "inside"], unpack, "x")
    fused = _write_fused(codec, body, names) if parts.has_exact_products(codec) else ""
    factors = [names.index(name) for name in names if name.startswith(("number", "row"))]
    lines = ["held = ()", "for one in tl.static_range(COUNT):", f"    held += ({load},)"]
    if "CUT" in decode and factors:
        product = " * ".join(f"held[one][{place}]" for place in factors)
        limit = torch.finfo(dtype).max / (2 * codec.grid.largest * codec.transform.sums)
        lines += [
            "far = False",
            "if CHECKS:",
            f"    most = {product.replace('one', '0')}",
            "    for one in tl.static_range(1, COUNT):",
            f"        most = tl.maximum(most, {product})",
            "    most = most_of_all(most)",
            # Whether a maximum ignores NaN differs between GPUs.
            f"    far = (most > {limit!r}) | (most != most)",
            "if far:",
            *indent(
                _add_lines(decode.replace("CUT", "True"), load.replace("one", "rank"), "range")
            ),
            "else:",
            *indent(_add_lines(decode.replace("CUT", "False"), "held[one]", fused=fused)),
        ]
    else:
        lines += _add_lines(decode.replace("CUT", "True"), "held[one]")
    arguments = ["x", "wire", "input_stride", "inside", *arguments[1:]]
    call = _write_function(body, "added", arguments, lines, "total")
    return lambda x, wire, count: call.replace("(x, wire", f"({x}, {wire}", 1).replace(
        "COUNT", str(count)
    )


def _write_fused(codec: BlockCodec, body: Body, names: list[str]) -> str:
    """Write a function that adds a decoded row to a total without rounding the products, which
    float32 holds exactly: the bits are the same. Return a call."""
    *lines, product = decode_lines(codec, torch.float32, body.size, clamp=False)
    assert product == "x = x * number_0", product
    lines = [f"{', '.join(names)}, = held", *lines]
    result = "tl.fma(x, tl.broadcast_to(number_0, x.shape), total)"
    return _write_function(body, "added_one", ["total", "held", "inside"], lines, result)


def _add_lines(
    decode: str, loaded: str, loop: str = "tl.static_range", fused: str = ""
) -> list[str]:
    """Return lines that add rows to ``x``, unless that is None; ``loaded`` is what was loaded of a
    row. Triton requires that a name has the same type in both branches, so loops have others.

    ``fused`` is a call that adds a row to ``total`` instead.
    """
    number = "one" if loop == "tl.static_range" else "rank"
    row = decode.replace("held", loaded)
    first = row.replace(f"{number} *", "0 *").replace(f"[{number}]", "[0]")
    added = fused.replace("held", loaded)
    onto = added.replace("total", "x", 1).replace(f"[{number}]", "[0]") or f"x + {first}"
    return [
        "if x is None:",
        f"    total = {first}",
        "else:",
        f"    total = {onto}",
        f"for {number} in {loop}(1, COUNT):",
        f"    total = {added or f'total + {row}'}",
    ]


def write_decode(codec: BlockCodec, dtype: torch.dtype, body: Body, name: str) -> str:
    """Write a function from ``wire`` to ``x``, and return a call of it."""
    _, loads, arguments = _loads(codec, body)
    lines = [*loads, *decode_lines(codec, dtype, body.size)]
    arguments = [*arguments[:2], "inside", *arguments[2:]]
    return _write_function(body, name, arguments, lines, "x").replace("CUT", "True")


def _write_function(
    body: Body, name: str, arguments: list[str], lines: list[str], result: str
) -> str:
    """Write a function of ``arguments`` and of the constants that its lines use; return a call."""
    names = ("COUNT", "CHECKS", "FP8", "PARTS", "CUT")
    constants = [name for name in names if any(name in line for line in lines)]
    header = ", ".join([*arguments, *(f"{each}: tl.constexpr" for each in constants)])
    text = textwrap.indent("\n".join(lines), "    ")
    body.functions.append(f"def {name}({header}):\n{text}\n    return {result}\n")
    return f"{name}({', '.join([*arguments, *constants])})"


def _loads(codec: BlockCodec, body: Body) -> tuple[list[str], list[str], list[str]]:
    """Return the names of what a wire holds of a tile, lines that load it, and their arguments."""
    names, lines, arguments = [], [], ["wire", "block", "block_mask"]
    for number, (_, _, first, length) in enumerate(parts.packs(codec.grid.bits, body.size)):
        place = f"block * {body.size * codec.grid.bits // 8} + {first}"
        place += f" + tl.arange(0, {length})[None, None, :]"
        names.append(f"raw_{number}")
        lines.append(f"raw_{number} = tl.load(wire + {place}, mask=block_mask, other=0)")
    for name, stored, at in _regions(codec, body, "input"):
        place = f"wire + {at} + block * {ITEMSIZE[stored]}"
        names.append(name)
        lines.append(f"{name} = load_{stored}({place}, block_mask)")
        arguments.append(at)
    for name, at in _row_regions(codec, body, "input"):
        names.append(name)
        lines.append(f"{name} = load_row(wire + {at}, block)")
        arguments.append(at)
    if codec.transform.side:
        at = body.add_argument("input_side_at", "i32")
        names.append("side")
        lines.append(f"side = tl.load(wire + {at} + block, mask=block_mask, other=0)")
        arguments.append(at)
    return names, lines, arguments


def decode_lines(
    codec: BlockCodec, dtype: torch.dtype, size: int, *, clamp: bool = True
) -> list[str]:
    """Return lines from what ``_loads`` loads to ``x``, as in ``Codec.decode_rows``; without
    ``clamp``, ``x`` may exceed the largest number of the dtype."""
    lines, bits, sums = [], codec.grid.bits, codec.transform.sums
    in_bytes = codec.grid == IntGrid(4)  # decoded without numbers of single codes
    for number, (low, width, _, _) in enumerate([] if in_bytes else parts.packs(bits, size)):
        part = f"unpacked(raw_{number}.to(tl.int32), {width}, PARTS)"
        lines.append(f"codes = {part}" if low == 0 else f"codes |= {part} << {low}")
    if sums > 1:  # divide here, not later: see BlockCodec.decode_parts
        lines += [f"middle = middle * {1 / sums!r}"] if codec.offset else []
        lines += [f"part_0 = number_0 * {1 / sums!r}"] if codec.scale.numbers else []
    decoded = "decode_int4(raw_0, FP8)" if in_bytes else parts.decode(codec.grid, "codes")
    lines += [
        f"x = {decoded}",
        *parts.multiply(codec.scale, "part_0" if sums > 1 else "number_0"),
    ]
    lines += ["x = x + middle"] if codec.offset else []
    lines += ["side = side.to(tl.int32)"] if codec.transform.side else []
    lines += parts.inverse(codec.transform, float(sums))
    return lines + (_clamp_lines(codec, torch.finfo(dtype).max) if clamp else [])


def _clamp_lines(codec: BlockCodec, limit: float) -> list[str]:
    """Return lines that clamp ``x`` to the largest number of its dtype, if a scale can exceed
    it."""
    most = codec.grid.largest * codec.transform.sums
    if isinstance(codec.scale, Static) and not codec.offset and codec.scale.value * most <= limit:
        return []
    return ["if CUT:", f"    x = clamp_to(x, {limit!r})"]


def _regions(codec: BlockCodec, body: Body, of: str) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers sent for each block: their names, storage formats, and the arguments for
    the offsets of their regions."""
    if codec.offset:
        yield "middle", codec.offset.stored, body.add_argument(f"{of}_middle_at", "i32")
    for i in range(codec.scale.numbers):
        yield f"number_{i}", codec.scale.stored, body.add_argument(f"{of}_number_{i}_at", "i32")


def _row_regions(codec: BlockCodec, body: Body, of: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers sent for each row: their names, and the arguments for the offsets of their
    regions."""
    for i in range(row_numbers(codec.scale)):
        yield f"row_{i}", body.add_argument(f"{of}_row_{i}_at", "i32")


@_write.register
def _sum(step: Sum, body: Body, chain: Chain) -> None:
    """Do nothing: the preceding decode writes the sum."""
    if chain.decodes is None:
        raise NotImplementedError("a sum of values that were not decoded")


@_write.register
def _divide(step: Divide, body: Body, chain: Chain) -> None:
    body.add(f"x = divided(x, {float(step.by)!r})")


@_write.register
def _enter(step: Enter, body: Body, chain: Chain) -> None:
    body.add(*parts.forward(step.domain.transform))


@_write.register
def _leave(step: Leave, body: Body, chain: Chain) -> None:
    if step.domain == VALUES or isinstance(step.domain.transform, NoTransform):
        return
    width = step.domain.width
    body.add(f"x = x * {1 / width!r}", *parts.inverse(step.domain.transform, float(width)))


@_write.register
def _cast(step: Cast, body: Body, chain: Chain) -> None:
    if step.dtype != torch.float32 and step is not chain.steps[-1]:
        body.add(f"x = through_{_short(step.dtype)}(x, CASTS)")


@_write.register
def _add(step: Add, body: Body, chain: Chain) -> None:
    name = body.add_argument(f"added_{next(body.numbers)}", TYPES[step.dtype])
    body.add(f"x = x + {body.load(f'{name} + row * output_stride + place')}")
    if step is not chain.steps[-1]:
        body.add(f"x = through_{_short(step.dtype)}(x, CASTS)")


def _write_store(dtype: torch.dtype, body: Body) -> None:
    name = body.add_argument(f"further_{next(body.results)}", TYPES[dtype])
    body.store(dtype, f"{name} + row * numel + place")


@_write.register
def _normalize(step: Normalize, body: Body, chain: Chain) -> None:
    body.add("x = tl.where(value_mask, x, 0.0)")
    if step.centered:
        body.add(f"mean = tl.sum(x) / {float(step.width)!r}")
        body.add("x = tl.where(value_mask, x - mean, 0.0)")
    body.add(f"rsqrt = tl.rsqrt(tl.sum(x * x) / {float(step.width)!r} + {step.eps!r})")
    body.add("x = x * rsqrt")
    for statistic in step.saved:
        name = body.add_argument(f"further_{next(body.results)}", TYPES[torch.float32])
        body.add(
            f"tl.store({name} + row * (numel // {step.width}) + tl.program_id(0), {statistic})"
        )


@_write.register
def _scale(step: Scale, body: Body, chain: Chain) -> None:
    offset = f" + {step.offset!r}" if step.offset else ""
    body.add(f"x = x * ({_row_expression(step.weight, body)}{offset})")


@_write.register
def _shift(step: Shift, body: Body, chain: Chain) -> None:
    body.add(f"x = x + {_row_expression(step.bias, body)}")


def _row_expression(dtype: torch.dtype, body: Body) -> str:
    """Return the values of a weight or bias, the next input."""
    name = body.add_argument(f"added_{next(body.numbers)}", TYPES[dtype])
    return body.load(f"{name} + along")


def _through(dtype: torch.dtype) -> str:
    return f"x = through_{_short(dtype)}(x, CASTS)"


def _short(dtype: torch.dtype) -> str:
    return TYPES[dtype].removeprefix("*")


def _tiles(*modules: ModuleType) -> dict[str, Any]:
    """Return the tile functions and numbers of modules by name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "is_tile", False) or (isinstance(value, (int, float)) and name.isupper())
    }


KNOWN = _tiles(grids, layouts, noise, numbers, packing, scales, transforms)
"""Names that the text of a generated kernel may use."""
