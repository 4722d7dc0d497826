"""candidates: site -> every way to carry it out, each with its stages, error and time.

needs: the sites of a graph, each with what it is allowed.
gives: ``Options`` for every site: first the uncompressed one, then each codec with each algorithm,
in chunks and micro-shards if they may gain.
changes: nothing. Every rank finds the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import torch

from commpass.codecs import FLOATS, Codec, codec
from commpass.collectives import (
    DEFAULTS,
    REDUCE_OPS,
    Algorithm,
    Stages,
    algorithms_of,
    find_algorithm,
    read_stages,
    with_parameters,
    without_chunks,
)
from commpass.costmodel import HOST, Profile, Task, finished_us
from commpass.passes.context import PassContext
from commpass.passes.divide import (
    SURE,
    divided,
    in_shards,
    is_surely_faster,
    is_unsure,
    no_more_gain,
    unapplied_note,
    undivided_reason,
)
from commpass.passes.payloads import (
    common_input,
    own_request,
    payload_of,
    prices_of,
    request_of,
)
from commpass.passes.results import Options
from commpass.passes.single_kernel import PeerMemoryOf, no_peer_memory, with_single_kernels
from commpass.plan import Candidate, PlannedSite, Site
from commpass.plan.kinds import KINDS, PAIRWISE
from commpass.plan.stage import Stage, plain_exchange
from commpass.policy.rules import Allowed


def run(context: PassContext) -> None:
    """List the candidates of all sites. Excluded sites have the uncompressed one alone."""
    given, excluded = context.input, _with_parts(context)
    scored = scoring(given.profile, given.policy.reassociate, given.peer_memory)
    for each in context.found:
        site = each.site
        if (why := excluded.get(site.name)) is not None:
            site = dataclasses.replace(site, unsupported_reason=why)
        context.options[site.name] = scored(site, each.allowed)


def _with_parts(context: PassContext) -> dict[str, str]:
    """Return the excluded sites, with the sites that they were grouped or split into. The chunks of
    one collective are excluded together."""
    excluded = dict(context.excluded)
    for fusion in context.plan.grouped:
        if (name := next((name for name in fusion.sites if name in excluded), None)) is not None:
            excluded.setdefault(fusion.into, excluded[name])
    for split in context.plan.split:
        names = (split.site, *split.into)
        if (name := next((name for name in names if name in excluded), None)) is not None:
            excluded |= {part: excluded.get(part, excluded[name]) for part in split.into}
    return excluded


def candidates(
    site: Site,
    allowed: Allowed,
    profile: Profile,
    reassociate: bool,
    peer_memory: PeerMemoryOf = no_peer_memory,
) -> Options:
    """Return all candidates that the policy allows for a site, with predicted times."""
    alone = (_uncompressed(site, profile),)
    if reason := _unsent(site) or site.unsupported_reason or _unsupported_reason(site, allowed):
        return Options(alone, reason)
    coded = tuple(_coded(site, allowed, profile, reassociate))
    return Options((*alone, *with_single_kernels(coded, site, allowed, peer_memory, profile)))


Scoring = Callable[[Site, Allowed], Options]
"""Returns the options of a site, for one profile."""


def scoring(
    profile: Profile, reassociate: bool, peer_memory: PeerMemoryOf = no_peer_memory
) -> Scoring:
    """Return ``candidates`` with a cache. Sites that differ only in name and neighbours share an
    entry."""
    known: dict[Any, Options] = {}

    def scored(site: Site, allowed: Allowed) -> Options:
        key = _site_facts(site), _allowed_facts(allowed)  # hashed faster than dataclasses
        if key not in known:
            named = nameless(site)
            known[key] = candidates(named, allowed, profile, reassociate, peer_memory)
        return known[key]

    return scored


NAMES: dict[str, Any] = {"name": "", "module": "", "label": "", "annotation": None}
"""The fields of a site that do not affect its candidates, and their empty values."""


def nameless(site: Site) -> Site:
    """Return a site without the fields that do not affect its candidates."""
    return dataclasses.replace(site, **NAMES)


def _facts(of: type, excluded: Collection[str] = ()) -> attrgetter[Any]:
    """Return a function for the values of a dataclass's fields."""
    names = (each.name for each in dataclasses.fields(of))
    return attrgetter(*(name for name in names if name not in excluded))


_site_facts, _allowed_facts = _facts(Site, NAMES), _facts(Allowed)


def _uncompressed(site: Site, profile: Profile) -> Candidate:
    """Return the uncompressed candidate with its predicted time."""
    known = getattr(torch, site.dtype, None) in FLOATS
    payload = common_input(site)[0] if site.uneven and known else None
    size = payload.numel * payload.dtype.itemsize if payload else max(site.bytes, 0)
    us = prices_of(site, profile).time_us(site.kind, size) if site.kind in KINDS else 0.0
    stages = (plain_exchange(site.kind, size),)
    return Candidate(wire_bytes=site.bytes, predicted_us=round(us, 3), stages=stages)


def _unsent(site: Site) -> str | None:
    return "the group has one rank: nothing is sent" if site.group_size == 1 else None


NO_CODEC = "{} allows no codec here"
"""The reason for sites that the policy excludes or does not mention."""


def _unsupported_reason(site: Site, allowed: Allowed) -> str | None:
    """Return why a site cannot or may not be compressed, else None."""
    if not algorithms_of(site.kind):
        return f"no algorithm carries out {site.kind} with a codec"
    if site.reduce_op is not None and site.reduce_op not in REDUCE_OPS:
        return (
            f"reduce op {site.reduce_op!r} is no sum: codes cannot be combined"
            f" ({' and '.join(REDUCE_OPS)} can)"
        )
    if getattr(torch, site.dtype, None) not in FLOATS:
        return f"{site.dtype} values must arrive exactly"
    if not allowed.codecs:
        return allowed.lossless_only or NO_CODEC.format(allowed.source)
    if allowed.named and not any(find_algorithm(site.kind, spec) for spec in allowed.algorithms):
        have = ", ".join(each.name for each in algorithms_of(site.kind))
        return (
            f"{allowed.source} names {', '.join(allowed.algorithms)}, but {site.kind} has only"
            f" {have}"
        )
    if site.width == 0 or (site.bytes == 0 and not site.uneven):
        return "it has no elements"
    if site.bytes < 0 and not site.uneven:
        return "its size is not known before it runs"
    return None


def _coded(
    site: Site, allowed: Allowed, profile: Profile, reassociate: bool
) -> Iterator[Candidate]:
    """Yield every allowed codec with every allowed algorithm, then micro-shards that are surely
    faster than all of these.

    A combination that raises an error is refused.
    """
    chosen = {each.spec: each for each in _algorithms(site, allowed, profile)}.values()
    known: list[Candidate] = []
    # A candidate that is no faster than this is chosen only if it is forced.
    plain = (
        inf if allowed.force else _uncompressed(site, profile).predicted_us * (1 - profile.margin)
    )
    undivided: list[tuple[Codec, Algorithm, Candidate]] = []
    for coder in {each.spec: each for each in map(codec, allowed.codecs)}.values():
        for each in chosen:
            made: list[Candidate] = []
            try:
                for part in divided(each, site, allowed, coder, profile):
                    scored = _candidate(site, coder, part, allowed, profile, reassociate)
                    made.append(
                        dataclasses.replace(scored, note=unapplied_note(each, site, allowed))
                    )
                    least = min((k.predicted_us for k in known if not k.refused), default=inf)
                    if no_more_gain(made, site, profile, min(least, plain)):
                        break
            except Exception as error:
                first_line = str(error).strip().partition("\n")[0]
                why = f"{coder.spec} by {each.spec} fails: {type(error).__name__}: {first_line}"
                name = without_chunks(each).spec
                made = [Candidate(codec=coder.spec, algorithm=name, refused=why)]
            if len(made) == 1 and not made[0].refused:
                undivided.append((coder, each, made[0]))
            made = [made[0], *(m for m in made[1:] if is_surely_faster(m, made[0], site, profile))]
            known += made
            yield from made
    if allowed.chunks is not None or is_unsure(site) or not undivided:
        return
    least = min(each.predicted_us for each in known if not each.refused)
    least *= 1 - max(profile.margin, SURE)
    for coder, each, one in undivided:
        if not (coder.dynamic or undivided_reason(each, site)):
            score = functools.partial(
                _candidate, site, coder, allowed=allowed, profile=profile, reassociate=reassociate
            )
            yield from in_shards(each, one, site, coder, profile, least, score)


def _candidate(
    site: Site,
    codec: Codec,
    algorithm: Algorithm,
    allowed: Allowed,
    profile: Profile,
    reassociate: bool,
) -> Candidate:
    """Return the candidate of one codec with one algorithm: with its time, or refused."""
    named = Candidate(
        codec=codec.spec,
        algorithm=without_chunks(algorithm).spec,
        chunks=algorithm.chunks,
    )
    reason = _unsupported_codec(site, codec, algorithm, reassociate)
    if reason := reason or (None if allowed.force else _needless(site, codec)):
        return dataclasses.replace(named, refused=reason)
    error = round(algorithm.error(codec, site.group_size), 6)
    if allowed.max_error is not None and error > allowed.max_error:
        budget = f"the budget of {allowed.max_error:.3%} ({allowed.budget})"
        above = f"{codec.spec} by {algorithm.spec}: error {error:.3%} is above {budget}"
        return dataclasses.replace(named, error=error, refused=above)
    scored = read_stages(site.kind, algorithm.spec, codec.spec, *common_input(site))
    real = scored
    if site.uneven and site.bytes >= 0:
        real = read_stages(
            site.kind, algorithm.spec, codec.spec, payload_of(site), own_request(site)
        )
    known = site.bytes >= 0
    return dataclasses.replace(
        named,
        chunks=_actual_chunks(algorithm, scored, site, codec),
        stages=scored.stages,
        wire_bytes=real.wire_bytes if known else -1,
        dynamic_bytes=real.dynamic_bytes if known else 0,
        domain=algorithm.domain(codec),
        predicted_us=round(stages_us(_timed(scored, site, algorithm, codec), site, profile), 3),
        error=error,
    )


def _actual_chunks(algorithm: Algorithm, found: Stages, site: Site, codec: Codec) -> int:
    """Return how many chunks an algorithm really makes.

    Fewer than requested if there are fewer blocks. For symbolic sizes, the requested number.
    """
    if algorithm.chunks == 1 or site.dynamic:
        return algorithm.chunks
    undivided = without_chunks(algorithm)
    whole = read_stages(site.kind, undivided.spec, codec.spec, *common_input(site))
    return len(found.exchanges) // max(len(whole.exchanges), 1)


def _unsupported_codec(
    site: Site, codec: Codec, algorithm: Algorithm, reassociate: bool
) -> str | None:
    """Return why an algorithm cannot or may not carry out a site with a codec, else None."""
    if reason := algorithm.unsupported_reason(codec, site.group_size):
        return reason
    if reason := codec.unsupported_shape(site.shape):
        return reason
    if codec.state is not None and site.stateless:
        return f"{codec.spec} needs {codec.state}, but {site.stateless}"
    if codec.dynamic and site.fixed:
        return f"{codec.spec} has a wire whose size depends on the values, but {site.fixed}"
    if site.reduce_op is not None and codec.lossless and not reassociate:
        return (
            f"{codec.spec} by {algorithm.spec} sums in another order, which reassociate=False"
            " forbids"
        )
    return None


MANY = 1 << 16
"""Row length from which on padding is negligible."""


def _needless(site: Site, codec: Codec) -> str | None:
    """Return why a codec is pointless unless it is forced: it rounds values and sends no fewer
    bytes.

    A row on the wire is padded, so that this also applies to few values of any dtype.
    """
    own = getattr(torch, site.dtype)
    if codec.lossless:
        return None
    if codec.wire_bytes(MANY, own) >= MANY * own.itemsize:
        return f"{codec.spec} sends no fewer bytes than the values of {site.dtype} are"
    row = payload_of(site).numel // (site.group_size if KINDS[site.kind].scatters else 1)
    if site.dynamic or site.uneven or site.bytes < 0 or not 0 < row < MANY:
        return None
    if (wire := codec.wire_bytes(row, own)) >= row * own.itemsize:
        return f"{codec.spec} sends {wire} bytes for each {row} values of {site.dtype}, no fewer"
    return None


def _algorithms(site: Site, allowed: Allowed, profile: Profile) -> list[Algorithm]:
    """Return the named algorithms that this kind has.

    If there is none, return the kind's defaults if the policy names algorithms for all sites. If a
    rule or annotation for this site names them, return nothing.
    """
    found = []
    for spec in allowed.algorithms:
        if (chosen := find_algorithm(site.kind, spec)) is None:
            continue
        if chosen.name == "hierarchical" and "node=" not in spec and profile.ranks_per_host > 1:
            chosen = with_parameters(chosen, node=profile.on_each_host(site.global_ranks) or 1)
        found.append(chosen)
    if found or allowed.named:
        return found
    return [each for each in algorithms_of(site.kind) if each.name in DEFAULTS]


# --- predicted times ------------------------------------------------------------------------------


def coded_us(site: Site, algorithm: Algorithm, codec: Codec, profile: Profile) -> float:
    """Return the predicted microseconds of a site by an algorithm with a codec."""
    found = read_stages(site.kind, algorithm.spec, codec.spec, *common_input(site))
    return stages_us(_timed(found, site, algorithm, codec), site, profile)


def plain_us(site: Site, profile: Profile) -> float:
    """Return the predicted microseconds of an uncompressed site."""
    return _uncompressed(site, profile).predicted_us


def together_us(members: Sequence[PlannedSite], profile: Profile) -> float:
    """Return the predicted microseconds of a coalesced collective."""
    return finished_us(joint_tasks(members, profile))


def joint_tasks(members: Sequence[PlannedSite], profile: Profile) -> list[Task]:
    """Return the tasks of a coalesced collective.

    All uncompressed tensors share one exchange; the others have their own stages. As in the graph,
    stages that wait for nothing come first.
    """
    of_group, kind = prices_of(members[0], profile), members[0].kind
    rest = sum(each.bytes for each in members if not each.compressed)
    stages = [plain_exchange(kind, rest)] if rest else []
    waits = [False] * len(stages)
    for each in members:
        first = len(stages)
        for stage in each.stages if each.compressed else ():
            after = tuple(first + number for number in stage.after)
            waits.append(any(waits[n] or stages[n].role == "exchange" for n in after))
            stages.append(dataclasses.replace(stage, after=after))
    order = sorted(range(len(stages)), key=waits.__getitem__)
    place = {number: at for at, number in enumerate(order)}
    return [
        of_group.task(
            dataclasses.replace(stages[n], after=tuple(place[m] for m in stages[n].after))
        )
        for n in order
    ]


def _timed(found: Stages, site: Site, algorithm: Algorithm, codec: Codec) -> list[Stage]:
    """Return the stages that determine a candidate's time.

    For a message, these are the stages of both ends, because both ends must make the same choice.
    """
    if not site.pairwise:
        return list(found)
    sent, received = (
        read_stages(kind, algorithm.spec, codec.spec, payload_of(site), request_of(site))
        for kind in PAIRWISE
    )
    last = (len(list(sent)) - 1,)
    decodes = (stage for stage in received if stage.role == "decode")
    return [*sent, *(dataclasses.replace(stage, after=last) for stage in decodes)]


def stages_us(found: Sequence[Stage], site: Site, profile: Profile) -> float:
    """Return the time of stages, with computation and transfers overlapped as far as possible."""
    return finished_us(stage_tasks(found, site, profile))


def stage_tasks(found: Sequence[Stage], site: Site, profile: Profile) -> list[Task]:
    """Return stages as tasks.

    A GPU stream runs its exchanges one after the other: the next one starts when the previous one
    has arrived completely.
    """
    tasks = list(map(prices_of(site, profile).task, found))
    if site.device == "cpu":
        return tasks
    return [
        task
        if task.resource == HOST
        else dataclasses.replace(task, us=task.us + task.latency_us, latency_us=0.0)
        for task in tasks
    ]
