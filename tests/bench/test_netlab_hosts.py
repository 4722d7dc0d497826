"""Test real labs, which need root: what ranks see, that links are as requested, and that nothing is
left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netlab

ROOT = Path(__file__).parents[2]
LAB = [sys.executable, "-m", "benchmarks.netlab"]
SECONDS = 60


def missing() -> str:
    try:
        netlab.check_machine()
    except netlab.LabError as error:
        return str(error)
    tried = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True, text=True)
    return tried.stderr.strip()


WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


def lab(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAB, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_command_runs_in_each_host(tmp_path):
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS"
    script += " $(ls /sys/class/net); [ $RANK = 0 ] || exit 3"
    found = lab("--no-check", "--json", str(tmp_path / "made"), "--", "sh", "-c", script)
    assert sorted(found.stdout.splitlines()) == [
        f"[{rank}] {rank} 0 2 10.77.0.1 eth0 1 eth0 lo" for rank in range(2)
    ]
    assert found.returncode == 3, found.stderr
    assert "rank 1 failed with exit code 3" in found.stderr
    assert json.loads((tmp_path / "made").read_text())["exit_code"] == 3


def test_each_host_has_its_own_core_on_request():
    script = "taskset --cpu-list --pid $$ | sed 's/.*: //'"
    cores = sorted(os.sched_getaffinity(0))
    hosts = ("--no-check", "--hosts", str(len(cores)))
    own = lab(*hosts, "--own-cores", "--", "sh", "-c", script)
    found = sorted(line.split()[-1] for line in own.stdout.splitlines())
    assert found == sorted(map(str, cores)), own.stderr
    shared = lab(*hosts, "--", "sh", "-c", script)
    assert len({line.split(maxsplit=1)[-1] for line in shared.stdout.splitlines()}) == 1
    few = lab("--own-cores", "--hosts", str(len(cores) + 1), "--", "sh", "-c", script)
    assert f"{len(cores) + 1} hosts, but {len(cores)} cores" in few.stderr


SEND = """
import os, socket
place = ("10.77.0.2", 5000)
if os.environ["RANK"] == "1":
    with socket.create_server(place) as server, server.accept()[0] as got:
        while got.recv(1 << 16):
            pass
else:
    while True:
        try:
            with socket.create_connection(place) as ours:
                ours.sendall(bytes(1_000_000))
            break
        except ConnectionRefusedError:
            pass
"""


@pytest.mark.every
def test_rates_hold_and_bytes_are_counted(tmp_path):
    command = ["--gbit", "0.1", "--json", str(tmp_path / "made"), "--", sys.executable, "-c", SEND]
    found = lab(*command)
    assert found.returncode == 0, found.stderr
    made = json.loads((tmp_path / "made").read_text())
    assert len(made["checks"]) == 4
    for one in made["checks"]:
        assert one["gbit"] == pytest.approx(0.1, rel=0.2)
    sent, received = made["links"][0]["sent_bytes"], made["links"][1]["received_bytes"]
    assert 1.005e6 < sent < 1.1e6  # with headers
    assert received == pytest.approx(sent, rel=0.01)


@pytest.mark.every
def test_delay_is_held():
    found = lab("--hosts", "2", "--gbit", "0.1", "--delay-us", "5000", "--", "true")
    assert found.returncode == 0, found.stderr
    warnings = [line for line in found.stderr.splitlines() if "WARNING" in line]
    assert all("next to nothing went over the links" in line for line in warnings)


TALK = """
import os, socket, time
place = ("10.77.0.2", 5000)
if os.environ["RANK"] == "1":
    server = socket.create_server(place)
    got, _ = server.accept()
    while True:
        got.sendall(got.recv(1))
while True:
    try:
        ours = socket.create_connection(place, timeout=1)
        break
    except ConnectionRefusedError:
        pass
print("connected")
while True:
    try:
        ours.sendall(b"x")
        ours.recv(1)
    except TimeoutError:
        raise SystemExit(5)
    time.sleep(0.01)
"""


@pytest.mark.every
@pytest.mark.parametrize("delay", ["0", "300"])
def test_host_that_is_dropped_falls_silent(delay):
    rest = ["--delay-us", delay, "--drop", "1@5", "--grace", "0", "--", sys.executable, "-c", TALK]
    found = lab("--no-check", *rest)
    assert found.returncode == 5, found.stderr
    assert found.stdout == "[0] connected\n"


API = """
import json
from benchmarks import netlab
from benchmarks.netlab.rates import transfer
netlab.stand_apart()
lab = netlab.build(netlab.Network(2, 0.1))
rates = transfer(lab, [(0, 1)])
lab.slow(1, 0.03)
rates += transfer(lab, [(0, 1)])
lab.drop(1)
rates += transfer(lab, [(0, 1)])
lab.restore(1)
rates += transfer(lab, [(0, 1)])
print(json.dumps(rates))
"""


@pytest.mark.every
def test_links_change_while_they_run(tmp_path):
    (tmp_path / "script.py").write_text(API)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert json.loads(found.stdout) == pytest.approx([0.1, 0.03, 0, 0.1], rel=0.2)


REMOVED = """
import json
from benchmarks import netlab
from benchmarks.netlab.rates import transfer
netlab.stand_apart()
netlab.build(netlab.Network(4, 1.0, node=2, inside_gbit=10.0)).remove()
lab = netlab.build(netlab.Network(2, 0.1, delay_us=100.0))
lab.remove()
print(json.dumps(transfer(netlab.build(netlab.Network(3, 0.1)), [(0, 2)])))
"""


def test_lab_is_removed_and_another_built(tmp_path):
    (tmp_path / "script.py").write_text(REMOVED)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == pytest.approx([0.1], rel=0.2)


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1 << 18)
dist.all_reduce(x)
print(int(x[0]))
dist.destroy_process_group()
"""


@pytest.mark.every
def test_gloo_goes_over_the_links(tmp_path):
    command = [sys.executable, "-c", GLOO]
    found = lab("--no-check", "--json", str(tmp_path / "made"), "--", *command)
    assert sorted(found.stdout.splitlines()) == ["[0] 2", "[1] 2"], found.stderr
    for link in json.loads((tmp_path / "made").read_text())["links"]:
        assert link["sent_bytes"] == pytest.approx(1 << 20, rel=0.1)


def left(mark: str) -> tuple[str, str, list[str]]:
    """Return namespaces and devices of this machine, and the processes whose command line contains
    a word."""
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in (["ip", "netns", "list"], ["ip", "-br", "link"])
    ]
    lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines[folder.name] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return *said, [pid for pid, line in lines.items() if mark in line]


def test_lab_that_is_killed_leaves_nothing_behind():
    mark = f"9{os.getpid()}"
    before = left(mark)
    command = [
        "--hosts",
        "2",
        "--no-check",
        "--",
        "sh",
        "-c",
        f"sleep {mark} & echo up; sleep {mark}",
    ]
    outer = subprocess.Popen([*LAB, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert {outer.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
    assert len(left(mark)[2]) >= 6
    outer.kill()
    outer.wait()
    deadline = time.monotonic() + 10
    while left(mark) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(mark) == before


@pytest.mark.every
@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_lab_that_is_ended_leaves_nothing_behind(number, code):
    mark = f"8{os.getpid()}"
    before = left(mark)
    command = ["--hosts", "2", "--no-check", "--", "sh", "-c", f"echo up; sleep {mark}"]
    outer = subprocess.Popen(
        [*LAB, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert {outer.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
    outer.send_signal(number)
    said = outer.communicate(timeout=SECONDS)[1]
    assert (outer.returncode, "Traceback" in said) == (code, False), said
    assert left(mark) == before
