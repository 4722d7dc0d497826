"""What commpass gains on a real network: hosts in namespaces, joined by links of a given rate.

    python -m benchmarks.network [--only NAME ...] [--quick] [--json FILE] [--plot FILE]

Needs Linux and root (docs/netlab.md). Every rank is a host of its own. Measurements, each a file:

- ``reduces``: all_reduce by codec and size, against what the bytes sent take on the link.
- ``steps``: a step of tensor-parallel transformers, forward and backward.
- ``gradients``: a data-parallel step and the loss after so many, against DDP's hooks.
- ``gathers``: all_gather and all_to_all without any loss.
- ``never_slower``: presets over kinds, sizes and rates, against plain.
- ``levels``: two levels of links, with an algorithm that knows them and with one that does not.

``--only`` chooses some. Other options are for all chosen measurements that have them; ``--help``
lists what each takes if nobody says. A time is a median over repetitions, [lower and upper
quartile], of the slowest rank. Those that are compared take turns in one loop, each behind a
barrier. Memory is kept by the ranks' malloc and not given back to the system between calls, for
all alike.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for _folder in (ROOT, ROOT / "tests", ROOT / "examples"):  # processes, llama; common, train_tp
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
