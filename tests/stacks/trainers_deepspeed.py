"""DeepSpeed: ``deepspeed --num_gpus 2 trainers_deepspeed.py OPTIONS``, with DS_ACCELERATOR=cpu."""

from __future__ import annotations

import contextlib

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainers_small import NextByte, options, rows, sent, write

import commpass

BATCH = 32


def main() -> None:
    given = options()
    deepspeed.init_distributed()
    model: torch.nn.Module = NextByte()
    integration = None
    if given.get("bf16"):
        model = model.bfloat16()  # DDP sends no gradient of parameters that are converted later
    if given.get("policy"):
        model = DistributedDataParallel(model)
        integration = commpass.parallel.compress_ddp(model, given["policy"], profile="ethernet-1g")
    stage = given["stage"]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "bf16": {
            "enabled": stage > 0 or given.get("bf16", False)
        },  # ZeRO needs a master copy of weights
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    refused = ""
    if given.get("engine_policy"):
        try:
            commpass.parallel.compress_ddp(engine, given["engine_policy"])
        except commpass.PolicyError as error:
            refused = str(error)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = rows(given.get("rows", 1000))
    losses = []
    for start in range(rank * BATCH, len(found), size * BATCH):
        loss = engine(found[start : start + BATCH])
        with engine.no_sync() if integration is not None else contextlib.nullcontext():
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    write(given, rank, losses, model, refused=refused, **sent(integration))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
