"""The ``Codec`` interface, and ``Wire``, the encoded tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commpass.codecs.block.domain import VALUES, Domain
from commpass.codecs.rows import ceil_to
from commpass.errors import PolicyError
from commpass.utils.ambient import ambient_free, making_lasting_tensors

UNIT = 16
"""Both parts of the wire of a ``dynamic`` codec are multiples of this many bytes."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are scaled and summed: float64 for float64, float32 for all
    narrower dtypes (law 4)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Wire:
    """An encoded tensor: ``payload`` holds the bytes to send (uint8, one dimension), the other
    fields describe how to decode it."""

    payload: Tensor
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Codec(ABC):
    """Encode and decode a tensor.

    Collectives work on *rows*: a tensor ``[rows, n]`` becomes bytes ``[rows, wire_bytes(n)]``, and
    each row can be decoded independently, on any rank.

    Two codecs are equal if and only if they encode and decode alike, whatever their names. So
    ``taco(form=int8, rotate=False, scale=absmax)`` equals ``int8``, and ``domain_codec`` of
    ``codec("rotated")`` does not equal ``codec("rotated")``, though both have the same ``spec``.
    Each codec is a frozen dataclass whose ``spec`` is not compared.
    """

    spec: str
    """The text that ``commpass.codec`` turns into an equal codec, such as ``int8(block=128)``.
    Codecs derived from it (``domain_codec``, ``salted``) keep the text."""
    lossless: bool = False
    state: str | None = None
    """The state that the caller must keep between calls, in words; None if there is none."""
    variant: str = ""
    """How the codec differs from the one that ``spec`` names, if it was derived by ``of_rank`` or
    ``of_sum`` and encodes differently."""
    dynamic: bool = False
    """Whether the last part of the wire has room for more bytes than most values need (see
    ``used_bytes``)."""

    @property
    def wire_spec(self) -> str:
        """The name stored in its wires: ``spec`` without parameters that do not change the bits."""
        return self.spec

    def measured(self, bits: float) -> Codec:
        """Return the codec whose sizes are planned with ``bits`` measured bits per value; itself if
        its sizes do not depend on the values."""
        return self

    @property
    @abstractmethod
    def block(self) -> int:
        """How many values are encoded together: rows are padded to a multiple of it."""

    @property
    def has_linear_padding(self) -> bool:
        """Whether ``padded_numel`` of a multiple of ``block`` is the same number. False if blocks
        form groups that must have equal sizes."""
        return True

    @property
    def has_independent_blocks(self) -> bool:
        """Whether the codes of a block depend on no value outside of it. A codec must state it."""
        return False

    def padded_numel(self, numel: int) -> int:
        """Return ``numel`` plus the padding of the last block. A row of that many values has the
        same wire, and decodes without a cut."""
        return numel

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the exact bytes of one encoded row of ``numel`` values, side data and alignment
        included."""

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the bytes of the parts of a row, in order: codes, then side data (scales); or the
        part of fixed size, then the dynamic part. The parts can be sent separately: see
        ``decode_parts``."""
        return (self.wire_bytes(numel, dtype),)

    def used_bytes(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return how many leading bytes of each row are needed, int64 ``[rows]``; if ``dynamic``,
        read from the first part."""
        return torch.full(
            (wire.shape[0],), self.wire_bytes(numel, dtype), dtype=torch.int64, device=wire.device
        )

    def hop_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which partial sums are passed to this codec.

        It is the accumulation dtype, or the dtype of the result for a lossless codec, which would
        otherwise send more bytes for no benefit.
        """
        return dtype if self.lossless else accumulation_dtype(dtype)

    @property
    def is_calibrated(self) -> bool:
        """Whether it encodes with numbers that were measured on the channels of a tensor. Such a
        codec must be applied to that tensor, and cannot be the inner codec of another one."""
        return False

    @property
    def domain(self) -> Domain:
        """The domain in which encoded values may be summed."""
        return VALUES

    @property
    def domain_codec(self) -> Codec:
        """The codec for values already in the domain: its decode does not leave the domain."""
        return self

    def unsupported_reason(self, ranks: int) -> str | None:
        """Return why the codec cannot be used between ``ranks`` ranks, or None if it can."""
        return None

    def unsupported_shape(self, shape: Sequence[Any]) -> str | None:
        """Return why a tensor of some shape cannot be encoded, or None if it can."""
        return None

    def of_rank(self, rank: int, ranks: int) -> Codec:
        """Return the codec that rank ``rank`` uses; it differs between ranks if the calibration
        does.

        Rows to decode are then those of all ranks, in order. Raises PolicyError if the codec was
        not calibrated for ``ranks`` ranks.
        """
        return self

    def of_sum(self, of: int, ranks: int) -> Codec:
        """Return the codec for sums over ``of`` of ``ranks`` ranks; any rank can decode what it
        encodes."""
        return self

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        """The constant tensors that the codec needs, on the device of ``like``."""
        return ()

    def with_constants(self, tables: Sequence[Tensor]) -> Codec:
        """Return the codec with the ``constants`` of a graph."""
        return self

    def initial_state(self, x: Tensor, ranks: int) -> Tensor:
        """Return the initial ``state`` for a collective of ``x`` on ``ranks`` ranks, for codecs
        with a state.

        It is zeros of the shape of ``x`` in the accumulation dtype: the sum of the values not sent.
        """
        return x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype))

    def salted(self, *salt: int) -> Codec:
        """Return the codec with random numbers that depend on ``salt``: the rank, the hop of the
        algorithm, the piece sent.

        Any of these codecs decodes a wire. They are not equal, since they encode differently; a
        codec with stochastic rounding is stored unsalted.
        """
        return self

    @property
    @abstractmethod
    def bound(self) -> float:
        """The error bound for any finite input: the 2-norm of a block's error is at most this times
        the 2-norm of the block. 0 if lossless.

        It holds for blocks within one row. ``floor`` and the rounding of the arithmetic, a few
        parts in a million, are added for each value.
        """

    def floor(self, dtype: torch.dtype) -> float:
        """Return the error that a value of ``dtype`` may have regardless of its block: of the order
        of the smallest normal number."""
        return 0.0

    def bits_per_value(self, numel: int, dtype: torch.dtype) -> float:
        """Return the bits per value on the wire, side data and padding included."""
        return 8 * self.wire_bytes(numel, dtype) / numel

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> Tensor:
        """Encode ``[rows, n]`` of a float dtype to uint8 ``[rows, wire_bytes(n, dtype)]``."""

    @abstractmethod
    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode uint8 ``[rows, wire_bytes(numel, dtype)]`` to ``[rows, numel]`` in the
        accumulation dtype of ``dtype``.

        A lossless codec returns ``dtype`` itself, since a wider dtype would not keep the payloads
        of NaNs. ``dtype`` is the dtype that was encoded. A finite value never decodes to one that
        overflows in it.
        """

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As ``encode_rows``, with separate parts, each ``[rows, parts(n, dtype)[i]]``."""
        return self.encode_rows(rows).split(list(self.parts(rows.shape[1], rows.dtype)), dim=1)

    def encode_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As ``encode_rows``, in pieces ``[rows, n_i]`` of any dtype, whose concatenated bytes are
        the row. A caller can write each piece directly to its destination."""
        return (self.encode_rows(rows),)

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """As ``decode_rows``, from separate parts ``[rows, parts(numel, dtype)[i]]``."""
        return self.decode_rows(torch.cat(list(parts), dim=1), numel, dtype)

    @ambient_free
    def encode(self, x: Tensor) -> Wire:
        """Encode any float tensor to a wire. Raises PolicyError for other dtypes."""
        if x.dtype not in FLOATS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise PolicyError(f"codec {self.spec!r} cannot carry {x.dtype}; it carries {names}")
        return Wire(
            self.encode_rows(x.reshape(1, -1)).flatten(), self.wire_spec, tuple(x.shape), x.dtype
        )

    @ambient_free
    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        """Decode a wire to the shape and dtype that were encoded.

        Raises PolicyError if the wire is of another codec or size or not of uint8, or if ``like``
        is given and has another shape or dtype.
        """
        if wire.codec != self.wire_spec:
            raise PolicyError(f"a wire of codec {wire.codec!r} cannot be decoded by {self.spec!r}")
        if like is not None and (tuple(like.shape), like.dtype) != (wire.shape, wire.dtype):
            raise PolicyError(
                f"the wire holds {list(wire.shape)} of {wire.dtype}, but `like` is"
                f" {list(like.shape)} of {like.dtype}"
            )
        numel = math.prod(wire.shape)
        expected = self.wire_bytes(numel, wire.dtype)
        if wire.payload.numel() != expected:
            raise PolicyError(
                f"the wire has {wire.payload.numel()} bytes, but {self.spec!r} makes {expected} of"
                f" {list(wire.shape)}"
            )
        if wire.payload.dtype != torch.uint8:
            raise PolicyError(f"the wire has {wire.payload.dtype}: it must be torch.uint8")
        payload = wire.payload.contiguous()
        # Dynamo does not support ``storage_offset``.
        if torch.compiler.is_dynamo_compiling() or payload.storage_offset() % 8:
            payload = payload.clone()
        rows = self.decode_rows(payload.reshape(1, -1), numel, wire.dtype)
        return rows.to(wire.dtype).reshape(wire.shape)

    def relative_error(self) -> float:
        """Root mean square error over root mean square value, on a fixed ``sample``; used by error
        budgets."""
        return 0.0 if self.lossless else _sample_error(self)

    def sample(self) -> Tensor:
        """Return typical float64 input values: Gaussian, except for a calibrated codec."""
        return _gaussian()

    def expected_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that a row of ``numel`` values is planned with.

        For a dynamic codec, these are the bytes that Gaussian values need, unless it has a better
        estimate; for others, ``wire_bytes``.
        """
        if not self.dynamic:
            return self.wire_bytes(numel, dtype)
        static, room = self.parts(numel, dtype)
        return static + ceil_to(math.ceil(room * _gaussian_share(self, dtype)), UNIT)


def _gaussian() -> Tensor:
    return torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@lru_cache(maxsize=256)
def _gaussian_share(codec: Codec, dtype: torch.dtype) -> float:
    """Return the share of the dynamic part that a fixed Gaussian sample uses."""
    with making_lasting_tensors():
        sample = _gaussian().to(dtype).reshape(1, -1)
        static, room = codec.parts(sample.numel(), dtype)
        used = int(codec.used_bytes(codec.encode_rows(sample), sample.numel(), dtype))
        return (used - static) / room if room else 0.0


@lru_cache(maxsize=256)
def _sample_error(codec: Codec) -> float:
    with making_lasting_tensors():
        sample = codec.sample()
        error = codec.decode(codec.encode(sample)) - sample
        # Round, so that ranks whose processors sum in another order compare the same number with
        # the budget.
        return round(float(error.square().mean().sqrt() / sample.square().mean().sqrt()), 6)
