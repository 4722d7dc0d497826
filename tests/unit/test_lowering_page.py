"""The table of kernels in docs/lowering.md has the numbers of benchmarks/results/lowered.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
CARDS = ("H100 SXM", "H200", "B200")


def rows_of_the_page() -> list[tuple[str, ...]]:
    """Return the rows of kernels of block codecs; those of others have several kernels each."""
    text = (ROOT / "docs" / "lowering.md").read_text()
    _, _, table = text.partition("| codec | kernel | registers | H100 | H200 | B200 |\n")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return [each for each in cells if re.fullmatch(r"\w+", each[1])]


def row_of(found: dict, codec: str, kernel: str) -> tuple[str, ...]:
    by_arch = {
        each["arch"]: each
        for each in found["rows"]
        if (each["codec"], each["kernel"]) == (codec, kernel)
    }
    registers = ", ".join(str(by_arch[arch]["registers"]) for arch in ARCHS)
    cards = {card["card"]: card for each in by_arch.values() for card in each.get("cards", [])}
    shares = [f"{cards[name]['share']:.2f} {cards[name]['limit']}" for name in CARDS]
    return (codec, kernel, registers, *shares)


def test_table_of_kernels_has_the_compiled_numbers():
    found = json.loads((ROOT / "benchmarks" / "results" / "lowered.json").read_text())
    rows = rows_of_the_page()
    assert len(rows) == 25
    assert rows == [row_of(found, codec, kernel) for codec, kernel, *_ in rows]
