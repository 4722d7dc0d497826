"""How the meshes of a process are found: nobody else notices."""

from __future__ import annotations

import sys
import threading

import pytest
from torch.distributed.device_mesh import init_device_mesh

from commpass import groups


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_that_build_tuples_meanwhile_are_not_disturbed(switching):
    errors, done = [], threading.Event()

    def build() -> None:
        try:
            while not done.is_set():
                tuple(float(number) for number in range(200))
        except BaseException as error:  # a SystemError, once
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        groups.meshes()
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_each_new_mesh_is_found_and_one_that_went_is_not(fake_group):
    fake_group(4)
    before = len(groups.meshes())
    kept = []
    for count in range(1, 4):
        kept.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"a{count}", "b")))
        assert f"a{count}" in groups.dimensions()
        assert len(groups.meshes()) >= before + count
    kept.clear()
    assert "a1" not in groups.dimensions()
