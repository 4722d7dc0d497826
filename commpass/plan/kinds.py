"""The kinds of collectives, one row each.

A new functional collective needs a row here and an algorithm that carries it out, with its name in
the ``ALGORITHMS`` of the algorithm's module.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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


Steps = Callable[[int, float], tuple[int, float]]


@dataclass(frozen=True)
class Kind:
    """A kind of collective.

    - ``operators``: its functional operators, without their form (coalesced, in-place, out). A kind
      without any is for explicit calls alone.
    - ``steps(ranks, nbytes)``: the consecutive messages, and the bytes that one rank sends, if each
      of ``ranks`` ranks passes ``nbytes`` to a bandwidth-optimal algorithm (see ``costmodel``).
    - ``sums``: values of several ranks are added.
    - ``scatters``: parts of the first dimension go to different ranks. Otherwise all ranks get the
      whole input.
    - ``gathers``: the first dimension of the result has a part from each rank, in rank order.
    - ``splits``: the parts may differ in length.
    - ``rooted``: one rank has the values.
    - ``pairwise``: it is one end of a message between two ranks, who agree on it with each other
      and not with their group.
    - ``receives``: its input is a buffer, which it fills with values from another graph.
    - ``direct``: each rank sends to each other rank, and not only to the next one.
    - ``by_messages``: commpass can send it as messages between pairs of ranks.
    - ``backward``: the kind of the collective of its gradient. A kind with one has a function for
      explicit calls, of the kind's name.
    """

    operators: tuple[str, ...]
    steps: Steps
    sums: bool = False
    scatters: bool = False
    gathers: bool = False
    splits: bool = False
    rooted: bool = False
    pairwise: bool = False
    receives: bool = False
    direct: bool = False
    by_messages: bool = False
    backward: str = ""


def _part(ranks: int, nbytes: float) -> tuple[int, float]:
    """Send a part to each other rank."""
    return ranks - 1, (ranks - 1) / ranks * nbytes


def _to_all(ranks: int, nbytes: float) -> tuple[int, float]:
    """Send all to each other rank."""
    return ranks - 1, (ranks - 1) * nbytes


def _twice(ranks: int, nbytes: float) -> tuple[int, float]:
    """Send a part to each other rank, then its sum."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes


def _passed_on(ranks: int, nbytes: float) -> tuple[int, float]:
    """Send all from rank to rank."""
    return ranks - 1, nbytes


def _once(ranks: int, nbytes: float) -> tuple[int, float]:
    """Send all to one rank."""
    return 1, nbytes


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(("all_reduce",), _twice, sums=True, backward="all_reduce"),
    "all_gather": Kind(
        ("all_gather_into_tensor",),
        _to_all,
        gathers=True,
        by_messages=True,
        backward="reduce_scatter",
    ),
    "reduce_scatter": Kind(
        ("reduce_scatter_tensor",), _part, sums=True, scatters=True, backward="all_gather"
    ),
    "all_to_all": Kind(
        ("all_to_all_single", "shard_dim_alltoall"),
        _part,
        scatters=True,
        gathers=True,
        splits=True,
        direct=True,
        by_messages=True,
        backward="all_to_all",
    ),
    "all_gather_v": Kind(
        (), _to_all, gathers=True, splits=True, direct=True, backward="reduce_scatter_v"
    ),
    "reduce_scatter_v": Kind(
        (), _part, sums=True, scatters=True, splits=True, direct=True, backward="all_gather_v"
    ),
    "broadcast": Kind(("broadcast",), _passed_on, rooted=True),
    "send": Kind(("isend", "batch_p2p_ops"), _once, pairwise=True),
    "recv": Kind(("irecv",), _once, pairwise=True, receives=True),
}
"""The kinds by name. Each end of a batch of sends and receives has its own kind."""
KIND_OF = {operator: name for name, kind in KINDS.items() for operator in kind.operators}
"""Maps an operator to the name of its kind."""
IN_GRAPHS = tuple(name for name, kind in KINDS.items() if kind.operators)
"""The names of the kinds that graphs contain. The others are for explicit calls."""
SUMS = tuple(name for name, kind in KINDS.items() if kind.sums)
"""The names of the kinds that add."""
PAIRWISE = tuple(name for name, kind in KINDS.items() if kind.pairwise)
"""The names of the kinds of ends of a message: it is sent, then received."""
GATHERS = tuple(name for name, kind in KINDS.items() if kind.gathers)
"""The names of the kinds whose results have a part from each rank."""
COPIES = tuple(
    name for name, kind in KINDS.items() if kind.rooted or (kind.gathers and not kind.scatters)
)
"""The names of the kinds that copy values of a rank to all ranks."""
BY_RANK = tuple(
    name for name, kind in KINDS.items() if (kind.sums or kind.gathers) and not kind.splits
)
"""The names of the kinds to which all ranks pass equally much, and which return parts of all ranks
in order, or sums of them: a sum over ranks, and its two halves."""


def without_form(operator: str) -> str:
    """Return the name of a functional operator without its form: coalesced, in-place or out."""
    return re.sub(r"_(coalesced_?|out|)$", "", operator)
