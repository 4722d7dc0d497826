"""The labels of a graph with one box for each site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from commpass.plan import PlannedSite
from commpass.plan.dump import GraphNode
from commpass.report.graph.nodes import fallback
from commpass.report.graph.picture import Arrow, Box, Picture, kind_of, travels
from commpass.report.graph.sites import Sketch, role_of
from commpass.report.numbers import amounts, durations
from commpass.report.site_text import done
from commpass.utils.printable import amount, clean, plural

MODULES = 3
"""Most modules that are named in a box."""


def picture(sketch: Sketch) -> Picture:
    """Return every box with its label."""
    many = Counter(sketch.sites.values())
    used = {source for some in sketch.edges.values() for source in some}
    boxes = []
    for name, nodes in sketch.members.items():
        site = sketch.sites.get(name)
        if site is None:
            last = "" if name in used else ", only for outputs"
            boxes.append(Box(name, "plain", (clean(run_label(nodes) + last),)))
        elif many[site] > 1:
            boxes.append(_part(name, nodes, site, sketch))
        else:
            lines = site_lines(sketch, site, nodes)
            boxes.append(Box(name, kind(nodes), tuple(map(clean, lines))))
    arrows = tuple(Arrow(source, box) for box in sketch.edges for source in sketch.edges[box])
    return Picture(title(sketch), tuple(boxes), arrows)


def title(sketch: Sketch) -> str:
    dump = sketch.dump
    sites = len(set(sketch.sites.values()))
    more = f"; {sketch.left_out} operators apart from all of them" if sketch.left_out else ""
    counts = f"{plural(sites, 'site')}, times are predicted{more}"
    return clean(
        f"graph {dump.number}: {dump.plan.direction}, {sketch.side} ({counts}){fallback(dump)}"
    )


def kind(nodes: Sequence[GraphNode]) -> str:
    return "compressed" if any(node.inserted for node in nodes) else "alone"


def site_lines(sketch: Sketch, site: str, nodes: Sequence[GraphNode]) -> list[str]:
    """Return the lines of a site's box: what and where it is, what was done to it, and what that
    saves.

    A site that is no longer in the plan is labelled with what became of it.
    """
    where = next((node.module for node in nodes if node.module), "") or "the root module"
    some = sketch.planned[site]
    if not some:
        node = next((each for each in nodes if travels(each)), nodes[0])
        return [f"{kind_of(node) or node.name} · {where}", became(sketch, site) or site]
    head = f"{sketch.numbers(site)}{some[0].kind} · {where}"
    return [
        head,
        *done_lines([some], found=sketch.side == "before" or bool(sketch.dump.plan.fallback)),
    ]


def done_lines(several: Sequence[Sequence[PlannedSite]], *, found: bool) -> list[str]:
    """Return what was done to equal sites, each with its parts, and what that saves for one of
    them.

    ``found``: as they were found, before any change.
    """
    first = several[0][0]
    each = "each " if len(several) > 1 else ""
    values = {name: _of_one(name, several) for name in VALUES}
    chunks = f" in {len(several[0])} chunks" if len(several[0]) > 1 else ""
    if found or not first.compressed:
        did = chunks.strip() if found else done(first) + chunks
        size, us = amount(values["bytes"]), durations(values["plain_us"])
        return [" · ".join(filter(None, (did, each + size, us)))]
    overlapped = f" x{first.chunks}" if first.chunks > 1 else ""
    return [
        f"{first.codec}/{first.algorithm}{overlapped}{chunks}",
        f"{each}{amounts(values['bytes'], values['wire_bytes'], arrow='→')} · "
        f"{durations(values['plain_us'], values['predicted_us'], arrow='→')}",
    ]


VALUES = ("bytes", "wire_bytes", "plain_us", "predicted_us")


def _of_one(name: str, several: Sequence[Sequence[PlannedSite]]) -> float:
    """Return the value for one of these equal sites; -1 if a size is unknown."""
    values = [getattr(site, name) for some in several for site in some]
    return -1 if min(values) < 0 else sum(values) / len(several)


def became(sketch: Sketch, name: str) -> str:
    """Return what became of a site that is no longer in the plan, as text."""
    plan = sketch.dump.plan
    for step in plan.simplified:
        if step.site == name:
            return f"{step.rule}: {step.into}"
    for split in plan.split:
        if split.site == name:
            return f"split into {len(split.into)} chunks of rows"
    for group in plan.grouped:
        if name in group.sites:
            return f"sent with {len(group.sites) - 1} others"
    return ""


def run_label(nodes: Sequence[GraphNode]) -> str:
    """Return ``layers.0.mlp, layers.0.norm: 14 operators``."""
    modules = modules_of(nodes)
    return f"{', '.join(modules)}: {plural(len(nodes), 'operator')}"


def modules_of(nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    """Return the modules of some operators, shortened to outer ones if they are too many."""
    paths = list(dict.fromkeys(node.module for node in nodes if node.module))
    if not paths:
        return ("the root module",)
    for depth in range(max((path.count(".") for path in paths), default=0) + 1, 0, -1):
        short = tuple(dict.fromkeys(".".join(path.split(".")[:depth]) for path in paths))
        if len(short) <= MODULES:
            return short
    if len(paths) > MODULES:
        return (paths[0].split(".")[0], f"... {paths[-1].split('.')[0]}")
    return tuple(paths)


def _part(name: str, nodes: Sequence[GraphNode], site: str, sketch: Sketch) -> Box:
    """Return a box of the middle level: one step of a site."""
    first = next((node for node in nodes if role_of(node)), nodes[0])
    role, some = role_of(first), sketch.planned[site]
    mine = next((each for each in some if each.name == first.site), some[0] if some else None)
    lines = [role if role != "exchange" else f"exchange: {kind_of(first)}"]
    if mine is not None and mine.compressed:
        if role == "exchange":
            lines.append(_on_the_wire(mine, first.hop))
        elif "code" in role:
            lines.append(mine.codec)
    lines += [first.value] if first.value and role != "exchange" else []
    head = f"{sketch.numbers(site)}{some[0].module or 'the root module'}" if some else site
    box = "transfer" if role == "exchange" else "inserted" if first.inserted else "alone"
    return Box(name, box, tuple(clean(line) for line in lines if line), clean(head))


def _on_the_wire(site: PlannedSite, hop: int) -> str:
    """Return the bytes that the rank hands to one exchange of a site."""
    exchanges = [stage for stage in site.stages if stage.role == "exchange"]
    return amount(exchanges[hop].nbytes) if hop < len(exchanges) else ""
