"""The patches of ``tests/mutants`` are current: they name their defect and the responsible tests,
and still apply."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from mutants import FOLDER, Mutant, mutants

ROOT = FOLDER.parent.parent
EVERY = mutants()


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_each_names_tests_that_are_there(mutant: Mutant):
    assert 1 <= len(mutant.tests) <= 4
    for test in mutant.tests:
        path, _, name = test.partition("::")
        names = re.findall(r"^def (\w+)\(", (ROOT / path).read_text(), re.MULTILINE)
        assert not name or name.partition("[")[0] in names, test


def test_all_apply_to_this_tree_and_change_the_package_alone():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a checkout of git")
    for mutant in EVERY:
        command = ["git", "apply", "--check", "--include=commpass/*", str(mutant.path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{mutant.name}: {done.stderr}"
        changed = [line for line in mutant.path.read_text().splitlines() if line[:6] == "+++ b/"]
        assert changed
        assert all(line[6:].startswith("commpass/") for line in changed)


def test_two_break_different_things():
    texts = [mutant.path.read_text().partition("\ndiff ")[2] for mutant in EVERY]
    assert all(texts)
    assert len({*texts}) == len({mutant.sentence for mutant in EVERY}) == len(EVERY)


def test_patch_without_a_header_is_refused(tmp_path, monkeypatch):
    (tmp_path / "nameless.patch").write_text("diff --git a/x b/x\n--- a/x\n+++ b/x\n")
    monkeypatch.setattr("mutants.FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"nameless\.patch: must begin with a sentence"):
        mutants()
