"""densities: the smallest gradients of a fusion are sent whole until equation 2 holds, and the
others are sparsified for that."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import collectives, ops, trace

import commpass
from commpass.codecs import codec
from commpass.costmodel import KernelRate, Kernels, Link
from commpass.passes import GraphInput, group, manager
from commpass.passes.densities import AGREED, EQUATION_2, NO_SMALLER
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS = 4
LARGE, SMALL = 4096, (60, 61, 90, 8000, 8001)
AT_ONCE = 4
SIZES = (*[LARGE] * AT_ONCE, *SMALL)
"""The gradients of two fusions: in these tests the first has this many selections."""
DENSITY = 0.01
ALPHA_US, BYTES_PER_US, CALL_US = 100.0, 0.95, 1000.0
LINK = Link(ALPHA_US, BYTES_PER_US / 1e3)
RULE = {"codec": f"topk(density={DENSITY})", "algorithm": "sparse"}


PASSES = [each.name for each in manager.PASSES]
UNTIL_CHOSEN, UNTIL_REWRITTEN = (
    manager.PASSES[: PASSES.index(name) + 1] for name in ("choose", "rewrite")
)


@pytest.fixture(autouse=True)
def _small_fusions(monkeypatch):
    monkeypatch.setattr(group, "MOST_SELECTIONS", AT_ONCE + 1)


def profile(call_us: float = CALL_US, gflops: float = 1e9) -> commpass.Profile:
    """A selection takes ``call_us``, regardless of its size; a matmul takes the time of its
    operations."""
    free = KernelRate(0.0, 0.0)
    kernels = Kernels(0.0, free, call_us=call_us, gflops=gflops, gbytes_per_s=1e9)
    return commpass.Profile("slow", LINK, kernels=kernels)


def gradients(*values):
    """All are available at once."""
    started = [ops.all_reduce(x * 1, "avg", "0") for x in values]
    return [wait(each) for each in started]


def with_matmul(weight, *values):
    """The last of them comes after a matmul."""
    started = [ops.all_reduce(x * 1, "avg", "0") for x in values[:-1]]
    late = values[-1] * (weight @ weight)[0, 0]
    started.append(ops.all_reduce(late, "avg", "0"))
    return [wait(each) for each in started]


def planned(
    sizes=SIZES,
    call_us: float = CALL_US,
    *,
    matmul: int = 0,
    gflops: float = 1e9,
    densities=None,
    hides: bool = False,
    rule=None,
    passes=UNTIL_CHOSEN,
    **more,
):
    values = [torch.zeros(n) for n in sizes]
    given = ([torch.zeros(matmul, matmul)] if matmul else []) + values
    gm = trace(with_matmul if matmul else gradients, *given)
    policy = {"selective": True, "max_error": 1.0, "rules": [Rule(**RULE | (rule or {}))]} | more
    road = GraphInput(
        gm=gm,
        direction="backward",
        policy=Policy(**policy),
        profile=profile(call_us, gflops),
        stateless=None,
        hides=hides,
        densities=densities,
    )
    outcome = manager.run(road, "0", passes, strict=True)
    if outcome.error is not None:
        raise outcome.error
    return gm, outcome


def whole(outcome, sizes=SIZES) -> list[int]:
    """Return the sizes of the gradients that are sent whole."""
    by_name = dict(zip([site.name for site in outcome.first], sizes, strict=True))
    left = [site.name for site in outcome.plan.sites if "sent whole" in site.reason]
    members = {each.into: each.sites for each in outcome.plan.grouped}
    return sorted(by_name[name] for each in left for name in members.get(each, (each,)))


def densities_of(outcome) -> set[float]:
    """Return the densities of the selections."""
    found = [codec(site.codec).density for site in outcome.plan.sites if site.codec != NONE]
    return {each.ratio for each in found}


def gather_us(sizes, density: float) -> float:
    """Equation 3, for one message with a selection of each."""
    chosen = codec("topk", density=density)
    nbytes = sum(chosen.wire_bytes(n, torch.float32) for n in sizes)
    return (RANKS - 1) * (ALPHA_US + nbytes / BYTES_PER_US)


@pytest.mark.slow
def test_smallest_of_a_fusion_are_sent_whole_until_equation_2_holds(fake_group):
    """This does not apply to the first fusion, before which nothing is sent."""
    fake_group(RANKS)
    sizes = (*[LARGE] * AT_ONCE, 59, *SMALL)
    gm, outcome = planned(sizes, passes=UNTIL_REWRITTEN)
    before = gather_us(sizes[: AT_ONCE + 1], DENSITY)
    left = sorted(SMALL)
    while before < CALL_US * len(left):
        left.pop(0)
    assert 0 < len(left) < len(SMALL)
    assert whole(outcome, sizes) == sorted(SMALL)[: len(SMALL) - len(left)]
    (site,) = [site for site in outcome.plan.sites if site.codec == NONE]
    assert EQUATION_2 in site.reason
    sent = collectives(gm)
    assert ("all_reduce", torch.float32, site.bytes) in sent
    assert [kind for kind, *_ in sent].count("all_gather") == 2
    assert {dtype for kind, dtype, _ in sent if kind == "all_gather"} == {torch.uint8}
    wires = [nbytes for kind, _, nbytes in sent if kind == "all_gather"]
    assert wires == [each.wire_bytes for each in outcome.plan.sites if each.codec != NONE]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    "different",
    [
        {"selective": False},
        {"call_us": 100.0},  # selection is short: equation 2 holds
        {"group_bytes": 0},
        {"rule": {"force": True}},
    ],
    ids=str,
)
def test_nothing_is_sent_whole_otherwise(different, fake_group):
    fake_group(RANKS)
    _, outcome = planned(**different)
    assert whole(outcome) == []
    expected = DENSITY
    if different == {"call_us": 100.0}:  # at most this many entries: each selection is rounded up
        room = DENSITY * sum(SIZES) - len(SIZES)
        expected = math.floor(room / sum(SIZES) * 1e6) / 1e6
    assert densities_of(outcome) == {expected}


def test_others_are_thinned_so_that_as_many_entries_are_sent(fake_group):
    fake_group(RANKS)
    _, outcome = planned()
    left = whole(outcome)
    assert left
    rest = sum(SIZES) - sum(left)
    room = DENSITY * sum(SIZES) - sum(left) - (len(SIZES) - len(left))
    (density,) = densities_of(outcome)
    assert density == math.floor(room / rest * 1e6) / 1e6
    kept = [n for n in SIZES if n not in left]
    sent = sum(math.ceil(density * n) for n in kept) + sum(left)
    assert sent <= DENSITY * sum(SIZES)
    assert sent > 0.9 * DENSITY * sum(SIZES)


def test_nothing_is_thinned_below_the_bound(fake_group):
    """A gradient that would require a lower density is not sent whole."""
    fake_group(RANKS)
    many = (*[LARGE] * 8, *[120] * 8)
    _, outcome = planned(many)
    (density,) = densities_of(outcome)
    assert density >= 0.001
    room = (DENSITY - 0.001) * sum(many) / (1 - 0.001)
    assert 0 < sum(whole(outcome, many)) <= room


def test_gradients_whose_codes_are_no_smaller_are_sent_whole(fake_group):
    fake_group(RANKS)
    sizes = (LARGE, LARGE, 3, 2)
    _, outcome = planned(sizes, 0.0)
    assert whole(outcome, sizes) == [2, 3]
    assert NO_SMALLER in next(site.reason for site in outcome.plan.sites if site.codec == NONE)


def test_ranks_compare_what_the_time_of_their_own_backward_decides(fake_group):
    fake_group(RANKS)
    late = {"matmul": 64, "gflops": 2 * 64**3 / 2e6, "group_delay": 99}  # 2 ms
    _, outcome = planned(**late, call_us=CALL_US * 0.55, hides=True)
    assert outcome.plan.timed == ("0",)


@pytest.mark.slow
def test_backward_counts_only_where_ranks_compare_it(fake_group):
    """A matmul before the last gradient delays it: more would have to be sent whole."""
    fake_group(RANKS)
    late = {"matmul": 64, "gflops": 2 * 64**3 / 2e6, "group_delay": 99}  # 2 ms
    short = {"call_us": CALL_US * 0.55}
    alone, asked = planned(**late, **short)[1], planned(**late, **short, hides=True)[1]
    assert len(whole(asked)) > len(whole(alone))
    assert (alone.plan.timed, asked.plan.timed) == ((), ("0",))
    # Another batch, whose matmul takes no time: the earlier agreement holds.
    known = asked.densities.by_site
    again = planned(matmul=64, group_delay=99, **short, hides=True, densities=known)[1]
    assert whole(again) == whole(asked)
    assert again.plan.timed == ()
    assert again.plan.digest() == asked.plan.digest()
    assert any(AGREED in site.reason for site in again.plan.sites)
    other = planned(matmul=64, group_delay=99, **short, hides=True)[1]
    assert whole(other) == whole(alone)
    assert other.plan.timed == ()
