"""Process groups by name. The names in graphs are torch's own; these are the few questions that we ask about them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def ready() -> bool:
    """Whether torch.distributed has been initialised."""
    return dist.is_available() and dist.is_initialized()


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of that name, or None if there is none such here."""
    if not ready():
        return None
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def rank_in(name: str) -> int | None:
    """The number of this process among the ranks of a group, or None where it is not one of them."""
    group = group_named(name)
    return group.rank() if group is not None and group.rank() >= 0 else None


def label(group: dist.ProcessGroup) -> str:
    """The mesh dimension that a group belongs to, such as ``tp``; ``world`` for the group of all ranks, which a mesh of one
    dimension shares; "" for a group that is of no mesh."""
    text = (group.group_desc or "").removeprefix("mesh_")
    return {"undefined": "", "default_pg": "world", "default": "world"}.get(text, text)


def is_first_rank() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return not ready() or dist.get_rank() == 0
