"""The examples of docs/codes.md run as printed, and do what the page says."""

from __future__ import annotations

import re

import pytest
from run_example import ROOT, output_of
from typer.testing import CliRunner

from commpass.cli import app

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]

PAGE = (ROOT / "docs" / "codes.md").read_text()
FIRST, CALL, SUMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def report_of(program: str, folder) -> str:
    (folder / "layer.py").write_text(program)
    return output_of("layer.py", 2, folder=folder)


def test_layer_as_printed_gathers_codes(tmp_path):
    line = re.search(r"`(simplified: quantised before gather [^`]*)`", PAGE).group(1)
    assert line in report_of(FIRST + CALL, tmp_path)
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "dumps"), "--all"])
    words = re.search(r"`(consumer: [^`]*)`", PAGE).group(1)
    assert words in " ".join(shown.output.split())


def test_small_layer_is_left_with_the_printed_reason(tmp_path):
    small = CALL.replace("1024, 2048", "128, 256").replace("512, 2048", "512, 256")
    reason = re.search(r"`(quantised before gather, it [^`]*)`", PAGE).group(1)
    assert reason in report_of(FIRST + small, tmp_path)


SEVERAL_SUMS = """
x = torch.randn(1024, 2048, dtype=torch.bfloat16)
residual, norm = torch.zeros(1024, 2048).bfloat16(), torch.ones(2048).bfloat16()
weight = torch.zeros(512, 2048).to(torch.float8_e4m3fn).t()
with torch.no_grad():
    layer(x, residual, norm, weight, torch.ones(1, 512))
if dist.get_rank() == 0:
    print(commpass.report())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("slow", [False, True], ids=["gloo", "the page's profile"])
def test_sums_are_scattered_only_under_a_profile_other_than_that_of_gloo(slow, tmp_path):
    profile = re.search(r"`(profile=commpass\.Profile[^`]*)`", PAGE).group(1)
    sums = SUMS.replace('dump="dumps"', profile) if slow else SUMS
    printed = report_of(FIRST + sums + SEVERAL_SUMS, tmp_path)
    assert ("simplified: sequence parallel (1)" in printed) == slow
    reason = re.search(r"`(sequence parallel: it would[^`]*)`", PAGE.replace("\n", " ")).group(1)
    assert (reason in printed) != slow
