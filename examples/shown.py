"""Print the comparison of the trainings that an example runs, on one screen."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from statistics import median

from common import OWN_HOSTS, TRACE, UNTIMED, Run, console
from rich.table import Table

from commpass.plan import Plan, dump
from commpass.report import explain, html, numbers, speedup, tables, timeline
from commpass.report.layer_patterns import patterns
from commpass.report.run import Run as Recorded

PICTURE, PAGE = "timeline.png", "report.html"
SPEEDS = slice(2, 4)
"""The lines of ``results`` about the time of a step."""
UNKNOWN_BYTES = "?: known only at run time. The table above has the bytes that were sent."


def report(runs: Mapping[str, Run], options: Namespace) -> None:
    """Print the results of the runs ``off``, ``bf16`` and ``on`` and the sites of the last one.

    Write a page about all three, and the timeline of the last one.
    """
    recorded = read(runs)
    console.print()
    lines = list(results(runs, recorded, options))
    for line in lines:
        console.print(line, style="bold", soft_wrap=True)
    console.print("", policies_table(runs, recorded, str(options.policy)), where(runs, options))
    console.print("", sites_table(recorded["on"]))
    if any(plan_has_unknown_bytes(plan) for plan in recorded["on"].plans):
        console.print(UNKNOWN_BYTES)
    shown = [recorded[name] for name in ("off", "on", "bf16")]
    on, bf16 = lines[SPEEDS]
    html.write(shown, options.out / PAGE, (f"steps of B: {on}", f"steps of C, {bf16}"))
    draw_timeline(recorded["on"], options.out / PICTURE)
    show_next(options)


def read(runs: Mapping[str, Run]) -> dict[str, Recorded]:
    """Return the runs as recorded in their folders, with the traced step of each."""
    folders = [run.folder for run in runs.values()]
    found = html.runs(
        [(folder, dump.read_run(folder)) for folder in folders],
        [folder / TRACE for folder in folders],
    )
    return dict(zip(runs, found, strict=True))


def results(
    runs: Mapping[str, Run], recorded: Mapping[str, Recorded], options: Namespace
) -> Iterator[str]:
    """Yield five lines: the bytes, the loss, the time of a step, that of bf16, and the sites."""
    off, on, sums = runs["off"], runs["on"], recorded["on"].totals
    sent = (off.sent, on.sent) if off.sent is not None and on.sent is not None else None
    yield speedup.bytes_sentence(*(sent or (sums.bytes, sums.wire_bytes))) + " a step and rank"
    yield speedup.loss_sentence(off.held_out, on.held_out) + " on held-out text"
    for name, prefix in (("on", ""), ("bf16", "codec bf16 alone: ")):
        expected = predicted(recorded["off"], recorded[name])
        if OWN_HOSTS in os.environ:
            found = speedup.speedup(off.step_ms, runs[name].step_ms)
            yield prefix + speedup.time_sentence(found, expected)
        else:
            yield prefix + speedup.loopback_sentence(expected, options.link_gbit)
    yield f"{sums.compressed} of {sums.sites} collectives are compressed{overlap(recorded['on'])}"


def predicted(off: Recorded, run: Recorded) -> float | None:
    """Return the predicted speedup of the compiled graphs; None without predictions."""
    if off.predicted is None or run.predicted is None or not run.predicted.us:
        return None
    return off.predicted.us / run.predicted.us


def overlap(run: Recorded) -> str:
    """Return the share of the exchange time that overlaps with compute."""
    known = [
        f"{each.overlapped:.0%} ({name})"
        for name, each in (("predicted", run.predicted), ("measured", run.measured))
        if each is not None and each.overlapped is not None
    ]
    return f"; {', '.join(known)} of their time overlaps with compute" if known else ""


def policies_table(runs: Mapping[str, Run], recorded: Mapping[str, Recorded], policy: str) -> Table:
    """Return a line for each run: bytes of a step, loss, and the median time of a step.

    A speedup that the steps cannot show is ``-``.
    """
    headers = ("bytes", "held-out loss", "ms a step", "times as fast", "predicted")
    table = tables.plain_table("policy", *headers, right=headers)
    base = runs["off"]
    for name, run in runs.items():
        expected = predicted(recorded["off"], recorded[name])
        sent = recorded[name].totals.wire_bytes if run.sent is None else run.sent
        found = speedup.speedup(base.step_ms, run.step_ms)
        unknown = OWN_HOSTS not in os.environ or found.is_inconclusive
        table.add_row(
            policy if name == "on" else name,
            numbers.size(sent),
            f"{run.held_out:.4f}",
            f"{median(run.step_ms):.0f}",
            "-" if unknown else f"{found.times:.2f}",
            "-" if expected is None else f"{expected:.2f}",
        )
    return table


def where(runs: Mapping[str, Run], options: Namespace) -> str:
    """Return how the steps were timed, and on which network."""
    network = (
        f"each rank on its own host, with a real link of {options.link_gbit:g} Gbit/s"
        if OWN_HOSTS in os.environ
        else "over loopback, where no gain can be seen (it can as root, started by python instead"
        " of torchrun)"
    )
    return f"{len(runs['off'].step_ms)} steps of each, in turns, after {UNTIMED}: {network}."


def plan_has_unknown_bytes(plan: Plan) -> bool:
    """Whether the size of a collective was not known when the plan was made."""
    return any(site.bytes < 0 for site in plan.sites)


def sites_table(run: Recorded) -> Table:
    """Return a line for each pattern of collectives, as ``commpass explain`` groups them."""
    table = tables.plain_table(
        "collectives", "decision", "bytes each", "predicted each", folded=("collectives",)
    )
    for plan in run.plans:
        fallback = f", compiled UNTOUCHED: {plan.fallback}" if plan.fallback else ""
        table.add_row(plan.direction + fallback, style="bold")
        for one in patterns([plan]):
            (name, _), (decision,), (size, _), (times,) = explain.cells(one)
            # why one is uncompressed is in ``commpass explain``
            table.add_row(f"  {name}", decision.partition(":")[0], size, times)
    return table


def draw_timeline(run: Recorded, picture: Path) -> None:
    """Draw what is computed during the exchanges, as predicted and as measured in one step."""
    if len(timeline.left_out(run.dumps)) < len(run.dumps):
        timeline.write(timeline.timelines(run.dumps, run.timelines), picture)


def show_next(options: Namespace) -> None:
    """Print where to read on."""
    out = quote(str(options.out))
    commands = {
        f"{program()} explain {out}/on": "every decision and its reason",
        f"{program()} diff {out}/off {out}/on": "the differences",
        f"{program()} graph {out}/on --text": "a rewritten graph",
    }
    console.print(f"\nNext: open {out}/{PAGE}, {out}/{PICTURE}, or run", style="bold")
    for command, what in commands.items():
        console.print(f"  {command}  # {what}", soft_wrap=True)


def program() -> str:
    """Return the command ``commpass``, with its path if it is not on PATH."""
    beside = Path(sys.executable).with_name("commpass")
    if shutil.which("commpass") or not beside.exists():
        return "commpass"
    here = Path.cwd()
    return quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
