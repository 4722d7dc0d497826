"""A whole Llama on real ranks, distributed in four usual forms: what simplify finds, and the
numbers.

The test extra installs the model's library; without it these tests fail.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tiers import rarely, sampled
from torch.distributed.tensor import DTensor

import commpass
from commpass.passes.simplify import RULES
from commpass.policy import Policy

pytestmark = pytest.mark.xdist_group("ranks")
PLAIN = Policy(skip=("simplify", "group"))
EXACT = Policy(skip="group", reassociate=False)
ALL = Policy(skip="group")
ROUNDING = 1e-5
"""Relative to a gradient's norm. A reassociated float32 sum differs by a rounding of 6e-8 relative
to its addends. A gradient has passed through at most a few dozen such sums, and cancellation may
make it tens of times smaller than its addends."""


def train(form, model, policy, inner):
    """Return loss and gradients of a compiled step, and facts by direction.

    The facts are the number of collectives by (kind, dtype, group), the applied rules, and the
    bytes sent and saved.
    """
    from llama import step, tokens

    torch._dynamo.reset()
    seen = len(commpass.plans())
    compiled = torch.compile(
        model, backend=commpass.backend(policy, inner=inner, strict=True), fullgraph=True
    )
    loss, grads = step(compiled, model, tokens(form, dist.get_rank()))
    plans = commpass.plans()[seen:]
    assert [plan.direction for plan in plans] == ["forward", "backward"]
    assert not any(plan.fallback for plan in plans)
    counts = {
        plan.direction: Counter((s.kind, s.dtype, _label(form, s)) for s in plan) for plan in plans
    }
    rules = Counter(step.rule for plan in plans for step in plan.simplified)
    size = sum(site.bytes for plan in plans for site in plan)
    # A reduce_scatter sends half of what an all_reduce does, for the same input.
    saved = sum(
        step.saved_bytes for plan in plans for step in plan.simplified if step.rule != "scattered"
    )
    return loss, grads, counts, rules, (size, saved)


def _label(form, site) -> str:
    """The label in the form's own mesh: meshes of earlier tests may have the same groups."""
    mine = ("tp", "dp") if form == "mesh" else ("x",)
    return next((label for label in mine if label in site.group_labels), site.group_label)


def bits_equal(a, b) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def simplified(form, layers=1, inductor=False, exact_too=False, **how):
    """Run a form plain, with the exact rules and with all rules: compare numbers, and return the
    plans' facts for plain and all."""
    from llama import build

    model = build(form, dist.get_world_size(), layers, **how)
    loss, grads, before, none, (plain_bytes, _) = train(form, model, PLAIN, "eager")
    assert not none
    assert grads
    if exact_too:
        exact_loss, exact_grads, _, exact_rules, _ = train(form, model, EXACT, "eager")
        assert set(exact_rules) <= {rule.name for rule in RULES if rule.exact}
        assert bits_equal(exact_loss, loss)
        for name, grad in exact_grads.items():
            assert bits_equal(grad, grads[name]), name
    again, again_grads, after, rules, (size, saved) = train(
        form, model, ALL, "inductor" if inductor else "eager"
    )
    assert abs(again - loss) <= ROUNDING * abs(loss)
    for name, grad in again_grads.items():
        assert grads[name].norm() > 0, name
        assert (grad - grads[name]).norm() <= ROUNDING * grads[name].norm(), name
    if not rules and not inductor:
        assert bits_equal(again, loss)
    assert size == plain_bytes - saved
    return before, after, rules, (plain_bytes, size), model


def same_on_all_ranks(tensors) -> bool:
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        if not all(bits_equal(part, tensor) for part in parts):
            return False
    return True


ALL_REDUCE = ("all_reduce", "float32", "x")


def tensor_form(layers, inductor):
    before, after, rules, sizes, model = simplified("tensor", layers, inductor)
    assert before == {"forward": {ALL_REDUCE: 2 * layers}, "backward": {ALL_REDUCE: 5 * layers}}
    assert after == {"forward": {ALL_REDUCE: 2 * layers}, "backward": {ALL_REDUCE: 2 * layers}}
    assert rules == {"sum of sums": 3 * layers}
    assert sizes[1] * 7 == sizes[0] * 4
    replicated = [p.grad for p in model.parameters() if not isinstance(p, DTensor)]
    assert len(replicated) == 2 * layers + 3  # norms, embedding and head
    assert same_on_all_ranks(replicated)


@pytest.mark.every
@pytest.mark.parametrize("layers", [1, rarely(2)])
def test_tensor_parallel_needs_four_all_reduces_a_layer(layers, ranks2):
    ranks2.run(tensor_form, layers, False)


@pytest.mark.every
def test_tensor_parallel_with_inductor(ranks2):
    ranks2.run(tensor_form, 1, True)


GATHER = ("all_gather", "float32", "x")
SCATTER = ("reduce_scatter", "float32", "x")
FORWARD = {SCATTER: 3, GATHER: 4}
"""For sequence parallelism: into and out of each block; the embedding's scatter; the gathers of the
head's input and output."""


def sequence_form(gather, before, after, applied):
    found, left, rules, _, _ = simplified("sequence", exact_too=gather == "each", gather=gather)
    assert found == {"forward": FORWARD, "backward": before}
    assert left == {"forward": FORWARD, "backward": after}
    assert rules == applied


SEQUENCE = {
    "once": ({SCATTER: 3, GATHER: 3}, {SCATTER: 3, GATHER: 3}, {}),
    "each": ({SCATTER: 6, GATHER: 3}, {SCATTER: 3, GATHER: 3}, {"sum of sums": 3}),
    "local": (
        {ALL_REDUCE: 5, SCATTER: 1, GATHER: 3},
        {SCATTER: 3, GATHER: 3},
        {"sum of sums": 3, "scattered": 2},
    ),
}


@pytest.mark.parametrize("gather", sampled(SEQUENCE, []))
def test_sequence_parallel(gather, ranks2):
    ranks2.run(sequence_form, gather, *SEQUENCE[gather])


def sharded_form():
    """The embedding is also the head, so one gather serves both, and two gradients are scattered:
    merged, or each narrow."""
    before, after, rules, sizes, _ = simplified("sharded", exact_too=True, tied=True)
    weights = 11
    assert before == {"forward": {GATHER: weights}, "backward": {SCATTER: weights + 1}}
    assert after["forward"] == {("all_gather", "bfloat16", "x"): weights}
    assert rules["gather then narrow"] == weights
    assert rules["sum of sums"] + rules["widen then reduce"] > 0
    # The cost model chooses which gradients are exchanged in bfloat16 and summed in float32.
    narrow = after["backward"][("all_to_all", "bfloat16", "x")]
    assert narrow == rules["widen then reduce"]
    assert after["backward"][SCATTER] == weights + 1 - narrow - rules["sum of sums"]
    assert sizes[1] < 0.75 * sizes[0]


@pytest.mark.every
def test_sharded_with_mixed_precision(ranks2):
    ranks2.run(sharded_form)


def mesh_form():
    before, after, rules, _, model = simplified("mesh", tied=True)
    weights = 11
    tp, dp = ("all_reduce", "float32", "tp"), ("all_reduce", "float32", "dp")
    assert before == {"forward": {tp: 2}, "backward": {tp: 5, dp: weights + 1}}
    assert after == {"forward": {tp: 2}, "backward": {tp: 2, dp: weights}}
    assert rules == {"sum of sums": 4}
    assert same_on_all_ranks([p.grad for p in model.parameters() if not isinstance(p, DTensor)])


@pytest.mark.every
def test_two_dimensional_mesh(ranks4):
    ranks4.run(mesh_form)
