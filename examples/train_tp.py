"""Trains one small language model twice, without and with compressed collectives, and compares the
two.

    torchrun --nproc-per-node 2 examples/train_tp.py
    python examples/train_tp.py --ranks 2 --policy aggressive --link-gbit 0.1

The model is a decoder-only transformer over bytes, its attention and MLP divided over the ranks
(tensor parallelism); it learns the sources of Python's standard library. Each layer sums
activations over all ranks twice in the forward and twice in the backward graph: these are the
collectives that commpass finds, and compresses where that pays on the given link.

You see the losses of both runs side by side, every collective with what was decided about it and
why, the bytes of a step before and after, and commands that show more. All that is particular to
commpass is its backend, two lines in ``train`` of common.py.
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
    """Divides the blocks over the ranks: an all_reduce after ``o`` and ``down``; in backward,
    before ``attn`` and ``mlp``."""
    # one DTensor goes into q, k and v (and into gate and up), so that in backward one all_reduce
    # sums for all of them
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
    main(__file__, Example(build, divide))
