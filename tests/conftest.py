"""Fixtures: a fake process group of any size for graph tests, and real ranks on gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture
def fake_group() -> Iterator[Callable[[int], dist.ProcessGroup]]:
    """``fake_group(64)`` makes this process rank 0 of 64, alone: collectives trace and compile, send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size: int) -> dist.ProcessGroup:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return dist.group.WORLD

    torch._dynamo.reset()
    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _ranks(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
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
