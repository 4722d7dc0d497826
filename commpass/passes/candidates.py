"""candidates: site -> every way to carry it out, each with its stages, error and time.

needs: the sites of a graph, each with what it is allowed.
gives: ``Options`` for every site: first the uncompressed one, then each codec with each algorithm,
in chunks and micro-shards if they may gain.
changes: nothing. Every rank finds the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from math import inf

import torch

from commpass.codecs import FLOATS, Codec, codec
from commpass.collectives import (
    DEFAULTS,
    REDUCE_OPS,
    Algorithm,
    Payload,
    Request,
    Stages,
    algorithm,
    algorithms_of,
    find_algorithm,
    read_stages,
    without_chunks,
)
from commpass.costmodel import Profile, finished_us
from commpass.passes.context import PassContext
from commpass.passes.divide import (
    SURE,
    divided,
    in_shards,
    is_surely_faster,
    is_unsure,
    no_more_gain,
    payload_of,
    prices_of,
    unapplied_note,
    undivided_reason,
)
from commpass.passes.results import Options
from commpass.plan import ROWS, Candidate, PlannedSite, Site
from commpass.plan.kinds import KINDS, PAIRWISE
from commpass.plan.stage import Stage
from commpass.plan.timeline import HOST
from commpass.policy.rules import Allowed


def run(context: PassContext) -> None:
    """List the candidates of all sites. Excluded sites have the uncompressed one alone."""
    given, excluded = context.input, _with_parts(context)
    scored = scoring(given.profile, given.policy.reassociate)
    for each in context.found:
        site = each.site
        if (why := excluded.get(site.name)) is not None:
            site = dataclasses.replace(site, obstacle=why)
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


def candidates(site: Site, allowed: Allowed, profile: Profile, reassociate: bool) -> Options:
    """Return all candidates that the policy allows for a site, with predicted times."""
    alone = (_uncompressed(site, profile),)
    if obstacle := _unsent(site) or site.obstacle or _unsupported_reason(site, allowed):
        return Options(alone, obstacle)
    return Options((*alone, *_coded(site, allowed, profile, reassociate)))


Scoring = Callable[[Site, Allowed], Options]
"""Returns the options of a site, for one profile."""


def scoring(profile: Profile, reassociate: bool) -> Scoring:
    """Return ``candidates`` with a cache. Sites that differ only in name and neighbours share an
    entry."""

    @functools.cache
    def scored(site: Site, allowed: Allowed) -> Options:
        return candidates(site, allowed, profile, reassociate)

    return lambda site, allowed: scored(nameless(site), allowed)


def nameless(site: Site) -> Site:
    """Return a site without the fields that do not affect its candidates."""
    return dataclasses.replace(site, name="", module="", producer=None, consumers=(), word=None)


def _uncompressed(site: Site, profile: Profile) -> Candidate:
    """Return the uncompressed candidate with its predicted time."""
    known = getattr(torch, site.dtype, None) in FLOATS
    payload = _scored(site)[0] if site.uneven and known else None
    size = payload.numel * payload.dtype.itemsize if payload else max(site.bytes, 0)
    us = prices_of(site, profile).time_us(site.kind, size) if site.kind in KINDS else 0.0
    exchange = Stage(role="exchange", kind=site.kind, nbytes=size, leaving=size)
    return Candidate(wire_bytes=site.bytes, predicted_us=round(us, 3), stages=(exchange,))


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
                said = str(error).strip().partition("\n")[0]
                why = f"{coder.spec} by {each.spec} fails: {type(error).__name__}: {said}"
                made = [
                    Candidate(codec=coder.spec, algorithm=without_chunks(each.spec), refused=why)
                ]
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
    coder: Codec,
    algorithm: Algorithm,
    allowed: Allowed,
    profile: Profile,
    reassociate: bool,
) -> Candidate:
    """Return the candidate of one codec with one algorithm: with its time, or refused."""
    named = Candidate(
        codec=coder.spec,
        algorithm=without_chunks(algorithm.spec),
        chunks=algorithm.chunks,
    )
    obstacle = _unsupported_codec(site, coder, algorithm, reassociate)
    if obstacle := obstacle or (None if allowed.force else _needless(site, coder)):
        return dataclasses.replace(named, refused=obstacle)
    error = round(algorithm.error(coder, site.group_size), 6)
    if allowed.max_error is not None and error > allowed.max_error:
        budget = f"the budget of {allowed.max_error:.3%} ({allowed.budget})"
        above = f"{coder.spec} by {algorithm.spec}: error {error:.3%} is above {budget}"
        return dataclasses.replace(named, error=error, refused=above)
    scored = read_stages(site.kind, algorithm.spec, coder.spec, *_scored(site))
    real = scored
    if site.uneven and site.bytes >= 0:
        real = read_stages(site.kind, algorithm.spec, coder.spec, payload_of(site), _handed(site))
    known = site.bytes >= 0
    return dataclasses.replace(
        named,
        chunks=_actual_chunks(algorithm, scored, site, coder),
        stages=scored.stages,
        wire_bytes=real.wire_bytes if known else -1,
        dynamic_bytes=real.dynamic_bytes if known else 0,
        domain=algorithm.domain(coder),
        predicted_us=round(stages_us(_timed(scored, site, algorithm, coder), site, profile), 3),
        error=error,
    )


def _actual_chunks(algorithm: Algorithm, found: Stages, site: Site, coder: Codec) -> int:
    """Return how many chunks an algorithm really makes.

    Fewer than requested if there are fewer blocks. For symbolic sizes, the requested number.
    """
    if algorithm.chunks == 1 or site.dynamic:
        return algorithm.chunks
    undivided = read_stages(site.kind, without_chunks(algorithm.spec), coder.spec, *_scored(site))
    return len(found.exchanges) // max(len(undivided.exchanges), 1)


def _unsupported_codec(
    site: Site, coder: Codec, algorithm: Algorithm, reassociate: bool
) -> str | None:
    """Return why an algorithm cannot or may not carry out a site with a codec, else None."""
    if obstacle := algorithm.unsupported_reason(coder, site.group_size):
        return obstacle
    if obstacle := coder.unsupported_shape(site.shape):
        return obstacle
    if coder.state is not None and site.stateless:
        return f"{coder.spec} needs {coder.state}, but {site.stateless}"
    if coder.dynamic and site.fixed:
        return f"{coder.spec} has a wire whose size depends on the values, but {site.fixed}"
    if site.reduce_op is not None and coder.lossless and not reassociate:
        return (
            f"{coder.spec} by {algorithm.spec} sums in another order, which reassociate=False"
            " forbids"
        )
    return None


MANY = 1 << 16
"""Row length from which on padding is negligible."""


def _needless(site: Site, coder: Codec) -> str | None:
    """Return why a codec is pointless unless it is forced: it rounds values and sends no fewer
    bytes."""
    own = getattr(torch, site.dtype)
    if coder.lossless or coder.wire_bytes(MANY, own) < MANY * own.itemsize:
        return None
    return f"{coder.spec} sends no fewer bytes than the values of {site.dtype} are"


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
            chosen = algorithm(site.kind, spec, node=profile.on_each_host(site.global_ranks) or 1)
        found.append(chosen)
    if found or allowed.named:
        return found
    return [each for each in algorithms_of(site.kind) if each.name in DEFAULTS]


# --- payloads -------------------------------------------------------------------------------------


def request(site: Site) -> Request:
    """Return the request of a site, as seen by any of its ranks."""
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
        by_messages=site.by_messages,
    )


def _scored(site: Site) -> tuple[Payload, Request]:
    """Return the payload and request that times are predicted for.

    If ranks may hold different sizes, they are standard sizes that all ranks know.
    """
    if not site.uneven:
        return payload_of(site), request(site)
    dtype = getattr(torch, site.dtype)
    rows = (ROWS,) * site.group_size
    asked = dataclasses.replace(
        request(site), sent=rows, received=rows, unknown=not _known(site), alike=False
    )
    return Payload(ROWS * site.group_size * site.width, site.width, dtype), asked


def _handed(site: Site) -> Request:
    """Return this rank's request if ranks may hold different sizes.

    If the sizes are still unknown, all entries count as sent to one rank, which gives the same
    bytes.
    """
    asked = request(site)
    if _known(site):
        return asked
    entries = payload_of(site).numel // max(site.width, 1)
    rows = (entries, *[0] * (site.group_size - 1))
    return dataclasses.replace(asked, sent=rows, received=rows, unknown=True)


def _known(site: Site) -> bool:
    return all(isinstance(size, int) for some in site.splits or () for size in some)


# --- predicted times ------------------------------------------------------------------------------


def coded_us(site: Site, algorithm: Algorithm, coder: Codec, profile: Profile) -> float:
    """Return the predicted microseconds of a site by an algorithm with a codec."""
    found = read_stages(site.kind, algorithm.spec, coder.spec, *_scored(site))
    return stages_us(_timed(found, site, algorithm, coder), site, profile)


def plain_us(site: Site, profile: Profile) -> float:
    """Return the predicted microseconds of an uncompressed site."""
    return _uncompressed(site, profile).predicted_us


def together_us(members: Sequence[PlannedSite], profile: Profile) -> float:
    """Return the predicted microseconds of a coalesced collective.

    All uncompressed tensors share one exchange; the others have their own stages. As in the graph,
    stages that wait for nothing come first.
    """
    of_group, kind = prices_of(members[0], profile), members[0].kind
    rest = sum(each.bytes for each in members if not each.compressed)
    stages = [Stage(role="exchange", kind=kind, nbytes=rest, leaving=rest)] if rest else []
    waits = [False] * len(stages)
    for each in members:
        first = len(stages)
        for stage in each.stages if each.compressed else ():
            after = tuple(first + number for number in stage.after)
            waits.append(any(waits[n] or stages[n].role == "exchange" for n in after))
            stages.append(dataclasses.replace(stage, after=after))
    order = sorted(range(len(stages)), key=waits.__getitem__)
    place = {number: at for at, number in enumerate(order)}
    return finished_us(
        [
            of_group.task(
                dataclasses.replace(stages[n], after=tuple(place[m] for m in stages[n].after))
            )
            for n in order
        ]
    )


def _timed(found: Stages, site: Site, algorithm: Algorithm, coder: Codec) -> list[Stage]:
    """Return the stages that determine a candidate's time.

    For a message, these are the stages of both ends, because both ends must make the same choice.
    """
    if not site.pairwise:
        return list(found)
    sent, received = (
        read_stages(kind, algorithm.spec, coder.spec, payload_of(site), request(site))
        for kind in PAIRWISE
    )
    last = (len(list(sent)) - 1,)
    decodes = (stage for stage in received if stage.role == "decode")
    return [*sent, *(dataclasses.replace(stage, after=last) for stage in decodes)]


def stages_us(found: Sequence[Stage], site: Site, profile: Profile) -> float:
    """Return the time of stages, with computation and transfers overlapped as far as possible.

    A GPU stream runs its exchanges one after the other: the next one starts when the previous one
    has arrived completely.
    """
    tasks = list(map(prices_of(site, profile).task, found))
    if site.device != "cpu":
        tasks = [
            task
            if task.resource == HOST
            else dataclasses.replace(task, us=task.us + task.latency_us, latency_us=0.0)
            for task in tasks
        ]
    return finished_us(tasks)
