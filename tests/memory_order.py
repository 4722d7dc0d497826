"""Read in what order a compiled exchange writes and reads wires and signals.

PTX names what an address is computed from, so accesses of wires are told apart from those of
tensors, counters and signals. The machine code has the order in which loads are issued.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from commpass.lowering.inspect.sass import Instruction, parse_sass

REGISTER = re.compile(r"%\w+")
PARAMETER = re.compile(r"_param_(\d+)\b")
BARRIER, RELEASE, ACQUIRE, STORE, LOAD = "barrier", "release", "acquire", "store", "load"


@dataclass(frozen=True)
class Step:
    """A step of a kernel, in the order of its text: a barrier, a signal that is released or
    acquired, or a ``store`` or ``load`` of global memory. ``names`` are the arguments that the
    address of an access depends on."""

    what: str
    names: frozenset[str] = frozenset()


def accesses_of(ptx: str, arguments: Sequence[str]) -> list[Step]:
    """Return the steps of a kernel with these arguments.

    A signal is released by an atomic operation or a store, and acquired by an atomic operation or
    a load.
    """
    lines = [_plain(line) for line in ptx.splitlines()]
    known = _sources([line for line in lines if line], arguments)
    steps = []
    for line in filter(None, lines):
        name, _, rest = line.partition(" ")
        parts = name.split(".")
        if parts[0] == "bar" and "sync" in parts:
            steps.append(Step(BARRIER))
        elif ordered := {RELEASE, ACQUIRE} & set(parts):
            assert "sys" in parts, line
            steps.append(Step(*ordered))
        elif parts[0] in ("ld", "st") and "global" in parts:
            (address,) = re.findall(r"\[(.*?)\]", rest)
            names = frozenset().union(*(known[each] for each in REGISTER.findall(address)))
            steps.append(Step(LOAD if parts[0] == "ld" else STORE, names))
    return steps


def _plain(line: str) -> str:
    """Return an instruction without its predicate and comment, or "". Of inline PTX, only a store
    that releases counts."""
    line = line.partition("//")[0].strip()
    if line.startswith("{") and (released := re.search(r"st\.release[^;]*;", line)):
        line = released[0]
    line = re.sub(r"^@!?%\w+\s+", "", line).replace("\t", " ")
    return line if re.match(r"[a-z][\w.:]* ", line) and line.endswith(";") else ""


def _sources(lines: Sequence[str], arguments: Sequence[str]) -> dict[str, set[str]]:
    """Return the arguments that each register depends on, but not through memory."""
    uses = []
    for line in lines:
        name, _, rest = line.partition(" ")
        opcode = name.split(".")[0]
        if opcode in ("st", "bar", "bra", "ret", "atom", "red"):
            continue
        if opcode == "ld":
            found = PARAMETER.search(rest)
            given = (
                {arguments[int(found[1])]} if found and int(found[1]) < len(arguments) else set()
            )
            uses += [(to, given, []) for to in REGISTER.findall(rest.partition("[")[0])]
        else:
            to, *of = REGISTER.findall(rest)
            uses.append((to, set(), of))
    known: dict[str, set[str]] = {}
    for to, _, of in uses:
        known.update({each: known.get(each, set()) for each in (to, *of)})
    is_changed = True
    while is_changed:
        is_changed = False
        for to, given, of in uses:
            all_of = given.union(*(known[each] for each in of))
            is_changed |= not all_of <= known[to]
            known[to] |= all_of
    return known


def out_of_order(steps: Sequence[Step], wires: Sequence[str]) -> list[str]:
    """Return what may be seen too late or read too early.

    ``wires`` are the arguments that locate the wires of each phase. All stores of a phase are
    before a barrier and the release behind it, and all loads behind its acquire and a barrier.
    """
    at = {
        what: [place for place, step in enumerate(steps) if step.what == what]
        for what in (BARRIER, RELEASE, ACQUIRE)
    }
    if not len(at[RELEASE]) == len(at[ACQUIRE]) == len(wires):
        return [f"{len(at[RELEASE])} releases, {len(at[ACQUIRE])} acquires"]
    found = []
    for name, release, acquire in zip(wires, at[RELEASE], at[ACQUIRE], strict=True):
        of = {
            what: [n for n, step in enumerate(steps) if step.what == what and name in step.names]
            for what in (STORE, LOAD)
        }
        before = max((n for n in at[BARRIER] if n < release), default=-1)
        behind = min((n for n in at[BARRIER] if n > acquire), default=len(steps))
        if not of[STORE] or not of[LOAD]:
            found.append(f"{name}: {len(of[STORE])} stores, {len(of[LOAD])} loads")
        if of[STORE] and of[STORE][-1] > before:
            found.append(f"{name}: a store behind the signal")
        if of[LOAD] and of[LOAD][0] < behind:
            found.append(f"{name}: a load before the signal is seen")
    return found


def loads_in_flight(sass: str) -> int:
    """Return the most loads of 16 bytes that machine code (``nvdisasm -c``) issues, one after
    another, before it uses what one of them loads."""
    most = 0
    for block in parse_sass(sass).kernel.blocks.values():
        waiting: dict[str, int] = {}
        for number, one in enumerate(block):
            used = set(re.findall(r"\bR\d+\b", one.operands))
            if used & waiting.keys() or number == len(block) - 1:
                most = max(most, len(set(waiting.values())))
                waiting = {}
            if _is_wide(one):
                first = int(re.match(r"R(\d+)", one.operands)[1])
                waiting |= {f"R{first + each}": number for each in range(4)}
    return most


def _is_wide(one: Instruction) -> bool:
    return one.name.startswith("LDG") and ".128" in one.name
