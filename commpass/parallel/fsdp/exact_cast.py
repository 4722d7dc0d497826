"""Detect wide gradients that hold narrow values, exactly, with one result for all ranks.

With ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`` gradients are computed in
bfloat16 and widened before they are summed. Then 16 of their 32 bits carry nothing (ZipCCL, section
5.2). That is not so if they were accumulated in float32. Only the values themselves can tell.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from commpass import groups
from commpass.costmodel import Profile, prices

FLAG = torch.int32


def cast_if_exact(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor | None:
    """Return ``x`` in a narrower ``dtype`` if all values fit exactly on all ranks of a group.

    Otherwise return None on all of them. A NaN does not fit, since its payload might be lost.
    """
    narrow = x.to(dtype)
    lost = narrow.to(x.dtype).ne(x).any().to(FLAG).reshape(1)
    dist.all_reduce(lost, dist.ReduceOp.MAX, group=group)
    return None if lost.item() else narrow


def is_faster(group: dist.ProcessGroup, wide: int, narrow: int, profile: Profile) -> bool:
    """Return whether a reduce_scatter of ``wide`` bytes is slower than an all_to_all of ``narrow``
    bytes.

    The latter includes three kernels that first check whether the narrow values suffice.
    """
    name = group.group_name
    here = prices(profile, group.size(), groups.labels_of(name), groups.ranks_of(name))
    before = here.time_us("reduce_scatter", wide)
    asked = here.time_us("all_reduce", FLAG.itemsize)
    kernels = profile.kernels.copies_us(3, 3 * wide + 2 * narrow)
    after = here.time_us("all_to_all", narrow) + asked + kernels
    return before - after > profile.margin * before
