"""Show a graph's sites with how long each exchange takes and how long a rank waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.table import Table
from rich.text import Text

from commpass.errors import CommpassError, DumpError, unwritable
from commpass.plan.dump import Dump
from commpass.plan.timeline import Timeline
from commpass.report import timeline_drawing, timeline_json
from commpass.report.numbers import ms, ratio
from commpass.report.tables import plain_table
from commpass.utils.printable import brief

LEFT, RIGHT = (
    ("site", "module", "codec", "algorithm"),
    ("chunks", "exchange ms", "exposed ms", "before moving ms"),
)
HEADERS = (*LEFT, *RIGHT)
MEASURED = "measured exposed ms"
STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em }
.drawing { overflow-x: auto; background: #ffffff; border-radius: 4px }
svg { width: 100%; min-width: 900px; height: auto }
.sites { overflow-x: auto }
td:last-child { min-width: 26em }
table { border-collapse: collapse; margin: 0 0 2em }
th, td { padding: .3em .7em; border-bottom: 1px solid #8888; text-align: left; vertical-align: top }
.number { text-align: right; white-space: nowrap }
"""


@dataclass(frozen=True)
class TimelineView:
    """A graph of a dump that has something to show, and its timelines."""

    dump: Dump
    predicted: Timeline
    measured: Timeline | None = None

    @property
    def pictures(self) -> list[timeline_drawing.Picture]:
        """The predicted timeline, and below it the measured one, each with totals in its title."""
        what = f"graph {self.dump.number}: {self.dump.plan.direction}"
        was = sum(site.unmoved_us for site in self.dump.plan.sites)
        moved = was > self.predicted.exposed_us + 0.5
        before = f"; before moving {ms(was)} ms exposed" if moved else ""
        title = f"{what}, predicted: {exposure_text(self.predicted, before)}"
        both = [self.predicted, *([] if self.measured is None else [self.measured])]
        end = max(event.end_us for each in both for event in each.events)
        modules = {site.name.partition(".")[0]: site.module for site in self.dump.plan.sites}
        found = [timeline_drawing.Picture(title, self.predicted, end, modules)]
        if self.measured is not None:
            title = f"{what}, measured: {exposure_text(self.measured)}"
            found.append(timeline_drawing.Picture(title, self.measured, end, modules))
        return found


def timelines(dumps: Sequence[Dump], measured: Mapping[int, Timeline]) -> list[TimelineView]:
    """Return the graphs that have exchanges to show.

    Raise CommpassError if there are none, and DumpError for a dump without timelines.
    """
    for one in dumps:
        if one.timeline is None:
            raise DumpError(
                f"graph {one.number} has no timeline: it was written by an older commpass"
                f" ({one.commpass}). Write the dump again"
            )
    if found := views(dumps, measured):
        return found
    raise CommpassError(f"there is nothing to show: {'; '.join(left_out(dumps))}")


def views(dumps: Sequence[Dump], measured: Mapping[int, Timeline]) -> list[TimelineView]:
    """Return the graphs that have events to show."""
    return [
        TimelineView(one, one.timeline, measured.get(one.number))
        for one in dumps
        if one.timeline is not None and one.timeline.events
    ]


def left_out(dumps: Sequence[Dump]) -> list[str]:
    """Return the graphs that are not shown, and why."""
    return [
        f"graph {one.number} ({one.plan.direction}) is not shown:"
        f" {one.timeline.note or 'its timeline has no events'}"
        for one in dumps
        if one.timeline is not None and not one.timeline.events
    ]


def exposure_text(timeline: Timeline, before: str = "") -> str:
    """Return how much of the exchange time is exposed, as text, and what is unknown."""
    exposed, travels = timeline.exposed_us, timeline.travel_us
    of = f"exposed {ms(exposed)} of {ms(travels)} ms on the links"
    start = f", {ms(timeline.start_us)} ms to start them" if timeline.start_us else ""
    note = f"; {timeline.note}" if timeline.note else ""
    share = ratio(travels - exposed, travels)
    return f"{ms(timeline.us)} ms, {of} ({share} overlapped){start}{before}{note}"


def overlapped(timelines: Sequence[Timeline]) -> str:
    """Return how much of the exchange time of several graphs is overlapped, as text."""
    travels = sum(each.travel_us for each in timelines)
    overlap = travels - sum(each.exposed_us for each in timelines)
    return f"{ms(overlap)} of {ms(travels)} ms ({ratio(overlap, travels)})"


def rows(view: TimelineView) -> list[tuple[str, ...]]:
    """Return the cells of each site, with the reason last.

    A coalesced collective's times are shown at the first of its sites.
    """
    found, seen = [], set[str]()
    moved = any(site.unmoved_us for site in view.dump.plan.sites)
    for site in view.dump.plan.sites:
        name = site.name.partition(".")[0]
        first, exposed = name not in seen, view.predicted.exposed_of(name)
        seen.add(name)
        times = [view.predicted.travel_of(name), exposed, site.unmoved_us if moved else exposed]
        if view.measured is not None:
            known = not view.measured.note
            times.append(view.measured.exposed_of(name) if known else -1.0)
        cells = [ms(time) if first and time >= 0 else "-" for time in times]
        chunks = str(site.chunks) if site.compressed else "-"
        about = (site.name, site.module or "-", brief(site.codec), site.algorithm, chunks)
        why = "; ".join(filter(None, (site.reason, site.missed)))
        found.append((*about, *cells, brief(why)))
    return found


def headers(view: TimelineView) -> tuple[str, ...]:
    return (*HEADERS, MEASURED) if view.measured is not None else HEADERS


def table(view: TimelineView) -> Table:
    """Return the sites as a table without reasons: ``commpass explain`` has them."""
    numbers = [each.replace(" ", "\n", 1) for each in headers(view)[len(LEFT) :]]  # narrow
    made = plain_table(*LEFT, *numbers, folded=LEFT, right=numbers)
    for row in rows(view):
        made.add_row(*map(Text, row[:-1]))
    return made


def write(view: Sequence[TimelineView], path: Path) -> None:
    """Write graphs, one below the other, as a PNG, as a page with tables, or as JSON for
    ui.perfetto.dev.

    Raise CommpassError for another extension, and if the file cannot be written.
    """
    kinds = {".png": _png, ".html": _html, ".json": _json}
    if path.suffix.lower() not in kinds:
        raise CommpassError(f"{str(path)!r}: a timeline is a .png, an .html or a .json file")
    try:
        kinds[path.suffix.lower()](view, path)
    except OSError as error:
        raise CommpassError(unwritable(path, error)) from error


def _png(view: Sequence[TimelineView], path: Path) -> None:
    timeline_drawing.draw([picture for one in view for picture in one.pictures]).savefig(
        path, format="png", dpi=110
    )


def _json(view: Sequence[TimelineView], path: Path) -> None:
    timeline_json.write([picture for one in view for picture in one.pictures], path)


def _html(view: Sequence[TimelineView], path: Path) -> None:
    parts = ["<!doctype html><meta charset=utf-8>"]
    parts.append('<meta name=viewport content="width=device-width">')
    parts.append(f"<title>commpass timeline</title><style>{STYLE}</style>")
    for one in view:
        drawn = timeline_drawing.svg(one.pictures, f"graph{one.dump.number}-")
        parts.append(f"<div class=drawing>{drawn}</div>")
        numeric = range(len(LEFT), len(headers(one)))
        heads = [*headers(one), "reason"]
        lines = [[f"<th>{escape(head)}" for head in heads]]
        for row in rows(one):
            places = ("<td class=number>" if at in numeric else "<td>" for at in range(len(row)))
            lines.append(
                [f"{place}{escape(cell)}" for place, cell in zip(places, row, strict=True)]
            )
        body = "".join("<tr>" + "".join(line) for line in lines)
        parts.append(f"<div class=sites><table>{body}</table></div>")
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
