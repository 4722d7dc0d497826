"""GPUs by name, with the numbers of their vendors and the rates of codecs on one of them: initial
values until ``commpass probe --kernels`` has measured the real ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from commpass.costmodel.kernels import KernelRate, Kernels


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
    "raw": Shares(2.0, 1.0, 1.0),
    "int8": Shares(1.02, 1.01, 0.98),
    "fp8": Shares(1.02, 1.00, 0.98),
    "int6": Shares(0.78, 0.86, 0.87),
    "int4": Shares(0.53, 0.99, 0.94),
    "rotated": Shares(1.01, 0.67, 0.76),
    "taco": Shares(1.03, 0.50, 0.86),
    "sdp4bit": Shares(0.53, 0.59, 0.87),
    "equarx": Shares(1.0, 1.00, 0.98),
    "table": Shares(0.51, 0.32, 0.46),
    "tahquant": Shares(0.54, 0.24, 0.49),
    "mxfp8": Shares(1.03, 0.99, 0.96),
    "mxfp6": Shares(0.78, 0.64, 0.87),
    "mxfp4": Shares(0.53, 0.72, 0.97),
    "nvfp4": Shares(0.56, 0.38, 0.95),
    "exponent": Shares(1.34, 0.40, 0.56),
}
"""Of 32 million values on an H200, with torch 2.11 and Triton 3.6
(benchmarks/results/gpu_nvidia_h200.json). On other GPUs, kernels are as much slower or faster as
their memory is, or their instructions are, whichever bounds the kernel on an H200."""
UNKNOWN = Shares(1.0, 0.5, 0.5)
"""An assumption for codecs that were not measured."""
SERIAL = {"ecq": KernelRate(0.012, 0.010, call_us=300.0)}
"""The rates on an H200 of codecs whose kernels code one number after the other. They were not
measured, but computed from three parts: the instructions of the compiled kernels for 4 bits (152
and 117 for 16 numbers, of which the GPU begins 1,045 a nanosecond), 12 bytes of other traffic a
value, and 600 cycles for each of the 1,024 steps of a chunk, which a small call waits for."""
SELECTIONS = {
    "topk": KernelRate(0.077, 0.003, call_us=120.0),
    "gaussiank": KernelRate(0.032, 0.003, call_us=250.0),
    "dgc": KernelRate(0.032, 0.003, call_us=250.0),
    "redsync": KernelRate(0.032, 0.003, call_us=250.0),
    "sidco": KernelRate(0.032, 0.003, call_us=250.0),
}
"""The rates on an H200 of codecs that select values: from 1 and 17 million values, measured with
more operators between their passes than they have now (``sidco``: as ``gaussiank``). The time apart
from the values is that of encode and decode together, half for each."""


AMD_IN_EXCHANGE, AMD_TILE_US = 0.25, 2.25
"""Single kernels on AMD: fitted to 4 MI300X, fp16, 1 to 8 MiB (vLLM, pull request 19744). On
NVIDIA, codecs keep their speed, and a tile takes 1.5 us (flashinfer, pull request 3759)."""
LAUNCH_US = 5.0
"""The time of a launch: an assumption."""
GRAPH_LAUNCH_US = 2.0
"""The same inside a CUDA graph: an assumption."""


BOUND_BY_MEMORY = 0.95
"""The share of a copy's speed from which on a kernel counts as bound by memory. Others are bound by
their instructions."""
H200_COPY, H200_SLOTS = 4800.0 * COPIED, 132 * 1.98 * 128.0
"""GB/s of a copy, and billions of instructions of one lane a second, where ``SHARES`` were
measured."""


def gpu_kernels(gbytes_per_s: float, gflops: float, slots: float = 0.0) -> Kernels:
    """Return the rates of a GPU that copies this many GB/s and has ``slots`` billion instructions
    of one lane a second (0: as many as an H200, relative to its bandwidth).

    A codec's rate is for bf16 values: a value is read or written as 2 bytes, its wire is written or
    read.
    """
    slower = H200_SLOTS / slots if slots else H200_COPY / gbytes_per_s

    def ns(wire: float, share: float) -> float:
        copy_ns = (2.0 + wire) / gbytes_per_s
        if share >= BOUND_BY_MEMORY:
            return copy_ns / share
        return max(copy_ns / BOUND_BY_MEMORY, (2.0 + wire) / H200_COPY / share * slower)

    def rate(of: Shares) -> KernelRate:
        return KernelRate(ns(of.wire, of.encode), ns(of.wire, of.decode))

    serial = {
        name: replace(each, encode_ns=each.encode_ns * slower, decode_ns=each.decode_ns * slower)
        for name, each in (SERIAL | SELECTIONS).items()
    }
    return Kernels(
        launch_us=LAUNCH_US,
        graph_launch_us=GRAPH_LAUNCH_US,
        other=rate(UNKNOWN),
        rates={name: rate(shares) for name, shares in SHARES.items()} | serial,
        gflops=gflops,
        gbytes_per_s=gbytes_per_s,
        fuses=True,
    )


@dataclass(frozen=True)
class Card:
    """A GPU's stated memory bandwidth in GB/s and dense bf16 operations in TFLOP/s.

    ``interconnect`` joins the GPUs of a host, and ``network`` its hosts: one port for each GPU, as
    in the reference systems of the vendors. ``joined`` GPUs are on one interconnect even if they
    are on several hosts (0: those of a host). ``processors`` run at ``ghz`` at most (0: not known).
    """

    gbytes_per_s: float
    tflops: float
    source: str
    interconnect: str = ""
    network: str = ""
    joined: int = 0
    processors: int = 0
    ghz: float = 0.0

    @property
    def is_amd(self) -> bool:
        """Whether it is a GPU of AMD, which has xGMI."""
        return self.interconnect.startswith("xgmi")

    @property
    def slots(self) -> float:
        """Billions of instructions of one lane a second: a processor begins four of 32 lanes in
        each cycle, or one of 64 on AMD."""
        return self.processors * self.ghz * (64 if self.is_amd else 128)

    @property
    def kernels(self) -> Kernels:
        made = gpu_kernels(self.gbytes_per_s * COPIED, self.tflops * 1e3 * MULTIPLIED, self.slots)
        if not self.is_amd:
            return made
        return replace(made, in_exchange=AMD_IN_EXCHANGE, tile_us=AMD_TILE_US)


HDR, NDR, XDR = "infiniband-hdr", "infiniband-ndr", "infiniband-xdr"
CARDS: dict[str, Card] = {
    "a100-pcie": Card(
        1935.0, 312.0, "NVIDIA A100 80GB PCIe data sheet", "pcie-4", HDR, processors=108, ghz=1.41
    ),
    "a100-40gb": Card(
        1555.0, 312.0, "NVIDIA A100 40GB SXM data sheet", "nvlink-3", HDR, processors=108, ghz=1.41
    ),
    "a100": Card(
        2039.0, 312.0, "NVIDIA A100 80GB SXM data sheet", "nvlink-3", HDR, processors=108, ghz=1.41
    ),
    "h100-nvl": Card(
        3900.0, 835.0, "NVIDIA H100 NVL data sheet", "pcie-5", NDR, processors=132, ghz=1.785
    ),
    "h100-pcie": Card(
        2000.0, 756.0, "NVIDIA H100 PCIe data sheet", "pcie-5", NDR, processors=114, ghz=1.755
    ),
    "h100": Card(
        3350.0, 989.0, "NVIDIA H100 SXM data sheet", "nvlink-4", NDR, processors=132, ghz=1.98
    ),
    "gh200": Card(
        4000.0,
        989.0,
        "NVIDIA GH200 data sheet, 96 GB HBM3",
        "nvlink-4",
        NDR,
        processors=132,
        ghz=1.98,
    ),
    "h200-nvl": Card(
        4800.0, 835.0, "NVIDIA H200 NVL data sheet", "pcie-5", NDR, processors=132, ghz=1.785
    ),
    "h200": Card(
        4800.0, 989.0, "NVIDIA H200 SXM data sheet", "nvlink-4", NDR, processors=132, ghz=1.98
    ),
    "h20": Card(4000.0, 148.0, "NVIDIA H20 data sheet", "nvlink-4", NDR, processors=78, ghz=1.98),
    "b200": Card(
        8000.0,
        2250.0,
        "NVIDIA DGX B200 data sheet, a card of eight",
        "nvlink-5",
        NDR,
        processors=148,
        ghz=1.965,
    ),
    "b300": Card(
        8000.0,
        2250.0,
        "NVIDIA DGX B300 data sheet, a card of eight",
        "nvlink-5",
        XDR,
        processors=148,
        ghz=1.92,
    ),
    "gb200": Card(
        8000.0,
        2500.0,
        "NVIDIA GB200 NVL72 data sheet",
        "nvlink-5",
        NDR,
        72,
        processors=152,
        ghz=1.965,
    ),
    "gb300": Card(
        8000.0,
        2500.0,
        "NVIDIA GB300 NVL72 data sheet",
        "nvlink-5",
        XDR,
        72,
        processors=152,
        ghz=1.92,
    ),
    "mi300x": Card(
        5300.0, 1307.0, "AMD Instinct MI300X data sheet", "xgmi-3", NDR, processors=304, ghz=2.1
    ),
    "mi350x": Card(
        8000.0, 2300.0, "AMD Instinct MI350X data sheet", "xgmi-4", NDR, processors=256, ghz=2.2
    ),
    "l40s": Card(864.0, 362.0, "NVIDIA L40S data sheet", "pcie-4", HDR, processors=142, ghz=2.52),
    "rtx-pro-6000": Card(
        1792.0,
        503.8,
        "NVIDIA RTX Blackwell PRO architecture paper, Workstation",
        "pcie-5",
        NDR,
        processors=188,
        ghz=2.617,
    ),
}
"""GPUs by the words of the device's name, in lower case. A name with more words comes first. Only
two H100 NVL, and two or four H200 NVL, can have an NVLink bridge: between more there is PCIe."""
GPU = gpu_kernels(500.0, 200_000.0)
"""An assumption for other GPUs: memory-bound kernels at a fraction of a recent GPU's bandwidth."""


def card_of(device: str) -> str | None:
    """Return the GPU of a device name such as ``"NVIDIA H100 80GB HBM3"``, or None if it is not
    known."""
    words = set(re.findall("[a-z0-9]+", device.lower()))
    return next((name for name in CARDS if words.issuperset(name.split("-"))), None)


def kernels_with(interconnect: str) -> Kernels:
    """Return the rates of the first GPU that was made for this interconnect, or of an unknown
    GPU."""
    if interconnect.startswith("pcie"):  # of any GPU
        return GPU
    made_for = (card for name, card in CARDS.items() if "-" not in name)
    return next((card.kernels for card in made_for if card.interconnect == interconnect), GPU)
