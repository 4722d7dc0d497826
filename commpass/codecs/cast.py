"""Casts to 16-bit floats as codecs, a baseline for the other codecs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commpass.codecs.codec import Codec, accumulation_dtype
from commpass.codecs.preset import Preset
from commpass.codecs.rows import aligned, as_bytes, finite_stays, pad
from commpass.errors import PolicyError, nearest

FORMS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes by name."""


@dataclass(frozen=True)
class CastCodec(Codec):
    """Round each value to the nearest 16-bit float, ties to even; 2 bytes per value, no side data.

    Nonfinite values are kept (law 2). A finite value that would be rounded to an Inf becomes the
    largest number instead: above 65504 in fp16, above 3.39e38 in bf16. Values representable in the
    16-bit dtype are exact, but the codec counts as lossy, since it does not know its input.
    """

    spec: str = field(compare=False)
    form: str

    block = 1

    @property
    def has_independent_blocks(self) -> bool:
        return True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return FORMS[self.form]

    @property
    def bound(self) -> float:
        """Half a unit of the mantissa: 2^-8 for bf16, 2^-11 for fp16. It holds for values up to the
        largest number of the dtype; above it, all of a value may be lost."""
        return torch.finfo(self.dtype).eps / 2

    def floor(self, dtype: torch.dtype) -> float:
        """Half a step of the subnormals: 2^-134 for bf16, 2^-25 for fp16."""
        form = torch.finfo(self.dtype)
        return float(form.tiny) * form.eps / 2

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return aligned(2 * numel)

    def encode_rows(self, rows: Tensor) -> Tensor:
        form, numel = self.dtype, rows.shape[1]
        if isinstance(numel, int) and numel == 0:
            return rows.new_empty((rows.shape[0], 0), dtype=torch.uint8)
        if _reach(rows.dtype) > _reach(form):  # clamp to the largest number of the form
            wide = rows.to(accumulation_dtype(rows.dtype))
            rows = finite_stays(wide, wide, form)
        codes = rows.to(form, copy=True).contiguous()  # a wire must not alias the values
        return pad(as_bytes(codes), self.wire_bytes(numel, form))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        form, work = self.dtype, accumulation_dtype(dtype)
        if isinstance(numel, int) and numel == 0:
            return wire.new_empty((wire.shape[0], 0), dtype=work)
        values = wire.narrow(1, 0, 2 * numel).view(form).to(work)
        return finite_stays(values, values, dtype) if _reach(form) > _reach(dtype) else values


def _reach(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def cast(spec: str, *, to: str = "bf16") -> Codec:
    """16-bit floats: ``to`` is bf16, with the range of fp32, or fp16, with 3 more mantissa bits and
    a largest value of 65504."""
    if to not in FORMS:
        raise PolicyError(f"to={to!r}{nearest(to, FORMS)}")
    return CastCodec(spec, to)


def bf16(spec: str) -> Codec:
    """16-bit floats with the range of fp32: ``cast(bf16)``."""
    return CastCodec(spec, "bf16")


def fp16(spec: str) -> Codec:
    """16-bit floats with 11 bits of mantissa and a largest value of 65504: ``cast(fp16)``."""
    return CastCodec(spec, "fp16")


PRESETS = (
    Preset(
        "cast",
        cast,
        "a 16-bit float: what every framework has; half of the bytes of float32",
        ("cast", "cast(to=fp16)"),
    ),
    Preset("bf16", bf16, "cast to bfloat16"),
    Preset("fp16", fp16, "cast to float16"),
)
