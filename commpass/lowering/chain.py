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
class Store:
    """Write the values, as they are here, as a further result."""


@dataclass(frozen=True)
class Normalize:
    """Normalize each ``width`` values, in float32: ``x / sqrt(mean(x^2) + eps)``, an RMSNorm, or if
    ``centered`` ``(x - mean(x)) / sqrt(var(x) + eps)``, a LayerNorm.

    ``saved`` names the statistics that are further results, float32 ``[rows, numel / width]``:
    ``mean`` and ``rsqrt``, the factor.
    """

    width: int
    eps: float
    centered: bool = False
    saved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """Multiply each ``width`` values by the chain's next input ``[1, width]`` of dtype ``weight``.
    An ``offset`` is added to it first, in float32."""

    width: int
    weight: torch.dtype
    offset: float = 0.0


@dataclass(frozen=True)
class Shift:
    """Add the chain's next input ``[1, width]`` of dtype ``bias`` to each ``width`` values."""

    width: int
    bias: torch.dtype


@dataclass(frozen=True)
class Encode:
    """Encode values to a wire of ``codec``: ``Codec.encode_rows``."""

    codec: Codec


Step = (
    Decode | Sum | Divide | Enter | Leave | Cast | Add | Store | Normalize | Scale | Shift | Encode
)


BY_WIDTH = (Normalize, Scale, Shift)
"""Steps that compute with ``width`` values, which are the same ones in all of them."""


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

    @property
    def width(self) -> int:
        """The number of values that are normalized together, or to which a row is added; 0 without
        either."""
        return next((step.width for step in self.steps if isinstance(step, BY_WIDTH)), 0)


@dataclass(frozen=True)
class Result:
    """A further result of a chain: its dtype, and the number of values of a row that share one of
    its values."""

    dtype: torch.dtype
    per: int = 1


@dataclass(frozen=True)
class Operand:
    """A further input of a chain: its dtype, and its width if it is one row for all values."""

    dtype: torch.dtype
    width: int | None = None


def further_inputs(chain: Chain) -> tuple[Operand, ...]:
    """Return the inputs of a chain besides its rows, in the order of its steps."""
    found = list[Operand]()
    for step in chain.steps:
        if isinstance(step, Add):
            found.append(Operand(step.dtype))
        elif isinstance(step, Scale):
            found.append(Operand(step.weight, step.width))
        elif isinstance(step, Shift):
            found.append(Operand(step.bias, step.width))
    return tuple(found)


def further_results(chain: Chain) -> tuple[Result, ...]:
    """Return the results that a chain writes besides its last one, in the order of its steps."""
    found, dtype = list[Result](), chain.input_dtype
    for step in chain.steps:
        if isinstance(step, Store):
            found.append(Result(dtype))
        elif isinstance(step, Normalize):
            found += [Result(torch.float32, step.width)] * len(step.saved)
        dtype = dtype_after(step, dtype)
    return tuple(found)


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
    if isinstance(step, Normalize):
        return torch.float32
    if isinstance(step, Scale):
        return torch.promote_types(dtype, torch.float32 if step.offset else step.weight)
    if isinstance(step, Shift):
        return torch.promote_types(dtype, step.bias)
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


@apply.register
def _store(step: Store, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows


@apply.register
def _normalize(step: Normalize, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    x, mean, rsqrt = _statistics(step, rows)
    return ((x - mean) * rsqrt if step.centered else x * rsqrt).reshape(rows.shape)


@apply.register
def _scale(step: Scale, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    weight = next(inputs)
    weight = weight.to(torch.float32) + step.offset if step.offset else weight
    return (_by_width(rows, step.width) * weight).reshape(rows.shape)


@apply.register
def _shift(step: Shift, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return (_by_width(rows, step.width) + next(inputs)).reshape(rows.shape)


def apply_further(step: Step, rows: Tensor) -> list[Tensor]:
    """Return the further results that a step writes, by plain operators. ``rows`` are the values
    before it."""
    if isinstance(step, Store):
        return [rows]
    if isinstance(step, Normalize) and step.saved:
        _, mean, rsqrt = _statistics(step, rows)
        made = {"mean": mean, "rsqrt": rsqrt}
        return [made[name].reshape(rows.shape[0], -1) for name in step.saved]
    return []


def _statistics(step: Normalize, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in float32 by ``width``, their means, and the factors."""
    x = _by_width(rows.to(torch.float32), step.width)
    mean = x.mean(dim=-1, keepdim=True)
    squares = (x - mean).square() if step.centered else x.square()
    return x, mean, (squares.mean(dim=-1, keepdim=True) + step.eps).rsqrt()


def _by_width(rows: Tensor, width: int) -> Tensor:
    return rows.reshape(rows.shape[0], -1, width)
