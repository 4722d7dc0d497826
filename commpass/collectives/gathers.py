"""All-gathers: send the row ``[1, n]`` of every rank to all ranks.

The result is ``[ranks, padded_numel(n)]``, row r from rank r. Each row is encoded once and decoded
by every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commpass.codecs import cut_apart, operators
from commpass.collectives import data_sized
from commpass.collectives.request import Gather, Request, pass_on
from commpass.collectives.steps import Coding, Steps, hop


def direct(row: Tensor, request: Request, coding: Coding) -> Steps:
    """Send all rows to all ranks in one exchange."""
    return (yield from hop(row, coding, Gather(request)))


def ring(row: Tensor, request: Request, coding: Coding) -> Steps:
    """Pass rows around a ring: each rank forwards the bytes that it received, so no two messages
    compete at a rank (SSFusion, section 2: the ring of an all-gather).

    The library's own all-gather does this itself and is used if exchanges are not sent as messages.
    Rows that need several exchanges use ``direct``.
    """
    codec, ranks, rank, numel = coding.codec, request.ranks, request.rank, row.shape[1]
    row = row.to(codec.hop_dtype(coding.dtype))
    several = coding.flow.shards > 1 or data_sized.varies(codec, row.dtype)
    if ranks <= 2 or not request.by_messages or several:
        return (yield from direct(row, request, coding))
    move = pass_on(request, [(rank + 1) % ranks], [(rank - 1) % ranks])
    wires = [operators.encode(codec, row, coding.salt(rank))]
    for _ in range(ranks - 1):
        wires.append((yield move.start(wires[-1])))
    wire = torch.cat([wires[(rank - source) % ranks] for source in range(ranks)])
    decoded = operators.decode(codec, wire, codec.padded_numel(numel), coding.dtype)
    return decoded if codec.has_linear_padding else cut_apart(decoded, numel)
