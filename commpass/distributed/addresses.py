"""Find the network interface that has the address of this host's name."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

LOOPBACK = "lo"
SIOCGIFCONF = 0x8912
"""The request for the IPv4 addresses of all interfaces (netdevice(7))."""
ENTRY, NAME, ADDRESS = 40, 16, 20
"""Bytes of an entry, of the name at its start, and before its IPv4 address, on 64-bit Linux."""
MOST_ENTRIES = 1024
INET6 = Path("/proc/net/if_inet6")


def interface_of_host_name() -> str:
    """Return the interface on which torch's gloo listens if no variable names one.

    It has the first address of the host's name that is one of this host. Without such an address,
    torch uses the loopback. Raises OSError if no interface has the address.
    """
    address = _own_address(socket.gethostname())
    return LOOPBACK if address is None else interface_with(address)


def _own_address(name: str) -> str | None:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as made:
                made.bind(address)
                return str(address[0])
        except OSError:
            continue
    return None


def interface_with(address: str) -> str:
    """Return the interface that has an address. Raises OSError if none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return LOOPBACK
    names = _ipv4() if wanted.version == 4 else _ipv6()
    if wanted not in names:
        raise OSError(f"no interface has the address {address}")
    return names[wanted]


def _ipv4() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    entries = array.array("B", bytes(ENTRY * MOST_ENTRIES))
    place, _ = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        given = struct.pack("iL", len(entries), place)
        filled = struct.unpack("iL", fcntl.ioctl(made.fileno(), SIOCGIFCONF, given))[0]
    raw = entries.tobytes()[:filled]
    rows = [raw[start : start + ENTRY] for start in range(0, len(raw), ENTRY)]
    return {
        ipaddress.IPv4Address(row[ADDRESS : ADDRESS + 4]): _name(row[:NAME].split(b"\0")[0])
        for row in rows
    }


def _name(raw: bytes) -> str:
    """Return the interface of a label: that of ``eth0:1``, a second address, is ``eth0``."""
    return raw.decode("ascii", "replace").partition(":")[0]


def _ipv6() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    rows = [line.split() for line in INET6.read_text(encoding="ascii").splitlines()]
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[-1] for row in rows if row}
