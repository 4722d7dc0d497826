"""C++ of functions that were written for tensors of bit planes.

The exponent codec's parts (``codecs.exponent``: bits, floats, ladder) are straight lines of integer
operations on int32 tensors. Called with a ``Word`` for each tensor they write the same operations
down as C++, on vectors: there is no second form of them that could differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Word:
    """A vector of int32 in C++, or one number, by its name; each operation on it adds a line to
    ``lines``. ``kind`` is its type there."""

    shape: tuple[int, ...] = ()

    def __init__(self, name: str, lines: list[str], kind: str = "Word") -> None:
        self.name, self.lines, self.kind = name, lines, kind

    def _made(self, text: str) -> Word:
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {self.kind} {name} = {text};")
        return Word(name, self.lines, self.kind)

    def _with(self, sign: str, other: Word | int) -> Word:
        return self._made(f"{self.name} {sign} {_named(other)}")

    def __and__(self, other: Word | int) -> Word:
        return self._with("&", other)

    def __or__(self, other: Word | int) -> Word:
        return self._with("|", other)

    def __xor__(self, other: Word | int) -> Word:
        return self._with("^", other)

    def __add__(self, other: Word | int) -> Word:
        return self._with("+", other)

    def __sub__(self, other: Word | int) -> Word:
        return self._with("-", other)

    def __mul__(self, other: int) -> Word:
        return self._with("*", other)

    def __lshift__(self, other: int) -> Word:
        return self._with("<<", other)

    def __rshift__(self, other: int) -> Word:
        return self._with(">>", other)

    def __invert__(self) -> Word:
        return self._made(f"~{self.name}")

    def __neg__(self) -> Word:
        return self._made(f"-{self.name}")

    def stride(self) -> tuple[int, ...]:
        return ()

    def as_strided(self, *how: Any) -> Word:
        """What keeps a value from being worked out twice: here it has a name."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        filled = {torch.full_like: lambda: args[1], torch.zeros_like: lambda: 0}
        if function not in filled:
            return NotImplemented
        return args[0]._made(f"Word{{}} + ({filled[function]()})")


def _named(value: Word | int) -> str:
    """Constants of 32 bits as C++ has them: with a sign."""
    if isinstance(value, Word):
        return value.name
    return f"({(value + 2**31) % 2**32 - 2**31})"


class Lines:
    """Lines of C++ that are being written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def word(self, text: str, kind: str = "Word") -> Any:
        """What a C++ expression is, by a name: a ``Word``, for functions of tensors."""
        return Word("", self.lines, kind)._made(text)

    def loads(self, places: Sequence[str]) -> list[Any]:
        return [self.word(f"get<Word>({place})") for place in places]

    def stores(self, places: Sequence[str], words: Sequence[Any]) -> None:
        for place, word in zip(places, words, strict=True):
            self.lines.append(f"put<Word>({place}, {word.name});")

    def __str__(self) -> str:
        return "\n    ".join(self.lines)
