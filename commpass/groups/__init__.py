"""Process groups by name. The names in graphs are torch's own; these are the few questions that we
ask about them."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from commpass.errors import CommpassError, PolicyError, Unanswered


def ready() -> bool:
    """Whether torch.distributed has been initialised."""
    return dist.is_available() and dist.is_initialized()


def need_group(caller: str) -> None:
    """Raises PolicyError where there is no process group, with what to write."""
    if not ready():
        raise PolicyError(
            f"{caller}: there is no process group yet. Write"
            " torch.distributed.init_process_group() before it, and start the program with"
            " torchrun --nproc-per-node RANKS"
        )


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of that name, or None if there is none such here."""
    if not ready():
        return None
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def rank_in(name: str) -> int | None:
    """The number of this process among the ranks of a group, or None where it is not one of
    them."""
    group = group_named(name)
    return group.rank() if group is not None and group.rank() >= 0 else None


def sends_messages(name: str, device: str) -> bool:
    """Whether exchanges of a group are best sent as messages between pairs of ranks
    (``collectives.messages``): on a CPU, where gloo carries them."""
    group = group_named(name)
    if group is None or device != "cpu":
        return False
    try:
        carriers = dist.get_backend_config(group).split(",")
    except (KeyError, ValueError, AssertionError):  # nobody registered it
        return False
    return "cpu:gloo" in carriers


def ranks_of(name: str) -> tuple[int, ...]:
    """The global ranks of a group, in its own order; () where there is no such group here."""
    group = group_named(name)
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


class Members:
    """The ranks of some groups, and which of them this process is, when something was made for
    them. Torch gives a group that is made anew the name of an older one."""

    def __init__(self, names: Iterable[str]):
        self.known = {name: (_reference(name), _members(name)) for name in sorted(set(names))}

    def check(self) -> None:
        """Raises CommpassError where a group of that name has other ranks now."""
        for name, (known, before) in self.known.items():
            group = group_named(name)
            if group is None or group is known():  # without a group, torch says so
                continue
            if before[0] and (now := _members(name)) != before:
                raise CommpassError(OTHER_RANKS.format(name, *_as_text(before), *_as_text(now)))
            self.known[name] = (weakref.ref(group), before)


OTHER_RANKS = (
    "the process groups were made anew, and group {!r} has other ranks than when this graph was"
    " compiled: then {}, this process was {} of them; now {}, it is {}. The graph sends codes to"
    " the former. Call torch._dynamo.reset() on all ranks, and it is compiled again"
)


def _members(name: str) -> tuple[tuple[int, ...], int | None]:
    return ranks_of(name), rank_in(name)


def _reference(name: str) -> Callable[[], dist.ProcessGroup | None]:
    group = group_named(name)
    return weakref.ref(group) if group is not None else lambda: None


def _as_text(members: tuple[tuple[int, ...], int | None]) -> tuple[str, str]:
    ranks, own = members
    return f"ranks {', '.join(map(str, ranks))}", f"number {own}" if own is not None else "none"


def labels_of(name: str) -> tuple[str, ...]:
    """The labels of a group by name; () where there is no such group here."""
    group = group_named(name)
    return labels(group) if group is not None else ()


_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def duplicate(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the same ranks, backend, time-out and labels, in which exchanges keep an order
    of their own. All ranks of the group call this alike, and no others need to. Raises Unanswered
    where one of them does not within the group's time-out."""
    _close_idle()
    _numbers[group] = _numbers.get(group, 0) + 1
    name = f"{group.group_name}-twin-{_numbers[group]}"
    # torch counts the groups that a rank has at the moment. Ranks may have different numbers of
    # them, and a name that was there before leads to addresses where nobody listens any more.
    ranks = dist.get_process_group_ranks(group)
    try:
        with mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name):
            made = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout_of(group)) if timeout_of(group) else None,
                # by one name, since torch warns when it closes a group of several backends
                backend="gloo" if _is_gloo(group) else dist.get_backend_config(group),
                use_local_synchronization=True,
                group_desc=group.group_desc,
                sort_ranks=False,
            )
    except RuntimeError as error:
        raise Unanswered(
            f"rank {dist.get_rank()} waited in vain for a rank of {ranks} to make a group of the"
            f" same ranks as {group.group_name!r}, in which exchanges have an order of their own"
            f" ({str(error).splitlines()[0]}). All of them must make the same call of"
            " commpass.parallel: another one may have been refused there, and said why"
        ) from error
    _twins[made] = group
    return made


_idle: list[weakref.ref[dist.ProcessGroup]] = []


def close_with(owner: object, group: dist.ProcessGroup) -> None:
    """Lets a twin be closed once its ``owner`` is gone: when the next twin is made, since an owner
    may go in the middle of anything. On gloo alone, where a rank closes its part by itself."""
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
    """The groups that torch knows."""
    return dist.distributed_c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup) -> float:
    """The longest time-out of a group in seconds; 0.0 where it does not say."""
    found = [0.0]
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        given = getattr(options, "_timeout", None)
        found += [given.total_seconds()] if isinstance(given, timedelta) else []
    return max(found)


def labels(group: dist.ProcessGroup) -> tuple[str, ...]:
    """What users call a group: the dimensions of meshes that it belongs to, such as ``tp``; last
    ``world`` if all ranks are in it. Several where several meshes share a group, as those of one
    dimension do with the group of all ranks. A twin has those of its group."""
    group = _twins.get(group, group)
    own = (group.group_desc or "").removeprefix("mesh_")
    found = [] if own in ("", "undefined", "default_pg", "default") else [own]
    found += sorted(name for mesh in meshes() for name in _dimensions(mesh, group))
    found += ["world"] if group.size() == dist.get_world_size() else []
    return tuple(dict.fromkeys(found))


def _dimensions(mesh: DeviceMesh, group: dist.ProcessGroup) -> Iterator[str]:
    """The names of a mesh's dimensions whose group this is."""
    registry = getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {})
    rows = zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False)
    for dimension, (name, held) in enumerate(rows):
        # A mesh of before init_process_group was called again holds another group of this name.
        if (
            held == group.group_name
            and mesh.size(dimension) == group.size()
            and registry.get(held, group) is group
        ):
            yield name


def dimensions() -> tuple[str, ...]:
    """The names of the dimensions of every mesh of this process, and ``world``."""
    named = (name for mesh in meshes() for name in mesh.mesh_dim_names or ())
    return tuple(dict.fromkeys((*named, "world")))


class _Meshes:
    """Every mesh of this process. torch keeps no list of them, and a mesh of one dimension leaves
    no other trace: it shares the group of all ranks. So they are found as what refers to their
    class (30 to 130 ms): again when one of the counts that a new mesh changes is another."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[DeviceMesh]] = []
        self.counts: tuple[int, ...] = ()

    def all(self) -> list[DeviceMesh]:
        alive = [mesh for reference in self.seen if (mesh := reference()) is not None]
        if len(alive) != len(self.seen) or self.counts != _counts():
            found = [one for one in gc.get_referrers(DeviceMesh) if type(one) is DeviceMesh]
            known = set(map(id, found))
            # those among objects that gc.freeze() has set aside are not found again
            alive = [*found, *(mesh for mesh in alive if id(mesh) not in known)]
            self.seen = [weakref.ref(mesh) for mesh in alive]
            self.counts = _counts()
        return alive


_LAYOUT = getattr(device_mesh, "_MeshLayout", DeviceMesh)  # torch's own, and not promised


def _counts() -> tuple[int, ...]:
    """References to the class of meshes and to that of their layouts, and meshes made lately. A
    mesh holds a reference to both classes. One to either may go as a mesh is made, so that its
    count stays as it was, but hardly one to each."""
    return sys.getrefcount(DeviceMesh), sys.getrefcount(_LAYOUT), _recent_meshes()


def _recent_meshes() -> int:
    """How many meshes are among the objects made lately.

    One call of C code, within which no other thread runs: a tuple that another thread is just
    building is among these objects, and Python refuses to finish one that is referred to twice.
    """
    lately = itertools.chain.from_iterable(map(gc.get_objects, (0, 1)))
    return operator.countOf(map(type, lately), DeviceMesh)


meshes = _Meshes().all


def is_first_rank() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return not ready() or dist.get_rank() == 0
