"""Run experiments on virtual hosts: each run starts in namespaces that are removed with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def in_lab(module: str, *options: str) -> dict[str, Any]:
    """Run a program that builds a lab (docs/netlab.md), and return what it writes to the file named
    by ``--json``.

    Needs Linux and root. Raise CalledProcessError if the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", module, *options, "--json", str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(path.read_text())
