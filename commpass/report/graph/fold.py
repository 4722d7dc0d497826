"""Fold repeated layers: merge the boxes of a graph that differ only in the number of their
layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from commpass.plan.dump import GraphNode
from commpass.report.graph.labels import done_lines, modules_of, picture
from commpass.report.graph.picture import Arrow, Box, Picture
from commpass.report.graph.sites import Sketch
from commpass.report.layer_patterns import patterns, without_numbers
from commpass.utils.printable import clean, plural

MANY = 60
"""Sites above which repeated layers are folded by default."""


def folded(sketch: Sketch) -> Picture:
    """Return one box for each pattern of sites, and one for each sort of run between them.

    An arrow back to the next layer is labelled.
    """
    whole = picture(sketch)
    groups = patterns([sketch.dump.plan])
    of = {site.name: at for at, one in enumerate(groups) for site in one.sites}
    pattern_of = {site: of[some[0].name] for site, some in sketch.planned.items() if some}
    group_of: dict[str, str] = {}
    for box in whole.boxes:
        site = sketch.sites.get(box.name)
        if site is None:
            modules = ", ".join(map(without_numbers, modules_of(sketch.members[box.name])))
            last = box.lines[0].endswith("alone")
            group_of[box.name] = f"runs of {modules}{' behind all' if last else ''}"
        elif site in pattern_of and not box.cluster:
            group_of[box.name] = f"pattern {pattern_of[site]}"
        else:
            group_of[box.name] = box.name
    members: dict[str, list[Box]] = {}
    for box in whole.boxes:
        members.setdefault(group_of[box.name], []).append(box)
    boxes = tuple(_box(name, some, sketch) for name, some in members.items())
    counted = Counter((group_of[a.source], group_of[a.user], a.hidden) for a in whole.arrows)
    place = {name: at for at, name in enumerate(members)}
    arrows = tuple(
        Arrow(source, user, hidden, _repeat_count(many) if place[user] <= place[source] else "")
        for (source, user, hidden), many in counted.items()
    )
    return Picture(whole.title, boxes, arrows)


def _repeat_count(count: int) -> str:
    return f"next layer, x {count}" if count > 1 else "next layer"


def _box(name: str, some: Sequence[Box], sketch: Sketch) -> Box:
    """Merge several boxes into one, with what they have in common."""
    first = dataclasses.replace(some[0], name=name)
    if len(some) == 1:
        return first
    if first.name.startswith("pattern "):
        several = [sketch.planned[sketch.sites[box.name]] for box in some]
        site = several[0][0]
        module = without_numbers(site.module) or "the root module"
        lines = [f"{site.kind} · {module} x {len(some)}", *done_lines(several, found=sketch.found)]
        return dataclasses.replace(first, lines=tuple(map(clean, lines)))
    last = some[0].lines[0].partition(", for outputs")
    label = runs_label([sketch.members[box.name] for box in some]) + "".join(last[1:])
    return dataclasses.replace(first, lines=(clean(label),))


def runs_label(runs: Sequence[Sequence[GraphNode]]) -> str:
    """Return ``layers.*.mlp x 32: 14 operators each``."""
    modules = ", ".join(map(without_numbers, modules_of(runs[0])))
    counts = sorted(map(len, runs))
    several = "" if counts[0] == counts[-1] else f"{counts[0]} to "
    return f"{modules} x {len(runs)}: {several}{plural(counts[-1], 'operator')} each"
