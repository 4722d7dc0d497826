"""A lossless codec: sign and mantissa unchanged, exponents in a short code around a window (ZipCCL,
section 4). ``ExponentCodec`` documents the wire format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from commpass.codecs.codec import FLOATS, UNIT, Codec, Wire
from commpass.codecs.exponent.bits import any_of, compress, expand, materialized, moves, transpose
from commpass.codecs.exponent.bits import count as bits_set
from commpass.codecs.exponent.floats import (
    CHUNK,
    FORMS,
    LANES,
    LINE,
    FloatForm,
    join,
    pack,
    split,
    unpack,
)
from commpass.codecs.exponent.ladder import LADDERS, Ladder
from commpass.codecs.exponent.strings import concatenate, join_fields, split_fields
from commpass.codecs.exponent.window import choose, total
from commpass.codecs.exponent.words import (
    LENGTH_AT,
    across,
    as_values,
    as_words,
    by_column,
    chunk_words,
    chunks_of,
    columns_of,
    columns_of_chunks,
    dynamic_lengths,
    existing,
    in_chunks,
    read_at,
    row_words,
)
from commpass.codecs.preset import Preset
from commpass.codecs.rows import ceil_to, cut, larger, pad, smaller, to_bytes
from commpass.errors import PolicyError
from commpass.utils.ambient import ambient_free
from commpass.utils.spec import spell

BIAS = 16
"""Window starts are stored plus this, since a window may begin below the smallest exponent."""
START_BITS, MODE_BITS = 9, 2
"""The 32-bit header of a chunk (its mark): the window start, the mode, and from bit ``LENGTH_AT``
on the number of its 16-bit words in the dynamic part."""

PLANES = 2
"""The default number of bit planes of the first step of a code."""


Encoding = Callable[["ExponentCodec", Tensor], Tensor]
Decoding = Callable[["ExponentCodec", Tensor, int, torch.dtype], Tensor]
Calls = tuple[Encoding, Decoding]
_calls: ContextVar[Calls | str | None] = ContextVar("exponent_calls", default="by tracer")


@contextmanager
def by_calls(calls: Calls | None) -> Iterator[None]:
    """Encode and decode rows with the given functions, which produce the same bytes.

    Either direction is 2,000 plain operators. Tracing them with symbolic sizes takes seconds, and
    Inductor takes minutes to compile them. None keeps the plain operators.
    """
    before = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(before)


def _encode_operator(codec: ExponentCodec, rows: Tensor) -> Tensor:
    wire: Tensor = torch.ops.commpass.exponent_encode(rows, codec.spec, False)
    return wire


def _decode_operator(codec: ExponentCodec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    rows: Tensor = torch.ops.commpass.exponent_decode(wire, codec.spec, numel, dtype, False)
    return rows


OPERATORS = (_encode_operator, _decode_operator)
"""The operators of ``codecs.exponent_operators``, without a kernel."""


@dataclass(frozen=True)
class ExponentCodec(Codec):
    """Bit-exact for bf16, fp16 and fp32; fp64 is sent uncompressed.

    A row of n values has ``n // 128`` lines of 128 values, in chunks of 8 lines; the last chunk may
    have fewer. The remaining values, fewer than 128, are sent uncompressed.

    The *static part* of a row has a size that does not depend on the values. It holds all signs and
    mantissas, the first step of each exponent's code (``planes`` bits), a mark of 4 bytes for each
    chunk, and the uncompressed values. Bit planes are stored one after another, each with a word
    for every column of 32 values.

    The *dynamic part* holds the later steps (see ``Ladder``), one chunk after another. Each step of
    a chunk is a bit string: for every column, the fields of the values that need the step, in bit
    planes. Their number per column is not limited. The string of a chunk is padded to whole 16-bit
    words, and its mark stores their number.

    A chunk that would need as many words as its plain exponents is *raw*. The planes of its first
    step hold the lowest bits of its exponents, and its string the other bits. So no chunk is longer
    than its values. The rest of the buffer is never read, and need not be sent. Here it is zeros;
    kernels do not write it. Both parts are multiples of 16 bytes.

    The window and the mode of a chunk minimize its bits over all windows around the median of its
    nonzero exponents (``choose``).

    ``bits`` is the measured number of bits per value, for plans (``expected_bytes``). It does not
    affect the encoding and is not compared.
    """

    spec: str = field(compare=False)
    ladder: Ladder
    bits: float = field(default=0.0, compare=False)

    lossless = True
    dynamic = True

    @property
    def wire_spec(self) -> str:
        planes = self.ladder.planes
        return "exponent" if planes == PLANES else f"exponent(planes={planes})"

    def measured(self, bits: float) -> Codec:
        planes = self.ladder.planes
        given = (("bits", bits), *((("planes", planes),) if planes != PLANES else ()))
        return exponent(spell("exponent", given), planes=planes, bits=bits)

    @property
    def block(self) -> int:
        return CHUNK

    @property
    def bound(self) -> float:
        return 0.0

    # --- sizes ------------------------------------------------------------------------------------

    def static_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the leading bytes of a row whose number does not depend on the values."""
        if dtype not in FORMS:
            return ceil_to(numel * dtype.itemsize, UNIT)
        words = self._static_words(FORMS[dtype]) * columns_of(numel) + chunks_of(numel)
        return ceil_to(words * 4 + numel % LINE * dtype.itemsize, UNIT)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row for any values: the values, 4 bytes for each chunk, and padding
        to 16 bytes."""
        return sum(self.parts(numel, dtype))

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        room = columns_of(numel) * self._raw_words(FORMS[dtype]) * 4 if dtype in FORMS else 0
        return self.static_bytes(numel, dtype), room

    def used_bytes(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return how many leading bytes of each row are needed, int64 ``[rows]``, a multiple of 16.
        Only the static part is read."""
        static = self.static_bytes(numel, dtype)
        if not self._is_coded(numel, dtype):
            return torch.full((wire.shape[0],), static, dtype=torch.int64, device=wire.device)
        form = FORMS[dtype]
        at = self._static_words(form) * columns_of(numel) * 4
        marks = as_words(wire.narrow(1, at, chunks_of(numel) * 4), chunks_of(numel) * 4)
        length = dynamic_lengths(marks.unsqueeze(2), self._capacity(form, numel, wire.device))
        dynamic = length.sum((1, 2), dtype=torch.int64) * 2
        return static + (dynamic + (UNIT - 1)) // UNIT * UNIT

    def expected_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that a row needs by the measured ``bits``, or the bytes for a Gaussian
        without them."""
        if not self.bits:
            return super().expected_bytes(numel, dtype)
        static, room = self.parts(numel, dtype)
        needed = ceil_to(math.ceil(numel * self.bits / 8), UNIT) - static
        return static + smaller(larger(needed, 0), room)

    def _is_coded(self, numel: int, dtype: torch.dtype) -> bool:
        return dtype in FORMS and numel >= LINE

    def _calls_for(self, numel: int, dtype: torch.dtype) -> Calls | None:
        """Return the functions of ``by_calls`` if rows may be coded.

        Outside of ``by_calls`` they are OPERATORS if a compiler of the user traces this, or only
        asks for shapes: it would take minutes for the plain operators. Dynamo cannot read a context
        variable.
        """
        if dtype not in FORMS or (isinstance(numel, int) and numel < LINE):
            return None
        if torch.compiler.is_dynamo_compiling():
            return OPERATORS
        calls = _calls.get()
        if not isinstance(calls, str):
            return calls
        is_traced = get_proxy_mode() is not None or detect_fake_mode() is not None
        return OPERATORS if is_traced else None

    def _static_words(self, form: FloatForm) -> int:
        """Words per column in the static part."""
        return form.rest_words + self.ladder.planes

    def _raw_words(self, form: FloatForm) -> int:
        """Words per column of a raw chunk in the dynamic part."""
        return form.exponent_bits - self.ladder.planes

    def _capacity(self, form: FloatForm, numel: int, device: torch.device) -> Tensor:
        """Return the most 16-bit words of each chunk in the dynamic part, int32 ``[chunks, 1]``."""
        return columns_of_chunks(numel, device) * (2 * self._raw_words(form))

    # --- rows -------------------------------------------------------------------------------------

    def encode_rows(self, rows: Tensor) -> Tensor:
        count, numel = rows.shape
        if (calls := self._calls_for(numel, rows.dtype)) is not None:
            return calls[0](self, rows)
        if not self._is_coded(numel, rows.dtype):
            raw = (
                to_bytes(rows)
                if numel
                else torch.zeros((count, 0), dtype=torch.uint8, device=rows.device)
            )
            return pad(raw, self.static_bytes(numel, rows.dtype))
        form, ladder = FORMS[rows.dtype], self.ladder
        first, columns, chunks = ladder.planes, columns_of(numel), chunks_of(numel)
        pairs, rest = split(form, chunk_words(rows, form).unbind(2))
        exponents = [
            materialized(plane) for plane in transpose(pack(pairs, 8))[: form.exponent_bits]
        ]
        live = existing(numel, rows.device)
        sizes = columns_of_chunks(numel, rows.device)
        start, mode = choose(ladder, exponents, sizes * LANES, LANES)
        steps, masks = ladder.encode(exponents, across(start), self._modes(mode))
        masks = [materialized(mask & live) for mask in masks]
        fields = (*ladder.fields[:-1], form.exponent_bits)
        bits = sum_of([total(mask) * each for mask, each in zip(masks[1:], fields, strict=True)])
        capacity = self._capacity(form, numel, rows.device)
        length = ((bits + 15) >> 4).minimum(capacity)
        is_raw = length == capacity
        raw = materialized(across(-is_raw.to(torch.int32)) & live)
        kept_planes = [(plane & ~raw) for plane in (*steps[0], *steps[-1])]
        shown = [plane & raw for plane in exponents]
        steps[0] = [a | b for a, b in zip(kept_planes[:first], shown[:first], strict=True)]
        shown = [*shown[first:], *[torch.zeros_like(raw)] * first]
        steps[-1] = [a | b for a, b in zip(kept_planes[first:], shown, strict=True)]
        masks = [*(mask & ~raw for mask in masks[:-1]), masks[-1] | raw]

        strings, lengths = [], []
        for step, mask in zip(steps[1:], masks[1:], strict=True):
            plan, some = moves(mask), bits_set(mask)
            closed = [compress(plane & mask, plan) for plane in step]
            there = [some] * len(step)
            if step is steps[-1]:
                there[form.exponent_bits - first :] = [some & ~raw] * first
            pairs_of = range(0, len(step), 2)
            strings.append(by_column([join_fields(closed[i : i + 2], some) for i in pairs_of]))
            lengths.append(by_column([sum_of(there[i : i + 2]) for i in pairs_of]))
        filling = torch.where(is_raw, 0, length * 16 - bits)
        words = concatenate(
            torch.cat([*strings, torch.zeros_like(filling, dtype=torch.int64)], 2).flatten(1),
            torch.cat([*lengths, filling], 2).flatten(1).to(torch.int64),
            columns * self._raw_words(form) // 2,
        )
        marks = (start + BIAS) | (mode << START_BITS) | (length << LENGTH_AT)
        plain = self.static_bytes(numel, rows.dtype) // 4 - self._static_words(form) * columns
        regions = [cut(region.flatten(1), columns) for region in (*rest, *steps[0])]
        regions += [
            marks.squeeze(2),
            as_words(
                rows.narrow(1, numel - numel % LINE, numel % LINE),
                (plain - chunks) * 4 // rows.dtype.itemsize,
            ),
            words.view(torch.int32),
        ]
        return torch.cat(regions, dim=1).view(torch.uint8)

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode uint8 ``[rows, wire_bytes(numel, dtype)]`` to ``[rows, numel]`` in ``dtype``,
        since a wider accumulation dtype would not keep the payloads of NaNs."""
        static, room = self.parts(numel, dtype)
        return self.decode_parts(
            (wire.narrow(1, 0, static), wire.narrow(1, static, room)), numel, dtype
        )

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """Decode the static part and the dynamic part, the latter at its full size."""
        wire, rest_of_wire = parts
        if (calls := self._calls_for(numel, dtype)) is not None:
            return calls[1](self, torch.cat([wire, rest_of_wire], dim=1), numel, dtype)
        count = wire.shape[0]
        if numel == 0:
            return torch.zeros((count, 0), dtype=dtype, device=wire.device)
        if not self._is_coded(numel, dtype):
            return as_values(cut(wire, numel * dtype.itemsize), dtype)
        form, ladder = FORMS[dtype], self.ladder
        first, columns, chunks = ladder.planes, columns_of(numel), chunks_of(numel)
        words = as_words(wire, wire.shape[1])
        static = [
            in_chunks(words.narrow(1, number * columns, columns), chunks)
            for number in range(self._static_words(form))
        ]
        rest, planes = static[: form.rest_words], static[form.rest_words :]
        at = self._static_words(form) * columns
        marks = words.narrow(1, at, chunks).unsqueeze(2)
        capacity = self._capacity(form, numel, wire.device)
        length = dynamic_lengths(marks, capacity)
        live = existing(numel, wire.device)
        raw = materialized(across(-(length == capacity).to(torch.int32)) & live)
        dynamic = as_words(rest_of_wire, rest_of_wire.shape[1], torch.int64)
        # The bit offset of the strings of a step.
        begin = length.to(torch.int64).flatten(1).cumsum(1).unsqueeze(2)
        begin = (begin - length) * 16

        here = ~any_of(planes) & live & ~raw
        steps = [planes]
        for bits in (*ladder.fields[:-1], form.exponent_bits):
            is_last = len(steps) == len(ladder.steps)
            here = materialized(here | raw if is_last else here)
            some = bits_set(here)
            each = some * bits - (some & raw) * first if is_last else some * bits
            ends = each.to(torch.int64).cumsum(2)
            offset = begin + ends - each
            plan = moves(here)
            closed: list[Tensor] = []
            for place in range(0, bits, 2):
                string = read_at(dynamic, offset + (some * place).to(torch.int64))
                closed += split_fields(string, min(2, bits - place), some)
            steps.append([expand(plane, plan, here) for plane in closed])
            begin = begin + ends[:, :, -1:]
            here = here & ~any_of(steps[-1])
        escaped = [plane & ~raw for plane in steps[-1]]
        start = (marks & ((1 << START_BITS) - 1)) - BIAS
        modes = self._modes((marks >> START_BITS) & ((1 << MODE_BITS) - 1))
        coded = ladder.decode([*steps[:-1], escaped], across(start), modes, form.exponent_bits)
        as_they_are = [*planes, *steps[-1][: form.exponent_bits - first]]
        exponents = [
            (plane & ~raw) | (other & raw) for plane, other in zip(coded, as_they_are, strict=True)
        ]
        exponents += [torch.zeros_like(here)] * (8 - form.exponent_bits)
        values = torch.stack(join(form, unpack(transpose(exponents), 8), rest), dim=2)
        body = row_words(values, form, columns, chunks).view(torch.uint8)
        if not isinstance(numel, int) or numel % LINE:
            plain = wire.narrow(1, (at + chunks) * 4, numel % LINE * dtype.itemsize)
            body = torch.cat([body, plain], dim=1)
        return as_values(body, dtype)

    def _modes(self, mode: Tensor) -> list[Tensor]:
        """For each step that may encode zeros, return the mask of the chunks whose mode selects it
        (see ``Ladder.encode``)."""
        return [
            across(-(mode == number + 1).to(torch.int32)) for number in range(self.ladder.modes)
        ]

    # --- whole tensors ----------------------------------------------------------------------------

    @ambient_free
    def encode(self, x: Tensor) -> Wire:
        """Encode any float tensor to a wire of only the bytes that its values need."""
        whole = super().encode(x)
        used = self.used_bytes(whole.payload.reshape(1, -1), x.numel(), x.dtype)
        return Wire(whole.payload[: int(used)], whole.codec, whole.shape, whole.dtype)

    @ambient_free
    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        """Decode a wire of ``encode``. Raises PolicyError if it is truncated, too long or of
        another codec."""
        numel = math.prod(wire.shape)
        found, least = wire.payload.numel(), self.static_bytes(numel, wire.dtype)
        if wire.codec == self.wire_spec and wire.dtype in FLOATS:
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


def exponent(spec: str, *, planes: int = PLANES, bits: float = 0.0) -> Codec:
    """Lossless.

    ``planes=2``: a code of four steps, 0.14 to 0.2 bits above the entropy of a Gaussian's
    exponents. ``planes=3``: the code of ZipCCL with two steps, 0.67 to 0.71 bits above it, and
    faster. ``bits`` is the measured number of bits per value, for plans; 0 uses the number for a
    Gaussian.
    """
    if planes not in LADDERS:
        raise PolicyError(f"planes={planes}: must be 2 or 3")
    if not 0 <= bits <= 64:
        raise PolicyError(f"bits={bits}: must be from 0 to 64")
    return ExponentCodec(spec, LADDERS[planes], bits)


PRESETS = (
    Preset(
        "exponent",
        exponent,
        "lossless: frequent exponents in 2 bits (planes=3: ZipCCL's 3): where no error is allowed",
        ("exponent(planes=3)", "exponent"),
    ),
)


def sum_of(numbers: Sequence[Tensor]) -> Tensor:
    whole = numbers[0]
    for number in numbers[1:]:
        whole = whole + number
    return whole
