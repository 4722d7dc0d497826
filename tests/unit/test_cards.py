"""GPUs and their links by name, against public timings and data sheets."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from deciding import decide

from commpass import Policy
from commpass.backend.options import in_cuda_graphs
from commpass.costmodel import Link, Profile, default_profile, profile_named
from commpass.costmodel.cards import CARDS, GPU, SELECTIONS, SERIAL, SHARES, card_of
from commpass.costmodel.interconnects import INTERCONNECTS
from commpass.costmodel.kernels import CPU
from commpass.costmodel.links import START_US
from commpass.costmodel.profile import INTRA_HOST, LINK, link_named
from commpass.costmodel.protocols import Protocol
from commpass.errors import PolicyError
from commpass.plan import NONE, Site

KIB, MIB = 1 << 10, 1 << 20
H200_BY_8 = {
    2 * KIB: 16.6,
    32 * KIB: 19.7,
    512 * KIB: 20.8,
    2 * MIB: 40.0,
    8 * MIB: 80.6,
    32 * MIB: 198.8,
    128 * MIB: 626.5,
    2048 * MIB: 9518.0,
}
"""NCCL, bf16 all_reduce, 8 H200, CUDA graph, median: flashinfer, pull request 3759."""
H100_BY_8 = {MIB: 24.5, 4 * MIB: 50.0, 64 * MIB: 316.0}
"""NCCL, all_reduce, 8 H100: as NVIDIA's nccl-tests print it; 370 GB/s of bus bandwidth is what
NVIDIA states for it without NVLink SHARP (nccl-tests, issue 212)."""
MI300X = {
    2: {32 * KIB: 17.15, MIB: 37.22, 4 * MIB: 105.1, 16 * MIB: 376.3, 64 * MIB: 1464.3},
    4: {32 * KIB: 18.17, MIB: 39.4, 4 * MIB: 70.61, 16 * MIB: 205.4, 64 * MIB: 761.2},
    8: {32 * KIB: 16.22, MIB: 26.39, 4 * MIB: 52.13, 16 * MIB: 148.4, 64 * MIB: 426.0},
}
"""RCCL 2.20.5, fp16 all_reduce: README of mk1-project/quickreduce (commit 910e892)."""
PCIE_5_BY_8 = {12582912: 482.0, 50331648: 1835.0, 100663296: 3642.0}
"""bf16 all_reduce, 8 cards on PCIe 5: local-inference-lab/b12x (commit 4d0c7a50) has 428, 1,631
and 3,237 us for its own copies, and states that NCCL takes 1.12 to 1.13 times as long."""
TIMINGS = [
    *(("nvlink-4", 8, size, us) for size, us in (*H200_BY_8.items(), *H100_BY_8.items())),
    *(("xgmi-3", ranks, size, us) for ranks, of in MI300X.items() for size, us in of.items()),
    *(("pcie-5", 8, size, us) for size, us in PCIE_5_BY_8.items()),
]


@pytest.mark.parametrize(("name", "ranks", "nbytes", "us"), TIMINGS)
def test_all_reduce_of_a_library_takes_what_was_published(name, ranks, nbytes, us):
    assert 1 / 1.5 < link_named(name).time_us("all_reduce", nbytes, ranks) / us < 1.5


LL = Protocol("LL", 6.0, 2.0, 0.5, near_step_us=0.5, tree_step_us=5.0, most_gbytes_per_s=20.0)
SIMPLE = Protocol("Simple", 8.0, 10.0, 1.0)
NETWORK = Link(5.0, 50.0, protocols=(LL, SIMPLE))


def test_fastest_protocol_carries_out_a_collective():
    """An all_gather of n bytes over 5 ranks has 4 messages of n bytes, one after the other: LL
    takes 6 + 4 * 2 us and 0.2 us a KB, Simple 8 + 4 * 10 and 0.08. They are equal at 283 KB."""
    for nbytes, expected in (
        (0, 14),
        (1e3, 14 + 4e3 / 20e3),
        (280e3 / 4, 14 + 280e3 / 20e3),
        (4e6, 48 + 16e6 / 50e3),
    ):
        assert NETWORK.time_us("all_gather", nbytes, 5) == pytest.approx(expected)
    assert NETWORK.parts_us("all_to_all", 0, 8, 7, by_messages=True) == (5, 0)
    assert NETWORK.time_us("all_to_all", 0, 8) == 6 + 2 + 6 * START_US


def test_small_all_reduce_follows_a_ring_or_a_tree():
    """A ring of 8 ranks has 14 messages of 2 us. A tree of 64 has 2 * 6 messages of 5 us; on hosts
    of 8 it has 2 * 3, and 2 * 7 between neighbours, of half a microsecond."""
    assert NETWORK.parts_us("all_reduce", 0, 8) == (6 + 28, 0)
    assert NETWORK.parts_us("all_reduce", 0, 64) == (6 + 60, 0)
    hosts = dataclasses.replace(NETWORK, on_host=8)
    assert hosts.parts_us("all_reduce", 0, 64) == (6 + 30 + 7, 0)
    ring_us = 6 + 126 / 8 * 2 + 126 * 7 / 8 * 0.5
    no_tree = dataclasses.replace(hosts, protocols=(dataclasses.replace(LL, tree_step_us=0.0),))
    assert no_tree.parts_us("all_reduce", 0, 64) == (ring_us, 0)


def test_collective_takes_a_least_time():
    link = dataclasses.replace(NETWORK, least_us=30.0)
    assert link.time_us("all_gather", 1e3, 5) == pytest.approx(30.0)
    assert link.time_us("all_gather", 4e6, 5) == NETWORK.time_us("all_gather", 4e6, 5)
    assert link.parts_us("all_to_all", 0, 8, 7, by_messages=True) == (5, 0)


def test_switch_that_sums_gets_each_tensor_once():
    """8 ranks: 1 MB at 25 GB/s after 40 us, where a ring sends 1.75 MB at 50 GB/s after 148."""
    sums = Protocol("NVLS", 40.0, 0.0, 0.5, switch_sums=True)
    link = dataclasses.replace(NETWORK, protocols=(SIMPLE, sums))
    assert link.time_us("all_reduce", 1e6, 8) == pytest.approx(40 + 1e6 / 25e3)
    for kind, ranks in (("all_reduce", 2), ("all_gather", 8), ("reduce_scatter", 8)):
        ring = dataclasses.replace(link, protocols=(SIMPLE,))
        assert link.time_us(kind, 1e6, ranks) == ring.time_us(kind, 1e6, ranks)


PAIRS = Link(0.0, 50.0, island=4, bridge_gbytes_per_s=40.0)


def test_bytes_between_islands_pass_the_bridge():
    """Of 8 ranks in two islands of 4, a ring sends one rank's bytes over the bridge. In an
    all_to_all, each rank sends 4 of 7 parts over it: 16 of 7 ranks' bytes."""
    sent = 7e6
    assert PAIRS.time_us("reduce_scatter", 8e6, 8) == pytest.approx(sent / 40e3)
    assert PAIRS.time_us("all_to_all", 8e6, 8) == pytest.approx(sent * 16 / 7 / 40e3)
    in_messages = PAIRS.parts_us("all_to_all", sent, 8, 7, by_messages=True)
    assert in_messages == pytest.approx((0, sent * 16 / 7 / 40e3))
    assert PAIRS.time_us("reduce_scatter", 4e6, 4) == pytest.approx(3e6 / 50e3)


def test_group_inside_an_island_needs_no_bridge():
    profile = Profile("islands", PAIRS)
    for ranks, island in (
        (range(4), 0),
        (range(4, 8), 0),
        (range(8), 4),
        ((0, 1, 4, 5), 2),
        ((3, 4), 1),
        ((0, 1, 2, 4), 1),
    ):
        assert profile.link_of("tp", ranks=ranks).island == island
    hosts = dataclasses.replace(profile, ranks_per_host=8, intra_host_link=PAIRS)
    assert hosts.link_of("tp", ranks=range(12, 16)).island == 0
    assert hosts.link_of("tp", ranks=range(8, 16)).island == 4


def test_connections_of_pairs_are_used_together():
    """Of 448 GB/s to 7 others a pair has 64: 3 of them have 192."""
    link = Link(0.0, 448.0, peer_gbytes_per_s=64.0)
    for ranks, rate in ((2, 64.0), (4, 192.0), (8, 448.0)):
        sent = 2 * (ranks - 1) / ranks * 1e6
        assert link.time_us("all_reduce", 1e6, ranks) == pytest.approx(sent / rate / 1e3)
    one_of_seven = link.parts_us("all_to_all", 1e6, 8, 1, by_messages=True)
    assert one_of_seven == pytest.approx((0, 1e6 / 64e3))
    assert link.scaled(0.5).time_us("all_reduce", 1e6, 2) == pytest.approx(1e3 / 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"least_us": -1.0},
        {"peer_gbytes_per_s": -1.0},
        {"on_host": -1},
        {"island": 2},
        {"island": 2.5},
        {"protocols": ("LL",)},
    ],
)
def test_link_refuses_invalid_numbers(wrong):
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        Link(1.0, 1.0, **wrong)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_card_is_known_by_the_words_of_its_name(device, card):
    assert card_of(device) == card


@pytest.mark.parametrize("name", CARDS)
def test_card_names_known_links(name):
    card = CARDS[name]
    assert card.source
    assert INTERCONNECTS[card.interconnect].gbytes_per_s > INTERCONNECTS[card.network].gbytes_per_s


def test_group_between_hosts_is_not_on_the_links_inside_one():
    found = default_profile("cuda", "NVIDIA H100 80GB HBM3", ranks_per_host=8)
    assert found.port_of("tp", ranks=range(8, 16)) == INTRA_HOST
    assert found.link_of("tp", ranks=range(8, 16)) == link_named("nvlink-4")
    network = link_named("infiniband-ndr")
    for ranks, on_host in ((range(16), 8), (range(0, 64, 8), 1), ((7, 8), 1)):
        assert found.port_of("dp", ranks=ranks) == LINK
        link = found.link_of("dp", ranks=ranks)
        assert dataclasses.replace(link, sharing={}) == dataclasses.replace(
            network, on_host=on_host
        )
        assert bool(link.sharing) == (on_host > 1)
    alone = default_profile("cuda", "NVIDIA H100 80GB HBM3")
    assert alone == Profile("h100", link_named("nvlink-4"), kernels=CARDS["h100"].kernels)


def test_rack_of_one_interconnect_is_as_one_host():
    found = default_profile("cuda", "NVIDIA GB200", ranks_per_host=4)
    assert found.link_of("tp", ranks=range(72)) == link_named("nvlink-5")
    network = dataclasses.replace(link_named("infiniband-ndr"), on_host=1)
    assert found.link_of("dp", ranks=range(0, 144, 72)) == network


@pytest.mark.parametrize("kernels", [GPU, *(card.kernels for card in CARDS.values())])
def test_simpler_codec_costs_less(kernels):
    assert kernels.rates.keys() == SHARES.keys() | SERIAL.keys() | SELECTIONS.keys()
    int8, rotated, taco = (kernels.rates[name] for name in ("int8", "rotated", "taco"))
    assert int8.encode_ns < rotated.encode_ns < taco.encode_ns
    assert int8.decode_ns < rotated.decode_ns


def test_kernel_bound_by_instructions_gains_nothing_from_memory():
    """int8 runs at the speed of a copy, nvfp4's encode at 0.38 of it on an H200."""
    h200, b200 = CARDS["h200"], CARDS["b200"]
    memory = h200.gbytes_per_s / b200.gbytes_per_s
    slots = h200.slots / b200.slots
    assert memory < slots < 1
    for codec, ratio in (("int8", memory), ("nvfp4", slots)):
        times = [card.kernels.rates[codec].encode_ns for card in (b200, h200)]
        assert times[0] / times[1] == pytest.approx(ratio)
    slow = CARDS["l40s"]  # of little bandwidth: bound by memory
    copy_ns = (2 + SHARES["rotated"].wire) / slow.kernels.gbytes_per_s
    assert slow.kernels.rates["rotated"].encode_ns == pytest.approx(copy_ns / 0.95)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_states_its_processors(name):
    assert 10_000 < CARDS[name].slots < 100_000


def test_launches_in_a_graph_take_less_time():
    kernels = CARDS["h100"].kernels
    assert kernels.in_graph.time_us("int8", "encode", 0) < kernels.time_us("int8", "encode", 0)
    assert CPU.in_graph == CPU


def test_profile_of_graphs_that_inductor_records_has_their_launches():
    profile = default_profile("cuda", "NVIDIA H100 80GB HBM3")
    assert in_cuda_graphs(profile) == profile
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert in_cuda_graphs(profile).kernels == profile.kernels.in_graph
        measured = dataclasses.replace(profile, kernels=CPU)
        assert in_cuda_graphs(measured) == measured


def test_named_link_has_the_kernels_of_the_card_made_for_it():
    assert profile_named("nvlink-3").kernels == CARDS["a100"].kernels
    assert profile_named("nvlink-4").kernels == CARDS["h100"].kernels
    assert profile_named("nvlink-5").kernels == CARDS["b200"].kernels
    assert profile_named("xgmi-3").kernels == CARDS["mi300x"].kernels
    for name in ("nvlink", "pcie-4", "pcie-5", "infiniband-ndr"):
        assert profile_named(name).kernels == GPU


def decided(profile: Profile, nbytes: int, codecs: str) -> str:
    return decided_site(profile, nbytes, codecs).codec


def decided_site(profile: Profile, nbytes: int, codecs: str) -> Site:
    site = Site(
        name="s",
        kind="all_reduce",
        reduce_op="sum",
        group="0",
        group_size=8,
        dtype="bfloat16",
        shape=(nbytes // 2,),
        bytes=nbytes,
        device="cuda",
    )
    return decide([site], Policy(codecs=codecs), profile)[0]


@pytest.mark.parametrize("nbytes", [64 * KIB, 512 * KIB, MIB, 4 * MIB])
def test_small_all_reduce_of_a_host_is_left_alone(nbytes):
    """NCCL takes 20 to 50 us: two exchanges and three kernels take longer."""
    found = default_profile("cuda", "NVIDIA H100 80GB HBM3", ranks_per_host=8)
    assert decided(found, nbytes, "int8") == NONE


def test_all_reduce_of_64_mib_is_left_alone_on_8_h100():
    """NCCL takes 316 us. It takes 115 us to gather or scatter 32 MiB (aiconfigurator, between its
    8 and 128 MB), and two of them and the kernels take as long."""
    found = default_profile("cuda", "NVIDIA H100 80GB HBM3", ranks_per_host=8)
    assert decided(found, 64 * MIB, "int8") == NONE


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_all_reduce_of_128_mib_saves_about_what_one_kernel_was_measured_to(card):
    """626.5 -> 523.8 us on 8 H200, fp8 (flashinfer, pull request 3759); NCCL 578.7 us on 8 H100."""
    site = decided_site(default_profile("cuda", card, ranks_per_host=8), 128 * MIB, "int8")
    assert (site.codec, site.algorithm) == ("int8", "two_shot")
    assert site.plain_us == pytest.approx(578.7, rel=0.1)
    assert 0.1 < 1 - site.predicted_us / site.plain_us < 1.2 * (1 - 523.8 / 626.5)


def test_large_all_reduce_is_compressed_rather_than_a_small_one():
    profile = dataclasses.replace(default_profile("cuda", "NVIDIA H100 80GB HBM3"), margin=0.0)
    chosen = [decided(profile, size << 20, "int8") != NONE for size in (1, 4, 16, 64, 256, 1024)]
    assert chosen == sorted(chosen)
    assert chosen[-1]


# --- matmuls that encode their result -------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def with_encode(card: str, codec: str, m: int, n: int, k: int) -> float:
    """Return the predicted time of a matmul that encodes, relative to the matmul alone."""
    kernels, nbytes = CARDS[card].kernels, 2 * (m * k + k * n + m * n)
    alone = kernels.time_us(codec, "matmul", 2 * m * n * k, nbytes)
    return 1 + kernels.time_us(codec, "in matmul", m * n) / alone


@pytest.mark.parametrize(
    ("card", "file"), [("h200", "gpu_nvidia_h200"), ("h100", "gpu_nvidia_h100_80gb_hbm3")]
)
def test_encode_in_a_matmul_takes_about_what_was_measured(card, file):
    found = json.loads((RESULTS / f"{file}.json").read_text())["timings"]
    off = []
    for row in found:
        if row["name"].startswith("matmul_encode "):
            m, n, k = map(int, row["name"].split()[1::2])
            off.append(abs(with_encode(card, row["what"], m, n, k) - row["of_matmul"]))
    assert len(off) == 12
    assert max(off) < 0.12
    assert statistics.median(off) < 0.03


@pytest.mark.parametrize("codec", ["int8", "rotated"])
def test_share_of_an_encode_falls_with_the_length_of_the_products(codec):
    """Between a half and a percent: independent estimates for int8 are 1.35 to 1.5, 1.07 to 1.15
    and 1.03 to 1.07."""
    ratios = [with_encode("h100", codec, 4096, 4096, k) for k in (512, 4096, 14336)]
    assert ratios == sorted(ratios, reverse=True)
    assert 1.25 < ratios[0] < 1.75
    assert 1.01 < ratios[2] < 1.07
