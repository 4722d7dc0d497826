"""Concatenate bit strings of many columns, each at most 64 bits long, without gaps, and split them
again.

Words are int64 used as unsigned 64-bit words: arithmetic wraps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join_fields(planes: Sequence[Tensor], count: Tensor) -> Tensor:
    """Concatenate bit planes of ``count`` fields each to a string of ``len(planes) * count`` bits.

    ``count`` is int32, ``[...]`` like the planes. The result is wrong if the string exceeds 64
    bits.
    """
    wide = [plane.to(torch.int64) & 0xFFFFFFFF for plane in planes]
    string = wide[0]
    for place, plane in enumerate(wide[1:], start=1):
        string = string | (plane << (count * place).clamp_max(63).to(torch.int64))
    return string


def split_fields(string: Tensor, bits: int, count: Tensor) -> list[Tensor]:
    """The inverse of ``join_fields``; the remaining bits of ``string`` are ignored."""
    mask = ~(torch.full_like(string, -1) << count.to(torch.int64))
    return [
        ((string >> (count * place).clamp_max(63).to(torch.int64) if place else string) & mask).to(
            torch.int32
        )
        for place in range(bits)
    ]


def concatenate(strings: Tensor, lengths: Tensor, length: int) -> Tensor:
    """Concatenate strings ``[rows, n]`` with int64 lengths to ``[rows, length]`` words, followed by
    zeros.

    Word w is ``sums[w + 1] - sums[w]``, so that no two strings store to the same place, though
    several share a word. Their bits are disjoint, hence "or" is "plus", and a word is the increase
    of a running sum (mod 2^64) over it. Exactly one string crosses each boundary between words; it
    stores the sum up to there.
    """
    ends = lengths.cumsum(1)
    offsets = ends - lengths
    shift = offsets & 63
    carry = ((strings >> 1) & 0x7FFFFFFFFFFFFFFF) >> (63 - shift)  # overflow into the next word
    sums = ((strings << shift) + carry).cumsum(1)
    word = offsets >> 6
    meets = (ends >> 6) > word
    rows = torch.arange(strings.shape[0], device=strings.device).unsqueeze(1)
    # Elements that are not stored are never read.
    out = torch.empty((strings.shape[0], length + 2), dtype=torch.int64, device=strings.device)
    out = out.index_put((rows, torch.where(meets, word + 1, length + 1)), sums - carry)
    # The last word may be partial.
    used = (ends[:, -1:] + 63) >> 6
    out = out.index_put((rows, used), sums[:, -1:])
    place = torch.arange(length, device=strings.device)
    before = torch.where(place > 0, out.narrow(1, 0, length), 0)
    return torch.where(place < used, out.narrow(1, 1, length) - before, 0)
