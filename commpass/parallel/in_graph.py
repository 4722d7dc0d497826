"""Data parallelism inside the compiled graph: parameters are distributed, and whoever reads one
gets the whole of it by collectives that torch.compile sees.

As in SimpleFSDP (Zhang et al. 2024, arXiv 2411.00284), a module's class becomes a subclass on which
each parameter is a property. ``parameters()`` and ``state_dict()`` do not go through it: they have
the distributed parameters, under their own names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from commpass.errors import ParallelError
from commpass.parallel import layout
from commpass.parallel.exchange import Exchange, Exchanged, Kept, gathered

HELD = "_commpass_held"
"""The attribute of a module that says how its parameters are exchanged."""


@dataclass(frozen=True)
class Inner:
    """What modules had before: a DTensor over the other dimensions of the mesh."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class Held:
    """One parameter, however many modules have it: how it is exchanged, and what is accumulated.

    While ``accumulating``, gradients go to ``leaf``, which takes no memory, and from there to
    ``pending``.
    """

    how: Exchange
    inner: Inner | None
    keep_gathered: bool
    accumulating: bool = False
    as_it_is: bool = False
    leaf: Tensor | None = None
    pending: Tensor | None = None


def replicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_op: str = "avg",
) -> nn.Module:
    """Makes a model data-parallel inside the graph: each rank has all parameters, and backward has
    an all_reduce for each gradient.

    ``mesh`` has one dimension, or ``dim`` names it. Parameters become DTensors on it: in place, and
    with the values of the first rank. A model that is tensor-parallel over another dimension of the
    same mesh stays so. ``param_dtype`` is what modules compute with, ``reduce_dtype`` what gradients
    are reduced in (``param_dtype``, if not said); gradients end in the parameter's own dtype.
    ``reduce_op`` is "avg" or "sum". Returns the model. Raises ParallelError for a model, mesh or
    parameter of which this cannot be made, before anything is changed.
    """
    return _distribute(model, mesh, dim, False, param_dtype, reduce_dtype, reduce_op, True)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_op: str = "avg",
    keep_gathered: bool = True,
) -> nn.Module:
    """Makes a model sharded-data-parallel inside the graph: each rank has a part of the rows of
    each parameter, gathered where it is used, and backward has a reduce_scatter for each gradient.

    Parameters without rows (of no dimension, or empty) are replicated. With ``keep_gathered`` the
    gathered parameters are kept from forward to backward, as torch's partitioner does by itself:
    the fewest bytes sent. Without, backward gathers again what it needs. The other arguments and
    errors are those of ``replicate``; parameters travel in ``param_dtype``.
    """
    return _distribute(model, mesh, dim, True, param_dtype, reduce_dtype, reduce_op, keep_gathered)


def _distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    dim: str | None,
    sharded: bool,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reduce_op: str,
    keep_gathered: bool,
) -> nn.Module:
    outer = layout.one_dimension(mesh, dim)
    parameters = dict(model.named_parameters())
    _check(model, parameters, outer)
    for what, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not dtype.is_floating_point:
            raise ParallelError(f"{what}={dtype}: must be a floating-point dtype")
    if reduce_op not in ("avg", "sum"):
        raise ParallelError(f"reduce_op={reduce_op!r}: must be 'avg' or 'sum'")
    inner = {one.device_mesh for one in parameters.values() if isinstance(one, DTensor)}
    around = {mesh: layout.around(outer, mesh) for mesh in inner}
    layout.check_alike(parameters, outer)
    layout.equalize(parameters.values(), outer)
    # Plain parameters go onto the mesh of the others: norms of gradients on two do not add up.
    plain = next(iter(around.values())) if len(around) == 1 else outer
    made: dict[int, tuple[nn.Parameter, Held]] = {}
    for parameter in parameters.values():
        floating = parameter.is_floating_point()
        held = _held(
            parameter,
            outer,
            sharded,
            param_dtype if floating and param_dtype else parameter.dtype,
            reduce_dtype if floating else None,
            reduce_op,
            keep_gathered,
        )
        whole = around[parameter.device_mesh] if isinstance(parameter, DTensor) else plain
        placed = layout.placed(parameter, outer, whole, held.how.sharded)
        made[id(parameter)] = nn.Parameter(placed, parameter.requires_grad), held
    for module in list(model.modules()):
        own = {name: made[id(one)] for name, one in module._parameters.items() if one is not None}
        if own:
            module._parameters.update({name: new for name, (new, _) in own.items()})
            module.__dict__[HELD] = {name: held for name, (_, held) in own.items()}
            module.__class__ = _reading(type(module), tuple(own))
    return model


def _held(
    parameter: nn.Parameter,
    outer: DeviceMesh,
    sharded: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    op: str,
    keep_gathered: bool,
) -> Held:
    local, inner = parameter.detach(), None
    if isinstance(local, DTensor):
        inner = Inner(local.device_mesh, local.placements, local.shape, local.stride())
        local = local.to_local()
    how = Exchange(
        group=outer.get_group().group_name,
        rank=outer.get_local_rank(),
        size=outer.size(),
        sharded=sharded and local.dim() > 0 and local.numel() > 0,
        shape=tuple(local.shape),
        dtype=parameter.dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype or param_dtype,
        op=op,
    )
    return Held(how, inner, keep_gathered or not how.sharded)


def _check(model: nn.Module, parameters: dict[str, nn.Parameter], outer: DeviceMesh) -> None:
    """Raises ParallelError for a model that cannot be made parallel."""
    if not isinstance(model, nn.Module):
        raise ParallelError(f"model is {type(model).__name__}, but must be a torch.nn.Module")
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if HELD in module.__dict__:
            raise ParallelError(
                f"{where} is data-parallel already, by replicate or shard, and cannot be so over"
                f" {layout.name_of(outer)} again: call one of them, once, with the whole model"
            )
        if isinstance(module, nn.RNNBase):
            raise ParallelError(
                f"{where} takes its parameters from a list of its own, not by name: torch.compile"
                " leaves it out of graphs as well. Use fully_shard or DistributedDataParallel"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ParallelError(f"{where} is TorchScript, whose parameters cannot be exchanged")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ParallelError(
                f"{name} is {parameter.dtype}, which is not exchanged: keep its real and imaginary"
                " part, as torch.view_as_real gives them"
            )
        if parameter.device.type not in (outer.device_type, "meta"):
            raise ParallelError(
                f"{name} is on {parameter.device}, but the mesh is of {outer.device_type}: move the"
                f" model first, as in model.to({outer.device_type!r})"
            )


@functools.cache
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass on which these parameters are read whole. Instances share it, and so what is
    compiled of it."""

    def read(name: str) -> property:
        return property(lambda module: _whole(module, name))

    members = {name: read(name) for name in names} | {"__module__": kind.__module__}
    return type(f"Parallel{kind.__name__}", (kind,), members)


def _whole(module: nn.Module, name: str) -> Tensor:
    """What a module sees of a parameter."""
    parameter, held = module._parameters[name], module.__dict__[HELD][name]
    if held.as_it_is or parameter is None:
        return parameter
    if not isinstance(parameter, DTensor):
        raise ParallelError(
            f"{name} of {type(module).__name__} was replaced by a {type(parameter).__name__} after"
            " the model was made data-parallel: change its values, as load_state_dict does"
        )
    if held.keep_gathered or not torch.is_grad_enabled():
        whole = _read(parameter.to_local(), held)
    else:  # backward runs it again
        whole = checkpoint(_read, parameter.to_local(), held, use_reentrant=False)
    inner = held.inner
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


def _read(part: Tensor, held: Held) -> Tensor:
    if held.accumulating and held.leaf is not None and part.requires_grad:
        return Kept.apply(gathered(part.detach(), held.how), held.leaf)
    return Exchanged.apply(part, held.pending, held.how)


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Gradients of what the model computes in here stay on their rank, and are exchanged with those
    of the next backward outside: all micro-batches but the last are run in here, forward and
    backward, as in ``no_sync`` of DistributedDataParallel.

    They are kept in ``reduce_dtype``, in memory of the size of the gathered parameters, which is
    used again in later steps; ``drop_accumulated`` gives it back. A parameter that the last
    micro-batch does not use sends what it has with the next one that does. Raises ParallelError for
    a model that ``replicate`` and ``shard`` have not seen.
    """
    held = [one for one, parameter in _all(model) if parameter.requires_grad]
    before = [one.accumulating for one in held]
    for one in held:
        if one.leaf is None:
            _make_room(one, next(p for o, p in _all(model) if o is one))
        one.accumulating = True
    try:
        yield
    finally:
        for one, was in zip(held, before, strict=True):
            one.accumulating = was


def _make_room(held: Held, parameter: Tensor) -> None:
    shape, dtype = held.how.shape, held.how.reduce_dtype
    device = parameter.device
    held.leaf = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
    held.pending = torch.zeros(shape, dtype=dtype, device=device)

    def add(leaf: Tensor) -> None:
        # A forward that is under way may hold it: backward takes what is there by then.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(held.pending):
            held.pending.add_(leaf.grad)
        leaf.grad = None

    held.leaf.register_post_accumulate_grad_hook(add)


def drop_accumulated(model: nn.Module) -> None:
    """Forgets what ``accumulate`` kept and was not exchanged yet, as ``zero_grad`` does with
    gradients, and gives its memory back."""
    for held, _ in _all(model):
        held.leaf = held.pending = None


@contextmanager
def distributed_parameters(model: nn.Module) -> Iterator[None]:
    """In here modules see their parameters as they are, DTensors, as to fill them in place: what a
    module sees otherwise is a copy."""
    held = [one for one, _ in _all(model)]
    for one in held:
        one.as_it_is = True
    try:
        yield
    finally:
        for one in held:
            one.as_it_is = False


def _all(model: nn.Module) -> Iterable[tuple[Held, nn.Parameter]]:
    """Each parameter of a model once. Raises ParallelError if it is not data-parallel."""
    found = {
        id(held): (held, parameter)
        for module in model.modules()
        for name, held in module.__dict__.get(HELD, {}).items()
        if (parameter := module._parameters[name]) is not None
    }
    if not found:
        raise ParallelError(
            f"{type(model).__name__} is not data-parallel in the graph: call"
            " commpass.parallel.replicate(model, mesh) or commpass.parallel.shard(model, mesh)"
        )
    return found.values()
