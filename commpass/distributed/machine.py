"""Describe the machine that this process runs on, and compare it with that of a profile."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from commpass.codecs.registry import NAMES as CODECS
from commpass.costmodel import Profile, default_profile, profile_from
from commpass.costmodel.cards import card_of
from commpass.costmodel.files import Machine, measured_profile, read
from commpass.errors import CommpassError, ProfileError, nearest
from commpass.groups import is_first_rank
from commpass.utils.tables import line_at

VARIABLE = "COMMPASS_PROFILE"
"""The environment variable that names a profile if the program names none."""
ASSUMED, STATED = "assumed", "stated by the manufacturer"
"""Where the numbers of a default profile are from."""
log = logging.getLogger("commpass")


def profile_here(profile: str | Path | Profile | None) -> Profile | None:
    """Return the profile that is requested by name, path or the environment; None if there is none.

    A profile that was measured on another machine is used with a warning, once. Raises ProfileError
    for a profile that does not exist or cannot be read; it says if the environment names it.
    """
    named = requested_profile(profile)
    try:
        return _profile_of(named)
    except CommpassError as error:
        if profile is not None:
            raise
        raise ProfileError(f"{VARIABLE}={named}: {error}") from error


def _profile_of(named: str | Path | Profile | None) -> Profile | None:
    if isinstance(named, (str, Path)) and str(named).endswith(".json"):
        file = read(Path(named))
        if is_first_rank() and (others := list(differences_from(file.machine, this_machine()))):
            _warn(f"profile {named} was measured elsewhere: {'; '.join(others)}. Probe again here")
        return measured_profile(file)
    found = profile_from(named)
    rates = found.kernels.rates if found is not None else {}
    for name in rates if str(named).endswith(".toml") else ():
        if name not in CODECS:
            line = line_at(Path(str(named)).read_text(), ("kernels", "rates", name))
            why = f"no codec{nearest(name, CODECS)}"
            raise ProfileError(f"{named}:{line}: [kernels.rates.{name}]: {why}")
    return found


@functools.cache
def default_here(device: str) -> Profile:
    """Return the default profile for a type of device, the name of the device here, and the hosts
    that torchrun has started. It says nothing of the network, which ``agreed_network`` reads."""
    card = card_here(device)
    found = default_profile(device, card, ranks_on_each_host() if card else 0)
    return dataclasses.replace(found, source=STATED if card_of(card) else ASSUMED)


def card_here(device: str) -> str:
    """Return the name of the GPU, or "" for another type of device."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else ""


def ranks_on_each_host() -> int:
    """Return the number of ranks on each of several hosts, as torchrun tells it. Return 0 if there
    is one host, if hosts have different numbers, or without torchrun."""
    names = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "RANK")
    values = [os.environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        return 0
    here, hosts, ranks, host, rank = map(int, values)
    alike = hosts > 1 and here * hosts == ranks and rank // max(here, 1) == host
    return here if alike else 0


def requested_profile(profile: str | Path | Profile | None) -> str | Path | Profile | None:
    """Return the profile that the program requests, or else the environment."""
    return profile if profile is not None else os.environ.get(VARIABLE) or None


@functools.cache
def _warn(warning: str) -> None:
    log.warning(warning)


def this_machine(places: Sequence[str] = ()) -> Machine:
    """Return this machine, as a profile records it; ``places`` are the hosts of all ranks."""
    world = dist.group.WORLD
    device = device_of(world) if world is not None else torch.device("cpu")
    return Machine(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        hosts=len(set(places)),
        world_size=len(places) or (world.size() if world is not None else 0),
        backend=backend_of(world, device) if world is not None else "",
        torch=str(torch.__version__),
    )


def processor() -> str:
    """Return the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(names, "") or platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which a group's exchanges are fastest."""
    carriers = dist.get_backend_config(group)
    return torch.device("cuda" if "nccl" in carriers and torch.cuda.is_available() else "cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that carries a group's exchanges on a device.

    A group that was made without naming one has several, and torch calls it "undefined".
    """
    carriers = dist.get_backend_config(group).split(",")
    named = dict(each.split(":", 1) for each in carriers if ":" in each)
    return named.get(device.type, dist.get_backend(group))


def host_id() -> str:
    """Return what ranks of one host share: name, network, and torchrun's number for it."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    text = f"{platform.node()}/{network}/{os.environ.get('GROUP_RANK', '')}"
    return text.encode(errors="backslashreplace").decode()  # a name may have any bytes


def differences_from(measured: Machine, current: Machine) -> Iterator[str]:
    """Yield how a profile's machine differs from this one, as far as both are known."""
    labels = {
        "device": "device",
        "processor": "processor",
        "world_size": "number of ranks",
        "hosts": "number of hosts",
        "backend": "backend",
        "cores": "number of cores",
    }
    for field, label in labels.items():
        then, now = getattr(measured, field), getattr(current, field)
        if now and then not in (now, UNDEFINED):
            yield f"{label} {then} there, {now} here"
    if _minor(measured.torch) != _minor(current.torch):
        yield f"torch {measured.torch} there, {current.torch} here"


UNDEFINED = "undefined"
"""The backend in older profiles, which did not record it by device."""


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
