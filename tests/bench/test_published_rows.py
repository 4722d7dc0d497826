"""Test the file of published measurements: columns, levels, splits, and who checked what."""

from __future__ import annotations

import collections
import csv
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "published" / "rows.tsv"
COLUMNS = [
    *("split", "level", "source", "hardware", "ranks", "collective", "dtype", "bytes", "codec"),
    *("baseline", "compressed", "unit", "note", "checked"),
]
MAY_BE_EMPTY = {"ranks", "bytes", "baseline", "compressed", "note"}
VALUE = re.compile(r"\d+(\.\d+)?( to \d+(\.\d+)?)?")
CHECKED = re.compile(r"yes|no: source not at hand|corrected: was \S.*")


@pytest.fixture(scope="module")
def lines() -> list[list[str]]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def rows(lines) -> list[dict[str, str]]:
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_every_line_has_every_column(lines):
    assert lines[0] == COLUMNS
    assert len(lines) > 200
    assert {len(line) for line in lines} == {len(COLUMNS)}


def test_columns_are_filled(rows):
    empty = [
        (number, name)
        for number, row in enumerate(rows, start=2)
        for name in COLUMNS
        if name not in MAY_BE_EMPTY and not row[name].strip()
    ]
    assert not empty


def test_levels_splits_and_checks_are_known(rows):
    assert {row["level"] for row in rows} == {"kernel", "step"}
    assert {row["split"] for row in rows} == {"fit", "held-out"}
    assert not [row for row in rows if not CHECKED.fullmatch(row["checked"])]


def test_measurements_are_numbers_or_ranges(rows):
    """One of the two values may be absent, where the source gives one alone."""
    for row in rows:
        values = [row[name] for name in ("baseline", "compressed") if row[name]]
        assert values, row
        assert all(VALUE.fullmatch(value) for value in values), row
        assert not row["ranks"] or int(row["ranks"]) > 0, row


def test_kernel_rows_to_fit_have_numbers_alone(rows):
    for row in rows:
        if (row["split"], row["level"]) == ("fit", "kernel"):
            assert int(row["bytes"]) > 0, row
            assert float(row["baseline"]) > 0, row
            assert float(row["compressed"]) > 0, row


def test_at_most_a_third_is_fitted_to(rows):
    splits = collections.Counter(row["split"] for row in rows)
    assert splits["fit"] * 3 <= len(rows)


def test_a_source_is_in_one_split(rows):
    splits = collections.defaultdict(set)
    for row in rows:
        splits[row["source"]].add(row["split"])
    assert not {source for source, found in splits.items() if len(found) > 1}


def test_no_measurement_is_there_twice(rows):
    """A measurement is a source with its hardware, message, codec and, of a step, its note."""
    names = [*COLUMNS[2:9], "note"]
    keys = collections.Counter(tuple(row[name] for name in names) for row in rows)
    assert not [key for key, times in keys.items() if times > 1]
