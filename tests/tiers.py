"""Select the tests that run.

* Quick tests always run.
* Those marked ``slow`` take over a second. They run with ``--slow``, or one in 8 of them with
  ``--share TEXT``. Of a function marked ``rest_slow(n)``, all cases but n are ``slow``.
* Those marked ``every`` run with ``--every``, which runs all tests, or one in 256 of them with
  ``--share TEXT``. Of a function marked ``few(n)``, all cases but n are ``every``.
* Tests of ``tests/bench``, which test the benchmarks, run with ``--bench`` or ``--every``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from _pytest.mark import ParameterSet

PARTS = 256
PARTS_OF_SLOW = 8
LONG_S = 1800
"""The time limit of tests marked ``every``. The slowest takes 850 s, with other work beside it."""
RANKS = {"ranks2", "ranks3", "ranks4"}
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
runs_again = pytest.mark.skipif(
    VERSION < (2, 12), reason="torch 2.11 keeps the results of these sums: nothing is run again"
)
has_messages = pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "isend"),
    reason="torch 2.11 has no functional send and recv",
)


_chosen_tier = {"every": False}


def examples(quick: int, every: int) -> int:
    """Return how many cases hypothesis tries: ``quick``, or ``every`` with ``--every``."""
    return every if _chosen_tier["every"] else quick


def part(text: str) -> int:
    """Return 0 to 255, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % PARTS


def sampled(
    cases: Iterable[Any], quick: Collection[Any] | Callable[[Any], bool], tier: str = "every"
) -> Iterator:
    """Yield all cases for ``parametrize``; mark those that are not ``quick`` as ``tier``."""
    for case in cases:
        kept = quick(case) if callable(quick) else case in quick
        marks = () if kept else getattr(pytest.mark, tier)
        yield pytest.param(*case if isinstance(case, tuple) else (case,), marks=marks)


def crossed(*choices: Iterable[Any], one_in: int = 1) -> Iterator[tuple]:
    """Yield the product of the choices, or one in ``one_in`` of it.

    Each pair of values of two choices is still included if a third choice has ``one_in`` values or
    more.
    """
    for numbered in itertools.product(*map(enumerate, choices)):
        if sum(number for number, _ in numbered) % one_in == 0:
            yield tuple(value for _, value in numbered)


def thinned(*choices: Iterable[Any], one_in: int) -> Iterator[ParameterSet]:
    """Yield the product of the choices for ``parametrize``, with nested tuples flattened.

    One case in ``one_in`` runs without ``--every``.
    """
    every, quick = (tuple(crossed(*choices, one_in=n)) for n in (1, one_in))
    for case in every:
        flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in case)
        yield pytest.param(*flat, marks=() if case in quick else pytest.mark.every)


def rarely(*case: Any, **more: Any) -> ParameterSet:
    """Return a case for ``parametrize`` that runs only with ``--every``."""
    return pytest.param(*case, marks=pytest.mark.every, **more)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", action="store_true", help="also the tests marked every: all combinations"
    )
    parser.addoption("--slow", action="store_true", help="also the tests marked slow")
    parser.addoption("--bench", action="store_true", help="also the tests of the benchmarks")
    parser.addoption(
        "--share",
        metavar="TEXT",
        default="",
        help="also one in 8 of the tests marked slow, and one in 256 of those marked every; TEXT, "
        "such as a commit, says which",
    )


def pytest_configure(config: pytest.Config) -> None:
    _chosen_tier["every"] = config.getoption("--every")
    if config.getoption("--every") or config.getoption("--share"):
        processes.Ranks.limit_factor = 3


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files of the benchmarks' tests where none of them can run."""
    options = ("--bench", "--every", "--share")
    named = any("bench" in argument for argument in config.invocation_params.args)
    is_left = collection_path.name == "bench" and not named
    return True if is_left and not any(map(config.getoption, options)) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run tests of the same real ranks in one worker, which starts them once. Mark tests of
    benchmarks."""
    if item.path.parent.name == "bench":
        item.add_marker("bench")
    if _takes_ranks(item) and not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group("ranks"))


def _takes_ranks(item: pytest.Item) -> bool:
    """Return whether a test has ranks as a fixture, or gets a fixture at run time: those are
    ranks."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    asks = code is not None and "getfixturevalue" in code.co_names
    return asks or bool(RANKS & {*getattr(item, "fixturenames", ())})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _keep_group(item)
    if config.getoption("--every"):
        _limit_to(LONG_S, items)
        return
    _mark_others(items, "few", "every")
    _mark_others(items, "rest_slow", "slow")
    _limit_to(LONG_S, [item for item in items if item.get_closest_marker("every")])
    left = [item for item in items if not _runs(item, config)]
    if left:
        out = set(left)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in out]


def _limit_to(seconds: float, items: list[pytest.Item]) -> None:
    """Set the time limit of the tests that have none of their own."""
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(seconds))


def _keep_group(item: pytest.Item) -> None:
    """Restore the group of a test, so that not each worker starts ranks.

    pytest-xdist 3.8 stores it in an id that pytest 9.2 no longer reads.
    """
    named = vars(item).get("_nodeid", item.nodeid)
    if named != item.nodeid:
        item._id = type(item._id).parse(named)


def _mark_others(items: list[pytest.Item], named: str, tier: str) -> None:
    """Mark cases of each function that is marked ``named`` as ``tier``, except as many as the mark
    says, evenly spaced."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(named) and not item.get_closest_marker("every"):
            cases.setdefault(getattr(item, "function", item), []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker(named)
        assert mark is not None
        kept = {number * len(found) // mark.args[0] for number in range(mark.args[0])}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(tier)


def _runs(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether a test runs without ``--every``."""
    text = config.getoption("--share")
    is_left = item.get_closest_marker("bench") and not config.getoption("--bench")
    if is_left or item.get_closest_marker("every"):
        return _is_chosen(item, text, PARTS)
    if item.get_closest_marker("slow") and not config.getoption("--slow"):
        return _is_chosen(item, text, PARTS_OF_SLOW)
    return True


def _is_chosen(item: pytest.Item, text: str, parts: int) -> bool:
    """Select by the test's place and name: under xdist its id ends with the name of its group."""
    place, _, name = item.location
    return bool(text) and part(f"{place}::{name}") % parts == part(text) % parts
