"""C++ kernels that add a bias to decoded values, with the bits of the plain form."""

from __future__ import annotations

import pytest
import torch
from test_cpu_norms import BF16, EPS, F32, INT8, U8, close, heavy_tailed, norm64, run, same
from tiers import rarely

from commpass.lowering.chain import Add, Cast, Chain, Decode, Normalize, Shift, Store

WIDTH, NORMS = 320, 7


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, rarely(F32)])
def test_bias_comes_before_the_residual_and_is_rounded(dtype):
    n = NORMS * WIDTH  # whose last unit and last block are not full
    wire = INT8.encode_rows(heavy_tailed(2, n).to(dtype))
    bias, residual = torch.randn(1, WIDTH).to(dtype), torch.randn(2, n).to(dtype)
    norm = Normalize(WIDTH, EPS, centered=True)
    steps = (Decode(INT8, dtype), Cast(dtype), Shift(WIDTH, dtype), Add(dtype), Store(), norm)
    y, total = run(Chain(U8, steps), [wire, bias, residual], n)
    decoded = INT8.decode_rows(wire, n, dtype).to(dtype)
    biased = (decoded.unflatten(1, (-1, WIDTH)) + bias).flatten(1)
    assert same(total, biased + residual)
    close(y, norm64(biased + residual, norm)[0])


@pytest.mark.slow
def test_bias_alone_needs_no_norm():
    n = NORMS * WIDTH
    wire, bias = INT8.encode_rows(heavy_tailed(2, n)), torch.randn(1, WIDTH)
    (y,) = run(Chain(U8, (Decode(INT8, F32), Shift(WIDTH, F32))), [wire, bias], n)
    decoded = INT8.decode_rows(wire, n, F32)
    assert same(y, (decoded.unflatten(1, (-1, WIDTH)) + bias).flatten(1))
