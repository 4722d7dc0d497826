"""Explain in one sentence why a policy compresses none of its sites, and what would change that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf, log10
from typing import Any

from commpass.costmodel import Profile
from commpass.passes import PassResult
from commpass.passes.breakeven import break_even, break_even_rate
from commpass.passes.candidates import NO_CODEC
from commpass.passes.choose import rank
from commpass.passes.results import Options
from commpass.plan import UNCOMPRESSED, Candidate, PlannedSite
from commpass.policy import Policy
from commpass.policy.rules import Allowed, Annotation
from commpass.utils.printable import amount, plural


@dataclass(frozen=True)
class Slower:
    """The candidates that code a site, best first, none of which is faster under a profile."""

    candidates: tuple[Candidate, ...]
    profile: Profile

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True)
class UncompressedSite:
    """A site that is left uncompressed.

    Either all its candidates are ``slower``, or there is a reason, ``why``, that sites may share.
    ``remedy`` is what would change that, as far as a user can.
    """

    site: PlannedSite
    why: str = ""
    remedy: str = ""
    slower: Slower | None = None

    @property
    def is_reported(self) -> bool:
        """Whether a warning, or an error, has reported the reason."""
        return self.why == EARLIER

    @property
    def is_unmatched(self) -> bool:
        """Whether it is left uncompressed because no rule matches it."""
        return self.remedy == NO_RULE_REMEDY


KEPT = "kept by keep in the model"
NO_RULE = "no rule of {} matches them"
NO_RULE_REMEDY = "a rule that matches them"
OVERLAPPED = "overlapped with compute"
EARLIER = "uncompressed for the reason of an earlier warning"


def asks_for_codecs(policy: Policy, sites: Sequence[PlannedSite]) -> bool:
    """Return whether the user requests compression: by a policy's codecs, a rule, or an
    annotation."""
    if policy.off:
        return False
    by_rule = any(not rule.keep and (rule.codec or rule.force) for rule in policy.rules)
    return bool(policy.codecs) or by_rule or any(map(_is_annotated, sites))


def _is_annotated(site: PlannedSite) -> bool:
    return site.annotation is not None and not Annotation.from_json(site.annotation).keep


def uncompressed_sites(
    outcome: PassResult, policy: Policy, profile: Profile
) -> tuple[UncompressedSite, ...]:
    """Return the uncompressed sites of a graph whose group has other ranks, each with its
    reason."""
    allowed = {each.site.name: each.allowed for each in outcome.found}
    plan, found = outcome.plan, []
    for site in plan.sites:
        if site.group_size == 1 or (site.compressed and not plan.fallback):
            continue
        if plan.fallback:
            found.append(UncompressedSite(site, EARLIER))
            continue
        options = outcome.options.get(site.name)
        terms = allowed.get(site.name) or policy.allowed(site)[0]
        found.append(_of_site(site, options, terms, policy, profile))
    return tuple(found)


def _of_site(
    site: PlannedSite,
    options: Options | None,
    allowed: Allowed,
    policy: Policy,
    profile: Profile,
) -> UncompressedSite:
    if site.hidden:
        return UncompressedSite(site, OVERLAPPED, "Policy(skip_overlapped=False)")
    if site.reason.startswith(UNCOMPRESSED):
        return UncompressedSite(site, EARLIER)
    if options is None:
        return UncompressedSite(site, site.reason)
    if options.unsupported_reason == NO_CODEC.format(allowed.source):
        return UncompressedSite(site, *_no_codec_reason(site, allowed, policy))
    if options.unsupported_reason:
        return UncompressedSite(site, site.reason)
    if not options.possible:
        first, *others = options.refused
        over = any(each.refused and each.error for each in options.candidates)
        more = f" (and {len(others)} more reasons)" if others else ""
        return UncompressedSite(site, first + more, "a larger max_error" if over else "")
    return UncompressedSite(site, slower=Slower(tuple(sorted(options.possible, key=rank)), profile))


def _no_codec_reason(site: PlannedSite, allowed: Allowed, policy: Policy) -> tuple[str, str]:
    """Return why no codec is allowed for a site, and what would allow one."""
    if site.annotation is not None and Annotation.from_json(site.annotation).keep:
        return KEPT, ""
    if allowed.source == policy.label and policy.rules:
        return NO_RULE.format(policy.label), NO_RULE_REMEDY
    if any(rule.keep and rule.matches(site) for rule in policy.rules):
        return f"kept by {allowed.source}", ""
    return f"{allowed.source} names no codec", "a codec there, or in the policy"


MOST = 3
"""Reasons that a sentence names."""


def sentence(policy: Policy, sites: Sequence[UncompressedSite], *, sizes: bool) -> str:
    """Return the sentence about a policy that compresses none of some sites.

    With ``sizes`` it may also search for the size from which on a codec is faster, for which
    algorithms are traced.
    """
    by_cause: dict[Any, list[UncompressedSite]] = defaultdict(list)
    for each in sites:
        if each.slower is not None:
            by_cause[_cause_key(each.site, each.slower)].append(each)
    by_time = sorted(by_cause.values(), key=lambda some: -sum(each.site.plain_us for each in some))
    slower = [(some[0].site, some[0].slower, len(some)) for some in by_time]
    others = Counter((each.why, each.remedy) for each in sites if each.slower is None)
    reasons = [_in_numbers(site, each, count) for site, each, count in slower if each]
    for (why, _), count in others.most_common():
        reasons.append(f"{plural(count, 'site')}: {why}" if count < len(sites) else why)
    if len(reasons) > MOST:
        reasons[MOST:] = [f"and {len(reasons) - MOST} more reasons (commpass explain)"]
    remedies = [each for site, best, _ in slower[:1] if best for each in _gains(site, best, sizes)]
    remedies += dict.fromkeys(remedy for (_, remedy), _ in others.most_common(MOST) if remedy)
    text = f"{policy.label}: 0 of {plural(len(sites), 'site')} compressed: {'; '.join(reasons)}"
    return f"{text}. What would change it: {'; '.join(remedies)}" if remedies else text


def _cause_key(site: PlannedSite, slower: Slower) -> tuple[Any, ...]:
    """Return the key that sites with one common reason share."""
    of_site = (site.kind, site.bytes, site.group_size, site.dtype)
    best = slower.best
    return (*of_site, best.codec, best.algorithm, best.chunks, slower.profile.name)


def _in_numbers(site: PlannedSite, slower: Slower, count: int) -> str:
    """Return the predicted times of a site: with its best candidate, and uncompressed."""
    best, profile = slower.best, slower.profile
    what = f"{site.kind} of {amount(site.common_bytes)} over {site.group_size} ranks"
    chunks = f" in {best.chunks} chunks" if best.chunks > 1 else ""
    text = (
        f"on {profile.name}, {what} takes {site.plain_us:,.0f} us, with {best.codec} by"
        f" {best.algorithm}{chunks} {best.predicted_us:,.0f} us"
    )
    if site.reason.startswith("coalesced:"):
        text += " (and is one exchange with others)"
    elif best.predicted_us < site.plain_us:
        text += f" (a gain below the model's margin of {profile.margin:.0%})"
    return f"{text} ({plural(count, 'site')})" if count > 1 else text


TRIED = 4
"""Candidates of a site for which the size is searched from which on they are faster."""


def _gains(site: PlannedSite, slower: Slower, sizes: bool) -> Iterator[str]:
    """Yield the conditions under which a candidate of a site would be faster."""
    best, profile = slower.best, slower.profile
    if not profile.measured:
        yield f"a profile that is measured here (commpass probe): {profile.name} is stated"
    if sizes:
        some = [_least_bytes(site, each, profile) for each in slower.candidates[:TRIED]]
        if site.bytes < (least := min(some)) < inf:
            yield f"tensors of {amount(least)} or more"
    rates = [break_even_rate(site, each, profile) or 0.0 for each in slower.candidates]
    if (rate := max(rates)) and (shown := _rounded_down(rate * 8)):
        yield f"a link of {shown:,g} Gbit/s or less"
    named = f"codec={best.codec!r}, algorithm={best.algorithm!r}, force=True"
    yield f"Rule({named}) compresses in spite of the prediction"


def _least_bytes(site: PlannedSite, candidate: Candidate, profile: Profile) -> float:
    """Return the bytes from which on a candidate is faster; inf if that is unknown."""
    spec, code = candidate.algorithm, candidate.codec
    least = break_even(site, spec, code, profile, chunks=candidate.chunks)
    return inf if least is None else least


def _rounded_down(value: float) -> float:
    """Round down to two digits."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return round(floor(value / unit) * unit, 9)
