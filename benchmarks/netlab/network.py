"""Define a lab: hosts, links with a rate each, and the commands that create them. Nothing here
runs.

Without nodes, every host has one link, to the hub. With nodes, a host's link goes to its node's
bridge, and one uplink per node, which its hosts share, goes to the hub. All addresses are in one
subnet. If links have a delay, a user-space switch replaces the hub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MTU = 9000
MOST_HOSTS = 250  # one subnet of 256 addresses
LARGEST_SEGMENT = 65536  # the largest unit, in bytes, that the kernel passes to a link at once
QUEUE_MS = 50
LEAST_WINDOW = 6 << 20  # the kernel's default limit
HEADERS = 66  # bytes of a TCP segment's Ethernet, IP and TCP headers, with time stamps


class LabError(Exception):
    """An error in the requested lab, or in the machine, in one line."""


@dataclass(frozen=True)
class Network:
    """``hosts`` hosts, linked by ``gbit`` Gbit/s each way.

    With ``node``, that many consecutive hosts are a node: their links have ``inside_gbit``, and
    each node's uplink has ``gbit``. ``delay_us`` is the number of microseconds for which each frame
    between hosts (with nodes, between nodes) is held, one way. ``slow`` gives the links of some
    hosts their own rates.
    """

    hosts: int
    gbit: float = 1.0
    delay_us: float = 0.0
    node: int | None = None
    inside_gbit: float | None = None
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise LabError(f"--hosts {self.hosts}: must be from 1 to {MOST_HOSTS}")
        check_rate("--gbit", self.gbit)
        if not (math.isfinite(self.delay_us) and self.delay_us >= 0):
            raise LabError(f"--delay-us {self.delay_us:g}: must be microseconds, 0 or more")
        if (self.node is None) != (self.inside_gbit is None):
            raise LabError("--node and --inside-gbit go together: one of them is missing")
        if self.node is not None:
            if self.node < 2 or self.hosts % self.node or self.node == self.hosts:
                raise LabError(
                    f"--node {self.node}: must divide the {self.hosts} hosts into two or more"
                    " nodes of two or more hosts"
                )
            check_rate("--inside-gbit", self.inside_gbit)
        for host, gbit in self.slow:
            self.check_host("--slow", host)
            check_rate("--slow", gbit)

    def check_host(self, option: str, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise LabError(f"{option}: there is no host {host}, only 0 to {self.hosts - 1}")

    def together(self, a: int, b: int) -> bool:
        """Return whether two hosts are on one node."""
        return self.node is not None and a // self.node == b // self.node


@dataclass(frozen=True)
class Link:
    """A link between two devices.

    ``near`` is the device at the host, in its namespace ``host``, or at a node's bridge. ``far`` is
    the other end, in the lab's namespace. ``far`` receives what the host sends.
    """

    name: str
    near: str
    far: str
    gbit: float
    host: str | None = None

    @property
    def inside(self) -> str:
        """Return the arguments that make ``ip`` and ``tc`` act on the near end."""
        return f"-n {self.host} " if self.host else ""


def check_rate(option: str, gbit: float | None) -> None:
    if gbit is None or not (math.isfinite(gbit) and 0.001 <= gbit <= 100):
        raise LabError(f"{option} {gbit:g}: must be from 0.001 to 100 Gbit/s")


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def host_link(network: Network, host: int) -> Link:
    usual = network.gbit if network.inside_gbit is None else network.inside_gbit
    gbit = dict(network.slow).get(host, usual)
    return Link(f"host {host}", "eth0", f"port{host}", gbit, f"host{host}")


def uplinks(network: Network) -> list[Link]:
    count = network.hosts // network.node if network.node else 0
    return [Link(f"node {n}", f"up{n}", f"core{n}", network.gbit) for n in range(count)]


def links(network: Network) -> list[Link]:
    return [host_link(network, host) for host in range(network.hosts)] + uplinks(network)


def path(network: Network, sender: int, receiver: int) -> list[Link]:
    """Return the links on the path of a frame from one host to another."""
    ends = [host_link(network, sender), host_link(network, receiver)]
    if network.node is None or network.together(sender, receiver):
        return ends
    up = uplinks(network)
    return [ends[0], up[sender // network.node], up[receiver // network.node], ends[1]]


def burst(gbit: float) -> int:
    """Return the bytes that a link may send at once.

    They are half a millisecond's, so that rates hold over a millisecond, and at least two frames.
    """
    return max(int(gbit * 1e9 / 8 * 0.5e-3), 2 * MTU)


def segment(gbit: float) -> int:
    """Return the bytes that the kernel may pass to a link at once.

    With half the burst, a link that is served late loses no time unless it is later than a quarter
    of a millisecond.
    """
    return min(max(burst(gbit) // 2, MTU), LARGEST_SEGMENT)


def queue_ms(delay_us: float) -> int:
    """Return how long a frame may wait at a link: 50 ms, or a round trip if that is longer, as TCP
    needs."""
    return max(QUEUE_MS, math.ceil(2 * delay_us / 1000))


def window(network: Network) -> int:
    """Return the bytes that TCP may have in flight.

    They are four times what the fastest link carries in a round trip and a full queue. The kernel's
    limit is too small for long delays.
    """
    longest_s = 2e-6 * network.delay_us + 1e-3 * queue_ms(network.delay_us)
    carried = max(link.gbit for link in links(network)) * 1e9 / 8 * longest_s
    return min(max(4 * int(carried), LEAST_WINDOW), 1 << 30)


def bucket(gbit: float, delay_us: float) -> str:
    rate, queue = round(gbit * 1e9), queue_ms(delay_us)
    return f"root tbf rate {rate}bit burst {burst(gbit)} latency {queue}ms"


def ports(network: Network) -> list[str]:
    """Return the devices at the hub."""
    outer = uplinks(network) if network.node else links(network)
    return [link.far for link in outer]


def bridges(network: Network) -> list[str]:
    count = network.hosts // network.node if network.node else 0
    return [*([] if network.delay_us else ["hub"]), *(f"node{n}" for n in range(count))]


def commands(network: Network, cubic: bool = True) -> Iterator[str]:
    """Yield all commands that create the lab, in order.

    With ``cubic``, TCP uses cubic congestion control regardless of the machine's default: bbr
    measures the link for seconds before it fills it.
    """
    yield "ip link set lo up"
    for bridge in bridges(network):
        yield f"ip link add {bridge} mtu {MTU} type bridge"
        yield f"ip link set {bridge} addrgenmode none up"
    outer = set(ports(network))
    for number, link in enumerate(links(network)):
        if link.host:
            yield f"ip netns add {link.host}"
        there = f" netns {link.host}" if link.host else ""
        yield f"ip link add {link.far} mtu {MTU} type veth peer name {link.near} mtu {MTU}{there}"
        most = f"gso_max_size {segment(link.gbit)}"
        if link.far not in outer:
            yield f"ip link set {link.far} master node{number // network.node}"
        elif not network.delay_us:
            yield f"ip link set {link.far} master hub"
        if not link.host:
            yield f"ip link set {link.near} master node{number - network.hosts}"
        yield f"ip link set {link.far} {most} addrgenmode none up"
        yield f"ip {link.inside}link set {link.near} {most} addrgenmode none up"
        yield f"tc qdisc add dev {link.far} {bucket(link.gbit, network.delay_us)}"
        yield f"tc {link.inside}qdisc add dev {link.near} {bucket(link.gbit, network.delay_us)}"
    for host in range(network.hosts):
        yield f"ip -n host{host} link set lo up"
        yield f"ip -n host{host} addr add {address(host)}/24 dev eth0"
        if cubic:
            yield f"ip -n host{host} route replace 10.77.0.0/24 dev eth0 congctl cubic"


def removal(network: Network) -> list[str]:
    """Return the commands that undo ``commands``. Deleting one end of a link deletes both."""
    devices = [link.far for link in links(network)] + bridges(network)
    made = [f"ip link del {device}" for device in devices]
    return made + [f"ip netns del host{host}" for host in range(network.hosts)]


def slowing(network: Network, host: int, gbit: float) -> list[str]:
    """Return the commands that change the rate of a host's link while the lab runs."""
    network.check_host("slow", host)
    check_rate("slow", gbit)
    link = host_link(network, host)
    rate = bucket(gbit, network.delay_us)
    return [
        f"tc qdisc change dev {link.far} {rate}",
        f"tc {link.inside}qdisc change dev {link.near} {rate}",
    ]
