"""A matmul and the encode of its result as one coded operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import Codec, operators


@dataclass(frozen=True)
class Product:
    """The operations on a product ``a @ b`` up to the wire.

    A bias is added, the sum is rounded to the operands' dtype, ``activation`` (relu, or none) is
    applied, and the values are encoded as ``rows`` rows of equal length.
    """

    codec: Codec
    rows: int
    activation: str = ""


_products: dict[str, Product] = {}


def lookup(name: str) -> Product:
    """Return the product of an operator's argument."""
    return _products[name]


def name_of(product: Product) -> str:
    """Return the name of a product in a graph."""
    then = f"{product.activation}, " if product.activation else ""
    name = f"{then}{product.rows} rows, {product.codec.spec}"
    while _products.setdefault(name, product) != product:
        name += "'"
    return name


def compute(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> Tensor:
    product = lookup(name)
    rows = values(a, b, bias, product).reshape(product.rows, -1).to(torch.float32)
    return product.codec.encode_rows(rows).contiguous()


def values(a: Tensor, b: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Return the values that a product encodes: ``[m, n]`` in the operands' dtype."""
    found = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return torch.relu(found) if product.activation == "relu" else found


def _shape(a: Tensor, b: Tensor, bias: Tensor | None, name: str) -> Tensor:
    product = lookup(name)
    numel = a.shape[0] * b.shape[1] // product.rows
    width = product.codec.wire_bytes(numel, torch.float32)
    return a.new_empty((product.rows, width), dtype=torch.uint8)


MATMUL = operators.define(
    "matmul_encode",
    "(Tensor a, Tensor b, Tensor? bias, str product) -> Tensor",
    compute,
    _shape,
    "matmul+encode",
)
"""The operator from ``a [m, k]``, ``b [k, n]`` and a bias ``[n]`` to the wires of ``[rows, m n /
rows]`` values."""
