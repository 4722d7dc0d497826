"""Read traces of torch.profiler: when the graphs of a dump ran, and where their ranks waited.

A trace is the JSON that ``prof.export_chrome_trace`` writes. These entries are used:

- ``## Call CompiledFxGraph``: a call of a graph that Inductor compiled. The last call of each graph
  is used. A graph is identified by the sequence of its exchanges.
- On the thread of that call: operators that start an exchange (such as
  ``_c10d_functional::all_reduce`` and ``commpass::all_to_all_single``), wait for one
  (``..::wait_tensor``), or are a kernel of commpass (``commpass::kernel_``). All other time is
  compute. It includes Inductor's own kernels, which have no name in a trace on a CPU.
- On a CPU, ``gloo:`` annotations: exchanges in flight, until they have been waited for.
- On a GPU, where waits do not block the host: kernels (``"cat": "kernel"``) that were launched in
  the call. Those named ``nccl`` are exchanges, and the others compute. A rank waits while only
  exchanges run.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commpass.errors import TraceError
from commpass.plan.kinds import KERNEL
from commpass.plan.timeline import WAIT
from commpass.report.operators import operation_kind

CALL = "## Call CompiledFxGraph"
BACKWARD = "CompiledFunctionBackward"
HOW = "write it with torch.profiler's prof.export_chrome_trace(...) around a step"


@dataclass(frozen=True)
class Row:
    """An entry of a trace with a duration, in microseconds.

    ``launch`` is the number that a kernel and its launch share.
    """

    name: str
    category: str
    thread: tuple[Any, Any]
    begin: float
    end: float
    launch: Any = None

    def holds(self, row: Row) -> bool:
        return self.begin <= row.begin and row.end <= self.end


@dataclass(frozen=True)
class Step:
    """The start of an exchange, a wait, or a kernel of commpass.

    ``what`` is the kind of the exchange, ``WAIT`` or ``KERNEL``.
    """

    what: str
    row: Row


@dataclass(frozen=True)
class Call:
    """A call of a compiled graph, with its steps in order."""

    row: Row
    backward: bool
    steps: tuple[Step, ...]

    @property
    def starts(self) -> tuple[str, ...]:
        """The kinds of its exchanges."""
        return tuple(step.what for step in self.steps if step.what not in (WAIT, KERNEL))


def read(path: Path) -> list[Row]:
    """Return the entries of a trace that have a duration, in order. Raise TraceError for other
    files."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        held = json.loads(text)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise TraceError(f"{path}: this is not JSON ({error}): {HOW}") from error
    events = held.get("traceEvents") if isinstance(held, dict) else held
    if not isinstance(events, list):
        raise TraceError(f'{path}: this is not a trace (no "traceEvents" in it): {HOW}')
    rows = [_row(each) for each in events if isinstance(each, dict) and each.get("ph") == "X"]
    found = [row for row in rows if row is not None]
    if not found:
        raise TraceError(f"{path}: nothing in this trace takes time: {HOW}")
    return sorted(found, key=lambda row: (row.begin, -row.end))


def _row(event: dict[str, Any]) -> Row | None:
    begin, us, args = event.get("ts"), event.get("dur"), event.get("args")
    if not isinstance(begin, (int, float)) or not isinstance(us, (int, float)):
        return None
    return Row(
        str(event.get("name", "")),
        str(event.get("cat", "")),
        (str(event.get("pid")), str(event.get("tid"))),
        begin,
        begin + us,
        args.get("correlation") if isinstance(args, dict) else None,
    )


# --- calls of graphs ------------------------------------------------------------------------------


def calls_of(rows: Sequence[Row]) -> list[Call]:
    """Return the calls of compiled graphs, in order, without the kernel calls inside them."""
    threads = defaultdict(list)
    for row in rows:
        threads[row.thread].append(row)
    found = []
    for own in threads.values():
        begins = [row.begin for row in own]
        backwards = [row for row in own if row.name == BACKWARD]
        for row in _outermost(row for row in own if row.name.startswith(CALL)):
            inside = own[bisect_left(begins, row.begin) : bisect_right(begins, row.end)]
            steps = [each for each in inside if operation_kind(each.name) and row.holds(each)]
            backward = any(each.holds(row) for each in backwards)
            taken = tuple(Step(operation_kind(each.name), each) for each in _outermost(steps))
            found.append(Call(row, backward, taken))
    return sorted(found, key=lambda call: call.row.begin)


def _outermost(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of one thread that are not inside others."""
    found: list[Row] = []
    for row in rows:
        if not found or row.begin >= found[-1].end:
            found.append(row)
    return found
