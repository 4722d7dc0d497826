"""choose: candidates + profile -> plan.

needs: the options of every site of a graph, and the graph's timeline.
gives: a plan with one chosen candidate per site, and the reason as text.
changes: nothing. A pure function: same inputs, same plan, on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from commpass.codecs import codec
from commpass.costmodel import Profile
from commpass.errors import PolicyError
from commpass.lowering import cpu, has_kernels
from commpass.lowering.chain import Chain, Encode
from commpass.passes.candidates import together_us
from commpass.passes.context import PassContext
from commpass.passes.divide import SURE
from commpass.passes.hidden import Schedule, allow_hiding, initial_schedule
from commpass.passes.results import Known, Options
from commpass.passes.simplify.reasons import with_rules
from commpass.passes.single_kernel import why_no_single_kernel
from commpass.passes.sizes import limits, with_limits
from commpass.plan import ROWS, SINGLE_KERNEL, Candidate, PlannedSite, Site, planned
from commpass.policy.rules import Allowed

SHARE = 3
"""How many sites of a graph must do the same work before they share kernels.

One site compiles no faster with kernels than inline, and inline its encode fuses with the producer
of its values (benchmarks/compile_time.py).
"""


def run(context: PassContext) -> None:
    """Choose a candidate of every site, and find the sizes for which the choice is valid."""
    given, found, options = context.input, context.found, tuple(context.options.values())
    policy, profile = given.policy, given.profile
    allowed = [each.allowed for each in found]
    timeline = None
    timed = given.hides and policy.skip_overlapped and given.unsupported_reason is None
    pairs = zip(options, allowed, strict=True)
    if timed and any(its.possible and not terms.force for its, terms in pairs):
        timeline = initial_schedule(given.gm, found, policy, profile, given.peer_memory)
    plan = choose(
        [each.site for each in found],
        options,
        allowed,
        profile,
        kernels=given.kernels,
        hook=given.hook,
        known=given.hidden if policy.skip_overlapped else None,
        timeline=timeline,
    )
    ends = limits(found, options, allowed, plan, profile)
    context.limits = tuple(ends.values())
    chosen = map(context.chunked.with_reason, with_limits(plan, ends))
    starts = [each.call.node for each in found]
    context.plan_with(sites=tuple(map(with_rules, chosen, starts)))


def choose(
    sites: Sequence[Site],
    options: Sequence[Options],
    allowed: Sequence[Allowed],
    profile: Profile,
    *,
    kernels: bool = False,
    hook: bool = False,
    timeline: Schedule | None = None,
    known: Known | None = None,
) -> tuple[PlannedSite, ...]:
    """Choose the candidate of every site.

    ``kernels`` says whether sites may share kernels that were not requested; the single site of a
    ``hook`` shares them with other graphs. A site that is ``known`` to be overlapped, or not, stays
    so. For other sites the end of the graph decides, if ``timeline`` is given.
    """
    rows = zip(sites, options, allowed, strict=True)
    plan = [_planned(site, its, terms, profile) for site, its, terms in rows]
    if any(site.compressed for site in plan):
        pairs = zip(sites, options, strict=True)
        alone = [
            planned(site, its.uncompressed, "", its.uncompressed.predicted_us)
            for site, its in pairs
        ]
        plan = _leave_coalesced(plan, alone, allowed, profile)
        if known is not None:
            plan = allow_hiding(plan, alone, allowed, known, timeline)
    return _lowered(plan, [terms.lowering for terms in allowed], kernels, 1 if hook else SHARE)


def _planned(site: Site, options: Options, allowed: Allowed, profile: Profile) -> PlannedSite:
    alone = options.uncompressed

    def leave(reason: str) -> PlannedSite:
        words = "; ".join(filter(None, (reason, allowed.lossless_only)))
        return planned(site, alone, words, alone.predicted_us)

    if options.unsupported_reason:
        return planned(site, alone, options.unsupported_reason, alone.predicted_us)
    if not options.possible:
        lacking = [why for why in options.refused if site.stateless and site.stateless in why]
        if allowed.force and lacking:
            where = site.module or "the root module"
            raise PolicyError(
                f"{allowed.source} forces a codec on {site.kind} {site.name} of {where}:"
                f" {lacking[0]}"
            )
        return leave("; ".join(options.refused))
    best = _with_fewest_chunks(options.possible)
    what = f"{best.codec} by {best.algorithm}"
    what += " in a single kernel" if best.lowering == SINGLE_KERNEL else ""
    what += f", sums in the {best.domain} domain" if best.domain else ""
    times = f"{best.predicted_us:,.0f} us instead of {alone.predicted_us:,.0f} us on {profile.name}"
    times += (
        f" for {ROWS:,} entries from each rank to each, since ranks may hold different numbers"
        if site.uneven
        else ""
    )
    if allowed.force:
        reason = f"{allowed.source} forces {what}: {times}"
    else:
        gain = alone.predicted_us - best.predicted_us
        if gain <= profile.margin * alone.predicted_us:
            below = f"a gain below the model's margin of {profile.margin:.0%}"
            return leave(f"{'no gain' if gain <= 0 else below}: {what} would take {times}")
        reason = f"{what}: {times} ({allowed.source})"
    # why it is not as requested, or not smaller
    notes = (best.note, why_no_single_kernel(best, options, allowed), allowed.lossless_only)
    reason = "; ".join([reason, *filter(None, notes)])
    return planned(site, best, reason, alone.predicted_us)


def _leave_coalesced(
    plan: Sequence[PlannedSite],
    uncompressed: Sequence[PlannedSite],
    allowed: Sequence[Allowed],
    profile: Profile,
) -> list[PlannedSite]:
    """Return a plan without codecs for coalesced collectives that gain nothing from them as a
    whole.

    Uncompressed, all their tensors share one exchange with one start-up. Each compressed tensor
    needs its own exchange.
    """
    calls: dict[str, list[int]] = defaultdict(list)
    for number, site in enumerate(plan):
        call, _, position = site.name.rpartition(".")
        if position.isdecimal() and not site.pairwise:
            calls[call].append(number)
    found = list(plan)
    for numbers in calls.values():
        members = [plan[n] for n in numbers]
        coded = {n for n in numbers if plan[n].compressed}
        if not coded or any(allowed[n].force for n in coded):
            continue
        plain, us = (
            together_us(some, profile) for some in ([uncompressed[n] for n in numbers], members)
        )
        if plain - us <= profile.margin * plain:
            reason = f"coalesced: its {len(numbers)} tensors would take {us:,.0f} us with codes"
            reason += f" instead of {plain:,.0f} us on {profile.name}"
            for n in coded:
                found[n] = dataclasses.replace(uncompressed[n], reason=reason)
    return found


def _with_fewest_chunks(possible: Sequence[Candidate]) -> Candidate:
    """Return the best candidate, with the fewest chunks that are not significantly slower."""
    best = min(possible, key=rank)
    others = (
        each
        for each in possible
        if (each.codec, each.algorithm, each.lowering)
        == (best.codec, best.algorithm, best.lowering)
        and each.predicted_us <= best.predicted_us * (1 + SURE)
    )
    return min(others, key=lambda each: each.chunks)


def rank(candidate: Candidate) -> tuple[Any, ...]:
    """Return the sort key of candidates. The smallest is best."""
    return (
        candidate.predicted_us,
        candidate.wire_bytes,
        candidate.codec,
        candidate.algorithm,
    )


def _lowered(
    plan: Sequence[PlannedSite], named: Sequence[str | None], kernels: bool, share: int
) -> tuple[PlannedSite, ...]:
    """Return the plan with the lowering of each site.

    A named lowering is used. Otherwise kernels are used if at least ``share`` sites or chunks of
    fixed sizes on a CPU do the same work.
    """
    alike: Counter[Any] = Counter()
    for each in plan:
        alike[_work_of(each)] += each.chunks

    def reason_of(site: PlannedSite, name: str | None) -> str:
        if not site.compressed or site.lowering == SINGLE_KERNEL:
            return site.lowering
        # All ranks of the group must find the same, so facts local to one rank do not count.
        common = not (site.uneven or site.pairwise)
        fixed = common and all(isinstance(size, int) for size in site.shape)
        shared = site.device == "cpu" and alike[_work_of(site)] >= share
        worth = kernels and fixed and (shared or _has_bits_of_its_own(site) or _generated(site))
        if name == "kernel" and (site.uneven or not fixed):
            return "inline"
        return name if name in ("inline", "kernel") else "kernel" if worth else "inline"

    def lowered(site: PlannedSite, name: str | None) -> PlannedSite:
        form, reason = reason_of(site, name), site.reason
        if name == "kernel" and form == "inline":
            reason += "; inline and not as a kernel, since its sizes are not fixed"
        return dataclasses.replace(site, lowering=form, reason=reason)

    return tuple(map(lowered, plan, named))


def _generated(site: PlannedSite) -> bool:
    """Whether a GPU has a generated kernel for the codec of a site of fixed sizes."""
    device = torch.device(site.device)
    if device.type != "cuda":
        return False
    values = math.prod(size for size in site.shape if isinstance(size, int))
    return has_kernels(codec(site.codec), max(values, 1), device)


def _has_bits_of_its_own(site: PlannedSite) -> bool:
    """Whether a CPU kernel produces other last bits than the inline form.

    The number of sites must then not decide, because a backward graph that recomputes forward sites
    has fewer of them.
    """
    encode = Chain(torch.float32, (Encode(codec(site.codec)),))
    return site.device == "cpu" and not cpu.is_exact(encode) and not cpu.unsupported_reason(encode)


def _work_of(site: PlannedSite) -> tuple[Any, ...]:
    """Return what two sites must have in common to compute the same."""
    return (
        *(site.kind, site.codec, site.algorithm, site.reduce_op, site.group, site.direction),
        *(site.dtype, site.shape, site.splits, site.chunks),
    )
