"""Triton kernels of chains with norms, in the interpreter, against norms in float64.

What precedes a norm has the bits of the plain form.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from tiers import rarely

from commpass.codecs import codec, operators
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Normalize,
    Scale,
    Shift,
    Store,
    Sum,
)

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

F32, F64, BF16, U8 = torch.float32, torch.float64, torch.bfloat16, torch.uint8
INT8 = codec("int8(block=64)")
RANKS, EPS = 2, 1e-5


def ran(chain: Chain, numel: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    from commpass.lowering.gpu import launch

    return launch.run_all(chain, inputs[0], numel, *inputs[1:])


def reason(chain: Chain, numel: int) -> str:
    from commpass.lowering.gpu import supported

    return supported.unsupported_reason(chain, numel)


def norm64(x: torch.Tensor, width: int, centered: bool):
    x = x.to(F64).unflatten(1, (-1, width))
    mean = x.mean(-1, keepdim=True)
    y = x - mean if centered else x
    factor = 1 / (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y * factor, mean.flatten(1), factor.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "centered"),
    [(F32, 192, True), (BF16, 256, False), rarely(BF16, 64, True), rarely(F32, 4096, False)],
)
def test_kernel_writes_sum_norm_and_statistics(dtype, width, centered):
    rows, norms = 2, 3
    numel = norms * width
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows * RANKS, numel, generator=random).to(dtype)
    wire = INT8.encode_rows(x)
    residual = torch.randn(rows, numel, generator=random).to(dtype)
    weight = torch.randn(1, width, generator=random).to(dtype)
    bias = torch.randn(1, width, generator=random).to(dtype)
    steps = (
        *(Decode(INT8, dtype), Sum(RANKS), Cast(dtype), Add(dtype), Store()),
        *(Normalize(width, EPS, centered, ("mean", "rsqrt") if centered else ("rsqrt",)),),
        *(Scale(width, dtype, 1.0), Shift(width, dtype), Cast(dtype)),
    )
    y, total, *saved = interpreted(ran, Chain(U8, steps), numel, wire, residual, weight, bias)
    decoded = INT8.decode_rows(wire, numel, dtype)
    sums = [operators.sum_rows(decoded[r * RANKS :][:RANKS]) for r in range(rows)]
    right = torch.cat(sums).to(dtype) + residual
    assert total.dtype == dtype
    assert torch.equal(total, right)
    normed, mean, factor = norm64(right, width, centered)
    for made, want in zip(saved, (mean, factor) if centered else (factor,), strict=True):
        torch.testing.assert_close(made.to(F64), want, rtol=1e-5, atol=1e-6)
    want = (normed * (weight.to(F64) + 1) + bias.to(F64)).flatten(1)
    close = {F32: 1e-5, BF16: 2e-2}[dtype]
    torch.testing.assert_close(y.to(F64), want, rtol=close, atol=close)


def test_casts_round_where_they_stand():
    width = numel = 64
    random = torch.Generator().manual_seed(0)
    wire = INT8.encode_rows(torch.randn(1, numel, generator=random).to(BF16))
    weight = torch.randn(1, width, generator=random).to(BF16)
    decode, norm = (Decode(INT8, BF16), Cast(BF16)), Normalize(width, EPS)
    (plain,) = interpreted(ran, Chain(U8, (*decode, norm)), numel, wire)
    early = Chain(U8, (*decode, norm, Cast(BF16), Scale(width, BF16)))
    (y,) = interpreted(ran, early, numel, wire, weight)
    assert torch.equal(y, plain.to(BF16) * weight)


@pytest.mark.parametrize(
    ("width", "numel", "said"),
    [(96, 192, "begin inside blocks of 64"), (128, 192, "begin inside"), (65536, 65536, "a tile")],
)
def test_norms_without_a_kernel_say_why(width, numel, said):
    chain = Chain(U8, (Decode(INT8, F32), Normalize(width, EPS)))
    assert said in interpreted(reason, chain, numel)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spec", "width", "arch"),
    [("int8", 5120, "sm_90"), ("rotated", 4096, "sm_90"), ("int8", 8192, "gfx942")],
)
def test_kernels_fit_into_registers_and_move_whole_words(spec, width, arch):
    from commpass.lowering.inspect.kernels import of_chain
    from commpass.lowering.inspect.lowerable import lower

    steps = (
        *(Decode(codec(spec), BF16), Cast(BF16), Add(BF16), Store()),
        *(Normalize(width, EPS, False, ("rsqrt",)), Cast(BF16), Scale(width, BF16)),
    )
    found = lower(of_chain(Chain(U8, steps), arch, 64 * width), arch).compiled
    assert found.spills == 0
    assert found.residence.programs * found.num_warps >= 8
    for accesses in (found.loads, found.stores):
        moved = {bytes_: bytes_ * number for bytes_, number in accesses.items()}
        assert moved[16] > 0.5 * sum(moved.values())
