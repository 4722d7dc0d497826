"""chunk: splits a collective beside a matmul into chunks of rows. Each chunk is sent as soon as the
preceding matmul has computed it, and used by the next matmul as soon as it arrives.

needs: the sites of a functional graph, each with what it is allowed.
gives: the same graph, with several smaller collectives in the place of some, and a record of each
split. ``move`` decides which of them overlap.
changes: only the number of rows of matmuls, which changes the rounding of some libraries.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.candidates import scoring
from commpass.passes.chunk.build import build, joined_of
from commpass.passes.chunk.gain import OverlappingCompute, exchange_of, part_of, pipeline_us
from commpass.passes.chunk.region import Join, Product, Region, product_of, region_of
from commpass.passes.context import PassContext
from commpass.passes.fx import costs, meta
from commpass.passes.fx.direction import AGAIN
from commpass.passes.fx.memory import LiveBytes, changed, memory, peak
from commpass.passes.fx.work import SMALL
from commpass.passes.graph_site import GraphSite
from commpass.passes.results import Chunked
from commpass.passes.single_kernel import PeerMemoryOf, no_peer_memory
from commpass.plan import NONE, Candidate, Site, Split
from commpass.policy import Policy

CHUNKS = (2, 4)
"""The chunk counts that are tried without a request."""
MOST = 512
"""The maximum number of sites that are split without a request. Each split recomputes the peak
memory of the graph."""


def run(context: PassContext) -> None:
    """Split collectives."""
    given = context.input
    context.chunked = chunk(
        given.gm,
        context.found,
        given.policy,
        given.profile,
        given.direction,
        given.peer_memory,
    )
    context.plan_with(split=tuple(context.chunked.splits))
    context.sites_changed = bool(context.chunked.splits)


def chunk(
    gm: fx.GraphModule,
    found: Sequence[GraphSite],
    policy: Policy,
    profile: Profile,
    direction: str,
    peer_memory: PeerMemoryOf = no_peer_memory,
) -> Chunked:
    """Split the collectives that gain from it, or for which a number of chunks is requested."""
    work = _Chunks(gm.graph, policy, profile, direction, peer_memory)
    for each in found:
        if each.allowed.rows != 1:
            work.site(each)
    if work.result.splits:
        gm.graph.lint()
        gm.recompile()
    return work.result


class _Chunks:
    """Splits the sites of a graph one after the other."""

    def __init__(
        self,
        graph: fx.Graph,
        policy: Policy,
        profile: Profile,
        direction: str,
        peer_memory: PeerMemoryOf,
    ):
        self.graph, self.policy, self.profile = graph, policy, profile
        self.direction = direction
        self.scored = scoring(profile, policy.reassociate, peer_memory)
        self.result = Chunked()
        self.joins: dict[fx.Node, Join] = {}
        self.known = memory(graph)
        self.written = changed(graph, self.known)
        self.counted: dict[tuple[Any, ...], tuple[int, int]] = {}
        # Splits add and erase nodes, and change no sizes of others.
        self.times = costs.NodeTimes.of(graph, profile)
        self.us_of = functools.cache(self.times.us)

    @cached_property
    def live_bytes(self) -> tuple[dict[fx.Node, int], int]:
        """The bytes that the original graph holds before each node, and their peak. They are
        computed at first access, before the first split."""
        live = LiveBytes(memory(self.graph, in_place=True))
        before: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            before[node] = live.now
            live.run(node)
        return before, live.most

    @cached_property
    def overlapping(self) -> OverlappingCompute:
        """The overlap of the graph at first access. Splitting one site does not change what can
        overlap another."""
        return OverlappingCompute(self.graph, self.us_of)

    def site(self, each: GraphSite) -> None:
        """Split one site if this is requested or gains."""
        asked, name = each.allowed.rows, each.site.name
        regions = self._regions(each)
        if isinstance(regions, str):
            if asked is not None:
                self.result.refused[name] = f"rows={asked} does not apply: {regions}"
            return
        if asked is None and len(self.result.splits) >= MOST:
            self.result.refused[name] = f"not split: {MOST} sites of this graph are"
            return
        if asked is not None:
            wanted = [(regions[0], f"{each.allowed.split} says rows={asked}")]
        else:
            wanted = self._gaining(each, regions)
        for region, reason in wanted:
            if not (why := self._build(each, region, reason)):
                self.result.refused.pop(name, None)
                return
            self.result.refused[name] = f"not split into {region.chunks} chunks of rows: {why}"

    def _regions(self, each: GraphSite) -> list[Region] | str:
        """Return the regions around a site, one per chunk count, or why there are none."""
        if each.site.group_size == 1:
            return "the group has one rank, and nothing is sent"
        if each.module.graph is not self.graph:
            return "it is in a region that may run several times"
        if not self.policy.reassociate:
            return "reassociate=False, and fewer rows of a matmul may be rounded differently"
        again = each.call.node.meta.get("recompute") in AGAIN
        if again or each.site.direction != self.direction:
            return "backward runs it again, and must send the same"
        product = product_of(each, self.joins, self.known, self.written)
        if isinstance(product, str):
            return product
        join = self.joins.get(product.first)
        fixed = join.bounds if product.nodes and join is not None else None
        asked = each.allowed.rows
        chunks = (asked,) if asked else CHUNKS if fixed is None else (len(fixed) - 1,)
        tried = [self._region(each, product, many, fixed) for many in chunks]
        found = [region for region in tried if isinstance(region, Region)]
        return found or str(tried[0])

    def _region(
        self, each: GraphSite, product: Product, chunks: int, fixed: tuple[int, ...] | None
    ) -> Region | str:
        region = region_of(each, product, chunks, fixed, self.known, self.written)
        if isinstance(region, Region) and each.site.by_messages:
            part = part_of(each.site, region).bytes
            if part < SMALL:
                return f"chunks of {part:,} bytes are too small for gloo, which needs {SMALL:,}"
        return region

    def _gaining(self, each: GraphSite, regions: Sequence[Region]) -> list[tuple[Region, str]]:
        """Return the regions that gain more than the model's margin, the best first, with reasons.

        Uncompressed chunks are tried as well, since an encode occupies the rank, and may not pay
        where chunks overlap with matmuls. They must gain over the whole uncompressed exchange, and
        be no slower than the whole best one.

        In backward, the computation before an exchange may be a weight gradient. Its time depends
        on the local batch, so ranks would decide differently; only regions with consumers count
        there.
        """
        if self.direction == "backward":
            regions = [region for region in regions if region.consumers]
        if not regions:
            return []
        best = self._best(each.site, each)
        if each.call.kind == "all_gather" and each.site.by_messages and best.codec == NONE:
            return []  # gloo cannot run two of them concurrently
        if self.overlapping.time_us(each.call.node) >= exchange_of(best, self.profile).us:
            return []
        plain = self._pipeline_us(regions[0], 1, best)
        ways = [(plain, self._best)]
        if not each.site.by_messages and best.codec != NONE and not each.allowed.force:
            whole = self._pipeline_us(regions[0], 1, self._plain(each.site, each))
            ways.append((whole, self._plain))
        found: list[tuple[float, Region]] = []
        for region in regions:
            part = part_of(each.site, region)
            tried = [
                (whole, self._pipeline_us(region, region.chunks, candidate_of(part, each)))
                for whole, candidate_of in ways
            ]
            gaining = [us for whole, us in tried if whole - us > self.profile.margin * whole]
            if gaining and min(gaining) <= plain:
                found.append((min(gaining), region))
        where = f"from the matmul before to those after on {self.profile.name}"
        return [
            (region, f"{us:,.0f} us instead of {plain:,.0f} us {where}")
            for us, region in sorted(found, key=lambda one: one[0])
        ]

    def _pipeline_us(self, region: Region, chunks: int, candidate: Candidate) -> float:
        """Return the time from the matmul before to those after, with a candidate for each of the
        chunks."""
        exchange = exchange_of(candidate, self.profile)
        joined = joined_of(region)[0] if chunks > 1 else ()
        cut = {node: join.chunks for node, join in self.joins.items()}
        return pipeline_us(region, chunks, exchange, joined, cut, self.times, self.us_of)

    def _plain(self, site: Site, each: GraphSite) -> Candidate:
        return self.scored(site, each.allowed).uncompressed

    def _best(self, site: Site, each: GraphSite) -> Candidate:
        """Return the fastest candidate of a site."""
        options = self.scored(site, each.allowed)
        possible = (options.uncompressed, *options.possible)
        return min(possible, key=lambda candidate: candidate.predicted_us)

    def _build(self, each: GraphSite, region: Region, reason: str) -> str:
        """Split a site and return "", or undo the split and return why."""
        through = tuple(node.name for node in (*region.product.nodes, *region.consumers))
        form, (before, original) = _form(region), self.live_bytes
        built = build(self.graph, region, self.joins)
        removed, most = set(built.old), _largest(each) // region.chunks
        base = before[each.call.node]
        if (more := self._more(base, original, form, most, removed)) > most:
            built.undo()
            return f"the peak memory would be {more:,} bytes higher"
        split = Split(
            site=each.site.name,
            into=tuple(node.name for node in built.starts),
            rows=tuple(end - begin for begin, end in itertools.pairwise(region.bounds)),
            through=through,
            group=each.site.group,
            reason=reason,
        )
        built.finish()
        self.joins = {n: join for n, join in (self.joins | built.joins).items() if n not in removed}
        self.result.splits.append(split)
        return ""

    def _more(
        self,
        base: int,
        original: int,
        form: tuple[Any, ...],
        limit: int,
        erased: set[fx.Node],
    ) -> int:
        """Return an upper bound of the increase in peak memory over the ``original`` one. ``base``
        bytes are held before the site.

        Computing it takes time linear in the graph. It is therefore reused for regions of the same
        form that hold hardly more memory.
        """
        if form in self.counted:
            more, then = self.counted[form]
            if (bound := max(more, 0) + max(base - then, 0)) <= limit:
                return bound
        order = [node for node in self.graph.nodes if node not in erased]
        more = peak(order, memory(self.graph, in_place=True, excluded=erased)) - original
        self.counted[form] = more, base
        return more


def _form(region: Region) -> tuple[Any, ...]:
    """Return a key that is equal for regions that need the same memory: operators, shapes, chunk
    bounds, and uses outside."""
    nodes = (*region.product.nodes, region.start, region.wait, *region.consumers)
    inside = set(nodes)

    def is_inside(node: fx.Node) -> bool:
        return inside.issuperset(node.users)

    return region.bounds, tuple(
        (
            node.target,
            tuple((each.shape, each.dtype) for each in meta.tensors(node.meta.get("val"))),
            is_inside(node),
            tuple(is_inside(each) for each in node.all_input_nodes if each not in inside),
        )
        for node in nodes
    )


def _largest(each: GraphSite) -> int:
    """Return the larger of a collective's input and output sizes, in bytes."""
    return max(each.site.bytes, meta.nbytes(each.call.node.meta["val"]))
