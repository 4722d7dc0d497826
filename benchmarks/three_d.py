"""Measure the bytes and errors of taco-3d and balanced-3d by dimension, on a trained model.

    python benchmarks/three_d.py [--steps 150] [--json FILE]

4 ranks, tensor parallelism 2 x data parallelism 2, train a language model of bytes on the text of
docs/, uncompressed. Then:

- *codecs*: what the last step sent in each dimension, encoded once by each preset's codec: partial
  sums of the layers and their gradients (tp), weights as differences in a closed loop over the last
  steps, gradients inside and between hosts (dp), outputs of the blocks and their gradients (pp).
  Errors are 2-norms, relative to what is encoded; for weights, relative to the change of the step.
- *gradients*: the same weights and batches of some more steps, with graphs compressed by each
  preset, on the same ranks: the error of all gradients against the uncompressed ones, the bytes
  that a rank sends in a step by dimension, and the error of the gathered weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

import commpass
from commpass.codecs import codec
from commpass.costmodel import Link, Profile
from commpass.policy import Policy
from commpass.policy.presets import DIMENSIONS, THREE_D
from tests.processes import Ranks

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "three_d.json"
TP, DP, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 2, 2, 256, 4, 2, 64, 8
LAST = 8
"""Number of steps whose weights are kept and whose gradients are compared."""
SLOW = Profile("slow", Link(60.0, 1e-4))
"""A link so slow that every site that may be compressed is: the error does not depend on the
link."""
ops = torch.ops._c10d_functional
recorded: list[dict[str, list[Tensor]]] = []
"""The tensors that are sent in the recorded steps, by their meaning."""


def note(what: str, x: Tensor) -> Tensor:
    if recorded:
        recorded[-1].setdefault(what, []).append(x.detach().clone())
    return x


def all_reduce(x: Tensor, group: str) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


class Summed(torch.autograd.Function):
    """Partial sums of a row-parallel layer, summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(note("tp, partial sums", x), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(torch.autograd.Function):
    """The input of a column-parallel layer; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(note("tp, their gradients", gradient), ctx.group), None


class Gathered(torch.autograd.Function):
    """A weight gathered from its shards; the mean of its gradients is scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: str) -> Tensor:
        ctx.group = group
        return ops.wait_tensor(ops.all_gather_into_tensor(shard, DP, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = note("dp, gradients", gradient.contiguous()) / DP
        return ops.wait_tensor(ops.reduce_scatter_tensor(gradient, "sum", DP, ctx.group)), None


class Stage(torch.autograd.Function):
    """Record what one pipeline stage would send to the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return note("pp, activations", x).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return note("pp, their gradients", gradient)


class Block(nn.Module):
    """Attention and a feed-forward layer, sharded over the tensor-parallel ranks."""

    def __init__(self, whole: Callable[[Tensor], Tensor], tp: str, make: Callable[..., Any]):
        super().__init__()
        self.whole, self.tp = whole, tp
        self.qkv, self.out = make(3 * WIDTH // TP, WIDTH), make(WIDTH, WIDTH // TP)
        self.up, self.down = make(4 * WIDTH // TP, WIDTH), make(WIDTH, 4 * WIDTH // TP)

    def forward(self, x: Tensor) -> Tensor:
        normed = Shared.apply(layer_norm(x, (WIDTH,)), self.tp)
        parts = (normed @ self.whole(self.qkv).t()).chunk(3, dim=2)
        q, k, v = (each.unflatten(2, (HEADS // TP, -1)).transpose(1, 2) for each in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + Summed.apply(mixed @ self.whole(self.out).t(), self.tp)
        normed = Shared.apply(layer_norm(x, (WIDTH,)), self.tp)
        hidden = gelu(normed @ self.whole(self.up).t())
        return Stage.apply(x + Summed.apply(hidden @ self.whole(self.down).t(), self.tp))


class Model(nn.Module):
    """A language model of bytes; each data-parallel rank has shards of its weights."""

    def __init__(self, tp: str, dp: str, tp_rank: int, dp_rank: int):
        super().__init__()
        count = 0

        def make(*shape: int, everywhere: bool = False) -> nn.Parameter:
            nonlocal count
            seed = 10 * (count := count + 1) + (0 if everywhere else tp_rank)
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            return nn.Parameter((weight * shape[-1] ** -0.5).chunk(DP)[dp_rank].clone())

        def whole(shard: Tensor) -> Tensor:
            return Gathered.apply(shard, dp)

        self.whole = whole
        self.embedding = make(256, WIDTH, everywhere=True)
        self.places = make(LENGTH, WIDTH, everywhere=True)
        self.blocks = nn.ModuleList(Block(whole, tp, make) for _ in range(BLOCKS))
        self.head = make(256, WIDTH, everywhere=True)

    def forward(self, text: Tensor) -> Tensor:
        x = self.whole(self.embedding)[text[:, :-1]] + self.whole(self.places)
        for block in self.blocks:
            x = block(x)
        logits = layer_norm(x, (WIDTH,)) @ self.whole(self.head).t()
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def batch(step: int, dp_rank: int, data: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(DP * step + dp_rank)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).long()


def off(coded: Tensor, exact: Tensor, whole: Tensor) -> list[float]:
    """Return the square of an error and the square of the norm that it is relative to."""
    return [float((coded - exact).double().square().sum()), float(whole.double().square().sum())]


def by_codec(name: str, sent: dict[str, list[Tensor]], weights: list[list[Tensor]]) -> dict:
    """Encode what this rank sent, once by each codec of a preset.

    Return the squares of the error and of the norm that it is relative to, the bytes, and the
    number of values.
    """
    tp, (gathers, sums), pp = (THREE_D[name][role] for role in ("tp", "dp", "pp"))
    between = sums.algorithm[-1].removeprefix("hierarchical(between=").removesuffix(")")
    coders = {
        "tp, partial sums": tp[0].codec[0],
        "tp, their gradients": tp[0].codec[0],
        "dp, gradients": sums.codec[0],
        "dp, gradients between hosts": between,
        "pp, activations": pp[0].codec[0],
        "pp, their gradients": pp[1].codec[0],
    }
    found: dict[str, Any] = {}

    def add(what: str, spec: str, row: list[float]) -> None:
        held = found.setdefault(what, {"codec": spec, "sums": [0.0] * 4})
        held["sums"] = [a + b for a, b in zip(held["sums"], row, strict=True)]

    for what, spec in coders.items():
        coder = codec(spec)
        for x in sent[what.removesuffix(" between hosts")]:
            size = coder.wire_bytes(x.numel(), x.dtype)
            add(what, spec, [*off(coder.decode(coder.encode(x)), x, x), size, x.numel()])
    coder = codec(gathers.codec[0])
    held = weights[0]
    for before, now in itertools.pairwise(weights):
        for number, x in enumerate(now):
            against = coder.against(held[number])
            size = coder.wire_bytes(x.numel(), x.dtype)
            new = against.decode(against.encode(x))
            held = [*held[:number], new, *held[number + 1 :]]
            row = [*off(new, x, x - before[number]), size, x.numel()]
            add("dp, weights", gathers.codec[0], row)
    return found


def with_roles(name: str, roles: tuple[str, ...]) -> Policy:
    """Return a preset restricted to some of its roles."""
    names = {role: role if role in roles else () for role in DIMENSIONS}
    return Policy.for_mesh(name, **(names | {"pp": ()}))


def by_gradients(model: Model, policy: Policy, weights: list[list[Tensor]], exact: Any, data: Any,
                 dp_rank: int, first: int) -> dict[str, Any]:  # fmt: skip
    """Return the error of the gradients of each of the last steps, and the bytes sent, by
    dimension."""
    torch._dynamo.reset()
    commpass.reset_state()
    seen, parameters = len(commpass.plans()), list(model.parameters())
    backend = commpass.backend(policy, inner="eager", strict=True, profile=SLOW)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    sums = [0.0, 0.0]
    for number, values in enumerate(weights):
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        compiled(batch(first + number, dp_rank, data)).backward()
        for parameter, wanted in zip(parameters, exact[number], strict=True):
            row = off(parameter.grad, wanted, wanted)
            sums = [a + b for a, b in zip(sums, row, strict=True)] if number else sums
            parameter.grad = None
    size: dict[str, list[int]] = {}
    for plan in commpass.plans()[seen:]:
        for site in plan.sites:
            row = size.setdefault(f"{site.group_label}, {site.kind}, {site.direction}", [0, 0, 0])
            row[0] += site.bytes
            row[1] += site.wire_bytes
            row[2] += site.compressed
    return {"sums": sums, "bytes": size}


def total(rows: list[float]) -> list[float]:
    """Return sums over all ranks."""
    summed = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.tolist()


def work(steps: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    dp_rank, tp_rank = mesh.get_coordinate()
    tp, dp = (mesh.get_group(name).group_name for name in ("tp", "dp"))
    model = Model(tp, dp, tp_rank, dp_rank)
    data = torch.frombuffer(
        bytearray(b"".join(each.read_bytes() for each in sorted((ROOT / "docs").glob("*.md")))),
        dtype=torch.uint8,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, weights, exact = [], [], []
    for step in range(steps + LAST):
        kept = step >= steps
        if kept:
            recorded[:] = [{}]
            weights.append([each.detach().clone() for each in model.parameters()])
        loss = model(batch(step, dp_rank, data))
        loss.backward()
        if kept:
            exact.append([each.grad.clone() for each in model.parameters()])
        losses.append(total([loss.item()])[0] / (TP * DP))
        optimizer.step()
        optimizer.zero_grad()
    (sent,) = recorded
    recorded.clear()
    found: dict[str, Any] = {"losses": losses[:: max(steps // 10, 1)], "codecs": {}, "whole": {}}
    for name in THREE_D:
        found["codecs"][name] = by_codec(name, sent, weights)
        for row in found["codecs"][name].values():
            row["sums"] = total(row["sums"])
        found["whole"][name] = {}
        for roles in (("tp",), ("dp",), ("tp", "dp")):
            policy = with_roles(name, roles)
            row = by_gradients(model, policy, weights, exact, data, dp_rank, steps)
            row["sums"] = total(row["sums"])
            found["whole"][name][" + ".join(roles)] = row
    return found


def relative(row: list[float]) -> float:
    return (row[0] / row[1]) ** 0.5


def tables(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of each site's error by codec, and of the error of all gradients."""
    theirs, ours = (found["codecs"][name] for name in ("taco-3d", "balanced-3d"))
    codecs = [
        {
            "what": what,
            "taco-3d": theirs[what]["codec"],
            "bits": 8 * theirs[what]["sums"][2] / theirs[what]["sums"][3],
            "error": relative(theirs[what]["sums"]),
            "balanced-3d": ours[what]["codec"],
            "our_bits": 8 * ours[what]["sums"][2] / ours[what]["sums"][3],
            "our_error": relative(ours[what]["sums"]),
        }
        for what in sorted(theirs)
    ]
    gradients = []
    for roles in found["whole"]["taco-3d"]:
        for name in ("taco-3d", "balanced-3d"):
            row = found["whole"][name][roles]
            gradients.append(
                {"preset": name, "compressed": roles, "error": relative(row["sums"])}
                | {"bytes": row["bytes"]}
            )
    return codecs, gradients


def show(codecs: list[dict[str, Any]], gradients: list[dict[str, Any]]) -> None:
    table = Table(title="encoded once: error, bits a value")
    for name in ("what", "taco-3d", "bits", "error", "balanced-3d", "bits", "error"):
        table.add_column(name, justify="right" if name in ("bits", "error") else "left")
    for row in codecs:
        table.add_row(
            row["what"], row["taco-3d"], f"{row['bits']:.2f}", f"{row['error']:.2%}",
            row["balanced-3d"], f"{row['our_bits']:.2f}", f"{row['our_error']:.2%}",
        )  # fmt: skip
    Console(width=160).print(table)
    table = Table(title="gradients of a step, tp 2 x dp 2: error, and bytes of a rank (from -> to)")
    for name in ("preset", "compressed", "error", "tp", "dp, weights", "dp, gradients"):
        table.add_column(name)
    for row in gradients:
        size: dict[str, list[int]] = {}
        for key, (before, after, _) in row["bytes"].items():
            label, kind, _ = key.split(", ")
            sent = "weights" if kind == "all_gather" else "gradients"
            place = "tp" if label == "tp" else f"dp, {sent}"
            held = size.setdefault(place, [0, 0])
            size[place] = [held[0] + before, held[1] + after]
        cells = [
            f"{a:,} -> {b:,}" for a, b in map(size.get, ("tp", "dp, weights", "dp, gradients"))
        ]
        table.add_row(row["preset"], row["compressed"], f"{row['error']:.3%}", *cells)
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="of training before measuring")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    ranks = Ranks(TP * DP)
    found = ranks.run(work, options.steps, timeout=3600)[0]
    ranks.stop()
    codecs, gradients = tables(found)
    show(codecs, gradients)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mesh": {"dp": DP, "tp": TP},
        "model": {"width": WIDTH, "blocks": BLOCKS, "heads": HEADS, "length": LENGTH},
        "steps": options.steps,
        "losses": found["losses"],
        "codecs": codecs,
        "gradients": gradients,
    }
    options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
