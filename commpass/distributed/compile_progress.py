"""Say what a compile is doing that takes long: at level INFO, and as a line on a terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commpass.groups import is_first_rank

log = logging.getLogger("commpass")

FIRST_S = 5.0
"""Seconds after which a compile is reported; then after twice as many, and so on."""
REFRESH_S = 0.5

_here = threading.local()


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Report the compile of a graph inside the context if it takes longer than FIRST_S.

    The first rank shows a line on stderr if that is a terminal. All ranks log at level INFO.
    """
    watch = _Watch(name)
    before = getattr(_here, "watch", None)
    _here.watch = watch
    watch.start()
    try:
        yield
    finally:
        watch.done.set()
        watch.join()
        _here.watch = before


def stage(text: str) -> None:
    """Set what the compile in this thread is doing, as it is shown: "pass 'choose'"."""
    watch = getattr(_here, "watch", None)
    if watch is not None:
        watch.stage = text


class _Watch(threading.Thread):
    """Reports one compile until it is done."""

    def __init__(self, name: str):
        super().__init__(name=f"commpass: {name}", daemon=True)
        self.subject, self.stage = name, "starts"
        self.begin = time.monotonic()
        self.done = threading.Event()

    def run(self) -> None:
        if self.done.wait(FIRST_S):
            return
        due = FIRST_S
        with _line() as show:
            while not self.done.is_set():
                elapsed = time.monotonic() - self.begin
                if elapsed >= due:
                    log.info("%s: compiling for %.0f s, now: %s", self.subject, elapsed, self.stage)
                    due *= 2
                show(f"commpass: {self.subject}, {elapsed:.0f} s: {self.stage}")
                self.done.wait(REFRESH_S)
        elapsed = time.monotonic() - self.begin
        log.info("%s: compiled in %.0f s", self.subject, elapsed)


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text on stderr, in place of the one before. It does nothing
    unless stderr is a terminal, and this the first rank."""
    if not (sys.stderr.isatty() and is_first_rank()):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(text))
