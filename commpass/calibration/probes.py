"""A backend that compiles nothing: it inserts a probe before each collective and measures.

A probe returns its input, or what a codec makes of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from commpass import groups
from commpass.backend import Backend, TracedGraph
from commpass.calibration.measured_sites import Address, without_name
from commpass.codecs import FLOATS, Codec
from commpass.codecs.wrappers.outlier import Running
from commpass.costmodel import Profile
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.calls import with_boxed_args
from commpass.distributed.samples import CHECKED, Reading, largest, measure, one_encode
from commpass.passes.candidates import candidates
from commpass.passes.discover import discover
from commpass.passes.fx import meta
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.fx.parse import is_wait
from commpass.passes.graph_site import GraphSite
from commpass.passes.simplify import simplify
from commpass.plan import Site
from commpass.policy import Policy
from commpass.policy.rules import Allowed
from commpass.utils.ambient import ambient_free


@dataclass
class Squares:
    """Sums of squares of sent values, and of the errors of codecs by name.

    ``count`` is the number of sent values, and ``bytes`` what codecs need for them.
    """

    values: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    count: int = 0
    bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Probes:
    """The settings and results of one rank's probes, in all graphs.

    - ``errors_of``: the codecs whose errors are measured at each place; ``sizes_of``: those whose
      sizes are measured at all places.
    - ``disturb``: the place whose values a codec changes.
    - ``channels``: the ranges of the channels of each place, None if its tensors do not have the
      same ones; ``sums``: those of the results of its sums.
    - ``group_ranks``: this rank's numbers in the groups of a place, each with the number of ranks.
    - ``measure``: whether probes count and measure what is sent.
    - ``peaks``: by place and codec, the largest readings of one call in all batches.
    - ``merged``: the places whose collectives simplify merges into one.
    """

    wanted: tuple[str, ...]
    policy: Policy
    profile: Profile | None = None
    errors_of: dict[Address, list[Codec]] = field(default_factory=dict)
    sizes_of: list[Codec] = field(default_factory=list)
    disturb: tuple[frozenset[Address], Codec] | None = None
    measure: bool = False
    sites: dict[Address, Counter[Site]] = field(default_factory=dict)
    squares: dict[Address, Squares] = field(default_factory=dict)
    peaks: dict[Address, dict[str, Reading]] = field(default_factory=dict)
    channels: dict[Address, Running | None] = field(default_factory=dict)
    sums: dict[Address, Running | None] = field(default_factory=dict)
    group_ranks: dict[Address, set[tuple[int, int]]] = field(default_factory=dict)
    merged: set[tuple[Address, Address]] = field(default_factory=set)
    remarks: dict[str, None] = field(default_factory=dict)

    def insert(self, gm: fx.GraphModule, direction: str, unsupported_reason: str | None) -> None:
        """Insert a probe before every collective of a graph that a rule could compress, after
        simplify."""
        found = discover(gm, direction)
        for each in found:
            each.call.node.meta[ALLOWED] = {}
        for each in found:
            recorder = _MergeRecorder(
                codecs=self.wanted, where=Address.of(each.site), merged=self.merged
            )
            each.call.node.meta[ALLOWED][each.position] = recorder
        found = [self._recording(each) for each in found]
        profile = agreed_profile(self.profile, meta.device_of(gm), gm)
        if "simplify" not in self.policy.skip and unsupported_reason is None and found:
            simplify(gm, found, self.policy, profile)
            found = [self._recording(each) for each in discover(gm, direction)]
        for each in found:
            if why := unsupported_reason or self._unsupported_reason(each, profile):
                place = Address.of(each.site)
                self.remarks.setdefault(f"not measured: {place}: {why}")
                continue
            where = (
                each.allowed.where
                if isinstance(each.allowed, _MergeRecorder)
                else Address.of(each.site)
            )
            rank_and_size = groups.rank_in(each.site.group) or 0, each.site.group_size
            self.group_ranks.setdefault(where, set()).add(rank_and_size)
            self._before(each, where)
            self._behind(each, where)
        for module in {each.module for each in found}:
            module.graph.lint()
            module.recompile()

    def _recording(self, each: GraphSite) -> GraphSite:
        known = each.call.node.meta.get(ALLOWED, {}).get(each.position)
        return dataclasses.replace(each, allowed=known or Allowed(codecs=self.wanted))

    def _unsupported_reason(self, each: GraphSite, profile: Profile) -> str | None:
        """Return why nothing is measured at a site; None if it is."""
        site = each.site
        if site.annotation is not None:
            return "an annotation in the model applies to it, which no rule can change"
        if site.pairwise:
            return "both ends of a send must be coded alike, but each has its own sensitivity"
        wanted = Allowed(codecs=self.wanted)
        options = candidates(site, wanted, profile, self.policy.reassociate)
        return options.unsupported_reason or (
            None if options.possible else "; ".join(options.refused)
        )

    def _before(self, each: GraphSite, address: Address) -> None:
        """Insert a probe before a site's input."""
        node, source = each.call.node, each.input
        graph = each.module.graph
        probe = Probe(self, address, without_name(each.site), "in-place" in each.call.form)
        name = _added(each, probe)
        with graph.inserting_before(node):
            inserted = graph.call_module(name, (source,))
        inserted.meta.update({key: source.meta[key] for key in ("val",) if key in source.meta})
        node.replace_input_with(source, inserted)

    def _behind(self, each: GraphSite, address: Address) -> None:
        """Insert a probe after a sum that has one output."""
        if each.site.reduce_op != "sum" or len(each.outputs) != 1 or not is_wait(each.outputs[0]):
            return
        (node,) = each.outputs
        name = _added(each, ProbeOfSums(self, address))
        with node.graph.inserting_after(node):
            inserted = node.graph.call_module(name, (node,))
        inserted.meta.update({key: node.meta[key] for key in ("val",) if key in node.meta})
        node.replace_all_uses_with(inserted, delete_user_cb=lambda user: user is not inserted)

    def forget(self) -> None:
        """Reset counts and sums."""
        self.squares = {}
        for counter in self.sites.values():
            counter.clear()


@dataclass(frozen=True, kw_only=True)
class _MergeRecorder(Allowed):
    """An allowance that simplify may merge with all others; it records what it is merged with."""

    where: Address
    merged: set[tuple[Address, Address]]

    def allow_like(self, exact: Allowed) -> bool:
        if isinstance(exact, _MergeRecorder) and exact.where != self.where:
            self.merged.add((min(self.where, exact.where), max(self.where, exact.where)))
        return True


def _added(each: GraphSite, probe: nn.Module) -> str:
    """Add a probe to the module of a site. Return its name."""
    name = f"commpass_probe_{len(each.module._modules)}"
    each.module.add_module(name, probe)
    return name


class Probe(nn.Module):
    """The probe before one collective."""

    def __init__(self, probes: Probes, address: Address, site: Site, in_place: bool):
        super().__init__()
        self.probes, self.where, self.site, self.in_place = probes, address, site, in_place

    @ambient_free
    def forward(self, x: Tensor) -> Tensor:
        probes, where = self.probes, self.where
        if probes.disturb is not None and where in probes.disturb[0]:
            changed = round_trip(probes.disturb[1], x)
            # What a collective overwrites is overwritten here as well.
            return x.copy_(changed) if self.in_place else changed
        if probes.measure and x.numel():
            probes.sites.setdefault(where, Counter())[self.site] += 1
            self._measure(x)
        return x

    def _measure(self, x: Tensor) -> None:
        probes, where = self.probes, self.where
        squares = probes.squares.setdefault(where, Squares())
        squares.values += square(x)
        for each in probes.errors_of.get(where, ()):
            lost = square(round_trip(each, x), x)
            squares.errors[each.spec] = squares.errors.get(each.spec, 0.0) + lost
            self._note_peak(each, x)
        squares.count += x.numel() if probes.sizes_of else 0
        for each in probes.sizes_of if x.dtype in FLOATS else ():
            size = each.encode(x.contiguous()).payload.numel()
            squares.bytes[each.spec] = squares.bytes.get(each.spec, 0) + size
        if not x.isfinite().all():
            squares.values = float("nan")
        else:
            _note_channels(probes.channels, where, x)

    def _note_peak(self, codec: Codec, x: Tensor) -> None:
        """Note what the error check of a compiled graph would read of a tensor."""
        if codec.lossless or codec.state is not None or x.dtype not in FLOATS:
            return
        if (reading := one_encode(measure(codec, x, CHECKED).tolist())) is not None:
            known = self.probes.peaks.setdefault(self.where, {})
            before = [known[codec.spec]] if codec.spec in known else []
            known[codec.spec] = largest([*before, reading])


class ProbeOfSums(nn.Module):
    """The probe after one collective."""

    def __init__(self, probes: Probes, address: Address):
        super().__init__()
        self.probes, self.where = probes, address

    @ambient_free
    def forward(self, x: Tensor) -> Tensor:
        if self.probes.measure and x.numel() and x.isfinite().all():
            _note_channels(self.probes.sums, self.where, x)
        return x


def _note_channels(known: dict[Address, Running | None], address: Address, x: Tensor) -> None:
    """Update the ranges of the channels of a tensor; None if tensors differ in them."""
    if address not in known:
        known[address] = Running.start(x) if x.dim() > 1 else None
    elif (before := known[address]) is not None:
        fits = x.dim() > 1 and before.low.numel() == x.shape[-1]
        known[address] = before.update(x) if fits else None


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    """Return what a receiver gets of a tensor, in its dtype."""
    return codec.decode(codec.encode(x.contiguous())) if x.dtype in FLOATS else x


def square(x: Tensor, exact: Tensor | None = None) -> float:
    """Return the sum of squares of a tensor, or of its difference to another, in float64."""
    x = x.detach().double()
    return float((x - exact.detach().double() if exact is not None else x).square().sum())


class Probing(Backend):
    """The backend for torch.compile: it runs all graphs of a step with probes, operator by
    operator."""

    def __init__(self, probes: Probes):
        super().__init__(probes.policy, "eager", probes.profile, True, None, None)
        self.probes = probes

    def compile(self, graph: TracedGraph) -> Any:
        self.probes.insert(graph.gm, graph.direction, graph.unsupported_reason)
        return with_boxed_args(graph.compile_graph(graph.gm, [], False))
