"""Sentences that compare two runs."""

from __future__ import annotations

import pytest

from commpass.errors import CommpassError
from commpass.report.speedup import (
    bytes_sentence,
    loopback_sentence,
    loss_sentence,
    predicted_sentence,
    speedup,
    time_sentence,
)

BEFORE = [400.0, 408.0, 412.0, 420.0, 410.0]


def test_faster_run():
    found = speedup(BEFORE, [300.0, 303.0, 302.0, 310.0, 304.0])
    assert time_sentence(found, 1.31) == (
        "1.35 times as fast (1.35 to 1.35): 410 -> 303 ms a step; predicted 1.31"
    )
    assert not found.is_inconclusive


def test_slower_run():
    found = speedup(BEFORE, [500.0, 510.0, 515.0, 525.0, 512.0])
    assert time_sentence(found) == "slower: 0.80 times as fast (0.80 to 0.80): 410 -> 512 ms a step"


def test_busy_machine_allows_no_conclusion():
    found = speedup([300.0, 500.0, 350.0, 620.0, 400.0], [310.0, 480.0, 330.0, 500.0, 390.0])
    text = time_sentence(found, 1.31)
    assert text == (
        "inconclusive: the machine is busy (middle halves 350 to 500 and 330 to 480 ms a step);"
        " predicted 1.31"
    )


def test_equal_runs_on_a_quiet_machine_are_not_called_busy():
    text = time_sentence(speedup(BEFORE, [409.0, 411.0, 407.0, 413.0, 410.0]))
    assert text.startswith("inconclusive: the difference is within the spread (middle halves 408")


def test_halves_that_touch_are_inconclusive_and_their_neighbours_are_not():
    assert speedup([10.0] * 4, [10.0] * 4).is_inconclusive
    assert not speedup([10.0] * 4, [9.9] * 4).is_inconclusive
    assert not speedup([10.0] * 4, [10.1] * 4).is_inconclusive


def test_rounds_are_compared_with_each_other():
    """A load that doubles both steps of a round does not change the speedup."""
    found = speedup([100.0, 200.0, 100.0, 200.0], [50.0, 100.0, 50.0, 100.0])
    assert (found.low, found.times, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("before", "after"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([], [])])
def test_too_few_rounds_are_refused(before, after):
    with pytest.raises(CommpassError, match="needs as many of each run, and at least 2"):
        speedup(before, after)


def test_no_network():
    assert loopback_sentence(1.31, 1.0) == (
        "no network to measure: loopback is faster than any;"
        " predicted 1.31 times as fast on 1 Gbit/s"
    )
    assert loopback_sentence(None, 1.0) == "no network to measure: loopback is faster than any"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (2 << 20, 1 << 20, "50 % fewer bytes: 2.0 MiB -> 1.0 MiB"),
        (1 << 20, 2 << 20, "100 % more bytes: 1.0 MiB -> 2.0 MiB"),
        (1 << 20, 1 << 20, "as many bytes as before: 1.0 MiB"),
        (10_000, 9_999, "less than 1 % fewer bytes: 9.8 KiB -> 9.8 KiB"),
        (0, 0, "no bytes are handed to collectives"),
    ],
)
def test_bytes(before, after, said):
    assert bytes_sentence(before, after) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (2.34565, 2.34572, "loss within 0.0001: 2.3457 -> 2.3457"),
        (2.3456, 2.3459, "loss within 0.0003: 2.3456 -> 2.3459"),
        (2.3459, 2.3456, "loss within 0.0003: 2.3459 -> 2.3456"),
        (2.0, 2.0, "the same loss: 2.0000"),
    ],
)
def test_losses(before, after, said):
    assert loss_sentence(before, after) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (131.0, 100.0, "predicted 1.31 times as fast"),
        (80.0, 100.0, "predicted slower: 0.80 times as fast"),
        (100.2, 100.0, "predicted to be as fast"),
        (0.0, 0.0, "predicted to be as fast"),
    ],
)
def test_predictions(before, after, said):
    assert predicted_sentence(before, after) == said
