"""Predict the steps of a model on a cluster that need not exist.

The model is traced with fake values in a fake process group of any size, and the cost model
predicts the times.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from commpass.backend import Backend, TracedGraph
from commpass.backend.records import GraphDump
from commpass.build_errors import check_call, name_of, named_errors, place_of
from commpass.costmodel import Profile
from commpass.distributed.machine import profile_here
from commpass.errors import CommpassError, PolicyError, check_quantity
from commpass.passes import GraphInput
from commpass.passes import run as run_passes
from commpass.passes.fx.parse import graph_modules
from commpass.passes.hidden import decided
from commpass.passes.timeline import NOTHING_SENT, timeline
from commpass.plan import Plan
from commpass.plan.timeline import Timeline
from commpass.plan.totals import totals
from commpass.policy import Policy, policy_named
from commpass.utils.deprecated import warn_renamed
from commpass.utils.keywords import named_arguments

Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]
"""A function that makes a model and its inputs, given the mesh of all ranks."""
Progress = Callable[[int, int, str], None]
"""A callback: the number of finished values of a sweep, their total, and the current step."""
RATES = {"gbit": "link", "intra_host_gbit": "intra_host_link"}
"""The names under which a sweep sets the rates of a profile's links, in Gbit/s."""
MOST_RANKS = 1 << 20
"""The most ranks of a simulated mesh: torch lists the ranks of every group."""
OLD_RATES = {"inside_gbit": "intra_host_gbit"}
"""Old names of rates, which work for one version."""


@dataclass(frozen=True)
class Simulated:
    """One step under one policy, as predicted for one rank.

    ``step_ms`` is the time of the step, ``exposed_ms`` the time that the rank waits for exchanges,
    both in milliseconds. ``wire_bytes`` counts the bytes handed to collectives. ``swept`` is the
    name and value that a sweep has set, if any. ``remarks`` name graphs that deviate from the
    policy, and graphs without a predicted time, which do not count.
    """

    policy: str
    ranks: int
    swept: tuple[str, float] | None
    step_ms: float
    exposed_ms: float
    sites: int
    compressed: int
    wire_bytes: int
    remarks: tuple[str, ...]

    @property
    def run(self) -> str:
        """The name of its run in a dump: "balanced", or "balanced-tp=4" in a sweep."""
        return _run_name(self.policy, self.swept)


def _run_name(policy: str, swept: tuple[str, float] | None) -> str:
    return f"{policy}-{swept[0]}={swept[1]:g}" if swept else policy


@named_arguments
def simulate(
    build: Build,
    profile: str | Path | Profile,
    mesh: Mapping[str, int],
    policies: Iterable[str | Path | Policy] = ("off", "lossless", "balanced"),
    *,
    sweep: tuple[str, Sequence[float]] | None = None,
    nodes: int | None = None,
    train: bool = True,
    progress: Progress | None = None,
    dump: str | Path | None = None,
) -> list[Simulated]:
    """Predict a step of a model on a cluster, under each policy.

    The model is traced once for all policies and links, and again for each mesh and each argument.

    Args:
        build: ``build(mesh)`` returns the model, already sharded over the mesh, and its inputs.
            They are made of fake tensors, which need no memory.
        profile: the cluster: a Profile, a name such as ``"dgx-h100"``, or a file.
        mesh: sizes by name of dimension; their product is the number of ranks.
        policies: the policies to compare, each as in ``commpass.backend``.
        sweep: one parameter and its values: a mesh dimension, ``gbit`` or ``intra_host_gbit`` of
            the profile's links, or an argument of ``build``.
        nodes: the number of hosts of the profile. The mesh must then have exactly their GPUs.
        dump: a folder for the plans and graphs, for ``commpass explain`` and related commands; None
            for none. Each policy and value is a run there, named as ``Simulated.run``.
        train: whether the sum of all outputs also runs backward.
        progress: called with the number of finished predictions, their total, and what is next;
            None for no calls.

    Raises CommpassError if a process group exists already, if a name cannot be swept, if the mesh
    does not fit ``nodes``, or if the model needs a tensor's value.
    """
    if dist.is_initialized():
        raise CommpassError("simulate makes process groups of its own: there must be none before")
    known = profile_here(profile)
    if known is None:
        raise CommpassError("simulate needs a profile: a name, a file, or COMMPASS_PROFILE")
    chosen = [policy_named(policy) for policy in policies]
    values = sweep[1] if sweep else (None,)
    cases = [
        _swept((sweep[0], value) if sweep and value is not None else None, dict(mesh), known)
        for value in values
    ]
    for case in cases:
        if prod(case.sizes.values()) > MOST_RANKS:
            raise CommpassError(
                f"mesh {mesh_text(case.sizes)} has more than {MOST_RANKS:,} ranks: must be fewer"
            )
    if nodes is not None:
        for case in cases:
            check_gpus(case.sizes, known, nodes)
    found: list[Simulated] = []
    done = 0
    for _, alike in groupby(cases, key=lambda case: (case.sizes, case.more)):
        same = list(alike)

        def describe(message: str, same: Sequence[_Case] = same, done: int = done) -> None:
            if progress is not None:
                which = same[0].set_to
                where = f"{which[0]}={which[1]:g}: " if which and len(same) == 1 else ""
                progress(done, len(cases), where + message)

        runs = [_Run(policy, case) for case in same for policy in chosen]
        with _fake_ranks(same[0].sizes) as ranks:
            _plan(build, ranks, runs, train, describe, Path(dump) if dump is not None else None)
        found += map(_summed, runs)
        done += len(same)
    return found


@dataclass(frozen=True)
class _Case:
    """The simulation for one value of a sweep. ``more`` holds additional arguments of ``build``."""

    set_to: tuple[str, float] | None
    sizes: dict[str, int]
    profile: Profile
    more: dict[str, Any]


@dataclass(frozen=True)
class _Graph:
    """The plan and predicted times of one graph."""

    plan: Plan
    times: Timeline


@dataclass
class _Run:
    """One step under one policy and profile, with the results of its graphs. ``hidden`` holds what
    a backend remembers of earlier graphs."""

    policy: Policy
    case: _Case
    graphs: list[_Graph] = field(default_factory=list)
    hidden: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _run_name(self.policy.name, self.case.set_to)


def _swept(set_to: tuple[str, float] | None, mesh: dict[str, int], profile: Profile) -> _Case:
    """Return mesh, profile and additional arguments of ``build`` with one parameter set."""
    for name, size in mesh.items():
        if not isinstance(size, int) or size < 1:
            raise CommpassError(f"mesh {name}={size!r}: must be a number of ranks")
    if set_to is None:
        return _Case(None, mesh, profile, {})
    name, value = set_to
    if name in OLD_RATES and name not in mesh:
        warn_renamed(f"sweep of {name!r}", repr(OLD_RATES[name]))
        name = OLD_RATES[name]
        set_to = name, value
    whole: Any = int(value) if float(value).is_integer() else value
    if name in mesh:
        if not isinstance(whole, int) or whole < 1:
            raise CommpassError(f"{name}={value}: must be a number of ranks")
        return _Case(set_to, {**mesh, name: whole}, profile, {})
    if name in RATES:
        which = RATES[name]
        link = getattr(profile, which)
        if link is None:
            raise CommpassError(f"{name}: the profile knows no link inside a host")
        if link.measured:
            raise CommpassError(f"{name}: this profile was measured, and has no one rate to set")
        check_quantity(name, value, above=True)
        faster = dataclasses.replace(link, gbytes_per_s=value / 8)
        set_profile = dataclasses.replace(profile, **{which: faster})
        return _Case(set_to, mesh, set_profile, {})
    return _Case(set_to, mesh, profile, {name: whole})


def check_gpus(sizes: Mapping[str, int], profile: Profile, nodes: int) -> None:
    """Raise CommpassError unless a mesh of these sizes has the GPUs of ``nodes`` hosts."""
    if not profile.ranks_per_host:
        raise CommpassError(
            f"nodes={nodes}: profile {profile.name!r} does not say how many GPUs a node has: name a"
            " machine such as dgx-h100, or give the profile ranks_per_host"
        )
    if not isinstance(nodes, int) or nodes < 1:
        raise CommpassError(f"nodes={nodes!r}: must be a number of nodes")
    ranks, gpus = prod(sizes.values()), nodes * profile.ranks_per_host
    if ranks == gpus:
        return
    first = next(iter(sizes))
    others = ranks // sizes[first]
    fits = {**sizes, first: gpus // others} if gpus % others == 0 else None
    raise CommpassError(
        f"mesh {mesh_text(sizes)} has {ranks:,} ranks, but {nodes:,} nodes of {profile.name} have"
        f" {gpus:,} GPUs: " + (f"write {mesh_text(fits)}" if fits else "change its sizes")
    )


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a mesh as the command line takes them: ``dp=8,tp=8``."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@contextmanager
def _fake_ranks(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Yield a mesh for rank 0 of a fake process group, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    many = prod(sizes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=many)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


class _Planner(Backend):
    """Plans every graph once per run, and executes it unchanged."""

    def __init__(self, runs: Sequence[_Run], report: Callable[[str], None], folder: Path | None):
        super().__init__(policy_named("off"), "eager", runs[0].case.profile, False, None, None)
        self.folder = folder
        self.runs, self.on_step = runs, report

    def compile(self, graph: TracedGraph) -> Any:
        gm, direction, calls = graph.gm, graph.direction, graph.calls
        for run in self.runs:
            profile = run.case.profile
            self.on_step(f"{direction}, policy {run.policy.name}")
            untouched = {module: copy.deepcopy(module.graph) for _, module in graph_modules(gm)}
            given = GraphInput(
                gm=gm,
                direction=direction,
                policy=run.policy,
                profile=profile,
                decompositions=graph.decompositions,
                stateless=graph.stateless,
                weights=calls.weights(gm, direction, graph.stateless),
                unsupported_reason=graph.unsupported_reason,
                hidden=run.hidden,
                hides=True,
            )
            dump = GraphDump(self.folder, run.name, run.policy)
            outcome = run_passes(given, graph.number, on_pass_end=dump.on_pass_end)
            if isinstance(outcome.error, PolicyError):
                raise outcome.error
            run.hidden |= decided(outcome.plan)
            dump.write(outcome)
            run.graphs.append(_Graph(outcome.plan, timeline(gm, outcome, profile)))
            for module, before in untouched.items():
                module.graph = before
        if direction == "backward":
            calls.keeps_state = False
        return graph.compile_graph(gm, [], False)


def _plan(
    build: Build,
    mesh: DeviceMesh,
    runs: Sequence[_Run],
    train: bool,
    report: Callable[[str], None],
    folder: Path | None,
) -> None:
    """Trace one step and plan its graphs for each run."""
    torch._dynamo.reset()
    try:
        with FakeTensorMode() as mode, nullcontext() if train else torch.no_grad():
            report("building the model")
            with _without_memo(mode), patch.object(Shard, "_shard_tensor", _first_shard):
                model, inputs = _built(build, mesh, runs[0].case.more)
            report("tracing")
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
            what = f"the model of {name_of(build)} does not run on mesh {mesh_text(sizes)}"
            with named_errors(what, mesh, [model]), _without_tracebacks():
                given = torch.compile(model, backend=_Planner(runs, report, folder))(*inputs)
            if train:
                _backward(given)
    except DataDependentOutputException as error:
        raise CommpassError(
            f"the model asks for a value of a tensor{place_of(error)} ({error.func}), and a"
            " simulation has none: leave out .item(), .tolist() and branches on values"
        ) from error
    finally:
        torch._dynamo.reset()
    if not runs[0].graphs:
        raise CommpassError("nothing of the model was compiled: is it a module or a function?")


def _first_shard(self: Shard, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, *_: Any) -> Tensor:
    """Return rank 0's shard of a tensor. DTensor would make and send one tensor per rank."""
    rows = -(-tensor.size(self.dim) // mesh.size(mesh_dim))
    shape = list(tensor.shape)
    shape[self.dim] = rows
    return tensor.new_empty(shape)


class _NoRecord(WeakValueDictionary):
    """A dictionary that stores nothing."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


@contextmanager
def _without_memo(mode: FakeTensorMode) -> Iterator[None]:
    """Keep a fake mode from remembering which fake tensor stands for which.

    A remembered reference to a parameter would prevent ``module.to(dtype)`` from replacing it.
    """
    converter = mode.fake_tensor_converter.meta_converter
    memo, converter.tensor_memo = converter.tensor_memo, _NoRecord()
    try:
        yield
    finally:
        converter.tensor_memo = memo


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging the traceback of a fake operator that fails: the error is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_no_error)
    try:
        yield
    finally:
        log.removeFilter(_no_error)


def _no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _built(build: Build, mesh: DeviceMesh, more: Mapping[str, Any]) -> Any:
    """Return the model and the inputs that a build function makes."""
    check_call(build, mesh, more, list(RATES))
    with named_errors(f"{name_of(build)} failed", mesh):
        found: Any = build(mesh, **more)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], (list, tuple)):
        raise CommpassError(
            f"{name_of(build)}(mesh) gave {type(found).__name__}, but must give a model and a tuple"
            " of its inputs"
        )
    if not callable(found[0]):
        raise CommpassError(
            f"{name_of(build)}(mesh) gave {type(found[0]).__name__} as the model: must be a module"
            " or a function"
        )
    return found


def _backward(inputs: Any) -> None:
    """Run backward from the sum of all outputs."""
    sums = [x.sum() for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    if not sums:
        raise CommpassError("nothing that the model gives needs a gradient: simulate inference")
    torch.stack([each.float() for each in sums]).sum().backward()


def _summed(run: _Run) -> Simulated:
    times = [graph.times for graph in run.graphs]
    of = totals(graph.plan for graph in run.graphs)
    return Simulated(
        policy=run.policy.name,
        ranks=prod(run.case.sizes.values()),
        swept=run.case.set_to,
        step_ms=round(sum(each.us for each in times) / 1e3, 3),
        exposed_ms=round(sum(each.exposed_us for each in times) / 1e3, 3),
        sites=of.sites,
        compressed=of.compressed,
        wire_bytes=of.wire_bytes,
        remarks=tuple(filter(None, map(_remark, range(len(run.graphs)), run.graphs))),
    )


def _remark(number: int, graph: _Graph) -> str:
    """Return a remark on a graph whose time does not count or needs a note, else ""."""
    times, what = graph.times, f"graph {number} ({graph.plan.direction})"
    if not (times.events or times.note == NOTHING_SENT):
        return f"{what} does not count: {times.note}"
    return f"{what}: {times.note}" if times.note not in ("", NOTHING_SENT) else ""
