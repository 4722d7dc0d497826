"""How many processor cores each rank has, if ranks share them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from commpass.errors import PolicyError

CORES = "COMMPASS_CORES"
"""The environment variable that states how many cores this rank has."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A file that differs between running kernels. Containers and network namespaces of one machine
have the same one."""


@dataclass(frozen=True)
class Processors:
    """Where a rank may run.

    ``machine`` names the running kernel ("" if unknown). ``cpus`` has a bit for each logical
    processor that the process may use, as a hexadecimal number. ``stated`` is the number of cores
    that the environment states, or 0.
    """

    machine: str = ""
    cpus: str = "0"
    stated: float = 0.0


def processors_here(boot: Path = BOOT) -> Processors:
    """Return where this process may run; nothing on a system that does not tell."""
    try:
        machine = boot.read_text(encoding="ascii").strip()
        cpus = os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):
        return Processors(stated=stated_cores())
    return Processors(machine, f"{sum(1 << cpu for cpu in cpus):x}", stated_cores())


def stated_cores() -> float:
    """Return the number in COMMPASS_CORES, 0 if it is not set. Raise PolicyError for another
    value."""
    given = os.environ.get(CORES) or "0"
    try:
        cores = float(given)
    except ValueError:
        cores = math.nan
    if not 0 <= cores < math.inf or (cores == 0 and given != "0"):
        raise PolicyError(f"{CORES}={given}: must be a number of cores of a rank, such as 0.5")
    return cores


def cores_of_rank(found: Collection[Processors]) -> float:
    """Return the number of cores of the rank with the fewest, or 1 if each has at least one.

    Ranks that may run on the same logical processor share it equally. A rank whose processors are
    unknown counts as one with a core.
    """
    users: Counter[tuple[str, int]] = Counter()
    places = [(one, _cpus(one)) for one in found]
    for one, cpus in places:
        users.update((one.machine, cpu) for cpu in cpus)
    cores = [
        one.stated or sum(1 / users[one.machine, cpu] for cpu in cpus) or 1.0
        for one, cpus in places
    ]
    return min(1.0, *cores) if cores else 1.0


def _cpus(one: Processors) -> list[int]:
    mask = int(one.cpus, 16) if one.machine else 0
    return [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1]
