"""Several hosts on one machine: a network namespace for each rank, all on one bridge by links of a
given rate.

Needs Linux, root, ``ip``, ``tc`` and ``unshare``. Everything lives in namespaces of this process's
own: when it ends, nothing is left behind. ``Ranks`` puts each rank into the namespace that its
``environment`` names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

APART = "COMMPASS_BENCHMARK_APART"
MTU = 9000


def stand_apart() -> None:
    """Starts this program again in network and mount namespaces of its own, unless it is there
    already."""
    if os.environ.get(APART):
        return
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"shaped links need {', '.join(missing)}: install util-linux and iproute2")
    if os.geteuid() != 0:
        raise SystemExit("shaped links need root")
    os.environ[APART] = "1"
    os.execvp(
        "unshare", ["unshare", "-n", "-m", "--kill-child", "--fork", sys.executable, *sys.argv]
    )


def shaped(ranks: int, gbit: float) -> dict[str, str]:
    """Links each rank to a bridge, ``gbit`` Gbit/s each way; returns the environment that ranks
    need."""
    burst = max(int(gbit * 1e9 / 8 * 0.5e-3), 2 * MTU)  # what half a millisecond carries
    _do("mount -t tmpfs tmpfs /run")
    _do("ip link set lo up")
    _do(f"ip link add hub mtu {MTU} type bridge")
    _do("ip link set hub up")
    for rank in range(ranks):
        host, ours = f"host{rank}", f"port{rank}"
        inside = f"ip netns exec {host}"
        _do(f"ip netns add {host}")
        _do(f"ip link add {ours} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {host}")
        _do(f"ip link set {ours} master hub gso_max_size {burst - MTU} up")
        _do(f"{inside} ip link set lo up")
        _do(f"{inside} ip link set eth0 gso_max_size {burst - MTU} up")
        _do(f"{inside} ip addr add 10.77.0.{rank + 1}/24 dev eth0")
        for where, device in (("", ours), (inside, "eth0")):
            _do(
                f"{where} tc qdisc add dev {device} root tbf rate {int(gbit * 1000)}mbit burst"
                f" {burst} latency 50ms"
            )
    return {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"}


def _do(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
