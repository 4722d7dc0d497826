"""Links by name, with the numbers of their vendors and of public measurements: initial values until
``commpass probe`` has measured the real ones.

The rate of a link is what one rank can send in one direction, times the share that libraries are
known to reach (``REACHED``). Numbers that are assumptions are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from commpass.costmodel.links import Link

REACHED = 0.8
"""The share of the stated rate that is reached. On NVLink and InfiniBand, the bus bandwidth of
nccl-tests for large all_reduces is 75 to 90 % of it. This is an assumption for the links here."""
START_US = 15.0
"""Start of a collective of NCCL or RCCL, in microseconds. With the steps it makes 19 for a small
all_reduce of 8 GPUs. Published: 17 to 21 for 2 to 512 KiB on 8 H200 (flashinfer, pull request
3759), 16 to 18 for 32 KiB on 2 to 8 MI300X (README of quickreduce)."""


@dataclass(frozen=True)
class Stated:
    """Stated GB/s of a rank in one direction, microseconds of a step, and the source of the rate.

    ``peer_gbytes_per_s`` is the stated rate to one other rank, if each pair has a connection of its
    own. Times of steps are assumptions, near those in NCCL's own model (``tuning.cc``): 0.6 on
    NVLink, 1 on PCIe, and 2.7 to 5 between hosts for its low-latency protocol.
    """

    gbytes_per_s: float
    alpha_us: float
    source: str
    peer_gbytes_per_s: float = 0.0

    @property
    def link(self) -> Link:
        return gpu_link(
            self.alpha_us,
            round(self.gbytes_per_s * REACHED, 3),
            round(self.peer_gbytes_per_s * REACHED, 3),
        )


def gpu_link(alpha_us: float, gbytes_per_s: float, peer_gbytes_per_s: float = 0.0) -> Link:
    """Return a link on which NCCL or RCCL carries out collectives."""
    return Link(
        alpha_us,
        gbytes_per_s,
        start_us=START_US,
        trees=True,
        peer_gbytes_per_s=peer_gbytes_per_s,
    )


INTERCONNECTS: dict[str, Stated] = {
    "nvlink-3": Stated(300.0, 0.6, "NVIDIA A100 data sheet: 600 GB/s, both directions"),
    "nvlink-4": Stated(450.0, 0.6, "NVIDIA H100 data sheet: 900 GB/s, both directions"),
    "nvlink-5": Stated(900.0, 0.6, "NVIDIA B200 data sheet: 1.8 TB/s, both directions"),
    "xgmi-3": Stated(
        448.0, 0.6, "AMD MI300X platform data sheet: 7 links of 128 GB/s, both directions", 64.0
    ),
    "pcie-3": Stated(15.75, 1.0, "PCI-SIG: 8 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-4": Stated(31.5, 1.0, "PCI-SIG: 16 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-5": Stated(63.0, 1.0, "PCI-SIG: 32 GT/s a lane, 16 lanes, 128b/130b"),
    "infiniband-edr": Stated(12.5, 5.0, "InfiniBand roadmap: 100 Gbit/s, 4 lanes"),
    "infiniband-hdr": Stated(25.0, 5.0, "InfiniBand roadmap: 200 Gbit/s, 4 lanes"),
    "infiniband-ndr": Stated(50.0, 5.0, "InfiniBand roadmap: 400 Gbit/s, 4 lanes"),
    "infiniband-xdr": Stated(100.0, 5.0, "InfiniBand roadmap: 800 Gbit/s, 4 lanes"),
}
