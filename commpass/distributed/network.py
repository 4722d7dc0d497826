"""Read from the system which network a rank sends over, and at which stated rate.

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
from commpass.distributed.interfaces import (
    Interface,
    ethernet,
    exists,
    infiniband_ports,
    interfaces_below,
    is_hardware,
    is_up,
    names_in,
    slowest,
    unknown_interface,
)
from commpass.distributed.processors import Processors, processors_here
from commpass.utils.printable import clean

SYS = Path("/sys")
NCCL_IGNORES = "^docker,lo,virbr"


@dataclass(frozen=True)
class NetworkOfRank:
    """The host of a rank (``machine.host_id``), the interfaces of gloo and of NCCL there, the name
    of its GPU ("" without NCCL), and its processors."""

    host: str
    gloo: Interface
    nccl: Interface
    card: str = ""
    processors: Processors | None = None


def network_here(host: str, backends: str, card: str = "") -> NetworkOfRank:
    """Return the network of this rank. ``backends`` are those of the default group, as in
    ``cpu:gloo,cuda:nccl``, and ``card`` is the name of its GPU."""

    def unused(backend: str) -> Interface:
        return Interface("", reason=f"the default process group has no {backend}")

    return NetworkOfRank(
        host,
        _printable(gloo_interface() if "gloo" in backends else unused("gloo")),  # may need DNS
        _printable(nccl_interface() if "nccl" in backends else unused("nccl")),
        card,
        processors_here(),
    )


def _printable(found: Interface) -> Interface:
    """Return an interface as it can be published: Linux allows any bytes in a name."""
    return replace(found, name=clean(found.name), reason=clean(found.reason))


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
    if not exists(root / "class/net"):
        return unknown_interface("", f"{root / 'class/net'} does not exist")
    listed = environ.get("GLOO_SOCKET_IFNAME", "")
    if len(listed) > 1:  # torch ignores a single character, and a comma at the end
        names = listed.removesuffix(",").split(",")
        return slowest([ethernet(name, root) for name in names])
    try:
        return ethernet(find(), root)
    except (OSError, UnicodeError) as error:
        return unknown_interface("", f"the host's name has no address ({error})")


def nccl_interface(root: Path | None = None, environ: Mapping[str, str] = os.environ) -> Interface:
    """Return the ports that NCCL uses: the active ones of InfiniBand or RoCE, else interfaces.

    ``NCCL_IB_HCA`` and ``NCCL_SOCKET_IFNAME`` select among them, and ``NCCL_IB_DISABLE=1`` or
    ``NCCL_NET=Socket`` excludes InfiniBand. If ports have different rates, those count that carry
    most together.
    """
    root = root or SYS
    if (
        not _is_nonzero(environ.get("NCCL_IB_DISABLE", ""))
        and environ.get("NCCL_NET", "").lower() != "socket"
    ):
        adapters = environ.get("NCCL_IB_HCA", "")
        ports = [port for port in infiniband_ports(root) if _is_selected(port.name, adapters)]
        if ports:
            return _widest(ports)
    names = names_in(root / "class/net")
    if pattern := environ.get("NCCL_SOCKET_IFNAME", ""):
        used = [name for name in names if _is_selected(name, pattern)]
        return _widest([ethernet(name, root) for name in used if is_up(name, root)])
    used = [name for name in names if name.startswith("ib")]
    used = used or [name for name in names if _is_selected(name, NCCL_IGNORES)]
    used = [name for name in used if is_up(name, root)]
    own = [name for name in used if _is_own_port(name, used, root)]
    return _widest([ethernet(name, root) for name in own or used])


def _is_nonzero(text: str) -> bool:
    """Return whether NCCL reads a number other than 0. It reads C's numbers, and 0 from a word."""
    found = re.match(r"\s*[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)", text)
    return found is not None and int(found.group(1).lstrip("0xX") or "0", 16) != 0


def _is_own_port(name: str, used: Sequence[str], root: Path) -> bool:
    """Return whether an interface is a port of its own.

    Members of a bond or bridge have no address, so NCCL uses none of them. Neither does it use the
    interfaces that a host has for its containers. A VLAN shares the port of the one below.
    """
    if exists(root / "class/net" / name / "master"):
        return False
    below = interfaces_below(name, root)
    shared = [each for each in below if each in used and _is_own_port(each, used, root)]
    return not shared and bool(below or is_hardware(name, root))


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


def _widest(found: Sequence[Interface]) -> Interface:
    """Return the ports of that rate whose ports carry most together, as one interface."""
    if not found:
        return unknown_interface("", "no network interface is in use")
    if unknown := next((each for each in found if each.reason), None):
        return unknown
    counts = Counter(each.mbit_per_s for each in found)
    rate = max(counts, key=lambda each: (each * counts[each], each))
    ports = [each for each in found if each.mbit_per_s == rate]
    names = [each.name for each in ports]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return Interface(name, rate, len(ports), ports[0].kind)
