"""``commpass calibrate``: measure a file's function on real ranks and choose codecs.

It prints a table of measurements and choices, and writes the policy as TOML and a picture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh

from commpass.build_errors import no_dimension
from commpass.calibration import CODECS, Calibration, Solution, calibrate
from commpass.distributed.machine import default_here, device_of, requested_profile
from commpass.errors import CalibrationError
from commpass.plan import NONE
from commpass.policy import Policy, policy_named
from commpass.report.numbers import size
from commpass.report.plots import new_figure
from commpass.report.probe import group
from commpass.report.progress import progress
from commpass.report.simulate import build_of, mesh_of
from commpass.report.tables import console_for, plain_table, print_json
from commpass.utils.tables import write_whole

UNIFORM = ("exponent", "rotated", "rotated(bits=6)", "rotated(bits=4)")
"""The codecs that totals are compared with."""


def run(
    address: str | None,
    mesh: str | None,
    max_error: float,
    output: Path,
    *,
    source: Path | None,
    measurements: Path | None,
    codecs: Sequence[str],
    policy: str,
    profile: str | None,
    cheapest: str,
    train: bool,
    plot: Path | None,
    json: bool,
) -> None:
    """Measure on every rank, or read measurements. Rank 0 writes the policy and prints the
    choices."""
    base = policy_named(policy)
    if output.suffix != ".toml":
        raise CalibrationError(f"{str(output)!r}: a policy is a .toml file")
    if not 0 <= max_error <= 1:
        raise CalibrationError(f"--max-error {max_error}: must be a share of 0 to 1, such as 0.02")
    for each in (output, measurements, plot):
        if each is not None and not os.access(each.parent, os.W_OK):
            raise CalibrationError(f"{each}: {str(each.parent)!r} is no folder that can be written")
    if source is not None:
        if address is not None:
            raise CalibrationError("give FILE.py:FUNCTION to measure, or --from to read: not both")
        found = Calibration.read(source)
        if codecs:
            raise CalibrationError(f"--codec: {source} has what was measured; measure again for it")
        if not train and found.of != "outputs":
            raise CalibrationError(f"--inference: {source} is of {found.of}; measure again for it")
    else:
        if address is None or mesh is None:
            raise CalibrationError(
                "give FILE.py:FUNCTION and --mesh, to measure, or --from calibration.json"
            )
        sizes = mesh_of(mesh)
        command = f"calibrate {address} --mesh {mesh} --max-error {max_error:g}"
        with group(command, math.prod(sizes.values())):
            first = dist.get_rank() == 0
            found = _measured(address, sizes, base, profile, codecs, train)
        if not first:
            return
        if measurements is not None:
            found.write(measurements)
            typer.echo(f"wrote {measurements} ({found.digest()})", err=json)
    solved = found.solve(max_error, base=base, profile=profile, cheapest=cheapest)
    made = found.policy(max_error, base=base, profile=profile, cheapest=cheapest, name=output.stem)
    _print_summary(found, solved, made, output, plot, assumed(profile), json)


RULES_ALLOW_MORE = (
    "with the policy a rank may send more than that: it allows the codecs above, and the cost model"
    " compresses a site only where it predicts a gain in time"
)


def assumed(profile: str | None) -> str:
    """Return a note about the profile, for a user who did not name one."""
    if requested_profile(profile) is not None:
        return RULES_ALLOW_MORE
    name = default_here("cuda" if torch.cuda.is_available() else "cpu").name
    return f"{RULES_ALLOW_MORE}. No --profile was given: {name} is assumed"


def _print_summary(
    found: Calibration,
    solved: Solution,
    policy: Policy,
    output: Path,
    plot: Path | None,
    more: str,
    json: bool,
) -> None:
    without_effect = (each for each in solved.places if each.without_effect)
    remarks = [*found.remarks, *(each.no_effect_remark(found.of) for each in without_effect)]
    for remark in dict.fromkeys(remarks):
        typer.echo(remark, err=True)
    if json:
        print_json(as_json(found, solved))
    else:
        shown = table(solved)
        console = console_for(shown)
        console.print(shown)
        for line in totals(found, solved):
            console.print(Text(line))
        console.print(Text(more))
    write_whole(output, policy.to_toml().encode(), CalibrationError)
    typer.echo(f"wrote {output}: commpass.backend({str(output)!r})", err=json)
    if plot is not None:
        draw(solved, f"chosen codecs, by their effect on the {found.of}", plot)
        typer.echo(f"wrote {plot}", err=json)


def _measured(
    address: str,
    sizes: dict[str, int],
    base: Policy,
    profile: str | None,
    codecs: Sequence[str],
    train: bool,
) -> Calibration:
    build = build_of(address)
    ranks = math.prod(sizes.values())
    if ranks != dist.get_world_size():
        raise CalibrationError(
            f"a mesh of {ranks} ranks, but {dist.get_world_size()} were started: torchrun"
            f" --nproc-per-node {ranks}"
        )
    world = dist.group.WORLD
    assert world is not None
    device = device_of(world).type
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    try:
        made: Any = build(mesh)
    except KeyError as error:
        if why := no_dimension(error, mesh):
            raise CalibrationError(f"{address}: {why}") from error
        raise
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CalibrationError(
            f"{address}: gave {type(made).__name__}, but must give a model, batches (tuples of its"
            " inputs), and if it likes a loss"
        )
    model, batches, *loss = made
    with progress("finds the collectives", visible=dist.get_rank() == 0) as show_progress:
        return calibrate(
            model,
            batches,
            base,
            loss=loss[0] if loss else None,
            codecs=codecs or CODECS,
            train=train,
            profile=profile,
            progress=lambda done, count: show_progress(done, count, f"run {done} of {count}"),
        )


def table(found: Solution) -> Table:
    """Return a table with a row for each place, in the order of modules."""
    groups = len({place.where[0].group for place in found.places}) > 1
    columns = ("module", "what", "bytes", "sens.", "codec", "sent", "error", "of all")
    made = plain_table(*columns)
    total = math.fsum(each.share for each in found.chosen)
    for place, (plain, *_), chosen in zip(
        found.places, found.considered, found.chosen, strict=True
    ):
        first = place.where[0]
        what = f"{first.kind}, {first.direction}" + (f", {first.group}" if groups else "")
        row = (
            *(place.label, what, size(round(plain.sent_bytes)), f"{place.sensitivity:.3g}"),
            short(chosen.codec),
            size(round(chosen.sent_bytes)),
            f"{chosen.error:.2%}",
            f"{chosen.share / total:.0%}" if total else "-",
        )
        made.add_row(*map(Text, row))
    return made


def as_json(measured: Calibration, found: Solution) -> dict[str, Any]:
    """Return the choices as plain data. Bytes leave one rank in one step; errors are relative."""
    rows = zip(found.places, found.considered, found.chosen, strict=True)
    return {
        "of": measured.of,
        "max_error": found.max_error,
        "error": found.error,
        "bytes": found.plain_bytes,
        "sent_bytes": found.sent_bytes,
        "places": [
            {
                "module": place.label,
                "kind": place.where[0].kind,
                "direction": place.where[0].direction,
                "group": place.where[0].group,
                "bytes": plain.sent_bytes,
                "sensitivity": place.sensitivity,
                "codec": chosen.codec,
                "sent_bytes": chosen.sent_bytes,
                "error": chosen.error,
            }
            for place, (plain, *_), chosen in rows
        ],
    }


def short(codec: str) -> str:
    """Return a codec's name without its data."""
    if codec == NONE:
        return "uncompressed"
    return codec if len(codec) < 40 else f"{codec.partition('(')[0]}(...)"


def totals(measured: Calibration, found: Solution) -> list[str]:
    """Return bytes and predicted error of the mix, and of one codec everywhere."""
    what = measured.of
    lines = [
        f"with these codecs, a rank sends {size(round(found.sent_bytes))} instead of"
        f" {size(round(found.plain_bytes))}; predicted error of the {what} {found.error:.3%},"
        f" of a budget of {found.max_error:.3%}"
    ]
    for name in UNIFORM:
        if (alike := found.uniform(name)) is not None:
            lines.append(
                f"{name} everywhere: {size(round(alike[0]))}, predicted error {alike[1]:.3%}"
            )
    return lines


def draw(found: Solution, title: str, path: Path) -> None:
    """Draw sensitivities as bars, with the chosen bits for each value."""
    of, many = found.places, len(found.places)
    figure = new_figure(8, 1.2 + 0.24 * many)
    from matplotlib.patches import Patch

    axes = figure.subplots()
    names = [f"{place.label} ({place.where[0].direction})" for place in found.places]
    colours = {"forward": "#9db4cf", "backward": "#e0b080"}
    axes.barh(
        range(many),
        [place.sensitivity for place in found.places],
        color=[colours[place.where[0].direction] for place in found.places],
    )
    for row, (place, chosen) in enumerate(zip(found.places, found.chosen, strict=True)):
        axes.text(place.sensitivity, row, f" {short(chosen.codec)}", va="center", fontsize=8)
    axes.set_yticks(range(many), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("sensitivity: error of the result for each unit of error at the place")
    used = [each for each in colours if any(place.where[0].direction == each for place in of)]
    handles = [Patch(color=colours[each], label=each) for each in used]
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=2, loc="outside upper right")
    figure.savefig(path, dpi=110)
