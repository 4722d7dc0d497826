"""A process group that counts the kind, dtype and bytes of every collective that really happens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class CountingGroup(dist.ProcessGroup):
    """Forward every collective to a gloo group and record (kind, dtype, bytes of one rank's input).

    Each collective that is used must be a method here. For a missing one, torch holds the
    interpreter while it waits for a thread of gloo. That thread waits for the interpreter to free a
    tensor.
    """

    def __init__(self, gloo: dist.ProcessGroup):
        super().__init__(gloo.rank(), gloo.size())
        self.gloo = gloo
        cpu = torch.device(
            "cpu"
        )  # a batch of sends and receives gets a backend, and then calls the group
        self._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, gloo._get_backend(cpu))
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # torch 2.15 requires one
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def _note(self, kind: str, tensors: Any) -> None:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            self.seen.append((kind, tensor.dtype, tensor.numel() * tensor.itemsize))

    def getBackendName(self) -> str:
        return "counting"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_desc(self) -> str:
        return "counting"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._note("all_reduce", tensors)
        return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        self._note("all_reduce", tensors)
        return self.gloo.allreduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions())

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        self._note("all_gather", tensor)
        return self.gloo._allgather_base(output, tensor, opts or dist.AllgatherOptions())

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._note("all_gather", inputs)
        return self.gloo.allgather_into_tensor_coalesced(
            outputs, inputs, opts or dist.AllgatherOptions()
        )

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        self._note("reduce_scatter", tensor)
        return self.gloo._reduce_scatter_base(output, tensor, opts or dist.ReduceScatterOptions())

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._note("reduce_scatter", inputs)
        return self.gloo.reduce_scatter_tensor_coalesced(
            outputs, inputs, opts or dist.ReduceScatterOptions()
        )

    def alltoall_base(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        self._note("all_to_all", tensor)
        return self.gloo.alltoall_base(
            output, tensor, output_splits, input_splits, opts or dist.AllToAllOptions()
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self._note("broadcast", tensors)
        return self.gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        self._note("send", tensors)
        return self.gloo.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self._note("recv", tensors)
        return self.gloo.recv(tensors, peer, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(opts or dist.BarrierOptions())


def counting_group(messages: bool = False) -> CountingGroup:
    """Return a group of all ranks whose process group counts. Every rank calls this alike.

    With ``messages`` it is treated as gloo's own, whose exchanges are messages between pairs.
    """
    gloo = dist.new_group(backend="gloo")
    name = f"counting{len(dist.Backend.backend_list)}"
    dist.Backend.register_backend(name, lambda *_: CountingGroup(gloo), devices=["cpu"])
    group = dist.new_group(backend=name)
    if messages:
        dist.distributed_c10d._world.pg_backend_config[group] = "cpu:gloo"
    return group
