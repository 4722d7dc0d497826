"""``benchmarks.claims``: how claims are judged, and that the page says what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.claims.claim import Claim, judged
from benchmarks.claims.page import page
from benchmarks.claims.suites import every

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "claims.json").read_text())


def claim(**more) -> Claim:
    return Claim(paper="P", where="w", text="t", **more)


def verdict(measured, **more) -> str:
    return judged(claim(measure=lambda found: measured, **more), {}).verdict


@pytest.mark.parametrize(
    ("measured", "number", "kind", "said"),
    [
        (8.3, 8.25, "exact", "reproduced"),
        (8.5, 8.25, "exact", "contradicted"),
        (1.2, 1.35, "ratio", "reproduced"),
        (1.05, 1.35, "ratio", "order only"),
        (0.9, 1.35, "ratio", "contradicted"),
        (True, None, "order", "reproduced"),
        (False, None, "order", "contradicted"),
    ],
)
def test_verdicts_are_by_the_kind_of_claim(measured, number, kind, said):
    assert verdict(measured, number=number, kind=kind) == said


@pytest.mark.parametrize(
    ("measured", "spread", "said"),
    [
        (0.4, 0.01, "reproduced"),
        (0.6, 0.2, "reproduced"),
        (0.6, 0.01, "order only"),
        (-0.5, 0.01, "contradicted"),
    ],
)
def test_changes_of_losses_are_judged_by_their_spread(measured, spread, said):
    result = judged(
        claim(measure=lambda _: measured, spread=lambda _: spread, number=0.25, kind="loss"), {}
    )
    assert (result.verdict, result.spread) == (said, spread)


@pytest.mark.parametrize(
    ("measured", "said"), [(0.0, "reproduced"), (1e-12, "reproduced"), (2e-12, "contradicted")]
)
def test_deviations_from_formulas_are_judged_by_their_bound(measured, said):
    assert verdict(measured, bound=1e-12) == said


def test_numbers_that_the_paper_does_not_have_are_ours_alone():
    assert verdict(0.0, kind="ours") == verdict(5.0, kind="ours") == "ours alone"


def test_claims_that_are_not_measured_say_what_there_is():
    assert judged(claim(predicted=1.0), {}).verdict == "predicted only"
    assert judged(claim(predicted=1.0, fitted=True), {}).verdict == "fitted"
    assert judged(claim(why_not="no weights"), {}).verdict == "not testable here"


def test_claims_whose_experiment_was_not_run_say_so():
    both = claim(
        measure=lambda found: found["a"] > found["b"], kind="order", experiments=("a", "b")
    )
    assert judged(both, {"a": 2, "b": 1}).verdict == "reproduced"
    assert judged(both, {"a": 2, "b": None}).verdict == "not run"
    with pytest.raises(KeyError):
        judged(both, {"a": 2})


def test_every_claim_has_a_number_or_says_why_not():
    for each in every():
        assert (each.measure is None) != (each.predicted is None and not each.why_not)
        assert len({case.name for case in each.cases}) == len(each.cases)
    cases = {case.name: case for each in every() for case in each.cases}
    assert len(set(cases.values())) == len(cases)


def test_page_is_that_of_the_results():
    assert (ROOT / "docs" / "papers.md").read_text() == page(FOUND)
    known = [(each.paper, each.text) for each in every()]
    assert [(row["paper"], row["text"]) for row in FOUND["claims"]] == known


@pytest.mark.every
@pytest.mark.xdist_group("ranks")
def test_claims_of_a_paper_are_measured_again():
    from benchmarks.claims.ranks import measured

    claims = [each for each in every() if each.paper == "Low-bit TP"]
    cases = {case.name: case for each in claims for case in each.cases}
    found = measured(list(cases.values()), "eager")
    said = {row["text"]: row["verdict"] for row in FOUND["claims"]}
    for each in claims:
        assert judged(each, found).verdict == said[each.text]
