"""What the calls of integrations refuse, in the same words for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commpass.errors import CommpassError, PolicyError

TORCH = "2.11 to 2.15"
"""The versions of torch whose private attributes are known."""


def wrong_argument(call: str, name: str, argument: object, needed: str) -> str:
    """Return the message about an argument of another type."""
    return f"{call}({name}={type(argument).__name__}): must be {needed}"


def refuse_other_torch(call: str, module: object, subject: str, names: Iterable[str]) -> None:
    """Raise CommpassError if an object of torch lacks attributes that an integration uses."""
    if missing := [name for name in names if not hasattr(module, name)]:
        raise CommpassError(
            f"{call} knows {subject} of torch {TORCH}; that of torch {torch.__version__} has no"
            f" {', '.join(missing)}"
        )


def refuse_other_group(call: str, subject: str, group: object, known: object, remedy: str) -> None:
    """Raise PolicyError if the process group is another one than when the integration was made."""
    if group is not known:
        raise PolicyError(
            f"{call}: {subject} was given another process group after {call}, but its exchanges"
            f" were planned for the ranks of the previous one: {remedy}"
        )


_RIGHT = (
    (DistributedDataParallel, "DistributedDataParallel", "compress_ddp"),
    (FSDPModule, "modules of fully_shard", "compress_fsdp"),
)
ALL = (
    ". Call commpass.parallel.compress_ddp(model, policy) after DistributedDataParallel(model),"
    " commpass.parallel.compress_fsdp(model, policy) after fully_shard(model), or"
    " commpass.parallel.shard(model, mesh) or replicate(model, mesh) for a compiled model"
)
"""What to call for a model without data parallelism."""
DEEPSPEED = (
    ", but is DeepSpeed's engine, which sends gradients itself and takes no comm hook. With"
    " ZeRO 0, give the engine a DistributedDataParallel model, compress that, and call"
    " engine.backward inside engine.no_sync(). Instead of ZeRO 1 to 3 use fully_shard and"
    " compress_fsdp"
)


def instead(model: object, call: str) -> str:
    """Return what to call, or to pass to ``call``, for a model that is not one of its models."""
    if any(kind.__module__.startswith("deepspeed.") for kind in type(model).__mro__):
        return DEEPSPEED
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for kind, noun, right in _RIGHT:
            if isinstance(module, kind):
                if right == call:
                    return f", and {path!r} in it is one: give that one"
                return f", but has {noun}: call commpass.parallel.{right}"
        if isinstance(module, FullyShardedDataParallel):
            return ", but has FSDP1's FullyShardedDataParallel: use fully_shard and compress_fsdp"
    return ALL
