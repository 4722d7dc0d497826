"""Recomputed sites in backward belong to forward; what compiled autograd compiles is backward."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from tiers import rarely, runs_again, sampled
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import commpass
from commpass import Policy, Rule
from commpass.passes.discover import discover
from commpass.passes.fx.direction import gradients, recomputed

pytestmark = pytest.mark.xdist_group("ranks")

ops = torch.ops._c10d_functional
WIDTH = 64


def summed(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))


class SumForward(torch.autograd.Function):
    """The end of a row-parallel layer: sums in forward."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumBackward(torch.autograd.Function):
    """The start of a column-parallel layer: sums in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class Block(nn.Module):
    """A tensor-parallel block; ``enters`` tells whether gradients are summed at its start."""

    def __init__(self, enters: bool):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.enters = enters

    def forward(self, x):
        x = SumBackward.apply(x) if self.enters else x
        return torch.tanh(SumForward.apply(self.down(torch.tanh(self.up(x)))))


def matmuls_are_saved(_, op, *args, **kwargs):
    saved = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, matmuls_are_saved)
HOW = {
    "plain": lambda block, x: block(x),
    "whole": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=SELECTIVE),
}


class Net(nn.Module):
    def __init__(self, how: str, enters: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(enters) for _ in range(3)])
        self.how = HOW[how]

    def forward(self, x):
        for block in self.layers:
            x = self.how(block, x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(
    how: str,
    policy: Policy | str,
    inner: str = "aot_eager",
    enters: bool = False,
    autograd: bool = False,
):
    """Return (gradients, plans) of one compiled training step."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    net = Net(how, enters)
    backend = commpass.backend(policy, inner=inner, strict=True)
    compiled = torch.compile(net, backend=backend)
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))
    with enabled if autograd else contextlib.nullcontext():
        compiled(batch()).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()], commpass.plans()[seen:]


def equal(some, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def backward_only(codec: str) -> Policy:
    return Policy(rules=[Rule(codec=codec, direction="backward", force=True)])


def forward_only(codec: str) -> Policy:
    return Policy(rules=[Rule(codec=codec, direction="forward", force=True)])


RUN = [("whole", "aot_eager"), ("selective", "aot_eager"), ("selective", "eager")]
"""Ways to run a step: with Inductor's joint-graph passes ("eager") and without."""


def check_backward_rules(how: str, inner: str) -> None:
    """No gradient is sent, so that a rule for backward changes no bit."""
    plain, _ = step(how, "off", inner)
    for codec in ("int4", "topk(density=0.1)"):
        got, (forward, backward) = step(how, backward_only(codec), inner)
        assert [site.direction for site in backward.sites] == ["forward"] * len(backward.sites)
        assert len(backward.sites) > 0  # otherwise nothing was recomputed, and nothing is tested
        assert not forward.compressed
        assert not backward.compressed
        assert equal(got, plain)
    assert commpass.state_dict() == {}


@runs_again
@pytest.mark.parametrize(("how", "inner"), sampled(RUN, RUN[:1]))
def test_rule_for_backward_leaves_what_is_run_again(how, inner, ranks2):
    ranks2.run(check_backward_rules, how, inner)


def check_forward_rules(how: str, inner: str) -> None:
    """Recomputed sites are sent as in forward: gradients are those without checkpoints."""
    for codec in ("int4", "int8(rounding=stochastic)"):
        kept, _ = step("plain", forward_only(codec), inner)
        got, (forward, backward) = step(how, forward_only(codec), inner)
        again = {site.module: site for site in backward.sites}
        assert again
        for site in forward.sites:
            other = again.get(site.module, site)
            assert (site.codec, site.algorithm, site.direction) == (
                other.codec,
                other.algorithm,
                other.direction,
            )
        assert all(site.compressed for site in (*forward.sites, *backward.sites))
        assert equal(got, kept)
        exact, _ = step("plain", "off", inner)
        assert not equal(got, exact)  # otherwise the codec did nothing


@pytest.mark.every
@runs_again
@pytest.mark.parametrize(("how", "inner"), sampled(RUN, RUN[2:]))
def test_recomputed_sites_are_sent_as_in_forward(how, inner, ranks2):
    ranks2.run(check_forward_rules, how, inner)


def check_inductor() -> None:
    plain, _ = step("whole", "off", "inductor")
    got, _ = step("whole", backward_only("topk(density=0.1)"), "inductor")
    assert equal(got, plain)


@pytest.mark.every
def test_recomputed_sites_under_inductor(ranks2):
    ranks2.run(check_inductor, timeout=600)


def check_words() -> None:
    """Gradients are distinguished from recomputed sites one by one, with and without compiled
    autograd."""
    for autograd in (False, True):
        _, (_, backward) = step("whole", backward_only("int8"), enters=True, autograd=autograd)
        assert backward.direction == "backward"
        again = [site for site in backward.sites if site.direction == "forward"]
        carried = [site for site in backward.sites if site.direction == "backward"]
        assert sorted(site.module for site in carried) == ["layers.1", "layers.2"]  # x needs none
        assert {site.codec for site in carried} == {"int8"}
        assert again
        assert {site.codec for site in again} == {"none"}


@pytest.mark.every
@runs_again
def test_gradients_and_what_is_run_again_in_one_graph(ranks2):
    ranks2.run(check_words)


def check_compiled_autograd() -> None:
    """Rules for backward apply to the gradients, rules for forward do not, and the model's
    annotations apply."""
    plain, _ = step("plain", "off", enters=True)
    exact, (_, backward) = step("plain", "off", enters=True, autograd=True)
    assert equal(exact, plain)
    assert {site.direction for site in backward.sites} == {"backward"}
    got, (forward, backward) = step("plain", backward_only("int4"), enters=True, autograd=True)
    assert not forward.compressed
    assert {site.codec for site in backward.sites} == {"int4"}
    assert not equal(got, plain)
    apart, _ = step("plain", backward_only("int4"), enters=True)
    assert equal(got, apart)
    _, (forward, backward) = step("plain", forward_only("int4"), enters=True, autograd=True)
    assert len(forward.compressed) == 3
    assert not backward.compressed


@pytest.mark.every
def test_compiled_autograd_makes_backward_graphs(ranks2):
    ranks2.run(check_compiled_autograd)


def check_kept_words() -> None:
    def kept(block, x):
        with commpass.keep():
            return block(x)

    HOW["kept"] = kept
    for autograd in (False, True):
        _, plans = step(
            "kept", Policy(rules=[Rule(codec="int8", force=True)]), enters=True, autograd=autograd
        )
        sites = [site for plan in plans for site in plan.sites]
        assert len(sites) > 3
        assert not [site for site in sites if site.compressed]


@pytest.mark.every
def test_words_hold_under_compiled_autograd(ranks2):
    ranks2.run(check_kept_words)


def check_ddp(direction: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    net(batch()).square().mean().backward()
    expected = []
    for parameter in net.parameters():
        total = parameter.grad.double()
        dist.all_reduce(total)
        expected.append(total / dist.get_world_size())
    net.zero_grad()
    rule = Rule(codec="int8", direction=direction, force=True)
    backend = commpass.backend(Policy(rules=[rule]), inner="aot_eager", strict=True)
    seen = len(commpass.plans())
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = torch.compile(DistributedDataParallel(net), backend=backend)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            compiled(batch()).square().mean().backward()
    worst = max(
        ((p.grad.double() - e).abs().max() / e.abs().max()).item()
        for p, e in zip(net.parameters(), expected, strict=True)
    )
    codecs = {site.codec for plan in commpass.plans()[seen:] for site in plan.sites}
    assert codecs == {"int8" if direction == "backward" else "none"}
    if direction == "backward":
        assert 1e-5 < worst < 0.05
    else:
        assert worst < 1e-5


@pytest.mark.every
@pytest.mark.parametrize("direction", ["backward", rarely("forward")])
def test_gradients_of_ddp_are_backward(direction, ranks2):
    ranks2.run(check_ddp, direction)
    ranks2.stop()  # DDP leaves hooks in the process group


# --- graphs, without ranks ------------------------------------------------------------------------


def backward_graph(tag: dict, takes_gradient: bool) -> torch.fx.GraphModule:
    """A collective of a saved tensor, or of an incoming gradient, with metadata ``tag``."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake = torch.empty(4, 4)
    saved, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    source = graph.call_function(
        torch.ops.aten.mul.Tensor, (saved, tangent if takes_gradient else saved)
    )
    started = graph.call_function(ops.all_reduce.default, (source, "sum", "0"))
    done = graph.call_function(ops.wait_tensor.default, (started,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (done, tangent)),))
    for node in graph.nodes:
        node.meta["val"] = fake
    started.meta |= tag
    return torch.fx.GraphModule({}, graph)


TAGS = {
    "checkpointed": {"recompute": CheckpointPolicy.PREFER_RECOMPUTE},
    "must be recomputed": {"recompute": CheckpointPolicy.MUST_RECOMPUTE},
    "made in forward": {"partitioner_tag": "is_forward"},
}


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("takes_gradient", [False, True])
def test_sites_that_a_gradient_reaches_are_never_forward(tag, takes_gradient, fake_group):
    fake_group(2)
    (found,) = discover(backward_graph(TAGS[tag], takes_gradient), "backward", stateless=None)
    assert found.site.direction == ("backward" if takes_gradient else "forward")
    assert (found.site.stateless is None) == takes_gradient


@pytest.mark.parametrize("tag", [{}, {"recompute": CheckpointPolicy.MUST_SAVE}])
def test_backward_formula_that_takes_no_gradient_is_backward(tag, fake_group):
    """An example is an auxiliary loss, whose gradient is a constant."""
    fake_group(2)
    (found,) = discover(backward_graph(tag, False), "backward", stateless=None)
    assert found.site.direction == "backward"


def test_recomputed_site_keeps_no_state(fake_group):
    fake_group(2)
    gm = backward_graph(TAGS["checkpointed"], False)
    started = next(node for node in gm.graph.nodes if node.target is ops.all_reduce.default)
    assert recomputed(started, gradients(gm.graph))
    plan = commpass.rewrite(gm, [], Policy(codecs="topk"), direction="backward")
    assert plan.sites[0].direction == "forward"
    assert "runs again what forward sent" in plan.sites[0].reason
