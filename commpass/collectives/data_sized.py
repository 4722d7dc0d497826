"""Exchanges whose size depends on the data: the wire of a lossless codec has a static and a dynamic
part (ZipCCL, section 4).

The buffers have room for the worst case, and only the used bytes are sent, so no values can cause
an overflow. Sizes are read on the host once per exchange; a traced graph holds them as unbacked
symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from commpass.codecs import Codec, operators
from commpass.codecs.codec import UNIT
from commpass.collectives.request import Broadcast, Move, Request, Rows, scatter
from commpass.errors import VerifyError


@contextmanager
def sizes_of_data(codec: Codec, x: Tensor, *, traced: bool) -> Iterator[None]:
    """Allow sizes that depend on values in a fake run of an algorithm, for a codec with a dynamic
    wire.

    Raises VerifyError if the fake mode has no ShapeEnv. If the run is ``traced``, the fake mode
    keeps allowing such sizes: the compiler of the graph runs it again on fake values, and Dynamo by
    default allows them only in full graphs. The mode belongs to that one graph. Otherwise the
    setting is restored.
    """
    mode = detect_fake_mode(x)
    if not codec.dynamic or mode is None:
        yield
        return
    if mode.shape_env is None:
        raise VerifyError(
            f"{codec.spec} has a wire whose size depends on the values, but the fake values have no"
            " ShapeEnv"
        )
    before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    if traced:
        yield
        return
    try:
        with mode.shape_env.ignore_fresh_unbacked_symbols():
            yield
    finally:
        mode.allow_scalar_outputs = before


Read = Callable[[Tensor], None]
_foreseen: ContextVar[tuple[bool, Read] | None] = ContextVar("foreseen", default=None)


@contextmanager
def foreseen(gaussian: bool, read: Read) -> Iterator[None]:
    """Do not read sizes in this context: use the bytes that Gaussian values need, or the fewest
    possible. ``read`` is called with each tensor that would have been read."""
    before = _foreseen.set((gaussian, read))
    try:
        yield
    finally:
        _foreseen.reset(before)


def varies(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether the number of bytes of a wire depends on the values.

    The number of values is ignored, so that ranks without values act as the others.
    """
    return codec.dynamic and codec.parts(codec.block, dtype)[1] > 0


def hop(
    codec: Codec, rows: Tensor, move: Move, sizes_first: bool
) -> Generator[Tensor, Tensor, Tensor]:
    """As ``steps.hop``, but send only the bytes that each row uses."""
    numel, dtype = rows.shape[1], rows.dtype
    static, room = codec.parts(numel, dtype)
    wire = operators.encode(codec, rows)
    if isinstance(room, int) and room == 0:  # too short to be coded, on all ranks
        arrived = yield move.start(wire)
        return operators.decode(codec, arrived, numel, dtype)
    used = (operators.used_bytes(codec, wire, numel, dtype) - static) // UNIT
    expected = _foreseen_bytes(codec, numel, dtype) // UNIT
    if sizes_first:
        sizes = yield move.start(used.unsqueeze(1).view(torch.uint8))
        arrived_units = sizes.contiguous().view(torch.int64).squeeze(1)
        whole = yield from _send_used(
            wire,
            used + static // UNIT,
            arrived_units + static // UNIT,
            move,
            expected + static // UNIT,
        )
        return operators.decode(codec, whole, numel, dtype)
    arrived = yield move.start(wire.narrow(1, 0, static).contiguous())
    arrived_units = (operators.used_bytes(codec, arrived, numel, dtype) - static) // UNIT
    tails = yield from _send_used(wire.narrow(1, static, room), used, arrived_units, move, expected)
    return operators.decode_parts(codec, (arrived, tails), numel, dtype)


def parts_hop(
    codec: Codec,
    wires: Sequence[Tensor],
    lengths: Sequence[int],
    arriving: Sequence[int],
    dtype: torch.dtype,
    request: Request,
    sizes_first: bool,
) -> Generator[Tensor, Tensor, list[Tensor]]:
    """As ``uneven.parts_hop``: send the wire of part r, ``[1, ...]`` with room for the worst case,
    to rank r."""
    sent, coming = ([codec.parts(numel, dtype) for numel in some] for some in (lengths, arriving))
    expected, expected_in = (
        [_foreseen_bytes(codec, numel, dtype) for numel in some] for some in (lengths, arriving)
    )
    used = [
        operators.used_bytes(codec, wire, numel, dtype) - part[0]
        for wire, numel, part in zip(wires, lengths, sent, strict=True)
    ]

    def read(bytes_in: Tensor) -> tuple[list[Any], list[Any]]:
        """Return the dynamic bytes of each part that arrives, and of each that is sent."""
        limits, likely = [room for _, room in (*coming, *sent)], [*expected_in, *expected]
        numbers = _numbers(torch.cat([bytes_in, *used]), limits, likely)
        return numbers[: len(coming)], numbers[len(coming) :]

    if sizes_first:
        units = torch.cat(used).div(UNIT, rounding_mode="floor").unsqueeze(1).view(torch.uint8)
        arrived = yield scatter(request).start(units)
        units_in = arrived.contiguous().view(torch.int64).squeeze(1)
        received, given = read(units_in * UNIT)
        sizes = [number + static for number, (static, _) in zip(received, coming, strict=True)]
        pieces = [
            wire.narrow(1, 0, number + static)
            for wire, number, (static, _) in zip(wires, given, sent, strict=True)
        ]
        wire = yield _flat(pieces, sizes, request)
        whole = [
            _filled(piece, sum(part)) for piece, part in zip(wire.split(sizes), coming, strict=True)
        ]
        return [
            operators.decode(codec, row, numel, dtype)
            for row, numel in zip(whole, arriving, strict=True)
        ]
    statics = [static for static, _ in coming]
    arrived = yield _flat(
        [wire.narrow(1, 0, static) for wire, (static, _) in zip(wires, sent, strict=True)],
        statics,
        request,
    )
    heads = [head.reshape(1, -1) for head in arrived.split(statics)]
    bytes_in = [
        operators.used_bytes(codec, head, numel, dtype) - static
        for head, numel, (static, _) in zip(heads, arriving, coming, strict=True)
    ]
    sizes, given = read(torch.cat(bytes_in))
    pieces = [
        wire.narrow(1, static, number)
        for wire, number, (static, _) in zip(wires, given, sent, strict=True)
    ]
    wire = yield _flat(pieces, sizes, request)
    tails = [_filled(tail, room) for tail, (_, room) in zip(wire.split(sizes), coming, strict=True)]
    return [
        operators.decode_parts(codec, pair, numel, dtype)
        for *pair, numel in zip(heads, tails, arriving, strict=True)
    ]


def _filled(piece: Tensor, length: int) -> Tensor:
    """Pad bytes with zeros and return them as a row; ``pad`` does not support lengths that are
    known only when a graph runs."""
    zeros = torch.zeros(length - piece.shape[0], dtype=torch.uint8, device=piece.device)
    return torch.cat([piece, zeros]).reshape(1, length)


def _flat(pieces: Sequence[Tensor], sizes: Sequence[Any], request: Request) -> Tensor:
    """Start an exchange that sends one piece of bytes, ``[1, ...]``, to each rank and receives
    ``sizes`` bytes."""
    move = Rows(request, tuple(piece.shape[1] for piece in pieces), tuple(sizes))
    return move.start(torch.cat(list(pieces), dim=1).flatten())


def _foreseen_bytes(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes assumed for the dynamic part of a row if its size is not read."""
    if (how := _foreseen.get()) is None or not how[0]:
        return 0
    return codec.expected_bytes(numel, dtype) - codec.parts(numel, dtype)[0]


def _send_used(
    wire: Tensor, used: Tensor, arriving: Tensor, move: Move, expected: int
) -> Generator[Tensor, Tensor, Tensor]:
    """Send the first ``used[i]`` units of each row of ``[r, room]``, or ``expected`` units if sizes
    are not read.

    ``arriving`` holds the numbers of units received. Return ``[r', room]``, in which only these
    units may be read.
    """
    room = wire.shape[1] // UNIT
    units = wire.reshape(wire.shape[0], room, UNIT)
    if isinstance(move, Rows):
        return (yield from _rows(units, used, arriving, move, expected))
    (most,) = _numbers(arriving.max().unsqueeze(0), [room], [expected])
    # One dimension: torch 2.11 cannot order strides if the number of units is not known.
    arrived = yield move.start(units.narrow(1, 0, most).reshape(-1))
    rows = units.shape[0] if isinstance(move, Broadcast) else move.request.ranks
    missing = torch.zeros((rows, room - most, UNIT), dtype=torch.uint8, device=wire.device)
    return torch.cat([arrived.reshape(rows, most, UNIT), missing], dim=1).flatten(1)


def _rows(
    units: Tensor, used: Tensor, arriving: Tensor, move: Rows, expected: int
) -> Generator[Tensor, Tensor, Tensor]:
    room = units.shape[1]
    many = (*move.sent, *move.received)
    units_by_rank = torch.cat([_by_rank(used, move.sent), _by_rank(arriving, move.received)])
    numbers = _numbers(units_by_rank, [room * n for n in many], [expected * n for n in many])
    sent, received = numbers[: len(move.sent)], numbers[len(move.sent) :]
    flat = units.flatten(0, 1)[_places(used, sum(sent), room)]
    move_units = Rows(move.request, tuple(sent), tuple(received))
    arrived = yield move_units.start(flat)
    spare = torch.zeros((1, UNIT), dtype=torch.uint8, device=units.device)
    begin = (arriving.cumsum(0) - arriving).unsqueeze(1)
    unit = torch.arange(room, device=units.device)
    place = torch.where(unit < arriving.unsqueeze(1), begin + unit, sum(received))
    return torch.cat([arrived, spare])[place].flatten(1)


def _places(used: Tensor, total: Any, capacity: int) -> Tensor:
    """Return the index, among the units of all rows, of each unit of a buffer that holds only the
    used units."""
    place = torch.arange(total, device=used.device)
    ends = used.cumsum(0)
    row = torch.searchsorted(ends, place, right=True)
    return row * capacity + place - (ends - used)[row]


def _by_rank(used: Tensor, rows: tuple[Any, ...]) -> Tensor:
    """Return the number of units for each rank, whose rows are consecutive."""
    zero = torch.zeros(1, dtype=used.dtype, device=used.device)
    sums, end, ends = torch.cat([zero, used.cumsum(0)]), 0, []
    for count in rows:
        end = end + count
        ends.append(
            torch.full_like(zero, end)
        )  # index on the device: a symbolic index would be compared with the size
    return torch.diff(sums[torch.cat(ends)], prepend=zero)


def _numbers(values: Tensor, limits: Sequence[Any], expected: Sequence[Any]) -> list[Any]:
    """Return ``values [n]`` as numbers of the graph, from 0 to ``limits``, or ``expected`` if sizes
    are not read.

    The host waits for the device once: all of them are copied together.
    """
    if (how := _foreseen.get()) is not None:
        how[1](values)
        return list(expected)
    numbers = []
    for value, limit in zip(values.cpu().unbind(), limits, strict=True):
        number = value.item()
        torch._check(number >= 0)
        torch._check(number <= limit)
        numbers.append(number)
    return numbers
