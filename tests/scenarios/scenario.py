"""Define what a scenario consists of, and what it gets."""

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
"""What a rank found, by name; the part before the first "/" determines how it is compared:

- ``loss``, ``out``: computed by forward; under a policy for backward only, equal to plain torch.
- ``grad``: gradients, as ``grad/<step>/<parameter>``.
- ``exact``: no collective on its path may be compressed: equal, except for rounding, under every
  policy.
- ``residual``: what error feedback holds back on this rank at the end.
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

    - run: trains for two to six steps on this rank. The same seeds give the same numbers.
    - ranks: the number of ranks.
    - sites: the least number of compressed sites on each rank, with int8 forced.
    - pays: whether the cost model compresses some sites on a slow link.
    - gradients: the least number of compressed sites with topk forced in backward. If 0, all must
      be exact.
    - conserved: gradients are sums over ranks without later steps: topk holds back what is missing.
    - replicated: prefixes of the names of results that must have the same bits on all ranks.
    - rules: rules that are added to every policy.
    - growth: the allowed error of the results, as a multiple of the codec's relative error.
    - rounding: the allowed relative error if only the order of a sum may differ.
    - differ: the ranks propose different changes, so that commpass may fall back, with a warning.
    - inductor: also run with Inductor.
    - presets: also run under every preset, none of which may change a bit.
    - torch: the first supported version of torch.
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
    """Return ``[rows, width]`` Gaussian values; the same seed gives the same values on every
    rank."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def batches(rank: int, rows: int, width: int, steps: int = 3) -> list[Tensor]:
    """Return a rank's own data, one tensor ``[rows, width]`` per step."""
    return [random(rows, width, 1000 * rank + step) for step in range(steps)]


def train(
    job: Job,
    model: nn.Module,
    data: Iterable[Tensor],
    forward: Callable[[Tensor], Tensor] | None = None,
    first: int = 0,
) -> Results:
    """Run steps of SGD on the mean square of the output of ``forward`` (the compiled model if
    None).

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
    """Return this rank's part of each gradient."""
    return {
        f"grad/{step}/{name}": local(weight.grad).clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def residual(model: nn.Module) -> Results:
    """Return what error feedback currently holds back of a model: one row of numbers, ordered by
    name."""
    kept = [tensor.double().reshape(-1) for _, tensor in sorted(commpass.state_dict(model).items())]
    return {"residual": torch.cat(kept)} if kept else {}


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
