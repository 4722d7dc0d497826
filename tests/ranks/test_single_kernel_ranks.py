"""Ranks agree on symmetric memory: all ranks of a group use it, or none does."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commpass.codecs import codec
from commpass.distributed import peers
from commpass.distributed.plan_store import open_store
from commpass.lowering.exchange import PeerCard

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

from commpass.lowering.gpu.exchange_sizes import Exchange

pytestmark = pytest.mark.xdist_group("ranks")

GPU = PeerCard("host", "", 132, 32, (9, 0))


def asked(cards: tuple[PeerCard, ...], trial: str, late: bool = False):
    """Return the memory of the group of all ranks, of which this one has the card of its number.

    ``trial`` is what the trial of the kernel would return. If ``late``, rank 1 asks once rank 0,
    which waits for no time, has its answer.
    """
    dist.barrier()
    open_store()
    dist.barrier()
    rank = dist.get_rank()
    with (
        mock.patch.object(peers, "card_here", return_value=cards[rank]),
        mock.patch.object(peers, "trial", return_value=trial),
        mock.patch.object(peers, "PATIENCE_S", 0.0 if late else 60.0),
    ):
        if late and rank == 1:
            dist.barrier()
        found = [peers.peer_memory(dist.group.WORLD.group_name) for _ in range(2)]
        if late and rank == 0:
            dist.barrier()
    assert found[0] == found[1]
    return found[0]


NAMED = tuple(replace(GPU, name=str(rank)) for rank in range(2))
WITHOUT = PeerCard(unsupported_reason="this torch has no symmetric memory")


@pytest.mark.parametrize(
    ("cards", "trial", "why"),
    [
        (NAMED, "", ""),
        ((NAMED[0], WITHOUT), "", "rank 1: this torch has no symmetric memory"),
        ((WITHOUT, NAMED[1]), "", "rank 0: this torch has no symmetric memory"),
        (NAMED, "rank 1: RuntimeError: out of memory", "out of memory"),
    ],
)
def test_ranks_use_symmetric_memory_together_or_not_at_all(ranks2, cards, trial, why):
    first, second = ranks2.run(asked, cards, trial)
    assert first == second
    assert (first.unsupported_reason == "") == (why == "")
    assert why in first.unsupported_reason
    assert first.programs == (0 if why else 132 - 64)


def test_late_rank_finds_that_the_other_gave_up(ranks2):
    first, second = ranks2.run(asked, NAMED, "", True)
    assert first.unsupported_reason == "rank 1 did not publish its GPU in time"
    assert second.unsupported_reason.startswith("rank 0: it did not wait longer")


def created(fails: tuple[int, ...]) -> tuple[str, int]:
    """Create the memory of an exchange, which fails on some ranks. Return the reason, and how many
    workspaces the group then has."""
    import torch.distributed._symmetric_memory as symmetric

    from commpass.lowering.gpu import exchange

    def empty(shape, **how):
        if dist.get_rank() in fails:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return torch.empty(shape, **how)

    def rendezvous(memory, group):
        raise RuntimeError("no access to the memory of another GPU")

    wanted = Exchange("one_shot", codec("int8"), torch.bfloat16, 900, 2)
    with (
        mock.patch.object(symmetric, "empty", empty),
        mock.patch.object(symmetric, "rendezvous", rendezvous),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        why = exchange.allocate([wanted], 1, dist.group.WORLD, torch.device("cpu"))
    return why, len(exchange._workspaces.get(dist.group.WORLD, {}))


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ((1,), "rank 1: RuntimeError: CUDA error: out of memory"),
        ((), "rank 0: RuntimeError: no access to the memory of another GPU"),
    ],
)
def test_all_ranks_learn_why_one_cannot_create_memory(ranks2, fails, why):
    assert ranks2.run(created, fails) == [(why, 0)] * 2
