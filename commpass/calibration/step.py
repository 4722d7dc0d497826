"""One step of the user's model, as often as it takes: the same inputs, random numbers and buffers
each time, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_leaves

from commpass.calibration.probes import square
from commpass.errors import CalibrationError

Loss = Callable[..., Tensor]


@dataclass
class Step:
    """A model that is compiled with probes, and what its output is: the gradients of parameters,
    or what it gives. ``weights`` are by parameter: one over the ranks that hold the same one."""

    model: Any
    original: Any
    parameters: dict[str, Tensor]
    loss: Loss | None
    train: bool
    weights: dict[str, float] = field(default_factory=dict)

    def run(self, batch: tuple[Any, ...]) -> tuple[float | None, dict[str, Tensor]]:
        """The loss (None for inference) and the output of one step on this rank, by name."""
        with _as_before(self.original, self.parameters):
            if not self.train:
                with torch.no_grad():
                    given = self.model(*batch)
                leaves = [each for each in tree_leaves(given) if _is_float(each)]
                if not leaves:
                    raise CalibrationError(
                        "the model gives no tensor of floats: nothing to compare"
                    )
                return None, {str(i): _local(each).clone() for i, each in enumerate(leaves)}
            loss = self._loss(batch)
            loss.backward()
            found = {
                name: each.grad for name, each in self.parameters.items() if each.grad is not None
            }
            if not found:
                raise CalibrationError(
                    "no parameter has a gradient after a step: give the parameters that are"
                    " trained, or calibrate inference (train=False, --inference)"
                )
            return float(_local(loss)), {name: _whole(each) for name, each in found.items()}

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        given = self.model(*batch)
        if self.loss is not None:
            given = self.loss(given, *batch)
        leaves = [each for each in tree_leaves(given) if _is_float(each) and each.requires_grad]
        if not leaves:
            raise CalibrationError(
                "nothing that the model gives needs a gradient: calibrate inference (train=False,"
                " --inference)"
            )
        sums = [each if each.dim() == 0 else each.sum() for each in leaves]
        return sums[0] if len(sums) == 1 else torch.stack([each.float() for each in sums]).sum()

    def squares(self, output: dict[str, Tensor], other: dict[str, Tensor] | None = None) -> float:
        """The sum of squares of an output, or of its difference to another, on this rank; what
        several ranks hold alike counts once in the sum over ranks."""
        total = 0.0
        for name in sorted(output.keys() | (other or {}).keys()):
            mine = output.get(name)
            its = other.get(name) if other is not None else None
            if mine is None or (its is None and other is not None):
                only = mine if mine is not None else its
                assert only is not None
                total += self._weight(name, only) * square(_local(only))
                continue
            weight = self._weight(name, mine)
            total += weight * square(_local(mine), _local(its) if its is not None else None)
        return total

    def _weight(self, name: str, value: Tensor) -> float:
        if not self.train:
            return 1.0
        if not isinstance(value, DTensor):
            return self.weights[name]
        alike = [
            value.device_mesh.size(dim)
            for dim, placement in enumerate(value.placements)
            if isinstance(placement, Replicate)
        ]
        weight = 1.0
        for each in alike:
            weight /= each
        return weight


def step_of(
    model: Any,
    compiled: Any,
    parameters: Iterable[Tensor] | None,
    loss: Loss | None,
    train: bool,
) -> Step:
    """Raises CalibrationError where it is not known which parameters are trained."""
    named: dict[str, Tensor] = {}
    if parameters is not None:
        named = {str(number): each for number, each in enumerate(parameters)}
    elif isinstance(model, nn.Module):
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    elif train:
        raise CalibrationError("model is a function: say parameters=, whose gradients count")
    if train and not named:
        raise CalibrationError("the model has no parameter that needs a gradient")
    return Step(compiled, model, named, loss, train)


def fingerprints(parameters: dict[str, Tensor]) -> dict[str, str]:
    """By name, a text that replicas of a plain parameter share."""
    return {
        name: f"{tuple(each.shape)} {float(each.detach().double().sum())!r} {square(each)!r}"
        for name, each in parameters.items()
        if not isinstance(each, DTensor)
    }


def replicas(own: dict[str, str], every: Sequence[dict[str, str]]) -> dict[str, float]:
    """By name, one over the number of ranks whose parameter of that name is the same."""
    return {
        name: 1 / sum(other.get(name) == print_ for other in every) for name, print_ in own.items()
    }


@contextmanager
def _as_before(model: Any, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Gradients, buffers and random numbers are afterwards what they were."""
    grads = {name: each.grad for name, each in parameters.items()}
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    kept = [each.detach().clone() for each in buffers]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    try:
        for each in parameters.values():
            each.grad = None
        yield
    finally:
        for name, each in parameters.items():
            each.grad = grads[name]
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1])


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _local(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _whole(value: Tensor) -> Tensor:
    """A gradient whose parts are no longer to be summed."""
    if isinstance(value, DTensor) and any(isinstance(each, Partial) for each in value.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
        return value.redistribute(placements=placements).detach()
    return value.detach()
