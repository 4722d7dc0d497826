"""Describe the messages between pipeline stages as sites, and decide how they are sent.

A message is one tensor that a stage sends to, or receives from, another stage once a microbatch.
Its two ends make the same decision, each on its own rank. They use shape, dtype, group and stages,
and no facts that only one of them has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commpass import groups
from commpass.codecs import codec
from commpass.costmodel import Profile
from commpass.parallel.pipeline.coding import Coding
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.passes.fx import meta
from commpass.passes.results import Options
from commpass.plan import Candidate, PlannedSite, Site, planned
from commpass.plan.kinds import KINDS
from commpass.policy import Policy

STATELESS = "a pipeline keeps no state between microbatches"
TOGETHER = "both stages are on this rank: nothing is sent"
WHOLE = "a stage's message is sent whole"


@dataclass(frozen=True)
class Message:
    """One end of a message that two stages exchange for each microbatch, in ``direction``.

    ``source`` and ``target`` are the stages that send and receive it; ``number`` distinguishes
    several messages between the same stages.
    """

    kind: str
    direction: str
    source: int
    target: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def peer(self) -> int:
        """The stage at the other end."""
        return self.target if self.kind == "send" else self.source


def messages_of(stage: Any, direction: str) -> tuple[Message, ...]:
    """Return all that a stage receives and sends in a direction, in torch's order.

    Call it once torch has prepared the stage for that direction.
    """
    index, forward = stage.stage_index, direction == "forward"
    received = _received(stage.args_recv_info if forward else stage.grad_recv_info)
    sent = _activations(stage) if forward else _gradients(stage)
    found: list[Message] = []
    for kind, tensors in (("recv", received), ("send", sent)):
        count: dict[int, int] = {}
        for peer, value in tensors:
            number = count[peer] = count.get(peer, -1) + 1
            source, target = (peer, index) if kind == "recv" else (index, peer)
            shape = tuple(value.shape)
            found.append(Message(kind, direction, source, target, number, shape, value.dtype))
    return tuple(found)


def _received(infos: dict[int, Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield (stage, metadata) of received tensors, which are the same for all microbatches.

    From torch 2.15 on, a stage has no buffer before it asks for a message.
    """
    for info in infos.get(0, ()):
        if _is_root(info):
            continue
        value = info.buffer if info.buffer is not None else getattr(info, "tensor_meta", None)
        if value is not None:
            yield info.source, value


def _activations(stage: Any) -> Iterator[tuple[int, Any]]:
    """Yield (stage, metadata) of the outputs that are sent on."""
    outputs = _metas(stage).outputs if _metas(stage) else stage.get_outputs_meta()
    for number, targets in stage.act_send_info.items():
        for target in targets:
            if target is not None:
                yield target, outputs[number]


def _gradients(stage: Any) -> Iterator[tuple[int, Any]]:
    """Yield (stage, metadata) of the gradients that are sent back.

    These are those of all received inputs, except inputs without a gradient, which torch before
    2.13 does not report.
    """
    send_meta = getattr(stage, "_get_grad_send_meta", None)
    for number, info in enumerate(stage.args_recv_info.get(0, ())):
        if not _is_root(info):
            value = send_meta(number) if send_meta else info.buffer
            if value is not None:
                yield info.source, value


def _metas(stage: Any) -> Any:
    return getattr(stage, "_stage_meta", None)


def _is_root(info: Any) -> bool:
    """Return whether it is an input of the whole pipeline; torch before 2.13 has another type for
    it."""
    return getattr(info, "is_root_arg", not hasattr(info, "buffer"))


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageRanks:
    """Where a stage runs: its process group, the rank of every stage in that group, and the
    device."""

    group: dist.ProcessGroup
    ranks: dict[int, int]
    device: torch.device

    def is_local(self, stage: int) -> bool:
        return self.ranks[stage] == self.group.rank()


def site_of(message: Message, location: StageRanks) -> Site:
    """Return a message as a site.

    Its module is ``stages.I``, the stage that sends the activations. So all messages between two
    stages have one name, whichever stage sends them.
    """
    low = message.source if message.direction == "forward" else message.target
    several = f".{message.number}" if message.number else ""
    group = location.group
    labels = groups.labels(group)
    nbytes = math.prod(message.shape) * message.dtype.itemsize
    return Site(
        name=f"stage_{message.source}_to_{message.target}{several}",
        kind=message.kind,
        group=group.group_name,
        group_label=next(iter(labels), ""),
        group_labels=labels,
        group_size=group.size(),
        members=tuple(dist.get_process_group_ranks(group)),
        dtype=meta.dtype_name(message.dtype),
        shape=message.shape,
        bytes=0 if location.is_local(message.peer) else nbytes,
        width=math.prod(message.shape[1:]),
        peer=location.ranks[message.peer],
        stateless=STATELESS,
        device=location.device.type,
        module=f"stages.{low}",
        direction=message.direction,
    )


def decide(site: Site, policy: Policy, profile: Profile) -> tuple[PlannedSite, Options]:
    """Return the decision for a message between two ranks, and its candidates."""
    allowed = policy.allowed(site)[0]
    whole = dataclasses.replace(allowed, chunks=1, rows=1)
    options = candidates(site, whole, profile, policy.reassociate)
    (chosen,) = choose([site], [options], [whole], profile)
    if chosen.compressed:
        # There is no graph to put codes into: they are compiled alone, or run eagerly.
        form = "inline" if allowed.lowering == "inline" else "kernel"
        chosen = dataclasses.replace(chosen, lowering=form)
        if (allowed.chunks or 1) > 1:
            reason = f"{chosen.reason}; chunks={allowed.chunks} does not apply: {WHOLE}"
            chosen = dataclasses.replace(chosen, reason=reason)
    return chosen, options


def decide_all(
    messages: Iterable[Message], location: StageRanks, policy: Policy, profile: Profile
) -> tuple[tuple[PlannedSite, ...], dict[str, Options]]:
    """Return the decisions on messages, in order, and the candidates by the site's name."""
    sites, considered = [], {}
    for message in messages:
        site = site_of(message, location)
        if location.is_local(message.peer):
            sites.append(planned(site, Candidate(), TOGETHER, 0.0))
            continue
        chosen, options = decide(site, policy, profile)
        sites.append(chosen)
        considered[site.name] = options
    return tuple(sites), considered


def coding_of(message: Message, site: PlannedSite, location: StageRanks) -> Coding | None:
    """Return how a message is coded; None if it is uncompressed."""
    if not site.compressed:
        return None
    assert KINDS[message.kind].pairwise
    return Coding(
        codec(site.codec),
        math.prod(message.shape),
        message.dtype,
        location.device,
        salt=(location.ranks[message.source],),
        compiled=site.lowering == "kernel",
    )
