"""Data parallelism inside the compiled graph.

Parameters of the model are gathered where they are read, and gradients are reduced there in
backward (as in SimpleFSDP, Zhang et al. 2024).
"""

from commpass.parallel.in_graph.accumulation import accumulate, drop_accumulated
from commpass.parallel.in_graph.integration import InGraph
from commpass.parallel.in_graph.model import replicate, shard
from commpass.parallel.in_graph.reading import distributed_parameters

__all__ = [
    "InGraph",
    "accumulate",
    "distributed_parameters",
    "drop_accumulated",
    "replicate",
    "shard",
]
