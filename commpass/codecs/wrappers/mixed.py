"""Mixed precision of tokens: a fixed share of them by one codec, the others by another one
(TahQuant: 3 and 4 bits).

The values of a row are tokens of ``width`` values. The sender computes a score of each, which
decides the tokens in the share. On the wire a row is one bit per token, then the wire of the tokens
in the share, then the wire of the others. The share is fixed, and so is the size of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from commpass.codecs.block.packing import pack, unpack
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, ceil_to, cut_apart, pad
from commpass.codecs.wrappers.inner import Resolve, inner_codec
from commpass.errors import PolicyError, nearest


def entropy(tokens: Tensor) -> Tensor:
    """Return ``-sum(p ln p)`` with ``p = |x| / sum |x|`` of each token, ``[..., width]`` to
    ``[...]``: 0 for a single nonzero value, ``ln(width)`` if all have the same size."""
    shares = tokens / tokens.sum(-1, keepdim=True).clamp_min(torch.finfo(tokens.dtype).tiny)
    return -torch.special.xlogy(shares, shares).sum(-1)


def energy(tokens: Tensor) -> Tensor:
    """Return the sum of squares of each token, ``[..., width]`` to ``[...]``. A codec's error grows
    with it, so the total error is least if the largest tokens have more bits."""
    return tokens.square().sum(-1)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {"entropy": entropy, "energy": energy}
"""Score functions by name: they map magnitudes ``|x|`` of tokens, at most 1, to scores."""
LEAST = 0.001
"""The smallest share of either codec: a share is a fraction with a denominator up to 1000."""


@dataclass(frozen=True)
class MixedCodec(Codec):
    """Encode the ``ceil(share * tokens)`` tokens of highest score ``by`` with ``high``, the others
    with ``low``.

    Of equal scores the first tokens are in the share. Zeros fill the last token.
    """

    spec: str = field(compare=False)
    high: Codec
    low: Codec
    share: Fraction
    width: int
    by: str

    @property
    def block(self) -> int:
        return self.width

    @property
    def bound(self) -> float:
        return max(self.high.bound, self.low.bound)

    def floor(self, dtype: torch.dtype) -> float:
        return max(self.high.floor(dtype), self.low.floor(dtype))

    def salted(self, *salt: int) -> MixedCodec:
        return replace(self, high=self.high.salted(*salt), low=self.low.salted(*salt))

    def _counts(self, numel: int) -> tuple[int, int]:
        """Return the number of tokens of a row, and how many of them are in the share."""
        tokens = (numel + self.width - 1) // self.width
        above, below = self.share.numerator, self.share.denominator
        return tokens, (tokens * above + below - 1) // below

    def _bytes(self, numel: int, dtype: torch.dtype) -> list[int]:
        """Bytes of the bits per token, of the tokens in the share, and of the others."""
        tokens, most = self._counts(numel)
        return [
            aligned((tokens + 7) // 8),
            self.high.wire_bytes(most * self.width, dtype),
            self.low.wire_bytes((tokens - most) * self.width, dtype),
        ]

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self._bytes(numel, dtype))

    def encode_rows(self, rows: Tensor) -> Tensor:
        (count, numel), dtype = rows.shape, rows.dtype
        tokens, most = self._counts(numel)
        split = pad(rows, tokens * self.width).reshape(count, tokens, self.width)
        order = self._score(split).sort(dim=1, descending=True, stable=True).indices
        place = order.argsort(dim=1)  # rank of each token: the first `most` are in the share
        chosen = place < most
        # Tokens in the share first; both parts keep the original order.
        order = (~chosen).to(torch.uint8).sort(dim=1, stable=True).indices
        sorted_ = split.gather(1, order.unsqueeze(2).expand(-1, -1, self.width))
        high = sorted_.narrow(1, 0, most).reshape(count, most * self.width)
        low = sorted_.narrow(1, most, tokens - most)
        low = low.reshape(count, (tokens - most) * self.width)
        first = self._bytes(numel, dtype)[0]
        bits = pack(pad(chosen.to(torch.uint8), ceil_to(tokens, 8)), 1)
        return torch.cat(
            [pad(bits, first), self.high.encode_rows(high), self.low.encode_rows(low)], dim=1
        )

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        count, (tokens, most) = wire.shape[0], self._counts(numel)
        first, second, third = self._bytes(numel, dtype)
        bits = wire.narrow(1, 0, (tokens + 7) // 8)
        chosen = unpack(bits, 1).narrow(1, 0, tokens).to(torch.bool)
        high = self.high.decode_rows(wire.narrow(1, first, second), most * self.width, dtype)
        low = self.low.decode_rows(
            wire.narrow(1, first + second, third), (tokens - most) * self.width, dtype
        )
        # The position of each token in the concatenation of the two parts.
        place = torch.where(chosen, chosen.cumsum(1) - 1, most + (~chosen).cumsum(1) - 1).clamp(
            0, tokens - 1
        )
        both = torch.cat([high, low], dim=1).reshape(count, tokens, self.width)
        values = both.gather(1, place.unsqueeze(2).expand(-1, -1, self.width))
        return cut_apart(values.reshape(count, tokens * self.width), numel)

    def _score(self, split: Tensor) -> Tensor:
        """Return scores ``[rows, tokens]``; nonfinite values count as 0."""
        sizes = split.to(accumulation_dtype(split.dtype)).abs().nan_to_num(0.0, 0.0)
        peak = sizes.amax(dim=(1, 2), keepdim=True) if split.shape[1] else sizes
        return SCORES[self.by](sizes / peak.clamp_min(torch.finfo(sizes.dtype).tiny))


def mixed(
    resolve: Resolve,
    spec: str,
    *,
    high: str = "tahquant",
    low: str = "tahquant(bits=3)",
    share: float = 0.8,
    width: int = 0,
    by: str = "entropy",
) -> Codec:
    """A fixed ``share`` of the tokens by codec ``high``, the others by ``low`` (TahQuant: 4 bits
    for 80 % of the tokens, 3 for the others).

    ``width`` is the number of values per token, a multiple of the blocks of both codecs; 0 uses one
    block. ``by`` selects the tokens in the share: those of highest ``entropy``, as in TahQuant, or
    of highest ``energy``. The latter is not in the paper and has less error if tokens differ in
    size.
    """
    if not LEAST <= share <= 1 - LEAST:
        raise PolicyError(f"share={share}: must be from {LEAST} to {1 - LEAST}, such as 0.8")
    if by not in SCORES:
        raise PolicyError(f"by={by!r}{nearest(by, SCORES)}")
    more, less = inner_codec(resolve, "high", high), inner_codec(resolve, "low", low)
    for name, inner in (("high", more), ("low", less)):
        if inner.lossless or inner.dynamic or isinstance(inner, MixedCodec):
            raise PolicyError(
                f"{name}={inner.spec!r}: take a lossy codec whose messages have a fixed size, such"
                " as 'rotated(bits=3)'"
            )
    block = math.lcm(more.block, less.block)
    if width < 0 or width % block:
        raise PolicyError(f"width={width}: must be a multiple of {block}, or 0 for {block}")
    fraction = Fraction(share).limit_denominator(round(1 / LEAST))
    return MixedCodec(spec, more, less, fraction, width or block, by)


PRESETS = (
    Preset(
        "mixed",
        mixed,
        "4 bits for four tokens of five, 3 for the others (TahQuant), or any two codecs",
        ("mixed",),
        has_inner=True,
    ),
)
