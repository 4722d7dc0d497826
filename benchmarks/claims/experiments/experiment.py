"""What an experiment is, and where its result is stored."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.facts import facts

FOLDER = Path(__file__).parents[2] / "results" / "claims"


@dataclass(frozen=True)
class Experiment:
    """A longer run: ``run`` returns plain data; ``minutes`` is what it takes on two cores."""

    name: str
    text: str
    minutes: float
    run: Callable[[], dict[str, Any]]


def stored(name: str) -> dict[str, Any]:
    """The result of an experiment. Raises FileNotFoundError that says how to run it."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        text = f"{name} has no stored result: python -m benchmarks.claims --run {name}"
        raise FileNotFoundError(text)
    return json.loads(path.read_text())


def is_stored(name: str) -> bool:
    return (FOLDER / f"{name}.json").exists()


def carry_out(experiment: Experiment) -> None:
    """Runs an experiment and stores what it found; ``load`` says how busy the machine was, as a
    mean of the last 15 minutes."""
    start = time.monotonic()
    found = experiment.run()
    how = {"seconds": round(time.monotonic() - start), "load": round(os.getloadavg()[2], 1)}
    said = facts() | how | found
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{experiment.name}.json").write_text(json.dumps(said, indent=1) + "\n")
