"""The request of a collective, and the exchanges that every algorithm consists of: functional
collectives on rows of bytes.

An exchange is *started* here; the code that runs the algorithm waits for it (see ``steps``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor

from commpass.collectives import messages
from commpass.groups import gather_aborts

ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Request:
    """The arguments of a collective, without its tensor.

    - ``op`` is ``sum`` or ``avg``.
    - ``group`` is the name of a group of ``ranks`` ranks, in which this rank has number ``rank``.
    - ``root`` is the number of the rank that broadcasts.
    - ``sent`` and ``received`` are the lengths along the first dimension for each rank of an
      all-to-all (numbers, possibly symbolic), None if even.
    - ``unknown`` says that the lengths are known only when the graph runs, though numbers are given
      here.
    - ``has_even_peers`` is False if the lengths of other ranks are not even, though those of this
      rank are.
    - ``peer`` is the number of the rank at the other end of a send or receive, ``tag`` identifies
      the message among others between the two.
    - ``by_messages`` says that exchanges are point-to-point messages (``messages``) and not the
      library's collectives.
    """

    group: str
    ranks: int
    rank: int = 0
    op: str = "sum"
    root: int = 0
    sent: tuple[Any, ...] | None = None
    received: tuple[Any, ...] | None = None
    unknown: bool = False
    has_even_peers: bool = True
    peer: int = 0
    tag: int = 0
    by_messages: bool = False

    def from_sum(self, total: Tensor) -> Tensor:
        """Return the result of a reduction from the sum over the ranks: the sum, or the mean."""
        return total / self.ranks if self.op == "avg" else total

    @property
    def operators(self) -> Any:
        """The namespace of all_gather_into_tensor and all_to_all_single."""
        return messages.ops if self.by_messages else ops


@dataclass(frozen=True)
class Gather:
    """Send every rank's row to all ranks: ``[1, n]`` to ``[ranks, n]``, row r from rank r."""

    request: Request

    def start(self, wire: Tensor) -> Tensor:
        request = self.request
        if gather_aborts(request.group, wire.device.type):
            rows, each = wire.expand(request.ranks, -1).contiguous(), [1] * request.ranks
            return request.operators.all_to_all_single(rows, each, each, request.group)
        return request.operators.all_gather_into_tensor(wire, request.ranks, request.group)


@dataclass(frozen=True)
class Rows:
    """Send the first ``sent[0]`` rows to rank 0, the next ``sent[1]`` to rank 1, and so on:
    ``[sum(sent), n]`` to ``[sum(received), n]``."""

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
    """Send the root's row to all ranks: ``[1, n]`` to ``[1, n]``."""

    request: Request

    def start(self, wire: Tensor) -> Tensor:
        return ops.broadcast(wire, self.request.root, self.request.group)


Move = Gather | Rows | Broadcast


def scatter(request: Request) -> Rows:
    """Send row r of ``[ranks, n]`` to rank r: ``[ranks, n]``, row r from rank r."""
    one = (1,) * request.ranks
    return Rows(request, one, one)


def pass_on(request: Request, to: Sequence[int], source: Sequence[int]) -> Rows:
    """Send one row to each of the ranks ``to``, in ascending order, and receive one from each of
    ``source``."""
    sent, received = ([int(rank in some) for rank in range(request.ranks)] for some in (to, source))
    return Rows(request, tuple(sent), tuple(received))
