"""Define what a claim is, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.claims.cases import Case

Kind = Literal["exact", "ratio", "order", "loss", "ours"]
Found = Mapping[str, Any]
"""By name: what was `Measured` of each case, and the stored result of each experiment, or None."""
WITHIN = {"exact": 0.02, "ratio": 0.15}
"""How far a reproduced number may be from the paper's, by the kind of claim."""
LOSS_WITHIN = 0.25
"""How far a change of a loss may be from the paper's, in percent of the uncompressed loss."""
NO_CHANGE = 0.1
"""A change of a loss up to this percentage counts as none (up to the spread over the seeds, if that
is larger). Two such changes may have opposite signs."""


@dataclass(frozen=True)
class Measured:
    """The measurement of one case: relative error of the result, its mean square, and bits on the
    wire per value that a rank sends.

    If the case has a ``reference``, ``deviation`` is the distance to it, relative to the largest
    value.
    """

    error: float
    mse: float
    bits: float
    exact: bool
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A headline result of a paper.

    ``number`` is the paper's number, or None if the paper only states an order.

    ``measure`` computes our number from the ``cases`` and ``experiments`` by name; for an order it
    tells whether the order holds. ``spread`` is its standard deviation over the seeds, None for one
    seed. For the kind "loss", both numbers are percent, mostly of the uncompressed loss. For the
    kind "ours", the paper has no number. ``bound`` is for a formula: our number is then the
    deviation from it, and may be at most what rounding explains. ``predicted`` is the number of the
    cost model, ``assumed`` are its assumptions, and ``fitted`` tells whether a parameter was fitted
    to this number. ``note`` tells how it was measured. ``unsupported_reason`` tells why there is
    neither number.
    """

    paper: str
    where: str
    text: str
    number: float | str | None = None
    kind: Kind = "exact"
    cases: tuple[Case, ...] = ()
    experiments: tuple[str, ...] = ()
    measure: Callable[[Found], float | bool] | None = None
    spread: Callable[[Found], float | None] | None = None
    bound: float | None = None
    predicted: float | str | None = None
    assumed: str = ""
    fitted: bool = False
    note: str = ""
    why_not: str = ""


def of_experiments(
    where: str,
    text: str,
    number: float | None,
    measure: Callable[[Found], float | bool],
    note: str,
    *,
    paper: str,
    experiments: tuple[str, ...],
    kind: str = "ratio",
) -> Claim:
    """Return the claim that results of experiments test; without a number it is about an order."""
    return Claim(
        paper=paper,
        where=where,
        text=text,
        number=number,
        kind="order" if number is None else kind,
        experiments=experiments,
        measure=measure,
        note=note,
    )


def untestable(paper: str, reasons: Mapping[tuple[str, str], str]) -> list[Claim]:
    """Return a claim for each ``(where, text)``, with the reason why it has neither number."""
    return [
        Claim(paper=paper, where=where, text=text, why_not=why)
        for (where, text), why in reasons.items()
    ]


@dataclass(frozen=True)
class Result:
    """A claim with our number and the verdict on it."""

    claim: Claim
    measured: float | bool | None
    spread: float | None
    verdict: str


def judged(claim: Claim, found: Found) -> Result:
    """Return the verdict on a claim, "not run" if the result of an experiment is None.

    Raise KeyError if a case was not run, or an experiment does not exist.
    """
    if any(found[name] is None for name in claim.experiments):
        return Result(claim, None, None, "not run")
    if claim.measure is None:
        if claim.predicted is None:
            return Result(claim, None, None, "not testable here")
        return Result(claim, None, None, "fitted" if claim.fitted else "predicted only")
    measured = claim.measure(found)
    spread = claim.spread(found) if claim.spread else None
    return Result(claim, measured, spread, _verdict(claim, measured, spread or 0.0))


def _verdict(claim: Claim, measured: float | bool, spread: float) -> str:
    if claim.bound is not None:
        return "reproduced" if measured <= claim.bound else "contradicted"
    if claim.kind == "ours":
        return "ours alone"
    if claim.kind == "order" or not isinstance(claim.number, float):
        return "reproduced" if measured else "contradicted"
    if claim.kind == "loss":
        same_side = measured * claim.number > 0
        both_none = max(abs(measured), abs(claim.number)) <= max(NO_CHANGE, spread)
        near = abs(measured - claim.number) <= max(LOSS_WITHIN, 2 * spread)
        near = near and (same_side or both_none)
    else:
        near = abs(measured / claim.number - 1) <= WITHIN[claim.kind]
        same_side = claim.kind == "ratio" and (measured > 1) == (claim.number > 1)
    if near:
        return "reproduced"
    return "order only" if same_side else "contradicted"
