"""HSDP: the group of ranks that hold the same shard of a unit, whose all_reduce is compressed.

FSDP2 averages gradients over the replicas by ``dist.all_reduce`` in this group, after it has
reduce-scattered them over the shards. It has no call that can be replaced, as it has for the others
(``set_all_reduce_hook`` runs afterwards). So a unit gets another process group, whose all_reduce is
sent under the policy. FSDP2 still decides when, on which stream and with which factors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor, Any], bool]
"""Sends the sum of a tensor for a reduce op in place; returns False if it leaves that to torch."""


class ReplicaGroup(dist.ProcessGroup):
    """A group with the ranks of ``plain``, which sends what ``send`` leaves."""

    def __init__(self, plain: dist.ProcessGroup, send: Send, done: Callable[[Tensor], dist.Work]):
        super().__init__(plain.rank(), plain.size())  # type: ignore[call-arg]
        self.plain, self._send, self._done = plain, send, done

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any
    ) -> dist.Work:
        """Sum one tensor in place, as ``dist.all_reduce`` calls it."""
        (x,) = tensors
        try:
            sent = self._send(x, options.reduceOp)
        except BaseException:
            # torch looks the group up here to log the error. It must not hold the group, and so
            # the model, otherwise.
            for known in _known():
                known[self] = known[self.plain]
            raise
        if sent:
            return self._done(x)
        work: dist.Work = self.plain.allreduce(list(tensors), options)
        return work

    def getBackendName(self) -> str:
        return str(self.plain.name())

    def close(self) -> None:
        """Let torch forget the group."""
        for known in _known():
            known.pop(self, None)


def _known() -> tuple[dict[Any, Any], ...]:
    """Return torch's tables of groups."""
    world: Any = dist.distributed_c10d._world
    return world.pg_map, world.pg_group_ranks


def group_of(unit_group: Any) -> dist.ProcessGroup | None:
    """Return the group of the replicas of a parameter group, or None if there is one replica."""
    found: dist.ProcessGroup | None = getattr(unit_group.mesh_info, "replicate_process_group", None)
    return found if found is not None and found.size() > 1 else None


def set_group(unit_group: Any, group: dist.ProcessGroup) -> None:
    """Give a parameter group another group of replicas. Others with its mesh keep theirs."""
    before = unit_group.mesh_info
    unit_group.mesh_info = copy.copy(before)
    unit_group.mesh_info.replicate_process_group = group
    if unit_group.post_forward_mesh_info is before:
        unit_group.post_forward_mesh_info = unit_group.mesh_info
