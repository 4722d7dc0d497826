"""Inputs that a fused kernel must not get, and forms that must not depend on the number of sites.

The inputs are operands and biases with a different memory layout than the kernel reads.
"""

from __future__ import annotations

import pytest
import torch
from graphs import ops, trace
from test_fuse import A, B, before, forced, fused_roles, roles_of, run, wait

from commpass.costmodel import default_profile
from commpass.passes import GraphInput, manager

BF16 = torch.bfloat16
SQUARE = torch.empty(1024, 1024, dtype=BF16)


def summed(x):
    return [wait(ops.all_reduce(x, "sum", "0")) * 2]


def biased(bias, x, w):
    return summed(torch.addmm(bias, x, w))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    "bias",
    [
        torch.empty(1, dtype=BF16),
        torch.empty(1, dtype=BF16).expand(1024),
        torch.empty(2048, dtype=BF16)[::2],
        torch.empty(1, 1024, dtype=BF16),
        torch.empty(2048, 1024, dtype=BF16),
    ],
    ids=["one", "repeated", "strided", "of two dimensions", "a matrix"],
)
def test_bias_that_is_no_row_in_memory_stays_apart(fake_group, bias):
    """The kernel would read beyond the bias, or other values."""
    fake_group(4)
    gm, _, plan = run(biased, forced("int8"), bias, A, B, passes=before("lower"))
    assert roles_of(gm)[0] == "encode"
    assert "its bias is no row" in plan.sites[0].reason


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(32768, dtype=BF16)[::2],
        torch.empty(16384, 2, dtype=BF16)[:, :1],
        torch.empty(1, dtype=BF16).expand(16384),
    ],
    ids=["strided", "a column", "repeated"],
)
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_values_that_do_not_lie_side_by_side_are_encoded_apart(fake_group, x, algorithm):
    fake_group(4)
    gm, _, plan = run(summed, forced("int8", algorithm), x, passes=before("lower"))
    assert "encode" not in fused_roles(gm)
    assert "side by side" in plan.sites[0].reason


def squared(x):
    return summed(x @ x)


def squared_and_biased(x, bias):
    return summed(torch.addmm(bias, x, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "inputs"),
    [(squared, (SQUARE,)), (squared_and_biased, (SQUARE, torch.empty(1024, dtype=BF16)))],
)
def test_matmul_may_take_one_tensor_twice(fake_group, function, inputs):
    fake_group(4)
    gm, _, _ = run(function, forced("int8"), *inputs)
    from test_fuse import FUNCTIONAL

    assert sum(node.target is FUNCTIONAL for node in gm.graph.nodes) == 3


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("codec", "two"), [("rotated", "kernel"), ("int8", "inline")])
def test_form_does_not_depend_on_the_number_of_sites_where_bits_differ(fake_group, codec, two):
    """Checkpointing reruns some of a forward graph's sites in the backward graph."""
    fake_group(4)
    x = torch.empty(64, 256, dtype=BF16)

    def chained(sites):
        def function(x):
            for _ in range(sites):
                x = torch.sin(wait(ops.all_reduce(x * 2, "sum", "0")))
            return [x]

        return function

    def forms(sites):
        road = GraphInput(
            gm=trace(chained(sites), x),
            direction="forward",
            policy=forced(codec),
            profile=default_profile("cpu"),
            stateless=None,
            kernels=True,
        )
        outcome = manager.run(road, "0", before("fuse"))
        assert outcome.error is None
        return {site.lowering for site in outcome.plan.sites}

    assert forms(3) == {"kernel"}
    assert forms(2) == {two}
