"""Norms are found in graphs as models, torch's decompositions and its partitioner write them."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
import transformers
from graphs import trace
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from commpass.lowering.chain import (
    Cast,
    Normalize,
    Scale,
    Shift,
    apply,
    apply_further,
)
from commpass.passes.fx.norms import Norm, norms_of

F32, BF16 = torch.float32, torch.bfloat16
H = 48
CLOSE = {F32: {"rtol": 1e-5, "atol": 1e-5}, BF16: {"rtol": 2e-2, "atol": 1e-5}}
MODULES = {
    "llama": lambda: LlamaRMSNorm(H, eps=1e-6),
    "gemma": lambda: GemmaRMSNorm(H, eps=1e-6),
    "rms": lambda: nn.RMSNorm(H, eps=1e-6),
    "rms without weight": lambda: nn.RMSNorm(H, eps=1e-6, elementwise_affine=False),
    "layer": lambda: nn.LayerNorm(H, eps=1e-6),
    "layer without weight": lambda: nn.LayerNorm(H, eps=1e-6, elementwise_affine=False),
    "layer without bias": lambda: nn.LayerNorm(H, eps=1e-6, bias=False),
}


def steps_after(name: str, dtype: torch.dtype) -> tuple:
    """What follows the normalized values, as each module defines it."""
    narrow = (Cast(BF16),) if dtype == BF16 else ()
    return {
        "llama": (*narrow, Scale(H, dtype)),
        "gemma": (Scale(H, dtype, 1.0), *narrow),
        "rms": (Scale(H, dtype), *narrow),
        "rms without weight": narrow,
        "layer": (Scale(H, dtype), Shift(H, dtype), *narrow),
        "layer without weight": narrow,
        "layer without bias": (Scale(H, dtype), *narrow),
    }[name]


def norms(gm) -> list[Norm]:
    """The norms of a graph. A norm of a cast of values is that of the values."""
    found: dict = {}
    for node in gm.graph.nodes:
        for norm in norms_of(node):
            found.setdefault(norm.result, norm)
    return list(found.values())


def filled(name: str, dtype: torch.dtype) -> nn.Module:
    module = MODULES[name]().to(dtype)
    random = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=random))
    return module


def forward_graph(module, *inputs):
    """The graph of a training step's forward, and its inputs."""
    found = []

    def capture(gm, example):
        found.append(gm)
        return gm.forward

    backend = aot_autograd(
        fw_compiler=capture,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    torch.compile(module, backend=backend, dynamic=False)(*inputs)
    return found[0]


def computed(gm, inputs) -> dict:
    """Every value of a graph by its node, for one run."""
    values: dict = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            values[node] = super().run_node(node)
            return values[node]

    Recorder(gm, garbage_collect_values=False).run(*inputs)
    return values


def by_steps(norm: Norm, values: dict) -> list[torch.Tensor]:
    rows = values[norm.input].reshape(1, -1)
    others = (values[other].reshape(1, -1) for other in norm.others)
    made = []
    for step in norm.steps:
        made += apply_further(step, rows)
        rows = apply(step, rows, others, rows.shape[1])
    return [rows.reshape(values[norm.result].shape), *made]


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", MODULES)
def test_norm_of_a_module_is_found_with_its_casts(name, dtype):
    module = filled(name, dtype)
    x, r = torch.randn(2, 3, H).to(dtype), torch.randn(2, 3, H).to(dtype)
    rows = list(module.parameters())

    def function(x, r):
        h = x + r
        return h, module(h)

    with torch.no_grad():
        gm = forward_graph(function, x, r)
    (norm,) = norms(gm)
    assert norm.steps[0] == Normalize(H, pytest.approx(1e-6), name.startswith("layer"))
    assert norm.steps[1:] == steps_after(name, dtype)
    assert norm.input.target is torch.ops.aten.add.Tensor
    assert [other.op for other in norm.others] == ["placeholder"] * len(rows)
    assert norm.result in gm.graph.output_node().all_input_nodes
    values = computed(gm, [x, r, *rows])
    (made,) = by_steps(norm, values)
    assert made.dtype == values[norm.result].dtype
    torch.testing.assert_close(
        made, values[norm.result], rtol=1e-5 if dtype == F32 else 2e-2, atol=1e-5
    )


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("name", "saved"), [("llama", ("rsqrt",)), ("gemma", ("rsqrt",)), ("layer", ("mean", "rsqrt"))]
)
def test_statistics_that_backward_uses_are_found(name, saved, dtype):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = filled(name, dtype), nn.Linear(H, H, bias=False, dtype=dtype)

        def forward(self, x, r):
            h = x + r
            return h, self.linear(self.norm(h))

    shape = (2, 3, H)
    x, r = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    gm = forward_graph(Block(), x, r)
    (norm,) = norms(gm)
    assert norm.steps[0].saved == saved
    assert len(norm.saved) == len(saved)
    assert len(norm.input.users) > 1  # the residual stream goes on


def graph_of_one_operator(operator, x, *rows) -> fx.GraphModule:
    """A graph that other compile stacks may have: the operator with its first result."""
    graph = fx.Graph()
    inputs = [graph.placeholder("x"), *(graph.placeholder(f"row_{i}") for i in range(len(rows)))]
    call = graph.call_function(operator, (inputs[0], [H], *inputs[1:], 1e-6))
    result = graph.call_function(getitem, (call, 0))
    graph.output([result])
    mode = FakeTensorMode()
    with mode:
        for node, value in zip(inputs, (x, *rows), strict=True):
            node.meta["val"] = mode.from_tensor(value)
        call.meta["val"] = operator(
            inputs[0].meta["val"], [H], *(node.meta["val"] for node in inputs[1:]), 1e-6
        )
    result.meta["val"] = call.meta["val"][0]
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("name", ["native_layer_norm", "_fused_rms_norm"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_that_is_one_operator_is_found(name, dtype):
    operator = getattr(torch.ops.aten, name).default
    rows = [torch.randn(H).to(dtype) for _ in range(2 if "layer" in name else 1)]
    x = torch.randn(2, H).to(dtype)
    gm = graph_of_one_operator(operator, x, *rows)
    (norm,) = norms(gm)
    assert norm.steps[0] == Normalize(H, 1e-6, "layer" in name)
    assert norm.result in gm.graph.output_node().all_input_nodes
    values = computed(gm, [x, *rows])
    torch.testing.assert_close(
        by_steps(norm, values)[0],
        values[norm.result],
        rtol=1e-5 if dtype == F32 else 2e-2,
        atol=1e-5,
    )


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MODELS = {  # norms of a layer, and one after the last
    "Llama": ({}, 2),
    "Qwen2": ({}, 2),
    "Qwen3": ({}, 4),
    "Gemma": ({}, 2),
    "Gemma2": ({}, 4),
    "DeepseekV3": (LATENT, 4),
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", MODELS)
def test_all_norms_of_a_model_are_found(name, dtype):
    more, a_layer = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**(SIZES | more))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    gm = forward_graph(model, torch.zeros(2, 8, dtype=torch.int64))
    found = norms(gm)
    assert len(found) == 2 * a_layer + 1
    unit = 1.0 if name.startswith("Gemma") else 0.0
    for norm in found:
        (scale,) = (step for step in norm.steps if isinstance(step, Scale))
        assert scale.offset == unit
        assert norm.result.meta["val"].dtype == dtype


# --- what is not ----------------------------------------------------------------------------------


def rms(x, w, dim=-1, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps) * w


def of_another_dimension(x, w):
    return [rms(x, w, dim=0)]


def of_two_dimensions(x, w):
    return [rms(x, w, dim=(0, 1))]


def with_eps_as_a_tensor(x, w):
    return [rms(x, w, eps=w.sum())]


def with_the_mean_used_elsewhere(x, w):
    mean = x.pow(2).mean(-1, keepdim=True)
    return [x * torch.rsqrt(mean + 1e-6) * w, mean]


def with_the_squares_used_elsewhere(x, w):
    squares = x.pow(2)
    return [x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6) * w, squares]


def of_cubes(x, w):
    return [x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6) * w]


def of_other_values(x, w):
    return [(x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w]


def with_a_scaled_eps(x, w):
    mean = x.pow(2).mean(-1, keepdim=True)
    return [x * torch.rsqrt(torch.add(mean, 1e-6, alpha=2)) * w]


def with_an_unbiased_variance(x, w):
    variance, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
    return [(x - mean) * torch.rsqrt(variance + 1e-6) * w]


def with_the_variance_used_elsewhere(x, w):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return [(x - mean) * torch.rsqrt(variance + 1e-6) * w, variance]


def with_the_difference_used_elsewhere(x, w):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    difference = x - mean
    return [difference * torch.rsqrt(variance + 1e-6) * w, difference]


def with_the_mean_minus_values(x, w):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return [(mean - x) * torch.rsqrt(variance + 1e-6) * w]


@pytest.mark.parametrize(
    "function",
    [
        of_another_dimension,
        of_two_dimensions,
        with_eps_as_a_tensor,
        with_the_mean_used_elsewhere,
        with_the_squares_used_elsewhere,
        of_cubes,
        of_other_values,
        with_a_scaled_eps,
        with_an_unbiased_variance,
        with_the_variance_used_elsewhere,
        with_the_difference_used_elsewhere,
        with_the_mean_minus_values,
    ],
)
def test_other_formula_is_no_norm(function):
    assert norms(trace(function, torch.randn(4, H), torch.randn(H))) == []


def test_norm_in_float64_is_none():
    x, w = torch.randn(4, H, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
    assert norms(trace(lambda x, w: [rms(x, w)], x, w)) == []


@pytest.mark.parametrize("shape", [(4, 1), (4, H), (1,), (1, H)])
def test_weight_of_another_shape_is_no_part_of_the_norm(shape):
    (norm,) = norms(trace(lambda x, w: [rms(x, w)], torch.randn(4, H), torch.randn(shape)))
    assert norm.steps == (Normalize(H, 1e-6),)


def test_normalized_values_that_others_use_end_the_norm():
    def function(x, w):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [y * w, y]

    (norm,) = norms(trace(function, torch.randn(4, H), torch.randn(H)))
    assert not any(isinstance(step, Scale) for step in norm.steps)


def test_bias_with_a_factor_is_no_part_of_the_norm():
    def function(x, w):
        return [torch.add(rms(x, w), w, alpha=2)]

    (norm,) = norms(trace(function, torch.randn(4, H), torch.randn(H)))
    assert norm.steps == (Normalize(H, 1e-6), Scale(H, F32))


def test_offset_that_is_added_in_bfloat16_is_no_part_of_the_norm():
    def function(x, w):
        x = x.float()
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [y.to(BF16) * (w + 1.0)]

    x, w = torch.randn(4, H).to(BF16), torch.randn(H).to(BF16)
    (norm,) = norms(trace(function, x, w))
    assert norm.steps[-1] == Scale(H, BF16)
    assert norm.others[0].target is torch.ops.aten.add.Tensor
