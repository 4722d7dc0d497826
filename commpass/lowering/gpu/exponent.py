"""Kernels of the lossless codec ``exponent``: their order, and the buffers between them. The tiles
are in ``tiles/exponent_*.py``.

Encode and decode are two kernels each, since the start of a chunk's strings is known only when all
chunks before it have been counted. All sizes follow from shapes; nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commpass.codecs.codec import UNIT
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.exponent.floats import FORMS, LANES, LINE
from commpass.codecs.exponent.ladder import BINS, Ladder
from commpass.lowering.gpu.call import Arguments, call_of, launch
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
    of tiles whose sums are added together, and ``placed`` of those whose strings one program moves;
    both are powers of two.
    """

    columns: int = 128
    warps: int = 1
    group: int = 128
    placed: int = 2


TILING = Tiling()


def unsupported_reason(numel: int, dtype: torch.dtype) -> str | None:
    """Return why there are no kernels for such a row, or None if there are."""
    if dtype not in FORMS:
        return f"{dtype} values are sent uncompressed"
    if numel < LINE:
        return f"{numel} values are sent uncompressed: {LINE} are coded together"
    if numel >= MOST:
        return f"a row of {numel} values has more than {MOST - 1}"
    return None


def encode_rows(
    codec: ExponentCodec, rows: Tensor, tiling: Tiling = TILING, *, graph: bool = False
) -> Tensor:
    """Return the wire of rows ``[count, numel]``: the used bytes of ``codec.encode_rows``.

    Rows are CUDA tensors, or CPU tensors if Triton interprets. With ``graph``, the calls are traced
    for Inductor, which launches the kernels itself.
    """
    count, numel = rows.shape
    if unsupported_reason(numel, rows.dtype) is not None or count == 0:
        return codec.encode_rows(rows)
    rows, sizes = rows.contiguous(), _sizes(codec, rows, tiling)
    size = codec.wire_bytes(numel, rows.dtype)
    wire = torch.empty((count, size), dtype=torch.uint8, device=rows.device)
    raw = FORMS[rows.dtype].exponent_bits - codec.ladder.planes
    strings = sizes.count * sizes.tiles * tiling.columns * raw
    sums = torch.empty(strings, dtype=torch.int32, device=rows.device)
    known = _known(codec, rows, wire, sizes, adds=True)
    known |= {"source": _as_integers(rows), "sums": sums}
    runs = sizes.count * -(-sizes.tiles // tiling.placed)
    _launch({exponent_split: sizes.count * sizes.tiles, exponent_place: runs}, known, sizes, graph)
    return wire


def decode_rows(
    codec: ExponentCodec,
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
        return codec.decode_rows(wire, numel, dtype)
    wire = wire.contiguous()
    if wire.storage_offset() % 4:
        wire = wire.clone()
    rows = torch.empty((count, numel), dtype=dtype, device=wire.device)
    sizes = _sizes(codec, rows, tiling)
    known = {"out": _as_integers(rows), **_known(codec, rows, wire, sizes)}
    each = {exponent_count: sizes.groups, exponent_join: sizes.tiles}
    programs = {entry: sizes.count * number for entry, number in each.items()}
    _launch(programs, known, sizes, graph)
    return rows


def _as_integers(rows: Tensor) -> Tensor:
    """View contiguous rows as 32-bit words, or as 16-bit ones if they do not begin or end with a
    whole word."""
    return rows.view(torch.int16 if _needs_halves(rows) else torch.int32)


def _needs_halves(rows: Tensor) -> bool:
    """Whether contiguous rows cannot be viewed as 32-bit words."""
    width = rows.dtype.itemsize
    return width == 2 and (rows.shape[1] % 2 == 1 or rows.storage_offset() % 2 == 1)


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


def _sizes(codec: ExponentCodec, rows: Tensor, tiling: Tiling) -> _Sizes:
    (count, numel), dtype = rows.shape, rows.dtype
    columns = numel // LINE * (LINE // LANES)
    tiles = -(-columns // tiling.columns)
    groups = -(-tiles // tiling.group)
    return _Sizes(count, columns, codec.static_bytes(numel, dtype) // UNIT, tiles, groups, tiling)


def _known(
    codec: ExponentCodec, rows: Tensor, wire: Tensor, sizes: _Sizes, adds: bool = False
) -> Arguments:
    """Return the arguments of all kernels: the wire, counters, which kernels pass to each other,
    and integers. ``adds``: whether tiles are added to their groups, which then begin at zero."""
    each, group = sizes.count, sizes.tiling.group
    tallies, groups = each * sizes.groups * group, each * -(-sizes.groups // group) * group
    return {
        "wire": wire.view(torch.int32),
        "tallies": torch.empty(tallies, dtype=torch.int32, device=rows.device),
        "groups": (torch.zeros if adds else torch.empty)(
            groups, dtype=sizes.sums, device=rows.device
        ),
        "pitch": _as_integers(rows).shape[1],
        "quads": sizes.columns // 4,
        "static": sizes.static,
        "tiles": sizes.tiles,
        "many_groups": sizes.groups,
        **_constants(codec, rows.dtype, _needs_halves(rows), sizes.tiling),
    }


@lru_cache(maxsize=64)
def _constants(
    codec: ExponentCodec, dtype: torch.dtype, halves: bool, tiling: Tiling
) -> dict[str, int]:
    """Return the compile-time arguments of the kernels of a codec and dtype."""
    form, ladder = FORMS[dtype], codec.ladder
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
        "PLACED": tiling.placed,
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
    programs: Mapping[Callable[..., None], int], known: Arguments, sizes: _Sizes, graph: bool
) -> None:
    """Launch kernels, each with its number of programs."""
    for entry, number in programs.items():
        launch(call_of(entry, known, number, sizes.tiling.warps, {}), graph=graph)
