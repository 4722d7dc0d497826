"""Run a command as one rank on each of several virtual hosts, linked at a given rate.

    python examples/hosts.py 2 1.0 -- python train.py    # 2 hosts, 1 Gbit/s; needs Linux and root

The hosts are network namespaces (docs/netlab.md). If they cannot be created, print the reason in
one line and exit with status 97.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import netlab

NO_HOSTS = 97
STOPPED = 130  # by Ctrl-C
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise it warns that these hosts have no names


def main() -> int:
    hosts, gbit, _, *command = sys.argv[1:]
    try:
        netlab.stand_apart()
        lab = netlab.build(netlab.Network(int(hosts), float(gbit)))
    except netlab.LabError as error:
        print(f"cannot create a host for each rank: {error}", file=sys.stderr)
        return NO_HOSTS
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"host{host}", *command],
            env={**QUIET, **os.environ, **lab.environment(host)},
        )
        for host in range(int(hosts))
    ]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.1)
    return next(filter(None, codes), 0)  # all ranks end with this process


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(STOPPED)
