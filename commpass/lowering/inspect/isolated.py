"""Compilable kernels of the codecs that do not use chains: ``exponent`` and the sparse ones."""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.codecs import SparseCodec
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.sparse.select import Threshold
from commpass.errors import KernelError
from commpass.lowering.gpu import exponent, sparse
from commpass.lowering.gpu.call import Call, divisible, signature
from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.lowerable import Lowerable


def of_exponent(
    name: str, coder: ExponentCodec, dtype: torch.dtype, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels in the order of their launches; the bytes that each moves depend on the
    values."""
    if why := exponent.unsupported_reason(numel, dtype):
        raise KernelError(f"no kernel: {coder.spec}: {why}")
    if name not in ("encode", "decode"):
        raise KernelError(f"no kernel: {coder.spec}: it has encode and decode alone")
    made = (exponent.encoding if name == "encode" else exponent.decoding)(coder, 1, numel, dtype)
    return tuple(
        Lowerable(
            name=f"{name}: {each.source.entry}",
            source=each.source,
            signature={key: what for key, what in each.signature.items() if what != "constexpr"},
            constants=dict(each.constants),
            hints={key: 16 for key, number in each.numbers if number % 16 == 0},
            num_warps=each.warps,
            moved=None,
        )
        for each in made.launches
    )


def of_sparse(
    name: str, coder: SparseCodec, dtype: torch.dtype, ranks: int, arch: str, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels of a sparse codec; the bytes that each moves depend on the values."""
    if why := sparse.unsupported_reason(coder, numel, dtype):
        raise KernelError(f"no kernel: {coder.spec}: {why}")
    if name == "decode_sum_encode":
        raise KernelError(f"no kernel: {coder.spec}: sums are not made sparse again in one kernel")
    warp, summed = ARCHITECTURES[arch].warp, name == "decode_sum"
    if name == "encode":
        calls = _encoding(coder, dtype, warp, numel)
    else:
        calls = _decoding(coder, dtype, ranks if summed else 1, warp, numel, summed)
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
        for each in calls
    )


def _fake(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a meta tensor, for a call that only needs its shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _encoding(coder: SparseCodec, dtype: torch.dtype, warp: int, numel: int) -> list[Call]:
    rows = 1
    sizes, layout = sparse.Sizes(warp=warp), sparse.layout_of(coder, numel, dtype)
    x, residual = _fake(dtype, rows, numel), _fake(torch.float32, rows, numel)
    wire = _fake(torch.uint8, rows, layout.pitch)
    values, indices = sparse.values_of(layout, wire), _fake(torch.int32, rows, layout.chosen)
    one = _fake(torch.int32, rows)
    if isinstance(coder.selector, Threshold):
        within = _fake(torch.int32, rows, 3)
        first = sparse.select_call(
            layout, sizes, x, residual, residual, values, indices, wire, one, within, one
        )
    else:
        first = sparse.take_call(layout, sizes, x, residual, residual, values, indices, one)
    done = isinstance(coder.selector, Threshold) and layout.code == sparse.sparse_indices.BITMAP
    made = [first, sparse.pack_call(layout, sizes, indices, one, one, values, wire, done)]
    if layout.later:
        own = _fake(torch.float32, rows, layout.chosen)
        made.append(sparse.settle_call(layout, sizes, residual, indices, values, own, one))
    return made


def _decoding(
    coder: SparseCodec, dtype: torch.dtype, rows: int, warp: int, numel: int, summed: bool
) -> list[Call]:
    sizes, layout = sparse.Sizes(warp=warp), sparse.layout_of(coder, numel, dtype)
    wire = _fake(torch.uint8, rows, layout.pitch)
    values, indices = wire.view(layout.value_dtype), _fake(torch.int32, rows, layout.chosen)
    if layout.later:
        values = _fake(torch.int32, rows, layout.chosen)
    if layout.code == sparse.sparse_indices.BLOCKS16:
        places = [sparse.places16_call(layout, sizes, wire, indices)]
    else:
        tiles = _fake(torch.int32, rows, -(-layout.second // sizes.tile))
        places = [
            sparse.ones_call(layout, sizes, wire, tiles),
            sparse.places_call(layout, sizes, wire, indices, tiles),
        ]
    out = _fake(torch.float32, *((numel,) if summed else (rows, numel)))
    return [*places, sparse.sum_call(layout, sizes, values, indices, out)]
