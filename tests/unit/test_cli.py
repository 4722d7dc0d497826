"""The command line, on dumps made by hand: what it prints, what it leaves with, and what it says
about bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from commpass import dump, plan
from commpass.report import doctor, draw, tables
from commpass.report.cli import app
from commpass.report.progress import progress

LONG = (
    "left alone: the rule for 'layers.*.attn' says keep, and the link is "
    + "very " * 30
    + "fast in truth"
)
ODD = "L['self'].layers[0].\"mlp\"\\x"


def run(*args: object, width: int = 120):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(width)})


def site(name: str, **changes: object) -> plan.PlannedSite:
    fields = {
        "name": name,
        "kind": "all_reduce",
        "reduce_op": "sum",
        "group": "7",
        "group_label": "tp",
        "group_size": 8,
        "dtype": "torch.bfloat16",
        "shape": (4096, "s0"),
        "bytes": 8 << 20,
        "module": ODD,
        "wire_bytes": 8 << 20,
        "plain_us": 100.0,
        "predicted_us": 100.0,
        "reason": LONG,
    }
    return plan.PlannedSite(**(fields | changes))


SMALL = {
    "codec": "int8",
    "algorithm": "two-shot",
    "chunks": 3,
    "wire_bytes": 2 << 20,
    "predicted_us": 40.0,
    "error": 0.008,
}
SITES = (site("all_reduce"), site("all_reduce_1", **SMALL, reason="saves 60 us [really]"))


def node(name: str, target: str, *inputs: str, **changes: object) -> dump.GraphNode:
    op = "placeholder" if target == name else "call_function"
    return dump.GraphNode(
        name=name,
        op=op,
        target=target,
        inputs=inputs,
        value="bf16[4096, s0]",
        module=ODD,
        **changes,
    )


def chain(length: int) -> tuple[dump.GraphNode, ...]:
    """x and w, a compressed all_reduce, and so many plain nodes after it that use x too."""
    nodes = [
        node("x", "x"),
        node(ODD, ODD),
        node("mm", "aten.mm.default", "x", ODD),
        node("encode", "commpass.encode.default", "mm", site="all_reduce_1", inserted=True),
        node(
            "gather",
            "_c10d_functional.all_gather_into_tensor.default",
            "encode",
            site="all_reduce_1",
            inserted=True,
        ),
        node("decode", "aten.view.default", "gather", site="all_reduce_1", inserted=True),
        node("all_reduce", "_c10d_functional.all_reduce.default", "decode", site="all_reduce"),
    ]
    for index in range(length):
        nodes.append(node(f"add_{index}", "aten.add.Tensor", nodes[-1].name, "x"))
    return tuple(nodes)


def make(
    direction: str = "forward", sites=SITES, *, name: str = "run-1", nodes=None, fallback: str = ""
) -> dump.Dump:
    return dump.Dump(
        run=name,
        commpass="0.1.0",
        torch="2.13.0",
        rank=0,
        world_size=8,
        written="2026-01-01T10:00:00Z",
        plan=plan.Plan(
            graph="g",
            direction=direction,
            policy="balanced",
            profile="h100",
            sites=tuple(sites),
            fallback=fallback,
        ),
        before=(
            node("x", "x"),
            node("all_reduce", "_c10d_functional.all_reduce.default", "x", site="all_reduce"),
        ),
        after=chain(3) if nodes is None else nodes,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One run: a forward graph with two sites, a backward graph with none."""
    for one in (make(), make("backward", ())):
        dump.write(tmp_path / "dump", one)
    return tmp_path / "dump"


def words(text: str) -> str:
    return " ".join(text.split())


def fails(result, *said: str) -> None:
    """A clean error: one line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"commpass: [^\n]+\n", result.stderr), result.stderr
    for part in said:
        assert part in result.stderr


# explain


@pytest.mark.parametrize("width", [40, 80, 240])
def test_explain_loses_nothing_at_any_width(folder: Path, width: int):
    result = run("explain", folder, width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    dense = re.sub(r"\s", "", result.stdout)
    for reason in (LONG, "saves 60 us [really]"):
        assert re.sub(r"\s", "", reason) in dense
    if width < 80:
        return  # cells are folded there
    shown = words(result.stdout)
    for part in (
        "all_reduce_1",
        "all_reduce(sum)",
        "tp/8",
        "bfloat16[4096, s0]",
        "8.0 MiB",
        "2.0 MiB",
        "25%",
        "int8",
    ):
        assert part in shown
    for part in ("two-shot", "3 chunks", "100.0", "40.0", "0.8%", "forward"):
        assert part in shown
    assert (
        re.sub(
            r"\s",
            "",
            "2 sites, 1 compressed; 16.0 MiB -> 10.0 MiB (62%); predicted 200.0 us -> 140.0 us",
        )
        in dense
    )
    for part in (
        "policy balanced, profile h100",
        "commpass 0.1.0, torch 2.13.0",
        "rank 0 of 8",
        "2026-01-01T10:00:00Z",
    ):
        assert part in shown


def test_one_line_a_site_where_there_is_room(folder: Path):
    [row] = [
        line
        for line in run("explain", folder, width=240).stdout.splitlines()
        if line.startswith("2  all_reduce_1")
    ]
    assert re.split(r"\s{2,}", row.strip()) == [
        "2",
        "all_reduce_1",
        ODD,
        "forward",
        "all_reduce(sum)",
        "tp/8",
        "bfloat16[4096, s0]",
        "8.0 MiB",
        "2.0 MiB",
        "25%",
        "int8",
        "two-shot",
        "3 chunks",
        "100.0",
        "40.0",
        "0.8%",
    ]


def test_explain_says_that_a_graph_has_no_sites(folder: Path):
    result = run("explain", folder / "0001-backward.json")
    assert result.exit_code == 0
    assert "no collective in this graph" in result.stdout


def test_explain_shouts_a_fallback_and_counts_nothing_as_saved(tmp_path: Path):
    result = run("explain", dump.write(tmp_path, make(fallback="pass fuse failed: KeyError")))
    assert "FALLBACK" in result.stdout
    assert "pass fuse failed: KeyError" in result.stdout
    assert "0 compressed; 16.0 MiB -> 16.0 MiB (100%); predicted 200.0 us -> 200.0 us" in words(
        result.stdout
    )


def test_sites_with_one_reason_share_a_line_and_unknown_bytes_are_not_added(tmp_path: Path):
    sites = [site(f"r{index}", reason="too small") for index in range(4)]
    sites.append(site("d", bytes=-1, wire_bytes=-1, reason="no size hint"))
    shown = run("explain", dump.write(tmp_path, make(sites=sites))).stdout
    assert re.search(r"^1-4 +too small *$", shown, re.MULTILINE)
    assert "32.0 MiB -> 32.0 MiB (100%) (1 of unknown size not counted)" in words(shown)


def test_explain_says_why_a_rank_stands_still(tmp_path: Path):
    sites = [
        site(f"r{index}", exposed_us=30.0, unmoved_us=40.0, missed="all that is left needs it")
        for index in range(2)
    ]
    path = dump.write(tmp_path, make(sites=[*sites, site("hidden")]))
    shown = run("explain", path, width=160).stdout
    assert re.search(r"^60\.0 us +1-2 +80\.0 us +all that is left needs it *$", shown, re.MULTILINE)
    still = "and a rank stands still for 60.0 us of them (80.0 us before exchanges were moved)"
    assert still in words(shown)
    plain = run("explain", dump.write(tmp_path, make())).stdout
    assert "exposed, predicted" not in plain
    assert "stands still" not in plain


def test_explain_json_is_the_plans(folder: Path):
    result = run("explain", folder, "--json")
    read = [plan.Plan.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert read == [one.plan for one in dump.read_run(folder)]


def test_runs(folder: Path):
    dump.write(folder, make(name="run-2", sites=()))
    newest = run("explain", folder)
    assert "2 runs" in newest.stderr
    assert "run-1" in newest.stderr
    assert "run run-2," in newest.stdout
    older = run("explain", folder, "--run", "run-1")
    assert older.stderr == ""
    assert "run run-1," in older.stdout
    fails(run("explain", folder, "--run", "run-11"), "no run 'run-11'", "did you mean 'run-1'?")


# graph


def test_text_has_one_marked_line_a_node(folder: Path):
    lines = run("graph", folder, "--graph", 0, width=60).stdout.splitlines()
    assert (
        lines[0]
        == "graph 0: forward, after (10 nodes, 1 site left alone, 1 rewritten with 3 inserted"
        " nodes)"
    )
    assert [line[0] for line in lines[3:]] == [*"   +++*   "]
    assert re.fullmatch(
        r"  mm +=" + re.escape(f" aten.mm.default(x, {ODD})") + r" +bf16\[4096, s0\] +.*", lines[5]
    )
    assert lines[6].endswith("for all_reduce_1")
    before = run("graph", folder, "--graph", 0, "--before").stdout.splitlines()
    assert [line[0] for line in before[3:]] == [*" *"]


def test_text_prints_all_graphs_and_writes_a_file(folder: Path, tmp_path: Path):
    printed = run("graph", folder).stdout
    assert "graph 0: forward" in printed
    assert "graph 1: backward" in printed
    assert str(tmp_path / "out.txt") in run("graph", folder, "-o", tmp_path / "out.txt").stdout
    assert (tmp_path / "out.txt").read_text() == printed


def test_around_hides_what_is_far_and_says_so(tmp_path: Path):
    path = dump.write(tmp_path, make(nodes=chain(30)))
    shown = run("graph", path, "--around", 1).stdout
    assert (
        "31 nodes farther than 1 from a site hidden" in shown
    )  # of 37: six are the site, its nodes, mm and add_0
    assert "add_0 " in shown
    assert "add_1 " not in shown
    assert "hidden" not in run("graph", path, "--around", "all").stdout
    drawn = parse_dot(run("graph", path, "--around", 1, "--dot").stdout)
    assert ["dashed" in drawn.nodes[name].get("style", "") for name in ('"add_0"', '"decode"')] == [
        True,
        False,
    ]
    fails(
        run("graph", dump.write(tmp_path, make(nodes=(node("x", "x"),))), "--around", 1),
        "--around all",
    )


Graph = namedtuple("Graph", "nodes edges clusters")


def parse_dot(text: str) -> Graph:
    """Reads the part of DOT that is written here, by its real rules for strings; anything else is
    an error."""
    string = r'"(?:[^"\\\n]|\\.)*"'
    token = rf"{string}|[\w#]+|->|[{{}}\[\];=,]"
    assert re.sub(rf"{token}|\s", "", text) == ""
    body = re.fullmatch(rf"digraph {string} \{{(.*)\}}\s*", text, re.DOTALL)
    assert body
    found = Graph({}, [], [])
    attribute = rf"\w+=(?:{string}|[\w#]+)"
    for line in filter(None, map(str.strip, body[1].splitlines())):
        if match := re.fullmatch(rf"({string}) \[({attribute}(?:, {attribute})*)\];", line):
            found.nodes[match[1]] = dict(re.findall(rf"(\w+)=({string}|\w+)", match[2]))
            if found.clusters and found.clusters[-1] is not None:
                found.clusters[-1].append(match[1])
        elif match := re.fullmatch(rf"({string}) -> ({string});", line):
            found.edges.append((match[1], match[2]))
        elif re.fullmatch(r"subgraph cluster_\d+ \{", line):
            found.clusters.append([])
        elif line == "}":
            found.clusters.append(None)
        else:
            assert re.fullmatch(rf"(node \[)?{attribute}([;,] {attribute})*\]?;", line), line
    return found


def test_dot_is_valid_whatever_the_names(folder: Path, tmp_path: Path):
    result = run("graph", folder, "--graph", 0, "--dot")
    drawn = parse_dot(result.stdout)
    names = {
        name: name.replace("\\", "\\\\").replace('"', '\\"') for name in (n.name for n in chain(3))
    }
    assert set(drawn.nodes) == {f'"{name}"' for name in names.values()}
    assert set(drawn.edges) == {
        (f'"{names[i]}"', f'"{names[n.name]}"') for n in chain(3) for i in n.inputs
    }
    assert drawn.clusters == [['"encode"', '"gather"', '"decode"'], None]
    fills = [
        drawn.nodes[f'"{name}"']["fillcolor"] for name in ("mm", "all_reduce", "encode", "gather")
    ]
    assert len(set(fills)) == 3
    assert fills[2] == fills[3]
    assert "bf16[4096, s0]" in drawn.nodes['"mm"']["label"]
    run("graph", folder, "--graph", 0, "--dot", "--output", tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text() == result.stdout


def test_svg_is_xml_with_every_label(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = run("graph", folder / "0000-forward.json", "--svg")
    assert result.stdout == "wrote graph-0000-forward-after.svg\n"
    root = ElementTree.parse("graph-0000-forward-after.svg").getroot()
    assert root.tag.endswith("}svg")
    texts = {
        words("".join(found.itertext())) for found in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"mm", "aten.mm", "encode", "for all_reduce_1", ODD, "inserted for a site"} <= texts
    run("graph", folder, "--graph", 0, "--svg", "--before", "-o", "b.svg")
    assert "encode" not in Path("b.svg").read_text()


def test_big_svg_shows_the_surroundings_of_sites(tmp_path: Path):
    path = dump.write(tmp_path, make(nodes=chain(200)))
    assert run("graph", path, "--svg", "-o", tmp_path / "g.svg").exit_code == 0
    drawn = (tmp_path / "g.svg").read_text()
    assert re.search(r"\d+ nodes farther than 2 from a site hidden", drawn)
    assert "add_0" in drawn
    assert "add_100" not in drawn


def test_no_two_boxes_overlap_and_labels_fit_their_box():
    from matplotlib.backends import backend_agg as agg
    from matplotlib.patches import FancyBboxPatch

    from commpass.report import draw

    wide = [node(f"$w_{index}$", "aten.neg.default", f"add_{index}") for index in range(8)]
    fan = [node(f"fan_{index}", "aten.sub.Tensor", "mm", f"$w_{7 - index}$") for index in range(8)]
    late = [node("late", "late"), node("last", "aten.add.Tensor", "add_39", "late")]
    nodes = (*chain(40), *wide, *fan, *late)
    drawing = draw.figure(draw.view(make(nodes=nodes), around=None))
    drawing.set_dpi(100)
    canvas = agg.FigureCanvasAgg(drawing)
    axes = drawing.axes[0]
    boxes = [
        patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyBboxPatch)
    ]
    labels = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
    title, *labels = labels
    assert len(boxes) == len(labels) == len(nodes) + 3
    top = {text.get_text().split("\n")[0]: text.get_position()[1] for text in axes.texts}
    assert top["add_38"] < top["late"] < top["last"]  # an input is next to its user
    assert "$w_3$" in {
        text.get_text().split("\n")[0] for text in axes.texts if not text.get_parse_math()
    }
    for index, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        assert box.x0 <= label.x0
        assert label.x1 <= box.x1
        assert box.height >= label.height
        assert not any(box.overlaps(other) for other in [*boxes[:index], title])


def test_graph_asks_which_and_knows_what_there_is(folder: Path):
    for kind in ("--dot", "--svg"):
        fails(run("graph", folder, kind), "--graph", "0 (forward), 1 (backward)")
    fails(run("graph", folder, "--graph", 7), "no graph 7", "0 (forward), 1 (backward)")
    fails(
        run("graph", folder, "--dot", "--graph", 0, "-o", folder / "no" / "x.dot"),
        "cannot be written",
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--svg", "--dot"),
        ("--dot", "--text"),
        ("--before", "--after"),
        ("--around", "-1"),
        ("--around", "near"),
    ],
)
def test_flags_that_exclude_each_other_and_values_that_cannot_be(
    folder: Path, flags: tuple[str, ...]
):
    result = run("graph", folder, "--graph", 0, *flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert flags[0] in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "name"), [("--svg", "x.png"), ("--svg", "x"), ("--dot", "x.svg"), ("--dot", "x.gv")]
)
def test_a_graph_is_written_under_no_other_ending(
    folder: Path, tmp_path: Path, flag: str, name: str
):
    result = run("graph", folder, "--graph", 0, flag, "-o", tmp_path / name, width=400)
    assert result.exit_code == 2
    for part in ("--output", f"{flag} writes ", name, f"must end in .{flag[2:]}"):
        assert part in result.stderr
    assert not (tmp_path / name).exists()


def test_svg_without_the_libraries_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "networkx", None)
    fails(run("graph", folder, "--graph", 0, "--svg"), "pip install 'commpass[graph]'")


def test_reading_dumps_needs_neither_torch_nor_the_drawing_libraries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("torch", "networkx", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for args in (
        ("explain", folder),
        ("graph", folder),
        ("graph", folder, "--graph", 0, "--dot"),
        ("diff", folder, folder),
    ):
        assert run(*args).exit_code == 0


# diff


def test_diff_of_the_same_and_of_different_plans(folder: Path, tmp_path: Path):
    same = run("diff", folder, folder)
    assert same.exit_code == 0
    assert "no differences" in same.stdout
    changed = (
        SITES[0],
        dataclasses.replace(SITES[1], codec="taco", wire_bytes=1 << 20, reason="rotated is enough"),
    )
    dump.write(tmp_path / "other", make(sites=(*changed, site("new"))))
    for path in (folder, tmp_path / "other"):
        dump.write(path, make(sites=(site("second"),)))
    result = run("diff", folder, tmp_path / "other", width=200)
    assert result.exit_code == 1
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert ["all_reduce_1", ODD, "codec", "int8", "taco"] in rows
    assert ["all_reduce_1", ODD, "wire_bytes", "2,097,152 (2.0 MiB)", "1,048,576 (1.0 MiB)"] in rows
    assert ["all_reduce_1", ODD, "reason", "saves 60 us [really]", "rotated is enough"] in rows
    assert ["new", ODD, "site", "(no such site)", "all_reduce"] in rows
    assert not any(row[0] == "all_reduce" for row in rows)
    assert "forward 1: 4 differences" in result.stdout
    assert re.search(r"backward 1: 1 difference\nonly in A", result.stdout)


def test_diff_of_two_runs_in_one_folder(folder: Path):
    dump.write(folder, make(name="run-2", fallback="verify failed"))
    result = run("diff", folder, folder, "--run-a", "run-1", "--run-b", "run-2")
    assert result.exit_code == 1
    assert "verify failed" in result.stdout


# bad input


def newer(head: dict) -> str:
    return json.dumps(head | {"version": 99})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: "{}", "not a commpass dump"),
        (lambda text: "[1, 2]", "not a commpass dump"),
        (lambda text: "model = x", "not JSON"),
        (lambda text: text[:-300], "cut short"),
        (lambda text: newer(json.loads(text)), "install a newer commpass"),
        (
            lambda text: text.replace('"sites"', '"sights"').replace('"graph"', '"graf"'),
            "damaged dump",
        ),
    ],
)
@pytest.mark.parametrize("command", ["explain", "graph", "diff"])
def test_a_file_that_is_no_dump(folder: Path, command: str, spoil, said: str):
    path = folder / "0001-backward.json"
    path.write_text(spoil(path.read_text()))
    fails(run(command, *([folder] * (1 + (command == "diff")))), said, str(path))


def test_no_file_and_no_dump_in_the_folder(folder: Path, tmp_path: Path):
    fails(run("explain", tmp_path / "nowhere"), "no such file or folder")
    (tmp_path / "empty").mkdir()
    fails(run("diff", folder, tmp_path / "empty"), "no dump in this folder")


def test_a_circle_in_a_damaged_graph(tmp_path: Path):
    nodes = (node("a", "aten.neg.default", "b"), node("b", "aten.neg.default", "a"))
    fails(
        run("graph", dump.write(tmp_path, make(nodes=nodes)), "--svg", "-o", tmp_path / "x.svg"),
        "circle",
    )


# doctor


def test_doctor(monkeypatch: pytest.MonkeyPatch):
    table = run("doctor")
    assert table.exit_code == 0
    rows = {row["what"]: row for row in json.loads(run("doctor", "--json").stdout)}
    assert rows["python"]["state"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["torch"]["ok"]
    assert rows["distributed"]["state"] == "yes"
    for row in rows.values():
        assert row["what"] in words(table.stdout)
        assert row["ok"] or row["meaning"]


@pytest.mark.parametrize(
    ("version", "code"),
    [("2.11.0a0+git1", 0), ("2.15.1+cu130", 0), ("2.10.2", 1), ("2.16.0", 1), ("3.1", 1)],
)
def test_doctor_knows_which_torch_is_supported(
    monkeypatch: pytest.MonkeyPatch, version: str, code: int
):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert [row["state"] for row in json.loads(result.stdout) if row["what"] == "torch"] == [
        version
    ]


def test_doctor_without_torch_or_distributed(monkeypatch: pytest.MonkeyPatch):
    import torch.distributed

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_available", lambda: False)
        assert run("doctor").exit_code == 1
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install 'torch<2.16,>=2.11'" in words(result.stdout)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.json", None, "gone.json"),
        ("bad.toml", "base = ", "bad.toml"),
        ("nvlink-44", None, ""),
    ],
)
def test_doctor_tells_what_is_wrong_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
):
    where = str(tmp_path / name) if "." in name else name
    if text is not None:
        Path(where).write_text(text)
    monkeypatch.setenv("COMMPASS_PROFILE", where)
    result = run("doctor")
    assert result.exit_code == 2
    assert f"COMMPASS_PROFILE={where}" in result.stderr
    assert said in result.stderr
    assert "assumes one" not in result.stdout
    assert "distributed" in result.stdout  # all else is told as well


# tables


def test_numbers_and_names_of_a_table_stay_whole(monkeypatch: pytest.MonkeyPatch, capsys):
    table = tables.plain_table("codec", "a number", "why", folded=("why",))
    table.add_row(
        "rotated(bits=6)", "0.0128 of all", "since it gains much more than the others " * 3
    )
    for width in (20, 30, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        tables.console_for(table).print(table)
        shown = capsys.readouterr().out
        assert "rotated(bits=6)" in shown
        assert "0.0128 of all" in shown
        assert len(shown.splitlines()) > 4  # the text goes on
    monkeypatch.delenv("COLUMNS")
    tables.console_for(table).print(table)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_progress_is_shown_on_a_terminal_alone(capsys, monkeypatch: pytest.MonkeyPatch):
    with progress("simulate") as told:
        told(1, 2, "tracing")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("simulate") as told:
        told(1, 2, "tracing")
    assert "tracing" in capsys.readouterr().err


def test_doctor_tells_the_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (8, 0)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H" if index else "A")
    assert doctor.gpus() == ("1 x A (capability 8.0, no fp8), 2 x H (capability 9.0, fp8)", True)


# the whole


def test_version_and_help():
    assert re.fullmatch(r"commpass \d+\.\d+\S*\n", run("--version").stdout)
    shown = run("--help").stdout
    for command in ("explain", "graph", "diff", "doctor"):
        assert re.search(rf"\b{command}\b", shown)
        assert run(command, "--help").exit_code == 0


def test_the_console_script_starts():
    import subprocess

    script = shutil.which("commpass", path=str(Path(sys.executable).parent)) or pytest.skip(
        "not installed"
    )
    done = subprocess.run(
        [script, "explain", "no-such-dump"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "commpass: no-such-dump: no such file or folder\n"


def test_what_a_kernel_writes_is_drawn_as_its_result():
    shown = draw.View(
        "",
        (
            node("x", "aten.mm.default"),
            node("wire", draw.BUFFER),
            node("encode", draw.KERNEL, "x", "wire"),
            node("gather", "commpass.all_gather_into_tensor.default", "wire"),
            node("values", draw.BUFFER),
            node("half", draw.KERNEL, "gather", "values"),
            node("other", draw.KERNEL, "gather", "values"),
            node("more", draw.BUFFER),
            node("after", draw.KERNEL, "values", "more"),
            node("output", "output", "more"),
        ),
    )
    edges = set(shown.edges())
    assert {("x", "encode"), ("encode", "gather"), ("after", "output")} <= edges
    assert {("half", "after"), ("other", "after")} <= edges
    assert not {("wire", "gather"), ("values", "after"), ("more", "output")} & edges
