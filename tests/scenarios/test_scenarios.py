"""Run every scenario under every policy, and compare it with plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from tiers import VERSION

import commpass
from scenarios.compare import OTHERS, POLICIES, outcome
from scenarios.control import other_policies
from scenarios.everything import ALL
from scenarios.scenario import Scenario

pytestmark = pytest.mark.xdist_group("ranks")

PATIENCE_S = 120
"""Far more seconds than any scenario takes: a longer time is a wait that plain torch does not
have."""
TURNS = ["int8", "topk", "balanced", "int8", "topk", "lossless", "off"]
"""Policies in turn: a case is marked ``every`` unless its policy is the one of its scenario's
turn. ``few`` leaves some of the others for ``--slow``."""
COMPILED = [("checkpointed", "int8")]
"""Those that also run with Inductor."""
LONG = (
    *("chained groups", "overlapping meshes", "late", "evaluated first", "evaluated alone"),
    *("experts, routed anew", "experts, uneven", "experts, routed, no tokens"),
    *("checkpointed around blocks", "printed half-way", "printed at the end", "resumed"),
    *("sharded, tied weights", "sharded, short last batch", "mesh of two dimensions"),
    "second model",
)
"""Those that take longest, or whose parts are in others too: all their cases are ``every``."""


def cases() -> Iterator[ParameterSet]:
    """Yield all cases; ``every`` marks those that run only with ``--every``."""
    for number, scenario in enumerate(ALL):
        for inner in ("aot_eager", "inductor") if scenario.inductor else ("aot_eager",):
            for policy in (*POLICIES, *(OTHERS if scenario.presets else ())):
                own = "balanced" if scenario.presets else TURNS[number % len(TURNS)]
                turn = policy == own and scenario.name not in LONG
                compiled = (scenario.name, policy) in COMPILED
                quick = compiled if inner == "inductor" else turn
                marks = () if quick else (pytest.mark.every,)
                name = f"{scenario.name}-{policy}-{inner}"
                yield pytest.param(scenario, policy, inner, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(("scenario", "policy", "inner"), cases())
def test_scenario_trains_as_in_plain_torch(scenario: Scenario, policy: str, inner: str, request):
    if scenario.torch > VERSION:
        pytest.skip(f"needs torch {scenario.torch}")
    ranks = request.getfixturevalue(f"ranks{scenario.ranks}")
    outcomes = ranks.run(outcome, scenario.name, policy, inner, timeout=PATIENCE_S)
    wrong = [f"rank {rank}: {text}" for rank, found in enumerate(outcomes) for text in found.wrong]
    assert not wrong, "\n".join(wrong)
    for key in outcomes[0].digests:
        assert len({found.digests[key] for found in outcomes}) == 1, f"{key} differs by rank"
    compressed = [found.compressed for found in outcomes]
    few = min(scenario.sites, scenario.pays)
    least = {"int8": scenario.sites, "balanced": few, "topk": scenario.gradients}.get(policy, 0)
    if not scenario.differ:
        assert min(compressed) >= least, f"{compressed} sites were compressed, too few of {least}"
        may = policy == "balanced" and scenario.sites
        assert least or may or not any(compressed), f"compressed: {compressed}"


@pytest.mark.slow
def test_new_groups_may_have_another_policy(ranks2):
    assert all(0.01 < error < 0.05 for error in ranks2.run(other_policies, ["fp8", "fp8"]))


def test_ranks_of_new_groups_whose_policies_differ_are_reported(ranks2):
    for rank, said in enumerate(ranks2.run(told_of_other_policies)):
        assert f"codec is '{['int8', 'fp8'][rank]}' in rank {rank}" in said


def told_of_other_policies() -> str:
    with pytest.raises(commpass.PlanMismatch) as error:
        other_policies(["int8", "fp8"])
    return str(error.value)
