"""Convert a fusion plan into a plan for ``commpass.plans()``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpass import groups
from commpass.collectives.request import Request
from commpass.collectives.stages import Payload, read_stages
from commpass.costmodel import Link, Profile, prices
from commpass.distributed import record
from commpass.parallel.ssfusion.messages import USED_BYTES, Part, gather_bytes, message_dtype
from commpass.parallel.ssfusion.plan import FusionPlan, Message
from commpass.passes import PassResult
from commpass.plan import NONE, Candidate, Grouped, Plan, PlannedSite, Site, planned
from commpass.plan.stage import Stage, plain_exchange
from commpass.plan.timeline import Timeline
from commpass.policy import paths

CODED_BY = "two_shot"
"""The algorithm of dense gradients with a codec."""
NO_EVENTS = "fusion buffers have no graph of their own"


def record_plan(
    plan: FusionPlan,
    names: Sequence[str],
    parts: Sequence[Sequence[Part]],
    group: dist.ProcessGroup,
    link: Link,
    dense_codec: str | None,
    device: torch.device,
    profile: str,
    dump: Path | None = None,
) -> Plan:
    """Record a fusion plan as a plan with a site for what is sent in one message by one codec.

    ``names`` are the gradients', ``parts`` the contents of each message, and ``profile`` is the
    link's name. Rank 0 writes it to the folder ``dump`` as a separate run, since each plan replaces
    the previous one.
    """
    sites: list[PlannedSite] = []
    grouped: list[Grouped] = []
    for number, (message, sent) in enumerate(zip(plan.messages, parts, strict=True)):
        rows = list(zip(message.sent, sent, strict=True))
        for is_dense, some in groupby(
            sorted(rows, key=lambda row: row[0].dense), key=lambda row: row[0].dense
        ):
            members = list(some)
            what = [part for _, part in members]
            own_names = [names[each.number] for each, _ in members]
            codec = dense_codec if is_dense and message.kind == "all_reduce" else None
            site = _site(
                f"{'whole' if is_dense else 'sparse'}_{number}", own_names, what, group, device
            )
            stages, wire = _stages(message, what, group, codec)
            candidate = Candidate(
                codec=codec or (NONE if what[0].codec is None else what[0].codec.spec),
                algorithm=CODED_BY if codec else NONE if what[0].codec is None else "sparse",
                wire_bytes=wire,
                predicted_us=round(_us(stages, link, group), 1),
                stages=stages,
            )
            plain = round(link.time_us("all_reduce", site.bytes, group.size()), 1)
            reason = plan.why or "; ".join(
                dict.fromkeys(each.why for each, _ in members if each.why)
            )
            sites.append(planned(site, candidate, f"by {message.kind}: {reason}", plain))
            if len(members) > 1:
                grouped.append(_grouped(site, own_names, [e.number for e, _ in members], what))
    made = Plan(
        graph="ssfusion",
        direction="backward",
        policy="ssfusion",
        profile=profile,
        sites=tuple(sites),
        grouped=tuple(grouped),
    )
    outcome = PassResult(made)
    record.record(outcome)
    if dump is not None and groups.is_first_rank():
        record.write_dump(dump, uuid.uuid4().hex[:8], outcome, Timeline(note=NO_EVENTS))
    return made


def _site(
    name: str, own_names: Sequence[str], parts: Sequence[Part], group: Any, device: torch.device
) -> Site:
    labels = groups.labels(group)
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    return Site(
        name=name,
        kind="all_reduce",
        reduce_op="avg",
        group=group.group_name,
        group_label=labels[0] if labels else "",
        group_labels=labels,
        group_size=group.size(),
        members=tuple(dist.get_process_group_ranks(group)),
        dtype=str(dtype).removeprefix("torch."),
        shape=(sum(part.entries for part in parts),),
        bytes=sum(part.entries * part.dtype.itemsize for part in parts),
        stateless=None,
        device=device.type,
        module=paths.common(name.rpartition(".")[0] for name in own_names),
        direction="backward",
    )


def _stages(
    message: Message, parts: Sequence[Part], group: Any, dense_codec: str | None
) -> tuple[tuple[Stage, ...], int]:
    """Return the stages of some parts of a message, and the bytes that a rank hands over with
    flags."""
    if dense_codec is not None:
        request = Request(group=group.group_name, ranks=group.size(), op="avg")
        payload = Payload(sum(part.entries for part in parts), 1, message_dtype(parts))
        read = read_stages("all_reduce", CODED_BY, dense_codec, payload, request)
        return read.stages, read.wire_bytes + len(parts) * USED_BYTES
    if message.kind == "all_gather":
        wire = gather_bytes(parts)
    else:
        entries = sum(part.entries for part in parts)
        wire = (entries + len(parts)) * message_dtype(parts).itemsize
    return (plain_exchange(message.kind, wire),), wire


def _us(stages: Sequence[Stage], link: Link, group: Any) -> float:
    """Return the microseconds of sending; coding counts as computation."""
    of_group = prices(Profile("measured", link), group.size(), groups.labels(group))
    tasks = (of_group.task(stage) for stage in stages if stage.role == "exchange")
    return sum(task.overhead_us + task.latency_us + task.us for task in tasks)


def _grouped(
    site: Site, own_names: Sequence[str], numbers: Sequence[int], parts: Sequence[Part]
) -> Grouped:
    return Grouped(
        sites=tuple(own_names),
        modules=tuple(name.rpartition(".")[0] for name in own_names),
        into=site.name,
        group=site.group,
        numbers=tuple(numbers),
        bytes=tuple(part.entries * part.dtype.itemsize for part in parts),
        reason="a fusion buffer",
    )
