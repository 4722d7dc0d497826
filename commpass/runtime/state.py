"""Error feedback: what each site has not yet sent, kept between calls, saved, and shared out anew when the ranks change.

A *residual* belongs to one site on one rank. It has the shape of the site's tensor and the dtype in which sums are made; the
compiled graph takes it as an input and changes it in place. Its name in ``state_dict()`` says all that is needed to read it
back: ``commpass.v1/<site>/<op>/<world, or the first rank of the group>/<rank>of<ranks>``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.errors import PolicyError, nearest
from commpass.groups import group_named, rank_in, ready
from commpass.passes.rewrite import Kept

VERSION = 1
_NAME = re.compile(r"commpass\.v(\d+)/(.+)/(sum|avg)/(world|\d+)/(\d+)of(\d+)")


@dataclass(frozen=True)
class Name:
    """Whose residual a tensor is: of a site, on rank ``rank`` of the ``ranks`` of the group whose first rank is ``first``
    ("world" for the group of all ranks)."""

    site: str
    op: str
    first: str
    rank: int
    ranks: int

    def __str__(self) -> str:
        return f"commpass.v{VERSION}/{self.site}/{self.op}/{self.first}/{self.rank}of{self.ranks}"

    def takes(self, saved: Name) -> bool:
        """Whether this rank carries on with what ``saved`` had not sent."""
        same = (saved.site, saved.op, saved.first) == (self.site, self.op, self.first)
        return same and saved.rank % self.ranks == self.rank


_residuals: dict[Name, Tensor] = {}
_waiting: dict[Name, Tensor] = {}
_frames: dict[str, list[Any]] = {}


def residual(kept: Kept, frame: Any) -> Tensor:
    """The residual of a site: zeros when it is first asked for, or what was loaded for it. ``frame`` is whose graph it is in: a
    function that is compiled again keeps its residuals. Raises PolicyError if state was loaded that this site is not part
    of."""
    frames = _frames.setdefault(kept.site, [])
    if frame not in frames:
        frames.append(frame)
    number = frames.index(frame)
    site = kept.site if number == 0 else f"{kept.site}#{number + 1}"
    ranks = _ranks(kept.group)
    everybody = not ready() or len(ranks) == dist.get_world_size()
    name = Name(site, kept.op, "world" if everybody else str(ranks[0]), rank_in(kept.group) or 0, len(ranks))
    if name not in _residuals:
        made = torch.zeros(kept.shape, dtype=kept.dtype, device=kept.device)
        if _waiting:
            made += _loaded(name, made)
            for taken in [saved for saved in _waiting if saved.site == name.site]:  # what others take is not this rank's
                del _waiting[taken]
        _residuals[name] = made
    return _residuals[name]


def _ranks(group: str) -> list[int]:
    here = group_named(group)
    return dist.get_process_group_ranks(here) if here is not None else [0]


def state_dict(of: str | os.PathLike[str] | None = None, prefix: str = "commpass") -> dict[str, Tensor]:
    """This rank's residuals by name: of this process, or with ``of`` empty ones to load those of a checkpoint into.

        dcp.save({"model": ..., "commpass": commpass.state_dict()}, checkpoint_id=path)

        state = commpass.state_dict(of=path)
        dcp.load({"commpass": state}, checkpoint_id=path)
        commpass.load_state_dict(state)

    ``of`` is a folder that ``torch.distributed.checkpoint`` wrote, in which the residuals stand under ``prefix``. The number
    of ranks may be another one: each rank is given those that it carries on with. What was loaded and not yet asked for by a
    graph is part of the state. Raises PolicyError where the folder holds no checkpoint.
    """
    if of is None:
        return {str(name): tensor for name, tensor in (_waiting | _residuals).items()}
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        stored = FileSystemReader(of).read_metadata().state_dict_metadata
    except OSError as error:
        raise PolicyError(f"{os.fspath(of)}: no checkpoint of torch.distributed.checkpoint: {error.strerror}") from error
    found = {key.removeprefix(prefix + "."): entry for key, entry in stored.items() if key.startswith(f"{prefix}.commpass.v")}
    rank, world = (dist.get_rank(), dist.get_world_size()) if ready() else (0, 1)
    state = {}
    for key, entry in found.items():
        name = _parse(key)
        # Of a group that is not the world it is not yet known who is in it now: all of them are read.
        if isinstance(entry, TensorStorageMetadata) and (name.first != "world" or name.rank % world == rank):
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    return state


def load_state_dict(state: Mapping[str, Tensor]) -> None:
    """Carries on with residuals that ``state_dict`` gave, of as many ranks or of others; an empty one begins again with zeros.

    Sites whose graphs are not compiled yet take theirs when they are. Raises PolicyError for what is no such state, or is that
    of another model, shape or version, with what was expected; nothing is changed then.
    """
    given: dict[Name, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise PolicyError(f"{key!r} is {type(tensor).__name__}, but error feedback is kept in tensors")
        given[_parse(key)] = tensor
    loaded: dict[Name, Tensor] = {}
    if given:
        for name, tensor in _residuals.items():
            loaded[name] = _shared(name, tensor, given)
        left = {saved.site for saved in given} - {name.site for name in _residuals}
        if _residuals and left:
            raise PolicyError(
                _foreign(sorted(left), sorted({name.site for name in _residuals}), "was loaded", "this model has")
            )
    for name, tensor in _residuals.items():
        tensor.copy_(loaded[name]) if given else tensor.zero_()
    _waiting.clear()
    _waiting.update({} if _residuals else given)


def _loaded(name: Name, like: Tensor) -> Tensor:
    return _shared(name, like, _waiting)


def _shared(name: Name, like: Tensor, given: Mapping[Name, Tensor]) -> Tensor:
    """What one rank carries on with: the sum over ranks stays what it was (for a mean, that divided by the number of ranks)."""
    of_site = {saved: tensor for saved, tensor in given.items() if saved.site == name.site}
    if not of_site:
        raise PolicyError(_foreign([name.site], sorted({saved.site for saved in given}), "this model has", "was loaded"))
    total = torch.zeros_like(like)
    for saved, tensor in sorted(of_site.items(), key=lambda pair: pair[0].rank):
        if saved.op != name.op:
            raise PolicyError(f"{name.site}: the state is of a {saved.op}, but here it is a {name.op}")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise PolicyError(
                f"{name.site}: the state is {list(tensor.shape)} of {tensor.dtype}, but here it is "
                f"{list(like.shape)} of {like.dtype}"
            )
        if name.takes(saved):
            scale = name.ranks / saved.ranks if name.op == "avg" else 1.0
            total += tensor.to(like.device) * scale
    groups = {saved.ranks for saved in of_site if saved.first == name.first}
    wanted = {rank for ranks in groups for rank in range(ranks) if rank % name.ranks == name.rank}
    missing = wanted - {saved.rank for saved in of_site if saved.first == name.first}
    if not groups or missing:
        raise PolicyError(
            f"{name.site}: the state lacks rank {', '.join(map(str, sorted(missing))) or name.rank} of the group that "
            f"begins at {name.first}; give every rank what commpass.state_dict(of=...) lists"
        )
    return total


def _foreign(sites: list[str], others: list[str], have: str, other: str) -> str:
    return f"error feedback of another model: {have} {', '.join(sites)}; {other} {', '.join(others)}" + nearest(
        sites[0], others
    )


def _parse(key: str) -> Name:
    found = _NAME.fullmatch(key)
    if found is None:
        raise PolicyError(
            f"{key!r} is no name of error feedback; those of commpass.state_dict() begin with commpass.v{VERSION}/"
        )
    version, site, op, first, rank, ranks = found.groups()
    if int(version) > VERSION:
        raise PolicyError(f"{key!r}: the state is of version {version}, this commpass reads up to {VERSION}: update commpass")
    return Name(site, op, first, int(rank), int(ranks))
