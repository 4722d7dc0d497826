"""Check that a lab is as requested: plain TCP between hosts, one pair after another and all at
once, and round-trip times."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

from .apart import inside
from .lab import Lab
from .network import HEADERS, MTU, Network, address, host_link, path, uplinks

OFF = 0.05  # a rate that is off by more than this share is reported
OWN_US = 300  # what a round trip may take without a delay
WARM_UP_S, MEASURE_S, PATIENCE_S = 0.3, 0.5, 5.0
CHUNK, ROUNDS = 1 << 18, 21
WIRE = (MTU + 14) / (MTU + 14 - HEADERS)  # bytes on the link for each byte of data, in full frames
RESET = struct.pack("ii", 1, 0)  # closing discards what is in flight


@dataclass(frozen=True)
class Way:
    """A link and a direction, with a pair of hosts that shows its rate.

    ``asked`` is the rate in Gbit/s of the slowest link between the two, ``delay_us`` the requested
    part of the round trip.
    """

    link: str
    direction: str
    sender: int
    receiver: int
    asked: float
    delay_us: float


@dataclass(frozen=True)
class Measured:
    """Measured rate and round trip.

    ``gbit`` counts headers too, as the link does. ``round_trip_us`` is the median, of messages of
    one byte on idle links.
    """

    way: Way
    gbit: float
    round_trip_us: float

    @property
    def off(self) -> bool:
        return abs(self.gbit / self.way.asked - 1) > OFF

    @property
    def late(self) -> bool:
        """Return whether a delay is not as requested, with an allowance for the path's own time."""
        over = self.round_trip_us - self.way.delay_us
        return self.way.delay_us > 0 and not 0 <= over <= OWN_US + OFF * self.way.delay_us


def slowest(network: Network, sender: int, receiver: int) -> float:
    return min(link.gbit for link in path(network, sender, receiver))


def ways(network: Network) -> Iterator[Way]:
    """Yield each link in both directions, with a pair of hosts.

    The other host is the next one (or the one before) to which nothing on the path is slower than
    the link, or else the one with the fastest path.
    """
    everyone = range(network.hosts)
    size = network.node or 1
    tried = [(host_link(network, h), h, network.node is None) for h in everyone]
    tried += [(link, n * size, True) for n, link in enumerate(uplinks(network))]
    for link, first, far in tried:
        own = range(first, first + (1 if link.host else size))  # an uplink: by its fastest host
        host = max(own, key=lambda h: host_link(network, h).gbit)
        others = [h for h in everyone if h != host and network.together(h, host) != far]
        for direction, turn in (("sends", 1), ("receives", -1)):
            near = sorted(
                others, key=lambda h, host=host, turn=turn: turn * (h - host) % network.hosts
            )
            other = max(near, key=lambda h, host=host: slowest(network, host, h), default=None)
            if other is not None:
                pair = (host, other) if direction == "sends" else (other, host)
                delay = 2 * network.delay_us if far else 0.0
                yield Way(link.name, direction, *pair, slowest(network, *pair), delay)


def check(lab: Lab, told: Callable[[Measured], None] = lambda _: None) -> list[Measured]:
    """Measure each link alone, in each direction."""
    known: dict[tuple[int, int], tuple[float, float]] = {}
    found = []
    for way in ways(lab.network):
        pair = way.sender, way.receiver
        if pair not in known:
            known[pair] = transfer(lab, [pair])[0], round_trip(lab, *pair)
        found.append(Measured(way, *known[pair]))
        told(found[-1])
    return found


def check_together(lab: Lab) -> tuple[float, float]:
    """Return the requested and the measured rates, in Gbit/s, of a ring in which all hosts send to
    the next at once."""
    hosts = lab.network.hosts
    pairs = [(host, (host + 1) % hosts) for host in range(hosts)]
    return sum(slowest(lab.network, *pair) for pair in pairs), sum(transfer(lab, pairs))


def round_trip(lab: Lab, sender: int, receiver: int) -> float:
    """Return the microseconds from one host to another and back."""
    times = []
    with suppress(OSError), ahead():
        ours, theirs = connected(sender, receiver)
        with ours, theirs:
            threading.Thread(target=echo, args=(theirs,), daemon=True).start()
            for _ in range(ROUNDS):
                start = time.perf_counter()
                ours.sendall(b"x")
                ours.recv(1)
                times.append(1e6 * (time.perf_counter() - start))
    return median(times) if times else float("inf")


def echo(theirs: socket.socket) -> None:
    with suppress(OSError):
        while message := theirs.recv(1):
            theirs.sendall(message)


def transfer(lab: Lab, pairs: list[tuple[int, int]]) -> list[float]:
    """Return the Gbit/s of each pair, all sending at once; 0 if nothing arrives."""
    found = [0.0] * len(pairs)
    warm = WARM_UP_S + 20e-6 * lab.network.delay_us  # ten round trips
    both = []
    with suppress(OSError):
        both = [connected(*pair) for pair in pairs]
    until = time.perf_counter() + warm + MEASURE_S
    threads = [threading.Thread(target=send, args=(ours, until)) for ours, _ in both]
    threads += [
        threading.Thread(target=receive, args=(theirs, until, found, number))
        for number, (_, theirs) in enumerate(both)
    ]
    with ahead():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def ahead() -> Iterator[None]:
    """Raise the priority of this thread, and of those that it starts, above all others.

    The measurement is then of the link, not of how busy the machine is.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, *before)


def connected(sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
    with inside(f"host{receiver}"):
        listening = socket.create_server((address(receiver), 0))
    with inside(f"host{sender}"):
        ours = socket.socket()
    with listening:
        listening.settimeout(PATIENCE_S)
        ours.settimeout(PATIENCE_S)
        ours.connect(listening.getsockname())
        theirs = listening.accept()[0]
    theirs.settimeout(PATIENCE_S)
    for one in (ours, theirs):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return ours, theirs


def send(ours: socket.socket, until: float) -> None:
    data = bytes(CHUNK)
    with suppress(OSError), ours:
        while time.perf_counter() < until:
            ours.send(data)


def receive(theirs: socket.socket, until: float, found: list[float], number: int) -> None:
    """Record the rate over the last ``MEASURE_S`` seconds before ``until``."""
    buffer, count, begun, now = bytearray(CHUNK), 0, 0.0, 0.0
    with suppress(OSError), theirs:
        while (now := time.perf_counter()) < until:
            got = theirs.recv_into(buffer)
            if not got:
                break
            if begun:
                count += got
            elif now > until - MEASURE_S:
                begun = now
        now = time.perf_counter()
    if begun:
        found[number] = count * 8 * WIRE / (now - begun) / 1e9
