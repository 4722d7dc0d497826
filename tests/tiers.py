"""Which tests run: the quick ones always, those marked ``every`` with ``--every``, or one in
256 of them with ``--share TEXT``. Of a function marked ``few(n)``, n cases are quick. Those of
``tests/bench``, which are of the benchmarks, run where ``--bench`` or ``--every`` is given."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

PARTS = 256
RANKS = {"ranks2", "ranks3", "ranks4"}
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
runs_again = pytest.mark.skipif(
    VERSION < (2, 12), reason="torch 2.11 keeps the results of these sums: nothing is run again"
)


_chosen_tier = {"every": False}


def examples(quick: int, every: int) -> int:
    """How many cases hypothesis tries: so many, or with ``--every`` more."""
    return every if _chosen_tier["every"] else quick


def part(text: str) -> int:
    """0 to 255, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % PARTS


def sampled(cases: Iterable[Any], quick: Collection[Any] | Callable[[Any], bool]) -> Iterator:
    """All cases for ``parametrize``; those that are not ``quick`` run with ``--every`` alone."""
    for case in cases:
        kept = quick(case) if callable(quick) else case in quick
        marks = () if kept else pytest.mark.every
        yield pytest.param(*case if isinstance(case, tuple) else (case,), marks=marks)


def crossed(*choices: Iterable[Any], one_in: int = 1) -> Iterator[tuple]:
    """The product of the choices, or one in so many of it. Each pair of values of two choices is
    still in it where a third choice has ``one_in`` values or more."""
    for numbered in itertools.product(*map(enumerate, choices)):
        if sum(number for number, _ in numbered) % one_in == 0:
            yield tuple(value for _, value in numbered)


def thinned(*choices: Iterable[Any], one_in: int) -> Iterator[ParameterSet]:
    """The product of the choices for ``parametrize``, tuples in it taken apart; one in so many of
    it runs without ``--every``."""
    every, quick = (tuple(crossed(*choices, one_in=n)) for n in (1, one_in))
    for case in every:
        flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in case)
        yield pytest.param(*flat, marks=() if case in quick else pytest.mark.every)


def rarely(*case: Any, **more: Any) -> ParameterSet:
    """A case for ``parametrize`` that runs with ``--every`` alone."""
    return pytest.param(*case, marks=pytest.mark.every, **more)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", action="store_true", help="also the tests marked every: all combinations"
    )
    parser.addoption("--bench", action="store_true", help="also the tests of the benchmarks")
    parser.addoption(
        "--share",
        metavar="TEXT",
        default="",
        help="also one in 256 of the tests marked every; TEXT, such as a commit, says which",
    )


def pytest_configure(config: pytest.Config) -> None:
    _chosen_tier["every"] = config.getoption("--every")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of the same real ranks run in one worker, in which these are started once. Tests of
    benchmarks are marked."""
    if item.path.parent.name == "bench":
        item.add_marker("bench")
    if _takes_ranks(item) and not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group("ranks"))


def _takes_ranks(item: pytest.Item) -> bool:
    """Whether a test takes ranks as a fixture, or asks for a fixture when it runs: those are
    ranks."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    asks = code is not None and "getfixturevalue" in code.co_names
    return asks or bool(RANKS & {*getattr(item, "fixturenames", ())})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _keep_group(item)
    if config.getoption("--every"):
        return
    _mark_all_but_few(items)
    text = config.getoption("--share")
    bench = config.getoption("--bench")
    left = [item for item in items if not _is_quick(item, bench) and not _chosen(item, text)]
    if left:
        out = set(left)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in out]


def _keep_group(item: pytest.Item) -> None:
    """pytest-xdist 3.8 tells the group of a test by an id that pytest 9.2 no longer asks for: each
    worker would start ranks of its own."""
    named = vars(item).get("_nodeid", item.nodeid)
    if named != item.nodeid:
        item._id = type(item._id).parse(named)


def _mark_all_but_few(items: list[pytest.Item]) -> None:
    """Marks ``every`` all cases of a function ``few(n)`` but n, which lie evenly among them."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("every"):
            cases.setdefault(getattr(item, "function", item), []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("few")
        assert mark is not None
        kept = {number * len(found) // mark.args[0] for number in range(mark.args[0])}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.every)


def _is_quick(item: pytest.Item, bench: bool) -> bool:
    return not item.get_closest_marker("every") and (bench or not item.get_closest_marker("bench"))


def _chosen(item: pytest.Item, text: str) -> bool:
    """By the test's place and name: its id has the name of its group at the end under xdist."""
    place, _, name = item.location
    return bool(text) and part(f"{place}::{name}") == part(text)
