"""DDP's gradients under one policy: a comm hook that sends each bucket by a plan.

DDP puts gradients into buckets and gives each to the hook as soon as it is full, while backward
continues. Each bucket is written as one exchange (``parallel/exchange.py``) and compiled by the
backend at its first use. A separate thread (``worker.py``) executes it in a separate process group.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from commpass.backend import backend
from commpass.costmodel import Profile
from commpass.distributed.integration import Bytes, Integration
from commpass.distributed.owners import parameter_names
from commpass.distributed.record import wire_bytes
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import PolicyError
from commpass.groups import close_with, duplicate
from commpass.parallel.ddp.buckets import BucketPart, parts_of
from commpass.parallel.ddp.checks import check_model, refuse_if_optimized_in_backward
from commpass.parallel.ddp.comm_hook import HookSlot, Released, send_bucket, slot_of
from commpass.parallel.ddp.unused import UnusedParameters
from commpass.parallel.ddp.worker import Worker
from commpass.parallel.exchange import Compiled, Exchanges
from commpass.parallel.meeting import wait_for_calls
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.policy.annotate import annotations_of
from commpass.utils.ambient import without_ambient_state
from commpass.utils.keywords import named_arguments


@publishing_refusal
@named_arguments
def compress_ddp(
    model: nn.Module,
    policy: str | Path | Policy = "lossless",
    *,
    inner: str | Callable[..., Any] = "inductor",
    profile: str | Path | Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> CompressedDDP:
    """Send the gradients of a DistributedDataParallel model as a policy allows.

        model = DistributedDataParallel(model)
        integration = commpass.parallel.compress_ddp(model, "balanced")

    Every rank of the model's group calls this function alike, before the first backward. The other
    arguments are those of ``commpass.backend``. Return the integration, which reports plans and
    bytes; it need not be kept. Error feedback is in ``commpass.state_dict(model)``, by the names of
    parameters.

    If DDP gets another process group later (``_update_process_group``), gradients are sent in that
    one, as DDP's own would be.

    Args:
        model: a ``DistributedDataParallel`` whose backward has not run.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        inner: the compiler of codes, as in ``commpass.backend``.
        profile: the links and kernels that the cost model assumes, as in ``commpass.backend``: a
            Profile, a name or a file. If None, COMMPASS_PROFILE, or else the network that is read
            from the system.
        strict: if True, raise when a pass fails. Otherwise log a warning and send uncompressed.
        dump: a folder for plans, for ``commpass explain``. If None, COMMPASS_DUMP.
        timeout: seconds that ranks wait for each other's plans. If None, the time-out of the
            process group.

    Raise PolicyError for a model that is not DDP's, or that has a comm hook or optimizers that run
    in backward. Raise it too if its gradients never reach a hook, or are complex or sparse.
    """
    ddp = check_model(model)
    made = backend(policy, inner=inner, profile=profile, strict=strict, dump=dump, timeout=timeout)
    integration = CompressedDDP(ddp, Exchanges(made), slot_of(ddp))
    integration.acquire(ddp, ddp)
    return integration


PROVISIONAL = "the last step was sent uncompressed, since DDP makes its final buckets after it"

CONVERTED = (
    "no step yet: parameters were converted to another dtype after DistributedDataParallel, which"
    " then sends no gradient of them, and ranks differ. Convert the model before"
)


_hook = send_bucket  # its name in models that were saved before


@dataclass
class _Step:
    """What was sent since the last bucket of the previous step."""

    plans: list[Plan] = field(default_factory=list)
    bytes: Bytes = field(default_factory=Bytes)


class CompressedDDP(Integration):
    """The integration that sends the gradients of one DDP model.

    Once it is closed, they are sent as without it, and another integration may follow.
    """

    call, per = "compress_ddp", " a step"

    def __init__(self, ddp: DistributedDataParallel, exchanges: Exchanges, slot: HookSlot):
        super().__init__(ddp, exchanges.backend.policy)
        self.exchanges, self._slot = exchanges, slot
        self._names, self._dtypes = parameter_names(ddp), _dtypes(ddp)
        self._annotations: dict[str, str] = {}
        self._parts: dict[Any, list[BucketPart]] = {}
        self._provisional: int | None = None
        self._now, self._last = _Step(), _Step()
        self._backward = -1
        self._unused: UnusedParameters | None = None
        self._streams: dict[torch.device, Any] = {}
        self._channel = _Channel(ddp.process_group)
        self._channel.open()
        slot.fill(self.call, self.send)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group in which gradients are sent; None once an exchange has failed here."""
        return self._channel.group

    @property
    def worker(self) -> Worker:
        """The thread that executes exchanges."""
        return self._channel.worker

    @property
    def plans(self) -> list[Plan]:
        """The plans of the last step, in the order of its buckets."""
        return list(self._last.plans)

    @property
    def bytes(self) -> Bytes:
        """The bytes that this rank sent in the last step."""
        return Bytes(self._last.bytes)

    def __reduce__(self) -> Any:
        """Pickle as ``Released``: a copy of the model has no comm hook, and so no integration."""
        return Released, ()

    @property
    def summary(self) -> str:
        ddp: Any = self.model
        if not self.bytes and ddp is not None and _dtypes(ddp) != self._dtypes:
            return CONVERTED
        return PROVISIONAL if self.bytes and not self.plans else super().summary

    def _stop(self) -> None:
        """Let DDP send again, end the thread, and close the group on this rank."""
        self._slot.empty()
        self.worker.end()
        _close_group(weakref.ref(self._channel))

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the exchange of one bucket.

        Its future is the bucket's own tensor, which then holds the mean over all ranks. Errors are
        raised at the end of backward, when DDP is ready for another one.
        """
        x = bucket.buffer()
        if bucket.index() == 0:  # the previous step may have ended in a user error
            self._now = _Step()
        backward = torch._C._current_graph_task_id()
        in_backward = backward != -1
        if in_backward and backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
        job: Callable[[], None] = _do_nothing
        try:
            if bucket.index() == 0:
                self._adopt_ddp_state()
            if self.worker.error is None:
                job = self._job(bucket, x)
        except Exception as error:
            self.worker.fail(error)
        if self._unused is not None and in_backward:
            self._unused.add_bucket(bucket)
        future = self._submit(job, x)
        if bucket.is_last():
            self._step_done()
        if not in_backward:  # the shadow backward of a rank without more inputs: join()
            future.wait()
            self.worker.check()
        return future

    def _backward_done(self) -> None:
        """Run at the end of backward, maybe before DDP ends it: errors wait until it has."""
        torch.autograd.Variable._execution_engine.queue_callback(self._ddp_done)

    def _ddp_done(self) -> None:
        self.worker.check()
        if self._unused is not None:
            self._unused.end()

    def _step_done(self) -> None:
        self._last, self._now = self._now, _Step()
        self._provisional = max(0, (self._provisional or 0) - 1)

    def _adopt_ddp_state(self) -> None:
        """Adopt DDP's current state before the first bucket of a step.

        ``_update_process_group`` may have given it another group, of other ranks. Then all
        exchanges are compiled anew, since ranks that join compile too. A failure in the previous
        group no longer counts.
        """
        ddp: Any = self.model
        if ddp is None:
            return
        if ddp.process_group is not self._channel.host:
            self._provisional = None
            self._parts.clear()
            self.exchanges.clear()
            self._channel = _Channel(ddp.process_group)
            self._channel.open()
        if self._provisional is None and self.group is not None:
            self._annotations = annotations_of(ddp)
            self._provisional = _provisional_steps(ddp)
            drops = ddp.find_unused_parameters and not ddp.static_graph
            self._unused = UnusedParameters("ddp", self.group.size()) if drops else None

    def _job(self, bucket: dist.GradBucket, x: Tensor) -> Callable[[], None]:
        """Return the function that executes the exchange of a bucket; compile it if it is new."""
        ddp: Any = self.model
        if ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise PolicyError(
                "compress_ddp: join(divide_by_initial_world_size=False) divides by the number of"
                " ranks that still have inputs, which a comm hook cannot know: leave it True"
            )
        assert self.group is not None  # while nothing has failed
        if self._provisional:
            self._now.bytes.add("all_reduce", x.nbytes, x.nbytes)
            return functools.partial(_send_plain, x, self.group.group_name, self.group.size())
        parameters = bucket.parameters()
        refuse_if_optimized_in_backward(parameters, "compress_ddp")
        key = (*map(id, parameters), x.dtype)
        if key not in self._parts:
            self._parts[key] = parts_of(
                self.exchanges.backend.policy,
                *(self.group, x, parameters, self._names, self._annotations),
            )
        jobs = []
        for part in self._parts[key]:
            piece = part.of(x)
            compiled = self.exchanges.get(part.what, piece, of=part.parameters)
            jobs.append(functools.partial(part.exchange, compiled.run, x))
            jobs.append(functools.partial(_record, self._now, compiled, piece.nbytes))
        return functools.partial(_run_in_order, jobs)

    def _submit(self, job: Callable[[], None], x: Tensor) -> Future[Tensor]:
        """Run a job in the worker's thread on a CPU, and on a separate stream on a GPU.

        A GPU's exchanges overlap its other work on that stream, so the calling thread need not
        wait.
        """
        if x.device.type == "cpu":
            return self.worker.submit(job, x)
        module = torch.get_device_module(x.device)
        if x.device not in self._streams:
            self._streams[x.device] = module.Stream(x.device)
        stream = self._streams[x.device]
        stream.wait_stream(module.current_stream(x.device))
        future: Future[Tensor] = Future(devices=[x.device])
        with module.stream(stream):
            try:
                job()
            except Exception as error:
                self.worker.fail(error)
            x.record_stream(stream)
            future.set_result(x)
        return future


class _Channel:
    """A group of the same ranks as a DDP model's group ``host``, and a thread that sends in it."""

    def __init__(self, host: dist.ProcessGroup):
        self.host = host
        self.group: dist.ProcessGroup | None = None
        self.worker = Worker("commpass-ddp", functools.partial(_close_group, weakref.ref(self)))

    def open(self) -> None:
        """Make the group. All ranks of the host group call this alike."""
        wait_for_calls(self.host, "compress_ddp")
        self.group = duplicate(self.host)
        close_with(self, self.group)


def _dtypes(ddp: Any) -> list[torch.dtype]:
    return [parameter.dtype for parameter in ddp._module_parameters]


def _provisional_steps(ddp: DistributedDataParallel) -> int:
    """Return how many steps DDP makes before it forms its final buckets in the order of gradients.

    Each bucket is compiled, so these steps are sent uncompressed. They are counted, since a rank in
    join() does not know whether its buckets are final.
    """
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    if ddp._has_rebuilt_buckets or not rebuilds:
        return 0
    return 2 if ddp.static_graph else 1


def _send_plain(x: Tensor, group: str, ranks: int) -> None:
    functional = torch.ops._c10d_functional
    with without_ambient_state():
        functional.wait_tensor(functional.all_reduce_(x.mul_(1.0 / ranks), "sum", group))


def _record(step: _Step, compiled: Compiled, plain: int) -> None:
    """Record an exchange after it was sent, since it may have been planned anew before."""
    step.plans.append(compiled.plan)
    step.bytes.add("all_reduce", plain, wire_bytes(compiled.plan))


def _run_in_order(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _do_nothing() -> None:
    pass


def _close_group(channel: weakref.ref[_Channel]) -> None:
    """Close the group of a channel in which an exchange failed on this rank.

    So no other rank waits for this one until its time-out. The group is closed when nothing refers
    to it any more.
    """
    if (found := channel()) is not None and found.group is not None:
        group, found.group = found.group, None
        dist.destroy_process_group(group)
