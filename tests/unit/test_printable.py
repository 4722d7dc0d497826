"""``commpass.utils.printable``: codecs that hold data are shortened in text for users."""

from __future__ import annotations

import logging

import pytest
import torch
from dumps import site

from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Running, calibrate
from commpass.plan import Candidate
from commpass.report.site_text import described, done
from commpass.report.sites_table import reasons
from commpass.utils.printable import brief, clean, less


def calibrated(seed: int) -> str:
    """Return the text of codec ``outlier`` with the channels and scales of 256 channels."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
    return codec("outlier", statistics=calibrate([Running.start(x)]).to_text()).spec


def test_brief_shortens_data_and_tells_codecs_apart():
    one, other = calibrated(0), calibrated(1)
    assert len(one) > 300
    assert len(brief(one)) < 60
    assert brief(one).startswith("outlier(statistics=c")
    assert brief(one) != brief(other)
    assert brief(f"no gain: {one} by one_shot") == f"no gain: {brief(one)} by one_shot"


def test_brief_leaves_other_texts_as_they_are():
    name = "a" * 80
    for text in ("int8(block=128)", f"{name}.down", "difference(inner=sdp4bit(part=weight))"):
        assert brief(text) == text


def test_clean_lines_and_messages_are_brief(caplog):
    spec = calibrated(0)
    assert clean(f"a\tb {spec}") == f"a b {brief(spec)}"
    with caplog.at_level(logging.WARNING, logger="commpass"):
        logging.getLogger("commpass").warning("with %s", spec)
    assert caplog.messages == [f"with {brief(spec)}"]


def test_words_of_plans_are_brief():
    spec = calibrated(0)
    coded = site("a", codec=spec, algorithm="one_shot", reason=f"{spec} by one_shot: faster")
    assert (
        done(coded)
        == described(Candidate(codec=spec, algorithm="one_shot"))
        == f"{brief(spec)} by one_shot"
    )
    table = reasons([coded])
    assert [str(cell) for column in table.columns for cell in column.cells] == [
        "1",
        f"{brief(spec)} by one_shot: faster",
    ]


@pytest.mark.parametrize(
    ("after", "before", "text"),
    [
        (25, 100, " (75% less)"),
        (112, 100, " (12% more)"),
        (99.6, 100, ""),
        (5, 0, ""),
        (-1, 100, ""),
    ],
)
def test_gain_is_in_per_cent(after, before, text):
    assert less(after, before) == text
    assert less(after, before, brackets=False) == (f", {text[2:-1]}" if text else "")
