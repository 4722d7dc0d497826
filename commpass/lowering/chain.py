"""Chains: sequences of steps that one generated kernel runs on rows, with all intermediate values
in registers.

A chain is plain data, derived from the coded operators of a graph. Kernels in Triton and C++ are
generated from it. The first step reads values ``[rows, numel]``, or a wire ``[rows, wire_bytes]``
if it is ``Decode``. The last step writes a wire if it is ``Encode``, else values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commpass.codecs import Codec, Domain


@dataclass(frozen=True)
class Decode:
    """Decode a wire of ``codec`` to values in the accumulation dtype of ``dtype``, the encoded
    dtype: ``Codec.decode_rows``."""

    codec: Codec
    dtype: torch.dtype


@dataclass(frozen=True)
class Sum:
    """Sum ``ranks`` rows to one, in rank order, in their own dtype."""

    ranks: int


@dataclass(frozen=True)
class Divide:
    """Divide values by a number."""

    by: float


@dataclass(frozen=True)
class Enter:
    """Transform values to a domain: ``Domain.to_domain``."""

    domain: Domain


@dataclass(frozen=True)
class Leave:
    """Transform values back from a domain: ``Domain.from_domain``."""

    domain: Domain


@dataclass(frozen=True)
class Cast:
    """Round values to a dtype."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Add:
    """Add the chain's next input (a residual), a tensor of the shape and dtype that the values have
    here."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Encode:
    """Encode values to a wire of ``codec``: ``Codec.encode_rows``."""

    codec: Codec


Step = Decode | Sum | Divide | Enter | Leave | Cast | Add | Encode


@dataclass(frozen=True)
class Chain:
    """Steps, and the dtype of the first one's input (uint8 for a wire)."""

    taken: torch.dtype
    steps: tuple[Step, ...]

    @property
    def decodes(self) -> Decode | None:
        """The first step if it decodes a wire, else None."""
        first = self.steps[0] if self.steps else None
        return first if isinstance(first, Decode) else None

    @property
    def encodes(self) -> Encode | None:
        """The last step if it encodes a wire, else None."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Encode) else None

    @property
    def ranks(self) -> int:
        """The number of rows that are summed to one; 1 without a sum."""
        return next((step.ranks for step in self.steps if isinstance(step, Sum)), 1)
