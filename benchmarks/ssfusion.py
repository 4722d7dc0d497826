"""Measure the gain of each part of SSFusion: a data-parallel step of a transformer on links of
given rates.

    python -m benchmarks.ssfusion [--ranks 4] [--gbit 0.1 1] [--selector topk] [--json FILE]

Needs Linux and root (docs/netlab.md). Every rank gets a virtual host. All variants start with the
same weights, use the same batches, and alternate in one loop, each step behind a barrier. A time is
a median, [lower and upper quartile], of the slowest rank. The first variant is
DistributedDataParallel. ``backward`` is the part of a step in which ``loss.backward()`` runs, whose
end a plan predicts. Each other variant adds one part to sparse gradients that are sent one by one.
All are forced except the last, which keeps gradients dense where that is predicted to be as fast.
``sent`` counts the bytes that a rank sends in a step. ``measuring`` is the one-time cost of
measuring and planning, and its share of a run of ten minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import benchmarks.network  # noqa: F401 (finds the folders of tests and examples)
import commpass
from benchmarks import netlab
from benchmarks.network.cli import facts
from benchmarks.network.shared import (
    LINKS,
    PATIENCE_S,
    WIDTH,
    Options,
    Row,
    compare,
    number,
    on_links,
    slowest,
    spread,
    table,
    take_turns,
    text,
)
from commpass.parallel import SSFusion, ssfusion

PARTS = ("fuse", "aware", "interleave", "offload")
WAYS: dict[str, dict[str, Any] | None] = {
    "dense DDP": None,
    "sparse, one by one": dict.fromkeys(PARTS, False) | {"force": True},
    "+ fusion": dict.fromkeys(PARTS[1:], False) | {"force": True},
    "+ density-aware": dict.fromkeys(PARTS[2:], False) | {"force": True},
    "+ interleaved": {"offload": False, "force": True},
    "+ offload": {"force": True},
    "ssfusion": {},
}
PROFILE_STEPS = 2
RUN_S = 600.0
"""The length of the run of which measuring is a share, in seconds."""


def train(options: Options) -> dict[str, Row]:
    """Return a rank's step times in each variant, the bytes that it sends, and the loss of its last
    batch."""
    import common
    import torch.distributed as dist

    texts = common.read_texts()
    ways, steps, kib = {}, {}, {}
    for name, asked in WAYS.items():
        torch.manual_seed(0)
        net = common.Transformer(options.layers, options.width)
        ways[name] = applied(net, asked, options)
        own = common.batches(texts[0], 10_000, 1 + dist.get_rank())
        learn = torch.optim.SGD(net.parameters(), lr=0.02)
        batches = (batch[: options.batch] for batch in own)
        steps[name] = partial(learned, ways[name][0], batches, learn, [], [])
        for _ in range(PROFILE_STEPS + 1):  # the last of these steps makes the plan
            steps[name]()
        whole = sum(weight.numel() * weight.itemsize for weight in net.parameters())
        wire = sum(site.wire_bytes for site in commpass.plans()[-1]) if asked is not None else whole
        kib[name] = wire / 1024
    found = take_turns(steps, options.repeats)
    for name, (_, handle) in ways.items():
        found[name] |= facts_of(handle) | {"loss": steps[name].args[3][-1]}
        took = zip(*steps[name].args[4][-options.repeats :], strict=True)
        found[name] |= zip(("backward_ms", "backward_cpu_ms"), map(list, took), strict=True)
        found[name]["kib"] = kib[name]
    return found


def applied(
    net: nn.Module, asked: dict[str, Any] | None, options: Options
) -> tuple[nn.Module, SSFusion | None]:
    if asked is None:
        return DistributedDataParallel(net), None
    more = {"selector": options.selector, "density": options.density}
    return net, ssfusion(net, profile_steps=PROFILE_STEPS, **more, **asked)


def learned(
    net: nn.Module, batches: Any, learn: Any, losses: list[float], backward: list[list[float]]
) -> None:
    loss = net(next(batches))
    learn.zero_grad()
    begun, busy = time.perf_counter(), time.process_time()
    loss.backward()
    took = time.perf_counter() - begun, time.process_time() - busy
    backward.append([1e3 * each for each in took])
    learn.step()
    losses.append(loss.item())


def facts_of(handle: SSFusion | None) -> Row:
    if handle is None or handle.plan is None:
        return {}
    return {
        "buffers": len(handle.plan.buffers),
        "sparse": len(handle.plan.sparse),
        "offloaded": sum(each.offloaded for each in handle.plan.sparse),
        "density": min((each.density for each in handle.plan.sparse), default=1.0),
        "predicted_ms": handle.plan.end_us / 1e3,
        "why": handle.plan.why,
        "overhead_s": handle.overhead_s,
    }


def rows_of(found: list[dict[str, Row]], known: Row) -> list[Row]:
    made = []
    for name, first in found[0].items():
        row = {**known, "way": name}
        timed = ("ms", "backward_ms", "backward_cpu_ms")
        row |= {key: slowest([each[name][key] for each in found]) for key in timed}
        if "predicted_ms" in first:
            row["of_measured"] = first["predicted_ms"] / row["backward_ms"][1]
        if "overhead_s" in first:
            row["of_run"] = max(each[name]["overhead_s"] for each in found) / RUN_S
        made.append(row | {key: value for key, value in first.items() if key not in row})
    compare(made, "way", "dense DDP", "of_ddp")
    return made


COLUMNS = {
    **LINKS,
    "way": text("way"),
    "step ms": spread,
    "x DDP": number("of_ddp"),
    "backward ms": lambda row: f"{row['backward_ms'][1]:.1f}",
    "predicted ms": number("predicted_ms", ".1f"),
    "of it": number("of_measured"),
    "sent KiB": number("kib", ".0f"),
    "buffers": number("buffers", "d"),
    "sparse": number("sparse", "d"),
    "offloaded": number("offloaded", "d"),
    "loss": number("loss", ".3f"),
    "measuring s": number("overhead_s"),
    "of 10 min": number("of_run", ".2%"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ssfusion", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--selector", default="dgc")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        netlab.stand_apart()
    except netlab.LabError as error:
        parser.error(str(error))
    rows: list[Row] = []
    for ranks, gbit in on_links("ssfusion", options):
        found = ranks.run(train, options, timeout=PATIENCE_S)
        rows += rows_of(found, {"ranks": ranks.size, "gbit": gbit})
        ranks.stop()  # hooks stay in a process; new ranks start automatically
        if options.json:
            asked = {key: value for key, value in vars(options).items() if key != "json"}
            options.json.write_text(json.dumps({**facts({"": rows}), "asked": asked}, indent=1))
    Console(width=WIDTH).print(table(rows, COLUMNS))


if __name__ == "__main__":
    main()
