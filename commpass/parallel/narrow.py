"""Wide gradients that hold narrow values: found out bit for bit, by all ranks alike.

With ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`` gradients are computed in
bfloat16 and widened before they are summed, so 16 of their 32 bits say nothing (ZipCCL, section
5.2). That is not so where they were accumulated in float32. Only the values themselves say which.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from commpass import groups
from commpass.costmodel import Profile, prices

FLAG = torch.int32


def narrowed(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor | None:
    """The values of ``x`` in a narrower ``dtype`` where they are all exactly such on all ranks of a
    group, else None on all of them. A NaN counts as no such value: its payload might be lost."""
    narrow = x.to(dtype)
    lost = narrow.to(x.dtype).ne(x).any().to(FLAG).reshape(1)
    dist.all_reduce(lost, dist.ReduceOp.MAX, group=group)
    return None if lost.item() else narrow


def gains(group: dist.ProcessGroup, wide: int, narrow: int, profile: Profile) -> bool:
    """Whether a reduce_scatter of ``wide`` bytes takes longer than an all_to_all of ``narrow``
    ones, where it is found out first, in three kernels, that these are enough."""
    name = group.group_name
    here = prices(profile, group.size(), groups.labels_of(name), groups.ranks_of(name))
    before = here.us("reduce_scatter", wide)
    asked = here.us("all_reduce", FLAG.itemsize)
    kernels = profile.kernels.copies_us(3, 3 * wide + 2 * narrow)
    after = here.us("all_to_all", narrow) + asked + kernels
    return before - after > profile.margin * before
