"""commpass codecs: measurements of codecs, on named data and on files, and errors for bad input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from commpass.cli import app
from commpass.report import codec_plot
from commpass.report import codecs as measurements


def run(*args: object):
    return CliRunner().invoke(app, ["codecs", *map(str, args)], env={"COLUMNS": "120"})


def rows(*args: object) -> dict[str, dict]:
    result = run(*args, "--json", "--no-speed")
    assert result.exit_code == 0, result.output
    return {row["codec"]: row for row in json.loads(result.stdout)}


def test_bits_errors_and_distances_are_those_of_the_data():
    x = measurements.gaussian(torch.Generator().manual_seed(0)).double().numpy().reshape(-1, 256)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    error = np.sqrt(((np.round(x / scale) * scale - x) ** 2).sum() / (x**2).sum())
    row = rows("int8")["int8"]
    assert row["bits"] == 8 + 32 / 256
    assert row["error"] == pytest.approx(error, rel=1e-3)
    assert row["distance"] == pytest.approx(row["bits"] + math.log2(error), abs=0.01)
    assert (row["encode_gbs"], row["lossless"]) == (None, False)


def test_distance_of_a_lossless_codec_is_that_to_the_entropy_of_the_exponents():
    x = measurements.laplace(torch.Generator().manual_seed(0)).to(torch.bfloat16)
    counts = np.unique(
        (x.view(torch.int16).numpy().view(np.uint16) >> 7) & 255, return_counts=True
    )[1]
    shares = counts / counts.sum()
    entropy = 8 - (shares * np.log2(shares)).sum()
    row = rows("exponent", "--data", "laplace", "--dtype", "bfloat16")["exponent"]
    assert row["error"] == 0
    assert row["distance"] == pytest.approx(row["bits"] - entropy, abs=1e-6)
    assert 0 < row["distance"] < 0.3


def test_all_float_tensors_of_a_file_count_together(tmp_path):
    file = tmp_path / "x.safetensors"
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(512, generator=generator), 3 * torch.randn(2, 256, generator=generator)]
    save_file({"a": parts[0], "b": parts[1], "c": torch.arange(7)}, file)
    row = rows("int8", "--data", file)["int8"]
    assert (
        row["bits"] == 8 * 2 * (512 + 128) / 1024
    )  # two tensors, each with its codes and a region of 128 bytes of scales
    assert 0.005 < row["error"] < 0.01


@pytest.mark.slow
def test_picture_and_the_table_hold_every_codec(tmp_path):
    picture = tmp_path / "out.png"
    result = run("int8", "rotated(bits=4)", "exponent", "--no-speed", "--plot", picture)
    assert result.exit_code == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for part in ("int8", "rotated(bits=4)", "lossless", "above the entropy"):
        assert part in result.stdout


@pytest.mark.slow
def test_speeds_are_measured_of_compiled_code():
    result = run("int8", "--json")
    (row,) = json.loads(result.stdout)
    assert 0.01 < row["encode_gbs"] < 1000
    assert 0.01 < row["decode_gbs"] < 1000


@pytest.mark.slow
def test_however_many_codecs_are_measured_all_are_compiled():
    """Dynamo limits how often the same code is compiled, and then runs it eagerly."""
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        result = run("cast", "cast(to=fp16)", "--json")
    assert result.exit_code == 0, result.exception


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("int9",), "did you mean 'int8'"),
        (("--data", "gausian"), "did you mean 'gaussian'"),
        (("--data", "none.safetensors"), "cannot be read"),
        (("--dtype", "float31"), "did you mean 'float32'"),
        (("int8", "--plot", "none/at/all.png"), "cannot be written"),
        (("outlier",), "give statistics"),
        (("difference",), "reference"),
    ],
)
def test_bad_input_is_one_line_and_leaves_with_2(args, part):
    result = run(*args, "--no-speed")
    assert result.exit_code == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_files_without_floats_or_that_are_no_safetensors_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"c": torch.arange(7)}, file)
    assert "holds no tensor of" in run("int8", "--data", file).stderr
    file.write_bytes(b"\x00" * 50)
    assert "cannot be read as safetensors" in run("int8", "--data", file).stderr


def test_every_codec_that_needs_nothing_else_is_measured_by_default():
    from commpass.codecs import NAMES

    shown = {spec.partition("(")[0] for spec in measurements.STANDARD}
    twice = {"bf16", "fp16"}  # other names of existing codecs
    assert shown == set(NAMES) - {"raw", "outlier", "difference", "segments"} - twice


def test_every_codec_has_a_line_that_says_what_it_is_for():
    from commpass.codecs import PRESETS

    assert len({preset.purpose for preset in PRESETS}) == len(PRESETS)
    assert all(preset.purpose for preset in PRESETS)
    shown = run("int8", "taco", "taco(scale=absmax)", "--no-speed").stdout
    assert shown.count("(TACO)") == 1
    assert "plain integers" in shown


@pytest.mark.parametrize(
    ("data", "title"),
    [
        ("gaussian", "Error of codecs on Gaussian data"),
        ("tokens", "Error of codecs on tokens data"),
        ("runs/grads.safetensors", "Error of codecs on grads.safetensors"),
    ],
)
def test_picture_names_its_data_and_what_it_leaves_out(data, title, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    x = measurements.tensors("gaussian", "float32")[0][:4096]
    rows = [measurements.measure(spec, [x]) for spec in ("int8", "int4", "exponent")]
    codec_plot.plot(rows, measurements.title_of(data), tmp_path / "out.png")
    (figure,) = drawn
    assert figure.get_suptitle() == title
    assert figure.axes[0].get_ylabel() == "relative error (2-norm)"
    assert figure.get_supxlabel().endswith("Without error, and not in the picture: exponent.")


def test_codecs_at_one_place_in_the_picture_share_a_label(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    rows = [
        measurements.Measured(name, bits, error, 1.0, 1.0, 0.0, lossless=False)
        for name, bits, error in [("a", 4.0, 0.1), ("b", 4.002, 0.1), ("c", 4.0, 0.2)]
    ]
    codec_plot.plot(rows, "codecs", tmp_path / "out.png")
    (figure,) = drawn
    labels = {each.get_text() for each in figure.axes[0].texts}
    assert labels >= {"a, b", "c"}
    assert labels.isdisjoint({"a", "b"})


@pytest.mark.every
def test_names_in_the_picture_cover_neither_each_other_nor_a_point(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation, Text

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    data = measurements.tensors("gaussian", "float32")
    specs = [spec for spec in measurements.STANDARD if not spec.startswith("exponent")]
    found = [measurements.measure(spec, [data[0][:65536]]) for spec in specs]
    codec_plot.plot(found, "codecs", tmp_path / "out.png")
    (figure,) = drawn
    renderer = figure.canvas.get_renderer()
    texts = [each for axes in figure.axes for each in axes.texts]
    names = [each for each in texts if isinstance(each, Annotation)]
    boxes = [Text.get_window_extent(each, renderer) for each in names]
    named = [name for each in names for name in each.get_text().split(", ")]
    assert named.count("int8") == 1
    assert set(named) >= {row.codec for row in found}
    wide = [box.padded(2, 0) for box in boxes]  # nor do two adjacent labels read as one
    assert not any(a.overlaps(b) for at, a in enumerate(wide) for b in boxes[:at])
    points = [
        axes.transData.transform((row.bits, row.error))
        for axes in figure.axes
        for row in found
        if axes.get_xlim()[0] <= row.bits <= axes.get_xlim()[1]
    ]
    assert len(points) >= len(found)
    assert not any(box.contains(*point) for box in boxes for point in points)
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() != "None"]
    looks = {(line.get_marker(), tuple(line.get_color())) for line in lines}
    assert len(looks) == len(lines) > 10
