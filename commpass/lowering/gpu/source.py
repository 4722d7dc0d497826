"""Kernels as text: an entry function with every tile function that it calls, in one self-contained
source.

Tile functions are written in Triton's language, each once, in ``tiles``. A generated kernel is a
short entry that calls them. Its text is what is compiled, shown and hashed.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

HEADER = "import triton\nimport triton.language as tl\n"
JIT = "@triton.jit\n"
PLAIN = (int, float, bool)


@dataclass(frozen=True)
class Source:
    """The text of a kernel and the name of its entry."""

    entry: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel with a generated entry, and how to call it.

    ``signature`` holds its arguments in order, with their Triton types; ``constants`` are the
    compile-time arguments that follow. ``fuses`` says whether a product and a sum may be rounded
    once. It is allowed if the bits depend on the GPU anyway, since it approximates a root.
    """

    source: Source
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    fuses: bool


def tile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function in Triton's language as a part of kernels. It is never called directly."""
    function.is_tile = True  # type: ignore[attr-defined]
    return function


@lru_cache(maxsize=64)
def of_function(entry: Callable[..., Any]) -> Source:
    """Return the source of a kernel that is itself written as a tile function."""
    return Source(entry.__name__, _assemble(_text(entry), _needs(entry)))


def of_text(entry: str, text: str, known: Mapping[str, Any]) -> Source:
    """Return the source of a kernel with a generated entry; ``known`` are the tile functions and
    numbers that its text may use.

    Raises ValueError if the text has an argument or a variable with the name of one of them: inside
    its function, that name is not the tile function any more.
    """
    code = compile(text, f"<{entry}>", "exec")
    usable = {name for name, value in known.items() if _is_usable(value)}
    if hidden := sorted(usable.intersection(_locals(code))):
        raise ValueError(f"{entry}: {', '.join(hidden)}: names of variables and of tile functions")
    return Source(entry, _assemble(text, _needs_of(code, known)))


def function_text(name: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
    """Return the text of a function; its head is broken between arguments alone."""
    joiner = "\N{NO-BREAK SPACE}"
    head = textwrap.fill(
        ", ".join(each.replace(" ", joiner) for each in arguments),
        96,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
    ).replace(joiner, " ")
    body = textwrap.indent("\n".join(lines), "    ")
    return f"def {name}(\n{head},\n):\n{body}\n"


def constant(name: str) -> str:
    """Return the declaration of a compile-time argument."""
    return f"{name}: tl.constexpr"


def indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


RARE = "  # rare"
"""What ends a line whose suite (the lines further in) is not reached for typical values."""


def without_rare(source: Source) -> Source:
    """Return a kernel whose rare suites do nothing, to count what the others do."""
    lines = list[str]()
    depth = -1  # of the rare line whose suite is being left out
    for line in source.text.splitlines():
        indent = len(line) - len(line.lstrip())
        if depth >= 0 and (indent > depth or not line):
            continue
        depth = indent if line.endswith(RARE) else -1
        lines.append(line)
        if depth >= 0:
            lines.append(" " * (depth + 4) + "pass")
    return Source(source.entry, "\n".join(lines) + "\n")


@lru_cache(maxsize=1024)
def load(source: Source) -> Any:
    """Return the kernel of a source, by ``triton.jit``, or interpreted if TRITON_INTERPRET=1."""
    place = f"<commpass {source.entry} {source.digest}>"
    # Triton reads the text of a function by its file name; this one has no file.
    lines = source.text.splitlines(keepends=True)
    linecache.cache[place] = (len(source.text), None, lines, place)
    namespace: dict[str, Any] = {"__name__": f"commpass.lowering.gpu.generated.{source.entry}"}
    exec(compile(source.text, place, "exec"), namespace)
    return namespace[source.entry]


def _text(function: Callable[..., Any]) -> str:
    """Return the text of a function, without decorators."""
    text = textwrap.dedent(inspect.getsource(function))
    return text[text.index("def ") :]


def _assemble(entry: str, needed: Mapping[str, Any]) -> str:
    """Return one text: numbers, tile functions, each after those that it calls, then the entry."""
    parts = [HEADER]
    numbers = [f"{n} = tl.constexpr({v!r})" for n, v in needed.items() if isinstance(v, PLAIN)]
    if numbers:
        parts.append("\n".join(numbers) + "\n")
    tiles = [value for value in needed.values() if not isinstance(value, PLAIN)]
    parts += [f"\n{JIT}{_text(each)}" for each in tiles]
    parts.append(f"\n{JIT}{entry}")
    return "\n".join(parts)


def _needs(function: Callable[..., Any]) -> dict[str, Any]:
    return _needs_of(function.__code__, function.__globals__)


def _needs_of(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and tile functions that code uses, directly or indirectly, dependencies
    first."""
    found: dict[str, Any] = {}
    for name in _globals(code):
        value = known.get(name)
        if not _is_usable(value):
            continue
        if not isinstance(value, PLAIN):
            for inner, what in _needs(value).items():  # type: ignore[arg-type]
                found.setdefault(inner, what)
        found.setdefault(name, value)
    return found


def _is_usable(value: Any) -> bool:
    """Whether the text of a kernel may contain the name of a value."""
    return isinstance(value, PLAIN) or getattr(value, "is_tile", False)


def _locals(code: CodeType) -> Iterator[str]:
    """Yield the names of the arguments and variables of code, including functions inside it."""
    yield from code.co_varnames
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _locals(inner)


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the global names that code uses, including functions inside it, in order."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
