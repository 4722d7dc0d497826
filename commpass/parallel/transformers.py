"""transformers: one line compresses what the ranks of a ``Trainer`` send.

    from commpass.parallel.transformers import compress

    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    compress(trainer, "balanced")
    trainer.train()

It works with DDP, and with models that ``from_pretrained`` or Accelerate shards by FSDP2.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import TrainerControl
from transformers.training_args import TrainingArguments

from commpass.distributed.integration import Integration
from commpass.parallel.trainers import (
    checked_options,
    compress_wrapped,
    load_state,
    log_summary,
    save_state,
)

log = logging.getLogger("commpass")

CALL = "commpass.parallel.transformers.compress"
FOLDER = "commpass"
"""The part of a checkpoint that has error feedback."""
STATE_FILE = "trainer_state.json"
NOT_FOUND = (
    "%s: training continues at step %d of a checkpoint that is not in %s: error feedback of that"
    " checkpoint, if it has any, is not loaded. Give TrainingArguments(resume_from_checkpoint=...)"
    " the same folder as train()"
)


def compress(trainer: Trainer, policy: Any = "lossless", **options: Any) -> Compress:
    """Compress what the ranks of a trainer send, under a policy.

    Call it on all ranks, before ``train``. Return the callback that was added to the trainer.

    Args:
        trainer: a ``transformers.Trainer`` that has not trained.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        **options: ``profile``, ``strict``, ``dump`` and ``timeout`` of ``compress_ddp`` and
            ``compress_fsdp``.

    Raise PolicyError for an unknown option, policy or profile.
    """
    callback = Compress(trainer, checked_options(CALL, {"policy": policy, **options}))
    trainer.add_callback(callback)
    return callback


class Compress(TrainerCallback):
    """The callback of ``compress``.

    ``integration`` is what ``compress_ddp`` or ``compress_fsdp`` returned: it has plans and bytes.
    It is None before ``train``, and in a job of one rank. Error feedback is written to the folder
    ``commpass`` of each checkpoint, and is loaded when training continues from it.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any]):
        self.trainer, self.options = trainer, options
        self.integration: Integration | None = None
        self._compressed: weakref.ref[nn.Module] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Compress what the wrapped model sends, and load error feedback of a checkpoint."""
        model = self.trainer.model_wrapped
        if self._compressed is None or self._compressed() is not model:  # a second train() keeps it
            self.integration = compress_wrapped(CALL, model, self.options)
            self._compressed = weakref.ref(model)
        if self.integration is not None and state.global_step > 0:
            self._load(self.integration, args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write error feedback into the checkpoint that the trainer has written."""
        if self.integration is not None and not args.save_only_model:
            save_state(self.integration, _checkpoint(args, state) / FOLDER)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Log what was sent."""
        log_summary(self.integration)

    def _load(self, integration: Integration, args: TrainingArguments, state: TrainerState) -> None:
        """Load error feedback of the checkpoint from which training continues.

        The trainer does not tell callbacks its folder: it is the one that has the same history.
        """
        given = args.resume_from_checkpoint
        folders = [Path(given)] if given and os.path.isdir(given) else []
        folders.append(_checkpoint(args, state))
        for folder in folders:
            if _has_history(folder, state):
                load_state(CALL, integration, folder / FOLDER)
                return
        log.warning(NOT_FOUND, CALL, state.global_step, args.output_dir)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _has_history(folder: Path, state: TrainerState) -> bool:
    """Return whether a folder is the checkpoint that a trainer's state was read from."""
    file = folder / STATE_FILE
    if not file.is_file():
        return False
    saved = TrainerState.load_from_json(str(file))
    return (saved.global_step, saved.log_history) == (state.global_step, state.log_history)
