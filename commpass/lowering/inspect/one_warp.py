"""The time of one warp that runs alone: its instructions issue in order, each when its operands are
there and its pipe is free.

Latencies on an idle processor, in clocks, are those of microbenchmarks: Luo et al. (2024) for
memory and shared memory, Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking" (2018) for arithmetic. A shuffle takes as long as a load from shared memory. Of
code that loops, an iteration takes as long as the first one. Bank conflicts, caches of
instructions, and waits for other warps are not modeled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from commpass.lowering.inspect.architectures import Architecture
from commpass.lowering.inspect.roofline import PIPES
from commpass.lowering.inspect.sass import Instruction, Sass, Trips, executions

ARITHMETIC = 4
LATENCIES = {
    "special": 18,
    "convert": 18,
    "bits": 18,
    "fp64": 16,
    "shared load": 29,
    "shuffle": 29,
    "uniform": 8,
    "move": 12,
    "barrier": 16,
}
"""Clocks from the issue of an instruction to its result, by kind; of others ``ARITHMETIC``."""
MEMORY = ("global load", "local load", "atomic", "async copy")
NO_RESULT = ("global store", "shared store", "local store", "barrier", "control", "async copy")
OPERAND = re.compile(r"(?<![\w.])(U?R\d+|U?P[0-6])(\.64)?(?![\w])")


def clocks_of_one_warp(code: Sass, trips: Sequence[Trips], arch: Architecture) -> float:
    """Return the clocks from the start of a warp to its last issue. Subroutines are not entered."""
    times = executions(code, trips)
    ready: dict[str, float] = {}
    free: dict[str, float] = {}
    now = total = 0.0
    for address, block in code.kernel.blocks.items():
        start = now
        for one in block:
            now = _issue(one, now, ready, free, arch)
        total += (now - start) * times[address]
    return total


def _issue(
    one: Instruction,
    now: float,
    ready: dict[str, float],
    free: dict[str, float],
    arch: Architecture,
) -> float:
    """Return when an instruction issues, after one that issued at ``now``."""
    results, operands = registers(one)
    pipes = PIPES.get(one.kind, ())
    at = max([now + 1, *(ready.get(each, 0.0) for each in operands)])
    at = max([at, *(free.get(pipe, 0.0) for pipe in pipes)])
    for pipe in pipes:
        free[pipe] = at + arch.warp * arch.quarters / arch.lanes[pipe]
    latency = arch.latency if one.kind in MEMORY else LATENCIES.get(one.kind, ARITHMETIC)
    ready.update(dict.fromkeys(results, at + latency))
    return at


def registers(one: Instruction) -> tuple[list[str], list[str]]:
    """Return the registers and predicates that an instruction writes, and those that it reads."""
    parts = one.operands.split(",")
    # RED and REDG, unlike REDUX, add to memory, and return nothing.
    written: list[str] = []
    if one.kind not in NO_RESULT and one.base not in ("RED", "REDG", "REDAS"):
        while parts and re.fullmatch(r"\s*!?U?PT?[0-6]?\s*", parts[0]):
            written += _named(parts.pop(0), 1)
        if parts and not one.base.endswith(("SETP", "SETP2", "VOTE")):
            written += _named(parts.pop(0), _results(one))
    stored = max(1, one.width // 4) if one.kind.endswith("store") else 1
    last = len(parts) - 1
    read = [
        each
        for number, part in enumerate(parts)
        for each in _named(part, stored if number == last else 1)
    ]
    return written, read + _named(one.predicate, 1)


def _results(one: Instruction) -> int:
    """Return how many registers an instruction writes."""
    words = one.name.split(".")
    if one.kind.endswith("load") or "64" in words or "128" in words:
        return max(1, one.width // 4)
    return 2 if "WIDE" in words else 1


def _named(text: str, width: int) -> list[str]:
    found = []
    for name, pair in OPERAND.findall(text):
        letters, number = re.fullmatch(r"(\D+)(\d+)", name).groups()  # type: ignore[union-attr]
        count = max(width, 2 if pair else 1)
        found += [f"{letters}{int(number) + ahead}" for ahead in range(count)]
    return found
