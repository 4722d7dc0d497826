"""``commpass breakeven``: the size from which compressing pays."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.lowering.exchange import RESERVED, PeerMemory
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import SINGLE_KERNEL, Site
from commpass.policy import policy_named
from commpass.report.breakeven import LEAST, MOST, decided, even, profile_of, smallest
from commpass.report.codecs import dtype_of

BALANCED = policy_named("balanced")


def asked(*arguments: str):
    return CliRunner().invoke(app, ["breakeven", *arguments])


@pytest.mark.slow
def test_sizes_from_the_break_even_on_are_compressed_and_half_of_it_is_not():
    link = commpass.ethernet(1)
    row = even(link, 64, "float32", "all_reduce", BALANCED, 1 << 24)
    assert LEAST < row.from_bytes < 1 << 24
    sizes = [1 << power for power in range(10, 35)]
    compressed = [decided(link, 64, "float32", "all_reduce", BALANCED, n).compressed for n in sizes]
    assert all(on for on, n in zip(compressed, sizes, strict=True) if n >= row.from_bytes)
    assert not compressed[sizes.index(row.from_bytes) - 1]
    assert row.codec != "none"
    assert row.predicted_us < row.uncompressed_us


@pytest.mark.slow
def test_example_of_the_page_prints_what_the_page_shows(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "costmodel.md").read_text()
    profile = re.search(r"^```toml\n(base = \"infiniband-ndr\"\n.*?)^```", page, re.M | re.S)
    command, output = re.search(
        r"^```\ncommpass breakeven (two\.toml .*?)\n```\n\n```\n(.*?)^```", page, re.M | re.S
    ).groups()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "two.toml").write_text(profile.group(1))
    printed = asked(*command.split()).output
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


def test_least_tensor_has_a_value_for_each_rank():
    slow = commpass.ethernet(0.05)
    row = even(slow, 1000, "float32", "all_gather", BALANCED, 1 << 24)
    assert row.from_bytes == smallest(1000, "float32") == 4096
    assert smallest(2, "float32") == LEAST


def test_cpus_send_messages_and_gpus_do_not():
    """As with gloo, where chunks of messages overlap with coding."""
    of = ("float32", "all_reduce", BALANCED, 1 << 24)
    cpus = decided(commpass.ethernet(1), 2, *of)
    assert cpus.by_messages
    assert cpus.chunks > 1
    gpus = decided(profile_of("ethernet-1g", "h100"), 2, *of)
    assert gpus.compressed
    assert not gpus.by_messages


def test_rates_that_were_measured_on_a_gpu_are_those_of_a_gpu(tmp_path):
    """``probe --kernels`` replaces the rates of a card."""
    measured = tmp_path / "measured.toml"
    measured.write_text(
        'base = "nvlink-4"\n[kernels]\nbase = "h100"\ngbytes_per_s = 2900\ngflops = 690000\n'
    )
    of = (4, "bfloat16", "all_reduce", policy_named("aggressive"), 1 << 24)
    found = decided(profile_of(str(measured)), *of)
    assert found.device == "cuda"
    assert not found.by_messages
    assert found.codec == decided(profile_of("nvlink-4", "h100"), *of).codec


def test_fast_link_never_pays_and_says_so(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = asked("ethernet-100g", "--ranks", "2", "--dtype", "bfloat16")
    assert found.exit_code == 0, found.output
    heading, *_, row = found.output.splitlines()
    assert heading.endswith("predicted up to 16.0 GiB")
    assert "  never  " in row
    assert row.rstrip().endswith("uncompressed")


@pytest.mark.slow
def test_table_fits_into_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = asked("ethernet-25g", "--ranks", "8")
    assert found.exit_code == 0, found.output
    assert max(map(len, found.output.splitlines())) <= 80
    assert "10.2 -> 10.2 ms" in found.output


def test_policy_without_lossy_codecs_compresses_nothing_here():
    row = even(commpass.ethernet(1), 2, "float32", "all_reduce", policy_named("off"), 1 << 24)
    assert row.from_bytes == inf
    assert row.predicted_us == row.uncompressed_us


@pytest.mark.slow
def test_link_is_what_counts_and_codecs_may_run_on_gpus():
    arguments = ("ethernet-100g", "--ranks=8", "--dtype=float32", "--json")
    by_cpu, by_gpu = (
        json.loads(asked(*arguments, *more).output)[0] for more in ((), ("--card=h100",))
    )
    assert by_cpu["codec"] == "none"
    assert by_gpu["codec"] != "none"
    assert by_gpu["uncompressed_us"] == by_cpu["uncompressed_us"]
    assert by_gpu["at_bytes"] == 1 << 24
    assert by_gpu["from_bytes"] <= MOST


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "all_reduc"], "did you mean 'all_reduce'?"),
        (["--kind", "send"], "unknown kind 'send'"),
        (["--kind", "all_gather_v"], "did you mean 'all_gather'?"),
        (["--dtype", "float33"], "did you mean 'float32'?"),
        (["--ranks", "1"], "must be numbers from 2 to 1,048,576"),
        (["--ranks", "two"], "must be numbers from 2 to 1,048,576"),
        (["--ranks", "9" * 30], "must be numbers from 2 to 1,048,576"),
        (["--size", "16 parsecs"], "must be bytes, such as"),
        (["--size", "9" * 400], "must be bytes, such as"),
        (["--size", "1KiB", "--ranks", "2,1000"], "need at least 4,000 bytes, a value for each"),
        (["DGX-H100"], "did you mean 'dgx-h100'?"),
        (["--policy", "balance"], "did you mean 'balanced'?"),
        (["ethernet"], "unknown profile 'ethernet'"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_write(arguments, said):
    found = asked(*arguments)
    assert found.exit_code == 2
    assert said in found.output
    assert len(found.output.strip().splitlines()) == 1


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-h200"])
def test_pages_have_the_predictions_of_single_kernels(machine):
    """breakeven considers none. With symmetric memory, ``costmodel.md`` and ``exchange.md``
    state up to which size they are chosen."""
    card, memory = profile_of(machine), PeerMemory(programs=132 - RESERVED, capability=(9, 0))

    def planned(dtype: str, kib: int):
        nbytes = kib << 10
        site = Site(
            name="s",
            kind="all_reduce",
            reduce_op="sum",
            group="",
            group_size=8,
            dtype=dtype,
            shape=(nbytes // dtype_of(dtype).itemsize,),
            bytes=nbytes,
            device="cuda",
        )
        allowed = BALANCED.allowed(site)[0]
        options = candidates(site, allowed, card, True, lambda group: memory)
        return choose([site], [options], [allowed], card)[0]

    for dtype, most in (("bfloat16", 128), ("float32", 256)):
        for kib in (4, 16, 64, most):
            assert planned(dtype, kib).lowering == SINGLE_KERNEL
        assert not planned(dtype, 2 * most).compressed
    of_64 = planned("bfloat16", 64)
    assert (round(of_64.predicted_us, 1), round(of_64.plain_us, 1)) == (
        {"dgx-h100": 10.7, "dgx-h200": 10.6}[machine],
        15.8,
    )
    alone = decided(card, 8, "bfloat16", "all_reduce", BALANCED, 64 << 10)
    assert not alone.compressed
    assert round(alone.plain_us, 1) == 15.8
