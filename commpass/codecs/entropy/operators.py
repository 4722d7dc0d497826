"""The entropy coder as two operators: its loops are no tensor operations.

On a CPU they run C++, and elsewhere the plain form, with the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.codecs.entropy import coder, cpp
from commpass.codecs.entropy.coder import BLOCK, Form
from commpass.utils.ambient import ambient_free

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("entropy_encode(Tensor values, int room, int even) -> Tensor")
_library.define("entropy_decode(Tensor wire, int room, int even) -> Tensor")


def _encode(values: Tensor, room: int, even: int) -> Tensor:
    if not values.numel():
        return _shape_of_encode(values, room, even)
    encode = cpp.encode if values.device.type == "cpu" else coder.encode
    return encode(values.contiguous(), Form(room, even))


def _decode(wire: Tensor, room: int, even: int) -> Tensor:
    if not wire.numel():
        return _shape_of_decode(wire, room, even)
    decode = cpp.decode if wire.device.type == "cpu" else coder.decode
    return decode(wire.contiguous(), Form(room, even))


def _shape_of_encode(values: Tensor, room: int, even: int) -> Tensor:
    return values.new_empty((values.shape[0], values.shape[1] // BLOCK * room), dtype=torch.uint8)


def _shape_of_decode(wire: Tensor, room: int, even: int) -> Tensor:
    return wire.new_empty((wire.shape[0], wire.shape[1] // room * BLOCK), dtype=torch.float32)


_library.impl("entropy_encode", ambient_free(_encode), "CompositeExplicitAutograd")
_library.impl("entropy_decode", ambient_free(_decode), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::entropy_encode", _shape_of_encode, lib=_library)
torch.library.register_fake("commpass::entropy_decode", _shape_of_decode, lib=_library)
