"""The HTML page of a comparison: the verdict, a table, losses, and a plot of step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from shlex import join

from jinja2 import Environment, PackageLoader, StrictUndefined

from commpass.errors import CommpassError
from commpass.report.compare.losses import difference_text
from commpass.report.compare.steps import RULE
from commpass.report.compare.verdict import Comparison, Series, label, middle_half, times
from commpass.report.html import check
from commpass.report.numbers import amounts
from commpass.utils.tables import write_whole
from commpass.utils.version import own_version

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 300, 60, 30
ROOM = 1.15
"""The axis of times goes this far above the highest of most steps."""
MOST = 0.98
"""The share of steps that the axis must show. Slower ones are drawn at its upper edge."""

__all__ = ["check", "page", "write"]


def write(found: Comparison, path: Path) -> None:
    """Write the page, completely or not at all. Raise CommpassError if that fails."""
    check(path)
    write_whole(path.resolve(), page(found).encode("utf-8", "replace"), CommpassError)


def page(found: Comparison) -> str:
    """Return the page as text."""
    made = Environment(
        loader=PackageLoader("commpass.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"times": times, "difference": difference_text, "name": label}
    made.globals |= {"amounts": amounts}
    style = resources.files("commpass.report.html") / "templates" / "page.css"
    return made.get_template("compare.html").render(
        found=found,
        slow=is_slower(found),
        command=join(found.command),
        style=style.read_text(encoding="utf-8"),
        plot=plot(found),
        rule=RULE,
        version=own_version(),
    )


def is_slower(found: Comparison) -> bool | None:
    """Return whether the verdict is that the program is slower than under the base; None if it is
    inconclusive."""
    clear = [
        each.faster
        for each in found.policies[1:]
        if each.faster is not None and not each.verdict.startswith("inconclusive")
    ]
    return max(clear) < 1 if clear else None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run of the command: its policy, the points of its line, and text for the pointer."""

    policy: int
    points: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place of an axis, in pixels."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The plot of step times, in pixels. ``cut`` is the number of steps above the axis."""

    width: int
    height: int
    left: int
    bottom: int
    lines: tuple[Line, ...]
    medians: tuple[tuple[int, float], ...]
    times: tuple[Tick, ...]
    steps: tuple[Tick, ...]
    cut: int


def plot(found: Comparison) -> Plot | None:
    """Return the plot of the counted steps: a line for each run, and the median of each policy."""
    ms = sorted(each for run in found.runs for each in run.ms)
    if not ms:
        return None
    names = [each.policy for each in found.policies]
    count = max(len(run.ms) for run in found.runs)
    top = ROOM * max(
        ms[int(MOST * (len(ms) - 1))], *(each.high_ms for each in found.policies if each.steps)
    )

    def x(step: int) -> float:
        return round(LEFT + (WIDTH - LEFT - 10) * step / max(1, count - 1), 1)

    def y(value: float) -> float:
        return round((HEIGHT - BOTTOM) * (1 - min(value, top) / top), 1)

    def line(run: Series) -> Line:
        middle = times(middle_half(run.ms)[0])
        return Line(
            policy=names.index(run.policy),
            points=" ".join(f"{x(step)},{y(value)}" for step, value in enumerate(run.ms)),
            title=f"{label(run.policy)}, round {run.round}: median {middle} ms",
        )

    return Plot(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        bottom=BOTTOM,
        lines=tuple(line(run) for run in found.runs if run.ms),
        medians=tuple(
            (at, y(each.median_ms)) for at, each in enumerate(found.policies) if each.steps
        ),
        times=tuple(Tick(at=y(value), text=f"{value:g}") for value in round_values(top)),
        steps=tuple(Tick(at=x(step), text=f"{step + 1}") for step in spread(count)),
        cut=sum(value > top for value in ms),
    )


def round_values(top: float) -> list[float]:
    """Return four to ten round numbers from 0 to ``top``."""
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * by for by in (2, 1, 0.5, 0.2) if top / (power * by) >= 4)
    return [float(f"{number * step:g}") for number in range(int(top / step) + 1)]


def spread(count: int) -> Sequence[int]:
    """Return at most six of the numbers below ``count``, evenly spread."""
    return sorted({round(at * (count - 1) / 5) for at in range(6)})
