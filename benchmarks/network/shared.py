"""Code shared by all measurements: hosts and their ranks, alternating variants, times, tables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from processes import Ranks
from rich.console import Console
from rich.table import Table

import commpass
from benchmarks import netlab

HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "PYTHONWARNINGS": "ignore",
    "TORCH_LOGS": "-all",
    "KINETO_LOG_LEVEL": "6",
}
WARM_UP = 3
FEWEST = 15  # repetitions, even of calls that take long
WIDTH = 160
PATIENCE_S = 3600.0
quartiles = partial(quantiles, n=4, method="inclusive")
progress = Console(stderr=True, width=WIDTH, highlight=False)
Row = dict[str, Any]
Options = SimpleNamespace
Allowed = commpass.Policy | str | None
"""A policy, or None for Inductor alone."""

torch._dynamo.config.recompile_limit = 64  # one function is compiled for each compared variant


@dataclass(frozen=True)
class Measurement:
    """A measurement.

    ``usual`` are its options with their defaults, ``quick`` those of ``--quick``. ``measured``
    makes all rows. ``columns`` are the columns of a table, by title; ``remarks`` are the lines
    below the table.
    """

    name: str
    title: str
    usual: Mapping[str, Any]
    quick: Mapping[str, Any]
    measured: Callable[[Options], list[Row]]
    columns: Mapping[str, Callable[[Row], str]]
    remarks: Callable[[list[Row]], list[str]] = lambda rows: []


@contextmanager
def hosts(network: netlab.Network) -> Iterator[netlab.Lab]:
    """Build a lab and remove it afterwards, so that the next measurement can build its own."""
    lab = netlab.build(network)
    try:
        yield lab
    finally:
        lab.remove()


@contextmanager
def members(ranks: int, options: Options) -> Iterator[Ranks]:
    """Start the ranks of the first hosts, one in each; with ``options.own_cores``, each on a core
    that no other rank uses."""
    os.environ.update(HEAP)  # the ranks begin after this
    environment = {"RANKS_HOST": "host", "GLOO_SOCKET_IFNAME": "eth0"}
    if options.own_cores:
        environment["RANKS_OWN_CORES"] = "1"
    made = Ranks(ranks, environment, workers=2)
    try:
        yield made
    finally:
        made.stop()


def on_links(name: str, options: Options) -> Iterator[tuple[Ranks, float]]:
    """Yield ranks and the rate of their links in Gbit/s: each number of ranks with each rate."""
    rates = options.gbit
    with hosts(netlab.Network(hosts=max(options.ranks), gbit=max(rates))) as lab:
        for ranks in options.ranks:
            with members(ranks, options) as those:
                for gbit in rates:
                    for host in range(lab.network.hosts):
                        lab.slow(host, gbit)
                    progress.print(f"{name}: {ranks} ranks, {gbit:g} Gbit/s")
                    yield those, gbit


def compiled(target: Any, policy: Allowed, profile: Any) -> Any:
    """Compile ``target`` under a policy, for links of this profile; None: under Inductor alone."""
    backend: Any = "inductor"
    if policy is not None:
        backend = commpass.backend(policy, profile=profile, strict=True)
    return torch.compile(target, backend=backend, dynamic=False)


def forced(codec: str, **named: Any) -> commpass.Policy:
    """Return a policy that compresses every site with a codec, whatever the model predicts."""
    return commpass.Policy(rules=[commpass.Rule(codec=codec, force=True, **named)])


def take_turns(
    functions: Mapping[str, Callable[[], Any]], repeats: int, seconds: float = math.inf
) -> dict[str, Row]:
    """Return milliseconds, and milliseconds of processor time, of each repetition on this rank.

    If all calls together took longer than ``seconds``, there are fewer repetitions, but at least
    ``FEWEST`` (or ``repeats``, if that is less).
    """
    begin = time.perf_counter()
    _turns(functions, WARM_UP)
    turn = torch.tensor((time.perf_counter() - begin) / WARM_UP)
    dist.all_reduce(turn, dist.ReduceOp.MAX)  # one number of repetitions on all ranks
    within = min(repeats, seconds / turn.item())
    return _turns(functions, max(int(within), min(repeats, FEWEST)))


def _turns(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Row]:
    found: dict[str, Row] = {name: {"ms": [], "cpu_ms": []} for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            function()
            took, worked = time.perf_counter() - start, time.process_time() - busy
            found[name]["ms"].append(1e3 * took)
            found[name]["cpu_ms"].append(1e3 * worked)
    return found


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Return lower quartile, median and upper quartile of the slowest rank's times, from those of
    each."""
    return quartiles([max(each) for each in zip(*times, strict=True)])


def compare(rows: list[Row], key: str, base: str, into: str) -> None:
    """Write into each row how many times faster it is than the one whose ``key`` is ``base``."""
    (ms,) = (row["ms"][1] for row in rows if row[key] == base)
    for row in rows:
        row[into] = ms / row["ms"][1]


def table(rows: list[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """Return a table; columns of numbers are aligned right."""
    made = Table(box=None)
    cells = {title: [show(row) for row in rows] for title, show in columns.items()}
    for title, texts in cells.items():
        right = all(text[:1].isdigit() or text[:1] in ("-", "+", "") for text in texts)
        made.add_column(title, justify="right" if right else "left")
    for texts in zip(*cells.values(), strict=True):
        made.add_row(*texts)
    return made


def chosen(have: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the first, with which all others are compared, and the named ones, in order."""
    first, *others = have
    return [first, *(name for name in others if name in names)]


def spread(row: Row) -> str:
    low, middle, high = row["ms"]
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def by(row: Row) -> str:
    """Return the algorithm with its chunks, or torch."""
    return f"{row['algorithm']} x{row['chunks']}" if row.get("algorithm") else "torch"


def number(key: str, form: str = ".2f") -> Callable[[Row], str]:
    """Return a column that shows one number, or - if a row has none."""
    return lambda row: "-" if row.get(key) is None else f"{row[key]:{form}}"


def text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


LINKS = {"ranks": text("ranks"), "Gbit/s": number("gbit", "g")}
