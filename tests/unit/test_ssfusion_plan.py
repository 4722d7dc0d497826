"""SSFusion's plan: every gradient once, buffers and cuts as good as an exhaustive search, equation
2, the requested density; and checked arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import commpass
from commpass.costmodel import Link
from commpass.costmodel.buffers import (
    Gradient,
    Problem,
    cut_off,
    excluded,
    fused,
    offloaded,
    sparsified,
)
from commpass.errors import PolicyError
from commpass.parallel.ssfusion import measure, ssfusion
from commpass.parallel.ssfusion.measure import Clock, Rate, backward_slowdown
from commpass.parallel.ssfusion.memory import Memory, clip_to_norm
from commpass.parallel.ssfusion.options import WARM_UP, Options, check_optimizer
from commpass.parallel.ssfusion.plan import (
    BUCKET_BYTES,
    Buffer,
    Sent,
    Settings,
    make,
    unmeasured,
)
from commpass.parallel.ssfusion.planner import Planner, Weight

LINK = Link(50.0, 0.125)
CPU = torch.device("cpu")


def row_bytes(entries: int, density: float) -> int:
    return 16 + 6 * math.ceil(density * entries)


times = st.integers(0, 5000).map(float)
gradient = st.builds(
    Gradient, st.just("g"), st.integers(1, 1 << 20), st.sampled_from([2, 4]), times, times, times
)
links = st.builds(
    Link, st.integers(0, 500).map(float), st.sampled_from([0.0125, 0.125, 1.25, 100.0])
)
ranks = st.integers(2, 64)
models = st.lists(gradient, min_size=1, max_size=7)
choices = st.builds(
    Settings,
    density=st.sampled_from([0.001, 0.01, 0.25]),
    fuse=st.booleans(),
    aware=st.booleans(),
    interleave=st.booleans(),
    offload=st.booleans(),
    force=st.booleans(),
)


def all_reduce_us(link: Link, ranks: int, nbytes: float) -> float:
    """Equation 4."""
    return 2 * (ranks - 1) * link.alpha_us + 2 * (ranks - 1) / ranks * nbytes / (
        link.gbytes_per_s * 1e3
    )


def all_gather_us(link: Link, ranks: int, nbytes: float) -> float:
    """Equation 3."""
    return (ranks - 1) * (link.alpha_us + nbytes / (link.gbytes_per_s * 1e3))


# --- the whole plan -------------------------------------------------------------------------------


@given(models, ranks, links, choices)
@settings(deadline=None)
def test_every_gradient_is_sent_once_in_the_order_of_backward(model, size, link, chosen):
    plan = make(model, size, link, row_bytes, chosen)
    sent = [each for buffer in plan.buffers for each in buffer.sent]
    assert [each.number for each in sent] == list(range(len(model)))
    carried = sorted(each.number for message in plan.messages for each in message.sent)
    assert carried == list(range(len(model)))
    for message in plan.messages:
        assert message.kind == "all_gather" or all(each.dense for each in message.sent)
        assert all(each.why for each in message.sent)
    if not chosen.interleave and plan.sparse:
        assert {message.kind for message in plan.messages} == {"all_gather"}
    if not chosen.fuse and plan.sparse:
        assert all(len(buffer.sent) == 1 for buffer in plan.buffers)
    if not chosen.offload:
        assert not any(each.offloaded for each in sent)


@given(models, ranks, links, choices)
@settings(deadline=None)
def test_share_that_is_sent_is_the_density_or_selection_is_at_its_bound(model, size, link, chosen):
    plan = make(model, size, link, row_bytes, dataclasses.replace(chosen, aware=True, force=True))
    total = sum(each.entries for each in model)
    whole = sum(
        model[each.number].entries for buffer in plan.buffers for each in buffer.sent if each.dense
    )
    picked = [math.ceil(each.density * model[each.number].entries) for each in plan.sparse]
    for each in plan.sparse:
        assert chosen.bound <= each.density <= chosen.density
    must = [n for n, e in enumerate(model) if row_bytes(e.entries, chosen.density) >= e.nbytes]
    least = sum(model[n].entries for n in must) + len(model) - len(must)
    least += chosen.bound * sum(e.entries for n, e in enumerate(model) if n not in must)
    if plan.sparse and (plan.sparse[0].density > chosen.bound or least <= chosen.density * total):
        assert whole + sum(picked) <= chosen.density * total * (1 + 1e-9)


def test_large_gradients_make_up_for_what_is_sent_whole_and_not_without_aware():
    model = [Gradient("w", 1_000_000), Gradient("b", 5_000), Gradient("v", 1_000_000)]
    assert sparsified(model, {1}, 0.01, 0.001) == pytest.approx(
        (20_050 - 5_000 - 2) / 2_000_000, rel=1e-3
    )
    assert sparsified(model, {}, 0.01, 0.001) == pytest.approx(0.01, rel=1e-3)
    assert sparsified(model, {0}, 0.01, 0.001) == 0.001
    slow = Link(50.0, 0.001)
    for aware in (True, False):
        some = [*model, Gradient("c", 3)]
        plan = make(some, 2, slow, row_bytes, Settings(aware=aware))
        dense = [each.number for buffer in plan.buffers for each in buffer.sent if each.dense]
        assert 3 in dense
        assert {each.density < 0.01 for each in plan.sparse} == {aware}


@given(models, ranks, links, choices)
@settings(deadline=None)
def test_nothing_is_sparse_where_that_is_predicted_to_take_longer(model, size, link, chosen):
    plan = make(model, size, link, row_bytes, dataclasses.replace(chosen, force=False))
    assert plan.end_us <= plan.dense_us
    assert not (plan.why and plan.sparse)
    again = make(model, size, link, row_bytes, dataclasses.replace(chosen, force=False))
    assert plan == again


def test_dense_where_the_link_is_fast_sparse_where_it_is_slow_and_forced_in_any_case():
    model = [Gradient("w", 1 << 20, 4, 1000.0, 20_000.0, 20_000.0)] * 4
    fast = make(model, 4, Link(1.0, 100.0), row_bytes, Settings())
    assert not fast.sparse
    assert "dense" in fast.why
    slow = make(model, 4, Link(1.0, 0.0125), row_bytes, Settings())
    assert len(slow.sparse) == 4
    assert slow.end_us < slow.dense_us / 4
    assert make(model, 4, Link(1.0, 100.0), row_bytes, Settings(force=True)).sparse
    assert not make(model, 1, Link(1.0, 0.0125), row_bytes, Settings(force=True)).sparse


def test_gradients_have_the_times_that_were_measured():
    weights = [
        Weight("w", nn.Parameter(torch.zeros(1000))),
        Weight("b", nn.Parameter(torch.zeros(10))),
    ]
    planner = Planner(weights, Options(Settings()), None, None, torch.device("cpu"), None)
    assert [each.around_us for each in planner.gradients()] == [0.0, 0.0]
    planner._backward_us = [7.0, 8.0]
    for name, us in (("_select", (1.0, 3.0)), ("_offload", (2.0, 9.0)), ("_sparse", (0.5, 10.0))):
        setattr(planner, name, Rate((10, 1000), us))
    w, b = planner.gradients()
    assert (w.backward_us, w.select_us, w.offload_us, w.around_us) == (7.0, 3.0, 9.0, 7.0)
    assert (b.backward_us, b.select_us, b.offload_us, b.around_us) == (8.0, 1.0, 2.0, 0.0)


@pytest.mark.parametrize("offload", [False, True])
def test_work_around_a_selection_counts_as_well(offload):
    """4 gradients of 4 MiB at 0.5 GB/s, 1 ms of backward and 1 ms of selection each."""
    light = [Gradient("w", 1 << 20, 4, 1e3, 1e3, 1e3)] * 4
    heavy = [dataclasses.replace(each, around_us=3e4) for each in light]
    link, how = Link(1.0, 0.5), Settings(offload=offload)
    sparse, dense = (make(model, 4, link, row_bytes, how) for model in (light, heavy))
    assert len(sparse.sparse) == 4
    assert not dense.sparse
    assert dense.dense_us == pytest.approx(
        1e3 + 4 * link.time_us("all_reduce", 4 << 20, 4), rel=0.05
    )
    forced = make(heavy, 4, link, row_bytes, dataclasses.replace(how, force=True))
    assert forced.end_us == pytest.approx(sparse.end_us + 4 * 3e4, rel=0.05)


def test_tensors_go_whole_in_buckets_until_times_are_known():
    model = [Gradient(str(n), BUCKET_BYTES // 8) for n in range(5)]  # half a bucket each
    plan = unmeasured(model)
    assert [len(buffer.sent) for buffer in plan.buffers] == [2, 2, 1]
    assert {message.kind for message in plan.messages} == {"all_reduce"}
    huge = unmeasured([Gradient("w", BUCKET_BYTES), *model])
    assert [len(buffer.sent) for buffer in huge.buffers] == [1, 2, 2, 1]


# --- its parts ------------------------------------------------------------------------------------


def end_of(model, runs, dense, kind, link, size, density):
    """Return when the exchanges of runs end, computed independently from the definition."""
    formula = {"all_reduce": all_reduce_us, "all_gather": all_gather_us}[kind]
    clock = link_free = 0.0
    for run in runs:
        nbytes = 0
        for number in run:
            each = model[number]
            clock += each.backward_us + (0 if number in dense else each.select_us)
            nbytes += each.nbytes if number in dense else row_bytes(each.entries, density)
        link_free = max(link_free, clock) + formula(link, size, nbytes)
    return link_free


def divisions(count):
    for cuts in itertools.product([False, True], repeat=count - 1):
        runs, begin = [], 0
        for end, cut in enumerate([*cuts, True], start=1):
            if cut:
                runs.append(range(begin, end))
                begin = end
        yield runs


@given(models, ranks, links, st.sampled_from(["all_reduce", "all_gather"]), st.data())
@settings(deadline=None)
def test_buffers_are_the_best_of_all_divisions(model, size, link, kind, data):
    dense = data.draw(st.sets(st.integers(0, len(model) - 1)))
    found = fused(Problem(model, size, link, row_bytes, 0.01), dense, kind)
    ends = [end_of(model, runs, dense, kind, link, size, 0.01) for runs in divisions(len(model))]
    mine = end_of(model, found, dense, kind, link, size, 0.01)
    assert mine == pytest.approx(min(ends))


@given(models, ranks, links, st.data())
@settings(deadline=None)
def test_cut_makes_t1_and_t2_least(model, size, link, data):
    dense = data.draw(st.sets(st.integers(0, len(model) - 1)))
    sent = [Sent(n, 1.0 if n in dense else 0.01) for n in range(len(model))]
    busy = [e.backward_us + (0 if n in dense else e.select_us) for n, e in enumerate(model)]

    def sum_of_times(cut):
        reduced = sum(model[n].nbytes for n in range(cut) if n in dense)
        gathered = sum(
            model[n].nbytes if n in dense else row_bytes(model[n].entries, 0.01)
            for n in range(len(model))
            if not (n < cut and n in dense)
        )
        reduce = all_reduce_us(link, size, reduced) if reduced else 0.0
        gather = all_gather_us(link, size, gathered) if gathered else 0.0
        return sum(busy[:cut]) + max(reduce, sum(busy[cut:])) + gather

    cut = cut_off(Problem(model, size, link, row_bytes, 0.01), sent)
    assert sum_of_times(cut) == pytest.approx(min(map(sum_of_times, range(len(model) + 1))))


@given(models, ranks, links, st.data())
@settings(deadline=None)
def test_smallest_of_a_buffer_are_left_dense_until_equation_2_holds(model, size, link, data):
    problem = Problem(model, size, link, row_bytes, 0.01)
    runs = data.draw(st.sampled_from(list(divisions(len(model)))))
    found = excluded(problem, runs, frozenset())
    assert len(set(found)) == len(found)
    assert not set(found) & set(runs[0])
    end = end_of(model, runs, found, "all_gather", link, size, 0.01)
    assert end <= end_of(model, runs, [], "all_gather", link, size, 0.01) * (1 + 1e-9)
    for before, run in itertools.pairwise(runs):
        order = sorted(run, key=lambda n: (model[n].entries, n))
        held = [n for n in order if n in found]
        assert held == order[: len(held)]
        exchange = problem.gather_us(before, found)
        left = [n for n in order if n not in found]
        busy = problem.compute_us(run, found)
        if exchange < busy and left:  # not yet, and the next one would cost more than it saves
            later = end_of(model, runs, [*found, left[0]], "all_gather", link, size, 0.01)
            earlier = [n for n in found if n >= run[0]]  # what was decided at that time
            then = end_of(model, runs, earlier, "all_gather", link, size, 0.01)
            one_more = [*earlier, left[0]]
            assert (
                end_of(model, runs, one_more, "all_gather", link, size, 0.01) > then or later > end
            )


def test_equation_2_leaves_a_small_one_dense_and_a_large_one_not():
    slow_to_select = Gradient("small", 2_000, 4, 10.0, 3_000.0)
    large = Gradient("large", 1_000_000, 4, 1_000.0, 2_000.0)
    model = [large, slow_to_select, large]
    problem = Problem(model, 4, Link(10.0, 0.05), row_bytes, 0.01)
    runs = [range(1), range(1, 3)]
    assert problem.gather_us([0], []) < problem.compute_us([1, 2], [])
    assert excluded(problem, runs, frozenset()) == [1]
    assert problem.gather_us([0], []) >= problem.compute_us([1, 2], [1])


@given(models, st.data())
@settings(deadline=None)
def test_cpu_selects_where_it_ends_before_backward_of_the_buffer(model, data):
    dense = data.draw(st.sets(st.integers(0, len(model) - 1)))
    problem = Problem(model, 4, LINK, row_bytes, 0.01)
    run = range(len(model))
    found = offloaded(problem, run, dense)
    assert not found & dense
    whole, busy = sum(each.backward_us for each in model), 0.0
    for number in run:
        there = sum(each.backward_us for each in model[: number + 1])
        done = max(busy, there) + model[number].offload_us
        assert (number in found) == (number not in dense and done <= whole)
        busy = done if number in found else busy


# --- momentum correction --------------------------------------------------------------------------


def dgc(gradients, k, momentum, norm):
    """Deep Gradient Compression on one rank, algorithm 4 and section 3.

    Return what each step sends, and what is left, in float64.
    """
    u, v = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    sent = []
    for g in gradients:
        u = momentum * u + g * min(1.0, norm / np.linalg.norm(g))
        v = v + u
        top = np.argsort(-np.abs(v), kind="stable")[:k]
        out = np.zeros_like(v)
        out[top] = v[top]
        sent.append(out)
        v[top] = 0
        u[top] = 0
    return sent, u, v


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_momentum_correction_is_that_of_the_paper(momentum):
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(12)]
    codec = commpass.codec("topk", density=0.1)
    velocity = torch.zeros(5, 7, dtype=torch.float64) if momentum else None
    memory = Memory(torch.zeros(5, 7, dtype=torch.float64), velocity, momentum)
    expected, u, v = dgc([g.numpy().ravel() for g in gradients], 4, momentum, 4.0)
    for g, right in zip(gradients, expected, strict=True):
        memory.add(g, 4.0)
        wire = memory.select(codec, torch.float64, CPU)
        sent = codec.decode_rows(wire, 35, torch.float64)[0].numpy()
        np.testing.assert_allclose(sent, right, rtol=1e-12)
        assert np.count_nonzero(sent) == 4
    np.testing.assert_allclose(memory.residual.numpy().ravel(), v, rtol=1e-12, atol=1e-15)
    if velocity is not None:
        np.testing.assert_allclose(velocity.numpy().ravel(), u, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("values", ["raw", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sent_and_remaining_values_are_the_input(values, dtype):
    memory = Memory(torch.zeros(300))
    codec = commpass.codec("dgc", density=0.05, values=values)
    given, sent = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for step in range(20):
        g = torch.randn(300, generator=torch.Generator().manual_seed(step)).to(dtype)
        memory.add(g)
        given += g.double()
        if step == 10:
            sent += memory.take(dtype).double()
        else:
            wire = memory.select(codec, dtype, CPU)
            sent += codec.decode_rows(wire, 300, dtype)[0].double()
    assert (sent + memory.residual.double() - given).abs().max() < 1e-4
    assert memory.residual.abs().max() > 0.1


@pytest.mark.parametrize("many", [1, 50])
def test_values_not_finite_go_out_once_and_do_not_come_back(many):
    memory = Memory(torch.zeros(100), torch.zeros(100), 0.9)
    codec = commpass.codec("dgc", density=0.05)
    bad = torch.ones(100)
    bad[:many] = math.nan
    memory.add(bad)
    out = codec.decode_rows(memory.select(codec, torch.float32, CPU), 100, torch.float32)[0]
    assert out[:many].isnan().all()  # 50 are more than there are slots: the row is lost
    assert memory.residual.isfinite().all()
    memory.add(torch.ones(100))
    out = codec.decode_rows(memory.select(codec, torch.float32, CPU), 100, torch.float32)[0]
    assert out.isfinite().all()
    memory.add(bad)
    assert memory.take(torch.float32)[:many].isnan().all()
    assert memory.residual.isfinite().all()
    assert memory.velocity.isfinite().all()


def test_row_of_zeros_sends_nothing_and_keeps_its_velocity():
    memory = Memory(torch.zeros(10), torch.arange(10.0), 0.5)
    codec = commpass.codec("dgc", density=0.1)
    memory.select(codec, torch.float32, CPU)
    assert memory.residual.eq(0).all()
    assert memory.velocity.equal(torch.arange(10.0))


def test_clipping_holds_the_norm_and_lets_what_is_not_finite_through():
    assert clip_to_norm(torch.full((4,), 3.0), 1.5).norm() == pytest.approx(1.5)
    assert clip_to_norm(torch.full((4,), 0.3), 1.5).equal(torch.full((4,), 0.3))
    assert clip_to_norm(torch.zeros(4), 1.5).equal(torch.zeros(4))
    assert clip_to_norm(torch.tensor([math.nan, 1.0]), 1.5).isnan().tolist() == [True, False]


# --- arguments ------------------------------------------------------------------------------------


def test_density_falls_exponentially_to_the_target():
    options = Options(Settings(density=0.001), warmup=8)
    densities = [options.at(step).density for step in range(10)]
    assert densities == [*(each for each in WARM_UP for _ in range(2)), 0.001, 0.001]
    assert all(a / b == pytest.approx(4, rel=0.03) for a, b in itertools.pairwise(WARM_UP))
    usual = Options(Settings(), warmup=3)
    assert [usual.at(step).density for step in range(4)] == [0.25, 0.0625, 0.015625, 0.01]
    assert Options(Settings(), warmup=3, step=3).at(0).density == 0.01
    assert Options(Settings()).at(0).density == 0.01


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: Settings(density=0.0), ["density", "at least"]),
        (lambda: Settings(density=2.0), ["density", "at most 1"]),
        (lambda: Settings(density=0.0001), ["bound=0.001", "density=0.0001"]),
        (lambda: Options(Settings(), selector="int8"), ["'int8'", "dgc"]),
        (lambda: Options(Settings(), selector="dgcc"), ["did you mean 'dgc'"]),
        (lambda: Options(Settings(), momentum=1.0), ["momentum=1", "below 1"]),
        (lambda: Options(Settings(), clip=0.0), ["clip", "above 0"]),
        (lambda: Options(Settings(), profile_steps=0), ["profile_steps=0", "1 or more"]),
        (lambda: Options(Settings(), dense="topk"), ["'topk'", "error feedback"]),
        (lambda: ssfusion(torch.nn.Linear(1, 1)), ["init_process_group"]),
    ],
)
def test_impossible_settings_are_refused_in_words(make_it, words):
    with pytest.raises(PolicyError) as caught:
        make_it()
    for word in words:
        assert word in str(caught.value)


def test_momentum_on_both_sides_is_refused():
    weight = [torch.nn.Parameter(torch.zeros(1))]
    for optimizer in (torch.optim.SGD(weight, momentum=0.9), torch.optim.AdamW(weight)):
        with pytest.raises(PolicyError, match="of its own"):
            check_optimizer(optimizer, 0.9)
        check_optimizer(optimizer, 0.0)
    check_optimizer(torch.optim.SGD(weight, lr=0.1), 0.9)
    check_optimizer(None, 0.9)


# --- ranks that share processors ------------------------------------------------------------------


def test_backward_takes_its_processor_time_where_ranks_share_processors():
    """In steps shorter than a time slice, times by the clock may be undisturbed by chance."""
    clock = Clock(CPU)
    clock.steps = [
        [(-1, (0.0, 0.0)), (0, (0.001, 0.001)), (1, (0.004, 0.002))],
        [(-1, (1.0, 1.0)), (0, (1.003, 1.002)), (1, (1.005, 1.004))],
    ]
    assert clock.backward_us(3) == pytest.approx([1000.0, 2000.0, 0.0])
    assert clock.backward_us(3, 0.5) == pytest.approx([2000.0, 2000.0, 0.0])
    assert clock.backward_us(3, 0.25) == pytest.approx([4000.0, 4000.0, 0.0])
    assert clock.backward_us(3, 4.0) == clock.backward_us(3)


@pytest.mark.parametrize(
    ("cores", "share"), [(0.25, 4.0), (1.0, 1.0), (1.5, 1 / 3), (2.0, 0.0), (16.0, 0.0)]
)
def test_thread_that_exchanges_keeps_backward_from_processors_it_shares(cores, share):
    assert backward_slowdown(cores) == pytest.approx(share)


def test_messages_that_keep_processors_from_backward_make_a_step_longer():
    """Three buffers: backward loses the time of the first two messages, and the last one comes
    after it."""
    model = [Gradient(name, 1000, backward_us=1000.0) for name in "abc"]
    link = Link(10.0, 1.0)
    buffers = [Buffer((Sent(number),), 1) for number in range(3)]
    last = link.time_us("all_reduce", 4000, 2)
    assert last < 1000
    alone = Problem(model, 2, link, row_bytes)
    assert alone.end_us(buffers) == pytest.approx(3000 + last)
    shared = dataclasses.replace(alone, overhead_us=lambda kind, nbytes: 100.0)
    assert shared.end_us(buffers) == pytest.approx(3200 + last)


def test_fewer_messages_are_planned_where_each_keeps_processors_from_backward():
    model = [Gradient(f"{n}", 1000, backward_us=100.0) for n in range(12)]
    problem = Problem(model, 2, Link(1.0, 1.0), row_bytes)
    shared = dataclasses.replace(problem, overhead_us=lambda kind, nbytes: 500.0)
    counts = [len(fused(each, set(range(12)), "all_reduce")) for each in (problem, shared)]
    assert counts[1] < counts[0]


@pytest.mark.parametrize(
    ("us_per_byte", "calls"),
    [
        (0.001, [1, 3, 1, 3, 1, 3]),  # 4 us, 66 us, 1.0 ms: a warm-up and three repeats of each
        (0.05, [1, 3, 1, 3, 1]),  # 3.3 ms for 64 KiB: 1 MiB is measured once
        (0.5, [1, 3, 1, 3]),  # 33 ms for 64 KiB: 1 MiB is not measured
        (1.0, [1, 3, 1]),  # 4.1 ms for 4 KiB, 66 ms for 64 KiB
    ],
)
def test_long_exchanges_are_measured_once_or_not_at_all(
    us_per_byte, calls, fake_group, monkeypatch
):
    fake_group(2)
    seen: list[str] = []

    def clocked(run, device):
        numel = run.args[1].numel()
        seen.append(f"timed {4 * numel}")
        return 1e-6 * us_per_byte * 4 * numel, 0.0

    def exchanged(_, rows, *__):
        seen.append(f"warm {4 * rows[0].numel()}")

    monkeypatch.setattr(measure, "_seconds", clocked)
    for name in ("sums", "gather"):
        monkeypatch.setattr(measure.messages, name, exchanged)
    found = measure.exchanges(dist.group.WORLD, torch.device("cpu"))
    runs = [len(list(same)) for _, same in itertools.groupby(seen)]
    assert runs == 2 * calls
    for kind in ("all_reduce", "all_gather"):
        assert found.link.time_us(kind, 1 << 16, 2) == pytest.approx(
            us_per_byte * (1 << 16), rel=0.3
        )
