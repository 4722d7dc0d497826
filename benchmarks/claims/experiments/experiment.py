"""Define what an experiment is, and where its result is stored."""

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
    """A longer run: ``run`` returns plain data, and ``minutes`` is its duration on two cores."""

    name: str
    text: str
    minutes: float
    run: Callable[[], dict[str, Any]]


def stored(name: str) -> dict[str, Any] | None:
    """Return the result of an experiment, or None if it was not run."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def scale(name: str) -> str:
    """Return how long the trainings of a stored experiment were; an empty result if it was not
    run."""
    found = stored(name)
    if found is None:
        return ""
    steps, seeds = found["setup"]["steps"], len(found["setup"]["seeds"])
    return f"{steps} steps, {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def carry_out(experiment: Experiment) -> None:
    """Run an experiment and store its result.

    ``load`` records how busy the machine was, as a mean of the last 15 minutes.
    """
    start = time.monotonic()
    found = experiment.run()
    how = {"seconds": round(time.monotonic() - start), "load": round(os.getloadavg()[2], 1)}
    said = facts() | how | found
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{experiment.name}.json").write_text(json.dumps(said, indent=1) + "\n")
