"""Any number of ranks in one process: algorithms run in lockstep, and exchanges are executed
between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commpass.collectives import messages, request


@dataclass(frozen=True)
class Started:
    """An exchange that one rank has started, with its index among the rank's exchanges."""

    index: int
    kind: str
    wire: Tensor
    how: tuple[Any, ...]


class Fabric:
    """A replacement for torch's functional collectives.

    ``started[r]`` are the exchanges of rank r, in order.
    """

    def __init__(self, ranks: int):
        self.started: list[list[Started]] = [[] for _ in range(ranks)]
        self.rank = 0

    def all_gather_into_tensor(self, wire: Tensor, ranks: int, group: str) -> Started:
        return self._start("all_gather", wire)

    def all_to_all_single(
        self, wire: Tensor, received: list[int], sent: list[int], group: str
    ) -> Started:
        return self._start("all_to_all", wire, sent, received)

    def broadcast(self, wire: Tensor, root: int, group: str) -> Started:
        return self._start("broadcast", wire, root)

    def _start(self, kind: str, wire: Tensor, *how: Any) -> Started:
        mine = self.started[self.rank]
        mine.append(Started(len(mine), kind, wire.clone(), how))
        return mine[-1]

    def arrived(self, rank: int, exchange: Started) -> Tensor:
        """Return what a rank gets from an exchange in which all have taken part."""
        all_of_it = [mine[exchange.index] for mine in self.started]
        assert {each.kind for each in all_of_it} == {exchange.kind}
        if exchange.kind == "all_gather":
            return torch.cat([each.wire for each in all_of_it])
        if exchange.kind == "broadcast":
            return all_of_it[exchange.how[0]].wire
        parts = [each.wire.split(each.how[0])[rank].flatten() for each in all_of_it]
        # Each rank sends the same number of bytes per row; with none, it may send rows without
        # bytes.
        rest = exchange.wire.shape[1:]
        assert [len(part) for part in parts] == [rows * rest.numel() for rows in exchange.how[1]], (
            "what is sent is not what is waited for"
        )
        return torch.cat(parts).reshape(sum(exchange.how[1]), *rest)


def lockstep(steps: Callable[[int], Any], ranks: int, monkeypatch: Any) -> tuple[list[Any], Fabric]:
    """Return the results of ``steps(rank)`` on all ranks, and what they sent."""
    fabric = Fabric(ranks)
    with monkeypatch.context() as patched:
        patched.setattr(request, "ops", fabric)
        patched.setattr(messages, "ops", fabric)
        return _carried_out(steps, ranks, fabric), fabric


def _carried_out(steps: Callable[[int], Any], ranks: int, fabric: Fabric) -> list[Any]:
    running, replies, results = (
        [steps(rank) for rank in range(ranks)],
        [None] * ranks,
        [None] * ranks,
    )
    while True:
        waiting: list[Started] = []
        for rank, generator in enumerate(running):
            fabric.rank = rank
            try:
                waiting.append(generator.send(replies[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not waiting:
            return results
        assert len(waiting) == ranks, "some ranks wait for what others will never send"
        replies = [fabric.arrived(rank, exchange) for rank, exchange in enumerate(waiting)]
