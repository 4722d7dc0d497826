"""The rows of ``plan.kinds``, and collectives of parts of different lengths on many ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fabric import lockstep
from torch.testing._internal.distributed.fake_pg import FakeStore

import commpass
from commpass.collectives import Payload, Request, algorithm, algorithms_of, read_stages
from commpass.collectives.table import ALGORITHMS
from commpass.plan.kinds import BY_RANK, COPIES, GATHERS, KIND_OF, KINDS, PAIRWISE, SUMS

PARTS = [[3, 0, 1, 7, 2], [0, 0, 0, 0, 6], [2, 2, 2, 2, 2], [1, *[0, 4] * 8]]


def test_names_by_fact():
    assert PAIRWISE == ("send", "recv")
    assert SUMS == ("all_reduce", "reduce_scatter", "reduce_scatter_v")
    assert GATHERS == ("all_gather", "all_to_all", "all_gather_v")
    assert COPIES == ("all_gather", "all_gather_v", "broadcast")
    assert BY_RANK == ("all_reduce", "all_gather", "reduce_scatter")


def test_every_operator_has_one_kind_and_every_kind_an_algorithm():
    assert len(KIND_OF) == sum(len(row.operators) for row in KINDS.values())
    assert set(ALGORITHMS) == set(KINDS)
    assert all(algorithms_of(kind) for kind in KINDS)


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row.backward])
def test_backward_sends_back_along_the_first_dimension_what_forward_sent(kind):
    row, back = KINDS[kind], KINDS[KINDS[kind].backward]
    assert KINDS[back.backward] == row
    assert (row.scatters, row.gathers, row.splits) == (back.gathers, back.scatters, back.splits)
    assert callable(getattr(commpass, kind))


def request_of(kind: str, parts: list[int], rank: int, op: str = "sum") -> Request:
    own = (parts[rank],) * len(parts)
    sent, received = (own, tuple(parts)) if kind == "all_gather_v" else (tuple(parts), own)
    return Request("0", len(parts), rank, op, sent=sent, received=received)


def carried_out(kind, parts, codec, xs, monkeypatch, op="sum"):
    coder, chosen = commpass.codec(codec), algorithm(kind, "direct")

    def steps(rank: int):
        return chosen.run(xs[rank], request_of(kind, parts, rank, op), coder)

    return lockstep(steps, len(parts), monkeypatch)


def some(entries: int, rank: int) -> torch.Tensor:
    return torch.randn(entries, 70, generator=torch.Generator().manual_seed(rank))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("codec", ["raw", "int8", "rotated", "equarx"])
def test_gathers_join_what_each_rank_decodes_of_itself(parts, codec, monkeypatch):
    xs = [some(size, rank) for rank, size in enumerate(parts)]
    results, fabric = carried_out("all_gather_v", parts, codec, xs, monkeypatch)
    coder = commpass.codec(codec)
    for result in results:
        assert torch.equal(result, results[0])
    wanted = torch.cat([coder.decode(coder.encode(x), x) if len(x) else x for x in xs])
    assert torch.equal(results[0], wanted)
    handed = [sum(each.wire.numel() for each in mine) for mine in fabric.started]
    for rank, size in enumerate(parts):
        payload = Payload(size * 70, 70, torch.float32)
        request = request_of("all_gather_v", parts, rank)
        found = read_stages("all_gather_v", "direct", codec, payload, request)
        assert found.wire_bytes == handed[rank]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("codec", ["raw", "int8", "rotated"])
def test_sums_are_those_of_the_parts_in_rank_order(parts, codec, op, monkeypatch):
    ranks = len(parts)
    xs = [some(sum(parts), rank).to(torch.bfloat16) for rank in range(ranks)]
    results, _ = carried_out("reduce_scatter_v", parts, codec, xs, monkeypatch, op)
    total = torch.zeros(sum(parts), 70)
    for x in xs:
        total = total + x.float()
    wanted = (total / ranks if op == "avg" else total).to(torch.bfloat16).split(parts)
    for rank, result in enumerate(results):
        assert (result.dtype, result.shape) == (torch.bfloat16, wanted[rank].shape)
        if codec == "raw" and ranks <= 16:
            assert torch.equal(result, wanted[rank])
        elif len(result):
            worst = (result.float() - wanted[rank].float()).abs().max()
            assert worst <= 0.08 * (ranks if op == "sum" else 1)


def test_codec_that_differs_between_ranks_or_keeps_state_is_refused():
    for kind in ("all_gather_v", "reduce_scatter_v"):
        (direct,) = algorithms_of(kind)
        why = direct.unsupported_reason(commpass.codec("topk"), 4)
        assert "only algorithm 'sparse' keeps" in why
        assert direct.unsupported_reason(commpass.codec("int8"), 4) is None


@pytest.mark.slow
def test_gathered_lengths_may_be_symbolic():
    """Dynamo makes a symbol of a length that changed since the last call."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:

        def gathered(x: torch.Tensor, other: int) -> torch.Tensor:
            return commpass.all_gather_v(x, [x.shape[0], other])

        compiled = torch.compile(gathered, backend="aot_eager", fullgraph=True)
        for other in (3, 5, 6):
            assert compiled(torch.ones(6, 16), other).shape == (6 + other, 16)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
