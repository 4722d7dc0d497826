"""Claims about the losses of trainings with stored results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.experiments.experiment import scale
from benchmarks.claims.experiments.losses import Runs, mean_percent, percents, spread_percent


@dataclass(frozen=True)
class Trained:
    """The runs of an experiment.

    ``forms`` is the key of its forms, ``base`` the uncompressed form, and ``what`` describes the
    training. Other experiments may hold more forms of the same training (``more``).
    """

    experiment: str
    forms: str
    base: str
    what: str
    more: tuple[str, ...] = ()

    def form(self, found: Found, form: str) -> dict[str, Any]:
        """Return what is stored of a form. Raise RuntimeError if it was trained differently from
        the base."""
        setup = found[self.experiment]["setup"]
        for name in (self.experiment, *self.more):
            result = found.get(name)
            if result is not None and form in result[self.forms]:
                if result["setup"] != setup:
                    raise RuntimeError(
                        f"{name} has not the setup of {self.experiment}: run it again"
                    )
                return result[self.forms][form]
        raise KeyError(form)

    def runs(self, found: Found, form: str) -> Runs:
        return self.form(found, form)["runs"]

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
        needs: str = "",
        note: str = "",
    ) -> Claim:
        """Return by how many percent the loss of a form is above that of ``base``; ``needs`` is the
        other experiment that has the form."""

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
            experiments=self.needed(needs),
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
        needs: str = "",
        note: str = "",
    ) -> Claim:
        return Claim(
            paper=paper,
            where=where,
            text=text,
            kind="order",
            experiments=self.needed(needs),
            measure=holds,
            note=self.note(note),
        )

    def is_above(self, found: Found, form: str, other: str) -> bool:
        """Return whether the loss of a form is above that of another one with each seed."""
        return min(percents(self.runs(found, form), self.runs(found, other))) > 0

    def percent(self, found: Found, form: str, base: str = "") -> float:
        return mean_percent(self.runs(found, form), self.runs(found, base or self.base))

    def needed(self, other: str) -> tuple[str, ...]:
        """Return the experiments of a claim that also needs another one, "" for none."""
        return (self.experiment, other) if other else (self.experiment,)

    def note(self, more: str = "") -> str:
        """Return what is trained, and for how long."""
        return "; ".join(filter(None, (more, self.what, scale(self.experiment))))
