"""Parse NVIDIA's machine code: from nvdisasm's text to instructions, loops, and counts by kind.

A count is static: every instruction counts once, or times the iterations of its loops if the caller
knows them. Both sides of a branch are counted. Rare code is not: the slow paths of division and
square root (subnormals), guards that end in a trap, and the handling of diverged threads.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import networkx as nx

from commpass.errors import KernelError

KINDS = {
    "global load": "LDG LD",
    "global store": "STG ST",
    "async copy": "LDGSTS",
    "bulk copy": "UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UBLKPF",
    "shared load": "LDS LDSM",
    "shared store": "STS STSM",
    "local load": "LDL",
    "local store": "STL",
    "tensor memory": "LDT LDTM STT STTM UTCCP UTCSHIFT",
    "atomic": "ATOM ATOMG ATOMS ATOMSG RED REDG REDAS UATOMG UREDGR",
    "tensor": "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA QGMMA IGMMA BGMMA"
    " UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA",
    "special": "MUFU",
    "fp32": "FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSWZADD",
    "fp32 pair": "FADD2 FMUL2 FFMA2",
    "compare": "FSETP FSET FMNMX FMNMX3 FSEL FCHK",
    "fp16": "HADD2 HMUL2 HFMA2 HADD2_32I HMUL2_32I HFMA2_32I HSETP2 HSET2 HMNMX2",
    "fp64": "DADD DMUL DFMA DSETP DMNMX",
    "multiply": "IMAD IMUL IMUL32I XMAD IDP IDP4A IDP2A",
    "int": "IADD IADD3 IADD32I IADD64 VIADD IABS VABSDIFF VABSDIFF4 IMNMX VIMNMX VIMNMX3"
    " VIADDMNMX VHMNMX ISETP ISET SEL LOP LOP3 LOP32I PLOP3 SHF SHL SHR LEA PRMT SGXT BMSK ISCADD"
    " ICMP BFE BFI MOV MOV32I P2R R2P VOTE",
    "bits": "POPC FLO BREV",
    "convert": "F2F F2I I2F F2IP FRND F2F64 I2I",
    "pack": "F2FP I2FP I2IP",
    "shuffle": "SHFL REDUX CREDUX MATCH",
    "barrier": "BAR SYNCS MEMBAR FENCE DEPBAR LDGDEPBAR ARRIVES WARPSYNC WARPGROUP WARPGROUPSET"
    " UTCBAR UTMACMDFLUSH UTMACCTL UCGABAR_ARV UCGABAR_WAIT ERRBAR CCTL CCTLL CCTLT B2R R2B"
    " UTCATOMSWS NANOSLEEP YIELD ACQBULK ACQSHMINIT",
    "control": "BRA BRX JMP JMX EXIT CALL RET BSSY BSYNC BREAK BMOV BPT KILL RTT NOP RPCMOV ELECT"
    " PMTRIG PREEXIT ENDCOLLECTIVE JMXU BRXU USETMAXREG",
    "uniform": "VOTEU",
    "move": "S2R CS2R LDC R2UR LEPC GETLMEMBASE S2UR LDCU ULDC MOVM QSPC",
}
"""Kinds of instructions, and their names. Other names that begin with U run once per warp, on its
uniform path."""

KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}

Trips = float | tuple[float, float] | None
"""The iterations of a loop; None if unknown.

A pair also gives the executions of its branches: if two loops were flattened to one, the code of
the outer one is in branches.
"""

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "96": 12, "128": 16, "256": 32}

LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*);"
)
LABEL = re.compile(r"^([.$\w]+):\s*$")
PLACE = re.compile(r"`\(([.$\w]+)\)")
RARE = ("slowpath", "_trap_")
JUMPS = ("BRA", "JMP")
LEAVES = ("EXIT", "RET", "BRX", "JMX", "KILL")

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a thread (or of its warp), such as ``LDG.E.128``, with its predicate."""

    address: int
    name: str
    operands: str = ""
    predicate: str = ""

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def kind(self) -> str:
        known = KIND_OF.get(self.base)
        return known or ("uniform" if self.base.startswith("U") else "other")

    @property
    def width(self) -> int:
        """Bytes per thread that it moves, if any."""
        if self.base in ("LDSM", "STSM"):
            return 4 * int(self.name[-1]) if self.name[-1].isdigit() else 4
        return next((WIDTHS[word] for word in self.name.split(".") if word in WIDTHS), 4)

    @property
    def target(self) -> str:
        """The label that it jumps to; "" for branches of diverged threads."""
        return self._label if self.base in JUMPS and ".DIV" not in self.name else ""

    @property
    def called(self) -> str:
        """The subroutine that it calls."""
        return self._label if self.base == "CALL" else ""

    @property
    def conditional(self) -> bool:
        """Whether it has a predicate, also among its operands: ``BRA.U !UP0, `(.L_x_4)``."""
        return bool(self.predicate) or re.match(r"!?U?P[0-9]", self.operands) is not None

    @property
    def _label(self) -> str:
        place = PLACE.search(self.operands)
        return place[1] if place else ""


@dataclass(frozen=True)
class Loop:
    """One loop: the address of its head, its nesting depth (1: outermost), its blocks, those that
    not every iteration runs, and whether it only waits."""

    address: int
    depth: int
    blocks: frozenset[int]
    branches: frozenset[int]
    waits: bool


@dataclass(frozen=True)
class Routine:
    """The kernel or a subroutine: consecutive instructions (blocks) by their first address, of
    those that run in usual cases. ``loops`` are in the order of their addresses, outer ones
    first."""

    blocks: Mapping[int, Sequence[Instruction]]
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Sass:
    """The kernel, and its subroutines by name."""

    kernel: Routine
    routines: Mapping[str, Routine]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the kernel that compute, in the order of the ``trips`` of
        ``count_instructions``."""
        return tuple(loop for loop in self.kernel.loops if not loop.waits)


@dataclass(frozen=True)
class Counts:
    """How often one warp issues each instruction, by name. ``loops`` is the number of loops that
    were counted as one iteration."""

    names: Mapping[str, float]
    loops: int = 0

    @property
    def total(self) -> float:
        return sum(self.names.values())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Base names of no known kind."""
        return tuple(sorted({one.base for one, _ in self._each() if one.kind == "other"}))

    def kinds(self) -> dict[str, float]:
        """Return the instructions by kind (KINDS)."""
        return _sums((one.kind, number) for one, number in self._each())

    def of(self, kind: str) -> float:
        return self.kinds().get(kind, 0.0)

    def widths(self, *kinds: str) -> dict[int, float]:
        """Return the accesses of these kinds by bytes per thread, widest first."""
        found = _sums((one.width, number) for one, number in self._each() if one.kind in kinds)
        return dict(sorted(found.items(), reverse=True))

    def bytes(self, *kinds: str) -> float:
        """Return the bytes that one thread moves by accesses of these kinds."""
        return sum(width * number for width, number in self.widths(*kinds).items())

    def matmuls(self) -> dict[str, float]:
        """Instructions of tensor cores, by base name: HMMA, HGMMA, QGMMA, UTCHMMA, ..."""
        return _sums((one.base, number) for one, number in self._each() if one.kind == "tensor")

    def _each(self) -> Iterable[tuple[Instruction, float]]:
        return ((Instruction(0, name), number) for name, number in self.names.items())


def _sums(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for key, number in pairs:
        found[key] = found.get(key, 0) + number
    return found


def parse_sass(text: str) -> Sass:
    """Parse the text that ``nvdisasm -c`` prints for a cubin with one kernel."""
    routines: dict[str, list[Instruction]] = {}
    labels: dict[str, int] = {}
    waiting: list[str] = []
    current = ""
    for line in text.splitlines():
        if label := LABEL.match(line):
            waiting.append(label[1])
        elif found := LINE.match(line):
            address = int(found[1], 16)
            for name in waiting:
                labels[name] = address
                if not name.startswith("."):
                    current = name
            waiting = []
            one = Instruction(address, found[3], found[4].strip(), found[2] or "")
            routines.setdefault(current, []).append(one)
    if not routines:
        raise KernelError("no instructions in what was disassembled")
    by_name = {name: _routine(some, labels) for name, some in routines.items()}
    kernel, *_ = by_name
    return Sass(by_name.pop(kernel), by_name)


def count_instructions(sass: Sass, trips: Sequence[Trips] = ()) -> Counts:
    """Count how often one warp issues each instruction.

    ``trips`` are the iterations of each of ``sass.loops``; None or missing ones count as one.
    Raises KernelError for more of them than there are loops.
    """
    times = executions(sass, trips)
    names = _sums(_issued(sass, sass.kernel, times))
    given = [*trips, *[None] * (len(sass.loops) - len(trips))]
    return Counts(names, sum(each is None for each in given))


def executions(sass: Sass, trips: Sequence[Trips] = ()) -> dict[int, float]:
    """Return how often a warp runs each block of the kernel; ``trips`` as of
    ``count_instructions``."""
    if len(trips) > len(sass.loops):
        raise KernelError(f"{len(trips)} trip counts for {len(sass.loops)} loops")
    known = dict(zip(sass.loops, trips, strict=False))
    times = dict.fromkeys(sass.kernel.blocks, 1.0)
    for loop, number in known.items():
        every, some = number if isinstance(number, tuple) else (number, number)
        for block in loop.blocks:
            turns = some if block in loop.branches else every
            times[block] *= 1.0 if turns is None else turns
    return times


def _issued(
    sass: Sass, routine: Routine, times: Mapping[int, float]
) -> Iterable[tuple[str, float]]:
    """Yield the names of all instructions, with the executions of their blocks (``times``)."""
    for address, block in routine.blocks.items():
        yield from ((one.name, times[address]) for one in block)
        called = sass.routines.get(block[-1].called)
        if called is not None and called is not routine:
            yield from _issued(sass, called, dict.fromkeys(called.blocks, times[address]))


def _routine(some: Sequence[Instruction], labels: Mapping[str, int]) -> Routine:
    """Divide instructions into blocks, and find the reachable ones and the loops."""
    addresses, entry = {one.address for one in some}, some[0].address
    heads = {entry, *(addresses & {labels.get(one.target) for one in some})}
    ends = (*JUMPS, *LEAVES, "CALL")
    heads |= {after.address for one, after in pairwise(some) if one.base in ends}
    blocks: dict[int, list[Instruction]] = {head: [] for head in sorted(heads)}
    block: list[Instruction] = []
    for one in some:
        block = blocks.get(one.address, block)
        block.append(one)
    graph = nx.DiGraph()
    graph.add_nodes_from(blocks)
    behind = dict(pairwise(blocks))
    for address in blocks:
        last = blocks[address][-1]
        target = labels.get(last.target)
        if target in blocks:
            graph.add_edge(address, target)
        left = last.base in LEAVES or target in blocks
        if address in behind and (last.conditional or not left):
            graph.add_edge(address, behind[address])
    graph.remove_nodes_from([each for each in blocks if each != entry and _is_rare(blocks[each])])
    usual = graph.subgraph({entry, *nx.descendants(graph, entry)})
    return Routine(
        {address: block for address, block in blocks.items() if address in usual},
        _loops(usual, entry, blocks),
    )


def _is_rare(block: Sequence[Instruction]) -> bool:
    return any(word in block[-1].called for word in RARE)


def _loops(
    graph: nx.DiGraph, entry: int, blocks: Mapping[int, Sequence[Instruction]]
) -> tuple[Loop, ...]:
    """Find natural loops: an edge back to a block that dominates its start, with every block that
    leads to it without passing its head."""
    above = nx.immediate_dominators(graph, entry)

    def dominators(block: int) -> set[int]:
        found = {block}
        while block != entry:
            block = above[block]
            found.add(block)
        return found

    tails: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        if head in dominators(tail):
            tails.setdefault(head, set()).add(tail)
    bodies = {}
    for head, some in tails.items():
        others = nx.restricted_view(graph, [head], [])
        before = (nx.ancestors(others, tail) for tail in some - {head})
        bodies[head] = frozenset({head} | some).union(*before)
    found = []
    for head, body in bodies.items():
        depth = sum(body <= other for other in bodies.values())
        every = set.intersection(*map(dominators, tails[head]))
        found.append(Loop(head, depth, body, body - every, _waits(blocks, body)))
    return tuple(sorted(found, key=lambda loop: (loop.address, loop.depth)))


def _waits(blocks: Mapping[int, Sequence[Instruction]], body: Iterable[int]) -> bool:
    """Whether a loop only polls for an arrival."""
    idle = {"barrier", "control", "move", "uniform", "int", "multiply"}
    some = [one for address in body for one in blocks[address]]
    asks = any(one.base in ("SYNCS", "UTCATOMSWS", "NANOSLEEP") for one in some)
    return asks and all(one.kind in idle for one in some)
