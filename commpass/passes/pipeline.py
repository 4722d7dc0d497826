"""The road of a graph: every pass, in order, in one place.

A pass is a plain function from one stage of the road to the next. What it needs, gives and changes
stands at the top of its file. Each can be left out by name with ``Policy(skip=...)``.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from commpass.costmodel import Profile
from commpass.errors import PolicyError, nearest
from commpass.passes.decide import decide
from commpass.passes.discover import Found, discover, graph_modules
from commpass.passes.lower import lower
from commpass.passes.rewrite import Kept, rewrite
from commpass.passes.simplify import simplify
from commpass.passes.template import Decompositions
from commpass.passes.terms import forget, matched, terms_of
from commpass.passes.verify import verify
from commpass.plan import NOBODY, Plan, PlannedSite, Simplification, Site, left_alone
from commpass.policy import Policy, Terms


@dataclass(frozen=True, kw_only=True)
class Road:
    """A graph on its way: what goes in, and what the passes have found and decided so far.
    ``obstacle`` says why none of its collectives may be changed, whatever the policy says;
    ``kernels`` whether Inductor compiles it, which can then compile what sites share as well."""

    gm: fx.GraphModule
    direction: str
    policy: Policy
    profile: Profile
    decompositions: Decompositions | None = None
    found: tuple[Found, ...] = ()
    terms: tuple[Terms, ...] = ()
    matched: tuple[int, ...] = ()
    simplified: tuple[Simplification, ...] = ()
    sites: tuple[PlannedSite, ...] | None = None
    stateless: str | None = NOBODY
    obstacle: str | None = None
    kernels: bool = False
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A pass by name. ``numerics`` says whether it may change the numbers that a graph computes;
    the road ends where a ``needed`` pass is left out."""

    name: str
    run: Callable[[Road], Road]
    numerics: bool = False
    needed: bool = False


def _discover(road: Road) -> Road:
    found = tuple(discover(road.gm, road.direction, road.stateless))
    if (why := road.obstacle) is not None:
        found = tuple(
            dataclasses.replace(f, site=dataclasses.replace(f.site, obstacle=why)) for f in found
        )
    forget(found)
    terms, rules = terms_of(found, road.policy), matched(found, road.policy)
    return dataclasses.replace(road, found=found, terms=terms, matched=rules)


def _simplify(road: Road) -> Road:
    if not road.found or road.policy.off or road.obstacle is not None:
        return road
    applied = simplify(road.gm, road.found, road.policy, road.profile)
    found = tuple(discover(road.gm, road.direction, road.stateless))
    terms = terms_of(found, road.policy)
    return dataclasses.replace(road, simplified=applied, found=found, terms=terms)


def _decide(road: Road) -> Road:
    sites = decide(
        (found.site for found in road.found),
        road.policy,
        road.profile,
        road.terms,
        kernels=road.kernels,
    )
    return dataclasses.replace(road, sites=sites)


def _rewrite(road: Road) -> Road:
    return dataclasses.replace(
        road, kept=rewrite(road.found, road.sites or (), road.decompositions)
    )


def _lower(road: Road) -> Road:
    lower(road.gm, road.sites or (), road.decompositions)
    return road


def _verify(road: Road) -> Road:
    verify(road.gm, road.sites or ())
    return road


PASSES: tuple[Pass, ...] = (
    Pass("discover", _discover, needed=True),
    Pass("simplify", _simplify, numerics=True),
    Pass("decide", _decide, needed=True),
    Pass("rewrite", _rewrite, numerics=True, needed=True),
    Pass("lower", _lower, numerics=True, needed=True),
    Pass("verify", _verify),
)


@dataclass
class Outcome:
    """A graph at the end of the road. ``plan.fallback`` is set where the graph is the untouched
    one, and says why. ``kept`` is the state that it takes as its last inputs."""

    plan: Plan
    found: tuple[Found, ...] = ()
    times_ms: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    untouched: dict[fx.GraphModule, fx.Graph] = field(default_factory=dict)
    first: tuple[Site, ...] = ()
    kept: tuple[Kept, ...] = ()

    def restore(self, why: str) -> None:
        """Puts the untouched graph back (law 7), because of ``why``."""
        for module, graph in self.untouched.items():
            module.graph = graph
            module.recompile()
        self.untouched = {}
        self.kept = ()
        sites = tuple(left_alone(site, why) for site in self.first)
        self.plan = dataclasses.replace(self.plan, sites=sites, simplified=(), fallback=why)


def check_skip(policy: Policy) -> None:
    """Raises PolicyError if ``policy.skip`` names a pass that does not exist."""
    names = [p.name for p in PASSES]
    for name in policy.skip:
        if name not in names:
            raise PolicyError(f"skip: no pass {name!r}{nearest(name, names)}")


Watch = Callable[[str, Road], None]


def run(
    road: Road, graph: str, passes: tuple[Pass, ...] | None = None, watch: Watch | None = None
) -> Outcome:
    """Takes a graph along the road, in place. All or nothing: if a pass fails, the graph is the
    untouched one again. ``watch`` is called with the name of each pass that has run."""
    outcome = Outcome(
        Plan(
            graph=graph,
            direction=road.direction,
            policy=road.policy.name,
            profile=road.profile.name,
        )
    )
    for step in PASSES if passes is None else passes:
        if step.name in road.policy.skip:
            if step.needed:
                outcome.restore(f"the policy skips pass {step.name!r}")
                break
            continue
        start = time.perf_counter()
        if step.numerics and not outcome.untouched:
            outcome.untouched = _copies(road)
        try:
            road = step.run(road)
        except Exception as error:
            outcome.error = error
            said = str(error).strip().partition("\n")[0]  # torch goes on with hints and addresses
            outcome.restore(f"pass {step.name!r} failed: {type(error).__name__}: {said}")
            return outcome
        finally:
            outcome.times_ms[step.name] = (time.perf_counter() - start) * 1e3
            outcome.found = road.found
        outcome.kept = road.kept
        outcome.first = outcome.first or tuple(found.site for found in road.found)
        outcome.plan = dataclasses.replace(
            outcome.plan, sites=road.sites or (), simplified=road.simplified, matched=road.matched
        )
        if watch is not None:
            watch(step.name, road)
    return outcome


def _copies(road: Road) -> dict[fx.GraphModule, fx.Graph]:
    """Copies of the graphs, where there is anything that could be changed."""
    if not road.found:
        return {}
    return {module: copy.deepcopy(module.graph) for _, module in graph_modules(road.gm)}
