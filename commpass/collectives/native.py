"""all_reduce and reduce_scatter by the library, on values cast to a 16-bit float.

This is what users can do without commpass: cast, let the library sum, cast back. The library sums
in the 16-bit dtype and in its own order, so law 4 (sums in float32, in rank order) does not hold.
``native`` is therefore used only if it is named explicitly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from commpass.codecs import CastCodec, Codec, accumulation_dtype, operators
from commpass.collectives.algorithm import Algorithm, Encodes
from commpass.collectives.request import Request, ops
from commpass.collectives.steps import Steps


def all_reduce_steps(x: Tensor, request: Request, codec: Codec) -> Steps:
    """Reduce ``x`` of any shape to its sum or mean over the ranks."""
    total = yield from _summed(
        x.reshape(1, -1),
        request,
        codec,
        lambda wire: ops.all_reduce(wire, "sum", request.group),
    )
    return total.to(x.dtype).reshape(x.shape)


def reduce_scatter_steps(x: Tensor, request: Request, codec: Codec) -> Steps:
    """Reduce ``[ranks * n, ...]`` to part ``request.rank`` of its sum or mean: ``[n, ...]``."""
    total = yield from _summed(
        x.reshape(request.ranks, -1),
        request,
        codec,
        lambda wire: ops.reduce_scatter_tensor(wire, "sum", request.ranks, request.group),
    )
    return total.to(x.dtype).reshape(x.shape[0] // request.ranks, *x.shape[1:])


def _summed(
    rows: Tensor, request: Request, codec: Codec, start: Callable[[Tensor], Tensor]
) -> Steps:
    """Cast ``[r, n]``, sum it by the exchange that ``start`` starts, and widen it to ``[1, n]`` in
    the accumulation dtype. For a mean, the sum is divided after it is widened, because gloo has no
    mean."""
    wire = operators.encode(codec, rows).flatten()
    arrived = yield start(wire.view(wire_dtype(codec)))
    row = arrived.view(torch.uint8).reshape(1, -1)
    total = operators.decode(codec, row, rows.shape[1], accumulation_dtype(rows.dtype))
    return request.from_sum(total)


def wire_dtype(codec: Codec) -> torch.dtype:
    """Return the dtype in which the library receives and sums the values."""
    assert isinstance(codec, CastCodec)
    return codec.dtype


def encodes(codec: Codec, ranks: int) -> Encodes:
    """Return the share of rounding errors, for a ring of the library.

    Every addend is rounded, which counts as one encode (share 1). A ring then adds one rank after
    another and rounds each partial sum: that of k ranks has k / ranks of the variance, for k = 2,
    ..., ranks. These add ``(ranks + 1) / 2 - 1 / ranks``. A library that sums as a tree, or in a
    wider dtype than it sends, rounds less.
    """
    return ((codec, 1 + (ranks + 1) / 2 - 1 / ranks),)


def _casts(codec: Codec, ranks: int) -> str | None:
    if isinstance(codec, CastCodec):
        return None
    return (
        f"the library cannot sum what {codec.spec} sends: algorithm 'native' is for casts, so write"
        " codec='bf16' with it, or name another algorithm"
    )


def native(kind: str, spec: str) -> Algorithm:
    """The library's own collective on values cast to bf16 or fp16: the fewest steps, but sums in 16
    bits.

    All ranks have the same bits, as the library returns them. Nonfinite values stay nonfinite. A
    finite addend that the 16-bit dtype cannot represent is clamped to its largest number, as in the
    codec. A *sum* above it is an Inf, as in any sum of the library in that dtype: 65504 in fp16,
    3.39e38 in bf16.
    """
    return Algorithm(
        spec,
        kind,
        all_reduce_steps if kind == "all_reduce" else reduce_scatter_steps,
        encodes=encodes,
        steps_unsupported_reason=_casts,
        wire_dtype=wire_dtype,
    )


ALGORITHMS = {"all_reduce": {"native": native}, "reduce_scatter": {"native": native}}
