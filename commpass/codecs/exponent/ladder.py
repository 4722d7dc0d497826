"""The code of an exponent: few bits in the middle of a window, more bits further out.

A code is a ladder of steps. Each step has a field of a few bits: zero means "continue with the next
step", any other value encodes an exponent. The last step is the plain exponent. The first step
exists for every value (the planes of the static part). The later ones exist only for values that no
earlier step encodes (the dynamic part).

The exponent zero (zeros and subnormals) is far below every window, yet common: relu and sparse
gradients make half the values zero. The *mode* of a chunk says which step encodes it. In mode 0, it
is the last step, if that has a code for it. In mode k, it is the last code of step k, and the
exponent that this code stood for takes the code of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commpass.codecs.exponent.bits import add, any_of, equals, spread, subtract

ZERO = 15
"""The entry for the exponent zero in tables of offsets, independent of the window."""
BINS = 16
"""The number of consecutive exponents that are counted to choose a window."""


@dataclass(frozen=True)
class Step:
    """A field of ``bits`` bits. This step and the earlier ones encode the offsets ``low .. high -
    1`` from the start of the innermost window."""

    bits: int
    low: int
    high: int


@dataclass(frozen=True)
class Ladder:
    """Steps with nested windows.

    ``offsets``: for each step and code the offset from the start of the outermost window; code 0 is
    unused. ``modes``: how many steps may encode the exponent zero by their last code. All bits of
    such codes are ones, so that a zero that is also in the window is decoded as zero. ``below``:
    how far the lowest candidate start of the outermost window is below a median.
    """

    steps: tuple[Step, ...]
    offsets: tuple[tuple[int, ...], ...]
    modes: int
    below: int

    @property
    def planes(self) -> int:
        """Bits of the first step's field."""
        return self.steps[0].bits

    @property
    def fields(self) -> tuple[int, ...]:
        """Bits of the fields of the dynamic part; the last one is the whole exponent."""
        return (*(step.bits for step in self.steps[1:]), 8)

    @property
    def names_zero(self) -> bool:
        """Whether the last step has a code for the exponent zero in every mode."""
        return ZERO in self.offsets[-1]

    @property
    def starts(self) -> int:
        """The number of candidate starts: those whose windows lie inside the bins."""
        return BINS + 1 - (self.steps[-1].high - self.steps[-1].low)

    def gains(self, bins: Sequence[Any], zeros: Any, escape: int) -> list[Any]:
        """Return the bits that a chunk saves compared with escapes only, for each mode and, within
        it, each start.

        ``bins`` holds the counts of 16 consecutive exponents, ``zeros`` the count of the exponent
        zero, ``escape`` the bits of a whole exponent. Only sums and products are used, so the
        arguments may be numbers or tensors.
        """
        low, fields = self.steps[-1].low, (*self.fields[:-1], escape)
        upto = [bins[0] * 0]
        for each in bins:
            upto.append(upto[-1] + each)
        found = []
        for mode in range(self.modes + 1):
            named = sum(fields[mode - 1 :]) if mode else fields[-1] * self.names_zero
            lost = named - fields[-1] * self.names_zero
            for start in range(self.starts):
                gain = zeros * named
                for step, bits in zip(self.steps, fields, strict=True):
                    first, end = start + step.low - low, start + step.high - low
                    gain = gain + (upto[end] - upto[first]) * bits
                if mode:
                    gain = gain - bins[start + self.offsets[mode - 1][-1]] * lost
                found.append(gain)
        return found

    def encode(
        self, exponents: Sequence[Tensor], start: Tensor, modes: Sequence[Tensor]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Encode bit planes of exponents to the planes of the fields of each step, and for each
        step a mask of the values that have a field.

        ``start`` is the start of the outermost window. ``modes[k]`` has all bits set for chunks in
        mode k + 1, and none otherwise. Fields are zero outside the mask; the last step is the
        exponent itself.
        """
        offset = subtract(exponents, spread(start, 9))
        near = ~any_of(offset[4:])
        zero = ~any_of(exponents)
        here = torch.full_like(near, -1)
        moved = []
        steps, masks = [], []
        for number, (step, table) in enumerate(zip(self.steps, self.offsets, strict=True)):
            inside = [entry for entry in table[1:] if entry != ZERO]
            terms = [term & near for term in equals(offset[:4], inside)]
            if number < self.modes:
                moved.append(terms[-1] & modes[number])
                terms[-1] = (terms[-1] & ~modes[number]) | (zero & modes[number])
            if ZERO in table:
                terms.append((zero & ~any_of(modes)) | any_of(moved))
            terms = [term & here for term in terms] if number else terms
            planes = [
                any_of([term for code, term in enumerate(terms, start=1) if code >> bit & 1])
                for bit in range(step.bits)
            ]
            steps.append(planes)
            masks.append(here)
            here = here & ~any_of(planes)
        return [*steps, [plane & here for plane in exponents]], [*masks, here]

    def decode(
        self,
        steps: Sequence[Sequence[Tensor]],
        start: Tensor,
        modes: Sequence[Tensor],
        bits: int,
    ) -> list[Tensor]:
        """The inverse of ``encode``, given the planes of all steps."""
        offset: list[list[Tensor]] = [[], [], [], []]
        named, zeros = [], []
        for number, (planes, table) in enumerate(zip(steps[:-1], self.offsets, strict=True)):
            terms = equals(planes, range(1, len(table)))
            for code, (term, entry) in enumerate(zip(terms, table[1:], strict=True), start=1):
                places = [(term, entry)]
                if entry == ZERO:
                    zeros.append(term & ~any_of(modes))
                    places = [
                        (term & mode, table[-1])
                        for mode, table in zip(modes, self.offsets, strict=False)
                    ]
                elif number < self.modes and code == len(table) - 1:
                    zeros.append(term & modes[number])
                    places = [(term & ~modes[number], entry)]
                for where, place in places:
                    for bit in range(4):
                        if place >> bit & 1:
                            offset[bit].append(where)
            named.append(any_of(planes))
        inside = any_of(named) & ~any_of(zeros)
        nothing = torch.zeros_like(inside)
        total = add(
            [any_of(terms) if terms else nothing for terms in offset], spread(start, bits), bits
        )
        return [(plane & inside) | whole for plane, whole in zip(total, steps[-1], strict=True)]


def ladder(*steps: Step, modes: int, below: int, zero: bool) -> Ladder:
    """Build a ladder with its tables. With ``zero``, the last step has a code for the exponent
    zero."""
    low = steps[-1].low
    offsets = []
    for number, step in enumerate(steps):
        inner = range(steps[number - 1].low, steps[number - 1].high) if number else range(0)
        table = [
            0,
            *(exponent - low for exponent in range(step.low, step.high) if exponent not in inner),
        ]
        if zero and step is steps[-1]:
            table.append(ZERO)
        assert len(table) <= 1 << step.bits, "more exponents than codes"
        offsets.append(tuple(table))
    return Ladder(steps, tuple(offsets), modes, below)


LADDERS = {
    2: ladder(Step(2, 0, 3), Step(2, -2, 4), Step(3, -7, 5), modes=2, below=9, zero=True),
    3: ladder(Step(3, 0, 7), modes=1, below=6, zero=False),
}
"""Ladders by the number of planes. 3 is the code of ZipCCL. 2 encodes the three likeliest
exponents, then three next to them, then six further ones and zero."""
