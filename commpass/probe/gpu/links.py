"""How the GPUs of a host are joined, and whether they can use each other's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _detect_dma_connectivity,
    _SymmetricMemory,
)

from commpass.costmodel.cards import CARDS, card_of
from commpass.probe.gpu.finding import Finding

NOT_KNOWN = "the cost model assumes an NVLink of 200 GB/s until it has a measured profile"
ROUTED = "exchanges go through the host's memory"
BYTES = 1 << 16


def named(device: torch.device) -> Finding:
    """Return which GPU the cost model takes a device for."""
    name = torch.cuda.get_device_name(device)
    if (card := card_of(name)) is None:
        return Finding("GPU", name, False, NOT_KNOWN)
    known = CARDS[card]
    return Finding("GPU", name, True, f"{card}: {known.interconnect}, {known.network}")


def pairs(matrix: Sequence[Sequence[int | bool]]) -> tuple[int, int]:
    """Return how many pairs of GPUs are joined in both directions, and how many there are."""
    many = range(len(matrix))
    joined = [bool(matrix[a][b] and matrix[b][a]) for a in many for b in many if a < b]
    return sum(joined), len(joined)


def between(test: str, matrix: Sequence[Sequence[int | bool]], meaning: str, lack: str) -> Finding:
    """Return a finding on the pairs of GPUs that are joined."""
    joined, every = pairs(matrix)
    if not every:
        return Finding(test, "not tested: there is one GPU", True)
    works = joined == every
    return Finding(test, f"{joined} of {every} pairs of GPUs", works, meaning if works else lack)


def findings(device: torch.device) -> Iterator[Finding]:
    """Yield what is known without an exchange; every rank of a host finds the same."""
    yield named(device)
    many = range(torch.cuda.device_count())
    access = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in many] for a in many]
    yield between("peer access", access, "GPUs read each other's memory", ROUTED)
    try:
        found = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError as error:
        yield Finding("NVLink", f"not known: {error}", False, ROUTED)
        return
    nvlink = [[found[a][b] for b in many] for a in many]
    yield between("NVLink", nvlink, "", "exchanges use PCIe or the host between some GPUs")


def symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> list[Finding]:
    """Return whether the ranks of a group can map each other's memory, and whether the switch can
    copy and add (multicast). Every rank calls it."""
    tests = ("symmetric memory", "multicast")
    try:
        memory = symmetric.empty((BYTES,), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
        multicast = bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        lack = "commpass.lowering.gpu.exchange cannot be used"
        return [Finding(tests[0], f"no: {why}", False, lack), Finding(tests[1], "not tested", True)]
    used = multicast and bool(handle.multicast_ptr)
    return [
        Finding(tests[0], f"ranks: {handle.world_size}", True),
        Finding(tests[1], "yes" if used else "no", True, "commpass does not use it"),
    ]
