"""docs/api.md describes every argument of what a user calls or constructs."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^::: ([\w.]+)\n    options: {heading: ([\w.]+)}$", re.MULTILINE)
NAMES = dict(ENTRY.findall((ROOT / "docs" / "api.md").read_text()))
# Users get these from a call, and do not construct them: the page describes their fields.
RESULTS = {
    "commpass.Calibration",
    "commpass.Handle",
    "commpass.Plan",
    "commpass.Report",
    "commpass.parallel.Integration",
    "commpass.parallel.SSFusion",
    "commpass.plan.PlannedSite",
}
ARGUMENT = re.compile(r"^    (\*{0,2}\w+): \S", re.MULTILINE)


def described_arguments(doc: str) -> list[str]:
    """Return the names in the section ``Args:`` of a docstring, in order."""
    section = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.cleandoc(doc), re.MULTILINE)
    return ARGUMENT.findall(section[1]) if section else []


def arguments(full: str) -> tuple[list[str], str]:
    """Return the names of a function's or class's arguments, ``*`` included, and its docstring.

    A module that needs a library that is not installed is read as source.
    """
    module, _, name = full.rpartition(".")
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("commpass"):
            raise
        return _arguments_in_source(ROOT / (module.replace(".", "/") + ".py"), name)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(value).parameters.values()
    ]
    return names, value.__doc__ or ""


def _arguments_in_source(path: Path, name: str) -> tuple[list[str], str]:
    found = next(
        each for each in ast.parse(path.read_text()).body if getattr(each, "name", "") == name
    )
    assert isinstance(found, ast.ClassDef)
    init = next(each for each in found.body if getattr(each, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    names = [each.arg for each in (*init.args.args[1:], *init.args.kwonlyargs)]
    names += [f"**{init.args.kwarg.arg}"] if init.args.kwarg else []
    return names, ast.get_docstring(found) or ""


def is_error(full: str) -> bool:
    return full.startswith("commpass.errors.")


@pytest.mark.parametrize(
    "full",
    [full for full, shown in NAMES.items() if shown not in RESULTS and not is_error(full)],
)
def test_every_argument_is_described(full):
    names, doc = arguments(full)
    described = described_arguments(doc)
    assert sorted(described) == sorted(names)


def test_results_are_names_of_the_page():
    assert set(NAMES.values()) >= RESULTS


def test_described_arguments_are_those_of_the_section():
    doc = """Do.

    Args:
        x: a value,
            in two lines: here.
        **more: others.

    Raises: nothing.
    """
    assert described_arguments(doc) == ["x", "**more"]
    assert described_arguments("Do.") == []
