"""candidates: site -> everything that may be done to it, each with its stages, error and time.

needs: the sites of a graph, each with what it is allowed.
gives: for every site its ``Options``: *leave it alone* first, then each codec with each algorithm,
in chunks and micro-shards where those may pay.
changes: nothing. Every rank finds the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    chunk_bytes_of,
    chunks_for,
    divides,
    has_shards,
    own,
    read_stages,
    whole,
)
from commpass.costmodel import Prices, Profile, finished_us, prices
from commpass.kinds import KINDS
from commpass.plan import ROWS, Candidate, PlannedSite, Site
from commpass.rules import Allowed
from commpass.stage import NEXT, Stage
from commpass.timeline import HOST


@dataclass(frozen=True)
class Options:
    """What may be done to a site, *leave it alone* first. ``obstacle`` says why it can be nothing
    else, whatever a codec or an algorithm could do."""

    candidates: tuple[Candidate, ...]
    obstacle: str = ""

    @property
    def alone(self) -> Candidate:
        """*Leave it alone*."""
        return self.candidates[0]

    @property
    def possible(self) -> tuple[Candidate, ...]:
        """The candidates that compress, without those that are refused."""
        return tuple(each for each in self.candidates[1:] if not each.refused)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why candidates are refused, each reason once; of a codec that loses more than the budget,
        by the algorithm with which it loses least."""
        losses = [each for each in self.candidates if each.refused and each.error]
        by_error = sorted(losses, key=lambda each: each.error)
        least = {each.codec: each for each in reversed(by_error)}
        refused = [each for each in self.candidates if each.refused]
        told = [each for each in refused if not each.error or least[each.codec] is each]
        return tuple(dict.fromkeys(each.refused for each in told))


def candidates(site: Site, allowed: Allowed, profile: Profile, reassociate: bool) -> Options:
    """All that the policy allows to be done to a site, scored."""
    alone = (_alone(site, profile),)
    if obstacle := _unsent(site) or site.obstacle or _obstacle(site, allowed):
        return Options(alone, obstacle)
    return Options((*alone, *_coded(site, allowed, profile, reassociate)))


Scoring = Callable[[Site, Allowed], Options]
"""What may be done to a site, with one profile."""


def scoring(profile: Profile, reassociate: bool) -> Scoring:
    """``candidates``, worked out once for sites that differ in name and neighbours alone."""

    @functools.cache
    def scored(site: Site, allowed: Allowed) -> Options:
        return candidates(site, allowed, profile, reassociate)

    return lambda site, allowed: scored(nameless(site), allowed)


def nameless(site: Site) -> Site:
    """A site without what tells it from others that are the same in all that counts."""
    return dataclasses.replace(site, name="", module="", producer=None, consumers=(), word=None)


def _alone(site: Site, profile: Profile) -> Candidate:
    """*Leave it alone*, with its time."""
    known = getattr(torch, site.dtype, None) in FLOATS
    payload = _scored(site)[0] if site.uneven and known else None
    size = payload.numel * payload.dtype.itemsize if payload else max(site.bytes, 0)
    us = _prices(site, profile).us(site.kind, size) if site.kind in KINDS else 0.0
    exchange = Stage(role="exchange", kind=site.kind, nbytes=size, leaving=size)
    return Candidate(wire_bytes=site.bytes, predicted_us=round(us, 3), stages=(exchange,))


def _unsent(site: Site) -> str | None:
    return "the group has one rank: nothing is sent" if site.group_size == 1 else None


def _obstacle(site: Site, allowed: Allowed) -> str | None:
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
    if not allowed.codecs:
        return allowed.lossless_only or f"{allowed.source} allows no codec here"
    if allowed.named and not any(own(site.kind, spec) for spec in allowed.algorithms):
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
    """Every codec with every algorithm that is allowed. One that fails on a site is refused. Then
    those in micro-shards that are surely faster than all of these."""
    chosen = {each.spec: each for each in _algorithms(site, allowed, profile)}.values()
    known: list[Candidate] = []
    undivided: list[tuple[Codec, Algorithm, Candidate]] = []
    for coder in {each.spec: each for each in map(codec, allowed.codecs)}.values():
        for each in chosen:
            parts = _divided(each, site, allowed, coder, profile)
            try:
                made = [
                    dataclasses.replace(
                        _candidate(site, coder, part, allowed, profile, reassociate),
                        note=_undivided(each, site, allowed),
                    )
                    for part in parts
                ]
            except Exception as error:
                said = str(error).strip().partition("\n")[0]
                why = f"{coder.spec} by {each.spec} fails: {type(error).__name__}: {said}"
                made = [Candidate(codec=coder.spec, algorithm=whole(each.spec), refused=why)]
            made = [made[0], *(m for m in made[1:] if _surely_faster(m, made[0], site, profile))]
            if len(made) == 1 and not made[0].refused:
                undivided.append((coder, each, made[0]))
            known += made
            yield from made
    if allowed.chunks is not None or _is_unsure(site) or not undivided:
        return
    least = min(each.predicted_us for each in known if not each.refused)
    least *= 1 - max(profile.margin, SURE)
    for coder, each, one in undivided:
        if not (coder.dynamic or _whole(each, site)):
            score = functools.partial(
                _candidate, site, coder, allowed=allowed, profile=profile, reassociate=reassociate
            )
            yield from _in_shards(each, one, site, coder, profile, least, score)


def _surely_faster(parts: Candidate, one: Candidate, site: Site, profile: Profile) -> bool:
    """Whether chunks that nobody asked for are faster than ``one``, which is sent whole, even if
    that is encoded by the kernel that makes its values: on a GPU a matmul may."""
    if one.refused or parts.refused:
        return True
    return parts.predicted_us < one.predicted_us - _free_us(one, site, profile)


def _free_us(one: Candidate, site: Site, profile: Profile) -> float:
    """How long what is sent whole is encoded at first, where that may cost nothing."""
    if site.device == "cpu":
        return 0.0
    task = _prices(site, profile).task
    first = (stage for stage in one.stages if stage.role == "encode" and not stage.after)
    return sum(task(stage).us for stage in first)


SURE = 0.01
"""By what share of the time more chunks, or micro-shards, must be faster than fewer."""


def _in_shards(
    chosen: Algorithm,
    one: Candidate,
    site: Site,
    coder: Codec,
    profile: Profile,
    least: float,
    score: Callable[[Algorithm], Candidate],
) -> Iterator[Candidate]:
    """An algorithm in micro-shards, if that takes less than ``least`` microseconds: in as few as
    are hardly slower. Only what is decoded hides behind what arrives, so there is nothing to gain
    where ``one``, which has none, would take longer even without that. It is for what is not
    divided into chunks: those hide what is encoded as well, by one message less a hop. What is to
    be summed counts as written and read once more: no kernel decodes and sums what comes in parts.
    """
    task = _prices(site, profile).task
    decodes = [stage for stage in one.stages if stage.role == "decode"]
    computed = [stage for stage in one.stages if stage.role in ("sum", "encode", "leave")]
    summed = {number for stage in computed for number in stage.after}
    values = sum(one.stages[n].values for n in summed if one.stages[n].role == "decode")
    least -= profile.kernels.copies_us(0, 2 * torch.float32.itemsize * values)
    least -= _free_us(one, site, profile)
    if one.predicted_us - sum(task(stage).us for stage in decodes) >= least:
        return
    if not has_shards(site.kind, chosen.name):
        return
    made = []
    for shards in _numbers(site):
        turns = site.by_messages and chosen.name not in FEW_HOPS
        if not turns or _is_slow_ring(chosen, shards, site, coder, profile):
            made.append(score(algorithm(site.kind, chosen.spec, shards=shards)))
    possible = [each for each in made if not each.refused and each.predicted_us < least]
    if possible:
        best = min(each.predicted_us for each in possible)
        yield next(each for each in possible if each.predicted_us <= best * (1 + SURE))


def _candidate(
    site: Site,
    coder: Codec,
    chosen: Algorithm,
    allowed: Allowed,
    profile: Profile,
    reassociate: bool,
) -> Candidate:
    """One codec with one algorithm: scored, or refused."""
    named = Candidate(
        codec=coder.spec,
        algorithm=whole(chosen.spec),
        chunks=chosen.chunks,
    )
    obstacle = _misfit(site, coder, chosen, reassociate)
    if obstacle := obstacle or (None if allowed.force else _needless(site, coder)):
        return dataclasses.replace(named, refused=obstacle)
    error = round(chosen.error(coder, site.group_size), 6)
    if allowed.max_error is not None and error > allowed.max_error:
        budget = f"the budget of {allowed.max_error:.3%} ({allowed.budget})"
        above = f"{coder.spec} by {chosen.spec}: error {error:.3%} is above {budget}"
        return dataclasses.replace(named, error=error, refused=above)
    scored = read_stages(site.kind, chosen.spec, coder.spec, *_scored(site))
    real = scored
    if site.uneven and site.bytes >= 0:
        real = read_stages(site.kind, chosen.spec, coder.spec, _payload(site), _handed(site))
    known = site.bytes >= 0
    return dataclasses.replace(
        named,
        chunks=_made(chosen, scored, site, coder),
        stages=scored.stages,
        wire_bytes=real.wire_bytes if known else -1,
        dynamic_bytes=real.dynamic_bytes if known else 0,
        domain=chosen.domain(coder),
        predicted_us=round(_us(_timed(scored, site, chosen, coder), site, profile), 3),
        error=error,
    )


CHUNKS = (2, 4, 8)
"""Into how many chunks a site may be divided where nobody names a number: more take longer, since
a rank is busy with every message (benchmarks/network/reduces.py)."""
MORE_CHUNKS = (16, 32)
"""And into how many where a rank is not: a stream of the GPU carries exchanges out."""
LEAST_BYTES = 2 << 20
"""Bytes of a tensor's values that are worth an exchange of their own."""
LEAST_OF_MANY = 16 << 20
"""As ``LEAST_BYTES``, of ``MORE_CHUNKS``: each takes as long to plan as it has operators."""
FEW_HOPS = ("one_shot", "two_shot", "direct")
"""Algorithms whose chunks are few messages."""
SLOW = 10.0
"""How many times longer than its coding a message of a ring's must take on the link for chunks to
gain: between its hops the rank takes turns (4 ranks on 2 cores: int8 gains 3 % at 0.1 Gbit/s, and
loses a fourth at 1, where it takes 9 times as long; benchmarks/network/reduces.py)."""


def _divided(
    chosen: Algorithm, site: Site, allowed: Allowed, coder: Codec, profile: Profile
) -> Iterator[Algorithm]:
    """An algorithm with every number of chunks that is allowed; one where it has none, where it was
    named with its own, and where chunks would be small or of sizes that are not fixed. The model
    knows what they gain where exchanges go as messages, or in a stream of the GPU's own, so it is
    those that it divides unasked."""
    unsure = _is_unsure(site) or coder.dynamic
    if each := chunk_bytes_of(chosen.spec):
        chunks = 1 if _is_unsure(site) else chunks_for(site.bytes, each)
        yield algorithm(site.kind, whole(chosen.spec), chunks=chunks)
        return
    if _whole(chosen, site) or (allowed.chunks is None and unsure):
        yield chosen
        return
    if allowed.chunks is not None:
        yield algorithm(site.kind, chosen.spec, chunks=allowed.chunks)
        return
    yield chosen
    for chunks in _numbers(site) if coder.settled else ():
        known = chosen.name in FEW_HOPS or _is_slow_ring(chosen, chunks, site, coder, profile)
        if known:
            yield algorithm(site.kind, chosen.spec, chunks=chunks)


def _numbers(site: Site) -> tuple[int, ...]:
    """Into how many parts a site may be divided unasked, each worth an exchange of its own: none
    where exchanges that are in the air together are not known to gain."""
    if not site.by_messages and site.device == "cpu":
        return ()
    more = () if site.by_messages else MORE_CHUNKS
    large = [many for many in more if many * LEAST_OF_MANY <= site.bytes]
    return (*(many for many in CHUNKS if many * LEAST_BYTES <= site.bytes), *large)


def _is_unsure(site: Site) -> bool:
    """Whether other ranks may hold other sizes, or other graphs."""
    return site.splits is not None or site.dynamic


def _is_slow_ring(
    chosen: Algorithm, chunks: int, site: Site, coder: Codec, profile: Profile
) -> bool:
    """Whether each message of a ring in chunks travels for long against what it takes to code."""
    if chosen.name != "ring":
        return False
    dtype = _payload(site).dtype
    values = site.bytes // dtype.itemsize // (site.group_size * chunks)
    nbytes = coder.expected_bytes(values, dtype)
    move = Stage(
        role="exchange",
        kind="all_to_all",
        nbytes=nbytes,
        leaving=nbytes,
        peers=1,
        reach=NEXT,
        by_messages=site.by_messages,
    )
    coding = [Stage(role=role, codec=coder.spec, values=values) for role in ("encode", "decode")]
    task = _prices(site, profile).task
    return task(move).us >= SLOW * sum(task(stage).us for stage in coding)


def _whole(chosen: Algorithm, site: Site) -> str | None:
    """Why an algorithm is not divided, whoever asks for it."""
    if not divides(site.kind, chosen.name):
        return f"{site.kind} by {chosen.name} is sent whole"
    if each := chunk_bytes_of(chosen.spec):
        return f"the algorithm was named with chunk_bytes={each}"
    if chosen.chunks > 1:
        return f"the algorithm was named with chunks={chosen.chunks}"
    return f"{chosen.spec} has shards instead" if "shards=" in chosen.spec else None


def _undivided(chosen: Algorithm, site: Site, allowed: Allowed) -> str:
    """What a reason says of chunks that a word asks for in vain."""
    if chunk_bytes_of(chosen.spec) and _is_unsure(site):
        return f"chunk_bytes={chunk_bytes_of(chosen.spec)} does not apply: sizes are not fixed"
    if allowed.chunks in (None, chosen.chunks) or not (why := _whole(chosen, site)):
        return ""
    return f"chunks={allowed.chunks} does not apply: {why}"


def _made(chosen: Algorithm, found: Stages, site: Site, coder: Codec) -> int:
    """How many chunks an algorithm makes in fact: fewer than it is told where there are not so many
    blocks. Of sizes that are not fixed, what it is told."""
    if chosen.chunks == 1 or site.dynamic:
        return chosen.chunks
    undivided = read_stages(site.kind, whole(chosen.spec), coder.spec, *_scored(site))
    return len(found.exchanges) // max(len(undivided.exchanges), 1)


def _misfit(site: Site, coder: Codec, chosen: Algorithm, reassociate: bool) -> str | None:
    """Why an algorithm cannot, or may not, carry out a site with a codec."""
    if obstacle := chosen.obstacle(coder, site.group_size):
        return obstacle
    if coder.state is not None and site.stateless:
        return f"{coder.spec} needs {coder.state}, but {site.stateless}"
    if coder.dynamic and site.fixed:
        return f"{coder.spec} has a wire whose size depends on the values, but {site.fixed}"
    if site.reduce_op is not None and coder.lossless and not reassociate:
        return (
            f"{coder.spec} by {chosen.spec} sums in another order, which reassociate=False forbids"
        )
    return None


MANY = 1 << 16
"""Values of a row whose padding no longer counts."""


def _needless(site: Site, coder: Codec) -> str | None:
    """Why nobody would want a codec who is not told to: it rounds values and sends no less."""
    own = getattr(torch, site.dtype)
    if coder.lossless or coder.wire_bytes(MANY, own) < MANY * own.itemsize:
        return None
    return f"{coder.spec} sends no fewer bytes than the values of {site.dtype} are"


def _algorithms(site: Site, allowed: Allowed, profile: Profile) -> list[Algorithm]:
    """The named algorithms that this kind has. Where none is one of its kind: its defaults, if the
    policy named them for every site alike; none, if the nearest word did."""
    found = []
    for spec in allowed.algorithms:
        if (chosen := own(site.kind, spec)) is None:
            continue
        if chosen.name == "hierarchical" and "node=" not in spec and profile.node > 1:
            chosen = algorithm(site.kind, spec, node=profile.on_each_host(site.global_ranks) or 1)
        found.append(chosen)
    if found or allowed.named:
        return found
    return [each for each in algorithms_of(site.kind) if each.name in DEFAULTS]


# --- what is sent ---------------------------------------------------------------------------------


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
        by_messages=site.by_messages,
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
    asked = dataclasses.replace(
        request(site), sent=rows, received=rows, unknown=not _known(site), alike=False
    )
    return Payload(ROWS * site.group_size * site.width, site.width, dtype), asked


def _handed(site: Site) -> Request:
    """What this rank asks for, where ranks may hold different sizes. If nobody knows them yet, all
    entries stand as if they went to one rank: their bytes are the same."""
    asked = request(site)
    if _known(site):
        return asked
    entries = _payload(site).numel // max(site.width, 1)
    rows = (entries, *[0] * (site.group_size - 1))
    return dataclasses.replace(asked, sent=rows, received=rows, unknown=True)


def _known(site: Site) -> bool:
    return all(isinstance(size, int) for some in site.splits or () for size in some)


# --- how long it takes ----------------------------------------------------------------------------


def coded_us(site: Site, chosen: Algorithm, coder: Codec, profile: Profile) -> float:
    """Predicted microseconds of a site by an algorithm with a codec."""
    found = read_stages(site.kind, chosen.spec, coder.spec, *_scored(site))
    return _us(_timed(found, site, chosen, coder), site, profile)


def plain_us(site: Site, profile: Profile) -> float:
    """Predicted microseconds of a site that is left alone."""
    return _alone(site, profile).predicted_us


def together_us(members: Sequence[PlannedSite], profile: Profile) -> float:
    """Predicted microseconds of a coalesced collective: one exchange of all that is left alone, and
    what is done to each of the others. As in the graph, all that waits for nothing comes first."""
    of_group, kind = _prices(members[0], profile), members[0].kind
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


def _timed(found: Stages, site: Site, chosen: Algorithm, coder: Codec) -> list[Stage]:
    """The stages that a candidate's time is made of: its own; of a message those of both ends,
    which must decide alike."""
    if not site.pairwise:
        return list(found)
    sent, received = (
        read_stages(kind, chosen.spec, coder.spec, _payload(site), request(site))
        for kind in ("send", "recv")
    )
    last = (len(list(sent)) - 1,)
    decodes = (stage for stage in received if stage.role == "decode")
    return [*sent, *(dataclasses.replace(stage, after=last) for stage in decodes)]


def _us(found: Sequence[Stage], site: Site, profile: Profile) -> float:
    """The time of stages: what is computed and what travels overlap as far as they can. A stream of
    the GPU's carries out one exchange after the other: the next begins when all of the one before
    has arrived."""
    tasks = list(map(_prices(site, profile).task, found))
    if site.device != "cpu":
        tasks = [
            task
            if task.resource == HOST
            else dataclasses.replace(task, us=task.us + task.latency_us, latency_us=0.0)
            for task in tasks
        ]
    return finished_us(tasks)


def _prices(site: Site, profile: Profile) -> Prices:
    labels = (site.group_label, *site.group_labels)
    return prices(profile, site.group_size, labels, site.global_ranks)
