"""Simulated steps of a model on clusters, against times computed from formulas."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from doc_blocks import block_under, blocks_of
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from typer.testing import CliRunner

import commpass
from commpass import Policy, Rule
from commpass.cli import app
from commpass.costmodel import KernelRate, Kernels, Link, Profile, profile
from commpass.errors import CommpassError, PolicyError
from commpass.plan import dump
from commpass.report.simulate import build_of, draw, mesh_of, millis, run, table
from commpass.simulate import Simulated

NO_COMPUTE = Kernels(launch_us=0.0, other=KernelRate(0, 0), gflops=1e12, gbytes_per_s=1e12)
CLUSTER = Profile("round numbers", Link(10.0, 1.0), kernels=NO_COMPUTE)
SOURCE = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Own(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def build(mesh, rows=512):
    model = nn.Sequential(nn.Linear(64, 256, bias=False), Own(), nn.Linear(256, 64, bias=False))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return model, (torch.randn(rows, 64, requires_grad=True),)

def asks(mesh):
    def function(x):
        return x * float(x.sum())
    return function, (torch.randn(4),)

def nothing(mesh):
    return None
"""


def build(mesh, rows: int = 512):
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model.to(torch.float64), (
        torch.randn(rows, 64, dtype=torch.float64, requires_grad=True),
    )


def all_reduce_ms(nbytes: int, ranks: int) -> float:
    """Return the time of a ring on the link above, from the formula."""
    return (2 * (ranks - 1) * 10.0 + 2 * (ranks - 1) / ranks * nbytes / 1000) / 1000


@pytest.mark.slow
def test_step_is_its_exchanges_where_nothing_is_computed():
    (found,) = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off"])
    each = all_reduce_ms(512 * 64 * 8, 4)
    assert (found.policy, found.ranks, found.swept) == ("off", 4, None)
    assert (found.sites, found.compressed, found.remarks) == (2, 0, ())  # one in each direction
    assert found.wire_bytes == 2 * 512 * 64 * 8
    assert found.step_ms == pytest.approx(2 * each, rel=0.01)
    assert found.exposed_ms == pytest.approx(2 * each, rel=0.01)
    assert not dist.is_initialized()


def test_compute_without_exchanges_counts():
    """Matmuls of 2 x 512^3 operations each, one in forward and two in backward, at 1 TFLOP/s;
    nothing is sent."""
    computes = dataclasses.replace(NO_COMPUTE, gflops=1000.0)
    slow = dataclasses.replace(CLUSTER, kernels=computes)

    def alone(mesh):
        model = nn.Linear(512, 512, bias=False)
        return model, (torch.randn(512, 512, requires_grad=True),)

    (found,) = commpass.simulate(alone, slow, {"tp": 2}, ["balanced"])
    assert (found.sites, found.exposed_ms, found.remarks) == (0, 0.0, ())
    assert found.step_ms == pytest.approx(3 * 2 * 512**3 / 1e9, rel=0.02)


@pytest.mark.slow
def test_graph_that_is_left_untouched_counts_and_is_reported():
    skips = Policy(codecs="int8", skip="rewrite")
    plain, found = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off", skips])
    assert found.step_ms == pytest.approx(plain.step_ms)
    assert found.exposed_ms == pytest.approx(plain.exposed_ms)
    assert len(found.remarks) == 2
    assert "the policy skips pass 'rewrite'" in found.remarks[0]


@pytest.mark.slow
def test_model_of_another_dtype_before_it_is_divided():
    def converted(mesh):
        model = nn.Sequential(nn.Linear(48, 96, bias=False), nn.Linear(96, 48, bias=False))
        model = model.bfloat16()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return model, (torch.randn(32, 48, dtype=torch.bfloat16, requires_grad=True),)

    (found,) = commpass.simulate(converted, CLUSTER, {"tp": 4}, ["off"])
    assert found.wire_bytes == 2 * 32 * 48 * 2


@pytest.mark.slow
def test_inference_has_no_backward():
    (found,) = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off"], train=False)
    assert found.step_ms == pytest.approx(all_reduce_ms(512 * 64 * 8, 4), rel=0.01)


@pytest.mark.slow
def test_compressed_sites_take_less_time():
    forced = Policy(name="int8", rules=[Rule(codec="int8", algorithm="two_shot", force=True)])
    plain, coded = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off", forced])
    assert coded.compressed == 2
    assert coded.wire_bytes < plain.wire_bytes / 3
    assert coded.step_ms < plain.step_ms


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 64, 1024])
def test_dimension_of_the_mesh_is_swept(ranks):
    (found,) = commpass.simulate(
        build, CLUSTER, {"dp": 2, "tp": 2}, ["off"], sweep=("dp", [ranks // 2])
    )
    assert (found.ranks, found.swept) == (ranks, ("dp", ranks // 2))
    assert found.step_ms == pytest.approx(2 * all_reduce_ms(512 * 64 * 8, 2), rel=0.01)


@pytest.mark.every
def test_rates_and_arguments_are_swept():
    slow, fast = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off"], sweep=("gbit", [8, 80]))
    assert slow.step_ms == pytest.approx(2 * all_reduce_ms(512 * 64 * 8, 4), rel=0.01)
    assert fast.step_ms < slow.step_ms / 3
    few, many = commpass.simulate(build, CLUSTER, {"tp": 4}, ["off"], sweep=("rows", [64, 512]))
    assert few.step_ms == pytest.approx(2 * all_reduce_ms(64 * 64 * 8, 4), rel=0.01)
    assert many.step_ms == pytest.approx(slow.step_ms)


@pytest.mark.every
def test_simulation_leaves_nothing_behind():
    before = commpass.simulate(build, CLUSTER, {"tp": 4}, ["balanced"])
    assert commpass.simulate(build, CLUSTER, {"tp": 4}, ["balanced"]) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mesh": {"tp": 0}}, "must be a number of ranks"),
        ({"mesh": {"tp": 1 << 40}}, "has more than 1,048,576 ranks"),
        ({"sweep": ("tp", [1.5])}, "must be a number of ranks"),
        ({"sweep": ("gbit", [-1])}, "^gbit=-1: must be a number above 0"),
        ({"sweep": ("row", [1])}, "'row' cannot be swept.*did you mean 'rows'"),
        ({"sweep": ("intra_host_gbit", [1])}, "knows no link inside"),
        ({"sweep": ("gbits", [1])}, "'gbits' cannot be swept.*did you mean 'gbit'"),
        ({"profile": "nvlink-44"}, "did you mean 'nvlink-4'"),
        ({"policies": ["balancd"]}, "did you mean 'balanced'"),
        ({"build": lambda mesh: (torch.relu, (torch.ones(3),))}, "simulate inference"),
        ({"build": lambda mesh: None}, "must give a model and a tuple"),
        ({"build": lambda mesh: ("model", ())}, "gave str as the model"),
        ({"build": lambda: None}, r"called as <lambda>.mesh.: too many positional arguments"),
        ({"build": lambda mesh, rows: None}, "missing a required argument: 'rows'"),
        ({"build": lambda mesh: 1 / 0}, r"test_simulate.py:\d+ in <lambda>: ZeroDivisionError"),
        (
            {"mesh": {"tp": 3}},
            r"mesh tp=3: RuntimeError: a and b must have same"
            r" reduction dim.*\. \S+weight has \d+ rows or columns, which 3 ranks divide unevenly",
        ),
        ({"sweep": ("gbit", [1e308])}, "^gbit=1e.308: must be from 1e-30"),
    ],
)
def test_simulation_refuses_bad_arguments(more, said):
    asked = {"build": build, "profile": CLUSTER, "mesh": {"tp": 2}, "policies": ["off"]} | more
    with pytest.raises(CommpassError, match=said):
        commpass.simulate(**asked)
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", ["²", "-2", "2.0", "9" * 30])
def test_size_of_a_mesh_must_be_a_number(size):
    with pytest.raises(CommpassError, match="must be sizes by name, such as dp=8,tp=8"):
        mesh_of(f"dp=2,tp={size}")


def test_simulation_is_refused_if_there_are_process_groups(fake_group):
    fake_group(2)
    with pytest.raises(CommpassError, match="there must be none before"):
        commpass.simulate(build, CLUSTER, {"tp": 2})


@pytest.mark.slow
def test_links_and_policies_share_one_trace():
    built, told = [], []

    def counted(mesh):
        built.append(mesh.size())
        return build(mesh)

    found = commpass.simulate(
        counted,
        CLUSTER,
        {"tp": 4},
        ["off", "balanced"],
        sweep=("gbit", [8, 0.8]),
        progress=lambda *said: told.append(said),
    )
    assert built == [4]
    assert [(each.policy, each.swept) for each in found] == [
        (policy, ("gbit", rate)) for rate in (8, 0.8) for policy in ("off", "balanced")
    ]
    alone = commpass.simulate(build, CLUSTER, {"tp": 4}, ["balanced"], sweep=("gbit", [0.8]))
    assert found[-1:] == alone
    assert ("forward, policy balanced") in {what for _, _, what in told}
    assert {many for _, many, _ in told} == {2}


@pytest.mark.slow
def test_many_ranks_take_no_time_of_their_own():
    """In particular, a parameter is not split into as many tensors as there are ranks."""
    cut = torch.Tensor.chunk

    def no_chunk(tensor, many, *rest):
        assert many < 1000
        return cut(tensor, many, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "chunk", no_chunk)
        (found,) = commpass.simulate(wide, CLUSTER, {"tp": 2048}, ["off"])
    assert found.step_ms == pytest.approx(2 * all_reduce_ms(8 * 64 * 4, 2048), rel=0.01)


def wide(mesh):
    model = nn.Sequential(nn.Linear(64, 4096, bias=False), nn.Linear(4096, 64, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model, (torch.randn(8, 64, requires_grad=True),)


@pytest.mark.every
def test_ranks_on_hosts_are_looked_at_once(monkeypatch):
    looked = []

    def counted(hosts):
        found = list(hosts)
        looked.append(len(found))
        return itertools.groupby(found)

    profile._on_each_host.cache_clear()
    monkeypatch.setattr(profile, "groupby", counted)
    hosts = dataclasses.replace(CLUSTER, ranks_per_host=4, intra_host_link=Link(5.0, 100.0))
    commpass.simulate(build, hosts, {"tp": 32}, ["balanced"])
    assert looked.count(32) == 1


# --- the command line -----------------------------------------------------------------------------


def call(tmp_path: Path, *args: str):
    (tmp_path / "model.py").write_text(SOURCE)
    common = ["--profile", "ethernet-1g"]
    return CliRunner().invoke(
        app, ["simulate", f"{tmp_path}/model.py:{args[0]}", *common, *args[1:]]
    )


@pytest.mark.every
def test_table_and_a_picture(tmp_path):
    plot = tmp_path / "out.png"
    result = call(
        tmp_path, "build", "--mesh", "tp=2", "--sweep", "tp=2,4", "--policy", "off",
        "--policy", "balanced", "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if "balanced" in line]
    assert [(row[0], row[1]) for row in rows] == [("2", "2"), ("4", "4")]
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = call(tmp_path, "build", "--mesh", "tp=2", "--policy", "off", "--inference", "--json")
    (row,) = json.loads(result.stdout)
    assert (row["policy"], row["sites"]) == ("off", 1)


@pytest.mark.slow
def test_plans_and_graphs_are_written_with_a_run_for_each_policy(tmp_path):
    folder = tmp_path / "dump"
    result = call(
        tmp_path, "build", "--mesh", "tp=2", "--policy", "off", "--policy", "balanced",
        "--dump", str(folder), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert f"commpass explain {folder} --run balanced" in " ".join(result.stderr.split())
    assert sorted(set(dump.runs(folder).values())) == ["balanced", "off"]
    for row in json.loads(result.stdout):
        found = dump.read_run(folder, row["policy"])
        assert [one.plan.direction for one in found] == ["forward", "backward"]
        assert sum(len(one.plan.sites) for one in found) == row["sites"]
        assert sum(one.timeline.us for one in found) / 1e3 == pytest.approx(row["step_ms"], 0.01)
        assert all(one.before and one.after and one.lowered for one in found)
        assert found[0].world_size == 2
    for command in ("explain", "graph", "timeline"):
        assert CliRunner().invoke(app, [command, str(folder)]).exit_code == 0


@pytest.mark.slow
def test_example_of_the_page_prints_its_table(tmp_path, monkeypatch):
    page, heading = "docs/costmodel.md", "Simulating a cluster: `commpass simulate`"
    command, shown, *_ = [text for title, text in blocks_of(page, "") if title == heading]
    (tmp_path / "model.py").write_text(block_under(page, heading))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split() == shown.split()


def test_file_that_is_not_there(tmp_path):
    result = CliRunner().invoke(
        app, ["simulate", f"{tmp_path}/no.py:build", "--mesh", "tp=2", "--profile", "nvlink-4"]
    )
    assert result.exit_code == 2
    assert "there is no such file" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["buid", "--mesh", "tp=2"],
            "no function 'buid'; did you mean 'build'? Known: asks, build, nothing.",
        ),
        (["build", "--mesh", "tp"], "such as dp=8,tp=8"),
        (["build", "--mesh", "tp=2,tp=4"], "such as dp=8,tp=8"),
        (["build", "--mesh", "tp=2", "--sweep", "tp=x"], "such as tp=2,4,8"),
        (["asks", "--mesh", "tp=2", "--inference"], "asks for a value of a tensor at model.py:"),
        (["nothing", "--mesh", "tp=2"], "must give a model and a tuple"),
        (["build", "--mesh", "dp=2"], "asks the mesh for a dimension 'tp'; there is 'dp'"),
    ],
)
def test_bad_arguments(tmp_path, args, said):
    result = call(tmp_path, *args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def simulated(policy: str, at: float, step: float) -> Simulated:
    return Simulated(policy, 8, ("gbit", at), step, step, 2, 0, 1 << 20, ())


def test_numbers_of_a_table_are_written_alike():
    assert [millis(ms) for ms in (5356.2, 4683.0, 48.06, 0.8114, 0.0, 0.01234)] == [
        "5,356", "4,683", "48.1", "0.811", "0", "0.0123",
    ]  # fmt: skip
    rows = list(table([simulated("off", 1, 4683.0)]).columns[5].cells)
    assert [str(cell) for cell in rows] == ["4,683"]


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Draw, and return the axes of the drawing."""
    made = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (made.append(self), save(self, *args))
    )

    def drawn(found):
        draw(found, "model.py:build, nvlink-4", tmp_path / "out.png")
        made[-1].canvas.draw()
        return made[-1]

    return drawn


@pytest.mark.slow
def test_picture_of_a_wide_sweep(figure):
    at = [1, 1.1, 10, 11, 100, 100_000]
    made = figure([simulated(name, x, 1000 / x) for x in at for name in ("off", "lossless")])
    for axes in made.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "Gbit/s of the link"
        assert axes.get_ylim()[1] > 1.1 * 1000
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(boxes) > 2
        assert not any(one.x1 > other.x0 for one, other in itertools.pairwise(boxes))
        first, second = axes.lines
        assert first.get_linewidth() > second.get_linewidth()
        assert first.get_linestyle() != second.get_linestyle()
    assert "model.py:build, nvlink-4" in made._suptitle.get_text()


@pytest.mark.slow
def test_picture_of_a_narrow_sweep(figure):
    made = figure([simulated("off", x, 10 + x) for x in (1, 2, 3)])
    for axes in made.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
        assert axes.get_ylim()[0] == 0


def test_several_policies_in_one_option_are_an_error():
    with pytest.raises(PolicyError, match=r"once for each: --policy off --policy balanced$"):
        run(
            "model.py:build",
            "ethernet-1g",
            "tp=2",
            ["off,balanced"],
            None,
            train=True,
            plot=None,
            json=False,
        )


def test_file_that_cannot_be_imported_is_named_with_its_line(tmp_path):
    (tmp_path / "wrong.py").write_text("x = 1\nimport no_such_module\n")
    with pytest.raises(CommpassError, match=r"cannot be imported at wrong\.py:2 .*no_such_module"):
        build_of(f"{tmp_path}/wrong.py:build")
