"""With sequence parallelism, one kernel computes what lies between a reduce_scatter and the
all_gather after it: decode, sum, addition, norm and encode."""

from __future__ import annotations

import pytest
import torch
from graphs import ops
from test_fuse_norms import BEFORE_FUSE, BEFORE_LOWER, rms, roles
from test_fuse_norms import run as planned

from commpass.passes import manager
from commpass.passes.fx.marks import MARK
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS, H, TOKENS = 4, 256, 32
F32, BF16 = torch.float32, torch.bfloat16
WHOLE = "decode+sum+add+norm+encode"
SAMPLE = torch.ops.commpass.sample_.default


def scattered(x):
    return wait(ops.reduce_scatter_tensor(torch.relu(x), "sum", RANKS, "0"))


def gathered(x):
    return wait(ops.all_gather_into_tensor(x, RANKS, "0"))


def layer(x, r, w):
    h = scattered(x) + r
    return [h, gathered(rms(h, w))]


def inference(x, r, w):
    return [gathered(rms(scattered(x) + r, w))]


def moved(x, r, w):
    """No norm between: a residual alone."""
    return [gathered(scattered(x) + r)]


def regathered(x, r, w):
    """The values of all ranks, which are then summed apart: a row for each rank."""
    total = gathered(torch.relu(x)) + r
    return [wait(ops.reduce_scatter_tensor(total, "sum", RANKS, "0"))]


def norm_used_twice(x, r, w):
    y = rms(scattered(x) + r, w)
    return [gathered(y), y]


def something_between(x, r, w):
    return [gathered(torch.sin(rms(scattered(x) + r, w)))]


def inputs(dtype=F32):
    random = torch.Generator().manual_seed(0)
    shapes = ((RANKS * TOKENS, H), (TOKENS, H), (H,))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def run(function, *given, policy=None, passes=BEFORE_LOWER):
    return planned(function, *given, policy=policy or unchecked(), passes=passes)


def unchecked(codec: str = "int8", **more) -> Policy:
    return Policy(rules=[Rule(codec=codec, force=True, lowering="kernel", **more)], check_calls=0)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("function", "role"),
    [(layer, WHOLE), (inference, WHOLE), (moved, "decode+sum+add+encode")],
)
def test_one_kernel_lies_between_two_exchanges(fake_group, function, role, dtype):
    fake_group(RANKS)
    gm, plan = run(function, *inputs(dtype))
    assert roles(gm) == ["encode", role, "decode"]
    first, second = plan.sites
    assert f"in one kernel each: encode, {role}" in first.reason
    assert f"encode, with what follows the decode of {first.name}, decode" in second.reason
    plain, _ = run(function, *inputs(dtype), passes=BEFORE_FUSE)
    for a, b in zip(plain(*inputs(dtype)), gm(*inputs(dtype)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=5e-2)  # a code at a tie


def test_rows_of_all_ranks_are_encoded_after_an_addition(fake_group):
    """The kernel: ``test_residuals_of_several_rows_are_added_before_an_encode``."""
    fake_group(RANKS)
    stream, rows, weight = inputs()
    gm, _ = run(regathered, rows, stream, weight)
    assert roles(gm) == ["encode", "decode+add+encode", "decode+sum"]


@pytest.mark.parametrize("codec", ["rotated", "fp8"])
def test_domains_and_other_codecs_are_fused_too(fake_group, codec):
    fake_group(RANKS)
    gm, _ = run(layer, *inputs(BF16), policy=unchecked(codec))
    assert sum(role.endswith("norm+encode") for role in roles(gm)) == 1


@pytest.mark.parametrize("function", [norm_used_twice, something_between])
def test_encode_stays_apart_where_its_values_are_needed_or_changed(fake_group, function):
    fake_group(RANKS)
    gm, _ = run(function, *inputs())
    assert "decode+sum+add+norm" in roles(gm)
    assert roles(gm).count("encode") + roles(gm).count("matmul+encode") == 2


@pytest.mark.slow
def test_gpu_kernel_has_one_size_of_blocks(fake_group):
    pytest.importorskip("triton", reason="kernels are written in Triton")
    from test_fuse import run as run_on_card

    fake_group(RANKS)
    rules = [
        Rule(kind="reduce_scatter", codec="int8(block=64)", force=True, lowering="kernel"),
        Rule(kind="all_gather", codec="int8", force=True, lowering="kernel"),
    ]
    *_, plan = run_on_card(layer, Policy(rules=rules, check_calls=0), *inputs(BF16))
    assert f"not fused: {WHOLE}: codecs of different blocks" in plan.sites[0].reason
    *_, plan = run_on_card(layer, unchecked(), *inputs(BF16))
    assert f"in one kernel each: encode, {WHOLE}" in plan.sites[0].reason


@pytest.mark.slow
def test_gpu_kernel_of_a_norm_leaves_a_rotation_to_another_kernel(fake_group):
    pytest.importorskip("triton", reason="kernels are written in Triton")
    from test_fuse import run as run_on_card

    fake_group(RANKS)
    *_, plan = run_on_card(layer, unchecked("rotated"), *inputs(BF16))
    done, _, missed = plan.sites[0].reason.partition("; not fused: ")
    assert done.endswith("add+norm")
    assert "norm+encode: rotated encodes faster in a kernel of its own" in missed


def test_encode_of_an_inline_site_is_left_to_the_compiler(fake_group):
    fake_group(RANKS)
    rules = [
        Rule(kind="reduce_scatter", codec="int8", force=True, lowering="kernel"),
        Rule(kind="all_gather", codec="int8", force=True, lowering="inline"),
    ]
    gm, _ = run(layer, *inputs(), policy=Policy(rules=rules, check_calls=0))
    assert roles(gm) == ["encode", "decode+sum+add+norm"]


def test_values_whose_error_is_checked_stay_in_memory(fake_group):
    fake_group(RANKS)
    rule = Rule(codec="int8", force=True, lowering="kernel", max_error=0.1)
    policy = Policy(rules=[rule], check_calls=2)
    gm, _ = run(layer, *inputs(BF16), policy=policy, passes=manager.PASSES)
    samples = [node for node in gm.graph.nodes if node.target is SAMPLE]
    assert [node.args[2] for node in samples] == [0, 1]
    kernels = [n for n in gm.graph.nodes if "kernel_" in str(n.target) and MARK in n.meta]
    (whole,) = (node for node in kernels if node.meta[MARK].role == WHOLE)
    wire, stream, normed = (buffer.meta["val"] for buffer in whole.kwargs["outputs"])
    assert (wire.dtype, stream.dtype, normed.dtype) == (torch.uint8, BF16, BF16)
    assert stream.numel() == normed.numel() == TOKENS * H
    assert samples[1].all_input_nodes[0] in whole.kwargs["outputs"]
