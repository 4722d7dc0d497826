"""Measure all_reduce on two levels of links: nodes of two hosts, fast inside and slow between.

It compares an algorithm for float32 that uses the levels with one that does not. ``uplink`` is the
least that is sent each way over the link of a node, ``ideal`` the time that this takes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

import commpass
from benchmarks import netlab
from commpass.plan.stage import BLOCK

from .calls import Contenders, all_reduce, ideal_ms, measure, rows_of
from .shared import (
    LINKS,
    PATIENCE_S,
    Measurement,
    Options,
    Row,
    compare,
    forced,
    hosts,
    members,
    number,
    progress,
    spread,
    text,
)

NAME = "levels"
NODE, INSIDE_GBIT = 2, 10.0
ALGORITHMS = ("two_shot", f"hierarchical(node={NODE})")
USUAL = {
    "ranks": [4],
    "gbit": [1.0],
    "kib": [4096, 16384],
    "codecs": ["int8"],
    "repeats": 9,
}
QUICK = {"kib": [1024], "repeats": 3}


def profile(gbit: float) -> commpass.Profile:
    """Return the cost model's profile of such a network."""
    inside = commpass.ethernet(INSIDE_GBIT).link
    return dataclasses.replace(commpass.ethernet(gbit), ranks_per_host=NODE, intra_host_link=inside)


def crossing(stage: Any, ranks: int) -> float:
    """Return the bytes of one stage that a rank sends to other nodes.

    A stage between nodes among only some of the ranks is between counterparts on different nodes.
    """
    if stage.role != "exchange" or stage.reach == BLOCK:
        return 0
    others = ranks - NODE
    if stage.kind == "all_gather":
        return stage.leaving * others
    return stage.leaving * (others / (ranks - 1) if stage.peers == ranks - 1 else 1)


def uplink(stages: Iterable[Any], ranks: int) -> float:
    """Return the bytes that leave a node."""
    return NODE * sum(map(crossing, stages, itertools.repeat(ranks)))


def ring(ranks: int, nbytes: float) -> float:
    """Return the bytes that leave a node in a plain all_reduce: a ring in which one rank of each
    node sends to the next node."""
    return 2 * (ranks - 1) / ranks * nbytes


def measured(options: Options) -> list[Row]:
    contenders: Contenders = {"plain": (all_reduce, None)}
    for codec, spec in itertools.product(options.codecs, ALGORITHMS):
        contenders[f"{codec}, {spec}"] = (all_reduce, forced(codec, algorithm=spec))
    rows: list[Row] = []
    for ranks, gbit in itertools.product(options.ranks, options.gbit):
        network = netlab.Network(hosts=ranks, gbit=gbit, node=NODE, inside_gbit=INSIDE_GBIT)
        with hosts(network), members(ranks, options) as those:
            progress.print(f"{NAME}: {ranks} ranks, {INSIDE_GBIT:g} and {gbit:g} Gbit/s")
            for kib in options.kib:
                job = (contenders, kib, torch.float32, profile(gbit), options.repeats)
                found = those.run(measure, *job, timeout=PATIENCE_S)
                rows += level_rows(found, ranks, gbit, kib)
    return rows


def level_rows(found: list[dict[str, Row]], ranks: int, gbit: float, kib: int) -> list[Row]:
    plain = ring(ranks, kib * 1024)
    least = dict.fromkeys(found[0], plain)
    made = rows_of(found, {"ranks": ranks, "gbit": gbit, "KiB": kib}, least)
    for row, first in zip(made, found[0].values(), strict=True):
        stages = first.get("stages")
        row["uplink_mib"] = (uplink(stages, ranks) if stages else plain) / 2**20
        row["ideal_ms"] = ideal_ms(row["uplink_mib"] * 2**20, gbit)
        row["share"] = row["ideal_ms"] / row["ms"][1]
    compare(made, "name", "plain", "of_plain")
    return made


COLUMNS = {
    **LINKS,
    "KiB": text("KiB"),
    "codec and algorithm": text("name"),
    "ms": spread,
    "uplink MiB": number("uplink_mib"),
    "ideal": number("ideal_ms", ".1f"),
    "share": number("share"),
    "x plain": number("of_plain"),
}
TITLE = f"all_reduce of float32, nodes of {NODE} with {INSIDE_GBIT:g} Gbit/s inside"
MEASUREMENT = Measurement(NAME, TITLE, USUAL, QUICK, measured, COLUMNS)
