"""Links by name, with the numbers of their vendors and of public measurements: initial values until
``commpass probe`` has measured the real ones.

The rate of a link is what one rank can send in one direction, times the share that libraries are
known to reach (``Family.reached``). Numbers that are assumptions are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commpass.costmodel.links import Link
from commpass.costmodel.protocols import Protocol


@dataclass(frozen=True)
class Family:
    """Links of one technology: what NCCL or RCCL reaches on them.

    - ``step_us``: the time of a message, as NCCL's low-latency protocol has it.
    - ``reached``: the share of the stated rate that a large collective reaches.
    - ``protocols``: those of the library, with NCCL's own times.
    - ``least_us``: the least time of a collective.
    """

    step_us: float
    reached: float
    protocols: tuple[Protocol, ...]
    least_us: float = 0.0


LOW = Protocol("LL", 6.6, 0.6, 0.5, most_gbytes_per_s=141.0)
NVLINK = Family(
    0.6,
    0.82,
    (LOW, Protocol("LL128", 14.0, 1.9, 0.92), Protocol("Simple", 8.4, 3.4, 1.0)),
)
"""Reached: NCCL's own rate of a link, 20.6 of 25 GB/s on Hopper."""


def with_sums(share: float) -> Family:
    """Return NVLink with switches that sum (NVLink SHARP). A rank sends its tensor at this share of
    the rate that a ring reaches."""
    sums = Protocol("NVLS", 40.0, 0.0, share, switch_sums=True)
    return replace(NVLINK, protocols=(*NVLINK.protocols, sums))


HOPPER, BLACKWELL = with_sums(0.68), with_sums(0.59)
"""Start and share on Hopper: fitted to 8 H200 (flashinfer, pull request 3759). On Blackwell, NCCL
states 0.74 / 0.85 of Hopper's efficiency."""
XGMI = Family(
    0.6,
    0.70,
    (LOW, Protocol("Simple", 8.4, 3.4, 1.0)),
    least_us=16.5,
)
"""Reached: fitted to 2 and 4 of 8 MI350X (torchcomms, measurements of its relay). The least time is
that of NCCL on 8 H200, with a copy (flashinfer, pull request 3759): an assumption for RCCL."""
PCIE = Family(
    1.0,
    0.82,
    (Protocol("LL", 6.6, 1.0, 0.5), Protocol("Simple", 8.4, 5.7, 1.0)),
)
"""Reached: fitted to copies in a ring of 4, PCIe 4 and 5 (flashinfer, pull request 4870)."""
NETWORK = Family(
    5.0,
    0.8,
    (
        Protocol("LL", 6.6, 2.7, 0.5, 0.6, 5.0, most_gbytes_per_s=45.0),
        Protocol("LL128", 14.0, 4.0, 0.92, 1.9, 8.5),
        Protocol("Simple", 8.4, 14.0, 1.0, 3.4, 14.0),
    ),
)
"""Reached: an assumption. In nccl-tests, large all_reduces reach 75 to 90 %."""
FAMILIES = {
    "nvlink-4": HOPPER,
    "nvlink-5": BLACKWELL,
    "nvlink": NVLINK,
    "xgmi": XGMI,
    "pcie": PCIE,
    "infiniband": NETWORK,
    "roce": NETWORK,
    "efa": NETWORK,
    "tcpxo": NETWORK,
    "slingshot": NETWORK,
}
"""Families by the name of a link, or its first word."""


@dataclass(frozen=True)
class Stated:
    """The stated GB/s of a rank in one direction, and the source.

    ``peer_gbytes_per_s`` is the stated rate to one other rank, if each pair has a connection of its
    own.
    """

    gbytes_per_s: float
    source: str
    peer_gbytes_per_s: float = 0.0

    def link(self, family: Family) -> Link:
        """Return the link as a library of GPUs uses it."""
        rates = (self.gbytes_per_s, self.peer_gbytes_per_s)
        rate, to_peer = (round(each * family.reached, 3) for each in rates)
        return replace(gpu_link(family, rate), peer_gbytes_per_s=to_peer)


def gpu_link(family: Family, gbytes_per_s: float) -> Link:
    """Return a link on which NCCL or RCCL carries out collectives at this bandwidth."""
    return Link(family.step_us, gbytes_per_s, protocols=family.protocols, least_us=family.least_us)


def family_of(name: str) -> Family:
    """Return the family of a link's name."""
    return FAMILIES.get(name) or FAMILIES[name.partition("-")[0]]


INTERCONNECTS: dict[str, Stated] = {
    "nvlink-3": Stated(300.0, "NVIDIA A100 data sheet: 600 GB/s, both directions"),
    "nvlink-4": Stated(450.0, "NVIDIA H100 data sheet: 900 GB/s, both directions"),
    "nvlink-5": Stated(900.0, "NVIDIA B200 data sheet: 1.8 TB/s, both directions"),
    "xgmi-3": Stated(
        448.0, "AMD MI300X platform data sheet: 7 links of 128 GB/s, both directions", 64.0
    ),
    "xgmi-4": Stated(
        537.6, "AMD MI350X platform data sheet: 7 links of 153.6 GB/s, both directions", 76.8
    ),
    "pcie-3": Stated(15.75, "PCI-SIG: 8 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-4": Stated(31.5, "PCI-SIG: 16 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-5": Stated(63.0, "PCI-SIG: 32 GT/s a lane, 16 lanes, 128b/130b"),
    "infiniband-edr": Stated(12.5, "InfiniBand roadmap: 100 Gbit/s, 4 lanes"),
    "infiniband-hdr": Stated(25.0, "InfiniBand roadmap: 200 Gbit/s, 4 lanes"),
    "infiniband-ndr": Stated(50.0, "InfiniBand roadmap: 400 Gbit/s, 4 lanes"),
    "infiniband-xdr": Stated(100.0, "InfiniBand roadmap: 800 Gbit/s, 4 lanes"),
    "roce-100": Stated(12.5, "IEEE 802.3: 100 Gbit/s Ethernet"),
    "roce-200": Stated(25.0, "IEEE 802.3: 200 Gbit/s Ethernet"),
    "roce-400": Stated(50.0, "IEEE 802.3: 400 Gbit/s Ethernet"),
    "efa-100": Stated(12.5, "AWS, Amazon EC2 P4 instances: 4 network cards, 400 Gbit/s"),
    "efa-400": Stated(50.0, "AWS, Amazon EC2 P5 instances: 3,200 Gbit/s for 8 GPUs"),
    "tcpxo-200": Stated(25.0, "Google Cloud, A3 Mega: a network card of 200 Gbit/s for each GPU"),
    "slingshot-10": Stated(12.5, "HPE Slingshot: network cards of 100 Gbit/s"),
    "slingshot-11": Stated(25.0, "HPE Slingshot: network cards of 200 Gbit/s"),
}
