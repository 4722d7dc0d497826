"""What an algorithm is to those who choose and run it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import Codec, RawCodec
from commpass.collectives.request import Request
from commpass.collectives.steps import Steps

Encodes = tuple[tuple[Codec, float], ...]
BY_RANK = ("all_reduce", "reduce_scatter", "all_gather")
"""Kinds in which rows to decode are those of all ranks, in order, or sums."""


def _fits_all(codec: Codec, ranks: int) -> str | None:
    return None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of one kind of collective, by name with its parameters (``spec``).

    ``steps(x, request, codec)`` are its steps; with a codec that needs state ``steps(x, request,
    codec, state)``, which end in the result and the new state. ``encodes(codec, ranks)`` are the
    codecs that a value meets on its way, each with the share of the result's variance that is then
    in it (for ranks whose values are independent). ``unsupported_reason`` says why it cannot work
    with a codec on so many ranks. ``domain`` names the domain in which it sums, "" for the values
    themselves. ``keeps`` says whether it, or an exchange in the air, still reads the input once it
    has started. ``chunks`` is into how many it divides what it sends, where that does not depend on
    the tensor's size. ``sends`` is the dtype of its wire: bytes, but for one whose library sums
    what is sent.
    """

    spec: str
    kind: str
    steps: Callable[..., Steps]
    encodes: Callable[[Codec, int], Encodes] = lambda codec, ranks: ((codec, 1.0),)
    obstacle: Callable[[Codec, int], str | None] = _fits_all
    domain: Callable[[Codec], str] = lambda codec: ""
    keeps: Callable[[Codec], bool] = lambda codec: isinstance(codec, RawCodec)
    chunks: int = 1
    sends: Callable[[Codec], torch.dtype] = lambda codec: torch.uint8

    def run(self, x: Tensor, request: Request, codec: Codec, *state: Tensor) -> Steps:
        """Its steps on this rank. Raises PolicyError for a codec that is not for so many ranks."""
        return self.steps(x, request, codec.of_rank(request.rank, request.ranks), *state)

    def unsupported_reason(self, codec: Codec, ranks: int) -> str | None:
        """Why it cannot work with a codec on so many ranks."""
        if why := codec.unsupported_reason(ranks):
            return why
        if self.kind not in BY_RANK and codec.of_rank(0, ranks) is not codec:
            return f"its scales differ between ranks, for which {self.kind} has no form: share them"
        return self.obstacle(codec, ranks)

    def error(self, codec: Codec, ranks: int) -> float:
        """Expected relative error of a result: the errors of all encodes, added as variances."""
        return math.sqrt(
            sum(share * coder.relative_error() ** 2 for coder, share in self.encodes(codec, ranks))
        )

    @property
    def name(self) -> str:
        return self.spec.partition("(")[0]
