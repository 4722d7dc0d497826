"""Split a bucket into parts: parameters with different terms in the policy are sent separately.

If a lossy codec has blocks, so are parameters that tensor parallelism divides, and those that are
equal on all of its ranks. In one block, the values that are divided would change the codes of the
others, differently on each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.distributed.owners import divided_over, local_part
from commpass.groups import labels
from commpass.parallel.exchange import Exchange
from commpass.passes.fx.meta import dtype_name
from commpass.plan import Site
from commpass.policy import Policy
from commpass.policy.paths import common
from commpass.policy.rules import Allowed


@dataclass(frozen=True)
class BucketPart:
    """Some parameters of a bucket, and their ranges in it: (start, length) in values."""

    what: Exchange
    parameters: tuple[Tensor, ...]
    ranges: tuple[tuple[int, int], ...]

    def of(self, x: Tensor) -> Tensor:
        """Return this part of a bucket's tensor: a view if it is contiguous, else a copy."""
        pieces = [x.narrow(0, start, length) for start, length in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def exchange(self, run: Callable[[Tensor], Any], x: Tensor) -> None:
        """Send this part with ``run``, and put the result into the bucket's tensor."""
        piece = self.of(x)
        run(piece)
        if len(self.ranges) > 1:
            lengths = [length for _, length in self.ranges]
            for (start, length), new in zip(self.ranges, piece.split(lengths), strict=True):
                x.narrow(0, start, length).copy_(new)


def parts_of(
    policy: Policy,
    group: dist.ProcessGroup,
    x: Tensor,
    parameters: Sequence[Tensor],
    names: Mapping[int, str],
    annotations: Mapping[str, str],
    hook: str = "ddp",
    op: str = "avg",
) -> list[BucketPart]:
    """Return the parts of a bucket whose tensor ``x`` holds the gradients of ``parameters`` in
    order.

    ``names`` are the parameters' names by id, ``annotations`` the nearest ones by module. ``hook``
    and ``op`` are those of ``Exchange``.
    """
    site = Site(
        name="bucket",
        kind="all_reduce",
        reduce_op="sum",
        group=group.group_name,
        group_labels=labels(group),
        group_size=group.size(),
        dtype=dtype_name(x.dtype),
        shape=tuple(x.shape),
        bytes=x.nbytes,
        direction="backward",
    )
    ranges: list[tuple[int, int]] = []
    alike: list[tuple[tuple[Allowed, frozenset[str]], list[int]]] = []
    modules = [names[id(parameter)].rpartition(".")[0] for parameter in parameters]
    start = 0
    for number, (parameter, module) in enumerate(zip(parameters, modules, strict=True)):
        length = local_part(parameter).numel()
        ranges.append((start, length))
        start += length
        annotation = annotations.get(module)
        mixes = policy.mixes_values(annotation)
        kind = (
            _terms(policy, site, module, annotation),
            divided_over(parameter) if mixes else frozenset[str](),
        )
        numbers_of_kind = next((numbers for other, numbers in alike if other == kind), None)
        if numbers_of_kind is None:
            alike.append((kind, [number]))
        else:
            numbers_of_kind.append(number)
    found = []
    for (terms, _), numbers in alike:
        module, annotation = common(modules[number] for number in numbers), None
        if _terms(policy, site, module, None) != terms:  # all in a group have the same terms
            module, annotation = modules[numbers[0]], annotations.get(modules[numbers[0]])
        what = Exchange(
            "all_reduce",
            *(group.group_name, group.size(), module, "backward", hook, op),
            annotation=annotation,
            flat=True,
            parameters=tuple(names[id(parameters[number])] for number in numbers),
        )
        own_parameters = tuple(parameters[number] for number in numbers)
        found.append(
            BucketPart(what, own_parameters, _joined([ranges[number] for number in numbers]))
        )
    return found


def _terms(policy: Policy, site: Site, module: str, annotation: str | None) -> Allowed:
    """Return the terms of a policy for the gradients of one module."""
    return policy.allowed(dataclasses.replace(site, module=module, annotation=annotation))[0].terms


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge ranges that follow each other."""
    found: list[tuple[int, int]] = []
    for start, length in ranges:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((start, length))
    return tuple(found)
