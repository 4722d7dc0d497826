"""Epilogues: additions and norms of decoded values, which the kernel that decodes can compute.

A residual stream goes on after the norm that reads it. The kernel then writes both: the sum, and
the normalized values. Statistics that backward needs are further results.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from commpass.codecs import operators
from commpass.lowering.chain import Add, Store
from commpass.passes.fx.norms import norms_of
from commpass.passes.fx.ops import aten, only_user
from commpass.passes.runs import Run, is_reshape

ADDITION = "decode with the addition after it"


def with_epilogue(run: Run) -> tuple[list[Run], str]:
    """Return the runs that extend a run by more and more of the operators after it, and why the
    addition after the run itself is not among them ("" if there is none)."""
    found, missed, last = list[Run](), "", run
    while last.nodes[-1].target is not operators.ops.encode.default:
        start = _with_reshapes(last)
        longer, why = _with_norm(start), ""
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


def _with_addition(run: Run) -> tuple[Run | None, str]:
    """Return a run extended by the addition that alone uses its values, or None and why not."""
    last = run.nodes[-1]
    user = only_user(last)
    if user is None:
        several = len(last.users) > 1
        return None, f"{ADDITION}: others take its values too" if several else ""
    if user.target is not aten.add.Tensor:
        return None, ""
    other = next((arg for arg in user.args[:2] if arg is not last), None)
    if not isinstance(other, fx.Node) or user.kwargs.get("alpha", 1) != 1:
        return None, f"{ADDITION}: of a number"
    mine, its = last.meta["val"], other.meta["val"]
    same = (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
    if not same or not its.is_contiguous():
        return None, f"{ADDITION}: of another shape, dtype or layout"
    longer = replace(
        run,
        nodes=(*run.nodes, user),
        steps=(*run.steps, Add(mine.dtype)),
        others=(*run.others, other),
    )
    return (longer, "") if longer.is_computable() else (None, "")
