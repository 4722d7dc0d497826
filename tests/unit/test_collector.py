"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import commpass
from commpass.passes import GraphInput, manager
from commpass.policy import Policy
from commpass.policy.rules import Rule
from commpass.utils.collector import collection_paused


def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    for weight in weights:
        x = ops.wait_tensor(ops.all_reduce(x @ weight, "sum", "0"))
    return x


@pytest.fixture(autouse=True)
def collection_stays_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def fail_in_a_pause() -> None:
    with collection_paused():
        assert not gc.isenabled()
        raise ValueError("no")


def test_an_error_ends_a_pause() -> None:
    with pytest.raises(ValueError, match="no"):
        fail_in_a_pause()
    assert gc.isenabled()


def test_a_pause_in_a_pause_ends_with_the_outer_one() -> None:
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_that_is_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_of_two_threads_the_last_one_ends_the_pause() -> None:
    first_is_in, second_is_in = threading.Event(), threading.Event()
    first_may_leave, second_may_leave = threading.Event(), threading.Event()

    def pause(is_in: threading.Event, may_leave: threading.Event) -> None:
        with collection_paused():
            is_in.set()
            may_leave.wait(60)

    first = threading.Thread(target=pause, args=(first_is_in, first_may_leave))
    second = threading.Thread(target=pause, args=(second_is_in, second_may_leave))
    first.start()
    assert first_is_in.wait(60)
    second.start()
    assert second_is_in.wait(60)
    first_may_leave.set()
    first.join(60)
    assert not gc.isenabled()
    second_may_leave.set()
    second.join(60)
    assert gc.isenabled()


def test_a_process_forked_in_a_pause_collects() -> None:
    with collection_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_interrupt_as_a_pause_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    disable = gc.disable
    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), collection_paused():
        pass
    assert gc.isenabled()
    monkeypatch.undo()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_process_forked_in_a_pause_of_another_thread_pauses_as_usual() -> None:
    is_in, may_leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collection_paused():
            is_in.set()
            may_leave.wait(60)

    thread = threading.Thread(target=pause)
    thread.start()
    assert is_in.wait(60)
    child = os.fork()
    if not child:
        before = gc.isenabled()
        with collection_paused():
            within = gc.isenabled()
        os._exit(0 if (before, within, gc.isenabled()) == (True, False, True) else 1)
    may_leave.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


def test_passes_run_without_collections(fake_group: Callable[[int], Any]) -> None:
    fake_group(8)
    with FakeTensorMode():
        x, weights = torch.randn(4, 4), [torch.randn(4, 4) for _ in range(30)]
        gm = make_fx(layers)(x, weights)
    policy = Policy(rules=[Rule(codec="int8", force=True)])
    given = GraphInput(gm=gm, direction="forward", policy=policy, profile=commpass.ethernet(1))
    collections: list[str] = []
    by_pass: dict[str, int] = {}

    def collected(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(collected)
    try:
        found = manager.run(
            given, "0", on_pass_end=lambda name, _: by_pass.update({name: len(collections)})
        )
    finally:
        gc.callbacks.remove(collected)
    assert len(found.plan.compressed) == 30
    assert len(by_pass) > 10
    assert len(set(by_pass.values())) == 1
    assert gc.isenabled()
