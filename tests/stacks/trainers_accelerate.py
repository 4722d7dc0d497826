"""Accelerate: ``torchrun --nproc-per-node 2 trainers_accelerate.py OPTIONS``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.data import DataLoader
from trainers_small import NextByte, options, rows, sent, write


def main() -> None:
    given = options()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=given.get("precision", "no"),
        gradient_accumulation_steps=given.get("accumulate", 1),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=given.get("find_unused", False))
        ],
    )
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows(given.get("rows", 1000)), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    integration = None
    if given.get("policy"):
        from commpass.parallel.accelerate import compress

        integration = compress(accelerator, model, given["policy"], profile="ethernet-1g")
    if given.get("resume"):
        accelerator.load_state(given["resume"])
    losses = []
    for _ in range(given.get("epochs", 1)):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if given.get("save"):
        accelerator.save_state(given["save"])
    write(given, accelerator.process_index, losses, model, **sent(integration))
    accelerator.end_training()


if __name__ == "__main__":
    main()
