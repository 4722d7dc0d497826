"""Waiting for what other ranks write to a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def appear(store: Any, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all keys are there in time. Asks again and again: the stores' own wait warns when it takes long."""
    deadline, pause = time.monotonic() + timeout_s, 0.001
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return True
