"""Selections in graphs of a GPU: kernels give the bits of the aten form."""

from __future__ import annotations

from collections import Counter

import fake_cuda
import pytest
import torch
from graphs import as_rank, ops, trace
from interpreter import interpreted
from lockstep import run_in_lockstep
from tiers import rarely
from torch import Tensor

import commpass
from commpass import lowering
from commpass.codecs import operators
from commpass.costmodel import Link
from commpass.lowering import generated
from commpass.passes import GraphInput, manager
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
FAR = commpass.Profile("far", Link(1000.0, 0.1))
RANKS = 2
SHAPES = [(10, 30), (7,)]
NAMES = [each.name for each in manager.PASSES]
UNTIL_REWRITTEN = manager.PASSES[: NAMES.index("rewrite") + 1]
SPARSE = ("sparse_encode", "sparse_sum")


def gradients(*values):
    started = [ops.all_reduce(x * 1, "avg", "0") for x in values]
    return [wait(each) for each in started]


def inputs(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def policy(spec: str, **more) -> Policy:
    rule = Rule(codec=spec, algorithm="sparse", force=True)
    return Policy(rules=[rule], max_error=1.0, **more)


def passed(gm, chosen: Policy, passes=None):
    road = GraphInput(
        gm=gm, direction="backward", policy=chosen, profile=FAR, stateless=None, kernels=True
    )
    outcome = manager.run(road, "0", passes, strict=True)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def called(gm) -> Counter:
    """Return how often each kernel of a selection is called."""
    names = (getattr(node.target, "_opname", "") for node in gm.graph.nodes)
    return Counter(name for name in names if name in SPARSE)


def on_card(spec: str, dtype: torch.dtype = torch.float32, **more):
    with fake_cuda.a_card():
        gm, given = fake_cuda.trace(gradients, *inputs(0, dtype))
        outcome = passed(gm, policy(spec, **more))
    return gm, given, outcome


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["dgc", rarely("topk(density=0.05, values=bf16)")])
def test_selections_on_a_gpu_are_calls_of_kernels(spec, fake_group):
    fake_group(RANKS)
    gm, given, outcome = on_card(spec)
    (site,) = outcome.plan.sites
    assert site.lowering == "kernel"
    assert called(gm) == {"sparse_encode": 2, "sparse_sum": 2}
    coded = [node for node in gm.graph.nodes if node.target in operators.IMPLEMENTATIONS]
    assert not coded
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    gathered = gm.graph.find_nodes(op="call_function", target=ops.all_gather_into_tensor.default)
    (wire,) = [node.args[0].meta["val"] for node in gathered]
    assert (wire.dtype, wire.numel()) == (torch.uint8, site.wire_bytes)
    made = gm.graph.output_node().args[0]
    gm.graph.output_node().args = (tuple(made),)
    gm.recompile()
    with given[0].fake_mode:
        states = [torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in outcome.state]
    code = fake_cuda.code_of(gm, [*given, *states])
    assert code.count("torch.ops.commpass.sparse_encode.default(") == 2
    assert code.count("torch.ops.commpass.sparse_sum.default(") == 2


@pytest.mark.parametrize(
    ("dtype", "there"), [(torch.float32, True), (torch.float64, False)], ids=str
)
def test_operators_have_kernels_where_there_are_some_for_the_dtype(dtype, there, fake_group):
    fake_group(RANKS)
    with fake_cuda.a_card():
        gm, _ = fake_cuda.trace(gradients, *inputs(0, dtype))
        passed(gm, policy("topk"), UNTIL_REWRITTEN)
        coded = [node for node in gm.graph.nodes if node.target in operators.IMPLEMENTATIONS]
        assert len(coded) == 2 * len(SHAPES)
        assert {lowering.caller(node) is not None for node in coded} == {there}


def test_operators_of_a_cpu_have_none(fake_group):
    fake_group(RANKS)
    gm = trace(gradients, *inputs(0))
    passed(gm, policy("topk"), UNTIL_REWRITTEN)
    coded = [node for node in gm.graph.nodes if node.target in operators.IMPLEMENTATIONS]
    assert {lowering.caller(node) for node in coded} == {None}


def stepped(
    spec: str, dtype: torch.dtype, steps: int, **more
) -> tuple[list[list[Tensor]], list[Counter]]:
    """Return the results of all ranks after each of some steps, and the residual of each."""
    graphs, states, found = [], [], []
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            gm = trace(gradients, *inputs(rank, dtype))
            outcome = passed(gm, policy(spec, **more))
            graphs.append(gm)
            states.append([torch.zeros(s.shape, dtype=s.dtype) for s in outcome.state])
    for _ in range(steps):
        given = [[*inputs(rank, dtype), *state] for rank, state in enumerate(states)]
        results = run_in_lockstep(graphs, given, lambda group: range(RANKS))
        assert all(all(map(torch.equal, other, results[0])) for other in results[1:])
        found.append([x.clone() for x in results[0]])
    return [*found, *states], [called(gm) for gm in graphs]


def both_forms(spec: str, dtype: torch.dtype) -> tuple[list[str], list[Counter]]:
    """Return the steps in which the graph of a GPU differs from the plain one, and the kernels that
    it calls.

    The kernels are interpreted on this CPU.
    """
    before, generated._no_triton = generated._no_triton, lambda device: ""
    try:
        plain, none = stepped(spec, dtype, 2, lowering="inline")
        kernels, calls = stepped(spec, dtype, 2, lowering="kernel")
    finally:
        generated._no_triton = before
    assert none == [{}] * RANKS
    pairs = zip(plain, kernels, strict=True)
    differing = [
        str(n) for n, (one, two) in enumerate(pairs) if not all(map(torch.equal, one, two))
    ]
    return differing, calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("topk(density=0.05)", torch.float32),
        rarely("dgc(density=0.05)", torch.float32),
        rarely("dgc(density=0.05, values=int8)", torch.bfloat16),
        rarely("topk(density=0.6)", torch.float16),
    ],
)
def test_steps_with_kernels_have_the_bits_of_the_plain_form(spec, dtype):
    """This includes the residuals of the next step."""
    differing, calls = interpreted(both_forms, spec, dtype)
    assert differing == []
    assert all(each["sparse_encode"] == len(SHAPES) for each in calls)
