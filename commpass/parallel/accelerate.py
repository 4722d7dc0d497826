"""Accelerate: one line compresses what ranks send.

    from commpass.parallel.accelerate import compress

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compress(accelerator, model, "balanced")

It works with DDP, and with FSDP2 (``fsdp_version=2``).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from commpass.distributed.integration import Integration
from commpass.parallel.trainers import checked_options, compress_wrapped, load_state, save_state

CALL = "commpass.parallel.accelerate.compress"


@dataclass(frozen=True)
class _Compressed:
    """A compressed model of an accelerator, and the hooks of its checkpoints.

    ``number`` is that of its folder. ``prepared`` is the accelerator's own entry for the model,
    which is the one inside of DDP's; None if it has none.
    """

    number: int
    integration: Integration
    prepared: weakref.ref[nn.Module] | None
    hooks: list[Any]

    def is_dropped(self, accelerator: Accelerator) -> bool:
        """Whether it is closed, or ``free_memory`` has dropped its model: the same on all ranks."""
        if self.integration.closed or self.prepared is None:
            return self.integration.closed
        model = self.prepared()
        return all(each is not model for each in accelerator._models)


_compressed: WeakKeyDictionary[Accelerator, list[_Compressed]] = WeakKeyDictionary()
"""The compressed models of an accelerator: each has a folder of its own."""


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
    kept = _trained(accelerator)
    number = next(each for each in count() if all(other.number != each for other in kept))
    made, name = integration, f"commpass_{number}" if number else "commpass"
    hooks: list[Any] = []
    one = _Compressed(number, made, _entry(accelerator, model), hooks)

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        save_state(made, Path(output_dir) / name)

    def load(models: list[nn.Module], input_dir: str) -> None:
        load_state(CALL, made, Path(input_dir) / name)

    hooks.append(accelerator.register_save_state_pre_hook(save))
    hooks.append(accelerator.register_load_state_pre_hook(load))
    _compressed[accelerator] = [*kept, one]
    return integration


def _entry(accelerator: Accelerator, model: nn.Module) -> weakref.ref[nn.Module] | None:
    """Return the accelerator's entry that has the parameters of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    for each in accelerator._models:
        if any(id(parameter) in own for parameter in each.parameters()):
            return weakref.ref(each)
    return None


def _trained(accelerator: Accelerator) -> list[_Compressed]:
    """Return the compressed models that are still trained, and remove the hooks of the others.

    So a model after ``free_memory`` has the folder that the only model of a new process reads.
    """
    kept = []
    for each in _compressed.get(accelerator, []):
        if not each.is_dropped(accelerator):
            kept.append(each)
            continue
        for hook in each.hooks:
            hook.remove()
    return kept
