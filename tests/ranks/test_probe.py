"""``commpass probe`` on real ranks: what it writes, and that they then decide by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import commpass
from commpass.costmodel.files import digest, read
from commpass.costmodel.links import steps
from commpass.errors import ProfileError
from commpass.probe import probe

pytestmark = pytest.mark.xdist_group("ranks")
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


def everywhere() -> tuple[str, list, int]:
    file = probe(2.0, name="probed")
    kinds = list(dict.fromkeys(point.kind for point in file.points))
    for point in file.points:
        if point.kind in KINDS:
            assert point.sent == int(steps(point.kind, point.ranks, point.nbytes)[1])
        assert 0 < point.low_us <= point.us <= point.high_us
    backend = commpass.backend("balanced", profile=file.profile)
    assert backend.profile.link.measured.keys() == set(kinds)
    return digest(file.profile), kinds, file.machine.world_size


def test_ranks_measure_the_same_profile(ranks3):
    first, *others = ranks3.run(everywhere)
    assert all(other == first for other in others)
    assert first[1:] == ([*KINDS, "message", "messages"], 3)


def alone() -> str:
    try:
        probe(1.0)
    except ProfileError as error:
        return str(error)
    return dist.get_backend()


def test_one_rank_has_nothing_to_measure():
    assert "several ranks" in alone()


def test_from_the_command_line(tmp_path: Path):
    out, plot = tmp_path / "cluster.json", tmp_path / "cluster.png"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    wanted = ["--seconds", "2", "-o", str(out), "--plot", str(plot)]
    done = subprocess.run(
        [*torchrun, "-m", "commpass", "probe", *wanted],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce") == 1  # rank 0 alone says it
    assert digest(read(out).profile) in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
