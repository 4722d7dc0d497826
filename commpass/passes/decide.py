"""decide: sites + policy + profile -> plan.

needs: the sites of a graph.
gives: a plan with one chosen candidate for each, *leave it alone* scored like the others, and the
reason in words.
changes: nothing. A pure function: same inputs, same plan, on every rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from commpass.codecs import FLOATS, Codec, codec
from commpass.collectives import (
    REDUCE_OPS,
    Algorithm,
    Hop,
    Payload,
    Request,
    algorithm,
    algorithms_of,
    own,
)
from commpass.costmodel import KINDS, Link, Profile
from commpass.errors import PolicyError
from commpass.plan import ROWS, PlannedSite, Site, left_alone
from commpass.policy import Policy, Terms


def decide(
    sites: Iterable[Site],
    policy: Policy,
    profile: Profile,
    terms: Sequence[Terms] | None = None,
    *,
    kernels: bool = False,
) -> tuple[PlannedSite, ...]:
    """The chosen candidate of every site; ``terms`` are what each is allowed, if not what the
    policy says of it. ``kernels`` says whether sites may share kernels that nobody asked for."""
    sites = tuple(sites)
    allowed = [policy.terms(site)[0] for site in sites] if terms is None else terms
    both = list(zip(sites, allowed, strict=True))
    plan = [_decide(site, its, profile, policy.reassociate) for site, its in both]
    return _lowered(plan, [its.lowering for its in allowed], kernels)


SHARE = 3
"""Sites of a graph that do the same before they share kernels. One compiles no quicker with kernels
than inline, and inline its codes fuse with what makes the values (benchmarks/compile_time.py)."""


def _lowered(
    plan: Sequence[PlannedSite], named: Sequence[str | None], kernels: bool
) -> tuple[PlannedSite, ...]:
    """The plan with what encode and decode become: as is named, else kernels where several sites
    of fixed sizes on a CPU do the same."""
    alike = Counter(map(_work_of, plan))

    def chosen(site: PlannedSite, name: str | None) -> str:
        if not site.compressed:
            return ""
        if codec(site.codec).dynamic:  # its sizes depend on values: no kernel has them fixed
            return "inline"
        fixed = all(isinstance(size, int) for size in site.shape)
        shared = kernels and fixed and site.device == "cpu" and alike[_work_of(site)] >= SHARE
        return name or ("kernel" if shared else "inline")

    pairs = zip(plan, named, strict=True)
    return tuple(dataclasses.replace(site, lowering=chosen(site, name)) for site, name in pairs)


def _work_of(site: PlannedSite) -> tuple[Any, ...]:
    """What two sites must have in common to compute the same."""
    return (
        *(site.kind, site.codec, site.algorithm, site.reduce_op, site.group_size),
        *(site.dtype, site.shape, site.splits),
    )


def _decide(site: Site, terms: Terms, profile: Profile, reassociate: bool) -> PlannedSite:
    plain = _leave(site, profile)
    obstacle = _alone(site) or site.obstacle or _obstacle(site, terms)
    if obstacle:
        return dataclasses.replace(plain, reason=obstacle)
    candidates, refused = _candidates(site, terms, profile, plain, reassociate)
    if not candidates:
        lacking = [why for why in refused if site.stateless and site.stateless in why]
        if terms.force and lacking:
            where = site.module or "the root module"
            raise PolicyError(
                f"{terms.source} forces a codec on {site.kind} {site.name} of {where}: {lacking[0]}"
            )
        return dataclasses.replace(plain, reason="; ".join(refused))
    best = min(candidates, key=lambda c: (c.predicted_us, c.wire_bytes, c.codec, c.algorithm))
    what = f"{best.codec} by {best.algorithm}" + (
        f", sums in the {best.domain} domain" if best.domain else ""
    )
    times = f"{best.predicted_us:,.0f} us instead of {plain.plain_us:,.0f} us on {profile.name}"
    times += (
        f" for {ROWS:,} entries from each rank to each, since ranks may hold different numbers"
        if site.uneven
        else ""
    )
    if terms.force:
        return dataclasses.replace(best, reason=f"{terms.source} forces {what}: {times}")
    gain = plain.plain_us - best.predicted_us
    if gain <= profile.margin * plain.plain_us:
        why = "no gain" if gain <= 0 else f"a gain below the model's margin of {profile.margin:.0%}"
        return dataclasses.replace(plain, reason=f"{why}: {what} would take {times}")
    return dataclasses.replace(best, reason=f"{what}: {times} ({terms.source})")


def _leave(site: Site, profile: Profile) -> PlannedSite:
    """*Leave it alone*, with its time."""
    known = getattr(torch, site.dtype, None) in FLOATS
    payload = _scored(site)[0] if site.uneven and known else None
    size = payload.numel * payload.dtype.itemsize if payload else max(site.bytes, 0)
    us = _link(site, profile).us(site.kind, size, site.group_size) if site.kind in KINDS else 0.0
    return left_alone(site, "", round(us, 3))


def _alone(site: Site) -> str | None:
    return "the group has one rank: nothing is sent" if site.group_size == 1 else None


def _obstacle(site: Site, terms: Terms) -> str | None:
    """Why a site cannot, or may not, be compressed."""
    if not algorithms_of(site.kind):
        return f"no algorithm carries out {site.kind} with a codec"
    if site.reduce_op is not None and site.reduce_op not in REDUCE_OPS:
        return (
            f"reduce op {site.reduce_op!r} is no sum: codes cannot be combined"
            f" ({' and '.join(REDUCE_OPS)} can)"
        )
    if getattr(torch, site.dtype, None) not in FLOATS:
        return f"{site.dtype} values must arrive exactly"
    if not terms.codecs:
        return f"{terms.source} allows no codec here"
    if terms.named and not any(own(site.kind, spec) for spec in terms.algorithms):
        have = ", ".join(each.name for each in algorithms_of(site.kind))
        return (
            f"{terms.source} names {', '.join(terms.algorithms)}, but {site.kind} has only {have}"
        )
    if site.width == 0 or (site.bytes == 0 and not site.uneven):
        return "it has no elements"
    if site.bytes < 0 and not site.uneven:
        return "its size is not known before it runs"
    return None


def _candidates(
    site: Site, terms: Terms, profile: Profile, plain: PlannedSite, reassociate: bool
) -> tuple[list[PlannedSite], list[str]]:
    """Every (codec, algorithm) that the terms allow, scored; and why others are out."""
    found: list[PlannedSite] = []
    refused: list[str] = []
    allowed = _allowed(site, terms, profile)
    for spec in terms.codecs:
        coder = codec(spec)
        for chosen in allowed:
            if obstacle := _misfit(site, coder, chosen, reassociate):
                refused.append(obstacle)
                continue
            error = round(chosen.error(coder, site.group_size), 6)
            if terms.max_error is not None and error > terms.max_error:
                budget = f"the budget of {terms.max_error:.3%} ({terms.budget})"
                refused.append(
                    f"{coder.spec} by {chosen.spec}: error {error:.3%} is above {budget}"
                )
                continue
            work = chosen.work(coder, *_scored(site))
            us = sum(_hop_us(hop, site, profile) for hop in work.hops)
            us += profile.kernels.us(coder.spec, work.encoded, work.decoded, kernels=work.kernels)
            real = chosen.work(coder, _payload(site), request(site)) if site.bytes >= 0 else None
            found.append(
                dataclasses.replace(
                    plain,
                    codec=coder.spec,
                    algorithm=chosen.spec,
                    wire_bytes=real.wire_bytes if real else -1,
                    dynamic_bytes=real.dynamic_bytes if real else 0,
                    domain=chosen.domain(coder),
                    predicted_us=round(us, 3),
                    error=error,
                )
            )
    return found, list(dict.fromkeys(refused))


def _misfit(site: Site, coder: Codec, chosen: Algorithm, reassociate: bool) -> str | None:
    """Why an algorithm cannot, or may not, carry out a site with a codec."""
    if obstacle := chosen.obstacle(coder, site.group_size):
        return obstacle
    if chosen.stateful and site.stateless:
        return f"{coder.spec} needs {coder.state}, but {site.stateless}"
    if site.reduce_op is not None and coder.lossless and not reassociate:
        return (
            f"{coder.spec} by {chosen.spec} sums in another order, which reassociate=False forbids"
        )
    return None


def request(site: Site) -> Request:
    """What a site asks for, as seen by any of its ranks."""
    sent, received = site.splits or (None, None)
    return Request(
        site.group,
        site.group_size,
        0,
        site.reduce_op or "sum",
        0,
        sent,
        received,
        peer=site.peer or 0,
        tag=site.tag,
    )


def _payload(site: Site) -> Payload:
    dtype = getattr(torch, site.dtype)
    return Payload(max(site.bytes, 0) // dtype.itemsize, site.width, dtype)


def _scored(site: Site) -> tuple[Payload, Request]:
    """What times are predicted for: the site itself, or where ranks may hold different sizes one
    that all ranks know."""
    if not site.uneven:
        return _payload(site), request(site)
    dtype = getattr(torch, site.dtype)
    rows = (ROWS,) * site.group_size
    unknown = not all(isinstance(size, int) for some in site.splits or () for size in some)
    asked = dataclasses.replace(
        request(site), sent=rows, received=rows, unknown=unknown, alike=False
    )
    return Payload(ROWS * site.group_size * site.width, site.width, dtype), asked


def _link(site: Site, profile: Profile) -> Link:
    return profile.link_of(site.group_label, *site.group_labels, ranks=site.global_ranks)


def _hop_us(hop: Hop, site: Site, profile: Profile) -> float:
    link = _link(site, profile)
    if (
        hop.inside
        and profile.inside is not None
        and _on_one_host((hop.peers or 0) + 1, site, profile)
    ):
        link = profile.inside
    return link.us(hop.kind, hop.leaving, site.group_size, hop.peers)


def _on_one_host(many: int, site: Site, profile: Profile) -> bool:
    """Whether each so many ranks that follow one another in a group are on one host; as the
    algorithm says, if the profile does not know."""
    return not profile.node or profile.on_each_host(
        site.global_ranks
    ) % many == 0 < profile.on_each_host(site.global_ranks)


def _allowed(site: Site, terms: Terms, profile: Profile) -> list[Algorithm]:
    """The named algorithms that this kind has. Where none is one of its kind: all of its kind, if
    the policy named them for every site alike; none, if the nearest word did."""
    found = []
    for spec in terms.algorithms:
        if (chosen := own(site.kind, spec)) is None:
            continue
        if chosen.name == "hierarchical" and "node=" not in spec and profile.node > 1:
            chosen = algorithm(site.kind, spec, node=profile.on_each_host(site.global_ranks) or 1)
        found.append(chosen)
    return found if found or terms.named else list(algorithms_of(site.kind))
