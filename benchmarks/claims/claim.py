"""What a claim is, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.claims.cases import Case

Kind = Literal["exact", "ratio", "order"]
Found = Mapping[str, "Measured"]
WITHIN = {"exact": 0.02, "ratio": 0.15}
"""How far from the paper's number a reproduced one may be, by the kind of claim."""


@dataclass(frozen=True)
class Measured:
    """Of one case: the error of the result relative to its norm, its mean square, and the bits on
    the wire for each value that a rank hands over."""

    error: float
    mse: float
    bits: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A headline of a paper. ``number`` is the paper's, None where it states an order alone.

    ``measure`` makes our number (of an order: whether it holds) of the ``cases`` by name;
    ``predicted`` is that of the cost model, ``assumed`` what it stands on, ``fitted`` whether a
    parameter was fitted to this very number. ``why_not`` says why there is neither.
    """

    paper: str
    where: str
    text: str
    number: float | str | None = None
    kind: Kind = "exact"
    cases: tuple[Case, ...] = ()
    measure: Callable[[Found], float | bool] | None = None
    predicted: float | str | None = None
    assumed: str = ""
    fitted: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Result:
    """A claim with our number and what is to be thought of it."""

    claim: Claim
    measured: float | bool | None
    verdict: str


def judged(claim: Claim, found: Found) -> Result:
    """The verdict over a claim. Raises KeyError where a case of it was not run."""
    if claim.measure is None:
        if claim.predicted is None:
            return Result(claim, None, "not testable here")
        return Result(claim, None, "fitted" if claim.fitted else "predicted only")
    measured = claim.measure(found)
    if claim.kind == "order" or not isinstance(claim.number, float):
        return Result(claim, measured, "reproduced" if measured else "contradicted")
    if abs(measured / claim.number - 1) <= WITHIN[claim.kind]:
        return Result(claim, measured, "reproduced")
    same_side = claim.kind == "ratio" and (measured > 1) == (claim.number > 1)
    return Result(claim, measured, "order only" if same_side else "contradicted")
