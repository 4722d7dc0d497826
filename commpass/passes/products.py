"""Products: the matmul whose result a run encodes, and the pointwise operations in between.

Each operation is matched by itself, so any sequence of known ones is: an activation in whatever
form decompositions leave it, a residual, a factor. What one of them takes beside the values is an
operand of the kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from commpass import lowering
from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.costmodel import Profile
from commpass.lowering import matmul
from commpass.lowering.chain import Cast, Encode, Enter, Step
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import BATCH, COLUMN, VALUE, Epilogue, Operand, Operation
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import Writers
from commpass.passes.fx.ops import aten, is_float_cast, is_pointwise, name_of
from commpass.passes.runs import Run, is_reshape

BADDBMM, GROUPED_MM = aten.baddbmm.default, aten._grouped_mm.default
BIASED = (aten.addmm.default, BADDBMM)
FORMS: dict[Any, str] = {
    aten.mm.default: SINGLE,
    aten.addmm.default: SINGLE,
    aten.bmm.default: BATCHED,
    BADDBMM: BATCHED,
    GROUPED_MM: GROUPED,
}
OPERATIONS: dict[Any, str] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), "add"),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), "sub"),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), "mul"),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), "div"),
    aten.neg.default: "neg",
    aten.exp.default: "exp",
    aten.erf.default: "erf",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.relu.default: "relu",
}
"""The operators that a kernel computes, by their names in ``lowering.pointwise``."""
MOST = 32
"""The most nodes between a matmul and an encode."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CHANGED = "an input is written in place before the kernel would read it"
OTHERS = "others take the matmul's result too"


@dataclass(frozen=True)
class Multiplied:
    """A product whose result only a run encodes, its operands, and the nodes that it replaces, last
    ones first."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    product: matmul.Product


def with_matmul(run: Run, profile: Profile, writers: Writers) -> tuple[Multiplied | None, str]:
    """Return the matmul whose result a run encodes, if one kernel should compute both.

    Otherwise return None and the reason, or "" if there is no matmul.
    """
    nodes = _between(run.source)
    if nodes is None:
        return None, ""
    product = nodes[-1]
    inside = {*nodes, run.nodes[0]}
    if any(user not in inside for node in nodes for user in node.users):
        return None, OTHERS
    if not meta.is_fixed(product.meta.get("val")):
        return None, "its sizes are not fixed"
    if why := unsupported_terms(product):
        return None, why
    coder = _whole_codec(run.steps)
    if coder is None:
        return None, "something else happens to the values before they are encoded"
    between = epilogue_of(nodes)
    if isinstance(between, str):
        return None, between
    epilogue, others = between
    form, biased = FORMS[product.target], product.target in BIASED
    rows = run.source.meta["val"].shape[0]
    made = Multiplied(
        (*terms_of(product), *others),
        nodes,
        matmul.Product(coder, rows, form, biased, epilogue),
    )
    if writers.change(made.operands, product, run.nodes[-1]):
        return None, CHANGED
    values = [each.meta["val"] for each in made.operands]
    if not all(map(meta.is_fixed, values)):
        return None, "its sizes are not fixed"
    why = lowering.unsupported_product_reason(values, made.product)
    return (None, why) if why else _if_quicker(made, profile)


# --- what lies between ----------------------------------------------------------------------------


def _between(source: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the nodes from the source of a run back to the last matmul that it depends on through
    pointwise operators and reshapes, last ones first; None if there is none."""
    reached, left = set[fx.Node](), [source]
    while left:
        node = left.pop()
        if node in reached or not (node.target in FORMS or _is_between(node)):
            continue
        reached.add(node)
        if len(reached) > MOST:
            return None
        if node.target not in FORMS:
            left += node.all_input_nodes
    products = [node for node in reached if node.target in FORMS]
    if not products:
        return None
    inside = {max(products)}  # what another product computes is an operand
    for node in sorted(reached - {*products}):
        if any(each in inside for each in node.all_input_nodes):
            inside.add(node)
    return tuple(sorted(inside, reverse=True))


def _is_between(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_reshape(node) or is_pointwise(node.target))


def epilogue_of(nodes: Sequence[fx.Node]) -> tuple[Epilogue, tuple[fx.Node, ...]] | str:
    """Return the operations of nodes after a matmul, the last one of ``nodes``, and their further
    operands; or why a kernel cannot compute them. The first node is the last operation."""
    *after, product = nodes
    operands = dict[fx.Node, Operand]()
    for node in reversed(after):
        if not is_reshape(node):
            found = _operands_of(node, {*nodes}, product)
            if isinstance(found, str):
                return found
            for other, operand in found:
                if operands.setdefault(other, operand) != operand:
                    return f"{name_of(node)}: a further operand is used in two ways"
    numbered = {product: "v0"} | {each: f"v{i}" for i, each in enumerate(operands, 1)}
    operations = list[Operation]()
    for node in reversed(after):
        if is_reshape(node):
            numbered[node] = numbered[node.all_input_nodes[0]]
            continue
        name = "cast" if is_float_cast(node) else OPERATIONS[node.target]
        given = node.args[:1] if name == "cast" else node.args[:2]
        texts = tuple(
            numbered[each] if isinstance(each, fx.Node) else repr(float(each))  # type: ignore
            for each in given
        )
        operations.append(Operation(name, texts, node.meta["val"].dtype))
        numbered[node] = f"v{len(operands) + len(operations)}"
    return Epilogue(tuple(operands.values()), tuple(operations)), tuple(operands)


def _operands_of(
    node: fx.Node, inside: set[fx.Node], product: fx.Node
) -> list[tuple[fx.Node, Operand]] | str:
    """Return the further operands of a node, or why a kernel cannot compute it."""
    name, made, values = name_of(node), node.meta["val"], product.meta["val"].numel()
    if not (is_float_cast(node) or node.target in OPERATIONS):
        return f"no kernel computes {name} before an encode"
    if not meta.is_fixed(made) or made.dtype not in FLOATS or made.numel() != values:
        return f"{name}: its result has another shape, or a dtype that kernels do not compute"
    if not made.is_contiguous():
        return f"{name}: its result is not contiguous"
    if is_float_cast(node):
        return []
    if node.kwargs.get("alpha", 1) != 1 or set(node.kwargs) - {"alpha"}:
        return f"{name}: its terms are scaled"
    found = list[tuple[fx.Node, Operand]]()
    for each in node.args:
        if isinstance(each, fx.Node):
            if each in inside:
                continue
            per = _per(each.meta.get("val"), made, product)
            if not per:
                return f"{name}: of a tensor of another shape, dtype or layout"
            found.append((each, Operand(each.meta["val"].dtype, per)))
        elif not isinstance(each, (int, float)) or not math.isfinite(each):
            return f"{name}: of something that is no number"
    return found


def _per(operand: Any, made: Tensor, product: fx.Node) -> str:
    """Return what an operand has a value for, or "" if a kernel cannot read it."""
    given, n = product.meta["val"], product.meta["val"].shape[-1]
    if (
        not isinstance(operand, Tensor)
        or operand.dtype not in FLOATS
        or operand.device != made.device
    ):
        return ""
    if not meta.is_fixed(operand) or not operand.is_contiguous():
        return ""
    if operand.shape == made.shape:
        return VALUE
    if made.shape[-1] != n:
        return ""
    if operand.shape[-1:] == (n,) and operand.numel() == n:
        return COLUMN
    batched = given.dim() == 3 and made.shape == given.shape
    return BATCH if batched and operand.shape == (given.shape[0], 1, n) else ""


# --- the matmul -----------------------------------------------------------------------------------


def terms_of(product: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands of a matmul in the order of the operator: ``a``, ``b``, then a bias or
    offsets."""
    given: Any = product.args
    yield from (*given[1:3], given[0]) if product.target in BIASED else given[:3]


def unsupported_terms(product: fx.Node) -> str:
    """Return why the bias of a matmul, or the form of a grouped one, has no kernel."""
    given: Any = product.args
    if product.target is GROUPED_MM:
        a, b, *rest = given
        if (a.meta["val"].dim(), b.meta["val"].dim()) != (2, 3):
            return "its operands are no rows and a matrix for each group"
        if not rest or rest[0] is None or any(each is not None for each in rest[1:]):
            return "it has no offsets, or a bias or another dtype"
        return "it has a bias or another dtype" if product.kwargs else ""
    if product.target not in BIASED:
        return ""
    if {product.kwargs.get("alpha", 1), product.kwargs.get("beta", 1)} != {1}:
        return "its terms are scaled"
    value, made = given[0].meta["val"], product.meta["val"]
    shapes = [made.shape[-1:]]
    if product.target is BADDBMM:  # a row for each batch
        shapes = [(made.shape[0], 1, made.shape[-1])]
    if value.shape not in shapes or not value.is_contiguous():
        return "its bias is no row"
    return ""


def _if_quicker(made: Multiplied, profile: Profile) -> tuple[Multiplied | None, str]:
    """Return the fused matmul if it is faster, else None and the times.

    The encode takes about as long in the matmul as by itself: its share of the matmul's time falls
    with ``k``. The fusion saves a launch. If there are operations in between, it also saves another
    kernel, which reads and writes the values and reads their operands.
    """
    product, kernels = made.product, profile.kernels
    tensors = [each.meta["val"] for each in made.operands]
    given = matmul.operands_of(product, tensors)
    m, n, k, _ = given.sizes
    values, itemsize = m * n, given.a.itemsize
    nbytes = (given.a.numel() + given.b.numel() + values) * itemsize
    alone = kernels.compute_us(2 * values * k, nbytes)
    apart = alone + kernels.time_us(product.codec.spec, "encode", values)
    fused = alone + kernels.time_us(product.codec.spec, "in matmul", values)
    if product.epilogue.operations:
        others = meta.total_nbytes(given.others)
        apart += kernels.launch_us + kernels.compute_us(0.0, 2 * values * itemsize + others)
        fused += kernels.compute_us(0.0, others)
    if fused >= apart:
        return None, f"matmul and encode apart take {apart:,.0f} us, together {fused:,.0f} us"
    return made, ""


def _whole_codec(steps: Sequence[Step]) -> Codec | None:
    """Return the codec of an encode and the steps before it, with its transform included, or
    None."""
    *before, last = steps
    assert isinstance(last, Encode)
    domain = None
    for step in before:
        if isinstance(step, Enter):
            domain = step.domain
        elif not (isinstance(step, Cast) and step.dtype == torch.float32):
            return None
    if domain is None:
        return last.codec
    assert isinstance(last.codec, BlockCodec)
    return dataclasses.replace(last.codec, transform=domain.transform)
