"""Helpers for tests of a collective in one kernel.

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


FORMS = {
    "one_shot": ("all_reduce", "one_shot"),
    "two_shot": ("all_reduce", "two_shot"),
    "reduce_scatter": ("reduce_scatter", "direct"),
    "all_gather": ("all_gather", "direct"),
}
"""Kinds and algorithms, by the names of their kernels."""
ALL = tuple(FORMS)


def exchange_of(name: str, *given: Any, **more: Any) -> Any:
    """Return the exchange whose kernel has a name, from the other fields of ``Exchange``."""
    from commpass.lowering.gpu.exchange_sizes import Exchange

    kind, algorithm = FORMS[name]
    return Exchange(algorithm, *given, kind=kind, **more)


def part_of(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank gets of ``plain``'s result."""
    return whole.reshape(ranks, -1)[rank] if name == "reduce_scatter" else whole


def mapped(folder: Path, capacity: Any, spins: int | None = None) -> Any:
    """Return a workspace with room for some exchanges: the memory of all ranks, mapped from files
    at addresses of this process."""
    from commpass.lowering.gpu.exchange import Workspace, memory_of

    rank, ranks, total = dist.get_rank(), dist.get_world_size(), memory_of(capacity).total
    (folder / str(rank)).write_bytes(bytes(total))
    dist.barrier()
    every = [
        torch.from_file(str(folder / str(peer)), shared=True, size=total, dtype=torch.uint8)
        for peer in range(ranks)
    ]
    peers = torch.tensor([each.data_ptr() for each in every], dtype=torch.int64)
    return Workspace(capacity, ranks, rank, peers, every[rank], every, spins)


def plain(
    coder: Codec, name: str, brought: list[torch.Tensor], op: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the wires of each rank, the wires of the sums, and the results of all ranks together:
    the sum of their inputs, or all of them.

    This is a second implementation from the codec alone.
    """
    if name == "all_gather":
        return _plain_gather(coder, brought)
    ranks, numel, dtype = len(brought), brought[0].numel(), brought[0].dtype
    domain, within = coder.domain, coder.domain_codec
    shards = 1 if name == "one_shot" else ranks
    length = -(-numel // (shards * coder.block)) * coder.block
    each = numel // ranks if name == "reduce_scatter" else length
    with plainly():
        wires = []
        for rank, x in enumerate(brought):
            rows = pad(pad(x.reshape(1, -1), each * shards).float().reshape(shards, each), length)
            wires.append(within.salted(rank, 0).encode_rows(domain.to_domain(rows)))
        sums = []
        for shard in range(shards):
            rows = torch.stack([wire[shard] for wire in wires])
            first, *others = within.decode_rows(rows, length, dtype).unbind(0)
            total = sum(others, first)
            sums.append(total / ranks if op == "avg" else total)
        result, coded = torch.stack(sums), []
        if name == "two_shot":
            for rank, total in enumerate(sums):
                coded.append(within.salted(rank, LAST).encode_rows(total.reshape(1, -1)))
            result = torch.cat([within.decode_rows(row, length, torch.float32) for row in coded])
        result = domain.from_domain(result).to(dtype)
    if name == "reduce_scatter":
        return wires, coded, cut_apart(result, each).flatten()
    return wires, coded, cut_apart(result.reshape(1, -1), numel).flatten()


def _plain_gather(
    coder: Codec, brought: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    numel, dtype = brought[0].numel(), brought[0].dtype
    with plainly():
        wires = [
            coder.salted(rank, 0).encode_rows(x.reshape(1, -1)) for rank, x in enumerate(brought)
        ]
        rows = coder.decode_rows(torch.cat(wires), coder.padded_numel(numel), dtype)
    return wires, [], cut_apart(rows.to(dtype), numel).flatten()
