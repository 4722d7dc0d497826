"""Checks of state before it is loaded: what it is, and whether its parameters can take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commpass.codecs import accumulation_dtype
from commpass.distributed.owners import local_part, parameter_names
from commpass.distributed.state.errors import lacks_ranks, other_model
from commpass.distributed.state.loaded import loads, names_of_hook
from commpass.distributed.state.names import OF_GRADIENTS, UNKNOWN, Name
from commpass.distributed.state.redistribute import missing_ranks
from commpass.errors import PolicyError
from commpass.groups import ready


def check_model(call: str, model: object) -> None:
    """Raise PolicyError, in the name of ``call``, for a model that is no module."""
    if model is not None and not isinstance(model, nn.Module):
        given = f"commpass.{call}(model={type(model).__name__})"
        raise PolicyError(f"{given}: must be a module, or None for all residuals")


def check_state(call: str, state: object) -> None:
    """Raise PolicyError, in the name of ``call``, for a state that is no mapping of names."""
    wrong = type(state).__name__
    if isinstance(state, Mapping):
        keys = [key for key in state if not isinstance(key, str)]
        if not keys:
            return
        wrong = f"a {wrong} with the key {keys[0]!r}"
    raise PolicyError(
        f"{call}(state): must be tensors by name, as commpass.state_dict(model) returns them, not"
        f" {wrong}. To start with zeros, give {{}}"
    )


def check_parameters(value: Iterable[Name], known: set[str]) -> None:
    """Raise PolicyError for state of parameters that a model does not have."""
    if left := {saved.parameter for saved in value} - known - {UNKNOWN}:
        raise other_model(left, known, "was loaded for", "this model has")


def check_shapes(value: Mapping[Name, Tensor], model: nn.Module) -> None:
    """Raise PolicyError if state of whole gradients, as hooks keep it, has the wrong shape or
    dtype.

    This is checked before a step asks for the state, since other ranks might not survive an error
    then.
    """
    names = parameter_names(model)
    found = {names[id(one)]: local_part(one) for one in model.parameters() if id(one) in names}
    for saved, tensor in value.items():
        like = found.get(saved.parameter)
        if saved.hook not in OF_GRADIENTS or like is None:
            continue
        if tensor.shape != like.shape:
            raise PolicyError(
                f"{saved.label}: the state is {list(tensor.shape)}, but here it is of a"
                f" parameter {list(like.shape)}"
            )
        # The gradient of a float64 parameter may be sent in a narrower dtype.
        dtypes = dict.fromkeys((accumulation_dtype(like.dtype), torch.float32))
        if tensor.dtype not in dtypes:
            raise PolicyError(
                f"{saved.label}: the state is of {tensor.dtype}, but here it is of"
                f" {' or '.join(map(str, dtypes))}"
            )


def check_ranks(value: Mapping[Name, Tensor]) -> None:
    """Raise PolicyError if state of the group of all ranks lacks what this rank continues with."""
    if not ready():
        return  # the number of ranks is not known yet
    rank, world = dist.get_rank(), dist.get_world_size()
    of_site: dict[tuple[str, str], list[Name]] = {}
    for saved in value:
        if saved.first == "world":
            of_site.setdefault((saved.parameter, saved.place), []).append(saved)
    for names in of_site.values():
        if missing := missing_ranks(names, value, rank, world):
            raise lacks_ranks(names[0].label, missing, "world")


@dataclass(frozen=True)
class Check:
    """What an integration needs of loaded state of its parameters, which are given by their ids.

    ``refuse`` gets the names of the state that ``hook`` keeps of them, and raises PolicyError if
    the integration cannot continue with it.
    """

    hook: str
    parameters: frozenset[int]
    refuse: Callable[[list[Name]], None]


_checks: WeakKeyDictionary[object, Check] = WeakKeyDictionary()


def check_for_integrations(value: Iterable[Name], names: dict[int, str] | None) -> None:
    """Raise PolicyError if an integration refuses state that is about to be loaded.

    ``names`` are those of the model that the state is for; None if it is for any.
    """
    for check in list(_checks.values()):
        check.refuse(names_of_hook(check.parameters, check.hook, value, names))


def check_loaded(check: Check) -> None:
    """Raise PolicyError if state that is already loaded is refused."""
    for loaded in loads():
        check.refuse(names_of_hook(check.parameters, check.hook, loaded.tensors, loaded.names()))


def check_loads(integration: object, check: Check) -> None:
    """Check all state that is loaded from now on, until ``end_checks``."""
    _checks[integration] = check


def end_checks(integration: object) -> None:
    """No longer check the state that is loaded."""
    _checks.pop(integration, None)
