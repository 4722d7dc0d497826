"""How many chunks or micro-shards a site is divided into: as requested, or as the cost model
predicts a gain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from commpass.codecs import Codec
from commpass.collectives import (
    Algorithm,
    chunks_for,
    has_parameter,
    with_parameters,
    without_chunks,
)
from commpass.costmodel import Profile
from commpass.passes.payloads import payload_of, prices_of
from commpass.plan import Candidate, Site
from commpass.plan.kinds import KINDS
from commpass.plan.stage import NEXT, Stage
from commpass.policy.rules import Allowed

SURE = 0.01
"""How much faster more chunks or micro-shards must be than fewer, as a share of the time."""
CHUNKS = (2, 4, 8)
"""Chunk counts that are tried without a request. More take longer, because a rank is busy with
every message (benchmarks/network/reduces.py)."""
MORE_CHUNKS = (16, 32)
"""Further chunk counts where the rank is not busy with messages: a GPU stream runs the
exchanges."""
LEAST_BYTES = 2 << 20
"""Minimum bytes of values that justify an exchange of their own."""
LEAST_OF_MANY = 16 << 20
"""As ``LEAST_BYTES``, for ``MORE_CHUNKS``: planning time grows with the number of operators."""
FEW_HOPS = ("one_shot", "two_shot", "direct")
"""Algorithms whose chunks are few messages."""
SLOW = 10.0
"""How many times longer than its coding a ring message must take on the link for chunks to gain.

The rank alternates between the hops of chunks. Measured with 4 ranks on 2 cores: int8 gains 3 % at
0.1 Gbit/s. At 1 Gbit/s, where a message takes 9 times as long as its coding, it loses a fourth
(benchmarks/network/reduces.py).
"""


def divided(
    undivided: Algorithm, site: Site, allowed: Allowed, codec: Codec, profile: Profile
) -> Iterator[Algorithm]:
    """Yield an algorithm with every allowed number of chunks.

    Yield it undivided if it has no chunks, if it was named with its own, or if chunks would be
    small or of symbolic sizes. Without a request, only exchanges as messages and exchanges in a GPU
    stream are divided, because the model knows their gain.
    """
    unsure = is_unsure(site) or codec.dynamic
    if each := undivided.chunk_bytes:
        chunks = 1 if is_unsure(site) else chunks_for(site.bytes, each)
        yield with_parameters(without_chunks(undivided), chunks=chunks)
        return
    if undivided_reason(undivided, site) or (allowed.chunks is None and unsure):
        yield undivided
        return
    if allowed.chunks is not None:
        yield with_parameters(undivided, chunks=allowed.chunks)
        return
    yield undivided
    for chunks in _numbers(site) if codec.has_linear_padding else ():
        if undivided.name in FEW_HOPS or _is_slow_ring(undivided, chunks, site, codec, profile):
            yield with_parameters(undivided, chunks=chunks)


def _numbers(site: Site) -> tuple[int, ...]:
    """Return the chunk counts to try without a request, each chunk large enough for its own
    exchange.

    Return none if concurrent exchanges are not known to gain.
    """
    if not site.by_messages and site.device == "cpu":
        return ()
    more = () if site.by_messages else MORE_CHUNKS
    large = [many for many in more if many * LEAST_OF_MANY <= site.bytes]
    return (*(many for many in CHUNKS if many * LEAST_BYTES <= site.bytes), *large)


def is_unsure(site: Site) -> bool:
    """Whether other ranks may hold other sizes or other graphs."""
    return site.splits is not None or site.dynamic


def _is_slow_ring(
    undivided: Algorithm, chunks: int, site: Site, codec: Codec, profile: Profile
) -> bool:
    """Whether each message of a chunked ring travels long compared with its coding."""
    if undivided.name != "ring":
        return False
    dtype = payload_of(site).dtype
    values = site.bytes // dtype.itemsize // (site.group_size * chunks)
    nbytes = codec.expected_bytes(values, dtype)
    move = Stage(
        role="exchange",
        kind="all_to_all",
        nbytes=nbytes,
        leaving=nbytes,
        peers=1,
        reach=NEXT,
        by_messages=site.by_messages,
    )
    coding = [Stage(role=role, codec=codec.spec, values=values) for role in ("encode", "decode")]
    task = prices_of(site, profile).task
    return task(move).us >= SLOW * sum(task(stage).us for stage in coding)


def undivided_reason(undivided: Algorithm, site: Site) -> str | None:
    """Return why an algorithm is not divided even on request, else None."""
    if not has_parameter(undivided, "chunks"):
        return f"{site.kind} by {undivided.name} is sent whole"
    if each := undivided.chunk_bytes:
        return f"the algorithm was named with chunk_bytes={each}"
    if undivided.chunks > 1:
        return f"the algorithm was named with chunks={undivided.chunks}"
    has_shards = "shards" in dict(undivided.parameters)
    return f"{undivided.spec} has shards instead" if has_shards else None


def unapplied_note(undivided: Algorithm, site: Site, allowed: Allowed) -> str:
    """Return the note for a request of chunks that does not apply, else ""."""
    if undivided.chunk_bytes and is_unsure(site):
        return f"chunk_bytes={undivided.chunk_bytes} does not apply: sizes are not fixed"
    if allowed.chunks in (None, undivided.chunks) or not (why := undivided_reason(undivided, site)):
        return ""
    return f"chunks={allowed.chunks} does not apply: {why}"


def is_surely_faster(parts: Candidate, one: Candidate, site: Site, profile: Profile) -> bool:
    """Whether unrequested chunks are faster than ``one``, the undivided candidate.

    They must be faster even if the kernel that produces the values encodes ``one`` for free, as a
    GPU matmul may.
    """
    if site.device == "cpu" or one.refused or parts.refused:
        return True
    return parts.predicted_us < one.predicted_us - _free_us(one, site, profile)


def no_more_gain(
    candidates: Sequence[Candidate], site: Site, profile: Profile, minimum: float
) -> bool:
    """Whether no candidate with more parts can be chosen on a GPU.

    ``candidates`` have increasing numbers of parts. If the last one is no faster than the one
    before, more parts take longer still: overlap shrinks, and start-ups add up. A candidate also
    takes at least as long as all its computation, or all its transfers, in sequence. This must be
    less than ``minimum`` microseconds. On a CPU all are scored, since a rank alternates between its
    messages.
    """
    if site.device == "cpu" or any(each.refused for each in candidates):
        return False
    if len(candidates) > 1 and candidates[-1].predicted_us >= candidates[-2].predicted_us:
        return True
    busy: dict[Hashable, float] = {}
    for task in map(prices_of(site, profile).task, candidates[-1].stages):
        busy[task.resource] = busy.get(task.resource, 0.0) + task.us + task.latency_us
    return max(busy.values(), default=0.0) >= minimum


def _free_us(one: Candidate, site: Site, profile: Profile) -> float:
    """Return how long the first encode of an undivided candidate takes, if it may cost nothing."""
    if site.device == "cpu":
        return 0.0
    task = prices_of(site, profile).task
    first = (stage for stage in one.stages if stage.role == "encode" and not stage.after)
    return sum(task(stage).us for stage in first)


def in_shards(
    undivided: Algorithm,
    one: Candidate,
    site: Site,
    codec: Codec,
    profile: Profile,
    minimum: float,
    score: Callable[[Algorithm], Candidate],
) -> Iterator[Candidate]:
    """Yield an algorithm in micro-shards if it takes less than ``minimum`` microseconds, in the
    fewest that are not significantly slower.

    Micro-shards overlap only decodes with arriving data. They gain nothing if ``one``, which has
    none, would exceed ``minimum`` even without its decodes. They serve algorithms without chunks;
    chunks also overlap encodes, with one message less per hop. Values to be summed count as written
    and read once more, because no kernel decodes and sums data that comes in parts.
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
    if not has_parameter(undivided, "shards"):
        return
    if site.by_messages and KINDS[site.kind].rooted:
        return  # gloo's own exchanges; small ones must not be in flight together
    made = []
    for shards in _numbers(site):
        turns = site.by_messages and undivided.name not in FEW_HOPS
        if not turns or _is_slow_ring(undivided, shards, site, codec, profile):
            made.append(score(with_parameters(undivided, shards=shards)))
            if no_more_gain(made, site, profile, minimum):
                break
    possible = [each for each in made if not each.refused and each.predicted_us < minimum]
    if possible:
        best = min(each.predicted_us for each in possible)
        yield next(each for each in possible if each.predicted_us <= best * (1 + SURE))
