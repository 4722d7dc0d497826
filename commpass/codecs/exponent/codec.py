"""Lossless: sign and mantissa as they are, exponents by a short code around a window chosen from
theory (ZipCCL, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commpass.ambient import ambient_free
from commpass.codecs.codec import FLOATS, Codec, Wire
from commpass.codecs.exponent.bits import any_of, compress, expand, kept, moves, transpose
from commpass.codecs.exponent.bits import count as bits_set
from commpass.codecs.exponent.floats import (
    CHUNK,
    FORMS,
    LANES,
    FloatForm,
    exponent_bytes,
    join,
    pack,
    split,
    unpack,
)
from commpass.codecs.exponent.ladder import LADDERS, Ladder
from commpass.codecs.exponent.strings import LONGEST, concatenate, join_fields, split_fields
from commpass.codecs.rows import ceil_to, cut, from_bytes, pad, to_bytes
from commpass.errors import PolicyError

ALIGNMENT = 128
BIAS = 8
"""Window starts are stored from -8 on, since a window may begin below the least exponent."""
MANY, WILD = 1 << 8, 1 << 9
"""Marks beside the window start of a chunk: zeros are many; its exponents lie in the dynamic part
as they are."""
COMMON = CHUNK // 22
"""From so many zeros on they are more than the values whose code they take: 4.5 % of a Gaussian lie
at 2 sigma and above."""
UNITS = CHUNK // ALIGNMENT
"""Units of 128 bytes that the exponents of a wild chunk take."""


Encoding = Callable[["ExponentCodec", Tensor], Tensor]
Decoding = Callable[["ExponentCodec", Tensor, int, torch.dtype], Tensor]
_calls: ContextVar[tuple[Encoding, Decoding] | None] = ContextVar("exponent_calls", default=None)


@contextmanager
def by_calls(calls: tuple[Encoding, Decoding] | None) -> Iterator[None]:
    """In here, rows of sizes that are not fixed are encoded and decoded by these functions, if
    any, which give the same bytes: to trace the 1,700 operators of either takes seconds with
    symbolic sizes."""
    before = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(before)


def _calls_for(rows: Tensor) -> tuple[Encoding, Decoding] | None:
    fixed = all(isinstance(size, int) for size in rows.shape)
    return None if fixed else _calls.get()


@dataclass(frozen=True)
class ExponentCodec(Codec):
    """Bit-exact for bf16, fp16 and fp32; fp64 travels as it is.

    The *static part* of a row has a size known beforehand: all signs and mantissas, the first step
    of each exponent's code (``planes`` bits), and a header with the row's used length and two bytes
    for each chunk of 1024 values: its window and two marks. The *dynamic part* has the later steps
    (see ``Ladder``): first the exponents of wild chunks as they are, 1024 bytes each, then the bit
    strings of all columns of 32 values, the second steps of all, then the third steps, and so on. A
    chunk is wild if one of its 32 columns needs more than 64 bits in one step. What follows in the
    buffer is zeros; it is never read, and need not be sent. All regions begin at multiples of 128
    bytes.

    The window of a chunk follows from its mean exponent, as that of a Gaussian with the same mean
    would; zeros don't count.
    """

    spec: str = field(compare=False)
    ladder: Ladder

    lossless = True
    dynamic = True

    @property
    def block(self) -> int:
        return CHUNK

    @property
    def bound(self) -> float:
        return 0.0

    # --- sizes ------------------------------------------------------------------------------------

    def static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes at the front of a row whose number does not depend on the values."""
        if dtype not in FORMS or numel == 0:
            return ceil_to(numel * dtype.itemsize, ALIGNMENT)
        return (
            self._static_words(FORMS[dtype]) * _chunks(numel) * LANES + _header_words(numel)
        ) * 4

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of a row whatever its values are: the static part, and room for a byte of each
        value in the dynamic part."""
        return self.static_bytes(numel, dtype) + (_chunks(numel) * CHUNK if dtype in FORMS else 0)

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        static = self.static_bytes(numel, dtype)
        return static, self.wire_bytes(numel, dtype) - static

    def used_bytes(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """How many bytes from its start each row needs, int64 ``[rows]``, a multiple of 128; reads
        the static part only."""
        used = torch.full(
            (wire.shape[0],), self.static_bytes(numel, dtype), dtype=torch.int64, device=wire.device
        )
        if dtype not in FORMS or numel == 0:
            return used
        header = self.static_bytes(numel, dtype) - _header_words(numel) * 4
        return (
            used
            + from_bytes(wire.narrow(1, header, 4), torch.float32).view(torch.int32).squeeze(1)
            * ALIGNMENT
        )

    def _static_words(self, form: FloatForm) -> int:
        """Column words of a chunk in the static part."""
        return form.rest_words + self.ladder.steps[0].bits

    # --- rows -------------------------------------------------------------------------------------

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        if rows.dtype in FORMS and (calls := _calls_for(rows)) is not None:
            return calls[0](self, rows)
        if rows.dtype not in FORMS or numel == 0:
            raw = (
                to_bytes(rows)
                if numel
                else torch.zeros((count, 0), dtype=torch.uint8, device=rows.device)
            )
            return pad(raw, ceil_to(raw.shape[1], ALIGNMENT))
        form, ladder, chunks = FORMS[rows.dtype], self.ladder, _chunks(numel)
        words = _words(rows, chunks * CHUNK).reshape(count, form.words, chunks * LANES)
        pairs, rest = split(form, words.unbind(1))
        start, many = self._window([pair.unflatten(1, (chunks, LANES)) for pair in pairs])
        steps, masks = ladder.encode(
            transpose(pack(pairs, 8))[: form.exponent_bits], _columns(start), _columns(many)
        )
        strings, lengths = [], []
        for planes, mask in zip(steps[1:], masks[1:], strict=True):
            plan, fields = moves(mask), bits_set(mask)
            strings.append(join_fields([compress(plane, plan) for plane in planes], fields))
            lengths.append(fields * len(planes))
        longest = lengths[0]
        for length in lengths[1:]:
            longest = longest.maximum(length)
        wild = longest.unflatten(1, (chunks, LANES)).amax(dim=2) > LONGEST  # [rows, chunks]
        tame = _columns((~wild).to(torch.int32).unsqueeze(2))
        before = wild.sum(1, keepdim=True)
        sums, bits = concatenate(
            torch.cat([string & -tame for string in strings], 1),
            torch.cat([length * tame for length in lengths], 1).to(torch.int64),
            before * (CHUNK // 8),
            chunks * (CHUNK // 8),
        )
        used = before * UNITS + (bits + 2047) // 2048 * 2
        header = _header(wild, start, many, used)
        regions = (
            *rest,
            *steps[0],
            header,
            self._dynamic(words, form, wild, sums, before * (CHUNK // 8) + (bits + 63) // 64),
        )
        return torch.cat([_lines(region) for region in regions], dim=1).flatten(1).view(torch.uint8)

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """uint8 ``[rows, wire_bytes(numel, dtype)]`` to ``[rows, numel]`` in ``dtype`` itself, not
        in an accumulation dtype: a wider one would not keep the payloads of NaNs."""
        static, room = self.parts(numel, dtype)
        return self.decode_parts(
            (wire.narrow(1, 0, static), wire.narrow(1, static, room)), numel, dtype
        )

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """The static and the dynamic part; of the latter, all the room that a row has for it."""
        wire, rest_of_wire = parts
        if dtype in FORMS and (calls := _calls_for(wire)) is not None:
            return calls[1](self, torch.cat([wire, rest_of_wire], dim=1), numel, dtype)
        count = wire.shape[0]
        if numel == 0:
            return torch.zeros((count, 0), dtype=dtype, device=wire.device)
        if dtype not in FORMS:
            return from_bytes(cut(wire, numel * dtype.itemsize), dtype)
        form, ladder, chunks = FORMS[dtype], self.ladder, _chunks(numel)
        words = _words(wire, wire.shape[1])
        columns = words.narrow(1, 0, self._static_words(form) * chunks * LANES)
        static = columns.reshape(count, self._static_words(form), chunks * LANES).unbind(1)
        rest, planes = static[: form.rest_words], static[form.rest_words :]
        at = self._static_words(form) * chunks * LANES
        start, many, wild = _windows(
            words.narrow(1, at + LANES, _header_words(numel) - LANES), chunks
        )
        dynamic = _words(rest_of_wire, rest_of_wire.shape[1])

        here = ~any_of(planes)
        tame = _columns((~wild).to(torch.int32))
        begin = wild.sum((1, 2)).reshape(count, 1) * (
            CHUNK * 8
        )  # the bit at which the strings of a step begin
        steps = [list(planes)]
        for bits in (*ladder.fields[:-1], form.exponent_bits):
            fields = bits_set(here) * tame
            lengths = fields.to(torch.int64) * bits
            ends = lengths.cumsum(1)
            string = _read(dynamic, begin + ends - lengths)
            plan = moves(here)
            steps.append(
                [expand(plane, plan, here) for plane in split_fields(string, bits, fields)]
            )
            begin = begin + ends[:, -1:]
            here = here & ~any_of(steps[-1])
        exponents = ladder.decode(steps, _columns(start), _columns(many), form.exponent_bits)
        exponents += [torch.zeros_like(here)] * (8 - form.exponent_bits)
        return self._finish(transpose(exponents), rest, dynamic, wild, form, numel)

    # --- parts of encode --------------------------------------------------------------------------

    def _window(self, pairs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Where the outermost window of each chunk starts, and -1 where its zeros are many, else 0;
        ``[rows, chunks, 1]``.

        From sums of whole numbers alone: the same in any order.
        """
        total, present = pairs[0], ((pairs[0] + 0x00FF00FF) >> 8) & 0x00010001
        for pair in pairs[1:]:
            total, present = total + pair, present + (((pair + 0x00FF00FF) >> 8) & 0x00010001)
        total = ((total & 0xFFFF) + (total >> 16)).sum(2, keepdim=True, dtype=torch.int32)
        present = (
            ((present & 0xFFFF) + (present >> 16))
            .sum(2, keepdim=True, dtype=torch.int32)
            .clamp_min(1)
        )
        inner = self.ladder.steps[0]
        start = torch.div(
            total * 256 + present * self.ladder.shift, present * 256, rounding_mode="floor"
        )
        start = (start + (self.ladder.outer.low - inner.low)).clamp(-BIAS, 255 - BIAS)
        return start, -(present < CHUNK - COMMON).to(torch.int32)

    def _dynamic(
        self, words: Tensor, form: FloatForm, wild: Tensor, sums: Tensor, end: Tensor
    ) -> Tensor:
        """The whole dynamic part, int32 ``[rows, chunks * 256]``; ``end`` is the number of its
        64-bit words.

        Words of 64 bits lie as 32 lower halves (128 bytes), then 32 upper ones, so that all stores
        are contiguous.
        """
        count, chunks = wild.shape
        device = wild.device
        # Exponents of the k-th wild chunk in the k-th place.
        order = wild.to(torch.int64).cumsum(1)
        rows = torch.arange(count, device=device).unsqueeze(1)
        chunk = torch.arange(chunks, device=device).unsqueeze(0)
        source = torch.zeros((count, chunks + 1), dtype=torch.int64, device=device)
        source = source.index_put(
            (rows, torch.where(wild, order - 1, chunks)), chunk.expand(count, chunks)
        )
        taken = words.unflatten(2, (chunks, LANES)).transpose(1, 2)[
            rows, source.narrow(1, 0, chunks)
        ]
        raw = exponent_bytes(
            form, taken.unflatten(2, (UNITS, form.words // UNITS))
        )  # [rows, chunks, 8, 32]
        wholes = sums.narrow(1, 1, chunks * (CHUNK // 8)) - sums.narrow(1, 0, chunks * (CHUNK // 8))
        wholes = wholes.reshape(count, chunks, UNITS // 2, 1, LANES)
        shift = 32 * torch.arange(2, device=device).reshape(2, 1)
        stream = (wholes >> shift).to(torch.int32).flatten(2, 3)  # [rows, chunks, 8, 32]
        unit = torch.arange(chunks * UNITS, device=device).reshape(chunks, UNITS, 1)
        word = (unit >> 1) * LANES + torch.arange(LANES, device=device)
        dense = order[:, -1:].reshape(count, 1, 1, 1) * UNITS
        return torch.where(
            unit < dense, raw, torch.where(word < end.reshape(count, 1, 1, 1), stream, 0)
        ).reshape(count, chunks * CHUNK // 4)

    # --- parts of decode --------------------------------------------------------------------------

    def _finish(
        self,
        exponents: list[Tensor],
        rest: tuple[Tensor, ...],
        dynamic: Tensor,
        wild: Tensor,
        form: FloatForm,
        numel: int,
    ) -> Tensor:
        """Values from exponents and all the rest; wild chunks take their exponents from the dynamic
        part."""
        count, chunks, _ = wild.shape
        rows = torch.arange(count, device=wild.device).unsqueeze(1)
        place = (wild.squeeze(2).to(torch.int64).cumsum(1) - 1).clamp_min(0)
        raw = dynamic.reshape(count, chunks, UNITS, LANES)[rows, place].unbind(2)
        shape = (chunks, LANES)
        exponents = [
            torch.where(wild, a, b.unflatten(1, shape)).flatten(1)
            for a, b in zip(raw, exponents, strict=True)
        ]
        whole = torch.stack(join(form, unpack(exponents, 8), rest), dim=1).flatten(1)
        # Cut as bytes: see _words.
        return (
            cut(whole.view(torch.uint8), numel * form.dtype.itemsize).contiguous().view(form.dtype)
        )

    # --- whole tensors ----------------------------------------------------------------------------

    @ambient_free
    def encode(self, x: Tensor) -> Wire:
        """Any float tensor to a wire of only as many bytes as its values need."""
        whole = super().encode(x)
        used = self.used_bytes(whole.payload.reshape(1, -1), x.numel(), x.dtype)
        return Wire(whole.payload[: int(used)], whole.codec, whole.shape, whole.dtype)

    @ambient_free
    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        """The tensor back from what ``encode`` made; a wire that is cut, longer or another codec's
        is refused."""
        numel = math.prod(wire.shape)
        found, least = wire.payload.numel(), self.static_bytes(numel, wire.dtype)
        if wire.codec == self.spec and wire.dtype in FLOATS:
            what = f"{self.spec!r} of {list(wire.shape)} {wire.dtype}"
            if found < least:
                raise PolicyError(
                    f"the wire has {found} bytes, but the static part of {what} alone has {least}:"
                    " it was cut"
                )
            used = int(self.used_bytes(wire.payload[:least].reshape(1, -1), numel, wire.dtype))
            if found != used:
                raise PolicyError(
                    f"the wire has {found} bytes, but its header says {used} for {what}: it was"
                    " cut, or is foreign"
                )
        whole = pad(wire.payload.reshape(1, -1), self.wire_bytes(numel, wire.dtype)).flatten()
        return super().decode(Wire(whole, wire.codec, wire.shape, wire.dtype), like)


def exponent(spec: str, *, planes: int = 2) -> Codec:
    """Lossless. ``planes`` 2: a code of four steps, 0.12 to 0.17 bits above the entropy of a
    Gaussian's exponents. 3: ZipCCL's of two steps, 0.67 to 0.71 bits above it, and quicker."""
    if planes not in LADDERS:
        raise PolicyError(f"planes={planes}: must be 2 or 3")
    return ExponentCodec(spec, LADDERS[planes])


def _chunks(numel: int) -> int:
    return (numel + CHUNK - 1) // CHUNK


def _header_words(numel: int) -> int:
    """128 bytes for the used length, then two bytes for each chunk."""
    return LANES + ceil_to((_chunks(numel) + 1) // 2, LANES)


def _columns(of_chunks: Tensor) -> Tensor:
    """``[rows, chunks, 1]`` to ``[rows, chunks * 32]``: what holds for a chunk, once for each
    column.

    Written out, so that what follows runs over columns alone: two loops in the place of one would
    not be fused.
    """
    return kept(
        of_chunks.expand(-1, -1, LANES).clone(memory_format=torch.contiguous_format)
    ).flatten(1)


def _lines(words: Tensor) -> Tensor:
    """``[rows, n]`` int32 to lines of 128 bytes, ``[rows, n / 32, 32]``."""
    return words.unflatten(1, (words.shape[1] // LANES, LANES))


def _words(rows: Tensor, length: int) -> Tensor:
    """Rows ``[rows, n]`` as int32 words, zeros behind them up to ``length`` numbers; copied only
    where it must be.

    Never touched as floats: compiled code pads and copies 16-bit floats by way of float32, which
    makes all NaNs one.
    """
    width = rows.element_size()
    if width == 4:
        return pad(rows.view(torch.int32), length)
    missing = length - rows.shape[1]
    # A view as wider numbers has to begin at a multiple of their size; Dynamo cannot be asked where
    # a tensor begins.
    if (
        isinstance(missing, int)
        and missing == 0
        and rows.stride(1) == 1
        and rows.stride(0) * width % 4 == 0
        and not torch.compiler.is_dynamo_compiling()
        and rows.storage_offset() * width % 4 == 0
    ):
        return rows.view(torch.int32)
    raw = pad(rows.unsqueeze(2).view(torch.uint8).flatten(1), length * width)
    return raw.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _header(wild: Tensor, start: Tensor, many: Tensor, used: Tensor) -> Tensor:
    """What chunks have to say, ``[rows, chunks, 1]`` (wild bool ``[rows, chunks]``), and the used
    units of 128 bytes ``[rows, 1]``: to int32 words ``[rows, _header_words]``."""
    chunks = wild.shape[1]
    marks = (start + BIAS).squeeze(2) | (many.squeeze(2) & MANY) | (wild.to(torch.int32) * WILD)
    two = pad(marks, ceil_to(chunks, 2 * LANES)).unflatten(1, (ceil_to(chunks, 2 * LANES) // 2, 2))
    return torch.cat([pad(used.to(torch.int32), LANES), two[..., 0] | (two[..., 1] << 16)], 1)


def _windows(words: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``_header``: window starts, -1 where zeros are many, and which chunks are
    wild, ``[rows, chunks, 1]``."""
    shifts = 16 * torch.arange(2, device=words.device, dtype=torch.int32)
    marks = cut(((words.unsqueeze(2) >> shifts) & 0xFFFF).flatten(1), chunks).unsqueeze(2)
    return (marks & 0xFF) - BIAS, -((marks & MANY) >> 8), (marks & WILD) != 0


def _read(dynamic: Tensor, offsets: Tensor) -> Tensor:
    """The 64 bits from each bit offset on, ``[rows, n]``."""
    word, shift = offsets >> 6, offsets & 63
    low, high = _word(dynamic, word), _word(dynamic, word + 1)
    return ((low >> shift) & ((torch.full_like(low, 2) << (63 - shift)) - 1)) | (
        (high << 1) << (63 - shift)
    )


def _word(dynamic: Tensor, index: Tensor) -> Tensor:
    """64-bit words by number; no index leads outside, whatever the wire holds."""
    last = dynamic.shape[1] // 2 - 1
    index = index.clamp(0, last)
    place = (index >> 5) * (2 * LANES) + (index & 31)
    return (dynamic.gather(1, place).to(torch.int64) & 0xFFFFFFFF) | (
        dynamic.gather(1, place + LANES).to(torch.int64) << 32
    )
