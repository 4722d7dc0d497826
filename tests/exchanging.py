"""Helpers for tests of an all_reduce in one kernel.

Memory that processes share replaces memory that GPUs share. The expected bits are computed here
too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_form import plainly

from commpass.codecs import Codec, cut_apart, pad

LAST = 1 << 16
"""The salt that distinguishes the random choices of a two-shot's second hop from those of its
first."""


def mapped(folder: Path, exchange: Any, spins: int | None = None) -> Any:
    """Return a workspace: the memory of all ranks, mapped from files at addresses of this
    process."""
    from commpass.lowering.gpu.exchange import Workspace, memory_of

    rank, total = dist.get_rank(), memory_of(exchange).total
    (folder / str(rank)).write_bytes(bytes(total))
    dist.barrier()
    every = [
        torch.from_file(str(folder / str(peer)), shared=True, size=total, dtype=torch.uint8)
        for peer in range(exchange.ranks)
    ]
    peers = torch.tensor([each.data_ptr() for each in every], dtype=torch.int64)
    return Workspace(exchange, rank, peers, every[rank], every, spins)


def plain(
    coder: Codec, algorithm: str, brought: list[torch.Tensor], op: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the wires of each rank, the wires of the sums, and the sum of the ranks' inputs.

    This is a second implementation from the codec alone.
    """
    ranks, numel, dtype = len(brought), brought[0].numel(), brought[0].dtype
    domain, within = coder.domain, coder.domain_codec
    shards = 1 if algorithm == "one_shot" else ranks
    length = -(-numel // (shards * coder.block)) * coder.block
    with plainly():
        wires = []
        for rank, x in enumerate(brought):
            rows = pad(x.reshape(1, -1), length * shards).float().reshape(shards, length)
            wires.append(within.salted(rank, 0).encode_rows(domain.to_domain(rows)))
        sums = []
        for shard in range(shards):
            rows = torch.stack([wire[shard] for wire in wires])
            first, *others = within.decode_rows(rows, length, dtype).unbind(0)
            total = sum(others, first)
            sums.append(total / ranks if op == "avg" else total)
        result, coded = torch.stack(sums), []
        if algorithm == "two_shot":
            for rank, total in enumerate(sums):
                coded.append(within.salted(rank, LAST).encode_rows(total.reshape(1, -1)))
            result = torch.cat([within.decode_rows(row, length, torch.float32) for row in coded])
        result = domain.from_domain(result).to(dtype)
    return wires, coded, cut_apart(result.reshape(1, -1), numel).flatten()
