"""Test the papers' numbers against the cost model: formulas with explicit numbers, rows, and the
direction of changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import papers
from benchmarks.paper_models import equarx, rows, ssfusion, taco, tried, unfused, zipccl
from benchmarks.paper_models.hops import hops
from benchmarks.paper_models.rows import Row, summary
from benchmarks.paper_models.sites import FREE, coded, fused, gain, plain, site
from commpass.codecs import codec
from commpass.costmodel import KernelRate, Kernels, Link
from commpass.costmodel.cards import CARDS

ROOT = Path(__file__).parents[2]
SMALL = taco.TensorParallel(parameters=1e9, layers=2, width=1024, tokens=1024)


def made(number: float | str, predicted: float | str, **more: bool) -> Row:
    return Row("a paper", "a number", number, predicted, "nothing", **more)


@pytest.fixture(scope="module")
def found() -> dict[str, Row]:
    return {f"{row.paper}: {row.what}": row for row in rows.all_rows()}


# --- formulas -------------------------------------------------------------------------------------


def test_fused_kernel_reads_values_and_writes_the_wire():
    """2 bytes and 8.25 bits of a value, at half of 3,350 GB/s."""
    rate = fused(CARDS["h100"], "taco").other
    assert rate.encode_ns == pytest.approx((2 + 8.25 / 8) / 1675, rel=1e-6)
    assert rate.decode_ns == rate.encode_ns
    slower = fused(CARDS["h100"], "taco", 0.25).other
    assert slower.encode_ns == pytest.approx(2 * rate.encode_ns)


def test_plain_and_coded_times_of_a_two_shot():
    """4 ranks, 2^20 values, 10 GB/s, 5 us per message.

    Plain: 6 messages and 3/4 of the bytes twice. Coded: as many messages; 8.25 bits per value; 5/4
    of the values encoded, twice as many decoded.
    """
    of, link = site("all_reduce", 1 << 20, 4), Link(5.0, 10.0)
    assert plain(of, link) == pytest.approx(6 * 5 + 1.5 * (2 << 20) / 1e4, abs=1e-3)
    wire = 1.5 * (1 << 20) * 8.25 / 8 / 1e4
    assert coded(of, "two_shot", "taco", link, FREE) == pytest.approx(30 + wire, rel=1e-3)
    kernels = Kernels(launch_us=7.0, other=KernelRate(0.01, 0.02))
    coding = 4 * 7 + (1 << 20) * (1.25 * 0.01 + 2 * 0.02) / 1e3
    assert coded(of, "two_shot", "taco", link, kernels) == pytest.approx(
        30 + wire + coding, rel=1e-3
    )


def test_fit_gives_back_the_machine_that_it_was_made_of():
    """Two throughputs of a machine with 4 s of compute and 25 GB/s, computed with the formula
    itself."""
    link = Link(8.0, 25.0)
    nbytes = 1024 * 1024 * 2
    step = {
        ranks: 4e6 / ranks + 8 * (2 * (ranks - 1) * 8.0 + 2 * (ranks - 1) / ranks * nbytes / 25e3)
        for ranks in (2, 4)
    }
    tflops = [(ranks, 6e9 * 1024 / (ranks * us * 1e6)) for ranks, us in step.items()]
    again = taco.fit_step(SMALL, tflops, link.alpha_us)
    assert again.compute_us == pytest.approx(4e6)
    assert again.link.gbytes_per_s == pytest.approx(25.0)
    for ranks, said in tflops:
        us = again.step_us(SMALL, ranks, plain(SMALL.sum_of(ranks), again.link))
        assert us == pytest.approx(step[ranks])
        assert SMALL.tflops(ranks, us) == pytest.approx(said)


def test_step_is_compute_and_exchanges():
    machine = taco.Fitted(800.0, Link(1.0, 10.0))
    assert machine.step_us(SMALL, 4, 50.0) == 200 + 8 * 50
    us = plain(SMALL.sum_of(4), machine.link)
    other = coded(SMALL.sum_of(4), "two_shot", "taco", machine.link, fused(CARDS["h100"], "taco"))
    assert taco.taco_gain(SMALL, machine, 4, CARDS["h100"]) == pytest.approx(
        (200 + 8 * us) / (200 + 8 * other)
    )


def test_unfused_operators_are_counted():
    """A cast of bf16 reads 2 bytes and writes 1, in one kernel; views and allocations need none."""
    with unfused._Counted(0) as counted:
        x = torch.empty(1024, dtype=torch.bfloat16)
        x.view(4, 256).to(torch.float8_e4m3fn)
    assert (counted.kernels, counted.nbytes) == (1, 3 * 1024)
    with unfused._Counted(3 * 1024 + 1) as counted:
        x.to(torch.float8_e4m3fn)
    assert counted.kernels == 0
    kernels = Kernels(launch_us=5.0, other=KernelRate(0, 0), gbytes_per_s=100.0)
    some = unfused.Unfused(3, 2, 40.0, 20.0)
    assert some.time_us("encode", 1e6, kernels) == pytest.approx(3 * 5 + 40e6 / 1e5)
    assert some.time_us("decode", 1e6, kernels, calls=4) == pytest.approx(4 * 2 * 5 + 20e6 / 1e5)


def test_hosts_share_a_port():
    """Of 16 ranks on 2 hosts, 8 send 8/15 of their bytes through one port; a ring crosses it once.

    7 of 8 of its steps are inside a host.
    """
    link = zipccl.hosts_link(2, 8)
    assert link.sharing["all_to_all"] == pytest.approx(8 * 8 / 15)
    assert link.sharing["all_reduce"] == 1.0
    assert link.alpha_us == pytest.approx((7 * 10 + 15) / 8)
    sent = plain(site("all_to_all", 1 << 20, 16), link) - 15 * link.alpha_us
    # half of the 8 ranks' bytes leave
    assert sent == pytest.approx(8 * (1 << 21) / 2 / 20e3, abs=1e-3)
    assert set(zipccl.hosts_link(8, 1).sharing.values()) == {1.0}
    assert zipccl.hosts_link(1, 8, hop=None, sockets=1) == hops("pcie-4")


def test_ring_is_as_fast_as_its_slowest_hop():
    """20 GB/s between hosts, 11 between GPUs of a host: it matters only if a host has several."""
    values, nbytes = 1 << 20, 1 << 21
    for gpus, rate in ((1, 20.0), (2, 11.0), (8, 11.0)):
        link, ranks = zipccl.hosts_link(8, gpus), 8 * gpus
        sent = plain(site("reduce_scatter", values, ranks), link) - (ranks - 1) * link.alpha_us
        assert sent == pytest.approx((ranks - 1) / ranks * nbytes / (rate * 1e3), rel=1e-3)


def test_sockets_of_a_host_share_what_joins_them():
    """Each of 4 of 8 GPUs sends 4/7 of its bytes to the other socket; a ring crosses it once."""
    link = zipccl.hosts_link(1, 8)
    times = [plain(site(kind, 1 << 24, 8), link) for kind in ("all_to_all", "reduce_scatter")]
    start = 7 * link.alpha_us
    assert (times[0] - start) / (times[1] - start) == pytest.approx(4 * 4 / 7)


def test_fsdp_step_waits_for_what_takes_longest():
    """If exchanges take longer: 64 gathers, 32 scatters.

    If compute takes longer: the first gather, 96 times a layer's forward, the last scatter.
    """
    slow = Kernels(launch_us=0.0, other=KernelRate(0, 0), gflops=1e-3)
    fast = dataclasses.replace(slow, gflops=1e12)
    assert zipccl.fsdp_step_us(100.0, 300.0, fast) == pytest.approx(64 * 100 + 32 * 300, rel=1e-3)
    assert zipccl.serial_step_us(100.0, 300.0, fast) == pytest.approx(64 * 100 + 32 * 300, rel=1e-3)
    forward = 2 * zipccl.LLAMA_LAYER * 1024 / 1e-3 / 1e3
    assert zipccl.fsdp_step_us(100.0, 300.0, slow) - 96 * forward == pytest.approx(400, abs=1)
    assert zipccl.LLAMA_LAYER == 218_112_000


def test_ring_of_chips():
    """Both directions of a port of 50 GB/s, minus a fifth."""
    assert equarx.ring_link().gbytes_per_s == pytest.approx(80.0)
    assert equarx.kernels().other.encode_ns == pytest.approx(
        (2 + codec("equarx").expected_bytes(1 << 20, torch.bfloat16) / 2**20) / 409.5
    )
    free, link = FREE, Link(0.0, 80.0)
    of = site("all_reduce", 8 << 20, 8)
    bits = 8 + 32 * 1024 / (1 << 20)  # 1,024 scales for a shard of 2^20 values
    assert gain(of, "ring", "equarx", link, free) == pytest.approx(16 / bits, rel=0.001)
    assert equarx.best_gain(16, 8, link, free) == pytest.approx(16 / bits, rel=0.01)


def test_growth_is_solved_for_alpha():
    """1 GB in 100 exchanges at 20 GB/s. 8 ranks: 14 alpha and 1.75 times 50 ms; 64: 126 and
    1.96875."""
    of = ssfusion.Gradients(1e9, 100)
    link = ssfusion.fit_alpha(of, 2.0)
    alpha = link.alpha_us
    assert alpha == pytest.approx((2 * 1.75 - 1.96875) * 50_000 / (100 * (126 - 2 * 14)))
    few, many = 1400 * alpha + 87_500, 12_600 * alpha + 98_437.5
    assert many / few == pytest.approx(2.0)
    assert ssfusion.growth("all_reduce", of, link) == pytest.approx(2.0)
    assert ssfusion.growth("all_gather", of, link) == pytest.approx(9.0)
    assert ssfusion.in_buffers(of, 64).exchanges == 15


# --- rows -----------------------------------------------------------------------------------------


def test_every_number_has_a_row(found):
    counted = dict.fromkeys(("TACO", "ZipCCL", "EQuARX", "SSFusion"), 0)
    for row in found.values():
        counted[row.paper] += 1
        assert row.assumed
    assert counted == {"TACO": 9, "ZipCCL": 11, "EQuARX": 2, "SSFusion": 4}
    numbers = {name: row.number for name, row in found.items()}
    for ranks, number in ((2, 1.29), (4, 1.70), (8, 1.87)):
        assert numbers[f"TACO: throughput, TP {ranks}"] == number
    for ranks, number in ((2, 0.73), (4, 0.86), (8, 0.70)):
        assert numbers[f"TACO: unfused, TP {ranks}"] == number
    assert sum("reduce_scatter" in name for name in found) == 7
    fitted = {name for name, row in found.items() if row.fitted}
    assert fitted == {
        "TACO: TFLOPS without, TP 2",
        "TACO: TFLOPS without, TP 4",
        "SSFusion: all_reduce, 8 to 64 ranks, BERT-large",
    }
    assert all(found[name].ratio == pytest.approx(1.0) for name in fitted)


def test_fitted_rows_do_not_count():
    some = [made(2.0, 2.0), made(2.0, 3.0), made("native", "native"), made("native", "zipped")]
    assert summary(some) == rows.Summary(predicted=4, met=2, fitted=0)
    assert summary([*some, made(2.0, 2.0, fitted=True)]) == rows.Summary(4, 2, 1)


def test_goal_and_the_share_of_a_gain():
    predicted = (0.849, 0.851, 1.149, 1.151)
    assert [made(1.0, each).met for each in predicted] == [False, True, True, False]
    assert made(1.5, 1.2, speedup=True).of_gain == pytest.approx(0.4)
    assert made(0.8, 0.9, speedup=True).of_gain == pytest.approx(0.5)
    assert made(1.5, 1.2).of_gain is None
    assert made("native", "zipped").ratio is None


def test_tables_say_what_missed():
    assert papers.cells(made(2.0, 3.0)) == [
        "a paper", "a number", "2.00", "3.00", "1.50", "", "no", "nothing",
    ]  # fmt: skip
    assert papers.cells(made(2.0, 2.0, fitted=True))[-2] == "fitted"
    assert papers.as_data([made(2.0, 3.0)])[0]["met"] is False


def test_results_are_those_of_the_model(found):
    """The file in the repository, and the table of the documentation made from it."""
    kept = json.loads(papers.RESULTS.read_text())
    assert kept["summary"] == dataclasses.asdict(summary(list(found.values())))
    page = (ROOT / "docs" / "costmodel.md").read_text()
    for each in kept["rows"]:
        row = found[f"{each['paper']}: {each['what']}"]
        assert each["number"] == row.number
        if row.ratio is None:
            assert each["predicted"] == row.predicted
        else:
            assert each["predicted"] == pytest.approx(row.predicted, rel=1e-6)
        line = f"| {row.what} | {papers.text(row.number)} | {papers.text(row.predicted)} |"
        assert line in page, line


# --- direction of predictions ---------------------------------------------------------------------


def test_more_ranks_gain_more_and_unfused_coding_loses(found):
    gains = [found[f"TACO: throughput, TP {ranks}"].predicted for ranks in (2, 4, 8)]
    assert 1 < gains[0] < gains[1] < gains[2]
    for ranks in (2, 4, 8):
        assert found[f"TACO: unfused, TP {ranks}"].predicted < 1


def test_faster_links_gain_less():
    gains = []
    for rate in (10.0, 40.0, 360.0):
        machine = taco.Fitted(rows.machine().compute_us, Link(8.0, rate))
        gains.append(taco.taco_gain(rows.GPT, machine, 8, CARDS["h100"]))
    assert gains[0] > gains[1] > gains[2]


def test_crowded_port_is_left_to_the_library():
    for gpus, chosen in ((1, "zipped"), (8, "native")):
        assert zipccl.switched(zipccl.hosts_link(8, gpus), 8 * gpus, rows.A6000) == chosen


def test_six_of_seven_choices_of_zipccl_are_predicted():
    found = {row.what: row for row in rows.zipccl_rows() if row.what.startswith("reduce_scatter")}
    assert len(found) == 7
    assert [what for what, row in found.items() if not row.met] == ["reduce_scatter, 8 x 1 GPUs"]


def test_latency_moves_the_crossover_up():
    near, far = (
        equarx.crossover_mib(8, equarx.ring_link(hop), equarx.kernels()) for hop in (1.0, 8.0)
    )
    assert near < far
    fit = equarx.fit_launch_us(8, equarx.ring_link(), far, (0.0, 0.3, 3.0))
    assert fit == 0.3


@pytest.mark.every
def test_other_assumptions_never_count():
    others = tried.all_tried()
    assert len(others) > 20
    assert {row.paper for row in others} == {"TACO", "ZipCCL", "EQuARX", "SSFusion"}
    asked = {(row.paper, row.what): row.number for row in rows.all_rows()}
    assert all(asked[row.paper, row.what] == row.number for row in others)
