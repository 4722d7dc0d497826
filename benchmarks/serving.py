"""Measure vLLM on two hosts: time to first token and tokens a second, plain and compressed.

    make .venv-vllm/ready
    sudo .venv/bin/python -m benchmarks.serving [--gbit 0.1 1 10] [--repeats 15] [--starts 2]
        [--policies off balanced aggressive] [--dtype float32] [--json FILE]

Each rank of a tensor-parallel Llama (``tests/stacks/small_llama.py``) is vLLM itself, in a virtual
host with a link of that speed (docs/netlab.md), which the profile names. ``ttft_ms`` is the time of
a request with a prompt of 512 tokens that asks for one token. ``tokens_per_s`` is the rate of the
tokens after the first one, of a single request. Both are medians, with their quartiles. vLLM is
started several times for each policy, in turns, since two starts differ. ``same`` says whether the
greedy tokens of all requests are those under the first policy.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import netlab

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
RANK = ROOT / "benchmarks" / "serving_rank.py"
Row = dict[str, Any]


def serve(
    lab: netlab.Lab, gbit: float, policy: str, options: argparse.Namespace, folder: Path
) -> Row:
    """Return what rank 0 measured under a policy, planned for links of that rate."""
    result = folder / f"{policy}.json"
    os.environ["COMMPASS_POLICY"] = "" if policy == "off" else policy
    os.environ["COMMPASS_PROFILE"] = f"ethernet-{gbit:g}g"
    command = [str(PYTHON), str(RANK), str(result), str(options.repeats), options.dtype]
    outcome = netlab.run(lab, command, netlab.Course(timeout_s=900))
    if outcome.code:
        raise SystemExit(f"vLLM under {policy!r}: {outcome.why}")
    return json.loads(result.read_text())


def together(starts: Sequence[Row]) -> Row:
    """Return the quartiles of all starts under a policy, and their tokens."""
    times = {
        name: quantiles([each for start in starts for each in start[name]], n=4, method="inclusive")
        for name in ("ttft_ms", "tokens_per_s")
    }
    return times | {"tokens": [start["tokens"] for start in starts]}


def measure(options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    lab = netlab.build(netlab.Network(hosts=2, gbit=max(options.gbit)))
    with tempfile.TemporaryDirectory() as folder:
        for gbit in options.gbit:
            for host in range(2):
                lab.slow(host, gbit)
            starts = [
                [serve(lab, gbit, policy, options, Path(folder)) for policy in options.policies]
                for _ in range(options.starts)
            ]
            of_rate = [
                {"gbit": gbit, "policy": policy} | together(alike)
                for policy, alike in zip(options.policies, zip(*starts, strict=True), strict=True)
            ]
            plain = of_rate[0]
            for row in of_rate:
                row["same"] = row["tokens"] == plain["tokens"]
                row["ttft_gain"] = plain["ttft_ms"][1] / row["ttft_ms"][1]
                row["decode_gain"] = row["tokens_per_s"][1] / plain["tokens_per_s"][1]
            found += of_rate
    for row in found:
        row["tokens"] = hashlib.sha256(json.dumps(row["tokens"]).encode()).hexdigest()[:16]
    return found


def show(found: list[Row]) -> None:
    table = Table("Gbit/s", "policy", "first token, ms", "gain", "tokens/s", "gain", "same tokens")
    for row in found:
        table.add_row(
            f"{row['gbit']:g}",
            row["policy"],
            "{1:.1f} [{0:.1f}, {2:.1f}]".format(*row["ttft_ms"]),
            f"{row['ttft_gain']:.2f}",
            "{1:.1f} [{0:.1f}, {2:.1f}]".format(*row["tokens_per_s"]),
            f"{row['decode_gain']:.2f}",
            "yes" if row["same"] else "no",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure vLLM on two hosts, as root (`make .venv-vllm/ready`)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gbit", type=float, nargs="+", default=[0.1, 1, 10], help="rates of the links, in Gbit/s")
    add(
        "--policies",
        nargs="+",
        default=["off", "balanced", "aggressive"],
        help="presets; the others are compared with the first",
    )
    add("--repeats", type=int, default=15, help="timed requests of a start, after 3 to warm up")
    add("--starts", type=int, default=2, help="starts of vLLM for each policy, in turns")
    add("--dtype", default="float32", choices=["bfloat16", "float32"], help="dtype of the model")
    add("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("vLLM is not installed yet: `make .venv-vllm/ready`")
    netlab.stand_apart()
    found = measure(options)
    show(found)
    if options.json:
        facts = {"date": datetime.date.today().isoformat(), "machine": platform.processor()}
        facts |= {"cores": os.cpu_count(), "dtype": options.dtype}
        facts |= {"repeats": options.repeats, "starts": options.starts}
        options.json.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
