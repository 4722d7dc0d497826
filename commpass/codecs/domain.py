"""Domains: where values may be summed without leaving the codec's transform (SDP4Bit: "staying in
the rotated domain")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from commpass.codecs.transforms import NO_TRANSFORM, Transform


@dataclass(frozen=True)
class Domain:
    """A linear map of rows ``[rows, n]``, n a multiple of ``width``, and its inverse. It is the
    same on all ranks, so the sum of what entered, once it leaves, is the sum of the values."""

    name: str
    width: int
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]


VALUES = Domain("", 1, lambda rows: rows, lambda rows: rows)
"""The values themselves."""


@cache
def domain_of(transform: Transform) -> Domain:
    """The domain of a transform; the values themselves if it is none, or depends on the values (a
    pivot swap)."""
    if transform is NO_TRANSFORM or transform.side:
        return VALUES
    width = transform.sums

    def enter(rows: Tensor) -> Tensor:
        return transform.forward(_blocks(rows, width))[0].flatten(1)

    def leave(rows: Tensor) -> Tensor:
        # Divided before and not after: the inverse then overflows only where its result does.
        return (transform.inverse(_blocks(rows, width) * (1 / width), None) * width).flatten(1)

    return Domain(transform.name, width, enter, leave)


def _blocks(rows: Tensor, width: int) -> Tensor:
    return rows.reshape(rows.shape[0], rows.shape[1] // width, width)
