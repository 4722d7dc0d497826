"""Report how long a run of the tests took, and compare it with the run stored in ``times.json``.

make test                 # warns if it takes longer than LONG_S
pytest ... --store-times  # stores the times of this run, by file
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "times.json"
LONG_S = 600.0
"""A longer run of the quick tier warns. It does not fail, since machines differ."""
LONGER = ("--slow", "--share", "--bench", "--every")
"""Options that run more than the quick tier, whose runs may be long."""
MOST = 10
"""Files that are named."""
_begun = time.monotonic()
_seconds: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store-times", action="store_true", help=f"write the times of this run to {STORED.name}"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count all phases of a test for its file; with xdist the controller gets those of all
    workers."""
    _seconds[report.location[0]] += report.duration


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if hasattr(config, "workerinput") or not _seconds:
        return
    took = time.monotonic() - _begun
    if config.getoption("--store-times"):
        STORED.write_text(json.dumps(_stored(took), indent=1) + "\n")
    terminalreporter.write_line(
        f"{len(_seconds)} files took {took / 60:.1f} minutes; their tests {_minutes()}"
    )
    if took > LONG_S and not any(map(config.getoption, LONGER)):
        terminalreporter.write_line(_warning(took), yellow=True)


def _minutes() -> str:
    return f"{sum(_seconds.values()) / 60:.1f} minutes of workers"


def _stored(took: float) -> dict[str, object]:
    return {
        "commpass": "times of the quick tier",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "took_s": round(took),
        "files": {name: round(_seconds[name], 1) for name in sorted(_seconds)},
    }


def _warning(took: float) -> str:
    """Return what grew most since the stored run, relative to all tests of both.

    On a slow machine all tests are slower.
    """
    text = f"WARNING: this took {took / 60:.1f} minutes, wanted are {LONG_S / 60:.0f}."
    if not STORED.exists():
        return text
    before: dict[str, float] = json.loads(STORED.read_text())["files"]
    both = before.keys() & _seconds.keys()
    slower = sum(_seconds[name] for name in both) / max(sum(before[n] for n in both), 1e-9)
    grown = {name: _seconds[name] - slower * before.get(name, 0.0) for name in _seconds}
    most = sorted(grown, key=lambda name: -grown[name])[:MOST]
    lines = [f"  {name}: {before.get(name, 0):.0f} s, now {_seconds[name]:.0f} s" for name in most]
    return "\n".join([f"{text} Since {STORED.name} ({slower:.2f} times) grew most:", *lines])
