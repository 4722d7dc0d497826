"""Triton kernels that add a bias to decoded values, in the interpreter, with the bits of the plain
form."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from test_gpu_norms import BF16, F32, INT8, U8, norm64, ran, reason
from tiers import rarely

from commpass.lowering.chain import Add, Cast, Chain, Decode, Normalize, Shift, Store

WIDTH = 192


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, rarely(F32)])
def test_bias_comes_before_the_residual_and_is_rounded(dtype):
    n = 2 * WIDTH
    random = torch.Generator().manual_seed(0)
    wire = INT8.encode_rows(torch.randn(2, n, generator=random).to(dtype))
    bias = torch.randn(1, WIDTH, generator=random).to(dtype)
    residual = torch.randn(2, n, generator=random).to(dtype)
    before = (Decode(INT8, dtype), Cast(dtype), Shift(WIDTH, dtype), Add(dtype))
    chain = Chain(U8, (*before, Store(), Normalize(WIDTH, 1e-5, True)))
    y, total = interpreted(ran, chain, n, wire, bias, residual)
    decoded = INT8.decode_rows(wire, n, dtype).to(dtype)
    biased = (decoded.unflatten(1, (-1, WIDTH)) + bias).flatten(1)
    assert torch.equal(total, biased + residual)
    right, _, _ = norm64(biased + residual, WIDTH, True)
    torch.testing.assert_close(y.double(), right.flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bias_alone_needs_no_norm():
    n = 2 * WIDTH
    wire = INT8.encode_rows(torch.randn(1, n, generator=torch.Generator().manual_seed(0)))
    bias = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    chain = Chain(U8, (Decode(INT8, F32), Shift(WIDTH, F32)))
    (y,) = interpreted(ran, chain, n, wire, bias)
    decoded = INT8.decode_rows(wire, n, F32)
    assert torch.equal(y, (decoded.unflatten(1, (-1, WIDTH)) + bias).flatten(1))


def test_bias_that_begins_inside_a_block_has_no_kernel():
    chain = Chain(U8, (Decode(INT8, F32), Shift(96, F32)))
    assert "begin inside blocks of 64" in reason(chain, WIDTH)
