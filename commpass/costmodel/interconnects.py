"""Links and GPUs by name, with the numbers of their vendors: initial values until ``commpass
probe`` has measured the real ones.

The rate of a link is what one rank can send in one direction, times the share that libraries are
known to reach (``REACHED``). Numbers that are assumptions are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from commpass.costmodel.kernels import KernelRate, Kernels
from commpass.costmodel.links import Link

REACHED = 0.8
"""The share of the stated rate that is reached. On NVLink and InfiniBand, the bus bandwidth of
nccl-tests for large all_reduces is 75 to 90 % of it. This is an assumption for the links here."""


@dataclass(frozen=True)
class Stated:
    """Stated GB/s of a rank in one direction, start-up time in microseconds, and the source of the
    rate.

    Start-up times are assumptions: small exchanges by NCCL take some 8 us per step inside a host
    and 15 between hosts.
    """

    gbytes_per_s: float
    alpha_us: float
    source: str

    @property
    def link(self) -> Link:
        return Link(self.alpha_us, round(self.gbytes_per_s * REACHED, 3))


INTERCONNECTS: dict[str, Stated] = {
    "nvlink-3": Stated(300.0, 8.0, "NVIDIA A100 data sheet: 600 GB/s, both directions"),
    "nvlink-4": Stated(450.0, 8.0, "NVIDIA H100 data sheet: 900 GB/s, both directions"),
    "nvlink-5": Stated(900.0, 8.0, "NVIDIA B200 data sheet: 1.8 TB/s, both directions"),
    "xgmi-3": Stated(448.0, 8.0, "AMD MI300X platform data sheet: 896 GB/s, both directions"),
    "pcie-3": Stated(15.75, 10.0, "PCI-SIG: 8 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-4": Stated(31.5, 10.0, "PCI-SIG: 16 GT/s a lane, 16 lanes, 128b/130b"),
    "pcie-5": Stated(63.0, 10.0, "PCI-SIG: 32 GT/s a lane, 16 lanes, 128b/130b"),
    "infiniband-edr": Stated(12.5, 15.0, "InfiniBand roadmap: 100 Gbit/s, 4 lanes"),
    "infiniband-hdr": Stated(25.0, 15.0, "InfiniBand roadmap: 200 Gbit/s, 4 lanes"),
    "infiniband-ndr": Stated(50.0, 15.0, "InfiniBand roadmap: 400 Gbit/s, 4 lanes"),
    "infiniband-xdr": Stated(100.0, 15.0, "InfiniBand roadmap: 800 Gbit/s, 4 lanes"),
}


@dataclass(frozen=True)
class Shares:
    """The bytes of a codec's wire for each value, and the measured shares of the speed of a copy of
    bf16 values that its kernels reach."""

    wire: float
    encode: float
    decode: float


COPIED = 0.88
"""The share of the stated bandwidth at which an H200 copies 256 MiB: 4,220 of 4,800 GB/s."""
MULTIPLIED = 0.65
"""The share of the stated bf16 rate that large matmuls reach on an H200, which then runs at the
limit of its power: 670 of 989 TFLOP/s."""
SHARES: dict[str, Shares] = {
    "int8": Shares(1.02, 0.99, 0.97),
    "fp8": Shares(1.02, 0.98, 0.96),
    "int6": Shares(0.78, 0.86, 0.81),
    "int4": Shares(0.53, 0.97, 0.93),
    "rotated": Shares(1.01, 0.59, 0.72),
    "taco": Shares(1.03, 0.38, 0.72),
    "sdp4bit": Shares(0.53, 0.58, 0.82),
    "equarx": Shares(1.0, 0.99, 0.98),
    "table": Shares(0.51, 0.25, 0.29),
    "tahquant": Shares(0.54, 0.21, 0.46),
    "mxfp8": Shares(1.03, 0.86, 0.95),
    "mxfp6": Shares(0.78, 0.62, 0.87),
    "mxfp4": Shares(0.53, 0.69, 0.94),
    "nvfp4": Shares(0.56, 0.36, 0.95),
}
"""Of 32 million values on an H200, with torch 2.11 and Triton 3.6
(benchmarks/results/gpu_nvidia_h200.json). Other GPUs are assumed to reach the same shares."""
UNKNOWN = Shares(1.0, 0.5, 0.5)
"""An assumption for codecs that were not measured."""


@dataclass(frozen=True)
class Card:
    """A GPU's stated memory bandwidth in GB/s and dense bf16 operations in TFLOP/s, and the
    interconnect of the GPUs of a host."""

    gbytes_per_s: float
    tflops: float
    source: str
    interconnect: str = ""

    @property
    def kernels(self) -> Kernels:
        """Rates of codecs for bf16 values: a value is read or written as 2 bytes, its wire is
        written or read."""
        copied = self.gbytes_per_s * COPIED

        def rate(of: Shares) -> KernelRate:
            copy_ns = (2.0 + of.wire) / copied
            return KernelRate(copy_ns / of.encode, copy_ns / of.decode)

        return Kernels(
            launch_us=5.0,
            other=rate(UNKNOWN),
            rates={name: rate(shares) for name, shares in SHARES.items()},
            gflops=self.tflops * 1e3 * MULTIPLIED,
            gbytes_per_s=copied,
        )


CARDS: dict[str, Card] = {
    "a100": Card(2039.0, 312.0, "NVIDIA A100 80GB SXM data sheet", "nvlink-3"),
    "h100": Card(3350.0, 989.0, "NVIDIA H100 SXM data sheet", "nvlink-4"),
    "h200": Card(4800.0, 989.0, "NVIDIA H200 SXM data sheet", "nvlink-4"),
    "b200": Card(8000.0, 2250.0, "NVIDIA DGX B200 data sheet, a card of eight", "nvlink-5"),
    "mi300x": Card(5300.0, 1307.0, "AMD Instinct MI300X data sheet", "xgmi-3"),
}
"""GPUs by a part of the device's name, in lower case."""


def card_of(device: str) -> str | None:
    """Return the GPU of a device name such as ``"NVIDIA H100 80GB HBM3"``. Return None for an
    unknown one, and for a board without those links (``"NVIDIA A100-PCIE-40GB"``)."""
    words = device.lower()
    return None if "pcie" in words else next((name for name in CARDS if name in words), None)
