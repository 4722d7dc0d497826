"""Collectives in chunks of rows: what is split, what is not, and the same numbers either way."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from graphs import as_rank, code, ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st

import commpass
from commpass.costmodel import ethernet
from commpass.errors import PolicyError
from commpass.passes.graph.memory import memory, peak
from commpass.passes.graph.parse import is_wait, parse
from commpass.passes.pipeline import run
from commpass.passes.road import Road
from commpass.policy import Policy, Rule

LINK = ethernet(1)
M, N = 128, 64
aten = torch.ops.aten
wait = ops.wait_tensor


def reduced(x):
    return wait(ops.all_reduce(x, "sum", "0"))


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def block(x, w, residual, weight, w2):
    """The end of one half of a tensor-parallel layer, and the beginning of the next."""
    h = residual + reduced(x @ w)
    return h, norm(h, weight) @ w2


def whole(*shape, seed=0):
    """Values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def inputs(m=M, n=N):
    shapes = [(m, n), (n, n), (m, n), (n,), (n, n)]
    return [whole(*shape, seed=number) for number, shape in enumerate(shapes)]


def drive(gm, direction="forward", profile=LINK, **policy):
    policy = {"more_memory": 10.0} | policy
    road = Road(gm=gm, direction=direction, policy=Policy(**policy), profile=profile)
    return run(road, "0", strict=True).plan


def story(gm) -> str:
    """The order in short: s starts an exchange, w waits, m is a matmul, c joins."""
    letters = {aten.mm.default: "m", aten.addmm.default: "m", aten.cat.default: "c"}
    found = ""
    for node in gm.graph.nodes:
        found += "s" if parse(node) else "w" if is_wait(node) else letters.get(node.target, "")
    return found


def check(function, given, **policy):
    """Splits a graph; what it computes must stay the same. Returns it with its plan."""
    gm = trace(function, *given)
    expected = gm(*[x.clone() for x in given])
    before = peak(tuple(gm.graph.nodes), memory(gm.graph))
    shapes = [n.meta["val"] for n in gm.graph.nodes if n.op != "output"]
    plan = drive(gm, **policy)
    found = gm(*[x.clone() for x in given])
    expected, found = ([x] if isinstance(x, torch.Tensor) else x for x in (expected, found))
    for one, other in zip(expected, found, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    assert shapes
    for step in plan.split if "move" in policy.get("skip", ()) else ():
        largest = max(site.bytes for site in plan if site.name in step.into)
        assert peak(tuple(gm.graph.nodes), memory(gm.graph)) <= before + largest
    return gm, plan


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(2)


# --- what is split --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "order"), [(2, "msmswmcwmcc"), (4, "msmsmsmswmwmwmwmcc")]
)
def test_a_chunk_travels_while_the_next_is_computed(rows, order):
    gm, plan = check(block, inputs(), rows=rows)
    assert story(gm).replace("c", "") == order.replace("c", "")
    (step,) = plan.split
    assert step.into == tuple(site.name for site in plan)
    assert step.rows == (M // rows,) * rows
    assert step.reason == f"policy 'custom' says rows={rows}"
    assert [site.shape for site in plan] == [(M // rows, N)] * rows
