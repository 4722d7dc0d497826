"""decide: sites + policy + profile -> plan.

needs: the sites of a graph.
gives: a plan with one chosen candidate for each, *leave it alone* scored like the others, and the reason in words.
changes: nothing. A pure function: same inputs, same plan, on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from commpass.codecs import FLOATS, codec
from commpass.collectives import REDUCE_OPS, Algorithm, algorithms_of
from commpass.costmodel import KINDS, Profile
from commpass.plan import PlannedSite, Site, left_alone
from commpass.policy import Policy, Terms


def decide(sites: Iterable[Site], policy: Policy, profile: Profile) -> tuple[PlannedSite, ...]:
    """The chosen candidate of every site."""
    return tuple(_decide(site, policy.terms(site)[0], profile) for site in sites)


def _decide(site: Site, terms: Terms, profile: Profile) -> PlannedSite:
    plain = _leave(site, profile)
    obstacle = site.obstacle or _obstacle(site, terms)
    if obstacle:
        return dataclasses.replace(plain, reason=obstacle)
    candidates, refused = _candidates(site, terms, profile, plain)
    if not candidates:
        return dataclasses.replace(plain, reason="; ".join(refused))
    best = min(candidates, key=lambda c: (c.predicted_us, c.wire_bytes, c.codec, c.algorithm))
    what = f"{best.codec} by {best.algorithm}"
    times = f"{best.predicted_us:,.0f} us instead of {plain.plain_us:,.0f} us on {profile.name}"
    if terms.force:
        return dataclasses.replace(best, reason=f"{terms.source} forces {what}: {times}")
    gain = plain.plain_us - best.predicted_us
    if gain <= profile.margin * plain.plain_us:
        why = "no gain" if gain <= 0 else f"a gain below the model's margin of {profile.margin:.0%}"
        return dataclasses.replace(plain, reason=f"{why}: {what} would take {times}")
    return dataclasses.replace(best, reason=f"{what}: {times} ({terms.source})")


def _leave(site: Site, profile: Profile) -> PlannedSite:
    """*Leave it alone*, with its time."""
    size = max(site.bytes, 0)
    us = profile.link_of(site.group_label).us(site.kind, size, site.group_size) if site.kind in KINDS else 0.0
    return left_alone(site, "", round(us, 3))


def _obstacle(site: Site, terms: Terms) -> str | None:
    """Why a site cannot, or may not, be compressed."""
    if site.group_size == 1:
        return "the group has one rank: nothing is sent"
    if not algorithms_of(site.kind):
        return f"no algorithm carries out {site.kind} with a codec"
    if site.reduce_op is not None and site.reduce_op not in REDUCE_OPS:
        return f"reduce op {site.reduce_op!r} is no sum: codes cannot be combined ({' and '.join(REDUCE_OPS)} can)"
    if getattr(torch, site.dtype, None) not in FLOATS:
        return f"{site.dtype} values must arrive exactly"
    if not terms.codecs:
        return f"{terms.source} allows no codec here"
    if site.bytes == 0:
        return "it has no elements"
    if site.bytes < 0:
        return "its size is not known before it runs"
    return None


def _candidates(site: Site, terms: Terms, profile: Profile, plain: PlannedSite) -> tuple[list[PlannedSite], list[str]]:
    """Every (codec, algorithm) that the terms allow, scored; and why others are out."""
    found: list[PlannedSite] = []
    refused: list[str] = []
    dtype = getattr(torch, site.dtype)
    numel = site.bytes // dtype.itemsize
    link = profile.link_of(site.group_label)
    for spec in terms.codecs:
        coder = codec(spec)
        if coder.state is not None:
            refused.append(f"{coder.spec} needs {coder.state}, which no algorithm keeps")
            continue
        for algorithm in _allowed(site.kind, terms):
            error = round(coder.relative_error() * math.sqrt(algorithm.encodes), 6)
            if terms.max_error is not None and error > terms.max_error:
                budget = f"the budget of {terms.max_error:.3%} ({terms.source})"
                refused.append(f"{coder.spec} by {algorithm.name}: error {error:.3%} is above {budget}")
                continue
            work = algorithm.work(coder, numel, dtype, site.group_size)
            us = sum(link.us(kind, size, site.group_size) for kind, size in work.exchanges)
            us += profile.kernels.us(coder.spec, work.encoded, work.decoded, kernels=2 * algorithm.encodes)
            found.append(
                dataclasses.replace(
                    plain, codec=coder.spec, algorithm=algorithm.name, wire_bytes=work.wire_bytes,
                    predicted_us=round(us, 3), error=error,
                )
            )  # fmt: skip
    return found, refused


def _allowed(kind: str, terms: Terms) -> list[Algorithm]:
    """The named algorithms that this kind has; where none of them is one of its kind, the naming was not about it."""
    have = algorithms_of(kind)
    return [a for a in have if a.name in terms.algorithms] or list(have)
