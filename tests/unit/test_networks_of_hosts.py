"""Profiles of networks that were read: of CPU hosts, and between hosts with GPUs."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
import report_dumps
from sys_trees import add_interface
from typer.testing import CliRunner

from commpass.cli import app
from commpass.costmodel import Profile, default_profile, ethernet
from commpass.costmodel.files import digest
from commpass.costmodel.networks import Ports, cpu_profile, gpu_profile
from commpass.costmodel.profile import DEFAULT_CPU
from commpass.distributed import network
from commpass.distributed.agreed_network import network_of, profile_over
from commpass.distributed.interfaces import Interface
from commpass.distributed.network import NetworkOfRank
from commpass.errors import PolicyError
from commpass.plan import dump

H100 = "NVIDIA H100 80GB HBM3"
NDR = Interface("mlx5_0:1 to mlx5_7:1", 400_000, 8, "infiniband")
NO_PORTS = Interface("", reason="no network interface is in use")
ETH0 = Interface("eth0", 1000)


def on_hosts(hosts: str, gloo: Interface = ETH0, nccl: Interface = NDR) -> dict[int, NetworkOfRank]:
    """Return what ranks have published, each on the host of its letter."""
    return {rank: NetworkOfRank(host, gloo, nccl) for rank, host in enumerate(hosts)}


def over(hosts: str, device: str = "cuda", card: str = H100, **interfaces: Interface) -> Profile:
    found = on_hosts(hosts, **interfaces)
    return profile_over(network_of(found, len(hosts), 0), device, card)


def test_ranks_of_a_cpu_host_share_its_port():
    found = cpu_profile(1.0, 4, "read from eth0")
    assert found.link_of(ranks=(0, 1, 2, 3)) == DEFAULT_CPU.link
    between = found.link_of(ranks=(0, 4))  # one of 4 groups that use the port at the same time
    assert between.gbytes_per_s == ethernet(1).link.gbytes_per_s
    assert set(between.sharing.values()) == {4.0}
    ring = found.link_of(ranks=range(8))
    assert ring.sharing["all_reduce"] == 1.0
    assert digest(cpu_profile(1.0, 1, "read from eth0")) == digest(ethernet(1))


def test_gpus_of_several_hosts_have_the_ports_that_were_read():
    found = over("a" * 8 + "b" * 8)
    assert found.description == ("h100 over infiniband-400g (read from mlx5_0:1 to mlx5_7:1)")
    default = default_profile("cuda", H100, ranks_per_host=8)  # the vendor's network is the same
    assert digest(found) == digest(default)


@pytest.mark.parametrize(
    ("ports", "name", "gbytes_per_s", "shared"),
    [
        (Interface("mlx5_0:1", 100_000, 1, "infiniband"), "h100 over infiniband-100g", 10.0, 8.0),
        (Interface("mlx5_0:1", 200_000, 4, "roce"), "h100 over roce-200g", 20.0, 2.0),
        (Interface("eth0", 25_000), "h100 over ethernet-25g", 2.5, 8.0),
    ],
)
def test_gpus_share_few_ports(ports, name, gbytes_per_s, shared):
    found = over("a" * 8 + "b" * 8, nccl=ports)
    assert (found.name, found.link.gbytes_per_s) == (name, gbytes_per_s)
    link = found.link_of(ranks=(0, 8))
    assert link.sharing["all_reduce"] == shared
    assert found.link_of(ranks=range(8)) == default_profile("cuda", H100).link


def test_gpus_of_several_joined_hosts_have_the_ports_of_all_of_them():
    found = gpu_profile("NVIDIA GB200", Ports("infiniband", 400, 4), 4, "")
    assert (found.ranks_per_host, found.ports) == (72, 0)
    found = gpu_profile("NVIDIA GB200", Ports("infiniband", 400, 1), 4, "")
    assert (found.ranks_per_host, found.ports) == (72, 18)


def test_gpu_of_an_unknown_name_has_the_network_that_was_read():
    found = over("aabb", card="Some GPU", nccl=Interface("mlx5_0:1", 100_000, 1, "infiniband"))
    assert found.name == "nvlink over infiniband-100g"
    assert found.link_of(ranks=(0, 1)) == default_profile("cuda").link
    assert found.link_of(ranks=(0, 2)).gbytes_per_s == 10.0


def test_gpus_without_a_network_that_can_be_read_have_the_one_of_the_vendor():
    found = over("aabb", nccl=NO_PORTS)
    assert digest(found) == digest(default_profile("cuda", H100, ranks_per_host=2))
    assert found.source == "stated by the manufacturer: no network interface is in use"


@pytest.mark.parametrize(
    ("mbit", "name"), [(100_000, "infiniband-100g"), (800_000, "infiniband-ndr")]
)
def test_rank_without_ports_counts_as_one_with_those_of_the_vendor(mbit, name):
    read = on_hosts("aabb", nccl=Interface("mlx5_0:1", mbit, 2, "infiniband"))
    read[3] = dataclasses.replace(read[3], nccl=NO_PORTS)
    found = profile_over(network_of(read, 4, 0), "cuda", H100)
    assert found.name == f"h100 over {name}"
    assert ("rank 3: no network interface is in use" in found.source) == (mbit == 800_000)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([H100] * 4, "h100"),
        ([H100, H100, "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"] * 2, "a100-40gb"),
        ([H100, "Some GPU", H100, H100], "nvlink"),
    ],
)
def test_ranks_with_different_gpus_plan_by_the_slowest(names, expected):
    read = on_hosts("aabb")
    read = {rank: dataclasses.replace(one, card=names[rank]) for rank, one in read.items()}
    network = network_of(read, 4, 0)
    found = {profile_over(network, "cuda", network.card).name for _ in names}
    assert found == {f"{expected} over infiniband-400g"}


def test_slowest_ports_are_those_that_carry_least_together():
    read = on_hosts("ab", nccl=Interface("mlx5_0:1", 400_000, 1, "infiniband"))
    read[1] = NetworkOfRank("b", ETH0, Interface("mlx5_0:1 to mlx5_7:1", 100_000, 8, "infiniband"))
    found = profile_over(network_of(read, 2, 0), "cuda", H100)
    assert found.source == "read from mlx5_0:1 of rank 0, the slowest"


def test_gpus_of_one_host_use_no_network():
    found = over("aaaa")
    assert digest(found) == digest(default_profile("cuda", H100))
    assert found.source == "stated by the manufacturer: all ranks are on one host"


def test_hosts_of_different_sizes():
    assert over("aab", device="cpu").description == "ethernet-1g (read from eth0)"
    found = over("aab")
    assert digest(found) == digest(default_profile("cuda", H100))
    assert found.source == "stated by the manufacturer: hosts have different numbers of ranks"


@pytest.mark.parametrize(
    ("found", "many", "started", "expected"),
    [
        ("aabb", 4, 0, (True, 2)),
        ("abab", 4, 0, (True, 0)),
        ("aaaa", 4, 2, (False, 0)),
        ("aab", 4, 2, (True, 2)),  # a rank is missing: torchrun's number counts
        ("aab", 4, 0, (True, 0)),
        ("aa", 4, 2, (True, 2)),
        ("aa", 4, 0, (False, 0)),
        ("", 4, 0, (False, 0)),
    ],
)
def test_hosts_of_ranks(found, many, started, expected):
    made = network_of(on_hosts(found), many, started)
    assert (made.has_several_hosts, made.ranks_per_host) == expected
    missing = f"{many - len(found)} of {many} ranks did not publish theirs"
    assert made.gloo.unknown == (missing if len(found) < many else "")


def test_profiles_with_different_sources_are_equal():
    read = dataclasses.replace(DEFAULT_CPU, source="read from eth0")
    assert read == DEFAULT_CPU
    assert digest(read) == digest(DEFAULT_CPU)
    assert (DEFAULT_CPU.description, read.description) == (
        "ethernet-10g",
        "ethernet-10g (read from eth0)",
    )
    with pytest.raises(PolicyError, match=r"Profile\(source=3\): must be a text"):
        dataclasses.replace(DEFAULT_CPU, source=3)


def test_doctor_shows_what_it_reads(tmp_path, monkeypatch):
    def state() -> str:
        rows = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
        return next(row["state"] for row in rows if row["what"] == "profile")

    monkeypatch.delenv("COMMPASS_PROFILE", raising=False)
    monkeypatch.setattr(network, "SYS", add_interface(tmp_path, "eth0", "1000"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    alone = "on one host ethernet-10g (assumed), on several"
    assert state() == f"{alone} ethernet-1g (read from eth0)"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert state() == f"{alone} ethernet-10g (assumed: there is no interface eth1)"
    monkeypatch.setenv("COMMPASS_CORES", "0.5")
    shared = "ranks share processors, 0.5 cores each"
    assert state() == (
        f"on one host ethernet-10g (assumed; {shared}), on several ethernet-10g (assumed: there is"
        f" no interface eth1; {shared})"
    )


def test_reports_of_a_dump_show_the_source(tmp_path):
    made = report_dumps.dump([report_dumps.site("all_reduce", "layers.0.mlp")])
    fields = msgspec.to_builtins(over("ab", device="cpu"))
    made = dataclasses.replace(
        made,
        plan=dataclasses.replace(made.plan, profile=fields["name"]),
        profile=fields,
    )
    dump.write(tmp_path / "dump", made)
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "dump")]).stdout
    assert "profile ethernet-1g (read from eth0)" in " ".join(shown.split())
    page = tmp_path / "report.html"
    CliRunner().invoke(app, ["report", str(tmp_path / "dump"), "-o", str(page)])
    assert "Profile ethernet-1g (read from eth0): what the cost model knew" in page.read_text()
