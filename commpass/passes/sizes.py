"""The sizes for which a plan is valid. At sizes where a codec starts or stops gaining, the graph is
recompiled.

needs: a graph of symbolic sizes, and a chosen candidate for each of its sites.
gives: the sizes at which another decision starts. Once the ranks have agreed on the plan, Dynamo
guards that cause a recompile there.
changes: nothing in the graph.

All ranks of a group hold tensors of the same sizes here, so they cross such a size together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, free_unbacked_symbols

from commpass.costmodel import Profile
from commpass.passes.breakeven import break_even, explanation
from commpass.passes.candidates import nameless
from commpass.passes.fx import meta
from commpass.passes.graph_site import GraphSite
from commpass.passes.results import Limit, Options
from commpass.plan import PlannedSite, Site
from commpass.policy.rules import Allowed

MOST = 2
"""The maximum number of break-even sizes per group that cause a recompile. Those of the most sites
are kept.

Dynamo compiles the same code a limited number of times (torch._dynamo.config.recompile_limit is 8),
and then no longer uses this backend. The limit is per group, because ranks see sites of groups that
the other ranks are not in.
"""
NEAR = 1.1
"""The factor within which two byte counts may be the same break-even size."""


def limits(
    found: Sequence[GraphSite],
    options: Sequence[Options],
    allowed: Sequence[Allowed],
    plan: Sequence[PlannedSite],
    profile: Profile,
) -> dict[str, Limit]:
    """Return the limits of sites, by name. Forced and overlapped sites and those of unknown size
    have none."""
    gains = functools.cache(functools.partial(_gains_from, profile=profile))
    rows = zip(found, options, allowed, plan, strict=True)
    known = {site.name: _limit(each, its, terms, site, gains) for each, its, terms, site in rows}
    some = {name: limit for name, limit in known.items() if limit is not None}
    groups = {each.site.name: each.site.group for each in found}
    kept: set[tuple[str, str, int]] = set()
    for group in {*groups.values()}:
        said = Counter(_limit_text(limit) for name, limit in some.items() if groups[name] == group)
        kept |= {(group, *what) for what, _ in said.most_common(MOST)}  # ties: the first one
    return {n: limit for n, limit in some.items() if (groups[n], *_limit_text(limit)) in kept}


def _limit_text(limit: Limit) -> tuple[str, int]:
    return str(limit.nbytes), limit.least


def _limit(
    found: GraphSite,
    options: Options,
    allowed: Allowed,
    site: PlannedSite,
    gains_from: Callable[[Site, tuple[tuple[str, str], ...]], float],
) -> Limit | None:
    if not site.dynamic or site.bytes < 0 or site.uneven or site.pairwise:
        return None
    if allowed.force or site.hidden or not options.possible:
        return None
    fake = meta.tensor(found.input)
    nbytes: Any = fake.numel() * fake.dtype.itemsize if fake is not None else 0
    if not isinstance(nbytes, torch.SymInt) or not _may_be_guarded(nbytes):
        return None
    ways = sorted({(each.algorithm, each.codec) for each in options.possible})
    size = gains_from(nameless(found.site), tuple(ways))
    if not 0 < size < inf:
        return None
    # The decision for this size is exact, while the break-even size has a tolerance. If the
    # decision contradicts the break-even size, there are several such sizes.
    if not (site.bytes * NEAR >= size if site.compressed else site.bytes <= size * NEAR):
        return None
    least = min(ceil(size), site.bytes) if site.compressed else max(ceil(size), site.bytes + 1)
    decided = nbytes.node.shape_env.bound_sympy(nbytes.node.expr)
    if decided.lower >= least or decided.upper < least:
        return None
    return Limit(nbytes, least, site.compressed)


def _gains_from(site: Site, ways: tuple[tuple[str, str], ...], profile: Profile) -> float:
    """Return the bytes from which on any of the given algorithms and codecs gains."""
    sizes = [break_even(site, algorithm, codec, profile) for algorithm, codec in ways]
    return min((size for size in sizes if size is not None), default=inf)


def _may_be_guarded(size: torch.SymInt) -> bool:
    """Whether other sizes may cause a recompile.

    Not if the user's bounds forbid it (``mark_dynamic`` with ``min`` or ``max``, ``torch.export``),
    or if sizes depend on values.
    """
    env, symbols = size.node.shape_env, size.node.expr.free_symbols
    if env.frozen or not size.node.has_hint() or free_unbacked_symbols(size):
        return False
    return not any(
        isinstance(bound, StrictMinMaxConstraint) and length.node.expr.free_symbols & symbols
        for tracked in env.tracked_fakes or ()
        for length, bound in _bounds(tracked)
    )


def _bounds(tracked: Any) -> list[tuple[torch.SymInt, Any]]:
    """Return the symbolic lengths of a Dynamo input, each with the user's constraint."""
    lengths = getattr(tracked.fake, "shape", ())
    bounds = getattr(tracked.symbolic_context, "constraint_sizes", ())
    return [
        pair for pair in zip(lengths, bounds, strict=False) if isinstance(pair[0], torch.SymInt)
    ]


def with_limits(plan: Sequence[PlannedSite], limits: dict[str, Limit]) -> tuple[PlannedSite, ...]:
    """Return the plan with the limits added to the reasons."""
    return tuple(
        _with_reason(site, limits[site.name]) if site.name in limits else site for site in plan
    )


def _with_reason(site: PlannedSite, limit: Limit) -> PlannedSite:
    words = explanation(site, limit.least)
    end = f"while {words}, else" if limit.above else f"until {words}, then"
    reason = f"{site.reason}; holds {end} compiled anew"
    return dataclasses.replace(site, reason=reason, holds=limit.key)
