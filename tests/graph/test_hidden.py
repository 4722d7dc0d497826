"""Exchanges that overlap with compute stay uncompressed: choices by the end of a graph's
timeline."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace

import pytest
import torch
from functional_ops import ar
from graphs import ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass.costmodel import HOST, KernelRate, Kernels, Link, Profile, Task
from commpass.passes import choose
from commpass.passes.coded_clock import CodedClock
from commpass.passes.context import GraphInput
from commpass.passes.fx.memory import memory
from commpass.passes.fx.work import work_of
from commpass.passes.hidden import MANY, UNSURE, Schedule, facts_of, initial_schedule
from commpass.passes.manager import run
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.rules import Rule

N = 64
wait = ops.wait_tensor
BYTES = N * N * 4
SENT = 2 * 3 / 4 * BYTES
"""The bytes that a rank of 4 sends in an all_reduce."""
MATMUL = 2 * N**3


def profile(exchange_us: float, matmul_us: float, coding: float = 0.1) -> Profile:
    """Return a profile with given times of the plain all_reduce of a graph and of one of its
    matmuls.

    Encode and decode each take a given share of the plain all_reduce; codes are a fourth of the
    bytes.
    """
    rate = KernelRate(*2 * [coding * exchange_us * 1e3 / (N * N)])
    kernels = Kernels(0.0, rate, gflops=MATMUL / matmul_us / 1e3, gbytes_per_s=1e6)
    return Profile("made up", Link(0.0, SENT / exchange_us / 1e3), kernels=kernels)


def gradients(matmuls: int):
    """A gradient that is summed while the matmuls for others are computed."""

    def function(g, x):
        summed = ar(x)
        for _ in range(matmuls):
            g = g @ x
        return g, summed

    return trace(function, torch.ones(N, N), torch.ones(N, N))


def planned(gm, known: Profile, *, hidden=None, hides=True, **policy):
    terms = {"codecs": "int8", "algorithms": "two_shot", "skip": ("group", "chunk")} | policy
    road = GraphInput(
        gm=gm,
        direction="backward",
        policy=Policy(**terms),
        profile=known,
        hidden={} if hidden is None else hidden,
        hides=hides,
    )
    return run(road, "0", strict=True).plan


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(4)


def test_sites_that_hide_behind_matmuls_are_left_alone_and_say_so():
    (site,) = planned(gradients(3), profile(exchange_us=10_000, matmul_us=20_000))
    assert (site.codec, site.hidden) == (NONE, True)
    assert site.wire_bytes == BYTES
    assert site.reason.startswith("overlapped with compute: int8 by two_shot would take")


def test_sites_that_nothing_hides_are_compressed():
    (site,) = planned(gradients(0), profile(exchange_us=10_000, matmul_us=20_000))
    assert (site.codec, site.hidden) == ("int8", False)


def test_sites_longer_than_the_matmuls_are_compressed():
    (site,) = planned(gradients(3), profile(exchange_us=100_000, matmul_us=10_000))
    assert site.codec == "int8"


@pytest.mark.parametrize(
    ("matmul_us", "hides"),
    [(10_000 * 0.7, False), (10_000 / UNSURE * 0.7, True), (10_000 / UNSURE * 1.1, True)],
)
def test_codes_gain_if_compute_is_fast_and_do_not_lose_if_it_is_as_predicted(matmul_us, hides):
    """In the second case codes gain 28 % if the matmul takes half of its time, and lose 2 % if it
    takes all of it."""
    known = profile(exchange_us=10_000, matmul_us=matmul_us, coding=0.01)
    (site,) = planned(gradients(1), known)
    assert site.hidden is hides


def test_codes_that_take_the_rank_longer_than_they_save_are_not_worth_it():
    """Half of the exchange is exposed. Coding takes three tenths of the plain time, and the wire a
    fourth: this pays without the matmul, and not with it."""
    known = profile(exchange_us=10_000, matmul_us=9_000 / UNSURE, coding=0.08)
    (alone,) = planned(gradients(1), known, hides=False)
    assert alone.codec == "int8"
    (site,) = planned(gradients(1), known)
    assert site.hidden


@pytest.mark.parametrize(
    "policy",
    [
        {"skip_overlapped": False},
        {"rules": (Rule(codec="int8", algorithm="two_shot", force=True),)},
    ],
)
def test_policy_may_compress_it_all_the_same(policy):
    known = profile(exchange_us=10_000, matmul_us=20_000)
    (site,) = planned(gradients(3), known, **policy)
    assert site.codec == "int8"


def test_timeline_is_computed_only_if_it_can_decide(monkeypatch):
    """It takes a share of the time of all passes."""
    computed = []

    def counted(*given):
        computed.append(given)
        return initial_schedule(*given)

    monkeypatch.setattr(choose, "initial_schedule", counted)
    known = profile(exchange_us=10_000, matmul_us=20_000)
    forced = (Rule(codec="int8", algorithm="two_shot", force=True),)
    planned(gradients(3), known, rules=forced)
    assert not computed
    planned(gradients(3), known)
    assert len(computed) == 1


def test_sites_are_not_left_alone_as_hidden_where_ranks_are_not_asked():
    known = profile(exchange_us=10_000, matmul_us=20_000)
    (site,) = planned(gradients(3), known, hides=False)
    assert site.codec == "int8"


@pytest.mark.parametrize("was", [True, False])
def test_earlier_decisions_stay(was):
    """As on a rank that recompiles for another batch: the others keep the existing decisions."""
    known = profile(exchange_us=10_000, matmul_us=20_000)
    (site,) = planned(gradients(3), known)
    before = {facts_of(site): was}
    for matmuls in (0, 3):
        for hides in (True, False):
            (found,) = planned(gradients(matmuls), known, hidden=before, hides=hides)
            assert found.hidden is was


@pytest.mark.parametrize(("early", "end_us", "exposed_us"), [(True, 39, 5), (False, 49, 15)])
def test_later_hop_starts_between_matmuls_or_at_the_wait(early, end_us, exposed_us):
    """The first hop arrives at 16 us, during the second of three matmuls of 10 us. The second hop
    starts after it, or, if the graph is not reordered, after the third."""
    gm = gradients(3)
    work = work_of(gm.graph, memory(gm.graph), profile(exchange_us=1.0, matmul_us=10.0))
    (start,), (wait,) = work.starts, work.waited
    nodes = [node for node in gm.graph.nodes if node is not wait]
    clock = CodedClock(work, coded={start: two_hops()}, early=early)
    for node in (*nodes[:-1], wait, nodes[-1]):
        clock.run(node)
    assert clock.now == pytest.approx(end_us)
    assert clock.exposed == pytest.approx({wait: exposed_us})


def two_hops(port: str = "link") -> list[Task]:
    """Return an encode of 1 us, two hops of 5 and 10 us with a decode of 2 us between them, and a
    decode of 1 us."""
    hop = Task(port, 5.0, latency_us=10.0)
    between, last = Task(HOST, 2.0, after=(1,)), Task(HOST, 1.0, after=(3,))
    return [Task(HOST, 1.0), replace(hop, after=(0,)), between, replace(hop, after=(2,)), last]


@pytest.mark.parametrize(("early", "waits_us", "end_us"), [(True, 28, 36), (False, 44, 52)])
def test_later_hop_starts_while_the_rank_waits_for_another_exchange(early, waits_us, end_us):
    """Two exchanges have links of their own, and start at 1 and 2 us. Their first hops arrive at 16
    and 17 us, their second ones at 33 and 35 us, or the last at 51 us."""

    def function(x, y):
        started = [ops.all_reduce(each, "sum", "0") for each in (x, y)]
        return [wait(each) for each in started]

    gm = trace(function, torch.ones(N, N), torch.ones(N, N))
    work = work_of(gm.graph, memory(gm.graph), profile(exchange_us=1.0, matmul_us=10.0))
    first, second = sorted(work.starts, key=work.index.__getitem__)
    clock = CodedClock(work, coded={first: two_hops("a"), second: two_hops("b")}, early=early)
    for node in work.nodes:
        clock.run(node)
    assert sum(clock.exposed.values()) == pytest.approx(waits_us)
    assert clock.now == pytest.approx(end_us)


def several(sizes, matmuls: int):
    """Gradients of several sizes, each summed when a matmul has computed it."""

    def function(x, *others):
        found = []
        for other in others:
            found.append(ar(other * 2))
            for _ in range(matmuls):
                x = x @ x
        return x, *found

    inputs = [torch.ones(N, N), *(torch.ones(size, N) for size in sizes)]
    return trace(function, *inputs)


def test_last_sites_alone_are_exposed_on_a_full_link():
    """Four exchanges, and after each but the last as much compute: only the last is coded. Each
    needs the matmuls before it."""

    def function(x, *others):
        found = []
        for number, other in enumerate(others):
            found.append(ar(other * x[0, 0]))
            if number < 3:
                x = x @ x
        return x, *found

    gm = trace(
        function,
        *[torch.ones(N, N)] * 2,
        torch.ones(N - 1, N),
        torch.ones(N - 2, N),
        torch.ones(N - 3, N),
    )
    plan = planned(gm, profile(exchange_us=10_000, matmul_us=10_500 / UNSURE))
    assert [site.hidden for site in plan] == [True, True, True, False]
    assert plan.sites[-1].codec == "int8"


def test_equal_sites_get_equal_decisions():
    gm = several([N, N, N], 1)
    plan = planned(gm, profile(exchange_us=10_000, matmul_us=10_500 / UNSURE))
    assert len({site.hidden for site in plan}) == 1


@pytest.mark.every
def test_sites_with_the_most_compute_behind_them_are_left_alone():
    """They follow one another on a link that has time for half of them without codes."""
    many = MANY + 8
    sizes = [N + n for n in range(many)]
    hidden = {
        room: [
            site.hidden for site in planned(several(sizes, 1), profile(10_000, room / UNSURE, 0.01))
        ]
        for room in (200, 5_000, 20_000)
    }
    assert not any(hidden[200])
    assert 0 < sum(hidden[5_000]) < many
    assert all(hidden[20_000])


cases = st.tuples(
    st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1, max_size=4, unique=True),
    st.integers(0, 2),
    st.floats(1_000, 100_000),
    st.floats(1_000, 100_000),
    st.sampled_from([0.01, 0.05, 0.1]),
)


@pytest.mark.every
@settings(max_examples=examples(10, 30), deadline=None)
@given(cases)
def test_uncompressed_sites_are_compared_with_every_other_set(case):
    """Compare with every set of uncompressed sites.

    The graph is not predicted to end later than without codes. The uncompressed sites delay its end
    by at most the margin, unless it thereby ends earlier if compute takes as long as predicted. No
    site is compressed that alone could stay uncompressed without delay.
    """
    sizes, matmuls, exchange_us, matmul_us, coding = case
    known = profile(exchange_us, matmul_us, coding)
    gm = several(sizes, matmuls)
    its = initial_schedule(gm, _found(gm), Policy(), known)
    coded = planned(several(sizes, matmuls), known, hides=False).sites
    hidden = {n for n, each in enumerate(planned(gm, known)) if each.hidden}
    if its is None:
        assert (matmuls, hidden) == (0, set())
        return
    alone = [dataclasses.replace(site, codec=NONE, stages=()) for site in coded]

    def end(*some: int, when: Schedule = its) -> float:
        return when.end_us([alone[n] if n in some else site for n, site in enumerate(coded)])

    able = {n for n, site in enumerate(coded) if site.compressed}
    predicted = its.as_predicted()
    assert hidden <= able
    assert end(*hidden, when=predicted) <= end(*able, when=predicted) + 1e-6
    within_margin = end() + known.margin * sum(coded[n].plain_us for n in hidden) + 1e-6
    gains = end(*hidden, when=predicted) < end(when=predicted)
    assert end(*hidden) <= within_margin or gains
    assert hidden or all(end(n) > end() for n in able)


def _found(gm):
    from commpass.passes.allowed import allow
    from commpass.passes.discover import discover

    return allow(tuple(discover(gm, "backward", "")), Policy(codecs="int8"), "backward")


def test_order_of_dictionaries_does_not_count():
    known = profile(exchange_us=10_000, matmul_us=12_000)
    plans = []
    for seed in range(3):
        before = [(("nothing", n), True) for n in range(50)]
        random.Random(seed).shuffle(before)
        plans.append(planned(several([64, 32, 16], 1), known, hidden=dict(before)))
    assert len({plan.digest() for plan in plans}) == 1
