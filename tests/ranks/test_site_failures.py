"""A failing site: if it fails on one rank only, all leave the graph unchanged; if on all, only the
site is uncompressed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_helpers import commpass_messages

import commpass
from commpass.codecs import operators
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional


def two(x):
    """Two sites, with different codecs."""
    group = dist.group.WORLD.group_name
    a = ops.wait_tensor(ops.all_reduce(x * 2, "sum", group))
    return ops.wait_tensor(ops.all_gather_into_tensor(a + 1, dist.get_world_size(), group)) - 1


def fails(failing: tuple[int, ...], numel: int):
    """Return (plan, result, result of plain torch, warnings) if encoding fp8 fails on some
    ranks."""
    kept = operators.IMPLEMENTATIONS[operators.ops.encode.default]

    def encode(rows, name, salt):
        if name.startswith("fp8") and dist.get_rank() in failing:
            raise RuntimeError("injected")
        return kept(rows, name, salt)

    rules = [Rule(kind="all_gather", codec="fp8", force=True), Rule(codec="int8", force=True)]
    operators.IMPLEMENTATIONS[operators.ops.encode.default] = encode
    try:
        torch._dynamo.reset()
        x = torch.arange(numel) / 3 + dist.get_rank()
        backend = commpass.backend(Policy(rules=rules), inner="aot_eager", timeout=120)
        with commpass_messages() as messages:
            got = torch.compile(two, backend=backend)(x)
        plan = commpass.plans()[-1]
        return [s.codec for s in plan], plan.fallback, got, two(x), " ".join(messages)
    finally:
        operators.IMPLEMENTATIONS[operators.ops.encode.default] = kept


WHY = "all_gather_into_tensor is uncompressed: pass 'lower' failed: RuntimeError: injected"


@pytest.mark.slow
def test_failure_on_one_rank_alone_leaves_all_graphs_untouched(ranks2):
    every = ranks2.run(fails, (1,), 700)
    for codecs, fallback, got, plain, warnings in every:
        assert codecs == ["none", "none"]
        assert torch.equal(got, plain)
        assert "planned differently" in fallback
        assert fallback.endswith(f"On rank 1 {WHY}.")
        assert "compiled untouched" in warnings
    untouched = "forward graph 0 compiled untouched"
    assert every[0][-1].startswith(untouched)
    assert every[1][-1].startswith(f"forward graph 0: {WHY} {untouched}")


def test_failure_on_all_ranks_leaves_the_site_alone(ranks2):
    every = ranks2.run(fails, (0, 1), 900)
    for codecs, fallback, got, plain, warnings in every:
        assert codecs == ["int8", "none"]
        assert fallback == ""
        assert not torch.equal(got, plain)
        assert torch.allclose(got, plain, rtol=0.02, atol=2)
        assert warnings == f"forward graph 0: {WHY}"
    assert torch.equal(every[0][2], every[1][2])
