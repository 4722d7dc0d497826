"""Data, sharded-data and pipeline parallelism: every collective of a training run under one policy.

``replicate`` and ``shard`` put the exchange of gradients and parameters into the compiled graph.
``compress_fsdp`` and ``compress_ddp`` are eager integrations, for exchanges that never reach a
graph. ``compress_pipeline`` compresses the messages between pipeline stages.
``compress_outer`` compresses the outer steps of local-update methods (LocalSGD, DiLoCo).
"""

from commpass.distributed.integration import Integration
from commpass.parallel.ddp import compress_ddp
from commpass.parallel.fsdp import compress_fsdp
from commpass.parallel.in_graph import (
    InGraph,
    accumulate,
    distributed_parameters,
    drop_accumulated,
    replicate,
    shard,
)
from commpass.parallel.outer import compress_outer
from commpass.parallel.pipeline import compress_pipeline
from commpass.parallel.ssfusion import SSFusion, ssfusion

__all__ = [
    "InGraph",
    "Integration",
    "SSFusion",
    "accumulate",
    "compress_ddp",
    "compress_fsdp",
    "compress_outer",
    "compress_pipeline",
    "distributed_parameters",
    "drop_accumulated",
    "replicate",
    "shard",
    "ssfusion",
]
