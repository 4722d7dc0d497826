"""Encode and decode of the exponent codec as one operator each.

Inlined, each is some 2,000 plain operators. With symbolic sizes they take seconds to trace, and
Inductor takes minutes to compile them. The operators run a kernel, or the plain operators one by
one, with the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.codecs.exponent.codec import Calls, ExponentCodec, by_calls
from commpass.codecs.registry import codec as codec_of
from commpass.errors import KernelError
from commpass.utils.ambient import ambient_free

KERNELS: list[Calls] = []
"""The functions that run a kernel, of contiguous rows. ``commpass.lowering.exponent`` adds
them."""

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("exponent_encode(Tensor rows, str codec, bool kernel) -> Tensor")
_library.define(
    "exponent_decode(Tensor wire, str codec, SymInt numel, ScalarType dtype, bool kernel) -> Tensor"
)


def _codec(name: str) -> ExponentCodec:
    codec = codec_of(name)
    assert isinstance(codec, ExponentCodec)
    return codec


def _kernels() -> Calls:
    if not KERNELS:
        raise KernelError(
            "this compiled graph runs kernels of commpass: import commpass.backend before it"
        )
    return KERNELS[0]


def _encode(rows: Tensor, name: str, kernel: bool) -> Tensor:
    rows = _side_by_side(rows)
    if kernel:
        return _kernels()[0](_codec(name), rows)
    with by_calls(None):
        return _codec(name).encode_rows(rows).contiguous()


def _decode(wire: Tensor, name: str, numel: int, dtype: torch.dtype, kernel: bool) -> Tensor:
    wire = _side_by_side(wire)
    if kernel:
        return _kernels()[1](_codec(name), wire, numel, dtype)
    with by_calls(None):
        return _codec(name).decode_rows(wire, numel, dtype).contiguous()


def _side_by_side(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.clone(memory_format=torch.contiguous_format)


def _shape_of_encode(rows: Tensor, name: str, kernel: bool) -> Tensor:
    count, numel = rows.shape
    return rows.new_empty((count, codec_of(name).wire_bytes(numel, rows.dtype)), dtype=torch.uint8)


def _shape_of_decode(
    wire: Tensor, name: str, numel: int, dtype: torch.dtype, kernel: bool
) -> Tensor:
    return wire.new_empty((wire.shape[0], numel), dtype=dtype)


_library.impl("exponent_encode", ambient_free(_encode), "CompositeExplicitAutograd")
_library.impl("exponent_decode", ambient_free(_decode), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::exponent_encode", _shape_of_encode, lib=_library)
torch.library.register_fake("commpass::exponent_decode", _shape_of_decode, lib=_library)
