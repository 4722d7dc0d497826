"""Rows of values as words of chunks: columns of 32 values, 32 columns a chunk, and the bits of the
dynamic part. ``ExponentCodec`` documents the wire format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commpass.codecs.exponent.bits import materialized
from commpass.codecs.exponent.floats import CHUNK, LANES, LINE, FloatForm
from commpass.codecs.rows import cut, pad

LENGTH_AT = 16
"""The first bit of a chunk's mark that holds the number of its 16-bit words in the dynamic part."""


def columns_of(numel: int) -> int:
    """The number of columns of 32 values in the lines of a row."""
    return numel // LINE * (LINE // LANES)


def chunks_of(numel: int) -> int:
    return (columns_of(numel) + LANES - 1) // LANES


def columns_of_chunks(numel: int, device: torch.device) -> Tensor:
    """The number of columns of each chunk, int32 ``[chunks, 1]``: 32 except for the last one."""
    first = torch.arange(chunks_of(numel), dtype=torch.int32, device=device).unsqueeze(1) * LANES
    return (columns_of(numel) - first).clamp_max(LANES)


def existing(numel: int, device: torch.device) -> Tensor:
    """Return words with all bits set for existing columns, int32 ``[chunks, 32]``."""
    lane = torch.arange(LANES, dtype=torch.int32, device=device)
    return -(lane < columns_of_chunks(numel, device)).to(torch.int32)


def across(of_chunks: Tensor) -> Tensor:
    """Expand ``[rows, chunks, 1]`` to ``[rows, chunks, 32]``: each number of a chunk, once per
    column.

    The copy is materialized, so that the following operations loop over columns only: two loops
    would not be fused.
    """
    return materialized(
        of_chunks.expand(-1, -1, LANES).clone(memory_format=torch.contiguous_format)
    )


def by_column(pieces: Sequence[Tensor]) -> Tensor:
    """Interleave ``[rows, chunks, 32]`` tensors to ``[rows, chunks, n]``, column by column."""
    return torch.stack(list(pieces), dim=3).flatten(2)


def dynamic_lengths(marks: Tensor, capacity: Tensor) -> Tensor:
    """Return the 16-bit words of each chunk in the dynamic part, clamped to its room for any
    marks."""
    return ((marks >> LENGTH_AT) & 0xFFFF).minimum(capacity)


def chunk_words(rows: Tensor, form: FloatForm) -> Tensor:
    """Return the lines of rows as int32 words ``[rows, chunks, form.packed_length, 32]``, with
    zeros for the missing columns of the last chunk."""
    count, numel = rows.shape
    body, chunks = numel - numel % LINE, chunks_of(numel)
    words = as_words(cut(rows, body), body)
    shape = (form.packed_length, LANES)
    if isinstance(numel, int) and body % CHUNK == 0:
        return words.unflatten(1, (chunks, *shape))
    whole, last = (
        (chunks - 1) * form.packed_length * LANES,
        columns_of(numel) - (chunks - 1) * LANES,
    )
    tail = words.narrow(1, whole, last * form.packed_length).reshape(
        count, 1, form.packed_length, last
    )
    head = words.narrow(1, 0, whole).reshape(count, chunks - 1, *shape)
    return torch.cat([head, pad(tail, LANES)], dim=1)


def row_words(packed: Tensor, form: FloatForm, columns: int, chunks: int) -> Tensor:
    """The inverse of ``chunk_words``: ``[rows, n]``."""
    if isinstance(columns, int) and columns % LANES == 0:
        return packed.flatten(1)
    last = columns - (chunks - 1) * LANES
    tail = cut(packed.narrow(1, chunks - 1, 1), last)
    # Copy even if complete: a graph traced with such sizes serves other sizes too.
    tail = tail.clone(memory_format=torch.contiguous_format).flatten(1)
    return torch.cat([packed.narrow(1, 0, chunks - 1).flatten(1), tail], dim=1)


def in_chunks(columns: Tensor, chunks: int) -> Tensor:
    """Reshape ``[rows, columns]`` to ``[rows, chunks, 32]``, with zeros for the missing columns of
    the last chunk."""
    return pad(columns, chunks * LANES).unflatten(1, (chunks, LANES))


def as_words(rows: Tensor, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return rows ``[rows, n]`` as words, padded with zeros to ``length`` numbers; copied only if
    needed.

    Values are not processed as floats, because compiled code pads and copies 16-bit floats through
    float32, which does not keep the payloads of NaNs.
    """
    width = rows.element_size()
    if width == dtype.itemsize:
        return pad(rows.view(dtype), length)
    missing = length - rows.shape[1]
    if isinstance(length, int) and length == 0:  # any stride, which a view might refuse
        return rows.new_empty((rows.shape[0], 0), dtype=dtype)
    # A view as a wider dtype must begin at a multiple of its size; Dynamo does not support
    # ``storage_offset``.
    if (
        isinstance(missing, int)
        and missing == 0
        and rows.stride(1) == 1
        and rows.stride(0) * width % dtype.itemsize == 0
        and not torch.compiler.is_dynamo_compiling()
        and rows.storage_offset() * width % dtype.itemsize == 0
    ):
        return rows.view(dtype)
    raw = pad(rows.unsqueeze(2).view(torch.uint8).flatten(1), length * width)
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def as_values(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as values; they are cut and joined as bytes (see ``as_words``)."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def read_at(dynamic: Tensor, offsets: Tensor) -> Tensor:
    """Return the 64 bits from each bit offset on; ``dynamic`` is int64 ``[rows, n]``. Indices are
    clamped, so that no wire causes a read out of bounds."""
    flat = offsets.flatten(1)
    word, shift, last = flat >> 6, flat & 63, dynamic.shape[1] - 1
    low = dynamic.gather(1, word.clamp(0, last))
    high = dynamic.gather(1, (word + 1).clamp(0, last))
    string = ((low >> shift) & ((torch.full_like(low, 2) << (63 - shift)) - 1)) | (
        (high << 1) << (63 - shift)
    )
    return string.reshape(offsets.shape)
