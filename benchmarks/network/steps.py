"""Measure a step of tensor-parallel transformers: zero the gradients, forward, loss, backward;
float32.

``demo`` is the model of examples/train_tp.py, ``llama`` a Llama of transformers with DTensor's
column- and row-parallel plan (tests/llama.py). Weights are the same under all policies: one model
is compiled under each. ``--length`` is the Llama's sequence length; the demo has its own sequences.

``exposed`` is how long a rank waits for exchanges that no computation overlaps. It is the time of
the operators that start and wait for exchanges in a step under torch's profiler, given as a share
of that step, and as that share of ``ms``. It is the median of three steps, as a mean over the
ranks.

There is no row for plain sums of values cast to bfloat16. DDP has a hook for that, tensor
parallelism has none, and a model or an autocast in bfloat16 also computes in it. ``bf16`` is
commpass's, by a rule: cast, exchanged by two_shot, summed in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.policy import PRESETS

from .shared import (
    LINKS,
    PATIENCE_S,
    Allowed,
    Measurement,
    Options,
    Row,
    chosen,
    compare,
    compiled,
    forced,
    number,
    on_links,
    slowest,
    spread,
    take_turns,
    text,
)

NAME = "steps"
POLICIES: dict[str, Allowed] = {
    "plain": None,
    "bf16": forced("bf16", algorithm="two_shot"),
    "lossless": "lossless",
    "balanced": "balanced",
    "int8": forced("int8"),
    "lossless, not moved": commpass.Policy(name="lossless", skip="move"),
    "balanced, not moved": replace(PRESETS["balanced"], skip=("move",)),
}
USUAL = {
    "ranks": [2, 4],
    "gbit": [0.1, 1.0],
    "models": ["demo", "llama"],
    "policies": list(POLICIES),
    "layers": 4,
    "width": 256,
    "batch": 8,
    "length": 128,
    "repeats": 9,
}
QUICK = {
    "ranks": [2],
    "gbit": [1.0],
    "models": ["demo"],
    "policies": ["plain", "balanced"],
    "layers": 1,
    "repeats": 3,
}
HEAD = 32
PROFILED = 3
EXCHANGES = ("commpass::all_to_all_single", "commpass::all_gather_into_tensor")
Step = Callable[[Any], Tensor]


def demo(options: Options) -> tuple[nn.Module, Step]:
    """Return the model and its loss function, which takes the model as it is or compiled."""
    import common
    import train_tp

    torch.manual_seed(0)
    model = common.Transformer(options.layers, options.width)
    train_tp.divide(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    batch = numbers(options.batch, common.CONTEXT + 1)
    return model, lambda called: called(batch)


def llama(options: Options) -> tuple[nn.Module, Step]:
    import llama as library

    heads = options.width // HEAD
    model = library.llama(layers=options.layers, width=options.width, heads=heads)
    library.tensor(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    batch = numbers(options.batch, options.length)
    return model, lambda called: called(input_ids=batch, labels=batch).loss


MODELS = {"demo": demo, "llama": llama}


def numbers(rows: int, length: int) -> Tensor:
    """Return random tokens, the same on each rank."""
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0))


def train(name: str, options: Options, profile: str) -> dict[str, Row]:
    """Return, on a rank, the times of a step under each policy, its waiting time, and the
    decisions."""
    torch._dynamo.reset()
    model, loss = MODELS[name](options)
    steps: dict[str, Callable[[], None]] = {}
    sites: dict[str, Row] = {}
    for policy in chosen(POLICIES, options.policies):
        made = compiled(model, POLICIES[policy], profile)

        def step(made: Any = made) -> None:
            model.zero_grad()
            loss(made).backward()

        earlier = len(commpass.plans())
        step()
        steps[policy] = step
        sites[policy] = counted(commpass.plans()[earlier:])
    found = take_turns(steps, options.repeats)
    for policy, step in steps.items():
        found[policy] |= sites[policy] | {"exposed": median(waits(step) for _ in range(PROFILED))}
    return found


def counted(plans: list[commpass.Plan]) -> Row:
    if not plans:
        return {"sites": None, "compressed": None}
    compressed = sum(len(plan.compressed) for plan in plans)
    return {"sites": sum(len(plan.sites) for plan in plans), "compressed": compressed}


def waits(step: Callable[[], None]) -> float:
    """Return the share of a step in which this rank starts or waits for exchanges."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
    return waiting({each.key: each.self_cpu_time_total for each in profile.key_averages()}) / took


def waiting(self_us: dict[str, float]) -> float:
    """Return the seconds that exchanges took, from the operators' own microseconds."""
    ours = [us for name, us in self_us.items() if name in EXCHANGES]
    return 1e-6 * sum(ours + [us for name, us in self_us.items() if "c10d" in name])


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        for model in options.models:
            job = (model, options, f"ethernet-{gbit:g}g")
            found = ranks.run(train, *job, timeout=PATIENCE_S)
            rows += step_rows(found, {"model": model, "ranks": ranks.size, "gbit": gbit})
    return rows


def step_rows(found: list[dict[str, Row]], known: Row) -> list[Row]:
    made = []
    for policy, first in found[0].items():
        every = [each[policy] for each in found]
        row = {**known, "policy": policy, "ms": slowest([each["ms"] for each in every])}
        row |= {key: first[key] for key in ("sites", "compressed")}
        row["exposed"] = fmean(each["exposed"] for each in every)
        row["exposed_ms"] = row["exposed"] * row["ms"][1]
        made.append(row)
    compare(made, "policy", "plain", "of_plain")
    return made


COLUMNS = {
    "model": text("model"),
    **LINKS,
    "policy": text("policy"),
    "sites": number("sites", "d"),
    "compressed": number("compressed", "d"),
    "step ms": spread,
    "x plain": number("of_plain"),
    "exposed ms": number("exposed_ms", ".1f"),
    "of the step": number("exposed", ".0%"),
}
MEASUREMENT = Measurement(
    NAME, "steps of tensor-parallel transformers", USUAL, QUICK, measured, COLUMNS
)
