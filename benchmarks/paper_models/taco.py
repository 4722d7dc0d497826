"""TACO: tensor-parallel training with fp8, fused and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commpass.collectives import Payload, read_stages
from commpass.costmodel import Link
from commpass.costmodel.cards import Card
from commpass.costmodel.links import steps
from commpass.passes.payloads import request_of
from commpass.plan import Site

from .sites import FREE, coded, fused, halved, plain, site
from .unfused import count_unfused


@dataclass(frozen=True)
class TensorParallel:
    """A GPT of TACO's section 5.4.

    Each layer sums its activations twice in forward and their gradients twice in backward, over all
    ranks. One micro-batch has ``tokens``.
    """

    parameters: float = 6.7e9
    layers: int = 32
    width: int = 4096
    tokens: int = 8192

    @property
    def exchanges(self) -> int:
        return 4 * self.layers

    def sum_of(self, ranks: int) -> Site:
        return site("all_reduce", self.tokens * self.width, ranks)

    def step_us(self, ranks: int, tflops: float) -> float:
        """Return the time of a step that runs at some TFLOP/s per GPU: 6 operations per parameter
        and token."""
        return 6 * self.parameters * self.tokens / (ranks * tflops * 1e6)

    def tflops(self, ranks: int, step_us: float) -> float:
        """Return the throughput of a step of some microseconds."""
        return self.step_us(ranks, 1.0) / step_us


@dataclass(frozen=True)
class Fitted:
    """A machine fitted to two throughputs without compression: microseconds of a step's compute on
    one GPU, and the link."""

    compute_us: float
    link: Link

    def step_us(self, model: TensorParallel, ranks: int, exchange_us: float) -> float:
        """Return the time of compute divided over ranks, then exchanges on the critical path (TACO,
        section 1)."""
        return self.compute_us / ranks + model.exchanges * exchange_us


def fit_step(model: TensorParallel, tflops: Sequence[tuple[int, float]], alpha_us: float) -> Fitted:
    """Solve ``step = compute / ranks + exchanges * (messages * alpha + bytes / rate)`` for compute
    and rate, from two throughputs by ranks."""
    (a, left), (b, right) = (_less_alpha(model, each, alpha_us) for each in tflops)
    sent_a, sent_b = (
        model.exchanges * steps("all_reduce", ranks, model.sum_of(ranks).bytes)[1]
        for ranks in (a, b)
    )
    per_byte = (b * right - a * left) / (b * sent_b - a * sent_a)
    return Fitted(a * (left - sent_a * per_byte), Link(alpha_us, 1 / per_byte / 1e3))


def _less_alpha(
    model: TensorParallel, measured: tuple[int, float], alpha_us: float
) -> tuple[int, float]:
    ranks, tflops = measured
    messages = steps("all_reduce", ranks, 0)[0]
    return ranks, model.step_us(ranks, tflops) - model.exchanges * messages * alpha_us


def taco_gain(
    model: TensorParallel, machine: Fitted, ranks: int, card: Card, spec: str = "two_shot"
) -> float:
    """Return the throughput with fused coding over that without compression."""
    of = model.sum_of(ranks)
    exchange = coded(of, spec, "taco", machine.link, fused(card, "taco"))
    without = machine.step_us(model, ranks, plain(of, machine.link))
    return without / machine.step_us(model, ranks, exchange)


def unfused_gain(
    model: TensorParallel, machine: Fitted, ranks: int, card: Card, *, by_peer: bool = False
) -> float:
    """Return the same with every operator as a separate kernel.

    With ``by_peer``, the data to or from each rank is coded by separate calls.
    """
    of, count = model.sum_of(ranks), count_unfused("taco")
    payload = Payload(model.tokens * model.width, of.width, torch.bfloat16)
    coding = 0.0
    for stage in read_stages(of.kind, "two_shot", "taco", payload, request_of(of)):
        if stage.role in ("encode", "decode"):
            rows = max(1, round(ranks * stage.values / payload.numel)) if by_peer else 1
            coding += count.time_us(stage.role, stage.values, halved(card), rows)
    exchange = coded(of, "two_shot", "taco", machine.link, FREE) + coding
    without = machine.step_us(model, ranks, plain(of, machine.link))
    return without / machine.step_us(model, ranks, exchange)
