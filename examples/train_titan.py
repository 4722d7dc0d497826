"""Trains on a mesh as torchtitan does: tensor parallelism, activation checkpointing and
torch.compile for each block, FSDP2 around it; without and with compressed collectives.

    torchrun --nproc-per-node 4 examples/train_titan.py
    torchrun --nproc-per-node 4 examples/train_titan.py --policy aggressive --link-gbit 0.1

The sums of tensor parallelism are in the graphs of the compiled blocks, where the backend finds
them. FSDP2 sends parameters and gradients eagerly: ``compress_fsdp`` is the door to these. All that
is particular to commpass is in ``parallelize`` of train_fsdp_tp.py, which has no checkpointing.
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


def checkpointed(block: nn.Module) -> nn.Module:
    """torchtitan compiles what it has checkpointed; torch 2.13 fails there with DTensors, with
    every backend."""
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
    """Losses of the steps and on held-out text (means over ranks), the plans of the graphs, and the
    door. Ranks that share their layers have the same batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    text, held_out = read_texts()
    model = Transformer(layers, width)
    earlier = len(commpass.plans())
    door = parallelize(model, mesh, policy, profile, inner, wrap=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(text, steps, 0, mesh["dp"].get_local_rank()):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.item()))
    tests = fmean(model(batch).item() for batch in batches(held_out, 8, seed=1))
    return losses, mean(tests), commpass.plans()[earlier:], door


def main() -> None:
    parser = ArgumentParser(description="Train as torchtitan does, compressed.")
    parser.add_argument("--policy", default="balanced", help="a preset by name, or a .toml file")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument("--link-gbit", type=float, default=1.0, help="the network to decide for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // TP, TP)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    profile = commpass.ethernet(options.link_gbit)
    off, held_off, *_ = train("off", profile, mesh, options.steps, options.layers)
    on, held_on, plans, door = train(options.policy, profile, mesh, options.steps, options.layers)
    if dist.get_rank() == 0:
        print(f"step      loss, off  loss, {options.policy}")
        for step in sorted({1, *range(10, options.steps + 1, 10), options.steps}):
            print(f"{step:<8} {off[step - 1]:10.4f} {on[step - 1]:10.4f}")
        print(f"held out {held_off:10.4f} {held_on:10.4f}")
        graphs = [plan for plan in plans if any(site.group_label == "tp" for site in plan)]
        print(f"tensor parallelism, a block: {totals_line(totals(graphs))}")
        print(f"FSDP2: {door}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
