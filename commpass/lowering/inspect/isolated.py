"""Compilable kernels of the codecs that do not use chains: ``exponent``, ``ecq`` and the sparse
ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from commpass.codecs import SparseCodec
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.entropy.operators import sizes
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.errors import KernelError
from commpass.lowering.gpu import entropy, exponent, sparse
from commpass.lowering.gpu.call import calls_of, divisible, signature
from commpass.lowering.gpu.tiles import sparse_measure
from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.lowerable import Lowerable


def of_exponent(
    name: str, codec: ExponentCodec, dtype: torch.dtype, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels in the order of their launches; the bytes that each moves depend on the
    values."""
    if why := exponent.unsupported_reason(numel, dtype):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if name not in ("encode", "decode"):
        raise KernelError(f"no kernel: {codec.spec}: it has only encode and decode")
    if name == "encode":
        return _kernels(name, lambda: exponent.encode_rows(codec, _fake(dtype, 1, numel)))
    wire = _fake(torch.uint8, 1, codec.wire_bytes(numel, dtype))
    return _kernels(name, lambda: exponent.decode_rows(codec, wire, numel, dtype))


def of_entropy(
    name: str, codec: EntropyCodec, dtype: torch.dtype, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels in the order of their launches; a chunk is coded once, or more often."""
    if why := entropy.unsupported_reason(numel):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if name not in ("encode", "decode"):
        raise KernelError(f"no kernel: {codec.spec}: it has only encode and decode")
    form = codec.form
    if name == "encode":
        rows = _fake(dtype, 1, numel)
        return _kernels(name, lambda: entropy.encode_rows(rows, form, codec.rotated))
    code, side = (_fake(torch.uint8, 1, each) for each in sizes(numel, form.nbytes, dtype))
    limit = torch.finfo(dtype).max
    decode = entropy.decode_rows
    return _kernels(name, lambda: decode(code, side, form, codec.rotated, limit, numel))


def of_sparse(
    name: str, codec: SparseCodec, dtype: torch.dtype, ranks: int, arch: str, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels of a sparse codec; the bytes that each moves depend on the values."""
    if why := sparse.unsupported_reason(codec, numel, dtype):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if name == "decode_sum_encode":
        raise KernelError(f"no kernel: {codec.spec}: no kernel encodes a sum of sparse rows")
    sizes = sparse.Sizes(warp=ARCHITECTURES[arch].warp)
    if name == "encode":
        x, residual = _fake(dtype, 1, numel), _fake(torch.float32, 1, numel)
        return _kernels(name, lambda: sparse.encode(codec, x, residual, sizes))
    decode = sparse.sum_rows if name == "decode_sum" else sparse.decode
    rows = ranks if name == "decode_sum" else 1
    wires = _fake(torch.uint8, rows, codec.wire_bytes(numel, dtype))
    return _kernels(name, lambda: decode(codec, wires, numel, dtype, sizes))


def _fake(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a meta tensor, for a call that only needs its shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _kernels(name: str, run: Callable[[], object]) -> tuple[Lowerable, ...]:
    """Return the kernels that a function launches, without those that measure thresholds."""
    return tuple(
        Lowerable(
            name=f"{name}: {each.source.entry}",
            source=each.source,
            signature={key: what for key, what in signature(each).items() if what != "constexpr"},
            constants=each.constants,
            hints={key: 16 if key in divisible(each) else 1 for key in each.arguments},
            num_warps=each.warps,
            num_stages=each.options.get("num_stages", 3),
            moved=None,
        )
        for each in calls_of(run)
        if each.entry.__module__ != sparse_measure.__name__
    )
