"""Code shared by the examples on a device mesh: train a model without and with compression and
compare the runs.

The comparison shows losses, bytes by mesh dimension, and the time of a step. The two trainings
alternate step by step, so that other load on the machine affects both alike. No text is repeated,
so every loss is on text that the model has not seen.
"""

from __future__ import annotations

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
DEVICES = Path("/proc/thread-self/net/dev")  # byte counters of this host's network devices
Plans = list[commpass.Plan]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


@dataclass(frozen=True)
class Training:
    """What an example sets up.

    ``step`` runs forward and backward on a batch and returns the loss, or None on a rank that does
    not have it. ``sent`` takes the plans of the training. It returns the bytes that this rank
    passes to the collectives of each mesh dimension in a step.
    """

    model: nn.Module
    step: Callable[[Tensor], Tensor | None]
    sent: Callable[[Plans], Counter[str]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw


Setup = Callable[[str, DeviceMesh, Namespace], Training]
"""Set up a training under a policy, on a mesh."""


@dataclass
class Run:
    """A training and the results of its steps on this rank: losses, milliseconds, and bytes that
    left its host.

    A loss or a number of bytes is NaN if this rank does not know it.
    """

    training: Training
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    plans: Plans = field(default_factory=list)

    def step(self, batch: Tensor) -> None:
        dist.barrier()
        earlier, before, start = len(commpass.plans()), bytes_left_host(), time.perf_counter()
        loss = self.training.step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ms.append(1e3 * (time.perf_counter() - start))
        self.losses.append(nan if loss is None else loss.item())
        dist.barrier()  # everything that was sent has arrived
        self.left.append(bytes_left_host() - before)
        self.plans += commpass.plans()[earlier:]


@dataclass(frozen=True)
class Result:
    """Means over the ranks.

    ``losses`` has the loss of every step. The others are of a late step, because the first ones
    compile: its time, the bytes by mesh dimension, and the bytes that left a host.
    """

    losses: list[float]
    step_ms: float
    sent: dict[str, float]
    left: float


def bytes_by_dimension(plans: Iterable[commpass.Plan], times: int = 1) -> Counter[str]:
    """Return the bytes that a rank passes to the collectives of the plans' graphs in a step, by
    mesh dimension.

    Each graph runs ``times`` times in a step.
    """
    found = Counter[str]()
    for plan in plans:
        for site in plan:
            if site.kind != "recv":  # the sending rank counts these bytes
                found[site.group_label] += times * (
                    site.bytes if plan.fallback else site.wire_bytes
                )
    return found


def bytes_left_host() -> float:
    """Return the bytes that have left this rank's host so far, with headers; NaN if ranks share
    it."""
    if OWN_HOSTS not in os.environ:
        return nan
    rows = (line.split(":") for line in DEVICES.read_text().splitlines()[2:])
    return next(float(row.split()[8]) for name, row in rows if name.strip() == "eth0")


def mean_known(values: list[float]) -> list[float]:
    """Return the mean of each value over the ranks where it is not NaN."""
    rows = torch.tensor([[0.0, 0.0] if isnan(x) else [x, 1.0] for x in values], dtype=torch.float64)
    dist.all_reduce(rows)
    return (rows[:, 0] / rows[:, 1]).tolist()


def train(
    setup: Setup, policies: Iterable[str], mesh: DeviceMesh, options: Namespace
) -> list[Result]:
    """Train a model under each policy, from the same seed and on the same batches.

    Each data-parallel rank has its own batches; all other ranks share theirs.
    """
    runs = []
    for policy in policies:
        torch.manual_seed(options.seed)
        training = setup(policy, mesh, options)
        runs.append(Run(training, training.optimizer(training.model)))
    batch_rank = mesh["dp"].get_local_rank() if "dp" in mesh.mesh_dim_names else 0
    all_batches = batches(read_texts()[0], options.steps, options.seed, batch_rank)
    for batch in track(all_batches, "steps", options.steps, console=console, disable=RANK > 0):
        for run in runs:
            run.step(batch)
    late = options.steps // 2
    found = []
    for run in runs:
        sent = run.training.sent(run.plans)
        by_name = {name: mean(sent[name]) for name in mesh.mesh_dim_names}
        step_ms, left = mean(median(run.ms[late:])), mean(fmean(run.left[late:]))
        found.append(Result(mean_known(run.losses), step_ms, by_name, left))
    return found


def report(off: Result, on: Result, options: Namespace) -> None:
    """Print the losses side by side, then the bytes and the time of a step."""
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


def mesh_shape(names: Sequence[str], parser: Parser, options: Namespace) -> dict[str, int]:
    """Return the shape of a mesh of the dimensions ``names`` and tensor parallelism.

    Every dimension has 2 ranks, except the first one, which has the remaining ranks.
    """
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
    """Start the ranks; on each, train without and with the policy, and report."""
    check_options(parser, options, shape.get("tp", 1))
    if not STARTED:
        start(file, options)
        return
    join()
    begin(options, Transformer(options.layers, options.width))
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    off, on = train(setup, ("off", options.policy), mesh, options)
    report(off, on, options)
    dist.barrier()
    dist.destroy_process_group()
