"""SSFusion: times of exchanges (equations 1, 3 and 4), what is sent whole (equation 2), and where a
buffer is separated (section IV.D)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.claims.formulas.equation import Equation, relative
from commpass.costmodel import Link
from commpass.costmodel.buffers import Problem, cut_off, excluded
from commpass.parallel.ssfusion.plan import Gradient, Sent

CASES = 200
SIZES = (1e3, 1e5, 1e7, 1e9)
WORKERS = (2, 8, 64)


# --- the formulas ---------------------------------------------------------------------------------


def message_us(alpha: float, beta: float, size: float) -> float:
    """Equation 1."""
    return alpha + beta * size


def all_gather_us(ranks: int, alpha: float, beta: float, size: float) -> float:
    """Equation 3."""
    return (ranks - 1) * alpha + (ranks - 1) * size * beta


def all_reduce_us(ranks: int, alpha: float, beta: float, size: float) -> float:
    """Equation 4."""
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size * beta


def sent_whole(
    before_us: float, backward_us: Sequence[float], select_us: Sequence[float], sizes: Sequence[int]
) -> list[int]:
    """Equation 2: return the smallest tensors of a buffer, in order, until its computation is no
    longer than the communication of the buffer before."""
    whole: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda n: (sizes[n], n)):
        computed = sum(backward_us) + sum(
            us for each, us in enumerate(select_us) if each not in whole
        )
        if before_us >= computed:
            break
        whole.append(number)
    return whole


def separated_us(cut: int, busy_us: Sequence[float], reduce_us: float, gather_us: float) -> float:
    """Section IV.D: return T1 + T2 of a buffer that is cut after some tensors."""
    return sum(busy_us[:cut]) + max(reduce_us, sum(busy_us[cut:])) + gather_us


# --- commpass -------------------------------------------------------------------------------------

ALPHA, GBYTES = 30.0, 12.5
LINK, BETA = Link(ALPHA, GBYTES), 1 / (GBYTES * 1e3)


def times(kind: str, formula, workers: Sequence[int]) -> float:
    pairs = [(ranks, size) for ranks in workers for size in SIZES]
    got = [LINK.time_us(kind, size, ranks) for ranks, size in pairs]
    expected = [formula(ranks, ALPHA, BETA, size) for ranks, size in pairs]
    return relative(np.array(got) / expected, np.ones(len(pairs)))


def row_bytes(entries: int, density: float) -> int:
    return 16 + 6 * math.ceil(density * entries)


def gradients(made: np.random.Generator, many: int) -> list[Gradient]:
    return [
        Gradient(
            f"weight {number}",
            int(made.integers(1, 1 << 20)),
            backward_us=float(made.integers(1, 500)),
            select_us=float(made.integers(1, 500)),
        )
        for number in range(many)
    ]


def exclusion() -> float:
    """Return how many choices of ``excluded`` differ from equation 2.

    Bytes take no time here: otherwise commpass stops earlier, where sending a tensor whole would
    end the step later.
    """
    made, off = np.random.default_rng(6), 0
    for _ in range(CASES):
        some = gradients(made, 8)
        link = Link(float(made.integers(1, 400)), 1e12)
        problem = Problem(some, 4, link, row_bytes, 0.01)
        got = set(excluded(problem, [range(4), range(4, 8)], frozenset()))
        second = some[4:]
        expected = sent_whole(
            all_gather_us(4, link.alpha_us, 0.0, 0.0),
            [each.backward_us for each in second],
            [each.select_us for each in second],
            [each.entries for each in second],
        )
        off += len(got ^ {4 + number for number in expected})
    return float(off)


def separation() -> float:
    """Return by how much T1 + T2 of the chosen cut exceeds that of the best one, found by trying
    all."""
    made, found = np.random.default_rng(7), []
    for _ in range(CASES):
        some = gradients(made, 6)
        dense = {number for number in range(6) if made.random() < 0.5}
        sent = [Sent(number, 1.0 if number in dense else 0.01) for number in range(6)]
        problem = Problem(some, 8, LINK, row_bytes, 0.01)
        busy = [
            each.backward_us + (0.0 if number in dense else each.select_us)
            for number, each in enumerate(some)
        ]

        def total_us(cut: int, some=some, dense=dense, busy=busy) -> float:
            reduced = sum(some[number].nbytes for number in range(cut) if number in dense)
            gathered = sum(
                some[number].nbytes if number in dense else row_bytes(some[number].entries, 0.01)
                for number in range(6)
                if number not in dense or number >= cut
            )
            reduce = all_reduce_us(8, ALPHA, BETA, reduced) if reduced else 0.0
            gather = all_gather_us(8, ALPHA, BETA, gathered) if gathered else 0.0
            return separated_us(cut, busy, reduce, gather)

        best = min(map(total_us, range(7)))
        found.append(total_us(cut_off(problem, sent)) / best - 1)
    return max(found)


EQUATIONS = (
    Equation(
        "equation 1",
        "the time of one message",
        lambda: times("send", lambda ranks, a, b, size: message_us(a, b, size), (2,)),
        1e-14,
    ),
    Equation(
        "equation 2",
        f"what is sent whole, in {CASES} pairs of buffers: how many tensors differ",
        exclusion,
        0.0,
        "where bytes take no time; else commpass stops before sending more ends later",
    ),
    Equation(
        "equation 3",
        "the time of an all_gather",
        lambda: times("all_gather", all_gather_us, WORKERS),
        1e-14,
    ),
    Equation(
        "equation 4",
        "the time of an all_reduce",
        lambda: times("all_reduce", all_reduce_us, WORKERS),
        1e-14,
    ),
    Equation(
        "section IV.D",
        f"T1 + T2 of the cut, against the best of all, in {CASES} buffers",
        separation,
        1e-12,
    ),
)
