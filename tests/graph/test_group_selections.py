"""group: sparse gradients are sent together, each with a separate selection."""

from __future__ import annotations

import pytest
import torch
from graphs import as_rank, collectives, ops, trace
from lockstep import run_in_lockstep
from tiers import rarely

import commpass
from commpass.codecs import codec
from commpass.costmodel import Link
from commpass.passes import GraphInput, manager
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
FAR = commpass.Profile("far", Link(1000.0, 0.1))
RANKS = 4
SHAPES = [(64, 64), (1000,), (7,)]
PASSES = manager.PASSES[: [each.name for each in manager.PASSES].index("lower")]
"""Coded operators can be called: how each is lowered is not tested here."""
SIZES = (1.0, 1e-3, 1000.0)
"""The magnitudes of the values: a common threshold would leave out the second tensor entirely."""


def gradients(*values):
    started = [ops.all_reduce(x * 1, "sum", "0") for x in values]
    return [wait(each) for each in started]


def inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(shape, generator=generator) * size
        for shape, size in zip(SHAPES, SIZES, strict=True)
    ]


def rewritten(
    spec: str, *values: torch.Tensor, stateless: str | None = None, force: bool = True, **more
):
    gm = trace(gradients, *values)
    road = GraphInput(
        gm=gm,
        direction="backward",
        policy=Policy(
            rules=[Rule(codec=spec, algorithm="sparse", force=force)],
            max_error=1.0,
            lowering="inline",
            **more,
        ),
        profile=FAR,
        stateless=stateless,
    )
    outcome = manager.run(road, "0", PASSES)
    if outcome.error is not None:
        raise outcome.error
    return gm, outcome


@pytest.mark.slow
def test_selections_of_several_tensors_are_one_exchange(fake_group):
    fake_group(RANKS)
    gm, outcome = rewritten("dgc", *inputs(0))
    (site,), (fusion,) = outcome.plan.sites, outcome.plan.grouped
    assert site.codec == "segments(lengths=n4096_1000_7)"
    assert (site.algorithm, len(fusion.sites)) == ("sparse", 3)
    assert collectives(gm) == [("all_gather", torch.uint8, site.wire_bytes)]
    each = codec("dgc")
    assert site.wire_bytes == sum(each.wire_bytes(n, torch.float32) for n in (4096, 1000, 7))
    assert [state.shape for state in outcome.state] == SHAPES
    _, alone = rewritten("dgc", *inputs(0), group_bytes=0)
    for one, other in zip(outcome.state, alone.state, strict=True):
        assert (one.place, one.number, one.reaches) == (other.place, other.number, other.reaches)


def after(spec: str, steps: int, **more) -> list[list[torch.Tensor]]:
    """Return what rank 0 has after each step, with the residuals of the step before."""
    graphs, states, found = [], [], []
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            gm, outcome = rewritten(spec, *inputs(rank), **more)
            graphs.append(gm)
            states.append([torch.zeros(s.shape, dtype=s.dtype) for s in outcome.state])
    for _ in range(steps):
        given = [[*inputs(rank), *state] for rank, state in enumerate(states)]
        results = run_in_lockstep(graphs, given, lambda group: range(RANKS))
        for other in results[1:]:
            assert all(map(torch.equal, other, results[0]))
        found.append([x.clone() for x in results[0]])
    return found


@pytest.mark.parametrize("spec", ["topk(density=0.05)", rarely("dgc")])
def test_results_are_those_of_tensors_sent_one_by_one(spec, fake_group):
    """This includes later steps: each tensor gets its own residual back."""
    fake_group(RANKS)
    together, apart = after(spec, 3), after(spec, 3, group_bytes=0)
    for one, other in zip(together, apart, strict=True):
        assert all(map(torch.equal, one, other))
    assert all((x != 0).any() for x in together[0])


def test_selections_without_state_stay_single(fake_group):
    """Without a residual nothing is selected, and nothing is fused."""
    fake_group(RANKS)
    _, outcome = rewritten("dgc", *inputs(0), stateless="there is no next step", force=False)
    assert not outcome.plan.grouped
    assert {site.codec for site in outcome.plan.sites} == {"none"}


def test_dense_codecs_are_put_together_in_blocks_as_before(fake_group):
    fake_group(RANKS)
    gm = trace(gradients, *inputs(0))
    policy = Policy(rules=[Rule(codec="int8", force=True)], max_error=1.0)
    plan = commpass.rewrite(gm, [], policy, profile=FAR, strict=True)
    assert [site.codec for site in plan.sites] == ["int8"]
    assert len(plan.grouped) == 1


@pytest.mark.parametrize("places", [slice(3, 4), slice(53, 54), slice(0, 40), slice(40, 70)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_segment_that_is_not_finite_stays_so(bad, places):
    """And no finite value of the row becomes non-finite (law 2)."""
    coder = codec("segments(inner=topk(density=0.1), lengths=n40_30)")
    x = torch.randn(70)
    x[places] = bad
    assert not coder.decode(coder.encode(x))[places].isfinite().any()
    finite = torch.randn(70)
    back = coder.decode(coder.encode(finite))
    assert (back[:40] != 0).sum() == 4
    assert (back[40:] != 0).sum() == 3
    assert torch.equal(back[back != 0], finite[back != 0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [("segments(inner=int8)", "that selects"), ("segments(lengths=n3_0)", "at least 1")],
)
def test_segments_that_cannot_be_are_refused(spec, words):
    with pytest.raises(commpass.errors.PolicyError, match=words):
        codec(spec)
