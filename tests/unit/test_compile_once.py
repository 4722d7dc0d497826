"""One rank of a host compiles a graph, and the others wait for it; objects bypass compiled code."""

from __future__ import annotations

import logging
import threading
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from torch import fx
from torch._dynamo.utils import counters
from torch._library.fake_class_registry import FakeScriptObject

from commpass.backend import compile_once
from commpass.backend.compile_once import compiled_once
from commpass.backend.object_inputs import bypass_objects

X = torch.randn(4)


def mesh() -> FakeScriptObject:
    """Return what stands for a DeviceMesh in a traced graph."""
    return FakeScriptObject(object(), "torch.distributed.device_mesh.DeviceMesh", None)


def graph(*, reads: bool = False) -> fx.GraphModule:
    """Return ``a, mesh, b -> a + b, mesh, b, mesh``; if it ``reads`` the mesh, an operator does."""
    made = fx.Graph()
    a, object_in, b = (made.placeholder(name) for name in ("a", "mesh", "b"))
    total = made.call_function(torch.add, (a, b))
    if reads:
        made.call_function(print, (object_in,))
    made.output((total, object_in, b, object_in))
    return fx.GraphModule(torch.nn.Module(), made)


# --- objects --------------------------------------------------------------------------------------


def test_object_bypasses_the_graph_and_is_returned_again():
    gm, held = graph(), mesh()
    bypass = bypass_objects(gm, [X, held, X])
    assert bypass.outputs == {1: (1, 3)}
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == ["a", "b"]
    inputs = [X, held, 2 * X]
    run = bypass.wrapped(lambda kept: gm(*kept))
    total, first, other, second = run(inputs)
    assert torch.equal(total, 3 * X)
    assert first is held
    assert second is held
    assert other is inputs[1]  # the list was changed in place, as for all compiled graphs
    assert len(inputs) == 2


def test_numbers_of_static_inputs_are_those_of_the_others():
    bypass = bypass_objects(graph(), [X, mesh(), X])
    assert bypass.renumbered([0, 1, 2]) == [0, 1]
    assert bypass.renumbered([2]) == [1]


@pytest.mark.parametrize("inputs", [[X, X, X], [X, mesh(), X]])
def test_tensors_and_objects_that_an_operator_reads_stay(inputs):
    gm = graph(reads=True)
    before = gm.code
    assert not bypass_objects(gm, inputs).outputs
    assert gm.code == before


def test_object_without_any_use_is_dropped():
    made = fx.Graph()
    a, _ = made.placeholder("a"), made.placeholder("mesh")
    made.output((a,))
    gm = fx.GraphModule(torch.nn.Module(), made)
    bypass = bypass_objects(gm, [X, mesh()])
    (found,) = bypass.wrapped(lambda kept: gm(*kept))([X, "the mesh"])
    assert found is X


# --- one rank at a time ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for the locks, in a process that waits for others."""
    monkeypatch.setattr(compile_once, "_failures", [])
    on = torch._inductor.config.patch(fx_graph_cache=True, force_disable_caches=False)
    with on, patch("torch._inductor.codecache.get_lock_dir", lambda: str(tmp_path / "locks")):
        yield tmp_path / "locks"


def lock_of(folder, gm: fx.GraphModule) -> FileLock:
    folder.mkdir(exist_ok=True)
    return FileLock(folder / f"commpass_{compile_once._digest(gm, [X])}.lock", is_singleton=False)


def compiled_while_locked(folder, gm: fx.GraphModule, hits: int) -> list[str]:
    """Return the events of a compile that begins while another process has the lock."""
    events, entered = [], threading.Event()

    def compile() -> None:
        with compiled_once(gm, [X]):
            events.append("compiles")
            counters["inductor"]["fxgraph_cache_hit"] += hits
        entered.set()

    other = lock_of(folder, gm)
    with other:
        thread = threading.Thread(target=compile)
        thread.start()
        assert not entered.wait(0.3)
        events.append("the other is done")
    thread.join(30)
    return events


def test_rank_waits_for_another_that_compiles_the_same_graph(folder):
    assert compiled_while_locked(folder, graph(), 1) == ["the other is done", "compiles"]
    assert not compile_once._failures


def test_rank_that_waited_in_vain_waits_no_more(folder, caplog):
    caplog.set_level(logging.INFO, logger="commpass")
    assert compiled_while_locked(folder, graph(), 0) == ["the other is done", "compiles"]
    assert "not found in Inductor's cache" in caplog.text
    with lock_of(folder, graph()), compiled_once(graph(), [X]):
        pass  # without a wait


def test_other_graphs_are_not_awaited(folder, monkeypatch):
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.1)
    with lock_of(folder, graph()), compiled_once(graph(reads=True), [X]):
        pass
    assert not compile_once._failures  # a wait would have ended with a reason


def test_rank_that_waits_too_long_compiles_by_itself(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="commpass")
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.1)
    with lock_of(folder, graph()), compiled_once(graph(), [X]):
        pass
    assert "by itself from now on: Timeout" in caplog.text


def test_folder_that_cannot_be_written_to_is_no_error(folder, caplog):
    caplog.set_level(logging.INFO, logger="commpass")
    folder.write_text("a file")
    with compiled_once(graph(), [X]):
        pass
    assert "by itself from now on: FileExistsError" in caplog.text


def test_failed_compile_frees_the_lock(folder):
    with pytest.raises(ValueError, match="no such kernel"), compiled_once(graph(), [X]):
        raise ValueError("no such kernel")
    with lock_of(folder, graph()).acquire(timeout=0):
        pass


@pytest.mark.parametrize("change", [{"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_without_a_cache_nobody_waits(folder, change, monkeypatch):
    monkeypatch.setattr(compile_once, "PATIENCE_S", 0.1)
    here = compiled_once(graph(), [X])
    with torch._inductor.config.patch(change), lock_of(folder, graph()), here:
        pass
    assert not compile_once._failures  # a wait would have ended with a reason
