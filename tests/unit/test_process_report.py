"""The report on a run as data, as text, and for loggers."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import rarely

import commpass
from commpass.codecs import codec
from commpass.distributed import samples
from commpass.distributed.samples import Sampled, Samples, is_sampled, measure
from commpass.distributed.step_log import Entry, StepLog
from commpass.distributed.step_timer import TimedGraph
from commpass.errors import CommpassError
from commpass.plan import Plan, PlannedSite, Simplification
from commpass.plan.stage import Stage
from commpass.report import process_report

ALONE = {
    "name": "all_reduce",
    "kind": "all_reduce",
    "reduce_op": "sum",
    "group": "7",
    "group_size": 4,
    "dtype": "float32",
    "shape": (256,),
    "bytes": 1024,
    "wire_bytes": 1024,
    "module": "head",
}
CODED = ALONE | {
    "codec": "int8",
    "algorithm": "two_shot",
    "wire_bytes": 400,
    "error": 2 * codec("int8").relative_error(),
    "stages": (
        Stage(role="exchange", kind="all_to_all", nbytes=320, leaving=320),
        Stage(role="exchange", kind="all_gather", nbytes=80, leaving=80),
    ),
}

REST = (1.0, 0.0, 0.0, 1.0, 1.0)
"""The remainder for one value without error."""


def entry(*sites: PlannedSite, bound=None, fallback="", took=(), why="") -> Entry:
    plan = Plan(
        graph="0", direction="forward", policy="p", profile="p", sites=sites, fallback=fallback
    )
    timed = TimedGraph("0 (forward)", 2e3, 3e3, False, times_us=list(took)) if took else None
    kept = Samples(0.5, [Sampled(site, bound, why) for site in sites], calls=3)
    return Entry(plan, kept, timed)


@pytest.fixture
def book(monkeypatch):
    """Return the only step_log; there are no plans of other tests."""
    made = StepLog("balanced")
    monkeypatch.setattr(process_report, "step_logs", lambda: [made])
    monkeypatch.setattr(process_report, "plans", lambda: [])
    return made


def layers(count: int) -> list[PlannedSite]:
    return [PlannedSite(**(CODED | {"module": f"layers.{i}.mlp"})) for i in range(count)]


# --- the report -----------------------------------------------------------------------------------


def test_report_before_anything_was_compiled_says_so(book):
    assert "compiled nothing" in str(commpass.report())
    assert commpass.report().as_dict()["totals"]["measured_ms"] is None
    assert commpass.metrics()["commpass/graphs"] == 0


def test_exchanges_that_it_does_not_follow_are_named(book, monkeypatch):
    followed = entry(*layers(1))
    made = [entry(*layers(1)).plan, followed.plan]  # one like that of a rewrite, and one of ours
    monkeypatch.setattr(process_report, "plans", lambda: made)
    book.entries.append(followed)
    assert str(commpass.report()).splitlines()[-1].startswith("not in this report: 1 plan of")
    book.entries.clear()
    said = str(commpass.report())
    assert said.startswith("not in this report: 2 plans of ")
    assert "commpass.rewrite, calls by hand" in said
    assert max(map(len, said.splitlines())) < 140
    assert "compiled nothing" not in said


def test_way_to_measure_errors_keeps_the_policy(book):
    """``Policy(error_sample_rate=0.01)`` alone would be another policy: it compresses nothing."""
    one = entry(*layers(1))
    one.samples.share = 0.0
    book.entries.append(one)
    assert 'Policy.from_preset("balanced", error_sample_rate=0.01)' in str(commpass.report())
    book.policy = "custom"
    assert "error_sample_rate=0.01 in the policy measures them" in str(commpass.report())


def test_it_says_how_to_see_whether_it_is_faster(book):
    book.entries.append(entry(PlannedSite(**ALONE), took=[1e3]))
    assert "commpass compare" not in str(commpass.report())
    book.entries.append(entry(*layers(1), took=[1e3]))
    assert "commpass compare" in str(commpass.report()).splitlines()[2]


def test_sites_of_repeated_layers_are_one_line_with_their_errors(book):
    one = entry(*layers(32), PlannedSite(**ALONE), bound=0.05, took=[2500.0, 2400.0, 2600.0])
    one.samples.sites[0].add([1e-4, 1.0, *REST])
    one.samples.sites[1].add([4e-4, 1.0, *REST])
    book.entries.append(one)
    text = str(commpass.report())
    (line,) = [row for row in text.splitlines() if row.startswith("layers.*.mlp x 32")]
    assert "int8/two_shot" in line
    assert "32,768 -> 12,800" in line
    assert f"{2 * 0.015:.3%}" in line  # the mean of 1 % and 2 %, for two encodes
    assert f"{2 * 0.02:.3%}" in line
    assert "5.000%" in line
    assert "uncompressed" in text
    assert "measured 2.5 ms; predicted 2 ms, and 3 ms without commpass (33% less)" in text
    assert max(map(len, text.splitlines())) < 140
    assert repr(commpass.report()) == text


ODD = "a\nb\x1b[31m\x1b]0;title\x07\u202e[red]|*\x00"


def test_names_neither_break_lines_nor_steer_a_terminal(book):
    site = PlannedSite(**(CODED | {"module": ODD, "reason": ODD}))
    alone = PlannedSite(**(ALONE | {"module": ODD, "reason": ODD}))
    book.entries.append(entry(site, alone, why=ODD))
    book.entries.append(entry(alone, fallback=ODD))
    book.policy = ODD
    said = str(commpass.report())
    assert all(line.isprintable() for line in said.splitlines())
    assert said.count("[red]|*") >= 5
    assert {each.module for each in commpass.report().sites} == {ODD}  # data is unchanged


def test_names_in_errors_and_logs_do_not_steer_a_terminal(caplog):
    with pytest.raises(CommpassError) as error:
        raise CommpassError(f"{ODD}:\nthe second line")
    assert "[red]|*" in str(error.value)
    assert str(error.value).splitlines()[-1] == "the second line"
    logging.getLogger("commpass").warning("%s", ODD)
    for text in (str(error.value), caplog.records[-1].getMessage()):
        assert all(line.isprintable() for line in text.split("\n"))


def test_it_says_why_sites_are_as_they_are_and_what_was_not_measured(book):
    alone = [PlannedSite(**(ALONE | {"reason": why})) for why in ("too small", "slow", "slow")]
    coded = entry(*layers(2), why="its codec loses nothing")
    book.entries += [entry(*alone), coded]
    lines = str(commpass.report()).splitlines()
    assert lines[-3:] == [
        "uncompressed: 2 sites, such as head: slow",
        "uncompressed: 1 site, such as head: too small",
        "not measured: 2 sites, such as layers.0.mlp: its codec loses nothing",
    ]
    assert [site.reason for site in commpass.report().sites[:3]] == ["too small", "slow", "slow"]
    coded.samples.sites[1].why = ""
    coded.samples.sites[1].add([0.0, 0.0, *REST])
    assert "no relative error: 1 site, such as layers.1.mlp: " in str(commpass.report())
    assert commpass.report().sites[4].unclear == 1
    coded.samples.share = book.entries[0].samples.share = 0.0
    assert (
        'from_preset("balanced", error_sample_rate=0.01)' in str(commpass.report()).splitlines()[-1]
    )


def test_it_shows_what_was_simplified_unless_the_graph_is_untouched(book):
    made = entry(PlannedSite(**ALONE))
    steps = [
        Simplification(rule=rule, site="a", into="b", saved_bytes=size)
        for rule, size in (("same", 1000), ("waits", 0), ("same", 24))
    ]
    for fallback in ("", "a pass failed"):
        plan = dataclasses.replace(made.plan, simplified=tuple(steps), fallback=fallback)
        book.entries[:] = [dataclasses.replace(made, plan=plan)]
        line = "simplified: same (2), waits (1); 1,024 bytes less, not counted above"
        assert (line in str(commpass.report()).splitlines()) == (not fallback)


def test_why_no_time_is_known(book, monkeypatch):
    book.entries.append(entry())
    assert "time: not measured: no graph has a collective" in str(commpass.report())
    book.entries.append(entry(*layers(1)))
    assert "time: not measured yet: calls of graphs that Inductor compiles" in str(
        commpass.report()
    )
    monkeypatch.setattr(process_report, "is_first_rank", lambda: False)
    assert "time: not measured: that is done on rank 0 alone" in str(commpass.report())


def test_bytes_that_leave_a_rank_are_those_of_its_exchanges(book):
    book.entries.append(entry(PlannedSite(**CODED), PlannedSite(**ALONE)))
    first, second = commpass.report().sites
    assert (first.bytes, first.wire_bytes) == (1024, 400)
    assert first.sent_plain == second.sent_plain == second.sent == 1536  # a ring: 2 * 3 / 4
    assert first.sent == 320 * 3 // 4 + 80 * 3
    totals = commpass.report().totals
    assert (totals.bytes_plain, totals.bytes) == (2048, 1424)
    assert (totals.sent_plain, totals.sent) == (3072, 480 + 1536)


def test_site_of_unknown_size_is_not_counted_and_one_that_only_receives_sends_nothing(book):
    unknown = PlannedSite(**(ALONE | {"bytes": -1, "wire_bytes": -1}))
    book.entries.append(entry(unknown, PlannedSite(**(ALONE | {"kind": "recv"}))))
    first, second = commpass.report().sites
    assert (first.sent_plain, first.sent) == (-1, -1)
    assert (second.sent_plain, second.sent) == (0, 0)
    assert commpass.report().totals.bytes_plain == 1024


def test_untouched_graph_sends_what_it_did_and_says_why(book):
    book.entries.append(entry(PlannedSite(**CODED), fallback="pass 'fuse' failed", why="failed"))
    (site,) = commpass.report().sites
    assert (site.wire_bytes, site.sent) == (site.bytes, site.sent_plain)
    assert "pass 'fuse' failed" in str(commpass.report())
    assert commpass.report().totals.fallbacks == 1


def test_report_is_plain_data_and_stays_as_it_was(book):
    book.entries.append(entry(PlannedSite(**CODED), took=[5.0]))
    before = commpass.report()
    assert json.loads(json.dumps(before.as_dict())) == before.as_dict()
    book.entries[0].samples.sites[0].add([1e-4, 1.0, *REST])
    assert before.sites[0].samples == 0
    assert commpass.report().sites[0].samples == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.graphs = ()


def test_backend_that_is_gone_is_not_in_the_report():
    graphs = len(commpass.report().graphs)
    made = commpass.backend("off")
    made.step_log.entries.append(entry(PlannedSite(**ALONE)))
    assert len(commpass.report().graphs) == graphs + 1
    del made
    assert len(commpass.report().graphs) == graphs


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "lines",
    [
        "import commpass; commpass.report(); import commpass.report.tables as t",
        "import commpass.report as r, commpass; r(); from commpass.report import tables as t",
        rarely("import commpass.report.tables as t, commpass; commpass.report()"),
        rarely("from commpass import report; report(); import commpass.report.tables as t"),
    ],
)
def test_room_and_the_function_have_one_name(lines):
    code = f"{lines}; assert t is commpass.report.tables; print(commpass.report())"
    if lines.startswith("from"):
        code = code.replace("; import", "; import commpass, ", 1).replace(",  ", ", ")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled nothing" in done.stdout


# --- metrics --------------------------------------------------------------------------------------


class Writer:
    """The part of TensorBoard's writer that is used."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, name, number, step):
        self.rows.append((name, number, step))


class Run:
    """A run of Weights & Biases."""

    def __init__(self):
        self.rows = []

    def log(self, numbers, step=None):
        self.rows += [(name, number, step) for name, number in numbers.items()]


class Lightning:
    """Besides ``log_metrics``, these have methods with other meanings."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, numbers, step=None):
        self.rows += [(name, number, step) for name, number in numbers.items()]

    def log(self, *_):
        raise AssertionError


@pytest.mark.parametrize("kind", [Writer, Run, Lightning])
def test_loggers_get_flat_names_and_numbers(book, kind):
    book.entries.append(entry(*layers(2)))
    book.entries[0].samples.sites[0].add([1e-4, 1.0, *REST])
    to = kind()
    commpass.log_metrics(to, 7)
    assert {name: number for name, number, _ in to.rows} == commpass.metrics()
    assert {step for _, _, step in to.rows} == {7}
    found = commpass.metrics()
    assert all(type(number) is float for number in found.values())
    assert found["commpass/error/layers.*.mlp/all_reduce/forward"] == pytest.approx(0.02)
    assert "commpass/measured_ms" not in found  # nothing is invented


def test_one_name_is_that_of_all_sites_whatever_their_size(book):
    """An example is a graph that was recompiled for another size."""
    for nbytes, lost in ((1024, 1e-4), (2048, 9e-4)):
        book.entries.append(entry(PlannedSite(**(CODED | {"bytes": nbytes, "shape": (nbytes,)}))))
        book.entries[-1].samples.sites[0].add([lost, 1.0, *REST])
    assert commpass.metrics()["commpass/error/head/all_reduce/forward"] == pytest.approx(0.04)


def test_one_is_no_more_than_one(book):
    book.entries.append(entry(*layers(1), bound=0.01, took=[2500.0]))
    book.entries[0].samples.sites[0].add([1e-4, 1.0, *REST])
    text = str(commpass.report())
    assert "1 graph, 1 site, 1 compressed" in text
    assert "error: 1 site above max_error" in text


def test_tensorboard_itself_takes_them(book, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not here")
    book.entries.append(entry(*layers(2)))
    with tensorboard.SummaryWriter(tmp_path) as writer:
        commpass.log_metrics(writer, 1)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [None, {}, print, logging.getLogger("x")])
def test_objects_other_than_loggers_are_refused(book, wrong):
    with pytest.raises(CommpassError, match="SummaryWriter"):
        commpass.log_metrics(wrong, 1)


# --- what is sampled ------------------------------------------------------------------------------


@given(st.floats(0, 1), st.integers(0, 2000))
def test_calls_sampled_are_as_many_as_asked(share, calls):
    sampled = sum(is_sampled(call, share) for call in range(calls))
    assert abs(sampled - share * calls) <= 1
    assert is_sampled(0, share) == (share > 0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_and_all(share):
    assert {is_sampled(call, share) for call in range(50)} == {bool(share)}


@pytest.mark.parametrize("spec", ["int8", "int4", "fp8", "rotated(bits=6)", "cast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_errors_are_those_of_the_codec(monkeypatch, spec, dtype):
    monkeypatch.setattr(samples, "SLICE_CPU", 4096)
    coder = codec(spec)
    x = torch.randn(3, 3001, generator=torch.Generator().manual_seed(1)).to(dtype)
    lost, had, *_ = measure(coder, x).tolist()
    whole = coder.decode_rows(coder.encode_rows(x.reshape(1, -1)), x.numel(), x.dtype).double()
    assert lost == pytest.approx(float((whole - x.reshape(1, -1).double()).square().sum()))
    assert had == pytest.approx(float(x.double().square().sum()))


def test_error_is_reported_for_the_result_of_all_encodes():
    site = Sampled(PlannedSite(**CODED), None, "")
    site.add([9e-4, 1.0, *REST])
    assert site.mean == pytest.approx(2 * 0.03)  # the plan's error is that of two encodes


def test_zeros_and_what_is_not_finite_have_no_relative_error_and_are_only_counted():
    site = Sampled(PlannedSite(**CODED), 1e-9, "")
    site.add([0.0, 0.0, *REST])
    site.add([float("nan"), float("inf"), *REST])
    assert (site.mean, site.count, site.unclear, site.warned) == (None, 0, 2, False)


def test_warning_names_the_site_once_and_not_below_the_bound(caplog):
    site = Sampled(PlannedSite(**CODED), 0.05, "")
    for lost in (1e-4, 1e-2, 1e-2):
        site.add([lost, 1.0, *REST])
        site.warn()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("head int8/two_shot", "all_reduce", "0.2", "max_error=0.05", "keep=True"):
        assert part in record.getMessage()


class Late:
    """An event of a GPU."""

    def __init__(self):
        self.done = False

    def query(self):
        return self.done


def test_report_does_not_wait_for_what_a_gpu_has_not_measured_yet():
    kept, event = entry(PlannedSite(**CODED)).samples, Late()
    kept._waiting.append((0, torch.tensor([1e-4, 1.0, *REST]), event))
    kept.read_measured()
    assert kept.sites[0].count == 0
    event.done = True
    kept.read_measured()
    assert kept.sites[0].count == 1
    assert not kept._waiting


class Stamp:
    """An event of a GPU that is one call behind, with a time."""

    made: ClassVar[list[Stamp]] = []

    def __init__(self, enable_timing=False):
        self.made.append(self)
        self.number = len(self.made)

    def record(self): ...

    def query(self):
        return self.number < len(self.made) - 1

    def elapsed_time(self, end):
        return end.number - self.number


def test_gpu_is_timed_by_events_that_are_read_when_they_have_come(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: type("m", (), {"Event": Stamp}))
    graph = TimedGraph("0 (forward)", 1.0, 1.0, False, "cuda")
    assert graph.time(lambda x: x + 1, 1) == 2
    graph.read_events()
    assert not graph.times_us
    graph.time(lambda x: x, 1)
    graph.read_events()
    assert graph.times_us == [1e3]
