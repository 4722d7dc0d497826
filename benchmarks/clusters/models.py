"""One layer of a Llama or of a mixture of experts on one rank of a mesh, for ``commpass.simulate``.

Exchanges are functional collectives in autograd functions, as in a hand-written training program:
sums of tensor parallelism, all_to_alls of expert parallelism, sums of gradients over data-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

ops = torch.ops._c10d_functional
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """The sizes of a model. ``tokens`` is the length of a sequence, which is one micro-batch.

    With ``experts``, ``ffn`` is the width of one of them, and each token uses ``top`` experts.
    """

    name: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_width: int
    tokens: int
    experts: int = 0
    top: int = 1

    @property
    def parameters(self) -> int:
        """The number of parameters of all layers, without embeddings and norms."""
        projections = (2 * self.heads + 2 * self.kv_heads) * self.head_width * self.width
        mlps = 3 * self.width * self.ffn * max(self.experts, 1)
        return self.layers * (projections + mlps + self.width * self.experts)


LLAMA_8B = Model("Llama 8B", 32, 4096, 14336, 32, 8, 128, 8192)
LLAMA_70B = Model("Llama 70B", 80, 8192, 28672, 64, 8, 128, 8192)
LLAMA_405B = Model("Llama 405B", 126, 16384, 53248, 128, 8, 128, 8192)
MIXTURE = Model("Mixture of experts, 235B", 94, 4096, 1536, 64, 4, 128, 4096, experts=128, top=8)
SMALL = Model("small", 3, 1024, 4096, 16, 4, 64, 1024)


class AllReduce(torch.autograd.Function):
    """Sum partial results over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class AllReduceGradient(torch.autograd.Function):
    """Sum the gradient of an input that all tensor-parallel ranks use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ops.wait_tensor(ops.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


class AverageGradient(torch.autograd.Function):
    """Average a weight's gradient over data-parallel ranks in float32, with the sum of the earlier
    micro-batches in ``accumulated``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, accumulated: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(accumulated)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (accumulated,) = ctx.saved_tensors
        mean = ops.wait_tensor(ops.all_reduce(accumulated + gradient, "avg", ctx.group))
        return mean.to(gradient.dtype), None, None


class AllToAll(torch.autograd.Function):
    """Send an equal number of rows to each expert-parallel rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return AllToAll.exchange(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.exchange(gradient, ctx.ranks, ctx.group), None, None

    @staticmethod
    def exchange(x: Tensor, ranks: int, group: str) -> Tensor:
        rows = [x.shape[0] // ranks] * ranks
        return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), rows, rows, group))


class Weights(nn.Module):
    """Weights by name, whose gradients are averaged over ``group`` if it is given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], group: str | None):
        super().__init__()
        self.group = group
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=DTYPE)))
            if group is not None:
                self.register_buffer(f"{name}_gradient", torch.empty(shape, dtype=torch.float32))

    def read(self, name: str) -> Tensor:
        weight = getattr(self, name)
        if self.group is None:
            return weight
        return AverageGradient.apply(weight, getattr(self, f"{name}_gradient"), self.group)


class Layer(nn.Module):
    """Attention and MLP, or a mixture of experts, of one rank. ``dp`` is the mesh dimension over
    which gradients are averaged, if they are.

    Attention and MLP are divided over ``tp``, experts over ``ep``. Ranks of ``ep`` have different
    tokens and equal attentions.
    """

    def __init__(self, model: Model, mesh: DeviceMesh, averages: bool):
        super().__init__()
        self.model, sizes = model, dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self.tp, self.ep = sizes.get("tp", 1), sizes.get("ep", 1)
        self.tp_group = group_of(mesh, "tp") if self.tp > 1 else ""
        self.ep_group = group_of(mesh, "ep") if self.ep > 1 else ""
        replicas = [name for name in ("dp", "ep") if sizes.get(name, 1) > 1]
        inner = group_of(mesh, *replicas) if averages and replicas else None
        experts = group_of(mesh, "dp") if averages and sizes["dp"] > 1 else None
        self.heads, self.kv_heads = model.heads // self.tp, max(model.kv_heads // self.tp, 1)
        width, head, ffn = model.width, model.head_width, model.ffn // self.tp
        self.attention = Weights(
            {
                "qkv": (width, (self.heads + 2 * self.kv_heads) * head),
                "out": (self.heads * head, width),
            },
            inner,
        )
        if model.experts:
            local = model.experts // self.ep
            shapes = {"up": (local, width, 2 * ffn), "down": (local, ffn, width)}
            self.router = Weights({"router": (width, model.experts)}, inner)
            self.mlp = Weights(shapes, experts)
            rows = model.tokens * model.top
            self.register_buffer("order", torch.empty(rows, dtype=torch.int64))
            self.register_buffer("inverse", torch.empty(rows, dtype=torch.int64))
        else:
            self.mlp = Weights({"up": (width, 2 * ffn), "down": (ffn, width)}, inner)
        self.norms = nn.ParameterList(torch.empty(width, dtype=DTYPE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._summed(self._attend(self._shared(self._normed(x, 0))))
        y = self._normed(x, 1)
        if self.model.experts:
            return x + self._mixture(y[0]).unsqueeze(0)
        gate, up = (self._shared(y) @ self.mlp.read("up")).chunk(2, -1)
        return x + self._summed((silu(gate) * up) @ self.mlp.read("down"))

    def _normed(self, x: Tensor, which: int) -> Tensor:
        return rms_norm(x, (self.model.width,), self.norms[which])

    def _summed(self, x: Tensor) -> Tensor:
        return AllReduce.apply(x, self.tp_group) if self.tp > 1 else x

    def _shared(self, x: Tensor) -> Tensor:
        return AllReduceGradient.apply(x, self.tp_group) if self.tp > 1 else x

    def _attend(self, x: Tensor) -> Tensor:
        head = self.model.head_width
        sizes = [self.heads * head, self.kv_heads * head, self.kv_heads * head]
        parts = (x @ self.attention.read("qkv")).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2) @ self.attention.read("out")

    def _mixture(self, x: Tensor) -> Tensor:
        """Route tokens to experts. All experts get equally many, in an order that is an input."""
        shares = (x @ self.router.read("router")).float().softmax(-1).topk(self.model.top).values
        rows = x.repeat_interleave(self.model.top, 0)[self.order]
        rows = self._exchanged(rows)
        local = self.model.experts // self.ep
        by_expert = rows.unflatten(0, (self.ep, local, -1)).transpose(0, 1).flatten(1, 2)
        gate, up = (by_expert @ self.mlp.read("up")).chunk(2, -1)
        done = (silu(gate) * up) @ self.mlp.read("down")
        done = done.unflatten(1, (self.ep, -1)).transpose(0, 1).flatten(0, 2)
        back = self._exchanged(done)[self.inverse].unflatten(0, (-1, self.model.top))
        return (back * shares.to(DTYPE).unsqueeze(-1)).sum(1)

    def _exchanged(self, rows: Tensor) -> Tensor:
        return AllToAll.apply(rows, self.ep, self.ep_group) if self.ep > 1 else rows


def group_of(mesh: DeviceMesh, *names: str) -> str:
    """Return the name of the group of this rank over one or more neighbouring mesh dimensions."""
    if len(names) == 1:
        return mesh[names[0]].get_group().group_name
    with unset_fake_temporarily():  # the mesh itself has a tensor of ranks, with values
        return mesh[names]._flatten("_".join(names)).get_group().group_name


def builder(model: Model, *, averages: bool, layers: int = 1) -> Any:
    """Return the function that makes ``layers`` layers and their input, for ``simulate``."""

    def build(mesh: DeviceMesh) -> tuple[nn.Module, tuple[Tensor]]:
        made = nn.Sequential(*(Layer(model, mesh, averages) for _ in range(layers)))
        x = torch.empty(1, model.tokens, model.width, dtype=DTYPE, requires_grad=True)
        return made, (x,)

    return build
