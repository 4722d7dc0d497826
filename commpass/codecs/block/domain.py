"""Domains: linear transforms in which values can be summed before the inverse is applied (SDP4Bit:
"staying in the rotated domain")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from commpass.codecs.block import transforms
from commpass.codecs.block.transforms import Hadamard, NoTransform, Transform
from commpass.codecs.dispatch import by_type


@dataclass(frozen=True)
class Domain:
    """A transform used as a linear map of rows ``[rows, n]``, with n a multiple of ``width``.

    The map is the same on all ranks, so the inverse of a sum of transformed rows is the sum of the
    original rows.
    """

    transform: Transform

    @property
    def name(self) -> str:
        """The name shown in plans; empty for untransformed values."""
        return self.transform.name

    @property
    def width(self) -> int:
        return self.transform.sums

    def to_domain(self, rows: Tensor) -> Tensor:
        """Transform rows of values to this domain."""
        return to_domain(self.transform, rows)

    def from_domain(self, rows: Tensor) -> Tensor:
        """The inverse of ``to_domain``."""
        return from_domain(self.transform, rows)


VALUES = Domain(NoTransform())
"""The domain of untransformed values."""


def domain_of(transform: Transform) -> Domain:
    """Return the domain of a transform: ``VALUES`` if it is the identity or depends on the values
    (a pivot swap)."""
    return VALUES if transform.side else Domain(transform)


@by_type
def to_domain(transform: Transform, rows: Tensor) -> Tensor:
    raise NotImplementedError(transform)


@by_type
def from_domain(transform: Transform, rows: Tensor) -> Tensor:
    raise NotImplementedError(transform)


@to_domain.register
@from_domain.register
def _identity(transform: NoTransform, rows: Tensor) -> Tensor:
    return rows


@to_domain.register
def _rotate(transform: Hadamard, rows: Tensor) -> Tensor:
    return transforms.forward(transform, _blocks(rows, transform.width))[0].flatten(1)


@from_domain.register
def _rotate_back(transform: Hadamard, rows: Tensor) -> Tensor:
    # Divide before the inverse, so that it overflows only if its result does.
    width = transform.width
    blocks = transforms.inverse(transform, _blocks(rows, width) * (1 / width), None)
    return (blocks * width).flatten(1)


def _blocks(rows: Tensor, width: int) -> Tensor:
    return rows.reshape(rows.shape[0], rows.shape[1] // width, width)
