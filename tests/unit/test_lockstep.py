"""The lockstep of ranks in one process: correct results, and an error where real ranks would
hang."""

from __future__ import annotations

import pytest
import torch
from graphs import ops, trace
from lockstep import LockstepError, run_in_lockstep

wait = ops.wait_tensor
GROUPS = {"all": [0, 1, 2], "pair": [0, 1], "other": [2, 1]}


def run(functions, values=None):
    """Run one function of a tensor for each rank, on the rank's own values."""
    values = values or [torch.arange(6.0).view(6, 1) + 10 * rank for rank in range(len(functions))]
    graphs = [trace(function, value) for function, value in zip(functions, values, strict=True)]
    return run_in_lockstep(graphs, [[value] for value in values], GROUPS.__getitem__), values


def ar(x, op="sum", group="all"):
    return wait(ops.all_reduce(x, op, group))


def total(x):
    return ar(x)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_all_reduce(op, fake_group):
    fake_group(3)
    results, values = run([lambda x: ar(x, op)] * 3)
    stacked = torch.stack(values)
    expected = {"sum": stacked.sum(0), "avg": stacked.mean(0), "product": stacked.prod(0)}
    expected |= {"max": stacked.amax(0), "min": stacked.amin(0)}
    assert all(torch.equal(result, expected[op]) for result in results)


def test_parts_come_in_the_order_of_the_group(fake_group):
    fake_group(3)

    def with_group(group, ranks):
        gather = lambda x: wait(ops.all_gather_into_tensor(x, ranks, group))  # noqa: E731
        scatter = lambda x: wait(ops.reduce_scatter_tensor(x, "sum", ranks, group))  # noqa: E731
        return lambda x: (gather(x), scatter(x))

    results, values = run([lambda x: (x, x), with_group("other", 2), with_group("other", 2)])
    assert torch.equal(results[1][0], torch.cat([values[2], values[1]]))
    assert torch.equal(results[2][1], (values[1] + values[2])[:3])
    assert torch.equal(results[1][1], (values[1] + values[2])[3:])


def test_uneven_all_to_all(fake_group):
    fake_group(3)
    sends = [[1, 2, 3], [0, 6, 0], [4, 0, 2]]

    def of(rank):
        received = [row[rank] for row in sends]
        return lambda x: wait(ops.all_to_all_single(x, received, sends[rank], "all"))

    results, values = run([of(rank) for rank in range(3)])
    assert torch.equal(results[0], torch.cat([values[0][:1], values[2][:4]]))
    assert torch.equal(results[2], torch.cat([values[0][3:], values[2][4:]]))


def test_starting_does_not_hold_a_rank_up_but_waiting_does(fake_group):
    fake_group(3)

    def first(x):
        a, b = ops.all_reduce(x, "sum", "pair"), ops.all_reduce(x, "max", "all")
        return wait(b) + wait(a)

    def second(x):
        b, a = ops.all_reduce(x, "max", "all"), ops.all_reduce(x, "sum", "pair")
        return wait(b) + wait(a)

    results, values = run([first, second, lambda x: ar(x, "max")])
    assert torch.equal(results[0], values[2] + values[0] + values[1])
    with pytest.raises(LockstepError, match=r"no rank can go on"):
        run([lambda x: ar(ar(x, group="pair")), lambda x: ar(ar(x), group="pair"), total])


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ar(x, "max"),
        lambda x: ar(x[:3]),
        lambda x: ar(x.double()),
        lambda x: wait(ops.all_gather_into_tensor(x, 3, "all")),
        lambda x: x,
    ],
)
def test_mismatched_exchanges_are_an_error(other, fake_group):
    fake_group(3)
    with pytest.raises(LockstepError, match=r"different collectives|no rank can go on"):
        run([total, total, other])


def test_exchanges_without_a_wait_must_be_started_by_all(fake_group):
    fake_group(3)

    graph = trace(lambda x: x + 1, torch.ones(2))
    lonely = trace(lambda x: (x + 1, ops.all_reduce_(x.clone(), "sum", "pair"))[0], torch.ones(2))
    with pytest.raises(LockstepError, match="never by all"):
        run_in_lockstep([lonely, graph, graph], [[torch.ones(2)]] * 3, GROUPS.__getitem__)
