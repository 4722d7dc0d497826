"""Timed tile sizes in a graph of a GPU: the launch arguments of its kernels, and the reasons in its
plan."""

from __future__ import annotations

import dataclasses
import logging
import re
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from graphs import ops, trace
from torch._guards import TracingContext, tracing

import commpass
from commpass.backend import tune
from commpass.costmodel import default_profile
from commpass.errors import CommpassError, VerifyError
from commpass.lowering.timed import Timed
from commpass.passes import GraphInput, manager
from commpass.passes.fx.marks import TUNABLE
from commpass.passes.fx.ops import triton_calls
from commpass.passes.retile import retile, tunable_nodes
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

from commpass.lowering.gpu import autotune, generate, timing
from commpass.lowering.gpu.tunable import TunableChain, TunableProduct, values_of

wait = ops.wait_tensor
X = torch.empty(1024, 1024, dtype=torch.bfloat16)


def layer(x, w, r):
    return [wait(ops.all_reduce(x @ w, "sum", "0")) + r]


def outcome_of(codec: str = "int8", function=layer, like=(X, X, X), **more):
    """Return the results of the passes for a graph of a GPU, and its inputs."""
    rule = Rule(codec=codec, algorithm="two_shot", force=True, **{"lowering": "kernel", **more})
    return fake_cuda.planned(function, rule, *like)


def shared(strict: bool = False):
    return SimpleNamespace(
        strict=strict, timeout=None, tile_sizes={}, autotune=True, logged_untimed=False
    )


def job(seconds: float = 10.0):
    return SimpleNamespace(autotune_s=seconds, direction="forward", number="0", decompositions=None)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Let kernels return at once, and let their last choice be the fastest. Return what was
    run."""
    ran: list = []

    def bound(kind):
        def run(self, choice, inputs):
            ran.append((self, choice))
            return [torch.zeros(1)]

        monkeypatch.setattr(kind, "run", run)
        monkeypatch.setattr(kind, "examples", lambda self: [])

    bound(TunableChain)
    bound(TunableProduct)

    def time_us(call, device):
        before = len(ran)
        call()
        (kernel, choice), *_ = ran[before:]
        return 50.0 - 30 * kernel.choices.index(choice) / (len(kernel.choices) - 1)

    monkeypatch.setattr(timing, "time_us", time_us)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return ran


def set_sizes(outcome, own=None, given=None) -> None:
    with fake_cuda.a_card():
        tune.set_tile_sizes(own or shared(), given or job(), outcome, None)


def launches(gm) -> list[dict]:
    return [node.kwargs for node in gm.graph.nodes if node.target in triton_calls()]


# --- which calls can be timed ---------------------------------------------------------------------


def test_kernels_of_a_site_can_be_timed(fake_group):
    fake_group(4)
    outcome, _ = outcome_of()
    found = tunable_nodes(outcome.gm)
    assert [each.mark.role for each in found] == [
        "matmul+encode",
        "decode+sum+encode",
        "decode+add",
    ]
    product, middle, last = (each.call for each in found)
    assert (product.problem.m, product.problem.n, product.problem.k) == (1024, 1024, 1024)
    assert [each.shape for each in middle.inputs] == [(4, 266240)]
    assert [each.shape for each in last.inputs] == [(4, 266240), (4, 262144)]
    assert all(call.choices[0] is not None and len(call.choices) > 1 for call in (middle, last))
    assert product.cost > last.cost > middle.cost


def test_choices_for_operands_that_are_not_aligned_have_a_kernel(fake_group):
    """Parts of a tile are encoded later only beside loads by descriptors."""
    fake_group(4)
    outcome, _ = outcome_of()
    product = tunable_nodes(outcome.gm)[0].call
    with fake_cuda.a_card():
        assert product.choices[0].deferred
        choices = dataclasses.replace(product, aligned=False).choices
    assert len(choices) > 1
    assert not any(each.descriptors or each.deferred for each in choices)


def test_equal_kernels_are_one(fake_group):
    fake_group(4)

    def twice(x, w, r):
        (y,) = layer(x, w, r)
        return layer(y, w, r)

    outcome, _ = outcome_of(function=twice)
    found = tunable_nodes(outcome.gm)
    assert len(found) == 6
    assert len({each.call for each in found}) == len({each.call.identity for each in found}) == 3


def test_kernels_of_one_choice_cannot_be_timed(fake_group):
    """The scales of taco are sums over the values of a block."""
    fake_group(4)
    outcome, _ = outcome_of("taco", function=lambda x: layer(x.relu(), x, x), like=(X,))
    roles = [each.mark.role for each in tunable_nodes(outcome.gm)]
    assert "encode" not in roles
    assert "decode+sum+encode" not in roles


@pytest.mark.parametrize("lowering", ["inline", pytest.param("kernel", marks=pytest.mark.slow)])
def test_graph_of_a_cpu_has_no_such_kernels(lowering, fake_group, runs):
    fake_group(4)
    rule = Rule(codec="int8", algorithm="two_shot", force=True, lowering=lowering)
    gm = trace(layer, X, X, X)
    given = GraphInput(
        gm=gm,
        direction="forward",
        policy=Policy(rules=[rule]),
        profile=default_profile("cpu"),
        stateless=None,
        kernels=True,
    )
    outcome = manager.run(given, "0")
    assert outcome.plan.compressed
    before = outcome.plan, gm.code
    tune.set_tile_sizes(shared(), job(), outcome, None)
    assert tunable_nodes(gm) == []
    assert (outcome.plan, gm.code) == before
    assert runs == []


def test_nothing_is_timed_unless_it_is_wanted(fake_group, runs):
    fake_group(4)
    outcome, _ = outcome_of()
    before = outcome.plan, launches(outcome.gm)
    set_sizes(outcome, given=job(0.0))
    assert (outcome.plan, launches(outcome.gm)) == before
    assert runs == []


# --- launch arguments -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_deferred", [False, True])
def test_launches_are_those_of_a_graph_that_was_lowered_with_the_choice(
    fake_group, monkeypatch, is_deferred
):
    """A matmul whose tiles are encoded later has memory for them, of another size by choice."""
    fake_group(4)
    outcome, _ = outcome_of()
    nodes = tunable_nodes(outcome.gm)
    chosen = {each.node: each.call.choices[-1] for each in nodes}
    matmuls = [by for by in nodes[0].call.choices[1:] if bool(by.deferred) == is_deferred]
    chosen[nodes[0].node] = matmuls[-1]
    with fake_cuda.a_card():
        retile(outcome.gm, chosen)
    outcome.gm.graph.lint()
    monkeypatch.setattr(
        "commpass.lowering.gpu.generate.static_tile",
        lambda chain, numel, lanes: next(
            each.call.choices[-1] for each in nodes if getattr(each.call, "chain", None) == chain
        ),
    )
    monkeypatch.setattr(
        "commpass.lowering.gpu.matmul_launch.configuration",
        lambda *given, **more: matmuls[-1],
    )
    generate.kernel.cache_clear()
    want, _ = outcome_of()
    generate.kernel.cache_clear()
    for found, wanted in zip(launches(outcome.gm), launches(want.gm), strict=True):
        numbers = [
            {name: value for name, value in each["kwargs"].items() if isinstance(value, int)}
            for each in (found, wanted)
        ]
        assert numbers[0] == numbers[1]
        tensors = [
            {name: value for name, value in each["kwargs"].items() if name not in numbers[0]}
            for each in (found, wanted)
        ]
        held = [each.pop("held", None) for each in tensors]
        shapes = [None if each is None else each.meta["val"].shape for each in held]
        assert shapes[0] == shapes[1]
        assert (shapes[0] is not None) == (is_deferred and "a" in tensors[0])
        said = [re.sub(r"empty(_\d+)?", "empty", str(each)) for each in tensors]
        assert said[0] == said[1]
        assert found["grid"] == wanted["grid"]
        assert found["tensors_to_clone"] == wanted["tensors_to_clone"]


@pytest.mark.slow
def test_inductor_launches_the_choice(fake_group, runs):
    fake_group(4)
    outcome, inputs = outcome_of()
    with tracing(TracingContext(inputs[0].fake_mode)):  # as while Inductor compiles
        set_sizes(outcome)
    by = tunable_nodes(outcome.gm)[0].call.choices[-1]
    code = fake_cuda.code_of(outcome.gm, inputs)
    assert re.findall(r"configs=\[\{'num_warps': (\d+), 'num_stages': (\d+)\}\]", code) == [
        (str(by.num_warps), str(by.num_stages)),
        ("4", "3"),
        ("4", "3"),
    ]
    assert re.findall(r"'constants': \{[^}]*'BLOCKS': (\d+)", code) == ["8", "16"]
    assert re.findall(r"'constants': \{'BLOCK_M': (\d+)", code) == [str(by.block_m)]
    runs_ = re.findall(r"(\w+)\.run\([^\n]*, (\d+), (\d+), 1, stream", code)
    assert [each[1:] for each in runs_[1:]] == [("128", "1"), ("64", "4")]


def test_call_with_other_tensors_is_an_error_and_changes_nothing(fake_group):
    fake_group(4)
    outcome, _ = outcome_of()
    first, _, last = tunable_nodes(outcome.gm)
    before = launches(outcome.gm)
    last.node.meta[TUNABLE] = first.call
    choice = first.call.choices[-1]
    with fake_cuda.a_card(), pytest.raises(VerifyError, match="the tensors of its kernel"):
        retile(outcome.gm, {first.node: choice, last.node: choice})
    assert launches(outcome.gm) == before


# --- the plan and messages ------------------------------------------------------------------------


def test_reasons_name_the_times(fake_group, runs, caplog):
    fake_group(4)
    outcome, _ = outcome_of()
    own = shared()
    with caplog.at_level(logging.INFO, logger="commpass"):
        set_sizes(outcome, own)
    assert outcome.plan.sites[0].reason.endswith(
        "; tile sizes: matmul+encode 50.0 us -> 20.0 us; decode+sum+encode 50.0 us -> 20.0 us;"
        " decode+add 50.0 us -> 20.0 us"
    )
    assert re.search(r"tile sizes of 3 kernels in \S+ s: 3 timed, 0 read from", caplog.text)
    assert "one call of the graph: 150.0 us -> 60.0 us (60% less)" in caplog.text
    assert len(own.tile_sizes) == 3


@pytest.mark.slow
def test_results_are_used_again_in_the_process_and_from_disk(fake_group, runs, caplog):
    fake_group(4)
    own = shared()
    reasons, counts = [], []
    for each in (own, own, shared()):
        outcome, _ = outcome_of()
        with caplog.at_level(logging.INFO, logger="commpass"):
            set_sizes(outcome, each)
        reasons.append(outcome.plan.sites[0].reason)
        counts.append(len(runs))
    assert len(set(reasons)) == 1
    assert len(set(counts)) == 1
    assert "0 timed, 3 read from Inductor's cache" in caplog.text


def test_kernels_over_the_bound_are_named(fake_group, runs):
    fake_group(4)
    outcome, _ = outcome_of()
    before = launches(outcome.gm)
    set_sizes(outcome, given=job(1e-12))
    assert "decode+add not all choices were timed within 1e-12 s" in outcome.plan.sites[0].reason
    assert launches(outcome.gm) == before


@pytest.mark.parametrize("strict", [False, True])
def test_failure_of_the_timing_keeps_static_choices_unless_strict(
    strict, fake_group, monkeypatch, caplog
):
    fake_group(4)

    def fail(*_, **__):
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(autotune, "tune", fail)
    outcome, _ = outcome_of()
    before = launches(outcome.gm)
    if strict:
        with pytest.raises(CommpassError, match="not timed: RuntimeError: CUDA error: unspecified"):
            set_sizes(outcome, shared(strict=True))
        return
    set_sizes(outcome)
    assert launches(outcome.gm) == before
    assert "static choices: RuntimeError: CUDA error" in caplog.text
    assert "not timed: RuntimeError: CUDA error" in outcome.plan.sites[0].reason


def test_choice_that_this_gpu_lacks_is_reported_and_the_plan_is_the_same(fake_group, caplog):
    fake_group(4)
    outcome, _ = outcome_of()
    nodes, before = tunable_nodes(outcome.gm), launches(outcome.gm)
    own = shared()
    for each in nodes:
        values = dict.fromkeys(values_of(each.call.choices[0]), 999)
        own.tile_sizes[each.call.identity] = Timed(values, 9.0, 8.0)
    set_sizes(outcome, own)
    assert launches(outcome.gm) == before
    assert "decode+add 9.0 us -> 8.0 us" in outcome.plan.sites[0].reason
    assert "does not have the tile sizes of decode+add" in caplog.text


@pytest.mark.slow
def test_identity_of_a_kernel_does_not_depend_on_the_gpu(fake_group, monkeypatch):
    fake_group(4)
    first = [each.call.identity for each in tunable_nodes(outcome_of()[0].gm)]
    monkeypatch.setattr(fake_cuda.CARD, "multi_processor_count", 108)
    monkeypatch.setattr(fake_cuda.CARD, "major", 8)
    second = [each.call.identity for each in tunable_nodes(outcome_of()[0].gm)]
    assert first == second


# --- the back-end ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "given", "seconds"),
    [
        ({}, {}, 0.0),
        ({"mode": "max-autotune-no-cudagraphs"}, {}, 10.0),
        ({"options": {"max_autotune": True}}, {"autotune": 2.5}, 2.5),
        ({"options": {"max_autotune": True}}, {"autotune": False}, 0.0),
    ],
)
def test_mode_and_option_reach_forward_and_backward(how, given, seconds, fake_group, monkeypatch):
    fake_group(2)
    seen = []

    def note(shared, job, outcome, round) -> None:
        seen.append((job.direction, job.autotune_s))

    monkeypatch.setattr(tune, "set_tile_sizes", note)
    torch._dynamo.reset()
    x = torch.ones(16, requires_grad=True)
    function = torch.compile(
        lambda x: (x * 2).sin(), backend=commpass.backend("lossless", **given), **how
    )
    function(x).sum().backward()
    assert seen == [("forward", seconds), ("backward", seconds)]
