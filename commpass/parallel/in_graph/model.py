"""Data parallelism inside the compiled graph: ``replicate`` and ``shard``.

Parameters are distributed. A module that reads one gets the full tensor by collectives that
torch.compile sees. As in SimpleFSDP (Zhang et al. 2024, arXiv 2411.00284), a module's class becomes
a subclass on which each parameter is a property. ``parameters()`` and ``state_dict()`` bypass it:
they return the distributed parameters, under their own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from commpass.distributed.integration import TWICE
from commpass.errors import ParallelError, nearest
from commpass.parallel.in_graph import layout
from commpass.parallel.in_graph.reading import EXCHANGED, ExchangedParameter, Inner, reading_class
from commpass.parallel.in_graph.traced import ParameterSpec
from commpass.parallel.refusals import wrong_argument
from commpass.utils.keywords import named_arguments


@dataclass(frozen=True)
class Terms:
    """The user's arguments, which apply to all parameters."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reduce_op: str
    keep_gathered: bool = True

    def check(self) -> None:
        for what in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, what)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ParallelError(
                    f"{what}={dtype!r}: must be a floating-point dtype, such as torch.bfloat16"
                )
        if self.reduce_op not in ("avg", "sum"):
            raise ParallelError(
                f"reduce_op={self.reduce_op!r}" + nearest(str(self.reduce_op), ("avg", "sum"))
            )


@named_arguments
def replicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    reduce_op: str = "avg",
) -> nn.Module:
    """Make a model data-parallel inside the graph. Return the model.

    Each rank has all parameters, and backward has an all_reduce for each gradient. A model that is
    tensor-parallel over another dimension of the same mesh stays so.

    Args:
        model: the model. Its parameters become DTensors in place, with the values of the first
            rank.
        mesh: a mesh of one dimension, or of several if ``dim`` names one.
        dim: the name of the mesh dimension; None if there is only one.
        param_dtype: the dtype of computation, in which parameters also travel; None for their own.
        reduce_dtype: the dtype in which gradients are reduced; None for ``param_dtype``. They end
            in the parameter's own dtype.
        cast_forward_inputs: whether the model's floating-point inputs are cast to ``param_dtype``.
        reduce_op: ``"avg"`` or ``"sum"`` of the gradients over the ranks.

    Raise ParallelError for an unsupported model, mesh or parameter, before anything is changed.
    """
    terms = Terms(param_dtype, reduce_dtype, reduce_op)
    return _distribute(model, mesh, dim, False, terms, cast_forward_inputs)


@named_arguments
def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    reduce_op: str = "avg",
    keep_gathered: bool = True,
) -> nn.Module:
    """Make a model sharded-data-parallel inside the graph. Return the model.

    Each rank has a part of the rows of each parameter, gathered where it is used, and backward has
    a reduce_scatter for each gradient. Parameters without rows to divide (of no dimension, of one
    row, or empty) are replicated.

    Args:
        model: the model. Its parameters become DTensors in place, with the values of the first
            rank.
        mesh: a mesh of one dimension, or of several if ``dim`` names one.
        dim: the name of the mesh dimension; None if there is only one.
        param_dtype: the dtype of computation, in which parameters also travel; None for their own.
        reduce_dtype: the dtype in which gradients are reduced; None for ``param_dtype``. They end
            in the parameter's own dtype.
        cast_forward_inputs: whether the model's floating-point inputs are cast to ``param_dtype``.
        reduce_op: ``"avg"`` or ``"sum"`` of the gradients over the ranks.
        keep_gathered: whether gathered parameters are kept from forward to backward. This is the
            default of torch's partitioner and sends the fewest bytes. If False, backward gathers
            again what it needs.

    Raise ParallelError for an unsupported model, mesh or parameter, before anything is changed.
    """
    terms = Terms(param_dtype, reduce_dtype, reduce_op, keep_gathered)
    return _distribute(model, mesh, dim, True, terms, cast_forward_inputs)


def _distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    dim: str | None,
    sharded: bool,
    terms: Terms,
    cast: bool,
) -> nn.Module:
    outer = layout.one_dimension(mesh, dim)
    _check(model, outer, "shard" if sharded else "replicate")
    terms.check()
    parameters = dict(model.named_parameters())
    inner = {one.device_mesh for one in parameters.values() if isinstance(one, DTensor)}
    around = {mesh: layout.joint_mesh(outer, mesh) for mesh in inner}
    layout.check_same_model(parameters, outer)
    layout.equalize(parameters.values(), outer.get_group())
    # Plain parameters use the mesh of the others: norms over two meshes cannot be added.
    plain = next(iter(around.values())) if len(around) == 1 else outer
    made: dict[int, tuple[nn.Parameter, ExchangedParameter]] = {}
    for parameter in parameters.values():
        exchanged = _shard_of(parameter, outer, sharded, terms)
        whole = around[parameter.device_mesh] if isinstance(parameter, DTensor) else plain
        placed = layout.placed(parameter, outer, whole, exchanged.how.sharded)
        made[id(parameter)] = nn.Parameter(placed, parameter.requires_grad), exchanged
    for module in list(model.modules()):
        own = {name: made[id(one)] for name, one in module._parameters.items() if one is not None}
        if own:
            module._parameters.update({name: new for name, (new, _) in own.items()})
            module.__dict__[EXCHANGED] = {name: exchanged for name, (_, exchanged) in own.items()}
            kind: Any = type(module)
            module.__class__ = reading_class(kind, tuple(own))
    if cast and terms.param_dtype is not None:
        model.register_forward_pre_hook(_casting(terms.param_dtype), with_kwargs=True)
    return model


def _shard_of(
    parameter: nn.Parameter, outer: DeviceMesh, sharded: bool, terms: Terms
) -> ExchangedParameter:
    local, inner = parameter.detach(), None
    sharded = sharded and layout.has_rows(local)
    if isinstance(local, DTensor):
        inner = Inner(local.device_mesh, local.placements, local.shape, local.stride())
        local = local.to_local()
    floating = parameter.is_floating_point()
    param_dtype = (terms.param_dtype if floating else None) or parameter.dtype
    how = ParameterSpec(
        group=outer.get_group().group_name,
        rank=outer.get_local_rank(),
        size=outer.size(),
        sharded=sharded,
        shape=tuple(local.shape),
        dtype=parameter.dtype,
        param_dtype=param_dtype,
        reduce_dtype=terms.reduce_dtype or param_dtype,
        op=terms.reduce_op,
    )
    return ExchangedParameter(how, inner, terms.keep_gathered or not how.sharded)


def _casting(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return before


def _check(model: nn.Module, outer: DeviceMesh, call: str) -> None:
    """Raise ParallelError for a model that cannot be made parallel."""
    if not isinstance(model, nn.Module):
        raise ParallelError(wrong_argument(call, "model", model, "a torch.nn.Module"))
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if EXCHANGED in module.__dict__:
            other = "commpass.parallel.replicate or shard already"
            raise ParallelError(TWICE.format(f"{call} over {layout.name_of(outer)}", where, other))
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise ParallelError(
                f"{where} exchanges gradients itself, and replicate or shard would do so again:"
                " give the module inside it, or call commpass.parallel.compress_ddp for"
                " DistributedDataParallel"
            )
        if isinstance(module, nn.RNNBase):
            raise ParallelError(
                f"{where} reads its parameters from an internal list, not by name, and"
                " torch.compile does not trace it. Use fully_shard or DistributedDataParallel"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ParallelError(f"{where} is TorchScript, whose parameters cannot be exchanged")
    for name, parameter in model.named_parameters():
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
