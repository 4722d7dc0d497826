"""A small language model with torchao's float8 and int8 layers, in each parallelism.

``train`` and ``infer`` return what a rank sees: losses, the plans, and the bytes of FSDP2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from torchao.quantization import quantize_

import commpass
from commpass.parallel import compress_fsdp

WIDTH, LAYERS, BATCH, CONTEXT = 256, 1, 8, 128
WHOLE, PARTS = Replicate(), Shard(1)  # all positions, or some of them
SLOW = commpass.ethernet(0.1)
PLAIN = "plain"
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(silu(self.w1(x)) * self.w2(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Model(nn.Module):
    """Return the mean cross entropy of each next byte, for bytes ``[batch, CONTEXT + 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return cross_entropy(logits.float(), text[:, 1:].flatten())


class Gathered(nn.Module):
    """A layer of all ranks' tokens, whose results are scattered, with functional collectives.

    Each rank has its own part of the hidden features, as a local tensor.
    """

    def __init__(self, group: Any):
        super().__init__()
        self.group, own = group, 2 * WIDTH // group.size()
        self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, own), (own, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        whole = all_gather_tensor(x, 0, self.group)
        y = self.down(torch.relu(self.up(whole)))
        return x + reduce_scatter_tensor(y, "sum", 0, self.group)


def is_ffn(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "ffn" in name


def float8(recipe: str, **changed: Any) -> Callable[[nn.Module], Any]:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **changed)
    return lambda model: convert_to_float8_training(model, module_filter_fn=is_ffn, config=config)


def quantised(config: Any) -> Callable[[nn.Module], Any]:
    return lambda model: quantize_(model, config, filter_fn=is_ffn)


def tensor_parallel(model: Model, mesh: DeviceMesh, in_float8: bool = False) -> None:
    columns, rows = _styles(in_float8)[1:]
    for block in model.blocks:
        styles = {"ffn.w1": columns(), "ffn.w2": columns(), "ffn.out": rows()}
        parallelize_module(block, mesh, styles)


def sequence_parallel(model: Model, mesh: DeviceMesh, in_float8: bool = False) -> None:
    prepare, columns, rows = _styles(in_float8)
    for block in model.blocks:
        styles = {
            "norm": SequenceParallel(),
            "ffn": prepare(input_layouts=PARTS, desired_input_layouts=WHOLE),
            "ffn.w1": columns(),
            "ffn.w2": columns(),
            "ffn.out": rows(output_layouts=PARTS),
        }
        parallelize_module(block, mesh, styles)
    cut, joined = (
        PrepareModuleInput(
            input_layouts=(given,), desired_input_layouts=(wanted,), use_local_output=True
        )
        for given, wanted in ((WHOLE, PARTS), (PARTS, WHOLE))
    )
    parallelize_module(model, mesh, {"blocks.0": cut, "norm": SequenceParallel(), "head": joined})


def _styles(in_float8: bool) -> tuple[Any, Any, Any]:
    """Return the styles of an input, of columns and of rows, torch's or torchao's."""
    if in_float8:
        return PrepareFloat8ModuleInput, Float8ColwiseParallel, Float8RowwiseParallel
    return PrepareModuleInput, ColwiseParallel, RowwiseParallel


@dataclass(frozen=True)
class Result:
    """``losses`` of the steps on this rank, the plans, and the bytes of FSDP2: plain, sent."""

    losses: list[float]
    plans: list[commpass.Plan]
    fsdp: tuple[int, int] | None = None


def backend_of(policy: str) -> Any:
    """Return a backend that runs the graphs that Inductor would get, operator by operator.

    ``PLAIN`` is torch's own one, without commpass.
    """
    if policy == PLAIN:
        return "aot_eager_decomp_partition"
    return commpass.backend(policy, profile=SLOW, inner="eager", strict=True)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)


def start(dtype: torch.dtype) -> Model:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model().to(dtype)


def train(
    policy: str,
    convert: Callable[[nn.Module], Any],
    parallelize: Callable[[Model, DeviceMesh], None],
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
) -> Result:
    """Train with tensor parallelism, in one graph of forward and one of backward."""
    mesh, before = init_device_mesh("cpu", (dist.get_world_size(),)), len(commpass.plans())
    model = start(dtype)
    convert(model)
    parallelize(model, mesh)
    loss_of = torch.compile(model, backend=backend_of(policy), fullgraph=True)
    losses = _steps(model, loss_of, steps)
    return Result(losses, commpass.plans()[before:])


def train_fsdp(
    policy: str,
    convert: Callable[[nn.Module], Any],
    mixed: MixedPrecisionPolicy | None = None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    tensor_parallel_ranks: int = 1,
    steps: int = 3,
) -> Result:
    """Train under FSDP2, over tensor parallelism if that has more than one rank."""
    ranks = dist.get_world_size() // tensor_parallel_ranks
    mesh = init_device_mesh("cpu", (ranks, tensor_parallel_ranks), mesh_dim_names=("dp", "tp"))
    model = start(torch.float32)
    convert(model)
    if tensor_parallel_ranks > 1:
        tensor_parallel(model, mesh["tp"])
    given: Any = {"mesh": mesh["dp"], "mp_policy": mixed or MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    handle = compress_fsdp(model, policy, profile=SLOW, strict=True) if policy != PLAIN else None
    losses = _steps(model, model, steps, after_step)
    if handle is None:
        return Result(losses, [])
    sent = handle.bytes.values()
    return Result(
        losses, handle.plans, (sum(each.plain for each in sent), sum(each.sent for each in sent))
    )


def _steps(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    steps: int,
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        losses.append(loss.item())
    return losses


@torch.no_grad()
def infer(
    policy: str,
    config: Any,
    parallelize: Callable[[Model, DeviceMesh], None],
    quantise_first: bool = False,
) -> Result:
    """Return the losses of a bfloat16 model of quantised weights, as DTensors."""
    mesh, before = init_device_mesh("cpu", (dist.get_world_size(),)), len(commpass.plans())
    model = start(torch.bfloat16).eval()
    if quantise_first:
        quantised(config)(model)
    parallelize(model, mesh)
    if not quantise_first:
        quantised(config)(model)
    loss_of = torch.compile(model, backend=backend_of(policy), fullgraph=True)
    losses = [loss_of(batch(step)).item() for step in range(2)]
    return Result(losses, commpass.plans()[before:])


@torch.no_grad()
def infer_local(policy: str, config: Any, dtype: torch.dtype) -> Result:
    """Return sums of results of a layer whose ranks quantise their parts of the weights."""
    before = len(commpass.plans())
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())
    layer = Gathered(dist.group.WORLD).to(dtype).eval()
    quantize_(layer, config)
    run = torch.compile(layer, backend=backend_of(policy), fullgraph=True)
    x = torch.randn(512, WIDTH, dtype=dtype)
    losses = [run(x * scale).double().square().mean().item() for scale in (1.0, 3.0)]
    return Result(losses, commpass.plans()[before:])
