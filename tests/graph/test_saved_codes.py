"""Codes are saved for backward instead of a gathered value, if checkpointing repeats its
consumers."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import pytest
import torch
from functional_ops import ag
from graphs import as_rank, trace
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import commpass
from commpass.passes import joint

SLOW = commpass.ethernet(0.001)
RANKS, ROWS, WIDTH, COLUMNS = 4, 8, 64, 16
VALUES = ROWS * WIDTH
NAME = "quantised before gather"


class Rounded(torch.autograd.Function):
    """int8 codes of rows and their decoded values. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-8) / 127
        codes = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
        return codes.to(x.dtype) * scale.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def linear(x, weight):
    return Rounded.apply(x) @ weight


def sine(x, weight):
    """A layer whose backward needs the value."""
    return linear(x, weight).sum() + x.float().sin().sum()


def outside(layer, x, weight):
    return checkpoint(layer, ag(x), weight, use_reentrant=False)


def inside(layer, x, weight):
    return checkpoint(lambda x, weight: layer(ag(x), weight), x, weight, use_reentrant=False)


def selective(layer, x, weight):
    """A checkpoint that saves the results of collectives and matmuls."""

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.aten.mm.default or op.namespace == "_c10d_functional"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(
        lambda x, weight: layer(ag(x), weight), x, weight, use_reentrant=False, context_fn=contexts
    )


def both(layer, x, weight):
    """A checkpointed layer, and another use of the gathered value in forward."""
    gathered = ag(x)
    return checkpoint(layer, gathered, weight, use_reentrant=False).sum() + gathered.sum()


def run(function, layer=linear, dtype=torch.bfloat16, policy="lossless", inner="eager"):
    """Compile and differentiate a layer of gathered rows on one of four ranks.

    Return its plans, and (dtype, shape) of the tensors saved for backward, without the weight.
    """
    torch._dynamo.reset()
    before, saved = len(commpass.plans()), []

    def pack(value):
        if value.shape != (WIDTH, COLUMNS):
            saved.append((value.dtype, tuple(value.shape)))
        return value

    with as_rank(0, RANKS), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        backend = commpass.backend(policy, inner=inner, profile=SLOW, strict=True)
        x = torch.randn(ROWS, WIDTH, dtype=dtype)
        weight = torch.randn(WIDTH, COLUMNS, dtype=dtype, requires_grad=True)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(layer, x, weight).sum().backward()
    return commpass.plans()[before:], saved


def nbytes(saved):
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in saved)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_saved_and_gathered_when_their_consumer_is_checkpointed(dtype, inner):
    (forward, backward), saved = run(outside, dtype=dtype, inner=inner)
    assert (torch.int8, (RANKS * ROWS, WIDTH)) in saved
    assert nbytes(saved) <= RANKS * (VALUES + ROWS * dtype.itemsize)
    assert [step.rule for step in forward.simplified] == [NAME]
    scales = ("uint8" if dtype is torch.bfloat16 else "int32", ROWS * dtype.itemsize)
    sent = sorted((site.dtype, site.bytes) for site in forward.sites)
    assert sent == sorted([("int8", VALUES), scales])
    assert not backward.sites


def test_codes_are_saved_when_a_selective_checkpoint_saves_collectives():
    (forward, backward), saved = run(selective)
    assert sorted(shape for _, shape in saved) == [(RANKS * ROWS, 1), (RANKS * ROWS, WIDTH)]
    assert (torch.int8, (RANKS * ROWS, WIDTH)) in saved
    assert [step.rule for step in forward.simplified] == [NAME]
    assert not backward.sites


def test_gathered_value_is_saved_when_forward_uses_it_too():
    (forward, _), saved = run(both)
    assert saved == [(torch.bfloat16, (RANKS * ROWS, WIDTH))]
    assert not forward.simplified


def test_gathered_value_is_saved_when_the_policy_is_off():
    _, saved = run(outside, policy="off")
    assert saved == [(torch.bfloat16, (RANKS * ROWS, WIDTH))]


def test_gathered_value_is_saved_when_simplify_is_skipped():
    (forward, _), saved = run(outside, policy=commpass.Policy(skip=("simplify",)))
    assert saved == [(torch.bfloat16, (RANKS * ROWS, WIDTH))]
    assert [site.dtype for site in forward.sites] == ["bfloat16"]


@pytest.mark.slow
def test_gathered_value_is_saved_when_backward_needs_it():
    def differentiated(layer, x, weight):
        return outside(layer, x * weight.sum(), weight)

    (forward, _), saved = run(differentiated, sine)
    assert (torch.bfloat16, (RANKS * ROWS, WIDTH)) in saved
    assert not forward.simplified


def test_gather_in_a_checkpoint_is_repeated_in_codes():
    plans, saved = run(inside)
    assert saved == [(torch.bfloat16, (ROWS, WIDTH))]
    for plan in plans:
        assert [step.rule for step in plan.simplified] == [NAME]
        assert sorted(site.dtype for site in plan.sites) == ["int8", "uint8"]


class Counts(CustomGraphPass):
    """A pass of a user, which counts its calls."""

    calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "counts"


def test_passes_of_the_user_run_before():
    user = Counts()
    with torch._inductor.config.patch({joint.SLOT: user}):
        _, saved = run(outside)
        assert getattr(torch._inductor.config, joint.SLOT) is user
    assert user.calls == 1
    assert (torch.int8, (RANKS * ROWS, WIDTH)) in saved


def test_passes_in_options_run_before():
    user, seen = Counts(), []
    patches = joint.with_joint({joint.SLOT: user}, lambda gm: seen.append(user.calls))
    gm = trace(torch.relu, torch.ones(1))
    patches[joint.SLOT](gm.graph)
    assert seen == [1]
    assert patches[joint.SLOT].uuid() == ("commpass joint", "counts")


def test_pass_has_no_name_when_an_earlier_one_has_none():
    assert joint.with_joint({joint.SLOT: print}, print)[joint.SLOT].uuid() is None


@pytest.mark.parametrize("strict", [False, True])
def test_failure_is_a_warning_or_raised_if_strict(strict, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("too deep")

    monkeypatch.setattr(joint, "save_codes", fail)
    with as_rank(0, RANKS):
        gm = trace(lambda x: ag(x) + 1, torch.ones(4, 4))
        with pytest.raises(ValueError, match="too deep") if strict else nullcontext():
            joint.mark_saved(gm, SLOW, strict=strict)
    warned = [each.split(": ", 1)[1] for each in caplog.messages]
    text = "torch alone decides what is saved for backward: ValueError: too deep"
    assert warned == ([] if strict else [text])
