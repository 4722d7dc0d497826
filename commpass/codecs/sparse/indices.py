"""Codes for the indices of chosen entries, in few bytes; the size depends only on (entries, chosen
entries).

``indices`` are int64 ``[rows, k]``, ascending in each row; an unused slot holds ``n``, one past the
last entry. ``index_code`` picks the smallest of three codes for a density. They are plain data; the
functions dispatch on their type and use plain aten operations only, so everything traces with
symbolic sizes.

- ``Bitmap``: ``n`` bits. The smallest from a density of 1/4 up.
- ``EliasFano``: ``k*l`` bits, then ``k + (n >> l)`` bits (Elias 1974). The smallest below 1/4; up
  to 0.1 within 0.6 bit of the entropy.
- ``Blocks16``: ``16*k`` bits, then 32 for each 65,536 entries. Never the smallest (Elias-Fano with
  l = 16 takes 17 bits); it needs no bit manipulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from commpass.codecs.dispatch import by_type
from commpass.codecs.rows import cut, pad
from commpass.errors import PolicyError, nearest

BLOCK_BITS = 16


@dataclass(frozen=True)
class Bitmap:
    """One bit for each entry: whether it was chosen."""


@dataclass(frozen=True)
class EliasFano:
    """The lowest ``low`` bits of each index unchanged, the other bits in unary by their increments:
    the i-th high part ``h`` sets bit ``h + i``."""

    low: int


@dataclass(frozen=True)
class Blocks16:
    """The low 16 bits of each index, and the number of chosen entries up to the end of each block
    of 65,536."""


IndexCode = Bitmap | EliasFano | Blocks16


def index_code(density: Fraction, kind: str = "least") -> IndexCode:
    """Return the smallest code for a density, or the code of a given kind.

    The choice depends only on the density, so a graph with symbolic sizes produces the same wire as
    one with fixed sizes. Raises PolicyError for an unknown kind.
    """
    fano = min(map(EliasFano, range(32)), key=lambda code: bits_per_entry(code, density))
    codes: dict[str, IndexCode] = {"bitmap": Bitmap(), "elias-fano": fano, "blocks16": Blocks16()}
    if kind == "least":
        return min(codes.values(), key=lambda code: bits_per_entry(code, density))
    if kind.replace("_", "-") not in codes:
        raise PolicyError(f"indices={kind!r}{nearest(kind, ('least', *codes))}")
    return codes[kind.replace("_", "-")]


# --- functions by type ----------------------------------------------------------------------------


@by_type
def nbytes(code: IndexCode, entries: int, count: int) -> int:
    """Return the bytes for ``count`` chosen of ``entries`` entries; both may be symbolic."""
    raise NotImplementedError(code)


@by_type
def bits_per_entry(code: IndexCode, density: Fraction) -> Fraction:
    """Return the bits for each chosen entry of a long row."""
    raise NotImplementedError(code)


@by_type
def encode(code: IndexCode, indices: Tensor, entries: int) -> Tensor:
    """Encode indices ``[rows, k]`` to uint8 ``[rows, nbytes(entries, k)]``."""
    raise NotImplementedError(code)


@by_type
def decode(code: IndexCode, raw: Tensor, entries: int, count: int) -> Tensor:
    """The inverse of ``encode``; for any bytes, all indices are within ``0 ... entries``."""
    raise NotImplementedError(code)


@nbytes.register
def _nbytes_bitmap(code: Bitmap, entries: int, count: int) -> int:
    return _bytes(entries)


@bits_per_entry.register
def _bits_bitmap(code: Bitmap, density: Fraction) -> Fraction:
    return 1 / density


@encode.register
def _encode_bitmap(code: Bitmap, indices: Tensor, entries: int) -> Tensor:
    # The last column receives the unused slots.
    return pack_bits(cut(_ones_at(indices, entries + 1), entries), 1)


@decode.register
def _decode_bitmap(code: Bitmap, raw: Tensor, entries: int, count: int) -> Tensor:
    return _places_of_ones(unpack_bits(raw, entries, 1), count).clamp(max=entries)


@nbytes.register
def _nbytes_fano(code: EliasFano, entries: int, count: int) -> int:
    return _bytes(count * code.low) + _bytes(_upper(code, entries, count))


@bits_per_entry.register
def _bits_fano(code: EliasFano, density: Fraction) -> Fraction:
    return code.low + 1 + 1 / (density * 2**code.low)


@encode.register
def _encode_fano(code: EliasFano, indices: Tensor, entries: int) -> Tensor:
    chosen = indices.shape[1]
    places = (indices >> code.low) + torch.arange(chosen, device=indices.device)
    upper = pack_bits(_ones_at(places, _upper(code, entries, chosen)), 1)
    return torch.cat([pack_bits(indices, code.low), upper], dim=1) if code.low else upper


@decode.register
def _decode_fano(code: EliasFano, raw: Tensor, entries: int, count: int) -> Tensor:
    split = _bytes(count * code.low)
    ones = unpack_bits(raw.narrow(1, split, raw.shape[1] - split), _upper(code, entries, count), 1)
    high = _places_of_ones(ones, count) - torch.arange(count, device=raw.device)
    indices = high << code.low
    if code.low:
        indices = indices | unpack_bits(raw.narrow(1, 0, split), count, code.low)
    return indices.clamp(0, entries)


def _upper(code: EliasFano, entries: int, count: int) -> int:
    """Bits of the high parts: the last position is ``(entries >> low) + chosen - 1``."""
    return count + (entries >> code.low)


@nbytes.register
def _nbytes_blocks(code: Blocks16, entries: int, count: int) -> int:
    return 2 * count + 4 * _blocks(entries)


@bits_per_entry.register
def _bits_blocks(code: Blocks16, density: Fraction) -> Fraction:
    return BLOCK_BITS + 32 / (density * 2**BLOCK_BITS)


@encode.register
def _encode_blocks(code: Blocks16, indices: Tensor, entries: int) -> Tensor:
    offsets = pack_bits(indices & (2**BLOCK_BITS - 1), BLOCK_BITS)
    starts = torch.arange(1, _blocks(entries) + 1, device=indices.device) << BLOCK_BITS
    bounds = starts.clamp(max=entries).expand(indices.shape[0], -1).contiguous()
    ends = torch.searchsorted(indices.contiguous(), bounds)
    return torch.cat([offsets, pack_bits(ends, 32)], dim=1)


@decode.register
def _decode_blocks(code: Blocks16, raw: Tensor, entries: int, count: int) -> Tensor:
    offsets = unpack_bits(raw.narrow(1, 0, 2 * count), count, BLOCK_BITS)
    ends = unpack_bits(raw.narrow(1, 2 * count, 4 * _blocks(entries)), _blocks(entries), 32)
    slots = torch.arange(count, device=raw.device).expand(raw.shape[0], -1).contiguous()
    blocks = torch.searchsorted(ends.contiguous(), slots, right=True)
    found = (blocks << BLOCK_BITS) | offsets
    return torch.where(blocks < _blocks(entries), found, entries).clamp(max=entries)


# --- bit packing ----------------------------------------------------------------------------------


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Pack the low ``width`` bits of integers ``[rows, m]`` to uint8 ``[rows, ceil(m * width /
    8)]``, lowest bit first, without gaps."""
    rows, count = values.shape
    groups = (count + 7) // 8
    octets = pad(values, groups * 8).reshape(rows, groups, 8)
    if width == 1:
        ones = (octets & 1).to(torch.uint8)
    else:
        ones = (
            ((octets.unsqueeze(-1) >> _range(width, values)) & 1)
            .to(torch.uint8)
            .reshape(rows, groups * width, 8)
        )
    packed = (ones << torch.arange(8, dtype=torch.uint8, device=values.device)).sum(
        -1, dtype=torch.uint8
    )
    return cut(packed, _bytes(count * width))


def unpack_bits(raw: Tensor, count: int, width: int) -> Tensor:
    """The inverse of ``pack_bits``: int64 ``[rows, count]``, or uint8 for a width of 1."""
    rows = raw.shape[0]
    groups = (count + 7) // 8
    octets = pad(raw, groups * width).unsqueeze(-1)
    ones = (octets >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1
    if width == 1:
        return cut(ones.reshape(rows, groups * 8), count)
    parts = ones.reshape(rows, groups * 8, width).to(torch.int64)
    return cut((parts << _range(width, parts)).sum(-1), count)


def _ones_at(places: Tensor, length: int) -> Tensor:
    """Return uint8 ``[rows, length]`` with 1 at each of the positions."""
    zeros = torch.zeros((places.shape[0], length), dtype=torch.uint8, device=places.device)
    return zeros.scatter(1, places, 1)


def _places_of_ones(ones: Tensor, count: int) -> Tensor:
    """Return the positions of the first ``count`` ones of each row, int64 ``[rows, count]``; the
    length of the row if there are fewer."""
    before = ones.cumsum(-1, dtype=torch.int32)
    return torch.searchsorted(before, ranks_up_to(count, before))


def ranks_up_to(count: int, like: Tensor) -> Tensor:
    """Return ``1 ... count`` for each row of ``like``, in its dtype."""
    ranks = torch.arange(1, count + 1, dtype=like.dtype, device=like.device)
    return ranks.expand(like.shape[0], -1).contiguous()


def _range(width: int, like: Tensor) -> Tensor:
    return torch.arange(width, dtype=like.dtype, device=like.device)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _blocks(entries: int) -> int:
    return (entries + 2**BLOCK_BITS - 1) >> BLOCK_BITS
