"""Show the progress of a command: a bar on stderr, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

ShowProgress = Callable[[int, int | None, str], None]
"""Called with the amount done, the total (None: unknown), and the current task."""


@contextmanager
def progress(title: str, *, visible: bool = True) -> Iterator[ShowProgress]:
    """Show a bar that disappears at the end. Nothing is written if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = not visible or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int | None, current: str) -> None:
            bar.update(task, completed=done, total=total, description=current or title)

        yield update
