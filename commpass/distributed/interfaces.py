"""Interfaces and ports of this host, with the rates that the system states.

Linux states rates in ``/sys/class/net/NAME/speed`` and ``/sys/class/infiniband/*/ports/*/rate``.
All functions take the folder of sysfs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ETHERNET, INFINIBAND, ROCE = "ethernet", "infiniband", "roce"
MOST_MBIT_PER_S = 10_000_000
"""Larger rates are errors: drivers state an unknown rate as 2^32 - 1, for example."""
STACKED = ("vlan", "macvlan", "ipvlan", "macvtap", "ipvtap")
"""Types (DEVTYPE) of interfaces that state the rate of the one below them, which a container may
not show."""


@dataclass(frozen=True)
class Interface:
    """What carries the exchanges of a rank between hosts.

    ``mbit_per_s`` is the stated rate of one of its ``ports``, in Mbit/s. It is 0 if it is not
    known, with the ``reason``.
    """

    name: str
    mbit_per_s: int = 0
    ports: int = 1
    kind: str = ETHERNET
    reason: str = ""


def ethernet(name: str, root: Path) -> Interface:
    """Return an interface with its rate, or the reason why that is not known."""
    if not name or name in (".", "..") or "/" in name:
        return unknown_interface(name, f"{name!r} is no name of an interface")
    folder = root / "class/net" / name
    if not exists(folder):
        return unknown_interface(name, f"there is no interface {name}")
    if why := _silent_type(name, root):
        return unknown_interface(name, why)
    if exists(folder / "bridge"):
        up = [each for each in interfaces_below(name, root) if is_up(each, root)]
        ports = [ethernet(each, root) for each in up or interfaces_below(name, root)]
        return replace(slowest(ports), name=name)
    found = _text(folder / "speed")
    rate = int(found) if re.fullmatch(r"\d{1,10}", found) else 0
    if not 0 < rate <= MOST_MBIT_PER_S:
        return unknown_interface(name, f"{name} does not state its rate")
    return Interface(name, rate)


def _silent_type(name: str, root: Path) -> str:
    """Return why the stated rate of an interface means nothing, or "" if it does."""
    folder = root / "class/net" / name
    if name == "lo":
        return "lo is the loopback interface"
    if exists(folder / "wireless") or exists(folder / "phy80211"):
        return f"{name} is wireless, which rarely reaches its stated rate"
    if exists(folder / "tun_flags"):
        return f"{name} is a tunnel, whose stated rate is arbitrary"
    if exists(folder / "bridge") and not interfaces_below(name, root):
        return f"{name} is a bridge without a network card"
    if not (
        is_hardware(name, root) or interfaces_below(name, root) or _type(name, root) in STACKED
    ):
        return f"{name} is a virtual interface, whose stated rate is arbitrary"
    reasons = (_silent_type(each, root) for each in interfaces_below(name, root))
    if why := next(filter(None, reasons), ""):
        return f"{name} sends over another interface: {why}"
    return ""


def interfaces_below(name: str, root: Path) -> list[str]:
    """Return the interfaces over which an interface sends: members of a bond, the one below a VLAN.

    Of a bridge, they are those to other hosts, and not those of containers.
    """
    folder = root / "class/net" / name
    if exists(folder / "bridge"):
        ports = names_in(folder / "brif")
        return [each for each in ports if is_hardware(each, root) or interfaces_below(each, root)]
    return [each.removeprefix("lower_") for each in names_in(folder) if each.startswith("lower_")]


def is_hardware(name: str, root: Path) -> bool:
    return exists(root / "class/net" / name / "device")


def is_up(name: str, root: Path) -> bool:
    return _text(root / "class/net" / name / "operstate") in ("up", "unknown")


def _type(name: str, root: Path) -> str:
    found = re.search(r"^DEVTYPE=(.*)$", _text(root / "class/net" / name / "uevent"), re.MULTILINE)
    return found.group(1) if found else ""


def infiniband_ports(root: Path) -> list[Interface]:
    """Return the active ports of adapters, which are named as in ``mlx5_0:1``; not those that are
    software only."""
    found = []
    for adapter in names_in(root / "class/infiniband"):
        folder = root / "class/infiniband" / adapter
        for number in names_in(folder / "ports") if exists(folder / "device") else ():
            port = folder / "ports" / number
            if not _text(port / "state").endswith("ACTIVE"):
                continue
            name = f"{adapter}:{number}"
            kind = ROCE if _text(port / "link_layer") == "Ethernet" else INFINIBAND
            stated = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", _text(port / "rate"))
            rate = round(float(stated.group(1)) * 1000) if stated else 0
            if 0 < rate <= MOST_MBIT_PER_S:
                found.append(Interface(name, rate, kind=kind))
            else:
                found.append(Interface(name, 0, 1, kind, f"{name} does not state its rate"))
    return found


def slowest(found: Sequence[Interface]) -> Interface:
    """Return the slowest interface, or an unknown one if there is any, whose rate is 0."""
    return min(found, key=lambda each: each.mbit_per_s)


def unknown_interface(name: str, reason: str) -> Interface:
    return Interface(name, reason=reason)


def exists(path: Path) -> bool:
    return os.path.exists(path)  # False also for a folder that may not be read


def _text(path: Path) -> str:
    """Return a file without surrounding space, or "" if it cannot be read: an interface that is
    down has an unreadable rate."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder: by their text, and numbers by their size. Return none if it
    cannot be read."""
    try:
        return sorted((each.name for each in folder.iterdir()), key=_by_number)
    except OSError:
        return []


def _by_number(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
