"""The kinds of collectives: one row each. A new functional collective is a row here, what it costs
on a link (``costmodel.links``) and the algorithms that carry it out (``collectives.table``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "_dtensor",
    "commpass",
)
"""Of the operators that are collectives."""
WAITS = ("wait_tensor", "wait_tensors")
KERNEL = "kernel_"
"""In the namespace commpass: a call of a kernel of ours."""


@dataclass(frozen=True)
class Kind:
    """``operators`` are the functional operators that are one, without their form (coalesced,
    in-place, out). ``sums``: values of several ranks are added. ``pairwise``: it is one end of what
    goes between two ranks, who agree on it with each other, not with their group."""

    operators: tuple[str, ...]
    sums: bool = False
    pairwise: bool = False


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(("all_reduce",), sums=True),
    "all_gather": Kind(("all_gather_into_tensor",)),
    "reduce_scatter": Kind(("reduce_scatter_tensor",), sums=True),
    "all_to_all": Kind(("all_to_all_single", "shard_dim_alltoall")),
    "broadcast": Kind(("broadcast",)),
    "send": Kind(("isend", "batch_p2p_ops"), pairwise=True),
    "recv": Kind(("irecv",), pairwise=True),
}
"""By name. The ends of a batch of sends and receives each have a kind of their own."""
KIND_OF = {operator: name for name, kind in KINDS.items() for operator in kind.operators}
"""Operator to the name of its kind."""
SUMS = tuple(name for name, kind in KINDS.items() if kind.sums)
"""The names of those that add."""


def without_form(operator: str) -> str:
    """The name of a functional operator without its form: coalesced, in-place or out."""
    return re.sub(r"_(coalesced_?|out|)$", "", operator)
