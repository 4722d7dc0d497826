"""Exchange several gradients in one collective and return their means, with equal bits on all
ranks.

A flag for each gradient tells whether a rank had one. A parameter that no rank used stays
unchanged, as in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.sparse import SparseCodec, sum_by_index
from commpass.collectives.public import all_reduce

ops = torch.ops._c10d_functional
Given = Sequence[Tensor | None]
"""What a rank sends of each gradient: a wire, or values; None if it had none."""
USED_BYTES = 1
"""The bytes of one gradient's flag in an all_gather, or beside a coded all_reduce."""


@dataclass(frozen=True)
class Part:
    """A gradient of ``entries`` values in a message: sparse by ``codec``, or dense if that is
    None."""

    entries: int
    dtype: torch.dtype
    codec: SparseCodec | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its row in an all_gather, without its flag."""
        if self.codec is not None:
            return self.codec.wire_bytes(self.entries, self.dtype)
        return self.entries * self.dtype.itemsize

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum ``[entries]`` of uint8 ``[ranks, nbytes]``, in rank order (law 4)."""
        if self.codec is not None:
            return sum_by_index(
                *self.codec.decode_sparse(rows, self.entries, self.dtype), self.entries
            )
        total = torch.zeros(self.entries, dtype=accumulation_dtype(self.dtype), device=rows.device)
        for row in rows.view(self.dtype):
            total += row
        return total


def gather(parts: Sequence[Part], values: Given, group: Any, device: Any) -> list[Tensor | None]:
    """Return the mean of each part by one all_gather of a row of bytes; None if no rank had any.

    The row has all wires, then a flag for each.
    """
    ranks, count = dist.get_world_size(group), len(parts)
    row = torch.zeros(gather_bytes(parts), dtype=torch.uint8, device=device)
    flags = [int(wire is not None) for wire in values]
    row[-count:] = torch.tensor(flags, dtype=torch.uint8)
    for (begin, part), wire in zip(_offsets(parts), values, strict=True):
        if wire is not None:
            row[begin : begin + part.nbytes] = wire.reshape(-1).view(torch.uint8)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(row, ranks, group.group_name))
    rows = gathered.view(ranks, -1)
    used = rows[:, -count:].bool()
    all_used, any_used = used.all(0).tolist(), used.any(0).tolist()
    found: list[Tensor | None] = []
    for number, (begin, part) in enumerate(_offsets(parts)):
        if not any_used[number]:
            found.append(None)
            continue
        part_rows = rows[:, begin : begin + part.nbytes]
        part_rows = part_rows.contiguous() if all_used[number] else part_rows[used[:, number]]
        found.append((part.sum(part_rows) / ranks).to(part.dtype))
    return found


def gather_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes that a rank hands over in ``gather``."""
    return sum(part.nbytes + USED_BYTES for part in parts)


def sums(
    parts: Sequence[Part], gradients: Given, group: Any, device: Any, codec: str | None = None
) -> list[Tensor | None]:
    """Return the mean of each part by one all_reduce of all values; None if no rank had any.

    The library sums them, or a codec is used. Values are divided before the sum, as in
    DistributedDataParallel.
    """
    ranks = dist.get_world_size(group)
    dtype = message_dtype(parts)
    flat = torch.cat(
        [
            torch.zeros(part.entries, dtype=dtype, device=device)
            if values is None
            else values.reshape(-1).to(dtype)
            for part, values in zip(parts, gradients, strict=True)
        ]
    )
    flags = [int(values is not None) for values in gradients]
    if codec is None:
        used = torch.tensor(flags, dtype=dtype, device=device)
        whole = torch.cat([flat / ranks, used])
        dist.all_reduce(whole, group=group)
        mean, used = whole.split([flat.numel(), len(parts)])
    else:
        mean = all_reduce(flat, "avg", group, codec=codec)
        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    means = mean.split([part.entries for part in parts])
    return [
        mean.to(part.dtype) if some else None
        for part, mean, some in zip(parts, means, used.bool().tolist(), strict=True)
    ]


def message_dtype(parts: Sequence[Part]) -> torch.dtype:
    """Return the dtype of an all_reduce's values: the widest of its gradients' dtypes."""
    return reduce(torch.promote_types, (part.dtype for part in parts))


def _offsets(parts: Sequence[Part]) -> list[tuple[int, Part]]:
    """Return where the row of each part begins."""
    found, begin = [], 0
    for part in parts:
        found.append((begin, part))
        begin += part.nbytes
    return found
