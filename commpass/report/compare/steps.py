"""The counted steps of one run, from the records of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median

from commpass.utils import step_records
from commpass.utils.step_records import EXPLICIT, START, StepRecord

WARM_UP = 3
"""The number of steps that do not count: at the start, and after each step that compiles."""
RULE = (
    f"Steps that compile a graph do not count, nor do the {WARM_UP} steps after each of them,"
    f" nor the first {WARM_UP} of a run."
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one run.

    ``ms`` are the times of the counted steps in milliseconds, each the median of all ranks.
    ``left_out`` is the number of steps that do not count. ``clock`` is what ended the steps.
    """

    ms: tuple[float, ...] = ()
    left_out: int = 0
    ranks: int = 0
    clock: str = ""


def read(folder: Path) -> list[list[StepRecord]]:
    """Return the records of each rank. Of several processes of a rank, the newest that has steps
    counts: a rank may have been started again, and processes such as those of a data loader have
    its number but no steps."""
    by_rank: dict[int, list[StepRecord]] = {}
    for path in step_records.files(folder):
        if found := step_records.read(path):
            rank = found[-1].rank
            if found[-1].clock != START or rank not in by_rank:
                by_rank[rank] = found
    return [by_rank[rank] for rank in sorted(by_rank)]


def steps_of(ranks: Sequence[Sequence[StepRecord]]) -> Steps:
    """Return the counted steps of some ranks: those of the clock that ``clock_of`` chooses."""
    clock = clock_of(ranks)
    rows = [[each for each in records if each.clock == clock] for records in ranks]
    rows = [row for row in rows if row]
    ms, left_out, wait = [], 0, WARM_UP
    for some in zip_longest(*rows):
        present = [each for each in some if each is not None]
        if any(each.compiled for each in present):
            wait = WARM_UP + 1
        if wait:
            wait, left_out = wait - 1, left_out + 1
        else:
            ms.append(1e3 * median(each.seconds for each in present))
    return Steps(ms=tuple(ms), left_out=left_out, ranks=len(ranks), clock=clock)


def clock_of(ranks: Sequence[Sequence[StepRecord]]) -> str:
    """Return what ends a step: explicit calls if there are any, or else the optimizer that stepped
    most often, of several the first. Return "" if there was no step."""
    count = Counter(each.clock for records in ranks for each in records if each.clock != START)
    if EXPLICIT in count:
        return EXPLICIT
    return max(sorted(count), key=count.__getitem__, default="")
