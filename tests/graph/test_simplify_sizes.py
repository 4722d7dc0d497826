"""simplify with sizes that differ between ranks: batches, numbers of tokens. All ranks must make
the same changes."""

from __future__ import annotations

import pytest
import torch
from everywhere import everywhere, same
from functional_ops import ag
from graphs import collectives, ops

import commpass

wait = ops.wait_tensor
LINKS = [commpass.ethernet(0.001), commpass.ethernet(10), commpass.ethernet(400, 5)]


def batches(*rows):
    """A batch with a different number of rows on each rank, and six parameters' shards of equal
    size."""
    draw = torch.Generator().manual_seed(0)
    shard = lambda: torch.randn(4, 16, generator=draw)  # noqa: E731
    return [[torch.randn(n, 8, generator=draw), *(shard() for _ in range(6))] for n in rows]


def sharded(x, *shards):
    """Parameters gathered where they are used, and gathered again, like ZeRO without a library."""
    for shard in (*shards, *shards):
        x = (x @ ag(shard * 1, 2)).relu() @ ag(shard * 1, 2).t()
    return x


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [(1, 1), (1, 4096), (512, 1), (0, 64), (4096, 4096)])
def test_gathers_of_parameters_do_not_depend_on_the_batch(rows):
    ranks = everywhere(lambda rank: sharded, batches(*rows))
    assert ranks.rules.count("same") == EVERY_BATCH
    assert same(ranks, exact=False)


EVERY_BATCH = 12
"""Of 24 gathers, the two of a layer are merged. Nothing is kept between the two uses of a layer."""


def reduced(x, *shards):
    """Gradients of a tied parameter, reduced for each of its uses; between them, large values."""
    first = wait(ops.reduce_scatter_tensor(shards[0].sin(), "sum", 2, "0"))
    wide = (x.sin() * 2).cos().sum()
    second = wait(ops.reduce_scatter_tensor(shards[1].cos(), "sum", 2, "0"))
    return first + second, wide


@pytest.mark.parametrize("rows", [(1, 4096), (4096, 1), (0, 7)])
def test_merged_gradients_do_not_depend_on_the_batch(rows):
    ranks = everywhere(lambda rank: reduced, batches(*rows))
    assert ranks.rules == ["sum of sums"]
    assert same(ranks, exact=False)


SENT = {
    "some": [[3, 4], [2, 5]],
    "no tokens on one rank": [[0, 0], [1000, 6]],
    "one rank gets none": [[0, 5000], [0, 3]],
    "as many to each": [[4, 4], [9, 1]],
}


def exchanged(sent, narrow):
    """Tokens sent to experts and back, with a cast between: each rank knows only its own
    numbers."""

    def of(rank):
        mine, back = sent[rank], [row[rank] for row in sent]

        def function(x):
            x = (x * 2).float() if not narrow else x.float() * 2
            y = wait(ops.all_to_all_single(x, back, mine, "0"))
            y = (y.bfloat16() if narrow else y).sin()
            return wait(ops.all_to_all_single(y.float(), mine, back, "0"))

        return function

    return of


@pytest.mark.few(14)
@pytest.mark.parametrize("link", range(len(LINKS)))
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", SENT)
def test_exchanges_of_tokens_do_not_depend_on_how_many_there_are(name, narrow, link):
    sent = SENT[name]
    inputs = [[torch.randn(sum(row), 16).bfloat16()] for row in sent]
    ranks = everywhere(exchanged(sent, narrow), inputs, profile=LINKS[link])
    assert same(ranks)
    if link == 0:
        assert ranks.rules == (["gather then narrow"] if narrow else []) + ["widen then gather"]
    dtypes = {tuple(dtype for _, dtype, _ in collectives(gm)) for gm in ranks.simple}
    assert len(dtypes) == 1


def test_exchanges_that_are_equal_by_chance_on_one_rank_stay_two():
    """Rank 0 sends and gets the same entries twice, and the others do not."""
    sent = [[[2, 2, 2], [2, 2, 2]], [[2, 1, 3], [2, 3, 1]], [[2, 3, 1], [2, 1, 3]]]

    def of(rank):
        def function(x):
            moved = []
            for turn in range(2):
                back = [row[turn][rank] for row in sent]
                moved.append(wait(ops.all_to_all_single(x * 2, back, sent[rank][turn], "0")))
            return moved[0].sum(), moved[1].sum()

        return function

    ranks = everywhere(of, [[torch.randn(6, 3)] for _ in range(3)])
    assert ranks.rules == []
    assert same(ranks)
