"""reordering: Inductor settings that reorder exchanges on each rank independently.

They decide by local facts: memory, and measured or estimated times. Ranks that compute different
things then start their exchanges in different orders and deadlock. torch leaves this to the user.
In a graph that commpass has changed, the ranks have agreed on the exchanges. These settings are
therefore off for it; pass ``move`` has already ordered its exchanges for overlap.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch._inductor import config

_OF_GRAPHS = "aten_distributed_optimizations"
REORDERING = (
    "reorder_for_compute_comm_overlap",
    f"{_OF_GRAPHS}.enable_overlap_scheduling",
    f"{_OF_GRAPHS}.enable_low_contention_collectives",
)
"""The names of the settings. Others keep the order of starts: ``enable_simple_overlap`` (torch
2.15, on by default) moves starts up and waits down, but not past another exchange."""


def reordering_settings() -> tuple[str, ...]:
    """Return the settings that are enabled. A setting that this torch lacks counts as disabled."""
    return tuple(name for name in REORDERING if _is_enabled(name))


def switched_off(names: tuple[str, ...]) -> Any:
    """Return a patch of Inductor's config that disables them, for one compile."""
    return config.patch(dict.fromkeys(names, False))


def _is_enabled(name: str) -> bool:
    try:
        return bool(attrgetter(name)(config))
    except AttributeError:
        return False
