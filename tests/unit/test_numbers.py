"""The format of times."""

from __future__ import annotations

import pytest

from commpass.report.numbers import micros


@pytest.mark.parametrize(
    ("us", "baseline", "text"),
    [
        (0.0, None, "0.0 us"),
        (999.0, None, "999.0 us"),
        (5505.2, None, "5.5 ms"),
        (0.0, 5259.5, "0.0 ms"),
        (140.0, 200.0, "140.0 us"),
        (1200.0, 200.0, "1.2 ms"),
        (25_286.0, 101_100.0, "25.3 ms"),
    ],
)
def test_times_from_a_millisecond_on_are_in_milliseconds(us, baseline, text):
    assert micros(us, baseline) == text
