"""Build measured timelines: match the calls of a trace with the graphs of a dump."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from commpass.errors import TraceError
from commpass.plan.dump import Dump, GraphNode
from commpass.plan.kinds import KERNEL
from commpass.plan.timeline import (
    COMPUTE,
    EXCHANGE,
    HOST,
    WAIT,
    Event,
    Span,
    Timeline,
    subtract,
    union,
)
from commpass.report.operators import operation_kind
from commpass.report.profiler_trace import CALL, HOW, Call, Row, Step, calls_of, read

LINKS = "links"
"""The lane of exchanges if the dump names none."""


def measured(path: Path, dumps: Sequence[Dump]) -> dict[int, Timeline]:
    """Return the measured timeline of each graph that has exchanges, by its number in the dump.

    Raise TraceError if the file is not a trace, or is that of another program.
    """
    rows = read(path)
    calls = calls_of(rows)
    if not calls:
        raise TraceError(
            f"{path}: no call of a graph that Inductor compiled ({CALL!r}) among its"
            f" {len(rows)} events: {HOW}"
        )
    matched = _matched(path, dumps, calls)
    return {
        one.number: _timeline(one, matched[one.number], rows)
        for one in dumps
        if one.number in matched
    }


def _steps(one: Dump) -> list[tuple[str, GraphNode]]:
    """Return the compiled graph's operations in the form of its calls."""
    found = [
        (operation_kind(node.target), node) for node in one.lowered if node.op == "call_function"
    ]
    return [(what, node) for what, node in found if what]


def _matched(path: Path, dumps: Sequence[Dump], calls: Sequence[Call]) -> dict[int, Call]:
    """Return the last call of each graph, by number.

    Graphs with the same exchanges are distinguished by direction, and then by their order.
    """
    alike: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for one in dumps:
        if pattern := tuple(what for what, _ in _steps(one) if what not in (WAIT, KERNEL)):
            alike[pattern, one.plan.direction].append(one.number)
    if not alike:
        raise TraceError(f"{path}: no graph of this dump has an exchange to look for")
    found: dict[int, Call] = {}
    for (pattern, direction), numbers in alike.items():
        backward = direction == "backward"
        own = [call for call in calls if call.starts == pattern and call.backward == backward]
        if len(own) < len(numbers):
            seen = "; ".join(sorted({_counted(call.starts) for call in calls}))
            raise TraceError(
                f"{path}: no call of graph {numbers[len(own)]} ({direction}) in this trace. It has"
                f" {_counted(pattern)}; the graphs that are called here have {seen}. Is it the"
                " trace of another program, or of another run of this one (--run)?"
            )
        found |= dict(zip(numbers, own[-len(numbers) :], strict=True))
    return found


def _counted(pattern: Iterable[str]) -> str:
    """Return the number of exchanges of each kind as text."""
    counts = Counter(pattern)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no exchange"


# --- a call as a timeline -------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What the dump has about the steps of a call.

    These are their nodes in the graph, the site of each node by name, and the lane of each exchange
    by name.
    """

    nodes: dict[Row, GraphNode]
    sites: dict[str, str]
    lanes: dict[str, str]

    def event(self, step: Step, name: str, begin: float, us: float, lane: str = HOST) -> Event:
        node = self.nodes.get(step.row)
        if node is None:
            return Event(name=step.row.name, what=name, lane=lane, begin_us=begin, us=us)
        return Event(
            name=node.name,
            what=name,
            lane=lane,
            begin_us=begin,
            us=us,
            site=self.sites[node.name],
            hop=node.hop,
            chunk=node.chunk,
            module=node.module,
        )

    def lane_of(self, start: Step) -> str:
        node = self.nodes.get(start.row)
        return self.lanes.get(node.name, LINKS) if node is not None else LINKS

    def role_of(self, kernel: Step) -> str:
        node = self.nodes.get(kernel.row)
        return node.role if node is not None else "kernel"


def _timeline(one: Dump, call: Call, rows: Sequence[Row]) -> Timeline:
    graph = _steps(one)
    pairs = zip(call.steps, (node for _, node in graph), strict=False)
    if not (same := [what for what, _ in graph] == [step.what for step in call.steps]):
        starts = (node for what, node in graph if what not in (WAIT, KERNEL))
        pairs = zip(_starts(call), starts, strict=True)
    known = Known({step.row: node for step, node in pairs}, _sites(one), _tracks(one))
    launched = _launched(call, rows)
    events = _on_gpu(call, known, launched) if launched else _on_cpu(call, known, rows)
    note = (
        "" if same else "its waits have another order than the graph's: sites are not distinguished"
    )
    return Timeline(
        events=tuple(sorted(events, key=lambda event: event.begin_us)),
        us=max(event.end_us for event in events if event.lane == HOST),
        note=note,
    )


def _starts(call: Call) -> list[Step]:
    return [step for step in call.steps if step.what not in (WAIT, KERNEL)]


def _tracks(one: Dump) -> dict[str, str]:
    """Return the lane of each exchange in the prediction."""
    predicted = one.timeline.events if one.timeline is not None else ()
    return {event.name: event.lane for event in predicted if event.travels}


def _sites(one: Dump) -> dict[str, str]:
    """Return the site of each node; for a wait, that of the exchange that it waits for."""
    found: dict[str, str] = {}
    for node in one.lowered:
        given = (found[each] for each in node.inputs if found.get(each))
        found[node.name] = (node.site or next(given, "")).partition(".")[0]
    return found


def _on_cpu(call: Call, known: Known, rows: Sequence[Row]) -> list[Event]:
    """Return the events of a call on a CPU. Waits are the host's; time outside of steps is
    compute."""
    zero, found = call.row.begin, []
    for step in call.steps:
        what = {WAIT: WAIT, KERNEL: known.role_of(step)}.get(step.what, EXCHANGE)
        begin, us = step.row.begin - zero, step.row.end - step.row.begin
        found.append(known.event(step, what, begin, us))
    for start, (begin, end) in _travels(call, rows).items():
        lane = known.lane_of(start)
        found.append(known.event(start, EXCHANGE, begin - zero, end - begin, lane))
    steps = [(step.row.begin, step.row.end) for step in call.steps]
    return [*found, *_computing(subtract([(zero, call.row.end)], steps), zero)]


def _computing(spans: Iterable[Span], zero: float) -> list[Event]:
    return [
        Event(name="", what=COMPUTE, lane=HOST, begin_us=begin - zero, us=end - begin)
        for begin, end in spans
    ]


def _travels(call: Call, rows: Sequence[Row]) -> dict[Step, Span]:
    """Return when each exchange of a call is in flight.

    Messages are recorded by the calling thread when they are handed over. Other exchanges are
    recorded by gloo's threads, one after the other.
    """
    inside = [row for row in rows if call.row.begin <= row.begin < call.row.end]
    notes = [row for row in inside if row.name.startswith("gloo:")]
    others = [row for row in notes if row.thread != call.row.thread]
    found = {}
    for start in _starts(call):
        own = [row for row in notes if row.thread == call.row.thread]
        own = [row for row in own if start.row.begin <= row.begin < start.row.end]
        if not own:
            own = [row for row in others if row.begin >= start.row.begin][:1]
            others = [row for row in others if row not in own]
        if own:
            found[start] = min(row.begin for row in own), max(row.end for row in own)
    return found


def _launched(call: Call, rows: Sequence[Row]) -> dict[Row, Row]:
    """Map the GPU kernels that were launched in a call, in order, to their launches."""
    launches = {
        row.launch: row
        for row in rows
        if row.launch is not None
        and row.category in ("cuda_runtime", "cuda_driver")
        and row.thread == call.row.thread
        and call.row.holds(row)
    }
    kernels = (row for row in rows if row.category in ("kernel", "gpu_memcpy", "gpu_memset"))
    return {row: launches[row.launch] for row in kernels if row.launch in launches}


def _on_gpu(call: Call, known: Known, launched: dict[Row, Row]) -> list[Event]:
    """Return the events of a call on a GPU. A rank waits while exchanges run and nothing is
    computed."""
    zero = min(row.begin for row in launched)
    travelling = {row: at for row, at in launched.items() if "nccl" in row.name.lower()}
    computing = {row: at for row, at in launched.items() if row not in travelling}
    busy = union((row.begin, row.end) for row in computing)
    own = [step for step in call.steps if step.what == KERNEL]
    coding = {
        row: step for row, launch in computing.items() for step in own if step.row.holds(launch)
    }
    found = []
    for row, step in coding.items():
        us = row.end - row.begin
        found.append(known.event(step, known.role_of(step), row.begin - zero, us))
    others = ((row.begin, row.end) for row in computing if row not in coding)
    found += _computing(union(others), zero)
    seen: list[Span] = []
    for row, launch in travelling.items():
        start = next((each for each in _starts(call) if each.row.holds(launch)), None)
        start = start or Step(EXCHANGE, row)
        us, lane = row.end - row.begin, known.lane_of(start)
        found.append(known.event(start, EXCHANGE, row.begin - zero, us, lane))
        for begin, end in subtract([(row.begin, row.end)], [*busy, *seen]):
            found.append(known.event(start, WAIT, begin - zero, end - begin))
        seen.append((row.begin, row.end))
    return found
