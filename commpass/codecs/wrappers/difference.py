"""Encode the difference to a reference that the receivers hold, by an inner codec (SDP4Bit, for
weights).

Weights change little from step to step: the difference is far smaller than the weights, and so is
its error. Law 1 requires that sender and receivers hold the same bits as reference: the decoded
weight of the last step, not the original. So errors do not accumulate: the error of one step is
part of the next difference.

An all_gather keeps its reference between calls (``initial_state``, ``next_reference``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from commpass.codecs.codec import Codec, Wire, accumulation_dtype
from commpass.codecs.preset import Preset
from commpass.codecs.wrappers.inner import Resolve, inner_codec
from commpass.errors import PolicyError
from commpass.utils.ambient import ambient_free


@dataclass(frozen=True, eq=False)
class DifferenceCodec(Codec):
    """``inner`` encodes ``x - reference``; ``against(reference)`` sets the reference, in the shape
    of the tensor.

    A reference may have another float dtype than ``x``. For ``encode_rows`` and ``decode_rows`` it
    has the shape of the rows ``[rows, n]``: the rank's own shard to encode, the shards of all ranks
    to decode. References are compared by identity: two with equal values may diverge later.
    """

    spec: str
    inner: Codec
    reference: Tensor | None = None

    state = "reference"

    def __eq__(self, value: object) -> bool:
        return (
            isinstance(value, DifferenceCodec)
            and self.inner == value.inner
            and self.reference is value.reference
        )

    def __hash__(self) -> int:
        return hash((self.inner, id(self.reference)))

    @property
    def block(self) -> int:
        return self.inner.block

    @property
    def bound(self) -> float:
        """Relative to the norm of the *difference*; the rounding of one subtraction and one sum is
        added."""
        return self.inner.bound

    def floor(self, dtype: torch.dtype) -> float:
        return self.inner.floor(accumulation_dtype(dtype))

    def relative_error(self) -> float:
        """The relative error of the inner codec, for the difference."""
        return self.inner.relative_error()

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.wire_bytes(numel, accumulation_dtype(dtype))

    def against(self, reference: Tensor) -> DifferenceCodec:
        """Return the codec with the reference that the receivers hold."""
        if not reference.is_floating_point():
            raise PolicyError(
                f"a reference of {reference.dtype}: must be of a float dtype, as what is encoded is"
            )
        return replace(self, reference=reference)

    def salted(self, *salt: int) -> DifferenceCodec:
        return replace(self, inner=self.inner.salted(*salt))

    @ambient_free
    def encode(self, x: Tensor) -> Wire:
        reference = self._reference(tuple(x.shape)).reshape(1, -1)
        return Codec.encode(self.against(reference), x)

    @ambient_free
    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        reference = self._reference(wire.shape).reshape(1, -1)
        return Codec.decode(self.against(reference), wire, like)

    def encode_rows(self, rows: Tensor) -> Tensor:
        return self.inner.encode_rows(subtract_reference(rows, self._reference(tuple(rows.shape))))

    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        reference = self._reference((wire.shape[0], numel))
        return add_to_reference(
            reference, self.inner.decode_rows(wire, numel, accumulation_dtype(dtype)), dtype
        )

    def initial_state(self, x: Tensor, ranks: int) -> Tensor:
        """Return the initial reference for shards ``x`` of an all_gather: zeros ``[ranks * n,
        ...]``, in the dtype of ``x``."""
        return x.new_zeros((ranks * x.shape[0], *x.shape[1:]))

    def _reference(self, shape: tuple[int, ...]) -> Tensor:
        if self.reference is None:
            raise PolicyError(
                f"codec {self.spec!r} codes the difference to what receivers hold: give it with"
                " .against(reference)"
            )
        if tuple(self.reference.shape) != shape:
            raise PolicyError(
                f"codec {self.spec!r}: the reference is {list(self.reference.shape)}, but what is"
                f" coded {list(shape)}"
            )
        return self.reference


def subtract_reference(x: Tensor, previous: Tensor) -> Tensor:
    """Return ``x - previous`` in the accumulation dtype of ``x``."""
    work = accumulation_dtype(x.dtype)
    if x.itemsize == 2:  # else Inductor uses the unrounded values of x, with their noise
        x = x.view(torch.int16).bitwise_and(-1).view(x.dtype)
    wide, reference = x.to(work), previous.to(work)
    return _clamp(wide - reference, wide, reference, work)


def add_to_reference(previous: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``previous + by`` in the accumulation dtype of ``dtype``, clamped so that it does not
    overflow in ``dtype``."""
    reference = previous.to(accumulation_dtype(dtype))
    return _clamp(reference + by, reference, by, dtype)


def next_reference(received: Tensor, previous: Tensor) -> Tensor:
    """Return the reference of the next difference: the received values, or the previous ones if
    these are not finite. A NaN would otherwise persist in all later steps."""
    return torch.where(received.isfinite(), received, previous)


def _clamp(values: Tensor, one: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values computed from two finite numbers to the largest number of ``dtype``; leave the
    others unchanged."""
    limit = torch.finfo(dtype).max
    return torch.where(one.isfinite() & value.isfinite(), values.clamp(-limit, limit), values)


def difference(resolve: Resolve, spec: str, *, inner: str = "int4(block=2048)") -> Codec:
    """4 bits of the difference to what receivers hold, in groups of 2048 (SDP4Bit, weights). An
    all_gather of parameters keeps the reference itself; elsewhere the caller keeps it."""
    return DifferenceCodec(spec, inner_codec(resolve, "inner", inner))


PRESETS = (
    Preset(
        "difference",
        difference,
        "the change against what receivers hold (SDP4Bit): weights that are gathered each step",
        has_inner=True,
    ),
)
