"""Checks of state before it is loaded: what it is, and whether its parameters can take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from commpass.distributed.owners import local_part, parameter_names
from commpass.distributed.state.errors import other_model
from commpass.distributed.state.loaded import loads, names_of_hook
from commpass.distributed.state.names import OF_GRADIENTS, UNKNOWN, Name
from commpass.errors import PolicyError


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
    """Raise PolicyError if state of whole gradients, as hooks keep it, has the wrong shape.

    This is checked before a step asks for the state, since other ranks might not survive an error
    then.
    """
    names = parameter_names(model)
    found = [one for one in model.parameters() if id(one) in names]
    shapes = {names[id(one)]: local_part(one).shape for one in found}
    for saved, tensor in value.items():
        like = shapes.get(saved.parameter, tensor.shape)
        if saved.hook in OF_GRADIENTS and tensor.shape != like:
            raise PolicyError(
                f"{saved.label}: the state is {list(tensor.shape)}, but here it is of a"
                f" parameter {list(like)}"
            )


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
