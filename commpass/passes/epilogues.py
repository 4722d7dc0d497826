"""Epilogues: additions and norms of decoded values and the encode of the next exchange, which the
kernel that decodes can compute.

A residual stream goes on after the norm that reads it. The kernel then writes both: the sum, and
the normalized values. Statistics that backward needs are further results. With sequence
parallelism, an all_gather sends the normalized values on, and the kernel encodes them too.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from torch import fx

from commpass.codecs import operators
from commpass.lowering.chain import Add, Encode, Shift, Step, Store
from commpass.passes.fx import meta
from commpass.passes.fx.norms import norms_of
from commpass.passes.fx.ops import aten, only_user
from commpass.passes.runs import BEFORE_ENCODE, Run, is_reshape, step_of

ADDITION = "decode with the addition after it"
PADDED = "decode with what follows it: its last block is padded"
CUT = (aten.view.dtype, aten.alias.default, aten.slice.Tensor)
"""The operators that remove the padding of a last block."""


def with_epilogue(
    run: Run, encodes: Container[fx.Node] = (), read: Container[fx.Node] = ()
) -> tuple[list[Run], str]:
    """Return the runs that extend a run by more and more of the operators after it, and why the
    addition after the run itself is not among them ("" if there is none).

    ``encodes`` are the encodes of other sites that a kernel may compute. Values that those in
    ``read`` encode are written to memory too.
    """
    found, missed, last = list[Run](), "", run
    while last.nodes[-1].target is not operators.ops.encode.default:
        start = _with_reshapes(last)
        longer, why = _with_norm(start) or _with_encode(start, encodes, read), ""
        if longer is None:
            longer, why = _with_addition(start)
        if longer is None:
            missed = missed if found else why
            break
        found.append(longer)
        last = longer
    return found, missed


def _with_reshapes(run: Run) -> Run:
    nodes = list(run.nodes)
    while (user := only_user(nodes[-1])) is not None and is_reshape(user):
        nodes.append(user)
    return replace(run, nodes=tuple(nodes))


def _with_norm(run: Run) -> Run | None:
    """Return a run extended by a norm of its values, or None. Values that others use too are
    stored."""
    last = run.nodes[-1]
    norm = next(norms_of(last), None)
    width = last.meta["val"].shape[-1] if norm is not None else 0
    if norm is None or not last.meta["val"].is_contiguous() or run.numel % width:
        return None
    nodes = {*run.nodes, *norm.nodes}
    stored = not nodes.issuperset(last.users)
    longer = Run(
        nodes=(*run.nodes, *norm.nodes),
        steps=(*run.steps, *([Store()] if stored else []), *norm.steps),
        others=(*run.others, *norm.others),
        further=(*run.further, *([last] if stored else []), *norm.saved),
    )
    return longer if longer.is_computable() else None


def _with_encode(run: Run, encodes: Container[fx.Node], read: Container[fx.Node]) -> Run | None:
    """Return a run extended by the encode of another site that alone uses its values, or None.

    Values that are read are stored as the site's exchange gets them, before they are converted to
    what is encoded.
    """
    value, nodes, steps = run.nodes[-1], list[fx.Node](), list[Step]()
    node = only_user(value)
    while node is not None and (is_reshape(node) or isinstance(step_of(node), BEFORE_ENCODE)):
        nodes.append(node)
        steps += [step] if (step := step_of(node)) is not None else []
        node = only_user(node)
    if node is None or node not in encodes:
        return None
    last = step_of(node)
    if not isinstance(last, Encode) or node.all_input_nodes[0].meta["val"].shape[1] != run.numel:
        return None
    stored = node in read
    longer = Run(
        nodes=(*run.nodes, *nodes, node),
        steps=(*run.steps, *([Store()] if stored else []), *steps, last),
        others=run.others,
        further=(*run.further, *([value] if stored else [])),
    )
    return longer if longer.is_computable() else None


def _with_addition(run: Run) -> tuple[Run | None, str]:
    """Return a run extended by the addition that alone uses its values, or None and why not. It
    adds a tensor of the same shape, or the bias of a layer, a row."""
    last = run.nodes[-1]
    user = only_user(last)
    if user is None:
        several = len(last.users) > 1
        return None, f"{ADDITION}: others take its values too" if several else ""
    if user.target in CUT:
        return None, PADDED if _leads_to_epilogue(user) else ""
    if user.target is not aten.add.Tensor:
        return None, ""
    other = next((arg for arg in user.args[:2] if arg is not last), None)
    if not isinstance(other, fx.Node) or user.kwargs.get("alpha", 1) != 1:
        return None, f"{ADDITION}: of a number"
    mine, its = last.meta["val"], other.meta["val"]
    same = (mine.dtype, mine.device) == (its.dtype, its.device) and its.is_contiguous()
    width = mine.shape[-1] if mine.dim() and meta.is_fixed(mine) else 0
    if same and its.shape == mine.shape:
        step: Step = Add(mine.dtype)
    elif same and width and its.shape == (width,) and run.numel % width == 0:
        step = Shift(width, mine.dtype)
    else:
        return None, f"{ADDITION}: of another shape, dtype or layout"
    longer = replace(
        run,
        nodes=(*run.nodes, user),
        steps=(*run.steps, step),
        others=(*run.others, other),
    )
    return (longer, "") if longer.is_computable() else (None, "")


def _leads_to_epilogue(node: fx.Node) -> bool:
    """Whether an addition or a norm takes the values of a node, as they are or cut and reshaped."""
    user = only_user(node)
    while user is not None and (user.target in CUT or is_reshape(user)):
        node, user = user, only_user(user)
    added = any(each.target is aten.add.Tensor for each in node.users)
    return added or any(True for _ in norms_of(node))
