"""Codes are gathered for the layers of torchao: float8 training and dynamic int8, as it writes them
today."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ag, rs
from graphs import as_rank
from row_scales import scales_of_rows
from tiers import VERSION, rarely
from torch import nn
from torch.utils.checkpoint import checkpoint

import commpass

pytest.importorskip("torchao", reason="torchao is an optional requirement of the tests")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.mx_formats.config import ScaleCalculationMode as MODE
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

SLOW = commpass.ethernet(0.001)
RANKS, ROWS, WIDTH = 4, 64, 128
VALUES = ROWS * WIDTH
NAME, IN_16_BITS = "quantised before gather", "quantised in 16 bits before gather"


@pytest.fixture(autouse=True)
def matmuls_with_scales_of_rows():
    with scales_of_rows():
        yield


class Gathered(nn.Module):
    """A linear layer of all ranks' tokens."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False)).to(dtype)

    def forward(self, x):
        return self.layer(ag(x))


class Scattered(torch.autograd.Function):
    """A reduce_scatter, whose backward gathers the gradient."""

    @staticmethod
    def forward(ctx, x):
        return rs(x)

    @staticmethod
    def backward(ctx, gradient):
        return ag(gradient)


class Summed(Gathered):
    """A linear layer whose results are summed and scattered."""

    def forward(self, x):
        return Scattered.apply(self.layer(x))


def float8(recipe):
    config = Float8LinearConfig.from_recipe_name(recipe)
    return lambda layer: convert_to_float8_training(layer, config=config)


def int8(layer):
    quantize_(layer, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))


def plans_of(model, x):
    """Compile and call a model on one of four simulated ranks. Return its plans."""
    torch._dynamo.reset()
    before = len(commpass.plans())
    backend = commpass.backend("lossless", inner="eager", profile=SLOW, strict=True)
    result = torch.compile(model, backend=backend, fullgraph=True)(x)
    if torch.is_grad_enabled():
        result.sum().backward()
    return commpass.plans()[before:]


IN_BF16 = "dynamic int8"
"""torchao computes these scales and codes in the dtype of the values."""
SCALES_IN_BF16 = ("int32", 4 * ROWS) if VERSION < (2, 12) else ("uint8", 2 * ROWS)
"""torch 2.11 removes the cast to bfloat16 between two of float32, and scales stay in float32."""
CASES = {
    "tensorwise": (float8("tensorwise"), torch.bfloat16, [("uint8", 2), ("uint8", VALUES)]),
    "rowwise": (float8("rowwise"), torch.bfloat16, [("uint8", 2 * ROWS), ("uint8", VALUES)]),
    "gradients of weights in bfloat16": (
        float8("rowwise_with_gw_hp"),
        torch.bfloat16,
        [("uint8", 2 * ROWS), ("uint8", VALUES)],
    ),
    IN_BF16: (int8, torch.bfloat16, [SCALES_IN_BF16, ("int8", VALUES)]),
    "dynamic int8 of float32": (int8, torch.float32, [("int32", 4 * ROWS), ("int8", VALUES)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layers_gather_codes(name):
    convert, dtype, sent = CASES[name]
    with as_rank(0, RANKS), torch.no_grad():
        model = Gathered(dtype)
        convert(model.layer)
        (plan,) = plans_of(model, torch.randn(ROWS, WIDTH).to(dtype))
    assert [step.rule for step in plan.simplified] == [IN_16_BITS if name == IN_BF16 else NAME]
    assert sorted((site.dtype, site.bytes) for site in plan.sites) == sorted(sent)
    assert plan.simplified[0].saved_bytes == VALUES * dtype.itemsize - sum(n for _, n in sent)
    takes = plan.simplified[0].into.endswith("; consumer: scaled_mm takes the codes")
    assert takes == ("dynamic" not in name)  # on a CPU, torchao multiplies a cast of int8 codes


FORMATS = {
    "mxfp8": (lambda x: to_mx(x, torch.float8_e4m3fn, 32, MODE.RCEIL), [VALUES // 32, VALUES]),
    "mxfp8 with scales rounded to even": (
        lambda x: to_mx(x, torch.float8_e4m3fn, 32, MODE.EVEN),
        [VALUES // 32, VALUES],
    ),
    "mxfp4": (
        lambda x: to_mx(x, torch.float4_e2m1fn_x2, 32, MODE.RCEIL),
        [VALUES // 32, VALUES // 2],
    ),
    "nvfp4": (
        lambda x: nvfp4_quantize(x, 16, x.abs().amax().float() / (448 * 6)),
        [2, VALUES // 16, VALUES // 2],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_hardware_are_gathered_as_they_are_stored(name):
    cast, sent = FORMATS[name]

    def gathered(x):
        return [each.view(torch.uint8) for each in cast(ag(x))]

    with as_rank(0, RANKS), torch.no_grad():
        (plan,) = plans_of(gathered, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    assert [step.rule for step in plan.simplified] == [NAME]
    assert sorted(site.bytes for site in plan.sites) == sent
    assert {site.dtype for site in plan.sites} == {"uint8"}


def test_gradients_are_gathered_in_codes_for_both_products():
    with as_rank(0, RANKS):
        model = Summed(torch.bfloat16)
        float8("tensorwise")(model.layer)
        x = torch.randn(RANKS * ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        forward, backward = plans_of(model, x)
    assert not forward.simplified
    assert [step.rule for step in backward.simplified] == [NAME]
    sent = sorted((site.dtype, site.bytes) for site in backward.sites)
    assert sent == [("uint8", 2), ("uint8", 2 * VALUES)]


@pytest.mark.slow
def test_training_gathers_codes_and_saves_them_for_backward():
    with as_rank(0, RANKS):
        model = Gathered(torch.bfloat16)
        float8("tensorwise")(model.layer)
        forward, backward = plans_of(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    assert [step.rule for step in forward.simplified] == [NAME]
    assert sorted(site.bytes for site in forward.sites) == [2, VALUES]
    assert not backward.sites


@pytest.mark.slow
def test_training_gathers_codes_of_rows_and_of_columns_when_values_are_float32():
    with as_rank(0, RANKS):
        model = Gathered(torch.float32)
        float8("rowwise")(model.layer)
        forward, backward = plans_of(model, torch.randn(ROWS, WIDTH))
    assert [step.rule for step in forward.simplified] == [NAME]
    maxima = [("int32", 4 * ROWS), ("int32", 4 * WIDTH)]
    sent = sorted((site.dtype, site.bytes) for site in forward.sites)
    assert sent == [*maxima, ("uint8", VALUES), ("uint8", VALUES)]
    assert not backward.sites


class Checkpointed(Gathered):
    """A linear layer of all ranks' tokens, whose gather is repeated in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", rarely("tensorwise")])
def test_repeated_gathers_send_only_the_codes_that_each_pass_needs(recipe):
    with as_rank(0, RANKS):
        model = Checkpointed(torch.bfloat16)
        float8(recipe)(model.layer)
        plans = plans_of(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    rows = recipe == "rowwise"
    for plan, maxima in zip(plans, (ROWS, WIDTH) if rows else (1, 1), strict=True):
        assert [step.rule for step in plan.simplified] == [NAME]
        assert sorted(site.bytes for site in plan.sites) == [2 * maxima, VALUES]
        assert {site.dtype for site in plan.sites} == {"uint8"}


@pytest.mark.slow
def test_values_that_backward_multiplies_stay():
    with as_rank(0, RANKS):
        model = Gathered(torch.bfloat16)
        float8("rowwise_with_gw_hp")(model.layer)
        forward, _ = plans_of(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    assert not forward.simplified
    assert [(site.dtype, site.bytes) for site in forward.sites] == [("bfloat16", 2 * VALUES)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_gradients_that_are_needed_in_two_forms_stay(recipe):
    with as_rank(0, RANKS):
        model = Summed(torch.bfloat16)
        float8(recipe)(model.layer)
        x = torch.randn(RANKS * ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        _, backward = plans_of(model, x)
    assert not backward.simplified


class Joined(Gathered):
    """A linear layer of sequences that are divided over the ranks, as of DTensor's ``Shard(1)``."""

    def forward(self, x):
        return self.layer(torch.cat(ag(x).split(len(x)), 1))


@pytest.mark.slow
def test_divided_sequences_stay_in_training_with_a_reason():
    """torchao flattens batch and sequence before its second cast, so rows of all ranks mix."""
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.bfloat16)
    with as_rank(0, RANKS):
        model = Joined(torch.bfloat16)
        float8("tensorwise")(model.layer)
        with torch.no_grad():
            (inference,) = plans_of(model, x)
        forward, _ = plans_of(model, x)
    assert [step.rule for step in inference.simplified] == [NAME]
    assert not forward.simplified
    (site,) = forward.sites
    assert "its values are quantised after it" in site.reason
