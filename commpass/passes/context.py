"""A graph on its way through the passes, and where it ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.candidates import Options
from commpass.passes.chunk import Chunked
from commpass.passes.constants import ConstantInput
from commpass.passes.densities import Densities, Thinned
from commpass.passes.discover import GraphSite
from commpass.passes.hidden import Known
from commpass.passes.move import Moved
from commpass.passes.references import UNKNOWN, Weights
from commpass.passes.rewrite import StateInput
from commpass.passes.sample import EncodedValue
from commpass.passes.sizes import Limit
from commpass.passes.template import Decompositions
from commpass.plan import NOBODY, Grouped, Plan, PlannedSite, Simplification, Site, uncompressed
from commpass.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """A graph on its way: what goes in, and what the passes have found and chosen so far.
    ``stateless`` and ``weights`` say which of its collectives may keep state, as in ``discover``;
    ``unsupported_reason`` says why none of its collectives may be changed, whatever the policy
    says, and ``excluded`` why single sites are left alone, by the names that they have in the plan;
    ``kernels`` whether Inductor compiles it, which can then compile what sites share as well.
    ``adds_inputs`` says that whoever calls the graph can give it more inputs. ``operators`` says
    that whoever compiles the graph lets operators of our own stay in it. ``hook`` says that it is
    the one exchange of a hook, which has many graphs like it. ``hidden`` says of sites that were
    compiled before whether they are hidden behind what is computed, and ``hides`` whether others
    may be found to be so: only where ranks agree on it. ``densities`` are those that were agreed on
    before, of gradients that are selected from. ``own`` says whether rules may look for what this
    rank alone uses, likewise. ``given`` has what compressed sites encode, by name; ``sampled`` says
    of compressed sites, by name, why their real error is not measured; "" where it is."""

    gm: fx.GraphModule
    direction: str
    policy: Policy
    profile: Profile
    decompositions: Decompositions | None = None
    found: tuple[GraphSite, ...] = ()
    matched: tuple[int, ...] = ()
    simplified: tuple[Simplification, ...] = ()
    grouped: tuple[Grouped, ...] = ()
    thinned: Thinned = field(default_factory=Thinned)
    chunked: Chunked = field(default_factory=Chunked)
    options: tuple[Options, ...] = ()
    sites: tuple[PlannedSite, ...] | None = None
    stateless: str | None = NOBODY
    weights: Weights = UNKNOWN
    obstacle: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    kernels: bool = False
    operators: bool = False
    adds_inputs: bool = False
    hook: bool = False
    hidden: Known | None = None
    hides: bool = False
    densities: Densities | None = None
    own: bool = True
    limits: tuple[Limit, ...] = ()
    state: tuple[StateInput, ...] = ()
    constants: tuple[ConstantInput, ...] = ()
    given: dict[str, EncodedValue] = field(default_factory=dict)
    moved: Moved = field(default_factory=Moved)
    sampled: dict[str, str] = field(default_factory=dict)


@dataclass
class PassResult:
    """A graph at the end of the road. ``plan.fallback`` is set where the graph is the untouched
    one, and says why. ``options`` has what might have been chosen, by the name of the site, and
    ``state``, then ``constants`` what it takes as its last inputs; ``pinned`` says that its order
    must be kept, and ``limits`` for which sizes it is right; ``sampled`` and ``densities`` are the
    road's. ``failed``
    says of the sites because of which a pass failed why, and ``excluded`` of those that the plan
    leaves alone for that, or because the caller said so."""

    plan: Plan
    found: tuple[GraphSite, ...] = ()
    options: dict[str, Options] = field(default_factory=dict)
    times_ms: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    untouched: dict[fx.GraphModule, fx.Graph] = field(default_factory=dict)
    first: tuple[Site, ...] = ()
    state: tuple[StateInput, ...] = ()
    constants: tuple[ConstantInput, ...] = ()
    pinned: bool = False
    limits: tuple[Limit, ...] = ()
    densities: Densities = field(default_factory=dict)
    sampled: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)

    def copies(self) -> dict[fx.GraphModule, fx.Graph]:
        """The untouched graphs once more."""
        return {module: copied(graph) for module, graph in self.untouched.items()}

    def restore(self, why: str) -> None:
        """Puts the untouched graph back (law 7), because of ``why``."""
        for module, graph in self.untouched.items():
            module.graph = graph
            module.recompile()
        self.untouched, self.options = {}, {}
        self.state, self.constants, self.pinned = (), (), False
        self.limits, self.sampled, self.densities = (), {}, {}
        sites = tuple(uncompressed(site, why) for site in self.first)
        self.plan = self.plan.untouched(sites, why)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy in which new nodes get the names that they would get in the graph itself: plans name
    their sites by them."""
    made = copy.deepcopy(graph)
    names, known = made._graph_namespace, graph._graph_namespace
    names._used_names |= known._used_names
    names._base_count |= known._base_count
    return made
