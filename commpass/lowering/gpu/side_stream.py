"""Kernels beside computation: one stream for each GPU, forked from and joined with the current one.

A start lets the stream wait for all that the current stream has to do so far, and launches the
kernel there. The wait lets the current stream wait for the kernel. Both only record events and wait
for them on the GPU, so a CUDA graph can contain them.

All kernels of a GPU share the stream, so they run in the order of their starts. A kernel in the
current stream waits for those in flight (``join``), and later starts wait for it.

Memory: inputs and results are allocated in the current stream, and kept here until the wait. When
they are freed afterwards, the current stream is behind the kernel. So the allocator may give the
memory to later kernels of that stream, as always, and ``record_stream`` is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from commpass.errors import CommpassError

PRIORITY = -1
"""The higher of the priorities of streams: a program of these kernels starts as soon as a processor
has room. Other ranks wait for it."""


@dataclass(frozen=True, eq=False)
class Started:
    """A kernel in flight: its device, the thread and the number of its start, its result, what
    keeps its inputs, and the event at its end (None on a CPU, where it is over). ``captured`` says
    that a CUDA graph was captured at its start."""

    device: torch.device
    thread: int
    number: int
    output: Tensor
    launch: Callable[[], None]
    end: Any
    captured: bool


_streams: dict[torch.device, Any] = {}
_started: list[Started] = []
"""The kernels in flight, in the order of their starts. Graphs of several threads, and a graph that
runs inside another, may have the same numbers."""


def start(device: torch.device, number: int, launch: Callable[[], None], output: Tensor) -> None:
    """Launch a kernel that writes ``output``. ``launch`` keeps the tensors that it reads.

    If the current stream is that of the kernels, they stay in its order. A kernel of the same
    number in flight, of a graph around this one, is waited for first.
    """
    if _in_flight(device, number) is not None:
        join(device)
    end, captured = None, False
    if device.type == "cuda":
        captured = torch.cuda.is_current_stream_capturing()
        end = _launch_beside(device, launch)
    else:
        launch()
    _started.append(Started(device, get_ident(), number, output, launch, end, captured))


def _launch_beside(device: torch.device, launch: Callable[[], None]) -> Any:
    """Launch a kernel after all work of the current stream. Return the event at its end."""
    side = _streams.get(device)
    if side is None:
        side = _streams[device] = torch.cuda.Stream(device, priority=PRIORITY)
    side.wait_event(torch.cuda.current_stream(device).record_event())
    with torch.cuda.stream(side):
        launch()
    return side.record_event()


def wait(device: torch.device, number: int) -> Tensor:
    """Let the current stream wait for a kernel, and return its result. Raises CommpassError if it
    was not started, or has been waited for."""
    found = _in_flight(device, number)
    if found is None:
        raise CommpassError(
            f"no single kernel of number {number} is in flight on {device}: each wait needs a start"
            " before it, in the same graph"
        )
    _started.remove(found)
    if found.end is not None:
        torch.cuda.current_stream(device).wait_event(found.end)
    return found.output


def _in_flight(device: torch.device, number: int) -> Started | None:
    """Return the latest kernel of a number that this thread has started, or None."""
    own = (each for each in reversed(_of_this_thread()) if each.device == device)
    return next((each for each in own if each.number == number), None)


def _of_this_thread() -> list[Started]:
    thread = get_ident()
    return [each for each in tuple(_started) if each.thread == thread]


def join(device: torch.device) -> None:
    """Let the current stream wait for all kernels in flight on a device. Their own waits follow.

    A capture of a CUDA graph waits for its own kernels, and nothing else does: those of a capture
    that has failed never run.
    """
    _follow(each for each in tuple(_started) if each.device == device)


def _follow(kernels: Iterable[Started]) -> None:
    """Let the current streams of their devices wait for kernels in flight."""
    for each in kernels:
        if each.end is not None and each.captured == torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(each.device).wait_event(each.end)


def joining(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a compiled graph: if it raises between a start and its wait, all later work of the
    current stream still follows the kernel. Kernels of a graph around it stay in flight."""

    def run(inputs: list[Any]) -> Any:
        around = _of_this_thread()
        try:
            return function(inputs)
        except BaseException:
            _drop([each for each in _of_this_thread() if each not in around])
            raise

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def _drop(kernels: Iterable[Started]) -> None:
    """Let the current streams wait for kernels in flight, and forget these."""
    for each in kernels:
        _started.remove(each)
        _follow([each])
