"""The kinds of collectives, one row each.

A new functional collective needs a row here, its cost on a link (``costmodel.links``) and the
algorithms that carry it out (``collectives.table``).
"""

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
"""The namespaces of collective operators."""
WAITS = ("wait_tensor", "wait_tensors")
KERNEL = "kernel_"
"""The operator in the namespace commpass that calls a commpass kernel."""


@dataclass(frozen=True)
class Kind:
    """A kind of collective.

    ``operators`` are its functional operators, without their form (coalesced, in-place, out).
    ``sums`` says that values of several ranks are added. ``pairwise`` says that it is one end of a
    message between two ranks, who agree on it with each other and not with their group.
    """

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
"""The kinds by name. Each end of a batch of sends and receives has its own kind."""
KIND_OF = {operator: name for name, kind in KINDS.items() for operator in kind.operators}
"""Maps an operator to the name of its kind."""
SUMS = tuple(name for name, kind in KINDS.items() if kind.sums)
"""The names of the kinds that add."""


def without_form(operator: str) -> str:
    """Return the name of a functional operator without its form: coalesced, in-place or out."""
    return re.sub(r"_(coalesced_?|out|)$", "", operator)
