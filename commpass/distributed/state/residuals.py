"""The residual of each site: made when the site first runs, from zeros or from what was loaded."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commpass.distributed.adopted import is_adopted
from commpass.distributed.owners import Code, Owner, parameter_names, state_owners
from commpass.distributed.state.errors import ambiguous
from commpass.distributed.state.loaded import Loaded, loads
from commpass.distributed.state.names import UNKNOWN, Name
from commpass.distributed.state.redistribute import is_new, redistributed, saved_for, scale
from commpass.groups import group_named, rank_in, ready
from commpass.passes.results import StateInput
from commpass.utils.ambient import making_lasting_tensors


def residual(state: StateInput, number: int, code: Code, owner: Owner) -> Tensor:
    """Return the residual of a site: the one numbered ``number`` at its place for an owner.

    It is zeros at first, or what was loaded for it. Raise PolicyError if the loaded state lacks
    this site but has others of its parameter, or if the owner of a loaded residual is ambiguous.
    """
    return owner.state[_key_of(state, number, code, owner)][1]


def move(state: StateInput, code: Code, owner: Owner, into: Tensor) -> Any:
    """Keep the residual of ``residual(state, 0, code, owner)`` in ``into`` from now on.

    ``into`` gets its value, and that of residuals from a group which this one replaces. Return the
    key in the owner's state.
    """
    key = _key_of(state, 0, code, owner)
    name, before = owner.state[key]
    owner.state[key] = name, into.copy_(before)
    for other in [each for each in owner.state if each != key and _is_same_site(each, key)]:
        old, left = owner.state.pop(other)
        into += left * scale(old, name)
    return key


def _is_same_site(one: Any, value: Any) -> bool:
    """Return whether two keys are of the same site, whatever the ranks."""
    (code, name), (code_of_other, name_of_other) = one, value
    return code == code_of_other and (name.place, name.op) == (
        name_of_other.place,
        name_of_other.op,
    )


def _key_of(state: StateInput, number: int, code: Code, owner: Owner) -> Any:
    """Return the key of a residual in its owner's state; make the residual if it is missing.

    Ranks of separate jobs have other numbers in each group. There a residual stays with its job, as
    that of its only rank.
    """
    adopted = is_adopted(state.group)
    ranks = [0] if adopted else _ranks(state.group)
    rank = 0 if adopted else rank_in(state.group) or 0
    is_world = adopted or not ready() or len(ranks) == dist.get_world_size()
    first = "world" if is_world else str(ranks[0])
    site, local_site = f"{state.place}/{state.number}", f"{state.place}/{number}"
    name = Name(UNKNOWN, code.name, site, state.op, first, rank, len(ranks), local_site)
    key = (code, dataclasses.replace(name, site=local_site))
    if key not in owner.state:
        with making_lasting_tensors():
            made = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
            for loaded in loads():
                if _add_loaded(loaded, name, owner, made):
                    break
        owner.state[key] = name, made
    return key


def _add_loaded(loaded: Loaded, name: Name, owner: Owner, into: Tensor) -> bool:
    """Add to a residual what was loaded for it. Return whether it was loaded for this owner."""
    names = loaded.names()
    if loaded.model is not None:
        parameter = owner.name_in(names) if names is not None else None
        if parameter is None or parameter in loaded.dropped:
            return False  # it belongs to another model
        name = dataclasses.replace(name, parameter=parameter)
    else:
        alive = [parameter() for parameter in owner.parameters]
        if any(one is not None and one in loaded.left_out for one in alive):
            return False  # it was reset, or has other state
        before = loaded.owners.get(name.place)
        if before is not None and before() is not None:
            raise ambiguous(name, "asked for by")
    if loaded.tensors and not is_new(name, loaded.parameters):
        into += redistributed(name, into, loaded.tensors)
        for saved in saved_for(name, loaded.tensors):  # this rank does not keep what others take
            del loaded.tensors[saved]
        loaded.owners[name.place] = weakref.ref(owner)
    return True


def _ranks(group: str) -> list[int]:
    here = group_named(group)
    return dist.get_process_group_ranks(here) if here is not None else [0]


def live_of(model: nn.Module | None) -> list[tuple[Name, Tensor]]:
    """Return the current residuals, of a model's parameters or of all."""
    names = parameter_names(model) if model is not None else None
    found = []
    for owner in state_owners():
        parameter = UNKNOWN if names is None else owner.name_in(names)
        if parameter is not None:
            found += [
                (dataclasses.replace(name, parameter=parameter), tensor)
                for name, tensor in owner.state.values()
            ]
    return found
