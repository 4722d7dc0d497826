"""Kernels of the lossless codec ``exponent``: their order, and the buffers between them. The tiles
are in ``tiles/exponent_*.py``.

Encode and decode are two kernels each, since the start of a chunk's strings is known only when all
chunks before it have been counted. All sizes follow from shapes; nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from commpass.codecs.codec import UNIT
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.exponent.floats import FORMS, LANES, LINE
from commpass.codecs.exponent.ladder import BINS, Ladder
from commpass.lowering.gpu.source import Source, load, of_function
from commpass.lowering.gpu.tiles.exponent_decode import exponent_count, exponent_join
from commpass.lowering.gpu.tiles.exponent_encode import exponent_place, exponent_split
from commpass.lowering.gpu.tiles.exponent_floats import BFLOAT16, FLOAT16, FLOAT32

MOST = 1 << 31
"""Rows of this many values or more are not supported: word counts would exceed 32 bits."""
NUMBERS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


@dataclass(frozen=True)
class Tiling:
    """How a row is divided among programs. It does not affect the wire.

    ``columns`` is the number of columns of 32 values per program, a power of two from 32 on. With
    one warp and 16 bytes for each access of a thread, that is 4 per thread. ``group`` is the number
    of tiles whose sums are added together, a power of two.
    """

    columns: int = 128
    warps: int = 1
    group: int = 128


TILING = Tiling()


@dataclass(frozen=True)
class Buffer:
    """A tensor that kernels pass to each other."""

    name: str
    dtype: torch.dtype
    numel: int
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments in order: names and types of tensors, then integers;
    ``constants`` by name, and the number of programs (``grid``)."""

    source: Source
    tensors: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, int], ...]
    grid: int
    warps: int

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument, as named by Triton."""
        fixed = {name: "constexpr" for name, _ in self.constants}
        return {**dict(self.tensors), **{name: "i32" for name, _ in self.numbers}, **fixed}


@dataclass(frozen=True)
class Kernels:
    """Kernels that turn ``source`` into ``wire``, or ``wire`` into ``out``; rows are contiguous."""

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]


def unsupported_reason(numel: int, dtype: torch.dtype) -> str | None:
    """Return why there are no kernels for such a row, or None if there are."""
    if dtype not in FORMS:
        return f"{dtype} travels as it is"
    if numel < LINE:
        return f"{numel} values travel as they are: {LINE} are coded together"
    if numel >= MOST:
        return f"a row of {numel} values has more than {MOST - 1}"
    return None


@lru_cache(maxsize=1024)
def encoding(
    coder: ExponentCodec,
    count: int,
    numel: int,
    dtype: torch.dtype,
    halves: bool = False,
    tiling: Tiling = TILING,
) -> Kernels:
    """Return kernels that turn ``source [count, numel]`` into ``wire [count, wire_bytes]``.

    ``source`` is passed as int32 words, or as int16 if ``halves``, which a 16-bit row needs if it
    does not begin or end with a whole word. ``wire`` is int32 words.
    """
    sizes = _sizes(coder, count, numel, dtype, tiling)
    known = _known(coder, dtype, halves, tiling)
    tensors = (
        ("source", "*i16" if halves else "*i32"),
        ("wire", "*i32"),
        ("sums", "*i64"),
        *_counters(sizes),
    )
    numbers = _numbers(sizes, numel * dtype.itemsize // (2 if halves else 4))
    raw = FORMS[dtype].exponent_bits - coder.ladder.planes
    strings = sizes.count * sizes.tiles * tiling.columns * raw // 2
    return Kernels(
        (Buffer("sums", torch.int64, strings), *_buffers(sizes)),
        tuple(
            _launch(entry, tensors, numbers, known, sizes)
            for entry in (exponent_split, exponent_place)
        ),
    )


@lru_cache(maxsize=1024)
def decoding(
    coder: ExponentCodec,
    count: int,
    numel: int,
    dtype: torch.dtype,
    halves: bool = False,
    tiling: Tiling = TILING,
) -> Kernels:
    """Return kernels that turn ``wire [count, wire_bytes]`` into ``out [count, numel]``; arguments
    are as for ``encoding``."""
    sizes = _sizes(coder, count, numel, dtype, tiling)
    known = _known(coder, dtype, halves, tiling)
    wire = ("wire", "*i32")
    numbers = _numbers(sizes, numel * dtype.itemsize // (2 if halves else 4))
    out = ("out", "*i16" if halves else "*i32")
    return Kernels(
        _buffers(sizes),
        (
            _launch(exponent_count, (wire, *_counters(sizes)), numbers[1:], known, sizes),
            _launch(exponent_join, (wire, out, *_counters(sizes)), numbers, known, sizes),
        ),
    )


def encode_rows(
    coder: ExponentCodec, rows: Tensor, tiling: Tiling = TILING, *, graph: bool = False
) -> Tensor:
    """Return the wire of rows ``[count, numel]``, the same bytes as ``coder.encode_rows``.

    Rows are CUDA tensors, or CPU tensors if Triton interprets. With ``graph``, the calls are traced
    for Inductor, which launches the kernels itself.
    """
    count, numel = rows.shape
    if unsupported_reason(numel, rows.dtype) is not None or count == 0:
        return coder.encode_rows(rows)
    rows = rows.contiguous()
    halves = _needs_halves(rows)
    size = coder.wire_bytes(numel, rows.dtype)
    wire = torch.empty((count, size), dtype=torch.uint8, device=rows.device)
    source = rows.view(torch.int16 if halves else torch.int32)
    _run(
        encoding(coder, count, numel, rows.dtype, halves, tiling),
        {"source": source, "wire": wire.view(torch.int32)},
        graph,
    )
    return wire


def decode_rows(
    coder: ExponentCodec,
    wire: Tensor,
    numel: int,
    dtype: torch.dtype,
    tiling: Tiling = TILING,
    *,
    graph: bool = False,
) -> Tensor:
    """Decode ``wire [count, wire_bytes]`` to rows ``[count, numel]`` in ``dtype``; ``graph`` is as
    for ``encode_rows``."""
    count = wire.shape[0]
    if unsupported_reason(numel, dtype) is not None or count == 0:
        return coder.decode_rows(wire, numel, dtype)
    wire = wire.contiguous()
    if wire.storage_offset() % 4:
        wire = wire.clone()
    rows = torch.empty((count, numel), dtype=dtype, device=wire.device)
    halves = _needs_halves(rows)
    _run(
        decoding(coder, count, numel, dtype, halves, tiling),
        {"wire": wire.view(torch.int32), "out": rows.view(torch.int16 if halves else torch.int32)},
        graph,
    )
    return rows


def _needs_halves(rows: Tensor) -> bool:
    """Whether contiguous rows cannot be viewed as 32-bit words."""
    width = rows.dtype.itemsize
    return width == 2 and (rows.shape[1] % 2 == 1 or rows.storage_offset() % 2 == 1)


def _run(kernels: Kernels, tensors: dict[str, Tensor], graph: bool) -> None:
    device = next(iter(tensors.values())).device
    for buffer in kernels.buffers:
        make = torch.zeros if buffer.zeroed else torch.empty
        tensors[buffer.name] = make(buffer.numel, dtype=buffer.dtype, device=device)
    for launch in kernels.launches:
        function = load(launch.source)
        (wrap_triton(function) if graph else function)[(launch.grid,)](
            *(tensors[name] for name, _ in launch.tensors),
            *(number for _, number in launch.numbers),
            **dict(launch.constants),
            num_warps=launch.warps,
        )


@dataclass(frozen=True)
class _Sizes:
    count: int
    columns: int
    static: int
    tiles: int
    groups: int
    tiling: Tiling

    @property
    def sums(self) -> torch.dtype:
        """The dtype of sums over groups: at most 12 words of 16 bits per column."""
        return torch.int32 if self.columns < 1 << 27 else torch.int64


def _sizes(
    coder: ExponentCodec, count: int, numel: int, dtype: torch.dtype, tiling: Tiling
) -> _Sizes:
    reason = unsupported_reason(numel, dtype)
    assert reason is None, reason
    columns = numel // LINE * (LINE // LANES)
    tiles = -(-columns // tiling.columns)
    groups = -(-tiles // tiling.group)
    return _Sizes(count, columns, coder.static_bytes(numel, dtype) // UNIT, tiles, groups, tiling)


def _buffers(sizes: _Sizes) -> tuple[Buffer, ...]:
    each, group = sizes.count, sizes.tiling.group
    return (
        Buffer("tallies", torch.int32, each * sizes.groups * group),
        Buffer("groups", sizes.sums, each * -(-sizes.groups // group) * group, zeroed=True),
    )


def _counters(sizes: _Sizes) -> tuple[tuple[str, str], ...]:
    return ("tallies", "*i32"), ("groups", "*i32" if sizes.sums == torch.int32 else "*i64")


def _numbers(sizes: _Sizes, length: int) -> tuple[tuple[str, int], ...]:
    return (
        ("pitch", length),
        ("quads", sizes.columns // 4),
        ("static", sizes.static),
        ("tiles", sizes.tiles),
        ("many_groups", sizes.groups),
    )


def _known(
    coder: ExponentCodec, dtype: torch.dtype, halves: bool, tiling: Tiling
) -> dict[str, int]:
    """Return the compile-time arguments of the kernels of a codec and dtype."""
    form, ladder = FORMS[dtype], coder.ladder
    modes = range(ladder.modes + 1)
    low, fields = ladder.steps[-1].low, (*ladder.fields[:-1], form.exponent_bits)
    # The bits that a zero saves in each mode, and that the exponent loses whose code it takes.
    named = [ladder.gains([0] * BINS, 1, form.exponent_bits)[m * ladder.starts] for m in modes]
    lost = [each - fields[-1] * ladder.names_zero for each in named]
    moved = [0, *(table[-1] for table in ladder.offsets[: ladder.modes])]
    return {
        "FORM": NUMBERS[dtype],
        "PACKED": form.packed_length,
        "REST": form.rest_words,
        "EXPONENT": form.exponent_bits,
        "STEPS": len(ladder.steps),
        "BITS": sum(step.bits << (4 * number) for number, step in enumerate(ladder.steps)),
        "TABLES": _tables(ladder),
        "FIELDS": sum(bits << (4 * step) for step, bits in enumerate(fields)),
        "WINDOWS": sum(
            ((step.low - low) | (step.high - low) << 4) << (8 * number)
            for number, step in enumerate(ladder.steps)
        ),
        "MODES": ladder.modes,
        "NAMED": _fives(named),
        "LOST": _fives(lost),
        "MOVED": _fives(moved),
        "STARTS": ladder.starts,
        "BELOW": ladder.below,
        "HALVES": halves,
        "COLUMNS": tiling.columns,
        "GROUP": tiling.group,
    }


def _fives(numbers: Sequence[int]) -> int:
    """Pack numbers below 32 into one integer."""
    return sum(number << (5 * place) for place, number in enumerate(numbers))


def _tables(ladder: Ladder) -> int:
    """Pack the offsets of a ladder into one integer; see ``tiles/exponent_ladder.py``."""
    tables = 0
    for number, (step, table) in enumerate(zip(ladder.steps, ladder.offsets, strict=True)):
        assert len(table) == 1 << step.bits, "a code that names no exponent"
        assert step.bits <= 3, "more codes than have room"
        for code, offset in enumerate(table):
            tables |= offset << (32 * number + 4 * code)
    return tables


def _launch(
    entry: Any,
    tensors: tuple[tuple[str, str], ...],
    numbers: tuple[tuple[str, int], ...],
    known: Mapping[str, int],
    sizes: _Sizes,
) -> Launch:
    taken = entry.__code__.co_varnames[: entry.__code__.co_argcount]
    constants = tuple((name, value) for name, value in known.items() if name in taken)
    return Launch(
        _source(entry), tensors, numbers, constants, sizes.count * sizes.tiles, sizes.tiling.warps
    )


@lru_cache(maxsize=16)
def _source(entry: Any) -> Source:
    return of_function(entry)
