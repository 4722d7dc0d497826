"""Residuals belong to a module instance: they are kept apart, carried over, loaded and released
with it."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from rank_helpers import forget_process, gather_objects
from refusals import refusals
from scenarios.parts import Copied, world
from scenarios.scenario import random
from tiers import VERSION, rarely
from torch import nn
from torch.utils.checkpoint import checkpoint

import commpass
from commpass import Policy, Rule
from commpass.distributed import owners
from commpass.distributed.state import unused
from commpass.errors import PolicyError

pytestmark = pytest.mark.xdist_group("ranks")

ops = torch.ops._c10d_functional
POLICY = Policy(rules=[Rule(codec="topk(density=0.1)", direction="backward", force=True)])
WIDTH, STEPS = 32, 4


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ops.wait_tensor(ops.all_reduce(gradient, "sum", dist.group.WORLD.group_name))


class Block(nn.Module):
    """A linear layer with a gradient that the ranks sum and that does not depend on its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x, scale):
        return (x @ Summed.apply(self.weight)).sum(0) @ scale


class Blocks(nn.Module):
    """Blocks of one class with inputs of very different magnitudes."""

    def __init__(self, number: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(number))


def data(layer: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * layer + 10 * step + rank)
    scale = torch.randn(WIDTH, generator=generator)
    return 10.0**layer * torch.randn(4, WIDTH, generator=generator), scale


def exact(layer: int, steps: range) -> torch.Tensor:
    """Return the sum of the gradients of all ranks and steps, in float64, from the formula."""
    total = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for step in steps:
        for rank in range(dist.get_world_size()):
            x, scale = (value.double() for value in data(layer, step, rank))
            total += torch.outer(x.sum(0), scale)
    return total


def compiled_blocks(model: Blocks, backend=None):
    """Compile every block separately: they share one code."""
    backend = backend or commpass.backend(POLICY, inner="eager", strict=True)
    return [torch.compile(block, backend=backend) for block in model.layers]


def train(model: Blocks, steps: range, order=(0, 1, 2), run=None, functions=None):
    """Return the sum of each block's gradients over the steps, in float64."""
    functions = functions or compiled_blocks(model)
    given = {layer: torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for layer in order}
    for step in steps:
        outputs = []
        for layer in order:
            x, scale = data(layer, step, dist.get_rank())
            function = functions[layer]
            outputs.append(run(function, x, scale) if run else function(x, scale))
        for output in outputs:
            output.backward()
        for layer in order:
            weight = model.layers[layer].weight
            given[layer] += weight.grad.double()
            weight.grad = None
    return given


def left(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return what all ranks have not sent yet, by layer, in float64."""
    total: dict[int, torch.Tensor] = {}
    for state in gather_objects(commpass.state_dict(model)):
        for name, tensor in state.items():
            layer = int(name.split("/")[1].split(".")[1])
            total[layer] = total.get(layer, 0) + tensor.double()
    return total


def check_nothing_is_lost(model: Blocks, given, steps: range, before=None) -> None:
    kept = left(model)
    assert sorted(kept) == sorted(given)
    for layer, sent in given.items():
        want = exact(layer, steps) + (before[layer] if before else 0)
        assert (sent + kept[layer] - want).abs().max() <= 1e-5 * want.abs().max(), layer
        assert kept[layer].abs().max() > 0.01 * want.abs().max()


def checkpointed(function, x, scale):
    return checkpoint(function, x, scale, use_reentrant=False)


def check_blocks(how: str) -> None:
    forget_process()
    model = Blocks()
    run = checkpointed if how == "checkpointed" else None
    if how == "compiled autograd":
        backend = commpass.backend(POLICY, inner="eager", strict=True)
        enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))
        functions = compiled_blocks(model, backend)
    else:
        enabled, functions = contextlib.nullcontext(), None
    with enabled:
        given = train(model, range(STEPS), run=run, functions=functions)
    check_nothing_is_lost(model, given, range(STEPS))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled autograd"])
def test_blocks_that_share_code_keep_residuals_of_their_own(how, ranks2):
    ranks2.run(check_blocks, how)


def check_inductor() -> None:
    forget_process()
    model = Blocks(2)
    functions = compiled_blocks(model, commpass.backend(POLICY, strict=True))
    given = train(model, range(3), (0, 1), functions=functions)
    check_nothing_is_lost(model, given, range(3))


@pytest.mark.every
def test_blocks_under_inductor(ranks2):
    ranks2.run(check_inductor, timeout=600)


def check_accumulation() -> None:
    """Two forwards, then two backwards, in any order; evaluation in between; a graph used twice."""
    forget_process()
    model = Blocks()
    functions = compiled_blocks(model)
    total = {layer: torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for layer in range(3)}
    with torch._functorch.config.patch(donated_buffer=False):
        for step in (0, 2):
            outputs = []
            for layer in range(3):
                for micro in (step, step + 1):
                    outputs.append(functions[layer](*data(layer, micro, dist.get_rank())))
                with torch.no_grad():
                    functions[layer](*data(layer, 99, dist.get_rank()))
            for output in reversed(outputs):
                output.backward()
            for layer in range(3):
                total[layer] += model.layers[layer].weight.grad.double()
                model.layers[layer].weight.grad = None
        again = functions[0](*data(0, 4, dist.get_rank()))
        again.backward(retain_graph=True)
        again.backward()
        total[0] += model.layers[0].weight.grad.double()
    kept = left(model)
    for layer in range(3):
        want = exact(layer, range(4))
        want += 2 * exact(0, range(4, 5)) if layer == 0 else 0
        assert (total[layer] + kept[layer] - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.slow
def test_accumulation_evaluation_and_graphs_that_are_kept(ranks2):
    ranks2.run(check_accumulation)


def check_second_model() -> None:
    """Two models alternate; then one is deleted, and another may take its place in memory."""
    forget_process()
    backend = commpass.backend(POLICY, inner="eager", strict=True)
    one, two = Blocks(1), Blocks(1)
    first, second = compiled_blocks(one, backend), compiled_blocks(two, backend)
    for step in range(3):
        given = train(one, range(step, step + 1), (0,), functions=first)
        if step == 1:
            sole = train(two, range(1), (0,), functions=second)
    check_nothing_is_lost(two, sole, range(1))
    lone = Blocks(1)
    fresh_given = train(lone, range(1), (0,), functions=compiled_blocks(lone, backend))
    assert torch.equal(fresh_given[0], sole[0])
    assert not torch.equal(given[0], sole[0])
    assert len(owners.state_owners()) == 3
    del one, first, lone
    gc.collect()
    assert len(owners.state_owners()) == 1
    assert len(commpass.state_dict()) == 1
    said = refusals(lambda: commpass.load_state_dict(twice(two)))[0]
    assert "several" in said, said


def twice(model: Blocks) -> dict[str, torch.Tensor]:
    """Return a state that was saved for two instances, as if by their parameters."""
    state = commpass.state_dict(model)
    ((name, tensor),) = state.items()
    return {name: tensor, name.replace("layers.0.weight", "layers.1.weight"): tensor}


@pytest.mark.slow
def test_models_keep_their_own_and_take_it_with_them(ranks2):
    ranks2.run(check_second_model)


def save() -> tuple[dict, dict]:
    forget_process()
    model = Blocks()
    given = train(model, range(STEPS))
    check_nothing_is_lost(model, given, range(STEPS))
    # without other information, they cannot be told apart
    assert "several" in refusals(commpass.state_dict)[0]
    return commpass.state_dict(model), left(model)


def resume(saved: list[tuple[dict, dict]], order: tuple[int, ...]) -> None:
    state, before = saved[dist.get_rank()]
    for ran_before in (False, True):
        forget_process()
        model = Blocks()
        if ran_before:
            train(model, range(50, 51), order)
        commpass.load_state_dict(state, model)
        assert {n: t.tolist() for n, t in commpass.state_dict(model).items()} == {
            n: t.tolist() for n, t in state.items()
        }
        given = train(model, range(STEPS), order)
        check_nothing_is_lost(model, given, range(STEPS), before)
    forget_process()
    model = Blocks()
    commpass.load_state_dict(state)
    assert "several" in refusals(lambda: train(model, range(1), order))[0]
    forget_process()
    commpass.load_state_dict(state, Blocks())  # of a model that no longer exists
    given = train(model, range(STEPS), order)
    check_nothing_is_lost(model, given, range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("order", [pytest.param((0, 1, 2), marks=pytest.mark.every), (2, 0, 1)])
def test_residuals_are_read_back_whatever_is_compiled_first(order, ranks2):
    ranks2.run(resume, ranks2.run(save), order)


def check_one_of_two() -> str:
    """A state of one model, loaded without naming the model: the second model that asks for it is
    rejected."""
    forget_process()
    one = Blocks(1)
    train(one, range(1), (0,))
    saved = commpass.state_dict()
    forget_process()
    two, three = Blocks(1), Blocks(1)
    commpass.load_state_dict(saved)
    train(two, range(1), (0,))
    return refusals(lambda: train(three, range(1), (0,)))[0]


@pytest.mark.slow
def test_state_of_one_instance_is_used_by_no_other(ranks2):
    said = ranks2.run(check_one_of_two)[0]
    assert "asked for by" in said
    assert "load_state_dict(state, model)" in said


def check_reset() -> None:
    forget_process()
    one, two = Blocks(1), Blocks(1)
    first = train(one, range(1), (0,))
    train(two, range(1), (0,))
    commpass.reset_state(one)
    assert commpass.state_dict(one) == {}
    assert len(commpass.state_dict(two)) == 1
    assert torch.equal(train(one, range(1), (0,))[0], first[0])  # from zeros again
    commpass.reset_state()
    assert commpass.state_dict() == {}


@pytest.mark.slow
def test_state_can_be_begun_again(ranks2):
    ranks2.run(check_reset)


def check_weights_are_loaded() -> None:
    """load_state_dict of the model changes parameters in place: residuals are kept."""
    forget_process()
    model = Blocks(1)
    functions = compiled_blocks(model)
    given = train(model, range(2), (0,), functions=functions)
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    more = train(model, range(2, 4), (0,), functions=functions)
    check_nothing_is_lost(model, {0: given[0] + more[0]}, range(4))


@pytest.mark.every
def test_parameters_that_are_loaded_keep_their_residuals(ranks2):
    ranks2.run(check_weights_are_loaded)


# --- forward, and graphs without an owner ---------------------------------------------------------


class SummedForward(torch.autograd.Function):
    """Sums activations over the ranks, but not their gradients."""

    @staticmethod
    def forward(ctx, x):
        return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def activations(x, weight):
    return SummedForward.apply(x @ weight).sum()


@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_error_feedback_in_forward_is_refused(inner, fake_group):
    fake_group(2)
    forget_process()
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    for force in (True, False):
        torch._dynamo.reset()
        policy = Policy(rules=[Rule(codec="topk", force=force)])
        function = torch.compile(activations, backend=commpass.backend(policy, inner=inner))
        if force:
            with pytest.raises(PolicyError, match=r"other activations.*direction='backward'"):
                function(torch.ones(4, WIDTH), weight)
        else:
            function(torch.ones(4, WIDTH), weight).backward()
            assert "other activations" in commpass.plans()[-2].sites[0].reason
        assert commpass.state_dict() == {}


class Activation(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = Summed.backward


@pytest.mark.parametrize("force", [True, False])
def test_graph_without_parameters_is_nobodys(force, fake_group):
    fake_group(2)
    forget_process()
    rule = Rule(codec="topk", direction="backward", force=force)
    backend = commpass.backend(Policy(rules=[rule]), inner="aot_eager")
    function = torch.compile(lambda x: Activation.apply(x).sin().sum(), backend=backend)
    output = function(torch.ones(256, 256, requires_grad=True) * 2)
    if force:
        with pytest.raises(PolicyError, match="its state has no owner"):
            output.backward()
    else:
        output.backward()
        assert "its state has no owner" in commpass.plans()[-1].sites[0].reason


@pytest.mark.every
def test_sizes_that_were_symbolic_elsewhere(fake_group):
    """Backward is then compiled together with forward, and torch makes no real tensors."""
    fake_group(2)
    forget_process()
    block = Block()
    backend = commpass.backend(POLICY, inner="eager", strict=True)
    function = torch.compile(block, backend=backend, dynamic=True)
    for rows in (3, 5):
        function(torch.ones(rows, WIDTH), torch.ones(WIDTH)).backward()
    (kept,) = commpass.state_dict(block).values()
    assert type(kept) is torch.Tensor
    assert kept.abs().max() > 0


@pytest.mark.every
def test_weights_that_are_new_in_every_step_are_said(fake_group, caplog):
    fake_group(2)
    forget_process()
    owners._short_lived[0] = 0
    function = torch.compile(
        lambda w: Summed.apply(w).sin().sum(), backend=commpass.backend(POLICY, inner="eager")
    )
    for _ in range(5):
        function(torch.ones(WIDTH, WIDTH, requires_grad=True)).backward()
        gc.collect()
    assert caplog.text.count("error feedback was dropped") == 1
    assert commpass.state_dict() == {}


def test_models_that_are_freed_after_one_step_are_no_fault(fake_group, caplog):
    """Several short runs in one process, such as a sweep."""
    fake_group(2)
    forget_process()
    owners._short_lived[0] = 0
    function = torch.compile(
        lambda w: Summed.apply(w).sin().sum(), backend=commpass.backend(POLICY, inner="eager")
    )
    for _ in range(owners.MOST_SHORT_LIVED + 2):
        block = Block()
        function(block.weight).backward()
        assert len(commpass.state_dict(block)) == 1
        del block
        gc.collect()
    assert len(owners.state_owners()) <= 1  # torch may keep the last one
    assert "error feedback was dropped" not in caplog.text
    forget_process()


INT8 = Policy(rules=[Rule(codec="int8", direction="backward", force=True)])


@pytest.mark.parametrize("sparse", [True, False])
def test_residuals_that_no_graph_takes_are_reported(sparse, fake_group, caplog, monkeypatch):
    """Another policy keeps no residuals. A graph that is compiled later takes its own."""
    fake_group(2)
    forget_process()
    monkeypatch.setattr(unused, "_warned", [])

    def step(block: Block, policy: Policy) -> None:
        function = torch.compile(
            lambda x, scale: block(x, scale).sin(),
            backend=commpass.backend(policy, inner="eager"),
        )
        with torch.no_grad():
            function(torch.ones(4, WIDTH), torch.ones(WIDTH))
        assert not warnings_of(block)
        function(torch.ones(4, WIDTH), torch.ones(WIDTH)).backward()

    def warnings_of(block: Block) -> list[str]:
        caplog.clear()
        commpass.state_dict(block)
        return [text for text in caplog.messages if "not sent" in text]

    first, second = Block(), Block()
    step(first, POLICY)
    saved = commpass.state_dict(first)
    assert len(saved) == 1
    torch._dynamo.reset()
    commpass.load_state_dict(saved, second)
    step(second, POLICY if sparse else INT8)
    with torch.no_grad():
        for _ in range(unused.MOST_CHANGES + 1):
            for parameter in second.parameters():
                parameter.mul_(1.0)
    assert len(warnings_of(second)) == (not sparse)


def test_names_of_parameters_are_those_without_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Blocks(2)
    plain = owners.parameter_names(model)
    assert list(plain.values()) == ["layers.0.weight", "layers.1.weight"]
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert owners.parameter_names(torch.compile(model)) == plain


class Branches(nn.Module):
    """Two weights of one shape, whose gradients are summed over the ranks; one of them may be left
    out."""

    sums_second = uses_second = True

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(random(8, 8, seed) / 3) for seed in (1, 2))

    def forward(self, x):
        x = torch.tanh(x @ Copied.apply(self.first, world()))
        if self.uses_second:
            x = x @ (Copied.apply(self.second, world()) if self.sums_second else self.second)
        return x


def leave_out(what: str) -> dict[str, tuple[float, float]]:
    """Return what is missing of each weight's first gradient, and its distance from what arrives in
    later steps.

    The later gradients themselves are zero. Return this while the second weight is left out, and
    after it is back.
    """
    forget_process()
    x, nothing = random(4, 8, dist.get_rank()), torch.zeros(4, 8)
    plain = Branches()
    plain(x).square().sum().backward()
    model = Branches()
    compiled = torch.compile(model, backend=commpass.backend(HALF, inner="aot_eager"))

    def step(x):
        model.zero_grad()
        compiled(x).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    first = step(x)
    lacks = {name: p.grad - first[name] for name, p in plain.named_parameters()}
    came = {name: torch.zeros(8, 8) for name in lacks}
    for left_out in (True, False):
        model.second.requires_grad_(what != "frozen" or not left_out)
        model.sums_second = what != "not summed" or not left_out
        model.uses_second = what != "not used" or not left_out
        for _ in range(4):
            for name, gradient in step(nothing).items():
                came[name] += gradient
        if left_out:
            assert torch.allclose(came["first"], lacks["first"], atol=1e-5)
            assert len(commpass.state_dict(model)) == 2
    return {
        name: (lacks[name].norm().item(), (came[name] - lacks[name]).norm().item())
        for name in lacks
    }


HALF = Policy(rules=[Rule(codec="topk(density=0.25)", direction="backward", force=True)])


FROZEN = pytest.param(
    "frozen",
    marks=pytest.mark.skipif(
        VERSION < (2, 12), reason="torch 2.11 compiles nothing anew for a weight that is frozen"
    ),
)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("what", [FROZEN, "not summed", "not used"])
def test_residual_of_a_weight_is_sent_for_no_other(what, ranks2):
    for found in ranks2.run(leave_out, what):
        for lacked, apart in found.values():
            assert lacked > 1
            assert apart < 1e-4
