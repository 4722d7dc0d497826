"""Into how many chunks or micro-shards a site is divided: as it is asked for, or as the cost model
finds worth it where nobody asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from commpass.codecs import Codec
from commpass.collectives import (
    Algorithm,
    Payload,
    algorithm,
    chunk_bytes_of,
    chunks_for,
    divides,
    has_shards,
    without_chunks,
)
from commpass.costmodel import Prices, Profile, prices
from commpass.plan import Candidate, Site
from commpass.plan.stage import NEXT, Stage
from commpass.policy.rules import Allowed

SURE = 0.01
"""By what share of the time more chunks, or micro-shards, must be faster than fewer."""
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


def divided(
    undivided: Algorithm, site: Site, allowed: Allowed, coder: Codec, profile: Profile
) -> Iterator[Algorithm]:
    """An algorithm with every number of chunks that is allowed; one where it has none, where it was
    named with its own, and where chunks would be small or of sizes that are not fixed. The model
    knows what they gain where exchanges go as messages, or in a stream of the GPU's own, so it is
    those that it divides unasked."""
    unsure = is_unsure(site) or coder.dynamic
    if each := chunk_bytes_of(undivided.spec):
        chunks = 1 if is_unsure(site) else chunks_for(site.bytes, each)
        yield algorithm(site.kind, without_chunks(undivided.spec), chunks=chunks)
        return
    if undivided_reason(undivided, site) or (allowed.chunks is None and unsure):
        yield undivided
        return
    if allowed.chunks is not None:
        yield algorithm(site.kind, undivided.spec, chunks=allowed.chunks)
        return
    yield undivided
    for chunks in _numbers(site) if coder.has_linear_padding else ():
        if undivided.name in FEW_HOPS or _is_slow_ring(undivided, chunks, site, coder, profile):
            yield algorithm(site.kind, undivided.spec, chunks=chunks)


def _numbers(site: Site) -> tuple[int, ...]:
    """Into how many parts a site may be divided unasked, each worth an exchange of its own: none
    where exchanges that are in the air together are not known to gain."""
    if not site.by_messages and site.device == "cpu":
        return ()
    more = () if site.by_messages else MORE_CHUNKS
    large = [many for many in more if many * LEAST_OF_MANY <= site.bytes]
    return (*(many for many in CHUNKS if many * LEAST_BYTES <= site.bytes), *large)


def is_unsure(site: Site) -> bool:
    """Whether other ranks may hold other sizes, or other graphs."""
    return site.splits is not None or site.dynamic


def _is_slow_ring(
    undivided: Algorithm, chunks: int, site: Site, coder: Codec, profile: Profile
) -> bool:
    """Whether each message of a ring in chunks travels for long against what it takes to code."""
    if undivided.name != "ring":
        return False
    dtype = payload_of(site).dtype
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
    task = prices_of(site, profile).task
    return task(move).us >= SLOW * sum(task(stage).us for stage in coding)


def undivided_reason(undivided: Algorithm, site: Site) -> str | None:
    """Why an algorithm is not divided, whoever asks for it."""
    if not divides(site.kind, undivided.name):
        return f"{site.kind} by {undivided.name} is sent whole"
    if each := chunk_bytes_of(undivided.spec):
        return f"the algorithm was named with chunk_bytes={each}"
    if undivided.chunks > 1:
        return f"the algorithm was named with chunks={undivided.chunks}"
    return f"{undivided.spec} has shards instead" if "shards=" in undivided.spec else None


def unapplied_note(undivided: Algorithm, site: Site, allowed: Allowed) -> str:
    """What a reason says of chunks that a word asks for in vain."""
    if chunk_bytes_of(undivided.spec) and is_unsure(site):
        return f"chunk_bytes={chunk_bytes_of(undivided.spec)} does not apply: sizes are not fixed"
    if allowed.chunks in (None, undivided.chunks) or not (why := undivided_reason(undivided, site)):
        return ""
    return f"chunks={allowed.chunks} does not apply: {why}"


def is_surely_faster(parts: Candidate, one: Candidate, site: Site, profile: Profile) -> bool:
    """Whether chunks that nobody asked for are faster than ``one``, which is sent whole, even if
    that is encoded by the kernel that makes its values: on a GPU a matmul may."""
    if site.device == "cpu" or one.refused or parts.refused:
        return True
    return parts.predicted_us < one.predicted_us - _free_us(one, site, profile)


def no_more_gain(
    candidates: Sequence[Candidate], site: Site, profile: Profile, minimum: float
) -> bool:
    """Whether more parts than the last of ``candidates`` has, each of which has more than the one
    before, would be chosen by nobody on a GPU. Where the last is no faster than the one before,
    more take longer still: what overlaps shrinks, and start-ups add up. And none ends before all
    that it computes, or sends, is done one after the other: that must be less than ``minimum``
    microseconds. On a CPU all are scored, since a rank takes turns between its messages."""
    if site.device == "cpu" or any(each.refused for each in candidates):
        return False
    if len(candidates) > 1 and candidates[-1].predicted_us >= candidates[-2].predicted_us:
        return True
    busy: dict[Hashable, float] = {}
    for task in map(prices_of(site, profile).task, candidates[-1].stages):
        busy[task.resource] = busy.get(task.resource, 0.0) + task.us + task.latency_us
    return max(busy.values(), default=0.0) >= minimum


def _free_us(one: Candidate, site: Site, profile: Profile) -> float:
    """How long what is sent whole is encoded at first, where that may cost nothing."""
    if site.device == "cpu":
        return 0.0
    task = prices_of(site, profile).task
    first = (stage for stage in one.stages if stage.role == "encode" and not stage.after)
    return sum(task(stage).us for stage in first)


def in_shards(
    undivided: Algorithm,
    one: Candidate,
    site: Site,
    coder: Codec,
    profile: Profile,
    minimum: float,
    score: Callable[[Algorithm], Candidate],
) -> Iterator[Candidate]:
    """An algorithm in micro-shards, if that takes less than ``minimum`` microseconds: in as few as
    are hardly slower. Only what is decoded hides behind what arrives, so there is nothing to gain
    where ``one``, which has none, would take longer even without that. It is for what is not
    divided into chunks: those hide what is encoded as well, by one message less a hop. What is to
    be summed counts as written and read once more: no kernel decodes and sums what comes in parts.
    """
    task = prices_of(site, profile).task
    decodes = [stage for stage in one.stages if stage.role == "decode"]
    computed = [stage for stage in one.stages if stage.role in ("sum", "encode", "leave")]
    summed = {number for stage in computed for number in stage.after}
    values = sum(one.stages[n].values for n in summed if one.stages[n].role == "decode")
    minimum -= profile.kernels.copies_us(0, 2 * torch.float32.itemsize * values)
    minimum -= _free_us(one, site, profile)
    if one.predicted_us - sum(task(stage).us for stage in decodes) >= minimum:
        return
    if not has_shards(site.kind, undivided.name):
        return
    if site.by_messages and site.kind == "broadcast":
        return  # gloo's own exchanges, of which small ones must not be in the air together
    made = []
    for shards in _numbers(site):
        turns = site.by_messages and undivided.name not in FEW_HOPS
        if not turns or _is_slow_ring(undivided, shards, site, coder, profile):
            made.append(score(algorithm(site.kind, undivided.spec, shards=shards)))
            if no_more_gain(made, site, profile, minimum):
                break
    possible = [each for each in made if not each.refused and each.predicted_us < minimum]
    if possible:
        best = min(each.predicted_us for each in possible)
        yield next(each for each in possible if each.predicted_us <= best * (1 + SURE))


def payload_of(site: Site) -> Payload:
    """The tensor that a rank hands over."""
    dtype = getattr(torch, site.dtype)
    return Payload(max(site.bytes, 0) // dtype.itemsize, site.width, dtype)


def prices_of(site: Site, profile: Profile) -> Prices:
    """What anything costs in the group of a site."""
    labels = (site.group_label, *site.group_labels)
    return prices(profile, site.group_size, labels, site.global_ranks)
