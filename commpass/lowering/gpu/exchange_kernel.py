"""The text of a kernel that carries out an all_reduce, all_gather or reduce_scatter: encode,
signal, wait, read what the peers have encoded, and sum or store it.

Like every other kernel, it is composed of the tile functions of a codec's parts. All ranks run the
same kernel over memory that each can access (symmetric memory): ``exchange_sizes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.noise import Stochastic
from commpass.lowering.chain import Divide, Enter, Leave
from commpass.lowering.gpu import generate, parts, supported, wires
from commpass.lowering.gpu.exchange_sizes import WARPS, Exchange, values_in_a_byte
from commpass.lowering.gpu.source import Kernel, constant, function_text, indent, of_text
from commpass.lowering.gpu.tiles import exchange as tiles
from commpass.lowering.gpu.tiles.exchange import SLOTS

SPINS = 1 << 30
"""Polls of the signals before a program gives up: nine minutes at half a microsecond each."""
GROUPS = {32: 8, 64: 2}
"""Ranks whose wires are decoded in one step of a loop, by the lanes of a warp: so a compiler can
start to read several before it needs the first. With 4, addresses spill on AMD; of tiles of MIXED
values, also with 2."""
SHARDED = 2
"""The same of tiles of MIXED values on NVIDIA, if each rank sums a shard: with 8, Triton 3.9
spilled 8 bytes on sm_90. The loop is unrolled: all reads still start before the first is used."""

NUMBERS = (
    *("rank", "count", "numel", "blocks", "tiles", "slots"),
    *("counters_at", "late_at", "wires_at", "wire_bytes", "buffer_bytes"),
)
"""Integer arguments of every kernel: this rank; ``Exchange.count``, and the values of a row; blocks
and tiles of a row; the programs that the memory has room for; the offsets of the counters, of the
ranks that did not arrive and of the wires; the bytes of a wire, and of a buffer."""


@lru_cache(maxsize=256)
def kernel(exchange: Exchange) -> Kernel:
    """Return the kernel of an exchange (``unsupported_reason`` must be ""). Its grid is
    ``(programs, rows)``."""
    writer = _writer(exchange)
    lines = [*_first_lines(writer), *(_LINES[exchange.name](writer)), *_last_lines()]
    pointers = {"peers": "*i64", "input": writer.values, "output": writer.values}
    signature = pointers | dict.fromkeys((*NUMBERS, *writer.places), "i32")
    constants = {
        **{"SIZE": writer.size, "PARTS": writer.split, "BLOCKS": exchange.blocks},
        **{"RANKS": exchange.ranks, "WIDTH": _power(exchange.ranks), "SPINS": SPINS},
        **{"CASTS": True, "FP8": True, "STORES": exchange.lanes == 32},
    }
    text = function_text(exchange.name, [*signature, *map(constant, constants)], lines)
    text = "\n\n@triton.jit\n".join([*writer.functions, text])
    known = {**generate.KNOWN, **vars(tiles)}
    fuses = isinstance(writer.codec.grid, CompandedGrid)
    source = of_text(exchange.name, text, known)
    return Kernel(
        source=source, signature=signature, constants=constants, num_warps=WARPS, fuses=fuses
    )


def _power(ranks: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (ranks - 1).bit_length()


@dataclass(frozen=True)
class _Writer:
    """What the lines of a kernel are composed of: functions that precede it, and their calls.
    ``places`` are the optional arguments: offsets of the regions of a wire."""

    exchange: Exchange
    codec: BlockCodec
    size: int
    split: int
    functions: tuple[str, ...]
    encoded: str
    loaded: str
    held: int
    decoded: str
    decoded_sum: str
    places: tuple[str, ...]

    @property
    def values(self) -> str:
        return supported.TYPES[self.exchange.dtype]

    @property
    def enter_lines(self) -> list[str]:
        return generate.lines_of(Enter(self.exchange.domain), self.size)

    @property
    def leave_lines(self) -> list[str]:
        return generate.lines_of(Leave(self.exchange.domain), self.size)

    @property
    def mean_lines(self) -> list[str]:
        by = Divide(float(self.exchange.ranks))
        return generate.lines_of(by, self.size) if self.exchange.op == "avg" else []


def _writer(exchange: Exchange) -> _Writer:
    codec = exchange.block_codec
    size = codec.layout.size(exchange.length)
    encode = wires.Body(size, codec.layout)
    ends = wires.write_encode(codec, encode)
    encode.add("if tile == 0:", *(f"    filled({place}, {length})" for place, length in ends))
    given = ["x", "output_stride", "row", "tile", "block", "inside", "block_mask", "blocks"]
    given += list(encode.signature)
    constants = ["FP8", "PARTS"]
    function = function_text("encoded", [*given, *map(constant, constants)], encode.lines)
    called = [{"output_stride": "wire_bytes", "output": "wire"}.get(name, name) for name in given]
    decode = wires.Body(size, codec.layout)
    loaded = wires.write_load(codec, decode)
    decoded = wires.write_decode_of_held(codec, exchange.dtype, decode, "decoded")
    decoded_sum = wires.write_decode_of_held(codec, torch.float32, decode, "decoded_sum")
    functions = decode.functions if exchange.phases > 1 else decode.functions[:2]
    keys = ["key"] if isinstance(codec.rounding, Stochastic) else []
    sums = ["sums_at", *(f"sum_{key}" for key in keys)] if exchange.phases > 1 else []
    places = [name for name in encode.signature if name.endswith("_at")]
    return _Writer(
        exchange,
        codec,
        size,
        values_in_a_byte(codec),
        (function, *functions),
        f"encoded({', '.join([*called, *constants])})",
        loaded.replace("input_", "output_"),  # a wire has one layout for reads and writes
        len(wires.load_lines(codec, decode)[0]),
        decoded.replace("CUT", "True"),
        decoded_sum.replace("CUT", "True"),
        (*places, *keys, *sums),
    )


def _first_lines(writer: _Writer) -> list[str]:
    return [
        "program = tl.program_id(0)",
        "programs = tl.num_programs(0)",
        "shard = tl.program_id(1)",
        "row = tl.program_id(2)  # 0, as a number of the card's",
        "own = shard * programs + program",
        *generate.INSIDE,
        "mine = memory_of(peers, rank)",
        "epoch = tl.load(number_at(mine, counters_at + own * 4)) + 1",
        "late = tl.load(number_at(mine, late_at))",
        "wires = wires_at + (epoch & 1) * buffer_bytes",
    ]


def _last_lines() -> list[str]:
    return [
        "count_call(mine, counters_at, own, programs * tl.num_programs(1), slots, epoch)",
        "if late != 0:",
        '    tl.atomic_or(number_at(mine, late_at), late, sem="relaxed")',
    ]


_PADDED = ("at = place + shard * numel", "value_mask = (place < numel) & (at < count)")
"""Lines that find the values of a wire in the tensor, of which only the last shard is padded."""
_SHARD = ("at = place + shard * count", "value_mask = place < count")
"""The same lines if each shard is padded."""
_WHOLE = ("at = place", "value_mask = place < count")
"""The same lines if the tensor is one shard."""


def _loop(writer: _Writer, lines: Sequence[str], places: tuple[str, str] = _PADDED) -> list[str]:
    """Return lines that loop over this program's tiles of a wire; ``at`` indexes the tensor."""
    return [
        "for tile in range(program, tiles, programs):",
        *indent(
            [
                "block = (tile * BLOCKS + tl.arange(0, BLOCKS))[:, None, None]",
                f"place = {parts.place(writer.codec.layout, writer.size)}",
                "block_mask = block < blocks",
                *places,
                *lines,
            ]
        ),
    ]


def _signal_line(phase: int, peers: str = "peers", ranks: str = "RANKS, WIDTH") -> str:
    """Return the line that signals all ranks, or those of which ``peers`` are the addresses."""
    return f"signal({peers}, {_slots(phase)}, rank, epoch, {ranks}, STORES)"


def _wait_line(phase: int) -> str:
    """Return the line that waits for the signals of this program on all ranks."""
    return f"late = wait(mine, {_slots(phase)}, epoch, RANKS, WIDTH, SPINS)"


def _slots(phase: int) -> str:
    """Return where the signals of this program begin."""
    first = f"({phase} * slots + own)" if phase else "own"
    return f"{first} * {SLOTS * 4}"


def _load_lines(writer: _Writer) -> list[str]:
    values = parts.split(writer.codec.layout, "tl.load(input + at, mask=value_mask, other=0.0)")
    return [f"x = to_float32({values}, FP8)", *writer.enter_lines]


def _sum_lines(writer: _Writer, at: str) -> list[str]:
    """Return lines that compute ``x``, the sum of what all ranks have encoded, in rank order."""
    ranks, lanes = writer.exchange.ranks, writer.exchange.lanes
    group = GROUPS[lanes]
    if writer.exchange.is_mixed and lanes == 64:
        group = 1
    elif writer.exchange.is_mixed and writer.exchange.rows > 1:
        group = SHARDED
    whole, left = divmod(ranks, group)
    lines = _group_lines(writer, at, "0", min(ranks, group))
    if whole > 1:
        lines.append(f"for first in range({group}, {whole * group}, {group}):")
        lines += indent(_group_lines(writer, at, "first", group, "x"))
    if whole and left:
        lines += _group_lines(writer, at, str(whole * group), left, "x")
    return [*lines, *writer.mean_lines]


def _group_lines(writer: _Writer, at: str, first: str, count: int, before: str = "") -> list[str]:
    """Return lines that add ``count`` ranks from ``first`` on to ``before``, if it is given."""
    decoded = _decode_lines(writer, at, first, count)
    sums = [f"x = x + x_{one}" if one or before else "x = x_0" for one in range(count)]
    if not writer.exchange.is_mixed:
        return [*decoded, *sums]
    each = len(decoded) // count
    return [line for one in range(count) for line in (*decoded[each * one :][:each], sums[one])]


def _decode_lines(writer: _Writer, at: str, first: str, count: int) -> list[str]:
    """Return lines that load what ``count`` ranks from ``first`` on have encoded, and decode it
    then. Each decode needs all codes: a compiler that saves registers would else load some of them
    after the first have arrived, and wait twice. Tiles of MIXED values are decoded one by one, for
    lack of registers."""
    loads, decodes = [], []
    for one in range(count):
        loads.append(f"wire = region(memory_of(peers, {first} + {one}), {at})")
        loads.append(f"held_{one} = {writer.loaded}")
        decodes.append(f"x_{one} = {writer.decoded.replace('held', f'held_{one}')}")
    if writer.exchange.is_mixed or count == 1:
        return [line for one in range(count) for line in (*loads[2 * one :][:2], decodes[one])]
    together = ["codes = held_0[0]"]
    together += [f"codes = bytes_of_both(codes, held_{one}[0], STORES)" for one in range(1, count)]
    for one in range(count):
        rest = "".join(f", held_{one}[{place}]" for place in range(1, writer.held))
        codes = f"after_all(held_{one}[0], codes, peers, STORES)"
        together.append(f"held_{one} = ({codes}{rest},)")
    return [*loads, *together, *decodes]


def _gather_lines(writer: _Writer, at: str) -> list[str]:
    """Return lines that store what each rank has encoded in its place. Of tiles of MIXED values,
    the registers hold one at a time."""
    ranks = writer.exchange.ranks
    group = 1 if writer.exchange.is_mixed else GROUPS[writer.exchange.lanes]
    whole, left = divmod(ranks, group)
    lines = []
    if whole:
        lines.append(f"for number in range({whole}):")
        lines += indent([f"first = number * {group}", *_stored_lines(writer, at, "first", group)])
    if left:
        lines += _stored_lines(writer, at, str(whole * group), left)
    return lines


def _stored_lines(writer: _Writer, at: str, first: str, count: int) -> list[str]:
    lines = _decode_lines(writer, at, first, count)
    for one in range(count):
        lines += [f"x = x_{one}", *_store_lines(writer, f"at + ({first} + {one}) * count")]
    return lines


def _store_lines(writer: _Writer, at: str = "at") -> list[str]:
    """Return the lines that store the result; NaN if a rank did not arrive."""
    store = f"store_values_{writer.values.removeprefix('*')}"
    return [
        *writer.leave_lines,
        'x = tl.where(late == 0, x, float("nan"))',
        f"{store}(output + {at}, {parts.join(writer.codec.layout, 'x')}, value_mask, CASTS)",
    ]


def _one_shot(writer: _Writer) -> list[str]:
    """Every rank encodes all its values, and sums those of all ranks."""
    encode = [*_load_lines(writer), "wire = region(mine, wires)", writer.encoded]
    return [
        "if late == 0:",
        *indent([*_loop(writer, encode), _signal_line(0), _wait_line(0)]),
        *_loop(writer, [*_sum_lines(writer, "wires"), *_store_lines(writer)]),
    ]


def _two_shot(writer: _Writer) -> list[str]:
    """Each program has tiles of one shard. The rank of the shard sums them and encodes the sum;
    every rank decodes it."""
    first = writer.encoded.replace(", row,", ", shard + row,")
    encode = [*_load_lines(writer), "wire = region(mine, wires)", first]
    inside = parts.split(writer.codec.layout, "place < numel")
    again = [] if isinstance(writer.codec.layout, Flat) else [f"x = tl.where({inside}, x, 0.0)"]
    last = writer.encoded.replace(", key,", ", sum_key,")
    sums = [
        *_sum_lines(writer, "wires + rank * wire_bytes"),
        *again,
        "wire = region(mine, sums)",
        last,
    ]
    decode = [
        "wire = region(memory_of(peers, shard), sums)",
        f"held = {writer.loaded}",
        f"x = {writer.decoded_sum}",
        *_store_lines(writer),
    ]
    own = ["if late == 0:", *indent([*_loop(writer, sums), _signal_line(1)])]
    return [
        "sums = sums_at + (epoch & 1) * buffer_bytes",
        "if late == 0:",
        *indent([*_loop(writer, encode), _signal_line(0, "peers + shard", "1, 1")]),
        "if (late == 0) & (shard == rank):",
        *indent([_wait_line(0), *own]),
        "if late == 0:",
        *indent(
            [
                f"missing = wait(mine, {_slots(1)} + shard * 4, epoch, 1, 1, SPINS)",
                "late = missing << shard",
            ]
        ),
        *_loop(writer, decode),
    ]


def _reduce_scatter(writer: _Writer) -> list[str]:
    """Each program has tiles of one shard. The rank of the shard sums them."""
    first = writer.encoded.replace(", row,", ", shard + row,")
    encode = [*_load_lines(writer), "wire = region(mine, wires)", first]
    sums = [*_sum_lines(writer, "wires + rank * wire_bytes"), *_store_lines(writer)]
    return [
        "if late == 0:",
        *indent([*_loop(writer, encode, _SHARD), _signal_line(0, "peers + shard", "1, 1")]),
        "if shard == rank:",
        *indent(["if late == 0:", *indent([_wait_line(0)]), *_loop(writer, sums, _WHOLE)]),
    ]


def _all_gather(writer: _Writer) -> list[str]:
    """Every rank encodes all its values, and stores those of all ranks."""
    encode = [*_load_lines(writer), "wire = region(mine, wires)", writer.encoded]
    return [
        "if late == 0:",
        *indent([*_loop(writer, encode, _WHOLE), _signal_line(0), _wait_line(0)]),
        *_loop(writer, _gather_lines(writer, "wires"), _WHOLE),
    ]


_LINES = {
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
"""The lines of kernels by ``Exchange.name``."""
