"""Define what an equation is, and how deviations are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Equation:
    """An equation of a paper.

    ``deviation()`` is how far commpass is from it: relative, unless ``text`` states otherwise.
    ``bound`` is the most that rounding explains, and ``note`` tells what is rounded.
    """

    where: str
    text: str
    deviation: Callable[[], float]
    bound: float
    note: str = "float64"


def relative(got: Any, expected: Any) -> float:
    """Return the largest difference of two arrays, as a share of the largest expected value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {got.shape} and {expected.shape}")
    return float(np.abs(got - expected).max() / np.abs(expected).max())
