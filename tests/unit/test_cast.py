"""The codec ``cast``: its values against the definition of rounding, law 2, bounds, sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codecs import bits, decoded, one_thread, tensors, wide
from tiers import examples
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import FLOATS, codec
from commpass.errors import PolicyError

__all__ = ["one_thread"]  # a fixture that works by its presence

FORMS = {"bf16": (8, -126, 127), "fp16": (11, -14, 15)}
"""Bits of the mantissa with the leading one, and the least and the largest exponent."""


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """Return the nearest number of a form, ties to even, clipped to the largest one, from the
    definition."""
    precision, least, most = FORMS[form]
    largest = (2 - 2.0 ** (1 - precision)) * 2.0**most
    exponent = np.maximum(np.frexp(x)[1] - 1, least)
    step = 2.0 ** (exponent - (precision - 1.0))
    return np.clip(np.rint(x / step) * step, -largest, largest)


@settings(max_examples=examples(100, 300), deadline=None)
@given(tensors(), st.sampled_from(sorted(FORMS)))
def test_values_are_the_nearest_of_the_form_and_within_the_bound(x, form):
    coder = codec("cast", to=form)
    values, back = wide(x), decoded(coder, x)
    limit = torch.finfo(x.dtype).max
    with np.errstate(over="ignore"):  # float64 is rounded to float32 first
        single = values.astype(np.float32).astype(np.float64)
    single = np.where(np.isfinite(single), single, values)
    allowed = [np.clip(rounded(each, form), -limit, limit) for each in (values, single)]
    assert ((back == allowed[0]) | (back == allowed[1])).all()
    largest = torch.finfo(coder_dtype(form)).max
    inside = np.abs(values) <= largest
    error = np.abs(back - values)[inside]
    assert (error <= coder.bound * np.abs(values[inside]) + coder.floor(x.dtype)).all()
    assert coder.decode(coder.encode(x)).isfinite().all()


def coder_dtype(form: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_not_finite_stay_and_the_largest_numbers_stay_finite(form, dtype):
    most = torch.finfo(dtype).max
    x = torch.tensor([math.nan, math.inf, -math.inf, most, -most, 1.0, -0.0], dtype=torch.float64)
    back = codec("cast", to=form).decode(codec("cast", to=form).encode(x.to(dtype)))
    assert back[0].isnan()
    assert back[1:3].tolist() == [math.inf, -math.inf]
    assert back[3:].isfinite().all()
    assert back[3] >= min(65504, most) * (1 - 2**-8)
    assert bits(back[5:]) == bits(x[5:].to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_values_of_the_form_come_back_as_they_are(form):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(coder_dtype(form))
    x = every[~every.isnan()]
    coder = codec("cast", to=form)
    assert bits(coder.decode(coder.encode(x))) == bits(x)
    wider = x.float()
    assert bits(coder.decode(coder.encode(wider))) == bits(wider)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_row_is_two_bytes_a_value_padded_to_128(dtype):
    coder = codec("cast")
    assert coder.bits_per_value(1 << 20, dtype) == 16
    for numel in (0, 1, 63, 64, 65, 1000):
        assert coder.wire_bytes(numel, dtype) == math.ceil(2 * numel / 128) * 128
        assert coder.encode_rows(torch.ones(3, numel, dtype=dtype)).shape == (
            3,
            coder.wire_bytes(numel, dtype),
        )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_and_traced_calls_agree_with_eager_ones(form):
    coder = codec("cast", to=form)

    def run(rows):
        wire = coder.encode_rows(rows)
        return wire, coder.decode_rows(wire, rows.shape[1], rows.dtype) * 2

    x = torch.randn(3, 333, generator=torch.Generator().manual_seed(0)) * 1e4
    x[1, 7], x[2, 9] = math.inf, math.nan
    traced = make_fx(run, tracing_mode="symbolic")(torch.randn(2, 100))
    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    for other in (traced(x), compiled(x)):
        assert bits(other[0][:2]) == bits(run(x)[0][:2])
        assert torch.equal(other[1].nan_to_num(5.0), run(x)[1].nan_to_num(5.0))


def test_other_forms_are_refused():
    with pytest.raises(PolicyError, match="to='fp8'"):
        codec("cast(to=fp8)")


@pytest.mark.parametrize("form", sorted(FORMS))
def test_wire_of_values_that_have_its_dtype_is_no_view_of_them(form):
    coder = codec(form)
    x = torch.ones(1, 64, dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[form]))
    wire = coder.encode_rows(x)
    x.zero_()
    assert (coder.decode_rows(wire, 64, x.dtype) == 1).all()
