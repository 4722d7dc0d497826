"""Measure torchtitan on two hosts: the time of a step, plain and compressed.

    make .venv-titan/ready
    sudo .venv/bin/python -m benchmarks.titan [--gbit 0.1 1] [--steps 13] [--setups FSDP2 ...]
        [--policies off balanced] [--json FILE]

Each rank is torchtitan's own trainer with a small Llama (``tests/stacks/titan_small.py``), in a
virtual host with a link of that speed (docs/netlab.md), which the profile names. ``step_s`` is the
time between the ends of two steps, the median with its quartiles; the first steps, which compile,
are left out. ``loss_differs`` is the largest relative difference of a step's loss from that of the
first policy.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import netlab

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-titan" / "bin" / "python"
RANK = ROOT / "benchmarks" / "titan_rank.py"
SETUPS = (
    "FSDP2",
    "tensor parallelism",
    "pipeline, 1F1B",
    "graph_trainer, FSDP",
    "graph_trainer, TP",
)
FIRST = 4
"""The first step whose time counts."""
Row = dict[str, Any]


def train(lab: netlab.Lab, row: Row, steps: int, folder: Path) -> Row:
    """Return the times and losses of a run, planned for links of its rate."""
    result = folder / "steps.json"
    command = [str(PYTHON), str(RANK), str(result), row["setup"], str(steps)]
    if row["policy"] != "off":
        command += [row["policy"], f"ethernet-{row['gbit']:g}g"]
    outcome = netlab.run(lab, command, netlab.Course(timeout_s=900))
    if outcome.code:
        raise SystemExit(f"torchtitan, {row}: {outcome.why}")
    # the last rank has the last stage of a pipeline, and so the losses
    found = json.loads(Path(f"{result}.1").read_text())
    ends = [each["at"] for each in found if each["step"] >= FIRST - 1]
    times = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return row | {
        "step_s": quantiles(times, n=4, method="inclusive"),
        "losses": [each["loss"] for each in found],
    }


def measure(options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    lab = netlab.build(netlab.Network(hosts=2, gbit=max(options.gbit)))
    with tempfile.TemporaryDirectory() as folder:
        for gbit, setup in itertools.product(options.gbit, options.setups):
            for host in range(2):
                lab.slow(host, gbit)
            alike: list[Row] = []
            for policy in options.policies:
                row = {"gbit": gbit, "setup": setup, "policy": policy}
                alike.append(train(lab, row, options.steps, Path(folder)))
            plain = alike[0]
            for row in alike:
                row["gain"] = plain["step_s"][1] / row["step_s"][1]
                pairs = zip(row["losses"], plain["losses"], strict=True)
                row["loss_differs"] = max(abs(own / other - 1) for own, other in pairs)
            found += alike
    return found


def show(found: list[Row]) -> None:
    table = Table("Gbit/s", "setup", "policy", "step, s", "gain", "loss differs by at most")
    for row in found:
        table.add_row(
            f"{row['gbit']:g}",
            row["setup"],
            row["policy"],
            "{1:.3f} [{0:.3f}, {2:.3f}]".format(*row["step_s"]),
            f"{row['gain']:.2f}",
            f"{row['loss_differs']:.3%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure torchtitan on two hosts, as root (`make .venv-titan/ready`)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gbit", type=float, nargs="+", default=[0.1, 1.0], help="rates of the links, in Gbit/s")
    add(
        "--policies",
        nargs="+",
        default=["off", "balanced"],
        help="presets; the others are compared with the first",
    )
    add(
        "--setups",
        nargs="+",
        choices=SETUPS,
        default=list(SETUPS),
        metavar="SETUP",
        help="in quotes, any of: " + "; ".join(SETUPS),
    )
    add("--steps", type=int, default=13, help=f"steps of a run; times count from step {FIRST} on")
    add("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("torchtitan is not installed yet: `make .venv-titan/ready`")
    netlab.stand_apart()
    subprocess.run([PYTHON, ROOT / "tests" / "stacks" / "titan_small.py"], check=True)
    found = measure(options)
    show(found)
    if options.json:
        facts = {"date": datetime.date.today().isoformat(), "machine": platform.processor()}
        facts |= {"cores": os.cpu_count(), "steps": options.steps}
        options.json.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
