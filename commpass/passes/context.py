"""What passes work on: the input of a run (GraphInput) and its results so far (PassContext)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from commpass.costmodel import Profile
from commpass.passes.fx.create import copy_of_graph
from commpass.passes.fx.parse import graph_modules
from commpass.passes.fx.tracing import Decompositions
from commpass.passes.graph_site import GraphSite
from commpass.passes.references import UNKNOWN, Weights
from commpass.passes.results import (
    Chunked,
    ConstantInput,
    DecidedDensities,
    Densities,
    EncodedValue,
    Known,
    Limit,
    Moved,
    Options,
    StateInput,
)
from commpass.passes.single_kernel import PeerMemoryOf, no_peer_memory
from commpass.plan import NOBODY, Plan, Site, uncompressed
from commpass.policy import Policy


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """A graph, and all that the passes need to know about it.

    - ``stateless`` and ``weights``: which collectives may keep state, as in ``discover``.
    - ``unsupported_reason``: why no collective may be changed, whatever the policy says, or None.
    - ``excluded``: why single sites stay uncompressed, by their names in the plan.
    - ``kernels``: whether Inductor compiles the graph. It can then compile code that sites share.
    - ``adds_inputs``: whether the caller of the graph can pass additional inputs.
    - ``operators``: whether the inner compiler accepts operators of commpass in the graph.
    - ``hook``: whether the graph is an exchange of a hook, which has many similar graphs.
    - ``hidden``: for sites compiled earlier, whether computation overlaps them.
    - ``hides``: whether other sites may be found overlapped. Requires that the ranks agree on it.
    - ``densities``: agreed densities of gradients that are selected from.
    - ``peer_memory``: returns the symmetric memory of a group, equal on all of its ranks.
    - ``own``: whether rules may look for what only this rank uses. Requires agreement as well.
    """

    gm: fx.GraphModule
    direction: str
    policy: Policy
    profile: Profile
    decompositions: Decompositions | None = None
    stateless: str | None = NOBODY
    weights: Weights = UNKNOWN
    unsupported_reason: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    kernels: bool = False
    operators: bool = False
    adds_inputs: bool = False
    hook: bool = False
    hidden: Known | None = None
    hides: bool = False
    densities: Densities | None = None
    peer_memory: PeerMemoryOf = no_peer_memory
    own: bool = True


@dataclass
class PassResult:
    """A plan and how it was made: what reports read, also of exchanges without a graph.

    - ``plan``: its ``fallback`` is set, with the reason, if the graph is the untouched one.
    - ``found``: the sites, in graph order. ``options``: their candidates, by name.
    - ``times_ms``: the time of each pass, of all rounds together.
    """

    plan: Plan
    found: tuple[GraphSite, ...] = ()
    options: dict[str, Options] = field(default_factory=dict)
    times_ms: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None


@dataclass
class PassContext(PassResult):
    """A graph on its way through the passes, which write their results here.

    - ``first``: the sites of the untouched graph; ``untouched``: copies of its graphs.
    - ``encoded``: what compressed sites encode, by name.
    - ``state``, then ``constants``: the graph's last inputs.
    - ``limits``: the sizes for which the graph is valid.
    - ``sampled``: why the real error of a compressed site is not measured, by name; "" if it is.
    - ``failed``: the errors of sites that made a pass fail, by name.
    - ``sites_changed``: whether a pass has changed the collectives, so that ``found`` is outdated.
    """

    input: GraphInput = field(kw_only=True)
    first: tuple[Site, ...] = ()
    untouched: dict[fx.GraphModule, fx.Graph] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    sites_changed: bool = False
    densities: DecidedDensities = field(default_factory=DecidedDensities)
    chunked: Chunked = field(default_factory=Chunked)
    limits: tuple[Limit, ...] = ()
    encoded: dict[str, EncodedValue] = field(default_factory=dict)
    state: tuple[StateInput, ...] = ()
    constants: tuple[ConstantInput, ...] = ()
    moved: Moved = field(default_factory=Moved)
    sampled: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, input: GraphInput, graph: str) -> PassContext:
        """Return a context without results. ``graph`` is the graph's name in its plan."""
        plan = Plan(
            graph=graph,
            direction=input.direction,
            policy=input.policy.name,
            profile=input.profile.name,
        )
        return cls(plan, input=input)

    @property
    def gm(self) -> fx.GraphModule:
        return self.input.gm

    @property
    def excluded(self) -> Mapping[str, str]:
        """Why sites were excluded, after a failure or at the caller's request, by name."""
        return self.input.excluded

    @property
    def changeable(self) -> bool:
        """Whether there are collectives, and they may be changed."""
        given = self.input
        return bool(self.found) and not given.policy.off and given.unsupported_reason is None

    def plan_with(self, **fields: Any) -> None:
        """Set fields of the plan."""
        self.plan = dataclasses.replace(self.plan, **fields)

    def copies(self) -> dict[fx.GraphModule, fx.Graph]:
        """Copy the untouched graphs."""
        return {module: copy_of_graph(graph) for module, graph in self.untouched.items()}

    def keep_untouched(self) -> None:
        """Copy the graphs if they contain sites and were not copied yet."""
        if self.found and not self.untouched:
            modules = (module for _, module in graph_modules(self.gm))
            self.untouched = {module: copy_of_graph(module.graph) for module in modules}

    def restore(self, why: str) -> None:
        """Restore the untouched graph (law 7). ``why`` becomes the plan's fallback reason."""
        for module, graph in self.untouched.items():
            module.graph = graph
            module.recompile()
        sites = tuple(uncompressed(site, why) for site in self.first)
        reset = PassContext(
            self.plan.untouched(sites, why),
            input=self.input,
            found=self.found,
            first=self.first,
            times_ms=self.times_ms,
            error=self.error,
            failed=self.failed,
        )
        vars(self).update(vars(reset))
