"""Which groups the other ranks have, derived from the device meshes of this process.

A rank has only its own groups. A device mesh is equal on all of its ranks, and defines for every
dimension which groups its ranks form. Nothing else here tells which values
another rank adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commpass import groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as Group

Blocks = frozenset[frozenset[int]]
"""The ranks of each group that a mesh dimension divides its ranks into."""


def union_group(first: str, second: str) -> Group | None:
    """Return the group over which one reduction equals one over group ``first`` followed by one
    over group ``second``.

    Return None if there is none, or if this cannot be proved here. On rank r the two add the values
    of the ranks in first(q) for all q in second(r). Therefore, for each rank of the larger group,
    the sets first(q) must be disjoint and together be all of it.
    """
    mine, others = (set(groups.ranks_of(name)) for name in (first, second))
    if not groups.ready() or mine & others != {dist.get_rank()}:
        return None  # the search for meshes is slow
    known = partitions()
    rows, columns = known.get(first), known.get(second)
    if rows is None or columns is None:
        return None
    row_of = {rank: row for row in rows for rank in row}
    if not others <= row_of.keys():
        return None
    all_rows = {row_of[rank] for rank in others}
    ranks = frozenset().union(*all_rows)
    across = [column for column in columns if column & ranks]
    if frozenset().union(*across) != ranks:
        return None
    if not all({row_of[rank] for rank in column} == all_rows for column in across):
        return None
    if not all(len(column) == len(all_rows) for column in across):
        return None
    return _group_of(ranks, (first, second), known)


def _group_of(ranks: frozenset[int], like: Iterable[str], known: Iterable[str]) -> Group | None:
    """Return the group of exactly these ranks with the same backend: the group of all ranks, or a
    mesh dimension.

    All its ranks know the same candidates, so they choose the same one.
    """
    world = dist.group.WORLD.group_name  # type: ignore[union-attr]
    others = sorted(set(known) - {world}, key=lambda name: (len(name), name))
    backends = {dist.get_backend_config(groups.group_named(name)) for name in like}
    for name in (world, *others):
        group = groups.group_named(name)
        if group is None or set(groups.ranks_of(name)) != ranks:
            continue
        if {dist.get_backend_config(group)} == backends:
            return group
    return None


def partitions() -> dict[str, Blocks]:
    """Return the groups of all ranks along the dimension of each mesh group of this process, by
    group name.

    A name for which meshes disagree is omitted.
    """
    found: dict[str, set[frozenset[int]]] = {}
    for name, blocks in itertools.chain.from_iterable(map(_dimensions, groups.meshes())):
        if set(groups.ranks_of(name)) in blocks:
            found.setdefault(name, set()).update(blocks)
    return {name: frozenset(blocks) for name, blocks in found.items() if _are_disjoint(blocks)}


def _are_disjoint(blocks: Iterable[frozenset[int]]) -> bool:
    """Whether no rank is in two blocks."""
    return sum(map(len, blocks)) == len(frozenset().union(*blocks))


def _dimensions(mesh: Any) -> Iterator[tuple[str, Blocks]]:
    """Yield (group name, groups of all ranks) for the dimensions of a mesh that this rank is in.

    A flattened dimension stands for one or more dimensions of its root mesh.
    """
    try:
        root = mesh._get_root_mesh()
        table: torch.Tensor = root.mesh
        mine = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        own = mesh.mesh
    except (AttributeError, RuntimeError, LookupError, TypeError, AssertionError):
        return  # made without groups, or not on this rank
    for dim, group in enumerate(mine):
        name = group.group_name
        if groups.group_named(name) is not group or not _has_group(mesh, root, dim, group):
            continue  # its group was destroyed, and another one has the name now
        if own.numel() == table.numel():
            yield name, _blocks(own, (dim,))
        elif own.ndim == 1:
            ranks = frozenset(own.tolist())
            wanted = [_blocks(table, dims) for dims in _subsets(table.ndim)]
            yield from ((name, blocks) for blocks in wanted if ranks in blocks)


def _has_group(mesh: Any, root: Any, dim: int, group: Any) -> bool:
    """Whether a dimension of a mesh was made with this group, and not with a destroyed group of the
    same name.

    If torch keeps no registry of a mesh's groups, the group's description decides. It must be that
    of a dimension of that name, or of all ranks.
    """
    registry = getattr(root, "_pg_registry", None)
    if registry is not None:
        return registry.get(group.group_name) is group
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim_{dim}"
    own = (group.group_desc or "").removeprefix("mesh_")
    return own in (name, "default_pg", "default")


def _blocks(table: torch.Tensor, dims: tuple[int, ...]) -> Blocks:
    """Return the sets of ranks that differ only in these dimensions of a mesh."""
    others = [dim for dim in range(table.ndim) if dim not in dims]
    length = 1
    for dim in dims:
        length *= table.shape[dim]
    return frozenset(map(frozenset, table.permute(*others, *dims).reshape(-1, length).tolist()))


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    for length in range(1, count + 1):
        yield from itertools.combinations(range(count), length)
