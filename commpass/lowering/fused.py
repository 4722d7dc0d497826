"""Fused operators: a chain as one coded operator.

Like every coded operator it stands for plain operators, and is expanded to them if no kernel is
generated for it, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commpass.codecs import operators
from commpass.lowering.chain import (
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Step,
    apply,
    encoded_dtype,
    output_dtype,
)

_chains: dict[str, Chain] = {}
"""Chains by their names in arguments of operators."""


def lookup(name: str) -> Chain:
    """Return the chain of an operator's argument."""
    return _chains[name]


def name_of(chain: Chain) -> str:
    """Return the name of a chain in a graph: its steps in words."""
    dtype = str(chain.input_dtype).removeprefix("torch.")
    name = f"{dtype}: {' + '.join(map(_step_text, chain.steps))}"
    while _chains.setdefault(name, chain) != chain:
        name += "'"
    return name


def role_of(chain: Chain) -> str:
    """Return the roles of a chain's steps, such as ``decode+sum+encode``."""
    words = [_step_name(step) for step in chain.steps]
    return "+".join(dict.fromkeys(word for word in words if word))


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
    for step in lookup(name).steps:
        rows = apply(step, rows, others, numel)
    return rows.contiguous()


def _shape(inputs: Sequence[Tensor], name: str, numel: int) -> Tensor:
    chain, rows = lookup(name), inputs[0]
    width: Any = numel
    if chain.encodes is not None:
        width = chain.encodes.codec.wire_bytes(numel, encoded_dtype(chain))
    return rows.new_empty((rows.shape[0] // chain.ranks, width), dtype=output_dtype(chain))


FUSED = operators.define(
    "fused", "(Tensor[] inputs, str chain, SymInt numel) -> Tensor", compute, _shape, "fused"
)
"""The fused operator. Its inputs are rows ``[r, n]``, then the inputs of later steps; the result is
``[r / ranks, numel]`` values, or wires."""
