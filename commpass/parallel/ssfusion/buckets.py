"""Exchange DistributedDataParallel's buckets by fusion buffers.

A bucket's future waits until the fusion buffers of all its gradients have come back.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from commpass.parallel.ddp.comm_hook import HookSlot
from commpass.parallel.refusals import refuse_other_group
from commpass.parallel.ssfusion.driver import Driver
from commpass.parallel.ssfusion.hooks import after_forward, weak_hook
from commpass.parallel.ssfusion.planner import Planner


class BucketHooks:
    """Gradients of a DistributedDataParallel, from the slot of its comm hook."""

    def __init__(self, module: DistributedDataParallel, planner: Planner, slot: HookSlot):
        # Its reducer holds the slot, invisibly to Python's garbage collector.
        self.module, self._group = weakref.ref(module), module.process_group
        self.driver = Driver(planner, self._on_mean, self._on_failure)
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}
        self._used: set[int] = set()
        self._handles: list[Any] = [
            each.parameter.register_post_accumulate_grad_hook(weak_hook(self._accumulated))
            for each in planner.weights
        ]
        self._handles.append(after_forward(module, self.driver))
        self._slot = slot
        slot.fill("ssfusion", self._send)

    def no_sync(self) -> AbstractContextManager[None]:
        module = self.module()
        assert module is not None  # the caller refers to it
        found: AbstractContextManager[None] = module.no_sync()
        return found

    def remove(self) -> None:
        """Stop exchanging: from now on DDP sends."""
        self._slot.empty()
        for handle in self._handles:
            handle.remove()
        self.driver.close()

    def _accumulated(self, parameter: Tensor) -> None:
        """Record that this parameter was used, in this backward or in one that accumulated."""
        self._used.add(id(parameter))

    def _send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        module = self.module()
        group = self._group if module is None else module.process_group
        remedy = "wrap the module in a new DistributedDataParallel, and call ssfusion on that one"
        refuse_other_group("ssfusion", "the model", group, self._group, remedy)
        parameters, views = bucket.parameters(), bucket.gradients()
        devices: list[int | str | torch.device] = []
        if bucket.buffer().is_cuda:
            devices.append(bucket.buffer().device)
        pending = _Bucket(bucket.buffer(), Future(devices=devices), {id(p) for p in parameters})
        with self._lock:
            self._buckets.update(dict.fromkeys(pending.missing, pending))
        for parameter, view in zip(parameters, views, strict=True):
            used = id(parameter) in self._used
            self.driver.ready(parameter, view, used)  # type: ignore[arg-type]
        if bucket.is_last():
            self._used.clear()
            self.driver.end()
        return pending.future

    def _on_mean(self, parameter: nn.Parameter) -> None:
        with self._lock:
            pending = self._buckets.pop(id(parameter))
            pending.missing.discard(id(parameter))
            complete = not pending.missing
        if complete:
            pending.future.set_result(pending.buffer)

    def _on_failure(self, error: BaseException) -> None:
        with self._lock:
            waiting = list({id(each): each for each in self._buckets.values()}.values())
            self._buckets.clear()
        for pending in waiting:
            pending.future.set_exception(error)  # type: ignore[arg-type]


class _Bucket:
    """The buffer of a bucket, its future, and the parameters whose means are missing."""

    def __init__(self, buffer: Tensor, future: Future[Tensor], missing: set[int]):
        self.buffer, self.future, self.missing = buffer, future, missing
