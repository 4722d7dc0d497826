"""Timelines, predicted for graphs, in dumps and pictures, and read from traces, against explicit
numbers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_dumps as made
import torch
from dumps import fails
from graphs import ops, trace
from steps import growth
from typer.testing import CliRunner

import commpass
from commpass import Policy, Rule
from commpass.cli import app
from commpass.costmodel import Link, Profile
from commpass.errors import TraceError
from commpass.passes import PASSES, GraphInput, run
from commpass.passes.timeline import timeline
from commpass.plan import dump
from commpass.plan.timeline import HOST, Event, Timeline, subtract, union
from commpass.report import timeline as timelines
from commpass.report.measured_timeline import measured
from commpass.report.timeline import TimelineView
from commpass.report.timeline_drawing import ROWS, Picture, draw, labels

wait = ops.wait_tensor


def test_time_that_is_taken_by_others():
    assert union([(5, 7), (0, 2), (1, 3)]) == [(0, 3), (5, 7)]
    assert subtract([(0, 10), (12, 14)], [(2, 4), (3, 5), (9, 13)]) == [(0, 2), (5, 9), (13, 14)]
    assert subtract([(0, 1)], []) == [(0, 1)]


# --- predicted ------------------------------------------------------------------------------------


def two_sums(x, w):
    first = ops.all_reduce(x + 1, "sum", "0")
    second = ops.all_reduce(x * 2, "sum", "0")
    shared = torch.mm(x, w)
    return wait(first) + wait(second) + shared


def profile(gflops: float = 1.0) -> Profile:
    """A link of 0.1 GB/s with a start-up time of 100 us; 2 GB/s read and written, 1 GFLOP/s."""
    kernels = dataclasses.replace(
        commpass.ethernet(1).kernels, launch_us=0.0, gflops=gflops, gbytes_per_s=2.0
    )
    return dataclasses.replace(
        commpass.ethernet(1), name="round numbers", link=Link(100.0, 0.1), kernels=kernels
    )


def outcome_of(gm, policy: Policy, known: Profile, *without: str):
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=known)
    return run(road, "0", tuple(each for each in PASSES if each.name not in without), strict=True)


KEPT = Policy(rules=[Rule(keep=True)])
CHUNKS = Policy(
    rules=[Rule(codec="int8", algorithm="two_shot", force=True, chunks=2)], more_memory=1.0
)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(500, 500), torch.ones(500, 500)


def test_begins_and_ends_are_those_of_the_rule(fake_group):
    """250,000 values: 1,000 us to read and write, 15,000 us on the link.

    Two exchanges follow one another while the rank computes for 250 ms, and only then waits for
    them.
    """
    fake_group(4)
    gm = trace(two_sums, *inputs())
    outcome = outcome_of(gm, KEPT, profile(), "simplify", "move")
    found = timeline(gm, outcome, profile())
    by_name = {(event.name, event.lane): event for event in found.events}
    add, mul, mm = (by_name[name, HOST] for name in ("add", "mul", "mm"))
    first, second = (by_name[name, "world"] for name in ("all_reduce", "all_reduce_1"))
    assert [(each.what, each.begin_us, each.us) for each in (add, mul, mm)] == [
        ("compute", 0.0, 1000.0),
        ("compute", 1000.0, 1000.0),
        ("compute", 2000.0, pytest.approx(250_000.0)),
    ]
    assert first.what == second.what == "exchange"
    assert (first.begin_us, first.us) == (1000.0, 15_000.0)
    assert second.begin_us == first.begin_us + first.us > 2000.0
    assert (first.site, second.site) == ("all_reduce", "all_reduce_1")
    assert second.end_us < mm.end_us
    assert found.exposed_us == 0.0
    assert found.travel_us == pytest.approx(second.end_us - first.begin_us)
    assert found.us == pytest.approx(254_000.0)
    assert found.tracks == (HOST, "world")


def test_wait_stands_still_until_all_has_arrived(fake_group):
    fake_group(4)
    gm = trace(lambda x, w: wait(ops.all_reduce(x + 1, "sum", "0")) @ w, *inputs())
    found = timeline(gm, outcome_of(gm, KEPT, profile()), profile())
    (still,) = [event for event in found.events if event.exposed]
    (travels,) = [event for event in found.events if event.travels]
    assert (still.name, still.site, still.lane) == ("wait_tensor", "all_reduce", HOST)
    assert still.begin_us == 1000.0
    assert still.end_us == travels.end_us == travels.begin_us + travels.us + travels.latency_us
    assert travels.latency_us > 0
    assert found.exposed_of("all_reduce") == found.travel_of("all_reduce") == found.exposed_us


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("policy", [KEPT, CHUNKS])
def test_exposed_time_is_that_of_the_plan(fake_group, policy):
    fake_group(4)
    gm = trace(two_sums, *inputs())
    known = dataclasses.replace(profile(gflops=1000.0), link=Link(100.0, 0.01))
    outcome = outcome_of(gm, policy, known)
    found = timeline(gm, outcome, known)
    assert found.exposed_us > 0
    for site in outcome.plan:
        assert found.exposed_of(site.name) == pytest.approx(site.exposed_us, abs=0.001)
    assert found.exposed_us <= found.travel_us <= found.us
    roles = {event.what for event in found.events}
    if policy is CHUNKS:
        assert {"encode", "decode"} <= roles  # sums are part of the decoding stage
        hops = {(event.hop, event.chunk) for event in found.events if event.travels}
        assert hops == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_no_timeline_says_why(fake_group):
    fake_group(4)
    gm = trace(lambda x: x + 1, torch.ones(4))
    found = timeline(gm, outcome_of(gm, KEPT, profile()), profile())
    # 16 bytes are read and as many written, at 2 GB/s
    assert found == Timeline(us=pytest.approx(0.016), note="no collective in this graph")
    gm = trace(lambda x: wait(ops.all_reduce(x, "sum", "0")), torch.ones(4))
    outcome = outcome_of(gm, KEPT, profile())
    outcome.error = ValueError("x")
    outcome.restore("pass 'move' failed: x")
    found = timeline(gm, outcome, profile())
    assert found.note == "the untouched graph was compiled: pass 'move' failed: x"
    # four floats over four ranks by a ring: 6 messages of 100 us, 24 bytes at 0.1 GB/s
    assert found.us == found.exposed_us == pytest.approx(600.24)


# --- in dumps, tables and pictures ----------------------------------------------------------------


def step(x, w):
    return wait(ops.all_reduce(torch.mm(x, w), "sum", "0")).relu()


@pytest.fixture
def folder(fake_group, tmp_path: Path) -> Path:
    """The dump of a graph with a site of two chunks and an uncompressed one."""
    fake_group(4)

    def function(x, w):
        return step(step(x, w), w).sum()

    rules = [Rule(codec="int8", algorithm="two_shot", force=True, chunks=2, lowering="inline")]
    backend = commpass.backend(
        Policy(rules=rules, rows=1), profile="ethernet-1g", dump=tmp_path / "dump", inner="eager"
    )
    x, w = torch.randn(512, 512), torch.randn(512, 512)
    with torch.no_grad():
        torch.compile(function, backend=backend)(x, w)
    return tmp_path / "dump"


def call(*args: object):
    return CliRunner().invoke(app, ["timeline", *map(str, args)], env={"COLUMNS": "160"})


@pytest.mark.slow
def test_dump_holds_the_timeline(folder):
    (one,) = dump.read_run(folder)
    exposed = sum(site.exposed_us for site in one.plan)
    assert one.timeline.exposed_us == pytest.approx(exposed, abs=0.01)
    assert exposed > 0
    assert one.timeline == dump.read(dump.files(folder)[0]).timeline
    damaged = json.loads(dump.files(folder)[0].read_text())
    damaged["timeline"]["events"][0]["begin_us"] = "soon"
    dump.files(folder)[0].write_text(json.dumps(damaged))
    fails(call(folder), "0000-forward.json", "damaged dump", "begin_us")


@pytest.mark.slow
def test_table_without_a_picture(folder):
    (one,) = dump.read_run(folder)
    result = call(folder)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert re.search(r"graph 0: forward, predicted: .* ms, exposed .* of .* ms on the links", said)
    for site in one.plan:
        assert re.search(rf"{site.name} .* two_shot 2 [\d.]+ [\d.]+ [\d.]+", said)


@pytest.mark.slow
def test_picture_and_a_page(folder, tmp_path):
    (one,) = dump.read_run(folder)
    assert call(folder, "-o", tmp_path / "out.png").exit_code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert call(folder, "--graph", "0", "-o", tmp_path / "out.html").exit_code == 0
    page = (tmp_path / "out.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    assert one.plan.sites[0].name in page[: page.index("</svg>")]
    for site in one.plan:
        assert f"<td>{site.name}<" in page
        assert escape(site.reason) in page


@pytest.mark.slow
def test_trace_events_have_each_event_of_each_timeline_on_its_lane(folder, tmp_path):
    (one,) = dump.read_run(folder)
    assert call(folder, "-o", tmp_path / "out.json").exit_code == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert tuple(names.values()) == one.timeline.tracks
    assert [(e["name"], e["cat"], names[e["tid"]], e["ts"], e["dur"]) for e in spans] == [
        (e.name, e.what, e.lane, e.begin_us, e.us) for e in one.timeline.events
    ]
    assert {e["args"]["site"] for e in spans if "site" in e["args"]} >= {
        site.name for site in one.plan
    }


@pytest.mark.slow
def test_pictures_label_module_paths(folder):
    (one,) = dump.read_run(folder)
    (picture,) = TimelineView(one, one.timeline).pictures
    known = {site.module or site.name for site in one.plan}
    assert {label.text for label in labels(picture)} == known
    texts = {text.get_text(): text.get_rotation() for text in draw([picture]).axes[0].texts}
    assert texts == dict.fromkeys(known, 0.0)


def exchange(site: str, begin_us: float, us: float = 4000.0, hop: int = 0) -> Event:
    return Event(
        name=site, what="exchange", lane="tp", begin_us=begin_us, us=us, site=site, hop=hop
    )


def test_neighbours_of_one_module_share_a_label():
    events = exchange("a", 0.0), exchange("b", 5000.0), exchange("b", 9500.0, hop=1)
    modules = {"a": "layers.0.mlp", "b": "layers.1.mlp"}
    found = labels(Picture("", Timeline(events=events, us=14000.0), 14000.0, modules))
    assert [(each.exchange_ms, each.text) for each in found] == [
        (2.0, "layers.0.mlp"),
        (9.25, "layers.1.mlp"),
    ]


def test_site_without_a_module_has_its_own_name():
    (found,) = labels(Picture("", Timeline(events=(exchange("a", 0.0),), us=4000.0), 4000.0))
    assert (found.text, found.row) == ("a", 0)


def test_labels_stay_inside_the_picture():
    name = "a.module.with.a.long.path"
    events = exchange(name, 0.0, 10.0), exchange(name + "s", 90_000.0, 10_000.0)
    first, last = labels(Picture("", Timeline(events=events, us=100_000.0), 100_000.0))
    assert first.exchange_ms < first.at_ms < 20
    assert 80 < last.at_ms < last.exchange_ms


def test_labels_that_would_overlap_are_in_other_rows_or_left_out():
    events = tuple(
        exchange(f"layers.{number}.mlp.down", 100.0 * number, 90.0) for number in range(9)
    )
    found = labels(Picture("", Timeline(events=events, us=100_000.0), 100_000.0))
    assert [(each.text, each.row) for each in found] == [
        (f"layers.{row}.mlp.down", row) for row in range(ROWS)
    ]


@pytest.mark.slow
def test_exposed_time_of_before_has_a_unit(folder):
    (one,) = dump.read_run(folder)
    sites = tuple(dataclasses.replace(site, unmoved_us=1e6) for site in one.plan.sites)
    moved = dataclasses.replace(one, plan=dataclasses.replace(one.plan, sites=sites))
    assert TimelineView(moved, moved.timeline).pictures[0].title.endswith(" ms exposed")


@pytest.mark.slow
def test_compared_timelines_have_one_axis(folder):
    (one,) = dump.read_run(folder)
    longer = dataclasses.replace(one.timeline.events[-1], us=1e6)
    slower = dataclasses.replace(one.timeline, events=(*one.timeline.events, longer))
    predicted, other = TimelineView(one, one.timeline, slower).pictures
    assert predicted.end_us == other.end_us == longer.end_us
    plots = draw([predicted, other]).axes
    assert plots[0].get_xlim() == plots[1].get_xlim() == (0, longer.end_us / 1000)


@pytest.mark.slow
def test_impossible_requests_are_reported(folder, tmp_path):
    fails(call(folder, "-o", tmp_path / "out.gif"), "out.gif", ".png, an .html or a .json")
    fails(call(folder, "-o", tmp_path / "none" / "out.png"), "cannot be written")
    fails(call(folder, "--graph", "7"), "no graph 7 here", "0 (forward)")
    (one,) = dump.read_run(folder)
    old = dump.write(tmp_path / "old", dataclasses.replace(one, timeline=None))
    fails(call(old), "has no timeline", "Write the dump again")
    none = dataclasses.replace(one, timeline=Timeline(note="no collective in this graph"))
    fails(call(dump.write(tmp_path / "none", none)), "nothing to show", "no collective")
    empty = dataclasses.replace(one, timeline=Timeline())
    fails(call(dump.write(tmp_path / "empty", empty)), "nothing to show", "has no events")
    both = dump.write(folder, dataclasses.replace(none, run=one.run)).parent
    result = call(both)
    assert result.exit_code == 0
    assert "graph 1 (forward) is not shown: no collective in this graph" in result.stderr


# --- measured -------------------------------------------------------------------------------------

CALLED = "## Call CompiledFxGraph fabc ##"


def event(name: str, begin: float, us: float, cat: str = "cpu_op", tid=1, **args) -> dict:
    row = {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": begin, "dur": us}
    return row | {"args": args}


@pytest.fixture
def plain(fake_group, tmp_path: Path) -> list[dump.Dump]:
    """The dump of a graph with two uncompressed all_reduces."""
    fake_group(4)
    backend = commpass.backend("off", dump=tmp_path / "plain", inner="eager")
    with torch.no_grad():
        torch.compile(lambda x, w: step(step(x, w), w), backend=backend)(*inputs())
    return dump.read_run(tmp_path / "plain")


def written(path: Path, *events: dict) -> Path:
    held = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    path.write_text(json.dumps(held))
    return path


ON_CPU = (
    event(CALLED, 1000, 100),
    event("aten::mm", 1000, 20),
    event("_c10d_functional::all_reduce_", 1020, 5),
    event("gloo:all_reduce", 1023, 30, "user_annotation", 2),
    event("_c10d_functional::wait_tensor", 1030, 25),
    event("_c10d_functional::all_reduce_", 1060, 5),
    event("c10d::allreduce_", 1061, 3),
    event("gloo:all_reduce", 1066, 10, "user_annotation", 2),
    event("_c10d_functional::wait_tensor", 1090, 1),
)


@pytest.mark.parametrize("packed", [False, True])
def test_trace_on_a_cpu(plain, tmp_path, packed):
    path = written(tmp_path / "trace.json", *ON_CPU)
    if packed:
        path = tmp_path / "trace.json.gz"
        path.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    found = measured(path, plain)[0]
    assert found.us == 100
    assert found.exposed_us == 26
    assert [found.exposed_of(site.name) for site in plain[0].plan] == [25, 1]
    travels = [(e.site, e.lane, e.begin_us, e.us) for e in found.events if e.travels]
    names = [site.name for site in plain[0].plan]
    assert travels == [(names[0], "world", 23, 30), (names[1], "world", 66, 10)]
    assert found.travel_us == 43  # from 23 to 55, from 66 to 76, and the last wait
    computing = [(e.begin_us, e.end_us) for e in found.events if e.what == "compute"]
    assert computing == [(0, 20), (25, 30), (55, 60), (65, 90), (91, 100)]


def test_last_call_counts(plain, tmp_path):
    later = [row | {"ts": row["ts"] + 5000, "dur": row["dur"] * 2} for row in ON_CPU[:1]]
    later += [row | {"ts": row["ts"] + 5000} for row in ON_CPU[1:]]
    assert measured(written(tmp_path / "trace.json", *ON_CPU, *later), plain)[0].us == 200


def test_waits_in_another_order_are_not_distinguished(plain, tmp_path):
    last = ON_CPU[-1]
    rows = [*ON_CPU[:4], *ON_CPU[5:], last | {"ts": 1092}]
    found = measured(written(tmp_path / "trace.json", *rows), plain)[0]
    assert "another order" in found.note
    assert found.exposed_us == 2
    assert {e.site for e in found.events if e.exposed} == {""}


def test_trace_on_a_gpu_stands_still_where_only_exchanges_run(plain, tmp_path):
    host = [
        event(CALLED, 0, 50),
        event("_c10d_functional::all_reduce_", 5, 2),
        event("_c10d_functional::wait_tensor", 8, 1),
        event("_c10d_functional::all_reduce_", 15, 2),
        event("_c10d_functional::wait_tensor", 18, 1),
    ]
    launches = [(1, "gemm", 2, 100, 40, 7), (2, "ncclDevKernel_AllReduce", 6, 130, 50, 20)]
    launches += [(3, "triton_poi_fused_0", 12, 170, 30, 7), (4, "ncclKernel", 16, 205, 5, 20)]
    for number, name, at, begin, us, stream in launches:
        host.append(event("cudaLaunchKernel", at, 1, "cuda_runtime", correlation=number))
        host.append(event(name, begin, us, "kernel", stream, correlation=number))
    host.append(event("other", 300, 5, "kernel", 7, correlation=99))  # launched by something else
    found = measured(written(tmp_path / "trace.json", *host), plain)[0]
    assert [found.exposed_of(site.name) for site in plain[0].plan] == [30, 5]
    assert found.travel_us == 55
    assert found.us == 110
    computing = [(e.begin_us, e.end_us) for e in found.events if e.what == "compute"]
    assert computing == [(0, 40), (70, 100)]


def test_traces_of_other_programs_are_refused(plain, tmp_path):
    path = tmp_path / "trace.json"
    cases = {
        "not JSON": "{",
        'no "traceEvents"': "{}",
        "nothing in this trace takes time": '{"traceEvents": [{"ph": "M"}]}',
        "no call of a graph": json.dumps([event("aten::mm", 0, 1)]),
        "It has 2 all_reduce; the graphs that are called here have 1 all_reduce": json.dumps(
            [*ON_CPU[:3]]
        ),
    }
    for said, text in cases.items():
        path.write_text(text)
        with pytest.raises(TraceError, match=re.escape(said)):
            measured(path, plain)
    with pytest.raises(TraceError, match="cannot be read"):
        measured(tmp_path / "none.json", plain)
    path.write_bytes(b"\x1f\x8bxx")
    with pytest.raises(TraceError, match="not JSON"):
        measured(path, plain)


def profiled(folder: str) -> None:
    """Profile a compiled step of two sites on each rank."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return wait(ops.all_reduce(x, "sum", "0"))

        @staticmethod
        def backward(ctx, gradient):
            return wait(ops.all_reduce(gradient, "sum", "0"))

    torch._dynamo.reset()
    rules = [Rule(codec="int8", algorithm="two_shot", force=True, chunks=2, lowering="kernel")]
    backend = commpass.backend(Policy(rules=rules), profile="ethernet-1g", dump=folder, strict=True)
    x, w = (torch.randn(512, 512, requires_grad=True) for _ in range(2))
    loss = torch.compile(lambda x, w: Sum.apply(x @ w).relu().sum(), backend=backend)
    loss(x, w).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss(x, w).backward()
    found.export_chrome_trace(f"{folder}/trace{dist.get_rank()}.json")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_trace_of_real_ranks_is_read(ranks2, tmp_path):
    ranks2.run(profiled, str(tmp_path))
    dumps = dump.read_run(tmp_path)
    assert [one.plan.direction for one in dumps] == ["forward", "backward"]
    for rank in range(2):
        path = tmp_path / f"trace{rank}.json"
        found = measured(path, dumps)
        assert [*found] == [0, 1]
        for one in dumps:
            times = found[one.number]
            assert not times.note
            assert 0 < times.exposed_us < times.us
            assert times.exposed_us <= times.travel_us
            (site,) = one.plan
            assert times.exposed_of(site.name) == pytest.approx(times.exposed_us)
            assert {e.what for e in times.events} == {
                *("compute", "encode", "decode+sum+encode", "decode", "exchange", "wait")
            }
            travels = [(e.hop, e.chunk) for e in times.events if e.travels]
            assert sorted(travels) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        step_us = sum(times.us for times in found.values())
        assert 0 < sum(times.exposed_us for times in found.values()) < step_us
    result = call(tmp_path, "--measured", tmp_path / "trace0.json")
    assert result.exit_code == 0, result.stderr
    assert "measured: " in result.stdout
    drawn = call(tmp_path, "--measured", tmp_path / "trace0.json", "-o", tmp_path / "out.html")
    assert drawn.exit_code == 0, drawn.stderr
    assert "measured exposed ms" in (tmp_path / "out.html").read_text()


def test_work_for_a_site_does_not_grow_with_their_number():
    def work(layers: int):
        one = made.dump(made.layers(layers))
        assert one.timeline is not None
        return lambda: timelines.rows(TimelineView(one, one.timeline))

    assert growth(work, 100) < 1.2
    rows = work(500)()
    assert (len(rows), rows[0][5:7]) == (1000, ("2.5", "1.25"))
