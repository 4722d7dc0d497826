"""Run one step of the user's model repeatedly without side effects.

Each run has the same inputs, random numbers and buffers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from commpass.calibration.probes import square
from commpass.errors import CalibrationError

Loss = Callable[..., Tensor]


@dataclass
class Step:
    """A model that is compiled with probes, and its measured output.

    That is the gradients of parameters, or the model's output. ``weights`` has, by parameter, one
    over the number of ranks that hold the same one. ``summed`` says that the last run had no loss,
    neither from ``loss`` nor as the model's only output, and took the sum of the output instead.
    """

    model: Any
    original: Any
    parameters: dict[str, Tensor]
    loss: Loss | None
    train: bool
    weights: dict[str, float] = field(default_factory=dict)
    summed: bool = False

    def run(self, batch: tuple[Any, ...]) -> tuple[float | None, dict[str, Tensor]]:
        """Return the loss (None for inference) and the output of one step on this rank, by name."""
        batch = tree_map_only(Tensor, _copied, batch)
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
            return float(_local(loss)), {name: _full_gradient(each) for name, each in found.items()}

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
        self.summed = self.loss is None and (len(leaves) > 1 or leaves[0].dim() > 0)
        sums = [each if each.dim() == 0 else each.sum() for each in leaves]
        return sums[0] if len(sums) == 1 else torch.stack([each.float() for each in sums]).sum()

    def squares(self, output: dict[str, Tensor], exact: dict[str, Tensor] | None = None) -> float:
        """Return the sum of squares of an output, or of its difference to another, on this rank.

        Values that several ranks hold alike count once in the sum over ranks.
        """
        total = 0.0
        for name in sorted(output.keys() | (exact or {}).keys()):
            mine = output.get(name)
            other = exact.get(name) if exact is not None else None
            if mine is None or (other is None and exact is not None):
                only = mine if mine is not None else other
                assert only is not None
                total += self._weight(name) * square(_local(only))
                continue
            weight = self._weight(name)
            total += weight * square(_local(mine), _local(other) if other is not None else None)
        return total

    def _weight(self, name: str) -> float:
        if not self.train:
            return 1.0
        return self.weights[name]


def step_of(
    model: Any,
    compiled: Any,
    parameters: Iterable[Tensor] | None,
    loss: Loss | None,
    train: bool,
) -> Step:
    """Return a step. Raise CalibrationError if it is unknown which parameters are trained."""
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
    """Return by name a text that all replicas of a rank's part of a parameter share."""
    return {name: _fingerprint(each) for name, each in parameters.items()}


def _fingerprint(parameter: Tensor) -> str:
    local = _local(parameter)
    values = f"{tuple(local.shape)} {float(local.double().sum())!r} {square(local)!r}"
    if not isinstance(parameter, DTensor):
        return values
    at = parameter.device_mesh.get_coordinate() or ()
    parts = [
        place
        for place, placement in zip(at, parameter.placements, strict=False)
        if not isinstance(placement, Replicate)
    ]
    return f"{values} {parameter.placements} {parts}"


def replicas(own_digests: dict[str, str], every: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return by name one over the number of ranks that hold the same part of a parameter."""
    return {
        name: 1 / sum(other.get(name) == print_ for other in every)
        for name, print_ in own_digests.items()
    }


@contextmanager
def _as_before(model: Any, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Restore gradients, buffers and random numbers afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    trained = [*parameters.values(), *(each for m in modules for each in m.parameters(False))]
    grads = [(each, each.grad) for each in trained]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with _same_random_numbers():
        try:
            for each in trained:
                each.grad = None
            yield
        finally:
            for each, grad in grads:
                each.grad = grad
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random numbers of torch, of Python, and of numpy if it is in use."""
    numpy: Any = sys.modules.get("numpy")
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    own, python = torch.get_rng_state(), random.getstate()
    card = torch.cuda.get_rng_state() if cuda else None
    others = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(own)
        random.setstate(python)
        if card is not None:
            torch.cuda.set_rng_state(card)
        if others is not None:
            numpy.random.set_state(others)


def _copied(value: Tensor) -> Tensor:
    """Copy a tensor that a model may change, or that may get a gradient."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _local(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _full_gradient(value: Tensor) -> Tensor:
    """Return a gradient without partial sums."""
    if isinstance(value, DTensor) and any(isinstance(each, Partial) for each in value.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
        return value.redistribute(placements=placements).detach()
    return value.detach()
