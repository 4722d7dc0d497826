"""A matmul and the encode of its result as one coded operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commpass.codecs import Codec, operators
from commpass.lowering.pointwise import Epilogue, apply

SINGLE, BATCHED, GROUPED = "", "batched", "grouped"
"""The forms of a product.

- ``SINGLE``: ``a [m, k] @ b [k, n]``, with a bias ``[n]``.
- ``BATCHED``: ``a [batches, m / batches, k] @ b [batches, k, n]``, with a bias ``[batches, n]``.
- ``GROUPED``: ``a [m, k] @ b [groups, k, n]``, with ``offsets [groups]`` int32. Rows from the
  offset before up to that of a group are multiplied by its matrix. Those from the last offset on
  are 0 here; torch leaves them undefined.
"""
HELD = "held"
"""The argument of a kernel for memory of tiles that it encodes later (``gpu.matmul_deferred``)."""


@dataclass(frozen=True)
class Product:
    """The operations on a product, in one of the forms above, up to the wire.

    A bias is added, the sum is rounded to the operands' dtype, the ``epilogue`` is applied, and the
    values ``[m, n]`` are encoded as ``rows`` rows of equal length.
    """

    codec: Codec
    rows: int
    form: str = SINGLE
    bias: bool = False
    epilogue: Epilogue = field(default_factory=Epilogue)

    @property
    def role(self) -> str:
        """What is fused, as in a plan: ``batched matmul+erf+mul+encode``."""
        first = f"{self.form} matmul".strip()
        return "+".join([first, *self.epilogue.functions, "encode"])


@dataclass(frozen=True)
class Operands:
    """The tensors of a product by their use."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    offsets: Tensor | None
    others: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``m``, ``n``, ``k`` and the number of batches or groups."""
        rows, batches = self.a.shape[-2], self.b.shape[0] if self.b.dim() == 3 else 1
        m = rows * batches if self.a.dim() == 3 else rows
        return m, self.b.shape[-1], self.a.shape[-1], batches


def operands_of(product: Product, tensors: Sequence[Tensor]) -> Operands:
    """Return the tensors of the operator by their use: ``a``, ``b``, then a bias and offsets, if
    the product has them, then the operands of its epilogue."""
    a, b, *rest = tensors
    bias = rest.pop(0) if product.bias else None
    offsets = rest.pop(0) if product.form == GROUPED else None
    return Operands(a, b, bias, offsets, tuple(rest))


_products: dict[str, Product] = {}


def lookup(name: str) -> Product:
    """Return the product of an operator's argument."""
    return _products[name]


def name_of(product: Product) -> str:
    """Return the name of a product in a graph."""
    name = f"{product.role}, {product.rows} rows, {product.codec.spec}"
    while _products.setdefault(name, product) != product:
        name += "'"
    return name


def compute(tensors: Sequence[Tensor], name: str) -> Tensor:
    product = lookup(name)
    rows = values(tensors, product).reshape(product.rows, -1).to(torch.float32)
    return product.codec.encode_rows(rows).contiguous()


def values(tensors: Sequence[Tensor], product: Product) -> Tensor:
    """Return the values that a product encodes: ``[m, n]``."""
    given = operands_of(product, tensors)
    n, batches = given.b.shape[-1], given.sizes[-1]
    found = _multiplied(given).reshape(-1, n)
    return apply(product.epilogue, found, given.others, batches)


def _multiplied(given: Operands) -> Tensor:
    """Return the product of the operands and its bias in their dtype."""
    a, b, bias = given.a, given.b, given.bias
    if given.offsets is not None:
        found = torch.ops.aten._grouped_mm.default(a, b, given.offsets)
        rows = torch.arange(a.shape[0], device=a.device)[:, None]
        return torch.where(rows < given.offsets[-1:], found, 0)
    if a.dim() == 3:
        if bias is None:
            return torch.bmm(a, b)
        return torch.baddbmm(bias.reshape(a.shape[0], 1, -1), a, b)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _shape(tensors: Sequence[Tensor], name: str) -> Tensor:
    product = lookup(name)
    m, n, _, _ = operands_of(product, tensors).sizes
    width = product.codec.wire_bytes(m * n // product.rows, torch.float32)
    return tensors[0].new_empty((product.rows, width), dtype=torch.uint8)


MATMUL = operators.define(
    "matmul_encode",
    "(Tensor[] operands, str product) -> Tensor",
    compute,
    _shape,
    "matmul+encode",
)
"""The operator from the operands of a product to the wires of ``[rows, m n / rows]`` values."""
