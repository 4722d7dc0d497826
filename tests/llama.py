"""A Llama built from its configuration, without pretrained weights, distributed in four usual
forms.

- ``tensor``: projections column- and row-parallel by DTensor, activations replicated on every rank.
- ``sequence``: the same, with activations split along the sequence between the projections.
- ``sharded``: every parameter is split over the ranks and gathered where it is used, then cast to
  bfloat16.
- ``mesh``: ``tensor`` over one dimension of a mesh; over the other the batch is split and gradients
  are averaged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
FORMS = ("tensor", "sequence", "sharded", "mesh")


def llama(layers: int = 2, width: int = 64, heads: int = 4, tied: bool = False) -> LlamaForCausalLM:
    """The model on one rank, with the same numbers on each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def tensor(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Column-parallel q, k, v, gate and up; row-parallel o and down.

    Each layer has two all_reduces in forward.
    """
    plan: dict = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {
        f"model.layers.*.{name}_proj": RowwiseParallel() for name in ("self_attn.o", "mlp.down")
    }
    return parallelize_module(model, mesh, plan)


def sequence(model: nn.Module, mesh: DeviceMesh, gather: str = "once") -> nn.Module:
    """Norms and residuals on a part of the sequence each.

    ``gather``: a module's input is gathered ``once``, before it and for all its projections; or as
    a local tensor (``local``); or by ``each`` projection separately.
    """
    split = {"input_layouts": Shard(1)} if gather == "each" else {}
    column, row = (
        ColwiseParallel(**split),
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    )
    plan: dict = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.mlp.down_proj": row,
    }
    plan |= {f"model.layers.*.self_attn.{name}_proj": column for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": column for name in ("gate", "up")}
    if gather != "each":
        plan["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=gather == "local",
        )
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_output=gather == "local",
        )
    return parallelize_module(model, mesh, plan)


def seen_as(model: nn.Module, change: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """Let modules see ``change(parameter)`` instead of each parameter, traced at each use.

    SimpleFSDP does the same.
    """

    def seen(name: str) -> property:
        return property(lambda module: change(module._parameters[name]))

    for module in list(model.modules()):
        if names := [
            name for name, parameter in module._parameters.items() if parameter is not None
        ]:
            kind = type(module)
            module.__class__ = type(
                f"Seen{kind.__name__}", (kind,), {name: seen(name) for name in names}
            )
    return model


def sharded(model: nn.Module, mesh: DeviceMesh, cast: str = "after") -> nn.Module:
    """Parameters split along their first dimension and gathered where they are used.

    Computation is in bfloat16, and gradients are averaged in float32. ``cast``: ``after``
    gathering, as autocast does it, or ``before``, as FSDP's own mixed precision does.
    """
    dtype = torch.bfloat16
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in parts:
                parts[parameter] = nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                )
            module._parameters[name] = parts[parameter]

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        first = (
            {"forward_dtype": dtype, "backward_dtype": torch.float32} if cast == "before" else {}
        )
        gathered = parameter.redistribute(placements=[Replicate()], **first)
        return gathered.to_local(grad_placements=[Partial("avg")]).to(dtype)

    return seen_as(model, whole)


def mesh(model: nn.Module, mesh: DeviceMesh, inner: str = "tensor") -> nn.Module:
    """``tensor`` (or ``sequence``) over the dimension ``tp``; gradients are averaged over
    ``dp``."""
    model = {"tensor": tensor, "sequence": sequence}[inner](model, mesh["tp"])
    dp = mesh["dp"]

    def averaged(parameter: nn.Parameter) -> torch.Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        copy = DTensor.from_local(local, dp, [Replicate()], run_check=False)
        mine = copy.to_local(grad_placements=[Partial("avg")])
        if not isinstance(parameter, DTensor):
            return mine
        return DTensor.from_local(
            mine, parameter.device_mesh, parameter.placements, run_check=False
        )

    return seen_as(model, averaged)


def build(
    form: str,
    ranks: int,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    tied: bool = False,
    **how: str,
) -> nn.Module:
    """A Llama in one of FORMS over all ranks; a mesh has two ranks in its dimension ``tp``."""
    model = llama(layers, width, heads, tied)
    if form == "mesh":
        return mesh(
            model, init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp")), **how
        )
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    return {"tensor": tensor, "sequence": sequence, "sharded": sharded}[form](model, line, **how)


def tokens(form: str, rank: int, batch: int = 2, length: int = 32) -> torch.Tensor:
    """The training batch of a rank: equal on all ranks of a split model, separate if the batch is
    split."""
    own = {"sharded": rank, "mesh": rank // 2}.get(form, 0)
    return torch.randint(
        0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(own)
    )


def step(
    compiled: Callable, model: nn.Module, batch: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and this rank's gradients of one training step."""
    model.zero_grad()
    loss = compiled(input_ids=batch, labels=batch).loss
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {
        name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()
    }
