"""Train a Hugging Face Llama, sharded by its own ``tp_plan``, without and with compressed
collectives.

    torchrun --nproc-per-node 2 examples/train_hf.py
    python examples/train_hf.py --ranks 2 --policy aggressive --link-gbit 0.1

Needs ``transformers`` and ``accelerate``. The model is small and has random weights. It is saved to
a folder and loaded like a model from the hub: ``from_pretrained`` with a ``tp_plan`` shards it over
the ranks. Only two lines in ``train`` of common.py are specific to commpass: they create and use
its backend.
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
    """A Hugging Face causal model with the interface that common.py expects."""

    def __init__(self, llama: transformers.PreTrainedModel):
        super().__init__()
        self.llama = llama

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross entropy of each next byte, for bytes of shape ``[batch, length +
        1]``."""
        logits = self.llama(input_ids=text[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def save(folder: Path, layers: int, width: int) -> None:
    """Save a Llama over bytes with random weights, with ``save_pretrained``."""
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
    """Load the model in a folder, sharded over all ranks by the plan of its class."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    )


def build(options: Namespace) -> NextByte:
    """Return the same model on all ranks: rank 0 saves it, and every rank loads it."""
    with TemporaryDirectory() as temporary:
        folder = [temporary]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            save(Path(temporary), options.layers, options.width)
        dist.barrier()
        model = load(Path(folder[0]))
        dist.barrier()
    return NextByte(model)


if __name__ == "__main__":
    main(__file__, Example(build, lambda model, mesh: None))
