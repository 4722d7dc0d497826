"""The kinds of values, with the texts that reasons use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What values are, by how they were computed. The text appears in reasons."""

    FIELD = "a field of like values"
    UNKNOWN = "an input of the graph"
    PRODUCT = "a product of two fields"
    ALIGNED = "a product of two fields of one shape"
    SQUARE = "squares or absolute values"
    ZERO = "zeros"
    CONSTANT = "constants"
    INTEGER = "integers made float"
    INDEX = "indices"
    MASK = "a mask"
    COUNT = "counts"
    STATISTIC = "statistics"
    COLUMN_SUM = "sums over the first dimension"
    GRADIENT = "sums of gradients"
    NORM = "norms"
    LOSS = "losses"
    NUMBERS = "single numbers"
    MIXED = "different things in one tensor"


FIELDS = frozenset({Kind.FIELD, Kind.UNKNOWN, Kind.PRODUCT, Kind.ALIGNED, Kind.SQUARE})
LIKE = FIELDS | {Kind.ZERO}
"""Kinds for which lossy codecs are allowed. Every codec reproduces zeros exactly."""
WHOLE = frozenset({Kind.INTEGER, Kind.INDEX, Kind.MASK, Kind.COUNT})
"""Kinds without fractions."""
NEUTRAL = frozenset({Kind.ZERO, Kind.CONSTANT})
SUMS = frozenset({Kind.COLUMN_SUM, Kind.GRADIENT})
"""Few values that count as a field beside a field, such as bias gradients beside weight
gradients."""
ACCUMULATED = frozenset({Kind.COUNT, Kind.STATISTIC, Kind.COLUMN_SUM, Kind.NORM, Kind.LOSS})
"""Kinds that survive an elementwise operation with a graph input: running counts and means, masked
losses, the larger of two."""


@dataclass(frozen=True)
class Provenance:
    """What values are, and ``how`` they were computed: the names of operators."""

    kind: Kind
    how: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.how})" if self.how else self.kind.value


FIELD, UNKNOWN = Provenance(Kind.FIELD), Provenance(Kind.UNKNOWN)
