"""Ranks on emulated hosts agree on the slowest network that they read; labs need root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sys_trees import add_interface
from test_netlab_hosts import LAB, ROOT, WHY

pytestmark = [pytest.mark.skipif(bool(WHY), reason=WHY), pytest.mark.slow]
SCRIPT = """
import torch.distributed as dist
from commpass.distributed.agreed_network import agreed_default
dist.init_process_group("gloo")
print(agreed_default("cpu").description, flush=True)
dist.barrier()
"""


def described(before: str) -> list[str]:
    """Return what each of two hosts prints, after a command of its own."""
    command = f"{before} exec {sys.executable} -c '{SCRIPT}'"
    found = subprocess.run(
        [*LAB, "--no-check", "--", "sh", "-ec", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return sorted(line for line in found.stdout.splitlines() if "ethernet-" in line)


def test_virtual_link_of_a_lab_is_assumed():
    reason = "eth0 is a virtual interface, whose stated rate is arbitrary"
    expected = f"ethernet-10g (assumed: {reason})"
    assert described("") == [f"[{rank}] {expected}" for rank in range(2)]


def test_slowest_host_counts(tmp_path: Path):
    for rank, speed in enumerate(("25000", "1000")):
        add_interface(tmp_path / str(rank), "eth0", speed)
    expected = "ethernet-1g (read from eth0 of rank 1, the slowest)"
    found = described(f"mount --bind {tmp_path}/$RANK /sys;")
    assert found == [f"[{rank}] {expected}" for rank in range(2)]
