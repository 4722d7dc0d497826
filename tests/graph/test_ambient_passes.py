"""Torch modes of the caller do not affect a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ambient import MODES
from graphs import code, ops, trace
from tiers import rarely
from torch import fx

import commpass
from commpass.codecs.codec import _sample_error
from commpass.collectives import read_stages
from commpass.policy import Policy
from commpass.policy.rules import Rule

BALANCED = Policy(name="two", rules=[Rule(codec="rotated", force=True)], max_error=1.0)
QUICK = (
    "autocast to bf16",
    "default dtype bfloat16",
    "device as context",
    "function mode",
    "inference",
)


def rewritten(policy: str | Policy) -> tuple[fx.GraphModule, Callable[[], list[object]]]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_reduce(x @ w, "sum", "0")) + 1

    gm = trace(function, torch.zeros(64, 96), torch.zeros(96, 128))

    def run() -> list[object]:
        plan = commpass.rewrite(gm, [], policy, strict=True, profile=commpass.ethernet(0.01))
        return [(s.codec, s.algorithm, s.error, s.wire_bytes) for s in plan.sites]

    return gm, run


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "policy",
    [
        BALANCED,
        rarely("balanced"),
        rarely(Policy(name="kernel", rules=[Rule(codec="taco", force=True)], max_error=1.0)),
    ],
)
@pytest.mark.parametrize("mode", [m if m in QUICK else rarely(m) for m in MODES])
def test_rewritten_graph_and_plan_are_the_same(fake_group, mode, policy):
    fake_group(4)
    found = []
    for within in (MODES[mode], torch.no_grad):
        for cached in (_sample_error, read_stages):
            cached.cache_clear()
        gm, run = rewritten(policy)
        with within():
            sites = run()
        values = [
            (node.name, node.meta["val"].dtype, node.meta["val"].device)
            for node in gm.graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
        ]
        found.append((code(gm), sites, values))
    assert found[0][1][0][0] != "none"
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_graphs_compiled_in_inference_mode_are_rewritten(fake_group, inner):
    """This includes graphs that write to their inputs, which are then inference tensors."""
    fake_group(4)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(ops.wait_tensor(ops.all_reduce(x @ x, "sum", "0")))
        return ops.wait_tensor(ops.reduce_scatter_tensor(y + 1, "sum", 4, "0"))

    for spec in ("int8", "rotated"):
        policy = Policy(rules=[Rule(codec=spec, force=True)])
        found = []
        for mode in (torch.inference_mode, torch.no_grad):
            torch._dynamo.reset()
            compiled = torch.compile(
                function, backend=commpass.backend(policy, inner=inner, strict=True)
            )
            with mode():
                x, y = torch.ones(64, 64) / 3, torch.zeros(64, 64)
                found.append((compiled(x, y), y))
            assert [site.codec for site in commpass.plans()[-1]] == [spec, spec]
        assert all(map(torch.equal, *found))
