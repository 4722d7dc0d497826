"""Group graphs into runs, with their measured timelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from commpass.errors import CommpassError
from commpass.plan.dump import Dump
from commpass.plan.timeline import Timeline
from commpass.report.measured_timeline import measured


@dataclass(frozen=True)
class Read:
    """The graphs of one run, the paths they were read from (for display), and measured timelines by
    number, none without a trace."""

    source: str
    dumps: tuple[Dump, ...]
    measured: Mapping[int, Timeline]


def runs(found: Iterable[tuple[Path, Sequence[Dump]]], traces: Sequence[Path] = ()) -> list[Read]:
    """Group the dumps of some paths into runs.

    Files of one run are combined; a graph number that exists already begins another run. The first
    trace belongs to the first run, and so on. Raise CommpassError for more traces than runs, and
    TraceError for a trace of another program.
    """
    groups: list[tuple[list[Path], dict[int, Dump]]] = []
    for path, dumps in found:
        for dump in dumps:
            group = next(
                (
                    (paths, own)
                    for paths, own in groups
                    if dump.run == next(iter(own.values())).run and dump.number not in own
                ),
                None,
            )
            if group is None:
                group = ([], {})
                groups.append(group)
            group[0].append(path)
            group[1][dump.number] = dump
    if len(traces) > len(groups):
        raise CommpassError(
            f"{len(traces)} traces for {len(groups)} run{'s' * (len(groups) != 1)}: --measured"
            " names one for each run at most"
        )
    return [
        Read(
            ", ".join(map(str, dict.fromkeys(paths))),
            dumps := tuple(own[number] for number in sorted(own)),
            measured(traces[at], dumps) if at < len(traces) else {},
        )
        for at, (paths, own) in enumerate(groups)
    ]
