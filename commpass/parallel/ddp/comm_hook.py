"""The comm hook of a DDP model: it delegates each bucket to the integration that is open now.

DDP takes one comm hook and keeps it for good. So the hook that is registered has a slot: an
integration fills it, ``close`` empties it, and the next integration fills it again. While it is
empty, the hook sends as DDP does without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Send = Callable[[dist.GradBucket], Future[Tensor]]


class Released:
    """Replaces the state of the hook in a copy of a model: torch copies the list of hooks, not the
    hook."""


class HookSlot:
    """The state of a DDP model's comm hook: which integration sends, and how.

    ``call`` is the name of the function that made the integration, "" if none is open.
    """

    def __init__(self, ddp: DistributedDataParallel):
        # Its reducer holds this object, invisibly to Python's garbage collector.
        self._ddp = weakref.ref(ddp)
        self._send: Send | None = None
        self.call = ""

    def __reduce__(self) -> Any:
        """Pickle as ``Released``: a copy of the model has no comm hook, and so no integration."""
        return Released, ()

    def fill(self, call: str, send: Send) -> None:
        """Send buckets with the function of an integration from now on."""
        self.call, self._send = call, send

    def empty(self) -> None:
        """Send buckets as DDP does from now on."""
        self.call, self._send = "", None

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the exchange of a bucket. Its future is the mean over all ranks."""
        if self._send is not None:
            return self._send(bucket)
        ddp = self._ddp()
        assert ddp is not None  # it runs this hook
        return allreduce_hook(ddp.process_group, bucket)


def slot_of(ddp: DistributedDataParallel) -> HookSlot:
    """Return the slot of a model's comm hook. Register that hook if the model has none."""
    for _, state in ddp._comm_hooks:
        if isinstance(state, HookSlot):
            return state
    slot = HookSlot(ddp)
    ddp.register_comm_hook(slot, send_bucket)
    return slot


def send_bucket(slot: HookSlot, bucket: dist.GradBucket) -> Future[Tensor]:
    """The comm hook. Saved models refer to it by its name."""
    return slot.send(bucket)


send_bucket.__annotations__.clear()  # DDP compares them with classes, but here they are strings


def hook_name(ddp: DistributedDataParallel) -> str:
    """Return the name of a model's comm hook; "" if it has none, or one whose slot is empty."""
    for hook, state in ddp._comm_hooks:
        if isinstance(state, HookSlot):
            return f"commpass.parallel.{state.call}" if state.call else ""
        return f"{hook.__module__}.{hook.__qualname__}"
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))
