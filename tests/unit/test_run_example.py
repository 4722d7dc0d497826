"""The runner of the examples shows the output of those that fail or do not end."""

from __future__ import annotations

import re

import pytest
from run_example import output_of

SLEEPING = """
import sys, time
print("begun", flush=True)
def waits_for_nothing():
    time.sleep(600)
waits_for_nothing()
"""


@pytest.mark.every  # long enough for two ranks to start on a busy machine
def test_example_that_does_not_end_shows_its_output_and_the_stacks_of_its_ranks(tmp_path):
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING)
    with pytest.raises(AssertionError) as caught:
        output_of(str(script), 2, longest_s=40)
    text = str(caught.value)
    assert re.search(r"did not end in \d+ s", text)
    assert text.count("begun") == 2
    assert text.count("in waits_for_nothing") == 2


@pytest.mark.slow
def test_example_that_fails_shows_its_output(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text("raise ValueError('no such model')")
    with pytest.raises(AssertionError, match="no such model"):
        output_of(str(script), 1)
