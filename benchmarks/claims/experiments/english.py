"""Real text that every Python installation has: the topics of its reference manual, about 500 KB of
English."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

TENTH = 10
"""One in this many topics is for validation, and one for the test."""


@dataclass(frozen=True)
class English:
    """Bytes ``[n]`` to train on, and bytes of other topics for validation and test."""

    train: Tensor
    validation: Tensor
    test: Tensor


def english() -> English:
    """Return the text; every process of one Python version gets the same text in the same order."""
    texts = list(dict.fromkeys(topics[name] for name in sorted(topics)))
    numbered = list(enumerate(texts))
    return English(
        train=_joined(text for n, text in numbered if n % TENTH < TENTH - 2),
        validation=_joined(text for n, text in numbered if n % TENTH == TENTH - 2),
        test=_joined(text for n, text in numbered if n % TENTH == TENTH - 1),
    )


def _joined(texts: Iterable[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8)
