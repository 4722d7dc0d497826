"""The text of the operations between a matmul and the encode of its result."""

from __future__ import annotations

import torch

from commpass.lowering.gpu import wires
from commpass.lowering.gpu.matmul_sizes import Matmul
from commpass.lowering.gpu.supported import TYPES
from commpass.lowering.pointwise import COLUMN, VALUE, Operand, Operation

OPERATIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "quotient({0}, {1})",
    "neg": "{0} * -1.0",
    "exp": "tl.exp({0})",
    "erf": "tl.erf({0})",
    "tanh": "tanh_of({0})",
    "sigmoid": "tl.sigmoid({0})",
    "relu": "relu({0})",
    "cast": "{0}",
}
"""Triton's expressions of the operations of ``lowering.pointwise``. A number is never negated by a
minus: that of 0 would be 0."""


ALONG = "along = column + tl.arange(0, BLOCK_N)"


def write_result(body: wires.Body, matmul: Matmul, batch: str, *, stored: bool) -> None:
    """Write lines that compute the result of the matmul from the product ``x [.., BLOCK_N]``: with
    its bias, and rounded unless it is ``stored``, which rounds it. ``batch`` is a name as in
    ``matmul_encode.Form``."""
    if matmul.bias is not None:
        body.add_argument("bias", TYPES[matmul.bias])
        at = f"bias + {batch}.to(tl.int64) * columns" if batch else "bias"
        body.add(ALONG, f"added = tl.load({at} + along, mask=along < columns, other=0.0)")
        body.add("x = x + to_float32(added, FP8)[None, :]")
    if not stored:
        body.add(*_through("x", matmul.dtype))


def write_epilogue(body: wires.Body, matmul: Matmul, rows: str, batch: str, line_of: str) -> None:
    """Write lines that compute the values that are encoded from the result ``x [ROWS, BLOCK_N]``.

    ``rows`` and ``batch`` are names as in ``matmul_encode.Form``. ``line_of`` is the row of a tile
    that is row ``{0}`` of a part of it.
    """
    epilogue = matmul.epilogue
    if not epilogue.operations:
        return
    if epilogue.operands:
        body.add(ALONG)
    if any(each.per == VALUE for each in epilogue.operands):
        body.add(
            f"down = line + {line_of.format('tl.arange(0, ROWS)')}",
            f"value_mask = (down < {rows})[:, None] & (along < columns)[None, :]",
            "place = down[:, None] * columns + along[None, :]",
        )
    body.add("v0 = x")
    for number, operand in enumerate(epilogue.operands, 1):
        body.add(_load(body, number, operand, batch))
    for number, operation in enumerate(epilogue.operations, 1 + len(epilogue.operands)):
        body.add(f"v{number} = {expression(operation)}")
        body.add(*_through(f"v{number}", operation.dtype))
    body.add(f"x = v{len(epilogue.operands) + len(epilogue.operations)}")


def _load(body: wires.Body, number: int, operand: Operand, batch: str) -> str:
    """Return a line that loads a further operand as float32."""
    at = body.add_argument(f"other_{number}", TYPES[operand.dtype])
    if operand.per == VALUE:
        at = f"{at} + first * columns + place, mask=value_mask"
        return f"v{number} = to_float32(tl.load({at}, other=0.0), FP8)"
    at += "" if operand.per == COLUMN else f" + {batch}.to(tl.int64) * columns"
    load = f"tl.load({at} + along, mask=along < columns, other=0.0)"
    return f"v{number} = to_float32({load}, FP8)[None, :]"


def expression(operation: Operation) -> str:
    """Return the expression of an operation."""
    return OPERATIONS[operation.name].format(*operation.operands)


def _through(value: str, dtype: torch.dtype) -> list[str]:
    """Return lines that round a value to a dtype."""
    if dtype == torch.float32:
        return []
    return [f"{value} = through_{TYPES[dtype].removeprefix('*')}({value}, CASTS, FP8)"]
