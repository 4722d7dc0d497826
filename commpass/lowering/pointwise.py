"""Pointwise operations on the result of a matmul before it is encoded, as plain data.

The values of an epilogue are numbered: ``v0`` is the rounded result of the matmul, then come the
further operands, then the result of each operation. The last one is encoded. Each operation
computes in float32 and rounds to its dtype, as operators of 16-bit tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VALUE, COLUMN, BATCH = "value", "column", "batch"
"""What a further operand has a value for: each value of the result ``[m, n]``, each of its columns
``[n]``, or each column of each batch ``[batches, n]``."""


@dataclass(frozen=True)
class Operand:
    """A further operand, contiguous: its dtype, and what it has a value for."""

    dtype: torch.dtype
    per: str


@dataclass(frozen=True)
class Operation:
    """A function of values (``"v0"``) and numbers (``"0.5"``), rounded to ``dtype``."""

    name: str
    operands: tuple[str, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Epilogue:
    """The operations between a matmul and the encode of its result, in order."""

    operands: tuple[Operand, ...] = ()
    operations: tuple[Operation, ...] = ()

    @property
    def functions(self) -> list[str]:
        """The names of its operations that are no casts, and no arithmetic with numbers: ``["erf",
        "mul"]``."""
        return [
            each.name
            for each in self.operations
            if each.name not in ("cast", "neg")
            and not any(is_number(operand) for operand in each.operands)
        ]


def is_number(operand: str) -> bool:
    return not operand.startswith("v")


PLAIN: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "exp": torch.exp,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "cast": torch.clone,
}
"""The operations, by name. The first operand is a value, the second one may be a number."""


def apply(epilogue: Epilogue, product: Tensor, operands: Sequence[Tensor], batches: int) -> Tensor:
    """Return the values that an epilogue computes from a product ``[m, n]`` of ``batches``
    batches, by plain operators: ``[m, n]``."""
    if not epilogue.operations:
        return product
    m, n = product.shape
    values = [product.to(torch.float32)]
    for operand, each in zip(epilogue.operands, operands, strict=True):
        shape = {VALUE: (m, n), COLUMN: (1, n), BATCH: (batches, n)}[operand.per]
        value = each.reshape(shape).to(torch.float32)
        if operand.per == BATCH:
            value = value.repeat_interleave(m // batches, 0)
        values.append(value)
    for operation in epilogue.operations:
        given: list[Any] = [
            float(each) if is_number(each) else values[int(each[1:])] for each in operation.operands
        ]
        rounded = PLAIN[operation.name](*given).to(operation.dtype)
        values.append(rounded.to(torch.float32))
    return values[-1]
