"""Repeated layers as one: the boxes of a graph that differ in the number of their layer alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from commpass.dump import GraphNode
from commpass.report import tables
from commpass.report.explained import name_of
from commpass.report.graph.picture import Arrow, Box, Picture, clean
from commpass.report.graph.sites import Sketch, modules_of, picture
from commpass.report.patterns import Pattern, patterns, without_numbers

MANY = 60
"""Sites above which repeated layers are folded unless it is told otherwise."""


def folded(shown: Sketch) -> Picture:
    """One box for each pattern of sites, and one for each sort of run between them. An arrow that
    leads back to the next layer says so."""
    whole = picture(shown)
    groups = patterns([shown.dump.plan])
    pattern_of = {site.name: at for at, one in enumerate(groups) for site in one.sites}
    group_of: dict[str, str] = {}
    for box in whole.boxes:
        site = shown.sites.get(box.name)
        if site is None:
            modules = ", ".join(map(without_numbers, modules_of(shown.members[box.name])))
            group_of[box.name] = f"runs of {modules}"
        elif site in pattern_of and not box.cluster:
            group_of[box.name] = f"pattern {pattern_of[site]}"
        else:
            group_of[box.name] = box.name
    members: dict[str, list[Box]] = {}
    for box in whole.boxes:
        members.setdefault(group_of[box.name], []).append(box)
    boxes = tuple(_box(name, some, shown, groups) for name, some in members.items())
    counted = Counter((group_of[a.source], group_of[a.user], a.hidden) for a in whole.arrows)
    place = {name: at for at, name in enumerate(members)}
    arrows = tuple(
        Arrow(source, user, hidden, _again(many) if place[user] <= place[source] else "")
        for (source, user, hidden), many in counted.items()
    )
    return Picture(whole.title, boxes, arrows)


def _again(many: int) -> str:
    return f"next layer, x {many}" if many > 1 else "next layer"


def _box(name: str, some: Sequence[Box], shown: Sketch, groups: Sequence[Pattern]) -> Box:
    """The box of several, with what they have in common."""
    first = dataclasses.replace(some[0], name=name)
    if len(some) == 1:
        return first
    if name.startswith("pattern "):
        one = groups[int(name.partition(" ")[2])]
        return dataclasses.replace(first, lines=tuple(map(clean, pattern_lines(one, first))))
    line = runs_label([shown.members[box.name] for box in some])
    return dataclasses.replace(first, lines=(clean(line),))


def pattern_lines(one: Pattern, box: Box) -> list[str]:
    """As the box of a site, with how many there are, and the mean of their times."""
    many = len(one.sites)
    site = one.first
    us = [one.total(name) / many for name in ("plain_us", "predicted_us")]
    head = f"{site.kind} · {name_of(one)}"
    if box.kind != "compressed":
        words = f"{box.lines[1].partition(' · ')[0]} · " if site.hidden else ""
        size = tables.amount(site.bytes)
        return [head, f"{words}each {size} · {tables.durations(us[0])}"]
    return [
        head,
        box.lines[1],
        f"each {tables.amounts(site.bytes, site.wire_bytes, arrow='→')} · "
        f"{tables.durations(*us, arrow='→')}",
    ]


def runs_label(runs: Sequence[Sequence[GraphNode]]) -> str:
    """``layers.*.mlp x 32: 14 operators each``."""
    modules = ", ".join(map(without_numbers, modules_of(runs[0])))
    counts = sorted(map(len, runs))
    several = "" if counts[0] == counts[-1] else f"{counts[0]} to "
    return f"{modules} x {len(runs)}: {several}{counts[-1]} operator{'s' * (counts[-1] != 1)} each"
