"""What examples, benchmarks and pages take from commpass's modules is there.

Most of it runs in no quick test, so a name that was changed would be noticed late.
"""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import commpass

ROOT = Path(commpass.__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("examples", "benchmarks")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


def unresolved(source: str) -> Iterator[str]:
    """Yield the names of commpass that a source imports, or reads from a module, and that are not
    there."""
    tree = ast.parse(source)
    modules = dict[str, object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "commpass":
                    module = importlib.import_module(each.name)
                    modules[each.asname or "commpass"] = module if each.asname else commpass
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "commpass":
            module = importlib.import_module(node.module or "")
            for each in node.names:
                if not hasattr(module, each.name) and not _is_submodule(module, each.name):
                    yield f"{node.module}.{each.name}"
                elif _is_submodule(module, each.name):
                    name = f"{node.module}.{each.name}"
                    modules[each.asname or each.name] = importlib.import_module(name)
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _stores(node)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in modules and name not in stored and not hasattr(modules[name], node.attr):
                yield f"{name}.{node.attr}"


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_submodule(module: object, name: str) -> bool:
    found = pkgutil.iter_modules(getattr(module, "__path__", ()))
    return not callable(getattr(module, name, None)) and name in {each.name for each in found}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_names_taken_from_commpass_are_there(path):
    assert list(unresolved((ROOT / path).read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from commpass.report import timeline\ntimeline.hidden([])", ["timeline.hidden"]),
        ("from commpass.report import timeline as view\nview.nothing", ["view.nothing"]),
        ("from commpass.codecs import codecs_of_old", ["commpass.codecs.codecs_of_old"]),
        ("import commpass\ncommpass.backends()", ["commpass.backends"]),
        ("import commpass\ncommpass.backend()", []),
        ("from commpass.report import timeline\ntimeline.write([], None)", []),
    ],
)
def test_missing_names_are_found(source, found):
    assert list(unresolved(source)) == found
