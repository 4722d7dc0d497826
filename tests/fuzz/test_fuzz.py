"""Random programs for several ranks, always the same ones; and every case that once failed.

``make fuzz MINUTES=30`` tries others.
"""

from __future__ import annotations

import pytest
from fuzz.check import Tried, check
from fuzz.found import FOLDER, Found
from fuzz.program import Case
from fuzz.strategies import cases
from hypothesis import HealthCheck, given, settings
from tiers import rarely

tried = Tried()


@pytest.mark.slow
@pytest.mark.parametrize("programs", [8, rarely(80)])
def test_random_programs(programs: int) -> None:
    @settings(
        max_examples=programs,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def right(case: Case) -> None:
        assert Case.from_json(case.to_json()) == case
        check(case, tried)

    right()


@pytest.mark.few(6)
@pytest.mark.parametrize("place", sorted(FOLDER.glob("*.json")), ids=lambda place: place.stem)
def test_found(place) -> None:
    check(Found.from_json(place.read_text()).case)
