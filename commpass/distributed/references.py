"""References: what all ranks hold of gathered parameters, to which the next difference is taken.

A reference begins with the parameters themselves, gathered uncompressed when its site first runs,
on all ranks alike. After that the graph changes it in place, by what all ranks decode: so all hold
the same bits. It belongs to the parameters and goes with them. It is not saved: another process, or
another group of ranks, gathers anew.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor

from commpass.distributed.owners import Owner
from commpass.groups import group_named
from commpass.passes.rewrite import StateInput
from commpass.utils.ambient import making_lasting_tensors

log = logging.getLogger("commpass")
ops = torch.ops._c10d_functional


def reference(state: StateInput, key: Any, owner: Owner, inputs: Sequence[Any]) -> Tensor:
    """The reference of a site for an owner, gathered when it is first asked for, or first since its
    process group was made. ``inputs`` are those of the call."""
    group: Any = group_named(state.group)
    found = owner.references.get((key, state.group))
    if found is None or found[0]() is not group:
        found = weakref.ref(group), _gathered(state, inputs)
        owner.references[key, state.group] = found
    return found[1]


def _gathered(state: StateInput, inputs: Sequence[Any]) -> Tensor:
    """What all ranks hold of their parameters now; 0 where that is not finite."""
    assert state.source is not None
    shard = state.source.value(inputs)
    ranks = state.shape[0] // shard.shape[0]
    log.debug("%s: gathers %d values for the first difference", state.place, shard.numel() * ranks)
    with making_lasting_tensors():
        everything = ops.wait_tensor(
            ops.all_gather_into_tensor(shard.contiguous(), ranks, state.group)
        )
        return torch.where(everything.isfinite(), everything, 0).to(state.dtype)
