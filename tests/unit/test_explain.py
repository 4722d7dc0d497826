"""explain and diff by pattern: totals, bytes sent, filters; and the time for large dumps."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import report_dumps as made
from dumps import fails, layered, make, node, run, site, words
from steps import growth

from commpass import plan
from commpass.plan import Grouped, Simplification, dump
from commpass.plan.stage import Stage
from commpass.report import sent_bytes

P = 8


def moved(kind: str, nbytes: int, **changes: object) -> int:
    return sent_bytes.plain(site("s", kind=kind, bytes=nbytes, **changes))


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("all_reduce", 2 * (P - 1) / P),
        ("all_gather", P - 1),
        ("reduce_scatter", (P - 1) / P),
        ("all_to_all", (P - 1) / P),
        ("send", 1),
        ("recv", 0),
    ],
)
def test_sent_is_what_leaves_the_rank(kind: str, times: float):
    assert moved(kind, 8000) == 8000 * times
    assert moved(kind, 8000, group_size=1) == 0
    assert moved(kind, -1) == -1


def exchange(kind: str, nbytes: int, **changes: object) -> Stage:
    return Stage(role="exchange", kind=kind, nbytes=nbytes, **{"leaving": nbytes} | changes)


def coded_site(*stages: Stage, **changes: object) -> plan.PlannedSite:
    handed = sum(stage.nbytes for stage in stages)
    facts = {"codec": "int8", "algorithm": "ring", "wire_bytes": handed, "stages": stages}
    return site("s", **facts | changes)


def test_ring_and_a_direct_exchange_compare_like_for_like():
    """Both for n bytes: P - 1 sends of n / P to a neighbour twice, or n / P to each other rank
    twice."""
    n = 8000
    hop = exchange("all_to_all", n // P, peers=1)
    ring = coded_site(*[hop] * (2 * (P - 1)))
    scatter = exchange("all_to_all", n, leaving=n * (P - 1) // P, peers=P - 1)
    direct = coded_site(scatter, exchange("all_gather", n // P))
    assert sent_bytes.planned(ring) == sent_bytes.planned(direct) == 2 * (P - 1) / P * n
    assert ring.wire_bytes != direct.wire_bytes


def test_sent_of_what_is_not_known_or_was_scored_for_another_size():
    gather = exchange("all_gather", 100)
    assert sent_bytes.planned(coded_site(gather)) == 700
    assert sent_bytes.planned(coded_site(gather, wire_bytes=300)) == 2100
    assert sent_bytes.planned(coded_site(gather, wire_bytes=-1)) == -1
    assert sent_bytes.planned(coded_site(wire_bytes=300)) == -1
    assert sent_bytes.planned(site("s")) == sent_bytes.plain(site("s"))
    known = make(sites=(coded_site(gather, bytes=800), site("d", bytes=-1, wire_bytes=-1))).plan
    assert sent_bytes.of_plans([known]) == (1400, 700, 1)
    fallen = dataclasses.replace(known, fallback="verify failed")
    assert sent_bytes.of_plans([fallen]) == (1400, 1400, 1)


def test_line_a_pattern_and_all_of_them_with_all(tmp_path: Path):
    path = dump.write(tmp_path, layered(32))
    lines = run("explain", path, width=140).stdout.splitlines()
    rows = [line for line in lines if "layers." in line and "each" not in line]
    assert len([row for row in rows if "layers.*.mlp.o x 32" in row]) == 1
    assert len(lines) < 20
    [row] = [words(row) for row in rows if "layers.*.mlp.o x 32" in row]
    said = "all_reduce over tp/8 int8 by two-shot x3 8 MiB -> 2 MiB 448 MiB -> 252 MiB 100 -> 40 us"
    assert said in row
    every = run("explain", path, "--all", width=240).stdout
    assert sum("ar_" in line for line in every.splitlines()) == 64


def test_exchanges_not_sent_at_all_are_counted(tmp_path: Path):
    """Of 12 collectives 4 are left, two of them fused into one and one in two chunks."""
    reduce = "_c10d_functional.all_reduce.default"
    before = tuple(node(f"r{n}", reduce, site=f"r{n}") for n in range(12))
    steps = tuple(
        Simplification(rule="same", site=f"r{n}", into="r0", saved_bytes=1000) for n in range(4, 12)
    )
    facts = {"group": "7", "numbers": (0, 1), "bytes": (8, 8), "reason": "small"}
    group = Grouped(sites=("r0", "r1"), modules=("a", "b"), into="both", **facts)
    split = plan.Split(site="r2", into=("r2a", "r2b"), rows=(4, 4))
    sites = [site(name) for name in ("both", "r2a", "r2b", "r3")]
    one = make(sites=sites)
    changed = dataclasses.replace(one.plan, simplified=steps, grouped=(group,), split=(split,))
    path = dump.write(tmp_path, dataclasses.replace(one, plan=changed, before=before))
    shown = run("explain", path, width=140).stdout
    assert "simplified: 8 of 12 collectives not sent at all, 7.8 KiB less handed over" in shown
    assert "r4 and 7 more" in shown
    assert "2 each into both" in shown
    every = run("explain", path, "--all", width=140).stdout
    assert "r11 (same)" in every


@pytest.mark.parametrize("chunks", [1, 2])
def test_reason_of_a_split_collective_is_that_of_each_chunk(tmp_path: Path, chunks: int):
    names = ("r0a", "r0b")[:chunks]
    one = make(sites=[site(name, reason="int8: 40 us instead of 100 us") for name in names])
    if chunks > 1:
        split = (plan.Split(site="r0", into=names, rows=(4, 4)),)
        one = dataclasses.replace(one, plan=dataclasses.replace(one.plan, split=split))
    shown = run("explain", dump.write(tmp_path, one), width=140).stdout
    assert "int8: 40 us instead of 100 us" in shown
    assert ("each chunk: int8: 40 us" in shown) == (chunks > 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dump.write(tmp_path / "dump", layered(2))
    dump.write(tmp_path / "dump", make("backward", [site("last", direction="backward")]))
    return tmp_path / "dump"


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("--module", "layers.*.mlp"), {"ar_mlp_0", "ar_mlp_1"}),
        (("--module", "layers.1"), {"ar_attn_1", "ar_mlp_1"}),
        (("--direction", "backward"), {"last"}),
        (("--codec", "none"), {"last"}),
        (("--codec", "int8", "--module", "layers.0.attn"), {"ar_attn_0"}),
        (("--kind", "all_reduce"), {"ar_attn_0", "ar_mlp_0", "ar_attn_1", "ar_mlp_1", "last"}),
    ],
)
def test_filters(folder: Path, args: tuple[str, ...], names: set[str]):
    plans = json.loads(run("explain", folder, *args, "--json").stdout)
    assert {each["name"] for one in plans for each in one["sites"]} == names
    assert "only --" in run("explain", folder, *args).stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kind", "all_reduc"), ("did you mean 'all_reduce'", "Known:")),
        (("--direction", "back"), ("did you mean 'backward'",)),
        (("--codec", "int9"), ("no site with codec 'int9'", "did you mean 'int8'", "none")),
        (("--module", "layer.0"), ("no site with module 'layer.0'", "layers.0.attn.o")),
        (("--kind", "broadcast"), ("no site with kind 'broadcast'", "Known: all_reduce.")),
        (("--codec", "int8", "--direction", "backward"), ("no site meets all of",)),
    ],
)
@pytest.mark.parametrize("command", ["explain", "diff"])
def test_filters_that_nothing_meets_say_what_there_is(folder: Path, command: str, args, said):
    folders = [folder] * (1 + (command == "diff"))
    fails(run(command, *folders, *args), *said)


def test_diff_is_a_line_a_pattern_after_the_totals_of_both(tmp_path: Path, monkeypatch):
    """Lines do not depend on how long the path of the test's folder is."""
    monkeypatch.chdir(tmp_path)
    a = dump.write(Path("a"), layered(32))
    b = dump.write(Path("b"), layered(32, {"codec": "int4", "wire_bytes": 1 << 20}))
    result = run("diff", a, b, width=140)
    assert result.exit_code == 1
    lines = [words(line) for line in result.stdout.splitlines()]
    assert "64 sites, 64 compressed; 512.0 MiB -> 128.0 MiB (25%)" in lines[1]
    assert "sent to other ranks: 896.0 MiB -> 504.0 MiB" in lines[2]
    assert "512.0 MiB -> 64.0 MiB" in lines[4]
    row = "32 all_reduce of layers.*.mlp.o codec int8 -> int4 64 MiB -> 32 MiB 1.3 ms"
    assert row in lines
    assert len(lines) < 14
    assert run("diff", a, a).exit_code == 0


def test_diff_of_chunks_is_one_of_the_whole(tmp_path: Path):
    one = layered(1)
    whole, other = one.plan.sites
    parts = tuple(
        dataclasses.replace(whole, name=f"part_{n}", wire_bytes=1 << 20, predicted_us=15.0)
        for n in range(2)
    )
    split = plan.Split(site=whole.name, into=("part_0", "part_1"), rows=(8, 8))
    changed = dataclasses.replace(one.plan, sites=(*parts, other), split=(split,))
    a = dump.write(tmp_path / "a", one)
    b = dump.write(tmp_path / "b", dataclasses.replace(one, plan=changed))
    shown = words(run("diff", a, b, width=140).stdout)
    assert "1 all_reduce of layers.0.attn.o chunks of rows 1 -> 2 2 MiB 40 -> 30 us" in shown
    assert re.search(r"1st forward graph: \d+ differences in 1 site\b(?!s)", shown)
    assert "only in" not in shown


def test_diff_for_programs(tmp_path: Path):
    a = dump.write(tmp_path / "a", layered(1))
    b = dump.write(tmp_path / "b", layered(1, {"codec": "int4", "wire_bytes": 1 << 20}))
    result = run("diff", a, b, "--json", "--module", "layers.*.mlp")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["a"]["wire_bytes"] == 4 << 20
    assert told["b"]["sent_bytes"] < told["a"]["sent_bytes"] < told["a"]["sent_plain_bytes"]
    [graph] = told["graphs"]
    found = {(row["site"], row["field"]): (row["a"], row["b"]) for row in graph["differences"]}
    assert found == {
        ("ar_mlp_0", "codec"): ("int8", "int4"),
        ("ar_mlp_0", "wire_bytes"): (2 << 20, 1 << 20),
    }
    same = run("diff", a, a, "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["graphs"] == []


@pytest.mark.every
def test_work_for_a_site_that_is_explained_does_not_grow_with_their_number(tmp_path: Path):
    def work(layers: int):
        path = dump.write(tmp_path / str(layers), layered(layers))
        return lambda: run("explain", path, width=100)

    work(10)()  # which reads what is read only once
    assert growth(work, 200) < 1.2
    assert "layers.*.mlp.o x 800" in work(800)().stdout


def test_no_name_speaks_to_the_terminal(tmp_path: Path):
    """Text of a dump is escaped: it has no terminal escapes, and no characters that change the text
    direction."""
    name = "\x1b[31mred\x1b]0;title\x07\u202e.layer"
    sites = [dataclasses.replace(site, module=name, reason=name) for site in made.layers(2)]
    for which in (name, f"{name} 2"):
        dump.write(tmp_path, made.dump(sites, run=which, policy=name))
    asked = [["explain"], ["explain", "--all"], ["explain", "--why", "all_reduce_0"], ["timeline"]]
    for command, *more in [*asked, ["graph"], ["graph", "--level", "nodes"]]:
        done = run(command, tmp_path, *more)
        assert done.exit_code == 0, done.output
        assert "red" in done.stdout + done.stderr
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", done.stdout + done.stderr), command
    done = run("explain", tmp_path, "--run", "nope")
    assert "red" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("width", [10, 20, 39])
def test_no_column_is_a_letter_wide(tmp_path: Path, width: int):
    dump.write(tmp_path, made.dump(made.layers(4, missed="all that is left needs it")))
    text = run("explain", tmp_path, width=width).stdout
    assert text == run("explain", tmp_path, width=40).stdout
    assert max(map(len, text.splitlines())) == 40
    assert re.search(r"^1 +layers\.\* ", text, re.MULTILINE), text
    letters = re.findall(r"^ *\S *$", text, re.MULTILINE)
    assert len(letters) <= 1, text  # the end of a word
