"""Policy(error_sample_rate=...): what is sampled, where, and that sampling changes nothing."""

from __future__ import annotations

import logging

import pytest
import torch
from functional_ops import ag, ar
from graphs import code, ops, trace
from tiers import rarely
from torch import nn

import commpass
from commpass import Policy, Rule
from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Channels
from commpass.errors import PolicyError
from commpass.passes import GraphInput, run
from commpass.passes.fx.marks import MARK

SAMPLE = torch.ops.commpass.sample_.default


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return ar(self.linear(x))


class Fused(nn.Module):
    """What is sent is computed by operators that Inductor fuses with their users."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return ar(torch.tanh(x) * self.scale)


def forced(spec: str = "int8", error_sample_rate: float = 1.0, **rule) -> Policy:
    return Policy(rules=[Rule(codec=spec, force=True, **rule)], error_sample_rate=error_sample_rate)


def planned(function, *inputs, policy, dynamic=False):
    gm = trace(function, *inputs, dynamic=dynamic)
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=commpass.ethernet(1))
    return gm, run(road, "0", strict=True)


def samples_in(gm) -> list[int]:
    return [node.args[2] for node in gm.graph.nodes if node.target is SAMPLE]


def values(seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps(model, policy, count: int, **options):
    """Return losses and gradients of some steps, and the report on this backend only."""
    torch._dynamo.reset()
    backend = commpass.backend(policy, strict=True, **options)
    compiled, found = torch.compile(model, backend=backend), []
    for step in range(count):
        model.zero_grad()
        loss = compiled(values(step, next(model.parameters()).dtype)).square().mean()
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
    return found, backend.step_log


# --- in the graph ---------------------------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
def test_each_site_is_looked_at_in_front_of_its_encode(fake_group, lowering):
    fake_group(4)

    def function(x, w):
        for _ in range(3):
            x = ar(x @ w)
        return x

    policy = forced(lowering=lowering)
    gm, outcome = planned(function, values(0), values(1), policy=policy)
    assert samples_in(gm) == [0, 1, 2]
    assert set(outcome.sampled.values()) == {""}
    for node in gm.graph.nodes:
        if node.target is SAMPLE:
            x = node.args[0]
            assert (tuple(x.meta["val"].shape), x.meta["val"].dtype) == ((64, 64), torch.float32)
            assert x.target is torch.ops.aten.mm.default


def test_site_in_chunks_is_looked_at_before_anything_of_it_is_taken(fake_group):
    fake_group(4)
    policy = forced(lowering="kernel", algorithm="one_shot", chunks=4)
    gm, _ = planned(lambda x, w: ar(x @ w), values(0), values(1), policy=policy)
    nodes = list(gm.graph.nodes)
    (sampled,) = (node for node in nodes if node.target is SAMPLE)
    x = sampled.args[0]
    takers = [user for view in (x, *x.users) for user in view.users if MARK in user.meta]
    assert [node.target for node in takers] == [torch.ops.commpass.kernel_.default] * 4
    assert all(nodes.index(sampled) < nodes.index(node) for node in takers)


def test_graph_has_no_sampling_without_watch(fake_group):
    fake_group(4)
    plain, _ = planned(lambda x: ar(x * 2), values(0), policy=forced(error_sample_rate=0.0))
    assert not samples_in(plain)
    less = Policy(rules=forced().rules, error_sample_rate=1.0, skip=("sample",))
    skipped, _ = planned(lambda x: ar(x * 2), values(0), policy=less)
    assert code(plain) == code(skipped)


def test_graph_is_the_same_but_for_the_sampling_operator(fake_group):
    fake_group(4)
    graphs = [
        planned(lambda x: ar(x @ x), values(0), policy=forced(error_sample_rate=error_sample_rate))[
            0
        ]
        for error_sample_rate in (0.0, 1.0)
    ]
    gm = graphs[1]
    for node in reversed(gm.graph.nodes):
        if node.target is SAMPLE:
            into = node.args[1]
            gm.graph.erase_node(node)
            gm.graph.erase_node(into)
    targets = [[node.target for node in each.graph.nodes] for each in graphs]
    assert targets[0] == targets[1]


NOT = {
    "inside": (forced(lowering="inline"), lambda x: ar(torch.tanh(x)), "inside of the kernel"),
    "lossless": (forced("exponent"), lambda x: ag(x @ x), "loses nothing"),
    "feedback": (forced("topk(density=0.1)"), lambda x: ar(x @ x), None),
    "uncompressed": (Policy(error_sample_rate=1.0), lambda x: ar(x @ x), None),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", NOT)
def test_unmeasured_sites_say_why(fake_group, what):
    fake_group(4)
    policy, function, why = NOT[what]
    x = values(0, torch.bfloat16).repeat(8, 8)
    gm, outcome = planned(function, x, policy=policy, dynamic=True)
    assert not samples_in(gm)
    assert [why in said for said in outcome.sampled.values()] == ([True] if why else [])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_every_kind_is_sampled(fake_group, kind):
    fake_group(4)
    sent = {
        "all_gather": lambda x: ops.all_gather_into_tensor(x, 4, "0"),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", 4, "0"),
        "all_to_all": lambda x: ops.all_to_all_single(x, [16] * 4, [16] * 4, "0"),
    }[kind]
    gm, _ = planned(lambda x: ops.wait_tensor(sent(x @ x)), values(0), policy=forced())
    assert samples_in(gm) == [0]


def test_passes_alone_leave_it_out_for_other_compile_stacks(fake_group):
    fake_group(4)
    gm = trace(lambda x: ar(x @ x), values(0))
    plan = commpass.rewrite(gm, (), forced(), profile=commpass.ethernet(1))
    assert plan.compressed
    assert not samples_in(gm)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), "often", None])
def test_sample_rate_must_be_a_share(wrong):
    with pytest.raises(PolicyError, match="error_sample_rate="):
        Policy(error_sample_rate=wrong)


def test_sample_rate_is_read_from_a_file(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text('preset = "balanced"\nwatch = 0.25\n')
    policy = Policy.from_toml(file)
    assert policy.error_sample_rate == 0.25
    file.write_text(policy.to_toml())
    assert Policy.from_toml(file) == policy
    file.write_text("name = 'x'\nwatch = 2\n")
    with pytest.raises(PolicyError, match=r"p\.toml:2: error_sample_rate=2"):
        Policy.from_toml(file)


# --- on calls -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "inductor", rarely("aot_eager")])
def test_errors_are_those_of_the_values_that_were_sent(fake_group, inner):
    fake_group(4)
    model = Layer()
    _, step_log = steps(
        model, forced("int4", algorithm="two_shot", lowering="kernel"), 3, inner=inner
    )
    forward, _ = step_log.entries
    (site,) = forward.samples.sites
    coder, wanted = codec(site.site.codec), []
    for step in range(3):
        x = model.linear(values(step)).detach().double()
        lost = coder.decode(coder.encode(x.float())).double() - x
        factor = site.site.error / coder.relative_error()
        wanted.append(float(lost.norm() / x.norm()) * factor)
    assert site.count == 3
    assert site.mean == pytest.approx(sum(wanted) / 3, rel=1e-4)
    assert site.worst == pytest.approx(max(wanted), rel=1e-4)
    assert site.mean == pytest.approx(site.site.error, rel=0.1)  # these values are Gaussian


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_errors_of_a_calibrated_codec_are_those_of_the_ranks_own_scales(fake_group, rank):
    """Neither forced nor with sampling requested: only the first calls of a budget."""
    fake_group(4, rank=rank)
    model, scales = Layer(), [2.0, 3.0, 4.0, 6.0]
    channels = Channels(64, (), tuple((scale,) * 64 for scale in scales))
    spec = codec("outlier", statistics=channels.to_text()).spec
    rule = Rule(codec=spec, kind="all_reduce", algorithm="one_shot", max_error=1.0)
    policy = Policy(rules=[rule])
    _, step_log = steps(model, policy, 1, inner="eager", profile=commpass.ethernet(0.001))
    (site,) = step_log.entries[0].samples.sites
    assert site.site.codec == spec
    x = model.linear(values(0)).detach().double()
    step = scales[rank] / 7
    lost = (x / step).round().clamp(-7, 7) * step - x
    factor = site.site.error / codec(spec).relative_error()
    assert site.count == 1
    assert site.last == pytest.approx(float(lost.norm() / x.norm()) * factor, rel=1e-4)


@pytest.mark.slow
def test_calls_sampled_are_as_many_as_asked(fake_group):
    fake_group(4)
    _, step_log = steps(Layer(), forced(error_sample_rate=0.25), 9, inner="eager")
    for entry in step_log.entries:
        assert entry.samples.calls == 9
        assert [each.count for each in entry.samples.sites] == [3]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
@pytest.mark.parametrize("model", [Layer, Fused])
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, rarely(torch.float32)])
def test_results_are_bit_identical_with_and_without(fake_group, model, lowering, dtype, inner):
    fake_group(4)
    torch.manual_seed(0)
    made = model().to(dtype)
    rule = {"algorithm": "two_shot", "lowering": lowering}
    plain, _ = steps(made, forced(error_sample_rate=0.0, **rule), 3, inner=inner)
    sampled, step_log = steps(made, forced(error_sample_rate=0.5, **rule), 3, inner=inner)
    assert all(map(torch.equal, plain, sampled))
    counts = [each.count for entry in step_log.entries for each in entry.samples.sites]
    assert any(counts) or (model is Fused and lowering == "inline")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"chunks": 4}, rarely({"rows": 4})])
def test_errors_of_chunks_are_those_of_each_chunk(fake_group, more):
    fake_group(4)
    made = Layer()
    plain, _ = steps(made, forced(error_sample_rate=0.0, **more), 1)
    sampled, step_log = steps(made, forced(error_sample_rate=1.0, **more), 1)
    assert all(map(torch.equal, plain, sampled))
    assert all(each.count == 1 for each in step_log.entries[0].samples.sites)


def test_compiler_of_others_is_not_given_the_operator(fake_group):
    fake_group(4)
    graphs = []

    def inner(gm, inputs):
        graphs.append(gm)
        return gm.forward

    _, step_log = steps(Layer(), forced(lowering="inline"), 1, inner=inner)
    assert len(graphs) == 2
    assert not any(map(samples_in, graphs))
    (site,) = step_log.entries[0].samples.sites
    assert "not sampled" in site.why


@pytest.mark.slow
def test_site_above_its_bound_is_reported_once_with_its_name(fake_group, caplog):
    fake_group(4)
    caplog.set_level(logging.WARNING, "commpass")
    bad = nn.Sequential(Layer(), Layer())
    with torch.no_grad():  # one value in each block of the second layer is much larger than others
        bad[1].linear.bias[::32] = 1e3
    bounded = Policy(
        rules=[Rule(codec="int4(block=32)", force=True, max_error=0.2)], error_sample_rate=1.0
    )
    steps(bad, bounded, 3, inner="eager")
    warned = [r.getMessage() for r in caplog.records if "real error" in r.getMessage()]
    assert warned == []  # large values are exact: the overall error is small
    with torch.no_grad():
        bad[1].linear.weight.zero_()
        bad[1].linear.bias.copy_(torch.tensor([7.0] + [0.49] * 31).repeat(2))
    steps(bad, bounded, 3, inner="eager")
    (warned,) = [r.getMessage() for r in caplog.records if "real error" in r.getMessage()]
    assert warned.startswith("1 int4")
    assert "above max_error=0.2" in warned


@pytest.mark.slow
def test_profilers_show_stages_by_site(fake_group):
    fake_group(4)
    torch._dynamo.reset()
    rule = {"algorithm": "two_shot", "lowering": "kernel"}
    model = torch.compile(nn.Sequential(Layer(), Layer()), backend=commpass.backend(forced(**rule)))
    with torch.no_grad():
        model(values(0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(values(0))
    names = [each.name for each in profile.events() if each.name.startswith("commpass: ")]
    (graph,) = {commpass.plans()[-1].graph}
    assert names[0] == f"commpass: graph {graph} forward"
    for layer in range(2):
        own = [name for name in names if name.startswith(f"commpass: {layer} int8/two_shot ")]
        assert [name.split()[-1] for name in own] == ["encode", "decode+sum+encode", "decode"]
