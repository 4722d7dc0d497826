"""The command line starts quickly: reading a dump does not import torch.

The tests count modules, since seconds depend on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import commpass
from commpass import plan
from commpass.plan import dump
from commpass.plan.timeline import COMPUTE, EXCHANGE, HOST, Event, Timeline

ROOT = Path(commpass.__file__).parent.parent
MOST_MODULES = 550
"""Most of them belong to the interpreter itself, typer and rich."""
HEAVY = ("torch", "sympy", "numpy", "matplotlib", "networkx", "triton")
REPORT = f"""
import sys
status = 0
sys.argv = ["commpass", *sys.argv[1:]]
from commpass.cli import main
try:
    main()
except SystemExit as stop:
    status = stop.code
found = [name for name in {HEAVY} if name in sys.modules]
print(status, len(sys.modules), *found, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dump of one graph with one site."""
    site = plan.PlannedSite(
        name="all_reduce",
        kind="all_reduce",
        reduce_op="sum",
        group="0",
        group_label="tp",
        group_size=2,
        dtype="float32",
        shape=(1024,),
        bytes=4096,
        module="layers.0.mlp",
        reason="uncompressed: no candidate gains",
    )
    nodes = (
        dump.GraphNode(name="x", op="placeholder", target="x"),
        dump.GraphNode(
            name="all_reduce",
            op="call_function",
            target="_c10d_functional.all_reduce.default",
            inputs=("x",),
            site="all_reduce",
        ),
    )
    made = plan.Plan(
        graph="0", direction="forward", policy="balanced", profile="ethernet-10g", sites=(site,)
    )
    events = (
        Event(name="compute", lane=HOST, what=COMPUTE, begin_us=0.0, us=5.0),
        Event(name="all_reduce", lane="tp", what=EXCHANGE, begin_us=5.0, us=4.0),
    )
    one = dump.Dump(
        run="run-1",
        commpass="0.1.0",
        torch="2.13.0",
        rank=0,
        world_size=2,
        written="2025-01-01T00:00:00+00:00",
        plan=made,
        before=nodes,
        after=nodes,
        timeline=Timeline(events=events, us=9.0),
    )
    dump.write(tmp_path / "dump", one)
    return tmp_path / "dump"


@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["explain", "--help"],
        ["explain", "DUMP"],
        ["explain", "DUMP", "--json"],
        ["diff", "DUMP", "DUMP"],
        ["graph", "DUMP", "--text"],
        ["graph", "DUMP", "--dot"],
        ["timeline", "DUMP"],
    ],
    ids=" ".join,
)
def test_reading_needs_no_torch_and_few_modules(arguments, folder):
    given = [str(folder) if each == "DUMP" else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *given],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip(), done.stderr
    status, modules, *heavy = done.stderr.splitlines()[-1].split()
    assert (status, heavy) == ("0", [])
    assert int(modules) < MOST_MODULES


@pytest.mark.slow
def test_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "commpass", "--version"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == f"commpass {commpass.__version__}"


def output(*arguments: object, **more) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more.pop("environment", {})
    command = [sys.executable, "-m", "commpass", *map(str, arguments)]
    return subprocess.run(command, timeout=100, check=False, env=environment, **more)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_signs_that_an_encoding_does_not_have_are_spelled(encoding, folder):
    """As on terminals of other systems, and in logs of jobs without a locale."""
    environment = {"PYTHONIOENCODING": encoding}
    done = output("graph", folder, capture_output=True, environment=environment)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    assert "#1 all_reduce" in text
    assert "?" not in text


@pytest.mark.rest_slow(1)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["graph"], ["explain"], ["explain", "--json"]])
def test_full_disk_is_one_line(arguments, folder):
    with open("/dev/full", "w") as full:
        done = output(*arguments, folder, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "commpass: the output cannot be written: No space left on device\n"
    )


def test_reader_that_stops_gets_no_traceback(folder):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = output("explain", folder, stdout=closed, stderr=subprocess.PIPE)
    assert done.stderr == b""
