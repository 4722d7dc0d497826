"""A compile that takes long says what it is doing."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from commpass.distributed import compile_progress


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "FIRST_S", 0.05)
    monkeypatch.setattr(compile_progress, "REFRESH_S", 0.01)


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_long_compile_is_logged_with_its_stage_and_its_end(caplog):
    with caplog.at_level(logging.INFO, "commpass"):
        with compile_progress.compiling("graph 3 (backward)"):
            compile_progress.stage("waits for the plans of rank 1")
            wait_for(lambda: caplog.messages)
        assert "now: waits for the plans of rank 1" in caplog.messages[0]
        assert caplog.messages[-1].startswith("graph 3 (backward): compiled in")


def test_short_compile_is_not_reported(caplog, monkeypatch):
    monkeypatch.setattr(compile_progress, "FIRST_S", 60)
    before = threading.active_count()
    with (
        caplog.at_level(logging.INFO, "commpass"),
        compile_progress.compiling("graph 0 (forward)"),
    ):
        compile_progress.stage("passes")
    assert not caplog.messages
    assert threading.active_count() == before


def test_error_ends_the_report():
    before = threading.active_count()
    with pytest.raises(KeyError), compile_progress.compiling("graph 0 (forward)"):
        raise KeyError
    assert threading.active_count() == before
    compile_progress.stage("outside of a compile, nothing happens")


def test_terminal_shows_a_line_on_the_first_rank(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown: list[str] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    def seen() -> bool:
        shown.append(capsys.readouterr().err)
        return "graph 1 (forward)" in "".join(shown) and "pass 'choose'" in "".join(shown)

    with compile_progress.compiling("graph 1 (forward)"):
        compile_progress.stage("pass 'choose'")
        wait_for(seen)


def test_other_ranks_show_no_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(compile_progress, "is_first_rank", lambda: False)
    with compile_progress.compiling("graph 1 (forward)"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
