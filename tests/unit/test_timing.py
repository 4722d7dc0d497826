"""The report on the duration of a test run."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import timing


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Return times of an earlier run, and of this one, on a machine of half the speed."""
    before = {"a.py": 10.0, "b.py": 20.0, "c.py": 30.0, "gone.py": 500.0}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"files": before}))
    monkeypatch.setattr(timing, "STORED", path)
    now = Counter({"a.py": 20.0, "b.py": 70.0, "c.py": 60.0, "new.py": 40.0})
    monkeypatch.setattr(timing, "_seconds", now)
    return path


def test_warning_names_the_files_that_grew_most_whatever_the_machine(stored):
    first, *files = timing._warning(700.0).splitlines()
    assert "11.7 minutes" in first
    assert "2.50 times" in first
    assert [line.split(":")[0].strip() for line in files[:2]] == ["new.py", "b.py"]
    assert "b.py: 20 s, now 70 s" in files[1]


def test_warning_without_stored_times_gives_the_time_alone(stored):
    stored.unlink()
    assert timing._warning(700.0).splitlines() == [
        "WARNING: this took 11.7 minutes, wanted are 10."
    ]


@pytest.mark.parametrize("option", ["", "--slow", "--share", "--bench", "--every"])
def test_long_run_is_warned_of_only_in_the_quick_tier(stored, monkeypatch, option):
    monkeypatch.setattr(timing, "_begun", timing.time.monotonic() - 700)
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lambda text, **_: lines.append(text))
    config = SimpleNamespace(getoption=lambda name: name == option)
    timing.pytest_terminal_summary(reporter, config)
    assert any("WARNING" in line for line in lines) == (option == "")


def test_stored_times_are_those_of_the_run(stored):
    found = timing._stored(700.0)
    assert found["took_s"] == 700
    assert {name: found["files"][name] for name in ("a.py", "b.py")} == {"a.py": 20.0, "b.py": 70.0}
