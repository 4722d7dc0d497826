"""Run the examples on a mesh as a user does.

Their output is compared with one process that trains the whole model on the batches of all ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from run_example import LONGEST_S, output_of

ROOT = Path(__file__).parents[2]
STEPS, WIDTH = 4, 64
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
pytestmark = pytest.mark.xdist_group("ranks")


def run(script: str, ranks: int, *options: str, longest_s: float = LONGEST_S) -> list[str]:
    """Return the lines that an example prints, with its ranks on this host."""
    size = (f"--steps={STEPS}", f"--width={WIDTH}")
    path = f"examples/{script}.py"
    return output_of(path, ranks, *size, *options, longest_s=longest_s).splitlines()


def cells(lines: list[str]) -> dict[str, list[str]]:
    """Return the rows of the printed tables by their first cell."""
    rows = (re.split(r" {2,}", line.strip()) for line in lines)
    return {first: rest for first, *rest in rows if len(rest) == 3}


def losses(rows: dict[str, list[str]]) -> list[tuple[float, float]]:
    """Return the losses without and with compression, by step."""
    return [(float(rows[str(n)][0]), float(rows[str(n)][1])) for n in range(1, STEPS + 1)]


def shares(rows: dict[str, list[str]]) -> dict[str, float]:
    """Return the bytes with compression, relative to those without, by mesh dimension."""
    found = {}
    for title, (off, on, _) in rows.items():
        if title.startswith("bytes over "):
            (a, unit), (b, other) = off.split(), on.split()
            found[title.removeprefix("bytes over ")] = (
                float(b) * UNITS[other] / (float(a) * UNITS[unit])
            )
    return found


def alone(layers: int, parts: int, optimizer=None) -> list[float]:
    """Return the losses of the whole model in one process, on the batches of some data-parallel
    ranks."""
    from common import Transformer, batches, read_texts

    torch.manual_seed(0)
    model = Transformer(layers, WIDTH)
    learn = (optimizer or partial(torch.optim.AdamW, lr=1e-3))(model.parameters())
    every = zip(*(batches(read_texts()[0], STEPS, 0, part) for part in range(parts)), strict=True)
    found = []
    for some in every:
        loss = model(torch.cat(some))
        loss.backward()
        learn.step()
        learn.zero_grad()
        found.append(loss.item())
    return found


def check_losses(rows: dict[str, list[str]], exact: list[float], bound: float) -> None:
    for (off, on), wanted in zip(losses(rows), exact, strict=True):
        assert off == pytest.approx(wanted, abs=2e-3)
        assert on == pytest.approx(off, abs=bound)
    assert any(off != on for off, on in losses(rows))
    assert rows["time"][0].endswith(" ms")


def test_data_parallel_ranks_have_batches_of_their_own():
    from common import batches

    text = torch.arange(100_000) % 256
    first, second, again = (next(batches(text, 1, 7, rank)) for rank in (0, 1, 0))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.every
def test_ssfusion():
    """There are measuring steps, and the last two of 4 steps would not suffice, so the test sets
    the number of steps.

    The run is forced, since on a slow machine a plan may send everything whole. The seventh step is
    the first one whose weights sparse gradients have changed.
    """
    lines = run("train_ssfusion", 2, "--layers=1", "--steps=8", "--force")
    rows = cells(lines)
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    first, *_, last = alone(1, 2, sgd)
    assert float(rows["1"][0]) == float(rows["1"][1]) == pytest.approx(first, abs=2e-3)
    assert float(rows["4"][0]) == pytest.approx(last, abs=2e-3)
    assert float(rows["4"][1]) == pytest.approx(last, abs=2e-3)  # whole until it has measured
    assert float(rows["8"][1]) == pytest.approx(float(rows["8"][0]), abs=0.5)
    away = [abs(float(on) - float(off)) for off, on in (rows[str(n)][:2] for n in range(1, 9))]
    assert max(away[:6]) < 2e-4 < max(away[6:])
    assert 0.005 < shares(rows)["dp"] < 0.04
    assert "over loopback" in " ".join(lines)


@pytest.mark.every
def test_uncompressed_gradients_beside_ssfusion():
    rows = cells(run("train_ssfusion", 2, "--layers=1", "--policy=off"))
    assert all(off == on for off, on in losses(rows))
    assert shares(rows) == {"dp": 1.0}


@pytest.mark.every
def test_fsdp_and_tensor_parallelism():
    rows = cells(run("train_fsdp_tp", 4, "--layers=1"))
    check_losses(rows, alone(1, 2), 0.01)
    found = shares(rows)
    assert 0.1 < found["dp"] < 0.4
    assert 0.2 < found["tp"] < 0.4


@pytest.mark.every
def test_tensor_and_pipeline_parallelism():
    rows = cells(run("train_3d", 4, "--mesh=tp,pp", "--policy=taco-3d"))
    check_losses(rows, alone(2, 1), 0.03)
    found = shares(rows)
    assert 0.1 < found["pp"] < 0.25
    assert 0.2 < found["tp"] < 0.6


@pytest.mark.every
@pytest.mark.timeout(1800)  # on two cores, 8 ranks compile different graphs
def test_all_three_dimensions_in_one_run():
    """Tensor, data and pipeline parallelism on 8 ranks: each is compressed, and the loss is
    unchanged."""
    options = ["--mesh=tp,dp,pp", "--width=64", "--steps=8", "--policy=balanced-3d"]
    rows = cells(run("train_3d", 8, *options, longest_s=500.0))
    assert all(abs(on - off) < 0.1 for off, on in losses(rows))
    found = shares(rows)
    assert found.keys() == {"tp", "dp", "pp"}
    assert 0.1 < found["pp"] < 0.25
    assert 0.2 < found["tp"] < 0.6
    assert found["dp"] < 0.6


@pytest.mark.every
def test_tensor_and_data_parallelism():
    rows = cells(run("train_3d", 4, "--mesh=tp,dp"))
    check_losses(rows, alone(1, 2), 0.1)
    found = shares(rows)
    assert found["dp"] < 0.6
    assert 0.2 < found["tp"] < 0.6


@pytest.mark.every
@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        pytest.param(
            "train_fsdp_tp",
            ["--ranks=3"],
            "--ranks 3: must be a multiple of 2",
            marks=pytest.mark.every,
        ),
        ("train_3d", ["--policy=balanced-4d"], "did you mean 'balanced-3d'"),
        pytest.param(
            "train_3d", ["--mesh=dp,pp"], "invalid choice: 'dp,pp'", marks=pytest.mark.every
        ),
    ],
)
def test_options_that_cannot_be(script, options, said):
    command = [sys.executable, f"examples/{script}.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
