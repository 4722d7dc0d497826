"""Torch modes of the caller do not change what real ranks exchange."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ambient import CODECS, MODES, differing, same_bits
from tiers import crossed, has_messages, rarely
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import commpass
from commpass.parallel import compress_fsdp, compress_pipeline
from commpass.parallel.exchange import Exchange, Exchanges
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MATMULS = ("rotated", "taco", "tahquant")
"""Codecs that autocast would affect."""


def forced(spec: str, **more) -> Policy:
    return Policy(name=spec, rules=[Rule(codec=spec, force=True)], max_error=1.0, **more)


def data() -> torch.Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


# --- direct calls ---------------------------------------------------------------------------------


def by_hand(kind: str, codecs: tuple[str, ...], mode: str) -> list[str]:
    x = data()
    return differing(lambda name: getattr(commpass, kind)(x, codec=name), codecs, mode)


@pytest.mark.parametrize(
    ("kind", "codecs", "mode"),
    [
        ("all_reduce", MATMULS, "autocast to bf16"),
        ("all_gather", MATMULS, "dispatch mode"),
        *(rarely(kind, CODECS, mode) for kind in KINDS for mode in MODES),
    ],
)
def test_collective_by_hand_gives_the_same_bits(ranks2, kind, codecs, mode):
    assert ranks2.run(by_hand, kind, codecs, mode) == [[], []]


# --- hooks ----------------------------------------------------------------------------------------


def exchanged(kind: str, codecs: tuple[str, ...], mode: str, **more) -> list[str]:
    x, ranks = data().flatten(), dist.get_world_size()
    sizes = {"all_gather": x.numel() * ranks, "reduce_scatter": x.numel() // ranks}

    def run(name: str) -> torch.Tensor:
        made = commpass.backend(forced(name, **more), inner="eager", strict=True)
        what = Exchange(kind, dist.group.WORLD.group_name, ranks, "m", "forward", "ambient")
        with contextlib.nullcontext() if kind in sizes else torch.inference_mode(False):
            sent, out = x.clone(), x.new_zeros(sizes.get(kind, 0))
        Exchanges(made).run(what, sent, out if kind in sizes else None)
        return out if kind in sizes else sent

    return differing(run, codecs, mode)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "codecs", "mode"),
    [
        ("all_gather", ("rotated",), "autocast to bf16"),
        ("all_reduce", ("int8",), "function mode"),
        *(
            rarely(kind, (*MATMULS, "int4"), mode)
            for kind, mode in crossed(KINDS[:3], MODES, one_in=3)
        ),
    ],
)
def test_exchange_of_a_hook_gives_the_same_bits(ranks2, kind, codecs, mode):
    assert ranks2.run(exchanged, kind, codecs, mode) == [[], []]


class Exact(nn.Module):
    """Computes the same under autocast, which affects no products of values: only exchanges could
    differ."""

    def __init__(self, width: int = 64):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.scales = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (y - target).square().mean()


def pipelined(mode: str, codec: str, lowering: str) -> bool:
    rank, found = dist.get_rank(), []
    for within in (contextlib.nullcontext, MODES[mode]):
        model = Exact()
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        compress_pipeline(stage, forced(codec, lowering=lowering))
        schedule = ScheduleGPipe(stage, 2, loss_fn=loss)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
        with within():
            schedule.step(x) if rank == 0 else schedule.step(target=x)
        found.append([p.grad for p in model.parameters()])
    return same_bits(*found)


@has_messages
@pytest.mark.parametrize(
    ("mode", "codec", "lowering"),
    [
        ("autocast to bf16", "rotated", "inline"),
        rarely("autocast to bf16", "taco", "kernel"),
        rarely("autocast to fp16", "tahquant", "inline"),
        rarely("default dtype bfloat16", "rotated", "inline"),
        rarely("deterministic", "int4", "inline"),
    ],
)
def test_pipeline_stage_sends_the_same_bits(ranks2, mode, codec, lowering):
    assert ranks2.run(pipelined, mode, codec, lowering) == [True, True]


def watched(
    error_sample_rate: float, mode: str | None
) -> tuple[list[torch.Tensor], list[tuple[str, float]]]:
    """Return gradients of a step, and the measured errors of what was gathered for it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    fully_shard(model)
    integration = compress_fsdp(
        model, forced("rotated", error_sample_rate=error_sample_rate), strict=True
    )
    integration.exchanges.backend.inner = "eager"
    with MODES[mode]() if mode else contextlib.nullcontext():
        model(data()).float().square().mean().backward()
    entries = integration.exchanges.backend.step_log.entries
    sites = [site for entry in entries for site in entry.samples.sites if site.count]
    errors = [(site.site.kind, site.last) for site in sites if site.site.kind == "all_gather"]
    return [p.grad.to_local() for p in model.parameters()], errors


def watching() -> tuple[bool, bool, int]:
    plain, _ = watched(0.0, "autocast to bf16")
    got, errors = watched(1.0, "autocast to bf16")
    _, outside = watched(1.0, None)
    return same_bits(plain, got), errors == outside, len(errors)


@pytest.mark.every
def test_errors_are_measured_under_autocast_without_changing_a_step_of_fsdp(ranks2):
    assert ranks2.run(watching) == [(True, True, 1)] * 2
