"""Measure the gain of commpass on a real network: hosts in namespaces, joined by links of a given
rate.

    python -m benchmarks.network [--only NAME ...] [--quick] [--json FILE] [--plot FILE]

Needs Linux and root (docs/netlab.md). Every rank gets a virtual host. The measurements, one file
each:

- ``reduces``: all_reduce by codec and size, against the time that the bytes sent take on the link.
- ``steps``: a step of tensor-parallel transformers, forward and backward.
- ``gathers``: all_gather and all_to_all without any loss.
- ``never_slower``: presets over kinds, sizes and rates, against plain.
- ``levels``: two levels of links, with an algorithm that uses them and with one that does not.

``--only`` selects some. Other options apply to all selected measurements that have them; ``--help``
lists the defaults of each. A time is a median over repetitions, [lower and upper quartile], of the
slowest rank. Compared variants alternate in one loop, each behind a barrier. The ranks' malloc
keeps memory between calls, for all variants.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for _folder in (ROOT, ROOT / "tests", ROOT / "examples"):  # processes, llama; common, train_tp
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
