"""The table at the top of docs/performance.md has the numbers of the result files."""

from __future__ import annotations

from benchmarks import overview


def test_table_is_that_of_the_files():
    page = overview.PAGE.read_text()
    assert overview.written(page) == page


def test_row_has_its_share_and_gain():
    row = overview.Row("step", "no waits", 50.0, "Inductor", 300.0, "`int8`", 100.0, "file.json")
    cells = ["step", "50 (no waits)", "300 (Inductor)", "100 (`int8`)", "0.50", "3.00"]
    assert row.cells() == [*cells, "`file.json`"]
    row = overview.Row("compile", "", None, "Inductor", 28965.0, "`int8`", 24896.0, "file.json")
    cells = ["compile", "-", "28,965 (Inductor)", "24,896 (`int8`)", "-", "1.16"]
    assert row.cells() == [*cells, "`file.json`"]
