"""Parse NVIDIA's machine code: from nvdisasm's text to instructions, loops, and counts by kind.

A count is static: every instruction counts once, or times the iterations of its loops if the caller
knows them. Both sides of a branch are counted. Rare code is not: the slow paths of division and
square root (subnormals), guards that end in a trap, and the handling of diverged threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Loop:
    """One loop: the first address of its head, its nesting depth (1: outermost), its blocks, those
    that not every iteration runs, and whether it only waits."""

    address: int
    depth: int
    blocks: frozenset[int]
    branches: frozenset[int]
    waits: bool


@dataclass(frozen=True)
class Block:
    """Consecutive instructions, the successors of the block, and the subroutine that its last
    instruction calls."""

    instructions: tuple[Instruction, ...]
    after: tuple[int, ...]
    calls: str = ""


@dataclass(frozen=True)
class Routine:
    """The kernel or a subroutine, as blocks; the first is its entry. ``loops`` are in the order of
    their addresses, outer ones first."""

    name: str
    blocks: tuple[Block, ...]
    loops: tuple[Loop, ...]
    reached: frozenset[int]


@dataclass(frozen=True)
class Sass:
    """The kernel, and its subroutines by name."""

    kernel: Routine
    routines: Mapping[str, Routine]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the kernel that compute, in the order of the ``trips`` of ``counted``."""
        return tuple(loop for loop in self.kernel.loops if not loop.waits)


@dataclass(frozen=True)
class Counts:
    """How often one warp issues each instruction, by name. ``unknown`` are names of no known kind;
    ``loops`` is the number of loops that were counted as one iteration."""

    names: Mapping[str, float]
    unknown: tuple[str, ...] = ()
    loops: int = 0

    @property
    def total(self) -> float:
        return sum(self.names.values())

    def kinds(self) -> dict[str, float]:
        """Return the instructions by kind (KINDS)."""
        found: Counter[str] = Counter()
        for name, number in self.names.items():
            found[Instruction(0, name).kind] += number  # type: ignore[assignment]
        return dict(found)

    def of(self, kind: str) -> float:
        return self.kinds().get(kind, 0.0)

    def widths(self, *kinds: str) -> dict[int, float]:
        """Return the accesses of these kinds by bytes per thread, widest first."""
        found: Counter[int] = Counter()
        for name, number in self.names.items():
            one = Instruction(0, name)
            if one.kind in kinds:
                found[one.width] += number  # type: ignore[assignment]
        return dict(sorted(found.items(), reverse=True))

    def bytes(self, *kinds: str) -> float:
        """Return the bytes that one thread moves by accesses of these kinds."""
        return sum(width * number for width, number in self.widths(*kinds).items())

    def matmuls(self) -> dict[str, float]:
        """Instructions of tensor cores, by base name: HMMA, HGMMA, QGMMA, UTCHMMA, ..."""
        found: Counter[str] = Counter()
        for name, number in self.names.items():
            one = Instruction(0, name)
            if one.kind == "tensor":
                found[one.base] += number  # type: ignore[assignment]
        return dict(found)


def parsed(text: str) -> Sass:
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
    made = {name: _routine(name, some, labels) for name, some in routines.items()}
    kernel, *_ = made
    return Sass(made.pop(kernel), made)


def counted(sass: Sass, trips: Sequence[Trips] = ()) -> Counts:
    """Count how often one warp issues each instruction.

    ``trips`` are the iterations of each of ``sass.loops``; None or missing ones count as one.
    Raises KernelError for more of them than there are loops.
    """
    if len(trips) > len(sass.loops):
        raise KernelError(f"{len(trips)} trip counts for {len(sass.loops)} loops")
    known = dict(zip(sass.loops, trips, strict=False))
    times = [1.0] * len(sass.kernel.blocks)
    for loop, number in known.items():
        every, some = number if isinstance(number, tuple) else (number, number)
        for block in loop.blocks:
            turns = some if block in loop.branches else every
            times[block] *= 1.0 if turns is None else turns
    found: Counter[str] = Counter()
    _count(sass, sass.kernel, times, found)
    unknown = sorted({Instruction(0, name).base for name in found if _is_unknown(name)})
    guessed = sum(known.get(loop) is None for loop in sass.loops)
    return Counts(dict(found), tuple(unknown), guessed)


def _is_unknown(name: str) -> bool:
    return Instruction(0, name).kind == "other"


def _count(sass: Sass, routine: Routine, times: Sequence[float], found: Counter[str]) -> None:
    for number in routine.reached:
        block = routine.blocks[number]
        for one in block.instructions:
            found[one.name] += times[number]  # type: ignore[assignment]
        called = sass.routines.get(block.calls)
        if called is not None and called is not routine:
            _count(sass, called, [times[number]] * len(called.blocks), found)


def _routine(name: str, some: list[Instruction], labels: Mapping[str, int]) -> Routine:
    """Divide instructions into blocks, and find the reachable ones and the loops."""
    own = {one.address for one in some}
    heads = {some[0].address}
    for place, one in enumerate(some):
        target = _target(one, labels)
        if target is not None and target in own:
            heads.add(target)
        if _ends(one) and place + 1 < len(some):
            heads.add(some[place + 1].address)
    starts = [place for place, one in enumerate(some) if one.address in heads]
    number_of = {some[start].address: number for number, start in enumerate(starts)}
    blocks = []
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(some)
        blocks.append(_block(some[start:end], number, number_of, labels, len(starts)))
    reached = _reached(blocks)
    return Routine(name, tuple(blocks), _loops(blocks, reached), frozenset(reached))


def _block(
    some: list[Instruction],
    number: int,
    number_of: Mapping[int, int],
    labels: Mapping[str, int],
    count: int,
) -> Block:
    last = some[-1]
    falls = (number + 1,) if number + 1 < count else ()
    place = PLACE.search(last.operands)
    if last.base == "CALL":
        return Block(tuple(some), falls, place[1] if place else "")
    if last.base in ("EXIT", "RET", "BRX", "JMX", "KILL") and not last.predicate:
        return Block(tuple(some), ())
    target = _target(last, labels)
    if target is None or target not in number_of:
        return Block(tuple(some), falls)
    always = not last.predicate and not _conditional(last)
    return Block(tuple(some), (number_of[target], *(() if always else falls)))


def _ends(one: Instruction) -> bool:
    return one.base in ("BRA", "JMP", "EXIT", "RET", "CALL", "BRX", "JMX", "KILL")


def _conditional(one: Instruction) -> bool:
    """Whether a branch has a predicate among its operands: ``BRA.U !UP0, `(.L_x_4)``."""
    return re.match(r"!?U?P[0-9]", one.operands) is not None


def _target(one: Instruction, labels: Mapping[str, int]) -> int | None:
    """Return the target of a branch; None for branches of diverged threads."""
    if one.base not in ("BRA", "JMP") or ".DIV" in one.name:
        return None
    place = PLACE.search(one.operands)
    return labels.get(place[1]) if place else None


def _is_rare(block: Block) -> bool:
    return bool(block.calls) and any(word in block.calls for word in RARE)


def _reached(blocks: Sequence[Block]) -> set[int]:
    """Return the blocks that run in usual cases."""
    found: set[int] = set()
    left = [0]
    while left:
        number = left.pop()
        if number not in found and not _is_rare(blocks[number]):
            found.add(number)
            left.extend(blocks[number].after)
    return found


def _loops(blocks: Sequence[Block], reached: set[int]) -> tuple[Loop, ...]:
    """Find natural loops: an edge back to a block that is still open in a depth-first search, with
    every block that leads to it without passing its head."""
    before: dict[int, list[int]] = {number: [] for number in reached}
    for number in reached:
        for after in blocks[number].after:
            if after in reached:
                before[after].append(number)
    bodies: dict[int, set[int]] = {}
    tails: dict[int, set[int]] = {}
    for tail, head in _back_edges(blocks, reached):
        tails.setdefault(head, set()).add(tail)
        body = bodies.setdefault(head, {head})
        left = [tail]
        while left:
            number = left.pop()
            if number not in body:
                body.add(number)
                left.extend(before[number])
    found = []
    for head, body in bodies.items():
        depth = sum(body <= other for other in bodies.values())
        address = blocks[head].instructions[0].address
        branches = frozenset(n for n in body if _avoided(blocks, body, head, tails[head], n))
        found.append(Loop(address, depth, frozenset(body), branches, _waits(blocks, body)))
    return tuple(sorted(found, key=lambda loop: (loop.address, loop.depth)))


def _back_edges(blocks: Sequence[Block], reached: set[int]) -> Iterable[tuple[int, int]]:
    opened, closed = {0}, set()
    path = [(0, iter(blocks[0].after))]
    while path:
        number, after = path[-1]
        for following in after:
            if following in opened:
                yield number, following
            elif following in reached and following not in closed:
                opened.add(following)
                path.append((following, iter(blocks[following].after)))
                break
        else:
            opened.discard(number)
            closed.add(number)
            path.pop()


def _avoided(
    blocks: Sequence[Block], body: set[int], head: int, tails: set[int], skipped: int
) -> bool:
    """Whether an iteration of a loop can avoid a block."""
    seen, left = {skipped}, [head]
    while left:
        number = left.pop()
        if number in seen or number not in body:
            continue
        if number in tails:
            return True
        seen.add(number)
        left.extend(blocks[number].after)
    return False


def _waits(blocks: Sequence[Block], body: set[int]) -> bool:
    """Whether a loop only polls for an arrival."""
    idle = {"barrier", "control", "move", "uniform", "int", "multiply"}
    some = [one for number in body for one in blocks[number].instructions]
    asks = any(one.base in ("SYNCS", "UTCATOMSWS", "NANOSLEEP") for one in some)
    return asks and all(one.kind in idle for one in some)
