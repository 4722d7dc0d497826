"""``commpass compare``: run a command under several policies, in turns, and compare its steps.

``jobs`` runs the command, ``steps`` reads the step times of its ranks, ``losses`` finds losses in
its output, ``verdict`` compares the policies, and ``page`` writes the HTML page.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from commpass.errors import CommpassError
from commpass.report.compare import page
from commpass.report.compare.jobs import OFF, ON, Interrupted, Job, Runs, check_command
from commpass.report.compare.jobs import run as run_job
from commpass.report.compare.losses import difference_text, loss_pattern, side_by_side
from commpass.report.compare.steps import RULE, WARM_UP
from commpass.report.compare.verdict import (
    Comparison,
    PolicyResult,
    compare,
    label,
    middle_half,
    times,
)
from commpass.report.numbers import amounts
from commpass.report.progress import progress
from commpass.report.tables import console_for, plain_table, print_json

LEAST_FREE = 1 << 20
"""Free bytes of a disk below which a failure may be due to it."""
LOSS_ROWS = 12
"""The number of losses that a terminal shows."""
NOT_USED = (
    "the command has not used commpass, so there is nothing to compare. Compile the model with"
    " torch.compile(model, backend=commpass.backend()), or apply an integration such as"
    " commpass.parallel.compress_ddp (docs/start.md)"
)
NO_STEP = (
    "commpass was used, but no step was found: no optimizer has stepped. Call commpass.step() at"
    " the end of each step of the program, outside of compiled code"
)


def policies_of(text: str) -> list[str]:
    """Parse ``off,lossless,balanced``. Raise PolicyError for an unknown policy, and CommpassError
    for fewer than two, or one twice."""
    made = []
    for name in filter(None, map(str.strip, text.split(","))):
        if name not in (OFF, ON):
            from commpass.policy import policy_named  # needs torch

            policy_named(name)
        made.append(str(Path(name).resolve()) if name.endswith(".toml") else name)
    if len(set(made)) < max(2, len(made)):
        raise CommpassError(
            f"--policies {text}: give at least two different policies, such as off,balanced"
            f" ({ON!r}: what the program itself says)"
        )
    return made


def run(runs: Runs, output: Path, keep: Path | None, *, json: bool) -> int:
    """Run the command, print the result and write the page. Return the exit status: 130 if the user
    stopped it, and 2 if the command failed under some policy."""
    check_command(runs.command)
    page.check(output)
    folder = _folder(keep)
    jobs: list[Job] = []
    try:
        stopped = _run_all(runs, folder, jobs)
        complete = [job for job in jobs if not job.status]
        failed = [job for job in jobs if job.status]
        remarks = ([stopped] if stopped else []) + [
            f"The command {failure(job)}. Its output is in {job.output}" for job in failed
        ]
        if stopped and not any(job.steps.ms for job in complete):
            raise CommpassError(f"{stopped} No step was counted until then")
        found = compare(runs.command, runs.policies, complete, remarks)
    finally:
        if keep is None and not any(job.status for job in jobs):
            shutil.rmtree(folder, ignore_errors=True)
    if json:  # first, in case the page cannot be written
        print_json(found)
    else:
        show(found)
    page.write(found, output)
    typer.echo(f"wrote {output}", err=json)
    return 130 if stopped else 2 if failed else 0


def _folder(keep: Path | None) -> Path:
    """Return the folder of all runs, as an absolute path: the program may change its own."""
    try:
        if keep is None:
            return Path(tempfile.mkdtemp(prefix="commpass-compare-"))
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise CommpassError(f"{keep}: is not empty; name a new folder")
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"--keep {keep}" if keep is not None else "the folder for temporary files"
        raise CommpassError(
            f"{what} cannot be written: {error.strerror}. Name another folder with --keep"
        ) from error
    return keep.resolve()


def _run_all(runs: Runs, folder: Path, jobs: list[Job]) -> str:
    """Run all rounds and append each run to ``jobs``. Return why it was stopped, "" if it was
    not.

    A policy under which the command fails has no further run, and nothing runs after a failure of
    the base. Raise CommpassError if nothing is left to compare.
    """
    turns = [(number, policy) for number in range(1, runs.rounds + 1) for policy in runs.policies]
    failed: set[str] = set()
    with progress("compare") as show_progress:
        for at, (number, policy) in enumerate(turns):
            if policy in failed:
                continue
            name = label(policy)
            title = f"round {number} of {runs.rounds}, {name}"

            def update(steps: int, at: int = at, title: str = title) -> None:
                show_progress(at, len(turns), f"{title}: {steps} steps counted")

            update(0)
            try:
                job = run_job(runs, policy, number, folder / f"{at:02d}-{name}", update)
            except Interrupted as interrupted:
                jobs.append(interrupted.job)
                return f"Stopped in {title}."
            jobs.append(job)
            if job.status:
                failed.add(policy)
                left = _still_run(runs, failed)
                if left or _are_comparable(runs, jobs):
                    _print_last_lines(job)
                    end = "no further run under this policy" if left else "this was the last run"
                    typer.echo(f"{title}: failed, so {end}", err=True)
                    if left:
                        continue
                    return ""
            check(job)
            middle = times(middle_half(job.steps.ms)[0])
            count = f"{len(job.steps.ms)} of {len(job.steps.ms) + job.steps.left_out} steps counted"
            typer.echo(f"{title}: {middle} ms a step, {count}, {job.seconds:.0f} s", err=True)
    return ""


def _still_run(runs: Runs, failed: Collection[str]) -> bool:
    """Return whether the base and another policy have not failed."""
    base, *others = runs.policies
    return base not in failed and not set(others) <= set(failed)


def _are_comparable(runs: Runs, jobs: Sequence[Job]) -> bool:
    """Return whether there is a complete run of the base and one of another policy."""
    complete = {job.policy for job in jobs if not job.status}
    return runs.policies[0] in complete and len(complete) > 1


def check(job: Job) -> None:
    """Raise CommpassError if a run has failed, has no counted step, or has losses that cannot be
    read in the first round: later ones do not end the comparison. The last lines of a failed run go
    to stderr."""
    where = f"policy {label(job.policy)!r}, round {job.round}"
    if job.status:
        _print_last_lines(job)
        raise CommpassError(
            f"the command {failure(job)}. Its last lines are above, and all of them in {job.output}"
            f"{_full_disk(job.folder)}"
        )
    if not job.used:
        raise CommpassError(NOT_USED)
    if not job.steps.clock:
        raise CommpassError(NO_STEP)
    if not job.steps.ms:
        raise CommpassError(
            f"all {job.steps.left_out} steps are warm-up ({where}): run at least {WARM_UP + 5}"
            f" steps. {RULE}"
        )
    if job.loss_error and job.round == 1:
        raise CommpassError(job.loss_error)


def failure(job: Job) -> str:
    """Return how a run failed, behind "the command"."""
    assert job.status
    what = f"exit status {job.status}" if job.status > 0 else f"signal {-job.status}"
    return f"failed with {what} (policy {label(job.policy)!r}, round {job.round})"


def _full_disk(folder: Path) -> str:
    """Return a sentence if the program may have failed since its output could not be written."""
    if shutil.disk_usage(folder).free >= LEAST_FREE:
        return ""
    return ". The disk of this file is full: free some space, or name another folder with --keep"


def _print_last_lines(job: Job) -> None:
    for line in job.last_lines():
        typer.echo(f"| {line}", err=True)


# --- as text --------------------------------------------------------------------------------------


def show(found: Comparison) -> None:
    """Print the verdict, the table of policies and the losses."""
    tables = [table_of(found)]
    if found.losses:
        tables.append(losses_of(found))
    prose, console = console_for(), console_for(*tables)  # prose is as wide as the terminal
    prose.print(Text(found.verdict, style="bold"), "", sep="\n")
    console.print(tables[0], "", sep="\n")
    for each in found.policies[1:]:
        if len(found.policies) > 2:
            prose.print(Text(f"{each.name}: {each.verdict}"))
    for made in tables[1:]:
        console.print(made, "", sep="\n")
    for remark in (*found.remarks, RULE):
        prose.print(Text(remark, style="dim"))


COLUMNS = (
    "policy",
    "ms\na step",
    "middle half",
    "times\nas fast",
    "steps\ncounted",
    "bytes",
    "predicted",
)
"""In two lines, so that the table fits into 80 columns."""


def table_of(found: Comparison) -> Table:
    """Return a table with a row for each policy."""
    made = plain_table(*COLUMNS, right=COLUMNS[1:])
    for row in rows_of(found):
        made.add_row(*map(Text, row))
    return made


def rows_of(found: Comparison) -> list[tuple[str, ...]]:
    """Return the cells of each policy, in the order of COLUMNS."""
    return [_row(each) for each in found.policies]


def _row(of: PolicyResult) -> tuple[str, ...]:
    traffic = of.traffic
    return (
        of.name,
        times(of.median_ms),
        f"{times(of.low_ms)} to {times(of.high_ms)}" if of.steps else "-",
        f"{of.faster:.2f}" if of.faster is not None else "-",
        f"{of.steps} of {of.steps + of.left_out}",
        amounts(traffic.bytes, traffic.wire_bytes) if traffic is not None else "-",
        f"{times(traffic.predicted_ms)} ms" if traffic and traffic.predicted_ms else "-",
    )


def losses_of(found: Comparison) -> Table:
    """Return a table of losses, with a column for each policy."""
    names = [escape(each.name) for each in found.policies]
    made = plain_table("loss", *names, right=names)
    columns = [{name: row[at] for name, row in found.losses} for at in range(len(names))]
    known = [{k: v for k, v in column.items() if v is not None} for column in columns]
    for name, row in side_by_side(known, LOSS_ROWS):
        made.add_row(Text(name), *("-" if value is None else f"{value:.6g}" for value in row))
    apart = [each.loss_difference for each in found.policies]
    shown = (difference_text(each) if each is not None else "-" for each in apart)
    if len(made.rows) < len(found.losses):
        made.caption = f"{len(made.rows)} of {len(found.losses)} lines: the page has all"
    made.add_row("difference", *shown)
    return made


__all__ = ["OFF", "ON", "Runs", "loss_pattern", "policies_of", "run"]
