"""Kernels on a GPU get their inputs with the strides that they were made for.

Inductor pads the rows of long intermediate results on a GPU.
"""

from __future__ import annotations

import re

import fake_cuda
import pytest
import torch
from graphs import ops
from test_order_on_gpu import X, partial_sums
from tiers import VERSION
from torch.library import wrap_triton
from torch.utils._pytree import tree_leaves

from commpass.passes.fx.marks import MARK, STRIDES, Mark
from commpass.passes.fx.ops import triton_calls
from commpass.passes.lower import require_strides
from commpass.passes.post.order import ordered
from commpass.policy.rules import Rule

triton = pytest.importorskip("triton", reason="kernels are written in Triton")
tl = pytest.importorskip("triton.language")
N = 1041
CALL = re.compile(r" copied_row_\w*\.run\((\w+), ")


@triton.jit
def copied_row(source, target, stride, SIZE: tl.constexpr):
    place = tl.program_id(0) * stride + tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place))


def words_of_concatenation(x):
    """A kernel reads a concatenation as other bits, after an exchange."""
    s = ops.wait_tensor(ops.all_to_all_single(x, [1] * 4, [1] * 4, "0"))
    y = torch.cat([torch.sin(s), torch.cos(s)], dim=1).view(torch.int32)
    target = torch.empty_like(y)
    wrap_triton(copied_row)[(4,)](y, target, N, 1024)
    return [ops.wait_tensor(ops.all_gather_into_tensor(target, 4, "0"))]


def row_stride(required: bool, pinned: bool) -> int:
    """Return the distance of the rows that Inductor's code gives to the kernel, in 16-bit values.

    The node is as one that commpass inserted: without what torch's tracing notes.
    """
    with fake_cuda.a_card():
        like = torch.empty(4, N, dtype=torch.bfloat16)
        gm, inputs = fake_cuda.trace(torch.func.functionalize(words_of_concatenation), like)
    (kernel,) = (node for node in gm.graph.nodes if node.target in triton_calls())
    kernel.meta.pop(STRIDES, None)
    kernel.meta[MARK] = Mark("site", 0, "encode")
    if required:
        require_strides(gm.graph)
    if pinned:
        with ordered():
            code = fake_cuda.code_of(gm, inputs)
    else:
        code = fake_cuda.code_of(gm, inputs)
    body = code[code.index("def call(") :]
    (read,) = CALL.findall(body)
    while (source := re.search(rf" {read} = (buf\d+)\n", body)) or (
        source := re.search(rf" {read} = torch.ops.aten.view.dtype\((\w+), ", body)
    ):
        read = source[1]
    made = re.search(rf" {read} = empty_strided_cuda\(\(4, (\d+)\), \((\d+), 1\)", body)
    assert made is not None, body
    return int(made[2]) * (2 if int(made[1]) == N else 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_padded_rows_are_not_given_to_kernels(fake_group, pinned):
    fake_group(4)
    assert row_stride(required=True, pinned=pinned) == 2 * N


@pytest.mark.skipif(VERSION > (2, 11), reason="torch 2.13 pads nothing that is viewed as others")
def test_pinned_kernel_would_get_padded_rows(fake_group):
    """If this fails, torch gives what is expected by itself, and the entry is not needed."""
    fake_group(4)
    assert row_stride(required=False, pinned=True) > 2 * N


def test_inserted_kernels_have_the_strides_of_their_inputs(fake_group):
    fake_group(4)
    rule = Rule(codec="int8", algorithm="two_shot", force=True, lowering="kernel")
    gm = fake_cuda.planned(partial_sums, rule, X, X)[0].gm
    calls = [node for node in gm.graph.nodes if node.target in triton_calls()]
    assert len(calls) == 3
    for node in calls:
        given = [each for each in tree_leaves(node.meta[STRIDES]) if hasattr(each, "stride")]
        held = [each.meta["val"] for each in tree_leaves((node.args, node.kwargs)) if is_node(each)]
        assert len(given) == len(held) >= 2
        assert [each.stride() for each in given] == [each.stride() for each in held]


def is_node(value) -> bool:
    return isinstance(value, torch.fx.Node)
