"""docs/troubleshooting.md: its messages are those of the program, and its commands work."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

import commpass.errors
from commpass.policy import Policy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_incomplete_libraries_are_deleted_by_the_command(tmp_path):
    folder = tmp_path / "torchinductor_someone" / "4x"
    folder.mkdir(parents=True)
    library, graph = folder / "c4x.so", folder / "graph.py"
    library.write_bytes(b"\x7fELF")
    graph.write_text("")
    with pytest.raises(OSError, match="file too short"):
        ctypes.CDLL(str(library))
    (command,) = re.findall(r"^find .*$", PAGE, re.MULTILINE)
    own = command.replace("/tmp/", f"{tmp_path}/")
    assert own != command
    environment = {**os.environ, "USER": "someone"}
    subprocess.run(own, shell=True, check=True, env=environment)
    assert not library.exists()
    assert graph.exists()


def test_named_errors_exist():
    named = set(re.findall(r"raises? `([A-Z]\w+)`", PAGE))
    assert named == {"PlanMismatch", "Unanswered"}
    for name in named:
        assert issubclass(getattr(commpass.errors, name), commpass.CommpassError)


def test_codec_that_keeps_the_bits_is_lossless():
    (shown,) = re.findall(r"commpass\.(Policy\(codecs=\"exponent\"\))", PAGE)
    assert Policy(codecs="exponent") == eval(shown, {"Policy": Policy})


def test_pages_and_sections_of_links_exist():
    for page, _, section in re.findall(r"\]\((\w+\.md)(#([\w-]+))?\)", PAGE):
        text = (ROOT / "docs" / page).read_text()
        heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}
        assert not section or section in anchors, (page, section)
