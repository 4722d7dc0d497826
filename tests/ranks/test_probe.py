"""``commpass probe`` on real ranks: what it writes, and that ranks then use it for decisions."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commpass
from commpass.costmodel.files import digest, read
from commpass.costmodel.links import steps
from commpass.distributed.machine import backend_of
from commpass.errors import ProfileError
from commpass.probe import probe, run

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


@pytest.mark.slow
def test_ranks_measure_the_same_profile(ranks3):
    first, *others = ranks3.run(everywhere)
    assert all(other == first for other in others)
    assert first[1:] == ([*KINDS, "message", "messages"], 3)


def as_on_hosts(hosts: list[int]) -> tuple:
    """Make each rank appear to be on the host of its number."""
    real, run.host_id = run.host_id, lambda: f"host {hosts[dist.get_rank()]}"
    try:
        file = probe(1.0)
    finally:
        run.host_id = real
    profile = file.profile
    ranks = {(point.group, point.ranks) for point in file.points}
    return digest(profile), profile.ranks_per_host, profile.intra_host_link is not None, ranks


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hosts", "node", "levels"),
    [
        ([0, 0, 1, 1], 2, {("link", 2), ("intra_host_link", 2)}),
        ([0, 0, 0, 0], 0, {("link", 4)}),
        ([0, 1, 2, 3], 0, {("link", 4)}),
        ([0, 1, 0, 1], 0, {("link", 4)}),
        ([0, 0, 0, 1], 0, {("link", 4)}),
    ],
)
def test_links_between_hosts_and_inside_are_distinguished(hosts, node, levels, ranks4):
    first, *others = ranks4.run(as_on_hosts, hosts)
    assert all(other == first for other in others)
    assert first[1:] == (node, node > 0, levels)


def alone() -> str:
    try:
        probe(1.0)
    except ProfileError as error:
        return str(error)
    return dist.get_backend()


def test_one_rank_has_nothing_to_measure():
    assert "several ranks" in alone()


def named() -> list[str]:
    """Return the name of the backend, by torch and by commpass, of a group that was created for
    several devices."""
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    return [dist.get_backend(group), *map(partial(backend_of, group), map(torch.device, DEVICES))]


DEVICES = ("cpu", "cuda", "xpu")


def test_backend_is_that_of_the_device(ranks2):
    torchs, cpu, cuda, xpu = ranks2.run(named)[0]
    assert torchs != "gloo"
    assert cpu == cuda == "gloo"
    assert xpu == torchs


def launch(*wanted: str) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, "-m", "commpass", "probe", *wanted],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.every
def test_folder_that_is_not_there_is_reported_before_anything_is_measured(tmp_path: Path):
    done = launch("--seconds", "300", "-o", str(tmp_path / "none" / "cluster.json"))
    assert done.returncode != 0
    assert "is no folder that can be written to" in done.stderr
    done = launch("--seconds", "300", "-o", str(make_folder(tmp_path / "cluster.json")))
    assert done.returncode != 0
    assert "cluster.json: cannot be written: it is a folder" in done.stderr


@pytest.mark.every
def test_missing_compiler_is_reported_before_anything_is_measured(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CXX", "/none")
    done = launch("--seconds", "300", "--kernels", "-o", str(tmp_path / "cluster.json"))
    assert done.returncode != 0
    assert "commpass: kernels are compiled, but rank 0 has no C++ compiler" in done.stderr


@pytest.mark.every
def test_command_line_gives_the_same(tmp_path: Path):
    out, plot = tmp_path / "cluster.json", tmp_path / "cluster.png"
    done = launch("--seconds", "2", "-o", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce") == 1  # only rank 0 prints it
    assert digest(read(out).profile) in done.stdout
    assert read(out).machine.backend == "gloo"  # torchrun names none
    assert plot.read_bytes().startswith(b"\x89PNG")
