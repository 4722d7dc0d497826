"""Draw a graph of a dump with one box for each site, between boxes of other operators.

A run of other operators is one box: those that come after the same sites and before the same sites.
So no operator in a box waits for a site that another one in it does not wait for, and boxes form no
cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from commpass.errors import CommpassError, nearest
from commpass.plan import PlannedSite
from commpass.plan.dump import Dump, GraphNode
from commpass.report.graph.nodes import nodes_of
from commpass.report.graph.picture import in_order, inputs_of, needed, travels, waits
from commpass.report.numbers import spans

NOT_DRAWN = ("placeholder", "get_attr", "output")
VIEWS = (
    *(
        "alias",
        "as_strided",
        "detach",
        "expand",
        "permute",
        "reshape",
        "select",
        "slice",
        "squeeze",
    ),
    *("t", "transpose", "unsqueeze", "view", "_unsafe_view"),
)
"""Operators that compute nothing. Views of inputs, such as weights, are not drawn, like inputs."""
COSTLY = ("mm", "conv", "attention", "linear")
"""Substrings of the names of operators that give a short run a separate box."""
FEW = 12
"""Runs of up to this many operators, none of them costly, are drawn with the run before them."""


@dataclass(frozen=True)
class Sketch:
    """The boxes of a graph before they have labels.

    ``members`` are the nodes of each box in graph order. ``edges`` maps each box to those that it
    waits for.
    """

    dump: Dump
    side: str
    members: dict[str, list[GraphNode]]
    edges: dict[str, tuple[str, ...]]
    sites: dict[str, str] = field(default_factory=dict)
    """Maps a box to its site. An expanded site has several boxes; one that is split into chunks of
    rows is drawn as the original."""
    left_out: int = 0
    """Operators in boxes that no other box waits for, and that wait for none."""
    planned: dict[str, tuple[PlannedSite, ...]] = field(default_factory=dict)
    """Maps a site to its planned sites: the chunks of a split one, the parts of a coalesced one,
    none if it is not sent."""

    @property
    def found(self) -> bool:
        """Whether the sites are as they were found, before any change."""
        return self.side == "before" or bool(self.dump.plan.fallback)

    def numbers(self, site: str) -> str:
        """Return the numbers of a site in the plan, from 1: "#3", or "#3-6"."""
        some = [self._number_of[each.name] for each in self.planned[site]]
        return f"#{spans(some)} " if some else ""

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {each.name: at for at, each in enumerate(self.dump.plan.sites, 1)}


def sketch(dump: Dump, side: str, expanded: Collection[str] = ()) -> Sketch:
    """Return the boxes of one side of a graph, with steps for the sites that are ``expanded``.

    Raise CommpassError for a graph without sites, or a damaged one.
    """
    nodes = nodes_of(dump, side) or _of_plan(dump)
    sources = inputs_of(nodes)
    whole = {part: split.site for split in dump.plan.split for part in split.into}
    site_of = {name: whole.get(site, site) for name, site in _sites(nodes, sources).items()}
    if not site_of:
        raise CommpassError(
            f"graph {dump.number} ({dump.plan.direction}) has no collective to draw: --level nodes"
            " draws every node"
        )
    owner = _runs(nodes, sources, site_of)
    roles = _roles(nodes, sources, site_of, expanded)
    owner |= {name: roles.get(name, f"site {site}") for name, site in site_of.items()}
    box_site = {owner[name]: site for name, site in site_of.items()}
    members: dict[str, list[GraphNode]] = {}
    for node in nodes:
        if node.name in owner:
            members.setdefault(owner[node.name], []).append(node)
    edges = _between(members, owner, sources)
    _fold_small(members, edges, box_site.keys())
    used = {source for some in edges.values() for source in some}
    alone = [box for box in edges if box not in box_site and box not in used and not edges[box]]
    left_out = sum(len(members.pop(box)) for box in alone)
    kept = {box: some for box, some in edges.items() if box in members}
    planned: dict[str, list[PlannedSite]] = {site: [] for site in site_of.values()}
    for each in dump.plan.sites:
        for name in (whole.get(each.name, each.name), each.name.partition(".")[0]):
            if name in planned:
                planned[name].append(each)
                break
    known = {site: tuple(some) for site, some in planned.items()}
    return Sketch(dump, side, members, needed(kept), box_site, left_out, known)


def _of_plan(dump: Dump) -> tuple[GraphNode, ...]:
    """Return only the sites, for a plan without a graph: the exchanges of a pipeline's stage."""
    return tuple(
        GraphNode(
            name=site.name,
            op="call_function",
            target=site.kind,
            module=site.module,
            site=site.name,
            inserted=site.compressed,
        )
        for site in dump.plan.sites
    )


def _sites(nodes: Sequence[GraphNode], sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map the nodes of sites to site names: collectives, their waits, and inserted nodes."""
    found: dict[str, str] = {}
    for node in nodes:
        if node.site or travels(node):
            found[node.name] = node.site or node.name
        elif waits(node) and (of := [found[each] for each in sources[node.name] if each in found]):
            found[node.name] = of[0]
    return found


def _runs(
    nodes: Sequence[GraphNode], sources: Mapping[str, Sequence[str]], site_of: Mapping[str, str]
) -> dict[str, str]:
    """Map each other operator to the name of its box."""
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
    inputs = {node.name for node in nodes if node.op in NOT_DRAWN}
    for node in nodes:
        if node.name in inputs or node.name in site_of:
            continue
        if _is_view(node) and inputs.issuperset(sources[node.name]):
            inputs.add(node.name)
        else:
            key = (before[node.name], after[node.name])
            found[node.name] = numbers.setdefault(key, f"run {len(numbers)}")
    # operators that depend only on inputs join the only run that uses them
    for node in reversed(nodes):
        if node.name in found and not before[node.name]:
            takers = {found.get(user, "") for user in users[node.name]}
            if len(takers) == 1 and (taker := takers.pop()):
                found[node.name] = taker
    return found


def _is_view(node: GraphNode) -> bool:
    return node.target.partition(".")[2].partition(".")[0] in VIEWS


def _reached(
    names: Sequence[str],
    sources: Mapping[str, Sequence[str]],
    site_of: Mapping[str, str],
    bit: Mapping[str, int],
) -> dict[str, int]:
    """Return the sites that come before each name, and its own, as bits.

    Equal numbers are one object.
    """
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
    """Map the nodes of expanded sites to the box of their role, hop and chunk.

    Views and buffers join the box of their users, or else of their inputs.
    """
    found: dict[str, str] = {}
    mine = [node for node in nodes if site_of.get(node.name) in expanded]
    for node in mine:
        if role := role_of(node):
            found[node.name] = f"{node.site or site_of[node.name]} {node.chunk} {node.hop} {role}"
    for node in reversed(mine):
        for source in sources[node.name]:
            if site_of.get(source) == site_of[node.name] and node.name in found:
                found.setdefault(source, found[node.name])
    for node in mine:
        for source in sources[node.name]:
            if site_of.get(source) == site_of[node.name] and source in found:
                found.setdefault(node.name, found[source])
    return found


def role_of(node: GraphNode) -> str:
    """Return what a node of a site does; "" for one that only moves or views memory."""
    if node.inserted:
        return "" if node.role == "layout" else node.role or node.target
    return "wait" if waits(node) else "exchange"


def _between(
    members: Mapping[str, Sequence[GraphNode]],
    owner: Mapping[str, str],
    sources: Mapping[str, Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """Map each box to the others that it takes inputs from."""
    found = {}
    for box, nodes in members.items():
        some = (owner[source] for node in nodes for source in sources[node.name] if source in owner)
        found[box] = tuple(dict.fromkeys(each for each in some if each != box))
    return found


def _fold_small(
    members: dict[str, list[GraphNode]], edges: dict[str, tuple[str, ...]], sites: AbstractSet[str]
) -> None:
    """Merge small runs that wait for only one other run into that run.

    This creates no cycle: all their users come after that run too.
    """
    into: dict[str, str] = {}
    for box in in_order(edges) or ():
        sources = {into.get(each, each) for each in edges[box]}
        costly = any(word in node.target for node in members[box] for word in COSTLY)
        if box in sites or sources & sites or len(sources) != 1 or costly:
            continue
        if len(members[box]) <= FEW:
            into[box] = sources.pop()
            members[into[box]] += members.pop(box)
            del edges[box]
    for box, some in edges.items():
        taken = dict.fromkeys(into.get(each, each) for each in some)
        edges[box] = tuple(each for each in taken if each != box)


def named(dump: Dump, side: str, name: str) -> set[str]:
    """Return the drawn sites that a number (as in ``explain --all``) or a name refers to.

    Raise CommpassError if there is none, with the nearest name.
    """
    plan = dump.plan
    whole = {part: split.site for split in plan.split for part in split.into}
    nodes = nodes_of(dump, side) or _of_plan(dump)
    drawn = {node.site or node.name for node in nodes if node.site or travels(node)}
    if name.isdecimal():
        if not 1 <= int(name) <= len(plan.sites):
            raise CommpassError(
                f"graph {dump.number} has no site {name}: it has {len(plan.sites)}, from 1 on"
                " (commpass explain --all numbers them)"
            )
        name = plan.sites[int(name) - 1].name
    meant = {name, name.partition(".")[0], *(g.into for g in plan.grouped if name in g.sites)}
    if side == "before":  # there it is shown as its original sites
        meant |= {each for group in plan.grouped if group.into == name for each in group.sites}
    known = {whole.get(site, site) for site in drawn}
    found = {whole.get(each, each) for each in meant} & known
    if not found:
        raise CommpassError(
            f"no site {name!r} in graph {dump.number}{nearest(name, known | drawn)}"
        )
    return found
