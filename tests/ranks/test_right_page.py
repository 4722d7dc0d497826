"""The script of docs/right.md runs as printed: every check of it holds on two ranks."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT, block_under
from run_example import output_of

PAGE = "docs/right.md"


def test_tests_that_the_page_names_exist():
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / PAGE).read_text())
    assert len(named) >= 11
    for path in named:
        assert (ROOT / path).exists(), path


def test_rows_are_those_of_the_invariants():
    design = (ROOT / "docs/design.md").read_text()
    section = re.search(r"^## Invariants\n(.*?)^## ", design, re.MULTILINE | re.DOTALL)[1]
    invariants = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    assert re.findall(r"^\| (\d+)\. ", (ROOT / PAGE).read_text(), re.MULTILINE) == invariants


@pytest.mark.xdist_group("ranks")
@pytest.mark.every
def test_script_as_printed_ends_with_all_checks_passed(tmp_path):
    (tmp_path / "script.py").write_text(block_under(PAGE, "A script"))
    printed = output_of("script.py", 2, folder=tmp_path, longest_s=900)
    found = re.search(r"replicas agree; (\d+) errors are within .*; codecs: (.*)", printed)
    assert found, printed
    assert int(found[1]) > 0
    assert set(found[2].split()) - {"none"}
