"""The mean over replicas of one tensor for each parameter, sent in buckets by plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commpass.distributed.flat import views_of
from commpass.distributed.integration import Bytes
from commpass.distributed.owners import local_part
from commpass.distributed.record import wire_bytes
from commpass.parallel.ddp.buckets import BucketPart, parts_of
from commpass.parallel.exchange import Exchanges
from commpass.policy.annotate import annotations_of

HOOK = "outer"
"""The name of this integration in plans and in the names of its state.

Shards of replicas that are separate jobs have the same ranks in their groups. There it is
``outer-NUMBER``, with the number of the shard.
"""
BUCKET_BYTES = 25 * 2**20
"""Most bytes of a bucket of several parameters, as in DDP."""


class Means:
    """Sends buckets of a model's parameters, and counts their bytes in ``sent``.

    ``names`` are the parameters' names by id. ``hook`` is the name of the integration here.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        model: nn.Module,
        names: Mapping[int, str],
        sent: Bytes,
        hook: str = HOOK,
    ):
        self.exchanges, self.names, self.hook, self._sent = exchanges, names, hook, sent
        self._annotations = annotations_of(model)
        self._parts: dict[Any, list[BucketPart]] = {}

    def clear(self) -> None:
        """Drop all plans, because the group changed. The new one has the same name."""
        self._parts.clear()
        self.exchanges.clear(reuse_code=True)

    @torch.no_grad()
    def average(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        participants: int,
    ) -> None:
        """Replace ``values`` by their sums over the group, divided by ``participants``.

        There is one value for each parameter, of the shape of its local part.
        """
        for bucket in buckets(parameters, values):
            self._average(group, [parameters[n] for n in bucket], [values[n] for n in bucket])
            for number in bucket:
                values[number].div_(participants)

    def _average(
        self, group: dist.ProcessGroup, parameters: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        total = sum(value.numel() for value in values)
        x = torch.empty(total, dtype=values[0].dtype, device=values[0].device)
        views = views_of(x, parameters)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        key = (*map(id, parameters), x.dtype)
        if key not in self._parts:
            self._parts[key] = parts_of(
                self.exchanges.backend.policy,
                *(group, x, parameters, self.names, self._annotations, self.hook, "sum"),
            )
        for part in self._parts[key]:
            piece = part.of(x)
            compiled = self.exchanges.get(part.what, piece, of=part.parameters)
            part.exchange(compiled.run, x)
            if group.size() > 1:  # a replica that is alone sends nothing
                self._sent.add("all_reduce", piece.nbytes, wire_bytes(compiled.plan))
        for view, value in zip(views, values, strict=True):
            value.copy_(view)


def buckets(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of the parameters of each bucket, which have one dtype and device.

    Empty parameters are in none.
    """
    numbers = [number for number, value in enumerate(values) if value.numel()]

    def kind(number: int) -> tuple[str, str]:
        return str(values[number].dtype), str(values[number].device)

    for _, alike in groupby(sorted(numbers, key=kind), kind):
        bucket: list[int] = []
        size = 0
        for number in alike:
            if bucket and size + values[number].nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(number)
            size += values[number].nbytes
        yield bucket


def trained(parameters: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the parameters that local steps change."""
    return [number for number, each in enumerate(parameters) if each.requires_grad]


def local(parameter: Tensor) -> Tensor:
    """Return the values of a parameter that this rank has, without autograd."""
    return local_part(parameter.detach())
