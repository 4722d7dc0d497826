"""commpass graph: one box per site or per node, as text, Graphviz source and drawing."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dumps import ODD, chain, coded, fails, layered, make, node, run, words
from hypothesis import given
from hypothesis import strategies as st

from commpass import plan
from commpass.plan import dump
from commpass.report.graph import dot as dots
from commpass.report.graph import picture, sites
from commpass.report.graph.view import of_sites


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One run: a forward graph with two sites, a backward graph with none."""
    for one in (make(), make("backward", ())):
        dump.write(tmp_path / "dump", one)
    return tmp_path / "dump"


NODES = ("--graph", 0, "--level", "nodes")


def test_text_has_one_marked_line_a_node(folder: Path):
    lines = run("graph", folder, *NODES, width=60).stdout.splitlines()
    assert (
        lines[0]
        == "graph 0: forward, after (10 nodes, 1 site uncompressed, 1 rewritten with 3 inserted"
        " nodes)"
    )
    assert [line[0] for line in lines[3:]] == [*"   +*+*   "]
    assert re.fullmatch(
        r"  mm +=" + re.escape(f" aten.mm.default(x, {ODD})") + r" +bf16\[4096, s0\] +.*", lines[5]
    )
    assert lines[6].endswith("for all_reduce_1")
    before = run("graph", folder, *NODES, "--before").stdout.splitlines()
    assert [line[0] for line in before[3:]] == [*" *"]


def test_newest_graph_is_shown_and_the_others_are_reported(folder: Path, tmp_path: Path):
    for _ in range(2):
        dump.write(folder, make())
    shown = run("graph", folder, "--level", "nodes")
    assert shown.stdout.startswith("graph 3: forward")
    told = (
        "this is graph 3 (forward) of run run-1, the newest of 4; --graph picks: 0 (forward), 1"
        " (backward)"
    )
    assert told in shown.stderr
    assert run("graph", folder, *NODES).stderr == "this is graph 0 (forward) of run run-1\n"
    written = run("graph", folder, *NODES, "-o", tmp_path / "out.txt")
    assert str(tmp_path / "out.txt") in written.stdout
    assert (tmp_path / "out.txt").read_text() == run("graph", folder, *NODES).stdout


def test_option_around_hides_what_is_far_and_says_so(tmp_path: Path):
    path = dump.write(tmp_path, make(nodes=chain(30)))
    shown = run("graph", path, "--level", "nodes", "--around", 1).stdout
    assert (
        "31 nodes farther than 1 from a site hidden" in shown
    )  # of 37: six are the site, its nodes, mm and add_0
    assert "add_0 " in shown
    assert "add_1 " not in shown
    assert "hidden" not in run("graph", path, "--level", "nodes", "--around", "all").stdout
    drawn = parse_dot(run("graph", path, "--level", "nodes", "--around", 1, "--dot").stdout)
    assert ["dashed" in drawn.nodes[name].get("style", "") for name in ('"add_0"', '"decode"')] == [
        True,
        False,
    ]
    fails(
        run(
            "graph",
            dump.write(tmp_path, make(nodes=(node("x", "x"),))),
            "--level",
            "nodes",
            "--around",
            1,
        ),
        "--around all",
    )


Graph = namedtuple("Graph", "nodes edges clusters looks")


def parse_dot(text: str) -> Graph:
    """Parse the subset of DOT that is written here, with DOT's rules for strings; anything else is
    an error."""
    string = r'"(?:[^"\\\n]|\\.)*"'
    token = rf"{string}|[\w#.]+|->|[{{}}\[\];=,]"
    assert re.sub(rf"{token}|\s", "", text) == ""
    body = re.fullmatch(rf"digraph {string} \{{(.*)\}}\s*", text, re.DOTALL)
    assert body
    found = Graph({}, [], [], [])
    attribute = rf"\w+=(?:{string}|[\w#.]+)"
    for line in filter(None, map(str.strip, body[1].splitlines())):
        if match := re.fullmatch(rf"({string}) \[({attribute}(?:, {attribute})*)\];", line):
            found.nodes[match[1]] = dict(re.findall(rf"(\w+)=({string}|\w+)", match[2]))
            if found.clusters and found.clusters[-1] is not None:
                found.clusters[-1].append(match[1])
        elif match := re.fullmatch(rf"({string}) -> ({string})(?: \[({attribute}.*)\])?;", line):
            found.edges.append((match[1], match[2]))
            found.looks.append(match[3] or "")
        elif re.fullmatch(r"subgraph cluster_\d+ \{", line):
            found.clusters.append([])
        elif line == "}":
            found.clusters.append(None)
        else:
            assert re.fullmatch(rf"((node|edge) \[)?{attribute}([;,] {attribute})*\]?;", line), line
    return found


def test_dot_is_valid_whatever_the_names(folder: Path, tmp_path: Path):
    result = run("graph", folder, *NODES, "--dot")
    drawn = parse_dot(result.stdout)
    names = {
        name: name.replace("\\", "\\\\").replace('"', '\\"') for name in (n.name for n in chain(3))
    }
    assert set(drawn.nodes) == {f'"{name}"' for name in names.values()}
    assert set(drawn.edges) == {
        (f'"{names[i]}"', f'"{names[n.name]}"') for n in chain(3) for i in n.inputs
    }
    assert drawn.clusters == [['"encode"', '"gather"', '"decode"'], None]
    assert "labeljust=l" in result.stdout  # beside the arrow into the frame, not below it
    fills = [
        drawn.nodes[f'"{name}"']["fillcolor"] for name in ("mm", "all_reduce", "encode", "gather")
    ]
    assert len(set(fills)) == 3
    assert fills[1] == fills[3]  # what is exchanged
    assert "bf16[4096, s0]" in drawn.nodes['"mm"']["label"]
    run("graph", folder, *NODES, "--dot", "--output", tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text() == result.stdout


needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None, reason="an SVG needs Graphviz: apt-get install graphviz"
)


def texts_of(path: Path) -> set[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("}svg")
    return {
        words("".join(found.itertext())) for found in root.iter("{http://www.w3.org/2000/svg}text")
    }


@needs_dot
def test_svg_is_xml_with_every_label(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("graphviz")
    monkeypatch.chdir(tmp_path)
    result = run("graph", folder / "0000-forward.json", "--svg", "--level", "nodes")
    assert result.stdout == "wrote graph-0000-forward-after.svg\n"
    found = texts_of(Path("graph-0000-forward-after.svg"))
    assert {"mm", "aten.mm.default", "encode", "for all_reduce_1", ODD} <= found
    assert any("blue: inserted for a collective" in text for text in found)
    assert any("orange: travels between ranks" in text for text in found)
    run("graph", folder, "--graph", 0, "--svg", "--before", "-o", "b.svg")
    assert "encode" not in Path("b.svg").read_text()


def test_graph_knows_which_there_are(folder: Path):
    fails(run("graph", folder, "--graph", 7), "no graph 7", "0 (forward), 1 (backward)")
    fails(
        run("graph", folder, "--dot", "--graph", 0, "-o", folder / "no" / "x.dot"),
        "cannot be written",
    )
    empty = dump.write(folder, make(nodes=(node("x", "x"),)))
    fails(run("graph", empty), "has no collective to draw", "--level nodes")


@pytest.mark.parametrize(
    "flags",
    [
        ("--svg", "--dot"),
        ("--dot", "--text"),
        ("--before", "--after"),
        ("--around", "-1"),
        ("--around", "near"),
        ("--level", "edges"),
        ("--level", "nodes", "--site", "1"),
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
def test_graph_is_written_under_no_other_ending(folder: Path, tmp_path: Path, flag: str, name: str):
    result = run("graph", folder, "--graph", 0, flag, "-o", tmp_path / name, width=400)
    assert result.exit_code == 2
    for part in ("--output", f"{flag} writes ", name, f"must end in .{flag[2:]}"):
        assert part in result.stderr
    assert not (tmp_path / name).exists()


def test_svg_without_graphviz_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    args = ("graph", folder, "--graph", 0, "--svg")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "graphviz", None)
        fails(run(*args), "pip install 'commpass[graph]'", "apt-get install graphviz")
    pytest.importorskip("graphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    fails(run(*args), "the program dot", "apt-get install graphviz", "--dot and --text")


def test_reading_dumps_needs_neither_torch_nor_the_drawing_libraries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("torch", "graphviz", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for args in (
        ("explain", folder),
        ("graph", folder, "--graph", 0),
        ("graph", folder, *NODES),
        ("graph", folder, "--graph", 0, "--dot"),
        ("diff", folder, folder),
    ):
        assert run(*args).exit_code == 0


def test_buffers_that_a_kernel_writes_are_drawn_as_its_results():
    edges = picture.inputs_of(
        (
            node("x", "aten.mm.default"),
            node("wire", picture.BUFFER),
            node("encode", picture.KERNEL, "x", "wire"),
            node("gather", "commpass.all_gather_into_tensor.default", "wire"),
            node("values", picture.BUFFER),
            node("half", picture.KERNEL, "gather", "values"),
            node("other", picture.KERNEL, "gather", "values"),
            node("more", picture.BUFFER),
            node("after", picture.KERNEL, "values", "more"),
            node("output", "output", "more"),
        )
    )
    edges = {(source, user) for user, sources in edges.items() for source in sources}
    assert {("x", "encode"), ("encode", "gather"), ("after", "output")} <= edges
    assert {("half", "after"), ("other", "after")} <= edges
    assert not {("wire", "gather"), ("values", "after"), ("more", "output")} & edges


# One box a site


def lines_of(shown: picture.Picture) -> list[str]:
    return [" | ".join(box.lines) for box in shown.boxes]


def ways(shown: picture.Picture) -> set[tuple[str, str]]:
    """Return the arrows, by the first line of the boxes."""
    first = {box.name: box.lines[0] for box in shown.boxes}
    return {(first[each.source], first[each.user]) for each in shown.arrows}


def test_one_box_a_site_between_boxes_of_what_computes():
    shown = of_sites(layered(2))
    saved = "int8/two-shot x3 | 8 MiB → 2 MiB · 100 → 40 us"
    assert lines_of(shown) == [
        "layers.0.attn: 2 operators",
        f"#1 all_reduce · layers.0.attn.o | {saved}",
        "layers.0.attn, layers.0.mlp: 3 operators",
        f"#2 all_reduce · layers.0.mlp.o | {saved}",
        "layers.0.mlp, layers.1.attn: 3 operators",
        f"#3 all_reduce · layers.1.attn.o | {saved}",
        "layers.1.attn, layers.1.mlp: 3 operators",
        f"#4 all_reduce · layers.1.mlp.o | {saved}",
        "layers.1.mlp, head: 2 operators, only for outputs",
    ]
    boxes = [box.lines[0] for box in shown.boxes]
    assert ways(shown) == set(pairwise(boxes))  # residuals follow from these arrows
    assert shown.title == "graph 0: forward, after (4 sites, times are predicted)"


def test_compute_that_no_collective_waits_for_has_a_box_beside_it():
    one = layered(1)
    extra = node("weight", "aten.mm.default", "act_attn_0", module="layers.0.attn")
    nodes = (*one.after, extra)
    shown = of_sites(dataclasses.replace(one, after=nodes))
    beside = "layers.0.attn: 1 operator, only for outputs"
    assert ("layers.0.attn: 2 operators", beside) in ways(shown)
    assert not any(source == beside for source, _ in ways(shown))


def test_site_opens_to_what_it_does():
    for asked in ({"expand": ("ar_mlp_0",)}, {"site": "2", "radius": 9}):
        shown = of_sites(layered(2), **asked)
        inside = [box for box in shown.boxes if box.cluster]
        assert {box.cluster for box in inside} == {"#2 layers.0.mlp.o"}
        assert [box.lines[0] for box in inside] == [
            *("encode", "exchange: all_gather", "wait", "decode")
        ]
        assert [box.kind for box in inside] == ["inserted", "transfer", "inserted", "inserted"]
        assert inside[1].lines[1] == "1 MiB"
        assert inside[0].lines[1] == "int8"
        places = ("encode", "exchange: all_gather"), ("exchange: all_gather", "wait")
        assert {*places, ("wait", "decode")} <= ways(shown)
        assert len(shown.boxes) == 9 - 1 + 4


def test_surroundings_alone_with_dashed_ways_between():
    shown = of_sites(layered(3), module="layers.*.mlp", radius=0)
    heads = [
        f"#{number} all_reduce · layers.{layer}.mlp.o" for layer, number in enumerate((2, 4, 6))
    ]
    assert [box.lines[0] for box in shown.boxes] == heads
    assert [arrow.hidden for arrow in shown.arrows] == [True, True]
    assert ways(shown) == set(pairwise(heads))
    text = dots.dot(shown)
    assert parse_dot(text).looks == ["style=dashed, weight=8"] * 2
    assert "dashed arrow: by way of what is not shown" in text
    near = of_sites(layered(3), module="layers.0.mlp")
    assert len(near.boxes) == 3
    assert not any(arrow.hidden for arrow in near.arrows)


def test_many_layers_are_folded_and_all_of_them_are_not():
    one = layered(40)
    shown = of_sites(one)
    assert lines_of(shown) == [
        "layers.0.attn: 2 operators",
        "all_reduce · layers.*.attn.o x 40 | int8/two-shot x3 | each 8 MiB → 2 MiB · 100 → 40 us",
        "layers.*.attn, layers.*.mlp x 40: 3 operators each",
        "all_reduce · layers.*.mlp.o x 40 | int8/two-shot x3 | each 8 MiB → 2 MiB · 100 → 40 us",
        "layers.*.mlp, layers.*.attn x 39: 3 operators each",
        "layers.39.mlp, head: 2 operators, only for outputs",
    ]
    assert [arrow.label for arrow in shown.arrows if arrow.label] == ["next layer, x 39"]
    assert len(of_sites(one, every=True).boxes) == 161
    assert len(of_sites(one, module="layers.7").boxes) == 5  # a requested module is not folded
    assert len(of_sites(layered(30)).boxes) == 121


def test_chunks_of_one_collective_are_one_box():
    one = layered(1)
    parts = tuple(
        dataclasses.replace(one.plan.sites[0], name=f"part_{n}", bytes=1 << 20, chunks=1)
        for n in range(2)
    )
    split = plan.Split(site="whole", into=("part_0", "part_1"), rows=(8, 8))
    nodes = [node("x", "x"), node("mm", "aten.mm.default", "x", module="a")]
    nodes += [*coded("part_0", "mm", "a"), *coded("part_1", "mm", "a")]
    nodes += [node("cat", "aten.cat.default", "decode_part_0", "decode_part_1", module="b")]
    both = dataclasses.replace(one.plan, sites=parts, split=(split,))
    one = dataclasses.replace(one, plan=both, after=tuple(nodes))
    assert lines_of(of_sites(one)) == [
        "a: 1 operator",
        "#1-2 all_reduce · a | int8/two-shot in 2 chunks | 2 MiB → 4 MiB · 200 → 80 us",
        "b: 1 operator, only for outputs",
    ]
    opened = [box.lines[0] for box in of_sites(one, site="2").boxes]
    assert opened.count("encode") == opened.count("decode") == 2


def test_option_before_says_what_became_of_a_collective():
    one = layered(1)
    step = plan.Simplification(rule="same", site="gone", into="ar_attn_0", saved_bytes=8)
    reduce = "_c10d_functional.all_reduce.default"
    nodes = (
        node("x", "x"),
        node("ar_attn_0", reduce, "x", site="ar_attn_0", module="a"),
        node("gone", reduce, "x", site="gone", module="b"),
        node("wait", "_c10d_functional.wait_tensor.default", "gone", module="b"),
    )
    one = dataclasses.replace(
        one, before=nodes, plan=dataclasses.replace(one.plan, simplified=(step,))
    )
    assert lines_of(of_sites(one, "before")) == [
        "#1 all_reduce · a | 8 MiB · 100 us",
        "all_reduce · b | same: ar_attn_0",
    ]


def test_site_or_module_that_is_not_there_is_reported_with_the_nearest(tmp_path: Path):
    path = dump.write(tmp_path, layered(2))
    fails(run("graph", path, "--site", 5), "no site 5", "it has 4, from 1 on")
    fails(run("graph", path, "--site", "ar_attn_7"), "did you mean 'ar_attn_")
    fails(run("graph", path, "--expand", "ar_mlp"), "no site 'ar_mlp' in graph 0")
    fails(run("graph", path, "--module", "layers.2"), "'layers.2'", "Known:")


def test_text_has_a_line_a_box_with_those_that_it_waits_for(tmp_path: Path):
    path = dump.write(tmp_path, layered(2))
    lines = run("graph", path, width=140).stdout.splitlines()
    assert re.fullmatch(r"1 +layers.0.attn: 2 operators +- *", lines[5])
    assert re.fullmatch(r"2 +\+ +#1 all_reduce · layers.0.attn.o · .* +1 *", lines[6])
    some = run("graph", path, "--module", "**.mlp", "--around", 0, width=140).stdout
    assert re.search(r"^2 +\+ +#4 .* \(1\) *$", some, re.MULTILINE)
    run("graph", path, "-o", tmp_path / "g.txt")
    assert "#4 all_reduce · layers.1.mlp.o" in (tmp_path / "g.txt").read_text()


@needs_dot
def test_thousand_sites_are_drawn_small(tmp_path: Path):
    pytest.importorskip("graphviz")
    path = dump.write(tmp_path, layered(500))
    assert run("graph", path, "--svg", "-o", tmp_path / "g.svg").exit_code == 0
    found = texts_of(tmp_path / "g.svg")
    assert "all_reduce · layers.*.mlp.o x 500" in found
    assert len(found) < 20


@pytest.mark.slow
@given(st.data())
def test_boxes_hold_every_operator_once_and_form_no_circle(data):
    """Random graphs with sites: the drawing has the dependencies of the graph."""
    many = data.draw(st.integers(2, 24))
    nodes = [node("n0", "n0")]
    for at in range(1, many):
        sources = data.draw(st.lists(st.integers(0, at - 1), min_size=1, max_size=3))
        is_site = data.draw(st.booleans()) or at == 1
        target = "_c10d_functional.all_reduce.default" if is_site else "aten.mm.default"
        names = [f"n{each}" for each in sources]
        nodes.append(node(f"n{at}", target, *names, site=f"n{at}" if is_site else None))
    shown = sites.sketch(make(sites=(), nodes=tuple(nodes)), "after")
    inside = [each.name for some in shown.members.values() for each in some]
    assert len(inside) == len(set(inside))
    assert len(inside) + shown.left_out == many - 1
    assert picture.in_order(shown.edges) is not None
    box = {each.name: name for name, some in shown.members.items() for each in some}
    reached: dict[str, set[str]] = {}
    for name in picture.in_order(shown.edges):
        reached[name] = {name}.union(*(reached[each] for each in shown.edges[name]))
    for user in nodes[1:]:
        for source in user.inputs:
            if source in box and user.name in box:
                assert box[source] in reached[box[user.name]]


def test_dashed_way_that_follows_from_another_is_not_drawn():
    edges = {"a": (), "b": ("a",), "p": ("a",), "q": ("b",), "c": ("p", "q"), "d": ("a", "c")}
    assert picture.between(edges, {"a", "b", "c"}) == [("b", "c")]
    assert picture.between(edges, {"a", "d"}) == []
    assert picture.between(edges, {"b", "p", "d"}) == [("b", "d"), ("p", "d")]
