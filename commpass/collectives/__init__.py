"""Algorithms that run a collective with a codec. Functions to call compressed collectives directly
are in ``public``."""

from commpass.codecs.operators import UNROLLED_RANKS
from commpass.collectives import public as public  # registers the operators
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.handle import Handle
from commpass.collectives.request import Request
from commpass.collectives.stages import Payload, Stages, read_stages, record_stages
from commpass.collectives.steps import MOST_CHUNKS, chunks_for, run
from commpass.collectives.table import (
    ALGORITHM_NAMES,
    DEFAULTS,
    REDUCE_OPS,
    algorithm,
    algorithms_of,
    check_name,
    find_algorithm,
    has_parameter,
    with_parameters,
    without_chunks,
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
    "check_name",
    "chunks_for",
    "find_algorithm",
    "has_parameter",
    "read_stages",
    "record_stages",
    "run",
    "with_parameters",
    "without_chunks",
]
