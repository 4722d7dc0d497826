"""Dumps: one JSON file per compiled graph, readable on any machine, without ranks and without
torch.

``backend(..., dump="dir")`` (or ``COMMPASS_DUMP=dir``) makes rank 0 write ``dir/0000-forward.json``
and so on. Each file takes the next free number, so no earlier dump is overwritten. A file holds the
plan, and the graph before and after. A folder ``dir/0000-forward`` has the graph after each pass.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from commpass.errors import DumpError, nearest
from commpass.plan import Candidate, Plan, PlannedSite
from commpass.plan.kinds import KINDS
from commpass.plan.older import dump_from_older
from commpass.plan.timeline import Timeline
from commpass.utils.collector import collection_paused
from commpass.utils.tables import Format, read_json

FORMAT = Format("dump", 2, "write the dump again with backend(..., dump=...)", DumpError)


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One node of a graph.

    ``site`` names the site that the node is (before) or was inserted for (after). For inserted
    nodes, ``role`` says what it does, and ``hop`` and ``chunk`` in which exchange of its algorithm.
    """

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
    """All candidates of some sites that have the same ones, the uncompressed one first."""

    sites: tuple[str, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """All information on one compiled graph.

    ``run`` is equal for all graphs of one backend object. ``considered`` has every candidate of
    every site with its predicted time. ``after`` is the graph with codec operators, and ``lowered``
    the compiled one. ``timeline`` is the prediction for the latter (None in dumps older than
    timelines).
    """

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
    """Write one dump atomically, under the next free number. Return the file."""
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


def write_passes(path: Path, graphs: Mapping[str, str]) -> None:
    """Write graphs as text, by the name of the pass that made them, into a folder beside the dump
    file ``path``."""
    folder = path.with_suffix("")
    for name, text in graphs.items():
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text(text)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers, so that no two take the same number."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def files(folder: Path) -> list[Path]:
    """Return the dump files of a folder, in the order in which they were written."""
    return sorted(
        (path for path in folder.glob("*-*.json") if path.name.partition("-")[0].isdigit()),
        key=_number,
    )


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def read(path: Path) -> Dump:
    """Read one dump file. Raises DumpError with the position and cause of any defect."""
    with collection_paused():
        found = read_json(path, FORMAT, Dump, dump_from_older)
    for number, site in enumerate(found.plan.sites):
        if wrong := _wrong(site):
            raise DumpError(f"{path}: plan.sites[{number}].{wrong}")
    return found


def _wrong(site: PlannedSite) -> str:
    """Return why a site is invalid despite its types, else ""."""
    if site.kind not in KINDS:
        return f"kind: no kind {site.kind!r}{nearest(site.kind, KINDS)}"
    if site.group_size < 1:
        return f"group_size: {site.group_size}, must be at least 1"
    for name in ("bytes", "wire_bytes"):
        if getattr(site, name) < -1:
            return f"{name}: {getattr(site, name)}, must be at least 0, or -1 for not known"
    return ""


@dataclass(frozen=True)
class _Head:
    """The field that identifies the run of a file."""

    run: str


def runs(folder: Path) -> dict[Path, str]:
    """Return the run of each dump file of a folder, in the order in which they were written."""
    return {file: read_json(file, FORMAT, _Head).run for file in files(folder)}


ALL = "all"
"""The name of all runs of a folder together."""


def read_run(path: Path, run: str | None = None) -> list[Dump]:
    """Return the graphs of one run.

    If ``path`` is a file, return its graph. In a folder, return those of the run named ``run``, or
    of the newest one. ``all`` joins all runs of a folder, for a program with several backends and
    integrations.
    """
    if path.is_file():
        return [read(path)]
    if not path.is_dir():
        raise DumpError(
            f"{path}: no such file or folder. A program writes a dump with COMMPASS_DUMP=folder"
        )
    found = runs(path)
    if not found:
        inside = [each.name for each in sorted(path.iterdir()) if each.is_dir() and files(each)]
        hint = f"; there is one in {', '.join(inside)}" if inside else ""
        raise DumpError(f"{path}: no dump in this folder (files like 0000-forward.json){hint}")
    known = list(dict.fromkeys(found.values()))
    if run == ALL:
        return [dataclasses.replace(read(file), run=", ".join(known)) for file in found]
    if run is not None and run not in known:
        raise DumpError(f"{path}: no run {run!r} here{nearest(run, (*known, ALL))}")
    return [read(file) for file, its_run in found.items() if its_run == (run or known[-1])]
