"""Which tests run with ``--every`` and ``--share``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import PARTS, PARTS_OF_SLOW, part, sampled

TESTS = """
import pytest

@pytest.mark.parametrize("n", range(1600))
@pytest.mark.every
def test_long(n):
    pass

def test_quick():
    pass
"""


FEW = """
import pytest

@pytest.mark.few(3)
@pytest.mark.parametrize("n", range(8))
def test_these(n):
    pass
"""

SLOW = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(40))
def test_slow(n):
    pass

@pytest.mark.rest_slow(2)
@pytest.mark.few(4)
@pytest.mark.parametrize("n", range(8))
def test_some(n):
    pass
"""


def collected(folder: Path, *runs: list[str], tests: str = TESTS) -> list[list[str]]:
    """Return the tests that pytest would run with each of some options, in a separate process with
    another hash seed."""
    (folder / "test_these.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = every: long\n")
    program = "import pytest, sys\nfor line in sys.stdin:\n    print('run')\n"
    program += "    pytest.main(['-p', 'tiers', '--collect-only', '-q', *line.split()])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        input="\n".join(" ".join(options) for options in runs) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    made = done.stdout.split("run\n")[1:]
    return [[line for line in text.splitlines() if "::" in line] for text in made]


TEXTS = [next(t for t in map(str, range(10_000)) if part(t) == n) for n in range(PARTS)]
"""One for each part, in order."""


def test_part_of_a_text_is_always_the_same():
    assert [part(text) for text in "ldaovgkh"] == [144, 137, 202, 123, 108, 197, 246, 31]


@pytest.mark.every
def test_few_cases_of_a_function_lie_evenly_among_them(tmp_path):
    quick, whole = collected(tmp_path, [], ["--every"], tests=FEW)
    assert quick == [f"test_these.py::test_these[{n}]" for n in (0, 2, 5)]
    assert len(whole) == 8


@pytest.mark.slow
def test_each_slow_test_is_in_one_part(tmp_path):
    runs = [[], ["--slow"], *(["--share", text] for text in TEXTS[:PARTS_OF_SLOW])]
    quick, slow, *parts = collected(tmp_path, *runs, tests=SLOW)
    assert quick == [f"test_these.py::test_some[{n}]" for n in (0, 4)]
    assert len(slow) == 44
    others = [set(some) - set(quick) for some in parts]
    assert sum(map(len, others)) >= len(set.union(*others)) >= 42
    for number, some in enumerate(others):
        assert {name for name in some if name in slow} == {
            name for name in slow if name not in quick and part(name) % PARTS_OF_SLOW == number
        }


@pytest.mark.every
def test_each_long_test_is_in_one_part(tmp_path):
    shares = [["--share", text] for text in TEXTS[:12]]
    grouped = ["--share", TEXTS[3], "-n", "0", "--dist", "loadgroup"]
    quick, whole, again, *parts = collected(tmp_path, [], ["--every"], grouped, *shares)
    assert quick == ["test_these.py::test_quick"]
    assert len(whole) == 1601
    for number, some in enumerate(parts):
        assert set(some) == {*quick, *(name for name in whole if part(name) == number)}
        assert len(some) > 1
    assert again == parts[3]


GROUPED = """
import os, pytest

@pytest.mark.parametrize("n", range(6))
@pytest.mark.xdist_group("ranks")
def test_ranks(n):
    open("workers", "a").write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


@pytest.mark.every
def test_group_stays_with_one_worker(tmp_path):
    """Otherwise each worker would start the ranks, and they would share the cores."""
    (tmp_path / "test_these.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-p", "tiers", "-n", "2", "--dist", "loadgroup"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 6
    assert len(set(workers)) == 1


GROUPS = """
import pytest

@pytest.fixture
def ranks2():
    pass

@pytest.fixture
def on_ranks(ranks2):
    pass

def test_takes(ranks2):
    pass

def test_takes_what_takes(on_ranks):
    pass

@pytest.mark.parametrize("size", [2])
def test_asks(size, request):
    request.getfixturevalue(f"ranks{size}")

@pytest.mark.xdist_group("own")
def test_is_in_another(ranks2):
    pass

def test_alone(tmp_path):
    pass
"""


SAID = """
def pytest_collection_finish(session):
    for item in session.items:
        mark = item.get_closest_marker("xdist_group")
        print("group", item.name, mark and mark.args[0], sep="::")
"""


@pytest.mark.slow
def test_tests_that_take_ranks_are_in_one_group(tmp_path):
    (tmp_path / "conftest.py").write_text(SAID)
    (said,) = collected(tmp_path, [], tests=GROUPS)
    assert [line for line in said if line.startswith("group::")] == [
        "group::test_takes::ranks",
        "group::test_takes_what_takes::ranks",
        "group::test_asks[2]::ranks",
        "group::test_is_in_another::own",
        "group::test_alone::None",
    ]


@pytest.mark.parametrize("quick", [(2,), lambda case: case == 2], ids=["listed", "asked"])
def test_cases_not_sampled_are_marked(quick):
    made = list(sampled([1, 2, (3, 4)], quick))
    assert [case.values for case in made] == [(1,), (2,), (3, 4)]
    assert [[mark.name for mark in case.marks] for case in made] == [["every"], [], ["every"]]


@pytest.mark.every
@pytest.mark.parametrize(
    ("option", "chosen"), [("", ["a"]), ("--bench", ["a", "b"]), ("--every", ["a", "b", "c"])]
)
def test_tests_of_benchmarks_run_when_asked(option, chosen, tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    slow = "import pytest\ndef test_b(): pass\n@pytest.mark.every\ndef test_c(): pass\n"
    (tmp_path / "bench" / "test_b.py").write_text(slow)
    command = [sys.executable, "-m", "pytest", "-p", "tiers", "--collect-only", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [*command, *filter(None, [option])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split("::test_")[1] for line in done.stdout.splitlines() if "::" in line]
    assert sorted(found) == chosen
