"""The bias of a row-parallel layer, which is added to the decoded sum, is part of the kernel that
decodes, as in GPT-2."""

from __future__ import annotations

import pytest
import torch
from test_fuse_norms import BEFORE_FUSE, BF16, F32, RANKS, H, inputs, roles, run, steps, summed
from torch.nn.functional import layer_norm

from commpass.lowering.chain import Add, Decode, Normalize, Scale, Shift, Store


def gpt_2(x, r, w, b):
    h = r + (summed(x) + b)
    return [h, layer_norm(h, (H,), w, b)]


def bias_alone(x, r, w, b):
    return [torch.sin(summed(x) + b)]


def other_dtype(x, r, w, b):
    return [summed(x) + b.double()]


def columns(x, r, w, b):
    return [summed(x) + b[:1]]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decode_bias_residual_and_norm_are_one_kernel(fake_group, dtype):
    fake_group(2)
    given = inputs(dtype)
    gm, _ = run(gpt_2, *given)
    assert roles(gm)[-1] == "decode+bias+add+norm"
    found = [each for each in steps(gm) if each.__name__ != "Cast"]
    assert found == [Decode, Shift, Add, Store, Normalize, Scale, Shift]
    plain, _ = run(gpt_2, *given, passes=BEFORE_FUSE)
    (total, normed), (right, right_normed) = gm(*given), plain(*given)
    assert torch.equal(total, right)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(normed, right_normed, **close)


def test_bias_without_a_norm_is_added_with_the_same_bits(fake_group):
    fake_group(2)
    gm, plan = run(bias_alone, *inputs())
    assert roles(gm)[-1] == "decode+bias"
    assert "decode+bias" in plan.sites[0].reason
    plain, _ = run(bias_alone, *inputs(), passes=BEFORE_FUSE)
    assert torch.equal(gm(*inputs())[0], plain(*inputs())[0])


@pytest.mark.parametrize("function", [other_dtype, columns])
def test_addition_of_something_else_than_a_row_stays_with_the_reason(fake_group, function):
    fake_group(RANKS)
    gm, plan = run(function, *inputs())
    assert roles(gm)[-1] == "decode"
    assert "of another shape, dtype or layout" in plan.sites[0].reason
