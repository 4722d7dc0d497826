"""What encoding and decoding costs: time per value, and per kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commpass.errors import PolicyError, check_number


@dataclass(frozen=True)
class KernelRate:
    """Nanoseconds per value of a codec's compiled encode and decode; ``call_us`` is what each of
    them takes beside its values, in microseconds (None: as long as ``Kernels`` says)."""

    encode_ns: float
    decode_ns: float
    call_us: float | None = None

    def __post_init__(self) -> None:
        check_number("KernelRate(encode_ns", self.encode_ns)
        check_number("KernelRate(decode_ns", self.decode_ns)
        if self.call_us is not None:
            check_number("KernelRate(call_us", self.call_us)


@dataclass(frozen=True)
class Kernels:
    """Rates by codec name (the part before the bracket), what stands for a codec not listed, and
    the time of a launch; ``call_us`` is what an encode or decode takes beside its values, between
    exchanges: where a rank has just waited, it takes longer than one that follows another. For the
    rest of a graph: ``gflops``, billions of operations that a matmul does in a second, and
    ``gbytes_per_s`` that a simple kernel reads and writes. ``matmul_encode`` is how many times as
    long as a matmul alone one takes that encodes its own result."""

    launch_us: float
    other: KernelRate
    rates: Mapping[str, KernelRate] = field(default_factory=dict)
    gflops: float = 40.0
    gbytes_per_s: float = 10.0
    call_us: float = 0.0
    matmul_encode: float = 1.1

    def __post_init__(self) -> None:
        check_number("Kernels(launch_us", self.launch_us)
        check_number("Kernels(call_us", self.call_us)
        check_number("Kernels(gflops", self.gflops, above=True)
        check_number("Kernels(gbytes_per_s", self.gbytes_per_s, above=True)
        check_number("Kernels(matmul_encode", self.matmul_encode, above=True)
        if not isinstance(self.rates, Mapping):
            raise PolicyError(
                f"Kernels(rates={self.rates!r}): must map names of codecs to KernelRate(...)"
            )
        for name, rate in (("other", self.other), *self.rates.items()):
            if not isinstance(rate, KernelRate):
                raise PolicyError(
                    f"Kernels: {name} is {rate!r}, but must be a KernelRate(encode_ns, decode_ns)"
                )

    def us(self, codec: str, role: str, values: float) -> float:
        """Microseconds of one kernel that encodes or decodes (``role``) that many values; of a
        ``matmul`` that encodes its own result, which does that many operations."""
        if role == "matmul":
            return self.compute_us(values, 0.0) * self.matmul_encode
        rate = self.rates.get(codec.partition("(")[0], self.other)
        ns = rate.encode_ns if role == "encode" else rate.decode_ns
        call = self.call_us if rate.call_us is None else rate.call_us
        return self.launch_us + call + values * ns / 1e3

    def compute_us(self, operations: float, nbytes: float) -> float:
        """Microseconds of what is no codec's: the longer of so many operations and so many bytes
        read and written. What does no operations worth counting becomes part of another kernel."""
        busy = max(operations / self.gflops, nbytes / self.gbytes_per_s) / 1e3
        return busy + (self.launch_us if operations > 0 else 0.0)

    def copies_us(self, kernels: int, nbytes: float) -> float:
        """Microseconds of so many kernels that together copy so many bytes."""
        return kernels * self.launch_us + nbytes / self.gbytes_per_s / 1e3


CAST = KernelRate(0.30, 0.40)  # by any of its names
CPU = Kernels(
    launch_us=2.0,
    other=KernelRate(3.0, 3.0),
    rates={
        "int8": KernelRate(0.65, 0.25),
        "int4": KernelRate(0.66, 0.35),
        "fp8": KernelRate(0.85, 0.60),
        "rotated": KernelRate(2.60, 2.40),
        "taco": KernelRate(1.50, 2.50),
        "exponent": KernelRate(1.40, 0.90),
        "cast": CAST,
        "bf16": CAST,
        "fp16": CAST,
    },
    call_us=140.0,
)
"""One core of a server processor, kernels made by Inductor, of taco the generated C++: read off
benchmarks/codecs.py, and copies off benchmarks/group.py, rounded up. Those of taco are processor
time, the least of 60 calls with 2^20 values: 1.41 and 2.40 ns, in bfloat16 and float32. The time of
a call is as ``commpass probe --kernels`` measures it on two cores."""

GPU = Kernels(launch_us=5.0, other=KernelRate(0.02, 0.02), gflops=200_000.0, gbytes_per_s=500.0)
"""An assumption until it is measured on the user's card: memory-bound kernels at a fraction of a
recent GPU's bandwidth."""
