"""Data, sharded-data and pipeline parallelism: every collective of a training run under one policy.

In the graph: ``replicate`` and ``shard`` put the exchange of gradients and parameters into the
compiled graph. Eager doors, for exchanges that never reach a graph: ``compress_fsdp`` and
``compress_ddp``. Stages: ``pipeline``.
"""

from commpass.parallel.in_graph.accumulation import accumulate, drop_accumulated
from commpass.parallel.in_graph.model import replicate, shard
from commpass.parallel.in_graph.reading import distributed_parameters

__all__ = ["accumulate", "distributed_parameters", "drop_accumulated", "replicate", "shard"]
