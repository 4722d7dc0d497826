"""``commpass compare`` on programs that only write step times: rounds, errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dumps import make
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.plan import dump
from commpass.report import compare as comparison
from commpass.report.compare import losses, processes

ROOT = Path(commpass.__file__).parent.parent
PROGRAM = """
import os, shutil, sys, time
from pathlib import Path
from commpass.utils.step_records import StepRecord, encode, file_name
steps, ms = int(sys.argv[1]), float(sys.argv[2])
is_off = os.environ.get("COMMPASS") == "off"
path = Path(os.environ["COMMPASS_STEPS"]) / file_name(time.time_ns(), "host", os.getpid())
shutil.copytree(os.environ["PLANS"], os.environ["COMMPASS_DUMP"])
with path.open("ab", buffering=0) as file:
    file.write(encode(StepRecord(0, "start")))
    for step in range(steps):
        print(f"step {step} loss {1 / (1 + step):.4f}")
        seconds = (2 if is_off else 1) * ms / 1e3 + step * 1e-6
        if ms > 50:
            time.sleep(ms / 1e3)
        file.write(encode(StepRecord(0, "optimizer 0", seconds, step == 0)))
"""
"""Says that steps are twice as fast with commpass. Above 50 ms it takes that time, too."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    dump.write(tmp_path / "plans", make())
    monkeypatch.setenv("PLANS", str(tmp_path / "plans"))
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(tmp_path: Path, *command: object, options=()):
    page = tmp_path / "compare.html"
    given = ["compare", "-o", str(page), *map(str, options), "--", *map(str, command)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "200"})


def test_rounds_in_turns_give_a_verdict_and_a_page(tmp_path, program):
    keep = tmp_path / "kept"
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 2, "--keep", keep))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("on is 2.00 times as fast as off: 10 ms a step instead of 20 ms")
    assert "Its printed losses are those of off" in " ".join(lines[:3])
    assert any(line.split()[:2] == ["step", "11"] for line in lines)
    assert [each.name for each in sorted(keep.iterdir())] == ["00-off", "01-on", "02-off", "03-on"]
    assert "16 of 24" in done.stdout
    page = (tmp_path / "compare.html").read_text()
    assert "on is 2.00 times as fast as off" in page
    assert page.count("<polyline") == 4
    assert "round 2 of 2, on: 10 ms a step" in done.stderr


def test_json_alone_is_printed(tmp_path, program):
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 1, "--json"))
    found = json.loads(done.stdout)
    assert found["policies"][1]["faster"] == pytest.approx(2, rel=1e-3)
    assert found["losses"][0] == ["step 0", [1.0, 1.0]]
    assert [len(each["ms"]) for each in found["runs"]] == [8, 8]


def test_run_is_stopped_after_enough_steps(tmp_path, program):
    done = run(tmp_path, sys.executable, program, 10_000, 60, options=("--rounds", 1, "--steps", 4))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("on is 2.00 times as fast as off")


def fails(done, *said: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("commpass: ")
    for part in said:
        assert part in done.stderr


def test_program_that_fails_under_one_policy(tmp_path, program):
    fail = "if not is_off: raise SystemExit('disk is full')\n"
    program.write_text(PROGRAM + fail)
    done = run(tmp_path, sys.executable, program, 12, 10)
    fails(done, "| disk is full", "exit status 1 (policy 'on', round 1)")
    output = Path(done.stderr.splitlines()[-1].rpartition(" in ")[2])
    assert "disk is full" in output.read_text()


def test_other_policies_are_compared_if_one_fails(tmp_path, program):
    fail = "if os.environ.get('COMMPASS_POLICY') == 'aggressive': raise SystemExit('no memory')\n"
    program.write_text(PROGRAM + fail)
    options = ("--rounds", 2, "--policies", "off,aggressive,balanced")
    done = run(tmp_path, sys.executable, program, 12, 10, options=options)
    assert done.exit_code == 2, done.output
    assert done.stdout.startswith("balanced is 2.00 times as fast as off")
    assert "aggressive: inconclusive: no run of aggressive is complete" in done.stdout
    assert "The command failed with exit status 1 (policy 'aggressive', round 1)" in done.stdout
    assert done.stderr.count("| no memory") == 1
    assert "round 2 of 2, balanced" in done.stderr
    assert "round 2 of 2, aggressive" not in done.stderr


def test_complete_rounds_are_compared_if_a_later_one_fails(tmp_path, program):
    fail = "if 'COMMPASS' not in os.environ and '03-on' in str(path): raise SystemExit('gone')\n"
    program.write_text(PROGRAM + fail)
    done = run(tmp_path, sys.executable, program, 12, 10)
    assert done.exit_code == 2, done.output
    assert done.stdout.startswith("on is 2.00 times as fast as off")
    assert "8 of 12" in done.stdout
    assert "(policy 'on', round 2)" in done.stdout
    assert "round 3 of 3" not in done.stderr


def test_complete_rounds_are_compared_if_the_base_fails_later(tmp_path, program):
    count = tmp_path / "count"
    fail = f"""
if is_off:
    with open({str(count)!r}, "a") as file:
        file.write("x")
    if os.path.getsize({str(count)!r}) == 2:
        raise SystemExit("no memory")
"""
    program.write_text(PROGRAM + fail)
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 3))
    assert done.exit_code == 2, done.output
    assert done.stdout.startswith("on is 2.00 times as fast as off")
    assert "round 2 of 3, off: failed, so this was the last run" in done.stderr
    assert "round 2 of 3, on" not in done.stderr


def test_losses_of_another_form_are_found_by_their_expression(tmp_path, program):
    program.write_text(PROGRAM.replace(" loss {", " ppl={"))
    options = ("--rounds", 1, "--loss", "ppl=([0-9.]+)")
    done = run(tmp_path, sys.executable, program, 12, 10, options=(*options, "--json"))
    assert json.loads(done.stdout)["losses"][0] == ["step 0", [1.0, 1.0]]
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 1))
    assert "No losses were found in the output" in done.stdout


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("ppl=(", "--loss 'ppl=(' is no regular expression: missing )"),
        ("ppl=", "--loss 'ppl=' has no group for the number"),
        ("(loss)", "the first group of the expression is 'loss', which is no number"),
    ],
)
def test_expressions_that_find_no_number(tmp_path, program, expression, said):
    options = ("--rounds", 1, "--loss", expression)
    fails(run(tmp_path, sys.executable, program, 12, 10, options=options), said)


def test_losses_that_cannot_be_read_in_a_later_round_do_not_end_the_comparison(tmp_path, program):
    program.write_text(PROGRAM.replace("{1 /", "{'none' if '/02-off/' in str(path) else 1 /"))
    program.write_text(program.read_text().replace(":.4f}", "}"))
    options = ("--rounds", 2, "--loss", r"loss (\S+)")
    done = run(tmp_path, sys.executable, program, 12, 10, options=options)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("on is 2.00 times as fast as off")
    assert "Its printed losses are those of off" in done.stdout


def test_stop_while_losses_are_read_keeps_what_there_is(tmp_path, program, monkeypatch):
    find, calls = losses.find, []

    def stopped(lines, pattern):
        calls.append(pattern)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return find(lines, pattern)

    monkeypatch.setattr(losses, "find", stopped)
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 2))
    assert done.exit_code == 130, done.output
    assert done.stdout.startswith("on is 2.00 times as fast as off")
    assert "Stopped in round 2 of 2, off." in done.stdout


def test_overlapping_times_come_with_advice(tmp_path, program):
    program.write_text(PROGRAM.replace("2 if is_off", "1 if is_off"))
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 1))
    assert done.exit_code == 0, done.output
    first = " ".join(done.stdout.splitlines()[:3])
    assert first.startswith("inconclusive: the middle halves")
    assert "Run more --rounds or more steps, or use an idle machine" in first


def test_traceback_of_a_rank_is_shown_though_the_launcher_prints_more(tmp_path, program):
    program.write_text("print('Traceback (most recent call last):\\n  File x\\nOSError: gone')\n")
    with program.open("a") as file:
        file.write("for line in range(99): print('launcher', line)\nraise SystemExit(3)\n")
    done = run(tmp_path, sys.executable, program)
    fails(done, "| OSError: gone", "| launcher 98", "exit status 3 (policy 'off', round 1)")
    assert "launcher 50" not in done.stderr


def test_program_without_commpass(tmp_path, program):
    program.write_text("print('hello')\n")
    fails(run(tmp_path, sys.executable, program), "has not used commpass", "torch.compile(model,")


def test_program_without_a_step(tmp_path, program):
    fails(run(tmp_path, sys.executable, program, 0, 1), "Call commpass.step() at the end of each")


def test_program_with_warm_up_steps_alone(tmp_path, program):
    fails(run(tmp_path, sys.executable, program, 4, 1), "all 4 steps are warm-up", "at least 8")


BACKGROUND = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(500) # {0}"], {1})
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("options", ["", "start_new_session=True"])
def test_processes_that_outlive_the_program_are_ended_and_noted(tmp_path, program, options):
    """Also those in a session of their own, as torchrun starts its ranks."""
    program.write_text("import subprocess\n" + PROGRAM + BACKGROUND.format(tmp_path, options))
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 1))
    assert done.exit_code == 0, done.output
    assert "still ran after its end under off (1)" in done.stdout
    assert not processes_of(f"# {tmp_path}")


def test_process_that_ends_soon_after_the_program_is_not_noted(tmp_path, program):
    program.write_text(PROGRAM + "import subprocess\nsubprocess.Popen(['sleep', '0.3'])\n")
    done = run(tmp_path, sys.executable, program, 12, 10, options=("--rounds", 1))
    assert "still ran" not in done.stdout
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_program_that_ignores_signals_is_killed(tmp_path, program, monkeypatch):
    short = [(number, 0.2) for number, _ in processes.PATIENCE]
    monkeypatch.setattr(processes, "PATIENCE", short)
    ignore = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    program.write_text(ignore + PROGRAM)
    options = ("--rounds", 1, "--steps", 4)
    done = run(tmp_path, sys.executable, program, 10_000, 60, options=options)
    assert done.exit_code == 0, done.output
    assert not processes_of(str(program))


def test_program_that_changes_its_folder_is_compared(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program.write_text(PROGRAM.replace("steps, ms", "os.chdir('/')\nsteps, ms", 1))
    options = ("--rounds", 1, "--keep", "kept")
    done = run(tmp_path, sys.executable, program, 12, 10, options=options)
    assert done.exit_code == 0, done.output


def test_long_line_is_shortened(tmp_path, program):
    program.write_text("import sys\nsys.stdout.write('x' * 10**7)\nsys.exit(1)\n")
    done = run(tmp_path, sys.executable, program)
    fails(done, "xxx... (10,000,000 characters)")
    assert len(done.stderr) < 2000


def test_folders_that_cannot_be_written(tmp_path, program, monkeypatch):
    """Found before the program runs."""
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    fails(run(tmp_path, "false"), f"{tmp_path} is not writable", "name a file in another folder")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    done = run(tmp_path, "false", options=("--keep", tmp_path / "file" / "kept"))
    fails(done, "cannot be written: Not a directory. Name another folder with --keep")


def test_program_that_fails_while_the_disk_is_full(tmp_path, program, monkeypatch):
    monkeypatch.setattr(comparison, "LEAST_FREE", 0)
    assert "disk" not in run(tmp_path, "false").stderr
    monkeypatch.setattr(comparison, "LEAST_FREE", 1 << 60)
    fails(run(tmp_path, "false"), "The disk of this file is full", "another folder with --keep")


def test_table_and_prose_fit_into_80_columns(tmp_path, program):
    given = ["compare", "--rounds", 1, "-o", tmp_path / "c.html", "--"]
    given += [sys.executable, program, 12, 10]
    done = CliRunner().invoke(app, list(map(str, given)), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    shown = done.stdout.partition("wrote ")[0].splitlines()
    assert max(map(len, shown)) <= 80
    assert "" in shown[2:4]  # behind the verdict


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (["no-such-program"], (), "no-such-program: there is no such program"),
        (["python", "x"], ("--policies", "off"), "give at least two different policies"),
        (["python", "x"], ("--policies", "off,off"), "give at least two different policies"),
        (["python", "x"], ("--policies", "off,balnced"), "did you mean 'balanced'"),
        (["python", "x"], ("-o", "page.txt"), "a report is an .html file"),
        (["python", "x"], ("--keep", "/"), "is not empty; name a new folder"),
    ],
)
def test_wrong_arguments(tmp_path, command, options, said):
    fails(run(tmp_path, *command, options=options), said)


def test_options_behind_the_command_are_those_of_the_command(tmp_path, program):
    """Also without dashes before it."""
    page = tmp_path / "c.html"
    given = ["compare", "--rounds", "1", "-o", page, sys.executable, "-B", program, "12", "10"]
    done = CliRunner().invoke(app, list(map(str, given)), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert page.exists()


def processes_of(text: str) -> list[int]:
    """Return the processes whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_ends_the_program_and_shows_what_there_is(tmp_path, program, number):
    keep, page = tmp_path / "kept", tmp_path / "compare.html"
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "commpass", "compare", "--keep", keep, "--steps", "8"),
            *("-o", page, "--", sys.executable, program, "10000", "60"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    last = keep / "02-off" / "output.txt"
    while not last.exists() or "step 3" not in last.read_text():
        assert child.poll() is None
        time.sleep(0.1)
    child.send_signal(number)
    stdout, stderr = child.communicate(timeout=120)
    assert child.returncode == 130, stderr
    assert "Stopped in round 2 of 3, off." in stdout
    assert stdout.startswith("on is 2.00 times as fast as off")
    assert page.exists()
    assert not processes_of(str(program))
