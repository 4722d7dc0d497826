"""Mutants: patches that each introduce one defect that users would notice, and the tests that must
catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mutant:
    """A patch: its defect in one ``sentence``, and the responsible ``tests``."""

    path: Path
    sentence: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def mutants() -> list[Mutant]:
    """Return all mutants by name. Raise ValueError for a patch without the two lines of a
    header."""
    return [_read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _read(path: Path) -> Mutant:
    sentence, tests, *_ = path.read_text().splitlines()
    key, _, given = tests.partition(":")
    if not sentence.endswith(".") or key != "tests" or not given.split():
        raise ValueError(f"{path.name}: must begin with a sentence, and 'tests: path ...'")
    return Mutant(path, sentence, tuple(given.split()))
