"""Start the ranks of an experiment: on this machine, or each in a network namespace.

The links of namespaces have a given rate (docs/netlab.md; needs root).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""malloc keeps memory, and does not return it to the system between calls."""
SHOWN = 3000
"""Number of characters of failed ranks' output in an error message."""


def launched(module: str, ranks: int, options: dict[str, Any], gbit: float | None = None) -> Any:
    """Return what ``module.on_rank(**options)`` returns on rank 0, after a round trip through JSON.

    With ``gbit``, each rank gets a link of that many Gbit/s. Raise RuntimeError with the output of
    the ranks if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        worker = ["-m", "benchmarks.claims.experiments.worker", module, str(out)]
        command = [*_starter(ranks, gbit), *worker, json.dumps(options)]
        paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]
        environment = os.environ | HEAP | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode or not out.exists():
            raised = [file.read_text() for file in sorted(Path(folder).glob("*.txt"))]
            said = "\n".join(raised) or done.stdout + done.stderr
            raise RuntimeError(f"{module} on {ranks} ranks:\n{said[-SHOWN:]}")
        return json.loads(out.read_text())


def _starter(ranks: int, gbit: float | None) -> list[str]:
    if gbit is None:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(ranks)),
        ]
    return [
        *(sys.executable, "-m", "benchmarks.netlab", "--hosts", str(ranks), "--gbit", str(gbit)),
        *("--no-check", "--", sys.executable),
    ]
