"""References: the gathered parameters that all ranks hold, from which the next difference is taken.

A reference starts as the parameters themselves, gathered uncompressed on all ranks when its site
first runs. After that the graph changes it in place by what all ranks decode, so all hold the same
bits. It belongs to the parameters and is freed with them. It is not saved: another process, or
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
from commpass.passes.results import StateInput
from commpass.utils.ambient import making_lasting_tensors

log = logging.getLogger("commpass")
ops = torch.ops._c10d_functional


OUTSIDE_OF_BACKWARD = -1
GATHERED_AGAIN = (
    "%s: backward gathers it again, as with a checkpoint around a compiled function. It then sends"
    " a second difference, and its weights are not quite those of forward. Put the checkpoint"
    " inside of the compiled function, or give this gather a codec without state"
)
_warned_of_checkpoint: list[str] = []


def reference(state: StateInput, key: Any, owner: Owner, inputs: Sequence[Any]) -> Tensor:
    """Return the reference of a site for an owner.

    It is gathered at the first request, and at the first one after its process group was made anew.
    ``inputs`` are those of the call. Warn once if backward runs the call again.
    """
    if torch._C._current_graph_task_id() != OUTSIDE_OF_BACKWARD and not _warned_of_checkpoint:
        _warned_of_checkpoint.append(state.place)
        log.warning(GATHERED_AGAIN, state.place or "a parameter")
    group: Any = group_named(state.group)
    found = owner.references.get((key, state.group))
    if found is None or found[0]() is not group:
        found = weakref.ref(group), _gathered(state, inputs)
        owner.references[key, state.group] = found
    return found[1]


def _gathered(state: StateInput, inputs: Sequence[Any]) -> Tensor:
    """Gather the current parameters of all ranks; values that are not finite become 0."""
    assert state.source is not None
    shard = state.source.value(inputs)
    ranks = state.shape[0] // shard.shape[0]
    log.debug("%s: gathers %d values for the first difference", state.place, shard.numel() * ranks)
    with making_lasting_tensors():
        everything = ops.wait_tensor(
            ops.all_gather_into_tensor(shard.contiguous(), ranks, state.group)
        )
        return torch.where(everything.isfinite(), everything, 0).to(state.dtype)
