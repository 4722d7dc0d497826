"""The first sentence of the page: how much faster a run is, and what got slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commpass.report.html.compare import Comparison
from commpass.report.layer_patterns import patterns
from commpass.report.numbers import durations
from commpass.report.run import Run, Times
from commpass.report.speedup import NEGLIGIBLE, bytes_sentence, predicted_sentence
from commpass.utils.printable import plural


@dataclass(frozen=True)
class Verdict:
    """Sentences about a run, or about the second of two.

    ``slow`` tells whether the graphs are predicted to take longer than before.
    """

    sentences: tuple[str, ...]
    slow: bool


def verdict(
    runs: Sequence[Run], comparison: Comparison | None, measured: Sequence[str] = ()
) -> Verdict:
    """Return the verdict on the first of some runs, or on the second against the first, with
    sentences on its ``measured`` times."""
    return of_one(runs[0]) if comparison is None else of_two(comparison, measured)


def of_one(run: Run) -> Verdict:
    """Return the verdict on one run against its own graphs without commpass."""
    sums = run.totals
    if not sums.sites:
        return Verdict(
            ("No collective is left in these graphs: there was nothing to decide.",), False
        )
    times = predicted_sentence(sums.plain_us, sums.predicted_us)
    found = [
        f"{sums.compressed} of {plural(sums.sites, 'collective')} compressed under {run.policies}:"
        f" {bytes_sentence(sums.bytes, sums.wire_bytes)}.",
        f"Each by itself, the collectives are {times}.",
    ]
    names = slower_patterns(run)
    if names:
        found.append(f"Predicted to be slower than uncompressed: {', '.join(names)}.")
    return Verdict(tuple(found), is_slower(sums.plain_us, sums.predicted_us))


def of_two(comparison: Comparison, measured: Sequence[str] = ()) -> Verdict:
    """Return the verdict on the second run against the first. Without ``measured`` sentences it has
    the times of a traced step."""
    a, b = comparison.runs
    sent = bytes_sentence(a.totals.wire_bytes, b.totals.wire_bytes)
    found, slow = [f"B ({b.policies}) against A ({a.policies}): {sent}."], False
    if a.predicted is not None and b.predicted is not None:
        slow = is_slower(a.predicted.us, b.predicted.us)
        found.append(
            f"Its graphs are {predicted_sentence(a.predicted.us, b.predicted.us)}"
            f" ({durations(a.predicted.us, b.predicted.us)})."
        )
    if measured:
        found += [f"{each[0].upper()}{each[1:]}." for each in measured]
    elif a.measured is not None and b.measured is not None:
        found.append(f"{measured_sentence(a.measured, b.measured)}.")
    places = [
        change.module or "(root)"
        for change in comparison.changes
        if all(change.sides) and is_slower(*(side.predicted_us for side in change.sides if side))
    ]
    if places:
        found.append(f"Slower in B: {', '.join(dict.fromkeys(places))}.")
    else:
        found.append("No place in the model is predicted to be slower.")
    return Verdict(tuple(found), slow)


def measured_sentence(a: Times, b: Times) -> str:
    """Return what a traced step of each run took: one step is no measurement of a speedup."""
    took = durations(a.us, b.us)
    return f"In one traced step of each, they took {took}: one step does not show the speedup"


def slower_patterns(run: Run) -> list[str]:
    """Return the patterns of sites whose collectives are predicted to take longer than before."""
    found = (
        (one.module or "(root)", one.total("plain_us"), one.total("predicted_us"))
        for one in patterns(run.plans)
    )
    return list(dict.fromkeys(name for name, before, after in found if is_slower(before, after)))


def is_slower(before_us: float, after_us: float) -> bool:
    return before_us > 0 and after_us > (1 + NEGLIGIBLE) * before_us
