"""Orders that pass ``move`` does not compute again: larger windows, and more memory."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest
import torch
from functional_ops import ar
from graphs import trace

from commpass.costmodel import ethernet
from commpass.passes.context import GraphInput
from commpass.passes.fx.memory import memory, peak
from commpass.passes.fx.parse import parse
from commpass.passes.fx.schedule import Scheduled, schedule, sequence, timed
from commpass.passes.fx.work import Work, work_of
from commpass.passes.manager import run
from commpass.policy import Policy
from commpass.policy.rules import Rule

N, WINDOWS = 64, range(5)
INT8 = Policy(rules=[Rule(codec="int8", force=True)])


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(8)


def random_graph(seed: int, coded: bool) -> Work:
    """Return a graph of matmuls and sums, each of which takes random earlier values."""
    choice = random.Random(seed)

    def function(*given):
        values = list(given)
        for _ in range(16):
            a, b = choice.choice(values[-6:]), choice.choice(values)
            values.append(ar(a) if choice.random() < 0.4 else a @ b)
        return values[-6:]

    gm = trace(function, *[torch.ones(N, N) for _ in range(3)])
    link = ethernet(choice.choice([0.1, 1, 10]))
    if coded:
        skip = ("move", "sample")
        policy = Policy(rules=INT8.rules, skip=skip)
        run(GraphInput(gm=gm, direction="backward", policy=policy, profile=link), "0", strict=True)
    return work_of(gm.graph, memory(gm.graph, in_place=True), link)


def orders(work: Work, bound: float) -> list[Scheduled]:
    return [schedule(work, sequence(work), window, bound) for window in WINDOWS]


CASES = [(seed, coded) for seed in range(12) for coded in (False, True)]


@pytest.mark.parametrize(("seed", "coded"), CASES)
def test_orders_that_count_as_equal_are(seed, coded):
    work = random_graph(seed, coded)
    assert any(parse(node) is not None for node in work.nodes)
    least = peak(work.nodes, work.memory)
    roomy = orders(work, inf)
    assert not any(each.bounded for each in roomy)
    for bound in (0.8 * least, least, 1.1 * least, inf):
        found = orders(work, bound)
        for each, larger in pairwise(found):
            assert each.windowed or each.order == larger.order
        for each, free in zip(found, roomy, strict=True):
            assert each.bounded or each.order == free.order
            assert each.clock.now == timed(work, each.order).now
            assert each.clock.exposed == timed(work, each.order).exposed
            assert each.peak == peak(each.order, work.memory)


@pytest.mark.slow
def test_some_orders_count_as_equal_and_some_do_not():
    works = [random_graph(seed, coded) for seed, coded in CASES]
    found = [each for work in works for each in orders(work, peak(work.nodes, work.memory))]
    assert {each.windowed for each in found} == {each.bounded for each in found} == {False, True}
