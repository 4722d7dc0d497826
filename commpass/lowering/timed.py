"""What the times of a kernel's tile sizes say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """The result for one kernel call.

    ``choice`` holds the values of the chosen tile or configuration; it is None if the static choice
    is kept. ``static_us`` and ``us`` are the times of the static and of the chosen one in
    microseconds, 0 if they are unknown. ``skipped`` names the choices that could not be used, with
    the reasons. ``note`` says why not all were timed, if so.
    """

    choice: dict[str, int | bool] | None = None
    static_us: float = 0.0
    us: float = 0.0
    skipped: tuple[str, ...] = ()
    note: str = ""

    @property
    def text(self) -> str:
        """The result in words."""
        if not self.us:
            return self.note
        times = f"{self.static_us:.1f} us"
        if self.choice is not None:
            times += f" -> {self.us:.1f} us"
        return f"{times} ({self.note})" if self.note else times
