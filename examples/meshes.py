"""What the examples on a mesh share: one model trained twice, without and with compression, and
what both gave: losses, bytes by mesh dimension, and the time of a step.

No text comes twice in a training, so every loss is one on text that the model has not seen.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from statistics import median

import torch
import torch.distributed as dist
from common import (
    OWN_HOSTS,
    RANK,
    STARTED,
    Parser,
    batches,
    begin,
    check_options,
    console,
    mean,
    read_texts,
    start,
)
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commpass

DEVICES = "/proc/thread-self/net/dev"  # counters of this host's network devices


@dataclass(frozen=True)
class Training:
    """A model, ready to be trained. ``step`` runs forward and backward on a batch and gives the
    loss, or None on a rank that does not have it. ``sent`` gives the bytes that this rank hands to
    the collectives of each mesh dimension in a step, once steps have been made."""

    model: nn.Module
    step: Callable[[Tensor], Tensor | None]
    sent: Callable[[], Counter[str]]


Setup = Callable[[str, DeviceMesh, Namespace], Training]
"""What an example is: a training under a policy, on a mesh."""


@dataclass(frozen=True)
class Run:
    """What one training gave, means over ranks: the loss of every step, milliseconds a step, the
    bytes of a step by mesh dimension, and those that left a rank's host (None where ranks share
    one)."""

    losses: list[float]
    step_ms: float
    sent: dict[str, float]
    left: float | None


def sent(plans: Iterable[commpass.Plan], times: float = 1) -> Counter[str]:
    """What a rank hands to the collectives of graphs that run so many ``times`` in a step: bytes
    by mesh dimension."""
    found = Counter[str]()
    for plan in plans:
        for site in plan:
            if site.kind != "recv":  # counted by the rank that sends it
                found[site.group_label] += times * (plan.fallback and site.bytes or site.wire_bytes)
    return found


def left_host() -> float:
    """Bytes that have left this rank's host so far, headers included."""
    with open(DEVICES) as file:
        rows = dict(line.split(":") for line in file.readlines()[2:])
    return next(float(row.split()[8]) for name, row in rows.items() if name.strip() == "eth0")


def train(setup: Setup, policy: str, mesh: DeviceMesh, options: Namespace, text: Tensor) -> Run:
    """Trains a new model, from the same seed and on the same batches, under ``policy``. Ranks that
    share their layers have the same batches, and data-parallel ones their own."""
    torch._dynamo.reset()
    commpass.reset_state()
    torch.manual_seed(options.seed)
    training = setup(policy, mesh, options)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, foreach=False)
    own = mesh["dp"].get_local_rank() if "dp" in mesh.mesh_dim_names else 0
    every = batches(text, options.steps, options.seed + (own << 32))
    losses, ends, left = list[float](), list[float](), list[float]()
    for batch in track(every, policy, options.steps, console=console, disable=RANK > 0):
        loss = training.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nan if loss is None else loss.item())
        ends.append(time.perf_counter())
        left.append(left_host() if OWN_HOSTS in os.environ else nan)
    late = options.steps // 2  # the first steps compile, and some profile
    step_ms = 1e3 * median([b - a for a, b in pairwise(ends[late - 1 :])] or [nan])
    handed = training.sent()
    return Run(
        [mean_known(loss) for loss in losses],
        mean(step_ms),
        {name: mean(handed[name]) for name in mesh.mesh_dim_names},
        mean((left[-1] - left[late - 1]) / (options.steps - late)),
    )


def mean_known(value: float) -> float:
    """The mean over the ranks that have one."""
    known = torch.tensor([0.0, 0.0] if value != value else [value, 1.0], dtype=torch.float64)
    dist.all_reduce(known)
    return (known[0] / known[1]).item()


def report(off: Run, on: Run, options: Namespace) -> None:
    """Prints the losses side by side, and what a step takes and sends."""
    from commpass.report import tables

    table = tables.plain_table("step", "loss, off", f"loss, {options.policy}", "difference")
    for step in sorted({1, options.steps, *range(0, options.steps, max(1, options.steps // 8))}):
        if step:
            left, right = off.losses[step - 1], on.losses[step - 1]
            table.add_row(str(step), f"{left:.4f}", f"{right:.4f}", f"{right - left:+.4f}")
    console.print("", table)
    table = tables.plain_table("a step of a rank", "off", options.policy, "ratio")
    rows = [(f"bytes over {name}", off.sent[name], on.sent[name]) for name in off.sent]
    if on.left == on.left:
        rows.append(("bytes that left its host", off.left, on.left))
    for name, before, after in rows:
        ratio = tables.ratio(after, before)
        table.add_row(name, tables.size(before), tables.size(after), ratio)
    time_ratio = tables.ratio(on.step_ms, off.step_ms)
    table.add_row("time", f"{off.step_ms:.0f} ms", f"{on.step_ms:.0f} ms", time_ratio)
    console.print("", table)


def compare(file: str, setup: Setup, build: Callable[[Namespace], nn.Module],
            parser: Parser, shape: Callable[[Namespace], dict[str, int]]) -> None:
    options = parser.parse_args()
    dims = shape(options)
    check_options(parser, options, dims.get("tp", 1))
    if not STARTED:
        start(file, options)
        return
    begin(options, build(options))
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    text, _ = read_texts()
    off, on = (train(setup, policy, mesh, options, text) for policy in ("off", options.policy))
    report(off, on, options)
    dist.barrier()
    dist.destroy_process_group()
