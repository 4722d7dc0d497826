"""What each rank continues with, of residuals that any number of ranks has saved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from commpass.distributed.state.errors import ambiguous, lacks_ranks, other_model
from commpass.distributed.state.names import UNKNOWN, Name
from commpass.errors import PolicyError


def redistributed(name: Name, like: Tensor, value: Mapping[Name, Tensor]) -> Tensor:
    """Return the residual that one rank continues with.

    The sum over ranks is kept. For a mean, the sum divided by the number of ranks is kept. What
    other ranks continue with may be on the meta device.
    """
    of_site = saved_for(name, value)
    if not of_site:
        raise other_model(
            [name.label], {saved.label for saved in value}, "this model has", "was loaded"
        )
    for saved in of_site:
        tensor = value[saved]
        if saved.op != name.op:
            raise PolicyError(
                f"{name.label}: the state is of a {saved.op}, but here it is a {name.op}"
            )
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise PolicyError(
                f"{name.label}: the state is {list(tensor.shape)} of {tensor.dtype}, but here it is"
                f" {list(like.shape)} of {like.dtype}"
            )
    of_group = [saved for saved in of_site if saved.first == name.first]
    missing = missing_ranks(of_group, value, name.rank, name.ranks)
    if not of_group or missing:
        raise lacks_ranks(name.label, missing or {name.rank}, name.first)
    total = torch.zeros_like(like)
    for saved in of_site:
        if name.continues(saved):
            total += value[saved].to(like.device) * scale(saved, name)
    return total


def missing_ranks(
    of_group: Iterable[Name], value: Mapping[Name, Tensor], rank: int, ranks: int
) -> set[int]:
    """Return the earlier ranks that one of ``ranks`` ranks continues with, and of which there is
    nothing. All names are of one site and one group."""
    found = list(of_group)
    wanted = {each for saved in found for each in range(saved.ranks) if each % ranks == rank}
    return wanted - {saved.rank for saved in found if not value[saved].is_meta}


def saved_for(name: Name, value: Mapping[Name, Tensor]) -> list[Name]:
    """Return what was saved for one site of one instance, in rank order.

    Raise PolicyError if it was saved for several instances.
    """
    found = [saved for saved in value if is_same_state(name, saved)]
    if len({saved.parameter for saved in found}) > 1:
        raise ambiguous(name, "saved for")
    return sorted(found, key=lambda saved: saved.rank)


def is_same_state(name: Name, saved: Name) -> bool:
    """Return whether saved state is of the same site, and of the same instance as far as both are
    known."""
    parameters = {name.parameter, saved.parameter}
    return (len(parameters) == 1 or UNKNOWN in parameters) and name.place == saved.place


def is_new(name: Name, parameters: Collection[str]) -> bool:
    """Return whether nothing was saved for a residual's parameter, but for ``parameters``.

    Its exchange then sent all of its values, for instance because the network was faster.
    """
    known = name.parameter != UNKNOWN and UNKNOWN not in parameters
    return known and name.parameter not in parameters


def scale(old: Name, new: Name) -> float:
    """Return the factor for a residual when the ranks change: 1 for a sum."""
    return new.ranks / old.ranks if new.op == "avg" else 1.0
