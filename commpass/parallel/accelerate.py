"""Accelerate: one line compresses what ranks send.

    from commpass.parallel.accelerate import compress

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compress(accelerator, model, "balanced")

It works with DDP, and with FSDP2 (``fsdp_version=2``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from commpass.distributed.integration import Integration
from commpass.parallel.ddp import CompressedDDP
from commpass.parallel.trainers import checked_options, compress_wrapped, load_state, save_state

CALL = "commpass.parallel.accelerate.compress"


def compress(
    accelerator: Accelerator, model: nn.Module, policy: Any = "lossless", **options: Any
) -> Integration | None:
    """Compress what a prepared model sends, under a policy.

    Call it on all ranks, after ``accelerator.prepare`` and before the first backward. The options
    are ``profile``, ``strict``, ``dump`` and ``timeout`` of ``compress_ddp`` and
    ``compress_fsdp``. Return what these return, or None in a job of one rank. From now on
    ``accelerator.save_state`` and ``load_state`` also save and load error feedback.

    Raise PolicyError for an unknown option, policy or profile, and for a model that is not DDP's or
    FSDP2's.
    """
    given = checked_options(CALL, {"policy": policy, **options})
    integration = compress_wrapped(CALL, model, given)
    if not isinstance(integration, CompressedDDP):  # FSDP2 keeps no error feedback
        return integration
    made = integration

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        save_state(made, _folder(models, model, output_dir))

    def load(models: list[nn.Module], input_dir: str) -> None:
        load_state(CALL, made, _folder(models, model, input_dir))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return integration


def _folder(models: list[nn.Module], model: nn.Module, checkpoint: str) -> Path:
    """Return the folder of a model's error feedback in a checkpoint."""
    number = next(number for number, each in enumerate(models) if each is model)
    return Path(checkpoint) / ("commpass" if number == 0 else f"commpass_{number}")
