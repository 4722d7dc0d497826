"""Draw timelines: a lane for a rank's compute, and one for each of its links."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commpass.plan.timeline import COMPUTE, EXCHANGE, HOST, Event, Span, Timeline
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
WIDTH, LANE, HEAD = 14.0, 0.5, 0.9
"""In inches: the width of the picture, the height of a lane, and that of title and axis."""
SIZE = 8
"""The font size of exchange labels in points; below, the size of a character and a line in
inches."""
CHAR, LINE = 0.53 * SIZE / 72, 1.35 * SIZE / 72


@dataclass(frozen=True)
class Picture:
    """One timeline with its title.

    ``end_us`` is the end of its axis, equal for timelines that are to be compared.
    """

    title: str
    timeline: Timeline
    end_us: float


@dataclass(frozen=True)
class Labels:
    """The labels below the lanes: position in ms, and text. ``inches`` is the room they take."""

    texts: tuple[tuple[float, str], ...]
    upright: bool
    inches: float


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
        LANE * len(each.timeline.tracks) + under.inches + HEAD
        for each, under in zip(pictures, below, strict=True)
    ]
    figure = new_figure(WIDTH, sum(heights) + 0.4)
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
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    return figure


def _draw(axes: Any, picture: Picture, below: Labels) -> None:
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
    for at, text in below.texts:
        turned = 90 if below.upright else 0
        axes.text(
            at, bottom, text, rotation=turned, ha="center", va="top", size=SIZE, parse_math=False
        )
    names = ["compute" if lane == HOST else f"link: {lane}" for lane in timeline.tracks]
    axes.set_yticks(list(places.values()), names)
    axes.set_ylim(bottom - below.inches / LANE, 0.5)
    axes.set_xlim(0, picture.end_us / 1000)
    axes.set_xlabel("ms")
    axes.set_title(picture.title, loc="left", fontsize=11, parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def labels(picture: Picture) -> Labels:
    """Return the site and hop of exchanges, upright if there are many.

    Labels without room are left out.
    """
    room = (WIDTH - 1.5) / (picture.end_us / 1000)  # inches for a millisecond
    known = _middles(event for event in picture.timeline.events if event.travels)
    wide = CHAR * max((len(site) for _, site, _ in known), default=0)
    upright = any((b[0] - a[0]) * room < wide for a, b in pairwise(known))
    need, found = LINE if upright else wide, list[tuple[float, str]]()
    for at, site, hop in known:
        if not found or (at - found[-1][0]) * room >= need:
            found.append((at, f"{site}{' ' if upright else chr(10)}{hop}".rstrip()))
    rows = max((text.count("\n") + 1 for _, text in found), default=1)
    tall = CHAR * max((len(text) for _, text in found), default=0) if upright else rows * LINE
    return Labels(tuple(found), upright, tall + 0.1)


def _middles(exchanges: Iterable[Event]) -> list[tuple[float, str, str]]:
    """Return the middle of each hop of each site in ms, its site and hop; chunks share one.

    The only hop of a site is not named.
    """
    spans: dict[tuple[str, int], Span] = {}
    for event in exchanges:
        begin, end = spans.get((event.site, event.hop), (event.begin_us, event.end_us))
        spans[event.site, event.hop] = min(begin, event.begin_us), max(end, event.end_us)
    many = Counter(site for site, _ in spans)
    return sorted(
        ((b + e) / 2000, site, f"hop {hop}" * (many[site] > 1))
        for (site, hop), (b, e) in spans.items()
    )


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
