"""Measure a step of a tensor-parallel transformer on real links, plain and coded by TACO's codec.

    python -m benchmarks.claims.experiments.taco_overlap --json FILE

The coded variants use several algorithms, whole and in chunks. Needs Linux and root
(docs/netlab.md). Every rank gets a virtual host. A step is forward, loss and backward in float32,
compiled by Inductor. All variants have the same weights and alternate in one loop, each step behind
a barrier. A time is that of the slowest rank: lower quartile, median, upper quartile. ``chunks``
splits what is coded, so that one part is sent while the next is coded. ``rows`` also splits the
matmul before and the computation after.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import commpass
from benchmarks import netlab
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.lab import in_lab
from benchmarks.network.shared import (
    PATIENCE_S,
    Options,
    Row,
    compiled,
    on_links,
    slowest,
    take_turns,
)
from benchmarks.network.steps import demo

NAME = "taco_overlap"


def forced(codec: str, algorithm: str, chunks: int = 1, rows: int = 1) -> commpass.Policy:
    """Return a policy that codes every all_reduce in exactly this way."""
    rule = commpass.Rule(
        kind="all_reduce", codec=codec, algorithm=algorithm, chunks=chunks, rows=rows, force=True
    )
    return commpass.Policy(rules=[rule], lowering="kernel")


WAYS: dict[str, commpass.Policy | None] = {
    "plain": None,
    "two_shot": forced("taco", "two_shot"),
    "two_shot, 2 chunks": forced("taco", "two_shot", chunks=2),
    "two_shot, 4 chunks": forced("taco", "two_shot", chunks=4),
    "two_shot, 2 of rows": forced("taco", "two_shot", rows=2),
    "one_shot": forced("taco", "one_shot"),
    "ring": forced("taco", "ring"),
    "TahQuant": forced("tahquant", "two_shot"),
    "balanced": forced("rotated", "two_shot"),
}
USUAL = {
    "ranks": [2],
    "gbit": [0.1, 1.0],
    "ways": list(WAYS),
    "layers": 2,
    "width": 256,
    "batch": 8,
    "repeats": 9,
}
QUICK = {"gbit": [1.0], "ways": ["plain", "two_shot"], "layers": 1, "width": 64, "repeats": 3}


def run() -> dict[str, Any]:
    return in_lab(f"benchmarks.claims.experiments.{NAME}")


def train(options: Options, profile: str) -> dict[str, Row]:
    """Return a rank's step times in each variant. Raise RuntimeError if a plan is not the requested
    one."""
    model, loss = demo(options)
    steps: dict[str, Callable[[], None]] = {}
    facts: dict[str, Row] = {}
    for name in options.ways:
        policy = WAYS[name]
        made = compiled(model, policy, profile)

        def step(made: Any = made) -> None:
            model.zero_grad()
            loss(made).backward()

        before = len(commpass.plans())
        step()
        steps[name], facts[name] = step, sent(name, policy, commpass.plans()[before:])
    found = take_turns(steps, options.repeats)
    return {name: found[name] | facts[name] for name in found}


def sent(name: str, policy: commpass.Policy | None, plans: list[commpass.Plan]) -> Row:
    """Return the number of sites, and the bytes that a rank sends in a step."""
    if policy is None:
        return {"sites": None, "bytes": None}
    (rule,) = policy.rules
    sites = [site for plan in plans for site in plan]
    left = [site.reason for site in sites if (site.codec,) != rule.codec]
    left += [plan.fallback for plan in plans if plan.fallback]
    if left or not sites:
        raise RuntimeError(f"{name}: {left[0] if left else 'no collective was found'}")
    return {"sites": len(sites), "bytes": sum(site.wire_bytes for site in sites)}


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        found = ranks.run(train, options, f"ethernet-{gbit:g}g", timeout=PATIENCE_S)
        for name, first in found[0].items():
            ms = slowest([each[name]["ms"] for each in found])
            row = {"ranks": ranks.size, "gbit": gbit, "way": name, "ms": ms}
            rows.append(row | {key: first[key] for key in ("sites", "bytes")})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="little of it: that it works")
    options = parser.parse_args()
    try:
        netlab.stand_apart()
    except netlab.LabError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    setup = USUAL | (QUICK if options.quick else {})
    found = {"setup": setup, "rows": measured(Options(**setup))}
    options.json.write_text(json.dumps(found))


TACO_OVERLAP = Experiment(
    NAME, "a tensor-parallel step at 0.1 and 1 Gbit/s, by algorithm and chunks", 8, run
)

if __name__ == "__main__":
    main()
