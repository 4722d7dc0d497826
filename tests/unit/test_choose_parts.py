"""The number of chunks or micro-shards of a site, if none is given.

It follows from the predicted time, which is computed a second time here.
"""

from __future__ import annotations

import dataclasses

import pytest
from deciding import FAST, MIB, decide, forced, one, options, profile, site

from commpass.costmodel import KernelRate, Kernels, Link
from commpass.errors import PolicyError
from commpass.passes import candidates, divide
from commpass.policy import Policy
from commpass.policy.rules import Rule

RANKS = 8
BLOCK_BYTES = 1 + 4 / 256
"""Bytes per value of int8 and equarx(block=256)."""


def kernels(encode_ns: float, decode_ns: float, gbytes_per_s: float = 1000.0) -> Kernels:
    """Kernels of a codec; other work takes no time."""
    rate = KernelRate(encode_ns, decode_ns)
    return Kernels(launch_us=0.0, other=rate, gbytes_per_s=gbytes_per_s)


def gathered(mib: float = 16, **changes):
    """An all_gather on a GPU, of float32."""
    return site("all_gather", int(mib * MIB) // 4, RANKS, **({"device": "cuda"} | changes))


# --- chunks on the stream of a GPU ----------------------------------------------------------------


def in_chunks_us(numel: int, chunks: int, alpha: float, rate: float, how: Kernels) -> float:
    """The first chunk is encoded, all are sent one after the other, and the last one is decoded;
    the rest overlaps with the exchanges."""
    first = numel / chunks * how.other.encode_ns / 1e3
    last = RANKS * numel / chunks * how.other.decode_ns / 1e3
    wire = (RANKS - 1) * (chunks * alpha + numel * BLOCK_BYTES / rate / 1e3)
    return first + wire + last


@pytest.mark.parametrize(("alpha", "expected"), [(10, 8), (20, 4), (100, 2), (1000, 1)])
def test_number_of_chunks_follows_from_the_predicted_time(alpha, expected):
    """On a GPU each exchange of a stream has a start-up time, which nothing overlaps."""
    a_site, how = gathered(), kernels(0.125, 0.0625)
    a_profile = profile(Link(alpha, 10.0), kernels=how)
    times = {many: in_chunks_us(4 * MIB, many, alpha, 10.0, how) for many in (1, 2, 4, 8)}
    best = min(times.values())
    assert expected == min(many for many, us in times.items() if us <= 1.01 * best)
    found = one(a_site, Policy(codecs="int8", algorithms="direct"), a_profile)
    assert found.chunks == expected
    assert found.predicted_us == pytest.approx(times[expected], rel=1e-3)


def test_chunks_on_a_gpu_gain_more_than_the_encode_that_a_matmul_may_do():
    """Eight chunks of an all_to_all hide 7/8 of encode and decode.

    That is more than the whole encode if decode takes more than a seventh of it, and not if it
    takes less.
    """
    policy = Policy(codecs="int8", algorithms="direct")
    a_site = site("all_to_all", 4 * MIB, RANKS, device="cuda")
    for decode_ns, expected in ((0.2, {1, 8}), (0.13, {1})):
        a_profile = profile(Link(0.0, 0.5), kernels=kernels(1.0, decode_ns))
        (found,) = options([a_site], policy, a_profile)
        assert {each.chunks for each in found.possible} == expected
    (found,) = options(
        [dataclasses.replace(a_site, device="cpu", by_messages=True)], policy, a_profile
    )
    assert {each.chunks for each in found.possible} == {1, 2, 4, 8}


@pytest.mark.parametrize("mib", [3.9, 16, 256, 512])
def test_chunks_on_a_gpu_are_worth_an_exchange_each(mib):
    """2 MiB; above eight of them 16 MiB, since each chunk takes as long to plan as it has
    operators."""
    policy = Policy(codecs="int8", algorithms="direct")
    a_profile = profile(Link(0.1, 1.0), kernels=kernels(0.0, 0.01))
    (found,) = options([gathered(mib)], policy, a_profile)
    counts = {1, *(c for c in (2, 4, 8) if 2 * c <= mib), *(c for c in (16, 32) if 16 * c <= mib)}
    assert {each.chunks for each in found.possible} == counts


@pytest.mark.parametrize(
    ("kind", "name", "on_gpu"),
    [("all_reduce", "two_shot", {1, 2, 4, 8}), ("all_to_all", "direct", {1, 4, 8})],
)
def test_chunks_are_tried_on_a_gpu_as_over_messages(kind, name, on_gpu):
    policy = Policy(codecs="int8", algorithms=name)
    link = profile(Link(1.0, 1.0))
    for changes, expected in (
        ({"device": "cuda"}, on_gpu),
        ({"by_messages": True}, {1, 2, 4, 8}),
        ({}, {1}),
    ):
        (found,) = options([site(kind, 4 * MIB, RANKS, **changes)], policy, link)
        assert {each.chunks for each in found.possible} == expected


def test_chunks_of_an_exchange_do_not_share_their_start_up_time_on_a_gpu():
    """With messages they do."""
    policy = Policy(rules=[Rule(codec="int8", algorithm="direct", force=True, chunks=4)])
    slow = profile(Link(1000.0, 1e9), kernels=kernels(0.0, 0.0))
    gpu, cpu = (one(gathered(device=device), policy, slow) for device in ("cuda", "cpu"))
    assert gpu.predicted_us - cpu.predicted_us == pytest.approx(3 * 7 * 1000.0)


# --- chunks by their bytes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "each", "expected"),
    [(256, 64, 4), (64, 64, 1), (1, 64, 1), (160, 64, 2), (180, 64, 3), (1024, 4, 64), (16, 2, 8)],
)
def test_chunks_of_so_many_bytes_are_a_number_for_each_size(mib, each, expected):
    """As near as possible; 64 MiB in TACO, section 3; never more than 64 chunks."""
    for device in ("cpu", "cuda"):
        named = f"two_shot(chunk_bytes={each * MIB})"
        a_site = site("all_reduce", mib * MIB // 4, RANKS, device=device)
        found = one(a_site, forced("int8", named), profile())
        assert (found.algorithm, found.chunks) == ("two_shot", expected)
        assert sum(stage.role == "exchange" for stage in found.stages) == 2 * expected


def test_chunks_of_so_many_bytes_are_whole_where_sizes_are_not_fixed():
    named = f"two_shot(chunk_bytes={2 * MIB})"
    found = one(site(shape=("s0", 4), numel=4 * MIB), forced("int8", named), profile())
    assert found.chunks == 1
    assert "chunk_bytes=2097152 does not apply: sizes are not fixed" in found.reason
    rule = Rule(codec="int8", algorithm=named, chunks=4, force=True)
    found = one(site(numel=4 * MIB), Policy(rules=[rule]), profile())
    assert found.chunks == 8
    assert "chunks=4 does not apply: the algorithm was named with chunk_bytes=" in found.reason


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("two_shot(chunk_bytes=-1)", "chunk_bytes=-1: must be a number of bytes"),
        ("ring(chunk_bytes=64, chunks=2)", "chunk_bytes=64 and chunks=2: give one"),
        ("one_shot(chunk_bytes=64, shards=2)", "chunk_bytes=64 and shards=2: give one"),
    ],
)
def test_chunks_of_so_many_bytes_are_refused_in_words(named, words):
    with pytest.raises(PolicyError, match=words):
        Policy(rules=[Rule(codec="int8", algorithm=named)])


# --- micro-shards ---------------------------------------------------------------------------------

EQUARX = Policy(codecs="equarx(block=256)", algorithms="direct")
"""Its blocks depend on the length, so it is not chunked by default."""


def in_shards_us(numel: int, shards: int, alpha: float, rate: float, how: Kernels) -> float:
    """Everything is encoded; side data and all codes are sent; the last shard is decoded.
    ``shards`` of 1 is one exchange without shards."""
    encode = numel * how.other.encode_ns / 1e3
    last = RANKS * numel / shards * how.other.decode_ns / 1e3
    exchanges = 1 + shards if shards > 1 else 1
    wire = (RANKS - 1) * (exchanges * alpha + numel * BLOCK_BYTES / rate / 1e3)
    return encode + wire + last


SHARDS = [
    (10.0, 0.0625, 0.1, 4),  # 2.1 ms of 5.7 are decoding
    (10.0, 0.0625, 0.4, 1),  # at most 37 % of them can overlap
    (10.0, 0.005, 0.1, 1),  # 4 % are decoding
    (1000.0, 0.0625, 0.1, 1),  # an exchange takes longer to start than it saves
]
"""Start-up time, decoding time per value, margin, and the shards that are chosen."""


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"device": "cpu", "by_messages": True}])
@pytest.mark.parametrize(("alpha", "decode_ns", "margin", "expected"), SHARDS)
def test_micro_shards_are_chosen_where_they_surely_win(alpha, decode_ns, margin, expected, changes):
    how = kernels(0.125, decode_ns)
    a_profile = profile(Link(alpha, 10.0), margin, how)
    found = one(gathered(**changes), EQUARX, a_profile)
    assert found.codec == "equarx(block=256)"
    name, chunks, us = found.algorithm, found.chunks, found.predicted_us
    assert chunks == 1
    if "by_messages" in changes:  # these share their start-up times
        assert ("shards=" in name) == (expected > 1 or alpha == 1000.0)
        return
    times = {many: in_shards_us(4 * MIB, many, alpha, 10.0, how) for many in (1, 2, 4, 8)}
    least = (1 - margin) * times[1] - 4 * MIB * how.other.encode_ns / 1e3
    sure = [many for many in (2, 4, 8) if times[many] < least]
    best = min((times[many] for many in sure), default=0.0)
    assert expected == next((many for many in sure if times[many] <= 1.01 * best), 1)
    assert name == ("direct" if expected == 1 else f"direct(shards={expected})")
    assert us == pytest.approx(times[expected], rel=1e-3)


def test_micro_shards_are_not_tried_where_chunks_are():
    """Chunks overlap encoding as well, with one exchange fewer."""
    policy = Policy(codecs="int8", algorithms="direct")
    a_profile = profile(Link(10.0, 10.0), 0.1, kernels(0.125, 0.0625))
    (found,) = options([gathered()], policy, a_profile)
    assert {each.algorithm for each in found.possible} == {"direct"}
    (found,) = options([gathered()], EQUARX, a_profile)
    assert [each.algorithm for each in found.possible] == ["direct", "direct(shards=4)"]


def test_micro_shards_of_a_sum_count_that_no_kernel_decodes_and_sums_them():
    """Two-shot: what the first hop decodes is written and read once more, 32 MiB of float32 for 16
    MiB of values."""
    policy = forced("equarx(block=256)", "two_shot")
    a_site = site("all_reduce", 4 * MIB, RANKS, device="cuda")
    for gbytes_per_s, expected in ((1000.0, "two_shot(shards=8)"), (10.0, "two_shot")):
        how = kernels(0.0, 0.25, gbytes_per_s)
        found = one(a_site, policy, profile(Link(1.0, 10.0), 0.1, how))
        assert found.algorithm == expected


ALONE = {
    "a number of chunks": (gathered(), dataclasses.replace(EQUARX, chunks=1)),
    "a library on a CPU": (gathered(device="cpu"), EQUARX),
    "a size that is not fixed": (gathered(shape=("s0", 4)), EQUARX),
    "splits": (
        site("all_to_all", 4 * MIB, 2, device="cuda", splits=((9, 3), (9, 3))),
        EQUARX,
    ),
    "a small tensor": (gathered(3.9), EQUARX),
    "named shards": (
        gathered(),
        dataclasses.replace(EQUARX, algorithms="direct(shards=2)"),
    ),
    "a library's own broadcasts": (
        site("broadcast", 4 * MIB, RANKS, by_messages=True),
        EQUARX,
    ),
    "a ring by messages whose rank takes turns": (
        site("all_reduce", 4 * MIB, RANKS, by_messages=True),
        Policy(codecs="equarx(block=256)", algorithms=("ring", "semi_ring")),
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_micro_shards_are_not_tried_where_what_they_gain_is_not_known(what):
    a_site, policy = ALONE[what]
    a_profile = profile(Link(1.0, 10.0), 0.0, kernels(0.125, 0.25))
    (found,) = options([a_site], policy, a_profile)
    assert found.possible
    named = {"direct(shards=2)"} if what == "named shards" else set()
    assert {each.algorithm for each in found.possible if "shards" in each.algorithm} == named


def test_micro_shards_are_planned_the_same_each_time():
    a_site = gathered()
    a_profile = profile(Link(10.0, 10.0), 0.1, kernels(0.125, 0.0625))
    twice = [decide([a_site], EQUARX, a_profile) for _ in range(2)]
    assert twice[0] == twice[1]
    assert one(a_site, EQUARX, profile(FAST)).codec == "none"


# --- candidates that need not be scored -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("rate", [2.0, 20.0, 360.0])
def test_parts_that_are_not_scored_on_a_gpu_would_not_have_been_chosen(monkeypatch, alpha, rate):
    """The choice is that among all numbers of chunks and micro-shards; fewer are scored."""
    how = kernels(0.02, 0.01, 500.0)
    a_profile = profile(Link(alpha, rate), kernels=how, margin=0.1)
    policy = Policy(codecs=("int8", "int4"), algorithms=("two_shot", "ring"), max_error=0.5)
    sites = [site("all_reduce", mib * MIB // 2, RANKS, device="cuda") for mib in (8, 64)]
    counts: list[int] = []  # how often an algorithm is scored
    real, chosen = candidates._candidate, []

    def counted(*given, **more):
        counts[-1] += 1
        return real(*given, **more)

    monkeypatch.setattr(candidates, "_candidate", counted)
    for prune in (True, False):
        if not prune:
            for module in (candidates, divide):
                monkeypatch.setattr(module, "no_more_gain", lambda *_: False)
        counts.append(0)
        plan = decide(sites, policy, a_profile)
        chosen.append([(each.codec, each.algorithm, each.chunks) for each in plan])
    assert chosen[0] == chosen[1]
    assert counts[0] <= counts[1]
    assert counts[0] < counts[1] or (alpha, rate) == (1.0, 20.0)  # most parts pay there
