"""Compile kernels to TTIR, Triton's first intermediate form, and parse its text.

Nothing behind that form is built, so a kernel takes a fifth of a second, on any machine.
"""

from __future__ import annotations

import linecache
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Type:
    """The type of a value: ``element`` is ``i32``, ``bf16``, ``ptr<i8>``, ..."""

    element: str
    shape: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """The width of an integer; 0 for other values."""
        return int(self.element[1:]) if re.fullmatch(r"i\d+", self.element) else 0

    @property
    def pointee(self) -> str:
        return self.element.removeprefix("ptr<").removesuffix(">")


@dataclass
class Block:
    """Operations in order, and the arguments at their start."""

    arguments: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Operation:
    """One operation.

    ``text`` is what follows its name, without types. ``carried`` are the values that a loop
    carries: their names inside, and what they are at first. ``place`` is the name of its location.
    """

    results: list[str]
    name: str
    operands: list[str]
    text: str
    carried: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    place: str = ""


@dataclass(frozen=True)
class Function:
    """A kernel: the names of its arguments, its operations, the types of all values, and its
    locations by name. No two values have the same name."""

    arguments: Sequence[str]
    body: Block
    types: Mapping[str, Type]
    places: Mapping[str, str]

    def line(self, place: str) -> str:
        """Return the line of a kernel's text at a location, and the lines that call it."""
        return "  <-  ".join(dict.fromkeys(self._lines(place))) or "unknown line"

    def _lines(self, place: str) -> Iterator[str]:
        text = self.places.get(place, "")
        if inner := re.findall(r"#loc\d*", text):
            for each in inner:
                yield from self._lines(each)
        elif where := re.match(r'"(.*)":(\d+):\d+', text):
            file, number = where[1], int(where[2])
            yield f"{number}: {linecache.getline(file, number).strip()}"


def compile_to_ttir(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int
) -> Function:
    """Return the TTIR of a kernel (of ``gpu.source.load``) after Triton's inlining.

    ``types`` are those of its arguments, as for ``triton.compile``.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": warps})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    every = {**types, **dict.fromkeys(constants, "constexpr")}
    names = list(kernel.arg_names)
    source = ASTSource(kernel, {name: every[name] for name in names}, dict(constants))
    helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *helpers, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return parse_ttir(str(stages["ttir"](module, {})))


VALUE = r"%[\w.$-]+(?:#\d+)?"
QUOTED = re.compile(r'"[^"]*"')
LOCATION = re.compile(r"\s*loc\((#loc\d*|callsite\([^()]*\)|\"[^\"]*\"\([^()]*\)|unknown)\)")
STATEMENT = re.compile(r'(?:(%[\w.$-]+(?::\d+)?(?:, %[\w.$-]+)*) = )?"?([a-z_]+\.[\w.]+)"?(.*)')
TYPE = re.compile(r"tensor<([\dx]*)x(!tt\.ptr<[^<>]*>|\w+)>|!tt\.ptr<([^<>]*)>|\b([if]\d+|bf16)\b")
BETWEEN = ("} else {", "} do {", "}, {")
ENDS = ("yield", "return", "condition")


def parse_ttir(text: str) -> Function:
    """Parse a module with one function. Raise ValueError for a line of no known form."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("#", "module"))]
    start = next(number for number, line in enumerate(lines) if line.startswith("tt.func"))
    if any("tt.func" in line for line in lines[start + 1 :]):
        raise ValueError("more than one function: a call that was not inlined")
    parser = _Parser()
    body = Block(parser.define_arguments(lines[start]))
    opened = [(Operation([], "tt.func", [], ""), body)]
    for line in filter(None, lines[start + 1 :]):
        operation, block = opened[-1]
        if line in BETWEEN:
            opened[-1] = (operation, parser.next_block(operation))
        elif line.startswith("}"):
            parser.leave(operation, line)
            opened.pop()
            if not opened:
                break
        elif line.startswith("^"):
            block.arguments = parser.define_arguments(line)
        else:
            made, has_blocks = parser.statement(line)
            block.operations.append(made)
            if has_blocks:
                opened.append((made, parser.first_block(made)))
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
    return Function(body.arguments, body, parser.types, places)


class _Parser:
    """The names of values in the scopes that are open, and the types of all values.

    MLIR gives a name again in another region, so values are renamed here.
    """

    def __init__(self) -> None:
        self.scope: ChainMap[str, str] = ChainMap()
        self.types: dict[str, Type] = {}

    def define(self, name: str, kind: Type) -> str:
        unique = name
        while unique in self.types:
            unique += "'"
        self.scope[name] = unique
        self.types[unique] = kind
        return unique

    def define_arguments(self, line: str) -> list[str]:
        found = re.findall(r"(%[\w.$-]+): ([^%]*)", line)
        return [self.define(name, next(types_in(what), Type("other"))) for name, what in found]

    def statement(self, line: str) -> tuple[Operation, bool]:
        """Return the operation of a line, and whether a block of it follows."""
        bare = LOCATION.sub("", line)
        found = STATEMENT.fullmatch(bare)
        if found is None:
            raise ValueError(f"unknown form: {line}")
        left, name, rest = found.groups()
        before, behind = _split_types(rest.removesuffix("({").removesuffix("{").strip())
        named = re.findall(VALUE, QUOTED.sub("", before))  # inline PTX has registers
        operands = [self.scope.get(each, each) for each in named]
        made = Operation([], name, operands, before, place=_place(line))
        if name in ("scf.for", "scf.while"):
            pairs = re.findall(rf"({VALUE}) = ({VALUE})(?=[,)])", before)
            made.carried = [(inside, self.scope[first]) for inside, first in pairs]
        made.results = self.define_results(left or "", types_of_results(name, behind))
        return made, bare.endswith("{")

    def define_results(self, left: str, types: Sequence[Type]) -> list[str]:
        name, _, number = left.partition(":")
        names = [f"{name}#{each}" for each in range(int(number))] if number else left.split(", ")
        kinds = [*types, *([types[-1] if types else Type("other")] * len(names))]
        return [self.define(*each) for each in zip(names, kinds, strict=False)] if left else []

    def first_block(self, operation: Operation) -> Block:
        """Open the scope of the first block; a loop's arguments are in the line before it."""
        firsts = [first for _, first in operation.carried]
        names = [inside for inside, _ in operation.carried]
        self.scope = self.scope.new_child()
        kinds = [self.types[first] for first in firsts]
        if operation.name == "scf.for":
            number = re.match(VALUE, operation.text)
            assert number is not None
            lower = self.scope[re.findall(VALUE, operation.text)[1]]
            names, kinds = [number[0], *names], [self.types[lower], *kinds]
        block = Block([self.define(*each) for each in zip(names, kinds, strict=True)])
        operation.blocks.append(block)
        return block

    def next_block(self, operation: Operation) -> Block:
        self.scope = self.scope.parents.new_child()
        operation.blocks.append(Block())
        return operation.blocks[-1]

    def leave(self, operation: Operation, line: str) -> None:
        """Close a scope. The line may have the location, and the types of what has none before."""
        self.scope = self.scope.parents
        operation.place = operation.place or _place(line)
        types = types_of_results(operation.name, line)
        for name, kind in zip(operation.results, types, strict=False):
            self.types[name] = kind


def _place(line: str) -> str:
    found = re.search(r"loc\((#loc\d*)\)$", line)
    return found[1] if found else ""


def _split_types(text: str) -> tuple[str, str]:
    """Split what follows a name: operands with attributes, and types."""
    bare = re.sub(r"<\{.*?\}>|\{[^{}]*\}", lambda each: " " * len(each[0]), text)
    ends = [at for at in (bare.find(" : "), bare.find(" -> ")) if at >= 0]
    at = min(ends, default=len(text))
    return text[:at], text[at:]


def types_of_results(name: str, text: str) -> list[Type]:
    """Return the types of an operation's results: behind an arrow or ``to``, or else the last."""
    for sign in ("->", " to "):
        if sign in text:
            return list(types_in(text.rpartition(sign)[2].partition("  : ")[0]))
    found = list(types_in(text))
    if name == "arith.cmpi":
        return [Type("i1", found[0].shape)]
    if name == "tt.load":
        return [Type(found[0].pointee, found[0].shape)]
    return found[:1] if name == "tt.addptr" else found[-1:]


def types_in(text: str) -> Iterator[Type]:
    for shape, element, pointee, scalar in TYPE.findall(LOCATION.sub("", text)):
        if shape:
            yield Type(element.removeprefix("!tt."), tuple(map(int, shape.split("x"))))
        else:
            yield Type(f"ptr<{pointee}>" if pointee else scalar)


def operations_of(blocks: Iterable[Block]) -> Iterator[Operation]:
    """Yield all operations, also those inside others."""
    for block in blocks:
        for each in block.operations:
            yield each
            yield from operations_of(each.blocks)


def returned(block: Block) -> list[str]:
    """Return what a block returns at its end: the values, without the condition of a loop."""
    last = block.operations[-1]
    if not last.name.endswith(ENDS):
        return []
    return last.operands[1:] if last.name.endswith("condition") else last.operands
