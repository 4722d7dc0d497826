"""Experiments on hosts of their own: each begins in namespaces that are gone with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def in_lab(module: str, *options: str) -> dict[str, Any]:
    """What a program that makes a lab (docs/netlab.md) writes to the file that ``--json`` names.
    Needs Linux and root. Raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", module, *options, "--json", str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(path.read_text())
