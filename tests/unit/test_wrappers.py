"""The wrappers ``outlier`` and ``difference``: values against float64, calibration by its formula,
laws 1 and 2, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, rarely
from torch._subclasses.fake_tensor import FakeTensorMode
from values import bits, gaussian

from commpass.codecs import FLOATS, accumulation_dtype, codec, constants, registry
from commpass.codecs.operators import CONSTANT
from commpass.codecs.wrappers.difference import subtract_reference
from commpass.codecs.wrappers.outlier import (
    KEPT,
    Channels,
    OutlierCodec,
    Running,
    _constants,
    calibrate,
    random_channels,
)
from commpass.errors import PolicyError

difference, outlier, topk = (registry.NAMES[name] for name in ("difference", "outlier", "topk"))
tried = settings(max_examples=examples(20, 60), deadline=None)


def stays_within_its_bound(coder, x: torch.Tensor, back: torch.Tensor) -> None:
    """Check that the 2-norm of the error of a whole tensor is within its bound; values are
    scaled, so that no square overflows."""
    values, got = x.double().numpy(), back.double().numpy()
    largest = np.abs(values).max(initial=0) or 1.0
    floor = coder.floor(x.dtype) * math.sqrt(x.numel()) / largest
    lost = np.linalg.norm((got - values) / largest)
    assert lost <= coder.bound * np.linalg.norm(values / largest) * 1.01 + floor


def features(
    tokens: int, width: int, seed: int = 0, wide: tuple[int, ...] = (3, 40)
) -> torch.Tensor:
    x = gaussian(tokens, width, seed=seed)
    x[:, list(wide)] *= 60
    return x


# --- calibration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99])
def test_running_ranges_follow_equations_1_and_2(gamma):
    sequences = [features(20, 48, seed) - 0.3 for seed in range(6)]
    running = Running.start(sequences[0])
    for x in sequences[1:]:
        running = running.update(x, gamma)
    low, high = sequences[0].double().numpy().min(0), sequences[0].double().numpy().max(0)
    for x in sequences[1:]:
        low = gamma * low + (1 - gamma) * x.double().numpy().min(0)
        high = gamma * high + (1 - gamma) * x.double().numpy().max(0)
    assert np.allclose(running.low.numpy(), low, rtol=1e-12)
    assert np.allclose(running.high.numpy(), high, rtol=1e-12)
    assert np.allclose(running.ranges.numpy(), np.maximum(np.abs(low), np.abs(high)), rtol=1e-12)


def test_widest_channels_of_all_ranks_together_are_kept():
    """Channel 7 is the widest on only one rank; the sums over the ranks of 20 and 30 are wider."""
    ranks = []
    for rank in range(4):
        x = gaussian(50, 64, seed=rank).clamp(-1, 1)
        x[0, 7] = 10.0 if rank == 0 else 1.0
        x[0, 20], x[0, 30] = 6.0, -7.0
        ranks.append(Running.start(x))
    assert calibrate(ranks, keep=2 / 64).kept == (20, 30)
    assert calibrate(ranks[:1], keep=1 / 64).kept == (7,)
    shared, each = calibrate(ranks, shared=True), calibrate(ranks)
    assert (len(shared.ranges), len(each.ranges)) == (1, 4)
    assert shared.ranges[0] == tuple(
        max(row[channel] for row in each.ranges) for channel in range(64)
    )
    for rank, row in zip(ranks, each.ranges, strict=True):  # rounded up to bfloat16
        assert (rank.ranges.numpy() <= row).all()
        assert (rank.ranges.numpy() * (1 + 2**-7) >= row).all()


def test_equal_ranges_keep_the_lowest_channels():
    assert calibrate([Running.start(torch.ones(2, 10))], keep=0.3).kept == (0, 1, 2)


def test_random_channels_are_those_of_their_seed_and_spread():
    one = random_channels(4096, 1 / 64, 5)
    assert len(one) == 64
    assert list(one) == sorted(set(one))
    assert random_channels(4096, 1 / 64, 5) == one
    assert len(set(one) & set(random_channels(4096, 1 / 64, 6))) < 10
    counts = np.bincount(
        [c for seed in range(200) for c in random_channels(40, 0.25, seed)], minlength=40
    )
    assert counts.min() > 25
    assert counts.max() < 80  # 50 expected, 6.1 a standard deviation
    assert calibrate([Running.start(features(9, 64))], seed=2).kept == random_channels(
        64, 1 / 64, 2
    )


@pytest.mark.parametrize(
    "bad", [torch.tensor([[1.0, math.nan]]), torch.tensor([[math.inf, 0.0]]), torch.empty(0, 4)]
)
def test_calibration_on_nothing_or_on_what_is_not_finite_is_refused(bad):
    with pytest.raises(PolicyError, match="calibration on"):
        Running.start(bad)


def test_calibration_refuses_other_widths_and_gammas():
    running = Running.start(torch.ones(2, 8))
    with pytest.raises(PolicyError, match="before on 8"):
        running.update(torch.ones(2, 9))
    for gamma in (-0.1, 1.0, math.nan):
        with pytest.raises(PolicyError, match="gamma="):
            running.update(torch.ones(2, 8), gamma)
    with pytest.raises(PolicyError, match="keep="):
        calibrate([running], keep=1.0)


# --- statistics as plain data ---------------------------------------------------------------------


@st.composite
def statistics_of(draw: st.DrawFn) -> Channels:
    width = draw(st.integers(1, 60))
    kept = draw(st.sets(st.integers(0, width - 1), max_size=width - 1))
    reach = st.one_of(st.just(0.0), st.floats(0, 2.9e38), st.floats(0, 100))
    rows = draw(st.integers(0, 3))
    return Channels(
        width,
        tuple(sorted(kept)),
        tuple(tuple(draw(reach) for _ in range(width)) for _ in range(rows)),
    )


@tried
@given(statistics_of())
def test_statistics_survive_json_and_text(channels):
    assert Channels.from_json(channels.to_json()) == channels
    text = channels.to_text()
    assert text.isidentifier()
    assert Channels.from_text(text) == channels
    assert hash(Channels.from_text(text)) == hash(channels)
    assert sorted((*channels.kept, *channels.inner_channels)) == list(range(channels.width))


def test_ranges_are_rounded_up_to_bfloat16():
    given_ = np.abs(np.random.default_rng(0).standard_normal(500)) * 10.0 ** np.random.default_rng(
        1
    ).uniform(-30, 30, 500)
    row = Channels(500, (), (tuple(given_),)).ranges[0]
    stored = torch.tensor(row, dtype=torch.float64)
    assert torch.equal(stored, stored.to(torch.bfloat16).double())
    assert (stored.numpy() >= given_).all()
    assert (stored.numpy() <= given_ * (1 + 2**-7)).all()


WRONG = {
    "unsorted": (lambda: Channels(8, (3, 1)), "ascend"),
    "twice": (lambda: Channels(8, (1, 1)), "ascend"),
    "outside": (lambda: Channels(8, (1, 8)), "from 0 to 7"),
    "negative": (lambda: Channels(8, (-1,)), "from 0 to 7"),
    "no number": (lambda: Channels(8, (1.0,)), "whole number"),
    "all": (lambda: Channels(2, (0, 1)), "all 2 channels"),
    "width": (lambda: Channels(0, ()), "width=0"),
    "short": (lambda: Channels(3, (), ((1.0, 2.0),)), "row of 2 ranges"),
    "nan": (lambda: Channels(1, (), ((math.nan,),)), "finite"),
    "below zero": (lambda: Channels(1, (), ((-1.0,),)), "finite"),
    "json": (lambda: Channels.from_json("{}"), "to_json"),
    "json list": (lambda: Channels.from_json("[1]"), "to_json"),
    "no json": (lambda: Channels.from_json("width"), "to_json"),
    "json unsorted": (
        lambda: Channels.from_json('{"width": 8, "kept": [3, 1], "ranges": []}'),
        "ascend",
    ),
    "text": (lambda: Channels.from_text("cABC"), "to_text"),
    "empty": (lambda: Channels.from_text(""), "to_text"),
    "cut short": (lambda: Channels.from_text(Channels(8, (1,)).to_text()[:-5]), "to_text"),
    "other": (lambda: Channels.from_text("x" + Channels(8, (1,)).to_text()[1:]), "to_text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_statistics_that_cannot_be_are_refused(case):
    make, words = WRONG[case]
    with pytest.raises(PolicyError, match=words):
        make()


@pytest.mark.parametrize("sums", [(), (5.0, 6.0, 0.5, 3.0)])
def test_ranges_of_sums_grow_like_variances(sums):
    rows = ((1.0, 2.0, 0.25, 0.0), (3.0, 2.0, 0.5, 4.0), (1.0, 1.0, 0.5, 0.0))
    channels = Channels(4, (1,), rows, sums)
    one = [max(row[c] for row in rows) for c in range(4)]
    every = sums or [math.sqrt(sum(row[c] ** 2 for row in rows)) for c in range(4)]
    assert channels.range_of_sum(1, 3) == tuple(one)
    assert channels.range_of_sum(3, 3) == pytest.approx(every)
    half = [math.sqrt((a * a + max(a * a, b * b)) / 2) for a, b in zip(one, every, strict=True)]
    assert channels.range_of_sum(2, 3) == pytest.approx(half)
    for again in (Channels.from_text(channels.to_text()), Channels.from_json(channels.to_json())):
        assert again == channels
    coder = built(channels)
    assert coder.of_sum(2, 3).channels.ranges == (pytest.approx(half, rel=2**-7),)
    assert coder.of_sum(2, 3).rank is None
    assert channels.shared().ranges == (tuple(one),)
    assert channels.keeping(0.5).kept == (0, 1)


def test_error_that_is_expected_is_that_of_channels_as_calibrated():
    """For a Gaussian of which 4 standard deviations are 7 steps: step / sqrt(12)."""
    coder = built(Channels(4, (), ((1.0, 30.0, 0.01, 4.0),)))
    assert coder.relative_error() == pytest.approx(4 / 7 / math.sqrt(12), rel=0.02)
    alone = built(Channels(4, (1,), ((1.0, 30.0, 0.01, 4.0),)))
    left = math.sqrt((1 + 16) / (900 + 17))
    assert alone.relative_error() == pytest.approx(left * 4 / 7 / math.sqrt(12), rel=0.03)
    each = built(Channels(4, (), ((1.0, 30.0, 0.01, 4.0), (1.0,) * 4)))
    assert each.relative_error() == each.at(0).relative_error() == coder.relative_error()


# --- outlier: values ------------------------------------------------------------------------------


def built(channels: Channels, **parameters) -> OutlierCodec:
    return outlier("outlier", statistics=channels.to_text(), **parameters)


def static_reference(
    x: np.ndarray, channels: Channels, row: int, bits_: int, dtype: torch.dtype
) -> np.ndarray:
    """Return kept channels rounded to 16 bits, the others as ``round(x / s) * s`` with
    ``s = range / largest``, clipped to the range."""
    largest = 2 ** (bits_ - 1) - 1
    reach = np.array(channels.ranges[row])
    scale = np.where(reach > 0, reach / largest, 1.0)
    out = np.clip(np.round(x / scale), -largest, largest) * scale
    kept = list(channels.kept)
    out[:, kept] = torch.from_numpy(x[:, kept]).to(dtype).to(KEPT[dtype]).double().numpy()
    return out


@tried
@given(
    st.integers(1, 9),
    st.integers(2, 70),
    st.sampled_from(FLOATS),
    st.sampled_from([2, 4, 6, 8]),
    st.integers(0, 10**6),
)
def test_static_values_are_those_of_the_formula(tokens, width, dtype, bits_, seed):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, width)) * 2).to(dtype)
    kept = tuple(sorted(rng.choice(width, rng.integers(0, width), replace=False).tolist()))
    reach = np.where(
        rng.random(width) < 0.1, 0.0, np.abs(rng.standard_normal(width)) + 0.1
    )  # some values lie outside
    coder = built(Channels(width, kept, (tuple(reach),)), bits=bits_)
    wide = x.double().numpy()
    want = static_reference(wide, coder.channels, 0, bits_, dtype)
    rows = coder.decode_rows(coder.encode_rows(x.reshape(1, -1)), x.numel(), dtype)
    assert rows.dtype == accumulation_dtype(dtype)
    got = rows.double().numpy().reshape(tokens, width)
    scale = np.where(
        np.array(coder.channels.ranges[0]) > 0,
        np.array(coder.channels.ranges[0]) / (2 ** (bits_ - 1) - 1),
        1.0,
    )
    tie = np.abs(np.abs(wide / scale) % 1 - 0.5) < 1e-5
    assert (np.abs(got - want) <= np.where(tie, scale, np.abs(want) * 1e-6 + 1e-12)).all()
    assert (np.abs(got - wide) <= np.abs(wide) * (1 + 1e-6)).all(), "off by more than it was"


def test_64th_of_the_channels_and_4_bits_are_4_19_bits_a_value():
    channels = Channels(4096, tuple(range(0, 4096, 64)), (tuple([1.0] * 4096),))
    assert built(channels).bits_per_value(4096 * 2048, torch.bfloat16) == pytest.approx(
        4 + 12 / 64, abs=1e-3
    )
    assert (
        built(channels).wire_bytes(4096 * 3, torch.bfloat16)
        == 384 + math.ceil(3 * 4032 / 2 / 128) * 128
    )


def test_kept_channels_save_the_error_and_random_ones_do_not():
    """Static int4 alone, with random channels, and with the widest: the paper's table 1 in
    small."""
    calibration = Running.start(features(400, 128))
    x = features(50, 128, seed=9)
    others = [channel for channel in range(128) if channel not in (3, 40)]

    def error(channels: Channels, **parameters) -> float:
        coder = built(channels, **parameters)
        return float((coder.decode(coder.encode(x)) - x).norm() / x.norm())

    alone = error(calibrate([calibration], keep=0))
    chosen = error(calibrate([calibration]))
    random = error(calibrate([calibration], seed=1))
    assert calibrate([calibration]).kept == (3, 40)
    assert chosen < 0.2 * alone
    assert random > 0.95 * alone
    dynamic = built(Channels(128, (3, 40)), inner="int4")
    back = dynamic.decode(dynamic.encode(x))
    assert float((back - x)[:, others].norm() / x[:, others].norm()) < 0.15
    plain = codec("int4")
    assert float((plain.decode(plain.encode(x)) - x)[:, others].norm() / x[:, others].norm()) > 0.9


def test_scales_of_each_rank_are_used_for_what_it_sent():
    ranks = [Running.start(features(100, 64, seed=rank) * 10.0**rank) for rank in range(3)]
    coder = built(calibrate(ranks))
    sent = [features(7, 64, seed=rank + 5) * 10.0**rank for rank in range(3)]
    wires = torch.cat([coder.at(rank).encode_rows(x.reshape(1, -1)) for rank, x in enumerate(sent)])
    got = coder.decode_rows(wires, 7 * 64, torch.float32)
    for rank, x in enumerate(sent):
        want = static_reference(x.double().numpy(), coder.channels, rank, 4, torch.float32)
        assert (
            np.abs(got[rank].double().numpy().reshape(7, 64) - want).max()
            <= 1e-4 * np.abs(want).max()
        )
        own = coder.at(rank).decode_rows(wires[rank : rank + 1], 7 * 64, torch.float32)
        assert bits(own) == bits(got[rank])
    assert coder.at(1).spec == coder.spec  # the same codec by name: ranks agree on it
    assert len({coder, *map(coder.at, range(3))}) == 4  # though each encodes differently
    with pytest.raises(PolicyError, match=r"\.at\(rank\)"):
        coder.encode_rows(sent[0].reshape(1, -1))
    with pytest.raises(PolicyError, match="2 rows to decode"):
        coder.decode_rows(wires[:2], 7 * 64, torch.float32)
    with pytest.raises(PolicyError, match="rank 3"):
        coder.at(3)


def test_each_rank_decodes_what_the_others_sent_by_their_scales():
    ranks = [Running.start(features(100, 64, seed=rank) * 10.0**rank) for rank in range(3)]
    coder = built(calibrate(ranks))
    sent = [features(7, 64, seed=rank + 5) * 10.0**rank for rank in range(3)]
    wires = torch.cat([coder.at(rank).encode_rows(x.reshape(1, -1)) for rank, x in enumerate(sent)])
    expected = bits(coder.decode_rows(wires, 7 * 64, torch.float32))
    for rank in range(3):
        assert bits(coder.at(rank).decode_rows(wires, 7 * 64, torch.float32)) == expected


@tried
@given(
    st.integers(0, 200),
    st.sampled_from(FLOATS),
    st.sampled_from(["", "int4", "int8", "raw", "rotated"]),
    st.data(),
)
def test_any_size_comes_back_and_what_is_not_finite_stays_so(numel, dtype, inner, data):
    channels = Channels(24, (2, 17), (tuple([2.0] * 24),))
    coder = built(channels, inner=inner)
    x = gaussian(numel, dtype=dtype) * data.draw(
        st.sampled_from([1, 1e-30, 1e30 if dtype != torch.float16 else 1e3])
    )
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    wire = coder.encode(x)
    assert wire.payload.numel() == coder.wire_bytes(numel, dtype)
    back = coder.decode(wire, x)
    assert back.isfinite().all()
    stays_within_its_bound(coder, x, back)
    if numel:
        place = data.draw(st.integers(0, numel - 1))
        broken = x.clone()
        broken[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        assert not coder.decode(coder.encode(broken)).reshape(-1)[place].isfinite()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_largest_numbers_stay_finite(dtype):
    limit = torch.finfo(dtype).max
    x = torch.tensor([limit, -limit]).to(dtype).double().repeat(24).clamp(-limit, limit).to(dtype)
    coder = built(Channels(4, (1, 2), ((1e-3, 1.0, 1.0, 2.9e38),)))
    assert coder.decode(coder.encode(x)).isfinite().all()


def test_finite_value_beyond_its_static_range_is_cut_to_it():
    coder = built(Channels(4, (1,), ((1.0, 1.0, 1.0, 0.0),)))
    assert coder.decode(coder.encode(torch.tensor([1e30, 3.0, -5.0, 0.4]))).tolist() == [
        1.0,
        3.0,
        -1.0,
        0.0,
    ]


BAD_OUTLIERS = [
    ({}, "give statistics"),
    ({"width": 8, "bits": 5}, "bits=5"),
    ({"width": 8, "keep": 1.5}, "keep=1.5"),
    ({"width": 8, "inner": "int9"}, "int9"),
    ({"statistics": "nothing"}, "to_text"),
    ({"statistics": Channels(8, (1,)).to_text(), "width": 9}, "width=9"),
]


@pytest.mark.parametrize(("parameters", "words"), BAD_OUTLIERS)
def test_bad_parameters_of_outlier_are_refused(parameters, words):
    with pytest.raises(PolicyError, match=words):
        outlier("outlier", **parameters)


# --- difference -----------------------------------------------------------------------------------


@tried
@given(
    st.integers(0, 5),
    st.integers(0, 300),
    st.sampled_from(FLOATS),
    st.sampled_from(["int4", "int8", "raw", "rotated"]),
    st.sampled_from([1.0, 1e-30, 1e30]),
    st.integers(0, 10**6),
)
def test_receivers_get_what_they_hold_and_the_coded_difference(rows, n, dtype, inner, scale, seed):
    scale = scale if dtype != torch.float16 else 1.0
    held = (gaussian(rows, n, seed=seed) * scale).to(dtype)
    x = (held.double() * (1 + 0.01 * gaussian(rows, n, seed=seed + 1, dtype=torch.float64))).to(
        dtype
    )
    coder = difference("difference", inner=inner)
    assert coder.state == "reference"
    bound = coder.against(held)
    wire = bound.encode(x)
    assert wire.payload.numel() == coder.wire_bytes(x.numel(), dtype)
    back = bound.decode(wire, x)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    work = accumulation_dtype(dtype)
    change = x.to(work) - held.to(work)
    plain = codec(inner) if inner != "raw" else coder.inner
    want = held.to(work) + plain.decode(plain.encode(change))
    assert torch.equal(back, want.to(dtype))


def test_error_is_that_of_the_difference():
    """SDP4Bit, section 3: the error for weights that change by 1 % is 100 times smaller than if
    they were coded directly."""
    held = gaussian(64, 1024)
    x = held + 0.01 * gaussian(64, 1024, seed=1)
    coder = difference("difference").against(held)
    plain = codec("int4", block=2048)
    error = float((coder.decode(coder.encode(x)) - x).norm() / x.norm())
    direct = float((plain.decode(plain.encode(x)) - x).norm() / x.norm())
    assert error == pytest.approx(direct / 100, rel=0.05)
    assert coder.inner == plain
    assert coder.relative_error() == plain.relative_error()
    assert coder.bound == plain.bound
    assert coder.bits_per_value(2**20, torch.float32) == pytest.approx(4 + 32 / 2048, abs=0.01)


def test_all_ranks_end_with_the_same_bits_and_may_go_on_from_them():
    """Law 1: each rank encodes its shard relative to what all hold of it, and all decode all
    shards."""
    held = gaussian(3, 500)
    for step in range(4):
        x = held + 0.01 * gaussian(3, 500, seed=step + 1)
        coder = difference("difference")
        wires = torch.cat(
            [
                coder.against(held[rank : rank + 1]).encode_rows(x[rank : rank + 1])
                for rank in range(3)
            ]
        )
        new = coder.against(held).decode_rows(wires, 500, torch.float32)
        for rank in range(3):
            own = coder.against(held[rank : rank + 1]).decode_rows(
                wires[rank : rank + 1], 500, torch.float32
            )
            assert bits(own) == bits(new[rank])
        assert float((new - x).norm() / x.norm()) < 3e-3
        held = new


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_differences_keep_what_is_not_finite(bad):
    held, x = gaussian(100), gaussian(100, seed=1)
    x[7] = bad
    coder = difference("difference").against(held)
    assert not coder.decode(coder.encode(x))[7].isfinite()
    held[7], x[7] = bad, 0.0
    assert not coder.decode(coder.encode(x))[7].isfinite()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_differences_of_the_largest_numbers_stay_finite(dtype):
    limit = torch.finfo(dtype).max
    x = torch.full((64,), 1.0, dtype=dtype) * limit
    coder = difference("difference", inner="int8").against(-x)
    assert coder.decode(coder.encode(x)).isfinite().all()


def test_compiled_code_takes_the_values_that_were_rounded():
    """Inductor removes a cast to 16 bits that is widened again.

    For unchanged weights, the difference would be their rounding error.
    """
    torch._dynamo.reset()
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    held = weights.to(torch.bfloat16)

    def send(weights: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return subtract_reference(weights.to(torch.bfloat16), held)

    assert not send(weights, held).any()
    assert not torch.compile(send)(weights, held).any()


def test_missing_or_wrong_reference_is_refused():
    x = torch.ones(4, 5)
    coder = difference("difference")
    for call in (
        lambda: coder.encode(x),
        lambda: coder.encode_rows(x),
        lambda: coder.decode_rows(torch.zeros(4, 9), 5, x.dtype),
    ):
        with pytest.raises(PolicyError, match=r"'difference'.*against\(reference\)"):
            call()
    wire = coder.against(x).encode(x)
    for other in (torch.ones(5, 4), torch.ones(20), torch.ones(4, 6)):
        with pytest.raises(PolicyError, match=r"reference is \[.*\[4, 5\]"):
            coder.against(other).encode(x)
        with pytest.raises(PolicyError, match=r"reference is \[.*\[4, 5\]"):
            coder.against(other).decode(wire)
    with pytest.raises(PolicyError, match=r"float dtype"):
        coder.against(torch.ones(4, 5, dtype=torch.int32))


def test_codec_with_state_inside_is_refused(monkeypatch):
    monkeypatch.setitem(registry.NAMES, "topk-of-this-test", topk)
    for make in (
        lambda: difference("difference", inner="topk-of-this-test"),
        lambda: outlier("outlier", width=8, inner="topk-of-this-test"),
        lambda: topk("topk", values="topk-of-this-test"),
    ):
        with pytest.raises(PolicyError, match="error feedback"):
            make()


def test_codec_of_calibrated_channels_inside_is_refused():
    """Other codecs pass on differences, selected values or other channels, for which the scales are
    wrong."""
    static = f"outlier(statistics={Channels(256, (1,), ((1.0,) * 256,)).to_text()})"
    dynamic = f"outlier(statistics={Channels(256, (1,)).to_text()})"
    for make in (
        lambda inner: difference("difference", inner=inner),
        lambda inner: outlier("outlier", width=256, inner=inner),
        lambda inner: topk("topk", values=inner),
        lambda inner: codec(f"mixed(low={inner})"),
    ):
        with pytest.raises(PolicyError, match="calibrated for the channels"):
            make(static)
        make(dynamic)


def test_constants_are_made_once_for_a_device():
    x = gaussian(5, 64)
    first, other = built(Channels(64, (3, 40))), built(Channels(64, (3, 40), (tuple([1.0] * 64),)))
    assert all(
        one is again for one, again in zip(first.constants(x), other.constants(x)[:2], strict=True)
    )
    assert [each.dtype for each in other.constants(x)] == [torch.int64, torch.int64, torch.float64]


@pytest.mark.parametrize("of", [0, 3])
def test_constants_are_made_for_graphs_from_a_cache(of, monkeypatch):
    """A process that finds compiled code on disk has not built the codec."""
    channels = Channels(8, (2,), (tuple(np.linspace(1, 2, 8)),))
    coder = codec("outlier", statistics=channels.to_text())
    used = coder.of_sum(of, 4) if of else coder
    wanted, names = used.constants(gaussian(1)), used.names
    monkeypatch.setattr(constants, "_constants", {})
    monkeypatch.setattr(constants, "_copies", {})
    registry._build.cache_clear()
    _constants.cache_clear()
    for name, value in zip(names, wanted, strict=True):
        assert torch.equal(CONSTANT(name, "cpu", used.spec, used.variant), value)


# --- compiled and fake ----------------------------------------------------------------------------


def coders() -> list:
    channels = Channels(64, (3, 40), (tuple(np.linspace(1, 3, 64)),))
    held = gaussian(3, 900, seed=4)
    made = [
        built(channels),
        built(channels, bits=8),
        built(channels, inner="int8"),
        built(channels, inner="rotated"),
    ]
    return [
        *made,
        difference("difference", inner="int4").against(held),
        difference("difference", inner="raw").against(held),
    ]


@pytest.mark.parametrize("one_in", [rarely(2), rarely(1)])
def test_eager_and_compiled_calls_agree_bit_for_bit(one_in):
    """This includes sizes at which the decoded rows end within a block and an elementwise operator
    follows: see inner_decode."""
    x = gaussian(3, 900)
    x[1] = 0.0
    x[2, 5] = math.nan
    made = [
        coder
        for coder in coders()
        if coder.inner.spec not in ("rotated", "raw", "int8(static=1.0)")
    ][::one_in]

    def all_of_them(rows):
        wires = [coder.encode_rows(rows) for coder in made]
        return [
            (wire, coder.decode_rows(wire, 900, torch.float32) * 2)
            for coder, wire in zip(made, wires, strict=True)
        ]

    compiled = torch.compile(all_of_them, dynamic=False, fullgraph=True)(x)
    for coder, eager, other in zip(made, all_of_them(x), compiled, strict=True):
        assert bits(eager[0][:2]) == bits(other[0][:2]), coder.inner.spec
        assert bits(eager[1][:2]) == bits(other[1][:2]), coder.inner.spec
        assert torch.equal(eager[1][2].isfinite(), other[1][2].isfinite()), coder.inner.spec


@pytest.mark.slow
def test_constants_may_be_inputs_of_the_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    coder = built(Channels(64, (3, 40), (tuple(np.linspace(1, 3, 64)),)))
    constants = coder.constants(gaussian(1))

    def run(x, *given_):
        bound = coder.with_constants(given_)
        return bound.decode_rows(bound.encode_rows(x), x.shape[1], x.dtype)

    x = gaussian(2, 640 * 7)
    graph = make_fx(run, tracing_mode="symbolic")(x, *constants)
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert not graph.graph.find_nodes(op="call_function", target=CONSTANT)
    for n in (640 * 7, 64 * 31, 64 * 100 + 5):
        x = gaussian(2, n)
        assert bits(graph(x, *constants)) == bits(
            coder.decode_rows(coder.encode_rows(x), n, torch.float32)
        )


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(dtype):
    x = gaussian(3, 900, dtype=dtype)
    for coder in coders():
        wire = coder.encode_rows(x)
        back = coder.decode_rows(wire, 900, dtype)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_wire = coder.encode_rows(mode.from_tensor(x))
            fake_back = coder.decode_rows(fake_wire, 900, dtype)
        assert wire.shape == (3, coder.wire_bytes(900, dtype))
        assert (fake_wire.shape, fake_wire.dtype) == (wire.shape, wire.dtype)
        assert (fake_back.shape, fake_back.dtype) == (back.shape, back.dtype)
