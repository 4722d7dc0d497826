"""Measure one collective at a time: compiled calls under several policies that alternate, and the
bytes that have to be sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor

import commpass
from commpass.plan import NONE

from .shared import PATIENCE_S, Allowed, Row, compare, compiled, quartiles, slowest, take_turns

ops = torch.ops._c10d_functional


def all_reduce(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def all_reduce_bf16(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.bfloat16(), "sum", "0")).float()


def all_gather(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(x, dist.get_world_size(), "0"))


def reduce_scatter(x: Tensor) -> Tensor:
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", dist.get_world_size(), "0"))


def all_to_all(x: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    even = [x.shape[0] // ranks] * ranks
    return ops.wait_tensor(ops.all_to_all_single(x, even, even, "0"))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
Contenders = Mapping[str, tuple[Callable[[Tensor], Tensor], Allowed]]
"""Name to a function of one collective and the policy under which it is compiled."""


def leaves(kind: str, ranks: int, nbytes: float) -> float:
    """Return the least bytes that leave a rank if each rank passes ``nbytes`` to a plain
    collective."""
    if kind == "all_gather":
        return (ranks - 1) * nbytes
    once = (ranks - 1) / ranks * nbytes
    return {"all_reduce": 2 * once, "reduce_scatter": once, "all_to_all": once}[kind]


def sent(stage: Any, ranks: int) -> int:
    """Return the bytes that leave a rank in one stage."""
    if stage.role != "exchange":
        return 0
    return stage.leaving * (ranks - 1 if stage.kind == "all_gather" else 1)


def ideal_ms(nbytes: float, gbit: float) -> float:
    """Return the milliseconds that a number of bytes takes on a link."""
    return nbytes * 8 / gbit / 1e6


def decided(plan: commpass.Plan) -> Row:
    """Return the decision of a plan of one site; ``unchanged``: the graph is the one without
    commpass."""
    (site,) = plan
    alone = site.codec == NONE
    return {
        "codec": None if alone else site.codec,
        "algorithm": None if alone else site.algorithm,
        "chunks": None if alone else site.chunks,
        "stages": site.stages,
        "predicted_ms": site.predicted_us / 1e3,
        "reason": site.reason,
        "unchanged": not (plan.compressed or plan.simplified),
    }


def measure(
    contenders: Contenders,
    kib: int,
    dtype: torch.dtype,
    profile: Any,
    repeats: int,
    seconds: float = math.inf,
) -> dict[str, Row]:
    """Return, on a rank, the results of ``take_turns`` and the decision for each contender.

    The input is a Gaussian tensor of the given KiB.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(kib * 1024 // dtype.itemsize, generator=generator).to(dtype)
    functions, plans = {}, {}
    with torch.no_grad():
        for name, (function, policy) in contenders.items():
            made = compiled(function, policy, profile)
            earlier = len(commpass.plans())
            made(x)
            plans[name] = [decided(plan) for plan in commpass.plans()[earlier:]]
            functions[name] = lambda made=made: made(x)
        found = take_turns(functions, repeats, seconds)
    for name, seen in plans.items():
        if seen:
            (plan,) = seen
            found[name] |= plan
    return found


def rows_of(found: list[dict[str, Row]], known: Row, least: Mapping[str, float]) -> list[Row]:
    """Return a row for each contender, from the results of each rank.

    ``known`` is added to all rows. ``least`` are the bytes that leave a rank if torch carries the
    contender out.
    """
    made = []
    for name, first in found[0].items():
        every = [each[name] for each in found]
        row = {**known, "name": name, "ms": slowest([each["ms"] for each in every])}
        row |= {key: value for key, value in first.items() if key not in ("ms", "cpu_ms", "stages")}
        stages = first.get("stages") if first.get("codec") else None
        leaving = sum(map(sent, stages, itertools.repeat(known["ranks"]))) if stages else None
        ideal = ideal_ms(least[name] if leaving is None else leaving, known["gbit"])
        row |= {"ideal_ms": ideal, "share": ideal / row["ms"][1]}
        row["cpu_ms"] = median([time for each in every for time in each["cpu_ms"]])
        made.append(row)
    return made


def compare_with_plain(
    ranks: Ranks,
    gbit: float,
    kind: str,
    kib: int,
    contenders: Contenders,
    dtype: torch.dtype,
    profile: Any,
    repeats: int,
    seconds: float = math.inf,
) -> list[Row]:
    """Measure contenders of one kind on all ranks. Return a row for each, with how many times
    faster than ``plain`` it is: ``of_plain`` by the medians, ``pairs`` by the quartiles over pairs
    of a plain call and the next one of the contender."""
    case = (contenders, kib, dtype, profile, repeats, seconds)
    found = ranks.run(measure, *case, timeout=PATIENCE_S)
    known = {"ranks": ranks.size, "gbit": gbit, "kind": kind, "KiB": kib}
    made = rows_of(found, known, dict.fromkeys(contenders, leaves(kind, ranks.size, kib * 1024)))
    compare(made, "name", "plain", "of_plain")
    for row in made:
        row |= {"pairs": pairs(found, row["name"]), "calls": len(found[0][row["name"]]["ms"])}
    return made


def pairs(found: list[dict[str, Row]], name: str, base: str = "plain") -> list[float]:
    """Return quartiles of how many times faster a contender is than the call of ``base`` in the
    same turn, by the times of the slowest rank."""

    def turns(name: str) -> list[float]:
        return [max(times) for times in zip(*(each[name]["ms"] for each in found), strict=True)]

    return quartiles([a / b for a, b in zip(turns(base), turns(name), strict=True)])
