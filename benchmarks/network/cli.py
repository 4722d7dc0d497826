"""The command line: measurements with their options, their tables, one JSON file, one picture."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import netlab

from . import (
    data_parallel,
    gathers,
    levels,
    never_slower,
    predicted,
    reduces,
    steps,
    wholes,
)
from .plot import PAINTED, draw
from .shared import HEAP, WARM_UP, WIDTH, Measurement, Options, Row, table

MEASUREMENTS: dict[str, Measurement] = {
    each.MEASUREMENT.name: each.MEASUREMENT
    for each in (
        reduces,
        steps,
        gathers,
        never_slower,
        levels,
        predicted,
        wholes,
        data_parallel,
    )
}
LISTS = {
    "ranks": int,
    "gbit": float,
    "kib": int,
    "codecs": str,
    "models": str,
    "policies": str,
    "ways": str,
}
KNOWN = {
    "models": steps.MODELS,
    "policies": steps.POLICIES,
    "ways": data_parallel.WAYS,
}
SINGLE = {
    "chunks": int,
    "algorithm": str,
    "layers": int,
    "width": int,
    "batch": int,
    "length": int,
    "steps": int,
    "repeats": int,
    "seconds": float,
}
LEAST = 2  # repetitions, for quartiles


def parsed(arguments: list[str] | None = None) -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    names = list(MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="little of each: that it works")
    parser.add_argument("--json", type=Path, help="file for all rows")
    parser.add_argument("--plot", type=Path, help=f"PNG of {', '.join(PAINTED)}")
    parser.add_argument("--own-cores", action="store_true", help="a core for each rank alone")
    for name, kind in (LISTS | SINGLE).items():
        usual = [
            f"{m.name} {shown(m.usual[name])}" for m in MEASUREMENTS.values() if name in m.usual
        ]
        more: dict[str, Any] = {"nargs": "+"} if name in LISTS else {}
        more |= {"choices": list(KNOWN[name])} if name in KNOWN else {}
        parser.add_argument(f"--{name}", type=kind, help="; ".join(usual), **more)
    options = parser.parse_args(arguments)
    for name in LISTS | SINGLE:
        if getattr(options, name) is not None and not takers(name, options.only):
            parser.error(f"--{name}: is for {', '.join(takers(name, names))}, none of --only")
    cores, most = len(os.sched_getaffinity(0)), max(_ranks(options))
    if options.own_cores and most > cores:
        parser.error(f"--own-cores: {most} ranks, but {cores} cores: fewer --ranks")
    if options.repeats is not None and options.repeats < LEAST:
        parser.error(f"--repeats {options.repeats}: must be at least {LEAST}, for quartiles")
    if options.steps is not None and options.steps < WARM_UP + LEAST:
        why = f"for quartiles behind {WARM_UP} that warm up"
        parser.error(f"--steps {options.steps}: must be at least {WARM_UP + LEAST}, {why}")
    if options.plot and not PAINTED.keys() & set(options.only):
        parser.error(f"--plot: shows {', '.join(PAINTED)}, none of --only")
    return parser, options


def _ranks(options: Any) -> list[int]:
    """Return all numbers of ranks that will be measured."""
    return [ranks for each in options.only for ranks in told(MEASUREMENTS[each], options).ranks]


def takers(name: str, chosen: list[str]) -> list[str]:
    """Return which of the selected measurements have an option."""
    return [each for each in chosen if name in MEASUREMENTS[each].usual]


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def told(measurement: Measurement, options: Any) -> Options:
    """Return a measurement's options: as given, else those of --quick, else the defaults."""
    made = {**measurement.usual, **(measurement.quick if options.quick else {})}
    given = {name: getattr(options, name) for name in made}
    made |= {name: value for name, value in given.items() if value is not None}
    return Options(**made, own_cores=options.own_cores)


def facts(rows: dict[str, list[Row]], options: Any) -> Row:
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("commpass", "torch", "transformers")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "heap": HEAP,
        "own_cores": options.own_cores,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> None:
    parser, options = parsed(arguments)
    try:
        netlab.stand_apart()
    except netlab.LabError as error:
        parser.error(str(error))
    rows: dict[str, list[Row]] = {}
    console = Console(width=WIDTH)
    for name in options.only:
        measurement = MEASUREMENTS[name]
        rows[name] = measurement.measured(told(measurement, options))
        console.print(f"\n{name}: {measurement.title}", style="bold")
        console.print(table(rows[name], measurement.columns))
        for line in measurement.remarks(rows[name]):
            console.print(line)
        if options.json:  # after each measurement, because all of them take hours
            options.json.write_text(json.dumps(facts(rows, options), indent=1) + "\n")
    if options.plot:
        draw(rows, options.plot)
