"""Intervals of the integers of a kernel, from its TTIR: which of those that make an address may
leave their width.

Each value has an interval that holds what it may be in any program of a launch. Loops are followed
until their intervals no longer grow. What an interval does not say (that two values belong
together) makes it wider, never narrower: so a kernel without findings has no overflow, if what is
said of its arguments holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ttir import Block, Function, Operation, Type, operations_of, returned

Interval = tuple[int, int]
"""The least and the largest value."""
AXES = {"x": 0, "y": 1, "z": 2}
COMPUTED = ("arith.addi", "arith.subi", "arith.muli", "arith.shli", "tt.reduce", "tt.scan")
"""Operations whose results may leave their width."""
BITS = ("arith.andi", "arith.shrui")
"""Operations that cut bits from a word."""
SAME = {
    *("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.unsplat"),
    *("arith.extsi", "arith.index_cast", "tt.split"),
}
"""Operations that have the values of their operand."""
ROUNDS = 40
"""How often a loop is followed before what still grows is taken for unbounded: more than a search
by halves of 2^31 takes."""


@dataclass(frozen=True)
class Launch:
    """What is known of a launch: the intervals of its integer arguments, and its grid.

    What is assumed of data: the intervals of the integers in ``memory`` and of what atomic
    operations find there (``counters``), by the name of the argument that points to them; and those
    of ``variables`` of the kernel's text.
    """

    integers: Mapping[str, Interval]
    grid: tuple[int, int, int]
    memory: Mapping[str, Interval] = field(default_factory=dict)
    counters: Mapping[str, Interval] = field(default_factory=dict)
    variables: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Overflow:
    """An operation whose result may leave its width, and its line in the kernel's text."""

    name: str
    type: str
    interval: Interval
    line: str

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.name} {self.type} is {low:,} to {high:,}: {self.line}"


def overflows(function: Function, launch: Launch) -> list[Overflow]:
    """Return the operations on indices and sizes that may leave their width in a launch.

    These are all that an address, a mask or the bound of a loop depends on. Others may wrap, as a
    generator of random bits does; so may those on the bits of values, until a minimum, a mask or a
    shift bounds them. An address of unbounded bits is one of the operations returned.
    """
    reader = _Reader(function, launch)
    reader.run(function.body)
    needed = _needed(function)
    found = []
    for each in operations_of([function.body]):
        name = next(iter(each.results), "")
        kind = function.types.get(name, Type(""))
        wraps = each.name in COMPUTED and name in needed and name not in reader.unbounded
        if wraps and not _fits(reader.exact[name], kind):
            line = function.line(each.place)
            found.append(Overflow(each.name, kind.element, reader.exact[name], line))
        if each.name == "tt.addptr" and each.operands[1] in reader.unbounded:
            offset = each.operands[1]
            line, kind = function.line(each.place), function.types[offset]
            found.append(Overflow(each.name, kind.element, reader.of(offset), line))
    return list(dict.fromkeys(found))


# --- what addresses depend on ---------------------------------------------------------------------


def _needed(function: Function) -> set[str]:
    """Return the integers that the addresses, masks and bounds of loops depend on."""
    sources: dict[str, list[str]] = {}
    todo: list[str] = []
    for each in operations_of([function.body]):
        if each.name == "tt.addptr":
            todo += each.operands[1:]
        elif each.name == "tt.load":
            todo += each.operands[1:2]
        elif each.name == "tt.store":
            todo += each.operands[2:]
        elif each.name == "scf.for":
            todo += each.operands[1:4]
        elif "descriptor" in each.name or "st.release" in each.text:  # inline PTX
            todo += each.operands
        for name, several in _sources_of(each):
            sources.setdefault(name, []).extend(several)
    needed: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in needed and function.types.get(name, Type("")).bits:
            needed.add(name)
            todo += sources.get(name, [])
    return needed


def _sources_of(operation: Operation) -> Iterable[tuple[str, list[str]]]:
    """Yield values, and those that they are made of.

    What is loaded is made of nothing. Nor is what is cut from a word: its bits are right if the
    word wraps, too.
    """
    if operation.name in ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", *BITS):
        return
    if operation.name in ("tt.reduce", "tt.scan") or not operation.blocks:
        for result in operation.results:
            yield result, operation.operands
        return
    for block in operation.blocks:
        ends = returned(block)
        yield from ((name, [end]) for name, end in zip(operation.results, ends, strict=False))
        yield from (
            (inside, [end]) for (inside, _), end in zip(operation.carried, ends, strict=False)
        )
    yield from ((inside, [first]) for inside, first in operation.carried)
    if operation.name == "scf.while":
        before, after = operation.blocks
        yield from zip(after.arguments, ([each] for each in returned(before)), strict=True)


# --- following the operations ---------------------------------------------------------------------


class _Reader:
    """The intervals of values. ``exact`` are those before they wrap at their width; ``unbounded``
    are the values that depend on data of which nothing is known."""

    def __init__(self, function: Function, launch: Launch) -> None:
        self.types = function.types
        self.launch = launch
        self.known: dict[str, Interval] = {}
        self.exact: dict[str, Interval] = {}
        self.unbounded: set[str] = set()
        self.origin: dict[str, str] = {}
        self.made: dict[str, Operation] = {}
        for name in function.arguments:
            bare = name.removeprefix("%")
            if self.types[name].bits:
                self.known[name] = launch.integers[bare]
            self.origin[name] = bare

    def of(self, name: str) -> Interval:
        return self.known[name] if name in self.known else full(self.types[name])

    def run(self, block: Block) -> None:
        for each in block.operations:
            for name in each.results:
                self.made[name] = each
            if each.name in LOOPS:
                LOOPS[each.name](self, each)
            elif each.name == "scf.if":
                self._branch(each)
            else:
                self._step(each)

    def _step(self, operation: Operation) -> None:
        if operation.name in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.bitcast"):
            self._follow(operation.results[0], operation.operands[0])
        for name in operation.results:
            kind = self.types[name]
            if kind.bits:
                found = self._result(operation, kind)
                self._set(name, found, from_data=self._is_data(operation, found))

    def _follow(self, name: str, pointer: str) -> None:
        if pointer in self.origin:
            self.origin[name] = self.origin[pointer]

    def _is_data(self, operation: Operation, found: Interval | None) -> bool:
        """Return whether an operation's result is bounded by nothing but its width."""
        if found is None:
            return True
        widths = (self.types[each] for each in operation.results)
        fits = all(_fits(found, kind) and found != full(kind) for kind in widths)
        return not fits and any(each in self.unbounded for each in operation.operands)

    def _set(self, name: str, interval: Interval | None, *, from_data: bool = False) -> None:
        kind = self.types[name]
        whole = full(kind)
        assumed = self.launch.variables.get(re.sub(r"(_\d+)?'*$", "", name.removeprefix("%")))
        if assumed is not None and kind.bits > 1:
            interval, from_data = meet(interval or whole, assumed), False
        self.exact[name] = whole if interval is None else interval
        self.known[name] = self.exact[name] if _fits(self.exact[name], kind) else whole
        (self.unbounded.add if from_data and kind.bits > 1 else self.unbounded.discard)(name)

    def _result(self, operation: Operation, kind: Type) -> Interval | None:
        given = [self.of(each) for each in operation.operands]
        name = operation.name
        if name in SAME and self.types[operation.operands[0]].bits:
            return given[0]
        if name in UNSIGNED:
            given = [_unsigned(each, self.types[operation.operands[0]]) for each in given]
        if name in RULES:
            return RULES[name](*given)
        if name == "arith.constant":
            return _constants(operation.text)
        if name == "tt.make_range":
            start, end = (int(re.findall(rf"{what} = (\d+)", operation.text)[0]) for what in ENDS)
            return start, end - 1
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            many = self.launch.grid[AXES[operation.text.split()[0]]]
            return (many, many) if "num" in name else (0, many - 1)
        if name == "arith.extui":
            return _unsigned(given[0], self.types[operation.operands[0]])
        if name in ("tt.reduce", "tt.scan"):
            return self._reduced(operation, given[0])
        if name in ("tt.load", "tt.atomic_rmw"):
            return self._loaded(operation, kind)
        if name == "arith.select":
            return join(given[1], given[2])
        return given[0] if name == "arith.trunci" and _fits(given[0], kind) else None

    def _loaded(self, operation: Operation, kind: Type) -> Interval | None:
        known = self.launch.memory if operation.name == "tt.load" else self.launch.counters
        found = known.get(self.origin.get(operation.operands[0], ""))
        others = [self.of(each) for each in operation.operands[2:] if self.types[each].bits > 1]
        return found and join(found, *others)

    def _reduced(self, operation: Operation, given: Interval) -> Interval | None:
        inside = operation.blocks[0]
        how = inside.operations[0].name
        if len(inside.operations) != 2 or how not in ("arith.addi", *FOLDS):
            return None
        if how in FOLDS:
            return given
        axis = int(re.findall(r"axis = (\d+)", operation.text)[0])
        many = self.types[operation.operands[0]].shape[axis]
        low, high = given
        if operation.name == "tt.scan":
            return min(low, low * many), max(high, high * many)
        return low * many, high * many

    def _branch(self, operation: Operation) -> None:
        for block in operation.blocks:
            self.run(block)
        for place, name in enumerate(operation.results):
            self._join(name, [returned(block)[place] for block in operation.blocks])

    def _join(self, name: str, several: list[str]) -> None:
        if self.types[name].bits:
            data = any(each in self.unbounded for each in several)
            self._set(name, join(*map(self.of, several)), from_data=data)
        for each in several:
            self._follow(name, each)

    # --- loops ------------------------------------------------------------------------------------

    def for_loop(self, operation: Operation) -> None:
        (number, *_), body = operation.blocks[0].arguments, operation.blocks[0]
        low, high, step = (self.of(each) for each in operation.operands[1:4])
        self._set(number, (low[0], max(low[0], high[1] - 1)))
        trips = max(0, -(-(high[1] - low[0]) // max(step[0], 1)))

        def run() -> None:
            self.run(body)

        self._until_steady(operation, run, lambda: returned(body), trips)
        for place, name in enumerate(operation.results):
            self._join(name, [operation.carried[place][1], returned(body)[place]])

    def while_loop(self, operation: Operation) -> None:
        before, after = operation.blocks

        def run() -> None:
            self.run(before)
            ends = returned(before)
            limits = self._limits(before.operations[-1].operands[0])
            for name, end in zip(after.arguments, ends, strict=True):
                self._join(name, [end])
                if end in limits and self.types[name].bits:
                    self.known[name] = meet(self.known[name], limits[end])
            self.run(after)

        self._until_steady(operation, run, lambda: returned(after), None)
        for place, name in enumerate(operation.results):
            self._join(name, [returned(before)[place]])

    def _limits(self, condition: str) -> dict[str, Interval]:
        """Return what is known of values where a condition holds."""
        made = self.made.get(condition)
        if made is None or made.name not in ("arith.andi", "arith.cmpi"):
            return {}
        if made.name == "arith.andi":
            found: dict[str, Interval] = {}
            for each in made.operands:
                for name, limit in self._limits(each).items():
                    found[name] = meet(limit, found.get(name, limit))
            return found
        one, other = made.operands
        how = made.text.split(",")[0].strip()
        less = how in ("slt", "sle")
        if how not in ("slt", "sle", "sgt", "sge"):
            return {}
        small, large = (one, other) if less else (other, one)
        edge = how in ("slt", "sgt")
        return {
            small: meet(self.of(small), (-math.inf, self.of(large)[1] - edge)),
            large: meet(self.of(large), (self.of(small)[0] + edge, math.inf)),
        }

    def _until_steady(
        self,
        operation: Operation,
        run: Callable[[], None],
        ends: Callable[[], list[str]],
        trips: int | None,
    ) -> None:
        """Run a loop's body until what it carries has its largest interval.

        What a round adds the same to is added to as often as the loop runs. What grows in another
        way is first taken for unbounded; then one more round tells what conditions leave of it.
        """
        carried = [pair for pair in operation.carried if self.types[pair[0]].bits]
        places = [place for place, pair in enumerate(operation.carried) if pair in carried]
        for inside, first in operation.carried:
            self._join(inside, [first])
        for number in range(2 * ROUNDS):
            run()
            steady = True
            for (inside, first), place in zip(carried, places, strict=True):
                end = ends()[place]
                added = self._added(inside, end)
                if added is not None and trips is not None:
                    whole = _product(added, (0, trips))
                    wider = _sum(self.of(first), whole)
                else:
                    wider = join(self.of(first), self.of(end))
                    if number >= ROUNDS and not _holds(self.of(inside), wider):
                        wider = full(self.types[inside])
                    elif number < ROUNDS:
                        wider = join(wider, self.of(inside))
                steady = steady and wider == self.known[inside]
                self.known[inside] = wider
            if steady:
                break
        else:
            self.known |= {inside: full(self.types[inside]) for inside, _ in carried}
        run()

    def _added(self, inside: str, end: str) -> Interval | None:
        """Return what a round adds to a value, if that is all that it does."""
        made = self.made.get(end)
        if end == inside:
            return 0, 0
        if made is None or made.name != "arith.addi" or inside not in made.operands:
            return None
        one, other = made.operands
        return self.of(other if one == inside else one)


LOOPS = {"scf.for": _Reader.for_loop, "scf.while": _Reader.while_loop}


# --- intervals ------------------------------------------------------------------------------------


def full(kind: Type) -> Interval:
    """Return all numbers of a width; a truth value is 0 or 1."""
    if kind.bits <= 1:
        return 0, 1
    return -(1 << (kind.bits - 1)), (1 << (kind.bits - 1)) - 1


def _fits(interval: Interval, kind: Type) -> bool:
    return _holds(full(kind), interval)


def _holds(outer: Interval, inner: Interval) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def join(*some: Interval) -> Interval:
    return min(low for low, _ in some), max(high for _, high in some)


def meet(one: tuple[float, float], other: tuple[float, float]) -> Interval:
    """Return what both hold; the second, if that is nothing."""
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (int(low), int(high)) if low <= high else (int(one[0]), int(one[1]))


def _unsigned(interval: Interval, kind: Type) -> Interval:
    return interval if interval[0] >= 0 else (0, (1 << kind.bits) - 1)


def _sum(one: Interval, other: Interval) -> Interval:
    return one[0] + other[0], one[1] + other[1]


def _difference(one: Interval, other: Interval) -> Interval:
    return one[0] - other[1], one[1] - other[0]


def _corners(how: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """Return the rule of an operation that is monotonous in each operand."""

    def rule(one: Interval, other: Interval) -> Interval:
        several = [how(a, b) for a in one for b in other]
        return min(several), max(several)

    return rule


_product = _corners(lambda a, b: a * b)


def _quotient(one: Interval, other: Interval) -> Interval | None:
    if other[0] <= 0:
        return None
    return _corners(lambda a, b: int(math.copysign(abs(a) // b, a)))(one, other)


def _remainder(one: Interval, other: Interval) -> Interval | None:
    if other[0] <= 0:
        return None
    most = other[1] - 1
    return (max(one[0], -most) if one[0] < 0 else 0), min(max(one[1], 0), most)


def _left(one: Interval, other: Interval) -> Interval | None:
    return _product(one, (1 << other[0], 1 << other[1])) if 0 <= other[0] <= other[1] < 64 else None


def _right(one: Interval, other: Interval) -> Interval | None:
    return _corners(lambda a, b: a >> b)(one, other) if 0 <= other[0] <= other[1] < 64 else None


def _and(one: Interval, other: Interval) -> Interval | None:
    tops = [each[1] for each in (one, other) if each[0] >= 0]
    return (0, min(tops)) if tops else None


def _or(one: Interval, other: Interval) -> Interval | None:
    if min(one[0], other[0]) < 0:
        return None
    return 0, (1 << max(one[1], other[1]).bit_length()) - 1


def _constants(text: str) -> Interval | None:
    if "dense" not in text and text.strip() in ("true", "false"):
        return (int("true" in text),) * 2  # type: ignore[return-value]
    if re.search(r"\d\.\d|0x", text):
        return None
    bare = text.replace("true", "1").replace("false", "0")
    found = [int(each) for each in re.findall(r"-?\d+", bare)]
    return (min(found), max(found)) if found else None


_LEAST, _MOST = _corners(min), _corners(max)
FOLDS = ("arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui")
ENDS = ("start", "end")
UNSIGNED = ("arith.divui", "arith.remui", "arith.shrui", "arith.minui", "arith.maxui")
RULES: Mapping[str, Callable[..., Interval | None]] = {
    "arith.addi": _sum,
    "arith.subi": _difference,
    "arith.muli": _product,
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.divui": _quotient,
    "arith.remui": _remainder,
    "arith.shli": _left,
    "arith.shrsi": _right,
    "arith.shrui": _right,
    "arith.andi": _and,
    "arith.ori": _or,
    "arith.xori": _or,
    "arith.minsi": _LEAST,
    "arith.maxsi": _MOST,
    "arith.minui": _LEAST,
    "arith.maxui": _MOST,
    "tt.join": join,
    "tt.cat": join,
    "arith.cmpi": lambda *_: (0, 1),
}
"""How the interval of a result follows from those of the operands; None if nothing is known."""
