"""Encode and decode of codec ``ecq`` as one operator each: their loops are no tensor operations.

On a CPU they run C++ (for float64, without the rotation and the scales), and on a GPU kernels of
Triton. The plain form serves for all else. The bytes and the values are the same: replicas may
differ in their devices and compilers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from commpass.codecs.block import scales, storage
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.transforms import Hadamard
from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.entropy import coder, cpp, rotation
from commpass.codecs.entropy.coder import BLOCK, CHUNK, Form
from commpass.codecs.rows import as_bytes, cut_apart, pad
from commpass.utils.ambient import ambient_free

BLOCKS = Flat(BLOCK)
OF_CHUNK = CHUNK // BLOCK
STORED = "pow2"
"""The storage format of the scale of a chunk: a power of two not below its largest value."""
ROTATION = Hadamard(BLOCK, signed=True)


@dataclass(frozen=True)
class Kernels:
    """Kernels for GPUs.

    Attributes:
        encode: ``(rows, form, rotated)`` to the code and the scales. Rows ``[n, numel]`` are
            float32, bfloat16 or float16.
        decode: ``(code, side, form, rotated, limit, numel)`` to float32 rows ``[n, numel]``.
        unsupported_reason: ``(device, numel)`` to why there are none, or "".
    """

    encode: Callable[[Tensor, Form, bool], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Form, bool, float, int], Tensor]
    unsupported_reason: Callable[[torch.device, int], str]


KERNELS: list[Kernels] = []
"""None, or one."""
REGISTERS = "commpass.lowering.entropy"
"""The module that adds ``KERNELS``, by ``register``, when the first tensor on a GPU is coded."""

_library = torch.library.Library("commpass", "FRAGMENT")
_library.define(
    "entropy_encode(Tensor rows, int nbytes, int even, bool rotated) -> (Tensor, Tensor)"
)
_library.define(
    "entropy_decode(Tensor code, Tensor side, int nbytes, int even, bool rotated, SymInt numel,"
    " ScalarType dtype) -> Tensor"
)


def sizes(numel: int, nbytes: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the code and of the scales of a row."""
    blocks = BLOCKS.blocks(numel)
    return blocks * nbytes, chunks(blocks) * storage.itemsize(STORED, accumulation_dtype(dtype))


def chunks(blocks: int) -> int:
    return (blocks + OF_CHUNK - 1) // OF_CHUNK


def _encode(rows: Tensor, nbytes: int, even: int, rotated: bool) -> tuple[Tensor, Tensor]:
    form, work = Form(nbytes, even), accumulation_dtype(rows.dtype)
    if rows.numel() and (kernels := _kernels(rows, work, rows.shape[1])):
        return kernels.encode(rows, form, rotated)
    rows = rows.to(work).contiguous()
    code, side = _shapes_of_encode(rows, nbytes, even, rotated)
    if not rows.numel():
        return code, side
    if _is_native(rows, work) and cpp.encode(rows, form, rotated, code, side):
        return code, side
    return _plain_encode(rows, form, rotated)


def _plain_encode(rows: Tensor, form: Form, rotated: bool) -> tuple[Tensor, Tensor]:
    blocks = BLOCKS.split(rows)
    if rotated:
        blocks = rotation.forward(blocks)
    scale = _scale(blocks)
    of_blocks = _of_blocks(scale, blocks.shape[1])
    codable = of_blocks.isfinite()
    if rows.dtype == torch.float64:  # C++ would scale values below the least normal number again
        codable &= of_blocks > torch.finfo(rows.dtype).tiny
    values = torch.where(codable, blocks * (1 / of_blocks), 0.0)
    code = _code(values.to(torch.float32).flatten(1), form)
    return code, as_bytes(storage.in_form(scale.squeeze(-1), STORED)).contiguous()


def _code(values: Tensor, form: Form) -> Tensor:
    """As ``coder.encode``."""
    if values.device.type == "cpu":
        code, scale = _shapes_of_encode(values, form.nbytes, form.even, False)
        if cpp.encode(values, form, False, code, scale):
            return code
    return coder.encode(values, form)


def _values(code: Tensor, form: Form) -> Tensor:
    """As ``coder.decode``."""
    if code.device.type == "cpu":
        blocks = code.shape[1] // form.nbytes
        values = code.new_empty((code.shape[0], blocks * BLOCK), dtype=torch.float32)
        ones = code.new_full((code.shape[0], chunks(blocks)), 127)  # scales of 2^0
        if cpp.decode(code, ones, form, False, torch.finfo(torch.float32).max, values):
            return values
    return coder.decode(code, form)


def _decode(
    code: Tensor,
    side: Tensor,
    nbytes: int,
    even: int,
    rotated: bool,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    form, work, limit = Form(nbytes, even), accumulation_dtype(dtype), torch.finfo(dtype).max
    if code.shape[0] and numel and (kernels := _kernels(code, work, numel)):
        return kernels.decode(code, side, form, rotated, limit, numel)
    code, side = code.contiguous(), side.contiguous()
    rows = _shape_of_decode(code, side, nbytes, even, rotated, numel, dtype)
    if not rows.numel():
        return rows
    if _is_native(code, work) and cpp.decode(code, side, form, rotated, limit, rows):
        return rows
    scale = storage.load(side, STORED, work).unsqueeze(-1)
    # Divide here: dividing later could overflow the sums of the largest finite values.
    sums, blocks = BLOCK if rotated else 1, BLOCKS.blocks(numel)
    values = _values(code, form).unflatten(1, (blocks, BLOCK)).to(work)
    values = values * _of_blocks(scale / sums, blocks)
    decoded = (rotation.inverse(values) if rotated else values) * sums
    joined = BLOCKS.join(decoded.clamp(-limit, limit), numel)
    return cut_apart(joined, numel).contiguous()


def _kernels(tensor: Tensor, work: torch.dtype, numel: int) -> Kernels | None:
    """Return the kernels for a GPU; None for a CPU, or with a warning if there are none."""
    if _is_cpu(tensor.device):
        return None
    if work != torch.float32:
        why = f"it has no kernel for {work}"
    else:
        if not KERNELS:
            import_module(REGISTERS).register()
        why = KERNELS[0].unsupported_reason(tensor.device, numel)
    if not why:
        return KERNELS[0]
    _warn_once(tensor.device.type, why)
    return None


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


@cache
def _warn_once(device: str, why: str) -> None:
    what = f"codec 'ecq' on {device}: {why}. Each encode and decode runs some 40,000"
    warnings.warn(f"{what} small operators; codec 'rotated' is faster", stacklevel=3)


def _is_native(tensor: Tensor, work: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and work == torch.float32


def _scale(blocks: Tensor) -> Tensor:
    """Return the scale of each chunk, ``[rows, chunks, 1]``: NaN if it has nonfinite values (law
    2)."""
    peaks = scales.peak_of(blocks).squeeze(-1)
    many = chunks(blocks.shape[1])
    peak = pad(peaks, many * OF_CHUNK).unflatten(1, (many, OF_CHUNK)).amax(dim=2, keepdim=True)
    number = peak.clamp_min(torch.finfo(peak.dtype).tiny)
    return storage.round_up(scales.propagate_nonfinite(number, peak), STORED)


def _of_blocks(scale: Tensor, blocks: int) -> Tensor:
    """Return for each block the number of its chunk: ``[rows, blocks, 1]``."""
    return scale.expand(-1, -1, OF_CHUNK).flatten(1).narrow(1, 0, blocks).unsqueeze(-1)


def _shapes_of_encode(rows: Tensor, nbytes: int, even: int, rotated: bool) -> tuple[Tensor, Tensor]:
    count, numel = rows.shape
    code, side = (
        rows.new_empty((count, size), dtype=torch.uint8)
        for size in sizes(numel, nbytes, rows.dtype)
    )
    return code, side


def _shape_of_decode(
    code: Tensor,
    side: Tensor,
    nbytes: int,
    even: int,
    rotated: bool,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    return code.new_empty((code.shape[0], numel), dtype=accumulation_dtype(dtype))


_library.impl("entropy_encode", ambient_free(_encode), "CompositeExplicitAutograd")
_library.impl("entropy_decode", ambient_free(_decode), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::entropy_encode", _shapes_of_encode, lib=_library)
torch.library.register_fake("commpass::entropy_decode", _shape_of_decode, lib=_library)
