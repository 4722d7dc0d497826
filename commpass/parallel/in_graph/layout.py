"""Place parameters as DTensors on a data-parallel mesh, alone or around tensor parallelism."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from commpass.errors import ParallelError, nearest


def one_dimension(mesh: DeviceMesh, dim: str | None) -> DeviceMesh:
    """Return the dimension of a mesh over which data is parallel.

    Raise ParallelError if it has no such dimension, or several and none was named.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ParallelError(
            f"mesh is {type(mesh).__name__}, but must be a DeviceMesh: init_device_mesh("
            "'cuda', (8,), mesh_dim_names=('dp',))"
        )
    names = mesh.mesh_dim_names or ()
    if dim is not None and dim not in names:
        raise ParallelError(f"the mesh has no dimension {dim!r}" + nearest(dim, names))
    if mesh.ndim == 1:
        return mesh
    if dim is None:
        raise ParallelError(
            f"the mesh has {mesh.ndim} dimensions, {', '.join(names) or 'without names'}, but data"
            " is parallel over one: give that one, as in mesh['dp'] or dim='dp'"
        )
    return mesh[dim]


def name_of(mesh: DeviceMesh) -> str:
    return ", ".join(mesh.mesh_dim_names or ("without a name",))


def joint_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the dimensions of both.

    Raise ParallelError if they are not of one mesh, or share a dimension.
    """
    shared = set(outer.mesh_dim_names or ()) & set(inner.mesh_dim_names or ())
    if shared:
        raise ParallelError(
            f"parameters are already distributed over {name_of(inner)}, and data cannot be parallel"
            f" over {name_of(outer)} as well: give another dimension of the mesh, and do not"
            " distribute a model twice (fully_shard already does what shard does)"
        )
    try:
        return DeviceMesh._concatenate([outer, inner])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ParallelError(
            f"the mesh of the data ({name_of(outer)}) and that of the parameters"
            f" ({name_of(inner)}) do not belong to one mesh: take both from one, as in"
            " init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'tp'))"
        ) from error


def placed(parameter: nn.Parameter, outer: DeviceMesh, mesh: DeviceMesh, sharded: bool) -> DTensor:
    """Return the parameter as a DTensor on ``mesh``.

    Over ``outer``, its first dimension, it is ``sharded`` by rows or replicated. Over the others it
    is placed as before (replicated, if it is a plain tensor). Ranks of ``outer`` must hold equal
    values: see ``equalize``.
    """
    local = parameter.detach()
    inner: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - outer.ndim)
    if isinstance(local, DTensor):
        inner, local = local.placements, local.to_local()
    first: Placement = Replicate()
    stride = parameter.stride()
    if sharded:
        size, rank = outer.size(), outer.get_local_rank()
        rows = -(-local.shape[0] // size)
        start = min(rank * rows, local.shape[0])
        local = local.narrow(0, start, min(rows, local.shape[0] - start))
        local = local.clone(memory_format=torch.contiguous_format)
        first, stride = _row_placement(mesh, inner), make_contiguous_strides_for(parameter.shape)
    return DTensor.from_local(
        local,
        mesh,
        (first, *inner),
        run_check=False,
        shape=parameter.shape,
        stride=stride,
    )


def has_rows(parameter: Tensor) -> bool:
    """Return whether there is more than one row to divide, on any rank of a mesh's other
    dimensions.

    All of these ranks must get the same result.
    """
    if parameter.dim() == 0 or parameter.numel() == 0:
        return False
    parts = 1
    if isinstance(parameter, DTensor):
        parts = _parts_of_rows(parameter.device_mesh, parameter.placements)
    return parameter.shape[0] > parts


def _parts_of_rows(mesh: DeviceMesh, placements: Iterable[Placement]) -> int:
    """Return into how many parts the last dimensions of a mesh, one for each placement, divide
    rows."""
    placements = tuple(placements)
    first = mesh.ndim - len(placements)
    return math.prod(
        mesh.size(first + dimension)
        for dimension, placement in enumerate(placements)
        if getattr(placement, "dim", None) == 0
    )


def _row_placement(mesh: DeviceMesh, inner: Iterable[Placement]) -> Placement:
    """Return the placement of the rows of a tensor that is already sharded.

    If that is sharded by rows as well, the parts of one rank are not contiguous.
    """
    parts = _parts_of_rows(mesh, inner)
    return _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)


def check_same_model(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Raise ParallelError, on all ranks of a mesh of one dimension, if their models differ."""
    check_same_parameters(parameters, mesh.get_group(), name_of(mesh), mesh.device_type)


def check_same_parameters(
    parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, subject: str, device: str
) -> None:
    """Raise ParallelError, on all ranks of a group, if their parameters differ in name or shape."""
    size = group.size()
    lines = [
        f"{name}: {list(parameter.shape)} of {parameter.dtype}, {parameter.placements}"
        if isinstance(parameter, DTensor)
        else f"{name}: {list(parameter.shape)} of {parameter.dtype}"
        for name, parameter in parameters.items()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    digests = [own.clone() for _ in range(size)]
    dist.all_gather(digests, own, group=group)
    if all(torch.equal(one, own) for one in digests):
        return
    models: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(models, lines, group=group)
    for rank, model in enumerate(models):
        for first_line, line in zip([*models[0], "nothing"], [*model, "nothing"], strict=False):
            if first_line != line:
                raise ParallelError(
                    f"the ranks of {subject} have different models: rank 0 of it has"
                    f" {first_line}, rank {rank} has {line}"
                )


def equalize(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values of its first rank."""
    for tensor in tensors:
        if tensor.is_meta:
            continue
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        dense = local.contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        if dense is not local:
            local.copy_(dense)
