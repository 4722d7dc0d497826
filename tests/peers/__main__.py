"""Run PyTorch's own tests plain and with commpass, and print what passes plain alone.

    PYTHONPATH=tests python -m peers CHECKOUT [FILE ...] [--policies off lossless balanced]
                                     [--timeout 300] [--json FILE] [-k EXPRESSION]

CHECKOUT is a checkout of PyTorch at the version that is installed: `git clone --depth 1 --branch
v2.13.0 https://github.com/pytorch/pytorch`. Its `test` folder is read, not changed. FILE is a path
below `test`; without one, `FILES` are run. The exit status is 1 if a test with commpass gives other
numbers, an error or no end. Asserts about generated code, counters and the shape of graphs are
listed, and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from peers.outcomes import PASSED, Difference, Outcome, differences, read
from peers.wrap import activated

TESTS = Path(__file__).resolve().parent.parent
FILES = (
    "distributed/test_functional_api.py",
    "distributed/test_c10d_functional_native.py",
    "distributed/test_inductor_collectives.py",
    "distributed/test_compute_comm_reordering.py",
    "distributed/test_dynamo_distributed.py",
    "distributed/tensor/test_dtensor_compile.py",
    "distributed/tensor/parallel/test_tp_examples.py",
    "distributed/tensor/parallel/test_micro_pipeline_tp.py",
    "distributed/_composable/fsdp/test_fully_shard_compile.py",
    "distributed/_composable/test_replicate_with_compiler.py",
)
"""Tests that compile collectives."""
POLICIES = ("off", "lossless", "balanced")


def main() -> int:
    parser = argparse.ArgumentParser(prog="peers", description=str(__doc__).splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of PyTorch, at the installed version")
    parser.add_argument("files", nargs="*", help="paths below its folder test")
    parser.add_argument(
        "--policies", nargs="+", default=POLICIES, help="presets, or paths of policy files"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-k", dest="expression", default="", help="as pytest's")
    given = parser.parse_args()
    test = given.checkout / "test"
    files = given.files or [each for each in FILES if (test / each).exists()]
    missing = [each for each in files if not (test / each).exists()]
    if missing or not files:
        sys.exit(f"{test} has no {', '.join(missing or FILES)}: give a checkout of PyTorch")
    console = Console()
    found: list[Difference] = []
    rows = []
    for file in files:
        plain = run(test, file, None, given.timeout, given.expression)
        if not passed(plain):
            console.print(f"{file}: no test passes plain: {reasons(plain)}", markup=False)
            continue
        for policy in given.policies:
            other = run(test, file, policy, given.timeout, given.expression)
            differ = differences(plain, other, policy)
            found += differ
            rows.append((file, policy, plain, other, differ))
    console.print(table(rows))
    for each in found:
        message = textwrap.shorten(each.message, 200)
        console.print(f"{each.policy}: {each.test}: {each.kind}: {message}", markup=False)
    if given.json:
        content = {"torch": torch.__version__, "found": [asdict(each) for each in found]}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    if not rows:
        sys.exit("nothing was compared")
    return int(any(not each.is_by_design for each in found))


def run(
    test: Path, file: str, policy: str | None, timeout: int, expression: str
) -> dict[str, Outcome]:
    """Run the tests of a file in a process, plain or under a policy, and return their outcomes."""
    with tempfile.TemporaryDirectory(prefix="peers") as folder:
        result = Path(folder) / "result.xml"
        environment = dict(os.environ)
        paths = [str(TESTS), str(test), *filter(None, [environment.get("PYTHONPATH")])]
        if policy is not None:
            more = activated(Path(folder), policy)
            paths.insert(0, more.pop("PYTHONPATH"))
            environment |= more
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "pytest", str(test / file), "-q", "-p", "no:cacheprovider"]
        command += ["--timeout", str(timeout), "--junitxml", str(result), "-o", "addopts="]
        command += ["-k", expression] if expression else []
        # The configuration of PyTorch's checkout is meant for its own plugins.
        command += ["-c", os.devnull, "--rootdir", str(test)]
        log = Path(folder) / "log.txt"
        with log.open("w") as output:
            subprocess.run(
                command, check=False, env=environment, cwd=test, stdout=output, stderr=output
            )
        if not result.exists():
            last = "\n".join(log.read_text().splitlines()[-20:])
            sys.exit(f"pytest gave no result for {file} under {policy or 'no policy'}:\n{last}")
        return read(result)


def table(
    rows: Sequence[tuple[str, str, dict[str, Outcome], dict[str, Outcome], list[Difference]]],
) -> Table:
    made = Table("file", "policy", "pass plain", "pass with it", "differ by design", "differ")
    made.columns[0].overflow = "fold"
    for file, policy, plain, other, differ in rows:
        kinds = Counter(each.is_by_design for each in differ)
        numbers = (passed(plain), passed(other), kinds[True], kinds[False])
        made.add_row(file.removeprefix("distributed/"), policy, *map(str, numbers))
    return made


def reasons(outcomes: dict[str, Outcome]) -> str:
    """Return how many tests of a file had which outcome, and the last line of an error."""
    states = Counter(each.state for each in outcomes.values())
    lines = [each.message.strip().splitlines()[-1] for each in outcomes.values() if each.message]
    return f"{dict(states)} {lines[0] if lines else ''}"


def passed(outcomes: dict[str, Outcome]) -> int:
    return sum(each.state == PASSED for each in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
