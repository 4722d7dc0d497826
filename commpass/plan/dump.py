"""Dumps: one JSON file a compiled graph, readable on any machine, without ranks and without torch.

``backend(..., dump="dir")`` (or ``COMMPASS_DUMP=dir``) makes rank 0 write ``dir/0000-forward.json``
and so on; the number is the next free one, so that no earlier dump is lost. A file holds the plan,
and the graph before and after.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from commpass.errors import DumpError, nearest
from commpass.plan import Candidate, Plan, PlannedSite
from commpass.plan.kinds import KINDS
from commpass.plan.timeline import Timeline
from commpass.utils.tables import Format, read_json

FORMAT = Format("dump", 1, "write the dump again with backend(..., dump=...)", DumpError)


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One node of a graph. ``site`` names the site that it is (before) or was inserted for
    (after); ``role``, ``hop`` and ``chunk`` are what an inserted node does, and in which exchange
    of its algorithm."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...] = ()
    value: str = ""
    module: str = ""
    site: str | None = None
    inserted: bool = False
    role: str = ""
    hop: int = 0
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Considered:
    """All that might have been done to some sites that have the same choice, *leave it alone*
    first."""

    sites: tuple[str, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Everything about one compiled graph. ``run`` is the same for all graphs of one backend
    object. ``considered`` has every candidate of every site with its score. ``after`` is the graph
    with coded operators, ``lowered`` what was compiled, and ``timeline`` what is predicted for that
    (None in dumps of before there were timelines)."""

    format: str = FORMAT.name
    version: int = FORMAT.version
    run: str
    number: int = 0
    commpass: str
    torch: str
    rank: int
    world_size: int
    written: str
    plan: Plan
    policy: dict = field(default_factory=dict)
    profile: dict = field(default_factory=dict)
    passes_ms: dict[str, float] = field(default_factory=dict)
    considered: tuple[Considered, ...] = ()
    before: tuple[GraphNode, ...] = ()
    after: tuple[GraphNode, ...] = ()
    lowered: tuple[GraphNode, ...] = ()
    timeline: Timeline | None = None


def write(folder: Path, dump: Dump) -> Path:
    """Writes one dump under the next free number, whole or not at all. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{uuid.uuid4().hex}.part"
    with _locked(folder):
        number = 1 + max(map(_number, files(folder)), default=-1)
        path = folder / f"{number:04d}-{dump.plan.direction}.json"
        try:
            temporary.write_bytes(
                msgspec.json.format(
                    msgspec.json.encode(dataclasses.replace(dump, number=number)), indent=1
                )
            )
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other writers out of a folder: two of them must not take the same number."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def files(folder: Path) -> list[Path]:
    """The dump files of a folder, in the order in which they were written."""
    return sorted(
        (path for path in folder.glob("*-*.json") if path.name.partition("-")[0].isdigit()),
        key=_number,
    )


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def read(path: Path) -> Dump:
    """One dump file. Raises DumpError that says what is wrong with it and where."""
    with _uncollected():
        found = read_json(path, FORMAT, Dump)
    for number, site in enumerate(found.plan.sites):
        if wrong := _wrong(site):
            raise DumpError(f"{path}: plan.sites[{number}].{wrong}")
    return found


def _wrong(site: PlannedSite) -> str:
    """What no site can be, though its type is right."""
    if site.kind not in KINDS:
        return f"kind: no kind {site.kind!r}{nearest(site.kind, KINDS)}"
    if site.group_size < 1:
        return f"group_size: {site.group_size}, must be at least 1"
    for name in ("bytes", "wire_bytes"):
        if getattr(site, name) < -1:
            return f"{name}: {getattr(site, name)}, must be at least 0, or -1 for not known"
    return ""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which looks again and again at all that a big dump is read
    into: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Head:
    """What tells the run of a file."""

    run: str


def runs(folder: Path) -> dict[Path, str]:
    """The run of each dump file of a folder, in the order in which they were written."""
    return {file: read_json(file, FORMAT, _Head).run for file in files(folder)}


ALL = "all"
"""The name of all runs of a folder together."""


def read_run(path: Path, run: str | None = None) -> list[Dump]:
    """The graphs of one run: of the newest in a folder, of the one named ``run``, or the one file
    that ``path`` is. ``all`` are all runs of a folder as one: those of a program that has several
    backends and doors."""
    if path.is_file():
        return [read(path)]
    if not path.is_dir():
        raise DumpError(f"{path}: no such file or folder")
    found = runs(path)
    if not found:
        raise DumpError(f"{path}: no dump in this folder (files like 0000-forward.json)")
    known = list(dict.fromkeys(found.values()))
    if run == ALL:
        return [dataclasses.replace(read(file), run=", ".join(known)) for file in found]
    if run is not None and run not in known:
        raise DumpError(f"{path}: no run {run!r} here{nearest(run, (*known, ALL))}")
    return [read(file) for file, its_run in found.items() if its_run == (run or known[-1])]
