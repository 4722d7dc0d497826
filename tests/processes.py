"""Real ranks for tests: persistent processes that run one function at a time on gloo.

A test calls ``ranks.run(function, *args)``: each rank runs ``function(*args)``, and the list of
results is returned. If a rank raises, or after the time-out, the test fails with every rank's
error, and the next test gets new ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

START_S = 120
PATIENCE_S = 30
"""Seconds to wait for the errors of other ranks once one has failed."""
CLONE_NEWNET = 0x40000000


class RanksFailed(AssertionError):
    """The message of each rank before the test failed."""


class Ranks:
    """``size`` processes with a separate process group.

    ``workers`` is how many exchanges of a group gloo executes at once; torch's own number is 2.
    With 2, and small exchanges in flight, gloo sometimes corrupts the memory of a rank, also
    without commpass (docs/collectives.md): hence 1. With an ``environment``, processes are new
    ones, since libraries read it when they are loaded.
    """

    limit_factor = 1
    """What the limits of ``run`` are multiplied by; more than 1 where long tests run."""

    def __init__(self, size: int, environment: dict[str, str] | None = None, workers: int = 1):
        self.size, self.workers = size, workers
        self.environment = environment or {}
        self.members: list[tuple[Any, Connection]] = []
        self.folder = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
        """Return the results of all ranks, in rank order."""
        if not self.members:
            self.start()
        for _, pipe in self.members:
            pipe.send((function, args))
        return self._collect(timeout, function.__name__)

    def stop(self) -> None:
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()
        self.members = []

    def start(self) -> None:
        """Start the processes; ``run`` does so if there are none."""
        context = multiprocessing.get_context("spawn") if self.environment else forked()
        folder = self.folder = tempfile.mkdtemp(prefix="ranks")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
            given = (rank, self.size, self.workers, folder, theirs, environment)
            process = context.Process(target=_member, args=given, daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))
        self._collect(START_S, "start")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        start = time.monotonic()
        deadline = start + timeout * self.limit_factor
        replies: dict[int, tuple[bool, Any]] = {}
        open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.members)}
        while open_pipes and (
            ready := wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        ):
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    replies[rank] = pipe.recv()
                except (EOFError, OSError):
                    replies[rank] = (False, self._death(rank))
                if not replies[rank][0]:  # others may wait for it: allow time for their errors
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if all(good for good, _ in replies.values()) and not open_pipes:
            return [replies[rank][1] for rank in range(self.size)]
        self.stop()
        silence = (False, f"no answer within {time.monotonic() - start:.0f} s")
        answers = [replies.get(rank, silence) for rank in range(self.size)]
        said = [
            f"--- rank {rank}: {'done' if good else reply}"
            for rank, (good, reply) in enumerate(answers)
        ]
        raise RanksFailed(f"{what} on {self.size} ranks:\n" + "\n".join(said))

    def _death(self, rank: int) -> str:
        """Return the exit code of a rank, and where it was if a signal ended it."""
        process = self.members[rank][0]
        process.join(5)
        stacks = _stacks(self.folder, rank).read_text()
        return f"the process died with exit code {process.exitcode}\n{stacks}".rstrip()


def _stacks(folder: str, rank: int) -> Path:
    """Return the path of the file with the stacks of a rank that a signal ended."""
    return Path(folder, f"stacks of rank {rank}")


def _member(
    rank: int, size: int, workers: int, folder: str, pipe: Connection, environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update({**environment, "RANK": str(rank), "WORLD_SIZE": str(size)})
    faulthandler.enable(os.open(_stacks(folder, rank), os.O_CREAT | os.O_WRONLY))
    if host := environment.get("RANKS_HOST"):
        _enter(f"{host}{rank}")
    if environment.get("RANKS_OWN_CORES"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    import torch.distributed as dist

    from commpass.distributed.plan_store import open_store

    do_not_time_guards()
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = _gloo_with(workers)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), size),
            rank=rank,
            world_size=size,
        )
        pipe.send((True, None))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            open_store()
            dist.barrier()  # agreements of the last function no longer count for any rank
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def forked() -> Any:
    """Return a context whose processes are forked with all modules that ``preloaded`` loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()  # it looks for the module there
    return context


def do_not_time_guards() -> None:
    """Skip Dynamo's timing of guards.

    Dynamo times the guards of each graph with all caches flushed, 20 ms each, for a log.
    """
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *given: 0.0


def _gloo_with(workers: int) -> type:
    """Return the class of gloo groups with so many workers each."""
    import torch.distributed as dist

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any):
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            device = (
                self.create_device(interface=interface)
                if interface
                else self.create_default_device()
            )
            options = self._Options()
            options._devices, options._threads, options._timeout = [device], workers, timeout
            super().__init__(store, rank, size, options)

    return Gloo


def _enter(host: str) -> None:
    """Move this process into a named network namespace."""
    with open(f"/run/netns/{host}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into network namespace {host}")
