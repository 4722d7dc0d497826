"""The times and bytes of every algorithm, computed a second time from their formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from deciding import COMPRESSIBLE, ITEM, KERNELS, MOST_HOPS, SHARED_OUT, forced, one, profile, site

from commpass.collectives import (
    DEFAULTS,
)
from commpass.costmodel import (
    Link,
)


def exchange_us(
    kind: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    gbytes: float,
    factor: float = 1.0,
    peers: int | None = None,
) -> float:
    """alpha-beta: ``messages * alpha + bytes sent / bandwidth``; 1 GB/s are 1000 bytes per
    microsecond.

    With ``peers``, a rank sends one message to each of those and to no other rank.
    """
    beta = factor / (gbytes * 1000)
    p = ranks
    if peers is not None:
        return peers * alpha + nbytes * beta
    return {
        "all_reduce": 2 * (p - 1) * alpha + 2 * (p - 1) / p * nbytes * beta,
        "all_gather": (p - 1) * (alpha + nbytes * beta),
        "reduce_scatter": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
        "all_to_all": (p - 1) * alpha + (p - 1) / p * nbytes * beta,
        "broadcast": (p - 1) * alpha + nbytes * beta,
    }[kind]


def wire_bytes(numel: int, block: int, bits: int, scale: int) -> int:
    """Codes of whole blocks, then a scale per block, each padded to a multiple of 128 bytes."""
    blocks = math.ceil(numel / block)
    return math.ceil(blocks * block * bits / 8 / 128) * 128 + math.ceil(blocks * scale / 128) * 128


def parameters(spec: str) -> tuple[str, dict[str, str]]:
    name, _, inside = spec.rstrip(")").partition("(")
    return name, dict(part.split("=") for part in inside.split(", ") if part)


def work(spec: str, kind: str, numel: int, ranks: int, block: int, bits: int, dtype: str):
    """Return the work of one rank: (exchanges, values encoded, values decoded, kernels).

    Exchanges are (kind, bytes passed to the collective, bytes that leave, peers). The codec has no
    scales and codes nothing if ``bits`` is 0. If ``peers`` is None, the bytes that leave follow the
    plain collective's formula.
    """
    wide, plain = 8 if dtype == "float64" else 4, ITEM[dtype]  # wide: a scale, and a partial sum
    name, given = parameters(spec)
    stage, shards, node = given.get("stage"), int(given.get("shards", 1)), int(given.get("node", 1))

    def whole(values: int) -> int:
        return math.ceil(values / (block * shards)) * block * shards

    def sizes(values: int, item: int) -> list[int]:
        """Return the bytes of a row in each exchange: one, or its shards' scales together and then
        the codes of each."""
        if item:
            return [math.ceil(values / shards) * item] * shards
        if shards == 1:
            return [wire_bytes(values, block, bits, wide)]
        of_one = whole(values) // shards
        codes = wire_bytes(of_one, block, bits, 0)
        return [shards * (wire_bytes(of_one, block, bits, wide) - codes), *[codes] * shards]

    # (kind, rows, values of each, rows for other ranks if only some get one, bytes per value if not
    # coded, rows that arrive)
    if kind in ("all_gather", "broadcast"):
        hops = [(kind, 1, numel, None, 0 if bits else plain, ranks if kind == "all_gather" else 1)]
    elif kind == "all_to_all":
        hops = [(kind, ranks, numel // ranks, None, 0 if bits else plain, ranks)]
    elif name == "one_shot":
        hops = [("all_gather", 1, whole(numel), None, 0 if bits else plain, ranks)]
    else:
        shard, nodes = whole(math.ceil(numel / ranks)), ranks // node
        scattered = {  # (rows, values of each, rows for other ranks)
            "two_shot": [(ranks, shard, None)],
            "direct": [(ranks, shard, None)],
            "ring": [(1, shard, 1)] * (ranks - 1),
            "semi_ring": [(2, shard, 2)] * ((ranks - 1) // 2) + [(1, shard, 1)] * (1 - ranks % 2),
            "hierarchical": [
                (node, nodes * shard, node - 1),
                (nodes, shard, nodes - 1),
            ],  # one stays here
        }[name]
        sums = (
            plain if name in ("two_shot", "direct") else wide
        )  # partial sums are not rounded, values are as they came
        item = sums if stage == "ag" or not bits else 0
        hops = [("all_to_all", rows, values, away, item, rows) for rows, values, away in scattered]
        if kind == "all_reduce":
            hops.append(
                ("all_gather", 1, shard, None, plain if stage == "rs" or not bits else 0, ranks)
            )
    exchanges = [
        (kind, rows * size, rows * size if away is None else away * size, away)
        for kind, rows, values, away, item, _ in hops
        for size in sizes(values, item)
    ]
    coded = [  # in whole blocks
        (rows * whole(values), arriving * whole(values))
        for _, rows, values, _, item, arriving in hops
        if not item
    ]
    encoded, decoded = (sum(pair[side] for pair in coded) for side in (0, 1))
    return (
        exchanges,
        encoded,
        decoded,
        2 * shards * len(coded),
    )  # a separate kernel encodes and decodes each shard


STAGES = ("", "stage=ag", "stage=rs")


SPECS = {
    "all_reduce": [
        "one_shot",
        *(
            f"{name}({stage})" if stage else name
            for name in ("two_shot", "ring", "semi_ring")
            for stage in STAGES
        ),
        *(f"hierarchical(node=4{', ' * bool(stage)}{stage})" for stage in STAGES),
        "hierarchical(node=2)",
    ],
    "reduce_scatter": [
        "direct",
        "ring",
        "semi_ring",
        "hierarchical(node=4)",
        "hierarchical(node=2)",
    ],
    "all_gather": ["direct"],
    "all_to_all": ["direct"],
    "broadcast": ["direct"],
}
"""Every algorithm and stage."""


SHARDED = {
    "all_reduce": [
        "one_shot(shards=2)",
        "two_shot(shards=4)",
        "two_shot(shards=3, stage=ag)",
        "two_shot(shards=2, stage=rs)",
        "ring(shards=2)",
        "semi_ring(shards=2, stage=ag)",
        "hierarchical(node=4, shards=2)",
    ],
    "reduce_scatter": ["direct(shards=2)", "semi_ring(shards=3)", "hierarchical(node=2, shards=2)"],
    "all_gather": ["direct(shards=2)"],
    "all_to_all": ["direct(shards=3)"],
    "broadcast": ["direct(shards=64)"],
}


def ring_hops(spec: str, ranks: int) -> int:
    """A ring passes each of the others; in both directions at once, the farther half."""
    return {"ring": ranks - 1, "semi_ring": ranks // 2}.get(parameters(spec)[0], 0)


def fits(spec: str, ranks: int) -> bool:
    node = int(parameters(spec)[1].get("node", 1))
    return ring_hops(spec, ranks) <= MOST_HOPS and (
        node == 1 or (ranks % node == 0 and ranks > node)
    )


CASES = [(kind, spec) for kind, specs in SPECS.items() for spec in specs]


def taken_us(size: int, kind: str, to: Any, ranks: int, gbytes: float, factors: dict) -> float:
    """Return the time for which an exchange occupies the link."""
    return exchange_us(kind, size, ranks, 0.0, gbytes, factors.get(kind, 1.0), to)


def check_formulas(kind: str, spec: str, ranks: int, dtype: str) -> None:
    alpha, gbytes = 7.0, 1.25
    factors = {"reduce_scatter": 2.0, "all_to_all": 1.5}
    a_profile = profile(Link(alpha, gbytes, factors))
    codecs = [("int8", 256, 8), ("int4(block=64)", 64, 4), ("raw", 1, 0)]
    for (codec, block, bits), per_rank in itertools.product(codecs, [1, 300, 40_000]):
        numel = per_rank * ranks
        planned = one(site(kind, numel, ranks, dtype), forced(codec, spec), a_profile)
        exchanges, encoded, decoded, kernels = work(spec, kind, numel, ranks, block, bits, dtype)
        rate = KERNELS.rates.get(codec.partition("(")[0], KERNELS.other)
        expected = sum(
            exchange_us(k, size, ranks, alpha, gbytes, factors.get(k, 1.0), to)
            for k, _, size, to in exchanges
        )
        expected += (
            kernels * KERNELS.launch_us
            + (encoded * rate.encode_ns + decoded * rate.decode_ns) / 1000
        )
        plain = exchange_us(kind, numel * ITEM[dtype], ranks, alpha, gbytes, factors.get(kind, 1.0))
        assert (planned.codec, planned.algorithm) == (codec, spec)
        if "shards=" in spec:  # coding may overlap with exchanges, but takes no less
            coded = kernels * KERNELS.launch_us
            coded += (encoded * rate.encode_ns + decoded * rate.decode_ns) / 1000
            least = max(
                coded,
                sum(taken_us(size, k, to, ranks, gbytes, factors) for k, _, size, to in exchanges),
            )
            assert least - 1e-3 <= planned.predicted_us <= expected + 1e-3
        else:
            assert planned.predicted_us == pytest.approx(expected, rel=1e-9, abs=1e-3)
        assert planned.plain_us == pytest.approx(plain, rel=1e-9, abs=1e-3)
        assert planned.wire_bytes == sum(size for _, size, _, _ in exchanges)
        assert planned.dynamic_bytes == 0
        assert planned.bytes == numel * ITEM[dtype]


RINGS = [
    (kind, spec)
    for kind in SHARED_OUT[:1] + COMPRESSIBLE[:1]
    for spec in SPECS[kind]
    if ring_hops(spec, 8)
]


LABELS = {"tp": 1.0, "tp_inner": 1.0, "dp": 2.0, "dp0": 3.0, "pp": 4.0, "": 4.0, "ep.1": 5.0}


def choices(kind: str) -> list[str]:
    """Return the choices for a kind if no algorithm is named."""
    return [spec for spec in DEFAULTS if spec in SPECS[kind]]
