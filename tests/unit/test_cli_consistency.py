"""All commands: a flag means the same everywhere, and shells complete names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from dumps import make
from typer.models import OptionInfo
from typer.testing import CliRunner

from commpass.cli import app, completion
from commpass.codecs.registry import NAMES as CODEC_NAMES
from commpass.plan import dump
from commpass.policy import PRESETS

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}


def options_of(command: Callable) -> dict[str, object]:
    """Return the Python types of a command's options, by all their names."""
    found = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        [info] = getattr(hint, "__metadata__", None) or [None]
        if not isinstance(info, OptionInfo):
            continue
        first = (info.default,) if isinstance(info.default, str) else ()  # as typer reads it
        names = (*first, *(info.param_decls or ())) or ("--" + name.replace("_", "-"),)
        found |= {each: get_args(hint)[0] for text in names for each in text.split("/")}
    return found


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_json_is_a_flag_and_output_a_file(name: str):
    options = options_of(COMMANDS[name])
    assert options.get("--json", bool) is bool
    assert ("-o" in options) == ("--output" in options)
    for each in ("-o", "--output", "--dump", "--plot", "--keep"):
        assert options.get(each, Path) in (Path, Path | None), each
    assert not options.keys() & {"-j", "-d", "--out", "--outfile", "--format"}


def test_commands_that_print_results_have_json():
    """The others write files, or draw."""
    without = {name for name, each in COMMANDS.items() if "--json" not in options_of(each)}
    assert without == {"graph", "report", "timeline"}


def test_option_of_one_name_has_one_type():
    """Some commands need it, or take it several times."""
    types: dict[str, set] = {}
    for command in COMMANDS.values():
        for name, kind in options_of(command).items():
            parts = [each for each in get_args(kind) or (kind,) if each is not type(None)]
            single = (get_args(each)[0] if get_args(each) else each for each in parts)
            types.setdefault(name, set()).update(single)
    several = {name for name, kinds in types.items() if len(kinds) > 1}
    assert several == {"--ranks"}  # one number, or some with commas
    assert types["--json"] == {bool}
    assert types["--output"] == {Path}


# completion


def completed(line: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    variables = {
        "_COMMPASS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="commpass", env=variables)
    assert done.exit_code == 0, done.output
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("commpass comp", ["compare"]),
        ("commpass simulate model.py:build --policy bal", ["balanced", "balanced-3d"]),
        ("commpass compare --policies off,loss", ["off,lossless"]),
        ("commpass simulate model.py:build --cluster dgx-h1", ["dgx-h100"]),
        ("commpass lower --codec nv", ["nvfp4"]),
        ("commpass codecs rot", ["rotated"]),
        ("commpass explain dump --kind all_red", ["all_reduce"]),
        ("commpass explain dump --direction b", ["backward"]),
        ("commpass explain dum", []),  # files, which the shell adds
    ],
)
def test_shell_completes_names(line: str, offered: list[str]):
    assert completed(line) == offered


def test_shell_completes_runs_of_a_folder(tmp_path: Path):
    for name in ("first", "second"):
        dump.write(tmp_path / "dump", make(name=name))
    assert completed(f"commpass graph {tmp_path}/dump --run ") == ["first", "second", "all"]
    assert completed(f"commpass graph {tmp_path}/nowhere --run ") == []


def test_completed_names_exist():
    assert set(completion.POLICIES) == set(PRESETS)
    assert set(completion.CODECS) <= set(CODEC_NAMES)


def test_help_offers_to_install_completion():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert re.search(r"--install-completion", shown)
