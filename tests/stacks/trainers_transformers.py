"""transformers: ``torchrun --nproc-per-node 2 trainers_transformers.py OPTIONS``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from trainers_small import CONTEXT, options, rows, sent, write
from transformers import LlamaConfig, LlamaForCausalLM


class Bytes(torch.utils.data.Dataset):
    """Rows of bytes, as transformers takes them."""

    def __init__(self, found: Tensor):
        self.found = found

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.found[index], "labels": self.found[index]}


class FailsAt(transformers.TrainerCallback):
    """Raise on the second rank before a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and args.process_index == 1:
            raise RuntimeError("rank 1 fails")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT + 1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def sharded(folder: Path) -> LlamaForCausalLM:
    """Return the model, sharded by FSDP2 as transformers loads it."""
    from transformers.distributed import DistributedConfig

    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder)
    torch.distributed.barrier()
    return LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=2)
    )


def main() -> None:
    given = options()
    folder = Path(given["out"])
    fsdp = given.get("fsdp", False)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=given.get("accumulate", 1),
        num_train_epochs=given.get("epochs", 1),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no" if fsdp else "steps",
        save_steps=given.get("save_steps", 500),
        bf16=given.get("bf16", False),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        seed=0,
        resume_from_checkpoint=given.get("resume"),  # Trainer does not read it; commpass does
    )
    trainer = transformers.Trainer(
        model=sharded(folder / "model") if fsdp else llama(),
        args=arguments,
        train_dataset=Bytes(rows(given.get("rows", 500))),  # its last batch has 10 a rank
        eval_dataset=Bytes(rows(64, start=4096)),
    )
    compressed = None
    if given.get("policy"):
        from commpass.parallel.transformers import compress

        compressed = compress(trainer, given["policy"], profile="ethernet-1g")
    if "fails_at" in given:
        trainer.add_callback(FailsAt(given["fails_at"]))
    trainer.train(resume_from_checkpoint=given.get("resume"))
    logged = trainer.state.log_history
    losses = [each["loss"] for each in logged if "loss" in each]
    held_out = [each["eval_loss"] for each in logged if "eval_loss" in each]
    found = sent(compressed.integration) if compressed else {}
    write(given, arguments.process_index, losses, trainer.model, held_out=held_out, **found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
