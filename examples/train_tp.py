"""Trains one small language model twice, without and with compressed collectives, and compares the two.

    torchrun --nproc-per-node 2 examples/train_tp.py
    python examples/train_tp.py --ranks 2 --policy aggressive --link-gbit 0.1

The model is a decoder-only transformer over bytes, its attention and MLP divided over the ranks (tensor parallelism); it
learns the sources of Python's standard library. Each layer sums activations over all ranks twice in the forward and twice
in the backward graph: these are the collectives that commpass finds, and compresses where that pays on the given link.

You see the losses of both runs side by side, every collective with what was decided about it and why, the bytes of a step
before and after, and commands that show more. All that is particular to commpass is its backend, two lines in ``train``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from shlex import quote
from statistics import fmean, median
from sysconfig import get_paths
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import commpass
from commpass import dump

BATCH, CONTEXT, HEAD = 8, 128, 32  # sequences a step, bytes a sequence, width of an attention head
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
console = Console(quiet=RANK > 0, highlight=False, markup=False)


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # q, k and v are divided by columns: each rank has some of the heads, and these whole
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width)
        self.norm2, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes ``[BATCH, CONTEXT + 1]`` in, the mean cross entropy of each next byte out."""
        x = self.token(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def divide(model: Transformer, mesh: DeviceMesh) -> None:
    """Divides the blocks over the ranks: an all_reduce after ``o`` and ``down``; in backward, before ``attn`` and ``mlp``."""
    # one DTensor goes into q, k and v (and into gate and up), so that in backward one all_reduce sums for all of them
    shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    attn = {"attn": shared, "attn.[qkv]": ColwiseParallel(), "attn.o": RowwiseParallel()}
    mlp = {"mlp": shared, "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, attn | mlp)


def read_texts(most: int = 4_000_000) -> tuple[Tensor, ...]:
    """Bytes to train on and bytes held out: the sources of Python's standard library, in the same order everywhere."""
    root = Path(get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))
    text = bytearray(b"".join(map(Path.read_bytes, files))[:most])
    return torch.frombuffer(text, dtype=torch.uint8).tensor_split([len(text) // 10 * 9])


def batches(text: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Random windows of the text ``[BATCH, CONTEXT + 1]``: the same ones on every rank."""
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, CONTEXT + 1, 1)
    return (windows[torch.randint(len(windows), (BATCH,), generator=generator)].long() for _ in range(count))


@dataclass(frozen=True)
class Run:
    """What one training gave: the loss of every step and on held-out text, milliseconds a step, and the plans."""

    losses: list[float]
    held_out: float
    step_ms: float
    plans: list[commpass.Plan]


def train(name: str, policy: str, options: Namespace, mesh: DeviceMesh, texts: tuple[Tensor, ...]) -> Run:
    """Trains a new model, from the same seed and on the same batches, with its collectives under ``policy``."""
    torch._dynamo.reset()
    torch.manual_seed(options.seed)
    model = Transformer(options.layers, options.width)
    divide(model, mesh)
    folder, earlier = options.out / name, len(commpass.plans())
    for file in dump.files(folder) if RANK == 0 else ():  # those of an earlier run
        file.unlink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    backend = commpass.backend(policy, profile=commpass.ethernet(options.link_gbit), dump=folder)
    loss_of = torch.compile(model, backend=backend, fullgraph=True)
    losses, ends = list[float](), list[float]()
    data = batches(texts[0], options.steps, options.seed)
    for batch in track(data, f"{name:3}", options.steps, console=console, disable=RANK > 0):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    # not under no_grad: that would compile another graph, and it is the one of the training that is to be judged
    held_out = fmean(loss_of(batch).item() for batch in batches(texts[1], 16, options.seed))
    step_ms = 1e3 * median([end - start for start, end in pairwise(ends)] or [nan])  # the first step compiles: left out
    return Run(losses, held_out, step_ms, commpass.plans()[earlier:])


def report(off: Run, on: Run, options: Namespace) -> None:
    """Prints losses and step times, every collective with its reason, the bytes, and how to see more."""
    from commpass import render

    table = render.plain_table("step", "loss, off", f"loss, {options.policy}", "difference")
    steps = sorted({1, options.steps, *range(0, options.steps, max(1, options.steps // 10))} - {0})
    rows = [(str(step), off.losses[step - 1], on.losses[step - 1]) for step in steps]
    for step, left, right in [*rows, ("held out", off.held_out, on.held_out)]:
        table.add_row(step, f"{left:.4f}", f"{right:.4f}", f"{right - left:+.4f}")
    console.print("", table)
    console.print(f"median step here: {off.step_ms:.0f} ms off, {on.step_ms:.0f} ms {options.policy}")

    console.print("\nThe collectives of one rank in one step, and why each is sent as it is:", style="bold")
    for plan in on.plans:
        console.print(plan.direction + (f", compiled UNTOUCHED: {plan.fallback}" if plan.fallback else ""), style="bold")
        table = render.plain_table("#", "module", "kind", "bytes", "wire", "codec", "algorithm")
        for number, site in enumerate(plan, 1):
            sizes = render.size(site.bytes), render.size(site.wire_bytes)
            table.add_row(str(number), site.module, site.kind, *sizes, site.codec, site.algorithm)
        console.print(table, render.reasons(plan.sites), "")
    console.print(f"All of a step: {render.totals(on.plans)}", style="bold")
    console.print(f"\nPlans and graphs are in {options.out}/off and {options.out}/on. To read them:")
    for command in ("explain {0}/on", "graph {0}/on --text --around 1", "diff {0}/off {0}/on"):
        console.print(f"  commpass {command.format(quote(str(options.out)))}", style="bold", soft_wrap=True)


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leaves with 2 after one line of rank 0. The others let it go first: torchrun ends all ranks when one leaves."""
        if RANK > 0:
            time.sleep(5)
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n" if RANK == 0 else None)


def read_options() -> Namespace:
    parser = Parser(description="Train without and with compressed collectives.", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policy", default="balanced", help="a preset by name, or a .toml file")
    parser.add_argument("--ranks", type=int, default=RANKS, help="processes to start, where torchrun has not done so")
    parser.add_argument("--steps", type=int, default=150, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--link-gbit", type=float, default=1.0, help="the network to decide for, in Gbit/s")
    parser.add_argument("--out", type=Path, default="demo-out", help="folder for plans and graphs; earlier ones are replaced")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--width", type=int, default=256, help="features of the model")
    options = parser.parse_args()
    for name in ("ranks", "steps", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if dist.is_torchelastic_launched() and options.ranks != RANKS:
        parser.error(f"--ranks {options.ranks}: torchrun started {RANKS}; leave it out, or start with python instead")
    if options.width % (unit := HEAD * options.ranks):
        parser.error(f"--width {options.width}: must be a multiple of {unit} ({options.ranks} ranks, heads of {HEAD})")
    if not 0 < options.link_gbit < inf:
        parser.error(f"--link-gbit {options.link_gbit}: must be a number of Gbit/s above 0")
    try:
        commpass.backend(options.policy)
        (options.out / "on").mkdir(parents=True, exist_ok=True)
    except (commpass.CommpassError, OSError) as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = read_options()
    if not dist.is_torchelastic_launched():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", f"--nproc-per-node={options.ranks}", __file__, *sys.argv[1:]])
        return
    handler = RichHandler(console=console if RANK == 0 else Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(format=f"rank {RANK}: %(message)s", handlers=[handler])
    logging.getLogger("commpass").setLevel(logging.INFO if RANK == 0 else logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("tp",))
    millions = sum(weight.numel() for weight in Transformer(options.layers, options.width).parameters()) / 1e6
    console.print(f"{millions:.1f} million parameters on {options.ranks} ranks, policy {options.policy}", style="bold")
    console.print(f"Decisions are made for a link of {options.link_gbit:g} Gbit/s. Ranks on one host talk over loopback, not "
                  "over that link: the step times below do not show what is gained.")  # fmt: skip
    texts = read_texts()
    off = train("off", "off", options, mesh, texts)
    on = train("on", options.policy, options, mesh, texts)
    report(off, on, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
