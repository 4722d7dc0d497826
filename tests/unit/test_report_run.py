"""Graphs of one exchange each, as integrations make them, are reported as one; and all runs of a
folder."""

from __future__ import annotations

import dataclasses

import pytest
from dumps import fails, make, run, site

from commpass.plan import dump
from commpass.plan.timeline import Timeline

SMALLER = {"codec": "int8", "algorithm": "ring", "wire_bytes": 2 << 20, "predicted_us": 40.0}


def exchange(module: str, direction: str = "forward", **more: object) -> dump.Dump:
    """Return what an integration writes for one module."""
    kind = "all_gather" if direction == "forward" else "reduce_scatter"
    one = site(kind, kind=kind, module=module, shape=(64,), reason="because", **more)
    return make(direction, [one], nodes=())


def integrations(layers: int, **more: object) -> list[dump.Dump]:
    names = [f"layers.{number}" for number in range(layers)]
    return [exchange(name, way, **more) for way in ("forward", "backward") for name in names]


def written(folder, dumps, name: str = "run-1"):
    for one in dumps:
        dump.write(folder, dataclasses.replace(one, run=name))
    return folder


def test_line_for_each_pattern_whatever_the_number_of_graphs(tmp_path):
    text = run("explain", written(tmp_path, integrations(12))).stdout
    assert "all 24 graphs: 24 sites" in text
    assert "graphs 0-11: forward, one exchange each" in text
    assert "graphs 12-23: backward, one exchange each" in text
    assert text.count("layers.* x 12") == 2
    assert "96.0 MiB -> 96.0 MiB" in text  # 12 times 8 MiB in each direction
    assert len(text.splitlines()) < 30
    all_of = run("explain", tmp_path, "--all").stdout
    assert all_of.count("layers.7") == 2


def test_graphs_of_more_than_an_exchange_stay_apart(tmp_path):
    computing = dataclasses.replace(exchange("head"), before=make().before * 5)
    given_up = exchange("tail", "backward")
    plan = dataclasses.replace(given_up.plan, fallback="a pass failed")
    given_up = dataclasses.replace(given_up, plan=plan)
    first, last = exchange("a"), exchange("b")
    text = run("explain", written(tmp_path, [first, computing, given_up, last])).stdout
    assert "graphs 0, 3: forward, one exchange each" in text
    assert "graph 1: forward" in text
    assert "graph 2: backward" in text
    assert "a pass failed" in text


@pytest.mark.parametrize("layers", [1, 3])
def test_exchanges_alone_are_reported_without_slack(layers, tmp_path):
    dumps = [
        dataclasses.replace(one, timeline=Timeline(us=5.0, slack_us={site.name: 0.0}))
        for one in integrations(layers)
        for site in one.plan
    ]
    text = run("explain", written(tmp_path, dumps)).stdout
    assert "critical" not in text
    assert "slack" not in text


def test_two_runs_of_integrations_are_compared_pattern_by_pattern(tmp_path):
    left = written(tmp_path / "a", integrations(12))
    right = written(tmp_path / "b", integrations(12, **SMALLER))
    text = run("diff", left, right).stdout
    assert text.count("12 all_gather of layers.*") == 1
    assert text.count("12 reduce_scatter of layers.*") == 1
    assert "2nd forward graph" not in text
    same = run("diff", left, left)
    assert same.exit_code == 0
    assert "no differences" in same.stdout


def test_all_runs_of_a_folder_are_reported_as_one(tmp_path):
    written(tmp_path, [make()], "backend")
    written(tmp_path, integrations(3), "integration")
    newest = run("explain", tmp_path)
    assert "run integration" in newest.stdout
    assert "--run picks: backend, or all" in newest.stderr
    both = run("explain", tmp_path, "--run", "all")
    assert "run backend, integration, written" in " ".join(both.stdout.split())
    assert "all 7 graphs: 8 sites" in both.stdout
    assert both.stderr == ""
    others = dataclasses.replace(make().plan, policy="other")
    written(tmp_path, [dataclasses.replace(make(), plan=others)], "third")
    text = run("diff", tmp_path, tmp_path, "--run-a", "all", "--run-b", "third").stdout
    assert "policy balanced, other, profile h100" in " ".join(text.split())
    page = tmp_path / "page.html"
    assert run("report", tmp_path, "--run", "all", "-o", page).exit_code == 0
    assert "policy balanced, other on h100" in page.read_text()
    fails(run("explain", tmp_path, "--run", "al"), "did you mean 'all'")


@pytest.mark.parametrize("command", ["graph", "report"])
def test_other_commands_take_all_runs_too(command, tmp_path):
    written(tmp_path / "dumps", [make()], "backend")
    written(tmp_path / "dumps", integrations(2), "integration")
    more = ("-o", tmp_path / "page.html") if command == "report" else ()
    done = run(command, tmp_path / "dumps", "--run", "all", *more)
    assert done.exit_code == 0, done.stderr


def test_layers_with_sizes_that_nobody_knows_are_one_line(tmp_path):
    sites = [
        site(f"all_to_all_{n}", kind="all_to_all", shape=(f"u{n}", 64), bytes=-1, wire_bytes=-1)
        for n in range(4)
    ]
    sites = [dataclasses.replace(s, module=f"layers.{n}.moe") for n, s in enumerate(sites)]
    text = run("explain", written(tmp_path, [make(sites=sites)])).stdout
    assert text.count("layers.*.moe x 4") == 1
    assert "?" in text
