"""Apply one mutant at a time to a copy of the repository, and run its responsible tests:
``make mutants``.

The tests must fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mutants import FOLDER, Mutant, mutants

ROOT = FOLDER.parent.parent
TIMEOUT_S = 600.0
RUN = """
import os, sys, commpass, pytest
here = os.getcwd()
if os.path.dirname(os.path.dirname(os.path.realpath(commpass.__file__))) != here:
    sys.exit(f"not the copy is tested: commpass is {commpass.__file__}, and not in {here}")
sys.exit(pytest.main(sys.argv[1:]))
"""
OPTIONS = ("-x", "-n0", "-rfE", "-p", "no:cacheprovider")
GOOD = ("killed", "timed out")
"""The good outcomes of a mutant: a test that hangs also catches it."""


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant; ``test`` is the first one that failed, or the reason why there is
    none."""

    name: str
    outcome: str
    test: str
    seconds: float


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Yield a folder with all files that git tracks or would add, in their current state."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        place = Path(folder).resolve() / "copy"
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place / name)
        yield place


def environment(place: Path) -> dict[str, str]:
    """Return the environment of a run in a copy: it uses nothing from elsewhere, and leaves nothing
    behind."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(place), str(place / "tests")]),
        "TORCHINDUCTOR_CACHE_DIR": str(place.parent / "inductor"),
        "TRITON_CACHE_DIR": str(place.parent / "triton"),
        "GIT_CEILING_DIRECTORIES": str(place.parent),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def tested(place: Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """Run tests in a copy; return how they end, and the first that fails, or the last line of
    output."""
    command = [sys.executable, "-c", RUN, *OPTIONS, *tests]
    process = subprocess.Popen(
        command,
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timed out", f"within {timeout:g} s"
    finally:
        if process.poll() is None:  # with the ranks that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if process.returncode == 1 and failed:
        return "killed", failed[1]
    if process.returncode == 0:
        return "survived", ""
    lines = said.strip().splitlines() or ["nothing was said"]
    return "did not run", failed[1] if failed else lines[-1]


def tried(mutant: Mutant, timeout: float) -> Result:
    """Apply a patch to a copy, and run its tests there."""
    start = time.monotonic()
    with copy_of_repository() as place:
        applied = subprocess.run(
            ["git", "apply", str(mutant.path)],
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
            check=False,
        )
        if applied.returncode:
            outcome, test = "does not apply", applied.stderr.strip()
        else:
            outcome, test = tested(place, mutant.tests, timeout)
    return Result(mutant.name, outcome, test, round(time.monotonic() - start, 1))


def table_of(results: Sequence[Result]) -> Table:
    table = Table("mutant", "outcome", "by", "s", highlight=False)
    table.columns[0].overflow = table.columns[2].overflow = "fold"
    for each in results:
        style = None if each.outcome in GOOD else "bold red"
        table.add_row(
            each.name, each.outcome, escape(each.test), f"{each.seconds:.0f}", style=style
        )
    return table


def written(results: Sequence[Result]) -> str:
    """Write the results as JSON, with the versions that they were made with."""
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = {each.name: asdict(each) for each in results}
    for row in rows.values():
        del row["name"]
    said = {"torch": torch.__version__, "commit": commit.strip(), "mutants": rows}
    return json.dumps(said, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants, also as globs; all if left out")
    parser.add_argument("--json", type=Path, help="a file that gets the results")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds for the tests of one mutant"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="only whether their tests pass without them"
    )
    given = parser.parse_args()
    console = Console()
    chosen = [
        each
        for each in mutants()
        if not given.names or any(fnmatchcase(each.name, name) for name in given.names)
    ]
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(given.names)}")
    if given.baseline:
        every = list(dict.fromkeys(test for each in chosen for test in each.tests))
        with copy_of_repository() as place:
            outcome, test = tested(place, every, given.timeout * len(chosen))
        said = "passed" if outcome == "survived" else f"{outcome} {escape(test)}"
        console.print(f"{len(every)} files or tests of the unchanged code: {said}")
        return outcome != "survived"
    results = []
    for number, mutant in enumerate(chosen, 1):
        result = tried(mutant, given.timeout)
        results.append(result)
        said = f"{number}/{len(chosen)} {result.name}: {result.outcome} {result.test}"
        print(f"{said} ({result.seconds:.0f} s)", flush=True)
    console.print(table_of(results))
    if given.json:
        given.json.write_text(written(results))
    bad = [each for each in results if each.outcome not in GOOD]
    console.print(f"{len(results) - len(bad)} of {len(results)} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
