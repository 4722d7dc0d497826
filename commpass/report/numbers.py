"""Format bytes, times and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from commpass.utils.printable import amount


def size(count: float) -> str:
    """Format bytes; a negative count is unknown (a dynamic shape without a hint)."""
    if count < 0:
        return "?"
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log2(count) // 10))
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def amounts(*counts: float, arrow: str = "->") -> str:
    """Format bytes before and after as ``1 MiB -> 260 KiB``, or one amount."""
    return f" {arrow} ".join(map(amount, counts))


def durations(*us: float, arrow: str = "->") -> str:
    """Format times before and after in one unit as ``8.5 -> 2.5 ms``, or one time."""
    most = max(us)
    unit, scale = ("us", 1.0) if most < 1000 else ("ms", 1e3) if most < 1e6 else ("s", 1e6)
    return f" {arrow} ".join(_short(each / scale) for each in us) + f" {unit}"


def _short(value: float) -> str:
    if value >= 10 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{value:.1g}"


def micros(value: float, baseline: float | None = None) -> str:
    """Format a time in us, or in ms if it or the ``baseline`` is at least 1 ms."""
    beside = value if baseline is None else max(value, baseline)
    return f"{value:,.1f} us" if beside < 1000 else f"{value / 1000:,.1f} ms"


def ms(us: float) -> str:
    """Format a time as milliseconds with three significant digits."""
    return f"{us / 1000:,.0f}" if us >= 1e5 else f"{us / 1000:.3g}"


def ordinal(number: int) -> str:
    """Format 1, 2, 3, 4 as "1st", "2nd", "3rd", "4th"."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


def ratio(after: float, before: float) -> str:
    return f"{100 * after / before:.0f}%" if before > 0 and after >= 0 else "-"


def percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def spans(numbers: Sequence[int]) -> str:
    """Format 1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
