"""What every codec offers, and the wire that it makes."""

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
"""Bytes of which both parts of the wire of a ``dynamic`` codec are multiples."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are scaled and summed: float64 for float64, float32 for all
    narrower ones (law 4)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Wire:
    """An encoded tensor: ``payload`` is what travels (uint8, one dimension); the rest says how to
    read it."""

    payload: Tensor
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Codec(ABC):
    """Encode and decode of a tensor.

    Collectives work on *rows*: a tensor ``[rows, n]`` becomes bytes ``[rows, wire_bytes(n)]``, and
    each row can be decoded on its own, on any rank.

    Codecs are compared by what they are made of: two are equal if and only if they encode and
    decode alike, whatever they are called. So ``taco(form=int8, rotate=False, scale=absmax)``
    equals ``int8``, and ``codec("rotated").within`` does not equal ``codec("rotated")``, though
    both are called so. Each codec is a frozen dataclass whose ``spec`` is not compared.
    """

    spec: str
    """What it is called: the text that ``commpass.codec`` turns into an equal codec, such as
    ``int8(block=128)``. What is made of a codec afterwards (``domain_codec``, ``salted``) keeps
    it."""
    lossless: bool = False
    state: str | None = None
    """What the caller must keep between calls, in words; None for nothing."""
    variant: str = ""
    """What was made of the codec that ``spec`` names, where encode and decode differ from it: by
    ``of_rank`` or ``of_sum``."""
    dynamic: bool = False
    """Whether the last part of the wire has room for more bytes than most values need: see
    ``used_bytes``."""

    @property
    def wire_spec(self) -> str:
        """What its wires are called: ``spec`` without what changes no bit of them."""
        return self.spec

    def measured(self, bits: float) -> Codec:
        """The codec whose sizes are planned with so many bits a value, as measured; itself where
        they do not depend on the values."""
        return self

    @property
    @abstractmethod
    def block(self) -> int:
        """How many values are encoded together: rows are padded to a multiple of it."""

    @property
    def has_linear_padding(self) -> bool:
        """Whether ``padded_numel`` of a multiple of ``block`` is the same number: not where blocks
        make groups that must be alike."""
        return True

    def padded_numel(self, numel: int) -> int:
        """``numel`` and what fills the last block. A row of so many values has the same wire, and
        decodes without a cut."""
        return numel

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of one encoded row of ``numel`` values; exact, side data and alignment included."""

    def parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of what a row consists of, in order: codes, then their side data (scales); or what
        has a fixed size, then what has not. They can travel apart: see ``decode_parts``."""
        return (self.wire_bytes(numel, dtype),)

    def used_bytes(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """How many bytes from its start each row needs, int64 ``[rows]``; if ``dynamic``, read off
        the first part."""
        return torch.full(
            (wire.shape[0],), self.wire_bytes(numel, dtype), dtype=torch.int64, device=wire.device
        )

    def hop_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which sums are handed to this codec on their way: as they are, but for a
        lossless one in the dtype of the result, since more would be sent for nothing."""
        return dtype if self.lossless else accumulation_dtype(dtype)

    @property
    def is_calibrated(self) -> bool:
        """Whether it encodes by numbers that were measured of the tensor's own channels: then it
        must be given that tensor, and cannot be inside another codec."""
        return False

    @property
    def domain(self) -> Domain:
        """Where what was coded may be summed."""
        return VALUES

    @property
    def domain_codec(self) -> Codec:
        """The codec of values that have entered the domain: its decode does not leave it."""
        return self

    def unsupported_reason(self, ranks: int) -> str | None:
        """Why it cannot be used between so many ranks."""
        return None

    def unsupported_shape(self, shape: Sequence[Any]) -> str | None:
        """Why a tensor of some shape cannot be what it was made for."""
        return None

    def of_rank(self, rank: int, ranks: int) -> Codec:
        """The codec as rank ``rank`` of so many uses it: another one where what was calibrated
        differs between ranks. Rows to decode are then those of all ranks, in order. Raises
        PolicyError for ranks that it was not made for."""
        return self

    def of_sum(self, of: int, ranks: int) -> Codec:
        """The codec for sums over ``of`` of so many ranks; what it encodes, any rank decodes."""
        return self

    def constants(self, like: Tensor) -> tuple[Tensor, ...]:
        """The constant tensors that it needs, on the device of ``like``."""
        return ()

    def with_constants(self, tables: Sequence[Tensor]) -> Codec:
        """The codec with ``constants`` of a graph."""
        return self

    def initial_state(self, x: Tensor, ranks: int) -> Tensor:
        """Zeros of the shape and dtype of the ``state`` for a collective of ``x`` on so many ranks:
        what was not sent, in which sums are made. For codecs that need some."""
        return x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype))

    def salted(self, *salt: int) -> Codec:
        """The same codec for one who encodes: ``salt`` says who and where (the rank, the hop of the
        algorithm, the piece); random numbers are others for each. Any of them decodes a wire; since
        they encode differently they are not equal, and one rounded at random is put away unsalted.
        """
        return self

    @property
    @abstractmethod
    def bound(self) -> float:
        """For any finite input: the 2-norm of a block's error is at most this times the 2-norm of
        the block (where blocks are of one row; then, for each value, ``floor`` and the rounding of
        the arithmetic, a few parts in a million). 0 if lossless."""

    def floor(self, dtype: torch.dtype) -> float:
        """An error that a value of ``dtype`` may have whatever is around it: of the order of the
        smallest normal one."""
        return 0.0

    def bits_per_value(self, numel: int, dtype: torch.dtype) -> float:
        """Bits on the wire for each of ``numel`` values, side data and padding included."""
        return 8 * self.wire_bytes(numel, dtype) / numel

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> Tensor:
        """``[rows, n]`` of a float dtype to uint8 ``[rows, wire_bytes(n, dtype)]``."""

    @abstractmethod
    def decode_rows(self, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """uint8 ``[rows, wire_bytes(numel, dtype)]`` to ``[rows, numel]`` in the accumulation dtype
        of ``dtype``; of a lossless codec in ``dtype`` itself, since a wider one would not keep the
        payloads of NaNs.

        ``dtype`` is what was encoded. A finite value is never decoded to one that overflows in it.
        """

    def encode_parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As ``encode_rows``, the parts apart: ``[rows, parts(n, dtype)[i]]`` each."""
        return self.encode_rows(rows).split(list(self.parts(rows.shape[1], rows.dtype)), dim=1)

    def encode_pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As ``encode_rows``, in pieces ``[rows, n_i]`` of any dtype, whose bytes side by side are
        the row: for one who writes each where it belongs."""
        return (self.encode_rows(rows),)

    def decode_parts(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """As ``decode_rows``, of parts ``[rows, parts(numel, dtype)[i]]`` that came apart."""
        return self.decode_rows(torch.cat(list(parts), dim=1), numel, dtype)

    @ambient_free
    def encode(self, x: Tensor) -> Wire:
        """Any float tensor to its wire."""
        if x.dtype not in FLOATS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise PolicyError(f"codec {self.spec!r} cannot carry {x.dtype}; it carries {names}")
        return Wire(
            self.encode_rows(x.reshape(1, -1)).flatten(), self.wire_spec, tuple(x.shape), x.dtype
        )

    @ambient_free
    def decode(self, wire: Wire, like: Tensor | None = None) -> Tensor:
        """The tensor back, in the shape and dtype that was encoded, which ``like`` must have if it
        is given."""
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
        payload = wire.payload
        # Dynamo cannot be asked where a tensor begins.
        if torch.compiler.is_dynamo_compiling() or payload.storage_offset() % 8:
            payload = payload.clone()
        rows = self.decode_rows(payload.reshape(1, -1), numel, wire.dtype)
        return rows.to(wire.dtype).reshape(wire.shape)

    def relative_error(self) -> float:
        """Root mean square error over root mean square value, on a fixed ``sample``; what error
        budgets count."""
        return 0.0 if self.lossless else _sample_error(self)

    def sample(self) -> Tensor:
        """Float64 values such as it is made for: Gaussian ones, but for a calibrated codec."""
        return _gaussian()

    def expected_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that a row of ``numel`` values is planned with: ``wire_bytes`` but for a dynamic
        codec; for that, what Gaussian values need, if it knows nothing better."""
        if not self.dynamic:
            return self.wire_bytes(numel, dtype)
        static, room = self.parts(numel, dtype)
        return static + ceil_to(math.ceil(room * _gaussian_share(self, dtype)), UNIT)


def _gaussian() -> Tensor:
    return torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@lru_cache(maxsize=256)
def _gaussian_share(codec: Codec, dtype: torch.dtype) -> float:
    """The share of the dynamic part that a fixed Gaussian sample needs."""
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
        # Rounded, so that ranks whose processors sum in another order still compare the same number
        # with the budget.
        return round(float(error.square().mean().sqrt() / sample.square().mean().sqrt()), 6)
