"""Run a tensor-parallel model on vLLM's operators, without and with compressed collectives.

    torchrun --nproc-per-node 2 examples/serve_vllm.py
    torchrun --nproc-per-node 2 examples/serve_vllm.py --policy aggressive

vLLM itself is not needed. This file defines vLLM's collectives over gloo, with vLLM's names and
schemas, and installs the pass where vLLM does: in Inductor's post-grad slot. With vLLM, add the
pass to its compilation config (docs/vllm.md).
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from common import Transformer, batches, read_texts
from torch import Tensor, nn

import commpass
from commpass.parallel.vllm import SLOT, CollectivePass
from commpass.plan.totals import totals
from commpass.report.headlines import totals_line

GROUP = "tp:0"  # vLLM's name of its first tensor-parallel group


def define_operators(library: torch.library.Library) -> None:
    """Define vLLM's collectives over the group of all ranks, as in its ``parallel_state``.

    ``library`` is a fragment of the namespace vllm. The operators exist as long as it does.
    """
    library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
    rest = "Tensor tensor, SymInt dim, SymInt world_size, str group_name"
    library.define(f"all_gather({rest}) -> Tensor")
    library.define(f"reduce_scatter({rest}) -> Tensor")

    def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result)
        return result

    def all_gather(tensor: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def reduce_scatter(tensor: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
        return all_reduce(tensor, group_name).chunk(world_size, dim)[dist.get_rank()].clone()

    def resized(tensor: Tensor, dim: int, size: Any) -> Tensor:
        return tensor.new_empty([size if i == dim else n for i, n in enumerate(tensor.shape)])

    for name, real, fake in (
        ("all_reduce", all_reduce, lambda tensor, _: torch.empty_like(tensor)),
        ("all_gather", all_gather, lambda x, dim, n, _: resized(x, dim, x.shape[dim] * n)),
        ("reduce_scatter", reduce_scatter, lambda x, dim, n, _: resized(x, dim, x.shape[dim] // n)),
    ):
        library.impl(name, real, "CPU")
        torch.library.register_fake(f"vllm::{name}", fake, lib=library)


class RowParallel(nn.Module):
    """vLLM's row-parallel layer, for ``o`` and ``down``: each rank has some of the inputs, and the
    results are summed over the ranks."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.vllm.all_reduce(x @ self.weight.T, GROUP)


def divide(model: Transformer, rank: int, ranks: int) -> None:
    """Keep only this rank's heads and its part of each MLP."""
    for block in model.blocks:
        for linear in (block.attn.q, block.attn.k, block.attn.v, block.mlp.gate, block.mlp.up):
            linear.weight = nn.Parameter(linear.weight.chunk(ranks, 0)[rank].clone())
        block.attn.o = RowParallel(block.attn.o.weight.chunk(ranks, 1)[rank].clone())
        block.mlp.down = RowParallel(block.mlp.down.weight.chunk(ranks, 1)[rank].clone())


def train_model(steps: int, text: Tensor) -> Transformer:
    """Train a small language model. Every rank trains the whole model and gets the same weights."""
    torch.manual_seed(0)
    model = Transformer(layers=2, width=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(text, steps, seed=0):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = ArgumentParser(description="Serve with vLLM's operators, compressed.")
    parser.add_argument("--policy", default="balanced", help="name of a preset, or a .toml file")
    parser.add_argument("--steps", type=int, default=30, help="training steps before serving")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    library = torch.library.Library("vllm", "FRAGMENT")
    define_operators(library)
    # on a hit in Inductor's cache the pass does not run, and makes no plan
    torch.compiler.config.force_disable_caches = True
    text, held_out = read_texts()
    model = train_model(options.steps, text)
    divide(model, dist.get_rank(), dist.get_world_size())
    losses = {}
    for policy in ("off", options.policy):
        torch._dynamo.reset()
        collective_pass = CollectivePass(
            policy, profile="ethernet-1g", groups=lambda _: dist.group.WORLD
        )
        compiled = torch.compile(model, options={SLOT: collective_pass})
        with torch.inference_mode():
            losses[policy] = fmean(compiled(batch).item() for batch in batches(held_out, 8, seed=1))
    if dist.get_rank() == 0:
        for policy, loss in losses.items():
            print(f"loss on held-out text, {policy:10} {loss:.5f}")
        plan = commpass.plans()[-1]
        for site in plan:
            print(f"{site.kind:10} {site.bytes:>8} bytes -> {site.wire_bytes:>7}  {site.codec}")
        print(totals_line(totals([plan])))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
