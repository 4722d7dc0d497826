"""Generate C++ from functions written for tensors of bit planes.

The exponent codec's parts (``codecs.exponent``: bits, floats, ladder) are straight-line integer
operations on int32 tensors. Called with an ``Expression`` for each tensor, they write the same
operations as C++ on vectors, so there is no second version of them that could differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Expression:
    """A named int32 vector (or number) in C++; each operation on it appends a line to ``lines``.
    ``kind`` is its C++ type."""

    shape: tuple[int, ...] = ()

    def __init__(self, name: str, lines: list[str], kind: str = "Word") -> None:
        self.name, self.lines, self.kind = name, lines, kind

    def _emit(self, text: str) -> Expression:
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {self.kind} {name} = {text};")
        return Expression(name, self.lines, self.kind)

    def _with(self, sign: str, operand: Expression | int) -> Expression:
        return self._emit(f"{self.name} {sign} {_operand(operand)}")

    def __and__(self, operand: Expression | int) -> Expression:
        return self._with("&", operand)

    def __or__(self, operand: Expression | int) -> Expression:
        return self._with("|", operand)

    def __xor__(self, operand: Expression | int) -> Expression:
        return self._with("^", operand)

    def __add__(self, operand: Expression | int) -> Expression:
        return self._with("+", operand)

    def __sub__(self, operand: Expression | int) -> Expression:
        return self._with("-", operand)

    def __mul__(self, operand: int) -> Expression:
        return self._with("*", operand)

    def __lshift__(self, operand: int) -> Expression:
        return self._with("<<", operand)

    def __rshift__(self, operand: int) -> Expression:
        return self._with(">>", operand)

    def __invert__(self) -> Expression:
        return self._emit(f"~{self.name}")

    def __neg__(self) -> Expression:
        return self._emit(f"-{self.name}")

    def stride(self) -> tuple[int, ...]:
        return ()

    def as_strided(self, *how: Any) -> Expression:
        """Return itself: a named value is not recomputed."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        filled = {torch.full_like: lambda: args[1], torch.zeros_like: lambda: 0}
        if function not in filled:
            return NotImplemented
        return args[0]._emit(f"Word{{}} + ({filled[function]()})")


def _operand(value: Expression | int) -> str:
    """Return the name of an expression, or a 32-bit constant as a signed number."""
    if isinstance(value, Expression):
        return value.name
    return f"({(value + 2**31) % 2**32 - 2**31})"


class Lines:
    """Lines of generated C++."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def expression(self, text: str, kind: str = "Word") -> Any:
        """Name a C++ expression and return it as an ``Expression``, for functions of tensors."""
        return Expression("", self.lines, kind)._emit(text)

    def loads(self, places: Sequence[str]) -> list[Any]:
        return [self.expression(f"get<Word>({place})") for place in places]

    def stores(self, places: Sequence[str], values: Sequence[Any]) -> None:
        for place, word in zip(places, values, strict=True):
            self.lines.append(f"put<Word>({place}, {word.name});")

    def __str__(self) -> str:
        return "\n    ".join(self.lines)


def addresses(name: str, number: int, first: int = 0) -> list[str]:
    """Return the C++ of addresses in tables of lanes, as byte pointers."""
    return [f"(Byte*)({name}[{first + i}] + g)" for i in range(number)]


def modes(lines: Lines, number: int) -> list[Any]:
    """Return for each mode of a chunk but the first whether it is chosen, as words of all or no
    bits."""
    return [lines.expression(f"Word{{}} - int(mode == {i + 1})") for i in range(number)]
