"""What the examples on a mesh share: one model trained twice, without and with compression, and a
comparison of the two: losses, bytes by mesh dimension, and the time of a step.

The two trainings take turns, step by step, so that whatever else the machine does hits both alike.
No text comes twice, so every loss is one on text that the model has not seen.
"""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from common import (
    OWN_HOSTS,
    RANK,
    STARTED,
    Parser,
    Transformer,
    batches,
    begin,
    check_options,
    console,
    join,
    mean,
    read_texts,
    start,
)
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commpass

TP = 2  # ranks that share a layer
DEVICES = Path("/proc/thread-self/net/dev")  # what this host's network devices have counted
Plans = list[commpass.Plan]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


@dataclass(frozen=True)
class Training:
    """What an example sets up. ``step`` runs forward and backward on a batch and gives the loss, or
    None on a rank that does not have it. ``sent`` gives what this rank hands to the collectives of
    each mesh dimension in a step, in bytes, from the plans of the training."""

    model: nn.Module
    step: Callable[[Tensor], Tensor | None]
    sent: Callable[[Plans], Counter[str]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw


Setup = Callable[[str, DeviceMesh, Namespace], Training]
"""Sets a training up under a policy, on a mesh."""


@dataclass
class Run:
    """A training and what its steps gave on this rank: losses, milliseconds, and the bytes that
    left its host (both NaN where that is not known)."""

    training: Training
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    plans: Plans = field(default_factory=list)

    def step(self, batch: Tensor) -> None:
        dist.barrier()
        earlier, before, start = len(commpass.plans()), left_host(), time.perf_counter()
        loss = self.training.step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ms.append(1e3 * (time.perf_counter() - start))
        self.losses.append(nan if loss is None else loss.item())
        dist.barrier()  # all that was sent has arrived
        self.left.append(left_host() - before)
        self.plans += commpass.plans()[earlier:]


@dataclass(frozen=True)
class Found:
    """Means over the ranks: the loss of every step; of a late step (the first ones compile) the
    time, the bytes by mesh dimension, and those that left a host."""

    losses: list[float]
    step_ms: float
    sent: dict[str, float]
    left: float


def sent(plans: Iterable[commpass.Plan], times: int = 1) -> Counter[str]:
    """What a rank hands to the collectives of graphs that run so many ``times`` in a step: bytes by
    mesh dimension."""
    found = Counter[str]()
    for plan in plans:
        for site in plan:
            if site.kind != "recv":  # the rank that sends it counts it
                found[site.group_label] += times * (
                    site.bytes if plan.fallback else site.wire_bytes
                )
    return found


def left_host() -> float:
    """Bytes that have left this rank's host so far, headers included; NaN if ranks share one."""
    if OWN_HOSTS not in os.environ:
        return nan
    rows = (line.split(":") for line in DEVICES.read_text().splitlines()[2:])
    return next(float(row.split()[8]) for name, row in rows if name.strip() == "eth0")


def mean_known(values: list[float]) -> list[float]:
    """The means over the ranks that know them (whose value is not NaN)."""
    rows = torch.tensor([[0.0, 0.0] if isnan(x) else [x, 1.0] for x in values], dtype=torch.float64)
    dist.all_reduce(rows)
    return (rows[:, 0] / rows[:, 1]).tolist()


def train(
    setup: Setup, policies: Iterable[str], mesh: DeviceMesh, options: Namespace
) -> list[Found]:
    """Trains a model under each policy, from the same seed and on the same batches. Data-parallel
    ranks have batches of their own, all others the same ones."""
    runs = []
    for policy in policies:
        torch.manual_seed(options.seed)
        training = setup(policy, mesh, options)
        runs.append(Run(training, training.optimizer(training.model)))
    own = mesh["dp"].get_local_rank() if "dp" in mesh.mesh_dim_names else 0
    every = batches(read_texts()[0], options.steps, options.seed, own)
    for batch in track(every, "steps", options.steps, console=console, disable=RANK > 0):
        for run in runs:
            run.step(batch)
    late = options.steps // 2
    found = []
    for run in runs:
        handed = run.training.sent(run.plans)
        by_name = {name: mean(handed[name]) for name in mesh.mesh_dim_names}
        step_ms, left = mean(median(run.ms[late:])), mean(fmean(run.left[late:]))
        found.append(Found(mean_known(run.losses), step_ms, by_name, left))
    return found


def report(off: Found, on: Found, options: Namespace) -> None:
    """Prints the losses side by side, and what a step sends and takes."""
    from commpass.report import numbers, tables

    table = tables.plain_table("step", "loss, off", f"loss, {options.policy}", "difference")
    last = options.steps
    for step in sorted({1, last, *range(0, last, max(1, last // 8))} - {0}):
        left, right = off.losses[step - 1], on.losses[step - 1]
        table.add_row(str(step), f"{left:.4f}", f"{right:.4f}", f"{right - left:+.4f}")
    console.print("", table, "")
    table = tables.plain_table("a step of a rank", "off", options.policy, "ratio")
    rows = [(f"bytes over {name}", off.sent[name], on.sent[name]) for name in off.sent]
    if not isnan(on.left):
        rows.append(("bytes that left its host", off.left, on.left))
    for name, before, after in rows:
        sizes = numbers.size(before), numbers.size(after)
        table.add_row(name, *sizes, numbers.ratio(after, before))
    share = numbers.ratio(on.step_ms, off.step_ms)
    table.add_row("time", f"{off.step_ms:.0f} ms", f"{on.step_ms:.0f} ms", share)
    console.print(table)


def beside_tp(names: Sequence[str], parser: Parser, options: Namespace) -> dict[str, int]:
    """The shape of a mesh of the first of ``names`` and, within it, of 2 ranks each, the others and
    tensor parallelism."""
    first, *within = (*names, "tp")
    inner = TP ** len(within)
    if options.ranks % inner:
        parser.error(
            f"--ranks {options.ranks}: must be a multiple of {inner}, the ranks of"
            f" {' and '.join(within)}"
        )
    return {first: options.ranks // inner, **dict.fromkeys(within, TP)}


def main(
    file: str, setup: Setup, parser: Parser, options: Namespace, shape: dict[str, int]
) -> None:
    """Starts the ranks; on each, trains without and with the policy, and reports."""
    check_options(parser, options, shape.get("tp", 1))
    if not STARTED:
        start(file, options)
        return
    join()
    begin(options, Transformer(options.layers, options.width))
    logging.getLogger("commpass").setLevel(logging.WARNING)  # each door would say a line of its own
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    off, on = train(setup, ("off", options.policy), mesh, options)
    report(off, on, options)
    dist.barrier()
    dist.destroy_process_group()
