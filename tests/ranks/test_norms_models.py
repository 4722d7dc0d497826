"""Norms of Gemma 3 and GPT-2 in the kernels that decode, on ranks under Inductor: a training step
with the numbers of the inline form."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from functional_ops import ar
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpass
from commpass.codecs import codec
from commpass.distributed.samples import Samples

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.every]
WIDTH, VOCABULARY = 256, 256
INT8 = codec("int8")


def gemma_3() -> nn.Module:
    """Norms before and after each half of a layer, and of queries and keys."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "head_dim": WIDTH // 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = transformers.Gemma3TextConfig(vocab_size=VOCABULARY, **sizes, **heads, use_cache=False)
    model = transformers.Gemma3ForCausalLM(config)
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


class RowParallel(nn.Module):
    """A linear layer of GPT-2 with a rank's rows of its weight. The bias is added to the sum."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        part = layer.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
        self.weight, self.bias = nn.Parameter(part.clone()), layer.bias

    def forward(self, x):
        part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        return ar(part @ self.weight) + self.bias


def gpt_2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=4, n_positions=64, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()  # without dropout
    for block in model.transformer.h:
        block.attn.c_proj, block.mlp.c_proj = map(
            RowParallel, (block.attn.c_proj, block.mlp.c_proj)
        )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()))
    return model


MODELS = {"gemma 3": gemma_3, "gpt 2": gpt_2}
FUSED = {"gemma 3": "decode+norm+add+norm", "gpt 2": "decode+bias+add+norm"}


def step(
    name: str, lowering: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str], list[torch.Tensor]]:
    """Return the logits, the gradients, the reasons of the sites in forward, and what this rank
    sends there, decoded, with a row for each token."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, known = MODELS[name](), len(commpass.plans())
    rule = commpass.Rule(
        direction="forward", codec="int8", algorithm="two_shot", lowering=lowering, force=True
    )
    policy = commpass.Policy(rules=[rule], max_error=0.5, error_sample_rate=1.0)
    backend, sent = commpass.backend(policy, strict=True), list[torch.Tensor]()

    def take(_, number, x, limit=None):
        rows = x.detach().reshape(-1, WIDTH)
        sent.append(INT8.decode(INT8.encode(rows)))

    tokens = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(5))
    with mock.patch.object(Samples, "_take", take):
        compiled = torch.compile(model, backend=backend, dynamic=False)
        found = compiled(input_ids=tokens, labels=tokens)
    found.loss.backward()
    gradients = {key: each.grad for key, each in model.named_parameters()}
    local = {k: g.to_local() if isinstance(g, DTensor) else g for k, g in gradients.items()}
    plans = [plan for plan in commpass.plans()[known:] if plan.direction == "forward"]
    reasons = [site.reason for plan in plans for site in plan.compressed]
    return found.logits.detach(), local, reasons, sent


def compare(name: str) -> None:
    logits, gradients, _, sent = step(name, "inline")
    fused_logits, fused, reasons, fused_sent = step(name, "kernel")
    assert len(reasons) == len(sent) == len(fused_sent) == 2
    assert all(FUSED[name] in reason for reason in reasons)
    # A value midway between two codes may get the other one, on any rank, for a few tokens.
    equal = torch.ones(logits.shape[0] * logits.shape[1])
    for one, other in zip(sent, fused_sent, strict=True):
        equal *= one.isclose(other, rtol=1e-4, atol=1e-7).all(1)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    alike = equal.bool()
    assert (~alike).sum() <= 3
    torch.testing.assert_close(
        fused_logits.flatten(0, 1)[alike], logits.flatten(0, 1)[alike], rtol=1e-4, atol=1e-4
    )
    for key, each in gradients.items():
        assert (fused[key] - each).norm() <= 5e-3 * each.norm(), key


@pytest.mark.parametrize("name", MODELS)
def test_norms_of_a_model_are_in_the_kernels_that_decode(ranks2, name):
    ranks2.run(compare, name, timeout=500)
