"""``benchmarks.claims``: how claims are judged, and that the page agrees with the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.claims.__main__ import arguments
from benchmarks.claims.claim import Claim, judged
from benchmarks.claims.experiments import EXPERIMENTS
from benchmarks.claims.experiments.experiment import stored
from benchmarks.claims.page import page
from benchmarks.claims.suites import every
from benchmarks.claims.suites.predicted import place
from benchmarks.claims.suites.ssfusion import offloading
from benchmarks.paper_models.rows import Row

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
    ("measured", "number", "spread", "said"),
    [
        (-0.1, 0.12, 0.01, "contradicted"),
        (-0.1, 0.12, 0.2, "reproduced"),
        (-0.05, 0.05, 0.01, "reproduced"),
        (0.1, 0.12, 0.01, "reproduced"),
    ],
)
def test_losses_of_opposite_sign_are_reproduced_only_if_both_are_none(
    measured, number, spread, said
):
    asked = claim(measure=lambda _: measured, spread=lambda _: spread, number=number, kind="loss")
    assert judged(asked, {}).verdict == said


@pytest.mark.parametrize(
    ("measured", "spread", "said"),
    [
        (0.4, 0.01, "reproduced"),
        (0.6, 0.2, "reproduced"),
        (0.6, 0.01, "order only"),
        (-0.5, 0.01, "contradicted"),
        (0.05, 0.01, "reproduced"),
        (-0.05, 0.01, "contradicted"),
        (-0.05, 0.3, "reproduced"),
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


@pytest.mark.slow
def test_every_claim_has_a_number_or_says_why_not():
    for each in every():
        assert (each.measure is None) != (each.predicted is None and not each.why_not)
        assert len({case.name for case in each.cases}) == len(each.cases)
    cases = {case.name: case for each in every() for case in each.cases}
    assert len(set(cases.values())) == len(cases)


@pytest.mark.slow
def test_page_is_that_of_the_results():
    assert (ROOT / "docs" / "papers.md").read_text() == page(FOUND)
    known = [(each.paper, each.text) for each in every()]
    assert [(row["paper"], row["text"]) for row in FOUND["claims"]] == known


def row(**more) -> dict:
    """Return a row in its stored form."""
    empty = {"number": None, "measured": None, "spread": None, "bound": None, "predicted": None}
    words = {"paper": "P", "where": "table 1", "text": "t"}
    reasons = {"note": "", "assumed": "", "why_not": "", "experiments": []}
    return {**empty, **words, **reasons, **more}


def written(*rows: dict) -> str:
    return page({"date": "d", "commit": "c", "torch": "t", "claims": list(rows)})


def part(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n")[1].split("\n## ", maxsplit=1)[0]


def test_page_lists_what_does_not_hold():
    text = written(
        row(text="first", verdict="reproduced", number=2.0, measured=2.0),
        row(text="second", verdict="contradicted", number=1.5, measured=0.5),
        row(text="third", verdict="contradicted", measured=False),
        row(text="fourth", verdict="predicted only", number=2.0, predicted=0.5),
        row(text="fifth", verdict="predicted only", number=2.0, predicted=2.1),
        row(text="sixth", verdict="fitted", number=2.0, predicted=9.0),
    )
    lines = part(text, "What does not hold here").splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- P, table 1: second: 0.5, the paper's is 1.5.",
        "- P, table 1: third: does not hold.",
        "- P, table 1: fourth: predicted 0.5, the paper's is 2.",
    ]


def test_page_counts_verdicts_by_paper():
    text = written(
        row(verdict="reproduced", measured=True),
        row(verdict="reproduced", measured=True),
        row(verdict="not run", experiments=["e"]),
        row(paper="Q", verdict="contradicted", measured=False),
    )
    counts = part(text, "How many rows have which verdict")
    assert "| P | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |" in counts
    assert "| Q | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 |" in counts


@pytest.mark.parametrize(
    ("number", "predicted", "said"),
    [
        (2.0, 2.2, "predicted only: ratio 1.10"),
        (2.0, 2.4, "predicted only: **off**, ratio 1.20"),
        ("native", "native", "predicted only: the same choice"),
        ("native", "zipped", "predicted only: **off**, another choice"),
        (None, 800.0, "predicted only"),
    ],
)
def test_page_says_how_far_a_prediction_is_off(number, predicted, said):
    text = written(row(verdict="predicted only", number=number, predicted=predicted))
    assert f" | {said} | " in part(text, "P")


def test_page_has_bounds_beside_deviations_and_not_as_numbers_of_the_paper():
    text = written(row(verdict="reproduced", measured=2e-16, bound=1e-12))
    assert "| t |  | 2e-16 (bound 1e-12) |  | reproduced |" in text


def test_predicted_rows_name_their_place_in_the_paper():
    row = Row("TACO", "throughput, TP 2", 1.29, 1.3, "")
    assert place(row) == ("section 5.4.1", "throughput by that without compression, TP 2")
    with pytest.raises(KeyError, match="say in PLACES"):
        place(Row("TACO", "latency", 1.0, 1.0, ""))


@pytest.mark.parametrize("option", ["--paper=ZipCLC", "--run=taco"])
def test_command_refuses_names_that_are_not_known(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["claims", option])
    with pytest.raises(SystemExit) as ended:
        arguments()
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_help_of_the_command_lists_every_experiment(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["claims", "--help"])
    with pytest.raises(SystemExit):
        arguments()
    lines = capsys.readouterr().out.splitlines()
    for each in EXPERIMENTS.values():
        assert f"  {each.name:<18} {each.minutes:>3g}  {each.text}" in lines


@pytest.mark.every
@pytest.mark.xdist_group("ranks")
def test_claims_of_a_paper_are_measured_again():
    from benchmarks.claims.ranks import measured

    claims = [each for each in every() if each.paper == "Low-bit TP"]
    cases = {case.name: case for each in claims for case in each.cases}
    found = measured(list(cases.values()), "eager")
    found |= {name: stored(name) for each in claims for name in each.experiments}
    said = {row["text"]: row["verdict"] for row in FOUND["claims"]}
    for each in claims:
        assert judged(each, found).verdict == said[each.text]


@pytest.mark.parametrize(("offloaded", "said"), [(0, "not testable here"), (3, "order only")])
def test_gain_of_offloading_is_claimed_only_if_something_is_offloaded(offloaded, said):
    asked = claim(measure=lambda _: 1.5, number=1.1, kind="ratio", experiments=("ssfusion_times",))
    found = {"rows": [{"gbit": 1.0, "offloaded": None}, {"gbit": 1.0, "offloaded": offloaded}]}
    made = offloading(1.0, asked, found)
    assert judged(made, {"ssfusion_times": found}).verdict == said
    assert bool(made.why_not) == (offloaded == 0)
