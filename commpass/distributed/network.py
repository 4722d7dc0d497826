"""Read from the system which network a rank sends over, and at which stated rate.

Linux states rates in ``/sys/class/net/NAME/speed`` and ``/sys/class/infiniband/*/ports/*/rate``.
Nothing is measured: a link that is slower than its interface states needs ``commpass probe``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commpass.distributed.addresses import interface_of_host_name

SYS = Path("/sys")
ETHERNET, INFINIBAND, ROCE = "ethernet", "infiniband", "roce"
MOST_MBIT_PER_S = 10_000_000
"""Larger rates are errors: drivers state an unknown rate as 2^32 - 1, for example."""
STACKED = ("vlan", "macvlan", "ipvlan", "macvtap", "ipvtap")
"""Types (DEVTYPE) of interfaces that state the rate of the one below them, which a container may
not show."""
NCCL_IGNORES = "^docker,lo,virbr"


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


@dataclass(frozen=True)
class NetworkOfRank:
    """The host of a rank (``machine.host_id``), and the interfaces of gloo and of NCCL there."""

    host: str
    gloo: Interface
    nccl: Interface


def network_here(host: str, backends: str) -> NetworkOfRank:
    """Return the network of this rank. ``backends`` are those of the default group, as in
    ``cpu:gloo,cuda:nccl``."""

    def without(backend: str) -> Interface:
        return Interface("", reason=f"the default process group has no {backend}")

    return NetworkOfRank(
        host,
        gloo_interface() if "gloo" in backends else without("gloo"),  # may need DNS
        nccl_interface() if "nccl" in backends else without("nccl"),
    )


def gloo_interface(
    root: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    find: Callable[[], str] = interface_of_host_name,
) -> Interface:
    """Return the interface that gloo uses, as torch selects it.

    These are the interfaces in ``GLOO_SOCKET_IFNAME``, of which the slowest counts, or else the one
    with the address of the host's name, which ``find`` returns. ``root`` is the folder of sysfs.
    """
    root = root or SYS
    if not _exists(root / "class/net"):
        return _unknown("", f"{root / 'class/net'} does not exist")
    if listed := environ.get("GLOO_SOCKET_IFNAME", ""):
        return _slowest([ethernet(name, root) for name in listed.split(",")])
    try:
        return ethernet(find(), root)
    except (OSError, UnicodeError) as error:
        return _unknown("", f"the host's name has no address ({error})")


def nccl_interface(root: Path | None = None, environ: Mapping[str, str] = os.environ) -> Interface:
    """Return the ports that NCCL uses: the active ones of InfiniBand or RoCE, else interfaces.

    ``NCCL_IB_HCA`` and ``NCCL_SOCKET_IFNAME`` select among them, and ``NCCL_IB_DISABLE=1`` or
    ``NCCL_NET=Socket`` excludes InfiniBand. If ports have different rates, those count that carry
    most together.
    """
    root = root or SYS
    is_without = environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if not is_without and environ.get("NCCL_NET", "").lower() != "socket":
        adapters = environ.get("NCCL_IB_HCA", "")
        ports = [port for port in _infiniband_ports(root) if _is_selected(port.name, adapters)]
        if ports:
            return _widest(ports)
    names = _names(root / "class/net")
    if pattern := environ.get("NCCL_SOCKET_IFNAME", ""):
        used = [name for name in names if _is_selected(name, pattern)]
        return _widest([ethernet(name, root) for name in used if _is_up(name, root)])
    used = [name for name in names if name.startswith("ib")]
    used = used or [name for name in names if _is_selected(name, NCCL_IGNORES)]
    used = [name for name in used if _is_up(name, root)]
    # A host has one virtual interface for each of its containers. NCCL uses none of these, as they
    # have no address there.
    real = [name for name in used if _is_hardware(name, root) or _below(name, root)]
    return _widest([ethernet(name, root) for name in real or used])


def ethernet(name: str, root: Path) -> Interface:
    """Return an interface with its rate, or the reason why that is not known."""
    if not name or name in (".", "..") or "/" in name:
        return _unknown(name, f"{name!r} is no name of an interface")
    folder = root / "class/net" / name
    if not _exists(folder):
        return _unknown(name, f"there is no interface {name}")
    if why := _silent_type(name, root):
        return _unknown(name, why)
    if _exists(folder / "bridge"):
        up = [each for each in _below(name, root) if _is_up(each, root)]
        ports = [ethernet(each, root) for each in up or _below(name, root)]
        return replace(_slowest(ports), name=name)
    found = _text(folder / "speed")
    rate = int(found) if re.fullmatch(r"\d{1,10}", found) else 0
    if not 0 < rate <= MOST_MBIT_PER_S:
        return _unknown(name, f"{name} does not state its rate")
    return Interface(name, rate)


def _silent_type(name: str, root: Path) -> str:
    """Return why the stated rate of an interface means nothing, or "" if it does."""
    folder = root / "class/net" / name
    if name == "lo":
        return "lo is the loopback"
    if _exists(folder / "wireless") or _exists(folder / "phy80211"):
        return f"{name} is wireless, which rarely reaches its stated rate"
    if _exists(folder / "tun_flags"):
        return f"{name} is a tunnel, whose stated rate is arbitrary"
    if _exists(folder / "bridge") and not _below(name, root):
        return f"{name} is a bridge without a network card"
    if not (_is_hardware(name, root) or _below(name, root) or _type(name, root) in STACKED):
        return f"{name} is a virtual interface, whose stated rate is arbitrary"
    reasons = (_silent_type(each, root) for each in _below(name, root))
    if why := next(filter(None, reasons), ""):
        return f"{name} sends over another interface: {why}"
    return ""


def _below(name: str, root: Path) -> list[str]:
    """Return the interfaces over which an interface sends: members of a bond, the one below a VLAN.

    Of a bridge, they are those to other hosts, and not those of containers.
    """
    folder = root / "class/net" / name
    if _exists(folder / "bridge"):
        ports = _names(folder / "brif")
        return [each for each in ports if _is_hardware(each, root) or _below(each, root)]
    return [each.removeprefix("lower_") for each in _names(folder) if each.startswith("lower_")]


def _is_hardware(name: str, root: Path) -> bool:
    return _exists(root / "class/net" / name / "device")


def _is_up(name: str, root: Path) -> bool:
    return _text(root / "class/net" / name / "operstate") in ("up", "unknown")


def _type(name: str, root: Path) -> str:
    found = re.search(r"^DEVTYPE=(.*)$", _text(root / "class/net" / name / "uevent"), re.MULTILINE)
    return found.group(1) if found else ""


def _infiniband_ports(root: Path) -> list[Interface]:
    """Return the active ports of adapters, which are named as in ``mlx5_0:1``; not those that are
    software only."""
    found = []
    for adapter in _names(root / "class/infiniband"):
        folder = root / "class/infiniband" / adapter
        for number in _names(folder / "ports") if _exists(folder / "device") else ():
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


def _is_selected(name: str, pattern: str) -> bool:
    """Return whether NCCL uses an interface or a port under such a variable.

    The variable is a list of prefixes. A first ``^`` excludes what the list names, and ``=`` (after
    it) requires whole names. ``mlx5_1:1`` names one port of an adapter.
    """
    excludes = pattern.startswith("^")
    exact = pattern[excludes:].startswith("=")
    listed = [each for each in pattern[excludes + exact :].split(",") if each]
    adapter, _, port = name.partition(":")

    def matches(entry: str) -> bool:
        start, _, number = entry.partition(":")
        named = adapter == start if exact else adapter.startswith(start)
        return named and number in ("", port)

    return not listed or any(map(matches, listed)) != excludes


def _slowest(found: Sequence[Interface]) -> Interface:
    """Return the slowest interface, or an unknown one if there is any, whose rate is 0."""
    return min(found, key=lambda each: each.mbit_per_s)


def _widest(found: Sequence[Interface]) -> Interface:
    """Return the ports of that rate whose ports carry most together, as one interface."""
    if not found:
        return _unknown("", "no network interface is in use")
    if unknown := next((each for each in found if each.reason), None):
        return unknown
    counts = Counter(each.mbit_per_s for each in found)
    rate = max(counts, key=lambda each: (each * counts[each], each))
    ports = [each for each in found if each.mbit_per_s == rate]
    names = [each.name for each in ports]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return Interface(name, rate, len(ports), ports[0].kind)


def _unknown(name: str, reason: str) -> Interface:
    return Interface(name, reason=reason)


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # False also for a folder that may not be read


def _text(path: Path) -> str:
    """Return a file without surrounding space, or "" if it cannot be read: an interface that is
    down has an unreadable rate."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    """Return the names in a folder: by their text, and numbers by their size. Return none if it
    cannot be read."""
    try:
        return sorted((each.name for each in folder.iterdir()), key=_by_number)
    except OSError:
        return []


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
