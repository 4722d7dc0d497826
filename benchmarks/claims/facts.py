"""Describe the software and hardware of a result."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch


def facts() -> dict[str, str]:
    head = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    commit = subprocess.run(head, cwd=here, capture_output=True, text=True, check=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
