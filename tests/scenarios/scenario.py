"""What a scenario says of itself, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import commpass

Results = dict[str, Tensor]
"""What a rank found, by name; the part before the first "/" says how it is compared:

``loss``, ``out``: made by forward; under a policy for backward alone they are those of plain torch.
``grad``: gradients, as ``grad/<step>/<parameter>``.
``exact``: no collective on the way may be compressed: equal, but for rounding, under every policy.
``residual``: what error feedback holds back on this rank in the end.
"""


@dataclass(frozen=True)
class Job:
    """How a scenario compiles and learns: with torch's backend or commpass's, at rate ``lr``."""

    backend: Any
    lr: float

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def compile(self, target: Any, **options: Any) -> Any:
        return torch.compile(target, backend=self.backend, **options)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training set-up.

    run: trains for two or three steps on this rank. Same seeds, same numbers.
    ranks: how many it needs.
    sites: how many sites of its plans are compressed on each rank, at least, with int8 forced.
    pays: some are, where the cost model decides, on a slow link.
    gradients: how many are, at least, where topk is forced in backward. With 0 all must be exact.
    conserved: gradients are sums over ranks and nothing comes after: topk holds back what lacks.
    replicated: beginnings of the names of results that must be the same bits on all ranks.
    rules: what the user also says, under every policy.
    growth: how many times a codec's own relative error the results may be off.
    rounding: relative error where only the order of a sum may differ.
    differ: what ranks want to change differs, so commpass may leave a graph as it is and say so.
    inductor: it is tried with Inductor, too.
    presets: it is tried under every preset, none of which may lose a bit.
    torch: the first version of torch that has what it needs.
    """

    name: str
    run: Callable[[Job], Results]
    ranks: int = 2
    sites: int = 1
    pays: bool = True
    gradients: int = 0
    conserved: bool = False
    replicated: tuple[str, ...] = ()
    rules: tuple[commpass.Rule, ...] = ()
    growth: float = 6.0
    rounding: float = 1e-5
    differ: bool = False
    inductor: bool = False
    presets: bool = False
    torch: tuple[int, int] = (2, 11)


def random(rows: int, width: int, seed: int) -> Tensor:
    """``[rows, width]`` of a Gaussian; the same for the same seed on every rank."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def batches(rank: int, rows: int, width: int, steps: int = 3) -> list[Tensor]:
    """A rank's own data, one tensor ``[rows, width]`` a step."""
    return [random(rows, width, 1000 * rank + step) for step in range(steps)]


def train(
    job: Job,
    model: nn.Module,
    data: Iterable[Tensor],
    forward: Callable[[Tensor], Tensor] | None = None,
    first: int = 0,
) -> Results:
    """Steps of SGD on the mean square of what ``forward`` gives (the compiled model if None).

    ``data`` has a batch for each step; steps are numbered from ``first``.
    """
    found: Results = {}
    forward = job.compile(model) if forward is None else forward
    learn = torch.optim.SGD(model.parameters(), job.lr, foreach=False)
    for step, batch in enumerate(data, start=first):
        out = forward(batch)
        loss = local(out).float().square().mean()
        loss.backward()
        found[f"loss/{step}"] = loss.detach()
        found[f"out/{step}"] = local(out).detach().clone()
        found |= gradients(model, step)
        learn.step()
        learn.zero_grad()
    return found | residual(model)


def gradients(model: nn.Module, step: int) -> Results:
    """This rank's part of each gradient."""
    return {
        f"grad/{step}/{name}": local(weight.grad).clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def residual(model: nn.Module) -> Results:
    """What error feedback holds back of a model now: one row of numbers, in the order of names."""
    kept = [tensor.double().reshape(-1) for _, tensor in sorted(commpass.state_dict(model).items())]
    return {"residual": torch.cat(kept)} if kept else {}


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
