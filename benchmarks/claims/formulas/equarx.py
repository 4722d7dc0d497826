"""EQuARX: scales by the lanes of a register (section III.B), and the full loop and semi-loop of a
ring (section III.C).

The available text has no numbered equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from benchmarks.claims.formulas.equation import Equation, Values, relative
from commpass.codecs import codec
from commpass.collectives import Payload, Request, read_stages

LANES, LARGEST = 8 * 128, 127
RANKS = 4


# --- the formulas ---------------------------------------------------------------------------------


def scales(shard: Values) -> Values:
    """Section III.B: return the scales of a flat shard whose length is a multiple of 1,024.

    A scale is the largest magnitude at each of the 8 x 128 places of its chunks, over 127.
    """
    return np.abs(shard.reshape(-1, LANES)).max(axis=0) / LARGEST


def coded(shard: Values) -> Values:
    """Return a shard as its receiver decodes it."""
    by = scales(shard)
    return (np.rint(shard.reshape(-1, LANES) / by) * by).reshape(-1)


def ring(ranks: Sequence[Values], coded_stages: str = "both") -> Values:
    """Section III.C, full loop: reduce-scatter and all-gather on a ring.

    The shard that rank s ends with starts at rank s + 1, and each rank in turn adds its own. Then
    it is gathered. Values are coded at each hop of the coded stages.
    """
    shards = [each.reshape(len(ranks), -1) for each in ranks]
    found = []
    for owner in range(len(ranks)):
        total = shards[(owner + 1) % len(ranks)][owner]
        for step in range(2, len(ranks) + 1):
            sent = total if coded_stages == "ag" else coded(total)
            total = sent + shards[(owner + step) % len(ranks)][owner]
        found.append(total if coded_stages == "rs" else coded(total))
    return np.stack(found).reshape(ranks[0].shape)


def hops(ranks: int, form: str) -> int:
    """Section III.C: return the steps of a reduce-scatter."""
    return ranks - 1 if form == "ring" else ranks // 2


def stage_bytes(ranks: int, nbytes: float) -> float:
    """Section III.C: return the least that a rank sends of ``nbytes`` in one stage.

    Divided by twice the rate of one direction, it is the lower bound of the stage's time.
    """
    return (ranks - 1) / ranks * nbytes


# --- commpass -------------------------------------------------------------------------------------


@cache
def shard() -> Values:
    made = np.random.default_rng(4)
    return (made.standard_normal((32, LANES)) * made.lognormal(0, 1, LANES)).reshape(-1)


def scale_deviation() -> float:
    _, sent = codec("equarx").encode_pieces(torch.from_numpy(shard()).reshape(1, -1))
    return relative(sent.flatten()[:LANES].numpy() / scales(shard()), np.ones(LANES))


def code_deviation() -> float:
    coder = codec("equarx")
    got = coder.decode(coder.encode(torch.from_numpy(shard()))).numpy()
    by = np.tile(scales(shard()), len(shard()) // LANES)
    return relative(got / by, coded(shard()) / by)


def exchanges(form: str, ranks: int) -> list[int]:
    """Return the bytes of float32 that leave rank 0 in each exchange of a reduce_scatter without a
    codec."""
    payload = Payload(ranks * LANES * 16, 1, torch.float32)
    found = read_stages("reduce_scatter", form, "raw", payload, Request("0", ranks, 0))
    return [stage.leaving for stage in found if stage.role == "exchange"]


def hop_deviation(form: str) -> float:
    """Return the error of the number of exchanges, on 2 to 16 ranks."""
    return float(
        sum(abs(len(exchanges(form, ranks)) - hops(ranks, form)) for ranks in (2, 4, 8, 16))
    )


def byte_deviation(form: str) -> float:
    expected = [stage_bytes(ranks, ranks * LANES * 16 * 4) for ranks in (2, 4, 8, 16)]
    return relative([sum(exchanges(form, ranks)) for ranks in (2, 4, 8, 16)], expected)


EQUATIONS = (
    Equation("section III.B", "the scales of 8 x 128 places of a shard", scale_deviation, 1e-14),
    Equation("section III.B", "8-bit integers by these scales", code_deviation, 1e-12),
    Equation(
        "section III.C",
        "N - 1 steps of a full loop: how many are too many or too few",
        lambda: hop_deviation("ring"),
        0.0,
    ),
    Equation(
        "section III.C",
        "N / 2 steps of a semi-loop: how many are too many or too few",
        lambda: hop_deviation("semi_ring"),
        0.0,
    ),
    Equation(
        "section III.C",
        "a full loop's stage sends (N - 1) / N of the tensor",
        lambda: byte_deviation("ring"),
        0.0,
    ),
)
