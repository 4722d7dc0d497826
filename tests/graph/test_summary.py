"""Reports on a backend's graphs: when, how often, and the alternatives for a rule that matched
nothing."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys

import pytest
import torch
from graphs import ops
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commpass
from commpass.distributed import record
from commpass.distributed import summary as summaries
from commpass.distributed.integration import Integration
from commpass.distributed.summary import Summary
from commpass.distributed.uncompressed import NO_RULE, NO_RULE_REMEDY, UncompressedSite
from commpass.groups import meshes
from commpass.plan import Plan, PlannedSite
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule

LAYERS = 2


def planned(**changes) -> PlannedSite:
    facts = {
        "name": "all_reduce",
        "kind": "all_reduce",
        "reduce_op": "sum",
        "group": "7",
        "group_label": "tp",
        "group_size": 8,
        "group_labels": ("tp", "world"),
        "dtype": "float32",
        "shape": (256,),
        "bytes": 1024,
        "wire_bytes": 1024,
        "module": "layers.0.mlp",
    }
    return PlannedSite(**(facts | changes))


def plan(graph: str, direction: str, *sites: PlannedSite, rules=()) -> Plan:
    """Return a plan of these sites, with the rules that match any of them."""
    matched = tuple(n for n, rule in enumerate(rules) if any(map(rule.matches, sites)))
    facts = {"policy": "p", "profile": "p", "sites": sites, "matched": matched}
    return Plan(graph=graph, direction=direction, **facts)


class Log:
    """Record what a summary logs, call by call."""

    def __init__(self, caplog, *rules: Rule):
        self.caplog, self.seen = caplog, 0
        caplog.set_level(logging.INFO, "commpass")
        gc.collect()  # the backends of other tests report when they are deleted
        caplog.clear()
        self.summary = Summary(Policy(rules=rules))

    def add(self, number: int, direction: str, trained: bool = False) -> None:
        site, rules = planned(direction=direction), self.summary.policy.rules
        self.summary.add(plan(str(number), direction, site, rules=rules), trained=trained)

    def call(self, *graphs: str) -> str:
        """Call graphs, where ``F0`` and ``B0`` are forward and backward of graph 0.

        Return what was logged meanwhile: L a line, W a warning.
        """
        for graph in graphs:
            self.summary.count_call(graph[1:] + {"F": "forward", "B": "backward"}[graph[0]])
        return self.said()

    def said(self) -> str:
        new = self.caplog.records[self.seen :]
        self.seen += len(new)
        return "".join("W" if entry.levelno == logging.WARNING else "L" for entry in new)


MISSING = Rule(module="nowhere")


def train(log: Log, number: int) -> None:
    log.add(number, "forward", trained=True)
    log.add(number, "backward")


@pytest.mark.slow
def test_step_is_reported_after_it_and_a_rule_that_matched_nothing_after_two(caplog):
    log = Log(caplog, MISSING)
    train(log, 0)
    assert [log.call("F0", "B0") for _ in range(6)] == ["", "L", "W", "", "", ""]
    log.summary.report()
    assert log.said() == ""


@pytest.mark.slow
def test_evaluation_first_is_reported_and_then_training_with_no_warning_before(caplog):
    log = Log(caplog, MISSING, Rule(direction="backward"))
    log.add(0, "forward")
    assert log.call(*["F0"] * 5) == "L"
    train(log, 1)
    assert [log.call("F1", "B1") for _ in range(4)] == ["", "L", "W", ""]
    assert "nowhere" in caplog.records[-1].getMessage()
    assert log.call("F0", "F0", "F1", "B1") == ""
    assert [entry.getMessage().count("3 graphs") for entry in caplog.records] == [0, 1, 1]


@pytest.mark.slow
def test_backward_that_is_compiled_when_it_is_first_needed_is_waited_for(caplog):
    log = Log(caplog, MISSING, Rule(direction="backward"))
    log.add(0, "forward", trained=True)
    assert log.call("F0", "F0", "F0") == ""
    log.add(0, "backward")
    assert [log.call("B0"), *(log.call("F0", "B0") for _ in range(3))] == ["", "L", "W", ""]


@pytest.mark.slow
def test_compiled_autograd_runs_one_backward_for_all_graphs(caplog):
    log = Log(caplog, MISSING, Rule(direction="backward"))
    log.add(0, "forward", trained=True)
    log.add(1, "forward", trained=True)
    assert log.call("F0", "F1") == ""
    log.add(2, "backward")
    assert [log.call("B2"), *(log.call("F0", "F1", "B2") for _ in range(4))] == [
        "",
        "",
        "L",
        "W",
        "",
    ]


@pytest.mark.slow
def test_graphs_of_hooks_in_backward_alone_are_reported_while_they_run(caplog):
    log = Log(caplog, MISSING)
    log.add(0, "backward")
    log.add(1, "backward")
    assert [log.call("B0", "B1") for _ in range(5)] == ["", "L", "W", "", ""]


@pytest.mark.slow
def test_blocks_that_share_a_graph_are_no_rounds(caplog):
    log = Log(caplog, MISSING)
    train(log, 0)
    assert log.call(*["F0"] * 8) == ""
    train(log, 1)
    steps = [log.call("F1", "B1", *["B0"] * 8)]
    steps += [log.call(*["F0"] * 8, "F1", "B1", *["B0"] * 8) for _ in range(4)]
    assert steps == ["", "L", "W", "", ""]


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one_are_reported_together(caplog):
    log = Log(caplog, MISSING)
    for number in range(4):
        train(log, number)
        log.call(f"F{number}")
    backward = [f"B{number}" for number in reversed(range(4))]
    forward = [f"F{number}" for number in range(4)]
    steps = [log.call(*backward)] + [log.call(*forward, *backward) for _ in range(4)]
    assert "".join(steps) == "LW"
    assert "4 graphs" not in caplog.records[0].getMessage()
    assert "8 graphs, 8 sites" in caplog.records[0].getMessage()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "order", [("F0", "B0") * 2, ("F0", "F0", "B0", "B0")], ids=["in turns", "pipelined"]
)
def test_parts_of_a_batch_are_reported_once(order, caplog):
    log = Log(caplog, MISSING)
    train(log, 0)
    assert "".join(log.call(*order) for _ in range(4)) == "LW"


@pytest.mark.slow
def test_second_model_of_the_backend_is_reported_too_and_each_warning_stays_one(caplog):
    log = Log(caplog, MISSING)
    train(log, 0)
    assert "".join(log.call("F0", "B0") for _ in range(4)) == "LW"
    train(log, 1)
    assert "".join(log.call("F1", "B1") for _ in range(4)) == "L"
    assert "4 graphs" in caplog.records[-1].getMessage()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("calls", "before", "at_the_end"), [(0, "", "LW"), (1, "", "LW"), (4, "L", "W")]
)
def test_summary_left_over_is_written_at_the_end(calls, before, at_the_end, caplog):
    log = Log(caplog, MISSING)
    log.add(0, "forward")
    assert log.call(*["F0"] * calls) == before
    log.summary.report()
    log.summary.report()
    assert log.said() == at_the_end


@pytest.mark.slow
def test_nothing_is_said_where_nothing_was_compiled(caplog):
    log = Log(caplog, MISSING)
    log.summary.report()
    assert log.said() == ""


# --- suggested alternatives -----------------------------------------------------------------------

SITES = (
    planned(),
    planned(module="layers.1.attn", direction="backward", bytes=4096),
    planned(module="head", kind="all_gather", group="9", group_label="dp", group_labels=("dp",)),
    planned(module="", group="11", group_label="", group_labels=()),
)
INSTEAD = {
    "a group": (
        Rule(group="tpp"),
        ["group='tpp'", "did you mean 'tp'?", "Known: 11, dp, tp, world."],
    ),
    "a module": (
        Rule(module="layers.*.mpl"),
        ["module='layers.*.mpl'", "did you mean 'layers.0.mlp'?", "head", "path ''"],
    ),
    "a kind": (Rule(kind="broadcast"), ["kind='broadcast'", "Known: all_gather, all_reduce."]),
    "bytes": (Rule(min_bytes=10**6), ["min_bytes=1000000: the largest has 4,096."]),
    "two of them": (Rule(group="ep", kind="broadcast"), ["group='ep'", "kind='broadcast'"]),
    "none alone": (
        Rule(group="dp", direction="backward"),
        ["some sites meet each of its conditions, but no site meets all of them"],
    ),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_rule_that_matched_nothing_is_reported_with_what_there_is(what):
    rule, parts = INSTEAD[what]
    summary = Summary(Policy(rules=[Rule(module="head"), rule]))
    summary.add(plan("0", "forward", *SITES, rules=summary.policy.rules), trained=True)
    ((number, sentence),) = summary.unmatched_rules().items()
    assert number == 1
    for part in (str(rule), "matched no collective", *parts):
        assert part in sentence


def test_preset_tells_groups_that_it_has_no_role_for_and_nothing_of_the_others(fake_group):
    fake_group(8)
    summary = Summary(PRESETS["balanced-3d"])
    summary.add(plan("0", "forward", planned(), rules=summary.policy.rules), trained=True)
    assert not summary.unmatched_rules()  # nothing about dp and pp, which do not exist
    other = planned(group="9", group_label="d", group_labels=("d", "world"))
    summary.add(plan("1", "forward", other, rules=summary.policy.rules), trained=True)
    (sentence,) = summary.unmatched_rules().values()
    assert "no rule for what is sent over d, which stays uncompressed" in sentence
    assert "for_mesh" in sentence
    summary.policy = Policy.for_mesh("balanced-3d", dp="world")
    assert not summary.unmatched_rules()
    summary.policy = Policy.from_preset("balanced-3d", rules=[Rule(group="d", keep=True)])
    summary.plans = [plan("0", "forward", other, rules=summary.policy.rules)]
    assert not summary.unmatched_rules()


def test_rule_for_one_of_the_blocks_that_share_a_graph_is_reported_with_the_reason():
    summary = Summary(Policy(rules=[Rule(module="layers.3", codec="int8")]))
    summary.add(plan("0", "forward", planned(module="layers.*.mlp")), trained=True)
    (sentence,) = summary.unmatched_rules().values()
    assert "layers.*.mlp" in sentence
    assert "compiled one by one share a graph" in sentence
    summary.plans = [plan("0", "forward", planned())]
    assert "share a graph" not in "".join(summary.unmatched_rules().values())


def test_rule_is_warned_that_there_are_no_collectives_at_all():
    summary = Summary(Policy(rules=[MISSING]))
    summary.add(plan("0", "forward"), trained=True)
    assert "they have none" in summary.unmatched_rules()[0]


def test_message_lists_no_more_names_than_one_can_read():
    summary = Summary(Policy(rules=[MISSING]))
    summary.add(
        plan("0", "forward", *(planned(module=f"layers.{number}.mlp") for number in range(500))),
        trained=True,
    )
    sentence = summary.unmatched_rules()[0]
    assert "and 460 more" in sentence
    assert len(sentence) < 1500


# --- one policy for several backends --------------------------------------------------------------

BOTH = (Rule(group="tp", codec="int8"), Rule(group="dp", codec="rotated"))
OVER_DP = {"group": "9", "group_label": "dp", "group_labels": ("dp",)}


def two_uses(caplog, *rules: Rule) -> tuple[Log, Log]:
    """Return the logs of two backends with equal policies: the first sends over tp, in a step of
    training, and the second over dp, from hooks of backward."""
    model, hooks = Log(caplog, *rules), Log(caplog, *rules)
    train(model, 0)
    over_dp = planned(module="head", direction="backward", **OVER_DP)
    hooks.summary.add(plan("0", "backward", over_dp, rules=rules), trained=False)
    return model, hooks


def warned(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def step(model: Log, hooks: Log) -> None:
    model.call("F0", "B0")
    hooks.call("B0")


def test_rule_for_what_another_backend_sends_is_not_reported(caplog):
    model, hooks = two_uses(caplog, *BOTH)
    for _ in range(5):
        step(model, hooks)
    for each in (hooks, model):
        each.summary.report()
        assert not each.summary.unmatched_rules()
    assert not warned(caplog)


def test_rule_is_reported_if_the_other_backend_has_no_graph_yet(caplog):
    model, hooks = Log(caplog, *BOTH), Log(caplog, *BOTH)
    train(model, 0)
    for _ in range(5):
        step(model, hooks)
    (warning,) = warned(caplog)
    assert "group='dp'" in warning
    assert "of the 2 graphs so far" in warning


@pytest.mark.parametrize("first", [0, 1], ids=["model", "hooks"])
def test_rule_that_no_backend_matches_is_reported_once_with_the_names_of_all(caplog, first):
    uses = two_uses(caplog, *BOTH, Rule(group="dpp"), Rule(module="haed"))
    for _ in range(5):
        for each in (uses[first], uses[1 - first]):
            each.call("F0", "B0") if each is uses[0] else each.call("B0")
    for each in uses:
        each.summary.report()
    group, module = warned(caplog)
    assert "group='dpp': there is none; did you mean 'dp'? Known: dp, tp, world." in group
    assert "did you mean 'head'?" in module
    assert "of the 3 graphs so far" in group


def test_backend_that_has_ended_counts(caplog):
    """At the end of a process its backends end one after the other."""
    model, hooks = two_uses(caplog, *BOTH)
    hooks.summary.report()
    del hooks
    gc.collect()
    model.summary.report()
    assert not warned(caplog)


def test_backend_with_another_policy_does_not_count(caplog):
    model, hooks = two_uses(caplog, *BOTH)
    hooks.summary.policy = Policy(name="other", rules=BOTH)
    for _ in range(5):
        step(model, hooks)
    dp, tp = warned(caplog)
    assert "group='dp': there is none" in dp
    assert "group='tp': there is none" in tp


def test_backend_whose_rules_are_for_another_one_is_not_said_to_compress_nothing(caplog):
    log = Log(caplog, BOTH[1])
    site = planned()
    left = [UncompressedSite(site, NO_RULE.format("policy 'custom'"), NO_RULE_REMEDY)]
    log.summary.add(plan("0", "forward", site), trained=False, sites=left)
    assert not log.summary.none_compressed()
    assert log.summary.unmatched_rules()
    hooks, over_dp = Summary(log.summary.policy), planned(**OVER_DP)
    hooks.add(plan("0", "backward", over_dp, rules=hooks.policy.rules), trained=False)
    assert not log.summary.none_compressed()
    assert not log.summary.unmatched_rules()


def test_preset_tells_groups_without_a_role_for_each_backend(fake_group, caplog):
    fake_group(8)
    logs = [Log(caplog, *PRESETS["balanced-3d"].rules) for _ in range(2)]
    for log, name in zip(logs, ("d", "e"), strict=True):
        site = planned(group=name, group_label=name, group_labels=(name,))
        log.summary.add(plan("0", "forward", site), trained=False)
    for log in logs:
        log.summary.report()
    first, second = warned(caplog)
    assert "what is sent over d, which" in first
    assert "what is sent over e, which" in second


def test_preset_of_which_no_rule_matched_is_reported_once_for_all_backends(caplog):
    logs = [Log(caplog, *PRESETS["tahquant"].rules) for _ in range(2)]
    for log in logs:
        log.summary.add(plan("0", "forward", planned()), trained=False)
    for log in logs:
        log.summary.report()
    (warning,) = warned(caplog)
    assert "matched a collective of the 2 graphs" in warning


# --- in real runs ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(self.linear(x), "sum", "0"))


def stack() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def steps(model, count: int) -> None:
    for _ in range(count):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()


def said(caplog) -> list[tuple[str, str]]:
    return [
        (entry.levelname, entry.getMessage())
        for entry in caplog.records
        if entry.name == "commpass"
    ]


def by_itself(model, chosen):
    return torch.compile(model, backend=chosen)


def block_by_block(model, chosen):
    for block in model:
        block.compile(backend=chosen)
    return model


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", [by_itself, block_by_block])
def test_evaluation_then_training_is_said_right_and_warns_of_nothing_that_matches(
    how, fake_group, caplog
):
    fake_group(2)
    gc.collect()
    caplog.set_level(logging.INFO, "commpass")
    caplog.clear()
    rules = [
        Rule(direction="backward", codec="int8", force=True),  # compressing nothing gives a warning
        Rule(module="lyers", codec="int8"),
    ]
    run = how(stack(), commpass.backend(Policy(rules=rules), inner="aot_eager", strict=True))
    with torch.no_grad():
        for _ in range(3):
            run(torch.ones(4, 8))
    assert not [level for level, _ in said(caplog) if level == "WARNING"]
    steps(run, 5)
    warnings = [message for level, message in said(caplog) if level == "WARNING"]
    lines = [message for level, message in said(caplog) if level == "INFO"]
    assert len(warnings) == 1
    assert "lyers" in warnings[0]
    assert len(lines) == 2
    made = commpass.plans()
    assert f"{int(lines[1].partition(' graphs')[0].rpartition(' ')[2])} graphs" in lines[1]
    assert any(plan.direction == "backward" for plan in made[-4:])


@pytest.mark.every
def test_process_that_ends_early_says_at_its_end_what_it_did():
    code = """
import logging, torch, commpass
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
policy = commpass.Policy(rules=[commpass.Rule(module="nowhere")])
torch.compile(lambda x: x + 1, backend=commpass.backend(policy, inner="aot_eager"))(torch.ones(2))
print("the end", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert "INFO policy 'custom': 1 graph, 0 sites" in done.stderr
    assert done.stderr.count("WARNING Rule(module='nowhere') of policy 'custom' matched") == 1


# --- labels ---------------------------------------------------------------------------------------


def plan_of(policy: Policy, **options) -> Plan:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(
            stack(), backend=commpass.backend(policy, inner="aot_eager", strict=True, **options)
        )(torch.ones(4, 8))
    return commpass.plans()[-1]


FORCED = Policy(rules=[Rule(group="tp", codec="int8", force=True)])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("group", ["tp", "t*", "world", "0"])
def test_mesh_of_one_dimension_gives_the_group_of_all_ranks_its_name(group, fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    found = plan_of(Policy(rules=[Rule(group=group, codec="int8", force=True)]))
    assert {site.group_label for site in found} == {"tp"}
    assert {site.group_labels for site in found} == {("tp", "world")}
    assert {site.members for site in found} == {(0, 1, 2, 3)}
    assert len(found.compressed) == len(found.sites) == LAYERS
    assert mesh.size() == 4


def test_mesh_is_found_though_as_many_refer_to_its_class_as_before(fake_group):
    fake_group(4)
    others = [DeviceMesh] * 100
    meshes()
    before = sys.getrefcount(DeviceMesh)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    while sys.getrefcount(DeviceMesh) > before:
        others.pop()
    assert any(found is mesh for found in meshes())


@pytest.mark.slow
def test_link_by_the_meshs_name_is_that_of_its_group(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    slow, fast = commpass.Link(1000.0, 0.001), commpass.Link(1.0, 100.0)
    times = [
        plan_of(Policy(), profile=commpass.Profile("p", fast, links={label: slow}))
        .sites[0]
        .plain_us
        for label in ("tp", "world", "dp")
    ]
    assert times[0] == times[1] > 100 * times[2]
    assert mesh.size() == 4


def test_label_is_absent_without_its_mesh(fake_group):
    fake_group(4)
    found = plan_of(FORCED)
    assert {site.group_labels for site in found} == {("world",)}
    assert not found.compressed
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert {site.group_labels for site in plan_of(FORCED)} == {("world",)}
    assert mesh.size() == 4


def test_names_come_from_every_mesh_in_an_order_of_their_own(fake_group):
    fake_group(4)
    meshes = [init_device_mesh("cpu", (4,), mesh_dim_names=(name,)) for name in ("tp", "dp")]
    meshes.append(init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "cp")))
    meshes.append(init_device_mesh("cpu", (4,)))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes.append(two._flatten("ab"))
    assert {site.group_labels for site in plan_of(FORCED)} == {("ab", "cp", "dp", "tp", "world")}
    assert len(meshes) == 5


@pytest.mark.slow
def test_mesh_of_before_the_ranks_were_set_up_again_counts_no_more(fake_group):
    fake_group(4)
    before = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    fake_group(8)
    assert {site.group_labels for site in plan_of(FORCED)} == {("world",)}
    fake_group(4)
    assert {site.group_labels for site in plan_of(FORCED)} == {("world",)}
    assert before.mesh_dim_names == ("tp",)


@pytest.mark.slow
def test_mesh_that_is_made_between_two_graphs_is_seen(fake_group):
    fake_group(4)
    assert not plan_of(FORCED).compressed
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    assert plan_of(FORCED).compressed
    del mesh
    gc.collect()
    assert not plan_of(FORCED).compressed


# --- where no graph has a collective --------------------------------------------------------------


class Alone(nn.Module):
    """Like a graph under DDP or FSDP2, which does not contain what they send."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def unsaid(monkeypatch, caplog):
    """Simulate a new process, with 8 ranks, in which nothing has been reported."""
    monkeypatch.setattr(summaries, "_warned_of_no_site", [])
    monkeypatch.setattr(record, "_plans", [])
    caplog.set_level(logging.INFO, "commpass")
    torch._dynamo.reset()


def told(caplog) -> list[str]:
    return [text for level, text in said(caplog) if text.startswith("no collective in any")]


@pytest.mark.slow
def test_model_of_several_ranks_without_a_site_is_reported_with_what_to_do_once(
    fake_group, unsaid, caplog
):
    fake_group(8)
    for _ in range(2):
        steps(torch.compile(Alone(), backend=commpass.backend("balanced", inner="eager")), 4)
    (text,) = told(caplog)
    assert ("WARNING", text) in said(caplog)
    for part in ("8 ranks", "compress_ddp", "compress_fsdp", "replicate", "DistributedDataPara"):
        assert part in text


def one_rank(model, fake_group):
    fake_group(1)
    steps(by_itself(model, commpass.backend("balanced", inner="eager")), 4)


def switched_off(model, fake_group):
    fake_group(8)
    steps(by_itself(model, commpass.backend("off", inner="eager")), 4)


def one_step(model, fake_group):
    fake_group(8)
    steps(by_itself(model, commpass.backend("balanced", inner="eager")), 1)


def inference(model, fake_group):
    fake_group(8)
    compiled = by_itself(model, commpass.backend("balanced", inner="eager"))
    with torch.no_grad():
        for _ in range(5):
            compiled(torch.ones(4, 8))


def other_graphs_have(model, fake_group):
    fake_group(8)
    steps(by_itself(stack(), commpass.backend("balanced", inner="eager")), 1)
    torch._dynamo.reset()
    steps(by_itself(model, commpass.backend("balanced", inner="eager")), 4)


def has_an_integration(model, fake_group):
    fake_group(8)
    integration = Integration()
    integration.acquire(model, model)
    steps(by_itself(model, commpass.backend("balanced", inner="eager")), 4)
    integration.close()


def not_the_first_rank(model, fake_group):
    from graphs import as_rank

    with as_rank(1, 8):
        steps(by_itself(model, commpass.backend("balanced", inner="eager")), 4)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "run",
    [
        one_rank,
        switched_off,
        one_step,
        inference,
        other_graphs_have,
        has_an_integration,
        not_the_first_rank,
    ],
)
def test_summary_does_not_claim_that_there_is_no_site(fake_group, unsaid, caplog, run):
    run(Alone(), fake_group)
    gc.collect()
    assert not told(caplog)
