"""Try random cases until the time is up: ``make fuzz MINUTES=30``.

A failing case is minimized and stored as JSON. The test suite then tries it each time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.check import Fault, Tried, check
from fuzz.found import FOLDER, Found
from fuzz.program import Case
from fuzz.strategies import cases
from hypothesis import HealthCheck, Phase, given, seed, settings

BATCH = 200
"""Number of cases per seed."""
SHRINK_S = 120.0
"""Seconds for minimizing a failing case."""


class Enough(BaseException):
    """The time is up. It is not an Exception, so that hypothesis does not catch it."""


@dataclass
class Search:
    """What was tried, and the smallest case of each fault by its signature."""

    until: float
    tried: Tried = field(default_factory=Tried)
    cases: int = 0
    faults: dict[str, tuple[Case, str]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    failing: str = ""
    give_up: float = 0.0

    def batch(self, number: int) -> None:
        """Try the cases of one seed, up to an unknown fault, which is minimized."""
        self.failing = ""
        known = set(self.faults)

        @seed(number)
        @settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(cases())
        def attempt(case: Case) -> None:
            self.attempt(case, known)

        try:
            attempt()
        except (Enough, Fault):
            pass
        except Exception:
            if not self.failing:
                raise

    def attempt(self, case: Case, known: set[str]) -> None:
        if time.monotonic() > (self.give_up if self.failing else self.until):
            raise Enough
        self.cases += not self.failing
        try:
            check(case, self.tried)
        except Exception as error:
            signature = error.signature if isinstance(error, Fault) else crash(error)
            if signature in known or (self.failing and signature != self.failing):
                self.again[signature] += not self.failing
                return
            if not self.failing:
                self.failing, self.give_up = signature, time.monotonic() + SHRINK_S
            best = self.faults.get(signature)
            if best is None or len(case.to_json()) < len(best[0].to_json()):
                self.faults[signature] = case, str(error)
            raise


def crash(error: Exception) -> str:
    """Return what distinguishes errors that are not a Fault: the type, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {Path(last.filename).name} {last.name}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first batch; random if left out"
    )
    parser.add_argument("--into", type=Path, default=FOLDER, help="where cases that fail are kept")
    parser.add_argument("--log", type=Path, help="a file that gets a line about this run")
    given = parser.parse_args()
    os.environ.setdefault("COMMPASS_CHECK", "1")  # as in the suite
    start = time.monotonic()
    search = Search(start + given.minutes * 60)
    number = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    first = number
    while time.monotonic() < search.until:
        known = set(search.faults)
        search.batch(number)
        for signature in set(search.faults) - known:
            case, text = search.faults[signature]
            name = re.sub(r"[^a-z0-9]+", "-", signature.lower()).strip("-")[:60]
            name += "-" + hashlib.sha256(signature.encode()).hexdigest()[:6]
            given.into.mkdir(parents=True, exist_ok=True)
            place = given.into / f"{name}.json"
            place.write_text(Found(text, case).to_json())
            print(f"seed {number}: {text}\n  kept as {place}", flush=True)
        number += 1
    for what, count in sorted(search.tried.met.items()):
        print(f"{count:8d}  {what}")
    for signature, count in search.again.items():
        print(f"{count:8d}  times more: {signature}")
    line = (
        f"{(time.monotonic() - start) / 60:.1f} min ({time.process_time() / 60:.1f} of processor), "
        f"seeds {first} to {number - 1}: {search.cases} programs, "
        f"{search.tried.graphs} graphs tried, {len(search.faults)} faults found"
    )
    print(line)
    if given.log:
        with given.log.open("a") as log:
            log.write(line + "".join(f"; {signature}" for signature in search.faults) + "\n")
    return 1 if search.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
