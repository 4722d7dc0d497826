"""The algorithms that carry out a collective with a codec, and the collectives to call by hand."""

from commpass.collectives.algorithms import (
    ALGORITHM_NAMES,
    REDUCE_OPS,
    Algorithm,
    Work,
    algorithm_named,
    algorithms_of,
)
from commpass.collectives.exchange import UNROLLED_RANKS
from commpass.collectives.public import all_gather, all_reduce, reduce_scatter

__all__ = [
    "ALGORITHM_NAMES",
    "REDUCE_OPS",
    "UNROLLED_RANKS",
    "Algorithm",
    "Work",
    "algorithm_named",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
]  # fmt: skip
