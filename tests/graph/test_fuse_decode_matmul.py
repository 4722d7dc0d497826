"""Matmuls decode the all_gather that produces their rows; where they cannot or should not, the
decode stays separate, with the reason in the plan.

The graphs are a GPU's, and nothing runs on one.
"""

from __future__ import annotations

import fake_cuda
import pytest
import torch
import torch.nn.functional as F
from graphs import ops
from test_fuse import RANKS, before, forced, run

from commpass.codecs import codec as codec_of
from commpass.codecs import operators
from commpass.costmodel import default_profile
from commpass.lowering import decode_matmul, fused
from commpass.passes import GraphInput, manager
from commpass.passes.decoded_rows import decoding_us
from commpass.passes.fuse import fuse
from commpass.passes.fx.marks import CODED

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

aten, wait = torch.ops.aten, ops.wait_tensor
BF16 = torch.bfloat16
ROWS, K, N = 64, 1024, 128
X, W = torch.empty(ROWS, K, dtype=BF16), torch.empty(N, K, dtype=BF16)
B = torch.empty(N, dtype=BF16)
TARGET = decode_matmul.DECODE_MATMUL


def gathered(x):
    return wait(ops.all_gather_into_tensor(x, RANKS, "0"))


def linear(x, w, b):
    return [F.linear(gathered(x), w)]


def biased(x, w, b):
    return [F.linear(gathered(x), w, b)]


def sequences(x, w, b):
    return [F.linear(gathered(x).view(2, -1, K), w)]


def three(x, w, b):
    y = gathered(x)
    return [F.linear(y, w), F.linear(y, w + 1), F.linear(y, w, b)]


def nodes_of(gm, target=TARGET):
    return [node for node in gm.graph.nodes if node.target is target]


def planned(function, *inputs, codec="int8", passes=None, **more):
    policy = forced(codec, "direct", chunks=1)
    passes = before("lower") if passes is None else passes
    gm, inputs, plan = run(function, policy, *inputs, passes=passes, **more)
    assert plan.sites[0].lowering == "kernel", plan.sites[0].reason
    return gm, inputs, plan.sites[0].reason


@pytest.mark.parametrize(
    ("function", "matmuls"), [(linear, 1), (biased, 1), (sequences, 1), (three, 3)]
)
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_matmul_decodes_its_rows(fake_group, function, matmuls, codec):
    fake_group(RANKS)
    gm, _, reason = planned(function, X, W, B, codec=codec)
    found = nodes_of(gm)
    assert len(found) == matmuls
    assert "decode+matmul" in reason
    assert "not fused" not in reason
    assert not nodes_of(gm, aten.mm.default) + nodes_of(gm, aten.addmm.default)
    assert not nodes_of(gm, operators.ops.decode.default)
    assert [n.meta["val"].shape for n in found] == [(RANKS * ROWS, N)] * matmuls
    wire = found[0].args[0][0].meta["val"]
    rows = decode_matmul.lookup(found[0].args[1])
    assert wire.dtype == torch.uint8
    assert wire.shape == (RANKS, rows.codec.wire_bytes(ROWS * K, BF16))
    assert (rows.numel, rows.dtype, rows.bias) == (ROWS * K, BF16, function is biased)


def test_code_of_inductor_calls_the_kernel(fake_group):
    fake_group(RANKS)
    gm, inputs, _ = planned(biased, X, W, B, passes=manager.PASSES)
    work = [n.meta[CODED] for n in gm.graph.nodes if n.meta.get(CODED)]
    values, operations = RANKS * ROWS * K, 2 * RANKS * ROWS * K * N
    wire = RANKS * codec_of("int8").wire_bytes(ROWS * K, BF16)
    moved = wire + W.nbytes + B.nbytes + RANKS * ROWS * N * 2
    assert (("int8", "decode", values), ("int8", "decoding matmul", operations, moved)) in work
    code = fake_cuda.code_of(gm, inputs)
    assert code.count("def decode_matmul(") == 1
    assert "extern_kernels.addmm" not in code


# --- what stays separate --------------------------------------------------------------------------


def saved(x, w, b):
    y = gathered(x)
    return [F.linear(y, w), y]


def activated(x, w, b):
    y = gathered(x)
    return [F.linear(y, w), torch.relu(y)]


def asserted(x, w, b):
    y = gathered(x)
    aten._assert_async.msg(y, "no zero")
    return [F.linear(y, w)]


def right_operand(x, w, b):
    return [torch.mm(w, gathered(x).t())]


def right_as_stored(x, w, b):
    return [torch.mm(w.new_empty(8, RANKS * ROWS), gathered(x))]


def both_operands(x, w, b):
    y = gathered(x)
    return [torch.mm(y, y.view(K, -1))]


def scaled(x, w, b):
    return [torch.addmm(b, gathered(x), w.t(), beta=2)]


def written(x, w, b):
    y = gathered(x)
    y.add_(1)
    return [F.linear(y, w)]


def columns_gathered(x, w, b):
    y = gathered(x).view(RANKS, ROWS, K).permute(1, 0, 2).reshape(ROWS, RANKS * K)
    return [F.linear(y, w.repeat(1, RANKS))]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (saved, "decode+matmul: others take the decoded values too"),
        (activated, "decode+matmul: others take the decoded values too"),
        (asserted, "decode+matmul: others take the decoded values too"),
        (right_operand, ""),
        (right_as_stored, "decode+matmul: the decoded values are not the left operand"),
        (both_operands, "decode+matmul: the decoded values are not the left operand"),
        (scaled, "decode+matmul: its terms are scaled"),
        (written, ""),
        (columns_gathered, ""),
    ],
)
def test_decode_stays_separate(fake_group, function, said):
    fake_group(RANKS)
    gm, _, reason = planned(function, X, W, B)
    assert not nodes_of(gm)
    assert said in reason
    assert ("decode+matmul" in reason) == bool(said)
    assert any("decode " in str(n.args[1]) for n in nodes_of(gm, fused.FUSED))


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("rotated", "a rotated block is decoded as a whole"),
        ("int6", "codes of 6 bits are stored in several parts"),
        ("nvfp4", "the values of its blocks are stored in another order"),
        ("int8(block=2048)", "blocks cross rows"),
    ],
)
def test_codec_without_a_local_decode_stays_separate(fake_group, codec, said):
    fake_group(RANKS)
    gm, _, reason = planned(linear, X, W, B, codec=codec)
    assert not nodes_of(gm)
    assert f"decode+matmul: {codec}: " in reason or "blocks cross rows" in reason
    assert said in reason


def test_wide_result_stays_separate(fake_group):
    fake_group(RANKS)
    wide = torch.empty(8192, K, dtype=BF16)
    gm, _, reason = planned(linear, torch.empty(4096, K, dtype=BF16), wide, B)
    assert not nodes_of(gm)
    assert "decode+matmul: decode and matmul apart take" in reason


def test_cpu_says_why_not(fake_group):
    """On a CPU the graph stays as it is."""
    fake_group(RANKS)
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(linear, tracing_mode="fake")(X, W, B)
    given = GraphInput(
        gm=gm,
        direction="forward",
        policy=forced("int8", "direct", chunks=1, lowering="kernel"),
        profile=default_profile("cpu"),
        stateless=None,
        kernels=True,
    )
    outcome = manager.run(given, "0", before("lower"), strict=True)
    assert outcome.error is None
    assert "decode+matmul: cpu has no kernel for it" in outcome.plan.sites[0].reason
    assert not nodes_of(gm)


def test_decode_is_repeated_for_each_tile_of_columns():
    kernels = default_profile("cuda").kernels
    one = decoding_us(kernels, 1 << 20, 128)
    assert one > 0
    assert decoding_us(kernels, 1 << 20, 1) == one
    assert decoding_us(kernels, 1 << 20, 129) == 2 * one


def test_wire_that_is_written_before_the_matmul_is_decoded_first(fake_group):
    fake_group(RANKS)
    policy = forced("int8", "direct", chunks=1)
    gm, _, plan = run(linear, policy, X, W, B, passes=before("fuse"))
    (decode,) = nodes_of(gm, operators.ops.decode.default)
    wire = decode.all_input_nodes[0]
    (cast,) = decode.users
    with gm.graph.inserting_after(cast):
        written = gm.graph.call_function(aten.zero_.default, (wire,))
    written.meta.update(wire.meta)
    with fake_cuda.a_card():
        (site,) = fuse(gm, plan.sites, default_profile("cuda"))
    assert not nodes_of(gm)
    assert "decode+matmul: an input is written in place" in site.reason
