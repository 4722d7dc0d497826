"""Chains: sequences of steps that one generated kernel runs on rows, with all intermediate values
in registers.

A chain is plain data, derived from the coded operators of a graph. Kernels in Triton and C++ are
generated from it, and ``apply`` computes a step by plain operators. The first step reads values
``[rows, numel]``, or a wire ``[rows, wire_bytes]`` if it is ``Decode``. The last step writes a wire
if it is ``Encode``, else values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import Codec, Domain, accumulation_dtype, operators
from commpass.codecs.dispatch import by_type


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

    input_dtype: torch.dtype
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


# --- dtypes ---------------------------------------------------------------------------------------


def output_dtype(chain: Chain) -> torch.dtype:
    """Return the dtype of a chain's result."""
    dtype = chain.input_dtype
    for step in chain.steps:
        dtype = dtype_after(step, dtype)
    return torch.uint8 if chain.encodes is not None else dtype


def dtype_after(step: Step, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values after a step."""
    if isinstance(step, (Cast, Add)):
        return step.dtype
    if isinstance(step, Decode):
        return step.dtype if step.codec.lossless else accumulation_dtype(step.dtype)
    return dtype


def encoded_dtype(chain: Chain) -> torch.dtype:
    """Return the dtype of the values that a chain encodes, which determines the size of its
    wire."""
    dtype = chain.input_dtype
    for step in chain.steps[:-1]:
        dtype = dtype_after(step, dtype)
    return dtype


# --- plain operators ------------------------------------------------------------------------------


@by_type
def apply(step: Step, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    """Apply a step to rows by plain operators. ``inputs`` are the further inputs of the chain, and
    ``numel`` the number of values of a row."""
    raise NotImplementedError(step)


@apply.register
def _decode(step: Decode, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.codec.decode_rows(rows, numel, step.dtype)


@apply.register
def _encode(step: Encode, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.codec.encode_rows(rows)


@apply.register
def _sum(step: Sum, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    sums = rows.reshape(-1, step.ranks, rows.shape[1]).unbind(0)
    return torch.cat([operators.sum_rows(each) for each in sums])


@apply.register
def _divide(step: Divide, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows / step.by


@apply.register
def _enter(step: Enter, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.domain.to_domain(rows)


@apply.register
def _leave(step: Leave, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.domain.from_domain(rows)


@apply.register
def _cast(step: Cast, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows.to(step.dtype)


@apply.register
def _add(step: Add, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows + next(inputs).reshape(rows.shape)
