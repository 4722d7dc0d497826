"""The ways in which ``data_parallel`` trains one model: how each wraps it.

Ways with hooks (DDP's, FSDP2's) compile each block separately with Inductor, as training loops with
such hooks do: hooks run between blocks, outside compiled graphs. Ways ``in graph`` compile the
whole model, so that exchanges are in its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpass.parallel

from .shared import Allowed, compiled, forced

BUCKET_MB = 4  # small enough that some buckets are sent while others are computed
DEFAULT_MB = 25  # DDP's default
ONE_BUCKET_MB = 1024
INT8 = forced("int8")
TOPK = commpass.Policy(
    name="topk",
    rules=[
        commpass.Rule(
            codec="topk(density=0.01)", direction="backward", min_bytes=1 << 16, force=True
        )
    ],
)
"""One value in a hundred of each matrix; error feedback adds what is not sent to later steps."""
GRAPH = "graph-alone"
Forward = Callable[[Tensor], Tensor]
"""Maps a batch to the loss."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    ``make`` wraps a new model for a mesh and links of a profile. ``alone`` is the way that computes
    the same and sends nothing: what a step takes beyond it is exposed.
    """

    make: Callable[[nn.Module, DeviceMesh, str], Forward]
    alone: str = "compute"


def block_by_block(net: nn.Module) -> None:
    for block in net.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)


def ddp(net: nn.Module, mesh: DeviceMesh, bucket: float = BUCKET_MB) -> DistributedDataParallel:
    block_by_block(net)
    return DistributedDataParallel(net, process_group=dist.new_group(), bucket_cap_mb=bucket)


def alone(net: nn.Module, mesh: DeviceMesh, profile: str) -> Forward:
    model = ddp(net, mesh)

    def forward(batch: Tensor) -> Tensor:
        with model.no_sync():
            return model(batch)

    return forward


def plain(net: nn.Module, mesh: DeviceMesh, profile: str, bucket: float = BUCKET_MB) -> Forward:
    return ddp(net, mesh, bucket)


def fp16(net: nn.Module, mesh: DeviceMesh, profile: str) -> Forward:
    model = ddp(net, mesh)
    model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)
    return model


def power(net: nn.Module, mesh: DeviceMesh, profile: str, rank: int, start: int = 2) -> Forward:
    """Return DDP of one bucket with PowerSGD, with its error feedback and a warm start.

    It starts with the third step, the earliest possible. The hook waits within the callbacks of
    gloo's two workers, where two buckets would deadlock.
    """
    model = ddp(net, mesh, ONE_BUCKET_MB)
    state = power_sgd.PowerSGDState(model.process_group, rank, start_powerSGD_iter=start)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return model


def compress_ddp(net: nn.Module, mesh: DeviceMesh, profile: str, policy: Allowed) -> Forward:
    model = ddp(net, mesh)
    commpass.parallel.compress_ddp(model, policy, profile=profile)
    return model


def ssfusion(net: nn.Module, mesh: DeviceMesh, profile: str, force: bool = False) -> Forward:
    """Return SSFusion at its density of 1 %; ``force``: sparse even where dense is predicted to be
    as fast."""
    block_by_block(net)
    commpass.parallel.ssfusion(net, profile=profile, group=dist.new_group(), force=force)
    return net


def fsdp(
    net: nn.Module, mesh: DeviceMesh, profile: str, policy: Allowed = None, keeps: bool = False
) -> Forward:
    """Return FSDP2; with ``keeps``, parameters gathered in forward are kept for backward (ZeRO-2),
    so that they are gathered once per step."""
    block_by_block(net)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    fully_shard(net, mesh=mesh, reshard_after_forward=not keeps)
    if policy is not None:
        commpass.parallel.compress_fsdp(net, policy, profile=profile)
    return net


def in_graph(
    net: nn.Module, mesh: DeviceMesh, profile: str, how: str | None, policy: Allowed = None
) -> Forward:
    if how is not None:
        getattr(commpass.parallel, how)(net, mesh)
    return compiled(net, policy, profile)


WAYS = {
    "ddp": Way(plain),
    "compute": Way(alone),
    "ddp-25mb": Way(partial(plain, bucket=DEFAULT_MB)),
    "fp16": Way(fp16),
    "powersgd-1": Way(partial(power, rank=1)),
    "powersgd-4": Way(partial(power, rank=4)),
    "powersgd-32": Way(partial(power, rank=32)),
    "int8": Way(partial(compress_ddp, policy=INT8)),
    "balanced": Way(partial(compress_ddp, policy="balanced")),
    "aggressive": Way(partial(compress_ddp, policy="aggressive")),
    "sdp4bit": Way(partial(compress_ddp, policy="sdp4bit")),
    "ssfusion": Way(ssfusion),
    "ssfusion-forced": Way(partial(ssfusion, force=True)),
    "fsdp": Way(fsdp),
    "fsdp-balanced": Way(partial(fsdp, policy="balanced")),
    "fsdp-kept": Way(partial(fsdp, keeps=True)),
    "fsdp-kept-balanced": Way(partial(fsdp, policy="balanced", keeps=True)),
    "fsdp-kept-sdp4bit": Way(partial(fsdp, policy="sdp4bit", keeps=True)),
    "fsdp-kept-3d": Way(partial(fsdp, policy="balanced-3d", keeps=True)),
    "graph-alone": Way(partial(in_graph, how=None), GRAPH),
    "graph": Way(partial(in_graph, how="replicate"), GRAPH),
    "graph-lossless": Way(partial(in_graph, how="replicate", policy="lossless"), GRAPH),
    "graph-balanced": Way(partial(in_graph, how="replicate", policy="balanced"), GRAPH),
    "graph-aggressive": Way(partial(in_graph, how="replicate", policy="aggressive"), GRAPH),
    "graph-topk": Way(partial(in_graph, how="replicate", policy=TOPK), GRAPH),
    "shard": Way(partial(in_graph, how="shard"), GRAPH),
    "shard-balanced": Way(partial(in_graph, how="shard", policy="balanced"), GRAPH),
}
"""All are compared with the first."""
