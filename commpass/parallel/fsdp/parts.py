"""The parts of a unit's row that are sent apart, because they must not share blocks of codes.

Tensor parallelism divides some parameters, and others are equal on all of its ranks. If both were
in one block, the values that are divided would change the codes of the others, differently on each
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commpass.distributed.owners import divided_over


def parts_of_row(
    sent: Sequence[Any], length: int
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Return the ranges (begin, end) of each part of a rank's row of ``length`` values.

    ``sent`` are the parameters of FSDP2's group in the order of the row. Return () if all of them
    are divided alike, and None if their places in the row are unknown.
    """
    if len({divided_over(each.sharded_param) for each in sent}) < 2:
        return ()
    parts: dict[frozenset[str], list[tuple[int, int]]] = {}
    end = 0
    for each in sent:
        begin, end = end, end + each.padded_sharded_param_size.numel()
        ranges = parts.setdefault(divided_over(each.sharded_param), [])
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        if begin < end:
            ranges.append((begin, end))
    return tuple(tuple(ranges) for ranges in parts.values()) if end == length else None
