"""Train with data parallelism and sparse gradients: per tensor, for selected tensors (SSFusion),
and in fused buffers, at two densities.

A byte-level transformer (``examples/common.py``) on two ranks, each with its own batches, learns
English text by SGD with momentum. All seeds train at the same time, each on its own two ranks.
Momentum correction and error feedback are the same in all variants
(``commpass.parallel.ssfusion.memory``), and so is the selector, DGC. A selection from several fused
tensors at once, as other work does it, is not part of commpass; ``Buffers`` implements it here. The
*fusion degree* is the share of tensors, from the last layer on, that are fused into one buffer. The
*missing rate* is the share of tensors of which a rank sends nothing in a step (section III.A).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.claims.experiments.english import english
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.losses import run_of
from commpass.codecs import codec
from commpass.codecs.sparse import SparseCodec
from commpass.parallel import ssfusion
from commpass.parallel.ssfusion.memory import Memory
from commpass.parallel.ssfusion.messages import Part, gather

DP = 2
CPU = torch.device("cpu")
BY_ONE = dict.fromkeys(("fuse", "aware", "interleave", "offload"), False)
DENSE, EACH, SELECTIVE, FUSED = "dense", "each tensor", "selective", "fused"
SELECTORS = ("dgc", "gaussiank", "redsync", "sidco", "randomk")
KIB = (10, 100, 1000, 10_000)
"""Sizes of SSFusion's table III, with its KB read as 1,024 bytes."""


@dataclass(frozen=True)
class Setup:
    """The settings of the trainings.

    A rank's batch is ``sequences`` of 128 bytes. ``degrees`` are the fusion degrees at the first
    density; degree 1 is used at all densities.
    """

    layers: int = 2
    width: int = 64
    sequences: int = 4
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    densities: tuple[float, ...] = (0.01, 0.001)
    degrees: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)
    rate: float = 0.1
    momentum: float = 0.9
    held_out: int = 32
    profile_steps: int = 5
    gbit: float = 0.1


@dataclass
class Buffers:
    """Gradients fused into buffers, each selected from as a whole.

    ``missing`` has the share of tensors of which nothing was sent, and ``busy_s`` the seconds of
    selection, one per step.
    """

    tensors: list[list[nn.Parameter]]
    density: float
    momentum: float
    group: dist.ProcessGroup
    missing: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = [sum(each.numel() for each in some) for some in self.tensors]
        self.memories = [
            Memory(torch.zeros(n), torch.zeros(n) if self.momentum else None, self.momentum)
            for n in sizes
        ]
        self.coder = codec("dgc", density=self.density)
        assert isinstance(self.coder, SparseCodec)
        self.parts = [Part(n, torch.float32, self.coder) for n in sizes]

    def exchange(self) -> None:
        """Replace the gradients by the mean of what all ranks sent."""
        begun, wires, missing = time.perf_counter(), [], 0
        for some, memory, part in zip(self.tensors, self.memories, self.parts, strict=True):
            memory.add(torch.cat([each.grad.flatten() for each in some]))
            wires.append(memory.select(self.coder, part.dtype, CPU))
            missing += not_sent(wires[-1], self.coder, [each.numel() for each in some])
        self.busy_s.append(time.perf_counter() - begun)
        self.missing.append(missing / sum(map(len, self.tensors)))
        means = gather(self.parts, wires, self.group, CPU)
        for some, mean in zip(self.tensors, means, strict=True):
            pieces = mean.split([each.numel() for each in some])
            for each, piece in zip(some, pieces, strict=True):
                each.grad.copy_(piece.view(each.shape))


def not_sent(wire: Tensor, coder: SparseCodec, lengths: Sequence[int]) -> int:
    """Return how many tensors have no entry in a wire ``[1, bytes]``.

    The tensors have the given ``lengths`` and lie one after the other in a row.
    """
    numel = sum(lengths)
    indices, _ = coder.decode_sparse(wire, numel, torch.float32)
    used = indices[indices < numel]
    ends = torch.tensor(lengths).cumsum(0)
    return len(lengths) - len(torch.searchsorted(ends, used, right=True).unique())


def buffers_of(model: nn.Module, degree: float) -> list[list[nn.Parameter]]:
    """Return the buffers: one for the share ``degree`` of the tensors, from the last one on, and
    one for each other tensor."""
    tensors = list(model.parameters())[::-1]
    fused = round(degree * len(tensors))
    first = [tensors[:fused]] if fused else []
    return first + [[each] for each in tensors[fused:]]


def run() -> dict[str, Any]:
    return trained(Setup())


def trained(setup: Setup) -> dict[str, Any]:
    """Return the results of each variant, and the time of a selection."""
    ways: dict[str, Any] = {}
    ranks = Ranks(DP * len(setup.seeds))
    try:
        for name, way, density, degree in jobs(setup):
            rows = ranks.run(train, way, density, degree, setup, timeout=3600)
            ways[name] = {"density": density, "runs": runs_of(rows)}
    finally:
        ranks.stop()
    return {"dp": DP, "setup": vars(setup), "ways": ways, "select_us": select_us()}


def jobs(setup: Setup) -> list[tuple[str, str, float, float]]:
    """Return name, variant, density and fusion degree of all trainings."""
    found = [(DENSE, DENSE, 1.0, 0.0)]
    for density in setup.densities:
        found += [(f"{way}, {density:g}", way, density, 1.0) for way in (EACH, SELECTIVE, FUSED)]
    first = setup.densities[0]
    return found + [(f"degree {degree:g}", FUSED, first, degree) for degree in setup.degrees]


def runs_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the run of each seed, from the results of all ranks."""
    return [mean_of(rows[start : start + DP]) for start in range(0, len(rows), DP)]


def mean_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first rank's result, with means over the ranks of the entries that differ."""
    means = {
        key: fmean(each[key] for each in found)
        for key in ("missing", "busy_share", "overhead_s", "took_s")
        if key in found[0]
    }
    return found[0] | means


def train(way: str, density: float, degree: float, setup: Setup) -> dict[str, Any]:
    """Return the run of a rank's seed."""
    import common

    mesh = init_device_mesh("cpu", (len(setup.seeds), DP), mesh_dim_names=("seed", "dp"))
    seed, group = setup.seeds[mesh["seed"].get_local_rank()], mesh["dp"].get_group()
    torch.manual_seed(seed)
    model = common.Transformer(setup.layers, setup.width)
    momentum = setup.momentum if way == DENSE else 0.0
    learn = torch.optim.SGD(model.parameters(), lr=setup.rate, momentum=momentum)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(learn, setup.steps, setup.rate / 10)
    buffers = handle = None
    if way == FUSED:
        buffers = Buffers(buffers_of(model, degree), density, setup.momentum, group)
    elif way != DENSE:
        handle = ssfusion(
            model,
            density=density,
            momentum=setup.momentum,
            profile=f"ethernet-{setup.gbit:g}g",
            profile_steps=setup.profile_steps,
            force=True,
            group=group,
            **(BY_ONE if way == EACH else {}),
        )
    text, losses = english(), []
    begun = time.perf_counter()
    for batch in common.batches(text.train, setup.steps, seed, group.rank()):
        loss = model(batch[: setup.sequences])
        loss.backward()
        if buffers is not None:
            buffers.exchange()
        elif way == DENSE:
            reduce_all(model, group)
        learn.step()
        learn.zero_grad()
        slower.step()
        losses.append(loss.item())
    took = time.perf_counter() - begun
    unseen = common.batches(text.validation, setup.held_out, 0)
    with torch.no_grad():
        held_out = fmean(model(batch[: setup.sequences]).item() for batch in unseen)
    found = run_of(seed, losses, held_out) | {"took_s": took}
    if buffers is not None:
        found["missing"] = fmean(buffers.missing)
        found["busy_share"] = sum(buffers.busy_s) / took
    if handle is not None:
        found |= facts_of(handle)
        handle.remove()
    return found


def facts_of(handle: Any) -> dict[str, Any]:
    """Return what is stored of SSFusion's plan. A tensor is missing if the plan has no message for
    it."""
    plan, count = handle.plan, len(handle.names)
    sent = {each.number for message in plan.messages for each in message.sent}
    return {
        "missing": 1 - len(sent) / count,
        "overhead_s": handle.overhead_s,
        "tensors": count,
        "sparse": len(plan.sparse),
        "buffers": len(plan.buffers),
        "density": min((each.density for each in plan.sparse), default=1.0),
    }


def reduce_all(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace the gradients by their means over the ranks, in one exchange."""
    gradients = [each.grad for each in model.parameters()]
    flat = torch.cat([each.flatten() for each in gradients]) / group.size()
    dist.all_reduce(flat, group=group)
    pieces = flat.split([each.numel() for each in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view(gradient.shape))


def select_us(repeats: int = 9) -> dict[str, dict[str, float]]:
    """Return the median processor time, in microseconds, in which one thread selects 1 % of a
    Gaussian of some KiB, by selector."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name in SELECTORS:
        coder = codec(name, density=0.01)
        assert isinstance(coder, SparseCodec)
        for kib in KIB:
            row = torch.randn(1, 256 * kib, generator=torch.Generator().manual_seed(kib))
            took = []
            for _ in range(repeats):
                begun = time.thread_time()
                coder.encode_eagerly(row)
                took.append(1e6 * (time.thread_time() - begun))
            found.setdefault(name, {})[str(kib)] = round(median(took), 1)
    return found


SSFUSION_TRAINING = Experiment(
    "ssfusion_training", "losses of data-parallel training with sparse gradients", 12, run
)
