"""Capabilities of processors and GPUs, from which occupancy and the roofline are computed.

Sources:

- sizes of register files and shared memory, most warps and blocks: CUDA C++ Programming Guide,
  "Technical Specifications per Compute Capability". For gfx942: the CDNA 3 instruction set guide
  and LLVM's AMDGPU usage guide (512 registers per lane, allocated in units of eight; 8 waves per
  SIMD).
- results per clock: the same guide, "Throughput of Native Arithmetic Instructions". The pipe of
  each instruction: Nsight Compute documentation, "Pipelines". Packing into fp8 is in neither, and
  is assumed to be as fast as packing into bf16.
- tensor cores: dense peaks of the data sheets, divided by processors and clock.
- latency of global memory: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
  Architecture via Microbenchmarking" (2024), A100 and H100. For sm_100 that of the H100 is used.
- GPUs: their data sheets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commpass.errors import KernelError, nearest


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One streaming multiprocessor (AMD: compute unit), which has ``quarters``, each with its own
    registers and scheduler.

    - ``registers`` are the 32-bit registers of a quarter, allocated to a warp in units of
      ``register_unit``.
    - ``shared`` is the shared memory in bytes, ``shared_each`` the most that one program may use.
      It is allocated in units of ``shared_unit``, plus ``shared_reserved`` for each program.
    - ``lanes`` is the number of threads that each pipe serves per clock.
    - ``tensor`` is the number of floating point operations per clock on operands of 16 bits.
    - ``latency`` is the number of clocks from a load to its value on an idle memory system.
    """

    name: str
    backend: str
    number: int | str
    warp: int = 32
    quarters: int = 4
    registers: int = 16384
    register_unit: int = 256
    shared: int
    shared_each: int
    shared_unit: int = 128
    shared_reserved: int = 1024
    warps: int = 64
    programs: int = 32
    lanes: Mapping[str, int] = field(default_factory=dict)
    tensor: int = 0
    line: int = 128
    latency: int = 0

    @property
    def can_count(self) -> bool:
        """Whether instructions can be counted against the pipes."""
        return bool(self.lanes)


@dataclass(frozen=True)
class Card:
    """A GPU: ``units`` multiprocessors at ``ghz``; ``gb_s`` GB/s of memory, both directions
    together."""

    name: str
    arch: str
    units: int
    ghz: float
    gb_s: float


@dataclass(frozen=True)
class Residence:
    """The number of ``programs`` on one multiprocessor at a time, their share of its most warps,
    and the limit that prevents more: registers, shared, warps or programs."""

    programs: int
    occupancy: float
    limit: str


KIB = 1024

ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(
            name="sm_80",
            backend="cuda",
            number=80,
            shared=164 * KIB,
            shared_each=163 * KIB,
            lanes={"fma": 64, "multiply": 64, "alu": 64, "half": 64, "special": 16, "double": 32},
            tensor=2048,
            latency=466,
        ),
        Architecture(
            name="sm_90",
            backend="cuda",
            number=90,
            shared=228 * KIB,
            shared_each=227 * KIB,
            lanes={"fma": 128, "multiply": 64, "alu": 64, "half": 128, "special": 16, "double": 64},
            tensor=4096,
            latency=479,
        ),
        Architecture(
            name="sm_100",
            backend="cuda",
            number=100,
            shared=228 * KIB,
            shared_each=227 * KIB,
            lanes={"fma": 128, "multiply": 64, "alu": 64, "half": 128, "special": 16, "double": 64},
            tensor=8192,
            latency=479,
        ),
        Architecture(
            name="gfx942",
            backend="hip",
            number="gfx942",
            warp=64,
            registers=32768,
            register_unit=512,
            shared=64 * KIB,
            shared_each=64 * KIB,
            shared_unit=512,
            shared_reserved=0,
            warps=32,
        ),
    )
}

CARDS = (
    Card("A100 SXM 80 GB", "sm_80", 108, 1.41, 2039),
    Card("H100 SXM", "sm_90", 132, 1.83, 3350),
    Card("H200", "sm_90", 132, 1.83, 4800),
    Card("B200", "sm_100", 148, 1.85, 8000),
    Card("MI300X", "gfx942", 304, 2.1, 5300),
)


def architecture(name: str) -> Architecture:
    """Return an architecture. Raises KernelError for an unknown name, with the nearest one, and for
    the name of a GPU, with its architecture."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    for card in CARDS:
        if card.name.split()[0].lower() in name.lower():
            raise KernelError(
                f"no architecture {name!r}; that of {card.name} is {card.arch!r}. Known:"
                f" {', '.join(sorted(ARCHITECTURES))}."
            )
    raise KernelError(f"no architecture {name!r}{nearest(name, ARCHITECTURES)}")


def cards_of(arch: str) -> list[Card]:
    return [card for card in CARDS if card.arch == arch]


def residence(arch: Architecture, registers: int, shared: int, warps: int) -> Residence:
    """Return how many programs of ``warps`` warps, ``registers`` registers per thread and
    ``shared`` bytes fit.

    A quarter holds whole warps, and allocates registers to each in whole units.
    """
    each = _up(max(registers, 1) * arch.warp, arch.register_unit)
    room = {
        "warps": arch.warps // warps,
        "programs": arch.programs,
        "registers": arch.quarters * (arch.registers // each) // warps,
    }
    if shared:
        needed = _up(shared, arch.shared_unit) + arch.shared_reserved
        room["shared"] = arch.shared // needed if shared <= arch.shared_each else 0
    limit = min(room, key=lambda name: room[name])
    return Residence(room[limit], room[limit] * warps / arch.warps, limit)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
