"""The command line on handwritten dumps: output, exit codes, and errors for bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from dumps import LONG, ODD, SITES, fails, make, node, run, site, words

import commpass
from commpass import plan
from commpass.errors import PolicyError, ProfileError
from commpass.plan import dump
from commpass.report import doctor, tables
from commpass.report.progress import progress


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One run: a forward graph with two sites, a backward graph with none."""
    for one in (make(), make("backward", ())):
        dump.write(tmp_path / "dump", one)
    return tmp_path / "dump"


# explain


@pytest.mark.parametrize("width", [40, 80, 240])
def test_explain_loses_nothing_at_any_width(folder: Path, width: int):
    result = run("explain", folder, "--all", width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    dense = re.sub(r"\s", "", result.stdout)
    for reason in (LONG, "saves 60 us [really]"):
        assert re.sub(r"\s", "", reason) in dense
    if width < 80:
        return  # cells are folded there
    shown = words(result.stdout)
    for part in (
        "all_reduce_1",
        "all_reduce(sum)",
        "tp/8",
        "bfloat16[4096, s0]",
        "8.0 MiB",
        "2.0 MiB",
        "25%",
        "int8",
    ):
        assert part in shown
    for part in ("two-shot", "3 chunks", "100.0", "40.0", "0.8%", "forward"):
        assert part in shown
    assert (
        re.sub(
            r"\s",
            "",
            "2 sites, 1 compressed; 16.0 MiB -> 10.0 MiB (62%); predicted 200.0 us -> 140.0 us",
        )
        in dense
    )
    for part in (
        "policy balanced, profile h100",
        "commpass 0.1.0, torch 2.13.0",
        "rank 0 of 8",
        "2026-01-01T10:00:00Z",
    ):
        assert part in shown


def test_one_line_a_site_where_there_is_room(folder: Path):
    [row] = [
        line
        for line in run("explain", folder, "--all", width=240).stdout.splitlines()
        if line.startswith("2  all_reduce_1")
    ]
    assert re.split(r"\s{2,}", row.strip()) == [
        "2",
        "all_reduce_1",
        ODD,
        "forward",
        "all_reduce(sum)",
        "tp/8",
        "bfloat16[4096, s0]",
        "8.0 MiB",
        "2.0 MiB",
        "25%",
        "7.9 MiB",
        "int8",
        "two-shot",
        "3 chunks",
        "100.0",
        "40.0",
        "0.8%",
    ]


def test_explain_says_that_a_graph_has_no_sites(folder: Path):
    result = run("explain", folder / "0001-backward.json")
    assert result.exit_code == 0
    assert "no collective in this graph" in result.stdout


def test_explain_shouts_a_fallback_and_counts_nothing_as_saved(tmp_path: Path):
    result = run("explain", dump.write(tmp_path, make(fallback="pass fuse failed: KeyError")))
    assert "FALLBACK" in result.stdout
    assert "pass fuse failed: KeyError" in result.stdout
    assert "0 compressed; 16.0 MiB -> 16.0 MiB (100%); predicted 200.0 us -> 200.0 us" in words(
        result.stdout
    )


def test_sites_with_one_reason_share_a_line_and_unknown_bytes_are_not_added(tmp_path: Path):
    sites = [site(f"r{index}", reason="too small") for index in range(4)]
    sites.append(site("d", bytes=-1, wire_bytes=-1, reason="no size hint"))
    shown = run("explain", dump.write(tmp_path, make(sites=sites)), "--all").stdout
    assert re.search(r"^1-4 +too small *$", shown, re.MULTILINE)
    assert "32.0 MiB -> 32.0 MiB (100%) (1 of unknown size not counted)" in words(shown)


def test_explain_says_why_a_rank_stands_still(tmp_path: Path):
    sites = [
        site(f"r{index}", exposed_us=30.0, unmoved_us=40.0, missed="all that is left needs it")
        for index in range(2)
    ]
    path = dump.write(tmp_path, make(sites=[*sites, site("hidden")]))
    shown = run("explain", path, "--all", width=160).stdout
    assert re.search(r"^60\.0 us +1-2 +80\.0 us +all that is left needs it *$", shown, re.MULTILINE)
    still = "of which a rank waits 60.0 us (80.0 us before exchanges were moved)"
    assert still in words(shown)
    plain = run("explain", dump.write(tmp_path, make())).stdout
    assert "exposed, predicted" not in plain
    assert "a rank waits" not in plain


def test_explain_json_is_the_plans(folder: Path):
    result = run("explain", folder, "--json")
    read = [plan.Plan.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert read == [one.plan for one in dump.read_run(folder)]


def test_runs(folder: Path):
    dump.write(folder, make(name="run-2", sites=()))
    newest = run("explain", folder)
    assert "2 runs" in newest.stderr
    assert "run-1" in newest.stderr
    assert "run run-2," in newest.stdout
    older = run("explain", folder, "--run", "run-1")
    assert older.stderr == ""
    assert "run run-1," in older.stdout
    fails(run("explain", folder, "--run", "run-11"), "no run 'run-11'", "did you mean 'run-1'?")


# diff


def test_diff_of_the_same_and_of_different_plans(folder: Path, tmp_path: Path):
    same = run("diff", folder, folder)
    assert same.exit_code == 0
    assert "no differences" in same.stdout
    changed = (
        SITES[0],
        dataclasses.replace(SITES[1], codec="taco", wire_bytes=1 << 20, reason="rotated is enough"),
    )
    dump.write(tmp_path / "other", make(sites=(*changed, site("new"))))
    for path in (folder, tmp_path / "other"):
        dump.write(path, make(sites=(site("second"),)))
    result = run("diff", folder, tmp_path / "other", "--all", width=200)
    assert result.exit_code == 1
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert ["all_reduce_1", ODD, "codec", "int8", "taco"] in rows
    assert [
        "all_reduce_1",
        ODD,
        "on the wire",
        "2,097,152 (2.0 MiB)",
        "1,048,576 (1.0 MiB)",
    ] in rows
    assert ["all_reduce_1", ODD, "reason", "saves 60 us [really]", "rotated is enough"] in rows
    assert ["new", ODD, "site", "(no such site)", "all_reduce"] in rows
    assert not any(row[0] == "all_reduce" for row in rows)
    assert "1st forward graph: 4 differences" in result.stdout
    assert re.search(r"1st backward graph: 1 difference\nonly in A", result.stdout)


def test_diff_of_two_runs_in_one_folder(folder: Path):
    dump.write(folder, make(name="run-2", fallback="verify failed"))
    result = run("diff", folder, folder, "--run-a", "run-1", "--run-b", "run-2")
    assert result.exit_code == 1
    assert "verify failed" in result.stdout


# bad input


def newer(head: dict) -> str:
    return json.dumps(head | {"version": 99})


def spoilt(text: str, change) -> str:
    head = json.loads(text)
    change(head)
    return json.dumps(head)


@pytest.mark.few(26)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: "{}", "not a commpass dump"),
        (lambda text: "[1, 2]", "not a commpass dump"),
        (lambda text: "model = x", "not JSON"),
        (lambda text: text[:-300], "cut short"),
        (lambda text: newer(json.loads(text)), "install a newer commpass"),
        (
            lambda text: text.replace('"sites"', '"sights"').replace('"graph"', '"graf"'),
            "damaged dump",
        ),
        (lambda text: spoilt(text, lambda head: head.update(plan=[1, 2])), "damaged dump"),
        (lambda text: spoilt(text, lambda head: head.update(after={"x": 1})), "damaged dump"),
        (lambda text: spoilt(text, lambda head: head["plan"].update(sites="all")), "damaged dump"),
        (lambda text: spoilt(text, lambda head: head.pop("run")), "damaged dump"),
        (lambda text: "", "cut short"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "graph", "diff"])
def test_file_that_is_no_dump(folder: Path, command: str, spoil, said: str):
    path = folder / "0001-backward.json"
    path.write_text(spoil(path.read_text()))
    fails(run(command, *([folder] * (1 + (command == "diff")))), said, str(path))


def test_no_file_and_no_dump_in_the_folder(folder: Path, tmp_path: Path):
    fails(run("explain", tmp_path / "nowhere"), "no such file or folder")
    (tmp_path / "empty").mkdir()
    fails(run("diff", folder, tmp_path / "empty"), "no dump in this folder")
    fails(run("explain", folder.parent), "no dump in this folder", f"there is one in {folder.name}")


@pytest.mark.parametrize("form", ["--text", "--dot", "--svg"])
@pytest.mark.parametrize("level", ["sites", "nodes"])
def test_circle_in_a_damaged_graph(tmp_path: Path, level: str, form: str):
    nodes = (node("a", "aten.neg.default", "b"), node("b", "aten.neg.default", "a"))
    path = dump.write(tmp_path, make(nodes=nodes))
    fails(run("graph", path, form, "--level", level), "circle", "a takes b")


# doctor


def test_doctor(monkeypatch: pytest.MonkeyPatch):
    table = run("doctor")
    assert table.exit_code == 0
    rows = {row["what"]: row for row in json.loads(run("doctor", "--json").stdout)}
    assert rows["python"]["state"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["torch"]["ok"]
    assert rows["distributed"]["state"] == "yes"
    for row in rows.values():
        assert row["what"] in words(table.stdout)
        assert row["ok"] or row["meaning"]


@pytest.mark.parametrize(
    ("version", "code"),
    [("2.11.0a0+git1", 0), ("2.15.1+cu130", 0), ("2.10.2", 1), ("2.16.0", 1), ("3.1", 1)],
)
def test_doctor_knows_which_torch_is_supported(
    monkeypatch: pytest.MonkeyPatch, version: str, code: int
):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert [row["state"] for row in json.loads(result.stdout) if row["what"] == "torch"] == [
        version
    ]


def test_doctor_without_torch_or_distributed(monkeypatch: pytest.MonkeyPatch):
    import torch.distributed

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_available", lambda: False)
        assert run("doctor").exit_code == 1
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install 'torch<2.16,>=2.11'" in words(result.stdout)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.json", None, "gone.json"),
        ("bad.toml", "base = ", "bad.toml"),
        ("nvlink-44", None, ""),
    ],
)
def test_doctor_tells_what_is_wrong_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
):
    where = str(tmp_path / name) if "." in name else name
    if text is not None:
        Path(where).write_text(text)
    monkeypatch.setenv("COMMPASS_PROFILE", where)
    result = run("doctor")
    assert result.exit_code == 2
    assert f"COMMPASS_PROFILE={where}" in result.stderr
    assert said in result.stderr
    assert max(map(len, result.stdout.splitlines())) < 200
    assert "assumes one" not in result.stdout
    assert "distributed" in result.stdout  # everything else is reported as well


def test_profile_of_the_environment_that_cannot_be_used_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COMMPASS_PROFILE", "nvlink-44")
    with pytest.raises(ProfileError, match=r"^COMMPASS_PROFILE=nvlink-44: .*did you mean"):
        commpass.backend("balanced")
    with pytest.raises(PolicyError, match=r"^unknown profile 'nvlink-44'"):
        commpass.backend("balanced", profile="nvlink-44")


# tables


def test_numbers_and_names_of_a_table_stay_whole(monkeypatch: pytest.MonkeyPatch, capsys):
    table = tables.plain_table("codec", "a number", "why", folded=("why",))
    table.add_row(
        "rotated(bits=6)", "0.0128 of all", "since it gains much more than the others " * 3
    )
    for width in (20, 30, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        tables.console_for(table).print(table)
        shown = capsys.readouterr().out
        assert "rotated(bits=6)" in shown
        assert "0.0128 of all" in shown
        assert len(shown.splitlines()) > 4  # the text goes on
    monkeypatch.delenv("COLUMNS")
    tables.console_for(table).print(table)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_progress_is_shown_on_a_terminal_alone(capsys, monkeypatch: pytest.MonkeyPatch):
    with progress("simulate") as told:
        told(1, 2, "tracing")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("simulate") as told:
        told(1, 2, "tracing")
    assert "tracing" in capsys.readouterr().err


def test_doctor_tells_the_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (8, 0)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H" if index else "A")
    assert doctor.gpus() == ("1 x A (capability 8.0, no fp8), 2 x H (capability 9.0, fp8)", True)


# the whole


@pytest.mark.slow
def test_version_and_help():
    assert re.fullmatch(r"commpass \d+\.\d+\S*\n", run("--version").stdout)
    shown = run("--help").stdout
    for command in ("explain", "graph", "diff", "doctor"):
        assert re.search(rf"\b{command}\b", shown)
        assert run(command, "--help").exit_code == 0


@pytest.mark.slow
def test_console_script_starts():
    import subprocess

    script = shutil.which("commpass", path=str(Path(sys.executable).parent)) or pytest.skip(
        "not installed"
    )
    done = subprocess.run(
        [script, "explain", "no-such-dump"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "commpass: no-such-dump: no such file or folder."
        " A program writes a dump with COMMPASS_DUMP=folder\n"
    )
