"""Which exchanges of a graph are on its critical path, in dumps and in the output of explain."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from graphs import ops
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.costmodel import ethernet
from commpass.costmodel.critical import dependencies, slack_us
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.memory import memory
from commpass.passes.fx.schedule import timed
from commpass.passes.fx.work import Work, work_of
from commpass.passes.timeline import site_slack_us, tasks_of
from commpass.plan import dump
from commpass.policy import Policy

N = 128
LINK = ethernet(1)
wait = ops.wait_tensor


def hidden_and_exposed(x, w):
    """One sum overlaps with eight matmuls; another one is waited for at once."""
    hidden = ops.all_reduce(x * 2, "sum", "0")
    y = x
    for _ in range(8):
        y = torch.relu(y @ w)
    y = y + wait(hidden)
    exposed = wait(ops.all_reduce(y[:1] * 3, "sum", "0"))
    return exposed * 2 + y


def explained(folder: Path, *arguments: object) -> str:
    result = CliRunner().invoke(
        app, ["explain", str(folder), *map(str, arguments)], env={"COLUMNS": "220"}
    )
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def dumped(fake_group, tmp_path):
    def write(policy, function=hidden_and_exposed, n=N):
        fake_group(4)
        chosen = commpass.backend(policy, inner="eager", profile=LINK, dump=tmp_path, strict=True)
        compiled = torch.compile(function, backend=chosen)
        compiled(torch.ones(64, n), torch.ones(n, n))
        (found,) = dump.read_run(tmp_path)
        return found

    return write


UNCHUNKED = Policy(name="plain", skip=("simplify", "group", "chunk"))


@pytest.mark.slow
def test_hidden_exchange_has_slack_and_an_exposed_one_is_critical(dumped, tmp_path):
    times = dumped(UNCHUNKED, n=1024).timeline
    hidden, exposed = "all_reduce", "all_reduce_1"
    assert times.exposed_of(hidden) == 0
    assert times.exposed_of(exposed) > 0
    assert times.slack_us[exposed] == 0
    travels = next(event for event in times.events if event.site == hidden and event.travels)
    assert times.slack_us[hidden] > 0
    (waited,) = (e for e in times.events if e.site == exposed and e.travels)
    before_wait = max(
        e.end_us for e in times.events if e.name.startswith("relu") and e.lane == "host"
    )
    assert times.slack_us[hidden] == pytest.approx(before_wait - travels.end_us, abs=0.01)
    assert waited.begin_us > before_wait
    shown = explained(tmp_path, "--all")
    assert "1 of 2 exchanges is critical: on the longest path" in shown
    sites = json.loads(explained(tmp_path, "--json"))[0]["sites"]
    assert [site["critical"] for site in sites] == [False, True]
    assert [site["slack_us"] for site in sites] == [times.slack_us[hidden], 0.0]
    assert "\ncritical: it is on" in explained(tmp_path, "--why", exposed)
    assert "\nslack " in explained(tmp_path, "--why", hidden)


def test_dependents_of_exchange_are_counted(dumped, tmp_path):
    dumped(UNCHUNKED)
    first, last = (explained(tmp_path, "--why", name) for name in ("all_reduce", "all_reduce_1"))
    # After the first: its sum, a slice, times 3, the other site, times 2, a sum. Before: times 2, 8
    # x 2.
    assert "1 of 1 other sites and 5 of 22 other operators depend on its result" in first
    assert "0 of 1 other sites and 2 of 22 other operators depend on its result" in last


def compiled(policy) -> tuple[Work, list]:
    """Return the compiled operators of a graph, as work, and its nodes in order."""
    seen = []

    def keep(gm, inputs):
        seen.append(gm)
        return gm.forward

    backend = commpass.backend(policy, inner=keep, profile=LINK, strict=True)
    torch.compile(hidden_and_exposed, backend=backend)(torch.ones(64, N), torch.ones(N, N))
    (gm,) = seen
    return work_of(gm.graph, memory(gm.graph), LINK), list(gm.graph.nodes)


@pytest.mark.slow
def test_coded_site_has_the_slack_of_its_least_exchange(fake_group):
    fake_group(4)
    rule = commpass.Rule(codec="int8", algorithm="two_shot", force=True)
    work, nodes = compiled(Policy(rules=[rule], skip=("move", "simplify", "group", "chunk")))
    ends: dict[str, list[float]] = {}
    for number, us in slack_us(tasks_of(work, nodes)).items():
        ends.setdefault(nodes[number].meta[MARK].site, []).append(us)
    assert sorted(map(len, ends.values())) == [2, 2]
    assert any(max(each) - min(each) > 1 for each in ends.values())
    wanted = {site: pytest.approx(min(each), abs=0.001) for site, each in ends.items()}
    assert site_slack_us(work, nodes) == wanted


@pytest.mark.slow
def test_longest_path_of_a_graph_is_its_predicted_time(fake_group):
    fake_group(4)
    work, nodes = compiled("balanced")
    tasks = tasks_of(work, nodes)
    longest = nx.dag_longest_path_length(dependencies(tasks), weight="us")
    assert longest == pytest.approx(timed(work, nodes).now)


@pytest.mark.slow
def test_dump_of_before_has_no_slack(dumped, tmp_path):
    dumped(UNCHUNKED)
    (file,) = dump.files(tmp_path)
    held = json.loads(file.read_text())
    assert held["timeline"].pop("slack_us")
    file.write_text(json.dumps(held))
    shown = explained(tmp_path, "--all") + explained(tmp_path)
    assert "slack" not in shown
    assert "critical" not in shown
    sites = json.loads(explained(tmp_path, "--json"))[0]["sites"]
    assert {(site["slack_us"], site["critical"]) for site in sites} == {(None, None)}


def test_exchange_of_a_hook_alone_is_not_called_critical(dumped, tmp_path):
    dumped(UNCHUNKED, lambda x, w: wait(ops.all_reduce(x, "sum", "0")))
    assert "critical" not in explained(tmp_path)
