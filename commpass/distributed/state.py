"""Error feedback: keep, save and load what each site has not sent yet, also for other rank counts.

A *residual* belongs to one site of one module instance, on one rank. It has the shape of the site's
tensor and the dtype of its sums. The compiled graph takes it as an input and changes it in place.
It is made when the site first runs for that instance, and is freed with the instance's parameters.

Its name in ``state_dict()`` holds all that is needed to read it back. It depends on nothing that
changes from run to run, such as the order in which code is compiled: ``commpass.v2/<first
parameter>/<function>/<site>/<op>/<world, or the first rank of the group>/<rank>of<ranks>``. The
parameter is ``-`` if no model was given to look up its name.
"""

from __future__ import annotations

import dataclasses
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commpass.distributed.adopted import is_adopted
from commpass.distributed.owners import Code, Owner, local_part, parameter_names, state_owners
from commpass.distributed.unused_state import Trained, warn_of_unused
from commpass.errors import PolicyError, nearest
from commpass.groups import group_named, rank_in, ready
from commpass.passes.results import StateInput
from commpass.utils.ambient import making_lasting_tensors
from commpass.utils.keywords import named_arguments

VERSION = 2
_VERSION = re.compile(r"commpass\.v(\d+)/(.+)", re.DOTALL)
_NAME = re.compile(r"([^/]+)/([^/]+)/(.+)/(sum|avg)/(world|\d+)/(\d+)of(\d+)", re.DOTALL)


@dataclass(frozen=True)
class Name:
    """The name of a residual.

    It belongs to a site, in a function, of the instance whose first parameter is ``parameter`` ("-"
    if unknown). It is that of rank ``rank`` of the ``ranks`` of the group whose first rank is
    ``first`` ("world" for the group of all ranks). ``local_site`` is the site's number among those
    of its parameter; the name uses it if the parameter is known.
    """

    parameter: str
    function: str
    site: str
    op: str
    first: str
    rank: int
    ranks: int
    local_site: str = field(default="", compare=False)

    def __str__(self) -> str:
        parameter = self.parameter.replace("%", "%25").replace("/", "%2F")
        site = f"commpass.v{VERSION}/{parameter}/{self.place}"
        return f"{site}/{self.op}/{self.first}/{self.rank}of{self.ranks}"

    @property
    def place(self) -> str:
        """Which of a model's residuals it is, whatever the ranks and the instance."""
        known = self.local_site and self.parameter != UNKNOWN
        return f"{self.function}/{self.local_site if known else self.site}"

    @property
    def hook(self) -> str:
        """The name of the integration that keeps it, without the number of a shard."""
        return self.function.partition("-")[0]

    @property
    def label(self) -> str:
        """Which residual it is, whatever the ranks, for messages."""
        return self.place if self.parameter == UNKNOWN else f"{self.parameter}/{self.place}"

    def continues(self, saved: Name) -> bool:
        """Return whether this rank continues with what ``saved`` of the same site had not sent."""
        return saved.first == self.first and saved.rank % self.ranks == self.rank


UNKNOWN = "-"
OUTER = "outer"
OF_GRADIENTS = ("ddp", "ssfusion", OUTER)
"""Functions that are hooks, which keep one residual for each parameter's gradient."""


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


def residual(state: StateInput, number: int, code: Code, owner: Owner) -> Tensor:
    """Return the residual of a site: the one numbered ``number`` at its place for an owner.

    It is zeros at first, or what was loaded for it. Raise PolicyError if the loaded state lacks
    this site, or if the owner of a loaded residual is ambiguous.
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
        into += left * _scale(old, name)
    return key


def _is_same_site(one: Any, value: Any) -> bool:
    """Return whether two keys are of the same site, whatever the ranks."""
    (code, name), (code_of_other, name_of_other) = one, value
    return code == code_of_other and (name.place, name.op) == (
        name_of_other.place,
        name_of_other.op,
    )


def _scale(old: Name, new: Name) -> float:
    """Return the factor for a residual when the ranks change: 1 for a sum."""
    return new.ranks / old.ranks if new.op == "avg" else 1.0


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
            for loaded in _loads(None):
                _add_loaded(loaded, name, owner, made)
        owner.state[key] = name, made
    return key


def _add_loaded(loaded: Loaded, name: Name, owner: Owner, into: Tensor) -> None:
    """Add to a residual what was loaded for it."""
    names = loaded.names()
    if loaded.model is not None:
        parameter = owner.name_in(names) if names is not None else None
        if parameter is None:
            return  # it belongs to another model
        name = dataclasses.replace(name, parameter=parameter)
    else:
        before = loaded.owners.get(name.place)
        if before is not None and before() is not None:
            raise _ambiguous(name, "asked for by")
    if loaded.tensors:
        into += _redistributed(name, into, loaded.tensors)
        for saved in _saved_for(name, loaded.tensors):  # this rank does not keep what others take
            del loaded.tensors[saved]
        loaded.owners[name.place] = weakref.ref(owner)


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


def check_loaded(check: Check) -> None:
    """Raise PolicyError if state that is already loaded is refused."""
    for loaded in _loads(None):
        check.refuse(_names_of(check.parameters, check.hook, loaded.tensors, loaded.names()))


def check_loads(integration: object, check: Check) -> None:
    """Check all state that is loaded from now on, until ``end_checks``."""
    _checks[integration] = check


def end_checks(integration: object) -> None:
    """No longer check the state that is loaded."""
    _checks.pop(integration, None)


def _names_of(
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
    for loaded in _loads(None):
        for name in _names_of(ids, hook, loaded.tensors, loaded.names()):
            loaded.tensors[name] = torch.zeros_like(loaded.tensors[name])


def _ranks(group: str) -> list[int]:
    here = group_named(group)
    return dist.get_process_group_ranks(here) if here is not None else [0]


@named_arguments
def state_dict(
    model: nn.Module | None = None,
    *,
    of: str | os.PathLike[str] | None = None,
    prefix: str = "commpass",
) -> dict[str, Tensor]:
    """Return this rank's residuals by name.

        dcp.save({"model": ..., "commpass": commpass.state_dict(model)}, checkpoint_id=path)

        state = commpass.state_dict(of=path)
        dcp.load({"commpass": state}, checkpoint_id=path)
        commpass.load_state_dict(state, model)

    The number of ranks may differ from that of the checkpoint: each rank gets the residuals that it
    continues with. State that was loaded and not yet used by a graph is included. If its parameters
    have been trained since, a warning says once that it is not sent.

    Args:
        model: the model whose residuals are returned, under its parameters' names. It is required
            if several instances share code: blocks that are compiled one by one, or two models of
            one class. None for all residuals.
        of: a folder that ``torch.distributed.checkpoint`` wrote. The result then has empty tensors,
            to load those of that checkpoint into.
        prefix: the prefix of the residuals in that checkpoint.

    Raise PolicyError for a model that is not a module, if the folder holds no checkpoint or a
    damaged one, or if the owner of a residual is ambiguous.
    """
    _check_model("state_dict", model)
    if of is not None:
        return _stored(of, prefix)
    loads = _loads(model)
    state = {str(name): tensor for loaded in loads for name, tensor in loaded.tensors.items()}
    for name, tensor in _live(model):
        if str(name) in state:
            raise _ambiguous(name, "kept for")
        state[str(name)] = tensor
    warn_of_unused([label for loaded in loads for label in loaded.unused()])
    return state


def _check_model(call: str, model: object) -> None:
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


def _live(model: nn.Module | None) -> list[tuple[Name, Tensor]]:
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


def _loads(model: nn.Module | None) -> list[Loaded]:
    """Return what was loaded for a model, or for any that is still alive."""
    freed = [one for one in _loaded if one.model is not None and one.model() is None]
    for loaded in freed:
        _loaded.remove(loaded)
    return [
        one for one in _loaded if model is None or (one.model is not None and one.model() is model)
    ]


def _stored(folder: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(folder, (str, os.PathLike)):
        raise PolicyError(f"commpass.state_dict(of={folder!r}): must be the path of a folder")
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except OSError as error:
        raise PolicyError(
            f"{os.fspath(folder)}: no checkpoint of torch.distributed.checkpoint: {error.strerror}"
        ) from error
    except Exception as error:  # of whatever reads the file
        raise PolicyError(
            f"{os.path.join(folder, '.metadata')}: damaged, or not written by"
            f" torch.distributed.checkpoint ({type(error).__name__}: {error}). Copy the checkpoint"
            " again, or read an earlier one"
        ) from error
    found = {
        key.removeprefix(prefix + "."): entry
        for key, entry in stored.items()
        if key.startswith(f"{prefix}.commpass.v")
    }
    rank, world = (dist.get_rank(), dist.get_world_size()) if ready() else (0, 1)
    state = {}
    for key, entry in found.items():
        name = _parse(key)
        # The members of a group that is not the world are unknown yet, so all of its residuals are
        # read.
        if isinstance(entry, TensorStorageMetadata) and (
            name.first != "world" or name.rank % world == rank
        ):
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
    return state


@named_arguments
def load_state_dict(state: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
    """Continue with residuals that ``state_dict`` returned, on any number of ranks.

    References of differences are not saved. Existing ones are dropped, and the next step gathers
    the parameters anew, so every rank must call this function. Sites that have not run yet take
    their residuals when they do.

    Args:
        state: residuals by name, as ``state_dict`` returns them. An empty state starts again with
            zeros.
        model: the model to whose parameters residuals are assigned by name; other models keep
            theirs. If None, each site takes what was saved for it. If several instances ask for it,
            that is an error.

    Raise PolicyError for a state that is invalid, or of another model, shape or version, with what
    was expected. Then nothing is changed.
    """
    _check_model("load_state_dict", model)
    check_state("commpass.load_state_dict", state)
    tensors: dict[Name, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise PolicyError(
                f"{key!r} is {type(tensor).__name__}, but error feedback is kept in tensors"
            )
        tensors[_parse(key)] = tensor
    live = _live(model)
    names = parameter_names(model) if model is not None else None
    if tensors and model is not None and names is not None:
        _check_parameters(tensors, set(names.values()))
        _check_shapes(tensors, model)
    for check in list(_checks.values()):
        check.refuse(_names_of(check.parameters, check.hook, tensors, names))
    loaded = [
        (_redistributed(name, tensor, tensors) if tensors else torch.zeros_like(tensor))
        for name, tensor in live
    ]
    if model is None and len({name for name, _ in live}) < len(live):
        twice = next(name for name, _ in live if sum(name == other for other, _ in live) > 1)
        if tensors:
            raise _ambiguous(twice, "kept for")
    left = {saved for saved in tensors if not any(_is_same_state(name, saved) for name, _ in live)}
    if live and left and model is None:
        raise PolicyError(
            _other_model_message(
                {n.label for n in left}, {n.label for n, _ in live}, "was loaded", "this model has"
            )
        )
    for (_, tensor), value in zip(live, loaded, strict=True):
        tensor.copy_(value)
    for owner in _owners_of(model):
        owner.references.clear()
    for old in _loads(model):
        _loaded.remove(old)
    if tensors:
        rest = {saved: tensors[saved] for saved in tensors if saved in left}
        added = Loaded(rest, None if model is None else weakref.ref(model))
        added.trained.watch(model, {name.parameter for name in rest})
        _loaded.append(added)


def reset_state(model: nn.Module | None = None) -> None:
    """Drop residuals, loaded state that is not used yet, and references of differences.

    The next step begins as in a new process: residuals are zero, and references are taken from the
    current parameters. Every rank must call it at the same step.

    Args:
        model: the model whose state is dropped; None for all models.
    """
    for owner in _owners_of(model):
        owner.state.clear()
        owner.references.clear()
    for loaded in _loads(model):
        _loaded.remove(loaded)


def _owners_of(model: nn.Module | None) -> list[Owner]:
    """Return all owners, or those of a model's parameters."""
    names = parameter_names(model) if model is not None else None
    return [each for each in state_owners() if names is None or each.name_in(names) is not None]


def _check_parameters(value: Iterable[Name], known: set[str]) -> None:
    """Raise PolicyError for state of parameters that a model does not have."""
    if left := {saved.parameter for saved in value} - known - {UNKNOWN}:
        raise PolicyError(_other_model_message(left, known, "was loaded for", "this model has"))


def _check_shapes(value: Mapping[Name, Tensor], model: nn.Module) -> None:
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


def _is_same_state(name: Name, saved: Name) -> bool:
    """Return whether saved state is of the same site, and of the same instance as far as both are
    known."""
    parameters = {name.parameter, saved.parameter}
    return (len(parameters) == 1 or UNKNOWN in parameters) and name.place == saved.place


def _saved_for(name: Name, value: Mapping[Name, Tensor]) -> list[Name]:
    """Return what was saved for one site of one instance, in rank order.

    Raise PolicyError if it was saved for several instances.
    """
    found = [saved for saved in value if _is_same_state(name, saved)]
    if len({saved.parameter for saved in found}) > 1:
        raise _ambiguous(name, "saved for")
    return sorted(found, key=lambda saved: saved.rank)


def _redistributed(name: Name, like: Tensor, value: Mapping[Name, Tensor]) -> Tensor:
    """Return the residual that one rank continues with.

    The sum over ranks is kept. For a mean, the sum divided by the number of ranks is kept.
    """
    of_site = _saved_for(name, value)
    if not of_site:
        raise PolicyError(
            _other_model_message(
                [name.label], {saved.label for saved in value}, "this model has", "was loaded"
            )
        )
    total = torch.zeros_like(like)
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
        if name.continues(saved):
            total += tensor.to(like.device) * _scale(saved, name)
    groups = {saved.ranks for saved in of_site if saved.first == name.first}
    wanted = {rank for ranks in groups for rank in range(ranks) if rank % name.ranks == name.rank}
    missing = wanted - {saved.rank for saved in of_site if saved.first == name.first}
    if not groups or missing:
        raise PolicyError(
            f"{name.label}: the state lacks rank"
            f" {', '.join(map(str, sorted(missing))) or name.rank} of the group that begins at"
            f" {name.first}; give every rank what commpass.state_dict(of=...) lists"
        )
    return total


def _other_model_message(some: Iterable[str], names: Iterable[str], have: str, value: str) -> str:
    some, names = sorted(some), sorted(names)
    return (
        "error feedback of another model (or of this one, if the mesh or what is compiled has"
        " changed: then leave the state out, and the first step begins with zeros):"
        f" {have} {', '.join(some)}; {value} {', '.join(names)}" + nearest(some[0], names)
    )


def _ambiguous(name: Name, subject: str) -> PolicyError:
    return PolicyError(
        f"error feedback of {name.label} is {subject} several instances or functions of one name,"
        " so its owner is unknown. Give the model, as in commpass.state_dict(model) and"
        " commpass.load_state_dict(state, model), and give functions different names"
    )


def _parse(key: str) -> Name:
    versioned = _VERSION.fullmatch(key)
    version = int(versioned[1]) if versioned else VERSION
    if version > VERSION:
        raise PolicyError(
            f"{key!r}: the state is of version {version}, this commpass reads up to {VERSION}:"
            " update commpass"
        )
    if version < VERSION:
        raise PolicyError(
            f"{key!r}: the state is of version {version}, whose names depend on the order in which"
            " code was compiled, so its owner is unknown. Leave it out: the first step then begins"
            " with zeros"
        )
    found = _NAME.fullmatch(versioned[2]) if versioned else None
    if found is None:
        raise PolicyError(
            f"{key!r} is not a name of error feedback; those of commpass.state_dict() begin with"
            f" commpass.v{VERSION}/"
        )
    parameter, function, site, op, first, rank, ranks = found.groups()
    parameter = parameter.replace("%2F", "/").replace("%25", "%")
    return Name(parameter, function, site, op, first, int(rank), int(ranks))
