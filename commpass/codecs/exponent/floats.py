"""Split floats, as 32-bit words, into exponents and the rest, and pack fields of a few bits into
words.

A *chunk* is 1024 consecutive values that are coded together: 32 *columns* of 32 values. Word i of
column l is word ``32 i + l`` of the chunk, so that every load and store is contiguous. The last
chunk of a row may have fewer columns, c of them, a multiple of 4; its word i of column l is word
``c i + l``. The 32 values of a column form 16 *pairs*: words with one number in each half. So
16-bit floats are processed two at a time in their memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type

LANES = 32
CHUNK = 1024
"""Values per chunk."""
LINE = 128
"""Values of four columns: chunks consist of whole lines, and the values after the last line are not
coded."""
PAIRS = CHUNK // LANES // 2
HALVES = 0x00010001
"""A one in both halves of a word."""


@dataclass(frozen=True)
class FloatForm:
    """The bit layout of a float. ``rest`` is the number of bits of sign and mantissa."""

    dtype: torch.dtype
    exponent_bits: int
    rest: int

    @property
    def packed_length(self) -> int:
        """Words of a column in memory."""
        return CHUNK // LANES * self.dtype.itemsize // 4

    @property
    def rest_words(self) -> int:
        """Words for the ``rest`` of a column, without wasted bits."""
        return CHUNK // LANES * self.rest // 32


@dataclass(frozen=True)
class Bfloat16(FloatForm):
    """8 exponent bits, 8 other bits: two halves of 16 bits."""

    dtype: torch.dtype = torch.bfloat16
    exponent_bits: int = 8
    rest: int = 8


@dataclass(frozen=True)
class Float16(FloatForm):
    """5 exponent bits; the other 11 bits are sent as 8 and 3."""

    dtype: torch.dtype = torch.float16
    exponent_bits: int = 5
    rest: int = 11


@dataclass(frozen=True)
class Float32(FloatForm):
    """8 exponent bits; the other 24 bits are sent as three words for every four."""

    dtype: torch.dtype = torch.float32
    exponent_bits: int = 8
    rest: int = 24


FORMS: dict[torch.dtype, FloatForm] = {
    form.dtype: form for form in (Bfloat16(), Float16(), Float32())
}


@by_type
def split(form: FloatForm, packed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the words of columns into 16 pairs of exponents and ``form.rest_words`` words of sign
    and mantissa."""
    raise NotImplementedError(form)


@by_type
def join(form: FloatForm, pairs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``split``."""
    raise NotImplementedError(form)


@split.register
def _split_float32(form: Float32, packed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    low, high = packed[0::2], packed[1::2]
    pairs = [((a >> 23) & 0xFF) | ((b >> 7) & 0x00FF0000) for a, b in zip(low, high, strict=True)]
    rests = [(word & 0x007FFFFF) | ((word >> 8) & 0x00800000) for word in packed]
    return pairs, _three_of_four(rests)


@join.register
def _join_float32(form: Float32, pairs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    rests = _four_of_three(rest)
    exponents = [part for pair in pairs for part in (pair & 0xFF, (pair >> 16) & 0xFF)]
    return [
        (rest & 0x007FFFFF) | ((rest & 0x00800000) << 8) | (exponent << 23)
        for rest, exponent in zip(rests, exponents, strict=True)
    ]


@split.register
def _split_bfloat16(form: Bfloat16, packed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return (
        [(word >> 7) & 0x00FF00FF for word in packed],
        pack([(word & 0x007F007F) | ((word >> 8) & 0x00800080) for word in packed], 8),
    )


@join.register
def _join_bfloat16(form: Bfloat16, pairs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    rests = unpack(rest, 8)
    return [
        (r & 0x007F007F) | ((r & 0x00800080) << 8) | (p << 7)
        for r, p in zip(rests, pairs, strict=True)
    ]


@split.register
def _split_float16(form: Float16, packed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    bytes_ = pack([word & 0x00FF00FF for word in packed], 8)
    above = pack([((word >> 8) & 0x00030003) | ((word >> 13) & 0x00040004) for word in packed], 3)
    return [(word >> 10) & 0x001F001F for word in packed], bytes_ + above


@join.register
def _join_float16(form: Float16, pairs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    bytes_, above = unpack(rest[:8], 8), unpack(rest[8:], 3)
    return [
        b | ((a & 0x00030003) << 8) | ((a & 0x00040004) << 13) | (p << 10)
        for b, a, p in zip(bytes_, above, pairs, strict=True)
    ]


def pack(pairs: Sequence[Tensor], bits: int) -> list[Tensor]:
    """Pack 16 pairs of ``bits``-bit fields (8 bits, or fewer than 4) into ``bits`` words.

    Each half of a word holds as many whole fields as fit. With 3 bits, one bit of 16 is left, and
    the last field is distributed over these bits.
    """
    each = 16 // bits
    words = [
        _or([pair << (bits * place) for place, pair in enumerate(pairs[start : start + each])])
        for start in range(0, each * bits, each)
    ]
    if each * bits == PAIRS:
        return words
    last = pairs[-1]
    return [word | (((last >> bit) & HALVES) << 15) for bit, word in enumerate(words)]


def unpack(packed: Sequence[Tensor], bits: int) -> list[Tensor]:
    """The inverse of ``pack``."""
    each = 16 // bits
    field = ((1 << bits) - 1) * HALVES
    pairs = [(word >> (bits * place)) & field for word in packed for place in range(each)]
    if len(pairs) < PAIRS:
        pairs.append(_or([((word >> 15) & HALVES) << bit for bit, word in enumerate(packed)]))
    return pairs


def _three_of_four(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Pack 24-bit numbers: the fourth of every four is distributed over the free bytes of the other
    three."""
    return [
        numbers[start + k] | ((numbers[start + 3] >> (8 * k)) << 24)
        for start in range(0, len(numbers), 4)
        for k in range(3)
    ]


def _four_of_three(packed: Sequence[Tensor]) -> list[Tensor]:
    numbers = []
    for start in range(0, len(packed), 3):
        three = packed[start : start + 3]
        numbers += [word & 0x00FFFFFF for word in three]
        numbers.append(_or([((word >> 24) & 0xFF) << (8 * k) for k, word in enumerate(three)]))
    return numbers


def _or(parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return whole
