"""The algorithms that carry out a collective with a codec, and the collectives to call by hand."""

from commpass.codecs.operators import UNROLLED_RANKS
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.handle import Handle
from commpass.collectives.public import all_gather, all_reduce, all_to_all, reduce_scatter
from commpass.collectives.reductions import MOST_CHUNKS
from commpass.collectives.request import Request
from commpass.collectives.stages import Payload, Stages, read_stages, record_stages
from commpass.collectives.steps import run
from commpass.collectives.table import (
    ALGORITHM_NAMES,
    DEFAULTS,
    REDUCE_OPS,
    algorithm,
    algorithms_of,
    check_name,
    divides,
    own,
    whole,
)

__all__ = [
    "ALGORITHM_NAMES",
    "DEFAULTS",
    "MOST_CHUNKS",
    "REDUCE_OPS",
    "UNROLLED_RANKS",
    "Algorithm",
    "Handle",
    "Payload",
    "Request",
    "Stages",
    "algorithm",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "check_name",
    "divides",
    "own",
    "read_stages",
    "record_stages",
    "reduce_scatter",
    "run",
    "whole",
]
