"""Codec ``outlier`` in graphs: its constants are inputs, and its scales may differ between
ranks."""

from functools import cache

import pytest
import torch
from graphs import as_rank, ops, trace
from lockstep import run_in_lockstep
from tiers import rarely
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import codec, constants
from commpass.codecs.operators import CONSTANT
from commpass.codecs.wrappers.outlier import Channels, Running, calibrate
from commpass.costmodel import default_profile
from commpass.passes import GraphInput, manager
from commpass.passes.constants import INPUT, lift_constants
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS, TOKENS, WIDTH = 8, 64, 512


def summed(x):
    return wait(ops.all_reduce(x * 1, "sum", "0"))


def activations(rank: int, tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Return partial sums with one channel in 64 that has 30 times the range.

    Each rank has a different magnitude: bell-shaped values whose channels differ.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    channels = torch.Generator().manual_seed(7)
    size = torch.rand(WIDTH, generator=channels) + 0.5
    size = size * torch.where(torch.randperm(WIDTH, generator=channels) < WIDTH // 64, 30.0, 1.0)
    own = 0.85 + 0.3 * rank / (RANKS - 1)
    return torch.randn(tokens, WIDTH, generator=generator) * size * own


@cache
def calibrated(ranks: int = RANKS, **how) -> Channels:
    seen = []
    for rank in range(ranks):
        running = Running.start(activations(rank, seed=1))
        for seed in range(2, 6):
            running = running.update(activations(rank, seed=seed))
        seen.append(running)
    return calibrate(seen, **how)


def spec_of(channels: Channels, **more) -> str:
    return codec("outlier", statistics=channels.to_text(), **more).spec


def policy_of(spec: str, **more) -> Policy:
    return Policy(rules=[Rule(codec=spec, force=True, **more)])


def rewritten(function, x, policy, **more):
    gm = trace(function, x)
    road = GraphInput(
        gm=gm,
        direction="forward",
        policy=policy,
        profile=default_profile("cpu"),
        stateless=None,
        **more,
    )
    outcome = manager.run(road, "0")
    if outcome.error is not None:
        raise outcome.error
    assert not outcome.excluded
    return gm, outcome


def sums(spec: str, ranks: int = RANKS, function=summed, **more) -> list[torch.Tensor]:
    """Return the final results of all ranks, with all graphs in one process."""
    graphs, inputs = [], [[activations(rank)] for rank in range(ranks)]
    for rank, (x,) in enumerate(inputs):
        with as_rank(rank, ranks):
            gm, outcome = rewritten(function, x, policy_of(spec, **more))
            assert [site.codec for site in outcome.plan.sites] == [spec]
            graphs.append(gm)
    return run_in_lockstep(graphs, inputs, lambda group: range(ranks))


def error(results: list[torch.Tensor], ranks: int = RANKS) -> float:
    exact = sum(activations(rank).double() for rank in range(ranks))
    assert all(torch.equal(one, results[0]) for one in results)
    return float((results[0].double() - exact).norm() / exact.norm())


ERRORS = {"each": 0.032, "shared": 0.036, "random": 0.114, "int4": 0.21}
"""The error of the sum on 8 ranks: with scales of each rank, with shared ones, with random
channels, with no channels."""


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize("how", ERRORS)
def test_errors_of_sums_are_in_the_order_of_the_paper(how, fake_group):
    """Section 3: scales of each device are best, and random channels gain little."""
    fake_group(RANKS)
    specs = {
        "each": spec_of(calibrated()),
        "shared": spec_of(calibrated(shared=True)),
        "random": spec_of(calibrated(seed=3)),
        "int4": "int4",
    }
    found = error(sums(specs[how], algorithm="one_shot"))
    assert found == pytest.approx(ERRORS[how], rel=0.12)


@pytest.mark.every
@pytest.mark.parametrize(
    ("how", "most"), [("two_shot", 0.055), ("ring", 0.09), ("semi_ring", 0.075)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_algorithms_that_code_sums_have_scales_of_sums(how, most, shared, fake_group):
    """Scales of one rank's values would clip most of a sum: an error of about 20 %."""
    fake_group(RANKS)
    assert error(sums(spec_of(calibrated(shared=shared)), algorithm=how)) < most


@pytest.mark.slow
@pytest.mark.parametrize("form", ["inline", rarely("kernel")])
def test_constants_are_inputs_that_sites_share(form, fake_group):
    fake_group(2)
    spec = spec_of(calibrated(2))

    def twice(x):
        return summed(x), summed(x.exp())

    rule = Rule(codec=spec, force=True, algorithm="one_shot", lowering=form)
    policy = Policy(rules=[rule], skip=("group",))
    gm, outcome = rewritten(twice, activations(0), policy, adds_inputs=True, kernels=True)
    assert [site.codec for site in outcome.plan.sites] == [spec] * 2
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")][1:]
    assert names == [f"{INPUT}_{number}" for number in range(3)]
    assert [tuple(each.tensor().shape) for each in outcome.constants] == [
        (WIDTH,),
        (WIDTH,),
        (2, WIDTH - WIDTH // 64),
    ]
    assert not gm.graph.find_nodes(op="call_function", target=CONSTANT)
    assert not gm.graph.find_nodes(op="get_attr")


@pytest.mark.slow
def test_constants_are_buffers_where_a_graph_gets_no_inputs(fake_group):
    fake_group(2)
    gm, outcome = rewritten(
        summed, activations(0), policy_of(spec_of(calibrated(2)), algorithm="one_shot")
    )
    assert not outcome.constants
    held = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    assert len(held) == 3
    assert held == dict(gm.named_buffers()).keys()
    assert all(name.startswith(INPUT) for name in held)


@pytest.mark.parametrize("as_inputs", [True, False])
def test_constants_that_come_later_take_no_others_place(as_inputs):
    """Codecs inside of codecs name their constants when they are lowered."""
    names = [constants.register([number, 1], torch.int64) for number in (5, 6)]

    def first(x):
        return x + CONSTANT(names[0], "cpu", "", "")

    gm = make_fx(first)(torch.ones(2, dtype=torch.int64))
    before = lift_constants(gm, as_inputs=as_inputs)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        new = gm.graph.call_function(CONSTANT, (names[1], "cpu", "", ""))
        new.meta["val"] = torch.empty(2, dtype=torch.int64)
        output.args = ((output.args[0], new),)
    made = lift_constants(gm, as_inputs=as_inputs, before=before)
    total, last = gm(torch.zeros(2, dtype=torch.int64), *(each.tensor() for each in made))
    assert total.tolist() == [5, 1]
    assert last.tolist() == [6, 1]


@pytest.mark.every
def test_kernels_give_the_bits_of_the_inline_form(fake_group):
    fake_group(2)
    spec = spec_of(calibrated(2))
    one, other = (
        sums(spec, 2, algorithm="two_shot", lowering=form)[0] for form in ("inline", "kernel")
    )
    assert torch.equal(one, other)


def test_scales_of_other_ranks_leave_their_site_alone(fake_group):
    """Its neighbour is still compressed."""
    fake_group(4)
    spec = spec_of(calibrated(2))
    small = activations(0)[:8]

    def both(x, y):
        return summed(x), summed(y)

    larger = Rule(codec="int8", force=True, min_bytes=2 * small.nbytes)
    policy = Policy(rules=[larger, Rule(codec=spec, force=True)])
    gm = trace(both, small, activations(1))
    road = GraphInput(
        gm=gm,
        direction="forward",
        policy=policy,
        profile=default_profile("cpu"),
        stateless=None,
    )
    outcome = manager.run(road, "0")
    assert [site.codec for site in outcome.plan.sites] == ["none", "int8"]
    assert "calibrated on 2 ranks, and these are 4" in outcome.plan.sites[0].reason
    assert not outcome.plan.fallback


@pytest.mark.slow
def test_channels_of_another_width_leave_their_site_alone(fake_group):
    fake_group(2)
    policy = policy_of(spec_of(calibrated(2, shared=True)))
    for shape in ((WIDTH, 96), (96,), ()):
        (site,) = rewritten(summed, torch.ones(shape), policy)[1].plan.sites
        assert not site.compressed
        assert "512 channels" in site.reason
    (site,) = rewritten(summed, torch.ones(3, 4, WIDTH), policy)[1].plan.sites
    assert site.compressed


@pytest.mark.slow
def test_scales_of_each_rank_are_not_for_an_all_to_all(fake_group):
    fake_group(2)

    def exchanged(x):
        return wait(ops.all_to_all_single(x * 1, [32, 32], [32, 32], "0"))

    _, outcome = rewritten(exchanged, activations(0), policy_of(spec_of(calibrated(2))))
    (site,) = outcome.plan.sites
    assert not site.compressed
    assert "differ between ranks" in site.reason
    _, outcome = rewritten(
        exchanged, activations(0), policy_of(spec_of(calibrated(2, shared=True)))
    )
    assert outcome.plan.sites[0].compressed
