"""Gathers of codes when one rank differs or fails: no rank hangs, and a message names it."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import ops
from rank_helpers import commpass_messages
from test_quantised_ranks import E4M3, NAME, quantised

import commpass
from commpass.errors import Unanswered
from commpass.passes.simplify.rules import quantise

pytestmark = pytest.mark.xdist_group("ranks")
SLOW = commpass.ethernet(0.001)
NEVER_S = 3600.0


def layer(x):
    return quantised(ops.wait_tensor(ops.all_gather_into_tensor(x, dist.get_world_size(), "0")), -1)


def compiled(inner="eager", timeout: float = NEVER_S):
    torch._dynamo.reset()
    backend = commpass.backend("lossless", inner=inner, profile=SLOW, timeout=timeout)
    return torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)


def tokens(rows: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def not_executed(gm, inputs):
    """Compile a graph to a function without exchanges, since gloo aborts if ranks differ."""
    values = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    return lambda *args: [torch.zeros(value.shape).to(value.dtype) for value in values]


def differ(rows: int, dtype: torch.dtype) -> str:
    """Rank 1 has other rows, or another dtype."""
    x = tokens(16) if dist.get_rank() == 0 else tokens(rows, dtype)
    with commpass_messages() as messages:
        compiled(not_executed)(x)
    plan = commpass.plans()[-1]
    assert not plan.simplified
    assert [(site.kind, site.bytes) for site in plan] == [("all_gather", x.nbytes)]
    assert plan.fallback in "\n".join(messages)
    return plan.fallback


def test_ranks_with_other_rows_gather_the_values_and_name_each_other(ranks2):
    first, second = "(16, 32) in rank 0", "(24, 32) in rank 1"
    one, other = ranks2.run(differ, 24, torch.bfloat16)
    assert f"common_shape is {first} and {second}" in one
    assert f"common_shape is {second} and {first}" in other


@pytest.mark.slow
def test_ranks_with_another_dtype_gather_the_values_and_name_each_other(ranks2):
    one, other = ranks2.run(differ, 16, torch.float32)
    assert re.search(r" is .* in rank 0 and .* in rank 1\n", one)
    assert re.search(r" is .* in rank 1 and .* in rank 0\n", other)


def fails() -> tuple[str, list[str]]:
    """The rule fails on rank 1, so that both gather values, with the same results."""
    broken = mock.patch.object(quantise, "before_gather", side_effect=RuntimeError("broken here"))
    x = tokens(16)
    with broken if dist.get_rank() == 1 else mock.patch.dict({}):
        codes, scale = compiled()(x)
    plan = commpass.plans()[-1]
    right, right_scale = layer(x)
    assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(scale, right_scale)
    return plan.fallback, [step.rule for step in plan.simplified]


@pytest.mark.slow
def test_failure_on_one_rank_leaves_the_gather_as_it_was_on_all(ranks2):
    (one, no_steps), (other, none) = ranks2.run(fails)
    assert no_steps == none == []
    assert "rank 1: pass 'simplify' failed: RuntimeError: broken here" in one
    assert "pass 'simplify' failed: RuntimeError: broken here" in other


def stops() -> tuple[str, list[str]]:
    """Rank 1 stops before a step, and comes back after rank 0 has given up."""
    x, rank = tokens(16), dist.get_rank()
    if rank == 1:
        dist.barrier()
    with pytest.raises(Unanswered) as error:
        compiled(timeout=NEVER_S if rank else 1)(x)
    if rank == 0:
        dist.barrier()
    codes, _ = compiled()(x)
    assert codes.dtype == E4M3
    return str(error.value), [step.rule for step in commpass.plans()[-1].simplified]


@pytest.mark.slow
def test_rank_that_stopped_is_named_and_the_next_step_gathers_codes(ranks2):
    (said, steps), (late, same) = ranks2.run(stops)
    assert "rank 1 of group" in said
    assert "rank 0 of group" in late
    assert steps == same == [NAME]
