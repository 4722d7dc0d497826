"""``commpass probe``: measure a process group, and show a table and a picture and write the
file."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text

from commpass.costmodel.files import Measured, ProfileFile, digest, write
from commpass.costmodel.fit import FASTEST
from commpass.costmodel.links import Link
from commpass.errors import CommpassError, ProfileError
from commpass.probe import probe
from commpass.report.numbers import size
from commpass.report.plots import new_figure
from commpass.report.progress import progress
from commpass.report.tables import console_for, plain_table, print_json


def run(output: Path, seconds: float, *, kernels: bool, plot: Path | None, json: bool) -> None:
    """Measure on every rank; rank 0 writes the file and prints its content."""
    if output.suffix != ".json":
        raise ProfileError(f"{str(output)!r}: a measured profile is a .json file")
    with group("probe -o cluster.json"):
        _check_folder(output)
        first = dist.get_rank() == 0
        with progress("measuring", visible=first) as show_progress:
            file = probe(seconds, name=output.stem, kernels=kernels, progress=show_progress)
        if not first:
            return
    _write(output, file)
    if json:
        print_json(file)
    else:
        made = links(file)
        console_for(made).print(made, rates(file) if kernels else KERNELS_ASSUMED)
    for warning in filter(None, (noisy(file), without_rate(file))):
        typer.echo(warning, err=True)
    if plot is not None:
        draw(file, plot)
        typer.echo(f"wrote {plot}", err=json)
    typer.echo(
        f"wrote {output} ({digest(file.profile)}): commpass.backend(..., profile={str(output)!r}),"
        f" or COMMPASS_PROFILE={output}",
        err=json,
    )


def _check_folder(output: Path) -> None:
    """Check the folder before the measurement. All ranks learn the result of rank 0, which
    writes."""
    why = None
    if not os.access(output.parent, os.W_OK):
        why = f"{str(output.parent)!r} is no folder that can be written to"
    elif output.is_dir():
        why = "it is a folder"
    found = [why]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        raise ProfileError(f"{output}: cannot be written: {found[0]}")


def _write(output: Path, file: ProfileFile) -> None:
    """Write the file; elsewhere if that fails now, since measuring took long."""
    try:
        write(output, file)
    except ProfileError as error:
        kept = Path(tempfile.mkdtemp(prefix="commpass-")) / output.name
        write(kept, file)
        raise ProfileError(f"{error}. The measurement is in {kept}") from error


NOISE = 0.5
"""Distance between quartiles, as a share of the median, above which a machine counts as busy."""


def noisy(file: ProfileFile) -> str:
    """Return a warning if a quarter of the times varied too much."""
    off = [each for each in file.points if each.high_us - each.low_us > NOISE * each.us]
    if len(off) <= len(file.points) / 4:
        return ""
    return (
        f"{len(off)} of {len(file.points)} times varied by more than half: other programs, or more"
        " ranks than cores. Measure again when the machines have their usual load"
    )


def without_rate(file: ProfileFile) -> str:
    """Return a warning if the largest sends of a kind showed no rate: they were too small."""
    measured = {"link": file.profile.link, "intra_host_link": file.profile.intra_host_link}
    found = []
    for level, link in measured.items():
        for kind, regions in link.measured.items() if link is not None else ():
            if regions and regions[-1].gbytes_per_s >= FASTEST:
                own = [p.sent for p in file.points if (p.group, p.kind) == (level, kind)]
                found.append(f"{kind} up to {size(max(own, default=0))}")
    if not found:
        return ""
    return (
        f"the time of {', '.join(found)} does not grow with the bytes, so larger ones are predicted"
        " as equally fast. Measure longer, with --seconds"
    )


KERNELS_ASSUMED = "Kernels were not measured (--kernels measures them). Their rates are assumed."


def how(command: str, ranks: int = 2) -> str:
    return f"torchrun --nproc-per-node {ranks} -m commpass {command}"


VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch needs besides RANK."""
LOST = "Connection closed by peer|Connection reset by peer"
"""What gloo says if another process has ended."""


@contextmanager
def group(command: str, ranks: int = 2) -> Iterator[None]:
    """Make the process group from the environment's variables, if there is none yet.

    ``command`` is what to start on every rank.
    """
    if dist.is_initialized():
        yield
        return
    if "RANK" not in os.environ:
        raise CommpassError(
            f"this is no rank of a group. Start it on every rank: {how(command, ranks)}"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise CommpassError(
            f"RANK is set, but not {', '.join(missing)}. Start it on every rank:"
            f" {how(command, ranks)}"
        )
    dist.init_process_group()
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, CommpassError) and re.search(LOST, str(error)):
            raise CommpassError(
                "another rank ended, or cannot be reached: see its output, and start all ranks"
                " again"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


WHERE = {"link": "between hosts", "intra_host_link": "inside a host"}


def links(file: ProfileFile) -> Table:
    """Return a row for each region of each kind: alpha, rate, and the error of the fit."""
    several = file.profile.intra_host_link is not None
    columns = ("ranks", "exchange", "sent", "alpha us", "GB/s", "off")
    table = plain_table(*(["link"] if several else []), *columns)
    levels: dict[str, Link | None] = {
        "link": file.profile.link,
        "intra_host_link": file.profile.intra_host_link,
    }
    for (level, kind), points in groupby(file.points, key=lambda each: (each.group, each.kind)):
        link = levels[level]
        measured = list(points)
        for number, region in enumerate(link.measured.get(kind, ()) if link is not None else ()):
            own = [each for each in measured if link and link.region(kind, each.sent) is region]
            if not own:
                continue
            span = f"{size(own[0].sent)} to {size(own[-1].sent)}"
            worst = max(abs(each.off) for each in own)
            row = ("", "") if number else (str(own[0].ranks), kind)
            where = ("" if number else WHERE[level],) if several else ()
            rate = "any" if region.gbytes_per_s >= FASTEST else f"{region.gbytes_per_s:.4g}"
            numbers = (f"{region.alpha_us:,.0f}", rate, f"{worst:.0%}")
            table.add_row(*map(Text, (*where, *row, span, *numbers)))
    return table


def rates(file: ProfileFile) -> Table:
    """Return the profile's kernel rates: nanoseconds for each value, and the speed of other
    work."""
    kernels = file.profile.kernels
    table = plain_table("codec", "encode ns", "decode ns", "us a call")
    for name, rate in kernels.rates.items():
        call_us = kernels.call_us if rate.call_us is None else rate.call_us
        numbers = (rate.encode_ns, rate.decode_ns, call_us)
        table.add_row(Text(name), *(Text(f"{number:.3g}") for number in numbers))
    table.caption = (
        f"{kernels.gflops:,.0f} GFLOP/s in matmuls, {kernels.gbytes_per_s:.3g} GB/s copied,"
        f" {kernels.call_us:.3g} us a call of other codecs"
    )
    return table


def draw(file: ProfileFile, path: Path) -> None:
    """Draw measured times with their quartiles, and the fit, for every kind."""
    levels = list(dict.fromkeys(each.group for each in file.points))
    figure = new_figure(7.5 * len(levels), 5.5)
    for axes, level in zip(figure.subplots(1, len(levels), squeeze=False)[0], levels, strict=True):
        own = [each for each in file.points if each.group == level]
        for kind, points in groupby(own, key=lambda each: each.kind):
            link = file.profile.intra_host_link if level == "intra_host_link" else file.profile.link
            _curve(axes, kind, list(points), link)
        where = WHERE[level] if file.profile.intra_host_link is not None else "between ranks"
        axes.set(xscale="log", yscale="log", xlabel="bytes that leave a rank", ylabel="time (us)")
        of = f"{where}, {own[0].ranks} ranks"
        axes.set_title(f"{of}: medians with quartiles (points) and fit (lines)")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _curve(axes: Any, kind: str, points: list[Measured], link: Link | None) -> None:
    sent = [each.sent for each in points]
    off = [[each.us - each.low_us for each in points], [each.high_us - each.us for each in points]]
    bars = axes.errorbar(sent, [each.us for each in points], yerr=off, fmt="o", ms=4, label=kind)
    colour = bars.lines[0].get_color()
    for part in parts(points, link):
        axes.plot([at.sent for at in part], [at.fit_us for at in part], lw=1, color=colour)


def parts(points: Sequence[Measured], link: Link | None) -> list[list[Measured]]:
    """Return the points of each region. A fit may jump between regions, so no line joins them."""

    def begin(each: Measured) -> float:
        region = link.region(each.kind, each.sent) if link is not None else None
        return region.from_bytes if region is not None else 0.0

    return [list(part) for _, part in groupby(points, key=begin)]
