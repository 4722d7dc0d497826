"""How the meshes of a process are found, without side effects."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commpass import groups


@pytest.fixture
def switching():
    """Let threads switch as often as possible."""
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


def test_mesh_made_as_another_reference_to_its_class_goes_is_found(fake_group):
    """The count of references is unchanged, and the mesh is old by then."""
    fake_group(4)
    init_device_mesh("cpu", (4,), mesh_dim_names=("first",))
    held = [DeviceMesh]
    assert "second" not in groups.dimensions()
    before = sys.getrefcount(DeviceMesh)
    held.clear()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("second",))
    gc.collect()
    assert sys.getrefcount(DeviceMesh) <= before
    assert mesh.mesh_dim_names[0] in groups.dimensions()


def test_meshes_are_looked_for_once_while_none_is_made(fake_group, monkeypatch):
    fake_group(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    gc.collect()  # now it is an old object
    assert groups.labels(mesh.get_group()) == ("tp", "world")
    monkeypatch.setattr(gc, "get_referrers", pytest.fail)
    gc.collect()
    assert groups.labels(mesh.get_group()) == ("tp", "world")


def test_meshes_are_still_known_after_gc_freeze(fake_group):
    """Serving stacks freeze existing objects when they start to serve."""
    fake_group(4)
    kept = [init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))]
    assert "tp" in groups.dimensions()
    gc.freeze()
    try:
        kept.append(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        assert {"tp", "dp"} <= set(groups.dimensions())
    finally:
        gc.unfreeze()
