"""Test the benchmark of GPU kernels without a GPU.

Its references are right, its checks pass in Triton's interpreter, and they catch a broken kernel.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreter import interpreted

from benchmarks.gpu import exact, ranks, run, show, timing
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import CODECS
from commpass.codecs import codec

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")


# --- float64 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*CODECS, "int4(stored=pow2)", "int8(static=0.05)", "int2"])
def test_float64_says_what_the_codec_says(spec):
    coder, numel = codec(spec), 2051
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    wire = coder.encode_rows(x)
    want = coder.decode_rows(wire, numel, torch.float32).double()
    found = exact.decode(coder, wire, numel, torch.float32)
    assert (found - want).abs().max() < 1e-5 * x.abs().max()
    assert not exact.gaps(coder, wire, numel).any()
    blocks = exact.blocks_of(coder, x)
    assert torch.equal(exact.joined(coder, blocks, numel), x)
    assert torch.equal(blocks, coder.layout.split(x))


@pytest.mark.parametrize("spec", ["rotated", "sdp4bit", "taco(block=32)", "rotated(block=128)"])
def test_domains_in_float64(spec):
    domain = codec(spec).domain
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entered = exact.enter(domain, x)
    assert (entered - domain.to_domain(x)).abs().max() < 1e-14
    assert (exact.leave(domain, entered) - x).abs().max() < 1e-12


def test_values_that_are_not_finite_are_so_in_float64():
    for spec in ("fp8", "fp8(form=e5m2)", "int4(stored=pow2)", "int8(static=0.05)"):
        coder, x = codec(spec), torch.ones(1, 600)
        x[0, 300] = float("nan")
        back = exact.decode(coder, coder.encode_rows(x), 600, torch.float32)
        assert torch.equal(
            back.isfinite(), coder.decode_rows(coder.encode_rows(x), 600, x.dtype).isfinite()
        )


# --- checks ---------------------------------------------------------------------------------------


def checked(spec: str, broken: str = "") -> list[dict[str, Any]]:
    """Return the results of the checks in the interpreter; ``broken`` tells how each kernel is
    broken."""
    from benchmarks.gpu import checks
    from commpass.lowering.gpu import launch

    real = launch.run

    def wrong(chain: Any, taken: torch.Tensor, numel: int, *others: torch.Tensor) -> torch.Tensor:
        encodes = chain.encodes is not None
        if broken == "raises":
            raise RuntimeError("misaligned address")
        made = real(chain, taken, numel, *others)
        if broken == "a code" and encodes:
            made[0, 700] ^= 0x40
        elif broken == "unwritten" and encodes:
            made[-1, -100:] = 0xAB
        elif broken == "a value" and not encodes:
            made[0, 3] *= 1.01
        elif broken == "finite" and not encodes:
            made.nan_to_num_(0.0, 0.0, 0.0)
        elif broken == "a rank" and not encodes and len(chain.steps) == 2:
            made -= real(chain.__class__(chain.input_dtype, chain.steps[:1]), taken[:1], numel)
        return made

    bench = Bench("test", torch.device("cpu"), 7, dry=True)
    with patch.object(launch, "run", wrong if broken else real):
        checks.block(bench, spec)
    return bench.found


def failed(found: list[dict[str, Any]]) -> list[str]:
    return [f"{each['name']}: {each['said']}" for each in found if not each.get("passed", True)]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["int8", "rotated(bits=4)"])
def test_kernels_pass_in_the_interpreter(spec):
    found = interpreted(checked, spec)
    assert failed(found) == []
    names = " ".join(each["name"] for each in found)
    for kernel in ("encode", "decode", "decode_sum(8)", "decode_sum_mean_encode(4)", "decode_add"):
        assert f"{kernel}:" in names, kernel
    assert ("enter_encode" in names) == spec.startswith("rotated")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("raises", "misaligned address"),
        ("a code", "encode: bits of the plain form"),
        ("unwritten", "encode: gaps"),
        ("a value", "decode: float64"),
        ("finite", "what is not finite stays so"),
        ("a rank", "decode_sum(4): float64"),
    ],
)
def test_broken_kernel_is_found(broken, said):
    assert any(said in each for each in failed(interpreted(checked, "int8", broken)))


@pytest.mark.every
def test_overlapped_graph_is_timed_with_and_without_the_pass_order(monkeypatch):
    """Two ranks over gloo. Their processes find the tests' settings in the environment."""
    monkeypatch.setenv("PYTHONPATH", str(run.ROOT))
    bench = Bench("time order", torch.device("cpu"), 7, dry=True)
    ranks.run_ordered(bench)
    assert failed(bench.found) == []
    checks = [each["name"] for each in bench.found if each["kind"] == "check"]
    assert len(checks) == 2 * 5
    assert sum("no bit differs" in name for name in checks) == 2
    times = [each for each in bench.found if each["kind"] == "note"]
    assert len(times) == 2
    assert all(each["us"] > 0 and each["without_us"] > 0 for each in times)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.every
def test_command_runs_dry(tmp_path):
    path = tmp_path / "found.json"
    names = ["copy", "check int4", "time block codecs"]
    command = [sys.executable, run.__file__, "--dry", "--only", *names, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["counts"]["checks failed"] == 0
    assert content["counts"]["checks passed"] > 20
    assert torch.__version__.startswith(content["torch"])
    assert any(each["what"].startswith("decode_sum_encode") for each in content["timings"])


def test_checks_come_before_times_and_what_matters_most_before_the_rest(monkeypatch, capsys):
    """What is left out for want of time is the end of each group."""
    groups = list[list[str]]()

    def work(crew: run.Crew, some: list[list[str]], side_by_side: int, until: float) -> None:
        groups.append([name for names in some for name in names])

    monkeypatch.setattr(run.Crew, "run", work)
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", "/dev/null"])
    assert run.main() == 0
    copy, checks, times = groups
    jobs = run.jobs()
    assert copy == ["copy"]  # every share is of its times
    assert [*copy, *checks, *times] == [job.name for job in jobs]
    assert {job.name for job in jobs if job.alone} == {*copy, *times}
    assert checks[:2] == ["check int8", "check rotated"]
    assert times[:2] == ["time block codecs", "time matmul"]
    compiled = ["ranks", "graphs", "single kernels", "models", "eager"]
    assert [name for name in checks if name in compiled] == compiled
    assert checks.index("ranks") < checks.index(f"check {CODECS[6]}")
    assert {f"check {spec}" for spec in CODECS} <= {*checks}
    assert times[-1] == "rivals"


@pytest.mark.parametrize("job", run.jobs(), ids=lambda job: job.name)
def test_job_names_a_function_that_takes_its_arguments(job):
    module, _, name = job.call.partition(":")
    function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    inspect.signature(function).bind(None, *job.given)


PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
[ "$1" != -c ] || exit {sees}
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("sees", [True, False])
def test_make_gpu_takes_the_interpreter_at_hand_if_it_sees_a_gpu(tmp_path, sees):
    log, place = tmp_path / "log", tmp_path / "venv" / "bin"
    place.mkdir(parents=True)
    for path in (tmp_path / "at_hand", place / "python"):
        path.write_text(PYTHON.format(log=log, sees=int(not sees)))
        path.chmod(0o755)
    for name in ("base", "ready"):  # as if what tests need were installed
        (tmp_path / "venv" / name).touch()
    given = [f"PYTHON={tmp_path / 'at_hand'}", f"VENV={tmp_path / 'venv'}"]
    subprocess.run(["make", "-s", "gpu", *given], cwd=run.ROOT, check=True, timeout=60)
    asked, ran = log.read_text().splitlines()
    assert asked.startswith("at_hand -c import torch")
    assert ran == f"{'at_hand' if sees else 'python'} benchmarks/gpu/run.py"


def test_check_that_fails_is_an_exit_code(monkeypatch, capsys):
    def work(crew: run.Crew, groups: list[list[str]], *others: Any) -> None:
        crew.found.append(
            {"kind": "check", "job": "copy", "name": "a sum", "passed": False, "said": "off by 3"}
        )

    monkeypatch.setattr(run.Crew, "run", work)
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry"])
    assert run.main() == 1
    assert "off by 3" in capsys.readouterr().out


def test_process_that_dies_is_a_check_that_fails(tmp_path):
    options = run.parsed(["--dry"])
    crew = run.Crew(options, show.Console(quiet=True))
    log = tmp_path / "log"
    log.write_text("Segmentation fault")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    crew._collect(run.Member(["check int8"], process, tmp_path / "none", log))
    assert [(each["passed"], "ended with 3" in each["said"]) for each in crew.found] == [
        (False, True)
    ]


def test_part_that_fails_does_not_stop_the_rest():
    bench = Bench("test", torch.device("cpu"), 0)
    for number in (0, 1):
        with bench.part(f"part {number}"):
            assert 1 / number
    assert [each["name"] for each in bench.found] == ["part 0"]
    assert "ZeroDivisionError" in bench.found[0]["said"]


def test_limit_lies_between_the_copies_that_were_measured():
    copies = timing.Copies({10: time_of(1.0), 20: time_of(2.0), 40: time_of(6.0)})
    assert [copies.seconds(n) for n in (5, 10, 15, 30, 40, 60)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]


def time_of(seconds: float) -> timing.Time:
    return timing.Time(seconds, 0.0, "graph")


def test_without_a_gpu_no_job_starts(capsys):
    with (
        patch.object(sys, "argv", ["run.py"]),
        patch.object(run, "has_gpu", return_value=False),
        patch.object(run, "Crew", side_effect=AssertionError("a job starts")),
    ):
        assert run.main() == 2
    assert capsys.readouterr().out.strip().endswith("--dry interprets the kernels without one")
