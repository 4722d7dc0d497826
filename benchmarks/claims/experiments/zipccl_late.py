"""Measure ZipCCL's two designs of all_to_all if one rank is late (section 5.1, figure 14).

Four ranks with links of 1 Gbit/s exchange bfloat16 tokens in compiled graphs: plain, by design 1
(sizes first, then all data) and by design 2 (the static part first). Rank 1 starts up to 100 ms
after the others. A time is from its start to the end of the last rank. In the uneven exchange the
late rank has half as much for each rank, as in figure 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commpass
from benchmarks.claims.experiments.coded import coded_sites, forced
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.launch import launched
from benchmarks.claims.experiments.turns import PLAIN, turns

CODEC = "exponent(planes=3)"
DESIGNS = {"design 1": "direct(first=sizes)", "design 2": "direct"}
RANKS, LATE_RANK, LATE_MS, GBIT = 4, 1, (0.0, 10.0, 20.0, 50.0, 100.0), 1.0
WIDTH, TOKENS, REPEATS = 1024, 1024, 11
"""Values per token, and tokens for each other rank."""


def splits(rank: int, tokens: int, even: bool) -> list[int]:
    """Return the number of tokens from a rank to each rank; it is the same in both directions.

    If not ``even``, the late rank exchanges half as many with each other rank, so that no rank has
    equal splits. A rank with equal splits would plan for equal ones, and the ranks would not agree.
    """
    if even:
        return [tokens] * RANKS
    late = rank == LATE_RANK
    return [tokens // 2 if (other == LATE_RANK) != late else tokens for other in range(RANKS)]


def on_rank(
    tokens: int, even: bool, late_ms: list[float], repeats: int, inner: str
) -> list[dict[str, Any]]:
    """Return a row for each delay and variant. Raise RuntimeError if a result has other bits."""
    rank = dist.get_rank()
    mine = splits(rank, tokens, even)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(mine), WIDTH, generator=generator).bfloat16()
    ops = torch.ops._c10d_functional

    def all_to_all(x: Tensor) -> Tensor:
        return ops.wait_tensor(ops.all_to_all_single(x, mine, mine, "0"))

    torch._dynamo.reset()
    functions: dict[str, Any] = {PLAIN: torch.compile(all_to_all, backend="inductor")}
    expected, bits = functions[PLAIN](x), {PLAIN: 16.0}
    for name, algorithm in DESIGNS.items():
        before = len(commpass.plans())
        backend = commpass.backend(
            forced(CODEC, algorithm, lowering="kernel"), inner=inner, strict=True
        )
        functions[name] = torch.compile(all_to_all, backend=backend, dynamic=False)
        if not torch.equal(functions[name](x).view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError(f"{name}: other bits than the plain all_to_all")
        (site,) = coded_sites(commpass.plans()[before:], [CODEC], 1)
        bits[name] = 8 * site.wire_bytes / x.numel()
    called = {name: partial(made, x) for name, made in functions.items()}
    return [
        {"name": name, "even": even, "late_ms": late, "ms": times, "planned_bits": bits[name]}
        for late in late_ms
        for name, times in turns(called, repeats, LATE_RANK, late).items()
    ]


def ratio(
    rows: Sequence[dict[str, Any]], one: str, other: str, late_ms: float, even: bool
) -> float:
    """Return the ratio of the median times of ``one`` and ``other``."""
    found = {
        row["name"]: row["ms"][1]
        for row in rows
        if row["late_ms"] == late_ms and row["even"] == even
    }
    return found[one] / found[other]


def run(
    tokens: int = TOKENS,
    late_ms: Sequence[float] = LATE_MS,
    repeats: int = REPEATS,
    gbit: float | None = GBIT,
    inner: str = "inductor",
) -> dict[str, Any]:
    options = {"tokens": tokens, "late_ms": list(late_ms), "repeats": repeats, "inner": inner}
    rows = [
        row
        for even in (True, False)
        for row in launched(__name__, RANKS, options | {"even": even}, gbit)
    ]
    facts = {"ranks": RANKS, "late_rank": LATE_RANK, "gbit": gbit, "token_values": WIDTH}
    return facts | {"tokens": tokens, "rows": rows}


EXPERIMENT = Experiment(
    "zipccl_late",
    "all_to_all by both designs with a rank that comes 0 to 100 ms late, 1 Gbit/s (root)",
    15,
    run,
)
