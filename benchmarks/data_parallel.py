"""Measure data-parallel training on virtual hosts: step time, bytes and loss of DDP, its hooks,
FSDP2 and commpass. Needs Linux and root (docs/netlab.md).

    python benchmarks/data_parallel.py --gbit 1 [--ways ddp balanced ...] [--json FILE]

This is the same as ``python -m benchmarks.network --only data_parallel``. What it measures is
described in benchmarks/network/data_parallel.py; ``--help`` lists the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.network import cli, data_parallel

if __name__ == "__main__":  # the started ranks import this file as well
    cli.main(["--only", data_parallel.NAME, *sys.argv[1:]])
