"""Kernels of the exponent codec behind its two operators: C++ on a CPU, Triton on a GPU.

``codecs.exponent_operators`` defines the operators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from commpass.codecs import exponent_operators
from commpass.codecs.exponent.codec import ExponentCodec, by_calls
from commpass.lowering import cpu
from commpass.lowering.chain import Chain, Decode, Encode
from commpass.lowering.generated import has_exponent_kernels


def as_calls(*, kernels: bool) -> AbstractContextManager[None]:
    """Trace encode and decode as calls in this context.

    With ``kernels``, the calls run kernels (C++ is compiled here), and codecs without a kernel are
    inlined. Otherwise all calls run the plain operators one by one, as other backends of the graph
    would.
    """

    def encode(codec: ExponentCodec, rows: Tensor) -> Tensor:
        if kernels and not _has_kernel(_encoding(codec, rows.dtype), rows.device):
            with by_calls(None):
                return codec.encode_rows(rows)
        return torch.ops.commpass.exponent_encode(rows, codec.spec, kernels)

    def decode(codec: ExponentCodec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if kernels and not _has_kernel(_decoding(codec, dtype), wire.device):
            with by_calls(None):
                return codec.decode_rows(wire, numel, dtype)
        return torch.ops.commpass.exponent_decode(wire, codec.spec, numel, dtype, kernels)

    return by_calls((encode, decode))


def _encoding(codec: ExponentCodec, dtype: torch.dtype) -> Chain:
    return Chain(dtype, (Encode(codec),))


def _decoding(codec: ExponentCodec, dtype: torch.dtype) -> Chain:
    return Chain(torch.uint8, (Decode(codec, dtype),))


def _has_kernel(chain: Chain, device: torch.device) -> bool:
    """Whether there is a kernel for a chain; a C++ kernel is compiled here."""
    if device.type != "cpu":
        return has_exponent_kernels(device)
    if cpu.unsupported_reason(chain):
        return False
    cpu.compile_chain(chain)
    return True


def _encode(codec: ExponentCodec, rows: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        from commpass.lowering.gpu import exponent

        return exponent.encode_rows(codec, rows)
    numel = rows.shape[1]
    wire = rows.new_empty((rows.shape[0], codec.wire_bytes(numel, rows.dtype)), dtype=torch.uint8)
    cpu.compile_chain(_encoding(codec, rows.dtype))([rows], wire, numel)
    return wire


def _decode(codec: ExponentCodec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    if wire.device.type != "cpu":
        from commpass.lowering.gpu import exponent

        return exponent.decode_rows(codec, wire, numel, dtype)
    rows = wire.new_empty((wire.shape[0], numel), dtype=dtype)
    cpu.compile_chain(_decoding(codec, dtype))([wire], rows, numel)
    return rows


exponent_operators.KERNELS[:] = [(_encode, _decode)]
