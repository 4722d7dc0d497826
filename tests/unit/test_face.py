"""``import commpass``: its names are loaded on first use, and do not depend on what was imported
before."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import torch

import commpass
from commpass.errors import PolicyError, nearest

PACKAGE = Path(commpass.__file__).parent
MOST_MODULES = 10
"""How many modules ``import commpass`` may load besides those of torch."""


def alone(code: str, *arguments: str) -> str:
    """Return what a separate program prints."""
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_package_imports_next_to_nothing():
    said = alone(
        "import sys, torch; before = set(sys.modules); import commpass\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    assert "commpass" in said.split()
    assert len(said.split()) <= MOST_MODULES, said
    assert alone("import commpass, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_plain_codecs_and_profiles_need_no_compiler():
    asked = "commpass.codec('int8'); commpass.ethernet(10); commpass.PolicyError"
    heavy = (
        "[name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules]"
    )
    assert alone(f"import sys, commpass; {asked}; print({heavy})") == "[]"


def test_type_checker_and_a_program_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commpass")
        for alias in node.names
    }
    homes = {name: f"commpass.{module}" for name, module in commpass._MODULE_OF.items()}
    assert {name: module for name, module in seen.items() if name in homes} == homes
    for name in seen.keys() - homes.keys():  # a submodule that is also a public name
        assert getattr(commpass, name) is sys.modules[f"commpass.{name}"]
    assert "parallel" in seen
    assert sorted(seen) == commpass.__all__
    assert {*commpass.__all__, "__version__"} <= set(dir(commpass))
    for name in commpass.__all__:
        assert getattr(commpass, name) is not None


ORDERS = {
    "the face first": "import commpass; commpass.NAME; import commpass.MODULE",
    "the module first": "import commpass.MODULE",
    "from the module": "from commpass.MODULE import *",
    "another of its modules first": "import commpass.parallel.fsdp, commpass.report.simulate",
    "by name": "import importlib; importlib.import_module('commpass.MODULE')",
    "all names": "from commpass import *; import commpass.MODULE",
    "twice": "import commpass.MODULE; import sys; del sys.modules['commpass.MODULE'];"
    " import commpass.MODULE",
    "reloaded": "import importlib, commpass.MODULE, sys;"
    " importlib.reload(sys.modules['commpass.MODULE'])",
}


QUICK = ("the face first", "the module first", "all names")


@pytest.mark.every
@pytest.mark.parametrize("order", tiers.sampled(ORDERS, QUICK))
def test_name_of_the_face_wins_over_a_module_of_that_name(order):
    paths = {
        name: (PACKAGE / f"{name}.py", PACKAGE / name / "__init__.py")
        for name in commpass._MODULE_OF
    }
    clashing = [name for name, both in paths.items() if any(path.is_file() for path in both)]
    assert clashing == ["backend", "simulate"]
    lines = [
        line
        for name in clashing
        for line in (
            ORDERS[order].replace("NAME", name).replace("MODULE", name),
            f"import commpass; from commpass import {name}",
            f"assert callable(commpass.{name}) and commpass.{name} is {name}, commpass.{name}",
            f"assert sys.modules['commpass.{name}'].__name__ == 'commpass.{name}'",
        )
    ]
    lines += [  # a package that can be called
        ORDERS[order].replace("NAME", "report").replace("MODULE", "report"),
        "import commpass; from commpass import report",
        "assert commpass.report is report is sys.modules['commpass.report'], commpass.report",
        "assert isinstance(report(), commpass.Report), report()",
    ]
    last = "print(commpass.parallel.__name__, commpass.errors.__name__, commpass.backend('off'))"
    said = alone("\n".join(["import sys", *lines, last]))
    assert said.startswith("commpass.parallel commpass.errors <commpass.backend: policy 'off'")


def test_name_may_be_set_and_restored_as_tests_do(monkeypatch):
    before = commpass.backend
    monkeypatch.setattr(commpass, "backend", 5)
    assert commpass.backend == 5
    monkeypatch.undo()
    assert commpass.backend is before


def test_name_that_is_not_there_is_an_error_that_python_knows_how_to_tell():
    with pytest.raises(
        AttributeError, match="module 'commpass' has no attribute 'bakend'"
    ) as error:
        commpass.bakend  # noqa: B018
    assert error.value.name == "bakend"
    assert error.value.obj is commpass
    assert not hasattr(commpass, "_backend")
    with pytest.raises(ImportError, match="cannot import name 'bakend'"):
        from commpass import bakend  # noqa: F401


@pytest.mark.parametrize("name", ["compress_ddp", "compres_ddp"])
def test_name_of_parallel_is_an_error_that_says_where_it_is(name):
    with pytest.raises(AttributeError, match=r"write commpass\.parallel\.compress_ddp"):
        getattr(commpass, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'polcy'$"):
        commpass.polcy  # noqa: B018


def test_backend_that_was_not_called_is_an_error_that_says_so():
    compiled = torch.compile(torch.sin, backend=commpass.backend)
    with pytest.raises(Exception, match=r"call it, with a policy.*backend\(\"balanced\"\)"):
        compiled(torch.ones(2))


def test_error_inside_a_submodule_is_raised_as_it_is(monkeypatch, tmp_path):
    (tmp_path / "faulty.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.setattr(commpass, "__path__", [*commpass.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        commpass.faulty  # noqa: B018


@pytest.mark.slow
def test_torch_compile_finds_the_backend_by_name_and_traces_names_nobody_asked_for():
    code = """
import torch, commpass
@torch.compile(backend="commpass", options={"inner": "eager"}, fullgraph=True)
def function(x):
    with commpass.keep():
        x = x * 2
    with commpass.compress(codec="int8"):
        return x + 1
assert "keep" not in vars(commpass)
print(function(torch.ones(2)).tolist(), len(commpass.plans()))
"""
    assert alone(code) == "[3.0, 3.0] 1"


USERS = sorted(
    str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if "torch.ops.commpass" in path.read_text()
)


@pytest.mark.every
def test_operators_need_the_import_that_registers_them():
    assert "commpass.collectives.public" in USERS
    code = f"""
import importlib, os, re, sys, torch._dynamo
for name in {USERS}:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(name)
        continue
    module = importlib.import_module(name)
    text = open(module.__file__).read()
    called = set(re.findall(r"torch\\.ops\\.commpass\\.(\\w+)", text))
    for alias in re.findall(r"^ *(?:ops, )?(ops|ours)\\b.*= .*torch\\.ops\\.commpass$", text, re.M):
        called |= set(re.findall(rf"\\b{{alias}}\\.(\\w+)", text))
    called.discard("commpass")
    missing = [each for each in called if not hasattr(torch.ops.commpass, each)]
    if not called or missing:
        print(name, called, missing, file=sys.stderr)
    os._exit(not called or bool(missing))
print("all")
"""
    assert alone(code) == "all"


def test_backend_says_what_it_is(tmp_path):
    plain = repr(commpass.backend())
    assert plain == (
        "<commpass.backend: policy 'lossless', inner 'inductor', default profile, 0 graphs>"
    )
    policy = commpass.Policy(name="mine", codecs=("int8",))
    made = commpass.backend(
        policy, inner=len, profile="ethernet-10g", strict=True, dump=tmp_path / "dumps"
    )
    for part in ("'mine'", "inner 'len'", "profile 'ethernet-10g'", "strict", str(tmp_path)):
        assert part in repr(made)
    assert "\n" not in repr(made)


def test_integration_without_a_process_group_says_what_to_write():
    assert not torch.distributed.is_initialized()
    with pytest.raises(PolicyError) as error:
        commpass.parallel.ssfusion(torch.nn.Linear(2, 2))
    said = str(error.value)
    assert said.startswith("commpass.parallel.ssfusion: there is no process group yet")
    assert "torch.distributed.init_process_group()" in said


NEAR = {
    "int9": "int8",
    "pf8": "fp8",
    "sr": "rs",
    "dq": "dp",
    "two-shot": "two_shot",
    "back": "backward",
    "balnced": "balanced",
    "Balnced": "balanced",
    "TOP K": "topk",
}
FAR = ("nope", "x", "", "best", "gpu", "compression", "12")
KNOWN = (*NEAR.values(), "topk", "taco", "exponent", "one_shot", "forward")


@pytest.mark.parametrize("word", NEAR)
def test_name_that_is_near_is_offered(word):
    assert nearest(word, KNOWN).startswith(f"; did you mean {NEAR[word]!r}? Known: ")


@pytest.mark.parametrize("word", FAR)
def test_name_that_is_far_from_all_is_reported_with_the_known_ones_alone(word):
    assert nearest(word, KNOWN).startswith(". Known: ")
    assert re.search(r"Known: .*topk", nearest(word, KNOWN))


def test_codec_that_is_like_none_is_not_taken_for_another():
    with pytest.raises(PolicyError, match=r"unknown codec 'nope'\. Known: .*topk"):
        commpass.codec("nope")
