"""Memory for Python's call frames."""

from __future__ import annotations

import resource

from commpass.utils.frames import roomy

CALLS, DEPTHS = 500, 400


def leaf(a: int, b: int) -> int:
    return a + b


def page_faults(depth: int) -> int:
    """Return the page faults of many calls at some depth of frames."""
    if depth:
        return page_faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(CALLS):
        leaf(number, number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_page_faults() -> int:
    return max(map(page_faults, range(DEPTHS)))


def test_calls_at_no_depth_need_new_memory() -> None:
    assert roomy(most_page_faults)() < CALLS / 2


def test_a_roomy_function_has_its_arguments_result_and_name() -> None:
    assert roomy(leaf)(1, b=2) == 3
    assert (roomy(leaf).__name__, roomy(leaf).__wrapped__) == ("leaf", leaf)
