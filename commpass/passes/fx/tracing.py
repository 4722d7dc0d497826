"""Trace functions as graphs of plain operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.errors import VerifyError

Decompositions = Callable[[], dict[Any, Callable[..., Any]]]


def traced(
    run: Callable[..., Any], values: Sequence[Any], decompositions: Decompositions, subject: str
) -> fx.GraphModule:
    """Trace a function of fake values. Raise VerifyError if it captured tensors, which no other
    graph can hold."""
    body = make_fx(run, decomposition_table=decompositions())(*values)
    if captured := [node.name for node in body.graph.nodes if node.op == "get_attr"]:
        raise VerifyError(f"{subject} captured tensors while it was traced: {captured}")
    return body


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor applies before it compiles a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
