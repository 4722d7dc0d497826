"""One collective of several gradients, and what comes back: the mean of each over the ranks, with
the same bits on all of them.

Beside the values travels which rank had a gradient at all, so that a parameter that nobody used is
left alone, as DistributedDataParallel does it.
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
from commpass.collectives import all_reduce

ops = torch.ops._c10d_functional
Given = Sequence[Tensor | None]
"""What a rank sends of each gradient: a wire, or values; None where it had none."""
USED_BYTES = 1
"""What one gradient's flag takes in an all_gather, or beside a coded all_reduce."""


@dataclass(frozen=True)
class Part:
    """A gradient of ``entries`` values in a message: selected from by ``coder``, or None, whole."""

    entries: int
    dtype: torch.dtype
    coder: SparseCodec | None = None

    @property
    def nbytes(self) -> int:
        """Of its row in an all_gather, without its flag."""
        if self.coder is not None:
            return self.coder.wire_bytes(self.entries, self.dtype)
        return self.entries * self.dtype.itemsize

    def sum(self, rows: Tensor) -> Tensor:
        """uint8 ``[ranks, nbytes]`` to the sum ``[entries]``, in rank order (law 4)."""
        if self.coder is not None:
            return sum_by_index(
                *self.coder.decode_sparse(rows, self.entries, self.dtype), self.entries
            )
        total = torch.zeros(self.entries, dtype=accumulation_dtype(self.dtype), device=rows.device)
        for row in rows.view(self.dtype):
            total += row
        return total


def gather(parts: Sequence[Part], values: Given, group: Any, device: Any) -> list[Tensor | None]:
    """One all_gather of a row of bytes: all wires, then a flag for each. The mean of each part,
    None where no rank had any."""
    ranks, many = dist.get_world_size(group), len(parts)
    mine = torch.zeros(gather_bytes(parts), dtype=torch.uint8, device=device)
    flags = [int(wire is not None) for wire in values]
    mine[-many:] = torch.tensor(flags, dtype=torch.uint8)
    for (begin, part), wire in zip(_places(parts), values, strict=True):
        if wire is not None:
            mine[begin : begin + part.nbytes] = wire.reshape(-1).view(torch.uint8)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(mine, ranks, group.group_name))
    rows = gathered.view(ranks, -1)
    used = rows[:, -many:].bool()
    everybody, somebody = used.all(0).tolist(), used.any(0).tolist()
    found: list[Tensor | None] = []
    for number, (begin, part) in enumerate(_places(parts)):
        if not somebody[number]:
            found.append(None)
            continue
        own = rows[:, begin : begin + part.nbytes]
        own = own.contiguous() if everybody[number] else own[used[:, number]]
        found.append((part.sum(own) / ranks).to(part.dtype))
    return found


def gather_bytes(parts: Sequence[Part]) -> int:
    """What a rank hands over in ``gather``."""
    return sum(part.nbytes + USED_BYTES for part in parts)


def sums(
    parts: Sequence[Part], gradients: Given, group: Any, device: Any, codec: str | None = None
) -> list[Tensor | None]:
    """One all_reduce of the values of all parts, by the library, or coded. The mean of each, None
    where no rank had any. Divided before it is summed, as DistributedDataParallel does it."""
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
    """In which the values of an all_reduce travel: the widest of its gradients'."""
    return reduce(torch.promote_types, (part.dtype for part in parts))


def _places(parts: Sequence[Part]) -> list[tuple[int, Part]]:
    """Where the row of each part begins."""
    found, begin = [], 0
    for part in parts:
        found.append((begin, part))
        begin += part.nbytes
    return found
