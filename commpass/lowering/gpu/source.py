"""Kernels as text: an entry function with every tile function that it calls, in one piece that
stands alone.

Tile functions are written in Triton's language, each once, in ``tiles``. A generated kernel is a
short entry that calls them; its text is what is compiled, shown and hashed.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator, Mapping
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


def tile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function in Triton's language of which kernels are made. It is never called."""
    function.is_tile = True  # type: ignore[attr-defined]
    return function


def of_function(entry: Callable[..., Any]) -> Source:
    """The source of a kernel that is written as a tile function itself."""
    return Source(entry.__name__, _assembled(_text(entry), _needs(entry)))


def of_text(entry: str, text: str, known: Mapping[str, Any]) -> Source:
    """The source of a kernel whose entry was generated; ``known`` are the tile functions and
    numbers that its text may name."""
    code = compile(text, f"<{entry}>", "exec")
    return Source(entry, _assembled(text, _needs_of(code, known)))


@lru_cache(maxsize=1024)
def load(source: Source) -> Any:
    """The kernel of a source: of ``triton.jit``, or interpreted where TRITON_INTERPRET=1."""
    place = f"<commpass {source.entry} {source.digest}>"
    # Triton reads the text of a function by the name of its file; this one has no file.
    lines = source.text.splitlines(keepends=True)
    linecache.cache[place] = (len(source.text), None, lines, place)
    namespace: dict[str, Any] = {"__name__": f"commpass.lowering.gpu.generated.{source.entry}"}
    exec(compile(source.text, place, "exec"), namespace)
    return namespace[source.entry]


def _text(function: Callable[..., Any]) -> str:
    """The text of a function, without decorators."""
    text = textwrap.dedent(inspect.getsource(function))
    return text[text.index("def ") :]


def _assembled(entry: str, needed: Mapping[str, Any]) -> str:
    """One text: numbers, tile functions, each after those that it calls, and the entry."""
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
    """The numbers and tile functions that code names, and those that these need, least first."""
    found: dict[str, Any] = {}
    for name in _globals(code):
        value = known.get(name)
        if isinstance(value, PLAIN):
            found.setdefault(name, value)
        elif getattr(value, "is_tile", False):
            for inner, what in _needs(value).items():  # type: ignore[arg-type]
                found.setdefault(inner, what)
            found.setdefault(name, value)
    return found


def _globals(code: CodeType) -> Iterator[str]:
    """The global names that code uses, that of functions inside it as well, in order."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
