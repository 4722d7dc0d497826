"""reordering: settings of Inductor's by which each rank would order exchanges for itself.

They decide by what a rank computes: by its memory, by times that are measured or estimated there.
Ranks that compute different things then start their exchanges in different orders, and wait for
each other for good. torch leaves that to the user. Where commpass has changed a graph the ranks
have agreed on its exchanges, so these settings are off for it; pass ``move`` has put its exchanges
into the order that hides them.
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
"""Their names. Others keep the order of starts: ``enable_simple_overlap`` (torch 2.15, on by
default) moves starts up and waits down, but past no other one."""


def reordering_settings() -> tuple[str, ...]:
    """Those that are on. A torch that does not have one has it off."""
    return tuple(name for name in REORDERING if _is_enabled(name))


def switched_off(names: tuple[str, ...]) -> Any:
    """Inductor's config without them, for one compile."""
    return config.patch(dict.fromkeys(names, False))


def _is_enabled(name: str) -> bool:
    try:
        return bool(attrgetter(name)(config))
    except AttributeError:
        return False
