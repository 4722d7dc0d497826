"""Claims about losses of trainings whose results are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.experiments.experiment import scale
from benchmarks.claims.experiments.losses import Runs, mean_percent, percents, spread_percent


@dataclass(frozen=True)
class Trained:
    """The runs of an experiment: ``forms`` is the key of its forms, ``base`` the form without, and
    ``what`` is trained."""

    experiment: str
    forms: str
    base: str
    what: str

    def runs(self, found: Found, form: str) -> Runs:
        return found[self.experiment][self.forms][form]["runs"]

    def form(self, found: Found, form: str) -> dict[str, Any]:
        return found[self.experiment][self.forms][form]

    def loss(
        self,
        paper: str,
        where: str,
        text: str,
        number: float,
        form: str,
        *,
        part: str = "validation",
        base: str = "",
        note: str = "",
    ) -> Claim:
        """By how much the loss of a form is above that of ``base``, in percent."""

        def of(statistic: Callable[..., Any]) -> Callable[[Found], Any]:
            return lambda found: statistic(
                self.runs(found, form), self.runs(found, base or self.base), part
            )

        return Claim(
            paper=paper,
            where=where,
            text=text,
            number=number,
            kind="loss",
            experiments=(self.experiment,),
            measure=of(mean_percent),
            spread=of(spread_percent),
            note=self.note(note),
        )

    def order(
        self,
        paper: str,
        where: str,
        text: str,
        holds: Callable[[Found], bool],
        *,
        note: str = "",
    ) -> Claim:
        return Claim(
            paper=paper,
            where=where,
            text=text,
            kind="order",
            experiments=(self.experiment,),
            measure=holds,
            note=self.note(note),
        )

    def is_above(self, found: Found, form: str, other: str) -> bool:
        """Whether the loss of a form is above that of another one with each seed."""
        return min(percents(self.runs(found, form), self.runs(found, other))) > 0

    def percent(self, found: Found, form: str, base: str = "") -> float:
        return mean_percent(self.runs(found, form), self.runs(found, base or self.base))

    def note(self, more: str = "") -> str:
        """What is trained, and for how long."""
        return "; ".join(filter(None, (more, self.what, scale(self.experiment))))
