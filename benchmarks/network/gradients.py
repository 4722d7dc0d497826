"""Measure a data-parallel step, and the loss that the training reaches.

A step is forward, backward and AdamW of a transformer of about 10 million parameters over the bytes
of Python's standard library (examples/common.py).

All ways start with the same weights and use the same batches; each rank has its own. ``loss`` is on
held-out text after ``--steps`` steps. Times leave out the first three steps, in which DDP makes its
buckets.

``ddp`` is DistributedDataParallel around the model, compiled by Inductor, alone or with torch's
hooks for gradients. Those run outside compiled graphs, where commpass sees nothing. In ``graph``
and in ours, each parameter is a DTensor whose gradient is averaged, which puts data parallelism
into the compiled graph. ``graph`` is Inductor alone.

GRACE, which has top-k and QSGD as hooks, is not on PyPI: ``pip download grace-dl`` finds nothing,
and ``grace`` there is a different package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import commpass

from .shared import (
    LINKS,
    PATIENCE_S,
    WARM_UP,
    Allowed,
    Measurement,
    Options,
    Row,
    chosen,
    compare,
    compiled,
    number,
    on_links,
    slowest,
    spread,
    take_turns,
    text,
)
from .steps import counted

NAME = "gradients"
HELD_OUT = 8
TOPK = commpass.Policy(
    name="topk",
    rules=[
        commpass.Rule(
            codec="topk(density=0.01)", direction="backward", min_bytes=1 << 16, force=True
        )
    ],
)
"""One value in a hundred of each matrix; error feedback adds what is not sent to later steps."""


def by_ddp(net: nn.Module, profile: str, hook: Any = None, **options: Any) -> Any:
    model = DistributedDataParallel(net, process_group=dist.new_group(), **options)
    if hook:
        hook(model)
    return compiled(model, None, profile)


def fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)


def power(model: DistributedDataParallel) -> None:
    """Register PowerSGD of rank 4 with its error feedback on a DDP model of one bucket.

    It starts with the third step, the earliest possible. The hook waits within the callbacks of
    gloo's two workers, where two buckets would deadlock.
    """
    rank, start = 4, 2
    state = power_sgd.PowerSGDState(model.process_group, rank, start_powerSGD_iter=start)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)


def in_graph(net: nn.Module, profile: str, policy: Allowed) -> Any:
    from llama import seen_as

    line = init_device_mesh("cpu", (dist.get_world_size(),))
    return compiled(seen_as(net, partial(averaged, mesh=line)), policy, profile)


def averaged(parameter: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    """The parameter; its gradient is the mean over ranks."""
    copy = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return copy.to_local(grad_placements=[Partial("avg")])


WAYS: dict[str, Callable[[nn.Module, str], Any]] = {
    "ddp": by_ddp,
    "fp16": partial(by_ddp, hook=fp16),
    "powersgd": partial(by_ddp, hook=power, bucket_cap_mb=1024),
    "graph": partial(in_graph, policy=None),
    "lossless": partial(in_graph, policy="lossless"),
    "balanced": partial(in_graph, policy="balanced"),
    "aggressive": partial(in_graph, policy="aggressive"),
    "topk": partial(in_graph, policy=TOPK),
}


USUAL = {
    "ranks": [2],
    "gbit": [0.1, 1.0],
    "ways": list(WAYS),
    "layers": 5,
    "width": 384,
    "batch": 4,
    "steps": 40,
}
QUICK = {
    "gbit": [1.0],
    "ways": ["ddp", "powersgd", "balanced"],
    "layers": 1,
    "width": 128,
    "batch": 2,
    "steps": 6,
}


def train(options: Options, profile: str) -> dict[str, Row]:
    """Return, on a rank, the step times and held-out loss of each way, and the decisions."""
    import common

    torch._dynamo.reset()
    commpass.reset_state()
    texts = common.read_texts()
    held_out = list(common.batches(texts[1], HELD_OUT, 0))
    nets, steps, sites = {}, {}, {}
    for name in chosen(WAYS, options.ways):
        torch.manual_seed(0)
        nets[name] = common.Transformer(options.layers, options.width)
        forward = WAYS[name](nets[name], profile)
        own = common.batches(texts[0], options.steps, 1 + dist.get_rank())
        learn = torch.optim.AdamW(nets[name].parameters(), lr=1e-3, foreach=False)
        sites[name] = {}
        steps[name] = partial(
            learned, forward, (batch[: options.batch] for batch in own), learn, sites[name], count()
        )
    found = take_turns(steps, options.steps - WARM_UP)
    for name, net in nets.items():
        with torch.no_grad():
            losses = [net(batch).item() for batch in held_out]
        found[name] |= sites[name] | {"loss": sum(losses) / len(losses)}
        found[name]["parameters"] = sum(weight.numel() for weight in net.parameters())
    return found


def learned(forward: Any, batches: Any, learn: Any, sites: Row, steps: Any) -> None:
    """Run one step; the first one compiles, and records the decisions in ``sites``."""
    earlier = len(commpass.plans())
    forward(next(batches)).backward()
    learn.step()
    learn.zero_grad()
    if next(steps) == 0:
        sites |= counted(commpass.plans()[earlier:])


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        job = (options, f"ethernet-{gbit:g}g")
        found = ranks.run(train, *job, timeout=PATIENCE_S)
        rows += way_rows(found, {"ranks": ranks.size, "gbit": gbit})
        ranks.stop()  # DDP leaves hooks in a process; new ranks start automatically
    return rows


def way_rows(found: list[dict[str, Row]], known: Row) -> list[Row]:
    """Return a row for each way. The loss is rank 0's, because replicas are equal."""
    made = []
    for name, first in found[0].items():
        row = {**known, "way": name, "ms": slowest([each[name]["ms"] for each in found])}
        row |= {key: first[key] for key in ("sites", "compressed", "loss", "parameters")}
        made.append(row)
    compare(made, "way", "ddp", "of_ddp")
    for row in made:
        row["more_loss"] = row["loss"] - made[0]["loss"]
    return made


COLUMNS = {
    **LINKS,
    "gradients": text("way"),
    "sites": number("sites", "d"),
    "compressed": number("compressed", "d"),
    "step ms": spread,
    "x ddp": number("of_ddp"),
    "loss": number("loss", ".3f"),
    "more than ddp": number("more_loss", "+.3f"),
}


def remarks(rows: list[Row]) -> list[str]:
    return [f"{rows[0]['parameters'] / 1e6:.1f} million parameters"] if rows else []


MEASUREMENT = Measurement(NAME, "data-parallel steps", USUAL, QUICK, measured, COLUMNS, remarks)
