"""Let modules read a parameter as a full tensor, by the collective that gathers it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from commpass.errors import ParallelError
from commpass.parallel.in_graph.traced import Exchanged, LocalGradient, ParameterSpec, gather
from commpass.utils.keywords import named_arguments

EXCHANGED = "_commpass_exchanged"
"""The attribute of a module that records how its parameters are exchanged."""


@dataclass(frozen=True)
class Inner:
    """The parameter's previous form: a DTensor over the other dimensions of the mesh."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class ExchangedParameter:
    """How one parameter is exchanged, and its accumulated gradient; modules that share it share
    this.

    While ``accumulating``, gradients go to ``leaf``, which takes no memory, and from there to
    ``pending``.
    """

    how: ParameterSpec
    inner: Inner | None
    keep_gathered: bool
    accumulating: bool = False
    reads_dtensor: bool = False
    leaf: Tensor | None = None
    pending: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExchangedParameter:
        """Copy for a copy of the model, without the accumulated gradient."""
        return memo.setdefault(
            id(self), ExchangedParameter(self.how, self.inner, self.keep_gathered)
        )


@functools.cache
def reading_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass on which these parameters are read in full.

    Instances share it, and therefore its compiled code.
    """

    def read(name: str) -> property:
        return property(lambda module: _full_parameter(module, name))

    members = {name: read(name) for name in names} | {"register_parameter": _register}
    return type(f"Parallel{kind.__name__}", (kind,), members | {"__module__": kind.__module__})


def _register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Register a parameter as ``nn.Module`` does, if the module had it when it was made
    parallel."""
    if name not in module.__dict__[EXCHANGED]:
        raise ParallelError(
            f"{name} of {type(module).__name__} is added after the model was made data-parallel,"
            " and its gradient would not be exchanged: add it before"
        )
    nn.Module.register_parameter(module, name, parameter)


def _full_parameter(module: nn.Module, name: str) -> Tensor:
    """Return what a module sees of a parameter."""
    parameter, exchanged = module._parameters[name], module.__dict__[EXCHANGED][name]
    if exchanged.reads_dtensor and parameter is not None:
        return parameter
    if not isinstance(parameter, DTensor):
        raise ParallelError(
            f"{name} of {type(module).__name__} was replaced by a {type(parameter).__name__} after"
            " the model was made data-parallel: change its values, as load_state_dict does"
        )
    if parameter.dtype != exchanged.how.dtype:
        raise ParallelError(
            f"{name} of {type(module).__name__} became {parameter.dtype} after the model was made"
            f" data-parallel with {exchanged.how.dtype}: change dtypes before, as in model.to(...),"
            " or compute in another one by param_dtype="
        )
    if exchanged.keep_gathered or not torch.is_grad_enabled():
        whole = _read(parameter.to_local(), exchanged)
    else:  # backward runs it again
        whole = checkpoint(_read, parameter.to_local(), exchanged, use_reentrant=False)
    inner = exchanged.inner
    if inner is None:
        return whole
    return DTensor.from_local(
        whole,
        inner.mesh,
        inner.placements,
        run_check=False,
        shape=inner.shape,
        stride=inner.stride,
    )


def _read(part: Tensor, parameter: ExchangedParameter) -> Tensor:
    if parameter.accumulating and parameter.leaf is not None and part.requires_grad:
        return LocalGradient.apply(gather(part.detach(), parameter.how), parameter.leaf)
    return Exchanged.apply(part, parameter.pending, parameter.how)


def exchanged_parameters(model: nn.Module) -> Collection[tuple[ExchangedParameter, nn.Parameter]]:
    """Return each parameter of a model once. Raise ParallelError if it is not data-parallel."""
    found = {
        id(exchanged): (exchanged, parameter)
        for module in model.modules()
        for name, exchanged in module.__dict__.get(EXCHANGED, {}).items()
        if (parameter := module._parameters[name]) is not None
    }
    if not found:
        raise ParallelError(
            f"{type(model).__name__} is not data-parallel in the graph: call"
            " commpass.parallel.replicate(model, mesh) or commpass.parallel.shard(model, mesh)"
        )
    return found.values()


@named_arguments
@contextmanager
def distributed_parameters(model: nn.Module) -> Iterator[None]:
    """Let modules see their parameters as DTensors in this context, for example to fill them in
    place.

    Otherwise a module sees a copy.

    Args:
        model: a model that was passed to ``replicate`` or ``shard``.
    """
    exchanged = [one for one, _ in exchanged_parameters(model)]
    for one in exchanged:
        one.reads_dtensor = True
    try:
        yield
    finally:
        for one in exchanged:
            one.reads_dtensor = False
