"""Fused operators: a chain as one coded operator.

Like every coded operator it stands for plain operators, and is expanded to them if no kernel is
generated for it, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from commpass.codecs import operators
from commpass.lowering.chain import (
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Normalize,
    Scale,
    Shift,
    Step,
    Store,
    apply,
    apply_further,
    encoded_dtype,
    further_results,
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
    for number, step in enumerate(chain.steps):
        if isinstance(step, Shift) and "norm" not in words[:number]:
            words[number] = "bias"
    return "+".join(word for word, _ in groupby(filter(None, words)))


UNNAMED = (Cast, Divide, Store, Scale, Shift)
"""Steps that roles do not name, except a bias that belongs to no norm."""


def _step_name(step: Step) -> str:
    if isinstance(step, UNNAMED):
        return ""
    return "norm" if isinstance(step, Normalize) else type(step).__name__.lower()


def _step_text(step: Step) -> str:
    if isinstance(step, (Encode, Decode)):
        return f"{_step_name(step)} {step.codec.spec}"
    if isinstance(step, Cast):
        return str(step.dtype).removeprefix("torch.")
    if isinstance(step, Normalize):
        kind = "layer norm" if step.centered else "norm"
        return " ".join([kind, str(step.width), f"eps={step.eps!r}", *step.saved])
    if isinstance(step, Scale):
        offset = f" plus {step.offset!r}" if step.offset else ""
        return f"scale by {str(step.weight).removeprefix('torch.')}{offset}"
    return type(step).__name__.lower()


# --- implementation -------------------------------------------------------------------------------


def compute(inputs: Sequence[Tensor], name: str, numel: int) -> Tensor:
    """Apply all steps to rows, by the plain operators of each."""
    return compute_all(inputs, name, numel)[0]


def compute_all(inputs: Sequence[Tensor], name: str, numel: int) -> list[Tensor]:
    """As ``compute``; the further results of the chain follow its result."""
    rows, others, further = inputs[0], iter(inputs[1:]), list[Tensor]()
    for step in lookup(name).steps:
        further += apply_further(step, rows)
        rows = apply(step, rows, others, numel)
    # No result shares memory with another.
    return [rows.contiguous(), *(each.clone() if each is rows else each for each in further)]


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


def _shapes(inputs: Sequence[Tensor], name: str, numel: int) -> list[Tensor]:
    made = _shape(inputs, name, numel)
    rows = made.shape[0]
    return [
        made,
        *(
            made.new_empty((rows, numel // each.per), dtype=each.dtype)
            for each in further_results(lookup(name))
        ),
    ]


FUSED_RESULTS = operators.define(
    "fused_results",
    "(Tensor[] inputs, str chain, SymInt numel) -> Tensor[]",
    compute_all,
    _shapes,
    "fused",
)
"""The fused operator of a chain with further results: the result, then these in order."""
CHAINS = (FUSED, FUSED_RESULTS)
"""The operators that name a chain."""
