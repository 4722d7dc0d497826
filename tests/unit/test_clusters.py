"""Predictions for clusters: the formulas of a step by hand, and the page beside its results."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import commpass
from benchmarks.clusters import whole
from benchmarks.clusters.averages import Average, average, exposed_ms, group_of, weights_of
from benchmarks.clusters.cases import CASES, case
from benchmarks.clusters.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTURE
from benchmarks.clusters.page import page
from benchmarks.clusters.steps import POLICIES, Layers, part_of, send_ms, simulated, step
from commpass.costmodel import prices, profile_named
from commpass.simulate import check_gpus

ROOT = Path(commpass.__file__).parents[1]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "clusters.json").read_text())


def test_page_is_written_from_the_results():
    assert (ROOT / "docs" / "clusters.md").read_text() == page(FOUND)
    assert (ROOT / "docs" / "clusters.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_of_the_cases():
    cases = [(each.model.name, each.machine, each.gpus, each.text) for each in CASES]
    keys = ("model", "machine", "gpus", "mesh_text")
    assert [tuple(row[key] for key in keys) for row in FOUND["rows"]] == cases
    assert all(tuple(row["policies"]) == POLICIES for row in FOUND["rows"])
    assert {each.gpus for each in CASES} >= {8, 64, 1024, 16384, 100_000}


@pytest.mark.parametrize("each", CASES, ids=lambda each: f"{each.model.name}-{each.gpus}")
def test_case_fills_its_machines(each):
    profile = profile_named(each.machine)
    check_gpus(each.sizes, profile, each.gpus // profile.ranks_per_host)
    inner = {name: size for name, size in each.mesh if name in ("tp", "ep")}
    assert list(inner) == list(each.sizes)[-1:]
    assert each.model.heads % inner.get("tp", 1) == 0
    assert max(each.model.experts, inner.get("ep", 1)) % inner.get("ep", 1) == 0


def test_models_have_the_parameters_of_their_names():
    """Without embeddings and output layer, which have up to a sixth of them."""
    for model, billions in ((LLAMA_8B, 8), (LLAMA_70B, 70), (LLAMA_405B, 405), (MIXTURE, 235)):
        assert 0.86 < model.parameters / 1e9 / billions < 1.01


ROWS = [pytest.param(row, id=f"{row['model']}-{row['gpus']}") for row in FOUND["rows"]]


@pytest.mark.parametrize("row", ROWS)
def test_policies_are_in_order(row):
    """Lossless is never slower than off. Fewer bits cost at most the margin of the exchanges, of
    which ``off`` exposes all, in each of the micro-batches and those of the pipeline's bubble."""
    times = {name: each["step_ms"] for name, each in row["policies"].items()}
    off = row["policies"]["off"]
    batches = row["micro_batches"]
    batch_ms = (off["step_ms"] - off["bubble_ms"]) / batches
    exposed = off["exposed_ms"] * (1 + off["bubble_ms"] / batch_ms / batches)
    assert times["lossless"] <= times["off"]
    margin = profile_named(row["machine"]).margin
    for name in ("balanced", "aggressive"):
        assert times[name] <= times["lossless"] + margin * exposed
    for each in row["policies"].values():
        assert 0 < each["exposed_ms"] < each["step_ms"]
        assert each["bubble_ms"] < each["step_ms"]


def test_more_replicas_take_no_less_time():
    """Each replica has the same micro-batches."""
    for one, other in pairwise(CASES):
        alike = {key: value for key, value in one.sizes.items() if key != "dp"}
        if (one.model, one.machine) != (other.model, other.machine):
            continue
        if alike != {key: value for key, value in other.sizes.items() if key != "dp"}:
            continue
        rows = [FOUND["rows"][CASES.index(each)]["policies"] for each in (one, other)]
        assert one.gpus < other.gpus
        for name in POLICIES:
            assert rows[0][name]["step_ms"] <= rows[1][name]["step_ms"]


def test_one_layer_is_as_a_part_of_the_whole():
    for times in FOUND["whole"]["policies"].values():
        assert times["by_layers_ms"] == pytest.approx(times["micro_batch_ms"], rel=0.03)
        assert times["last_by_layers_ms"] == pytest.approx(times["last_ms"], rel=0.2)


def test_step_of_a_pipeline():
    """Two stages of 16 layers of 3 ms, of which 1 ms is exposed, and 4 micro-batches, each sent in
    5 ms twice: 5 batches of 58 ms. The averages of a layer take 3 ms, and backward 2: those of 16
    layers end 3 + 15 ms after the last backward."""
    two = case(LLAMA_8B, "dgx-h100", 4, pp=2, dp=4, tp=8)
    found = step(two, Layers(3.0, 1.0, 1, 4), Average(3.0, 2, 4), 5.0)
    assert found["step_ms"] == 5 * (16 * 3 + 10) + 18
    assert found["exposed_ms"] == 4 * (16 * 1 + 10) + 18
    assert (found["gradients_ms"], found["bubble_ms"]) == (18, 58)
    assert (found["compressed"], found["sites"]) == (3, 8)


def test_averages_overlap_with_backward_of_the_layers_below():
    assert exposed_ms(10, 5.0, 3.0) == 3.0
    assert exposed_ms(10, 2.0, 3.0) == 3.0 + 9 * 1.0
    assert exposed_ms(10, 5.0, 0.0) == 0.0


def test_groups_and_weights_of_a_case():
    dense = case(LLAMA_8B, "dgx-h100", 1, pp=2, dp=3, tp=4)
    assert group_of(dense, ("dp",)) == (0, 4, 8)
    assert (dense.next_stage, dense.gpus, dense.layers) == (12, 24, 16)
    whole_layer = sum(sum(each) for each in weights_of(dense).values()) * 4
    assert whole_layer == LLAMA_8B.parameters // LLAMA_8B.layers
    mixed = case(MIXTURE, "dgx-h100", 1, dp=2, pp=3, ep=64)
    assert group_of(mixed, ("dp",)) == (0, 192)
    assert group_of(mixed, ("dp", "ep")) == (*range(64), *range(192, 256))
    (attention, experts) = weights_of(mixed).values()
    assert sum(experts) == 2 * 3 * MIXTURE.width * MIXTURE.ffn
    assert sum(attention) == MIXTURE.width * (2 * 64 + 2 * 4) * 128


def test_average_without_a_codec_is_the_plain_all_reduces():
    two = case(LLAMA_8B, "p4d.24xlarge", 1, dp=4, tp=8)
    here = prices(profile_named("p4d.24xlarge"), 4, ("dp",), (0, 8, 16, 24))
    expected = sum(here.time_us("all_reduce", 4 * n) for n in weights_of(two)[("dp",)]) / 1e3
    off = average(two, "off")
    assert off.ms == pytest.approx(expected, rel=1e-5)
    assert (off.compressed, off.sites) == (0, 4)
    coded = average(two, "balanced")
    assert coded.ms < off.ms / 2
    assert coded.compressed > 0
    assert average(case(LLAMA_8B, "p4d.24xlarge", 1, dp=1, tp=8), "off") == Average(0.0, 0, 0)


def test_stage_sends_its_share_of_the_activations():
    two = case(LLAMA_8B, "dgx-h100", 4, pp=2, dp=4, tp=8)
    network = profile_named("dgx-h100").link
    nbytes = 8192 * 4096 * 2 / 8
    assert send_ms(two) == pytest.approx(network.time_us("send", nbytes, 2) / 1e3, rel=1e-6)
    assert 1 < send_ms(two) / (nbytes / 40e6) < 1.2
    inside = case(LLAMA_8B, "gb300-nvl72", 4, dp=4, pp=9, tp=8)
    assert send_ms(inside) < send_ms(two) / 5
    assert send_ms(case(LLAMA_8B, "dgx-h100", 4, dp=4, tp=8)) == 0.0


@pytest.mark.slow
def test_a_layer_has_the_exchanges_of_its_mesh():
    """Two all_reduces in each direction. Each has a row of 1,024 values for each of 1,024 tokens,
    2 MB in bfloat16."""
    found = simulated(part_of(whole.CASE))
    off = found["off"]
    assert (off.sites, off.compressed) == (4, 0)
    host = profile_named("p4d.24xlarge")
    each_us = prices(host, 8, ()).time_us("all_reduce", 2 * 1024 * 1024)
    assert off.exposed_ms == pytest.approx(4 * each_us / 1e3, rel=0.01)
    assert found["lossless"].step_ms <= off.step_ms


@pytest.mark.every
def test_layers_of_experts_have_all_to_alls_and_averages():
    small = case(MIXTURE, "dgx-h100", 1, dp=2, ep=8)
    part = part_of(small)
    micro = simulated(part)
    assert micro["off"].sites == 4

    last = simulated(replace(part, mesh=small.mesh, averages=True))
    assert last["off"].sites == 4 + 2 + 1 + 2  # attention, router, experts
    assert last["off"].step_ms > micro["off"].step_ms
