"""Fixtures: a fake process group of any size for graph tests, and real ranks on gloo."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis  # noqa: F401  parsed before there are graphs, whose end inside of a parse crashes it
import pytest
import tiers
import timing
import torch
import torch.distributed as dist
from processes import Ranks, do_not_time_guards
from tiers import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_itemcollected,
)
from timing import pytest_runtest_logreport, pytest_terminal_summary

# pytest adds a handler to each logger that does not propagate. torch then logs all that it
# compiles.
logging.getLogger("torch.__trace").propagate = True
os.environ["COMMPASS_CHECK"] = "1"  # check the invariants between passes, on all ranks
# Plans must not depend on how many cores a machine has for the ranks of a test, or how fast.
os.environ["COMMPASS_CORES"] = "1"
os.environ["COMMPASS_SPEED"] = "1"

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_itemcollected",
    "pytest_runtest_logreport",
    "pytest_terminal_summary",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.pytest_addoption(parser)
    timing.pytest_addoption(parser)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget the backends of earlier tests: what they matched, and what was reported."""
    if (summary := sys.modules.get("commpass.distributed.summary")) is not None:
        summary._summaries.clear()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Let backends of earlier tests write their last report before the test begins."""
    torch._dynamo.reset()
    gc.collect()
    caplog.clear()
    return caplog


@pytest.fixture
def fake_group() -> Iterator[Callable[..., dist.ProcessGroup]]:
    """Make this process rank 0 of 64 by ``fake_group(64)``, or another ``rank``, without other
    processes.

    Collectives trace and compile, but send nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size: int, rank: int = 0) -> dist.ProcessGroup:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return dist.group.WORLD

    torch._dynamo.reset()
    with _results_from_inputs() if tiers.VERSION < (2, 13) else contextlib.nullcontext():
        yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _results_from_inputs() -> Iterator[None]:
    """Let collectives on a CPU return parts of this rank's input, as in torch 2.13.

    The fake process group of torch 2.11 returns memory that nothing has written.
    """

    def own_part(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
        rank = dist.distributed_c10d._resolve_process_group(group).rank()
        return x.chunk(size)[rank].clone()

    def own_parts(xs: list[torch.Tensor], *settings: Any) -> list[torch.Tensor]:
        return [own_part(x, *settings) for x in xs]

    def exchanged(x: torch.Tensor, to: list[int], of: list[int], group: str) -> torch.Tensor:
        return x.clone() if sum(to) == len(x) else x.new_zeros(sum(to), *x.shape[1:])

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        library.impl("reduce_scatter_tensor", own_part, "CPU")
        library.impl("reduce_scatter_tensor_coalesced", own_parts, "CPU")
        library.impl("all_to_all_single", exchanged, "CPU")
        yield


@pytest.fixture
def wait_tensors() -> Iterator[Callable[..., list[torch.Tensor]]]:
    """The operator ``wait_tensors``, which waits for several tensors at once.

    torch has it from 2.15 on; before, this is an operator that can only be traced.
    """
    if hasattr(torch.ops._c10d_functional, "wait_tensors"):
        yield torch.ops._c10d_functional.wait_tensors
        return
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
        library.impl(
            "wait_tensors", lambda tensors: [torch.empty_like(tensor) for tensor in tensors], "Meta"
        )
        yield torch.ops._c10d_functional.wait_tensors


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Disable garbage collection while a report parses the source of a failed test.

    The parser of Python 3.11 raises SystemError if a collection runs code meanwhile, such as ours
    at the end of graphs, and the worker ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _ranks(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    ranks.start()  # so that the first test does not take its time
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    yield from _ranks(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    yield from _ranks(4)


def pytest_collection_finish() -> None:
    """Freeze all objects that exist when the tests begin, so that the garbage collector skips
    them."""
    do_not_time_guards()
    gc.collect()
    gc.freeze()
