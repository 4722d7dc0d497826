"""The state that passes hand on (PassContext) and the result of a pipeline run (PassResult)."""

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
from commpass.passes.fx.tracing import Decompositions
from commpass.passes.hidden import Known
from commpass.passes.move import Moved
from commpass.passes.references import UNKNOWN, Weights
from commpass.passes.rewrite import StateInput
from commpass.passes.sample import EncodedValue
from commpass.passes.sizes import Limit
from commpass.plan import NOBODY, Grouped, Plan, PlannedSite, Simplification, Site, uncompressed
from commpass.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """The input of the passes, and what they have found and chosen so far.

    - ``stateless`` and ``weights``: which collectives may keep state, as in ``discover``.
    - ``obstacle``: why no collective may be changed, whatever the policy says, or None.
    - ``excluded``: why single sites stay uncompressed, by their names in the plan.
    - ``kernels``: whether Inductor compiles the graph. It can then compile code that sites share.
    - ``adds_inputs``: whether the caller of the graph can pass additional inputs.
    - ``operators``: whether the inner compiler accepts operators of commpass in the graph.
    - ``hook``: whether the graph is the single exchange of a hook, which has many similar graphs.
    - ``hidden``: for sites compiled earlier, whether computation overlaps them.
    - ``hides``: whether other sites may be found overlapped. Requires that the ranks agree on it.
    - ``densities``: agreed densities of gradients that are selected from.
    - ``own``: whether rules may look for what only this rank uses. Requires agreement as well.
    - ``given``: what compressed sites encode, by name.
    - ``sampled``: why the real error of a compressed site is not measured, by name; "" if it is.
    """

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
    """The result of the passes.

    - ``plan``: its ``fallback`` is set, with the reason, if the graph is the untouched one.
    - ``options``: the candidates of each site, by name.
    - ``state``, then ``constants``: the graph's last inputs.
    - ``pinned``: whether the order of the graph must be kept.
    - ``limits``: the sizes for which the graph is valid.
    - ``sampled`` and ``densities``: as in the context.
    - ``failed``: the errors of sites that made a pass fail, by name.
    - ``excluded``: why sites were excluded, for such an error or at the caller's request.
    """

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
        """Copy the untouched graphs."""
        return {module: copied(graph) for module, graph in self.untouched.items()}

    def restore(self, why: str) -> None:
        """Restore the untouched graph (law 7). ``why`` becomes the plan's fallback reason."""
        for module, graph in self.untouched.items():
            module.graph = graph
            module.recompile()
        self.untouched, self.options = {}, {}
        self.state, self.constants, self.pinned = (), (), False
        self.limits, self.sampled, self.densities = (), {}, {}
        sites = tuple(uncompressed(site, why) for site in self.first)
        self.plan = self.plan.untouched(sites, why)


def copied(graph: fx.Graph) -> fx.Graph:
    """Copy a graph so that new nodes get the same names as in the original. Plans refer to sites by
    these names."""
    made = copy.deepcopy(graph)
    names, known = made._graph_namespace, graph._graph_namespace
    names._used_names |= known._used_names
    names._base_count |= known._base_count
    return made
