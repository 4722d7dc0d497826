"""Compilable kernels of the codecs that do not use chains: ``exponent``, ``ecq`` and the sparse
ones.

The bytes and the iterations of ``exponent`` and of sparse codecs are those of typical values
(``typical.py``). Torch's operators between kernels are not a part of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from commpass.codecs import SparseCodec
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.entropy.operators import sizes
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.exponent.floats import CHUNK, FORMS
from commpass.errors import KernelError
from commpass.lowering.gpu import entropy, exponent, sparse
from commpass.lowering.gpu.call import calls_of, divisible, signature
from commpass.lowering.gpu.tiles import sparse_indices, sparse_measure
from commpass.lowering.gpu.tiles.exponent_encode import FEW_BITS, UNITS
from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.lowerable import Lowerable, Work
from commpass.lowering.inspect.sass import Trips
from commpass.lowering.inspect.typical import Exponents, exponents, mean_maximum


def of_exponent(
    name: str, codec: ExponentCodec, dtype: torch.dtype, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels in the order of their launches."""
    if why := exponent.unsupported_reason(numel, dtype):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if name not in ("encode", "decode"):
        raise KernelError(f"no kernel: {codec.spec}: it has only encode and decode")
    works = _works_of_exponent(codec, dtype, numel)
    if name == "encode":
        return _kernels(name, lambda: exponent.encode_rows(codec, _fake(dtype, 1, numel)), works)
    wire = _fake(torch.uint8, 1, codec.wire_bytes(numel, dtype))
    return _kernels(name, lambda: exponent.decode_rows(codec, wire, numel, dtype), works)


def _works_of_exponent(codec: ExponentCodec, dtype: torch.dtype, numel: int) -> dict[str, Work]:
    """Return the work of each kernel for one row of typical values."""
    found, tiling = exponents(codec.ladder, FORMS[dtype]), exponent.TILING
    chunks, tiles = numel / CHUNK, -(-numel // (32 * tiling.columns))
    words = found.words(CHUNK)
    values, static, dynamic = (
        float(numel * dtype.itemsize),
        float(codec.static_bytes(numel, dtype)),
        2.0 * words * chunks,
    )
    marks, tallies = 4.0 * chunks, 4.0 * tiles
    # The strings are written, and read, in words of 4 bytes.
    strings = 4.0 * math.ceil(words / 2) * chunks
    rounds = _rounds(found, tiling.columns)
    units = float(math.ceil(words / UNITS))
    whole = values + static + dynamic
    return {
        "exponent_split": Work(values + static + strings + tallies, rounds, whole),
        "exponent_place": Work(marks + strings + tallies + dynamic, (units,), whole),
        "exponent_count": Work(marks + tallies, (), whole),
        "exponent_join": Work(whole + tallies, rounds, whole),
    }


def _rounds(found: Exponents, columns: int) -> tuple[float, ...]:
    """Return the iterations of the loops that move fields one at a time."""
    return tuple(
        found.rounds(step, columns) for step, bits in enumerate(found.fields) if bits > FEW_BITS
    )


def of_entropy(
    name: str, codec: EntropyCodec, dtype: torch.dtype, numel: int
) -> tuple[Lowerable, ...]:
    """Return the kernels in the order of their launches; a chunk is coded once, or more often."""
    if why := entropy.unsupported_reason(numel):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if dtype == torch.float64:
        raise KernelError(f"no kernel: {codec.spec}: it has no kernel for float64")
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
    """Return the kernels of a sparse codec, without those that measure thresholds."""
    if why := sparse.unsupported_reason(codec, numel, dtype):
        raise KernelError(f"no kernel: {codec.spec}: {why}")
    if name == "decode_sum_encode":
        raise KernelError(f"no kernel: {codec.spec}: no kernel encodes a sum of sparse rows")
    sizes = sparse.Sizes(warp=ARCHITECTURES[arch].warp)
    rows = ranks if name == "decode_sum" else 1
    works = _works_of_sparse(sparse.layout_of(codec, numel, dtype), sizes, rows)
    if name == "encode":
        x, residual = _fake(dtype, 1, numel), _fake(torch.float32, 1, numel)
        return _kernels(name, lambda: sparse.encode(codec, x, residual, sizes), works)
    decode = sparse.sum_rows if name == "decode_sum" else sparse.decode
    wires = _fake(torch.uint8, rows, codec.wire_bytes(numel, dtype))
    return _kernels(name, lambda: decode(codec, wires, numel, dtype, sizes), works)


def _works_of_sparse(layout: sparse.Layout, sizes: sparse.Sizes, rows: int) -> dict[str, Work]:
    """Return the work of each kernel for rows whose chosen entries are spread evenly: one row to
    encode, ``rows`` to decode or to sum. Tables of the blocks of a row are not counted."""
    entries, chosen = float(layout.entries), float(layout.chosen)
    x, float32, index = layout.dtype.itemsize * entries, 4.0 * entries, 4.0 * chosen
    values, codes = float(layout.gap), float(layout.first + layout.second)
    left = x + 2.0 * float32
    done = codes if layout.code == sparse_indices.BITMAP else 0.0
    density = chosen / entries
    # A program looks back once: the one before it is likely to know the sum of those before.
    fullest = mean_maximum(density, sizes.block // 32)
    steps = float(math.ceil(sizes.block * density / sizes.step))
    search = float(layout.chosen.bit_length())
    whole = left + values + codes
    back = rows * (values + codes) + float32
    coded = rows * (codes + index)
    return {
        "sparse_select": Work(left + values + index + done, (1.0, fullest), whole),
        "sparse_take": Work(left + values + index, (steps, steps), whole),
        "sparse_pack": Work(index + codes - done, (search,), whole),
        "sparse_settle": Work(2.0 * index + values + 2.0 * index, (), whole),
        "sparse_count_ones": Work(float(rows * layout.second), (), back),
        "sparse_places": Work(coded, (), back),
        "sparse_places16": Work(coded, (float((-(-layout.entries >> 16)).bit_length()),), back),
        "sparse_sum": Work(rows * (values + index) + float32, (float(rows), steps), back),
    }


def _fake(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a meta tensor, for a call that only needs its shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _kernels(
    name: str, run: Callable[[], object], works: Mapping[str, Work] | None = None
) -> tuple[Lowerable, ...]:
    """Return the kernels that a function launches, without those that measure thresholds."""
    found = []
    for each in calls_of(run):
        if each.entry.__module__ == sparse_measure.__name__:
            continue
        work = (works or {}).get(each.source.entry)
        trips: tuple[Trips, ...] = work.trips if work else ()
        found.append(
            Lowerable(
                name=f"{name}: {each.source.entry}",
                source=each.source,
                signature={
                    key: what for key, what in signature(each).items() if what != "constexpr"
                },
                constants=each.constants,
                hints={key: 16 if key in divisible(each) else 1 for key in each.arguments},
                num_warps=each.warps,
                num_stages=each.options.get("num_stages", 3),
                moved=work.moved / each.programs if work else None,
                trips=trips,
                launched=each.programs,
                whole=work.whole if work else None,
            )
        )
    return tuple(found)
