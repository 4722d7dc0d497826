"""Error feedback: what each site has not yet sent, kept between calls, saved, and shared out anew
when the ranks change.

A *residual* belongs to one site of one module instance, on one rank. It has the shape of the site's
tensor and the dtype in which sums are made; the compiled graph takes it as an input and changes it
in place. It is made when the site first runs for that instance, and goes with the instance's
parameters. Its name in ``state_dict()`` says all that is needed to read it back, and depends on
nothing that changes from run to run, such as the order in which code is compiled:
``commpass.v2/<first parameter>/<function>/<site>/<op>/<world, or the first rank of the
group>/<rank>of<ranks>``. The parameter is ``-`` where no model was given that would tell its name.
"""

from __future__ import annotations

import dataclasses
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commpass.distributed.owners import Code, Owner, parameter_names, state_owners
from commpass.errors import PolicyError, nearest
from commpass.groups import group_named, rank_in, ready
from commpass.passes.rewrite import StateInput
from commpass.utils.ambient import making_lasting_tensors

VERSION = 2
_VERSION = re.compile(r"commpass\.v(\d+)/(.+)", re.DOTALL)
_NAME = re.compile(r"([^/]+)/([^/]+)/(.+)/(sum|avg)/(world|\d+)/(\d+)of(\d+)", re.DOTALL)


@dataclass(frozen=True)
class Name:
    """Whose residual a tensor is: of a site, in a function, of the instance whose first
    parameter is ``parameter`` ("-" if that is not known); on rank ``rank`` of the ``ranks`` of
    the group whose first rank is ``first`` ("world" for the group of all ranks). ``own`` is the
    site as it is counted among those of its parameter, by which it is named where that is known."""

    parameter: str
    function: str
    site: str
    op: str
    first: str
    rank: int
    ranks: int
    own: str = field(default="", compare=False)

    def __str__(self) -> str:
        parameter = self.parameter.replace("%", "%25").replace("/", "%2F")
        whose = f"commpass.v{VERSION}/{parameter}/{self.place}"
        return f"{whose}/{self.op}/{self.first}/{self.rank}of{self.ranks}"

    @property
    def place(self) -> str:
        """Which of a model's residuals, whatever the ranks and whichever the instance."""
        return (
            f"{self.function}/{self.own if self.own and self.parameter != UNKNOWN else self.site}"
        )

    @property
    def whose(self) -> str:
        """Which residual, whatever the ranks: for people."""
        return self.place if self.parameter == UNKNOWN else f"{self.parameter}/{self.place}"

    def continues(self, saved: Name) -> bool:
        """Whether this rank carries on with what ``saved`` of the same site had not sent."""
        return saved.first == self.first and saved.rank % self.ranks == self.rank


UNKNOWN = "-"
OF_GRADIENTS = ("ddp", "ssfusion")
"""Functions that are hooks, which keep one residual for each parameter's gradient."""


@dataclass
class Loaded:
    """State that was loaded for ``model``, or for whatever asks for it, and those who took of
    it, by place."""

    given: dict[Name, Tensor]
    model: weakref.ref[nn.Module] | None
    taken: dict[str, weakref.ref[Owner]] = field(default_factory=dict)

    def names(self) -> dict[int, str] | None:
        """The names of the model's parameters by id; None where no model was given, or it is
        gone."""
        model = self.model() if self.model is not None else None
        return parameter_names(model) if model is not None else None


_loaded: list[Loaded] = []


def residual(state: StateInput, number: int, code: Code, owner: Owner) -> Tensor:
    """The residual of a site, of its place the one of that ``number`` for an owner: zeros when it
    is first asked for, or what was loaded for it. Raises PolicyError if state was loaded that this
    site is not part of, or of which it is not known whose it is."""
    return owner.state[_kept_under(state, number, code, owner)][1]


def move(state: StateInput, code: Code, owner: Owner, into: Tensor) -> Any:
    """Keeps the residual of ``residual(kept, 0, code, owner)`` in ``into`` from now on, with what
    it was, also in a group that this one has taken the place of. Returns its key in the owner's
    state."""
    key = _kept_under(state, 0, code, owner)
    name, before = owner.state[key]
    owner.state[key] = name, into.copy_(before)
    for other in [each for each in owner.state if each != key and _of_one_site(each, key)]:
        old, left = owner.state.pop(other)
        into += left * _scale(old, name)
    return key


def _of_one_site(one: Any, value: Any) -> bool:
    """Whether two keys are of the same site, whatever the ranks."""
    (code, name), (code_of_other, name_of_other) = one, value
    return code == code_of_other and (name.place, name.op) == (
        name_of_other.place,
        name_of_other.op,
    )


def _scale(old: Name, new: Name) -> float:
    """By what a residual is multiplied where there are other ranks: of a sum it stays what it
    was."""
    return new.ranks / old.ranks if new.op == "avg" else 1.0


def _kept_under(state: StateInput, number: int, code: Code, owner: Owner) -> Any:
    """The key of a residual in its owner's state, where it is made if it is not there."""
    ranks = _ranks(state.group)
    everybody = not ready() or len(ranks) == dist.get_world_size()
    first = "world" if everybody else str(ranks[0])
    site, own = f"{state.place}/{state.number}", f"{state.place}/{number}"
    name = Name(
        UNKNOWN, code.name, site, state.op, first, rank_in(state.group) or 0, len(ranks), own
    )
    key = (code, dataclasses.replace(name, site=own))
    if key not in owner.state:
        with making_lasting_tensors():
            made = torch.zeros(state.shape, dtype=state.dtype, device=state.device)
            for loaded in _loads(None):
                _take(loaded, name, owner, made)
        owner.state[key] = name, made
    return key


def _take(loaded: Loaded, name: Name, owner: Owner, into: Tensor) -> None:
    """Adds to a residual what was loaded for it."""
    names = loaded.names()
    if loaded.model is not None:
        parameter = owner.name_in(names) if names is not None else None
        if parameter is None:
            return  # it is another model's
        name = dataclasses.replace(name, parameter=parameter)
    else:
        before = loaded.taken.get(name.place)
        if before is not None and before() is not None:
            raise _ambiguous(name, "asked for by")
    if loaded.given:
        into += _shared(name, into, loaded.given)
        for saved in _of(name, loaded.given):  # what others take is not this rank's
            del loaded.given[saved]
        loaded.taken[name.place] = weakref.ref(owner)


def _ranks(group: str) -> list[int]:
    here = group_named(group)
    return dist.get_process_group_ranks(here) if here is not None else [0]


def state_dict(
    model: nn.Module | None = None,
    *,
    of: str | os.PathLike[str] | None = None,
    prefix: str = "commpass",
) -> dict[str, Tensor]:
    """This rank's residuals by name: of this process, or with ``of`` empty ones to load those of a
    checkpoint into.

        dcp.save({"model": ..., "commpass": commpass.state_dict(model)}, checkpoint_id=path)

        state = commpass.state_dict(of=path)
        dcp.load({"commpass": state}, checkpoint_id=path)
        commpass.load_state_dict(state, model)

    With ``model`` those of its parameters alone, by the names of these. It is needed where several
    instances share their code: blocks that are compiled one by one, two models of one class. ``of``
    is a folder that ``torch.distributed.checkpoint`` wrote, in which the residuals stand under
    ``prefix``. The number of ranks may be another one: each rank is given those that it carries on
    with. What was loaded and not yet asked for by a graph is part of the state. Raises PolicyError
    where the folder holds no checkpoint, and where it cannot be told whose a residual is.
    """
    if of is not None:
        return _stored(of, prefix)
    state = {str(name): tensor for loaded in _loads(model) for name, tensor in loaded.given.items()}
    for name, tensor in _live(model):
        if str(name) in state:
            raise _ambiguous(name, "kept for")
        state[str(name)] = tensor
    return state


def _live(model: nn.Module | None) -> list[tuple[Name, Tensor]]:
    """The residuals there are, of a model's parameters or of all."""
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
    """What was loaded for a model, or for any that there still is."""
    gone = [one for one in _loaded if one.model is not None and one.model() is None]
    for loaded in gone:
        _loaded.remove(loaded)
    return [
        one for one in _loaded if model is None or (one.model is not None and one.model() is model)
    ]


def _stored(folder: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except OSError as error:
        raise PolicyError(
            f"{os.fspath(folder)}: no checkpoint of torch.distributed.checkpoint: {error.strerror}"
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
        # Of a group that is not the world it is not yet known who is in it now: all of them are
        # read.
        if isinstance(entry, TensorStorageMetadata) and (
            name.first != "world" or name.rank % world == rank
        ):
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
    return state


def load_state_dict(state: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
    """Carries on with residuals that ``state_dict`` gave, of as many ranks or of others; an empty
    one begins again with zeros. References of differences are not saved: those there are, are
    forgotten, and the next step gathers the parameters anew. So every rank must call it.

    With ``model`` they are given to its parameters by name, and other models keep theirs. Without,
    each site takes what was saved for it, which is refused where several instances ask for it.
    Sites that have not run yet take theirs when they do. Raises PolicyError for what is no such
    state, or is that of another model, shape or version, with what was expected; nothing is changed
    then.
    """
    given: dict[Name, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise PolicyError(
                f"{key!r} is {type(tensor).__name__}, but error feedback is kept in tensors"
            )
        given[_parse(key)] = tensor
    live = _live(model)
    if given and model is not None:
        _check_parameters(given, set(parameter_names(model).values()))
        _check_shapes(given, model)
    loaded = [
        (_shared(name, tensor, given) if given else torch.zeros_like(tensor))
        for name, tensor in live
    ]
    if model is None and len({name for name, _ in live}) < len(live):
        twice = next(name for name, _ in live if sum(name == other for other, _ in live) > 1)
        if given:
            raise _ambiguous(twice, "kept for")
    left = {saved for saved in given if not any(_same(name, saved) for name, _ in live)}
    if live and left and model is None:
        raise PolicyError(
            _foreign(
                {n.whose for n in left}, {n.whose for n, _ in live}, "was loaded", "this model has"
            )
        )
    for (_, tensor), value in zip(live, loaded, strict=True):
        tensor.copy_(value)
    for owner in _owners_of(model):
        owner.references.clear()
    for old in _loads(model):
        _loaded.remove(old)
    if given:
        rest = {saved: given[saved] for saved in given if saved in left}
        _loaded.append(Loaded(rest, None if model is None else weakref.ref(model)))


def reset_state(model: nn.Module | None = None) -> None:
    """Forgets what was not sent, what was loaded and not asked for yet, and the references of
    differences: all of it, or that of one model's parameters. The next step begins as in a new
    process: with nothing left to send, and references of the parameters as they then are. Every
    rank must call it at the same step."""
    for owner in _owners_of(model):
        owner.state.clear()
        owner.references.clear()
    for loaded in _loads(model):
        _loaded.remove(loaded)


def _owners_of(model: nn.Module | None) -> list[Owner]:
    """All, or those of a model's parameters."""
    names = parameter_names(model) if model is not None else None
    return [each for each in state_owners() if names is None or each.name_in(names) is not None]


def _check_parameters(value: Iterable[Name], known: set[str]) -> None:
    """Raises PolicyError for state of parameters that a model does not have."""
    if left := {saved.parameter for saved in value} - known - {UNKNOWN}:
        raise PolicyError(_foreign(left, known, "was loaded for", "this model has"))


def _check_shapes(value: Mapping[Name, Tensor], model: nn.Module) -> None:
    """Raises PolicyError for state of whole gradients, as hooks keep it, that is not of the shape
    of their parameters: before a step asks for it, which others might not survive."""
    names = parameter_names(model)
    shapes = {names[id(one)]: one.shape for one in model.parameters() if id(one) in names}
    for saved, tensor in value.items():
        like = shapes.get(saved.parameter, tensor.shape)
        if saved.function in OF_GRADIENTS and tensor.shape != like:
            raise PolicyError(
                f"{saved.whose}: the state is {list(tensor.shape)}, but here it is of a"
                f" parameter {list(like)}"
            )


def _same(name: Name, saved: Name) -> bool:
    """Whether what was saved is of the same site, of the same instance as far as both are known."""
    alike = name.parameter == saved.parameter or UNKNOWN in (name.parameter, saved.parameter)
    return alike and name.place == saved.place


def _of(name: Name, value: Mapping[Name, Tensor]) -> list[Name]:
    """What was saved for one site of one instance, in rank order. Raises PolicyError if it was
    saved for several."""
    found = [saved for saved in value if _same(name, saved)]
    if len({saved.parameter for saved in found}) > 1:
        raise _ambiguous(name, "saved for")
    return sorted(found, key=lambda saved: saved.rank)


def _shared(name: Name, like: Tensor, value: Mapping[Name, Tensor]) -> Tensor:
    """What one rank carries on with: the sum over ranks stays what it was (for a mean, that
    divided by the number of ranks)."""
    of_site = _of(name, value)
    if not of_site:
        raise PolicyError(
            _foreign([name.whose], {saved.whose for saved in value}, "this model has", "was loaded")
        )
    total = torch.zeros_like(like)
    for saved in of_site:
        tensor = value[saved]
        if saved.op != name.op:
            raise PolicyError(
                f"{name.whose}: the state is of a {saved.op}, but here it is a {name.op}"
            )
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise PolicyError(
                f"{name.whose}: the state is {list(tensor.shape)} of {tensor.dtype}, but here it is"
                f" {list(like.shape)} of {like.dtype}"
            )
        if name.continues(saved):
            total += tensor.to(like.device) * _scale(saved, name)
    groups = {saved.ranks for saved in of_site if saved.first == name.first}
    wanted = {rank for ranks in groups for rank in range(ranks) if rank % name.ranks == name.rank}
    missing = wanted - {saved.rank for saved in of_site if saved.first == name.first}
    if not groups or missing:
        raise PolicyError(
            f"{name.whose}: the state lacks rank"
            f" {', '.join(map(str, sorted(missing))) or name.rank} of the group that begins at"
            f" {name.first}; give every rank what commpass.state_dict(of=...) lists"
        )
    return total


def _foreign(some: Iterable[str], names: Iterable[str], have: str, value: str) -> str:
    some, names = sorted(some), sorted(names)
    return (
        f"error feedback of another model: {have} {', '.join(some)}; {value} {', '.join(names)}"
        + nearest(some[0], names)
    )


def _ambiguous(name: Name, subject: str) -> PolicyError:
    return PolicyError(
        f"error feedback of {name.whose} is {subject} several instances or functions of one name,"
        " so"
        " that it is not known whose it is. Give the model, as in commpass.state_dict(model) and"
        " commpass.load_state_dict(state, model), and functions names of their own"
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
            " code was compiled, so that it is not known whose it is. Leave it out: the first step"
            " then begins with zeros"
        )
    found = _NAME.fullmatch(versioned[2]) if versioned else None
    if found is None:
        raise PolicyError(
            f"{key!r} is no name of error feedback; those of commpass.state_dict() begin with"
            f" commpass.v{VERSION}/"
        )
    parameter, function, site, op, first, rank, ranks = found.groups()
    parameter = parameter.replace("%2F", "/").replace("%25", "%")
    return Name(parameter, function, site, op, first, int(rank), int(ranks))
