"""Measure the perplexity of a trained model under low-bit tensor parallelism, by codec.

A small transformer is trained in one process, sharded by tensor parallelism, and calibrated on
parts of the training text. It is measured on held-out text through compiled graphs in which every
all_reduce of forward is coded. ``selected`` channels are the paper's: static scales, and the widest
channels in bfloat16. ``random`` channels are chosen at random. ``dynamic`` keeps the selected
channels, and measures block scales in each call. There are two models: one as trained, and one with
planted outlier channels that computes the same function.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.functional import linear

import commpass
from benchmarks.claims.experiments import text
from benchmarks.claims.experiments.coded import coded_sites
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.launch import launched
from commpass.calibration import Calibration
from commpass.codecs.wrappers.outlier import Channels, random_channels

SHARES = (0.0, 1 / 128, 1 / 64, 1 / 32, 1 / 16)
BITS, HOWS, SEEDS = (2, 4, 6), ("selected", "random", "dynamic"), (0, 1, 2)
LAYERS, WIDTH, STEPS = 2, 256, 600
CALIBRATED, MEASURED = 32, 8
"""Number of sequences of a calibration; number of batches of held-out text."""
PLANTED, FACTOR = 1 / 64, 32.0
"""Share of planted channels, and the factor by which they are enlarged."""
Rows = Sequence[dict[str, Any]]


# --- models ---------------------------------------------------------------------------------------


class Unscaled(nn.Module):
    """A norm after enlarged channels: it divides them by their factors first."""

    def __init__(self, norm: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x / self.factors)


def factors() -> Tensor:
    """Return the factor of each channel of the residual stream; powers of two, so that products are
    exact."""
    generator = torch.Generator().manual_seed(11)
    chosen = torch.randperm(WIDTH, generator=generator) < round(PLANTED * WIDTH)
    return torch.where(chosen, FACTOR, 1.0)


@torch.no_grad()
def plant(model: nn.Module) -> nn.Module:
    """Enlarge channels of the residual stream in all weights that write to it, and divide them
    before all norms that read it.

    The model computes the same function, bit for bit.
    """
    by = factors()
    model.token.weight.mul_(by)
    model.position.weight.mul_(by)
    for block in model.blocks:
        block.attn.o.weight.mul_(by.unsqueeze(1))
        block.mlp.down.weight.mul_(by.unsqueeze(1))
        block.norm1, block.norm2 = Unscaled(block.norm1, by), Unscaled(block.norm2, by)
    model.norm = Unscaled(model.norm, by)
    return model


class RowParallel(nn.Module):
    """A linear layer of which each rank has some of the input features, and the sum over ranks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(linear(x, self.weight), "sum", dist.group.WORLD)


def divided(state: str, planted: bool) -> nn.Module:
    """Return the model with tensor parallelism for inference.

    Heads and inner features are sharded over the ranks, with a sum after each attention and each
    MLP.
    """
    model = text.transformer(LAYERS, WIDTH)
    model.load_state_dict(torch.load(state))
    model = (plant(model) if planted else model).requires_grad_(False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for block in model.blocks:
        columns = [getattr(block.attn, name) for name in "qkv"] + [block.mlp.gate, block.mlp.up]
        for layer in columns:
            layer.weight = nn.Parameter(layer.weight.chunk(ranks, 0)[rank].clone(), False)
        for module, name in ((block.attn, "o"), (block.mlp, "down")):
            rows = getattr(module, name).weight.chunk(ranks, 1)[rank].clone()
            setattr(module, name, RowParallel(rows))
    return model


# --- policies -------------------------------------------------------------------------------------


def policy_of(found: Calibration, how: str, share: float, bits: int, seed: int) -> commpass.Policy:
    """Return a policy that codes all places in one way; ``selected`` is ``Policy.lowbit_tp``."""
    if how == "selected":
        policy = commpass.Policy.lowbit_tp(found, share, bits=bits, max_error=1.0)
        return replace(policy, rules=[replace(rule, force=True) for rule in policy.rules])
    rules = [
        commpass.Rule(
            module=where.module,
            kind=where.kind,
            direction=where.direction,
            codec=_codec(Channels.from_text(place.statistics), how, share, bits, seed),
            algorithm="one_shot",
            force=True,
            max_error=1.0,
        )
        for place in found.places
        for where in place.where
    ]
    return commpass.Policy(rules=sorted(rules, key=lambda rule: -str(rule.module).count(".")))


def _codec(channels: Channels, how: str, share: float, bits: int, seed: int) -> str:
    if how == "random":
        chosen = replace(channels, kept=random_channels(channels.width, share, seed))
        return commpass.codec("outlier", statistics=chosen.to_text(), bits=bits).spec
    kept = channels.keeping(share).kept
    bare = Channels(channels.width, kept).to_text()
    return commpass.codec("outlier", statistics=bare, inner=f"int{bits}").spec


# --- on a rank ------------------------------------------------------------------------------------


def on_rank(
    state: str,
    planted: bool,
    cells: list[list[Any]],
    calibrated: int,
    measured: int,
    inner: str,
) -> dict[str, Any]:
    """Return the perplexity without a codec, and a row for each cell
    ``[how, share, bits, seed]``."""
    model = divided(state, planted)
    plain, rows, reach = text.perplexity(model, measured), [], []
    for seed in dict.fromkeys(cell[-1] for cell in cells):
        sequences = text.batches(text.texts()[0], calibrated, 100 + seed, size=1)
        found = commpass.calibrate(
            model,
            [(each,) for each in sequences],
            codecs=("int4",),
            probes=("rotated(bits=6)",),
            train=False,
        )
        reach.append(spans(found))
        for how, share, bits, of in cells:
            if of != seed:
                continue
            policy = policy_of(found, how, share, bits, seed)
            torch._dynamo.reset()
            before = len(commpass.plans())
            backend = commpass.backend(policy, inner=inner, strict=True)
            coded = text.perplexity(torch.compile(model, backend=backend), measured)
            codecs = [each for rule in policy.rules for each in rule.codec]
            sites = coded_sites(commpass.plans()[before:], codecs, 2 * LAYERS)
            wire = sum(site.wire_bytes for site in sites) / sum(site.bytes for site in sites)
            rows.append(
                {"how": how, "share": share, "bits": bits, "seed": seed, "perplexity": coded}
                | {"wire_bits": 32 * wire}
            )
    return {"perplexity": plain, "rows": rows, "widest_by_median": reach}


def spans(found: Calibration) -> list[float]:
    """Return, for each place, the ratio of the widest channel's range to the median one, with
    ranges summed over the ranks."""
    tables = [Channels.from_text(place.statistics).ranges for place in found.places]
    totals = [torch.tensor(table).sum(0) for table in tables]
    return [float(total.max() / total.median()) for total in totals]


# --- results from the rows ------------------------------------------------------------------------


def loss_percent(part: dict[str, Any], how: str, share: float, bits: int) -> list[float]:
    """Return by how many percent perplexity is larger than without a codec, for each seed.

    Without kept channels, ``random`` and ``selected`` are the same. Raise KeyError for what was not
    measured.
    """
    how = "selected" if how == "random" and share == 0 else how
    found = [
        100 * (row["perplexity"] / part["perplexity"] - 1)
        for row in part["rows"]
        if (row["how"], row["bits"]) == (how, bits) and abs(row["share"] - share) < 1e-9
    ]
    if not found:
        raise KeyError((how, share, bits))
    return found


def mean_percent(part: dict[str, Any], how: str, share: float, bits: int) -> float:
    return fmean(loss_percent(part, how, share, bits))


def spread_percent(part: dict[str, Any], how: str, share: float, bits: int) -> float:
    found = loss_percent(part, how, share, bits)
    return stdev(found) if len(found) > 1 else 0.0


def wire_bits(part: dict[str, Any], how: str, share: float, bits: int) -> float:
    """Return the bits per value on the wire, according to the plans."""
    return next(
        row["wire_bits"]
        for row in part["rows"]
        if (row["how"], row["share"], row["bits"]) == (how, share, bits)
    )


def cells(
    bits: Sequence[int], shares: Sequence[float], seeds: Sequence[int]
) -> list[tuple[str, float, int, int]]:
    """Return all cells that differ: without a kept channel, ``random`` is ``selected``."""
    return [
        (how, share, each, seed)
        for seed in seeds
        for each in bits
        for how in HOWS
        for share in shares
        if share or how != "random"
    ]


def run(
    ranks: int,
    planted: bool,
    some: Sequence[tuple[str, float, int, int]],
    steps: int = STEPS,
    calibrated: int = CALIBRATED,
    measured: int = MEASURED,
    inner: str = "eager",
) -> dict[str, Any]:
    """Train the model, then return the results of ``on_rank`` for some cells."""
    model = text.trained(LAYERS, WIDTH, steps)
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "model.pt")
        torch.save(model.state_dict(), state)
        given = {"state": state, "planted": planted, "cells": some, "calibrated": calibrated}
        found = launched(__name__, ranks, given | {"measured": measured, "inner": inner})
    facts = {"layers": LAYERS, "width": WIDTH, "steps": steps, "text": text.digest()}
    how = {"ranks": ranks, "planted": planted, "calibrated": calibrated, "measured": measured}
    return facts | how | found


FEW = (0.0, 1 / 64)
TRAINED = Experiment(
    "lowbit_perplexity",
    "perplexity under int2, int4 and int6 by channels kept: selected, random, dynamic; 2 ranks",
    9,
    partial(run, 2, False, cells(BITS, SHARES, SEEDS[:1]) + cells(BITS, FEW, SEEDS[1:])),
)
"""All shares with the first calibration; with no kept channel and with 1/64 of them, three
calibrations."""
OUTLIERS = Experiment(
    "lowbit_planted",
    "perplexity under int4 of a model with planted outlier channels; 2 ranks",
    3,
    partial(run, 2, True, cells((4,), SHARES, SEEDS[:1])),
)
FOUR = Experiment(
    "lowbit_four_ranks",
    "perplexity under int4; 4 ranks",
    3,
    partial(run, 4, False, cells((4,), FEW, SEEDS[:1])),
)
