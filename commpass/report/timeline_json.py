"""Write timelines in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commpass.plan.timeline import Timeline
from commpass.report.timeline_drawing import Picture


def write(pictures: Sequence[Picture], path: Path) -> None:
    """Write each timeline as a process whose threads are its lanes.

    Times are in microseconds from the start of the graph. Raise OSError if the file cannot be
    written.
    """
    processes = [(each.title, each.timeline) for each in pictures]
    events = [event for pid, one in enumerate(processes) for event in _process(pid, *one)]
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _process(pid: int, title: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    for tid, lane in enumerate(timeline.tracks):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
    for event in timeline.events:
        named = {"site": event.site, "module": event.module}
        args: dict[str, Any] = {key: value for key, value in named.items() if value}
        if event.site:
            args |= {"hop": event.hop, "chunk": event.chunk}
        if event.latency_us:
            args["latency_us"] = event.latency_us
        yield {
            **{"ph": "X", "pid": pid, "tid": timeline.tracks.index(event.lane)},
            **{"name": event.name, "cat": event.what, "ts": event.begin_us, "dur": event.us},
            "args": args,
        }
