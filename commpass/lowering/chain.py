"""Chains: what one generated kernel does with rows, step by step, on tiles that never leave the
processor's registers in between.

A chain is plain data, read off the coded operators of a graph. From it the kernels are generated,
in Triton and in C++. The first step takes rows: of values ``[rows, numel]``, or of a wire
``[rows, wire_bytes]`` if it is ``Decode``. The last one writes rows: a wire if it is ``Encode``,
else values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commpass.codecs import Codec, Domain


@dataclass(frozen=True)
class Decode:
    """Wire of ``codec`` to values in the accumulation dtype of ``dtype``, which was encoded: what
    ``Codec.decode_rows`` computes."""

    codec: Codec
    dtype: torch.dtype


@dataclass(frozen=True)
class Sum:
    """``ranks`` rows to one, added in rank order, in their own dtype."""

    ranks: int


@dataclass(frozen=True)
class Divide:
    """Values divided by a number."""

    by: float


@dataclass(frozen=True)
class Enter:
    """Values to a domain: ``Domain.enter``."""

    domain: Domain


@dataclass(frozen=True)
class Leave:
    """Values out of a domain: ``Domain.leave``."""

    domain: Domain


@dataclass(frozen=True)
class Cast:
    """Values rounded to a dtype."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Add:
    """Another tensor of the shape and dtype that values have here, the chain's next input, is
    added (a residual)."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Normalise:
    """Root mean square norm of each ``width`` values, times a weight of so many values and
    ``dtype``, the chain's next input; ``eps`` as in ``torch.nn.RMSNorm``."""

    width: int
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Encode:
    """Values to the wire of ``codec``: ``Codec.encode_rows``."""

    codec: Codec


Step = Decode | Sum | Divide | Enter | Leave | Cast | Add | Normalise | Encode


@dataclass(frozen=True)
class Chain:
    """Steps, and the dtype of the values that the first one takes (of a wire: uint8)."""

    taken: torch.dtype
    steps: tuple[Step, ...]

    @property
    def decodes(self) -> Decode | None:
        """Its first step, if it takes a wire."""
        first = self.steps[0] if self.steps else None
        return first if isinstance(first, Decode) else None

    @property
    def encodes(self) -> Encode | None:
        """Its last step, if it makes a wire."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Encode) else None

    @property
    def ranks(self) -> int:
        """Rows that are summed to one; 1 if none are."""
        return next((step.ranks for step in self.steps if isinstance(step, Sum)), 1)
