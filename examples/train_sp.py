"""Train a language model with sequence parallelism, without and with compressed collectives.

    torchrun --nproc-per-node 2 examples/train_sp.py
    python examples/train_sp.py --ranks 2 --policy aggressive --link-gbit 0.1

As in train_tp.py, attention and MLP are sharded over the ranks. Here the activations between them
are sharded too, by sequence: each rank has some of the positions. Each layer therefore gathers the
whole sequence before ``attn`` and before ``mlp`` (all_gather). After them it sums and scatters the
results (reduce_scatter). In backward the two are swapped.

The output shows the losses of the runs side by side, every collective with the decision and its
reason, the bytes of a step before and after, and commands that show more.
"""

from __future__ import annotations

from argparse import Namespace

from common import Example, Transformer, main
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WHOLE, DIVIDED = Replicate(), Shard(1)  # every rank has all positions, or some of them


def build(options: Namespace) -> Transformer:
    return Transformer(options.layers, options.width)


def divide(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard the blocks over the ranks, and the sequence between them."""
    gathered = PrepareModuleInput(input_layouts=(DIVIDED,), desired_input_layouts=(WHOLE,))
    summed = RowwiseParallel(output_layouts=DIVIDED)
    attn = {
        "norm1": SequenceParallel(),
        "attn": gathered,
        "attn.[qkv]": ColwiseParallel(),
        "attn.o": summed,
    }
    mlp = {
        "norm2": SequenceParallel(),
        "mlp": gathered,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, attn | mlp | {"mlp.down": summed})
    # the embeddings, and the input of the head, are replicated
    cut = PrepareModuleInput(
        input_layouts=(WHOLE,), desired_input_layouts=(DIVIDED,), use_local_output=True
    )
    joined = PrepareModuleInput(
        input_layouts=(DIVIDED,), desired_input_layouts=(WHOLE,), use_local_output=True
    )
    parallelize_module(model, mesh, {"blocks.0": cut, "norm": SequenceParallel(), "head": joined})


def sum_norm_gradients(model: nn.Module) -> None:
    """Sum the gradients of the norms' weights over the ranks: each rank has only seen its own
    positions."""
    for weight in model.parameters():
        if isinstance(weight.grad, DTensor) and weight.grad.placements[0].is_partial():
            weight.grad = weight.grad.redistribute(placements=(WHOLE,))


if __name__ == "__main__":
    main(
        __file__,
        Example(build, divide, sum_norm_gradients, sequence_parallel=True),
    )
