"""The script of docs/cookbook.md that saves and loads error feedback runs as printed, twice."""

from __future__ import annotations

import re

import pytest
from doc_blocks import block_under
from run_example import output_of

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.every]


def test_second_run_continues_with_the_residuals_of_the_first(tmp_path):
    script = block_under("docs/cookbook.md", "Checkpoints and resume with error feedback")
    (tmp_path / "script.py").write_text(script)
    first, second = (output_of("script.py", 2, folder=tmp_path, longest_s=900) for _ in range(2))
    losses = [
        [float(loss) for loss in re.findall(r"loss (\S+)", printed)] for printed in (first, second)
    ]
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[1][0] < losses[0][-1] * 1.02
    assert losses[1][-1] < losses[0][-1]
    saved = [int(number) for number in re.findall(r"(\d+) residuals saved", first + second)]
    assert len(saved) == 2
    assert saved[0] == saved[1] > 0
