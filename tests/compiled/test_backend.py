"""The backend on the fake process group: what it rejects, what it leaves unchanged, what it
reports."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import errno
import gc
import json
import logging

import pytest
import torch
from graphs import ops
from tiers import rarely
from torch import nn

import commpass
from commpass.errors import CommpassError, PolicyError
from commpass.plan import dump as dumps
from commpass.policy import Policy
from commpass.policy.rules import Rule

X = torch.ones(64, 64)
FORCED = Policy(rules=[Rule(codec="int8", force=True)])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(self.w(x), "sum", "0"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compile_and_run(policy=FORCED, model=None, times=1, grad=False, **options):
    """Compile and run a small model; return its plans."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    function = torch.compile(
        model or Net(),
        backend=commpass.backend(policy, **{"inner": "eager", "strict": True} | options),
    )
    for _ in range(times):
        if grad:
            function(X.clone().requires_grad_()).sum().backward()
        else:
            with torch.no_grad():
                function(X)
    return commpass.plans()[seen:]


@pytest.mark.every
@pytest.mark.parametrize("ranks", [rarely(2), rarely(8), 64, rarely(1024)])
def test_model_compiles_for_any_number_of_ranks(ranks, fake_group):
    fake_group(ranks)
    forward, backward = compile_and_run(grad=True, inner="inductor")
    assert [site.codec for site in (*forward, *backward)] == ["int8"] * 4
    assert {site.group_size for site in forward} == {ranks}


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ({"policy": "balance"}, "'balanced'"),
        ({"inner": "inducter"}, "'inductor'"),
        ({"timeout": 0}, "timeout=0: must be seconds as a number above 0, e.g. timeout=30"),
        ({"timeout": "30"}, "timeout='30': must be seconds as a number"),
        ({"timeout": True}, "timeout=True: must be seconds as a number"),
        (
            {"timeout": datetime.timedelta(seconds=30)},
            "must be seconds as a number above 0, e.g. timeout=30",
        ),
        ({"strict": "no"}, "strict='no': must be strict=True or strict=False"),
        ({"dump": 5}, "dump=5: must be the path of a folder"),
        ({"policy": "missing.toml"}, "missing.toml"),
    ],
)
def test_unknown_arguments_are_refused_with_the_nearest_that_exists(arguments, near):
    with pytest.raises(PolicyError, match=near):
        commpass.backend(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy(), FORCED], ids=["grouped", "coded"])
def test_graphs_compile_after_ddp_has_switched_its_fusion_on(policy, fake_group):
    """DDP with ``optimize_ddp="python_reducer"`` does so for the whole process."""

    def sums(x):
        begun = [ops.all_reduce(each, "sum", "0") for each in (x * 2, x.t() * 3, x[:, :3] * 5)]
        return [ops.wait_tensor(each) * 2 for each in begun]

    fake_group(2)
    with torch._inductor.config.patch(_fuse_ddp_communication=True, fx_graph_cache=False):
        (plan,) = compile_and_run(policy, sums, inner="inductor", profile=commpass.ethernet(10))
    assert plan.grouped or plan.compressed


@pytest.mark.slow
def test_no_global_state_is_changed(fake_group):
    import torch._functorch.config
    import torch._inductor.config

    fake_group(8)
    configs = (torch._inductor.config, torch._functorch.config, torch._dynamo.config)
    before = [copy.deepcopy(config.get_config_copy()) for config in configs]
    modes = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    compile_and_run(grad=True, inner="inductor", times=2)
    compile_and_run("balanced", grad=True, inner="aot_eager")
    assert [config.get_config_copy() for config in configs] == before
    assert modes == (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.slow
def test_other_peoples_passes_still_run_and_see_the_rewritten_graph(fake_group):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    fake_group(8)
    seen = []

    class Theirs(CustomGraphPass):
        def __call__(self, graph):
            seen.append([str(node.target) for node in graph.nodes if "all_" in str(node.target)])

        def uuid(self):
            return None

    with torch._inductor.config.patch(post_grad_custom_pre_pass=Theirs()):
        compile_and_run(inner="inductor")
    assert seen
    assert not any("all_reduce" in target for target in seen[0])


@pytest.mark.slow
def test_mode_and_options_go_to_inductor(fake_group):
    fake_group(8)
    seen = []

    def spy(gm, example_inputs, **kwargs):
        seen.append(torch._inductor.config.max_autotune)
        return gm.forward

    torch._dynamo.reset()
    import torch._inductor.compile_fx as module

    real = module.compile_fx_inner
    module.compile_fx_inner = lambda gm, inputs, **kw: (
        seen.append(torch._inductor.config.coordinate_descent_tuning),
        real(gm, inputs, **kw),
    )[1]
    try:
        with torch.no_grad():
            backend = commpass.backend(FORCED, strict=True)
            torch.compile(Net(), backend=backend, options={"coordinate_descent_tuning": True})(X)
            torch._dynamo.reset()
            torch.compile(Net(), backend=backend)(X)
    finally:
        module.compile_fx_inner = real
    assert seen == [True, False]


@pytest.mark.slow
def test_world_size_one_sends_nothing_and_says_so(fake_group):
    fake_group(1)
    (plan,) = compile_and_run()
    assert plan.sites == ()
    assert ["one rank" in step.into for step in plan.simplified] == [True, True]
    (plan,) = compile_and_run(Policy(skip="simplify", codecs="int8"))
    assert [site.codec for site in plan] == ["none", "none"]
    assert "one rank" in plan.sites[0].reason


def test_graph_without_collectives_compiles_and_has_an_empty_plan(fake_group):
    fake_group(8)
    (plan,) = compile_and_run(model=nn.Linear(64, 64))
    assert plan.sites == ()
    assert plan.fallback == ""


@pytest.mark.slow
def test_it_works_without_torch_distributed():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend=commpass.backend(strict=True))
    assert torch.equal(compiled(X), X * 2)


@pytest.mark.slow
def test_every_site_has_a_reason_and_a_rule_that_matched_nothing_is_reported_once(
    fake_group, caplog
):
    fake_group(8)
    rules = [Rule(module="layers.0", codec="int8", force=True), Rule(module="layer.*", keep=True)]
    torch._dynamo.reset()
    gc.collect()  # the backends of other tests report when they are deleted
    with caplog.at_level(logging.INFO, "commpass"):
        plans = compile_and_run(Policy(rules=rules), grad=True, times=3)
    assert all(site.reason for plan in plans for site in plan)
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "layer.*" in warnings[0]
    assert "matched no collective" in warnings[0]
    summaries = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.INFO]
    assert len(summaries) == 1
    assert "2 graphs, 4 sites, 2 compressed" in summaries[0]


@pytest.mark.slow
def test_rule_that_only_backward_meets_is_not_reported(fake_group, caplog):
    fake_group(8)
    with caplog.at_level(logging.INFO, "commpass"):
        compile_and_run(
            Policy(rules=[Rule(direction="backward", codec="int8", force=True)]), grad=True, times=2
        )
    assert not [entry for entry in caplog.records if entry.levelno == logging.WARNING]


@pytest.mark.slow
def test_counters_and_artifacts(fake_group, tmp_path):
    from torch._dynamo.utils import counters

    fake_group(8)
    entries = []
    handler = logging.Handler()
    handler.emit = entries.append
    trace_log = logging.getLogger("torch.__trace")
    trace_log.addHandler(handler)
    before = dict(counters["commpass"])
    try:
        plans = compile_and_run(grad=True)
    finally:
        trace_log.removeHandler(handler)
    gained = {key: counters["commpass"][key] - before.get(key, 0) for key in counters["commpass"]}
    assert (gained["graphs"], gained["sites"], gained["compressed"], gained["fallbacks"]) == (
        2,
        4,
        4,
        0,
    )
    assert (
        gained["wire_bytes"]
        == sum(site.wire_bytes for plan in plans for site in plan)
        < gained["bytes"]
    )
    names = [
        entry.metadata["artifact"]["name"]
        for entry in entries
        if "artifact" in getattr(entry, "metadata", {})
    ]
    assert {"commpass_plan_forward", "commpass_forward_before", "commpass_backward_after"} <= set(
        names
    )
    payloads = [
        e.payload
        for e in entries
        if getattr(e, "metadata", {}).get("artifact", {}).get("name") == "commpass_plan_forward"
    ]
    plan = json.loads(payloads[0])["plan"]
    assert [site["codec"] for site in plan["sites"]] == ["int8", "int8"]


@pytest.mark.slow
def test_full_disk_ends_no_job(fake_group, tmp_path, monkeypatch, caplog):
    fake_group(8)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dumps, "write", full)
    (plan,) = compile_and_run(grad=False, dump=tmp_path)
    assert plan.sites
    assert f"the dump of graph {plan.graph} was not written: No space left" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_dump_holds_plan_and_graphs(how, fake_group, tmp_path, monkeypatch):
    fake_group(8)
    if how == "environment":
        monkeypatch.setenv("COMMPASS_DUMP", str(tmp_path))
    plans = compile_and_run(grad=True, **({"dump": tmp_path} if how == "argument" else {}))
    forward, backward = dumps.read_run(tmp_path)
    assert [forward.plan, backward.plan] == plans
    assert (forward.world_size, forward.rank, forward.torch) == (8, 0, torch.__version__)
    assert [node.site for node in forward.before if node.site] == [
        site.name for site in forward.plan
    ]
    assert not any(node.inserted for node in forward.before)
    assert {node.site for node in forward.after if node.inserted} == {
        site.name for site in forward.plan
    }
    for nodes in (forward.after, forward.lowered):
        assert not any("all_reduce" in node.target for node in nodes)
        roles = {node.role for node in nodes if node.inserted}
        assert {"encode", "exchange", "wait", "decode", "sum"} <= roles
    coded = [node for node in forward.after if node.target.startswith("commpass.")]
    assert {node.role for node in coded} == {"encode", "decode", "sum"}
    assert not any("commpass" in node.target for node in forward.lowered)
    assert len(forward.after) < len(forward.lowered) / 2


def test_dump_has_the_graph_after_each_pass_that_changed_it(fake_group, tmp_path):
    fake_group(8)
    compile_and_run(grad=False, dump=tmp_path)
    (dump,) = dumps.read_run(tmp_path)
    texts = {path.stem: path.read_text() for path in (tmp_path / "0000-forward").iterdir()}
    assert {"00-discover", "06-rewrite", "08-lower"} <= texts.keys()
    assert "05-choose" not in texts
    assert len(set(texts.values())) == len(texts)
    for name, text in texts.items():
        step = name[3:]
        assert text.startswith(f"# {step} took {dump.passes_ms[step]:.1f} ms\nclass ")
        assert ("torch.ops.commpass.encode" in text) == (name in ("06-rewrite", "07-fuse"))
    assert "all_reduce" in texts["00-discover"]


def test_failing_pass_compiles_the_untouched_graph_with_a_warning(fake_group, monkeypatch, caplog):
    from commpass.passes import manager, rewrite

    def fail(road):
        rewrite.run(road)
        raise RuntimeError("injected")

    fake_group(8)
    monkeypatch.setattr(
        manager,
        "PASSES",
        tuple(
            dataclasses.replace(p, run=fail) if p.name == "rewrite" else p for p in manager.PASSES
        ),
    )
    with caplog.at_level(logging.WARNING, "commpass"):
        (plan,) = compile_and_run(strict=False)
    assert plan.fallback == "pass 'rewrite' failed: RuntimeError: injected"
    assert any("injected" in entry.getMessage() for entry in caplog.records)
    with pytest.raises(Exception, match="injected"):
        compile_and_run(strict=True)


# --- by name --------------------------------------------------------------------------------------


def by_name(**options):
    torch._dynamo.reset()
    seen = len(commpass.plans())
    function = torch.compile(Net(), backend="commpass", options=options)
    with torch.no_grad():
        function(X)
    return commpass.plans()[seen:]


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_name_with_the_arguments_as_options(fake_group):
    fake_group(8)
    assert "commpass" in torch.compiler.list_backends()
    first = by_name(policy=FORCED, inner="eager", strict=True)
    assert [site.codec for site in first[0]] == ["int8", "int8"]
    assert [site.codec for site in by_name(inner="eager")[0]] == ["none", "none"]
    again = by_name(policy=FORCED, inner="eager", strict=True)
    assert again[0].graph != first[0].graph  # of the same backend, which numbers its graphs


def test_options_of_inductor_may_stand_beside_them(fake_group):
    fake_group(2)
    assert [site.codec for site in by_name(policy=FORCED, max_autotune=False)[0]] == [
        "int8",
        "int8",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"polcy": "off"}, "unknown option 'polcy'; did you mean 'policy'?"),
        ({"policy": "balancd"}, "did you mean 'balanced'?"),
        ({"inner": "eager", "max_autotune": True}, "unknown option 'max_autotune'"),
        ({"max_autotune": 1}, "option max_autotune=1: must be a bool"),
    ],
)
def test_options_that_nobody_knows_are_refused(options, said, fake_group):
    fake_group(2)
    with pytest.raises(Exception, match="PolicyError") as error:
        by_name(**options)
    assert said in str(error.value)


def test_options_of_inductor_are_written_with_either_sign_and_checked(fake_group):
    fake_group(2)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Net(), backend=commpass.backend("off"), options={"max-autotune": False})(X)
        torch._dynamo.reset()
        with pytest.raises(
            Exception, match="unknown option 'max_autotun'; did you mean 'max_autotune'"
        ):
            torch.compile(Net(), backend=commpass.backend("off"), options={"max_autotun": False})(X)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "warned"), [(FORCED, True), ("off", False)])
def test_last_compile_before_torch_gives_up_is_reported_where_anything_was_changed(
    policy, warned, fake_group, caplog
):
    fake_group(2)
    torch._dynamo.reset()
    function = torch.compile(Net(), backend=commpass.backend(policy, inner="eager"), dynamic=False)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(recompile_limit=3),
        caplog.at_level(logging.WARNING, "commpass"),
    ):
        for rows in range(1, 4):
            assert not any("for the last time" in line for line in caplog.messages)
            function(X[:rows])
    assert any("for the last time" in line for line in caplog.messages) is warned


@pytest.mark.parametrize(("codec", "refused"), [("int8", True), ("none", False)])
def test_changed_graph_is_not_called_with_other_ranks_than_it_was_compiled_for(
    fake_group, codec, refused
):
    policy = Policy(rules=[Rule(codec=codec, force=True) if refused else Rule(keep=True)])
    compiled = torch.compile(
        lambda x: ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")),
        backend=commpass.backend(policy, inner="eager"),
    )
    x = torch.ones(64, 64)
    fake_group(4)
    compiled(x)
    fake_group(4)  # created again, with the same ranks
    compiled(x)
    fake_group(8)
    if refused:
        with pytest.raises(
            CommpassError, match=r"had ranks 0, 1, 2, 3, .* now it has ranks 0, 1, 2, 3, 4"
        ):
            compiled(x)
        torch._dynamo.reset()
    compiled(x)
