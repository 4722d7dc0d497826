"""Measure the gain of all_reduce, by codec and size.

A row is one codec with the cost model's choice for it on this link, or with the named chunks and
algorithm. The tensors are float32. It alternates with Inductor's plain all_reduce of the same
values and of the values cast to bfloat16, which needs no commpass. ``ideal`` is the time that the
bytes that a rank sends take on its link; ``share`` is how much of the measured time that is.
``CPU`` is the processor time of one rank for one call.
"""

from __future__ import annotations

import torch

from commpass.collectives import algorithm

from .calls import Contenders, all_reduce, all_reduce_bf16, leaves, measure, rows_of
from .shared import (
    LINKS,
    PATIENCE_S,
    Measurement,
    Options,
    Row,
    by,
    compare,
    forced,
    number,
    on_links,
    spread,
    text,
)

NAME = "reduces"
USUAL = {
    "ranks": [2, 4],
    "gbit": [0.1, 1.0, 10.0],
    "kib": [256, 1024, 4096, 16384, 65536],
    "codecs": ["bf16", "int8", "int4", "rotated", "rotated(bits=4)"],
    "chunks": None,
    "algorithm": None,
    "repeats": 9,
}
QUICK = {"ranks": [2], "gbit": [1.0], "kib": [256, 1024], "codecs": ["bf16", "int8"], "repeats": 3}


def measured(options: Options) -> list[Row]:
    """Return the rows. Raise PolicyError for an unknown algorithm."""
    if options.algorithm:
        algorithm("all_reduce", options.algorithm)
    named = {"chunks": options.chunks, "algorithm": options.algorithm}
    named = {key: value for key, value in named.items() if value}
    contenders: Contenders = {
        "plain": (all_reduce, None),
        "plain bf16": (all_reduce_bf16, None),
        **{codec: (all_reduce, forced(codec, **named)) for codec in options.codecs},
    }
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        for kib in options.kib:
            job = (contenders, kib, torch.float32, f"ethernet-{gbit:g}g", options.repeats)
            found = ranks.run(measure, *job, timeout=PATIENCE_S)
            whole = leaves("all_reduce", ranks.size, kib * 1024)
            least = dict.fromkeys(contenders, whole) | {"plain bf16": whole / 2}
            known = {"ranks": ranks.size, "gbit": gbit, "KiB": kib}
            made = rows_of(found, known, least)
            compare(made, "name", "plain", "of_plain")
            compare(made, "name", "plain bf16", "of_bf16")
            rows += made
    return rows


COLUMNS = {
    **LINKS,
    "KiB": text("KiB"),
    "codec": text("name"),
    "by": by,
    "ms": spread,
    "predicted": number("predicted_ms", ".1f"),
    "ideal": number("ideal_ms", ".1f"),
    "share": number("share"),
    "x plain": number("of_plain"),
    "x bf16": number("of_bf16"),
    "CPU ms": number("cpu_ms", ".1f"),
}
MEASUREMENT = Measurement(NAME, "all_reduce of float32", USUAL, QUICK, measured, COLUMNS)
