"""``Algorithm``: the interface through which algorithms are chosen and run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commpass.codecs import Codec, RawCodec
from commpass.collectives.request import Request
from commpass.collectives.steps import Steps
from commpass.plan.kinds import BY_RANK

Encodes = tuple[tuple[Codec, float], ...]


def _fits_all(codec: Codec, ranks: int) -> str | None:
    return None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for one kind of collective, identified by its name with parameters (``spec``).

    - ``parameters``: those of ``spec`` that differ from their defaults, by name.
    - ``steps(x, request, codec)`` returns its steps. For a codec with state it is ``steps(x,
      request, codec, state)``, whose result is a pair of the result and the new state.
    - ``encodes(codec, ranks)`` returns the codecs that encode a value on its way, each with the
      share of the result's variance that it encodes (for ranks whose values are independent).
    - ``steps_unsupported_reason`` returns why its steps cannot work with a codec on a number of
      ranks, or None.
    - ``domain`` returns the name of the domain in which it sums, "" for untransformed values.
    - ``keeps_input`` returns whether it, or a running exchange, still reads the input after it has
      started.
    - ``chunks`` is the number of chunks that it sends, if that does not depend on the tensor's
      size.
    - ``wire_dtype`` returns the dtype of its wire: uint8, except if the library sums what is sent.
    """

    spec: str
    kind: str
    steps: Callable[..., Steps]
    encodes: Callable[[Codec, int], Encodes] = lambda codec, ranks: ((codec, 1.0),)
    steps_unsupported_reason: Callable[[Codec, int], str | None] = _fits_all
    domain: Callable[[Codec], str] = lambda codec: ""
    keeps_input: Callable[[Codec], bool] = lambda codec: isinstance(codec, RawCodec)
    chunks: int = 1
    wire_dtype: Callable[[Codec], torch.dtype] = lambda codec: torch.uint8
    parameters: tuple[tuple[str, Any], ...] = ()

    def run(self, x: Tensor, request: Request, codec: Codec, *state: Tensor) -> Steps:
        """Return its steps on this rank. Raises PolicyError for a codec calibrated for another
        number of ranks."""
        return self.steps(x, request, codec.of_rank(request.rank, request.ranks), *state)

    def unsupported_reason(self, codec: Codec, ranks: int) -> str | None:
        """Return why it cannot work with a codec on ``ranks`` ranks, or None if it can."""
        if why := codec.unsupported_reason(ranks):
            return why
        if self.kind not in BY_RANK and codec.of_rank(0, ranks) is not codec:
            return f"its scales differ between ranks, for which {self.kind} has no form: share them"
        return self.steps_unsupported_reason(codec, ranks)

    def error(self, codec: Codec, ranks: int) -> float:
        """The expected relative error of a result: the errors of all encodes, added as
        variances."""
        return math.sqrt(
            sum(share * coder.relative_error() ** 2 for coder, share in self.encodes(codec, ranks))
        )

    @property
    def name(self) -> str:
        return self.spec.partition("(")[0]

    @property
    def chunk_bytes(self) -> int:
        """The size of the chunks that it was named with; 0 if it was not."""
        return int(dict(self.parameters).get("chunk_bytes", 0))
