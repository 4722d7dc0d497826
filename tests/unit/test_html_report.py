"""The page of ``commpass report``: its content, that it is one file and loads nothing, and errors
for bad input."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_dumps as made
from dumps import fails
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import growth
from tiers import examples
from typer.testing import CliRunner

from commpass.cli import app
from commpass.errors import CommpassError
from commpass.plan import dump as dumps
from commpass.plan.timeline import Timeline
from commpass.report import html
from commpass.report.colours import colour_of
from commpass.report.graph import dot
from commpass.report.html.page import page

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """The elements of a page. Raise AssertionError if they do not nest."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.terms: list[list[str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def data(self):
        return json.loads(self.scripts[0])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def row(self, head: str) -> list[str]:
        (found,) = [row[1:] for row in self.rows if row[0] == head]
        return found

    def term(self, name: str) -> list[str]:
        (found,) = [term[1:] for term in self.terms if term[0] == name]
        return found

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "dt":
            self.terms.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag in ("dt", "dd"):
            self.terms[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        where = self._open[-1] if self._open else ""
        if where == "script":
            self.scripts[-1] += text
            return
        if where != "style":
            self.words.append(text)
        text = text.replace("\u00a0", " ")
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += text
        elif "dt" in self._open or "dd" in self._open:
            self.terms[-1][-1] += text


def shown(*runs, measured=()) -> Page:
    """Return the page of some runs, each a list of dumps."""
    times = [*measured, *({} for _ in runs[len(measured) :])]
    read = [
        html.Run(tuple(run), f"folder-{at}", time)
        for at, (run, time) in enumerate(zip(runs, times, strict=True))
    ]
    return Page(page(read))


def report(*args: object):
    return CliRunner().invoke(app, ["report", *map(str, args)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dumps.write(tmp_path / "dump", made.eventful())
    return tmp_path / "dump"


# --- content --------------------------------------------------------------------------------------


def test_totals_are_the_sums_of_the_plan():
    """Twelve sites of 1 MiB: ten as int8, two uncompressed."""
    one = made.eventful(6)
    found = shown([one])
    handed = [266_240] * 10 + [1 << 20] * 2
    assert sorted(site.wire_bytes for site in one.plan) == sorted(handed)
    assert found.term("Bytes on the wire") == [
        f"12.0 MiB → {sum(handed) / 2**20:.1f} MiB",
        f"{100 * sum(handed) / (12 << 20):.0f}% of what it was",
    ]
    # of n bytes an all_reduce over 4 ranks sends 2 (4 - 1) / 4 n; these plans have no stages
    assert found.term("Sent to other ranks") == [
        "3.0 MiB",
        "what leaves this rank, by any algorithm; 10 sites not counted",
    ]
    assert found.term("Sites compressed")[0] == "9 of 11"  # two are chunks of one
    assert found.term("Collectives, predicted")[0] == "102.0 ms → 42.0 ms"
    assert found.term("Simplified")[0] == "7.0 KiB less"
    # half of what each site takes is waited for
    assert found.term("Overlapped, predicted")[0] == "50%"
    assert found.term("Exposed, predicted")[0] == "21.0 ms"
    assert found.row("0: forward") == [
        "11", "9", "12.0 MiB → 4.5 MiB", "54.0 ms", "21.0 ms", "50%", "4 ms",
    ]  # fmt: skip
    groups = found.data["runs"]["A"]["groups"]
    rows = [row for group in groups for row in group["sites"]]
    assert sum(row["bytes"] for row in rows) == 12 << 20
    assert sum(row["wire_bytes"] for row in rows) == sum(handed)
    assert sum(row["predicted_us"] for row in rows) == 10 * 2500.25 + 2 * 8500.5
    assert sum(row["exposed_us"] for row in rows) == pytest.approx(one.timeline.exposed_us)


def test_sites_of_repeated_layers_are_one_group():
    groups = shown([made.eventful(6)]).data["runs"]["A"]["groups"]
    assert [(group["module"], group["choice"], len(group["sites"])) for group in groups] == [
        ("layers.*.attn.o", "int8 by two_shot, 2 chunks, kernel", 6),
        ("layers.*.mlp.down", "int8 by two_shot, 2 chunks, kernel", 4),
        ("layers.*.mlp.down", "uncompressed", 2),
    ]
    assert [row["module"] for row in groups[2]["sites"]] == [
        "layers.2.mlp.down",
        "layers.5.mlp.down",
    ]
    assert [row["number"] for row in groups[2]["sites"]] == [6, 12]


def test_each_site_has_its_reason_its_candidates_and_what_it_was_made_of():
    run = shown([made.eventful(6)]).data["runs"]["A"]
    first, _, alone = (group["sites"][0] for group in run["groups"])
    assert run["texts"][first["reason"]] == made.REASON
    assert first["before"] == ["all_reduce_p", "all_reduce_q"]
    assert run["groups"][1]["sites"][0]["before"] == ["all_reduce_w"]
    best, left, refused = run["choices"][first["choice"]]
    assert (best["what"], best["why"]) == ("int8 by two_shot, 2 chunks, kernel", "chosen")
    assert (left["what"], left["why"]) == ("uncompressed", "6,000 us slower")
    assert (refused["what"], refused["why"], refused["us"]) == (
        "int4 by ring",
        "an error of 12% is above max_error",
        None,
    )
    whys = [option["why"] for option in run["choices"][alone["choice"]]]
    assert whys[:2] == ["a gain of 70.6%, not above the model's margin", "chosen"]
    assert len(run["choices"]) == 2  # once for all equal sites


def test_simplified_sites_are_listed_by_rule():
    rules = shown([made.eventful()]).data["runs"]["A"]["rules"]
    assert [(rule["rule"], rule["count"], rule["saved_bytes"]) for rule in rules] == [
        ("sum once", 2, 5120),
        ("own part", 1, 2048),
    ]
    assert rules[0]["steps"][1] == [0, "all_reduce_y", "nothing", 1024]


def test_timelines_and_what_was_measured():
    one = made.eventful(2)
    timeline = one.timeline
    slower = dataclasses.replace(
        timeline,
        us=2 * timeline.us,
        events=tuple(
            dataclasses.replace(each, us=each.us * (2 if each.exposed else 1))
            for each in timeline.events
        ),
    )
    found = shown([one], measured=[{0: slower}])
    run = found.data["runs"]["A"]
    assert [strip["measured"] for strip in run["strips"]] == [False, True]
    assert run["strips"][0]["end_us"] == run["strips"][1]["end_us"]
    assert run["strips"][0]["lanes"] == ["compute", "link: tp"]
    kinds = Counter(found.data["kinds"][bar[1]] for bar in run["strips"][0]["bars"])
    assert kinds == {"compute": 4, "exchange on a link": 4, "exposed: the rank waits": 4}
    assert run["strips"][0]["modules"][1] == "layers.0.attn.o"
    assert run["strips"][0]["labels"][1] == "all_reduce_0 in layers.0.attn.o, hop 0, chunk 0"
    assert found.term("Exposed, measured")[0] == f"{2 * timeline.exposed_us / 1000:.1f} ms"
    assert found.row("0: forward")[6:8] == ["28.0 ms", "10.0 ms"]
    rows = [row for group in run["groups"] for row in group["sites"]]
    assert sum(row["measured_us"] for row in rows) == pytest.approx(slower.exposed_us)
    mixed = dataclasses.replace(slower, note="it waits in another order than the graph")
    groups = shown([one], measured=[{0: mixed}]).data["runs"]["A"]["groups"]
    assert {row["measured_us"] for group in groups for row in group["sites"]} == {None}


def test_graph_that_fell_back_is_reported_and_counts_as_untouched():
    one = made.dump(made.layers(2), fallback="pass 'move' failed: x")
    found = shown([one])
    assert "Graph 0 fell back" in found.text
    assert "pass 'move' failed: x" in found.text
    assert found.term("Bytes on the wire")[0] == "4.0 MiB"
    assert found.term("Sites compressed")[0] == "0 of 4"
    groups = found.data["runs"]["A"]["groups"]
    assert {group["choice"] for group in groups} == {"untouched"}
    assert {row["wire_bytes"] for group in groups for row in group["sites"]} == {1 << 20}


def test_unknown_bytes_are_not_counted():
    unknown = dataclasses.replace(made.site("s", "a"), bytes=-1, wire_bytes=-1)
    one = made.dump([unknown, made.site("t", "b")], timed=False)
    found = shown([dataclasses.replace(one, considered=(), policy={}, profile={})])
    assert found.term("Bytes on the wire") == [
        "1.0 MiB → 260.0 KiB",
        "25% of what it was; 1 site of unknown size not counted",
    ]
    assert "Overlapped, predicted" not in [term[0] for term in found.terms]
    assert "has no timeline: its dump was written by an older commpass (0.1.0)" in found.text
    assert found.text.count("This dump does not hold it.") == 2
    rows = [row for group in found.data["runs"]["A"]["groups"] for row in group["sites"]]
    assert {row["choice"] for row in rows} == {-1}


def test_graph_without_collectives():
    empty = dataclasses.replace(
        made.dump([]), timeline=Timeline(note="no collective in this graph")
    )
    found = shown([empty])
    assert "No collective is left in this graph" in found.text
    assert "has no timeline: no collective in this graph" in found.text
    assert found.term("Bytes on the wire")[0] == "0 B"


def test_predicted_times_are_called_so():
    found = shown([made.eventful()], [made.eventful(run="b")])
    heads = {cell for row in found.rows for cell in row} | {term[0] for term in found.terms}
    times = {
        head for head in heads if re.match(r"(graphs? takes?|exposed|overlapped|time|Coll)", head)
    }
    assert len(times) >= 6
    assert all(head.endswith(("predicted", "measured")) for head in times)


# --- verdict --------------------------------------------------------------------------------------


def verdict_of(found: Page) -> str:
    text = found.text
    return text[text.index("commpass report ") : text.index("What was done to")]


def test_page_begins_with_the_verdict_on_its_run():
    text = verdict_of(shown([made.dump(made.layers(4))]))
    assert "7 of 8 collectives compressed under balanced: 65 % fewer bytes: 8.0 MiB -> 2.8" in text
    assert "the collectives are predicted" in text
    assert "times as fast" in text
    assert "slower" not in text


def test_verdict_names_what_got_slower():
    sites = [
        dataclasses.replace(site, predicted_us=2 * site.plain_us) if "mlp" in site.module else site
        for site in made.layers(4)
    ]
    one = shown([made.dump(sites)])
    assert "Predicted to be slower than uncompressed: layers.*.mlp.down, " in verdict_of(one)
    two = shown([made.dump(made.layers(4))], [made.dump(sites, run="b")])
    assert "Slower in B: layers.*.mlp.down." in verdict_of(two)


def test_verdict_on_two_runs_has_bytes_and_both_times():
    before, after = made.eventful(policy="off"), made.eventful(run="b")
    faster = dataclasses.replace(after.timeline, us=after.timeline.us / 2)
    after = dataclasses.replace(after, timeline=faster)
    found = shown([before], [after], measured=[{0: before.timeline}, {0: faster}])
    text = verdict_of(found)
    assert "B (balanced) against A (off):" in text
    assert "Its graphs are predicted 2.00 times as fast" in text
    assert "In one traced step of each, they took" in text
    assert "one step does not show the speedup" in text
    assert "No place in the model is predicted to be slower." in text


def test_verdict_has_the_measured_speedup_in_place_of_a_traced_step():
    before, after = made.eventful(policy="off"), made.eventful(run="b")
    runs = [html.Run((each,), "folder", {0: each.timeline}) for each in (before, after)]
    text = verdict_of(Page(page(runs, ["inconclusive: the machine is busy"])))
    assert "Inconclusive: the machine is busy." in text
    assert "traced" not in text


def test_verdict_without_collectives():
    assert "there was nothing to decide" in verdict_of(shown([made.dump([])]))


def test_runs_have_the_colours_of_their_policies():
    found = shown([made.eventful(policy="off")], [made.eventful(run="b", policy="balanced")])
    styles = [value for name, value in found.attributes if name == "style"]
    assert styles == [f"--policy: {colour_of(policy)}" for policy in ("off", "balanced")]


# --- several runs ---------------------------------------------------------------------------------


def test_two_runs_are_compared_by_place():
    sites = [dataclasses.replace(site) for site in made.layers(6)]
    other = [
        dataclasses.replace(site, codec="int4", wire_bytes=133_120, predicted_us=1500.0)
        if site.compressed and "attn" in site.module
        else site
        for site in sites
    ]
    found = shown([made.dump(sites)], [made.dump(other, run="run-b", policy="aggressive")])
    (change,) = found.data["changes"]
    assert (change["graph"], change["module"]) == ("1st forward graph", "layers.*.attn.o")
    assert change["what"] == [
        "int8 by two_shot, 2 chunks, kernel → int4 by two_shot, 2 chunks, kernel"
    ]
    assert [side["wire_bytes"] for side in change["sides"]] == [6 * 266_240, 6 * 133_120]
    assert found.row("policy")[:2] == ["balanced", "aggressive"]
    assert found.row("bytes on the wire") == ["4.5 MiB", "3.8 MiB", "-17%"]
    (sent,) = [row for row in found.rows if row[0].startswith("sent to other ranks")]
    assert sent[0] == "sent to other ranks (20 sites not counted)"  # these plans have no stages
    assert sent[1:] == ["3.0 MiB", "3.0 MiB", "the same"]
    assert "1 place differs, 1 is the same in both" in found.text


def test_place_that_only_one_run_has():
    right = made.dump([*made.layers(2), made.site("extra", "head")], run="b")
    found = shown([made.dump(made.layers(2))], [right])
    (change,) = found.data["changes"]
    assert (change["module"], change["what"], change["sides"][0]) == ("head", ["only in B"], None)


def test_runs_of_different_worlds():
    found = shown([made.eventful()], [made.dump(made.layers(4, ranks=8), run="b", ranks=8)])
    assert "A ran on 4 ranks, B on 8" in found.text
    assert found.row("ranks")[:2] == ["4", "8"]
    assert "1st forward graph, simplified: sum once x2, own part → nothing" in found.text
    assert {text for change in found.data["changes"] for text in change["what"]} == {"ranks: 4 → 8"}


def test_third_run_is_shown_and_not_compared():
    runs = [[made.eventful(run=name)] for name in "abc"]
    found = shown(*runs)
    assert list(found.data["runs"]) == ["A", "B", "C"]
    assert "The other runs are shown below, and not compared" in found.text
    assert found.data["changes"] == []


@pytest.mark.slow
def test_files_of_one_run_belong_together(tmp_path):
    folder, out = tmp_path / "dump", tmp_path / "out.html"
    first = dumps.write(folder, made.eventful())
    second = dumps.write(folder, made.dump(made.layers(2), direction="backward"))
    assert report(second, first, "-o", out).exit_code == 0
    found = Page(out.read_text())
    assert list(found.data["runs"]) == ["A"]
    assert [row[0] for row in found.rows if row[0][:1].isdigit()] == ["0: forward", "1: backward"]
    assert report(folder, "-o", out).exit_code == 0
    assert Page(out.read_text()).data == found.data
    assert report(folder, folder, "-o", out).exit_code == 0
    assert list(Page(out.read_text()).data["runs"]) == ["A", "B"]
    assert Page(out.read_text()).data["changes"] == []


def test_two_runs_of_one_folder(tmp_path):
    folder, out = tmp_path / "dump", tmp_path / "out.html"
    for name in ("one", "two"):
        dumps.write(folder, made.eventful(run=name))
    assert report(folder, "-o", out).exit_code == 0
    assert list(Page(out.read_text()).data["runs"]) == ["A"]
    assert report(folder, "--run", "one", "--run", "two", "-o", out).exit_code == 0
    assert list(Page(out.read_text()).data["runs"]) == ["A", "B"]
    fails(report(folder, "--run", "tow", "-o", out), "no run 'tow'", "did you mean 'two'?")
    result = report(folder, folder, "--run", "one", "-o", out)
    assert result.exit_code == 2
    assert "runs of one DUMP" in result.stderr


# --- one self-contained file, and hostile text ----------------------------------------------------


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp;",
    "层.注意力 → ✓ \u202e\u2028\u2029",
    "\x00\x1b[31m\r\n\t",
)


def hostile(text: str) -> dumps.Dump:
    """Return a dump that has one text wherever a text may be."""
    one = made.eventful()
    sites = tuple(
        dataclasses.replace(site, module=text, reason=text, missed=text, group_label=text)
        for site in one.plan.sites
    )
    simplified = tuple(
        dataclasses.replace(step, rule=text, into=text) for step in one.plan.simplified
    )
    grouped = tuple(dataclasses.replace(each, reason=text) for each in one.plan.grouped)
    split = tuple(dataclasses.replace(each, reason=text) for each in one.plan.split)
    plan = dataclasses.replace(
        one.plan,
        sites=sites,
        simplified=simplified,
        grouped=grouped,
        split=split,
        policy=text,
        profile=text,
        fallback=text,
    )
    events = tuple(dataclasses.replace(event, lane=text) for event in one.timeline.events)
    return dataclasses.replace(
        one,
        plan=plan,
        run=text or "run",
        torch=text,
        commpass=text,
        written=text,
        policy={text or "x": text, "rules": [{"module": text}]},
        profile={"link": {text or "x": [text]}},
        timeline=dataclasses.replace(one.timeline, events=events),
    )


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("text", HOSTILE)
def test_names_are_data(text):
    kept = shown([hostile("plain")], [hostile("plain")])
    found = shown([hostile(text)], [hostile(text)])
    assert found.tags == kept.tags
    assert {name for name, _ in found.attributes} == {name for name, _ in kept.attributes}
    (group, *_) = found.data["runs"]["A"]["groups"]
    assert group["module"] == text
    assert found.data["runs"]["A"]["rules"][0]["rule"] == text


@pytest.mark.slow
@given(st.text(max_size=30))
@settings(max_examples=examples(10, 30), deadline=None)
def test_any_text_stays_what_it_is(text):
    one = hostile(text)
    raw = page([html.Run((one,), text, {})])
    found = Page(raw)
    assert len(found.scripts) == raw.count("<script") == raw.count("</script>") == 2
    run = found.data["runs"]["A"]
    assert run["groups"][0]["module"] == text
    assert text in run["texts"]


def test_page_loads_nothing():
    text = page([html.Run((made.eventful(),), "folder", {})])
    found = Page(text)
    links = [value for name, value in found.attributes if name in ("href", "src", "action")]
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/(2000/svg|1999/xlink))", text)
    (policy,) = [value for _, value in found.attributes if value.startswith("default-src")]
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert not [name for name, _ in found.attributes if name.startswith("on")]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("runs", [1, 2, 3, 28])
def test_every_link_has_its_target(runs):
    found = shown(*([made.eventful(run=str(n))] for n in range(runs)))
    assert len(found.ids) == len(set(found.ids))
    targets = [value[1:] for name, value in found.attributes if name == "href" and value[0] == "#"]
    targets += [value for name, value in found.attributes if name == "aria-labelledby"]
    assert set(targets) <= set(found.ids)
    assert len(targets) > 5 * runs


@pytest.mark.every
def test_work_for_a_site_does_not_grow_with_their_number():
    def work(layers: int):
        one = made.dump(made.layers(layers))
        return lambda: page([html.Run((one,), "big", {})])

    work(10)()  # which reads what is read only once
    assert growth(work, 200) < 1.2


@pytest.mark.every
def test_ten_thousand_sites_take_few_elements():
    one = made.dump(made.layers(5000))
    text = page([html.Run((one,), "big", {})])
    found = Page(text)
    assert sum(found.tags.values()) < 500  # the page creates rows on demand
    assert [len(group["sites"]) for group in found.data["runs"]["A"]["groups"]] == [
        5000,
        3334,
        1666,
    ]
    assert len(text) < 10e6


# --- bad input ------------------------------------------------------------------------------------


def damage(folder: Path, how: str) -> None:
    (file,) = dumps.files(folder)
    text = file.read_text()
    if how == "cut short":
        file.write_text(text[: len(text) // 2])
    elif how == "damaged dump":
        file.write_text(text.replace('"predicted_us": 2500.25', '"predicted_us": "soon"', 1))
    elif how == "not a commpass dump":
        file.write_text("{}")
    elif how == "install a newer commpass":
        file.write_text(text.replace('"version": 2', '"version": 99', 1))


@pytest.mark.parametrize(
    "how", ["cut short", "damaged dump", "not a commpass dump", "install a newer commpass"]
)
def test_broken_dump_is_reported_and_nothing_is_written(folder, tmp_path, how):
    out = tmp_path / "out.html"
    out.write_text("older")
    damage(folder, how)
    fails(report(folder, "-o", out), "0000-forward.json", how)
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "out.html"]


def test_no_dump_there(tmp_path):
    out = tmp_path / "out.html"
    (tmp_path / "empty").mkdir()
    fails(report(tmp_path / "empty", "-o", out), "empty", "no dump in this folder")
    fails(report(tmp_path / "none", "-o", out), "none", "no such file or folder")
    assert not out.exists()


def test_folders_where_no_page_can_be_written(folder, tmp_path, monkeypatch):
    fails(report(folder, "-o", tmp_path), "is a folder", "report.html")
    fails(report(folder, "-o", tmp_path / "gone" / "x.html"), "there is no folder", "gone")
    fails(report(folder, "-o", tmp_path / "x.txt"), "a report is an .html file", "x.html")
    file = tmp_path / "x.html"
    file.write_text("older")
    fails(report(folder, "-o", file / "y.html"), "there is no folder")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    fails(report(folder, "-o", file), "x.html: cannot be written: No space left on device")
    assert file.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "x.html"]


def test_traces_that_fit_no_run(folder, tmp_path):
    trace, out = tmp_path / "trace.json", tmp_path / "out.html"
    trace.write_text("{}")
    asked = ("--measured", trace)
    fails(report(folder, *asked, *asked, "-o", out), "2 traces for 1 run")
    fails(report(folder, *asked, "-o", out), "trace.json")
    assert not out.exists()


def test_command_writes_the_page_and_says_so(folder, tmp_path):
    out = tmp_path / "out.html"
    result = report(folder, "-o", out)
    assert (result.exit_code, result.stdout) == (0, f"wrote {out}\n")
    assert Page(out.read_text()).term("Sites compressed")[0] == "6 of 7"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "out.html"]


# --- drawings -------------------------------------------------------------------------------------


def test_each_graph_has_a_drawing_of_its_own(monkeypatch):
    monkeypatch.setattr(dot, "svg", lambda picture: '<?xml?><svg id="graph0"><g id="node1"/></svg>')
    found = shown([made.eventful(), made.dump(made.layers(2), number=1)], [made.eventful(run="b")])
    assert {"A-0-graph0", "A-1-graph0", "B-0-node1", "a-graph", "b-graph"} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))


def test_page_without_graphviz_says_so(monkeypatch):
    def missing(picture):
        raise CommpassError("an SVG needs <dot>")

    monkeypatch.setattr(dot, "svg", missing)
    assert "There is no drawing: an SVG needs <dot>." in shown([made.eventful()]).text


def test_drawing_that_nobody_could_read_is_not_made(monkeypatch):
    monkeypatch.setattr(dot, "svg", lambda picture: pytest.fail("drawn"))
    sites = [made.site(f"all_reduce_{n}", f"part{n}.mlp") for n in range(1000)]
    found = shown([made.dump(sites)])
    assert re.search(r"There is no drawing: it would have 2,\d+ boxes", found.text)
