"""Residuals that were loaded, and that no site has taken yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from commpass.distributed.owners import Owner, parameter_names
from commpass.distributed.state.names import OUTER, UNKNOWN, Name
from commpass.distributed.state.unused import Trained


@dataclass
class Loaded:
    """State that was loaded for ``model``, or for any, and the owners that took parts of it, by
    place.

    ``trained`` tells which parameters of the model were trained since.
    """

    tensors: dict[Name, Tensor]
    model: weakref.ref[nn.Module] | None
    owners: dict[str, weakref.ref[Owner]] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    def names(self) -> dict[int, str] | None:
        """Return the names of the model's parameters by id; None if no model was given, or it was
        freed."""
        model = self.model() if self.model is not None else None
        return parameter_names(model) if model is not None else None

    def unused(self) -> list[str]:
        """Return the residuals that no exchange has taken, although their parameters were trained.

        Outer steps are not counted: many steps may come before the first of them.
        """
        return [
            name.label
            for name in self.tensors
            if name.hook != OUTER and name.parameter in self.trained
        ]


_loaded: list[Loaded] = []


def loads_of(model: nn.Module | None) -> list[Loaded]:
    """Return what was loaded for a model, or for any that is still alive."""
    freed = [one for one in _loaded if one.model is not None and one.model() is None]
    for loaded in freed:
        _loaded.remove(loaded)
    return [
        one for one in _loaded if model is None or (one.model is not None and one.model() is model)
    ]


def add(tensors: dict[Name, Tensor], model: nn.Module | None) -> None:
    """Keep state for the sites of a model, or of any, that have not run yet."""
    added = Loaded(tensors, None if model is None else weakref.ref(model))
    added.trained.watch(model, {name.parameter for name in tensors})
    _loaded.append(added)


def drop(model: nn.Module | None) -> None:
    """Drop what was loaded for a model, or for any."""
    for loaded in loads_of(model):
        _loaded.remove(loaded)


def names_of_hook(
    parameters: Iterable[int], hook: str, value: Iterable[Name], names: dict[int, str] | None
) -> list[Name]:
    """Return those names that are of state which a hook keeps of parameters, given by their ids.

    ``names`` are those of the model that the state is for; None if it is for any.
    """
    known = None if names is None else {names[each] for each in parameters if each in names}
    if known is not None and not known:
        return []  # it is for another model
    return [
        name
        for name in value
        if name.hook == hook and (known is None or name.parameter in known | {UNKNOWN})
    ]


def clear_loaded(parameters: Iterable[Tensor], hook: str) -> None:
    """Set what was loaded for an integration's state of parameters, and is not used yet, to
    zero."""
    ids = set(map(id, parameters))
    for loaded in loads_of(None):
        for name in names_of_hook(ids, hook, loaded.tensors, loaded.names()):
            loaded.tensors[name] = torch.zeros_like(loaded.tensors[name])
