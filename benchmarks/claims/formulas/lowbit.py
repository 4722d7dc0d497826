"""Low-bit tensor-parallel inference: calibration (equations 1 and 2), the choice of channels, and
the sums of section 2 with the grids of section 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from benchmarks.claims.cases import DATA
from benchmarks.claims.formulas.equation import Equation, Values, relative
from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Channels, Running, calibrate

GAMMA, SHARE, LARGEST = 0.99, 1 / 64, 7
RANKS, SEQUENCES, TOKENS, WIDTH = 4, 8, 64, 256


# --- the formulas ---------------------------------------------------------------------------------


def moving(sequences: Sequence[Values]) -> tuple[Values, Values]:
    """Equations 1 and 2: return moving averages of each channel's least and largest value, over
    sequences ``[tokens, width]``."""
    low, high = sequences[0].min(axis=0), sequences[0].max(axis=0)
    for each in sequences[1:]:
        low = GAMMA * low + (1 - GAMMA) * each.min(axis=0)
        high = GAMMA * high + (1 - GAMMA) * each.max(axis=0)
    return low, high


def ranges(sequences: Sequence[Values]) -> Values:
    """Section 3: return the largest value of each channel's symmetric grid."""
    low, high = moving(sequences)
    return np.maximum(np.abs(low), np.abs(high))


def widest(by_rank: Values, share: float = SHARE) -> list[int]:
    """Section 3: return the widest ``share`` of the channels, by ranges summed over the ranks
    ``[ranks, width]``."""
    many = int(np.ceil(share * by_rank.shape[1]))
    return sorted(np.argsort(-by_rank.sum(axis=0), kind="stable")[:many].tolist())


def quantised(x: Values, reach: Values) -> Values:
    """Section 3: quantise to symmetric 4-bit integers, with one static scale per channel, and
    return the values."""
    scale = reach / LARGEST
    return np.clip(np.rint(x / scale), -LARGEST, LARGEST) * scale


def one_shot(parts: Sequence[Values], by_rank: Values) -> Values:
    """Section 2: return the sum of what all ranks send; the widest channels are sent unchanged."""
    kept = widest(by_rank)
    total = np.zeros_like(parts[0])
    for part, reach in zip(parts, by_rank, strict=True):
        coded = quantised(part, reach)
        coded[:, kept] = part[:, kept]
        total += coded
    return total


def calibrated_sum(ranks: Sequence[Values]) -> Values:
    """Return what four ranks have of activations (``cases.channels``), calibrated as in
    ``Case.spec``, on seeds 1 to 7."""
    seen = [
        [DATA["channels"](rank, seed).double().numpy() for seed in range(1, 8)]
        for rank in range(len(ranks))
    ]
    return one_shot(ranks, rounded_up(np.stack([ranges(each) for each in seen])))


def rounded_up(values: Values) -> Values:
    """Return the least bfloat16 that is not below each positive value, which is how ranges are
    stored."""
    exponent = np.floor(np.log2(values)) - 7
    return np.ceil(values / 2.0**exponent) * 2.0**exponent


# --- commpass -------------------------------------------------------------------------------------


@cache
def sequences(rank: int) -> tuple[Values, ...]:
    """Return activations in float64; one channel in 32 is large, and ranks differ."""
    made = np.random.default_rng(100 + rank)
    size = np.where(np.arange(WIDTH) % 32 == 5, 30.0, 1.0) * (1 + 0.2 * rank)
    return tuple(made.standard_normal((TOKENS, WIDTH)) * size for _ in range(SEQUENCES))


@cache
def running(rank: int) -> Running:
    found = Running.start(torch.from_numpy(sequences(rank)[0]))
    for each in sequences(rank)[1:]:
        found = found.update(torch.from_numpy(each), GAMMA)
    return found


@cache
def channels() -> Channels:
    return calibrate([running(rank) for rank in range(RANKS)], SHARE)


@cache
def exact_ranges() -> Values:
    return np.stack([ranges(sequences(rank)) for rank in range(RANKS)])


def range_deviation() -> float:
    """Return the deviation of the ranges that ``calibrate`` stores from the formula's, rounded up
    to bfloat16."""
    return relative(np.array(channels().ranges), rounded_up(exact_ranges()))


def choice() -> float:
    """Return how many chosen channels are not those of the formula."""
    return float(len(set(channels().kept) ^ set(widest(exact_ranges()))))


def code_deviation() -> float:
    """Return the deviation of a rank's values after encode and decode, with the stored ranges."""
    reach, kept = np.array(channels().ranges), list(channels().kept)
    found = []
    for rank in range(RANKS):
        x = sequences(rank)[0]
        expected = quantised(x, reach[rank])
        expected[:, kept] = x[:, kept]
        coder = codec("outlier", statistics=channels().to_text()).at(rank)
        got = coder.decode(coder.encode(torch.from_numpy(x))).numpy()
        found.append(relative(got / reach[rank], expected / reach[rank]))
    return max(found)


EQUATIONS = (
    Equation(
        "equation 1",
        "the moving average of the least value of each channel",
        lambda: max(
            relative(running(rank).low.numpy(), moving(sequences(rank))[0]) for rank in range(RANKS)
        ),
        1e-14,
    ),
    Equation(
        "equation 2",
        "the moving average of the largest",
        lambda: max(
            relative(running(rank).high.numpy(), moving(sequences(rank))[1])
            for rank in range(RANKS)
        ),
        1e-14,
    ),
    Equation(
        "section 3",
        "how far the symmetric grids reach",
        range_deviation,
        0.0,
        "ranges are stored in bfloat16, rounded up, and so are those of the formula here",
    ),
    Equation(
        "section 3",
        "the channels of the widest ranges, added up over ranks: how many others are chosen",
        choice,
        0.0,
    ),
    Equation(
        "section 3", "4-bit integers by a static scale for each channel", code_deviation, 1e-12
    ),
)
