"""A graph of a dump with one box a site, between boxes of what else is computed.

A run of other operators is one box: those that come after the same sites and before the same sites.
So no box waits for a site that another operator in it does not wait for, and boxes form no circle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from commpass.dump import Dump, GraphNode
from commpass.errors import CommpassError, nearest
from commpass.plan import PlannedSite
from commpass.report import tables
from commpass.report.explained import done
from commpass.report.graph.nodes import fallback, nodes_of
from commpass.report.graph.picture import (
    Arrow,
    Box,
    Picture,
    clean,
    kind_of,
    needed,
    taken,
    travels,
    waits,
)

NOT_DRAWN = ("placeholder", "get_attr", "output")
FEW = 3
"""So many operators behind which nothing comes are drawn with what is before them. And so many
modules are named in a box."""


@dataclass(frozen=True)
class Sketch:
    """The boxes of a graph before they have labels: the box of each node, in graph order the nodes
    of each box, the box of each site, and from each box to those that it waits for."""

    dump: Dump
    side: str
    members: dict[str, list[GraphNode]]
    edges: dict[str, tuple[str, ...]]
    sites: dict[str, str] = field(default_factory=dict)
    """From box to the name of its site. A site that is expanded has several boxes."""
    left_out: int = 0
    """Operators in boxes that no other box waits for, and that wait for none."""


def sketch(dump: Dump, side: str, expanded: Collection[str] = ()) -> Sketch:
    """The boxes of one side of a graph, with those of the middle level for the sites that are
    ``expanded``. Raises CommpassError for a graph without sites, or a damaged one."""
    nodes = nodes_of(dump, side)
    sources = taken(nodes)
    site_of = _sites(nodes, sources)
    if not site_of:
        raise CommpassError(
            f"graph {dump.number} ({dump.plan.direction}) has no collective to draw: --level nodes"
            " draws every node"
        )
    owner = _runs(nodes, sources, site_of)
    sites = dict.fromkeys(site_of.values())
    roles = _roles(nodes, sources, site_of, expanded)
    owner |= {name: roles.get(name, f"site {site}") for name, site in site_of.items()}
    box_site = {owner[name]: site for name, site in site_of.items()}
    assert sites.keys() == set(box_site.values())
    members: dict[str, list[GraphNode]] = {}
    for node in nodes:
        if node.name in owner:
            members.setdefault(owner[node.name], []).append(node)
    edges = _between(members, owner, sources)
    _fold_tails(members, edges, box_site)
    used = {source for some in edges.values() for source in some}
    alone = [box for box in edges if box not in box_site and box not in used and not edges[box]]
    left_out = sum(len(members.pop(box)) for box in alone)
    kept = {box: some for box, some in edges.items() if box in members}
    return Sketch(dump, side, members, needed(kept), box_site, left_out)


def _sites(nodes: Sequence[GraphNode], sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """From the nodes of sites to their names: collectives, their waits, and what was inserted."""
    found: dict[str, str] = {}
    for node in nodes:
        if node.site:
            found[node.name] = node.site
        elif waits(node) and (of := [found[each] for each in sources[node.name] if each in found]):
            found[node.name] = of[0]
    return found


def _runs(
    nodes: Sequence[GraphNode], sources: Mapping[str, Sequence[str]], site_of: Mapping[str, str]
) -> dict[str, str]:
    """From each other operator to the name of its box."""
    users: dict[str, list[str]] = {node.name: [] for node in nodes}
    for name, some in sources.items():
        for source in some:
            users[source].append(name)
    bit = {site: 1 << at for at, site in enumerate(dict.fromkeys(site_of.values()))}
    forwards = [node.name for node in nodes]
    before = _reached(forwards, sources, site_of, bit)
    after = _reached(forwards[::-1], users, site_of, bit)
    numbers: dict[tuple[int, int], str] = {}
    found: dict[str, str] = {}
    drawn = {node.name for node in nodes if node.op not in NOT_DRAWN}
    for name in forwards:
        if name in drawn and name not in site_of:
            key = (before[name], after[name])
            found[name] = numbers.setdefault(key, f"run {len(numbers)}")
    ready = {name for name in forwards if name not in drawn}  # what needs nothing that is computed
    for name in forwards:
        if name in found and all(source in ready for source in sources[name]):
            ready.add(name)
    for name in reversed(forwards):  # such goes to the only box that takes it
        if name in found and name in ready:
            takers = {found.get(user, "") for user in users[name] if user in drawn}
            if len(takers) == 1 and (taker := takers.pop()):
                found[name] = taker
    return found


def _reached(
    names: Sequence[str],
    sources: Mapping[str, Sequence[str]],
    site_of: Mapping[str, str],
    bit: Mapping[str, int],
) -> dict[str, int]:
    """The sites that come before each name, and its own, as bits; equal numbers are one object."""
    found: dict[str, int] = {}
    same: dict[int, int] = {}
    for name in names:
        some = bit[site_of[name]] if name in site_of else 0
        for source in sources[name]:
            some |= found[source]
        found[name] = same.setdefault(some, some)
    return found


def _roles(
    nodes: Sequence[GraphNode],
    sources: Mapping[str, Sequence[str]],
    site_of: Mapping[str, str],
    expanded: Collection[str],
) -> dict[str, str]:
    """From the nodes of sites that are expanded to the box of what they do: the role, hop and chunk
    of their mark. Views and buffers go with what takes them, or else with what they take."""
    found: dict[str, str] = {}
    mine = [node for node in nodes if site_of.get(node.name) in expanded]
    for node in mine:
        role = _role(node)
        if role:
            found[node.name] = f"{site_of[node.name]} {node.chunk} {node.hop} {role}"
    for node in reversed(mine):
        for source in sources[node.name]:
            if site_of.get(source) == site_of[node.name] and node.name in found:
                found.setdefault(source, found[node.name])
    for node in mine:
        for source in sources[node.name]:
            if site_of.get(source) == site_of[node.name] and source in found:
                found.setdefault(node.name, found[source])
    return found


def _role(node: GraphNode) -> str:
    """What a node of a site does, "" for one that only moves or views memory."""
    if node.inserted:
        return "" if node.role == "layout" else node.role or node.target
    return "wait" if waits(node) else "exchange"


def _between(
    members: Mapping[str, Sequence[GraphNode]],
    owner: Mapping[str, str],
    sources: Mapping[str, Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """From each box to the others that it takes from."""
    found = {}
    for box, nodes in members.items():
        some = (owner[source] for node in nodes for source in sources[node.name] if source in owner)
        found[box] = tuple(dict.fromkeys(each for each in some if each != box))
    return found


def _fold_tails(
    members: dict[str, list[GraphNode]],
    edges: dict[str, tuple[str, ...]],
    sites: Collection[str],
) -> None:
    """A few operators behind which nothing comes go into the run of operators before them."""
    used = {source for some in edges.values() for source in some}
    for box, some in list(edges.items()):
        short = len(members[box]) <= FEW and box not in sites and box not in used
        if short and len(some) == 1 and some[0] not in sites:
            members[some[0]] += members.pop(box)
            del edges[box]


# What stands in the boxes


def picture(shown: Sketch) -> Picture:
    """Every box with its label."""
    plan = shown.dump.plan
    numbers = {site.name: at for at, site in enumerate(plan.sites, 1)}
    many = dict.fromkeys(shown.sites.values(), 0)
    for site in shown.sites.values():
        many[site] += 1
    boxes = []
    for name, nodes in shown.members.items():
        site = shown.sites.get(name)
        if site is None:
            boxes.append(Box(name, "plain", (clean(run_label(nodes)),)))
        elif many[site] > 1:
            boxes.append(_part(name, nodes, site, shown, numbers))
        else:
            planned = plan.sites[numbers[site] - 1] if site in numbers else None
            lines = site_lines(planned, numbers.get(site, 0), nodes, shown)
            boxes.append(Box(name, _kind(nodes, planned), tuple(map(clean, lines))))
    arrows = tuple(Arrow(source, box) for box in shown.edges for source in shown.edges[box])
    return Picture(title(shown), tuple(boxes), arrows)


def title(shown: Sketch) -> str:
    dump = shown.dump
    sites = len(set(shown.sites.values()))
    more = f"; {shown.left_out} operators apart from all of them" if shown.left_out else ""
    counts = f"{sites} site{'s' * (sites != 1)}, times are predicted{more}"
    return clean(
        f"graph {dump.number}: {dump.plan.direction}, {shown.side} ({counts}){fallback(dump)}"
    )


def _kind(nodes: Sequence[GraphNode], site: PlannedSite | None) -> str:
    inserted = any(node.inserted for node in nodes)
    return "compressed" if inserted or (site and site.compressed and not nodes) else "alone"


def site_lines(
    site: PlannedSite | None, number: int, nodes: Sequence[GraphNode], shown: Sketch
) -> list[str]:
    """What stands in the box of a site: what it is and where, what was done to it, and what that
    saves. A site that the plan does not have any more says what became of it."""
    where = next((node.module for node in nodes if node.module), "") or "the root module"
    if site is None:
        node = next((each for each in nodes if travels(each)), nodes[0])
        name = node.site or node.name
        return [f"{kind_of(node) or node.name} · {where}", became(shown, name) or name]
    lines = [f"#{number} {site.kind} · {where}"]
    if shown.side == "before" or not site.compressed or shown.dump.plan.fallback:
        alone = "" if shown.side == "before" else f"{done(site)} · "
        return [*lines, f"{alone}{tables.amount(site.bytes)} · {tables.durations(site.plain_us)}"]
    chunks = f" x{site.chunks}" if site.chunks > 1 else ""
    return [
        *lines,
        f"{site.codec}/{site.algorithm}{chunks}",
        f"{tables.amounts(site.bytes, site.wire_bytes, arrow='→')} · "
        f"{tables.durations(site.plain_us, site.predicted_us, arrow='→')}",
    ]


def became(shown: Sketch, name: str) -> str:
    """What became of a site that the plan does not have any more, in words."""
    plan = shown.dump.plan
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
    """``layers.0.mlp, layers.0.norm: 14 operators``."""
    modules = modules_of(nodes)
    many = len(nodes)
    return f"{', '.join(modules)}: {many} operator{'s' * (many != 1)}"


def modules_of(nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    """The modules of some operators, without what is inside them where they are too many."""
    paths = list(dict.fromkeys(node.module for node in nodes if node.module))
    for depth in range(max((path.count(".") for path in paths), default=0) + 1, 0, -1):
        short = tuple(dict.fromkeys(".".join(path.split(".")[:depth]) for path in paths))
        if len(short) <= FEW:
            return short
    if len(paths) > FEW:
        return (paths[0].split(".")[0], f"... {paths[-1].split('.')[0]}")
    return tuple(paths) or ("the root module",)


def _part(
    name: str, nodes: Sequence[GraphNode], site: str, shown: Sketch, numbers: Mapping[str, int]
) -> Box:
    """A box of the middle level: what a site does in one step."""
    first = next((node for node in nodes if _role(node)), nodes[0])
    role = _role(first)
    planned = shown.dump.plan.sites[numbers[site] - 1] if site in numbers else None
    lines = [role if role != "exchange" else f"exchange: {kind_of(first)}"]
    if planned is not None and planned.compressed:
        if role == "exchange":
            lines.append(_on_the_wire(planned, first.hop))
        elif "code" in role:
            lines.append(planned.codec)
    lines += [first.value] if first.value and role != "exchange" else []
    kind = "transfer" if role == "exchange" else "inserted"
    head = f"#{numbers[site]} {planned.module or 'the root module'}" if planned else site
    return Box(name, kind, tuple(clean(line) for line in lines if line), clean(head))


def _on_the_wire(site: PlannedSite, hop: int) -> str:
    """The bytes that the rank hands to one exchange of a site."""
    exchanges = [stage for stage in site.stages if stage.role == "exchange"]
    return tables.amount(exchanges[hop].nbytes) if hop < len(exchanges) else ""


def named(dump: Dump, side: str, name: str) -> set[str]:
    """The sites of a graph that a number (as ``explain --all`` has it), a name, or what a name
    becomes, means. Raises CommpassError where there is none, with the nearest."""
    plan = dump.plan
    drawn = {node.site for node in nodes_of(dump, side) if node.site}
    if name.isdecimal():
        if not 1 <= int(name) <= len(plan.sites):
            raise CommpassError(
                f"graph {dump.number} has no site {name}: it has {len(plan.sites)}, from 1 on"
                " (commpass explain --all numbers them)"
            )
        name = plan.sites[int(name) - 1].name
    parts = {part for split in plan.split if split.site == name for part in split.into}
    parts |= {each.into for each in plan.grouped if name in each.sites}
    found = {each for each in (name, name.partition(".")[0], *parts) if each in drawn}
    if not found:
        raise CommpassError(f"no site {name!r} in graph {dump.number}{nearest(name, drawn)}")
    return found
