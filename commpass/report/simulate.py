"""``commpass simulate``: predict a step of a file's function under each policy, and draw a
picture."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from commpass.build_errors import named_errors
from commpass.costmodel.machines import machine_named
from commpass.errors import CommpassError, PolicyError, nearest
from commpass.report.colours import WAITING, colour_of
from commpass.report.numbers import size
from commpass.report.plots import new_figure
from commpass.report.progress import progress
from commpass.report.tables import console_for, plain_table, print_json
from commpass.simulate import Build, Simulated, mesh_text, simulate

Sweep = tuple[str, Sequence[float]]


def run(
    path: str,
    profile: str | None,
    mesh: str,
    policies: Sequence[str],
    sweep: str | None,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    train: bool,
    plot: Path | None,
    dump: Path | None = None,
    json: bool,
) -> None:
    for policy in policies:
        if "," in policy and not policy.endswith(".toml"):
            options = " ".join(f"--policy {name.strip()}" for name in policy.split(","))
            raise PolicyError(f"--policy {policy}: give the option once for each: {options}")
    sizes = mesh_of(mesh)
    where = profile_of(profile, cluster)
    if cluster is not None and nodes is None and not sweep:
        nodes = nodes_of(sizes, cluster)
    with progress("simulate") as show_progress:
        found = simulate(
            build_of(path),
            where,
            sizes,
            policies,
            sweep=sweep_of(sweep) if sweep else None,
            nodes=nodes,
            train=train,
            progress=show_progress,
            dump=dump,
        )
    for each in found:
        for remark in each.remarks:
            typer.echo(f"policy {each.policy!r}: {remark}", err=True)
    if json:
        print_json(found)
    else:
        made = table(found)
        console_for(made).print(made)
    if dump is not None:
        typer.echo(f"wrote {dump}: commpass explain {dump} --run {found[-1].run}", err=json)
    if plot is not None:
        draw(found, f"{Path(path).name}, {Path(where).name}", plot)
        typer.echo(f"wrote {plot}", err=json)


def profile_of(profile: str | None, cluster: str | None) -> str:
    """Return the name of the profile, of the two ways to give it, or else that of COMMPASS_PROFILE.
    Raises CommpassError if there are both or none, or if ``cluster`` is no machine."""
    if profile is None and cluster is None:
        profile = os.environ.get("COMMPASS_PROFILE") or None
    if profile is not None and cluster is None:
        return profile
    if cluster is not None and profile is None:
        machine_named(cluster)
        return cluster
    missing = "neither is given, and COMMPASS_PROFILE is not set"
    found = "both are given" if cluster is not None else missing
    raise CommpassError(
        "give either --cluster with a machine, such as dgx-h100, or --profile with another name or"
        f" a file: {found}"
    )


def nodes_of(sizes: Mapping[str, int], cluster: str) -> int | None:
    """Return how many machines have the ranks of this mesh, or None if it needs a part of one.
    Raises CommpassError if one of several is not full."""
    ranks, gpus = prod(sizes.values()), machine_named(cluster).gpus
    if ranks % gpus and ranks > gpus:
        raise CommpassError(
            f"mesh {mesh_text(sizes)} has {ranks:,} ranks, but {cluster} has {gpus} GPUs: the"
            f" product of the sizes must be a multiple of {gpus}"
        )
    return ranks // gpus or None


def build_of(location: str) -> Build:
    """Return the function that ``FILE.py:NAME`` names."""
    path, _, name = location.rpartition(":")
    if not path.endswith(".py") or not name:
        raise CommpassError(f"{location!r}: must be FILE.py:FUNCTION, such as model.py:build")
    if not Path(path).is_file():
        raise CommpassError(f"{path}: there is no such file")
    module = _module(Path(path))
    names = vars(module)
    if not callable(names.get(name)):
        known = [
            each
            for each, value in names.items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise CommpassError(f"{path} has no function {name!r}{nearest(name, known)}")
    return names[name]


def _module(path: Path) -> ModuleType:
    """Import a file as a module under a name that Dynamo finds, with its folder on the path."""
    spec = importlib.util.spec_from_file_location(f"simulated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))  # as ``python FILE.py`` would
    with named_errors(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def mesh_of(text: str) -> dict[str, int]:
    """Parse ``dp=8,tp=8`` into sizes by name."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, many = part.partition("=")
        if (
            not name.isidentifier()
            or not re.fullmatch("[0-9]{1,9}", many)
            or not int(many)
            or name in found
        ):
            raise CommpassError(f"mesh {text!r}: must be sizes by name, such as dp=8,tp=8")
        found[name] = int(many)
    return found


def sweep_of(text: str) -> Sweep:
    """Parse ``tp=2,4,8`` into a name and values."""
    name, _, values = text.partition("=")
    try:
        found = [float(value) for value in values.split(",")]
    except ValueError:
        found = []
    if not name.isidentifier() or not found:
        raise CommpassError(f"sweep {text!r}: must be a name and values, such as tp=2,4,8")
    return name, found


def table(found: Sequence[Simulated]) -> Table:
    """Return a table with a row for each policy; the swept value is the first column."""
    name = found[0].swept[0] if found[0].swept else None
    columns = ("ranks", "policy", "step ms", "x first", "exposed ms", "compressed", "sent")
    made = plain_table(*([name] if name and name != "ranks" else []), *columns)
    for each in found:
        first = next(one for one in found if one.swept == each.swept)
        row = (
            f"{each.ranks:,}",
            each.policy,
            millis(each.step_ms),
            f"{first.step_ms / each.step_ms:.2f}" if each.step_ms else "-",
            millis(each.exposed_ms),
            f"{each.compressed} of {each.sites}",
            size(each.wire_bytes),
        )
        made.add_row(*map(Text, ((f"{each.swept[1]:g}",) if each.swept else ()) + row))
    return made


def millis(value: float) -> str:
    """Format milliseconds with three significant digits, without an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(digits, 0), 4)}f}"


FAR = 20
"""Ratio of the largest to the smallest swept value from which on an axis is logarithmic."""
AXES = {"gbit": "Gbit/s of the link", "intra_host_gbit": "Gbit/s inside a host"}
STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osD^v"


def draw(found: Sequence[Simulated], of: str, path: Path) -> None:
    """Draw step times and exposed communication by policy: bars, or lines over the swept value.

    Widths and dashes distinguish lines of equal policies, which cover each other.
    """
    names = list(dict.fromkeys(each.policy for each in found))
    if found[0].swept is None:
        figure = new_figure(7, 4.5)
        axes = figure.subplots()
        colours = [colour_of(each.policy) for each in found]
        axes.bar(names, [each.step_ms for each in found], color=colours)
        axes.bar(names, [each.exposed_ms for each in found], color=WAITING, label="exposed")
        axes.set(ylabel="ms", title=f"a step, predicted: {of}")
        figure.legend(loc="outside lower center", frameon=False)
        figure.savefig(path, dpi=110)
        return
    figure = new_figure(11, 4.5)
    both = figure.subplots(1, 2)
    for axes, field, what in zip(both, ("step_ms", "exposed_ms"), ("step", "exposed"), strict=True):
        for number, name in enumerate(names):
            some = [each for each in found if each.policy == name]
            axes.plot(
                [each.swept[1] for each in some if each.swept],
                [getattr(each, field) for each in some],
                linestyle=STYLES[number % len(STYLES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=max(10 - 3 * number, 3),
                linewidth=max(4 - 1.2 * number, 1.2),
                color=colour_of(name),
                label=name,
            )
        _scaled(axes, found, field)
        axes.set(xlabel=AXES.get(found[0].swept[0], found[0].swept[0]), ylabel="ms", title=what)
        axes.grid(alpha=0.3)
    shown = both[0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"predicted: {of}")
    figure.savefig(path, dpi=110)


def _scaled(axes: Any, found: Sequence[Simulated], field: str) -> None:
    """Scale the axes to the values, with ticks at swept values as far as there is room."""
    at = sorted({each.swept[1] for each in found if each.swept})
    ms = [getattr(each, field) for each in found]
    if far := at[0] > 0 and at[-1] > FAR * at[0]:
        axes.set_xscale("log")
    axes.set_xticks(separate(at, log=far), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xticklabels([f"{value:,.10g}" for value in axes.get_xticks()])
    if min(ms) > 0 and max(ms) > FAR * min(ms):
        axes.set(yscale="log", ylim=(min(ms) / 1.6, max(ms) * 1.6))
    else:
        axes.set_ylim(0, 1.15 * max(ms) or 1)


ROOM = 0.11
"""The share of an axis that a tick's label takes."""


def separate(values: Sequence[float], *, log: bool) -> list[float]:
    """Return those of growing values whose labels do not overlap; the last is always included."""
    places = [math.log(value) if log else value for value in values]
    room = ROOM * (places[-1] - places[0])
    kept = [len(values) - 1]
    for number in reversed(range(len(values) - 1)):
        if places[kept[-1]] - places[number] >= room:
            kept.append(number)
    return [values[number] for number in reversed(kept)]
