"""TACO: 8-bit floats, the adaptive scale-Hadamard transform and its two scales (equations 1 to 13).

The paper does not state tau. It is 1 here, as in codec ``taco``; epsilon is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from benchmarks.claims.formulas.equation import Equation, Values, relative
from commpass.codecs import codec
from commpass.codecs.block import transforms

BLOCK, LARGEST = 256, 448.0
ROUNDED = 1e-12
"""Far above the rounding of float64, and far below that of float32."""


# --- the formulas ---------------------------------------------------------------------------------


def sigma(blocks: Values) -> Values:
    """Equation 6: return the root mean square of each block, ``[blocks]``."""
    return np.sqrt((blocks**2).mean(axis=1))


def alpha(blocks: Values) -> Values:
    """Equation 7."""
    return 1 / sigma(blocks)


def hadamard(width: int) -> Values:
    """The Walsh-Hadamard matrix by Sylvester's construction, not normalised."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotated(blocks: Values) -> Values:
    """Equation 8, for blocks that are rescaled by alpha."""
    return (alpha(blocks)[:, None] * blocks) @ hadamard(BLOCK).T / np.sqrt(BLOCK)


def peak_scale(blocks: Values) -> Values:
    """Equation 9."""
    return np.abs(rotated(blocks)).max(axis=1) / LARGEST


@cache
def e4m3_values() -> Values:
    """Equation 4: return the values of the codes 0 to 126, with 4 bits of exponent and 3 of
    mantissa."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    normal = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return np.where(exponent == 0, 2.0**-6 * mantissa / 8, normal)


def to_fp8(values: Values) -> Values:
    """Return the nearest value of an 8-bit float; in a tie, the one with the even code.

    The paper's intrinsic (``float_to_fp8``) takes float32, to which values are rounded first.
    """
    levels, values = e4m3_values(), values.astype(np.float32).astype(np.float64)
    size = np.minimum(np.abs(values), levels[-1])
    above = np.clip(np.searchsorted(levels, size), 1, len(levels) - 1)
    low, high = size - levels[above - 1], levels[above] - size
    upper = (high < low) | ((high == low) & (above % 2 == 0))
    return np.copysign(np.where(upper, levels[above], levels[above - 1]), values)


def quantised(blocks: Values) -> Values:
    """Equation 10: return the values of the 8-bit floats that are sent."""
    return to_fp8(rotated(blocks) / peak_scale(blocks)[:, None])


def reconstructed(blocks: Values) -> tuple[Values, Values, Values]:
    """Equations 11, 12 and 13: return the values in the rotated domain, rotated back, and
    rescaled."""
    scaled = quantised(blocks) * peak_scale(blocks)[:, None]
    back = scaled @ hadamard(BLOCK).T / np.sqrt(BLOCK)
    return scaled, back, back / alpha(blocks)[:, None]


def two_shot(ranks: Sequence[Values]) -> Values:
    """Section 4: return the all_reduce of flat tensors whose length is a multiple of ranks and
    blocks.

    What each rank sends is coded and summed, and the sum is coded again.
    """
    total = sum(reconstructed(each.reshape(-1, BLOCK))[2] for each in ranks)
    return reconstructed(total)[2].reshape(ranks[0].shape)


# --- commpass -------------------------------------------------------------------------------------


@cache
def gradients() -> Values:
    """Return blocks of many sizes with heavy tails."""
    made = np.random.default_rng(1)
    return made.standard_normal((512, BLOCK)) * made.lognormal(-12, 2, (512, 1))


@cache
def wire() -> tuple[Values, Values, Values]:
    """Return the values that the codes of codec ``taco`` stand for, and both scales of each
    block."""
    rows = torch.from_numpy(gradients().reshape(1, -1))
    codes, first, second = codec("taco").encode_pieces(rows)
    values = codes.flatten()[: rows.numel()].view(torch.float8_e4m3fn).double()
    count = len(gradients())
    scales = (each.flatten()[:count].numpy() for each in (first, second))
    return values.numpy().reshape(-1, BLOCK), *scales


@cache
def decoded() -> Values:
    x = torch.from_numpy(gradients())
    coder = codec("taco")
    return coder.decode(coder.encode(x)).numpy()


def transformed() -> Values:
    """Return the codec's transform of the blocks, normalised and rescaled."""
    coder = codec("taco")
    found, _ = transforms.forward(coder.transform, torch.from_numpy(gradients()))
    return found.numpy() * np.sqrt(BLOCK) * alpha(gradients())[:, None]


def sent_sigma() -> Values:
    """Return ``sigma / tau``, which is sent instead of alpha.

    commpass rotates by ``H / B``, whose root mean square is smaller by ``sqrt(B)``.
    """
    return wire()[1] * np.sqrt(BLOCK)


def rotated_back() -> Values:
    """Equation 12 applied to what is sent: the paper's inverse rotation."""
    return wire()[0] * wire()[2][:, None] @ hadamard(BLOCK).T / np.sqrt(BLOCK)


def int8_error() -> float:
    """Return the largest error of codec ``int8``, relative to half a step of its block."""
    x = np.random.default_rng(2).laplace(size=(512, BLOCK))
    coder = codec("int8")
    got = coder.decode(coder.encode(torch.from_numpy(x))).numpy()
    steps = np.abs(x).max(axis=1, keepdims=True) / 127
    return float((np.abs(got - x) / (steps / 2)).max() - 1)


def collisions() -> float:
    """Return how many of 256 values within one step of ``int8`` do not share the code of the
    first."""
    x = torch.full((1, BLOCK), 127.0, dtype=torch.float64)
    x[0, 1:] = 0.4 * torch.linspace(0, 1, BLOCK - 1, dtype=torch.float64)
    coder = codec("int8")
    got = coder.decode(coder.encode(x))[0, 1:]
    return float((got != got[0]).sum())


def fp8_error() -> float:
    """Return the largest error of a plain cast to E4M3 of normal numbers, relative to half of the
    gap in equation 3, less 1."""
    x = np.random.default_rng(3).standard_normal(1 << 16)
    x = x[(np.abs(x) >= 2.0**-6) & (np.abs(x) <= LARGEST)]
    coder = codec("fp8(static=1.0)")
    got = coder.decode(coder.encode(torch.from_numpy(x))).numpy()
    gap = 2.0 ** (np.floor(np.log2(np.abs(x))) - 3)
    return float((np.abs(got - x) / (gap / 2)).max() - 1)


def code_values() -> float:
    """Return the deviation of the values of the codes of ``fp8`` from equation 4."""
    levels = e4m3_values()
    coder = codec("fp8(static=1.0)")
    wire_bytes = coder.encode_rows(torch.from_numpy(levels.copy()).unsqueeze(0))
    codes = wire_bytes.flatten()[: len(levels)].numpy()
    got = coder.decode_rows(wire_bytes, len(levels), torch.float64).numpy()[0, : len(levels)]
    return relative(got, levels) + float((codes != np.arange(len(levels))).sum())


EQUATIONS = (
    Equation("equation 1", "an error of int8 is at most half a step", int8_error, ROUNDED),
    Equation(
        "equation 2",
        "values within a step of int8 share a code: how many do not",
        collisions,
        0.0,
    ),
    Equation("equation 3", "an error of fp8 is at most half of a gap", fp8_error, ROUNDED),
    Equation("equation 4", "what the codes of fp8 stand for", code_values, 0.0),
    Equation(
        "equation 5",
        "blocks follow one another: a block alone gives what it gives among others",
        lambda: relative(
            np.concatenate([_alone(block) for block in gradients()[:16]]), decoded()[:16]
        ),
        0.0,
    ),
    Equation(
        "equation 6",
        "the root mean square of a block",
        lambda: relative(sent_sigma() / sigma(gradients()), np.ones(len(gradients()))),
        ROUNDED,
    ),
    Equation(
        "equation 7",
        "the factor that rescales a block",
        lambda: relative(1 / sent_sigma() / alpha(gradients()), np.ones(len(gradients()))),
        ROUNDED,
    ),
    Equation(
        "equation 8",
        "the rescaled block, rotated",
        lambda: relative(transformed(), rotated(gradients())),
        ROUNDED,
    ),
    Equation(
        "equation 9",
        "the scale of the peak",
        lambda: relative(wire()[2] / peak_scale(gradients()), np.ones(len(gradients()))),
        ROUNDED,
    ),
    Equation("equation 10", "the codes", lambda: relative(wire()[0], quantised(gradients())), 0.0),
    Equation(
        "equation 11",
        "codes times the scale of the peak",
        lambda: relative(wire()[0] * wire()[2][:, None], reconstructed(gradients())[0]),
        ROUNDED,
    ),
    Equation(
        "equation 12",
        "rotated back",
        lambda: relative(rotated_back(), reconstructed(gradients())[1]),
        ROUNDED,
    ),
    Equation(
        "equation 13",
        "the block that is received",
        lambda: relative(
            decoded() / sigma(gradients())[:, None],
            reconstructed(gradients())[2] / sigma(gradients())[:, None],
        ),
        ROUNDED,
    ),
)


def _alone(block: Values) -> Values:
    coder = codec("taco")
    x = torch.from_numpy(block.reshape(1, -1).copy())
    return coder.decode(coder.encode(x)).numpy()
