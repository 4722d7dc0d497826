"""Encode and decode messages outside a graph, compiled once for a codec and a size.

Eager codecs take several times as long as compiled ones (docs/lowering.md). Inductor compiles the
plain operators of the codec, or C++ is generated from its parts if that is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from commpass.codecs import Codec
from commpass.codecs.rows import cut_apart
from commpass.lowering import Form, KernelInput, Piece, Source, cpu, form_of, make
from commpass.lowering.chain import Cast, Chain, Decode, Encode
from commpass.passes.fx.tracing import inductor_decompositions, traced
from commpass.passes.regions import write
from commpass.utils.ambient import ambient_free, without_ambient_state

Run = Callable[[Tensor, Tensor], object]
"""Reads one row and writes another."""


@dataclass(frozen=True)
class Coding:
    """How a tensor of ``numel`` values of ``dtype`` becomes one message, and is decoded.

    ``salt`` is that of the encoding rank (see ``Codec.salted``). ``compiled`` uses kernels that all
    equal codings share; otherwise the codec runs operator by operator. The bits are the same,
    except for rotations in C++ (``lowering.cpu.is_exact``).
    """

    codec: Codec
    numel: int
    dtype: torch.dtype
    device: torch.device
    salt: tuple[int, ...] = ()
    compiled: bool = True

    @property
    def wire_bytes(self) -> int:
        return self.codec.wire_bytes(self.numel, self.codec.hop_dtype(self.dtype))

    def empty_wire(self) -> Tensor:
        """Return a buffer for the message, uint8 ``[wire_bytes]``."""
        return torch.empty(self.wire_bytes, dtype=torch.uint8, device=self.device)

    @ambient_free
    def prepare(self, *, encodes: bool) -> None:
        """Compile the encoder or decoder, so that the first message need not wait for it."""
        if self.compiled:
            (encoder if encodes else decoder)(self)

    @ambient_free
    def encode(self, x: Tensor) -> Tensor:
        """Encode ``numel`` values of any shape into a new message, uint8 ``[wire_bytes]``."""
        row = x.detach().reshape(1, self.numel)
        if not self.compiled:
            return torch.cat([_bytes(piece) for piece in self.encoded(row)], dim=1).flatten()
        wire = self.empty_wire()
        encoder(self)(row, wire.unsqueeze(0))
        return wire

    @ambient_free
    def decode(self, wire: Tensor, into: Tensor) -> None:
        """Decode a message to ``numel`` values of ``dtype``, into a tensor of any shape and
        layout."""
        rows, into = wire.unsqueeze(0), into.detach()
        if not self.compiled:
            into.copy_(self.decoded(rows).reshape(into.shape))
            return
        made = into if into.is_contiguous() else rows.new_empty(into.shape, dtype=into.dtype)
        decoder(self)(rows, made.view(1, self.numel))
        if made is not into:
            into.copy_(made)

    def encoded(self, row: Tensor) -> tuple[Tensor, ...]:
        """Return the pieces of the message, by plain operators."""
        return self.codec.salted(*self.salt).encode_pieces(row.to(self.codec.hop_dtype(self.dtype)))

    def decoded(self, wire: Tensor) -> Tensor:
        """Return the values ``[1, numel]``, by plain operators."""
        rows = self.codec.decode_rows(wire, self.codec.padded_numel(self.numel), self.dtype)
        return cut_apart(rows.to(self.dtype), self.numel)


def _bytes(piece: Tensor) -> Tensor:
    return piece if piece.dtype == torch.uint8 else piece.contiguous().view(torch.uint8)


@functools.cache
def encoder(coding: Coding) -> Run:
    """Return a function that writes the message of a row ``[1, numel]`` into ``[1,
    wire_bytes]``."""
    chain = Chain(coding.dtype, (Encode(coding.codec.salted(*coding.salt)),))
    if (kernel := _generated(coding, chain)) is not None:
        return kernel
    return _compiled(coding.encoded, coding, (1, coding.numel), coding.dtype)


@functools.cache
def decoder(coding: Coding) -> Run:
    """Return a function that writes the values of a message ``[1, wire_bytes]`` into ``[1,
    numel]``."""
    chain = Chain(torch.uint8, (Decode(coding.codec, coding.dtype), Cast(coding.dtype)))
    if (kernel := _generated(coding, chain)) is not None:
        return kernel
    return _compiled(
        lambda wire: (coding.decoded(wire),), coding, (1, coding.wire_bytes), torch.uint8
    )


def _generated(coding: Coding, chain: Chain) -> Run | None:
    """Return C++ generated from the codec's parts, if it exists and is faster."""
    if coding.device.type != "cpu" or cpu.unsupported_reason(chain):
        return None
    kernel = cpu.compile_chain(chain)
    return lambda row, output: kernel([row], output, coding.numel)


def _compiled(
    run: Callable[[Tensor], tuple[Tensor, ...]],
    coding: Coding,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Run:
    """Compile a function of one row with Inductor; its results are written side by side."""
    with without_ambient_state(), FakeTensorMode():
        fake = torch.empty(shape, dtype=dtype, device=coding.device)
        spec = coding.codec.spec
        body = traced(lambda row: list(run(row)), [fake], inductor_decompositions, spec)
    made: Any = body.graph.output_node().args[0]
    pieces, offset = [], 0
    for node in made:
        value = node.meta["val"]
        form = Form(value.dtype, value.device, tuple(value.shape), (value.shape[1], 1))
        pieces.append(Piece(0, offset // value.itemsize, form))
        offset += value.numel() * value.itemsize
    write(body, made, pieces)
    input_form = form_of(fake)
    source = Source(body, (KernelInput(input_form, input_form),), tuple(pieces))
    make([source])
    call = torch.ops.commpass.kernel_.default
    return lambda row, written: call([row], [written], [0, 0], source.name)
