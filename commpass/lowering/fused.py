"""Fused operators: a chain as one coded operator.

Like every coded operator it stands for plain operators, and is expanded to them if no kernel is
generated for it, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import accumulation_dtype, operators
from commpass.codecs.dispatch import by_type
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Step,
    Sum,
)

_held: dict[str, Chain] = {}
"""Chains by their names in arguments of operators."""


def named(name: str) -> Chain:
    """Return the chain of an operator's argument."""
    return _held[name]


def name_of(chain: Chain) -> str:
    """Return the name of a chain in a graph: its steps in words."""
    dtype = str(chain.taken).removeprefix("torch.")
    name = f"{dtype}: {' + '.join(map(_step_text, chain.steps))}"
    while _held.setdefault(name, chain) != chain:
        name += "'"
    return name


def role_of(chain: Chain) -> str:
    """Return the roles of a chain's steps, such as ``decode+sum+encode``."""
    words = [_step_name(step) for step in chain.steps]
    return "+".join(dict.fromkeys(word for word in words if word))


def made_dtype(chain: Chain) -> torch.dtype:
    """Return the dtype of a chain's result."""
    held = chain.taken
    for step in chain.steps:
        held = dtype_after(step, held)
    return torch.uint8 if chain.encodes is not None else held


def dtype_after(step: Step, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values after a step."""
    if isinstance(step, (Cast, Add)):
        return step.dtype
    if isinstance(step, Decode):
        return step.dtype if step.codec.lossless else accumulation_dtype(step.dtype)
    return dtype


def _step_name(step: Step) -> str:
    return "" if isinstance(step, (Cast, Divide)) else type(step).__name__.lower()


def _step_text(step: Step) -> str:
    word = type(step).__name__.lower()
    if isinstance(step, (Encode, Decode)):
        return f"{word} {step.codec.spec}"
    if isinstance(step, Cast):
        return str(step.dtype).removeprefix("torch.")
    return word


# --- implementation -------------------------------------------------------------------------------


def compute(inputs: Sequence[Tensor], name: str, numel: int) -> Tensor:
    """Apply all steps to rows, by the plain operators of each."""
    rows, others = inputs[0], iter(inputs[1:])
    for step in named(name).steps:
        rows = _done(step, rows, others, numel)
    return rows.contiguous()


@by_type
def _done(step: Step, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    raise NotImplementedError(step)


@_done.register
def _decode(step: Decode, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.codec.decode_rows(rows, numel, step.dtype)


@_done.register
def _encode(step: Encode, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.codec.encode_rows(rows)


@_done.register
def _sum(step: Sum, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    sums = rows.reshape(-1, step.ranks, rows.shape[1]).unbind(0)
    return torch.cat([operators.sum_rows(each) for each in sums])


@_done.register
def _divide(step: Divide, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows / step.by


@_done.register
def _enter(step: Enter, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.domain.to_domain(rows)


@_done.register
def _leave(step: Leave, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return step.domain.from_domain(rows)


@_done.register
def _cast(step: Cast, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows.to(step.dtype)


@_done.register
def _add(step: Add, rows: Tensor, inputs: Iterator[Tensor], numel: int) -> Tensor:
    return rows + next(inputs).reshape(rows.shape)


def _shape(inputs: Sequence[Tensor], name: str, numel: int) -> Tensor:
    chain, rows = named(name), inputs[0]
    width: Any = numel
    if chain.encodes is not None:
        width = chain.encodes.codec.wire_bytes(numel, encoded_dtype(chain))
    return rows.new_empty((rows.shape[0] // chain.ranks, width), dtype=made_dtype(chain))


def encoded_dtype(chain: Chain) -> torch.dtype:
    """Return the dtype of the values that a chain encodes, which determines the size of its
    wire."""
    held = chain.taken
    for step in chain.steps[:-1]:
        held = dtype_after(step, held)
    return held


FUSED = operators.define(
    "fused", "(Tensor[] inputs, str chain, SymInt numel) -> Tensor", compute, _shape, "fused"
)
"""The fused operator. Its inputs are rows ``[r, n]``, then the inputs of later steps; the result is
``[r / ranks, numel]`` values, or wires."""
