"""A running lab: its devices exist, and can be slowed, dropped, restored and counted."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .apart import APART, inside
from .network import (
    LabError,
    Network,
    address,
    commands,
    host_link,
    links,
    ports,
    removal,
    slowing,
    window,
)

SETTINGS, CUBIC = Path("/proc/sys/net/ipv4"), "tcp_available_congestion_control"
QUIET_S = 0.1
PORT = 29500


@dataclass(frozen=True)
class Lab:
    """A running lab. ``switch`` is the process that delays frames, if links have a delay."""

    network: Network
    switch: subprocess.Popen | None = None

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment variables of a rank on a host."""
        return {
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.network.hosts),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def slow(self, host: int, gbit: float) -> None:
        """Change the rate of a host's link, in Gbit/s, each way."""
        do(slowing(self.network, host, gbit))

    def drop(self, host: int) -> None:
        """Take a host's link down: no frame passes, and no process is notified."""
        self.network.check_host("drop", host)
        do([f"ip link set {host_link(self.network, host).far} down"])

    def restore(self, host: int) -> None:
        """Bring a host's link up, at its original rate."""
        do(slowing(self.network, host, host_link(self.network, host).gbit))
        do([f"ip link set {host_link(self.network, host).far} up"])

    def remove(self) -> None:
        """Remove all devices, so that this process can build another lab.

        Processes in the hosts must have ended.
        """
        if self.switch:
            self.switch.kill()
            self.switch.wait()
        do(removal(self.network))

    def bytes(self) -> dict[str, tuple[int, int]]:
        """Return, for each link, the bytes sent and received by its host or node since it was
        created.

        They count what left the queue, with headers; what is lost in a queue does not count.
        """
        said = json.loads(do(["ip -j -s link show"]))
        found = {device["ifname"]: device["stats64"] for device in said}
        return {
            link.name: (found[link.far]["rx"]["bytes"], found[link.far]["tx"]["bytes"])
            for link in links(self.network)
        }


def settle(lab: Lab, patience_s: float = 3.0) -> dict[str, tuple[int, int]]:
    """Wait until no frame is in flight; return the bytes of each link then."""
    deadline, before = time.monotonic() + patience_s, lab.bytes()
    while time.monotonic() < deadline:
        time.sleep(QUIET_S + 2e-6 * lab.network.delay_us)
        now = lab.bytes()
        if now == before:
            break
        before = now
    return before


def build(network: Network) -> Lab:
    """Build a lab, in a process that runs in its own namespaces (``stand_apart``)."""
    if APART not in os.environ:
        raise LabError("a lab must be built after stand_apart(): it would change this machine")
    do(commands(network, cubic="cubic" in SETTINGS.joinpath(CUBIC).read_text().split()))
    for host in range(network.hosts if network.delay_us else 0):
        with inside(f"host{host}"):
            for name in ("tcp_rmem", "tcp_wmem"):
                SETTINGS.joinpath(name).write_text(f"4096 131072 {window(network)}")
    return Lab(network, start_switch(network) if network.delay_us else None)


def shaped(ranks: int, gbit: float) -> dict[str, str]:
    """Build a lab of some hosts; return the environment by which ``Ranks`` puts each rank into its
    host."""
    build(Network(ranks, gbit))
    return {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"}


def start_switch(network: Network) -> subprocess.Popen:
    program = str(Path(__file__).with_name("switch.py"))
    command = [sys.executable, program, str(network.delay_us), *ports(network)]
    switch = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if switch.stdout.readline() != "ready\n":
        why = switch.communicate()[1].strip().splitlines()[-1:]
        raise LabError(f"--delay-us needs packet sockets (CONFIG_PACKET): {' '.join(why)}")
    return switch


def do(some: Iterable[str]) -> str:
    """Run commands; return the output of the last one."""
    said = ""
    for command in some:
        done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"{command}: {' '.join(done.stderr.split())}")
        said = done.stdout
    return said
