"""Algorithms on more ranks than a machine can start: correct sums, errors as predicted, equal bits,
bytes as stated."""

from __future__ import annotations

import math

import pytest
import torch
from fabric import lockstep
from tiers import thinned

import commpass
from commpass.collectives import Payload, Request, algorithm, read_stages

RANKS = [5, 6, 7, 16]
STAGED = [
    f"{name}{stage}"
    for name in ("two_shot", "ring", "semi_ring")
    for stage in ("", "(stage=ag)", "(stage=rs)")
]
SUMS = [
    ("all_reduce", name)
    for name in ("one_shot", "one_shot(shards=3)", *STAGED, "ring(shards=2)", "semi_ring(shards=2)")
]
SUMS += [
    ("reduce_scatter", name) for name in ("direct", "ring", "semi_ring", "semi_ring(shards=2)")
]
BY_NODES = (
    "hierarchical(node=4)",
    "hierarchical(between=int4, node=2)",
    "hierarchical(node=8, stage=rs)",
)
NODES = [("all_reduce", name) for name in BY_NODES] + [("reduce_scatter", BY_NODES[1])]
CASES = [(*case, ranks) for case in SUMS for ranks in RANKS] + [(*case, 16) for case in NODES]


def inputs(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(ranks)
    ]


def carried_out(kind, name, codec, values, monkeypatch, op="sum", by_messages=False):
    ranks, coder, chosen = len(values), commpass.codec(codec), algorithm(kind, name)
    requests = [Request("0", ranks, rank, op, by_messages=by_messages) for rank in range(ranks)]
    run = lambda rank: chosen.run(values[rank], requests[rank], coder)  # noqa: E731
    payload = Payload(values[0].numel(), 1, values[0].dtype)
    said = [read_stages(kind, name, codec, payload, request).exchanges for request in requests]
    results, fabric = lockstep(run, ranks, monkeypatch)
    for sent, exchanges in zip(fabric.started, said, strict=True):
        if not coder.dynamic:
            assert [(each.kind, each.wire.nbytes) for each in sent] == [
                (stage.kind, stage.nbytes) for stage in exchanges
            ]
    return results


def exact(kind, values, rank):
    total = sum(value.double() for value in values)
    return total if kind == "all_reduce" else total.chunk(len(values))[rank]


HARDWARE = [
    ("all_reduce", "two_shot", 5, "nvfp4"),
    ("all_reduce", "ring", 6, "mxfp6"),
    ("reduce_scatter", "direct", 7, "nvfp4"),
]
UNEVEN_GROUPS = 1024 * 257
"""The number of values of a rank's shard in which a codec of uniform groups pads whole blocks
again."""


@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "name", "ranks"),
    [
        *[("all_reduce", name, 3) for name in ("two_shot", "two_shot(stage=ag)", "ring")],
        ("all_reduce", "semi_ring", 5),
        ("all_reduce", "hierarchical(node=2)", 4),
        ("reduce_scatter", "ring", 2),
    ],
)
def test_shards_of_blocks_that_are_padded_to_groups_arrive_in_their_places(
    kind, name, ranks, monkeypatch
):
    values = inputs(ranks, (ranks, UNEVEN_GROUPS))
    results = carried_out(kind, name, "equarx", values, monkeypatch)
    for rank, result in enumerate(results):
        expected = exact(kind, values, rank)
        assert (result.double() - expected).norm() <= 0.03 * expected.norm()
    if kind == "all_reduce":
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.rest_slow(1)
@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("kind", "name", "ranks", "codec"),
    [*thinned(CASES, ["int8", "rotated"], one_in=2), *HARDWARE],
)
def test_sums_have_the_predicted_error_and_replicas_the_same_bits(
    kind, name, ranks, codec, monkeypatch
):
    values = inputs(ranks, (ranks * 2, 512))
    results = carried_out(kind, name, codec, values, monkeypatch)
    lost = sum(
        (result.double() - exact(kind, values, rank)).square().mean().item()
        for rank, result in enumerate(results)
    )
    predicted = algorithm(kind, name).error(commpass.codec(codec), ranks)
    assert (
        0.85 * predicted <= math.sqrt(lost / ranks / ranks) <= 1.15 * predicted
    )  # the sum's variance is the number of ranks
    if kind == "all_reduce":
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    ("codec", "between"), [("rotated", "int8"), ("int8", "rotated"), ("rotated", "rotated(bits=4)")]
)
def test_codecs_of_other_domains_may_follow_one_another(kind, codec, between, monkeypatch):
    values = inputs(4, (8, 512))
    name = f"hierarchical(between={between}, node=2)"
    results = carried_out(kind, name, codec, values, monkeypatch)
    for rank, result in enumerate(results):
        expected = exact(kind, values, rank)
        assert (result.double() - expected).norm() <= 0.15 * expected.norm()


@pytest.mark.rest_slow(1)
@pytest.mark.few(28)
@pytest.mark.parametrize(("kind", "name", "ranks", "op"), thinned(CASES, ["sum", "avg"], one_in=2))
def test_odd_shapes_of_bfloat16_by_a_lossless_codec_lose_no_more_than_one_rounding(
    kind, name, ranks, op, monkeypatch
):
    values = inputs(ranks, (ranks * 3, 43), torch.bfloat16)
    results = carried_out(kind, name.replace("between=int4, ", ""), "raw", values, monkeypatch, op)
    for rank, result in enumerate(results):
        expected = exact(kind, values, rank) / (ranks if op == "avg" else 1)
        assert result.dtype == torch.bfloat16
        twice = (
            2 if kind == "all_reduce" and "one_shot" not in name else 1
        )  # a stage that sends bfloat16 rounds to it
        assert ((result.double() - expected).abs() <= twice * 2**-8 * expected.abs() + 1e-5).all()


@pytest.mark.few(14)
@pytest.mark.parametrize("codec", ["int8", "rotated", "bf16", "raw", "equarx"])
@pytest.mark.parametrize("name", ["ring", "ring(stage=rs)", "ring(stage=ag)", "ring(chunks=3)"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_messages_of_a_ring_never_meet_and_sums_are_the_same(ranks, name, codec, monkeypatch):
    values = inputs(ranks, (ranks * 3, 129))
    expected = carried_out("all_reduce", name, codec, values, monkeypatch)
    results = carried_out("all_reduce", name, codec, values, monkeypatch, by_messages=True)
    assert all(map(torch.equal, results, expected))
    payload = Payload(values[0].numel(), 1, torch.float32)
    request = Request("0", ranks, 1, by_messages=True)
    found = read_stages("all_reduce", name, codec, payload, request).exchanges
    library = read_stages("all_reduce", name, codec, payload, Request("0", ranks, 1)).exchanges
    leaving = [stage.leaving for stage in found]
    if ranks > 2:
        assert {stage.peers for stage in found} == {1}
        assert len(found) % (2 * (ranks - 1)) == 0
    gathers = [stage.leaving for stage in library if stage.kind == "all_gather"]
    others = [stage.leaving for stage in library if stage.kind != "all_gather"]
    assert sum(leaving) == sum(others) + (ranks - 1 if ranks > 2 else 1) * sum(gathers)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one_shot", "two_shot", "ring", "semi_ring"])
def test_exponent_sums_are_exact_in_float32_order(name, monkeypatch):
    values = [
        torch.randint(-99, 99, (6, 500), generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(6)
    ]
    results = carried_out("all_reduce", name, "exponent", values, monkeypatch)
    assert all(torch.equal(result, exact("all_reduce", values, 0).bfloat16()) for result in results)


@pytest.mark.parametrize("codec", ["int8", "exponent"])
def test_rank_that_sends_even_parts_and_receives_others_does_as_its_peers(codec, monkeypatch):
    sent = [(2, 2, 2), (1, 2, 3), (4, 2, 0)]
    generator = torch.Generator().manual_seed(9)
    values = [torch.randn(sum(some), 3, generator=generator) for some in sent]
    requests = [
        Request("0", 3, rank, sent=some, received=tuple(each[rank] for each in sent))
        for rank, some in enumerate(sent)
    ]
    chosen, coder = algorithm("all_to_all", "direct"), commpass.codec(codec)
    results, _ = lockstep(
        lambda rank: chosen.run(values[rank], requests[rank], coder), 3, monkeypatch
    )
    for rank, result in enumerate(results):
        parts = [x.split(some)[rank] for x, some in zip(values, sent, strict=True)]
        assert torch.allclose(result, torch.cat(parts), atol=0.02, rtol=0)
