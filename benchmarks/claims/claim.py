"""What a claim is, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.claims.cases import Case

Kind = Literal["exact", "ratio", "order", "loss", "ours"]
Found = Mapping[str, Any]
"""By name: of each case what was `Measured`, of each experiment its stored result, or None."""
WITHIN = {"exact": 0.02, "ratio": 0.15}
"""How far from the paper's number a reproduced one may be, by the kind of claim."""
LOSS_WITHIN = 0.25
"""How far a change of a loss may be, in percent of the loss without."""
NO_CHANGE = 0.1
"""A change of a loss that counts as none, in percent, where the spread over the seeds is less: two
of them may have opposite signs."""


@dataclass(frozen=True)
class Measured:
    """Of one case: the error of the result relative to its norm, its mean square, and the bits on
    the wire for each value that a rank hands over. ``deviation`` is how far it is from the case's
    ``reference``, relative to the largest value, where there is one."""

    error: float
    mse: float
    bits: float
    exact: bool
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A headline of a paper. ``number`` is the paper's, None where it states an order alone.

    ``measure`` makes our number (of an order: whether it holds) of the ``cases`` and of the
    ``experiments`` by name; ``spread`` is its standard deviation over the seeds, None for one. Of
    the kind "loss", both numbers are percent, mostly of the loss without. Of the kind "ours" the
    paper has no number. ``bound`` is for a formula: ours is then the deviation from it, and no more
    than rounding explains. ``predicted`` is that of the cost model, ``assumed`` what it stands on,
    ``fitted`` whether a parameter was fitted to this very number. ``note`` says how it was
    measured. ``unsupported_reason`` says why there is neither.
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


def untestable(paper: str, reasons: Mapping[tuple[str, str], str]) -> list[Claim]:
    """A claim for each ``(where, text)``, with the reason why it has neither number."""
    return [
        Claim(paper=paper, where=where, text=text, why_not=why)
        for (where, text), why in reasons.items()
    ]


@dataclass(frozen=True)
class Result:
    """A claim with our number and what is to be thought of it."""

    claim: Claim
    measured: float | bool | None
    spread: float | None
    verdict: str


def judged(claim: Claim, found: Found) -> Result:
    """The verdict over a claim: "not run" where the result of an experiment is None. Raises
    KeyError where a case was not run, or an experiment is not there."""
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
