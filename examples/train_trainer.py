"""Train a Hugging Face model with Trainer and DDP on 2 ranks, without and with compressed
gradients.

    torchrun --nproc-per-node 2 examples/train_trainer.py
    torchrun --nproc-per-node 2 examples/train_trainer.py --policy aggressive --link-gbit 0.1

Needs ``transformers`` and ``accelerate``. Only ``compress`` is specific to commpass: a callback
that compresses what the model sends once Trainer has wrapped it in DDP.
"""

from __future__ import annotations

from argparse import ArgumentParser
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import CONTEXT, HEAD, mean, read_texts
from torch import Tensor

import commpass
from commpass.parallel.transformers import compress

BATCH = 8  # sequences per step and rank


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text, ``CONTEXT`` bytes each."""

    def __init__(self, text: Tensor, count: int):
        self.rows = text[: count * CONTEXT].view(count, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama(layers: int, width: int) -> transformers.LlamaForCausalLM:
    """Return a Llama over bytes, with the same random weights on each rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def train(
    policy: str, profile: Any, steps: int, layers: int = 2, width: int = 128
) -> tuple[list[float], float, Any]:
    """Return the losses of the steps, the loss on held-out text (mean over ranks), and the DDP
    integration."""
    text, held_out = read_texts()
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            seed=0,
        )
        trainer = transformers.Trainer(
            model=llama(layers, width),
            args=arguments,
            train_dataset=Windows(text, steps * BATCH * 4),
            eval_dataset=Windows(held_out, 16 * BATCH),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        compressed = compress(trainer, policy, profile=profile)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, mean(trainer.evaluate()["eval_loss"]), compressed.integration


def main() -> None:
    parser = ArgumentParser(description="Train with Trainer, gradients compressed.")
    parser.add_argument("--policy", default="balanced", help="name of a preset, or a .toml file")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument(
        "--link-gbit", type=float, default=1.0, help="rate of the assumed link, in Gbit/s"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    profile = commpass.ethernet(options.link_gbit)
    off, held_off, _ = train("off", profile, options.steps)
    on, held_on, integration = train(options.policy, profile, options.steps)
    if dist.get_rank() == 0:
        print(f"step      loss, off  loss, {options.policy}")
        for step in sorted({1, *range(10, options.steps + 1, 10), options.steps}):
            print(f"{step:<8} {off[step - 1]:10.4f} {on[step - 1]:10.4f}")
        print(f"held out {held_off:10.4f} {held_on:10.4f}")
        print(integration)
        for plan in integration.plans:
            for site in plan:
                print(f"{site.kind}, {site.bytes:,} bytes -> {site.wire_bytes:,}: {site.reason}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
