"""Lightning: a callback that compresses what ranks send.

    from commpass.parallel.lightning import Compress

    trainer = lightning.Trainer(strategy="ddp", devices=8, callbacks=[Compress("balanced")])

It works with the strategies of DDP and with ``ModelParallelStrategy`` and FSDP2's ``fully_shard``.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from commpass.distributed.integration import Integration
from commpass.distributed.state import load_state_dict
from commpass.parallel.trainers import (
    checked_options,
    compress_wrapped,
    gathered_state,
    log_summary,
)

log = logging.getLogger("commpass")

CALL = "commpass.parallel.lightning.Compress"
INTERRUPTED = (
    "%s: this checkpoint is written without error feedback, since an exception has ended training,"
    " and ranks that have not raised it would not answer"
)


class Compress(Callback):
    """Compress what the model sends while it is fitted, under a policy.

    ``integration`` is what ``compress_ddp`` or ``compress_fsdp`` returns: it has plans and bytes.
    It is None before ``fit``, and in a job of one rank. Error feedback of all ranks is part of the
    trainer's checkpoints. The first rank gathers it in its memory.

    Args:
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        **options: ``profile``, ``strict``, ``dump`` and ``timeout`` of ``compress_ddp`` and
            ``compress_fsdp``.

    Raise PolicyError for an unknown option, policy or profile.
    """

    def __init__(self, policy: Any = "lossless", **options: Any):
        self.options = checked_options(CALL, {"policy": policy, **options})
        self.integration: Integration | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self._loaded: dict[str, Tensor] | None = None
        """The error feedback of a checkpoint; None if none was read."""
        self._interrupted = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget error feedback that a test or validation has read from its checkpoint."""
        self._loaded, self._interrupted = None, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compress what the model sends: Lightning has wrapped it, and nothing was sent yet."""
        model = trainer.strategy.model
        assert model is not None
        self.integration = compress_wrapped(CALL, model, self.options)
        self._module = weakref.ref(pl_module)  # it stays when Lightning removes its wrapper

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the error feedback of the checkpoint that the trainer has loaded.

        If it has none, training continues without that of the training before.
        """
        loaded, self._loaded = self._loaded, None
        if self.integration is not None and loaded is not None:
            load_state_dict(loaded, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the error feedback of all ranks on the first one, which writes the checkpoint."""
        module = self._module() if self._module is not None else None
        if self.integration is None or module is None:
            return {}
        if self._interrupted:
            log.warning(INTERRUPTED, CALL)
            return {}
        return gathered_state(module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note that a checkpoint is read: Lightning loads no empty state of a callback."""
        self._loaded = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep error feedback until training starts."""
        self._loaded = dict(state_dict)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Note that other ranks may not have failed: checkpoints must not wait for them now."""
        self._interrupted = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the model send as without this callback, once it is fitted."""
        if self.integration is not None and not self.integration.closed:
            log_summary(self.integration)
            self.integration.close()
