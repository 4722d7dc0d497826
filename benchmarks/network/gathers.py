"""Measure the gain of lossless collectives: all_gather and all_to_all of bfloat16 with codec
``exponent``.

Values are Gaussian, which approximates weights and gradients. Sizes are what each rank sends. The
cost model chooses; if it leaves a call uncompressed, the table tells why, and ``x plain`` is then
the same graph twice.
"""

from __future__ import annotations

import torch

import commpass

from .calls import KINDS, Contenders, compare_with_plain
from .shared import (
    LINKS,
    Measurement,
    Options,
    Row,
    by,
    number,
    on_links,
    spread,
    text,
)

NAME = "gathers"
USUAL = {
    "ranks": [2],
    "gbit": [0.1, 1.0, 10.0],
    "kib": [1024, 4096, 16384],
    "repeats": 9,
}
QUICK = {
    "gbit": [10.0],
    "kib": [1024],
    "repeats": 3,
}  # nothing is coded there: that compiles for minutes
LOSSLESS = commpass.Policy(name="exponent", codecs=("exponent",))


def measured(options: Options) -> list[Row]:
    rows: list[Row] = []
    for ranks, gbit in on_links(NAME, options):
        for kind in ("all_gather", "all_to_all"):
            function = KINDS[kind]
            contenders: Contenders = {"plain": (function, None), "exponent": (function, LOSSLESS)}
            for kib in options.kib:
                case = (ranks, gbit, kind, kib, contenders, torch.bfloat16)
                rows += compare_with_plain(*case, f"ethernet-{gbit:g}g", options.repeats)
    return rows


COLUMNS = {
    **LINKS,
    "kind": text("kind"),
    "KiB": text("KiB"),
    "codec": text("name"),
    "by": by,
    "ms": spread,
    "ideal": number("ideal_ms", ".1f"),
    "share": number("share"),
    "x plain": number("of_plain"),
    "why": lambda row: row.get("reason", ""),
}
MEASUREMENT = Measurement(NAME, "moves of bfloat16", USUAL, QUICK, measured, COLUMNS)
