"""Decoded rows: the matmuls that alone use what a run decodes, as their left operand.

With sequence parallelism, an all_gather sends activations, and the matmuls of a layer read the
result. Each of them can decode the wires itself. Then the decoded rows are never stored. This is
done for all matmuls of a decode or for none: if one needs the stored rows, the others read them
too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx

from commpass import lowering
from commpass.costmodel import Profile
from commpass.costmodel.kernels import Kernels
from commpass.lowering.chain import Cast, Decode
from commpass.lowering.decode_matmul import DecodedRows
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import Writers
from commpass.passes.fx.ops import aten, is_functional
from commpass.passes.products import BIASED, CHANGED, terms_of, unsupported_terms
from commpass.passes.runs import Run, is_reshape

PRODUCTS = (aten.mm.default, aten.addmm.default)
OTHERS = "others take the decoded values too"
COLUMNS = 128
"""The columns for which a kernel decodes a row once."""
INSTRUCTIONS = 12.0
"""Instructions of one lane to decode a value in a matmul, and to pass it to the tensor cores: an
assumption."""
INSTRUCTIONS_PER_BYTE = 4.4
"""Instructions of one lane in the time in which a copy moves a byte: of a B200, the fewest of the
known GPUs (``costmodel.cards``)."""


@dataclass(frozen=True)
class DecodedProducts:
    """Matmuls of decoded rows in graph order, and for each ``b`` and perhaps a bias. ``between``
    are the views of the decoded values and unused conversions of them."""

    rows: DecodedRows
    products: tuple[fx.Node, ...]
    operands: dict[fx.Node, tuple[fx.Node, ...]]
    between: tuple[fx.Node, ...]

    def rows_of(self, product: fx.Node) -> DecodedRows:
        return dataclasses.replace(self.rows, bias=product.target in BIASED)


def with_products(
    run: Run, profile: Profile, writers: Writers
) -> tuple[DecodedProducts | None, str]:
    """Return the matmuls of the values that a run decodes, if their kernels should decode them.

    Otherwise return None and the reason, or "" if no matmul uses the values.
    """
    rows = _rows_of(run)
    if rows is None:
        return None, ""
    between, products, others = _users(run.nodes[-1])
    if not products:
        return None, ""
    if others:
        return None, OTHERS
    decoded, operands = {run.nodes[-1], *between}, dict[fx.Node, tuple[fx.Node, ...]]()
    for product in products:
        a, *rest = terms_of(product)
        if a not in decoded or any(each in decoded for each in rest):
            return None, "the decoded values are not the left operand"
        if why := unsupported_terms(product):
            return None, why
        operands[product] = tuple(rest)
        values = [each.meta["val"] for each in (run.source, *rest)]
        if not all(map(meta.is_fixed, values)):
            return None, "its sizes are not fixed"
        if writers.change((run.source,), run.nodes[0], product):
            return None, CHANGED
    found = DecodedProducts(rows, products, operands, between)
    for product in products:
        values = [each.meta["val"] for each in (run.source, *operands[product])]
        if why := lowering.unsupported_decode_reason(values, found.rows_of(product)):
            return None, why
    return _if_quicker(found, run, profile.kernels)


def _rows_of(run: Run) -> DecodedRows | None:
    """Return how a run decodes, or None if it does anything else to the values."""
    decode, *rest = run.steps
    dtype = run.nodes[-1].meta["val"].dtype
    if not isinstance(decode, Decode) or not isinstance(run.numel, int) or decode.dtype != dtype:
        return None
    if any(step not in (Cast(dtype), Cast(torch.float32)) for step in rest):
        return None
    return DecodedRows(decode.codec, run.numel, dtype)


def _users(value: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...], bool]:
    """Return the views of a value and its unused conversions, the matmuls of these, and whether
    anything else uses them."""
    between, products, left, others = set[fx.Node](), set[fx.Node](), [value], False
    while left:
        for user in left.pop().users:
            if user.target in PRODUCTS:
                products.add(user)
            elif user.op == "call_function" and is_reshape(user):
                between.add(user)
                left.append(user)
            elif not user.users and is_functional(user.target) and not user.is_impure():
                between.add(user)
            else:
                others = True
    return tuple(sorted(between)), tuple(sorted(products)), others


def _if_quicker(
    found: DecodedProducts, run: Run, kernels: Kernels
) -> tuple[DecodedProducts | None, str]:
    """Return the matmuls if they are faster with the decode, else None and the times."""
    wire = run.source.meta["val"]
    values = found.rows.numel * wire.shape[0]
    apart = kernels.time_us(found.rows.codec.spec, "decode", values)
    together = 0.0
    for product in found.products:
        b, made = (each.meta["val"] for each in (found.operands[product][0], product))
        moved = (b.numel() + made.numel()) * b.itemsize
        operations = 2.0 * made.numel() * b.shape[0]
        apart += kernels.compute_us(operations, moved + values * b.itemsize)
        together += kernels.compute_us(operations, moved + wire.numel()) * kernels.decoding_matmul
        together += decoding_us(kernels, values, b.shape[1])
    if together >= apart:
        return None, f"decode and matmul apart take {apart:,.0f} us, together {together:,.0f} us"
    return found, ""


def decoding_us(kernels: Kernels, values: int, columns: int) -> float:
    """Return the microseconds in which a matmul with ``columns`` columns decodes the values of its
    left operand, once for each tile of ``COLUMNS``. No overlap with its products is assumed."""
    times = -(-columns // COLUMNS)
    nbytes = values * times * INSTRUCTIONS / INSTRUCTIONS_PER_BYTE
    return kernels.compute_us(0.0, nbytes)
