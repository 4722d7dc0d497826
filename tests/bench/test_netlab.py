"""Test the plan of a lab, which does not need root.

The tests cover its commands, the pairs that its check measures, and the errors for bad arguments
and machines.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace

import pytest

from benchmarks.netlab import apart, cli, show
from benchmarks.netlab.network import (
    LabError,
    Network,
    burst,
    commands,
    links,
    path,
    ports,
    removal,
    segment,
    slowing,
    window,
)
from benchmarks.netlab.rates import Measured, ways

FLAT, NODES = Network(3, 0.1), Network(4, 1.0, node=2, inside_gbit=10.0)


def names(some) -> list[str]:
    return [link.name for link in some]


def test_each_host_has_a_link_to_the_hub():
    made = list(commands(FLAT))
    assert [line for line in made if "netns add" in line] == [
        f"ip netns add host{host}" for host in range(3)
    ]
    assert [line for line in made if "master" in line] == [
        f"ip link set port{host} master hub" for host in range(3)
    ]
    assert "ip -n host1 addr add 10.77.0.2/24 dev eth0" in made
    assert "ip -n host1 route replace 10.77.0.0/24 dev eth0 congctl cubic" in made
    assert not [line for line in commands(FLAT, cubic=False) if "cubic" in line]


@pytest.mark.parametrize("network", [FLAT, NODES, replace(NODES, delay_us=100.0)])
def test_all_that_is_made_is_removed(network):
    made, gone = " ".join(commands(network)).split("ip "), removal(network)
    devices = {line.split()[2] for line in made if line.startswith("link add")}
    hosts = {line.split()[2] for line in made if line.startswith("netns add")}
    assert {line.split()[3] for line in gone if line.startswith("ip link del")} == devices
    assert {line.split()[3] for line in gone if line.startswith("ip netns del")} == hosts
    assert len(gone) == len(devices) + len(hosts)


def test_both_ends_of_a_link_are_shaped():
    shaped = [line for line in commands(FLAT) if line.startswith("tc")]
    rate = "root tbf rate 100000000bit burst 18000 latency 50ms"
    assert shaped == [
        line
        for host in range(3)
        for line in (
            f"tc qdisc add dev port{host} {rate}",
            f"tc -n host{host} qdisc add dev eth0 {rate}",
        )
    ]


def test_nodes_have_a_bridge_and_an_uplink():
    made = list(commands(NODES))
    assert [line.split()[3:] for line in made if "master" in line] == [
        ["port0", "master", "node0"],
        ["port1", "master", "node0"],
        ["port2", "master", "node1"],
        ["port3", "master", "node1"],
        ["core0", "master", "hub"],
        ["up0", "master", "node0"],
        ["core1", "master", "hub"],
        ["up1", "master", "node1"],
    ]
    assert [link.gbit for link in links(NODES)] == [10, 10, 10, 10, 1, 1]
    assert names(path(NODES, 0, 1)) == ["host 0", "host 1"]
    assert names(path(NODES, 1, 2)) == ["host 1", "node 0", "node 1", "host 2"]


def test_delay_takes_the_place_of_the_hub():
    late = replace(NODES, delay_us=40_000)
    assert "hub" not in " ".join(commands(late))
    assert ports(late) == ["core0", "core1"]
    assert "latency 80ms" in slowing(late, 0, 1.0)[0]  # a queue of a round trip
    assert window(late) == 4 * 10e9 / 8 * (0.08 + 0.08)


def test_slow_links():
    one = Network(2, 1.0, slow=((1, 0.1),))
    assert [link.gbit for link in links(one)] == [1.0, 0.1]
    assert slowing(one, 1, 0.2) == [
        "tc qdisc change dev port1 root tbf rate 200000000bit burst 18000 latency 50ms",
        "tc -n host1 qdisc change dev eth0 root tbf rate 200000000bit burst 18000 latency 50ms",
    ]


@pytest.mark.parametrize("gbit", [0.001, 0.1, 1, 10, 100])
def test_bytes_handed_over_at_once_fit_into_a_burst(gbit):
    assert 9000 <= segment(gbit) <= min(burst(gbit) - 9000, 65536)


@pytest.mark.parametrize("network", [FLAT, NODES, Network(4, 1, slow=((1, 0.1),)), Network(1)])
def test_every_link_is_checked_each_way(network):
    found = list(ways(network))
    wanted = {(link.name, way) for link in links(network) for way in ("sends", "receives")}
    assert {(way.link, way.direction) for way in found} == (wanted if network.hosts > 1 else set())
    own = {link.name: link.gbit for link in links(network)}
    for way in found:
        over = path(network, way.sender, way.receiver)
        assert way.link in names(over)
        assert way.asked == own[way.link] == min(link.gbit for link in over)


def test_deviations_are_reported():
    way = next(ways(Network(2, 1.0, delay_us=500)))
    good = Measured(way, 0.96, 1250)
    assert show.warnings([good], (2.0, 1.95)) == []
    assert show.warnings([replace(good, gbit=0.9)], None) == ["host 0 sends 0.9 Gbit/s, not 1"]
    assert (
        "round trip of 2000 us, not 1000"
        in show.warnings([replace(good, round_trip_us=2000)], None)[0]
    )
    assert "cannot carry more" in show.warnings([good], (2.0, 1.2))[0]


def test_traffic_is_counted_from_before():
    row = show.counted(
        Network(1, 0.1), {"host 0": (100, 50)}, {"host 0": (12_500_100, 50)}, seconds=2.0
    )[0]
    assert row["sent_bytes"] == 12_500_000
    assert row["received_bytes"] == 0
    assert row["sent_share"] == pytest.approx(0.5)


def said(capsys, monkeypatch, *arguments: str) -> str:
    """Return the one line of the command line's error."""
    monkeypatch.setattr(sys, "argv", ["netlab", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 0", "--hosts 0: must be from 1 to 250"),
        ("--hosts many", "--hosts"),
        ("--gbit -1", "--gbit -1: must be from 0.001 to 100"),
        ("--gbit fast", "--gbit"),
        ("--gbit nan", "--gbit nan"),
        ("--delay-us -5", "--delay-us -5: must be microseconds"),
        ("--hosts 4 --node 3 --inside-gbit 1", "--node 3: must divide the 4 hosts"),
        ("--hosts 4 --node 4 --inside-gbit 1", "--node 4: must divide the 4 hosts"),
        ("--hosts 4 --node 2", "--node and --inside-gbit go together"),
        ("--slow 2=1", "--slow: there is no host 2, only 0 to 1"),
        ("--slow 1", "--slow 1: must be a host=a number"),
        ("--drop 1@soon", "--drop 1@soon: must be a host@a number"),
        ("--drop 0@-1", "--drop -1: must be seconds"),
        ("--late 7=1", "--late: there is no host 7"),
        ("--timeout -1", "--timeout -1: must be seconds"),
        ("--json /no/such/file", "--json /no/such/file: there is no such folder"),
        ("--fast", "--fast"),
    ],
)
def test_bad_arguments_are_one_line(capsys, monkeypatch, arguments, words):
    assert words in said(capsys, monkeypatch, *arguments.split(), "--", "true")


def test_no_command_is_one_line(capsys, monkeypatch):
    assert "COMMAND" in said(capsys, monkeypatch, "--hosts", "2")


def test_missing_programs_are_reported_in_one_line(capsys, monkeypatch):
    monkeypatch.delenv(apart.APART, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    both = "a lab needs the command tc and root: install iproute2 and run it with sudo"
    assert both in said(capsys, monkeypatch, "--", "true")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert "a lab needs root: run it with sudo" in said(capsys, monkeypatch, "--", "true")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only Linux" in said(capsys, monkeypatch, "--", "true")


def test_lab_is_not_built_in_the_machines_own_namespace(monkeypatch):
    monkeypatch.delenv(apart.APART, raising=False)
    from benchmarks.netlab import build

    with pytest.raises(LabError, match="after stand_apart"):
        build(Network(2))
