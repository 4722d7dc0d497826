"""How many processor cores each rank has, if ranks share them, and how fast they are."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from commpass.distributed.speed import speed_of_core
from commpass.errors import PolicyError

CORES = "COMMPASS_CORES"
"""The environment variable that states how many cores this rank has."""
SPEED = "COMMPASS_SPEED"
"""The environment variable that states how many times as fast as ``costmodel.kernels.CPU`` a core
is."""
LEAST, MOST = 0.01, 1e6
"""The least and the largest number that either may state. Rates times either stay finite."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A file that differs between running kernels. Containers and network namespaces of one machine
have the same one."""


@dataclass(frozen=True)
class Processors:
    """Where a rank may run.

    ``machine`` names the running kernel. ``cpus`` has a bit for each logical processor that the
    process may use, as a hexadecimal number. ``stated`` is the number of cores that the environment
    states, or 0. ``speed`` is that of a core, in units of ``costmodel.kernels.CPU``.
    """

    machine: str
    cpus: str
    stated: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True)
class Capacity:
    """What every rank can count on: the fewest cores of any, at most 1, and the least speed."""

    cores: float = 1.0
    speed: float = 1.0


WHOLE = Capacity()
"""A core as the cost model assumes it."""


@dataclass(frozen=True)
class Sent:
    """What a rank sends to the others of its group: its processors, or why it has none to send."""

    processors: Processors | None = None
    error: str = ""


def processors_here(boot: Path = BOOT) -> Processors:
    """Return where this process may run; all processors if the system does not tell (macOS)."""
    try:
        machine = boot.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = platform.node().encode(errors="backslashreplace").decode()
    if hasattr(os, "sched_getaffinity"):
        mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    else:
        mask = (1 << (os.cpu_count() or 1)) - 1
    return Processors(machine, f"{mask:x}", stated_cores(), speed_here())


def processors_each(group: Any) -> float:
    """Return how many processors each rank of a group has to itself while all of them compute: that
    of the rank with the fewest. Every rank must call this function. Raise PolicyError on all ranks
    if COMMPASS_CORES is wrong on one."""
    try:
        own = Sent(processors=processors_here())
    except PolicyError as error:  # the others wait for this rank
        own = Sent(error=str(error))
    raw: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(raw, msgspec.json.encode(own), group=group)
    found = [msgspec.json.decode(each, type=Sent) for each in raw]
    for rank, each in enumerate(found):
        if each.error:
            raise PolicyError(f"rank {rank}: {each.error}")
    return fewest_cores([each.processors for each in found if each.processors])


def stated_cores() -> float:
    """Return the number in COMMPASS_CORES, 0 if it is not set. Raise PolicyError for another
    value."""
    return _stated(CORES, "a number of cores of a rank, such as 0.5")


def stated_speed() -> float:
    """Return the number in COMMPASS_SPEED, 0 if it is not set. Raise PolicyError for another
    value."""
    return _stated(SPEED, "how many times as fast as a slow core one is, such as 2")


def speed_here() -> float:
    """Return how fast a core of this rank is: as stated, or else as measured."""
    return stated_speed() or speed_of_core()


def _stated(variable: str, expected: str) -> float:
    given = os.environ.get(variable)
    if not given:
        return 0.0
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not LEAST <= number <= MOST:
        limit = f"at most {MOST:,.0f}" if number > MOST else f"at least {LEAST}"
        raise PolicyError(f"{variable}={given}: must be {expected}, and {limit}")
    return number


def capacity_of(found: Collection[Processors]) -> Capacity:
    """Return what every rank can count on, from the processors of all."""
    speed = min((one.speed for one in found), default=1.0)
    return Capacity(min(1.0, fewest_cores(found)), speed)


def fewest_cores(found: Collection[Processors]) -> float:
    """Return the number of cores of the rank with the fewest; 1 without ranks.

    Ranks that may run on the same logical processor share it equally: each of 4 ranks on the same 2
    has 0.5. Ranks that share an operating-system kernel are on one machine, in whatever containers.
    """
    machines: dict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        machines[one.machine][one.cpus] += 1
    shares = {machine: _shares(ranks) for machine, ranks in machines.items()}
    return min((one.stated or shares[one.machine][one.cpus] for one in found), default=1.0)


def _shares(ranks: Mapping[str, int]) -> dict[str, float]:
    """Return the cores of each rank of a machine by the processors that it may use, from how many
    ranks may use these. Many ranks often may use the same ones."""
    places = {cpus: _numbers(cpus) for cpus in ranks}
    users: Counter[int] = Counter()
    for cpus, numbers in places.items():
        users.update(dict.fromkeys(numbers, ranks[cpus]))
    return {cpus: _sum([users[cpu] for cpu in numbers]) for cpus, numbers in places.items()}


def _sum(users: Sequence[int]) -> float:
    """Return the sum of 1 / users, exactly: six sixths are one core, not less."""
    return float(sum(Fraction(many, each) for each, many in Counter(users).items()))


def _numbers(cpus: str) -> list[int]:
    mask = int(cpus, 16)
    return [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1]
