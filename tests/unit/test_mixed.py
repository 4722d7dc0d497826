"""The wrapper ``mixed``: which tokens get which codec, by float64 formulas; sizes, laws 1 and 2,
bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wrappers import bits, gaussian, stays_within_its_bound
from tiers import examples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import FLOATS, codec, registry
from commpass.errors import PolicyError

tried = settings(max_examples=examples(20, 60), deadline=None)


def tokens_of(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return tokens that differ in magnitude and in the distribution of their values."""
    x = gaussian(count, width, seed=seed)
    x[::3, 1] *= 40
    return x * torch.exp(gaussian(count, 1, seed=seed + 1))


def in_the_share(x: np.ndarray, share: float, by: str) -> np.ndarray:
    """Return from the formulas, in float64: bool ``[tokens]``."""
    sizes = np.abs(x)
    if by == "energy":
        score = (sizes**2).sum(1)
    else:
        p = sizes / sizes.sum(1, keepdims=True)
        score = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    first = np.argsort(-score, kind="stable")[: math.ceil(share * len(x))]
    chosen = np.zeros(len(x), bool)
    chosen[first] = True
    return chosen


@pytest.mark.few(9)
@pytest.mark.parametrize("by", ["entropy", "energy"])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.01])
@pytest.mark.parametrize("width", [128, 512])
def test_each_token_is_coded_by_the_codec_that_its_score_gives_it(by, share, width):
    """Each token is a separate block in either codec, so that it decodes as it would alone."""
    coder = codec("mixed", by=by, share=share, width=width)
    x = tokens_of(37, width)
    wire = coder.encode(x)
    chosen = in_the_share(x.double().numpy(), share, by)
    assert np.array_equal(np.unpackbits(wire.payload[:5].numpy().reshape(1, 5)).sum(), chosen.sum())
    back = coder.decode(wire)
    for place, inside in enumerate(chosen):
        alone = codec("tahquant", bits=4 if inside else 3)
        assert bits(back[place]) == bits(alone.decode(alone.encode(x[place]))), place


def test_80_percent_with_4_bits_are_3_8_bits_and_what_scales_take():
    """TahQuant: 3.8 bits; then two bf16 numbers and a byte of the pivot for each 128 values, and
    one bit for the choice."""
    numel = 128 * 100_000
    want = 0.8 * 4 + 0.2 * 3 + (16 + 16 + 8 + 1) / 128
    assert codec("mixed").bits_per_value(numel, torch.float32) == pytest.approx(want, abs=1e-3)


def test_energy_loses_less_than_entropy_where_tokens_differ_in_size():
    """And with rotated codecs, 5 and 3 bits lead to less error than 4 bits for all."""
    x = tokens_of(4000, 256)

    def error(text: str) -> float:
        coder = codec(text)
        return float((coder.decode(coder.encode(x)) - x).norm() / x.norm())

    assert error("mixed(by=energy)") < 0.85 * error("mixed")
    halves = "mixed(high=rotated(bits=5), low=rotated(bits=3), share=0.5, by=energy)"
    assert error(halves) < 0.7 * error("rotated(bits=4)")
    sizes = [codec(text).wire_bytes(x.numel(), x.dtype) for text in (halves, "rotated(bits=4)")]
    assert sizes[0] < 1.005 * sizes[1]


@tried
@given(
    st.integers(0, 3000),
    st.sampled_from(FLOATS),
    st.sampled_from(["", "by=energy, width=256", "high=int8, low=int4, share=0.3, width=512"]),
    st.sampled_from([1, 1e-30, 1e30]),
    st.data(),
)
def test_any_size_comes_back_and_what_is_not_finite_stays_so(numel, dtype, options, scale, data):
    coder = codec(f"mixed({options})" if options else "mixed")
    limit = torch.finfo(dtype).max
    x = (gaussian(numel).double() * scale).clamp(-limit, limit).to(dtype)
    wire = coder.encode(x)
    assert wire.payload.numel() == coder.wire_bytes(numel, dtype)
    back = coder.decode(wire, x)
    assert back.isfinite().all()
    stays_within_its_bound(coder, x, back)
    if numel:
        place = data.draw(st.integers(0, numel - 1))
        x[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        got = coder.decode(coder.encode(x))
        assert not got[place].isfinite()
        # Tokens without it stay finite.
        token = place // coder.block
        others = torch.cat([got[: token * coder.block], got[(token + 1) * coder.block :]])
        assert others.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_largest_numbers_and_zeros_come_back(dtype):
    limit = torch.finfo(dtype).max
    x = torch.zeros(6, 128, dtype=dtype)
    x[1], x[2, ::2] = limit, -limit
    back = codec("mixed").decode(codec("mixed").encode(x))
    assert back.isfinite().all()
    assert back[0].count_nonzero() == back[3:].count_nonzero() == 0


def test_rows_are_independent_of_each_other():
    coder, x = codec("mixed"), tokens_of(3, 1280)
    wires = coder.encode_rows(x)
    for row in range(3):
        assert bits(wires[row]) == bits(coder.encode_rows(x[row : row + 1]))


@pytest.mark.every
def test_eager_and_compiled_calls_agree_bit_for_bit():
    x = tokens_of(2, 128 * 9 + 5)
    coder = codec("mixed", high="int8(block=128)", low="int4")

    def both(rows):
        wire = coder.encode_rows(rows)
        return wire, coder.decode_rows(wire, rows.shape[1], rows.dtype) * 2

    for one, other in zip(
        both(x), torch.compile(both, dynamic=False, fullgraph=True)(x), strict=True
    ):
        assert bits(one) == bits(other)


@pytest.mark.every
def test_sizes_may_be_symbolic():
    coder = codec("mixed", high="int8(block=128)", low="int4")

    def run(x):
        return coder.decode_rows(coder.encode_rows(x), x.shape[1], x.dtype)

    graph = make_fx(run, tracing_mode="symbolic")(tokens_of(2, 128 * 40))
    for numel in (128 * 40, 128 * 31, 128 * 100 + 5):
        x = tokens_of(2, numel)
        assert bits(graph(x)) == bits(run(x))


@pytest.mark.slow
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    coder, x = codec("mixed"), tokens_of(3, 900)
    wire = coder.encode_rows(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = coder.encode_rows(mode.from_tensor(x))
        back = coder.decode_rows(fake, 900, torch.float32)
    assert (fake.shape, fake.dtype) == (wire.shape, wire.dtype)
    assert back.shape == x.shape


BAD = [
    ({"share": 0}, "share=0"),
    ({"share": 1.0}, "share=1.0"),
    ({"share": 0.0004}, "share=0.0004: must be from 0.001 to 0.999"),
    ({"share": 0.9996}, "share=0.9996"),
    ({"by": "entropie"}, "did you mean 'entropy'"),
    ({"width": 100}, "width=100.*multiple of 128"),
    ({"width": -128}, "width=-128"),
    ({"high": "exponent"}, "high='exponent'.*fixed size"),
    ({"low": "mixed"}, "low='mixed'"),
    ({"low": "topk"}, "error feedback"),
    ({"high": "int9"}, "int9"),
]


@pytest.mark.parametrize(("parameters", "words"), BAD)
def test_bad_parameters_are_refused(parameters, words):
    with pytest.raises(PolicyError, match=words):
        registry.codec("mixed", **parameters)
