"""C++ of functions that were written for tensors of bit planes.

The exponent codec's parts (``codecs.exponent``: bits, floats, ladder) are straight lines of integer
operations on int32 tensors. Called with a ``Expression`` for each tensor they write the same
operations down as C++, on vectors: there is no second form of them that could differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Expression:
    """A vector of int32 in C++, or one number, by its name; each operation on it adds a line to
    ``lines``. ``kind`` is its type there."""

    shape: tuple[int, ...] = ()

    def __init__(self, name: str, lines: list[str], kind: str = "Word") -> None:
        self.name, self.lines, self.kind = name, lines, kind

    def _emit(self, text: str) -> Expression:
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {self.kind} {name} = {text};")
        return Expression(name, self.lines, self.kind)

    def _with(self, sign: str, operand: Expression | int) -> Expression:
        return self._emit(f"{self.name} {sign} {_named(operand)}")

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
        """What keeps a value from being worked out twice: here it has a name."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        filled = {torch.full_like: lambda: args[1], torch.zeros_like: lambda: 0}
        if function not in filled:
            return NotImplemented
        return args[0]._emit(f"Word{{}} + ({filled[function]()})")


def _named(value: Expression | int) -> str:
    """Constants of 32 bits as C++ has them: with a sign."""
    if isinstance(value, Expression):
        return value.name
    return f"({(value + 2**31) % 2**32 - 2**31})"


class Lines:
    """Lines of C++ that are being written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def expression(self, text: str, kind: str = "Word") -> Any:
        """What a C++ expression is, by a name: a ``Expression``, for functions of tensors."""
        return Expression("", self.lines, kind)._emit(text)

    def loads(self, places: Sequence[str]) -> list[Any]:
        return [self.expression(f"get<Word>({place})") for place in places]

    def stores(self, places: Sequence[str], values: Sequence[Any]) -> None:
        for place, word in zip(places, values, strict=True):
            self.lines.append(f"put<Word>({place}, {word.name});")

    def __str__(self) -> str:
        return "\n    ".join(self.lines)
