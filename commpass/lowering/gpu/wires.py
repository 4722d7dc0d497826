"""The text of kernels that writes and reads wires: values to codes, and codes to values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.layouts import Layout
from commpass.codecs.block.noise import Stochastic
from commpass.codecs.block.scales import Absmax, Static, TwoLevel, row_numbers
from commpass.codecs.block.storage import ITEMSIZE
from commpass.codecs.block.transforms import Hadamard
from commpass.lowering.gpu import grid_parts, parts
from commpass.lowering.gpu.supported import TYPES


@dataclass
class Body:
    """The lines of an entry function, and the arguments that they use."""

    size: int
    layout: Layout
    group: parts.Group | None = None
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
        return f"to_float32({parts.split(self.layout, values)}, FP8)"

    def store(self, dtype: torch.dtype, address: str) -> None:
        """Add a line that writes ``x`` in a dtype."""
        function = f"store_values_{short_name(dtype)}"
        self.add(f"{function}({address}, {parts.join(self.layout, 'x')}, value_mask, CASTS)")


def write_encode(codec: BlockCodec, body: Body) -> list[tuple[str, str]]:
    """Write ``x`` to the wire ``output``. Return its regions and their lengths, after which padding
    must still be written."""
    body.add_argument("output", "*u8")
    if isinstance(codec.rounding, Stochastic):
        body.add_argument("key", "i32")
    if row_numbers(codec.scale):
        peaks = body.add_argument("row_peaks", "*fp32")
        body.add(f"row_peak = load_row({peaks} + row, block)")
    body.add(*encode_lines(codec, body.group))
    body.add("wire = output + row * output_stride")
    for low, width, first, length in parts.packs(codec.grid.bits, body.size):
        row = body.size * codec.grid.bits // 8
        body.add(f"bytes = block * {row} + {first} + tl.arange(0, {length})[None, None, :]")
        codes = f"packed(codes, {low}, {width}, {codec.grid.bits})"
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


def encode_lines(codec: BlockCodec, group: parts.Group | None = None) -> list[str]:
    """Return lines from ``x`` to ``codes``, ``number_i`` (in storage format) and ``side``. A group
    is the form in which a rotated tile is encoded, if the registers allow it."""
    grid, scale = codec.grid, codec.scale
    transform, groups = codec.transform, False
    if group and isinstance(transform, Hadamard) and _encodes_grouped(codec):
        lines, groups = parts.rotated_and_peak(transform, group), True
    else:
        lines = list(parts.forward(transform))
    if codec.offset:
        lines += [f"middle = nearest_{codec.offset.stored}(middle_of(x))", "x = x - middle"]
    rounding = "nearest" if isinstance(scale, TwoLevel) else "up"
    last = f"number_{scale.numbers - 1}"
    zeros = [] if grid.has_zero else [f"{last} = without_zero({last}, peak, {grid.largest!r})"]
    if scale.numbers:
        lines += [] if groups else ["peak = peak_of(x)"]
        lines += parts.measure(scale, grid)
        lines += [] if isinstance(scale, Absmax) else zeros
        for i in range(scale.numbers):
            number = f"{rounding}_{scale.stored}(number_{i})"
            lines.append(f"number_{i} = propagate_nonfinite({number}, peak)")
    lines += parts.divide(scale, grid)
    lines.append(f"noise = {parts.noise(codec.rounding)}")
    lines += grid_parts.encode(grid, parts.never_exceeds(scale))
    lines += parts.refit(scale, grid)
    lines += zeros if isinstance(scale, Absmax) else []  # what is divided by is not zero
    if groups:
        lines += [f"number_{i} = number_of_block(number_{i})" for i in range(scale.numbers)]
    return lines


def _encodes_grouped(codec: BlockCodec) -> bool:
    """Whether all lines from the peaks to the bytes of a codec work on a grouped tile."""
    nearest = not isinstance(codec.rounding, Stochastic)  # noise has the form of ``inside``
    return codec.scale.numbers > 0 and codec.offset is None and nearest


def write_load(codec: BlockCodec, body: Body) -> str:
    """Write a function from ``wire`` to what it holds of a tile, and return a call of it."""
    names, loads, arguments = load_lines(codec, body)
    return write_function(body, "loaded", arguments, loads, f"({', '.join(names)},)")


def write_decode_of_held(codec: BlockCodec, dtype: torch.dtype, body: Body, name: str) -> str:
    """Write a function from ``held``, which ``write_load`` returns, to ``x``; return a call."""
    names, _, _ = load_lines(codec, body)
    lines = [f"{', '.join(names)}, = held", *decode_lines(codec, dtype, body.size)]
    return write_function(body, name, ["held", "inside"], lines, "x")


def write_decode(codec: BlockCodec, dtype: torch.dtype, body: Body, name: str) -> str:
    """Write a function from ``wire`` to ``x``, and return a call of it."""
    _, loads, arguments = load_lines(codec, body)
    lines = [*loads, *decode_lines(codec, dtype, body.size, group=body.group)]
    arguments = [*arguments[:2], "inside", *arguments[2:]]
    return write_function(body, name, arguments, lines, "x").replace("CUT", "True")


def write_function(
    body: Body, name: str, arguments: list[str], lines: list[str], result: str
) -> str:
    """Write a function of ``arguments`` and of the constants that its lines use; return a call."""
    names = ("COUNT", "CHECKS", "FP8", "PARTS", "CUT")
    constants = [name for name in names if any(name in line for line in lines)]
    header = ", ".join([*arguments, *(f"{each}: tl.constexpr" for each in constants)])
    text = textwrap.indent("\n".join(lines), "    ")
    body.functions.append(f"def {name}({header}):\n{text}\n    return {result}\n")
    return f"{name}({', '.join([*arguments, *constants])})"


def load_lines(codec: BlockCodec, body: Body) -> tuple[list[str], list[str], list[str]]:
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


def load_number_lines(codec: BlockCodec, body: Body, mask: str) -> list[str]:
    """Return lines that load the numbers of ``block`` from ``wire``, of a codec without numbers for
    rows and without side data."""
    return [
        f"{name} = load_{stored}(wire + {at} + block * {ITEMSIZE[stored]}, {mask})"
        for name, stored, at in _regions(codec, body, "input")
    ]


def decode_lines(
    codec: BlockCodec,
    dtype: torch.dtype,
    size: int,
    *,
    clamp: bool = True,
    group: parts.Group | None = None,
) -> list[str]:
    """Return lines from what ``load_lines`` loads to ``x``, as in ``Codec.decode_rows``; without
    ``clamp``, ``x`` may exceed the largest number of the dtype."""
    lines, bits = list[str](), codec.grid.bits
    decoded = grid_parts.decode_bytes(codec.grid, "raw_0")
    for number, (low, width, _, _) in enumerate([] if decoded else parts.packs(bits, size)):
        part = f"unpacked(raw_{number}.to(tl.int32), {width}, PARTS)"
        lines.append(f"codes = {part}" if low == 0 else f"codes |= {part} << {low}")
    decoded = decoded or grid_parts.decode(codec.grid, "codes")
    return lines + value_lines(codec, dtype, decoded, clamp=clamp, group=group)


def value_lines(
    codec: BlockCodec,
    dtype: torch.dtype,
    decoded: str,
    *,
    clamp: bool = True,
    group: parts.Group | None = None,
) -> list[str]:
    """Return lines from ``decoded``, an expression of numbers in grid units, to the values ``x``,
    with the numbers and side data that ``load_lines`` loads."""
    lines, sums = list[str](), codec.transform.sums
    times, first = grid_parts.output_scale(codec.grid), "number_0"
    if sums > 1:  # divide here, not later: see BlockCodec.decode_parts
        lines += [f"middle = middle * {1 / sums!r}"] if codec.offset else []
    if codec.scale.numbers:
        factor = repr(1 / sums)
        if times != 1:
            factor = f"({times / sums!r} if FP8 else {factor})"
        if factor != "1.0":
            lines, first = [*lines, f"part_0 = number_0 * {factor}"], "part_0"
    elif times != 1:
        decoded = f"of_companded({decoded}, {times!r}, FP8)"
    lines += [f"x = {decoded}", *parts.multiply(codec.scale, first)]
    lines += ["x = x + middle"] if codec.offset else []
    lines += ["side = side.to(tl.int32)"] if codec.transform.side else []
    lines += parts.inverse(codec.transform, float(sums), group)
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


def short_name(dtype: torch.dtype) -> str:
    return TYPES[dtype].removeprefix("*")
