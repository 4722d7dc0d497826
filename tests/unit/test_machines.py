"""Named machines: their files, and times between their GPUs against values by hand."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.costmodel import Link, Profile, prices, profile_from, profile_named
from commpass.costmodel.cards import CARDS
from commpass.costmodel.files import digest
from commpass.costmodel.machines import (
    NamedMachine,
    machine_named,
    machine_names,
    parse_machine,
)
from commpass.costmodel.profile import INTRA_HOST, LINK, link_named
from commpass.distributed.machine import profile_here
from commpass.errors import CommpassError, PolicyError, ProfileError
from commpass.plan.stage import ALL, plain_exchange
from commpass.report import simulate as report_simulate
from commpass.report.breakeven import decided
from commpass.report.simulate import nodes_of
from commpass.simulate import check_gpus

DOCS = Path(commpass.__file__).parents[1] / "docs" / "costmodel.md"
TEXT = """
title = "Two of them"
card = "h100"
gpus = 4
intra_host_link = "nvlink-4"
network = "infiniband-ndr"
ports = 2
oversubscription = 2
sources = ["a test"]
"""


def of_machine(name: str, **changes) -> Profile:
    """Return the profile of a machine whose links have no latency and no protocols."""
    found = profile_named(name)
    bare = {"protocols": (), "alpha_us": 0.0, "least_us": 0.0}
    return dataclasses.replace(
        found,
        link=dataclasses.replace(found.link, **bare),
        intra_host_link=dataclasses.replace(found.intra_host_link, **bare),
        **changes,
    )


def time_us(profile: Profile, kind: str, nbytes: float, members) -> float:
    members = list(members)
    return prices(profile, len(members), (), members).time_us(kind, nbytes)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", machine_names())
def test_file_names_known_parts_and_its_sources(name):
    machine = machine_named(name)
    assert all(len(source) > 20 for source in machine.sources)
    profile = profile_named(name)
    assert (profile.name, profile.ranks_per_host) == (name, machine.gpus)
    assert profile.kernels == CARDS[machine.card].kernels
    assert profile.intra_host_link.gbytes_per_s >= profile.link.gbytes_per_s
    assert profile.ports == machine.ports
    if isinstance(machine.intra_host_link, str):
        assert profile.intra_host_link == link_named(machine.intra_host_link)
    raw = (resources.files("commpass.costmodel") / "machines" / f"{name}.toml").read_text()
    assert set(tomllib.loads(raw)) <= set(NamedMachine.__struct_fields__)
    assert max(map(len, raw.splitlines())) <= 120


def test_at_least_the_usual_machines_have_names():
    names = """a100-pcie a3-megagpu-8g dgx-a100 dgx-h100 dgx-h200 g6e.48xlarge gb200-nvl72
    gb300-nvl72 hgx-b200 l40s-pcie mi300x-8 mi350x-8 p4d.24xlarge p5.48xlarge rtx-pro-6000-pcie"""
    assert set(names.split()) <= set(machine_names())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("h100", "h10", "card: unknown name 'h10'; did you mean 'h100'"),
        ("nvlink-4", "nvlink-44", "intra_host_link: unknown name .* did you mean 'nvlink-4'"),
        ("infiniband-ndr", "infiniband-nrd", "network: .* did you mean 'infiniband-ndr'"),
        ("gpus = 4", "gpus = 0", "gpus=0: must be a number"),
        ("ports = 2", "ports = 0", "ports=0: must be a number"),
        ("oversubscription = 2", "oversubscription = 0.5", "oversubscription=0.5"),
        ('["a test"]', "[]", "sources: must"),
        ("title", "titles", "titles"),
        ("ports = 2\n", "", "ports"),
        ("gpus = 4", "gpus =", "Invalid value"),
    ],
)
def test_invalid_file_is_refused_with_its_name_and_the_cause(old, new, expected):
    assert parse_machine(TEXT.encode(), "two").ports == 2
    with pytest.raises(ProfileError, match=f"machine 'two': .*{expected}"):
        parse_machine(TEXT.replace(old, new).encode(), "two")


@pytest.mark.parametrize("find", [profile_named, machine_named])
def test_unknown_name_is_refused_with_the_nearest_one(find):
    with pytest.raises(PolicyError, match="did you mean 'dgx-h100'"):
        find("dgx-h10")
    with pytest.raises(PolicyError, match="unknown link 'dgx-h100'"):
        link_named("dgx-h100")


def test_machine_is_the_base_of_a_file_and_a_value_of_the_environment(tmp_path, monkeypatch):
    (tmp_path / "ours.toml").write_text('base = "dgx-h100"\nranks_per_host = 4\nports = 1\n')
    found = profile_from(tmp_path / "ours.toml")
    named = profile_named("dgx-h100")
    expected = dataclasses.replace(named, name="ours", ranks_per_host=4, ports=1)
    assert digest(found) == digest(expected) != digest(named)
    monkeypatch.setenv("COMMPASS_PROFILE", "dgx-h100")
    assert profile_here(None) == named


def row(name: str) -> str:
    """Return the row of a machine in the documentation."""
    machine = machine_named(name)
    inside = f"`{machine.inside.base}`"
    if machine.inside.gbytes_per_s:
        inside += f" at {machine.inside.gbytes_per_s:g} GB/s"
    if machine.inside.island:
        inside += (
            f", islands of {machine.inside.island} GPUs with"
            f" {machine.inside.bridge_gbytes_per_s:g} GB/s between them"
        )
    network = f"{machine.ports} x `{machine.network}`"
    return (
        f"| `{name}` | {machine.title} | {machine.gpus} x `{machine.card}` | {inside} | {network} |"
    )


def test_documentation_has_the_table_of_the_files():
    text = DOCS.read_text()
    _, _, section = text.partition("### Named machines")
    found = [line for line in section.split("\n### ")[0].splitlines() if line.startswith("| `")]
    assert found == [row(name) for name in machine_names()]


# --- times ----------------------------------------------------------------------------------------


def test_ring_and_all_to_all_within_an_island_and_across():
    """Each of 8 ranks on PCIe hands 8 MB. A ring sends 14 MB on a link of 25.4 GB/s, and half of it
    as much over the bridge in each direction. An all_to_all sends 7 MB, of which 16 / 7 ranks'
    bytes pass the bridge of 38.8 GB/s. Among 4 GPUs of an island there is no bridge. With two on
    each island 4 / 3 ranks' bytes pass it, of which the other 4 GPUs use half."""
    host = of_machine("l40s-pcie")
    assert time_us(host, "all_reduce", 8e6, range(8)) == pytest.approx(14e6 / 25.4e3)
    assert time_us(host, "all_to_all", 8e6, range(8)) == pytest.approx(7e6 * 16 / 7 / 38.8e3)
    for members in (range(4), range(4, 8), range(12, 16)):
        assert time_us(host, "all_reduce", 8e6, members) == pytest.approx(12e6 / 25.4e3)
        assert time_us(host, "all_to_all", 8e6, members) == pytest.approx(6e6 / 25.4e3)
    across = time_us(host, "all_to_all", 8e6, (0, 1, 4, 5))
    assert across == pytest.approx(6e6 * 4 / 3 / (38.8e3 / 2))
    assert across > 6e6 / 25.4e3


def test_links_of_a_mesh_are_used_together():
    """MI300X: 64 GB/s to each other GPU, of which 0.7 are reached."""
    host = of_machine("mi300x-8")
    for ranks in (2, 4, 8):
        expected = 2 * (ranks - 1) / ranks * 8e6 / (0.7 * 64e3 * (ranks - 1))
        assert time_us(host, "all_reduce", 8e6, range(ranks)) == pytest.approx(expected)


def test_ranks_share_the_ports_of_their_host():
    """p4d has 4 ports of 12.5 GB/s for 8 GPUs, of which 0.8 are reached: 10 GB/s. In groups with
    one rank on each host, two ranks share a port."""
    host = of_machine("p4d.24xlarge")
    assert time_us(host, "all_gather", 1e6, range(0, 32, 8)) == pytest.approx(3e6 * 2 / 10e3)
    assert time_us(host, "all_to_all", 4e6, range(0, 32, 8)) == pytest.approx(3e6 * 2 / 10e3)
    own = of_machine("dgx-h100")
    assert time_us(own, "all_gather", 1e6, range(0, 32, 8)) == pytest.approx(3e6 / 40e3)


def test_rings_of_a_library_use_all_ports_of_a_host():
    """Of 16 ranks on two DGX, each port of 40 GB/s carries an eighth of a ring. With ranks 0 to 3
    of each host there are four ports. On p4d, 8 ranks have four ports of 10 GB/s. With a GPU in
    each of two islands, a ring is no faster than 25.4 GB/s inside the host."""
    free = {"alpha_us": 0.0, "least_us": 0.0}
    for name, members, gbytes_per_s in (
        ("dgx-h100", range(16), 8 * 40),
        ("dgx-h100", (0, 1, 2, 3, 8, 9, 10, 11), 4 * 40),
        ("dgx-h100", range(0, 64, 8), 40),
        ("p4d.24xlarge", range(16), 4 * 10),
        ("p4d.24xlarge", range(0, 64, 8), 10 / 2),
        ("l40s-pcie", range(16), 25.4),
        ("gb200-nvl72", range(144), 738),
    ):
        found = profile_named(name)
        simple = tuple(
            dataclasses.replace(each, start_us=0.0, step_us=0.0, near_step_us=0.0, tree_step_us=0.0)
            for each in found.link.protocols
            if each.name == "Simple"
        )
        link = dataclasses.replace(found.link, protocols=simple, **free)
        inside = dataclasses.replace(found.intra_host_link, protocols=())
        bare = dataclasses.replace(found, link=link, intra_host_link=inside)
        count = len(list(members))
        sent = 2 * (count - 1) / count * 1e9
        expected = pytest.approx(sent / gbytes_per_s / 1e3)
        assert time_us(bare, "all_reduce", 1e9, members) == expected, (name, members)


def test_message_of_a_ring_between_pairs_has_one_port():
    """A library's rings are on all ports, but a message between two ranks is on one."""
    found = prices(profile_named("dgx-h100"), 16, ())
    one = dataclasses.replace(plain_exchange("all_to_all", 1 << 26), peers=1, reach="next")
    assert found.task(one).us == pytest.approx((1 << 26) / 40e3)
    whole = found.task(plain_exchange("all_gather", 1 << 26))
    assert whole.us == pytest.approx(15 * (1 << 26) / 8 / 40e3)
    assert plain_exchange("all_gather", 1).reach == ALL


def test_rack_of_one_interconnect_is_one_host():
    rack = profile_named("gb300-nvl72")
    assert rack.port_of(ranks=range(72)) == INTRA_HOST
    assert rack.port_of(ranks=range(60, 80)) == LINK


def test_oversubscribed_network_is_slower_by_its_number():
    two = parse_machine(TEXT.encode(), "two")
    assert (two.oversubscription, machine_named("dgx-h100").oversubscription) == (2, 1)
    full = link_named("infiniband-ndr")
    half = full.scaled(1 / two.oversubscription)
    assert half.gbytes_per_s == full.gbytes_per_s / 2
    assert half.protocols == full.protocols


# --- commands -------------------------------------------------------------------------------------


def test_break_even_of_a_host_is_on_the_links_inside_it():
    policy = commpass.Policy()
    machine = profile_named("dgx-h100")
    inside = Profile("inside", machine.intra_host_link, kernels=machine.kernels)
    for ranks, alike in ((8, True), (16, False)):
        plain = [
            decided(each, ranks, "bfloat16", "all_reduce", policy, 1 << 24).plain_us
            for each in (machine, inside)
        ]
        assert (plain[0] == plain[1]) == alike
    assert decided(machine, 16, "bfloat16", "all_reduce", policy, 1 << 24).plain_us == (
        pytest.approx(prices(machine, 16, ()).time_us("all_reduce", 1 << 24), rel=1e-4)
    )


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
def test_break_even_is_shown_for_a_machine_and_for_a_card():
    given = ("--ranks=8", "--dtype=bfloat16", "--json")
    (named,) = json.loads(call("breakeven", "dgx-h100", *given).output)
    assert named["profile"] == "dgx-h100"
    (other,) = json.loads(call("breakeven", "dgx-h100", "--card", "a100", *given).output)
    assert other["profile"] == "dgx-h100 with a100"
    assert other["uncompressed_us"] == named["uncompressed_us"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ethernet-25g", "--gpus"], "ethernet-25g does not say which GPU encodes"),
        (["infiniband-ndr"], "name it with --card"),
        (["dgx-h100", "--card", "h10"], "did you mean 'h100'"),
        (["dgx-h100", "--card", "H100 SXM"], "did you mean 'h100'"),
        (["dgx-h10"], "did you mean 'dgx-h100'"),
    ],
)
def test_break_even_asks_for_the_card(arguments, expected):
    found = call("breakeven", *arguments)
    assert found.exit_code == 2
    assert expected in found.output


def test_mesh_has_the_gpus_of_the_nodes():
    machine = profile_named("dgx-h100")
    check_gpus({"dp": 16, "tp": 8}, machine, 16)
    with pytest.raises(
        CommpassError, match=r"64 ranks, but 16 nodes .* 128 GPUs: write dp=16,tp=8"
    ):
        check_gpus({"dp": 8, "tp": 8}, machine, 16)
    with pytest.raises(CommpassError, match="change its sizes"):
        check_gpus({"dp": 8, "tp": 3}, machine, 16)
    with pytest.raises(CommpassError, match="must be a number of nodes"):
        check_gpus({"dp": 8}, machine, 0)
    with pytest.raises(CommpassError, match="how many GPUs a node has"):
        check_gpus({"dp": 8}, Profile("one", Link(1, 1)), 1)
    assert nodes_of({"dp": 3, "tp": 8}, "dgx-h100") == 3
    assert nodes_of({"tp": 4}, "dgx-h100") is None
    with pytest.raises(CommpassError, match="multiple of 8"):
        nodes_of({"dp": 3, "tp": 4}, "dgx-h100")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cluster", "dgx-h10"], "unknown machine 'dgx-h10'; did you mean 'dgx-h100'"),
        (["--cluster", "infiniband-ndr"], "machine 'infiniband-ndr': it is a link, for --profile."),
        (["--cluster", "dgx-h100", "--profile", "nvlink-4"], "a file: both are given"),
        ([], "a file: neither is given, and COMMPASS_PROFILE is not set"),
        (["--cluster", "dgx-h100", "--nodes", "2"], "8 ranks, but 2 nodes of dgx-h100 have 16"),
        (["--profile", "nvlink-4", "--nodes", "2"], "how many GPUs a node has"),
    ],
)
def test_simulate_refuses_what_does_not_fit(tmp_path, arguments, expected):
    (tmp_path / "model.py").write_text("def build(mesh): ...\n")
    found = call("simulate", f"{tmp_path}/model.py:build", "--mesh", "tp=8", *arguments)
    assert found.exit_code == 2
    assert expected in " ".join(found.output.split())


def test_simulate_takes_the_profile_of_the_environment(monkeypatch):
    monkeypatch.setenv("COMMPASS_PROFILE", "nvlink-4")
    assert report_simulate.profile_of(None, None) == "nvlink-4"
    assert report_simulate.profile_of("ethernet-1g", None) == "ethernet-1g"
    assert report_simulate.profile_of(None, "dgx-h100") == "dgx-h100"
    monkeypatch.setenv("COMMPASS_PROFILE", "")
    with pytest.raises(CommpassError, match="give either --cluster"):
        report_simulate.profile_of(None, None)
