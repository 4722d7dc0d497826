"""Process groups by name, as torch names them in graphs, and queries on them."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from commpass.errors import CommpassError, PolicyError, Unanswered

P = ParamSpec("P")
R = TypeVar("R")


_kept: ContextVar[dict[Any, Any] | None] = ContextVar("_kept", default=None)


@contextmanager
def unchanged() -> Iterator[None]:
    """Look up each property of a group once in this context, in which groups do not change."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _looked_up_once(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the results of a function in the context ``unchanged``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if (known := _kept.get()) is None:
            return function(*args, **kwargs)
        key = function, args, tuple(kwargs.items())
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return run


def ready() -> bool:
    """Whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


THREADS = (
    "the ranks are threads of one process (backend 'threaded'), and torch.compile compiles one"
    " thread at a time: none can wait for the plans of the others. Start a process for each rank"
)


def unsupported_reason() -> str | None:
    """Return why no collective of this process may be changed, else None."""
    return THREADS if ready() and dist.get_backend() == "threaded" else None


def need_group(caller: str) -> None:
    """Raise PolicyError with instructions if there is no process group."""
    if not ready():
        raise PolicyError(
            f"{caller}: there is no process group yet. Write"
            " torch.distributed.init_process_group() before it, and start the program with"
            " torchrun --nproc-per-node RANKS"
        )


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of that name, or None if it does not exist here."""
    if not ready():
        return None
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


@_looked_up_once
def rank_in(name: str) -> int | None:
    """Return the number of this process among the ranks of a group, or None if it is not one of
    them."""
    group = group_named(name)
    return group.rank() if group is not None and group.rank() >= 0 else None


@_looked_up_once
def sends_messages(name: str, device: str) -> bool:
    """Whether exchanges of a group are best sent as messages between pairs of ranks
    (``collectives.messages``). True on a CPU with gloo."""
    group = group_named(name)
    if group is None or device != "cpu":
        return False
    try:
        carriers = dist.get_backend_config(group).split(",")
    except (KeyError, ValueError, AssertionError):  # not registered
        return False
    return "cpu:gloo" in carriers


@_looked_up_once
def ranks_of(name: str) -> tuple[int, ...]:
    """Return the global ranks of a group in its own order, or () if the group does not exist
    here."""
    group = group_named(name)
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


class Members:
    """The ranks of some groups, and this process's number in them, when a graph was compiled.

    torch may give a new group the name of an older one.
    """

    def __init__(self, names: Iterable[str]):
        self.known = {name: (_reference(name), _members(name)) for name in sorted(set(names))}

    def check(self) -> None:
        """Raise CommpassError if a group of that name now has other ranks."""
        for name, (known, before) in self.known.items():
            group = group_named(name)
            if group is None or group is known():  # torch itself raises for a missing group
                continue
            if before[0] and (now := _members(name)) != before:
                raise CommpassError(OTHER_RANKS.format(name, *_as_text(before), *_as_text(now)))
            self.known[name] = (weakref.ref(group), before)


OTHER_RANKS = (
    "the process groups were created again, and group {!r} has other ranks than when this graph was"
    " compiled. It had {}, with this process as {}; now it has {}, with this process as {}. The"
    " compiled graph fits the former. Call torch._dynamo.reset() on all ranks to compile it again"
)


def _members(name: str) -> tuple[tuple[int, ...], int | None]:
    return ranks_of(name), rank_in(name)


def _reference(name: str) -> Callable[[], dist.ProcessGroup | None]:
    group = group_named(name)
    return weakref.ref(group) if group is not None else lambda: None


def _as_text(members: tuple[tuple[int, ...], int | None]) -> tuple[str, str]:
    ranks, own = members
    return f"ranks {', '.join(map(str, ranks))}", f"number {own}" if own is not None else "none"


@_looked_up_once
def labels_of(name: str) -> tuple[str, ...]:
    """Return the labels of a group by name, or () if the group does not exist here."""
    group = group_named(name)
    return labels(group) if group is not None else ()


_originals: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def duplicate(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks, backend, time-out and labels, with a separate order of
    exchanges.

    All ranks of the group must make this call, and no others. Raises Unanswered if one of them does
    not within the group's time-out.
    """
    _close_idle()
    _numbers[group] = _numbers.get(group, 0) + 1
    name = f"{group.group_name}-twin-{_numbers[group]}"
    # torch names groups by the rank's current number of groups. Ranks may have different numbers,
    # and a reused name leads to addresses where no process listens any more.
    ranks = dist.get_process_group_ranks(group)
    order: Any = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # torch 2.11 sorts all
    try:
        with mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name):
            made = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout_of(group)) if timeout_of(group) else None,
                # a single name, because torch warns when it closes a group of several backends
                backend="gloo" if _is_gloo(group) else dist.get_backend_config(group),
                use_local_synchronization=True,
                group_desc=group.group_desc,
                **order,
            )
        if _is_gloo(made):  # a rank that closes it at once would disconnect one still connecting
            dist.barrier(group=made)
    except RuntimeError as error:
        raise Unanswered(
            f"rank {dist.get_rank()} could not create a second process group for ranks {ranks} of"
            f" {group.group_name!r}, since another rank did not take part in time"
            f" ({str(error).splitlines()[0]}). All of them must make the same call of"
            " commpass.parallel. If that call failed on another rank, its error has the reason"
        ) from error
    _originals[made] = group
    return made


_idle: list[weakref.ref[dist.ProcessGroup]] = []


def close_with(owner: object, group: dist.ProcessGroup) -> None:
    """Close a duplicate group after its ``owner`` is freed.

    It is closed when the next duplicate is made, because an owner may be freed at any point. Only
    on gloo, where one rank can close its part without the others.
    """
    if _is_gloo(group):
        weakref.finalize(owner, _idle.append, weakref.ref(group)).atexit = False


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo carries all of a group's exchanges."""
    carriers = dist.get_backend_config(group).split(",")
    return all(carrier.endswith(":gloo") for carrier in carriers)


def _close_idle() -> None:
    while _idle:
        group = _idle.pop()()
        if group is not None and group in _known():
            dist.destroy_process_group(group)


def _known() -> Any:
    """Return the groups that torch has registered."""
    return dist.distributed_c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the longest time-out of a group in seconds, or 0.0 if it has none."""
    found = [0.0]
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        given = getattr(options, "_timeout", None)
        found += [given.total_seconds()] if isinstance(given, timedelta) else []
    return max(found)


def labels(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the labels of a group: the mesh dimensions that it belongs to, such as ``tp``, and
    last ``world`` if it has all ranks.

    There are several if meshes share a group, as one-dimensional meshes share the group of all
    ranks. A duplicate has the labels of its original.
    """
    group = _originals.get(group, group)
    own = (group.group_desc or "").removeprefix("mesh_")
    found = [] if own in ("", "undefined", "default_pg", "default") else [own]
    found += sorted(name for mesh in meshes() for name in _dimensions(mesh, group))
    found += ["world"] if group.size() == dist.get_world_size() else []
    return tuple(dict.fromkeys(found))


def _dimensions(mesh: DeviceMesh, group: dist.ProcessGroup) -> Iterator[str]:
    """Yield the names of a mesh's dimensions that use this group."""
    registry = getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {})
    rows = zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False)
    for dimension, (name, held) in enumerate(rows):
        # A mesh from before a repeated init_process_group holds another group of this name.
        if (
            held == group.group_name
            and mesh.size(dimension) == group.size()
            and registry.get(held, group) is group
        ):
            yield name


def dimensions() -> tuple[str, ...]:
    """Return the names of the dimensions of every mesh of this process, and ``world``."""
    named = (name for mesh in meshes() for name in mesh.mesh_dim_names or ())
    return tuple(dict.fromkeys((*named, "world")))


class _Meshes:
    """Finds every mesh of this process.

    torch keeps no list of them, and a one-dimensional mesh leaves no other trace, because it shares
    the group of all ranks. Meshes are therefore found as referrers of their class (30 to 130 ms).
    The search is repeated if a count that a new mesh changes has changed.
    """

    def __init__(self) -> None:
        self.seen: list[weakref.ref[DeviceMesh]] = []
        self.counts: tuple[int, ...] = ()

    def all(self) -> list[DeviceMesh]:
        alive = [mesh for reference in self.seen if (mesh := reference()) is not None]
        if len(alive) != len(self.seen) or self.counts != _counts():
            found = [one for one in gc.get_referrers(DeviceMesh) if type(one) is DeviceMesh]
            known = set(map(id, found))
            # objects set aside by gc.freeze() are not found again
            alive = [*found, *(mesh for mesh in alive if id(mesh) not in known)]
            self.seen = [weakref.ref(mesh) for mesh in alive]
            self.counts = _counts()
        return alive


_LAYOUT = getattr(device_mesh, "_MeshLayout", DeviceMesh)  # private to torch


def _counts() -> tuple[int, ...]:
    """Return the reference counts of the mesh class and its layout class, and the number of recent
    meshes.

    A mesh refers to both classes. If another reference to one class disappears when a mesh is made,
    its count stays equal; for both at once this is unlikely.
    """
    return sys.getrefcount(DeviceMesh), sys.getrefcount(_LAYOUT), _recent_meshes()


def _recent_meshes() -> int:
    """Return how many meshes are among the recently created objects.

    This is one call of C code, during which no other thread runs. These objects include tuples that
    another thread is building, and Python refuses to finish a tuple that is referenced twice.
    """
    lately = itertools.chain.from_iterable(map(gc.get_objects, (0, 1)))
    return operator.countOf(map(type, lately), DeviceMesh)


meshes = _Meshes().all


def is_first_rank() -> bool:
    """Whether this process reports for all: rank 0, or the only process."""
    return not ready() or dist.get_rank() == 0
