"""The kernel of an exchange on all ranks by random schedules, over memory as weak as a GPU's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from exchange_schedules import Outcome, Setup, outcomes
from exchanging import ALL
from interpreter import interpreted
from tiers import rarely
from weak_memory import Agent, Memory

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

AT_ONCE = 10
"""Schedules of one call of the interpreter's process, which has a time limit."""


def run(setup: Setup, schedules: int) -> list[Outcome]:
    found = []
    for first in range(0, schedules, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, schedules))
        found += interpreted(outcomes, setup, seeds)
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "schedules"),
    [
        ("one_shot", 2, 4),
        pytest.param("one_shot", 2, 26, marks=pytest.mark.slow),
        pytest.param("two_shot", 2, 4, marks=pytest.mark.slow),
        rarely("one_shot", 2, 400),
        rarely("one_shot", 3, 200),
        rarely("one_shot", 4, 60),
        rarely("one_shot", 8, 10),
        rarely("two_shot", 2, 250),
        rarely("two_shot", 3, 60),
        rarely("two_shot", 4, 20),
        rarely("two_shot", 8, 2),
        ("reduce_scatter", 2, 4),
        rarely("reduce_scatter", 2, 300),
        rarely("reduce_scatter", 3, 100),
        rarely("reduce_scatter", 4, 30),
        rarely("reduce_scatter", 8, 2),
        ("all_gather", 2, 4),
        rarely("all_gather", 2, 400),
        rarely("all_gather", 3, 150),
        rarely("all_gather", 4, 40),
        rarely("all_gather", 8, 5),
        rarely("all_gather", 17, 1),
        rarely("reduce_scatter", 9, 1),
    ],
)
def test_results_are_right_in_every_schedule(name, ranks, schedules):
    """No read could have read other bytes, though calls overtake each other."""
    setup = Setup(name, ranks, numel=90 // ranks * ranks)
    found = run(setup, schedules)
    assert [each for each in found if each.is_bad] == []
    assert {each.right for each in found} == {ranks * setup.calls}
    assert {each.missing for each in found} == {(0,) * ranks}
    assert max(each.lead for each in found) == 1


MIXED = [("all_gather", 1040, 2), ("two_shot", 130, 1), ("reduce_scatter", 60, 1)]
"""Exchanges with one, two and as many programs of a rank as there are ranks."""


@pytest.mark.parametrize(
    ("first", "ranks", "schedules"),
    [
        ("one_shot", 2, 4),
        pytest.param("reduce_scatter", 2, 8, marks=pytest.mark.slow),
        *(rarely(name, 2, 100) for name in ALL),
        *(rarely(name, 3, 40) for name in ALL),
    ],
)
def test_exchanges_of_several_kinds_share_memory_in_every_schedule(first, ranks, schedules):
    """Wires of different lengths lie in the same places, and numbers of programs differ."""
    setup = Setup(first, ranks, numel=1100 // ranks * ranks, calls=6, others=tuple(MIXED))
    found = run(setup, schedules)
    assert [each for each in found if each.is_bad] == []
    assert {each.right for each in found} == {ranks * setup.calls}
    assert max(each.lead for each in found) == 1


HALF = 1 << 31
"""So many calls, after which the numbers of calls are negative."""


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("one_shot", HALF + 5),
        ("reduce_scatter", HALF - 2),
        *(rarely(name, number) for name in ALL for number in (HALF - 2, HALF + 5, 2 * HALF - 2)),
    ],
)
def test_numbers_wrap_around_and_slots_that_no_call_has_used_hold_old_ones(name, counted):
    setup = Setup(name, 2, counted=counted)
    found = run(setup, 3)
    assert [each for each in found if each.is_bad] == []
    assert {each.right for each in found} == {2 * setup.calls}
    (alone,) = run(Setup(name, 2, gone=1, spins=3, counted=counted), 1)
    assert (alone.right, alone.wrong) == (0, 0)


def test_schedules_find_old_numbers_that_count_as_later_ones():
    (found,) = run(Setup("one_shot", 2, gone=1, spins=3, counted=HALF + 5, faults=(OLD,)), 1)
    assert found.wrong


@pytest.mark.every
@pytest.mark.parametrize("name", ALL)
def test_programs_share_tiles_in_every_schedule(name):
    """Several programs of a rank each have some tiles of a wire."""
    setup = Setup(name, 2, numel=2100, programs=2)
    found = run(setup, 20)
    assert [each for each in found if each.is_bad] == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["equarx(width=60)", "mxfp4", "equarx(block=8)"])
@pytest.mark.parametrize("name", ALL)
def test_every_layout_has_a_kernel(name, spec):
    """Blocks that are rectangles, or hold even places first, or one value of each register."""
    setup = Setup(name, 2, numel=2 * 8192 if "block" in spec else 1042, calls=1, spec=spec)
    found = run(setup, 1)
    assert [each.right for each in found] == [2]


@pytest.mark.parametrize(
    ("name", "ranks", "schedules"),
    [
        ("one_shot", 2, 3),
        ("reduce_scatter", 2, 3),
        ("all_gather", 2, 3),
        rarely("two_shot", 2, 40),
        rarely("one_shot", 4, 30),
    ],
)
def test_rank_that_never_comes_is_named(name, ranks, schedules):
    found = run(Setup(name, ranks, gone=1, spins=3), schedules)
    for each in found:
        assert not each.wrong
        assert not each.right
        assert all(bits >> 1 & 1 for rank, bits in enumerate(each.missing) if rank != 1)


@pytest.mark.parametrize(
    ("name", "ranks", "schedules"),
    [
        pytest.param("one_shot", 2, 5, marks=pytest.mark.slow),
        rarely("two_shot", 2, 60),
        rarely("one_shot", 3, 60),
        rarely("reduce_scatter", 2, 60),
        rarely("reduce_scatter", 3, 60),
        rarely("all_gather", 2, 60),
        rarely("all_gather", 3, 60),
    ],
)
def test_rank_that_comes_too_late_gets_no_wrong_numbers(name, ranks, schedules):
    """Ranks that give up early, and those that they then miss: each result is right, or NaN."""
    found = run(Setup(name, ranks, spins=2), schedules)
    assert not any(each.wrong for each in found)
    assert any(each.nan for each in found)


# --- faults are found -----------------------------------------------------------------------------

FAULTS = {
    "barrier before the signal": (
        "        tl.debug_barrier()\n        tl.atomic_xchg",
        "        tl.atomic_xchg",
    ),
    "barrier after the wait": ("    tl.debug_barrier()\n    return missing", "    return missing"),
    "release": ('sem="release"', 'sem="relaxed"'),
    "acquire": ('sem="acquire"', 'sem="relaxed"'),
    "the other buffer": ("(epoch & 1) * buffer_bytes", "0 * buffer_bytes"),
    "this call's signal": ("ahead < 0", "ahead < -1"),
}
OLD = ("(ahead < 0) | (ahead > 1)", "ahead < 0")
"""A fault: any number that is not below that of the call counts as a later one."""
COUNT = ("mask=each < slots", "mask=each == own")
"""A fault: a call is counted for its own programs alone, and not for all that the next may have."""
QUICK = {"barrier before the signal", "the other buffer"}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("one_shot", fault) if fault in QUICK else rarely("one_shot", fault) for fault in FAULTS),
        *(rarely("two_shot", fault) for fault in FAULTS if fault != "the other buffer"),
        *(rarely(name, fault) for name in ("reduce_scatter", "all_gather") for fault in FAULTS),
    ],
)
def test_schedules_find_what_is_missing(name, fault):
    """An exchange without a step that it needs gives wrong results in some schedule."""
    found = interpreted(outcomes, Setup(name, 2, faults=(FAULTS[fault],)), range(30), True)
    assert found[-1].wrong
    assert found[-1].races


def test_schedules_find_a_call_that_some_programs_do_not_count():
    others = (("all_gather", 1040, 2),)
    setup = Setup("one_shot", 2, numel=1100, calls=4, others=others, faults=(COUNT,))
    found = interpreted(outcomes, setup, range(30), True)
    assert found[-1].is_bad


@pytest.mark.every
@pytest.mark.parametrize("name", ["one_shot", "reduce_scatter", "all_gather"])
def test_schedules_find_values_that_a_late_rank_must_not_return(name):
    fault = ('x = tl.where(late == 0, x, float("nan"))', "x = x")
    found = run(Setup(name, 2, spins=2, faults=(fault,)), 30)
    assert any(each.wrong for each in found)


@pytest.mark.every
def test_schedules_find_ranks_that_wait_for_ever():
    fault = ("wait(mine, (1 * slots", "wait(mine, (0 * slots")
    found = interpreted(outcomes, Setup("two_shot", 2, faults=(fault,)), range(30), True)
    assert found[-1].stuck


# --- the memory -----------------------------------------------------------------------------------


def passed(*, barrier: bool, release: bool, acquire: bool, barrier_after: bool) -> set[int]:
    """Return what a second agent reads of a byte after the signal of the first has arrived."""
    found = set()
    data, flag = np.array([[0]]), np.array([[4, 5, 6, 7]])
    for seed in range(20):
        memory = Memory(8, np.random.default_rng(seed))
        first, second = memory.agent(), memory.agent()
        memory.write(first, data, np.array([[7]], dtype=np.uint8))
        if barrier:
            first.barrier()
        one = np.ones((1, 4), dtype=np.uint8)
        memory.exchange(first, flag, one, release=release)
        assert memory.fetch(second, flag, acquire=acquire).all()
        if barrier_after:
            second.barrier()
        found.add(int(memory.read(second, data)[0, 0]))
    return found


STEPS = ("barrier", "release", "acquire", "barrier_after")


@pytest.mark.parametrize("without", [None, *STEPS])
def test_message_is_passed_by_all_four_steps_alone(without):
    steps = {step: step != without for step in STEPS}
    assert passed(**steps) == ({7} if without is None else {0, 7})


def test_agent_reads_what_it_wrote_and_never_older_bytes_again():
    memory = Memory(4, np.random.default_rng(0))
    writer, reader = memory.agent(), memory.agent()
    at = np.array([[0], [1], [2]])
    for number in range(1, 6):
        memory.write(writer, at, np.full((3, 1), number, dtype=np.uint8))
        assert (memory.read(writer, at) == number).all()
    read = [memory.read(reader, at) for _ in range(30)]
    assert all((after >= before).all() for before, after in pairwise(read))
    assert (memory.read(Agent.after(writer), at) == 5).all()
