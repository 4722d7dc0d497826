"""Train on a mesh as torchtitan does, without and with compressed collectives.

    torchrun --nproc-per-node 4 examples/train_titan.py
    torchrun --nproc-per-node 4 examples/train_titan.py --policy aggressive --link-gbit 0.1

Each block has tensor parallelism, activation checkpointing and torch.compile; FSDP2 wraps it. The
all_reduces of tensor parallelism are in the graphs of the compiled blocks, where the backend finds
them. FSDP2 sends parameters and gradients eagerly, which ``compress_fsdp`` compresses. Only
``parallelize`` of train_fsdp_tp.py, which has no checkpointing, is specific to commpass.
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from common import HEAD, Transformer, batches, mean, read_texts
from meshes import TP
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from train_fsdp_tp import parallelize

import commpass
from commpass.plan.totals import totals
from commpass.report.headlines import totals_line


def checkpoint_block(block: nn.Module) -> nn.Module:
    """Apply activation checkpointing to a compiled block.

    torchtitan compiles the checkpointed block; with DTensors, torch 2.13 fails there with every
    backend.
    """
    return checkpoint_wrapper(block, preserve_rng_state=False)


def train(
    policy: str,
    profile: Any,
    mesh: DeviceMesh,
    steps: int,
    layers: int,
    width: int = 4 * HEAD,
    inner: str = "inductor",
) -> tuple[list[float], float, list[commpass.Plan], Any]:
    """Return the losses of the steps and on held-out text (means over ranks), the plans of the
    graphs, and the FSDP2 integration.

    Ranks that share their layers have the same batches.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    text, held_out = read_texts()
    model = Transformer(layers, width)
    earlier = len(commpass.plans())
    integration = parallelize(model, mesh, policy, profile, inner, wrap=checkpoint_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(text, steps, 0, mesh["dp"].get_local_rank()):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.item()))
    tests = fmean(model(batch).item() for batch in batches(held_out, 8, seed=1))
    return losses, mean(tests), commpass.plans()[earlier:], integration


def main() -> None:
    parser = ArgumentParser(description="Train as torchtitan does, compressed.")
    parser.add_argument("--policy", default="balanced", help="name of a preset, or a .toml file")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument(
        "--link-gbit", type=float, default=1.0, help="rate of the assumed link, in Gbit/s"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // TP, TP)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    profile = commpass.ethernet(options.link_gbit)
    off, held_off, *_ = train("off", profile, mesh, options.steps, options.layers)
    on, held_on, plans, integration = train(
        options.policy, profile, mesh, options.steps, options.layers
    )
    if dist.get_rank() == 0:
        print(f"step      loss, off  loss, {options.policy}")
        for step in sorted({1, *range(10, options.steps + 1, 10), options.steps}):
            print(f"{step:<8} {off[step - 1]:10.4f} {on[step - 1]:10.4f}")
        print(f"held out {held_off:10.4f} {held_on:10.4f}")
        graphs = [plan for plan in plans if any(site.group_label == "tp" for site in plan)]
        print(f"tensor parallelism, a block: {totals_line(totals(graphs))}")
        print(f"FSDP2: {integration}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
