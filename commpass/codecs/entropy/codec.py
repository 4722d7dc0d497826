"""Codec ``ecq``: a rotation, one step for a chunk of values, and an entropy code that fills a fixed
number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from commpass.codecs.block import scales, transforms
from commpass.codecs.block.domain import Domain, domain_of
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.transforms import Hadamard, NoTransform, Transform
from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.entropy import operators  # noqa: F401
from commpass.codecs.entropy.coder import BLOCK, CHUNK, Form
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, as_bytes, cut_apart, pad
from commpass.errors import PolicyError

_BLOCKS = Flat(BLOCK)
_OF_CHUNK = CHUNK // BLOCK
_STORED = "pow2"


@dataclass(frozen=True)
class EntropyCodec(Codec):
    """Encode ``q = round(transform(x) / step)``, and the numbers q by an entropy code.

    A row holds the code of its blocks, ``form.room`` bytes for each of 256 values (see ``coder``),
    then the scale of each chunk of 64 blocks: a power of two not below its largest value, a byte.

    The values of a rotated block are close to a Gaussian. In any case, the code of a number is as
    long as a Gaussian's would be, a square plus a constant, and the sum of the squares is the known
    one of the block. So the length of a code hardly depends on the values, and the step that fills
    the bytes is found at once. Zeros fill the last block of a row.
    """

    spec: str = field(compare=False)
    form: Form
    transform: Transform

    @property
    def block(self) -> int:
        return BLOCK

    def padded_numel(self, numel: int) -> int:
        return _BLOCKS.padded_numel(numel)

    @property
    def bound(self) -> float:
        """No error is larger than its (rotated) value: a block of small values beside large ones
        may become zeros."""
        return 1 + 2**-7

    def floor(self, dtype: torch.dtype) -> float:
        return torch.finfo(accumulation_dtype(dtype)).tiny * BLOCK

    @property
    def domain(self) -> Domain:
        return domain_of(self.transform)

    @property
    def domain_codec(self) -> Codec:
        return replace(self, transform=NoTransform())

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        code, side = self._regions(numel, dtype)
        return aligned(code), aligned(side)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.parts(numel, dtype))

    def _regions(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        blocks = _BLOCKS.blocks(numel)
        size = scales.itemsize(_STORED, accumulation_dtype(dtype))
        return blocks * self.form.room, _chunks(blocks) * size

    def encode_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([as_bytes(piece) for piece in self.encode_pieces(rows)], dim=1)

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        code, side = map(as_bytes, self.encode_pieces(rows))
        return code, side

    def encode_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        split = _BLOCKS.split(rows).to(accumulation_dtype(rows.dtype))
        blocks, _ = transforms.forward(self.transform, split)
        scale = scales.materialized(self._scale(blocks), _STORED)
        of_blocks = _of_blocks(scale, blocks.shape[1])
        values = torch.where(of_blocks.isfinite(), blocks * (1 / of_blocks), 0.0)
        code = torch.ops.commpass.entropy_encode(
            values.to(torch.float32).flatten(1), self.form.room, self.form.even
        )
        stored = scales.in_form(scale.squeeze(-1), _STORED)
        return _fill(code), _fill(stored)

    def _scale(self, blocks: Tensor) -> Tensor:
        """Return the scale of each chunk, ``[rows, chunks, 1]``: NaN if it has nonfinite values
        (law 2)."""
        peaks = scales.peak_of(blocks).squeeze(-1)
        chunks = _chunks(blocks.shape[1])
        peak = pad(peaks, chunks * _OF_CHUNK).unflatten(1, (chunks, _OF_CHUNK))
        peak = peak.amax(dim=2, keepdim=True)
        number = peak.clamp_min(torch.finfo(peak.dtype).tiny)
        return scales.round_up(scales.propagate_nonfinite(number, peak), _STORED)

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        code, side = self.parts(numel, dtype)
        return self.decode_parts(
            (wire.narrow(1, 0, code), wire.narrow(1, code, side)), numel, dtype
        )

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        raw, rest = parts
        work = accumulation_dtype(dtype)
        if isinstance(numel, int) and numel == 0:
            return raw.new_empty((raw.shape[0], 0), dtype=work)
        code, side = self._regions(numel, dtype)
        values = torch.ops.commpass.entropy_decode(
            raw.narrow(1, 0, code), self.form.room, self.form.even
        )
        scale = scales.load(rest.narrow(1, 0, side), _STORED, work).unsqueeze(-1)
        # Divide here: dividing later could overflow the sums of the largest finite values.
        sums = self.transform.sums
        blocks = _BLOCKS.blocks(numel)
        decoded = values.unflatten(1, (blocks, BLOCK)).to(work) * _of_blocks(scale / sums, blocks)
        decoded = transforms.inverse(self.transform, decoded, None)
        decoded = decoded * sums if sums > 1 else decoded
        limit = torch.finfo(dtype).max
        return cut_apart(_BLOCKS.join(decoded.clamp(-limit, limit), numel), numel)


def _chunks(blocks: int) -> int:
    return (blocks + _OF_CHUNK - 1) // _OF_CHUNK


def _of_blocks(scale: Tensor, blocks: int) -> Tensor:
    """Return for each block the number of its chunk: ``[rows, blocks, 1]``."""
    return scale.expand(-1, -1, _OF_CHUNK).flatten(1).narrow(1, 0, blocks).unsqueeze(-1)


def _fill(region: Tensor) -> Tensor:
    """Pad a region with zeros to its length on the wire."""
    return pad(region, aligned(region.shape[1] * region.itemsize) // region.itemsize)


LEAST_BITS, MOST_BITS = 1.5, 12.0


def ecq(spec: str, *, bits: float = 4.0, even: float = 0.0) -> Codec:
    """A Hadamard rotation with signs, and an entropy code of a fixed size. Not from a paper.

    ``bits`` per value may be a fraction, in sixteenths. ``even`` is 0, 0.5 or 1: the step of a
    block is proportional to its root mean square to this power. 0 gives the least error of the
    whole, 1 the same relative error in all blocks.
    """
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise PolicyError(f"bits={bits}: must be from {LEAST_BITS} to {MOST_BITS}")
    room = int(bits * BLOCK / 16) * 2
    if room * 8 != bits * BLOCK:
        raise PolicyError(f"bits={bits}: must be a multiple of 1/16, such as {room * 8 / BLOCK}")
    if even not in (0, 0.5, 1):
        raise PolicyError(f"even={even}: must be 0, 0.5 or 1")
    given = [f"{key}={value:g}" for key, value in (("bits", bits), ("even", even)) if key in spec]
    spec = f"ecq({', '.join(given)})" if given else "ecq"
    return EntropyCodec(spec, Form(room, int(2 * even)), Hadamard(BLOCK, signed=True))


PRESETS = (
    Preset(
        "ecq",
        ecq,
        "rotated integers in an entropy code of fixed size: least error for its bytes, on slow"
        " networks",
        ("ecq(bits=2)", "ecq(bits=3)", "ecq", "ecq(bits=6)", "ecq(bits=8)"),
    ),
)
