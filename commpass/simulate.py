"""The plans of a model on a cluster that is not there: traced with fake values in a fake process
group of any size, with the times that the cost model predicts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from commpass.backend import backend
from commpass.costmodel import Profile
from commpass.dump import Dump, read_run
from commpass.errors import CommpassError, nearest
from commpass.passes.timeline import NOTHING_SENT
from commpass.policy import Policy, policy_named
from commpass.runtime.machine import profile_here

Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]
"""What makes a model and its inputs, given the mesh of all ranks."""
RATES = {"gbit": "link", "inside_gbit": "inside"}
"""What a sweep calls the rates of a profile's links, in Gbit/s."""


@dataclass(frozen=True)
class Simulated:
    """One step under one policy, as predicted of one rank: milliseconds of the step, those for
    which the rank waits for exchanges, and bytes that it hands to collectives. ``swept`` is the
    name and value that a sweep has set, if there was one. ``remarks`` say which graphs are not as
    the policy would have them, or do not count because the cost model cannot tell their time."""

    policy: str
    ranks: int
    swept: tuple[str, float] | None
    step_ms: float
    exposed_ms: float
    sites: int
    compressed: int
    wire_bytes: int
    remarks: tuple[str, ...]


def simulate(
    build: Build,
    profile: str | Path | Profile,
    mesh: Mapping[str, int],
    policies: Iterable[str | Path | Policy] = ("off", "lossless", "balanced"),
    *,
    sweep: tuple[str, Sequence[float]] | None = None,
    train: bool = True,
) -> list[Simulated]:
    """What a step of a model would take on a cluster, under each policy.

    ``build(mesh)`` gives the model, divided over the mesh as it will be, and its inputs; what it
    makes are fake tensors, which need no memory. ``mesh`` are the sizes of its dimensions, by name;
    as many ranks as their product. With ``train`` the sum of all that the model gives runs
    backward. ``sweep`` sets one thing to several values: a dimension of the mesh, ``gbit`` or
    ``inside_gbit`` of the profile's links, or an argument of ``build``.

    No process group may be there already. Raises CommpassError for that, for a name that cannot be
    swept, and where a model asks for values.
    """
    if dist.is_initialized():
        raise CommpassError("simulate makes process groups of its own: there must be none before")
    known = profile_here(profile)
    if known is None:
        raise CommpassError("simulate needs a profile: a name, a file, or COMMPASS_PROFILE")
    chosen = [policy_named(policy) for policy in policies]
    found = []
    for value in sweep[1] if sweep else (None,):
        set_to = (sweep[0], value) if sweep and value is not None else None
        sizes, on, more = _swept(set_to, dict(mesh), known)
        with _fake_ranks(sizes) as ranks:
            for policy in chosen:
                dumps = _planned(build, ranks, on, policy, more, train)
                found.append(_summed(policy, prod(sizes.values()), set_to, dumps))
    return found


def _swept(
    set_to: tuple[str, float] | None, mesh: dict[str, int], profile: Profile
) -> tuple[dict[str, int], Profile, dict[str, Any]]:
    """Mesh, profile and further arguments of ``build`` with one thing set."""
    for name, size in mesh.items():
        if not isinstance(size, int) or size < 1:
            raise CommpassError(f"mesh {name}={size!r}: must be a number of ranks")
    if set_to is None:
        return mesh, profile, {}
    name, value = set_to
    whole: Any = int(value) if float(value).is_integer() else value
    if name in mesh:
        if not isinstance(whole, int) or whole < 1:
            raise CommpassError(f"{name}={value}: must be a number of ranks")
        return {**mesh, name: whole}, profile, {}
    if name in RATES:
        field = RATES[name]
        link = getattr(profile, field)
        if link is None:
            raise CommpassError(f"{name}: the profile knows no link inside a host")
        if link.measured:
            raise CommpassError(f"{name}: this profile was measured, and has no one rate to set")
        faster = dataclasses.replace(link, gbytes_per_s=value / 8)
        return mesh, dataclasses.replace(profile, **{field: faster}), {}
    return mesh, profile, {name: whole}


@contextmanager
def _fake_ranks(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Rank 0 of so many, with a mesh; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    many = prod(sizes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=many)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def _planned(
    build: Build,
    mesh: DeviceMesh,
    profile: Profile,
    policy: Policy,
    more: Mapping[str, Any],
    train: bool,
) -> list[Dump]:
    """The dumps of all graphs of one step."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        made = backend(policy, inner="eager", profile=profile, dump=folder)
        try:
            with FakeTensorMode() as mode, nullcontext() if train else torch.no_grad():
                with _forgetful(mode):
                    model, inputs = _built(build, mesh, more)
                given = torch.compile(model, backend=made)(*inputs)
                if train:
                    _backward(given)
        except DataDependentOutputException as error:
            raise CommpassError(
                f"the model asks for a value ({error.func}), and a simulation has none"
            ) from error
        finally:
            torch._dynamo.reset()
        if not any(Path(folder).iterdir()):
            raise CommpassError("nothing of the model was compiled: is it a module or a function?")
        return read_run(Path(folder))


class _Nothing(WeakValueDictionary):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


@contextmanager
def _forgetful(mode: FakeTensorMode) -> Iterator[None]:
    """A mode that does not remember which fake tensor stands for which: who refers to a parameter
    keeps ``module.to(dtype)`` from putting another one in its place."""
    converter = mode.fake_tensor_converter.meta_converter
    kept, converter.tensor_memo = converter.tensor_memo, _Nothing()
    try:
        yield
    finally:
        converter.tensor_memo = kept


def _built(build: Build, mesh: DeviceMesh, more: Mapping[str, Any]) -> Any:
    try:
        found = build(mesh, **more)
    except TypeError as error:
        if unknown := [name for name in more if f"'{name}'" in str(error)]:
            names = [*(mesh.mesh_dim_names or ()), *RATES]
            raise CommpassError(
                f"{unknown[0]!r} cannot be swept: it is no argument of {build.__name__}"
                f"{nearest(unknown[0], names)}"
            ) from error
        raise
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], (list, tuple)):
        raise CommpassError(
            f"{build.__name__}(mesh) gave {type(found).__name__}, but must give a model and a tuple"
            " of its inputs"
        )
    return found


def _backward(given: Any) -> None:
    """Backward of all that a model gives."""
    sums = [x.sum() for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    if not sums:
        raise CommpassError("nothing that the model gives needs a gradient: simulate inference")
    torch.stack([each.float() for each in sums]).sum().backward()


def _summed(
    policy: Policy, ranks: int, swept: tuple[str, float] | None, dumps: Sequence[Dump]
) -> Simulated:
    times = [dump.timeline for dump in dumps if dump.timeline is not None]
    sites = [site for dump in dumps for site in dump.plan]
    return Simulated(
        policy=policy.name,
        ranks=ranks,
        swept=swept,
        step_ms=round(sum(each.us for each in times) / 1e3, 3),
        exposed_ms=round(sum(each.exposed_us for each in times) / 1e3, 3),
        sites=len(sites),
        compressed=sum(site.compressed for site in sites),
        wire_bytes=sum(max(site.wire_bytes, 0) for site in sites),
        remarks=tuple(filter(None, map(_remark, dumps))),
    )


def _remark(dump: Dump) -> str:
    """What is to be known of a graph beside its times."""
    times, what = dump.timeline, f"graph {dump.number} ({dump.plan.direction})"
    if times is None or not (times.events or times.note == NOTHING_SENT):
        return f"{what} does not count: {times.note if times is not None else 'it has no timeline'}"
    return f"{what}: {times.note}" if times.note not in ("", NOTHING_SENT) else ""
