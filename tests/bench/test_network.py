"""Test the parts of benchmarks.network that need no network: bytes to send, rows, ratios, command
line, picture."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex

from benchmarks.network import (
    calls,
    cli,
    data_parallel,
    levels,
    never_slower,
    plot,
    readme_picture,
    shared,
    steps,
)
from benchmarks.network.data_ways import WAYS
from commpass.collectives import Payload, Request, read_stages
from commpass.plan.stage import Stage
from commpass.report.colours import colour_of
from commpass.report.plots import new_figure

MIB = 2**20
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("all_reduce", (1, 1.5)),
        ("reduce_scatter", (0.5, 0.75)),
        ("all_to_all", (0.5, 0.75)),
        ("all_gather", (1, 3)),
    ],
)
def test_bytes_that_leave_a_rank(kind, shares):
    assert [calls.leaves(kind, ranks, MIB) for ranks in (2, 4)] == [n * MIB for n in shares]


def test_bytes_of_stages():
    assert calls.sent(Stage(role="encode", values=100), 4) == 0
    assert calls.sent(Stage(role="exchange", kind="all_to_all", leaving=75), 4) == 75
    assert calls.sent(Stage(role="exchange", kind="all_gather", leaving=25), 4) == 75


def test_times_of_bytes():
    assert calls.ideal_ms(MIB, 1) == pytest.approx(8.388608)
    assert calls.ideal_ms(MIB, 0.1) == pytest.approx(83.88608)


@pytest.mark.parametrize(("spec", "share"), [("two_shot", 2.0), ("hierarchical(node=2)", 1.5)])
def test_bytes_that_leave_a_node(spec, share):
    """A quarter of the tensor is a rank's own part.

    With two_shot, each rank of a node sends a quarter to each of the two ranks of the other node,
    in both stages: 2 x 2 x 2 quarters. With levels, it sends one quarter to its counterpart, which
    owns that part, and its own part to both: 2 x 3 quarters.
    """
    numel = 1 << 20
    request = Request("0", 4)
    found = read_stages("all_reduce", spec, "int8", Payload(numel, 1, torch.float32), request)
    wire = numel * 8.125 / 8
    assert levels.uplink(found.stages, 4) == pytest.approx(share * wire, rel=0.01)


def found(**ms):
    """Return the results of two ranks; the second takes a millisecond more."""
    return [
        {name: {"ms": [n + rank for n in times], "cpu_ms": [1.0]} for name, times in ms.items()}
        for rank in (0, 1)
    ]


def test_rows_are_of_the_slowest_rank():
    known = {"ranks": 2, "gbit": 1.0, "KiB": 1024}
    ranks = found(plain=[19.0, 9.0, 39.0], ours=[9.0, 9.0, 9.0])
    for each in ranks:
        stage = Stage(role="exchange", kind="all_to_all", leaving=MIB // 4)
        each["ours"] |= {"codec": "int8", "stages": (stage, stage)}
    plain, ours = calls.rows_of(ranks, known, dict.fromkeys(("plain", "ours"), MIB))
    assert plain["ms"] == [15.0, 20.0, 30.0]
    assert plain["share"] == pytest.approx(8.388608 / 20)
    assert ours["share"] == pytest.approx(8.388608 / 2 / 10)
    shared.compare([plain, ours], "name", "plain", "of_plain")
    assert (plain["of_plain"], ours["of_plain"]) == (1.0, 2.0)


def test_call_that_is_left_alone_sends_what_torch_sends():
    ranks = found(plain=[9.0, 9.0], ours=[9.0, 9.0])
    for each in ranks:
        each["ours"] |= {"codec": None, "stages": (), "unchanged": True}
    plain, ours = calls.rows_of(
        ranks, {"ranks": 2, "gbit": 1.0}, dict.fromkeys(("plain", "ours"), MIB)
    )
    assert ours["ideal_ms"] == plain["ideal_ms"] == pytest.approx(8.388608)


def test_pairs_are_of_calls_in_the_same_turn():
    ranks = found(plain=[19.0, 39.0, 9.0], ours=[9.0, 19.0, 19.0])
    assert calls.pairs(ranks, "ours") == [1.25, 2.0, 2.0]
    assert calls.pairs(ranks, "plain") == [1.0, 1.0, 1.0]


def test_worst_is_of_those_that_were_changed():
    row = {"kind": "all_reduce", "KiB": 4, "gbit": 1.0, "name": "balanced"}
    rows = [
        {**row, "name": "plain", "pairs": [1.0, 1.0, 1.0]},
        {**row, "unchanged": True, "pairs": [0.4, 0.5, 0.6]},
        {**row, "unchanged": False, "pairs": [0.8, 1.2, 1.3]},
        {**row, "unchanged": False, "pairs": [0.85, 0.9, 1.5], "KiB": 16},
    ]
    assert never_slower.remarks(rows) == [
        "unchanged: 1 of 3",
        "worst of the others: 0.90 times plain (all_reduce, 16 KiB, 1 Gbit/s, balanced)",
    ]
    assert never_slower.remarks(rows[:2]) == ["unchanged: 1 of 1"]


@pytest.mark.parametrize(
    ("repeats", "seconds", "turns"), [(4, 60.0, 4), (40, 1e-9, 15), (4, 1e-9, 4)]
)
def test_repetitions_are_bounded_by_time(repeats, seconds, turns, fake_group):
    fake_group(2)
    found = shared.take_turns({"plain": lambda: None, "ours": lambda: None}, repeats, seconds)
    assert {name: len(row["ms"]) for name, row in found.items()} == {"plain": turns, "ours": turns}


def test_waiting_is_what_exchanges_take():
    took = {
        "_c10d_functional::wait_tensor": 3e6,
        "_c10d_functional::all_reduce_": 1e6,
        "commpass::all_to_all_single": 5e5,
        "commpass::kernel_": 7e6,
        "aten::mm": 9e6,
    }
    assert steps.waiting(took) == pytest.approx(4.5)


def step_found(**ms):
    ranks = found(**ms)
    for number, each in enumerate(ranks):
        for row in each.values():
            row |= {"sites": 4, "compressed": 2, "exposed": 0.2 + 0.2 * number}
    return ranks


def test_rows_of_steps():
    known = {"model": "demo", "ranks": 2, "gbit": 1.0}
    plain, ours = steps.step_rows(step_found(plain=[199.0, 199.0], balanced=[99.0, 99.0]), known)
    assert ours["of_plain"] == 2.0
    assert plain["exposed_ms"] == pytest.approx(0.3 * 200)


def learned(steps=5, **ms):
    """Return the results of two ranks in some steps, of which the first three warm up; the second
    takes a millisecond more."""
    found = [{}, {}]
    for rank, each in enumerate(found):
        for name, time in ms.items():
            times = [time + rank] * (steps - shared.WARM_UP)
            row = {"ms": times, "cpu_ms": [80.0 + rank] * len(times), "held_out": 2.0 + rank}
            row |= {"ran_ms": [900.0] * 3 + [60.0] * len(times), "queued_ms": [10.0] * steps}
            row |= {"sent": [10**9] * 3 + [10**6 * (1 + rank)] * len(times), "parameters": 10}
            row |= {"loss": [float(rank + step) for step in range(steps)]}
            each[name] = row | {"sites": None, "compressed": None}
    return found


def test_rows_of_data_parallel_training():
    found = learned(compute=99.0, ddp=299.0, int8=199.0)
    known = {"ranks": 2, "gbit": 1.0}
    compute, ddp, int8 = data_parallel.way_rows(found, known)
    assert [row["exposed_ms"] for row in (compute, ddp, int8)] == [0, 200, 100]
    assert (ddp["less_exposed"], int8["less_exposed"]) == (1, 2)
    assert compute["less_exposed"] is compute["of_wire"] is compute["more_loss"] is None
    assert int8["wire_ms"] == 16  # 2 MB, of the busier rank, without the warm-up steps
    assert int8["of_wire"] == 100 / 16
    assert int8["waits_ms"] == 199.5 - 60 - 10
    assert int8["held_out"] == 2.5


def test_losses_over_time_leave_compiling_out():
    found = learned(steps=14, compute=99.0, ddp=299.0, int8=199.0)
    for each in found:  # a slow step is not the first
        each["int8"]["ms"][4] = 999.0
    _, ddp, int8 = data_parallel.way_rows(found, {"ranks": 2, "gbit": 1.0})
    assert ddp["elapsed_s"] == pytest.approx([0.3 * step for step in range(1, 15)])
    assert int8["elapsed_s"][6:8] == pytest.approx([1.4, 2.399])
    assert int8["losses"][:3] == [0.5, 1, 1.5]  # means over ranks, then over the steps so far
    assert int8["losses"][-1] == 9  # of the steps 4.5 to 13.5
    assert ddp["by_s"] == int8["by_s"] == int8["elapsed_s"][-1]
    assert int8["loss_by"] == 9
    assert ddp["loss_by"] == ddp["losses"][10]  # the 12th step ends at 3.6 s, and this is 3.599


def test_baseline_of_a_way_is_run_too():
    assert data_parallel.taking_part(["int8"]) == ["ddp", "compute", "int8"]
    assert data_parallel.taking_part(["graph"]) == ["ddp", "compute", "graph-alone", "graph"]
    assert all(WAYS[way.alone].alone == way.alone for way in WAYS.values())


def test_own_cores_need_as_many_cores_as_ranks(capsys):
    cores = len(os.sched_getaffinity(0))
    _, options = cli.parsed(["--own-cores", "--only", "steps", "--ranks", str(cores)])
    assert cli.told(cli.MEASUREMENTS["steps"], options).own_cores
    with pytest.raises(SystemExit):
        cli.parsed(["--own-cores", "--only", "steps", "--ranks", str(cores + 1)])
    assert f"{cores + 1} ranks, but {cores} cores" in capsys.readouterr().err


def told(*arguments):
    options = cli.parsed(list(arguments))[1]
    return {name: cli.told(cli.MEASUREMENTS[name], options) for name in options.only}


def test_options_are_given_or_quick_or_usual():
    usual, quick = told()["levels"], told("--quick")["levels"]
    assert (usual.repeats, quick.repeats) == (9, 3)
    assert quick.codecs == usual.codecs == ["int8"]
    both = told("--quick", "--repeats", "5", "--only", "levels", "gathers")
    assert [each.repeats for each in both.values()] == [5, 5]
    assert not hasattr(both["gathers"], "codecs")


@pytest.mark.parametrize("name", list(cli.MEASUREMENTS))
def test_quick_has_no_options_of_its_own(name):
    measurement = cli.MEASUREMENTS[name]
    assert measurement.quick.keys() <= measurement.usual.keys()
    assert measurement.usual.keys() <= (cli.LISTS | cli.SINGLE).keys()
    assert all(
        n >= 9
        for n in (
            measurement.usual.get("repeats", 9),
            measurement.usual.get("steps", 12) - shared.WARM_UP,
        )
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "levels", "--ways", "ddp"], "--ways: is for data_parallel, none of"),
        (["--only", "levels", "--plot", "x.png"], "--plot: shows reduces, steps, data_parallel"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--repeats", "1"], "--repeats 1: must be at least 2, for quartiles"),
        (["--steps", "4"], "--steps 4: must be at least 5, for quartiles behind 3 that warm up"),
    ],
)
def test_unknown_options_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        cli.parsed(arguments)
    assert said in capsys.readouterr().err


def test_first_is_always_compared():
    assert shared.chosen(WAYS, ["int8", "fp16"]) == ["ddp", "fp16", "int8"]


def test_options_for_ranks_arrive():
    sent = (steps.POLICIES, levels.profile(1.0))
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_tables_show_every_column():
    rows = [{"ranks": 2, "gbit": 0.1, "ms": [1.0, 2.0, 3.0], "name": "plain", "share": None}]
    columns = {
        **shared.LINKS,
        "codec": shared.text("name"),
        "ms": shared.spread,
        "share": shared.number("share"),
    }
    table = shared.table(rows, columns)
    cells = {column.header: (*column.cells,) for column in table.columns}
    assert cells == {
        "ranks": ("2",),
        "Gbit/s": ("0.1",),
        "codec": ("plain",),
        "ms": ("2.0 [1.0, 3.0]",),
        "share": ("-",),
    }
    assert [column.justify for column in table.columns] == ["right"] * 2 + ["left"] + ["right"] * 2


def reduced():
    for gbit in (0.1, 1.0):
        for ranks in (2, 4):
            for kib in (256, 1024):
                for name, gain in (("plain", 1.0), ("int8", 2.0)):
                    row = {"gbit": gbit, "ranks": ranks, "KiB": kib, "name": name}
                    yield {**row, "share": 0.5 * gain, "of_plain": gain}


def test_picture_is_drawn(tmp_path):
    known = {"model": "demo", "ranks": 2, "gbit": 1.0}
    rows = {
        "reduces": list(reduced()),
        "steps": steps.step_rows(step_found(plain=[199.0, 199.0], balanced=[99.0, 99.0]), known),
        "levels": [],
    }
    plot.draw(rows, tmp_path / "all.png")
    plot.draw({"steps": rows["steps"]}, tmp_path / "steps.png")
    found = learned(steps=9, compute=99.0, ddp=299.0, int8=199.0)
    plot.draw({"data_parallel": data_parallel.way_rows(found, known)}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    sizes = []
    for name in ("all.png", "steps.png"):
        made = (tmp_path / name).read_bytes()
        assert made.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(made[20:24]))
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=3)  # a panel each for gains and steps


def test_picture_has_one_rate_and_the_fewest_ranks():
    axes = new_figure(5, 4).subplots()
    plot.gains(axes, plot.at_one_rate(reduced()))
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["int8"].get_xydata().tolist() == [[256.0, 2.0], [1024.0, 2.0]]
    assert lines["int8"].get_color() == colour_of("int8")
    assert axes.get_title("left") == "all_reduce over 2 ranks, 1 Gbit/s"


def test_later_files_replace_measurements_of_earlier_ones(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for gain, file in enumerate(files, 2):
        row = {"gbit": 1.0, "ranks": 2, "KiB": 256, "name": "int8", "of_plain": gain}
        other = {**row, "KiB": 256 * gain}
        file.write_text(json.dumps({"rows": {"reduces": [row, other]}}))
    rows = plot.merged(files)["reduces"]
    assert {(row["KiB"], row["of_plain"]) for row in rows} == {(256, 3), (512, 2), (768, 3)}


def test_readme_picture_shows_the_numbers_of_the_files():
    shown = readme_picture.panels()
    figure = readme_picture.draw(shown)
    by_file = [
        json.loads((readme_picture.RESULTS / name).read_text())["rows"]["steps"]
        for name in readme_picture.FILES
    ]
    latest = {
        (row["ranks"], row["gbit"], row["policy"]): row
        for rows in by_file
        for row in rows
        if row["model"] == "llama" and row["policy"] in readme_picture.POLICIES
    }
    rows = list(latest.values())
    assert len(rows) >= 12
    by_title = {axes.get_title("left"): axes for axes in figure.axes}
    drawn = {
        (title, bar.get_width(), to_hex(bar.get_facecolor()))
        for title, axes in by_title.items()
        for bar in axes.patches
    }
    assert drawn == {
        (f"{row['ranks']} ranks, {row['gbit']:g} Gbit/s", row["ms"][1], colour_of(row["policy"]))
        for row in rows
    }


def test_readme_shows_the_picture():
    assert "](docs/steps.png)" in (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_reported(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw: it shows reduces, steps, data_parallel"):
        plot.draw({"levels": [{"gbit": 1.0}]}, tmp_path / "none.png")
