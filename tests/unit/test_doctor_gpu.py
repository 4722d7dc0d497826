"""``commpass doctor --gpu`` as far as it can be tested without a GPU."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from interpreter import interpreted
from typer.testing import CliRunner

from commpass.cli import app
from commpass.codecs import codec
from commpass.errors import CommpassError

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

from commpass.probe.gpu import codecs, links
from commpass.probe.gpu import exchange as probed
from commpass.probe.gpu.exchange import Timed
from commpass.probe.gpu.finding import Finding
from commpass.report import doctor_gpu

CPU = torch.device("cpu")


def test_without_a_gpu_one_line_lists_what_was_not_tested():
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert line.startswith("not tested (torch finds no GPU): ")
    for what in ("kernels", "links", "symmetric memory", "multicast", "codecs", "exchanges"):
        assert what in line


def test_json_without_a_gpu_has_the_reason():
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data.pop("why").startswith("not tested (torch finds no GPU): ")
    assert data == {"findings": [], "times": [], "profile": None}


def found_here(name: str) -> list[Finding]:
    return list(codecs.findings([codec(name)], CPU))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["int8", "exponent", "rotated", "mxfp4", "fp8", "int6", "ecq"])
def test_kernels_of_a_codec_pass(name):
    (found,) = interpreted(found_here, name)
    assert found.works, found
    assert found.what == f"codec {name}"
    if codecs.is_exact(codec(name)):
        assert found.state == "encode and decode give the bits of the plain form"


def test_every_named_codec_has_kernels():
    for name in codecs.NAMES:
        assert codecs.unsupported_reason(codec(name)) == "", name
    assert codecs.unsupported_reason(codec("bf16"))


def flipped(name: str) -> list[Finding]:
    """Return the findings if one bit of the wire is wrong."""
    encode, decode = codecs.kernels_of(codec(name))

    def wrong(rows: torch.Tensor) -> torch.Tensor:
        wire = encode(rows)
        wire[0, 300] ^= 1
        return wire

    before, codecs.kernels_of = codecs.kernels_of, lambda coder: (wrong, decode)
    try:
        return list(codecs.findings([codec(name)], CPU))
    finally:
        codecs.kernels_of = before


@pytest.mark.slow
def test_one_wrong_bit_is_found():
    (found,) = interpreted(flipped, "int8")
    assert not found.works
    assert "of the wire" in found.state


def decoded_with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Finding:
    """Return the finding if the codec's plain form encodes, and decodes with a change."""
    coder = codec(name)

    def decode(wire: torch.Tensor) -> torch.Tensor:
        return change(coder.decode_rows(wire, codecs.NUMEL, torch.bfloat16))

    with patch.object(codecs, "kernels_of", lambda _: (coder.encode_rows, decode)):
        return codecs.compared(coder, CPU)


def test_neighbours_of_decoded_values_are_rounding():
    """A value that cancels in a rotation has other bits, and is as close."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values.abs() < 1e-3, values, values * (1 + 2.0**-8)).bfloat16()

    found = decoded_with("rotated(bits=4)", rounded)
    assert found.works, found
    assert "0.00% by more than rounding" in found.state
    assert not decoded_with("int8", rounded).works  # its kernels have the plain form's bits


def test_wrong_decoded_value_is_no_rounding():
    def wrong(values: torch.Tensor) -> torch.Tensor:
        values[0, 300] += 1
        return values

    found = decoded_with("rotated(bits=4)", wrong)
    assert not found.works
    assert "by more than rounding" not in found.state  # all that differ


@pytest.mark.parametrize("status", [0, 1])
def test_status_of_the_ranks_is_returned_without_a_traceback(status):
    write = "import os, sys; open(os.environ[sys.argv[1]], 'w').write(sys.argv[2])"
    command = [sys.executable, "-c", write, doctor_gpu.STATUS, str(status)]
    assert doctor_gpu.started(command) == status
    assert doctor_gpu.started([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_kernel_that_fails_is_a_finding(monkeypatch):
    def fail(coder):
        raise RuntimeError("no\nsuch card")

    monkeypatch.setattr(codecs, "kernels_of", fail)
    (found,) = codecs.findings([codec("int8")], CPU)
    assert (found.works, found.state) == (False, "failed: no such card")


def test_codec_without_kernels_is_no_failure():
    (found,) = codecs.findings([codec("bf16")], CPU)
    assert found.works
    assert found.state == "no kernel"


@pytest.mark.parametrize(
    ("matrix", "joined"),
    [([[1]], (0, 0)), ([[0, 1], [1, 0]], (1, 1)), ([[0, 1, 0], [1, 0, 1], [0, 0, 0]], (1, 3))],
)
def test_pairs_are_joined_in_both_directions(matrix, joined):
    assert links.pairs(matrix) == joined
    found = links.between("NVLink", matrix, "all", "some")
    assert found.works == (joined[0] == joined[1])


def test_finding_of_the_rank_that_failed_is_kept():
    good, bad = Finding("codec int8", "right", True), Finding("codec int8", "wrong", False, "why")
    assert doctor_gpu.merged([[good], [good]]) == [good]
    assert doctor_gpu.merged([[good], [good], [bad]]) == [
        dataclasses.replace(bad, state="rank 2: wrong")
    ]
    with pytest.raises(CommpassError, match="different tests"):
        doctor_gpu.merged([[good], []])


def test_ranks_are_started_for_each_gpu(tmp_path):
    command = doctor_gpu.torchrun(4, tmp_path / "here.json", 20.0, json=True)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "4"
    ours = command[command.index("commpass") :]
    output = str(tmp_path / "here.json")
    assert ours == f"commpass doctor --gpu --output {output} --seconds 20.0 --json".split()


def test_times_stand_beside_each_other():
    sums, gathers = doctor_gpu.times_tables(
        [
            Timed("all_reduce", 1 << 20, {"nccl": 24.5, "int8, two exchanges": None}),
            Timed("all_reduce", 1 << 21, {"nccl": 30.0, "int8, two exchanges": 20.0}),
            Timed("all_gather", 1 << 20, {"nccl": 12.0, "int8 in one kernel": 9.0}),
        ]
    )
    assert [str(column.header) for column in sums.columns] == [
        "all_reduce of",
        "nccl",
        "int8, two exchanges",
    ]
    cells = [[str(cell) for cell in column.cells] for column in sums.columns]
    assert cells == [["1.0 MiB", "2.0 MiB"], ["24.5 us", "30.0 us"], ["", "20.0 us"]]
    assert str(gathers.columns[0].header) == "all_gather of"
    assert gathers.row_count == 1


class Pair:
    """A group of two ranks, of which this is the first."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("supported", "address", "state"), [(True, 64, "yes"), (True, 0, "no"), (False, 64, "no")]
)
def test_symmetric_memory_that_works_says_how_many_ranks_and_multicast(supported, address, state):
    handle = SimpleNamespace(world_size=2, multicast_ptr=address)
    support = SimpleNamespace(has_multicast_support=lambda kind, index: supported)
    with (
        patch.object(links.symmetric, "empty", lambda *shape, **how: torch.empty(1)),
        patch.object(links.symmetric, "rendezvous", lambda memory, group: handle),
        patch.object(links, "_SymmetricMemory", support),
    ):
        memory, multicast = links.symmetric_memory(Pair(), CPU)
    assert (memory.state, memory.works) == ("ranks: 2", True)
    assert (multicast.state, multicast.works) == (state, True)


def test_symmetric_memory_that_fails_says_why():
    def fail(memory, group):
        raise RuntimeError("no\npeer access")

    with (
        patch.object(links.symmetric, "empty", lambda *shape, **how: torch.empty(1)),
        patch.object(links.symmetric, "rendezvous", fail),
    ):
        memory, multicast = links.symmetric_memory(Pair(), CPU)
    assert (memory.state, memory.works) == ("no: no peer access", False)
    assert (multicast.state, multicast.works) == ("not tested", True)


@pytest.mark.parametrize(
    ("off", "other", "works", "state"),
    [
        (0.0, False, True, "error "),
        (1.0, False, False, "error "),
        (0.0, True, False, "ranks hold different bits"),
    ],
)
def test_result_of_an_exchange_is_compared_with_the_sum_and_with_other_ranks(
    off, other, works, state
):
    exact = sum(probed._values(rank, probed.NUMEL).double() for rank in range(2))

    def gathered(every: list, own: bytes, group: object) -> None:
        every[:] = [own, own[::-1] if other else own]

    with patch.object(probed.dist, "all_gather_object", gathered):
        found = probed._checked(
            "test", "one_shot", lambda x, group, codec: exact.float() + off, Pair(), CPU
        )
    assert found.works == works
    assert found.state.startswith(state)


@pytest.mark.parametrize("works", [True, False])
def test_profile_of_the_links_is_written_beside_the_findings(works, tmp_path):
    written, output = [], tmp_path / "cluster.json"
    probed_file = SimpleNamespace(profile="the links")
    ours = SimpleNamespace(group=SimpleNamespace(WORLD=Pair()), get_rank=lambda: 0)
    with ExitStack() as stack:
        for name, by in {
            "dist": ours,
            "group_of": lambda *which: nullcontext(),
            "tested": lambda *how: [Finding("exchange", "error 1", works)],
            "probe": lambda seconds, name, kernels: probed_file if name == "cluster" else None,
            "write": lambda *what: written.append(what),
            "digest": str,
        }.items():
            stack.enter_context(patch.object(doctor_gpu, name, by))
        stack.enter_context(patch.object(doctor_gpu.exchange, "times", lambda *how: []))
        stack.enter_context(patch.object(torch.cuda, "device_count", lambda: 2))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        assert doctor_gpu.tested_here(output, 1.0, json=True) == int(not works)
    assert written == [(output, probed_file)]
