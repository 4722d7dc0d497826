"""group: combines small similar sites into one exchange if that is faster.

needs: the sites of a graph, each with what it is allowed.
gives: the same graph, in which one plain collective carries the concatenated values of such sites,
and a record of every fusion.
changes: nothing for gathers. For sums, the library's order of additions and thus the rounding.
``Policy(reassociate=False)`` excludes sums; ``Policy(group_bytes=0)`` disables the pass.

The decisions use only facts that all ranks share: sizes, terms and groups of sites, and their
places in the graph.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from commpass.codecs import FLOATS, Codec, SparseCodec, codec
from commpass.codecs.sparse.segments import segmented
from commpass.collectives import find_algorithm
from commpass.costmodel import Profile
from commpass.passes.context import PassContext
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import Roots, roots
from commpass.passes.fx.direction import AGAIN
from commpass.passes.fx.marks import ALLOWED, SEGMENTS
from commpass.passes.fx.ops import aten, functional, may_compute_much
from commpass.passes.fx.parse import graph_modules
from commpass.passes.graph_site import GraphSite
from commpass.passes.simplify.carriers import SENT_EVERYWHERE
from commpass.passes.simplify.editor import Editor, fake
from commpass.passes.simplify.outputs import output_memory
from commpass.plan import Grouped
from commpass.plan.kinds import BY_RANK, KINDS, SUMS
from commpass.policy import Policy
from commpass.policy.paths import common
from commpass.policy.rules import Allowed

TOTAL = 4
"""The maximum total size of a fusion's members, as a multiple of ``Policy.group_bytes``."""
MOST = 64
"""The maximum number of members of a fusion. More save almost nothing, and the limit keeps the pass
linear."""
MOST_SELECTIONS = 16
"""As ``MOST``, if each member has its own selection, which takes about a hundred nodes."""
BLOCK = 256
"""Members of lossy codecs are padded to a multiple of this number of values."""
NAME = "group"


@dataclass(frozen=True)
class Member:
    """A small site that may be fused.

    ``number`` is its place among the sites of its process group, and ``use`` the first node that
    reads its result. ``begin`` and ``end`` count the compute nodes before its start and before its
    use. ``sent`` is the size of its padded input in bytes.
    """

    found: GraphSite
    number: int
    use: fx.Node
    begin: int
    end: int
    sent: int

    @property
    def start(self) -> fx.Node:
        return self.found.call.node

    @property
    def wait(self) -> fx.Node:
        return self.found.outputs[0]


@dataclass(frozen=True)
class GraphSnapshot:
    """A graph before any fusion.

    It holds the ``order`` of the nodes and how much ``compute`` precedes each. ``memory`` says what
    they may share, ``fixed`` what must stay as it is, and ``leaving`` what becomes an output.
    """

    order: dict[fx.Node, int]
    compute: dict[fx.Node, int]
    memory: Roots
    fixed: frozenset[fx.Node]
    leaving: frozenset[fx.Node]

    def written_between(self, node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
        """Whether an operator between two nodes may write to the memory of a node."""
        low, high = self.order[first], self.order[last]
        places = self.memory.written.get(self.memory.of[node], ())
        return any(low < place < high for place in places)


@dataclass(frozen=True)
class Fusions:
    """The fusions of one graph module, as ``sets`` of members. ``prefix`` starts the names of its
    nodes."""

    module: fx.GraphModule
    prefix: str
    editor: Editor
    look: GraphSnapshot
    sets: tuple[list[Member], ...]


def run(context: PassContext) -> None:
    """Combine small sites. The parts of a hook's exchange stay apart: if they are not compressed,
    the hook's own call sends them at once."""
    given = context.input
    if given.hook:
        return
    grouped = group(given.gm, context.found, given.policy, given.profile, given.direction)
    context.plan_with(grouped=grouped)
    context.sites_changed = bool(grouped)


def group(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    direction: str = "forward",
) -> tuple[Grouped, ...]:
    """Fuse sites in each graph module of a forward or backward graph, in place, and return what was
    fused."""
    made: list[Grouped] = []
    for each in fusions(gm, found, policy, profile, direction):
        for members in sorted(each.sets, key=lambda members: each.look.order[members[-1].start]):
            made.append(_fuse(members, each.editor, each.look, each.prefix))
        if each.sets:
            each.module.graph.lint()
            each.module.recompile()
    return tuple(made)


def fusions(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    direction: str,
) -> Iterator[Fusions]:
    """Yield the possible fusions of each graph module that has several small sites."""
    if policy.off or not policy.group_bytes:
        return
    numbered = list(zip(_numbers(found), found, strict=True))
    for prefix, module in graph_modules(gm):
        mine = [(number, each) for number, each in numbered if each.module is module]
        small = {each.call.node for _, each in mine if _is_small(each, policy, direction)}
        if len(small) < 2:
            continue
        editor = Editor(module, profile, {each.call.node: each.allowed for _, each in mine})
        look = _snapshot(module.graph)
        chosen = [_best(members, editor) for members in _compatible(mine, small, look, policy)]
        sets = tuple(members for members in chosen if len(members) > 1)
        yield Fusions(module, prefix, editor, look, sets)


def _numbers(found: Sequence[GraphSite]) -> Iterator[int]:
    """Yield the place of each site among the sites of its process group."""
    counts: Counter[str] = Counter()
    for each in found:
        yield counts[each.site.group]
        counts[each.site.group] += 1


# --- analysis -------------------------------------------------------------------------------------


def _snapshot(graph: fx.Graph) -> GraphSnapshot:
    memory = roots(graph)
    nodes = list(graph.nodes)
    before = itertools.accumulate(map(may_compute_much, nodes), initial=0)
    return GraphSnapshot(
        order={node: place for place, node in enumerate(nodes)},
        compute=dict(zip(nodes, before, strict=False)),
        memory=memory,
        fixed=memory.fixed(),
        leaving=frozenset(output_memory(graph, memory)),
    )


def _is_small(each: GraphSite, policy: Policy, direction: str) -> bool:
    """Whether a site is a plain collective of few bytes, with a size that all ranks share."""
    site, call = each.site, each.call
    return (
        site.kind in BY_RANK
        and call.form == "plain"
        and site.unsupported_reason is None
        and not (site.uneven or site.dynamic)
        and site.group_size > 1
        and 0 < _carried(each)[1] <= policy.group_bytes
        and (policy.reassociate or site.kind not in SUMS)
        and fake(each.input).dtype in SENT_EVERYWHERE
        and not runs_again(each, direction)
        and _fill(each) > 0
    )


def runs_again(each: GraphSite, direction: str) -> bool:
    """Whether forward and backward both run a site. They must send the same, but the site may have
    other neighbours in backward."""
    return each.site.direction != direction or each.call.node.meta.get("recompute") in AGAIN


def _fill(each: GraphSite) -> int:
    """Return the multiple of values that a member is padded to, so that no codec block spans two
    members.

    Return 0 if an allowed codec depends on more than a block.
    """
    if fake(each.input).dtype not in FLOATS:
        return 1
    if selects(each):
        return 1
    lossy = [coder for coder in _coders(each) if not coder.lossless]
    if any(coder.state is not None or not coder.has_independent_blocks for coder in lossy):
        return 0
    return math.lcm(BLOCK, *(coder.block for coder in lossy)) if lossy else 1


def _coders(each: GraphSite) -> set[Codec]:
    """Return the allowed codecs, and those that parameters of an allowed algorithm name."""
    coders = {codec(spec) for spec in each.allowed.codecs}
    for spec in each.allowed.algorithms:
        if "(" in spec and (found := find_algorithm(each.site.kind, spec)) is not None:
            for coder in tuple(coders):
                coders |= {used for used, _ in found.encodes(coder, each.site.group_size)}
    return coders


def selects(each: GraphSite) -> bool:
    """Whether a site loses values only by selection. Each member then keeps its own selection."""
    lossy = [coder for coder in map(codec, each.allowed.codecs) if not coder.lossless]
    plain = each.site.kind == "all_reduce" and each.site.stateless is None
    return plain and bool(lossy) and all(type(coder) is SparseCodec for coder in lossy)


def _carried(each: GraphSite) -> tuple[str, int]:
    """Return the kind of exchange that a site becomes, and the bytes that one rank sends."""
    if not selects(each):
        return each.site.kind, each.site.bytes
    value = fake(each.input)
    codecs = [coder for coder in map(codec, each.allowed.codecs) if not coder.lossless]
    return "all_gather", max(coder.wire_bytes(value.numel(), value.dtype) for coder in codecs)


def _member(each: GraphSite, number: int, snapshot: GraphSnapshot) -> Member | None:
    """Return a small site as a member if its result is waited for once and never written to, else
    None."""
    wait = each.outputs[0]
    if list(each.call.node.users) != [wait] or len(each.outputs) > 1 or not wait.users:
        return None
    if snapshot.memory.of[wait] in snapshot.fixed or not fake(wait).is_contiguous():
        return None
    use = min(wait.users, key=snapshot.order.__getitem__)
    begin, end = snapshot.compute[each.call.node], snapshot.compute[use]
    rows = _rows(each)
    width = fake(each.input).numel() // rows
    values = rows * math.ceil(width / _fill(each)) * _fill(each)
    sent = values * fake(each.input).dtype.itemsize
    return Member(each, number, use, begin, end, _carried(each)[1] if selects(each) else sent)


def _rows(each: GraphSite) -> int:
    """Return how many parts of the input have different destinations: one per rank for a
    reduce_scatter, else 1."""
    return each.site.group_size if KINDS[each.site.kind].scatters else 1


def _compatible(
    numbered: Sequence[tuple[int, GraphSite]],
    small: set[fx.Node],
    snapshot: GraphSnapshot,
    policy: Policy,
) -> Iterator[list[Member]]:
    """Yield sets of sites that may be fused, each in graph order. A site that does not fit into its
    set starts a new one."""
    open_sets: dict[Any, list[Member]] = {}
    for number, each in numbered:
        if each.site.pairwise:  # another rank may wait for this message
            yield from open_sets.values()
            open_sets.clear()
        member = _member(each, number, snapshot) if each.call.node in small else None
        if member is None:
            continue
        key = _key(each)
        if not _fits(open_sets.get(key, []), member, snapshot, policy):
            yield open_sets.pop(key)
        open_sets.setdefault(key, []).append(member)
    yield from open_sets.values()


def _key(each: GraphSite) -> tuple[Any, ...]:
    """Return what all members of a set have in common."""
    site, device = each.site, fake(each.input).device
    what = (site.kind, site.reduce_op, site.group, site.dtype)
    return (*what, device, site.direction, each.allowed.terms)


def _fits(members: Sequence[Member], new: Member, snapshot: GraphSnapshot, policy: Policy) -> bool:
    """Whether a site may be fused with earlier ones. The single exchange starts where this site
    starts. Its wait precedes the first use of any member."""
    if not members:
        return True
    every = [*members, new]
    most = MOST_SELECTIONS if selects(new.found) else MOST
    if len(every) > most or sum(each.sent for each in every) > TOTAL * policy.group_bytes:
        return False
    if min(snapshot.order[each.use] for each in every) <= snapshot.order[new.start]:
        return False
    # Computation between the start and the use of an exchange overlaps it.
    left = min(each.end for each in every) - new.begin
    if max(each.end - each.begin for each in every) - left > policy.group_delay:
        return False
    return not any(
        snapshot.written_between(each.found.input, each.start, new.start) for each in members
    )


# --- gain -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Predicted microseconds of the separate exchanges, of the fused one, and of the copies for
    it."""

    separate: float
    fused: float
    copies: float

    @property
    def gain(self) -> float:
        return self.separate - self.fused - self.copies


def _best(members: list[Member], editor: Editor) -> list[Member]:
    """Remove the largest members until the predicted gain of the fusion exceeds the model's margin.
    Return the remaining ones."""
    members = list(members)
    while len(members) > 1:
        times = _times(members, editor)
        if times.gain > editor.profile.margin * times.separate:
            return members
        members.pop(max(range(len(members)), key=lambda number: members[number].sent))
    return []


def _times(members: Sequence[Member], editor: Editor) -> Times:
    call = members[0].found.call
    sent = sum(each.sent for each in members)
    copied = sum(
        meta.nbytes(fake(each.found.input)) + meta.nbytes(fake(each.wait)) for each in members
    )
    carried = [_carried(each.found) for each in members]
    return Times(
        separate=sum(editor.time_us(kind, nbytes, call) for kind, nbytes in carried),
        fused=editor.time_us(carried[0][0], sent, call),
        copies=editor.profile.kernels.copies_us(1 + len(members), copied),
    )


def _record(members: Sequence[Member], editor: Editor, into: str) -> Grouped:
    times = _times(members, editor)
    reason = (
        f"{times.fused:,.0f} us and {times.copies:,.0f} us of copies instead of"
        f" {times.separate:,.0f} us for {len(members)} exchanges on {editor.profile.name}"
    )
    return Grouped(
        sites=tuple(each.found.site.name for each in members),
        modules=tuple(each.found.site.module for each in members),
        into=into,
        group=members[0].found.site.group,
        numbers=tuple(each.number for each in members),
        bytes=tuple(each.found.site.bytes for each in members),
        reason=reason,
    )


# --- edits ----------------------------------------------------------------------------------------


def _fuse(
    members: Sequence[Member], editor: Editor, snapshot: GraphSnapshot, prefix: str
) -> Grouped:
    """Replace the members by one exchange. ``prefix`` starts the names of their graph's nodes."""
    first, last = members[0].found, members[-1].start
    use = min((each.use for each in members), key=snapshot.order.__getitem__)
    call, ranks = first.current_call, first.site.group_size
    flat = [_flat(each.found, last, editor) for each in members]
    lengths = [fake(node).shape[1] for node in flat]
    joined = editor.emit(last, NAME, call.node, aten.cat.default, flat, 1)
    line = editor.emit(last, NAME, call.node, aten.view.default, joined, [-1])
    start = editor.start(last, NAME, call, line)
    if selects(first):
        start.meta[ALLOWED] = {0: _allowed_separately(first.allowed, lengths)}
        start.meta[SEGMENTS] = tuple(
            (each.found.site.module, tuple(fake(each.found.input).shape)) for each in members
        )
    path = common(each.found.site.module for each in members)
    start.meta["custom"] = {**(start.meta.get("custom") or {}), meta.PLACE: path}
    made = _record(members, editor, prefix + start.name)
    wait = editor.emit(use, NAME, call.node, functional.wait_tensor.default, start)
    rows = ranks if KINDS[first.site.kind].gathers else 1
    arrived = editor.emit(use, NAME, call.node, aten.view.default, wait, [rows, sum(lengths)])
    for each, end, length in zip(members, itertools.accumulate(lengths), lengths, strict=True):
        shape = list(fake(each.wait).shape)
        part = [end - length, end - length + math.prod(shape) // rows]
        value = editor.emit(use, NAME, each.start, aten.slice.Tensor, arrived, 1, *part)
        if rows > 1 or snapshot.memory.of[each.wait] in snapshot.leaving:
            # Copy: an output must not share memory with others.
            value = editor.copy(use, NAME, each.start, value)
        value = editor.emit(use, NAME, each.start, aten.view.default, value, shape)
        each.wait.replace_all_uses_with(value)
        editor.prune(each.wait)
    return made


def _allowed_separately(allowed: Allowed, lengths: Sequence[int]) -> Allowed:
    """Return what is allowed for members of several lengths in one exchange, with a separate
    selection for each."""
    codecs = (
        segmented(spec, lengths) if isinstance(codec(spec), SparseCodec) else spec
        for spec in allowed.codecs
    )
    return replace(allowed, codecs=tuple(codecs))


def _flat(each: GraphSite, before: fx.Node, editor: Editor) -> fx.Node:
    """Return the input of a member as ``[rows, n]``, padded with zeros."""
    node, rows = each.call.node, _rows(each)
    flat = editor.emit(before, NAME, node, aten.reshape.default, each.input, [rows, -1])
    missing = -fake(flat).shape[1] % _fill(each)
    if not missing:
        return flat
    return editor.emit(before, NAME, node, aten.constant_pad_nd.default, flat, [0, missing])
