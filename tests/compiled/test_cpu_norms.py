"""C++ kernels of chains with norms, against norms in float64.

What precedes a norm has the bits of the plain form. A norm sums in an order of its own, so it is
compared within the rounding errors of float32.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiers import rarely

from commpass.codecs import codec, operators
from commpass.errors import CommpassError
from commpass.lowering import cpu
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Encode,
    Normalize,
    Scale,
    Shift,
    Store,
    Sum,
    further_inputs,
    further_results,
    output_dtype,
)

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
F64 = torch.float64
INT8 = codec("int8")
EPS = 1e-5
WIDTHS = (rarely(1), rarely(16), 67, rarely(96), 320, rarely(1000))


def heavy_tailed(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    """Values of a Student t distribution with two degrees of freedom."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, rows, n, generator=random)
    return normal[0] / (normal[1:].square().mean(0) + 1e-6).sqrt()


def norm64(x, step: Normalize):
    """Return the norm, the means and the factors in float64."""
    x = x.to(F64).unflatten(-1, (-1, step.width))
    mean = x.mean(-1, keepdim=True)
    y = x - mean if step.centered else x
    factor = 1 / (y.square().mean(-1, keepdim=True) + step.eps).sqrt()
    return (y * factor).flatten(-2), mean.flatten(-2), factor.flatten(-2)


def run(chain: Chain, inputs, numel: int):
    """Run a kernel; its results lie between values that it must not touch."""
    rows = inputs[0].shape[0] // chain.ranks
    last = chain.steps[-1]
    dtypes = [output_dtype(chain), *(each.dtype for each in further_results(chain))]
    widths = [numel, *(numel // each.per for each in further_results(chain))]
    if isinstance(last, Encode):
        widths[0] = last.codec.wire_bytes(numel, F32)
    wholes = [
        torch.full((rows, width + 7), 55, dtype=dtype)
        for dtype, width in zip(dtypes, widths, strict=True)
    ]
    inner = [whole[:, 2:-5] for whole in wholes]
    cpu.compile_chain(chain)(inputs, inner[0], numel, inner[1:])
    for whole in wholes:
        assert (whole[:, :2] == 55).all()
        assert (whole[:, -5:] == 55).all()
    return [each.clone(memory_format=torch.contiguous_format) for each in inner]


def close(made: torch.Tensor, right: torch.Tensor, roundings: float = 1.0) -> None:
    """Compare with float64, within some roundings of the result's dtype and of float32."""
    unit = torch.finfo(made.dtype).eps * roundings + 64 * torch.finfo(F32).eps
    bound = unit * right.abs() + 1e-6 * (made.dtype == F32) + 1e-5
    assert ((made.to(F64) - right).abs() <= bound).all()


def same(made: torch.Tensor, right: torch.Tensor) -> bool:
    as_bits = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}[made.dtype]
    return made.dtype == right.dtype and torch.equal(made.view(as_bits), right.view(as_bits))


@pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_values_are_those_of_float64(width, centered):
    step = Normalize(width, EPS, centered, ("mean", "rsqrt"))
    n = 3 * width
    x = heavy_tailed(4, n, width)
    x[1, :width] = 0
    y, means, factors = run(Chain(F32, (step,)), [x], n)
    right, mean, factor = norm64(x, step)
    if width > 1 or not centered:
        close(y, right)
    close(factors, factor)
    if centered:
        close(means, mean)
    assert not y[1, :width].any()


@pytest.mark.parametrize(
    ("dtype", "weight", "offset"),
    [(F32, BF16, 1.0), (BF16, F32, 0.0), rarely(F16, BF16, 1.0), rarely(BF16, BF16, 0.0)],
)
def test_weight_and_bias_are_read_in_their_dtypes(dtype, weight, offset):
    width = 96
    n = 5 * width
    steps = (Normalize(width, EPS), Scale(width, weight, offset), Shift(width, dtype), Cast(dtype))
    x, w, b = heavy_tailed(2, n).to(dtype), torch.randn(1, width), torch.randn(1, width)
    w, b = w.to(weight), b.to(dtype)
    (y,) = run(Chain(dtype, steps), [x, w, b], n)
    right = norm64(x, steps[0])[0].unflatten(1, (-1, width))
    close(y, ((right * (w.to(F64) + offset)) + b.to(F64)).flatten(1), 1.0)
    assert y.dtype == dtype


def test_casts_round_where_they_stand():
    """Llama rounds before its weight, then once more. Products of two bfloat16 values are exact in
    float32, so rounding in between is visible."""
    width, n = 128, 1024
    x, w = heavy_tailed(2, n).to(BF16), torch.randn(1, width).to(BF16)
    steps = (Normalize(width, EPS), Cast(BF16), Scale(width, BF16))
    (y,) = run(Chain(BF16, steps), [x, w], n)
    (plain,) = run(Chain(BF16, steps[:1]), [x], n)
    assert same(y, (plain.to(BF16).unflatten(1, (-1, width)) * w).flatten(1))
    late = (Normalize(width, EPS), Scale(width, BF16), Cast(BF16))
    (z,) = run(Chain(BF16, late), [x, w], n)
    assert same(z, (plain.unflatten(1, (-1, width)) * w).flatten(1).to(BF16))
    assert not torch.equal(y, z)


@pytest.mark.parametrize(("spec", "dtype"), [("int8", BF16), rarely("fp8(block=64)", F32)])
def test_residual_sum_is_a_result_with_the_bits_of_the_plain_form(spec, dtype):
    coder, ranks, width = codec(spec), 3, 320
    n = 7 * width  # whose last unit and last block are not full
    wire = coder.encode_rows(heavy_tailed(2 * ranks, n).to(dtype))
    residual, w = torch.randn(2, n).to(dtype), torch.randn(1, width).to(dtype)
    norm = Normalize(width, EPS, False, ("rsqrt",))
    steps = (
        *(Decode(coder, dtype), Sum(ranks), Cast(dtype), Add(dtype), Store()),
        *(norm, Cast(dtype), Scale(width, dtype)),
    )
    chain = Chain(U8, steps)
    y, total, factors = run(chain, [wire, residual, w], n)
    sums = [
        operators.sum_rows(coder.decode_rows(wire[row * ranks :][:ranks], n, dtype))
        for row in range(2)
    ]
    right = torch.cat(sums).to(dtype) + residual
    assert same(total, right)
    normed, _, factor = norm64(right, norm)
    close(factors, factor)
    close(y, (normed.unflatten(1, (-1, width)) * w.to(F64)).flatten(1), 2.0)


def test_two_norms_about_an_addition_are_one_kernel():
    """As in Gemma 2: the sum over ranks is normalized before it is added, and once more after."""
    width, n = 256, 1024
    wire = INT8.encode_rows(heavy_tailed(1, n))
    residual, a, b = torch.randn(1, n), torch.randn(1, width), torch.randn(1, width)
    norm = Normalize(width, EPS)
    steps = (
        *(Decode(INT8, F32), norm, Scale(width, F32, 1.0), Add(F32), Store()),
        *(norm, Scale(width, F32, 1.0)),
    )
    assert [each.width for each in further_inputs(Chain(U8, steps))] == [width, None, width]
    y, total = run(Chain(U8, steps), [wire, a, residual, b], n)
    first = norm64(INT8.decode_rows(wire, n, F32), norm)[0].unflatten(1, (-1, width))
    right = (first * (a.to(F64) + 1)).flatten(1) + residual.to(F64)
    close(total, right)
    second = norm64(right, norm)[0].unflatten(1, (-1, width))
    assert torch.allclose(y.to(F64), (second * (b.to(F64) + 1)).flatten(1), atol=1e-4)


def test_normalized_values_go_on_as_a_wire():
    width, n = 256, 2048
    x = heavy_tailed(2, n)
    steps = (Add(F32), Store(), Normalize(width, EPS), Encode(INT8))
    wire, total = run(Chain(F32, steps), [x, x], n)
    (y,) = run(Chain(F32, (Normalize(width, EPS),)), [x + x], n)
    assert same(total, x + x)
    assert torch.equal(wire, INT8.encode_rows(y))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so_and_change_no_other_row(special, centered):
    width, n = 64, 256
    x = heavy_tailed(2, n)
    step = Normalize(width, EPS, centered)
    (clean,) = run(Chain(F32, (step,)), [x], n)
    x[1, 70] = special
    (y,) = run(Chain(F32, (step,)), [x], n)
    assert not y[1, 70].isfinite()
    x[1, 64:128], y[1, 64:128], clean[1, 64:128] = 0, 0, 0
    assert same(y, clean)


def test_rows_that_hold_no_whole_norms_are_refused():
    kernel = cpu.compile_chain(Chain(F32, (Normalize(64, EPS),)))
    x = torch.zeros(2, 96)
    with pytest.raises(CommpassError, match="norms of 64"):
        kernel([x], torch.empty_like(x), 96)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((Normalize(64, EPS), Scale(32, F32)), "different widths"),
        ((Decode(INT8, F32), Normalize(32768 + 256, EPS)), "whole blocks"),
        ((Normalize(64, EPS), Scale(64, F64)), "float64"),
    ],
)
def test_norms_without_a_kernel_say_why(steps, reason):
    taken = U8 if isinstance(steps[0], Decode) else F32
    assert reason in cpu.unsupported_reason(Chain(taken, steps))


def test_number_of_threads_changes_nothing():
    width, n = 320, 320 * 1024
    x, w = heavy_tailed(1, n), torch.randn(1, width)
    chain = Chain(F32, (Normalize(width, EPS), Scale(width, F32)))
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made += run(chain, [x, w], n)
    finally:
        torch.set_num_threads(before)
    assert same(*made)
