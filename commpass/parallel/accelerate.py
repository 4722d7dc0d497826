"""Accelerate: one line compresses what ranks send.

    from commpass.parallel.accelerate import compress

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compress(accelerator, model, "balanced")

It works with DDP, and with FSDP2 (``fsdp_version=2``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from commpass.distributed.integration import Integration
from commpass.parallel.trainers import checked_options, compress_wrapped, load_state, save_state

CALL = "commpass.parallel.accelerate.compress"
_models: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""How many models of an accelerator are compressed: each has a folder of its own."""


def compress(
    accelerator: Accelerator, model: nn.Module, policy: Any = "lossless", **options: Any
) -> Integration | None:
    """Compress what a prepared model sends, under a policy.

    Call it on all ranks, after ``accelerator.prepare`` and before the first backward. Return the
    integration of ``compress_ddp`` or ``compress_fsdp``, or None in a job of one rank. From now on
    ``accelerator.save_state`` and ``load_state`` also save and load error feedback.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: what ``accelerator.prepare`` returned: a model of DDP or FSDP2.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        **options: ``profile``, ``strict``, ``dump`` and ``timeout`` of ``compress_ddp`` and
            ``compress_fsdp``.

    Raise PolicyError for an unknown option, policy or profile, and for a model that is not DDP's or
    FSDP2's.
    """
    given = checked_options(CALL, {"policy": policy, **options})
    integration = compress_wrapped(CALL, model, given)
    if integration is None:
        return None
    made, number = integration, _models.get(accelerator, 0)
    _models[accelerator] = number + 1
    name = f"commpass_{number}" if number else "commpass"

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        save_state(made, Path(output_dir) / name)

    def load(models: list[nn.Module], input_dir: str) -> None:
        load_state(CALL, made, Path(input_dir) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return integration
