"""The code of an exponent: short for the few in the middle of the window, longer the further out it
lies.

A code is a ladder of steps. Each step has a field of a few bits; a field of zero says "not here,
look at the next step", any other names an exponent; the last step is the exponent as it is. The
first step is there for every value (the planes of the static part), the next ones only for those
that the steps before could not name (the dynamic part).

The exponent zero (zeros and subnormals) is far below every window, yet common: relu and sparse
gradients make half the values zero. Where a chunk has many, zero takes the code of the highest
exponent of an early step, which moves to that of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.exponent.bits import add, any_of, equals, spread, subtract
from commpass.codecs.exponent.window import window_shift

ZERO = 15
"""Stands in the tables of offsets for the exponent zero itself, wherever the window lies."""


@dataclass(frozen=True)
class Step:
    """A field of ``bits``; ``low .. high - 1`` are the offsets from the start of the innermost
    window that are named so far."""

    bits: int
    low: int
    high: int


@dataclass(frozen=True)
class Ladder:
    """Steps whose windows enclose each other.

    ``offsets``: for each step and code the offset from the start of the outermost window; code 0 is
    unused. ``early``: the step of which the last code is for zero where zeros are many. All bits of
    the last codes are ones, so that a zero that is in the window as well is read as zero.
    ``shift``: 256ths to add to a mean exponent, so that the floor of the sum is the start of the
    first step's window (``window_shift``).
    """

    steps: tuple[Step, ...]
    offsets: tuple[tuple[int, ...], ...]
    early: int
    shift: int

    @property
    def outer(self) -> Step:
        return self.steps[-1]

    @property
    def fields(self) -> tuple[int, ...]:
        """Bits of the fields of the dynamic part, the last one being the whole exponent."""
        return (*(step.bits for step in self.steps[1:]), 8)

    def encode(
        self, exponents: Sequence[Tensor], start: Tensor, many: Tensor
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Bit planes of exponents to those of the fields of each step, and for each step where it
        has fields.

        ``start`` is that of the outermost window, ``many`` has all bits set where zeros are many,
        none elsewhere. Fields are zero where a step has none; the last step is the exponent itself.
        """
        offset = subtract(exponents, spread(start, 9))
        near = ~any_of(offset[4:])
        zero = ~any_of(exponents)
        here = torch.full_like(near, -1)
        moved = here
        steps, masks = [], []
        for number, (step, table) in enumerate(zip(self.steps, self.offsets, strict=True)):
            inside = [entry for entry in table[1:] if entry != ZERO]
            terms = [term & near for term in equals(offset[:4], inside)]
            if number == self.early:
                moved = terms[-1]
                terms[-1] = (moved & ~many) | (zero & many)
            if ZERO in table:
                terms.append((zero & ~many) | (moved & many))
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
        self, steps: Sequence[Sequence[Tensor]], start: Tensor, many: Tensor, bits: int
    ) -> list[Tensor]:
        """The inverse of ``encode``, given the planes of all steps."""
        offset: list[list[Tensor]] = [[], [], [], []]
        moved = self.offsets[self.early][-1]
        named, zeros = [], []
        for number, (planes, table) in enumerate(zip(steps[:-1], self.offsets, strict=True)):
            terms = equals(planes, range(1, len(table)))
            for term, entry in zip(terms, table[1:], strict=True):
                inside, place = term, entry
                if entry == ZERO:
                    zeros.append(term & ~many)
                    inside, place = term & many, moved
                elif number == self.early and entry == moved:
                    zeros.append(term & many)
                    inside = term & ~many
                for bit in range(4):
                    if place >> bit & 1:
                        offset[bit].append(inside)
            named.append(any_of(planes))
        inside = any_of(named) & ~any_of(zeros)
        nothing = torch.zeros_like(inside)
        total = add(
            [any_of(terms) if terms else nothing for terms in offset], spread(start, bits), bits
        )
        return [(plane & inside) | whole for plane, whole in zip(total, steps[-1], strict=True)]


def ladder(*steps: Step, early: int, zero: bool) -> Ladder:
    """A ladder with its tables. ``zero``: the last step has a code for the exponent zero."""
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
    shift = round(window_shift(steps[0].high - steps[0].low) * 256)
    return Ladder(steps, tuple(offsets), early, shift)


LADDERS = {
    2: ladder(Step(2, 0, 3), Step(2, -2, 4), Step(3, -7, 5), early=1, zero=True),
    3: ladder(Step(3, 0, 7), early=0, zero=False),
}
"""By the number of planes. 3: ZipCCL's. 2: the three likeliest exponents, then three beside them,
then six further and zero."""
