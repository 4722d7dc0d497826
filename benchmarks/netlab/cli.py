"""The command line. Results of the command go to stdout, messages of the lab to stderr."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import show
from .apart import stand_apart
from .lab import build, settle
from .network import LabError, Network
from .ranks import Course, cores_here, run
from .rates import check, check_together

app = typer.Typer(add_completion=False)
SECONDS = "SECONDS"
TALK_BYTES = 1000  # fewer bytes are only hosts that look for addresses


def pairs(option: str, texts: list[str], sign: str) -> tuple[tuple[int, float], ...]:
    """Parse HOST=NUMBER or HOST@NUMBER."""
    made: dict[int, float] = {}
    for text in texts:
        host, _, number = text.partition(sign)
        try:
            made[int(host)] = float(number)
        except ValueError:
            raise LabError(
                f"{option} {text}: must be a host{sign}a number, as 1{sign}0.5"
            ) from None
    return tuple(made.items())


def course_of(
    network: Network,
    late: list[str],
    drop: list[str],
    grace: float,
    timeout: float | None,
    *,
    own_cores: bool = False,
) -> Course:
    late_, drop_ = pairs("--late", late, "="), pairs("--drop", drop, "@")
    made = Course(late_, drop_, grace, timeout, own_cores)
    if own_cores and network.hosts > len(cores_here()):
        raise LabError(f"--own-cores: {network.hosts} hosts, but {len(cores_here())} cores")
    given = [("--late", *one) for one in made.late] + [("--drop", *one) for one in made.drop]
    for option, host, seconds in given:
        network.check_host(option, host)
        check_seconds(option, seconds)
    check_seconds("--grace", grace)
    if timeout is not None:
        check_seconds("--timeout", timeout)
    return made


def check_seconds(option: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise LabError(f"{option} {seconds:g}: must be seconds, 0 or more")


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def netlab(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND ...", help="Runs once in each host.", show_default=False
        ),
    ],
    hosts: Annotated[int, typer.Option(help="Hosts, numbered from 0; one rank in each.")] = 2,
    gbit: Annotated[
        float, typer.Option(metavar="GBIT", help="Rate of each link, each way (0.001 to 100).")
    ] = 1.0,
    delay_us: Annotated[
        float, typer.Option(metavar="US", help="One-way delay, between nodes where there are some.")
    ] = 0.0,
    node: Annotated[
        int | None, typer.Option(metavar="N", help="So many hosts that follow are one node.")
    ] = None,
    inside_gbit: Annotated[
        float | None,
        typer.Option(
            metavar="GBIT", help="Rate of hosts' links in a node; --gbit is each uplink's."
        ),
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="HOST=GBIT", help="Another rate for a host's link.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST@SECONDS", help="A host's link goes down after so long."),
    ] = None,
    late: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST=SECONDS", help="A host's rank starts so much later."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar=SECONDS, help="All ranks end then; exit code 124.")
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar=SECONDS, help="What others get once a rank has failed.")
    ] = 5.0,
    own_cores: Annotated[
        bool, typer.Option("--own-cores", help="Each host has a core that no other host uses.")
    ] = False,
    checks: Annotated[
        bool, typer.Option("--check/--no-check", help="Measure every link first.")
    ] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured.")
    ] = None,
) -> int:
    """A network in a box: hosts on this machine with links of a given rate, and a command in each.

    Needs Linux and root. Leaves with the exit code of the first rank that failed.
    """
    network = Network(hosts, gbit, delay_us, node, inside_gbit, pairs("--slow", slow or [], "="))
    course = course_of(network, late or [], drop or [], grace, timeout, own_cores=own_cores)
    if json_path and not json_path.absolute().parent.is_dir():
        raise LabError(f"--json {json_path}: there is no such folder")
    stand_apart()
    lab, found, together = build(network), [], None
    if hosts > 1 and checks:
        found = check(lab)
        show.show(show.checked(network, found))
    if hosts > 1 and (checks or delay_us):  # a user-space switch that is too slow must be reported
        together = check_together(lab)
        say(f"all hosts at once send {together[1]:.3g} of {together[0]:g} Gbit/s")
    for warning in show.warnings(found, together):
        say(f"WARNING: {warning}")
    before = settle(lab)
    outcome = run(lab, command, course)
    rows = show.counted(network, before, lab.bytes(), outcome.seconds)
    if outcome.why:
        say(outcome.why)
    show.show(show.traffic(rows, outcome.seconds))
    if hosts > 1 and sum(row["sent_bytes"] for row in rows) < TALK_BYTES:
        say("WARNING: next to nothing went over the links: the ranks did not talk to each other")
    if json_path:
        all_at_once = together and {"asked_gbit": together[0], "gbit": together[1]}
        made = {
            "network": asdict(network),
            "course": asdict(course),
            "command": command,
            "exit_code": outcome.code,
            "seconds": outcome.seconds,
            "checks": show.as_json(found),
            "all_at_once": all_at_once,
            "links": rows,
        }
        json_path.write_text(json.dumps(made, indent=1) + "\n")
    return outcome.code


def say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"netlab: {text}", markup=False)


def main() -> None:
    """Run the command line; errors are one line, with exit code 2."""
    try:
        code = app(standalone_mode=False, prog_name="python -m benchmarks.netlab")
    except LabError as error:
        say(str(error))
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(130)
        if not hasattr(error, "format_message"):  # errors of click or typer in the arguments
            raise
        say(" ".join(error.format_message().split()))
        code = 2
    sys.exit(code)
