"""Kernels beside computation: the order that streams and events give them.

Streams of a GPU are recorded, and their order is computed from the record: an event of one stream
that another waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from commpass.errors import CommpassError
from commpass.lowering.gpu import side_stream

pytest.importorskip("triton", reason="kernels are written in Triton")

from commpass.lowering.gpu import exchange

GPU = torch.device("cuda", 0)


class Stream:
    """A stream that records what is enqueued. ``after`` has, for each entry, what precedes it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.done: frozenset[str] = frozenset()

    def record_event(self) -> frozenset[str]:
        self.recorder.events += 1
        return self.done

    def wait_event(self, event: frozenset[str]) -> None:
        self.done |= event

    def enqueue(self, name: str) -> None:
        self.recorder.after[name] = self.done
        self.done |= {name}


class Recorder:
    """The streams of a GPU: ``main``, and those that are created."""

    def __init__(self) -> None:
        self.after: dict[str, frozenset[str]] = {}
        self.main = self.current = Stream(self)
        self.created: list[Stream] = []
        self.events = 0
        self.capturing = False

    def create(self, device: torch.device, priority: int) -> Stream:
        self.created.append(Stream(self))
        return self.created[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, name: str) -> None:
        self.current.enqueue(name)

    def start(self, name: str, number: int) -> object:
        """Start a kernel, and return its result."""
        output = SimpleNamespace(name=name)
        side_stream.start(GPU, number, lambda: self.run(name), output)
        return output

    def block(self, name: str) -> None:
        """Run a single kernel in the current stream, as explicit calls do."""
        prepared = (SimpleNamespace(), lambda: self.run(name))
        with mock.patch.object(exchange, "_prepare", return_value=prepared):
            exchange.run(None, None, SimpleNamespace(device=GPU))


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    recorder = Recorder()
    fakes = {
        "Stream": recorder.create,
        "stream": recorder.stream,
        "current_stream": lambda device: recorder.current,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: recorder.capturing,
    }
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.dict(side_stream._streams, clear=True),
        mock.patch.object(side_stream, "_started", []),
    ):
        yield recorder


def test_kernel_runs_beside_what_is_between_its_start_and_its_wait(gpu):
    gpu.run("input")
    output = gpu.start("kernel", 0)
    gpu.run("matmul")
    assert side_stream.wait(GPU, 0) is output
    gpu.run("reader")
    assert gpu.after["kernel"] == {"input"}
    assert gpu.after["matmul"] == {"input"}
    assert gpu.after["reader"] == {"input", "kernel", "matmul"}
    assert gpu.events == 2
    assert len(gpu.created) == 1


def test_kernels_share_one_stream_and_keep_the_order_of_their_starts(gpu):
    for number in range(4):
        gpu.start(f"kernel {number}", number)
        gpu.run(f"matmul {number}")
    for number in (2, 0, 3, 1):  # waits may come in any order
        side_stream.wait(GPU, number)
        gpu.run(f"reader {number}")
    assert len(gpu.created) == 1
    for number in range(1, 4):
        assert f"kernel {number - 1}" in gpu.after[f"kernel {number}"]
        assert f"matmul {number - 1}" in gpu.after[f"kernel {number}"]
    assert "kernel 3" not in gpu.after["reader 2"]
    assert not side_stream._started


def test_kernel_of_the_current_stream_follows_those_in_flight_and_precedes_later_ones(gpu):
    gpu.start("first", 0)
    gpu.block("blocking")
    gpu.start("second", 1)
    gpu.run("matmul")
    assert "first" in gpu.after["blocking"]
    assert "blocking" in gpu.after["second"]
    assert "second" not in gpu.after["matmul"]


def test_kernel_of_the_current_stream_alone_needs_no_event(gpu):
    gpu.block("blocking")
    assert gpu.events == 0
    assert gpu.created == []


def test_kernel_started_in_its_own_stream_stays_in_order(gpu):
    gpu.start("first", 0)
    with gpu.stream(gpu.created[0]):
        gpu.start("second", 1)
        side_stream.wait(GPU, 1)
        gpu.run("reader")
    assert gpu.after["reader"] == {"first", "second"}


def test_memory_is_kept_until_the_wait(gpu):
    import weakref

    class Memory: ...

    kept = Memory()
    seen = weakref.ref(kept)
    side_stream.start(GPU, 0, lambda kept=kept: None, SimpleNamespace())
    del kept
    assert seen() is not None
    side_stream.wait(GPU, 0)
    assert seen() is None


def test_result_is_allocated_in_the_current_stream(gpu):
    """Memory of the kernels' own stream would need ``record_stream``."""
    where = []

    def prepare(workspace, exchange, x):
        where.append(gpu.current)
        return SimpleNamespace(), lambda: where.append(gpu.current)

    with (
        mock.patch.object(exchange, "_prepare", prepare),
        mock.patch.object(exchange, "_workspace_of"),
    ):
        exchange.start_in_group(None, "0", SimpleNamespace(device=GPU), 0)
    assert where == [gpu.main, *gpu.created]
    assert gpu.main not in gpu.created


def test_error_between_start_and_wait_leaves_no_later_call_unordered(gpu):
    def graph(inputs):
        gpu.start("kernel", 0)
        raise RuntimeError("out of memory")

    run = side_stream.joining(graph)
    with pytest.raises(RuntimeError, match="out of memory"):
        run([])
    gpu.run("later")
    assert "kernel" in gpu.after["later"]
    assert not side_stream._started
    gpu.start("again", 0)
    assert "kernel" in gpu.after["again"]


def test_kernels_in_a_capture_follow_each_other(gpu):
    gpu.capturing = True
    gpu.start("first", 0)
    gpu.block("blocking")
    assert "first" in gpu.after["blocking"]


def test_error_in_a_capture_waits_for_nothing(gpu):
    """What a capture has recorded never runs, and no other stream may wait for its events. The
    capture has ended when the error arrives."""

    def graph(inputs):
        gpu.capturing = True
        try:
            gpu.start("kernel", 0)
            raise RuntimeError("not permitted")
        finally:
            gpu.capturing = False

    with pytest.raises(RuntimeError, match="not permitted"):
        side_stream.joining(graph)([])
    assert gpu.main.done == frozenset()
    assert not side_stream._started


def test_graph_without_an_error_is_not_joined(gpu):
    def graph(inputs):
        gpu.start("kernel", 0)
        gpu.run("matmul")
        return side_stream.wait(GPU, 0)

    assert side_stream.joining(graph)([]).name == "kernel"
    assert gpu.events == 2


def test_start_whose_wait_was_never_reached_precedes_the_next_of_its_number(gpu):
    gpu.start("lost", 0)
    output = gpu.start("kernel", 0)
    gpu.run("later")
    assert "lost" in gpu.after["later"]
    assert side_stream.wait(GPU, 0) is output


def test_graph_inside_another_has_its_own_kernels(gpu):
    """Both number their starts from 0, and the inner one may be between a start and its wait."""

    def inner(inputs):
        gpu.start("inner", 0)
        if inputs:
            raise ValueError("inner error")
        return side_stream.wait(GPU, 0)

    for given in ([], [1]):
        output, run = gpu.start("outer", 0), side_stream.joining(inner)
        if given:
            with pytest.raises(ValueError, match="inner error"):
                run(given)
        else:
            assert run(given).name == "inner"
        gpu.run("later")
        assert "inner" in gpu.after["later"]
        assert side_stream.wait(GPU, 0) is output
        assert not side_stream._started


def test_graphs_of_two_threads_have_their_own_kernels(gpu):
    import threading

    found = []

    def other():
        found.append(gpu.start("other", 0))
        started.set()
        assert waited.wait(10)
        found.append(side_stream.wait(GPU, 0))

    started, waited = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    output = gpu.start("kernel", 0)
    thread.start()
    assert started.wait(10)

    def failing(inputs):
        raise RuntimeError("not this thread's kernel")

    with pytest.raises(RuntimeError, match="not this"):
        side_stream.joining(failing)([])
    gpu.block("blocking")
    assert {"kernel", "other"} <= gpu.after["blocking"]  # they share the processors of a GPU
    assert side_stream.wait(GPU, 0) is output
    waited.set()
    thread.join(10)
    assert found[1] is found[0]
    assert not side_stream._started


def test_wait_without_a_start_raises(gpu):
    with pytest.raises(CommpassError, match="no single kernel of number 3 is in flight on cuda:0"):
        side_stream.wait(GPU, 3)
    gpu.start("kernel", 3)
    side_stream.wait(GPU, 3)
    with pytest.raises(CommpassError, match="each wait needs a start before it"):
        side_stream.wait(GPU, 3)


def test_kernel_on_a_cpu_is_over_at_its_start(gpu):
    ran = []
    output = torch.ones(3)
    cpu = torch.device("cpu")
    side_stream.start(cpu, 0, lambda: ran.append("kernel"), output)
    assert ran == ["kernel"]
    assert side_stream.wait(cpu, 0) is output
    assert gpu.events == 0
    assert gpu.created == []
