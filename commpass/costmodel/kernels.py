"""The cost of encoding and decoding: time per value and per kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from commpass.errors import PolicyError, check_quantity
from commpass.utils.deprecated import renamed_fields
from commpass.utils.keywords import named_fields

RAW = "raw"
"""The codec that only copies."""
_INNER = re.compile(r"= *(\w+)")
"""A parameter's value in the text of a codec, which may be an inner codec."""


@named_fields()
@dataclass(frozen=True)
class KernelRate:
    """The speed of a codec's encode and decode.

    Args:
        encode_ns: nanoseconds per value of a compiled encode.
        decode_ns: nanoseconds per value of a compiled decode.
        call_us: the time of a call apart from its values, in microseconds (None: that of
            ``Kernels``).
    """

    encode_ns: float
    decode_ns: float
    call_us: float | None = None

    def __post_init__(self) -> None:
        check_quantity("KernelRate(encode_ns", self.encode_ns)
        check_quantity("KernelRate(decode_ns", self.decode_ns)
        if self.call_us is not None:
            check_quantity("KernelRate(call_us", self.call_us)

    def slowed(self, times: float) -> KernelRate:
        """Return the rate of kernels that take ``times`` as long."""
        call_us = None if self.call_us is None else self.call_us * times
        return KernelRate(self.encode_ns * times, self.decode_ns * times, call_us)


OLD_NAMES = {"matmul_encode": "decoding_matmul"}
"""Fields of ``Kernels`` by their old names, which work for one version."""


@renamed_fields(OLD_NAMES)
@named_fields()
@dataclass(frozen=True)
class Kernels:
    """Rates of kernels.

    Args:
        launch_us: the time of a launch, in microseconds.
        other: the rate of codecs that are not in ``rates``.
        rates: rates by codec name (the part before the bracket).
        gflops: billions of matmul operations per second, for the rest of a graph.
        gbytes_per_s: GB/s that a simple kernel reads and writes, for the rest of a graph.
        call_us: the time of an encode or decode between exchanges, apart from its values. After a
            wait, it takes longer than after another kernel.
        in_matmul: the time that an encode adds to the matmul whose result it encodes, relative to
            an encode by itself without its launch.
        decoding_matmul: the time of a matmul that decodes its rows, apart from decode, relative to
            a plain matmul.
        graph_launch_us: the time of a launch in a CUDA graph (0: the same).
        in_exchange: the share of its speed that an encode or decode reaches inside a single kernel
            which also exchanges values.
        tile_us: the time in which a program of such a kernel encodes or decodes a tile, about two
            accesses of memory and some hundred instructions.
        fuses: whether other operators take the time in which their fused kernel accesses memory, as
            on a GPU. Otherwise each takes that of its own result.
    """

    launch_us: float
    other: KernelRate
    rates: Mapping[str, KernelRate] = field(default_factory=dict)
    gflops: float = 40.0
    gbytes_per_s: float = 10.0
    call_us: float = 0.0
    in_matmul: float = 1.0
    decoding_matmul: float = 1.1
    graph_launch_us: float = 0.0
    in_exchange: float = 1.0
    tile_us: float = 1.5
    fuses: bool = False

    def __post_init__(self) -> None:
        check_quantity("Kernels(launch_us", self.launch_us)
        check_quantity("Kernels(graph_launch_us", self.graph_launch_us)
        check_quantity("Kernels(in_exchange", self.in_exchange, above=True)
        check_quantity("Kernels(tile_us", self.tile_us)
        check_quantity("Kernels(call_us", self.call_us)
        check_quantity("Kernels(gflops", self.gflops, above=True)
        check_quantity("Kernels(gbytes_per_s", self.gbytes_per_s, above=True)
        check_quantity("Kernels(in_matmul", self.in_matmul)
        check_quantity("Kernels(decoding_matmul", self.decoding_matmul, above=True)
        if not isinstance(self.rates, Mapping):
            raise PolicyError(
                f"Kernels(rates={self.rates!r}): must map names of codecs to KernelRate(...)"
            )
        for name, rate in (("other", self.other), *self.rates.items()):
            if not isinstance(rate, KernelRate):
                raise PolicyError(
                    f"Kernels: {name} is {rate!r}, but must be a KernelRate(encode_ns, decode_ns)"
                )

    @property
    def in_graph(self) -> Kernels:
        """The rates of kernels that a CUDA graph launches."""
        return replace(self, launch_us=self.graph_launch_us or self.launch_us)

    def slowed(self, times: float) -> Kernels:
        """Return kernels that take ``times`` as long."""
        return replace(
            self,
            launch_us=self.launch_us * times,
            graph_launch_us=self.graph_launch_us * times,
            other=self.other.slowed(times),
            rates={name: rate.slowed(times) for name, rate in self.rates.items()},
            gflops=self.gflops / times,
            gbytes_per_s=self.gbytes_per_s / times,
            call_us=self.call_us * times,
            tile_us=self.tile_us * times,
        )

    def time_us(self, codec: str, role: str, values: float, nbytes: float = 0.0) -> float:
        """Return the microseconds of one kernel that encodes or decodes (``role``) ``values``
        values. For a ``matmul`` that encodes its own result, and for a ``decoding matmul`` apart
        from its decode, ``values`` is the number of operations, and ``nbytes`` what it reads and
        writes. The encode of a matmul has the role ``in matmul``. For ``bytes``, which a kernel
        moves beside those of its codec, ``values`` is their number."""
        if role == "bytes":
            return self.compute_us(0.0, values)
        if role == "matmul":
            return self.compute_us(values, nbytes)
        if role == "decoding matmul":
            return self.compute_us(values, nbytes) * self.decoding_matmul
        if role == "in matmul":
            return self.values_us(codec, "encode", values) * self.in_matmul
        call = self._rate(codec).call_us
        call_us = self.call_us if call is None else call
        return self.launch_us + call_us + self.values_us(codec, role, values)

    def values_us(self, codec: str, role: str, values: float) -> float:
        """Return the microseconds of an encode or decode without those of its kernel's start."""
        rate = self._rate(codec)
        return values * (rate.encode_ns if role == "encode" else rate.decode_ns) / 1e3

    def in_exchange_us(self, codec: str, role: str, values: float) -> float:
        """Return the microseconds of an encode or decode inside a single kernel."""
        share = 1.0 if codec == RAW else self.in_exchange
        return self.tile_us + self.values_us(codec, role, values) / share

    def _rate(self, codec: str) -> KernelRate:
        """Return the rate of a codec; if it has inner codecs, it is not faster than the slowest of
        them."""
        own = self.rates.get(codec.partition("(")[0], self.other)
        inner = [self.rates[name] for name in _INNER.findall(codec) if name in self.rates]
        if not inner:
            return own
        calls = (self.call_us if rate.call_us is None else rate.call_us for rate in (own, *inner))
        return KernelRate(
            max(rate.encode_ns for rate in (own, *inner)),
            max(rate.decode_ns for rate in (own, *inner)),
            max(calls),
        )

    def compute_us(self, operations: float, nbytes: float) -> float:
        """Return the microseconds of other kernels: the longer of the times for the operations and
        for the bytes read and written. Without operations, no launch is counted, since it is fused
        into another kernel."""
        busy = max(operations / self.gflops, nbytes / self.gbytes_per_s) / 1e3
        return busy + (self.launch_us if operations > 0 else 0.0)

    def copies_us(self, kernels: int, nbytes: float) -> float:
        """Return the microseconds of ``kernels`` kernels that together copy ``nbytes`` bytes."""
        return kernels * self.launch_us + nbytes / self.gbytes_per_s / 1e3


CAST = KernelRate(0.55, 0.30)  # the same for all its names
CPU = Kernels(
    launch_us=2.0,
    other=KernelRate(3.0, 3.0),
    rates={
        "int8": KernelRate(0.55, 0.40),
        "int4": KernelRate(0.65, 0.50),
        "fp8": KernelRate(0.70, 0.65),
        "mxfp8": KernelRate(1.55, 0.70),
        "mxfp6": KernelRate(1.75, 0.80),
        "mxfp4": KernelRate(1.30, 0.60),
        "nvfp4": KernelRate(1.95, 0.65),
        "rotated": KernelRate(1.05, 1.20),
        "taco": KernelRate(1.40, 1.15),
        "ecq": KernelRate(10.0, 11.2),
        "exponent": KernelRate(1.55, 1.60),
        "cast": CAST,
        "bf16": CAST,
        "fp16": CAST,
    },
    call_us=140.0,
)
"""One core of a slow server processor with AVX2, and the C++ of commpass.lowering.cpu.

Rates are the times of kernels in benchmarks/results/codecs_cpu_vectors.json (bfloat16), rounded up.
A processor with AVX-512 was three to four times as fast (codecs_cpu_avx512.json). The slower one
counts, so that what is predicted to win also wins there; ``commpass probe --kernels`` measures
another. Those of mxfp8, mxfp6 and nvfp4 are fp8's times the ratio to it in AVX2 on the faster one,
those of casts (Inductor's code) int8's.
Those of ecq (float32: benchmarks/results/codecs_entropy.json) are the largest of 2, 4 and 8 bits.
Copies are from benchmarks/group.py. The time of a call is as measured by ``commpass probe
--kernels`` on two cores.
"""
