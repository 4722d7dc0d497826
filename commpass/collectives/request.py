"""How a collective was called, and the exchanges that every algorithm is made of: functional
collectives on rows of bytes.

An exchange is *started* here and waited for by whoever runs the algorithm: see ``steps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor

from commpass.collectives import messages

ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Request:
    """What a collective is asked for beside its tensor.

    ``op`` is ``sum`` or ``avg``; ``group`` a group name, of ``ranks`` ranks, in which this one has
    number ``rank``; ``root`` is the number of the rank that broadcasts; ``sent`` and ``received``
    are the lengths along the first dimension for each rank of an all-to-all (numbers, maybe
    symbolic), None if even; ``unknown`` says that they are only known when the graph runs, though
    numbers stand in for them here; ``alike`` is False if those of other ranks are not even, though
    these are. ``peer`` is the number of the rank at the other end of a send or receive, ``tag``
    what tells it apart from others between the two. ``by_messages`` says that exchanges go as
    messages between pairs of ranks (``messages``) and not by the library's own collectives.
    """

    group: str
    ranks: int
    rank: int = 0
    op: str = "sum"
    root: int = 0
    sent: tuple[Any, ...] | None = None
    received: tuple[Any, ...] | None = None
    unknown: bool = False
    alike: bool = True
    peer: int = 0
    tag: int = 0
    by_messages: bool = False

    @property
    def operators(self) -> Any:
        """Where all_gather_into_tensor and all_to_all_single are taken from."""
        return messages.ops if self.by_messages else ops


@dataclass(frozen=True)
class Gather:
    """Every rank's row to all ranks: ``[1, n]`` to ``[ranks, n]``, row r from rank r."""

    request: Request

    def start(self, wire: Tensor) -> Tensor:
        request = self.request
        return request.operators.all_gather_into_tensor(wire, request.ranks, request.group)


@dataclass(frozen=True)
class Rows:
    """The first ``sent[0]`` rows to rank 0, the next ``sent[1]`` to rank 1, ...: ``[sum(sent), n]``
    to ``[sum(received), n]``."""

    request: Request
    sent: tuple[Any, ...]
    received: tuple[Any, ...]

    def start(self, wire: Tensor) -> Tensor:
        request = self.request
        return request.operators.all_to_all_single(
            wire, list(self.received), list(self.sent), request.group
        )


@dataclass(frozen=True)
class Broadcast:
    """The root's row to all ranks: ``[1, n]`` to ``[1, n]``."""

    request: Request

    def start(self, wire: Tensor) -> Tensor:
        return ops.broadcast(wire, self.request.root, self.request.group)


Move = Gather | Rows | Broadcast


def scatter(request: Request) -> Rows:
    """Row r of ``[ranks, n]`` to rank r: ``[ranks, n]``, row r from rank r."""
    one = (1,) * request.ranks
    return Rows(request, one, one)


def pass_on(request: Request, to: Sequence[int], source: Sequence[int]) -> Rows:
    """One row to each of the ranks ``to``, in ascending order, and one from each of ``source``;
    nothing to and from the others."""
    sent, received = ([int(rank in some) for rank in range(request.ranks)] for some in (to, source))
    return Rows(request, tuple(sent), tuple(received))
