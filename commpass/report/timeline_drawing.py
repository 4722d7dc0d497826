"""Draw timelines: a lane for a rank's compute, and one for each of its links."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commpass.plan.timeline import COMPUTE, EXCHANGE, HOST, Event, Timeline
from commpass.report.plots import new_figure

COLOURS = {
    "compute": "#9db4cf",
    "encode, decode, sum": "#f2a33a",
    "starting an exchange": "#6b5b95",
    "exchange on a link": "#3d9970",
    "latency": "#bfe3d0",
    "exposed: the rank waits": "#ffffff",
}
EXPOSED = "exposed: the rank waits"
TRAVELS = "exchange on a link"
IN_TURNS = " (every other site darker)"
RED = "#cc2222"
DARKER = "#27684c"
"""The colour of every other site's exchanges, to distinguish neighbours."""
WIDTH, LANE, HEAD = 12.0, 0.5, 0.9
"""In inches: the width of the picture, the height of a lane, and that of title and axis."""
SIZE = 9
"""The font size of exchange labels in points; below, the size of a character and a line in
inches."""
CHAR, LINE = 0.6 * SIZE / 72, 1.5 * SIZE / 72
TITLE = 126
"""The longest line of a title, in characters."""
ROWS = 4
"""Most rows of labels below the lanes."""


@dataclass(frozen=True)
class Picture:
    """One timeline with its title.

    ``end_us`` is the end of its axis, equal for timelines that are to be compared. ``modules`` has
    the path of a site's module by the name of the site.
    """

    title: str
    timeline: Timeline
    end_us: float
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Label:
    """The text below an exchange, whose middle is at ``exchange_ms``.

    The text is centred at ``at_ms``, in a ``row`` that has room for it, from 0.
    """

    exchange_ms: float
    at_ms: float
    text: str
    row: int


def kind(event: Event) -> str:
    """Return the kind that an event is shown as."""
    if event.exposed:
        return EXPOSED
    if event.travels:
        return TRAVELS
    if event.what == EXCHANGE:
        return "starting an exchange"
    return "compute" if event.what == COMPUTE else "encode, decode, sum"


def draw(pictures: Sequence[Picture]) -> Any:
    """Draw pictures one below the other, as a matplotlib figure."""
    below = [labels(each) for each in pictures]
    heights = [
        LANE * len(each.timeline.tracks) + _inches(under) + HEAD
        for each, under in zip(pictures, below, strict=True)
    ]
    figure = new_figure(WIDTH, sum(heights) + 0.6)
    from matplotlib.patches import Patch

    plots = figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, each, under in zip(plots, pictures, below, strict=True):
        _draw(axes, each, under)
    patches = [
        Patch(
            facecolor=colour,
            edgecolor=RED if what == EXPOSED else colour,
            label=what + IN_TURNS * (what == TRAVELS),
        )
        for what, colour in COLOURS.items()
    ]
    patches[-1].set_hatch("////")
    figure.legend(handles=patches, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw(axes: Any, picture: Picture, below: Sequence[Label]) -> None:
    timeline = picture.timeline
    places = {lane: -number for number, lane in enumerate(timeline.tracks)}
    travelling = dict.fromkeys(event.site for event in timeline.events if event.travels)
    numbers = {site: number for number, site in enumerate(travelling)}
    for event in timeline.events:
        what, place = kind(event), places[event.lane]
        begin, us = event.begin_us / 1000, event.us / 1000
        style: dict[str, Any] = {"facecolor": COLOURS[what], "linewidth": 0}
        if event.exposed:
            style |= {"edgecolor": RED, "hatch": "////", "linewidth": 0.4}
        if event.travels:
            colour = (COLOURS[what], DARKER)[numbers[event.site] % 2]
            style |= {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}
            after = [(begin + us, event.latency_us / 1000)]
            axes.broken_barh(after, (place - 0.2, 0.4), facecolor=COLOURS["latency"], zorder=0.5)
        axes.broken_barh([(begin, us)], (place - 0.4, 0.8), **style)
    bottom = min(places.values()) - 0.5
    for label in below:
        top = bottom - (0.1 + label.row * LINE) / LANE
        if label.row:
            axes.plot(
                [label.exchange_ms] * 2, [bottom, top], color="#999999", linewidth=0.5, zorder=0
            )
        axes.text(
            label.at_ms,
            top,
            label.text,
            ha="center",
            va="top",
            size=SIZE,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    names = ["compute" if lane == HOST else f"link: {lane}" for lane in timeline.tracks]
    axes.set_yticks(list(places.values()), names)
    axes.set_ylim(bottom - _inches(below) / LANE, 0.5)
    axes.set_xlim(0, picture.end_us / 1000)
    axes.set_xlabel("ms")
    title = textwrap.fill(picture.title, TITLE)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def labels(picture: Picture) -> list[Label]:
    """Return the module paths of exchanges, in rows that keep them apart.

    Neighbours of one module share a label. Labels without room in ``ROWS`` rows are left out.
    """
    room = (WIDTH - 1.5) / (picture.end_us / 1000)  # inches for a millisecond
    ends = [float("-inf")] * ROWS
    found = list[Label]()
    for middle, text in _middles(picture):
        half = CHAR * (len(text) + 1) / 2 / room
        at = max(half, min(middle, picture.end_us / 1000 - half))  # inside the picture
        row = next((row for row, end in enumerate(ends) if at - half >= end), None)
        if row is not None:
            ends[row] = at + half
            found.append(Label(middle, at, text, row))
    return found


def _inches(below: Sequence[Label]) -> float:
    """Return the room that labels take below the lanes."""
    return LINE * (1 + max((label.row for label in below), default=0)) + 0.15


def _middles(picture: Picture) -> list[tuple[float, str]]:
    """Return the middle of each module's exchanges in ms, and the module, in order of time.

    All hops and chunks that follow each other count together. A site without a module has its own
    name.
    """
    spans: list[tuple[str, float, float]] = []
    exchanges = (event for event in picture.timeline.events if event.travels)
    for event in sorted(exchanges, key=lambda event: event.begin_us):
        text = picture.modules.get(event.site) or event.site
        if spans and spans[-1][0] == text:
            _, begin, end = spans.pop()
        else:
            begin, end = event.begin_us, event.end_us
        spans.append((text, begin, max(end, event.end_us)))
    return [((begin + end) / 2000, text) for text, begin, end in spans]


def svg(pictures: Sequence[Picture], prefix: str) -> str:
    """Return the figure as SVG text for a page. Its ids begin with a prefix, since a page has
    several."""
    from matplotlib import rc_context

    held = io.StringIO()
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "commpass"}
    ):  # text stays text, and the bytes are reproducible
        draw(pictures).savefig(held, format="svg", metadata={"Date": None})
    text = held.getvalue()
    for before in (' id="', 'href="#', "url(#"):
        text = text.replace(before, before + prefix)
    return text[text.index("<svg") :]
