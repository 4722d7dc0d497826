"""What is read of the network, from made-up folders of sysfs and from a real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from sys_trees import add_adapter, add_interface

from commpass.distributed import addresses, network
from commpass.distributed.interfaces import Interface, ethernet
from commpass.distributed.machine import host_id
from commpass.distributed.network import gloo_interface, nccl_interface

NDR = "400 Gb/sec (4X NDR)"
HDR = "200 Gb/sec (4X HDR)"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "class/net").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("rate", [10, 100, 1000, 2500, 10_000, 25_000, 100_000, 800_000])
def test_rate_of_a_network_card_is_what_it_states(root, rate):
    add_interface(root, "eth0", str(rate))
    assert ethernet("eth0", root) == Interface("eth0", rate)


@pytest.mark.parametrize(
    "text", ["-1", "0", "", "4294967295", "65535000", "1000.5", "fast", "1e3", "\xff", "10\n10"]
)
def test_odd_rates_are_unknown(root, text):
    add_interface(root, "eth0", text)
    found = ethernet("eth0", root)
    assert (found.mbit_per_s, found.reason) == (0, "eth0 does not state its rate")


def test_unreadable_rate_is_unknown(root):
    add_interface(root, "eth0")  # an interface that is down has a file that cannot be read
    (root / "class/net/eth0/speed").mkdir()
    assert ethernet("eth0", root).reason == "eth0 does not state its rate"


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("veth1", {"device": False}, "veth1 is a virtual interface"),
        ("dummy0", {"device": False}, "dummy0 is a virtual interface"),
        ("lo", {"device": False}, "lo is the loopback interface"),
        ("tun0", {"device": False, "folders": ["tun_flags"]}, "tun0 is a tunnel"),
        ("wlan0", {"folders": ["wireless", "phy80211"]}, "wlan0 is wireless"),
        ("bond0", {"device": False, "folders": ["bonding"]}, "bond0 is a virtual interface"),
    ],
)
def test_interfaces_that_state_an_arbitrary_rate_are_unknown(root, name, settings, reason):
    add_interface(root, name, "10000", **settings)
    found = ethernet(name, root)
    assert found.mbit_per_s == 0
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("devtype", ["vlan", "macvlan", "ipvlan"])
def test_interface_of_a_container_states_the_rate_of_the_hidden_one_below(root, devtype):
    add_interface(root, "eth0", "25000", device=False, devtype=devtype)
    assert ethernet("eth0", root) == Interface("eth0", 25_000)


def test_bond_states_the_rate_of_its_members_together(root):
    add_interface(root, "eth0", "10000")
    add_interface(root, "eth1")  # without a cable
    add_interface(root, "bond0", "10000", device=False, below=["eth0", "eth1"], devtype="bond")
    assert ethernet("bond0", root) == Interface("bond0", 10_000)
    add_interface(root, "bond0.7", "10000", device=False, below=["bond0"], devtype="vlan")
    assert ethernet("bond0.7", root) == Interface("bond0.7", 10_000)


def test_bond_of_virtual_interfaces_is_unknown(root):
    add_interface(root, "veth0", "10000", device=False)
    add_interface(root, "eth0", "10000")
    add_interface(root, "bond0", "20000", device=False, below=["eth0", "veth0"], devtype="bond")
    assert ethernet("bond0", root).reason == (
        "bond0 sends over another interface: veth0 is a virtual interface, whose stated rate is"
        " arbitrary"
    )


def test_bridge_has_the_rate_of_its_network_card(root):
    add_interface(root, "eth0", "1000")
    add_interface(root, "eth1", "25000", operstate="down")
    add_interface(root, "veth0", "10000", device=False)
    add_interface(root, "tap0", "10", device=False, folders=["tun_flags"])
    given = {"device": False, "devtype": "bridge"}
    add_interface(root, "br0", "10000", ports=["veth0", "tap0", "eth0", "eth1"], **given)
    assert ethernet("br0", root) == Interface("br0", 1000)
    add_interface(root, "docker0", "10000", ports=["veth0"], **given)
    assert ethernet("docker0", root).reason == "docker0 is a bridge without a network card"
    add_interface(root, "eth2", "-1")
    add_interface(root, "br1", "10000", ports=["eth2"], **given)
    assert ethernet("br1", root) == Interface("br1", reason="eth2 does not state its rate")


def test_folder_that_may_not_be_read_is_unknown(root, monkeypatch):
    add_interface(root, "eth0", "1000")

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert ethernet("eth0", root).reason == "there is no interface eth0"
    assert gloo_interface(root, {}, unexpected).reason
    assert nccl_interface(root, {}).reason


@pytest.mark.parametrize("name", ["eth9", "", "..", "../../etc", "eth0/.."])
def test_name_of_no_interface_is_unknown(root, name):
    add_interface(root, "eth0", "1000")
    assert ethernet(name, root).reason


# --- gloo -----------------------------------------------------------------------------------------


def unexpected() -> str:
    raise AssertionError("the variable names the interface")


def test_gloo_uses_the_interface_of_the_variable(root):
    add_interface(root, "eth0", "1000")
    add_interface(root, "eth1", "25000")
    add_interface(root, "eth2", "-1")
    found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1"}, unexpected)
    assert found == Interface("eth1", 25_000)
    found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, unexpected)
    assert found == Interface("eth0", 1000)
    found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1,eth2"}, unexpected)
    assert found.reason == "eth2 does not state its rate"
    found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth"}, unexpected)
    assert found.reason == "there is no interface eth"  # not a prefix, as in NCCL's variable


def test_gloo_reads_its_variable_as_torch_does(root):
    """torch ignores a single character, and a comma at the end."""
    add_interface(root, "eth0", "1000")
    add_interface(root, "eth1", "25000")
    for listed in ("x", ","):
        found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": listed}, lambda: "eth1")
        assert found == Interface("eth1", 25_000)
    found = gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1,"}, unexpected)
    assert found == Interface("eth1", 25_000)
    assert gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1,,eth0"}, unexpected).reason
    assert gloo_interface(root, {"GLOO_SOCKET_IFNAME": "eth1, eth0"}, unexpected).reason


def test_gloo_uses_the_interface_of_the_host_name(root):
    add_interface(root, "eth0", "1000")
    add_interface(root, "eth1", "25000")
    assert gloo_interface(root, {}, lambda: "eth1") == Interface("eth1", 25_000)
    assert gloo_interface(root, {}, lambda: "lo").reason

    def fail() -> str:
        raise OSError("no interface has the address 10.0.0.1")

    found = gloo_interface(root, {}, fail)
    assert found.reason == "the host's name has no address (no interface has the address 10.0.0.1)"


def test_system_without_sysfs_is_unknown(tmp_path):
    assert gloo_interface(tmp_path, {}, unexpected).reason == f"{tmp_path}/class/net does not exist"
    assert nccl_interface(tmp_path, {}).reason == "no network interface is in use"


def test_address_of_the_host_name_is_the_first_that_can_be_bound(monkeypatch):
    def resolve(name, port, type):
        rows = ["203.0.113.7", "127.0.0.1"]  # the first one is of no interface
        return [(socket.AF_INET, type, 0, "", (each, 0)) for each in rows]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses._own_address("x") == "127.0.0.1"
    assert addresses.interface_of_host_name() == "lo"

    def refuse(*_, **__):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses.interface_of_host_name() == "lo"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_addresses_are_those_of_real_interfaces():
    assert addresses.interface_with("127.0.0.1") == "lo"
    assert addresses.interface_with("::1") == "lo"
    names = {name for _, name in socket.if_nameindex()}
    found = {**addresses._ipv4(), **addresses._ipv6()}
    assert set(found.values()) <= names
    for address, name in found.items():
        if not address.is_loopback:
            assert addresses.interface_with(f"{address}%{name}") == name
    with pytest.raises(OSError, match=r"no interface has the address 203\.0\.113\.7"):
        addresses.interface_with("203.0.113.7")


# --- NCCL -----------------------------------------------------------------------------------------


def test_nccl_uses_active_ports(root):
    for number in range(8):
        add_adapter(root, f"mlx5_{number}", {1: NDR})
    add_adapter(root, "mlx5_8", {1: HDR})
    add_adapter(root, "mlx5_9", {1: NDR}, state="1: DOWN")
    add_adapter(root, "rxe0", {1: NDR}, device=False)
    add_interface(root, "eth0", "1000")
    found = nccl_interface(root, {})
    assert found == Interface("mlx5_0:1 to mlx5_7:1", 400_000, 8, "infiniband")


def test_ports_count_that_carry_most_together(root):
    add_adapter(root, "mlx5_0", {1: NDR, 2: "100 Gb/sec (4X EDR)"})
    for number in range(10, 15):
        add_adapter(root, f"mlx5_{number}", {1: "100 Gb/sec (4X EDR)"})
    found = nccl_interface(root, {})
    assert found == Interface("mlx5_0:2 to mlx5_14:1", 100_000, 6, "infiniband")


def test_roce_and_odd_rates(root):
    add_adapter(root, "mlx5_0", {1: "25 Gb/sec (1X EDR)"}, link_layer="Ethernet")
    assert nccl_interface(root, {}) == Interface("mlx5_0:1", 25_000, 1, "roce")
    add_adapter(root, "mlx4_0", {1: "2.5 Gb/sec (1X SDR)"}, link_layer="Ethernet")
    assert nccl_interface(root, {"NCCL_IB_HCA": "mlx4"}) == Interface("mlx4_0:1", 2500, 1, "roce")
    add_adapter(root, "mlx4_1", {1: "? Gb/sec"})
    assert nccl_interface(root, {}).reason == "mlx4_1:1 does not state its rate"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("mlx5", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("=mlx5_1", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:2", ["mlx5_1:2"]),
        ("=mlx5_1:2,mlx5_10", ["mlx5_1:2", "mlx5_10:1"]),
        ("^mlx5_10", ["mlx5_1:1", "mlx5_1:2"]),
        ("^=mlx5_1", ["mlx5_10:1"]),
        ("^=mlx5_1:1", ["mlx5_1:2", "mlx5_10:1"]),
        ("^", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
    ],
)
def test_variable_selects_adapters(root, pattern, names):
    add_adapter(root, "mlx5_1", {1: NDR, 2: NDR})
    add_adapter(root, "mlx5_10", {1: NDR})
    found = nccl_interface(root, {"NCCL_IB_HCA": pattern})
    assert found.ports == len(names)
    assert found.name == (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")


@pytest.mark.parametrize(
    "variables",
    [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}, {"NCCL_IB_HCA": "mlx9"}],
)
def test_nccl_without_infiniband_uses_interfaces(root, variables):
    add_adapter(root, "mlx5_0", {1: NDR})
    add_interface(root, "eth0", "25000")
    assert nccl_interface(root, variables) == Interface("eth0", 25_000)
    for text in ("0", "", "00", "0x0", "true", "no"):  # NCCL reads 0 from a word
        assert nccl_interface(root, {"NCCL_IB_DISABLE": text}).kind == "infiniband"
    for text in ("2", " 1", "-1", "0x10", "1 "):
        assert nccl_interface(root, {"NCCL_IB_DISABLE": text}).kind == "ethernet"


def test_nccl_ignores_interfaces_that_are_down_or_of_containers(root):
    add_interface(root, "lo", "-1", device=False)
    add_interface(root, "docker0", "10000", device=False, ports=["veth0"], devtype="bridge")
    add_interface(root, "veth0", "10000", device=False)
    add_interface(root, "eth1", "100000", operstate="down")
    add_interface(root, "eth0", "25000")
    assert nccl_interface(root, {}) == Interface("eth0", 25_000)
    add_interface(root, "ib0", "100000")
    assert nccl_interface(root, {}) == Interface("ib0", 100_000)
    assert nccl_interface(root, {"NCCL_SOCKET_IFNAME": "eth"}) == Interface("eth0", 25_000)
    assert nccl_interface(root, {"NCCL_SOCKET_IFNAME": "^ib,lo,docker,veth"}).name == "eth0"
    assert nccl_interface(root, {"NCCL_SOCKET_IFNAME": "=veth0"}).reason
    assert nccl_interface(root, {"NCCL_SOCKET_IFNAME": "em"}).reason


def test_nccl_counts_a_port_once(root):
    for name in ("eth0", "eth1"):
        add_interface(root, name, "25000", folders=["master"])
    add_interface(root, "bond0", "50000", device=False, below=["eth0", "eth1"], devtype="bond")
    add_interface(root, "bond0.7", "50000", device=False, below=["bond0"], devtype="vlan")
    assert nccl_interface(root, {}) == Interface("bond0", 50_000)


def test_nccl_in_a_container_with_a_virtual_interface_is_unknown(root):
    add_interface(root, "eth0", "10000", device=False)
    assert nccl_interface(root, {}).reason.startswith("eth0 is a virtual interface")


def test_interfaces_of_unused_backends_are_not_looked_for(root, monkeypatch):
    monkeypatch.setattr(
        network, "SYS", add_adapter(add_interface(root, "eth0", "1000"), "a", {1: NDR})
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = network.network_here("here", "cpu:gloo,cuda:nccl")
    assert (found.gloo.mbit_per_s, found.nccl.mbit_per_s) == (1000, 400_000)
    found = network.network_here("here", "nccl")
    assert found.gloo.reason == "the default process group has no gloo"
    assert found.nccl.mbit_per_s == 400_000
    assert network.network_here("here", "gloo").nccl.reason


@pytest.mark.parametrize(
    "name", [os.fsdecode(b"eth\xff"), "eth\x1b[31m", "\u00b2", "\u0663", "e\u00b2"]
)
def test_interface_of_any_name_can_be_published(root, monkeypatch, name):
    """Linux allows all bytes but a slash and white space in a name."""
    folder = root / "class/net" / name
    (folder / "device").mkdir(parents=True)
    (folder / "speed").write_text("1000\n")
    (folder / "operstate").write_text("up\n")
    add_interface(root, "eth1", "1000")
    monkeypatch.setattr(network, "SYS", root)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{name},{name}")
    for label in ("GROUP_RANK", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(label, raising=False)
    found = network.network_here(host_id(), "cpu:gloo,cuda:nccl")
    assert (found.gloo.mbit_per_s, found.nccl.ports) == (1000, 2)
    assert found.gloo.name.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{name}9")
    monkeypatch.setenv("GROUP_RANK", name)
    found = network.network_here(host_id(), "gloo")
    assert found.gloo.reason.startswith("there is no interface")
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


# --- a real kernel --------------------------------------------------------------------------------

SCRIPT = """
set -e
mount -t sysfs sys /sys
ip link add va type veth peer name vb
ip link add link va name mv type macvlan
ip link add br0 type bridge
ip link set vb master br0
for each in va vb mv br0; do ip link set $each up; done
ip address add 10.9.0.1/24 dev va
ip address add 10.9.1.1/24 dev mv
ip -6 address add fd12::1/64 dev br0 nodad
exec "$0" -c '
import json
from commpass.distributed.addresses import interface_with
from commpass.distributed.interfaces import ethernet
from commpass.distributed.network import SYS
names = ["va", "mv", "br0", "lo"]
rates = {name: (SYS / "class/net" / name / "speed") for name in names[:3]}
print(json.dumps({
    "stated": {name: path.read_text().strip() for name, path in rates.items()},
    "reasons": [ethernet(name, SYS).reason for name in names],
    "of": [interface_with(each) for each in ("10.9.0.1", "10.9.1.1", "fd12::1")],
}))
'
"""


def without_namespaces() -> str:
    try:
        tried = subprocess.run(
            [
                "unshare",
                "-nm",
                "sh",
                "-c",
                "mount -t sysfs sys /sys && ip link add va type veth peer name vb",
            ],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return str(error)
    return tried.stderr.strip()


@pytest.mark.slow
def test_virtual_interfaces_of_a_real_kernel_are_unknown():
    import json

    if os.name != "posix" or (why := without_namespaces()):
        pytest.skip(f"needs network namespaces: {why}")
    found = subprocess.run(
        ["unshare", "-nm", "sh", "-c", SCRIPT, sys.executable],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    made = json.loads(found.stdout)
    assert made["stated"]["va"] == made["stated"]["mv"] == "10000"  # which means nothing
    assert made["of"] == ["va", "mv", "br0"]
    virtual = "va is a virtual interface, whose stated rate is arbitrary"
    assert made["reasons"] == [
        virtual,
        f"mv sends over another interface: {virtual}",
        "br0 is a bridge without a network card",
        "lo is the loopback interface",
    ]
