"""The plan of each step, equal on all ranks and verified to be (law 5).

Times are measured in the first steps. A plan is made when the density changes.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commpass.costmodel import Link
from commpass.costmodel.buffers import Gradient
from commpass.distributed import step_log
from commpass.distributed.processors import processors_each
from commpass.errors import PlanMismatch
from commpass.parallel.ssfusion import measure, recording
from commpass.parallel.ssfusion.messages import Part
from commpass.parallel.ssfusion.options import Options
from commpass.parallel.ssfusion.plan import FusionPlan, Message, Sent, make, unmeasured
from commpass.plan import Plan

UNSEEN = "what one step leaves out, later ones send"


@dataclass(frozen=True)
class Weight:
    """A parameter that requires a gradient, with its name."""

    name: str
    parameter: nn.Parameter


@dataclass
class Planner:
    """Measure and plan the exchange of a model's gradients.

    ``weights`` are in the order of backward: at first the reverse of the model's, then as measured.
    ``group`` is the user's; ``channel`` is a separate group of the same ranks. ``link`` is None
    until it is measured, and ``profile`` is its name. ``dump`` is the folder for plans.
    ``overhead_s`` is the time that measuring and planning took. ``recorded`` is the plan of the
    last step.
    """

    weights: list[Weight]
    options: Options
    group: dist.ProcessGroup
    channel: dist.ProcessGroup
    device: torch.device
    link: Link | None
    profile: str = "measured"
    dump: Path | None = None
    overhead_s: float = 0.0
    measured: bool = False
    recorded: Plan | None = None
    _select: measure.Rate | None = None
    _offload: measure.Rate | None = None
    _sparse: measure.Rate | None = None
    _exchanges: measure.ExchangeTimes = field(
        default_factory=lambda: measure.ExchangeTimes(Link(0.0, 1.0))
    )
    _backward_us: list[float] = field(default_factory=list)
    _plans: dict[float, tuple[FusionPlan, Plan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = measure.Clock(self.device)
        self.step_log = step_log.open_log("ssfusion")

    def measures(self, step: int) -> bool:
        """Return whether a step is measured."""
        return step < self.options.profile_steps

    def plan_at(self, step: int) -> FusionPlan:
        """Return the plan of a step: the same object while the plan does not change.

        All ranks call it before the step's first message.
        """
        density = 1.0 if self.measures(step) else self.options.at(step).density
        if density not in self._plans or (not self.measured and not self.measures(step)):
            begun = time.perf_counter()
            if self.measures(step):
                plan = unmeasured(self.gradients())
            else:
                if not self.measured:
                    self._measure()
                plan = self._new_plan(step)
            agree(self.channel, plan, "fusion plans", "the same profile and options")
            self._plans[density] = plan, self._record(plan)
            self.overhead_s += time.perf_counter() - begun
        plan, self.recorded = self._plans[density]
        return plan

    def gradients(self) -> list[Gradient]:
        """Return what is known of each gradient."""
        found = []
        for number, each in enumerate(self.weights):
            entries = each.parameter.numel()
            backward = self._backward_us[number] if self._backward_us else 0.0
            rates = (self._select, self._offload, self._sparse)
            select, offload, sparse = (rate.of(entries) if rate else 0.0 for rate in rates)
            found.append(
                Gradient(
                    each.name,
                    entries,
                    each.parameter.dtype.itemsize,
                    backward,
                    select,
                    offload,
                    max(0.0, sparse - select),
                )
            )
        return found

    def part(self, sent: Sent) -> Part:
        """Return what is sent of a gradient, as part of a message."""
        parameter = self.weights[sent.number].parameter
        selector = None if sent.dense else self.options.selector_at(sent.density)
        return Part(parameter.numel(), parameter.dtype, selector)

    def parts(self, message: Message) -> list[Part]:
        return [self.part(each) for each in message.sent]

    def _new_plan(self, step: int) -> FusionPlan:
        assert self.link is not None
        gradients = self.gradients()
        itemsize = max(each.itemsize for each in gradients)
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]

        def row_bytes(entries: int, density: float) -> int:
            return self.options.selector_at(density).wire_bytes(entries, dtype)

        settings = self.options.at(step)
        known = (self.channel.size(), self.link, row_bytes, settings)
        return make(gradients, *known, self._exchanges.overhead_us)

    def _measure(self) -> None:
        """Measure, and combine the results so that all ranks plan alike.

        Times of backward and selection are the mean over ranks. The order is that of rank 0, and
        the link that of the slowest rank.
        """
        order: list[Any] = [self.clock.order()]
        dist.broadcast_object_list(order, dist.get_global_rank(self.channel, 0), self.channel)
        full_order = order[0] + sorted(set(range(len(self.weights))) - set(order[0]))
        cores = math.inf if self.device.type == "cuda" else processors_each(self.channel)
        if self.channel.size() > 1:
            self._exchanges = measure.exchanges(self.channel, self.device, cores)
        self.link = self.link or self._exchanges.link
        sizes = [each.parameter.numel() for each in self.weights]
        selector = self.options.selector_at(self.options.settings.density)
        dtype = self.weights[0].parameter.dtype
        what = (selector, sizes, dtype, self.device, self.channel, cores)
        rates = [
            measure.selection(*what),
            measure.offloaded_rate(*what),
            measure.sparsifying(*what),
        ]
        us = [
            *self.clock.backward_us(len(sizes), cores),
            *(each for rate in rates for each in rate.us),
        ]
        mean = torch.tensor(us, dtype=torch.float64, device=self.device) / self.channel.size()
        dist.all_reduce(mean, group=self.channel)
        (*backward,) = (round(each, 1) for each in mean[: len(sizes)].tolist())
        means = mean[len(sizes) :].view(len(rates), -1).tolist()
        self._select, self._offload, self._sparse = (
            replace(rate, us=tuple(own)) for rate, own in zip(rates, means, strict=True)
        )
        self.weights = [self.weights[number] for number in full_order]
        self._backward_us = [backward[number] for number in full_order]
        self._plans.clear()
        self.measured = True

    def _record(self, plan: FusionPlan) -> Plan:
        names = [each.name for each in self.weights]
        parts = [self.parts(message) for message in plan.messages]
        link = self.link or Link(0.0, 1.0)
        dense = self.options.dense
        group, device = self.group, self.device
        facts = (group, link, dense, device, self.profile, self.dump)
        made = recording.record_plan(plan, names, parts, *facts)
        self.step_log.replace(made, UNSEEN)
        return made


def agree(group: Any, own_value: Any, subject: str, need: str) -> None:
    """Raise PlanMismatch, on all ranks of a group, if their values are not equal."""
    text = repr(own_value)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * len(digests)
    dist.all_gather_object(texts, text, group=group)
    other = next(rank for rank, each in enumerate(digests) if each != digests[0])
    start = next(
        (i for i, (a, b) in enumerate(zip(texts[0], texts[other], strict=False)) if a != b), 0
    )
    begin = max(start - 40, 0)
    first, second = (each[begin : begin + 120] for each in (texts[0], texts[other]))
    raise PlanMismatch(
        f"the {subject} of rank 0 and rank {other} differ: ...{first}... and ...{second}...; give"
        " all"
        f" ranks {need}"
    )
