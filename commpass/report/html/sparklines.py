"""Convert timelines into the page's lanes of coloured bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commpass.plan.dump import Dump
from commpass.plan.timeline import HOST, Event, Timeline
from commpass.report import timeline_drawing
from commpass.report.timeline import views

KINDS = tuple(what for what in timeline_drawing.COLOURS if what != "latency")
"""The kinds of bars, in the order of the legend. An exchange's latency is a part of its bar."""

Bar = tuple[int, int, float, float, float, int]
"""Lane, kind, begin, length and latency in microseconds, and the index of its label."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One timeline, with ``bars`` in order of time.

    ``labels`` are the texts of bars, and ``modules`` the module of each label, "" without one.
    ``end_us`` is the end of its axis, equal for timelines that are to be compared.
    """

    title: str
    measured: bool
    lanes: tuple[str, ...]
    end_us: float
    bars: tuple[Bar, ...]
    labels: tuple[str, ...]
    modules: tuple[str, ...]


def sparklines(dumps: Sequence[Dump], measured: Mapping[int, Timeline]) -> tuple[Strip, ...]:
    """Return the predicted timeline of each graph, and below it the measured one.

    Graphs without events have none.
    """
    return tuple(
        _strip(picture, second)
        for one in views(dumps, measured)
        for second, picture in enumerate(one.pictures)
    )


def missing(dump: Dump) -> str:
    """Return why a graph has no timeline to show; "" if it has one."""
    if dump.timeline is None:
        return f"its dump was written by an older commpass ({dump.commpass})"
    return "" if dump.timeline.events else dump.timeline.note or "nothing happens in it"


def _strip(picture: timeline_drawing.Picture, second: int) -> Strip:
    timeline = picture.timeline
    modules = picture.modules
    places = {lane: at for at, lane in enumerate(timeline.tracks)}
    labels, places_of = dict[str, int](), dict[str, str]()
    events = sorted(timeline.events, key=lambda event: event.begin_us)
    for event in events:
        places_of.setdefault(_label(event, modules), _module(event, modules))
    return Strip(
        title=picture.title,
        measured=bool(second),
        lanes=tuple("compute" if lane == HOST else f"link: {lane}" for lane in timeline.tracks),
        end_us=picture.end_us,
        bars=tuple(
            (
                places[event.lane],
                KINDS.index(timeline_drawing.kind(event)),
                round(event.begin_us, 3),
                round(event.us, 3),
                round(event.latency_us, 3),
                labels.setdefault(_label(event, modules), len(labels)),
            )
            for event in events
        ),
        labels=tuple(labels),
        modules=tuple(places_of[text] for text in labels),
    )


def _label(event: Event, modules: Mapping[str, str]) -> str:
    """Return a text for an event."""
    if not event.site:
        return " in ".join(filter(None, (event.name, event.module)))
    role = "" if event.travels or event.exposed else f"{event.what} for "
    module = _module(event, modules)
    where = f" in {module}" if module else ""
    return f"{role}{event.site}{where}, hop {event.hop}, chunk {event.chunk}"


def _module(event: Event, modules: Mapping[str, str]) -> str:
    return modules.get(event.site) or event.module
