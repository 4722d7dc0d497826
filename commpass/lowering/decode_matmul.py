"""A matmul and the decode of the all_gather that produces its rows as one coded operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import Codec, operators


@dataclass(frozen=True)
class DecodedRows:
    """How the left operand of a matmul is decoded.

    Each row of a wire ``[ranks, wire_bytes]`` holds ``numel`` values, ``numel / k`` rows of ``k``.
    They are decoded to ``dtype``, the dtype of the right operand ``[k, n]``, of the ``bias [n]`` if
    there is one, and of the result ``[ranks numel / k, n]``.
    """

    codec: Codec
    numel: int
    dtype: torch.dtype
    bias: bool = False

    @property
    def role(self) -> str:
        """What is fused, as in a plan."""
        return "decode+matmul"


_rows: dict[str, DecodedRows] = {}


def lookup(name: str) -> DecodedRows:
    """Return the left operand of an operator's argument."""
    return _rows[name]


def name_of(rows: DecodedRows) -> str:
    """Return its name in a graph."""
    bias = " and a bias" if rows.bias else ""
    dtype = str(rows.dtype).removeprefix("torch.")
    name = f"{rows.role}{bias}, {rows.numel} {dtype} values a row, {rows.codec.spec}"
    while _rows.setdefault(name, rows) != rows:
        name += "'"
    return name


def compute(tensors: Sequence[Tensor], name: str) -> Tensor:
    rows, (wire, b, *bias) = lookup(name), tensors
    a = rows.codec.decode_rows(wire, rows.numel, rows.dtype).to(rows.dtype)
    a = a.reshape(-1, b.shape[0])
    return torch.addmm(bias[0], a, b) if bias else torch.mm(a, b)


def _shape(tensors: Sequence[Tensor], name: str) -> Tensor:
    rows, (wire, b, *_) = lookup(name), tensors
    return b.new_empty((wire.shape[0] * rows.numel // b.shape[0], b.shape[1]))


DECODE_MATMUL = operators.define(
    "decode_matmul",
    "(Tensor[] operands, str rows) -> Tensor",
    compute,
    _shape,
    "decode+matmul",
)
"""The operator from wires, the right operand and perhaps a bias to the result ``[m, n]``."""
