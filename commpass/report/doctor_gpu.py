"""``commpass doctor --gpu``: test the kernels, links and exchanges of this node's GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text

from commpass.codecs import codec
from commpass.costmodel.files import digest, write
from commpass.errors import CommpassError
from commpass.probe import probe
from commpass.probe.gpu import codecs, exchange, links
from commpass.probe.gpu.exchange import Timed
from commpass.probe.gpu.finding import Finding
from commpass.report.numbers import size
from commpass.report.probe import group as group_of
from commpass.report.progress import ShowProgress, progress
from commpass.report.tables import console_for, plain_table, print_json

STATUS = "COMMPASS_DOCTOR_STATUS"
"""Environment variable: the file for the exit status, if `commpass doctor` started the ranks."""


def run(output: Path, seconds: float, *, json: bool) -> int:
    """Test on every rank, and return the exit status: 1 if a test failed.

    Without a process group, one is started with a rank for each GPU of this node.
    """
    if "RANK" not in os.environ:
        return started(torchrun(torch.cuda.device_count(), output, seconds, json=json))
    status = tested_here(output, seconds, json=json)
    if STATUS not in os.environ:
        return status
    if os.environ["RANK"] == "0":
        Path(os.environ[STATUS]).write_text(str(status))
    return 0


def started(command: Sequence[str]) -> int:
    """Start the ranks, and return the exit status that rank 0 wrote. torchrun would print a
    traceback if a rank ended with it."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "status"
        ended = subprocess.call(command, env={**os.environ, STATUS: str(file)})
        return ended or int(file.read_text())


def tested_here(output: Path, seconds: float, *, json: bool) -> int:
    """Test on this rank and print what rank 0 collects. Return 1 if a test failed."""
    with group_of("doctor --gpu", torch.cuda.device_count()):
        world = dist.group.WORLD
        assert world is not None
        device = torch.device("cuda", torch.cuda.current_device())
        with progress("testing", visible=dist.get_rank() == 0) as show_progress:
            found = tested(world, device, show_progress)
            show_progress(len(found), len(found), "timing exchanges")
            timed = exchange.times(world, device)
        file = probe(seconds, name=output.stem, kernels=True) if world.size() > 1 else None
        if dist.get_rank():
            return 0
    if json:
        print_json({"findings": found, "times": timed, "profile": str(output) if file else None})
    else:
        tables = [table(found), *times_tables(timed)]
        for each in tables:
            console_for(each).print(each)
    if file is not None:
        write(output, file)
        typer.echo(f"wrote {output} ({digest(file.profile)})", err=json)
    else:
        typer.echo("no profile was written: one GPU has no links to measure", err=json)
    return int(not all(each.works for each in found))


def torchrun(ranks: int, output: Path, seconds: float, *, json: bool) -> list[str]:
    """Return the command that starts this one on every GPU of the node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "commpass", "doctor", "--gpu"]
    command += ["--output", str(output), "--seconds", str(seconds)]
    return [*command, *(["--json"] if json else [])]


def tested(
    group: dist.ProcessGroup, device: torch.device, show_progress: ShowProgress
) -> list[Finding]:
    """Return the findings of all ranks: of equal ones the first, and of different ones those that
    failed. ``show_progress`` is called with each finding."""
    own: list[Finding] = []
    for each in chain(
        links.findings(device),
        links.symmetric_memory(group, device),
        codecs.findings([codec(name) for name in codecs.NAMES], device),
        exchange.findings(group, device),
    ):
        own.append(each)
        show_progress(len(own), None, each.what)
    every: list[list[Finding]] = [[] for _ in range(group.size())]
    dist.all_gather_object(every, own, group)
    return merged(every)


def merged(every: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return one finding for each test, from those of every rank: that of the first rank on which
    it failed, with the rank's number, or that of rank 0."""
    if len({len(each) for each in every}) > 1:
        raise CommpassError("the ranks made different tests: start the same command on all")
    found = []
    for results in zip(*every, strict=True):
        rank = next((rank for rank, each in enumerate(results) if not each.works), 0)
        each = results[rank]
        state = f"rank {rank}: {each.state}" if rank else each.state
        found.append(Finding(each.what, state, each.works, each.meaning))
    return found


def table(found: Sequence[Finding]) -> Table:
    made = plain_table("what", "state", "meaning", folded=("state", "meaning"))
    for each in found:
        style = "green" if each.works else "bold red"
        made.add_row(Text(each.what), Text(each.state, style=style), Text(each.meaning))
    return made


def times_tables(timed: Sequence[Timed]) -> list[Table]:
    """Return a table for each kind of collective: microseconds by size."""
    tables = []
    for kind, group in groupby(timed, key=lambda each: each.kind):
        rows = list(group)
        headers = [f"{kind} of", *rows[0].us]
        made = plain_table(*headers, right=headers)
        for each in rows:
            us = ("" if time is None else f"{time:,.1f} us" for time in each.us.values())
            made.add_row(size(each.nbytes), *us)
        tables.append(made)
    return tables
