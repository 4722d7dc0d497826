"""Residuals that were loaded, and that no site has taken yet.

They belong to parameters, as those of sites do. So a wrapper of a model, a module that contains it
and a part of it have the same ones.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from commpass.distributed.owners import Owner, parameter_names
from commpass.distributed.state.names import OUTER, UNKNOWN, Name
from commpass.distributed.state.unused import Trained
from commpass.policy.paths import unwrapped


@dataclass(eq=False)
class Loaded:
    """State that was loaded for ``model``, or for any, and the owners that took parts of it, by
    place.

    Of the residuals that other ranks continue with, ``tensors`` has tensors on the meta device.
    ``parameters`` are those of the whole state, also of parts that sites had taken before.
    ``model`` is the module inside its wrappers, which may be freed or made later. ``trained`` tells
    which parameters of the model were trained since, and ``dropped`` has the names of those whose
    state was dropped. Of state for any model, ``left_out`` are the parameters that get none of it.
    """

    tensors: dict[Name, Tensor]
    parameters: frozenset[str]
    model: weakref.ref[nn.Module] | None
    owners: dict[str, weakref.ref[Owner]] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)
    dropped: set[str] = field(default_factory=set)
    left_out: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def names(self) -> dict[int, str] | None:
        """Return the names of the model's parameters by id; None if no model was given, or it was
        freed."""
        model = self.model() if self.model is not None else None
        return parameter_names(model) if model is not None else None

    def names_in(self, model: nn.Module | None) -> dict[Name, Name]:
        """Return the names of what is left for a model's parameters, with their names in that
        model; all for None.

        Those without a parameter are of a model that holds all parameters. What was loaded for any
        model is left for each one that has a parameter of that name, until one takes it.
        """
        own = self.model() if self.model is not None else None
        if model is None or own is unwrapped(model):
            return {name: name for name in self.tensors}
        if self.model is None:
            names = parameter_names(model)
            known = {names[id(one)] for one in model.parameters() if one not in self.left_out}
            known |= {UNKNOWN} if known else set()
            return {name: name for name in self.tensors if name.parameter in known}
        if own is None:
            return {}
        there = {name: key for key, name in parameter_names(own).items()}
        here = parameter_names(model)
        found = {UNKNOWN: UNKNOWN} if here.keys() >= set(there.values()) else {}
        found |= {name: here[key] for name, key in there.items() if key in here}
        return {
            name: dataclasses.replace(name, parameter=found[name.parameter])
            for name in self.tensors
            if name.parameter in found
        }

    def is_unused(self, name: Name) -> bool:
        """Return whether no exchange has taken a residual, although its parameter was trained.

        Outer steps are not counted: many steps may come before the first of them.
        """
        return name.hook != OUTER and name.parameter in self.trained


_loaded: list[Loaded] = []


def loads() -> list[Loaded]:
    """Return what was loaded for models that are still alive, or for any, the last first."""
    freed = [one for one in _loaded if one.model is not None and one.model() is None]
    for loaded in freed:
        _loaded.remove(loaded)
    return _loaded[::-1]


def add(tensors: dict[Name, Tensor], parameters: frozenset[str], model: nn.Module | None) -> None:
    """Keep state for the sites of a model, or of any, that have not run yet. ``parameters`` are
    those of the whole state."""
    added = Loaded(tensors, parameters, None if model is None else weakref.ref(unwrapped(model)))
    added.trained.watch(model, {name.parameter for name in tensors})
    _loaded.append(added)


def drop(model: nn.Module | None) -> None:
    """Drop what was loaded for a model's parameters, or all. Other models still take what was
    loaded for any."""
    for loaded in loads():
        if model is not None and loaded.model is None:
            loaded.left_out.update(dict.fromkeys(model.parameters(), True))
            continue
        names = loaded.names_in(model)
        for name in names:
            del loaded.tensors[name]
        loaded.dropped |= {name.parameter for name in names} - {UNKNOWN}
        if model is None or (loaded.model is not None and not loaded.tensors):
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
    for loaded in loads():
        for name in names_of_hook(ids, hook, loaded.tensors, loaded.names()):
            loaded.tensors[name] = torch.zeros_like(loaded.tensors[name])
