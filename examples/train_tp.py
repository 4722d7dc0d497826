"""Train a language model with tensor parallelism, without and with compressed collectives.

    torchrun --nproc-per-node 2 examples/train_tp.py
    python examples/train_tp.py --ranks 2 --policy aggressive --link-gbit 0.1

The model is a decoder-only transformer over bytes that learns the sources of Python's standard
library. Its attention and MLP are sharded over the ranks. Each layer sums activations over all
ranks twice in the forward graph and twice in the backward graph. commpass finds these collectives,
and compresses them if that pays on the given link.

The output shows the losses of the runs side by side, every collective with the decision and its
reason, the bytes of a step before and after, and commands that show more. Only two lines in
``train`` of common.py are specific to commpass: they create and use its backend.
"""

from __future__ import annotations

from argparse import Namespace

from common import Example, Transformer, main
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def build(options: Namespace) -> Transformer:
    return Transformer(options.layers, options.width)


def divide(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard the blocks over the ranks.

    This adds an all_reduce after ``o`` and ``down`` and, in backward, before ``attn`` and ``mlp``.
    """
    # q, k and v share one input DTensor (as do gate and up), so that backward needs one all_reduce
    shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    attn = {"attn": shared, "attn.[qkv]": ColwiseParallel(), "attn.o": RowwiseParallel()}
    mlp = {
        "mlp": shared,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, attn | mlp)


if __name__ == "__main__":
    # one wide layer: compiling takes most of the time
    main(__file__, Example(build, divide, steps=24, layers=1, width=384, link_gbit=0.5))
