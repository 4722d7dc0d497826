"""Bits a value of weights, gradients and activations of a small model in bfloat16 as it trains.

The model is trained twice on two ranks: sharded by its parameters (weights are gathered, gradients
scattered) and by tensor parallelism (activations and their gradients are summed). At some steps its
graph with coded collectives runs as well, and the profiler counts the bytes that it hands over. Of
the tensors of ZipCCL's figure 16 there are also bits by codec, and by the paper's one window for a
whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import commpass
from benchmarks.claims.experiments import text
from benchmarks.claims.experiments.coded import coded_sites
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.launch import launched
from benchmarks.claims.formulas.zipccl import EXPONENTS, best_start
from commpass.kinds import KINDS
from commpass.parallel import shard
from commpass.report.trace import what_of

CODECS = ("exponent", "exponent(planes=3)")
"""Ours, and the paper's: a window for each 1,024 values."""
RANKS, LAYERS, WIDTH, STEPS = 2, 2, 256, 300
MEASURED = (0, 10, 30, 100, 200, 300)
SENT = {"shard": ("weights", "gradients"), "tp": ("activations", "activation gradients")}
"""By division: what travels in forward and in backward."""
ONE_WINDOW = "one window"


# --- bits of a tensor -----------------------------------------------------------------------------


def one_window_bits(x: Tensor) -> float:
    """By the paper's table: 11 bits a value and 8 more for each outside of the window of seven
    exponents that equation 5 gives for the tensor's deviation."""
    return 11 + 8 * (1 - window_share(x))


def window_share(x: Tensor) -> float:
    """The share of values whose exponents are in that window."""
    values = x.detach().float().flatten()
    start = round(best_start(float(values.std())))
    exponents = torch.frexp(values).exponent - 1
    inside = (exponents >= start) & (exponents < start + EXPONENTS) & (values != 0)
    return float(inside.double().mean())


def top_share(x: Tensor, k: int = EXPONENTS) -> float:
    """The share of values that have one of the ``k`` commonest exponents, as table 1 counts."""
    exponents = (x.detach().flatten().view(torch.int16).to(torch.int32) >> 7) & 0xFF
    counts = torch.bincount(exponents, minlength=256).sort(descending=True).values
    return float(counts[:k].sum()) / x.numel()


def entropy_bits(x: Tensor) -> float:
    """8 bits of sign and mantissa, and the entropy of the exponents: the least that a code of
    exponents alone takes."""
    exponents = (x.detach().flatten().view(torch.int16).to(torch.int32) >> 7) & 0xFF
    shares = torch.bincount(exponents, minlength=256).double() / x.numel()
    shares = shares[shares > 0]
    return 8 + float(-(shares * shares.log2()).sum())


def codec_bits(x: Tensor, codec: str) -> float:
    """What a codec needs, read off its wire."""
    coder, row = commpass.codec(codec), x.detach().reshape(1, -1)
    wire = coder.encode_rows(row)
    return 8 * float(coder.used_bytes(wire, row.shape[1], row.dtype)) / row.shape[1]


def bits_of(x: Tensor) -> dict[str, float]:
    found = {codec: codec_bits(x, codec) for codec in CODECS}
    return found | {
        ONE_WINDOW: one_window_bits(x),
        "entropy": entropy_bits(x),
        "window share": window_share(x),
        "top share": top_share(x),
    }


# --- on a rank ------------------------------------------------------------------------------------


def handed(run: Callable[[], Any]) -> tuple[Any, int]:
    """What ``run`` returns, and the bytes that this rank hands to collectives, as the profiler sees
    them."""
    sizes = {"unsigned char": 1, "long int": 8, "c10::BFloat16": 2, "float": 4}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        found = run()
    total = 0
    for event in profile.profiler.kineto_results.events():
        ours = event.name().startswith(("_c10d_functional::", "commpass::"))
        if ours and what_of(event.name()) in KINDS:
            total += math.prod(event.shapes()[0]) * sizes[event.dtypes()[0]]
    return found, total


def values_coded(plans: Iterable[commpass.Plan]) -> int:
    """How many values are encoded on this rank, by the plans' stages."""
    return sum(
        stage.values
        for plan in plans
        for site in plan
        for stage in site.stages
        if stage.role == "encode"
    )


def divided(division: str) -> nn.Module:
    from train_tp import divide

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    model = text.transformer(LAYERS, WIDTH)
    if division == "shard":
        return shard(model, mesh, param_dtype=torch.bfloat16)
    model = model.bfloat16()
    divide(model, mesh)
    return model


def on_rank(division: str, steps: int, measured: list[int], inner: str) -> list[dict[str, Any]]:
    """Rows of bits: ``of`` what travels, by codec, on the wire of a step's graph."""
    own = dist.get_rank() if division == "shard" else 0
    model, rows = divided(division), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    plain = torch.compile(model, backend=commpass.backend("off", inner="eager"))
    coded = {codec: Coded(model, codec, inner) for codec in CODECS}
    for step, batch in enumerate(text.batches(text.texts()[0], steps + 1, 1000 * own)):
        if step in measured:
            for each in coded.values():
                rows += [row | {"step": step} for row in each.bits(batch, SENT[division])]
        loss = plain(batch)
        optimizer.zero_grad()
        loss.backward()
        if step in measured:
            rows += [{"step": step, "of": "loss", "loss": float(loss)}]
        optimizer.step()
    return rows


class Coded:
    """The model's graphs with all collectives coded; they are compiled at the first step."""

    def __init__(self, model: nn.Module, codec: str, inner: str) -> None:
        self.model, self.codec = model, codec
        rule = commpass.Rule(codec=codec, force=True)
        backend = commpass.backend(commpass.Policy(rules=[rule]), inner=inner, strict=True)
        self.compiled = torch.compile(model, backend=backend)
        self.values: tuple[int, int] | None = None

    def bits(self, batch: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Bits a value in forward and in backward. Gradients are gone afterwards."""
        if self.values is None:
            before = len(commpass.plans())
            self.compiled(batch).backward()
            plans = commpass.plans()[before:]
            coded_sites(plans, [self.codec], sum(len(plan.sites) for plan in plans))
            forward, backward = (
                [plan for plan in plans if plan.direction == which]
                for which in ("forward", "backward")
            )
            self.values = values_coded(forward), values_coded(backward)
        loss, ahead = handed(lambda: self.compiled(batch))
        _, back = handed(loss.backward)
        self.model.zero_grad()
        return [
            {"of": name, "codec": self.codec, "wire_bits": 8 * sent / values}
            for name, sent, values in zip(names, (ahead, back), self.values, strict=True)
        ]


# --- tensors of figure 16 -------------------------------------------------------------------------


def tensors(steps: int, measured: Sequence[int]) -> list[dict[str, Any]]:
    """Bits of the weight, the input and both gradients of the first matmul of the first MLP, of a
    model in bfloat16 on one process."""
    model, rows = text.transformer(LAYERS, WIDTH).bfloat16(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    gate, seen = model.blocks[0].mlp.gate, {}

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["activations"] = inputs[0]
        inputs[0].retain_grad()

    gate.register_forward_pre_hook(keep)
    for step, batch in enumerate(text.batches(text.texts()[0], steps + 1, 0)):
        optimizer.zero_grad()
        model(batch).backward()
        if step in measured:
            found = {
                "weights": gate.weight,
                "gradients": gate.weight.grad,
                "activations": seen["activations"],
                "activation gradients": seen["activations"].grad,
            }
            rows += [{"step": step, "of": name, **bits_of(x)} for name, x in found.items()]
        optimizer.step()
    return rows


# --- what is read off the rows --------------------------------------------------------------------


def wire_bits(rows: Sequence[dict[str, Any]], of: str, codec: str) -> dict[int, float]:
    """Bits on the wire by step."""
    return {
        row["step"]: row["wire_bits"]
        for row in rows
        if row["of"] == of and row.get("codec") == codec
    }


def tensor_bits(rows: Sequence[dict[str, Any]], of: str, how: str) -> dict[int, float]:
    """A number of ``bits_of`` by step."""
    return {row["step"]: row[how] for row in rows if row["of"] == of}


def run(
    steps: int = STEPS, measured: Sequence[int] = MEASURED, inner: str = "eager"
) -> dict[str, Any]:
    options = {"steps": steps, "measured": list(measured), "inner": inner}
    wire = [
        row | {"division": division}
        for division in SENT
        for row in launched(__name__, RANKS, options | {"division": division})
    ]
    facts = {"layers": LAYERS, "width": WIDTH, "steps": steps, "text": text.digest()}
    return facts | {"wire": wire, "tensors": tensors(steps, measured)}


EXPERIMENT = Experiment(
    "zipccl_bits",
    "bits of weights, gradients and activations by training step, bfloat16, on the wire",
    15,
    run,
)
