"""Measure data-parallel training by DDP, its hooks, FSDP2 and commpass: step time, bytes, and the
loss.

All ways start with the same weights and use the same batches of real text (examples/common.py).
Each rank has its own batches, and the ways alternate step by step. A step is forward, backward,
AdamW and zeroing the gradients. ``compute`` is DDP that never exchanges (``no_sync``). ``exposed``
is what a step takes beyond it; for ways that are compiled whole, beyond ``graph-alone``.

``wire`` is the time that the bytes that left the busiest rank's link, with headers, take at the
link's rate. ``CPU`` is processor time of a rank beyond ``compute``: codecs, and passing bytes to
sockets. ``waits`` is how long the training thread waits in a step: for others, the network, or its
own coding threads. ``queues`` is how long it could run but had no core.

``loss`` is on held-out text after ``--steps`` steps, the mean over ranks, each with its own text.
``by T`` is the training loss of a way at the time at which the fastest way has finished its steps:
the mean of the last ten steps until then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import commpass

from .calls import ideal_ms
from .data_ways import WAYS
from .shared import (
    LINKS,
    PATIENCE_S,
    WARM_UP,
    Measurement,
    Options,
    Row,
    chosen,
    compare,
    number,
    on_links,
    slowest,
    spread,
    take_turns,
    text,
)
from .steps import counted

NAME = "data_parallel"
BASE = "ddp"
USUAL = {
    "ranks": [4],
    "gbit": [0.1, 1.0],
    "ways": list(WAYS),
    "layers": 3,
    "width": 384,
    "batch": 1,
    "steps": 60,
}
QUICK = {
    "ranks": [2],
    "gbit": [1.0],
    "ways": ["fp16"],
    "layers": 1,
    "width": 64,
    "steps": 6,
}
HELD_OUT, SMOOTH = 2, 10
DEVICES, WAITING = Path("/proc/thread-self/net/dev"), Path("/proc/thread-self/schedstat")
DEVICE, SENT = "eth0", 8  # the network device, and its column of bytes sent


def sent_so_far() -> int:
    """Return the bytes that have left this rank's host, as counted by its device."""
    lines = (line.split(":") for line in DEVICES.read_text().splitlines()[2:])
    return next(int(row.split()[SENT]) for name, row in lines if name.strip() == DEVICE)


def on_core() -> tuple[int, int]:
    """Return the nanoseconds for which this thread ran, and for which it could have run but had no
    core."""
    ran, queued, _ = map(int, WAITING.read_text().split())
    return ran, queued


@dataclass
class Training:
    """One way on one rank: what it trains, and the results of each step.

    ``marks`` has the bytes that had left the host when each step of any way began. A barrier
    precedes, so that everything sent before had arrived.
    """

    net: nn.Module
    forward: Callable[[Tensor], Tensor]
    batches: Iterator[Tensor]
    learn: torch.optim.Optimizer
    marks: list[int]
    found: list[Row] = field(default_factory=list)
    plans: list[commpass.Plan] = field(default_factory=list)

    def step(self) -> None:
        self.marks.append(sent_so_far())
        earlier, (ran, queued) = len(commpass.plans()), on_core()
        loss = self.forward(next(self.batches))
        loss.backward()
        self.learn.step()
        self.learn.zero_grad()
        row = {"loss": loss.item()}
        now = on_core()
        row |= {"ran_ms": (now[0] - ran) / 1e6, "queued_ms": (now[1] - queued) / 1e6}
        self.found.append(row)
        self.plans += commpass.plans()[earlier:]


def train(options: Options, profile: str) -> dict[str, Row]:
    """Return, on a rank, the times and results of each step of each way, and its loss on held-out
    text."""
    import common

    torch._dynamo.reset()
    commpass.reset_state()
    texts, rank = common.read_texts(), dist.get_rank()
    line = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    every, marks = {}, list[int]()
    for name in taking_part(options.ways):
        torch.manual_seed(0)
        net = common.Transformer(options.layers, options.width)
        forward = WAYS[name].make(net, line, profile)
        own = common.batches(texts[0], options.steps, 1 + rank)
        few = (batch[: options.batch] for batch in own)
        learn = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        every[name] = Training(net, forward, few, learn, marks)
    found = take_turns({name: one.step for name, one in every.items()}, options.steps - WARM_UP)
    dist.barrier()
    sent = [after - before for before, after in pairwise([*marks, sent_so_far()])]
    for turn, (name, one) in enumerate(every.items()):
        # in grad mode and with batches of the training shape: otherwise everything is compiled
        # again
        unseen = torch.cat([*common.batches(texts[1], HELD_OUT, rank)]).split(options.batch)
        losses = [one.net(batch).item() for batch in unseen]
        row = {key: [each[key] for each in one.found] for key in one.found[0]}
        row |= {"sent": sent[turn :: len(every)], "held_out": fmean(losses)}
        found[name] |= row | counted(one.plans)
        found[name]["parameters"] = sum(weight.numel() for weight in one.net.parameters())
    return found


def taking_part(names: Sequence[str]) -> list[str]:
    """Return the base, the named ways, and those that compute the same and send nothing."""
    some = set(chosen(WAYS, names))
    some |= {WAYS[name].alone for name in some}
    return [name for name in WAYS if name in some]


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        job = (options, f"ethernet-{gbit:g}g")
        found = ranks.run(train, *job, timeout=PATIENCE_S)
        rows += way_rows(found, {"ranks": ranks.size, "gbit": gbit})
        ranks.stop()  # DDP leaves hooks in a process; new ranks start automatically
    return rows


def way_rows(found: list[dict[str, Row]], known: Row) -> list[Row]:
    """Return a row for each way, from the results of each rank."""
    made = [way_row(name, [each[name] for each in found], known) for name in found[0]]
    rows = {row["way"]: row for row in made}
    for row in made:
        alone = rows[WAYS[row["way"]].alone]
        row["exposed_ms"] = row["ms"][1] - alone["ms"][1]
        row["more_cpu_ms"] = row["cpu_ms"] - alone["cpu_ms"]
    base = rows[BASE]
    compare(made, "way", BASE, "of_base")
    first = min(row["elapsed_s"][-1] for row in made if row["learns"])
    for row in made:
        gains = row["learns"] and row["exposed_ms"] > 0
        row["less_exposed"] = base["exposed_ms"] / row["exposed_ms"] if gains else None
        row["of_wire"] = row["exposed_ms"] / row["wire_ms"] if row["learns"] else None
        row["more_loss"] = row["held_out"] - base["held_out"] if row["learns"] else None
        row["by_s"], row["loss_by"] = first, loss_by(row, first)
    return made


def way_row(name: str, ranks: list[Row], known: Row) -> Row:
    row = {**known, "way": name, "learns": WAYS[name].alone != name}
    row["ms"] = slowest([each["ms"] for each in ranks])
    for key in ("cpu_ms", "ran_ms", "queued_ms"):
        row[key] = fmean(median(each[key][-len(each["ms"]) :]) for each in ranks)
    own_ms = fmean(median(each["ms"]) for each in ranks)
    row["waits_ms"] = own_ms - row["ran_ms"] - row["queued_ms"]
    row["sent"] = max(median(each["sent"][WARM_UP:]) for each in ranks)
    row["wire_ms"] = ideal_ms(row["sent"], known["gbit"])
    steps = [max(each) for each in zip(*(each["ms"] for each in ranks), strict=True)]
    usual = [row["ms"][1]] * WARM_UP  # the first steps compile
    row["elapsed_s"] = [ms / 1e3 for ms in accumulate(usual + steps)]
    losses = [fmean(each) for each in zip(*(each["loss"] for each in ranks), strict=True)]
    row["losses"] = [fmean(losses[max(0, end - SMOOTH) : end]) for end in range(1, 1 + len(losses))]
    row["held_out"] = fmean(each["held_out"] for each in ranks)
    return row | {key: ranks[0][key] for key in ("sites", "compressed", "parameters")}


def loss_by(row: Row, seconds: float) -> float:
    """Return the training loss that a way has reached by a time."""
    return row["losses"][max(0, bisect_right(row["elapsed_s"], seconds) - 1)]


COLUMNS = {
    **LINKS,
    "way": text("way"),
    "step ms": spread,
    "x ddp": number("of_base"),
    "exposed": number("exposed_ms", ".0f"),
    "x less": number("less_exposed"),
    "sent MB": lambda row: f"{row['sent'] / 1e6:.2f}",
    "wire": number("wire_ms", ".0f"),
    "x wire": number("of_wire"),
    "CPU": number("more_cpu_ms", ".0f"),
    "waits": number("waits_ms", ".0f"),
    "queues": number("queued_ms", ".0f"),
    "loss": number("held_out", ".3f"),
    "to ddp": number("more_loss", "+.3f"),
    "by T": number("loss_by", ".3f"),
}


def remarks(rows: list[Row]) -> list[str]:
    by = dict.fromkeys((row["gbit"], row["ranks"], row["by_s"]) for row in rows)
    said = [f"T is {s:.1f} s at {gbit:g} Gbit/s on {ranks} ranks" for gbit, ranks, s in by]
    return [f"{rows[0]['parameters'] / 1e6:.1f} million parameters", *said] if rows else []


MEASUREMENT = Measurement(NAME, "data-parallel training", USUAL, QUICK, measured, COLUMNS, remarks)
