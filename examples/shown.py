"""Print the comparison of the trainings that an example runs."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from statistics import median, quantiles

from common import OWN_HOSTS, TRACE, Run, console

from commpass.plan import dump
from commpass.plan.totals import totals
from commpass.report import html, numbers, tables, timeline
from commpass.report.headlines import totals_line
from commpass.report.measured_timeline import measured
from commpass.report.sites_table import reasons


def report(runs: Mapping[str, Run], options: Namespace) -> None:
    """Print the losses and step times of the runs ``off``, ``bf16`` and ``on``, every collective
    with its reason, the bytes, and commands that show more."""
    labels = {"off": "off", "bf16": "bf16", "on": str(options.policy)}
    show_losses(runs, labels, options.steps)
    show_plans(runs["on"])
    show_bytes(runs["off"], runs["on"])
    draw_overlap(options)
    show_times(runs, labels, options.link_gbit)
    write_page(options)
    console.print(
        f"\nPlans and graphs are in {options.out}/off and {options.out}/on. To read them:"
    )
    for command in (
        "explain {0}/on",
        "graph {0}/on --text",
        "diff {0}/off {0}/on",
        "timeline {0}/on --measured {0}/on/" + TRACE + " -o timeline.html",
    ):
        line = f"  {quote(program())} {command.format(quote(str(options.out)))}"
        console.print(line, style="bold", soft_wrap=True)


def program() -> str:
    """Return the command ``commpass``, with its path if it is not on PATH."""
    beside = Path(sys.executable).with_name("commpass")
    if shutil.which("commpass") or not beside.exists():
        return "commpass"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def show_losses(runs: Mapping[str, Run], labels: Mapping[str, str], steps_run: int) -> None:
    names = [f"loss, {labels[name]}" for name in runs]
    table = tables.plain_table("step", *names, "difference")
    steps = sorted({1, steps_run, *range(0, steps_run, max(1, steps_run // 10))} - {0})
    rows = [(str(step), [run.losses[step - 1] for run in runs.values()]) for step in steps]
    for step, losses in [*rows, ("held out", [run.held_out for run in runs.values()])]:
        table.add_row(step, *(f"{loss:.4f}" for loss in losses), f"{losses[-1] - losses[0]:+.4f}")
    console.print("", table)


def show_plans(run: Run) -> None:
    console.print(
        "\nThe collectives of one rank in one step, with the decision on each and its reason:",
        style="bold",
    )
    for plan in run.plans:
        console.print(
            plan.direction + (f", compiled UNTOUCHED: {plan.fallback}" if plan.fallback else ""),
            style="bold",
        )
        table = tables.plain_table("#", "module", "kind", "bytes", "wire", "codec", "algorithm")
        for number, site in enumerate(plan, 1):
            sizes = numbers.size(site.bytes), numbers.size(site.wire_bytes)
            how = (site.codec, site.algorithm) if site.compressed else ("uncompressed", "-")
            table.add_row(str(number), site.module, site.kind, *sizes, *how)
        console.print(table, reasons(plan.sites), "")


def show_bytes(off: Run, on: Run) -> None:
    console.print(f"All of a step: {totals_line(totals(on.plans))}", style="bold")
    if off.sent is None or on.sent is None:
        return
    share = numbers.ratio(on.sent, off.sent)
    console.print(
        "Sizes shown as ? depend on the data. Measured in one step, the mean over ranks, all"
        f" sites: {numbers.size(off.sent)} -> {numbers.size(on.sent)} ({share})",
        style="bold",
    )


def draw_overlap(options: Namespace) -> None:
    """Draw what is computed during the exchanges, as predicted and as measured in the last step,
    and print which share of the exchanges is overlapped."""
    folder, picture = options.out / "on", options.out / "timeline.png"
    dumps = dump.read_run(folder)
    omitted = timeline.left_out(dumps)
    for line in omitted:
        console.print(f"In {picture.name}, {line}")
    if len(omitted) == len(dumps):
        return
    shown = timeline.timelines(dumps, measured(folder / TRACE, dumps))
    timeline.write(shown, picture)
    predicted = timeline.overlapped([one.predicted for one in shown])
    found = timeline.overlapped([one.measured for one in shown if one.measured is not None])
    console.print(
        f"Exchange time that overlaps with compute: predicted {predicted}, measured in one step"
        f" {found}. {picture} shows what runs during the exchanges.",
        style="bold",
    )


def write_page(options: Namespace) -> None:
    """Write one HTML page of the runs ``off`` and ``on``, as predicted and as measured in one
    step."""
    folders = [options.out / name for name in ("off", "on")]
    read = html.runs(
        [(folder, dump.read_run(folder)) for folder in folders],
        [folder / TRACE for folder in folders],
    )
    html.write(read, options.out / "report.html")
    console.print(f"All of it on one page: {options.out}/report.html", style="bold")


def show_times(runs: Mapping[str, Run], labels: Mapping[str, str], gbit: float) -> None:
    """Print the times of the alternating steps, and on which network they were measured."""
    table = tables.plain_table("policy", "ms a step", "middle half", "times as fast")
    base = median(runs["off"].step_ms)
    for name, run in runs.items():
        low, _, high = quantiles(run.step_ms, n=4)
        middle = median(run.step_ms)
        table.add_row(
            labels[name], f"{middle:.0f}", f"{low:.0f} to {high:.0f}", f"{base / middle:.2f}"
        )
    rounds = len(runs["off"].step_ms)
    where = (
        f"each rank on its own host, with a real link of {gbit:g} Gbit/s"
        if OWN_HOSTS in os.environ
        else "over loopback, where no gain can be seen (sudo make demo shows it)"
    )
    console.print("", table, f"{rounds} steps of each, in turns, {where}.")
