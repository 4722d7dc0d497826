"""Lightning: ``python trainers_lightning.py OPTIONS``; its launcher starts the other rank."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainers_small import NextByte, options, rows, sent, write


class Module(lightning.LightningModule):
    def __init__(self, given: dict[str, Any]):
        super().__init__()
        self.given, self.losses, self.held_out = given, [], []
        self.model = NextByte()

    def configure_model(self) -> None:
        if self.given["strategy"] == "fsdp2" and self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for each in (self.model.hidden, self.model.output, self.model):
                fully_shard(each, mesh=mesh)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if self.given.get("fails_at") == len(self.losses) and self.global_rank == 1:
            raise RuntimeError("rank 1 fails")
        loss = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.held_out.append(self.model(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    given = options()
    callbacks: list[Any] = []
    if given.get("policy"):
        from commpass.parallel.lightning import Compress

        callbacks.append(Compress(given["policy"], profile="ethernet-1g"))
    strategy: Any = given["strategy"]
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=given.get("precision", "32-true"),
        accumulate_grad_batches=given.get("accumulate", 1),
        max_epochs=given.get("epochs", 1),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(given)
    trainer.fit(
        module,
        DataLoader(rows(given.get("rows", 1000)), batch_size=32),  # its last batch has 20 a rank
        DataLoader(rows(256, start=4096), batch_size=64),
        ckpt_path=given.get("resume"),
        weights_only=False,
    )
    integration = callbacks[0].integration if callbacks else None
    found = sent(integration)
    if given.get("save"):
        trainer.save_checkpoint(given["save"])
    write(
        given, trainer.global_rank, module.losses, module.model, held_out=module.held_out, **found
    )


if __name__ == "__main__":
    main()
