"""Cases that failed once, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
from fuzz.program import Case

FOLDER = Path(__file__).parent / "found"


@dataclass(frozen=True)
class Found:
    """A case and what failed."""

    fault: str
    case: Case

    def to_json(self) -> str:
        return f'{{"fault": {json.dumps(self.fault)},\n"case": {self.case.to_json().rstrip()}}}\n'

    @staticmethod
    def from_json(text: str | bytes) -> Found:
        return msgspec.json.decode(text, type=Found)
