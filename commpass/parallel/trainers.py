"""What the integrations with trainers share.

A trainer wraps the model itself, and writes checkpoints itself. These functions compress what the
wrapped model sends, and put error feedback into the trainer's checkpoints.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from commpass.backend import backend
from commpass.distributed.integration import Integration
from commpass.distributed.state import state_dict
from commpass.errors import ParallelError, PolicyError, nearest
from commpass.parallel.ddp import compress_ddp
from commpass.parallel.fsdp import compress_fsdp

log = logging.getLogger("commpass")

OPTIONS = ("policy", "profile", "strict", "dump", "timeout")
"""The arguments that compress_ddp and compress_fsdp both have."""
ONE_RANK = "%s: this job has one rank, which sends nothing: the model is left as it is"
NOT_EVERYWHERE = (
    "{}: the folder {} is there on rank{} {}, and not on the others: error feedback is loaded from"
    " a folder that all ranks can read"
)


def checked_options(call: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call.

    Raise PolicyError for an unknown option, policy or profile, before there is a model.
    """
    for name in options:
        if name not in OPTIONS:
            raise PolicyError(f"{call} has no option {name!r}{nearest(name, OPTIONS)}")
    backend(**options)
    return {"policy": "lossless", **options}


def compress_wrapped(call: str, model: nn.Module, options: Mapping[str, Any]) -> Integration | None:
    """Compress what a model of DDP or FSDP2 sends.

    Return the integration, or None in a job of one rank. Raise PolicyError for any other model.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        log.info(ONE_RANK, call)
        return None
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return compress_fsdp(model, **options)
    return compress_ddp(model, **options)


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the error feedback of all ranks on the first rank, on its CPU; nothing on the others.

    All ranks call this function. The state of one rank has up to the size of the gradients.
    """
    own = state_dict(model)
    listed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        listed, [(key, x.shape, x.dtype, x.device.type) for key, x in own.items()]
    )
    me, found = dist.get_rank(), {}
    for rank, entries in enumerate(listed):
        for key, shape, dtype, device in entries:
            if rank == me == 0:
                found[key] = own[key].cpu().clone()
            elif rank == me:
                dist.send(own[key].contiguous(), 0)
            elif me == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, rank)
                found[key] = received.cpu()
    return found


def save_state(integration: Integration, folder: Path) -> None:
    """Write the error feedback of all ranks to a folder, if there is any. All ranks call this.

    If there is none, a folder of an earlier checkpoint at the same place is removed.
    """
    state = integration.state_dict()
    found = _of_all_ranks((bool(state), (folder / ".metadata").is_file()))
    if any(has_state for has_state, _ in found):
        dcp.save({"commpass": state}, checkpoint_id=folder)
    elif any(is_old for _, is_old in found):
        shutil.rmtree(folder, ignore_errors=True)  # each host may have its own
        dist.barrier()


def load_state(call: str, integration: Integration, folder: Path) -> None:
    """Load the error feedback of ``save_state``; drop the current one if there was none.

    All ranks call this, and their number may have changed. Raise ParallelError if some ranks cannot
    read the folder.
    """
    found = _of_all_ranks(folder.is_dir())
    ranks = [rank for rank, has in enumerate(found) if has]
    if not ranks:
        integration.load_state_dict({})
        return
    if len(ranks) < len(found):
        plural = "s" if len(ranks) > 1 else ""
        raise ParallelError(NOT_EVERYWHERE.format(call, folder, plural, ", ".join(map(str, ranks))))
    state = state_dict(of=folder)
    dcp.load({"commpass": state}, checkpoint_id=folder)
    integration.load_state_dict(state)


def log_summary(integration: Integration | None) -> None:
    """Log what was sent, on the first rank."""
    if integration is not None and dist.get_rank() == 0:
        log.info("%s", integration)


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
