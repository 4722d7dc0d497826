"""Codec ``ecq``: a rotation, one step for a chunk of values, and an entropy code that fills a fixed
number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs.block.domain import VALUES, Domain, domain_of
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.entropy.coder import BLOCK, Form
from commpass.codecs.entropy.operators import BLOCKS, ROTATION, sizes
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, pad
from commpass.errors import PolicyError


@dataclass(frozen=True)
class EntropyCodec(Codec):
    """Encode ``q = round(transform(x) / step)``, and the numbers q by an entropy code.

    A row holds the code of its blocks, ``form.nbytes`` for each of 256 values (see ``coder``). Then
    follows the scale of each chunk of 64 blocks, a byte: a power of two not below its largest
    value.

    The values of a rotated block are close to a Gaussian. In any case, the code of a number is as
    long as a Gaussian's would be, a square plus a constant, and the sum of the squares is the known
    one of the block. So the length of a code hardly depends on the values, and the step that fills
    the bytes is mostly found at the first attempt. Zeros fill the last block of a row.
    """

    spec: str = field(compare=False)
    form: Form
    rotated: bool = True

    @property
    def block(self) -> int:
        return BLOCK

    def padded_numel(self, numel: int) -> int:
        return BLOCKS.padded_numel(numel)

    @property
    def bound(self) -> float:
        """A block of small values beside large ones may become zeros. The largest error has a block
        with a single rotated value, in a chunk that is dithered because it did not fit
        otherwise."""
        return 1.5

    def floor(self, dtype: torch.dtype) -> float:
        return torch.finfo(accumulation_dtype(dtype)).tiny * BLOCK

    @property
    def domain(self) -> Domain:
        return domain_of(ROTATION) if self.rotated else VALUES

    @property
    def domain_codec(self) -> Codec:
        return replace(self, rotated=False)

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        code, side = sizes(numel, self.form.nbytes, dtype)
        return aligned(code), aligned(side)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.parts(numel, dtype))

    def encode_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self.encode_pieces(rows), dim=1)

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self.encode_pieces(rows)

    def encode_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self.padded(
            *torch.ops.commpass.entropy_encode(rows, self.form.nbytes, self.form.even, self.rotated)
        )

    def padded(self, code: Tensor, side: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a wire, of the code and the scales."""
        return tuple(pad(each, aligned(each.shape[1])) for each in (code, side))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        code, side = self.parts(numel, dtype)
        return self.decode_parts(
            (wire.narrow(1, 0, code), wire.narrow(1, code, side)), numel, dtype
        )

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        code, side = sizes(numel, self.form.nbytes, dtype)
        rows: Tensor = torch.ops.commpass.entropy_decode(
            parts[0].narrow(1, 0, code),
            parts[1].narrow(1, 0, side),
            *(self.form.nbytes, self.form.even, self.rotated),
            *(numel, dtype),
        )
        return rows


LEAST_BITS, MOST_BITS = 1.5, 12.0


def ecq(spec: str, *, bits: float = 4.0, even: float = 0.0) -> Codec:
    """A Hadamard rotation with signs, and an entropy code of a fixed size. Not from a paper.

    ``bits`` per value may be a fraction, in sixteenths. ``even`` is 0, 0.5 or 1: the step of a
    block is proportional to its root mean square to this power. 0 gives the least error of the
    whole, 1 the same relative error in all blocks.
    """
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise PolicyError(f"bits={bits}: must be from {LEAST_BITS} to {MOST_BITS}")
    nbytes = int(bits * BLOCK / 16) * 2
    if nbytes * 8 != bits * BLOCK:
        raise PolicyError(
            f"bits={bits}: must be a multiple of 1/16, such as {(nbytes + 2) * 8 / BLOCK}"
        )
    if even not in (0, 0.5, 1):
        raise PolicyError(f"even={even}: must be 0, 0.5 or 1")
    given = [f"{key}={value:g}" for key, value in (("bits", bits), ("even", even)) if key in spec]
    spec = f"ecq({', '.join(given)})" if given else "ecq"
    return EntropyCodec(spec, Form(nbytes, int(2 * even)))


PRESETS = (
    Preset(
        "ecq",
        ecq,
        "rotated integers in an entropy code of fixed size: least error for its bytes; slow",
        ("ecq(bits=2)", "ecq(bits=3)", "ecq", "ecq(bits=6)", "ecq(bits=8)"),
    ),
)
