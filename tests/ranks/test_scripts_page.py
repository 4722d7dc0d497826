"""The scripts of docs/scripts.md run as printed on two ranks: losses fall, fewer bytes travel."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from doc_blocks import block_under, blocks_of
from run_example import output_of
from tiers import has_messages

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(1200)]

PAGE = "docs/scripts.md"
has_transformers = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers"
)
SCRIPTS = {
    "Tensor parallelism": [pytest.mark.slow],
    "DDP": [pytest.mark.every],
    "FSDP2": [pytest.mark.every],
    "Pipeline": [pytest.mark.every, has_messages],
    "Hugging Face": [pytest.mark.every, has_transformers],
}
LOSS = re.compile(r"^step \d+: loss (\S+)$", re.MULTILINE)
# What the sites' lines, the handles and the report print: first the bytes without a codec.
PLAIN_THEN_SENT = {
    "Tensor parallelism": r" (\d+) -> (\d+) bytes",
    "FSDP2": r"calls, ([\d,]+) bytes as ([\d,]+)",
    "Hugging Face": r"^bytes: ([\d,]+) -> ([\d,]+) handed to collectives",
}
SENT_INSTEAD = r"(?P<sent>[\d,]+) instead of (?P<plain>[\d,]+) bytes"


def test_every_script_of_the_page_is_run_here():
    complete = [heading for heading, text in blocks_of(PAGE, "python") if "import torch" in text]
    assert complete == [*SCRIPTS]


@pytest.mark.parametrize(
    "heading", [pytest.param(name, marks=marks) for name, marks in SCRIPTS.items()]
)
def test_script_as_printed_compresses_and_learns(heading, tmp_path):
    (tmp_path / "script.py").write_text(block_under(PAGE, heading))
    printed = output_of("script.py", 2, folder=tmp_path, longest_s=900)
    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert len(losses) >= 10, printed
    assert losses[-1] < 0.8 * losses[0], losses
    pairs = bytes_without_and_with(heading, printed)
    assert pairs, printed
    for plain, sent in pairs:
        assert 0 < sent < 0.6 * plain, printed


def bytes_without_and_with(heading: str, printed: str) -> list[tuple[int, int]]:
    """Return the bytes without and with commpass of each line that a script prints about them."""
    if pattern := PLAIN_THEN_SENT.get(heading):
        pairs = re.findall(pattern, printed, re.MULTILINE)
    else:
        pairs = [(found["plain"], found["sent"]) for found in re.finditer(SENT_INSTEAD, printed)]
    return [(number(plain), number(sent)) for plain, sent in pairs]


def number(text: str) -> int:
    return int(text.replace(",", ""))
