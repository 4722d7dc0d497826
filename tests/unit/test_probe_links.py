"""The order in which a probe measures sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from commpass.probe.links import LEAST, MOST, _Trial


@pytest.mark.parametrize("repeats", [LEAST, 7, 12, MOST])
def test_repetitions_of_a_size_are_spread_over_all_turns(repeats):
    trial = _Trial("all_reduce", 1024, repeats, lambda: None)
    turns = [turn for turn in range(MOST) if trial.has_turn(turn)]
    assert len(turns) == repeats
    gaps = [later - turn for turn, later in pairwise(turns)]
    assert max(gaps) - min(gaps) <= 1
    assert turns[-1] == MOST - 1
