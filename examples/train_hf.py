"""Trains a Hugging Face Llama, divided by its own ``tp_plan``, without and with compressed
collectives.

    torchrun --nproc-per-node 2 examples/train_hf.py
    python examples/train_hf.py --ranks 2 --policy aggressive --link-gbit 0.1

Needs ``transformers`` and ``accelerate``. The model has random weights and is small; it is saved and loaded from a
folder, as one from a hub would be: ``from_pretrained`` with a ``tp_plan`` divides it over the
ranks. All that is particular to commpass is its backend, two lines in ``train`` of common.py.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
import transformers
from common import CONTEXT, HEAD, Example, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig

transformers.logging.disable_progress_bar()


class NextByte(nn.Module):
    """A causal model of Hugging Face's as the trainings of common.py want it."""

    def __init__(self, llama: transformers.PreTrainedModel):
        super().__init__()
        self.llama = llama

    def forward(self, text: Tensor) -> Tensor:
        """Bytes ``[batch, length + 1]`` in, the mean cross entropy of each next byte out."""
        logits = self.llama(input_ids=text[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def save(folder: Path, layers: int, width: int) -> None:
    """Writes a Llama over bytes with random weights, as ``save_pretrained`` does."""
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
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: Path) -> transformers.PreTrainedModel:
    """The model in a folder, divided over all ranks by the plan that its class brings along."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    )


def build(options: Namespace) -> NextByte:
    """The same model on all ranks: rank 0 writes it, all read it."""
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            save(Path(own), options.layers, options.width)
        dist.barrier()
        model = load(Path(folder[0]))
        dist.barrier()
    return NextByte(model)


if __name__ == "__main__":
    main(__file__, Example(build, lambda model, mesh: None, steps=60, layers=2))
