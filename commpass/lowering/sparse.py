"""Selection from rows on a GPU, as one operator for each coded one: it launches its kernels in
order, with operations on a few numbers between them.

Inlined, a selection is hundreds of plain operators. The bytes and the residual are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from commpass.codecs import codec as codec_of
from commpass.codecs import operators
from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.sparse import SparseCodec
from commpass.utils.ambient import ambient_free

ops = torch.ops.commpass
ENCODE = ops.encode_with_feedback.default
SUM = ops.decode_and_sum_by_index.default
CODING = (ENCODE, SUM)

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define(
    "sparse_encode(Tensor rows, Tensor residual, str codec, int[] salt) -> (Tensor, Tensor)"
)
_library.define("sparse_sum(Tensor wires, str codec, int numel, ScalarType dtype) -> Tensor")


def caller(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function that computes a coded operator with selection kernels; None if there are
    none."""
    codec = operators.lookup(str(node.args[2 if node.target is ENCODE else 1]))
    if not isinstance(codec, SparseCodec):
        return None
    rows: Tensor = node.all_input_nodes[0].meta["val"]
    if node.target is ENCODE:
        numel, dtype = rows.shape[1], rows.dtype
    else:
        numel, dtype = node.args[2:4]  # type: ignore[assignment]
    if unsupported_reason(codec, numel, dtype):
        return None
    spec = codec.spec
    if node.target is ENCODE:
        salt: Any = node.args[3]
        return lambda x, residual: ops.sparse_encode(x, residual, spec, salt)
    return lambda wires: ops.sparse_sum(wires, spec, numel, dtype)


def unsupported_reason(codec: SparseCodec, numel: Any, dtype: torch.dtype) -> str:
    """Return why rows of ``numel`` values have no kernels, or "" if they have."""
    from commpass.lowering.gpu import sparse

    if not isinstance(numel, int):
        return "sparse kernels take rows of a fixed length"
    return sparse.unsupported_reason(codec, numel, dtype) or ""


def _codec(name: str) -> SparseCodec:
    found = codec_of(name)
    assert isinstance(found, SparseCodec)
    return found


def _encode(
    rows: Tensor, residual: Tensor, name: str, salt: Sequence[int]
) -> tuple[Tensor, Tensor]:
    from commpass.lowering.gpu import sparse

    codec = _codec(name).salted(*salt)
    return sparse.encode(codec, rows.contiguous(), residual.contiguous())


def _sum(wires: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    from commpass.lowering.gpu import sparse

    return sparse.sum_rows(_codec(name), wires.contiguous(), numel, dtype)


def _shapes_of_encode(
    rows: Tensor, residual: Tensor, name: str, salt: Sequence[int]
) -> tuple[Tensor, Tensor]:
    width = _codec(name).wire_bytes(rows.shape[1], rows.dtype)
    wire = rows.new_empty((rows.shape[0], width), dtype=torch.uint8)
    return wire, residual.new_empty(residual.shape)


def _shape_of_sum(wires: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    return wires.new_empty((numel,), dtype=accumulation_dtype(dtype))


for _name, _function, _shape in (
    ("sparse_encode", _encode, _shapes_of_encode),
    ("sparse_sum", _sum, _shape_of_sum),
):
    _library.impl(_name, ambient_free(_function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"commpass::{_name}", _shape, lib=_library)
