"""Quantisers, products of codes, and norms, as libraries write them: operators of fuzzed programs.

Their results in float64 are those without quantisation, with its error as bound. The check of
interest is that the passes keep the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

TOPS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""The largest code of each format."""
SCALES = ("tensor", "row", "column", "block", "static")
FORMS = ("multiply", "divide", "power of two", "signed")
BLOCK = 4


def _wide(on: Any, x: Any, how: dict[str, Any]) -> Any:
    """Return the values in float32, in which most libraries quantise."""
    narrow = how["wide"] and on.dtype(x) != torch.float32
    return on(convert, x, torch.float32) if narrow else x


def _maxima(on: Any, x: Any, how: dict[str, Any]) -> Any:
    """Return the largest magnitude of the tensor, of each row, column or block."""
    if how["scale"] == "tensor":
        if how["form"] == "signed":
            return on(
                aten.maximum.default,
                on(aten.amax.default, x, []),
                on(aten.neg.default, on(aten.amin.default, x, [])),
            )
        return on(aten.max.default, on(aten.abs.default, x))
    dims = [0] if how["scale"] == "column" else [-1]
    if how["form"] != "signed":
        return on(aten.amax.default, on(aten.abs.default, x), dims, True)
    low = on(aten.neg.default, on(aten.amin.default, x, dims, True))
    return on(aten.maximum.default, on(aten.amax.default, x, dims, True), low)


def _scale(on: Any, x: Any, how: dict[str, Any]) -> Any:
    """Return the factor by which values are multiplied."""
    top = on(aten.clamp.default, _maxima(on, x, how), 1e-5)
    if how["form"] == "multiply":
        top = on(convert, top, torch.float64)
        return on(convert, _times(on, on(aten.reciprocal.default, top), how), torch.float32)
    scale = _times(on, on(aten.reciprocal.default, top), how)
    if how["form"] == "power of two":
        scale = on(convert, scale, torch.float32)
        scale = on(aten.exp2.default, on(aten.floor.default, on(aten.log2.default, scale)))
    return scale


def _times(on: Any, x: Any, how: dict[str, Any]) -> Any:
    return on(aten.mul.Tensor, x, TOPS[how["dtype"]])


def codes(on: Any, x: Any, how: dict[str, Any]) -> tuple[Any, Any]:
    """Return codes of a matrix, and what they are multiplied by: a tensor, or a number if the scale
    is static."""
    top, values = TOPS[how["dtype"]], _wide(on, x, how)
    if how["scale"] == "static":
        scaled, back = on(aten.mul.Tensor, values, how["by"]), 1.0 / how["by"]
    elif how["form"] == "divide":
        back = on(aten.reciprocal.default, _scale(on, values, how))
        scaled = on(aten.div.Tensor, values, back)
    else:
        scale = _scale(on, values, how)
        scaled, back = on(aten.mul.Tensor, values, scale), on(aten.reciprocal.default, scale)
    if how["dtype"] == "int8":
        scaled = on(aten.round.default, scaled)
    scaled = on(aten.clamp.default, scaled, -top, top)
    return on(convert, scaled, getattr(torch, how["dtype"])), back


def _of_rank(how: dict[str, Any], where: Any) -> dict[str, Any]:
    by = how.get("by")
    return {**how, "by": by[where.rank]} if isinstance(by, list) else how


def _blocks(on: Any, x: Any, how: dict[str, Any]) -> Any:
    shape = list(on.shape(x))
    return on(aten.reshape.default, x, [shape[0], shape[1] // BLOCK, BLOCK])


def quantised(on: Any, x: Any, how: dict[str, Any], where: Any) -> Any:
    """Return a matrix as it is after quantisation."""
    how = _of_rank(how, where)
    shape, dtype = list(on.shape(x)), on.dtype(x)
    given, back = codes(on, _blocks(on, x, how) if how["scale"] == "block" else x, how)
    decoded = on(aten.mul.Tensor, on(convert, given, torch.float32), back)
    if how["scale"] == "block":
        decoded = on(aten.reshape.default, decoded, shape)
    return decoded if on.dtype(decoded) == dtype else on(convert, decoded, dtype)


def codes_mm(on: Any, x: Any, y: Any, how: dict[str, Any], where: Any) -> Any:
    """Return the product of a matrix and a transposed one, both quantised."""
    how = _of_rank(how, where)
    a, scale = codes(on, x, how)
    b, other = codes(on, y, {"form": "multiply", **how, "scale": "tensor"})
    b = on(aten.permute.default, b, [1, 0])
    if how["dtype"] == "int8":
        product = on(convert, on(aten._int_mm.default, a, b), torch.float32)
    else:
        one = on(aten.full.default, [], 1.0, dtype=torch.float32, device=torch.device("cpu"))
        product = on(aten._scaled_mm.default, a, b, one, one, None, None, torch.float32)
    product = on(aten.mul.Tensor, on(aten.mul.Tensor, product, scale), other)
    return product if on.dtype(product) == on.dtype(x) else on(convert, product, on.dtype(x))


def norm(on: Any, x: Any, how: dict[str, Any], where: Any) -> Any:
    """Return an RMSNorm or LayerNorm of rows, without weights."""
    wide = x if on.dtype(x) == torch.float32 else on(convert, x, torch.float32)
    if how["centered"]:
        wide = on(aten.sub.Tensor, wide, on(aten.mean.dim, wide, [-1], True))
    mean = on(aten.mean.dim, on(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    factor = on(aten.rsqrt.default, on(aten.add.Tensor, mean, how["eps"]))
    made = on(aten.mul.Tensor, wide, factor)
    return made if on.dtype(x) == torch.float32 else on(convert, made, on.dtype(x))


OPERATORS: dict[str, Callable[..., Any]] = {
    "quantised": quantised,
    "codes mm": codes_mm,
    "norm": norm,
}
