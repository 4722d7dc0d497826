"""Collectives in the branches of ``torch.cond`` and in the body of ``while_loop``."""

from __future__ import annotations

import pytest
import torch
from graphs import ops
from tiers import rarely

import commpass
from commpass import Policy, Rule

pytestmark = pytest.mark.xdist_group("ranks")


def summed(x):
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def branches(x, w):
    return torch.cond(
        w.sum() > 0, lambda x, w: summed(x @ w) + 1, lambda x, w: summed(x * 2) @ w, (x, w)
    )


def loop(x, w):
    def again(count, x):
        return count + 1, summed(torch.tanh(x @ w)) / 2

    start = torch.tensor(0)
    return torch._higher_order_ops.while_loop(lambda count, x: count < 3, again, (start, x))[1]


FUNCTIONS = {"branches": branches, "loop": loop}


def compiled(name: str, lowering: str) -> tuple[float, list[tuple[str, str]]]:
    """Return the relative error on this rank, and the codec and lowering of each site."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    function = FUNCTIONS[name]
    values = torch.Generator().manual_seed(0)
    w = torch.randn(128, 128, generator=values) * 0.05
    x = torch.randn(256, 128, generator=values) ** 3  # heavy tails
    expected = function(x, w)
    policy = Policy(rules=[Rule(codec="int8", force=True, lowering=lowering)])
    found = torch.compile(function, backend=commpass.backend(policy, strict=True))(x, w)
    error = float((found - expected).norm() / expected.norm())
    return error, [(s.codec, s.lowering) for plan in commpass.plans()[seen:] for s in plan.sites]


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["kernel", rarely("inline")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_site_of_a_sub_graph_runs(name, lowering, ranks2):
    for error, sites in ranks2.run(compiled, name, lowering):
        assert error < 0.03
        assert sites == [("int8", lowering)] * len(sites)
        assert len(sites) == {"branches": 2, "loop": 1}[name]
