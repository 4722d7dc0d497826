"""Compress the activations and gradients that stages of ``torch.distributed.pipelining`` exchange.

torch's schedules ask a stage for the messages of a microbatch, and start and wait for them
themselves. A compressed stage returns the same messages, to the same ranks and in the same order,
with a wire tensor in place of the values. A received message is decoded into torch's own buffer
just before the stage reads it. So every schedule works that gets messages from its stages. The
gradient of a decoded activation is sent back as if it were the original's (straight through).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.backend import Backend, backend
from commpass.costmodel import Profile
from commpass.distributed import pairs, record
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.agreement import longest_timeout
from commpass.distributed.budget import OVER
from commpass.distributed.integration import Bytes, Integration, refuse_if_exchanged
from commpass.distributed.plan_store import current_store, publish_hello
from commpass.distributed.refusal import publishing_refusal
from commpass.distributed.samples import MORE, label
from commpass.distributed.uncompressed import uncompressed_sites
from commpass.errors import CommpassError, PolicyError
from commpass.parallel.pipeline import endpoints
from commpass.parallel.pipeline.budget import EdgeBudget
from commpass.parallel.pipeline.coding import Coding
from commpass.parallel.pipeline.send_recv import (
    Message,
    StageRanks,
    coding_of,
    decide_all,
    messages_of,
)
from commpass.parallel.refusals import refuse_other_group, refuse_other_torch, wrong_argument
from commpass.passes import PassResult
from commpass.plan import UNCOMPRESSED, Plan, PlannedSite
from commpass.plan.timeline import Timeline
from commpass.policy import Policy
from commpass.policy.rules import DIRECTIONS
from commpass.utils.keywords import named_arguments

log = logging.getLogger("commpass")

PREPARE = {"forward": "_prepare_forward_infra", "backward": "_prepare_backward_infra"}
RETRIEVE = {"forward": "_retrieve_recv_activations", "backward": "_retrieve_recv_grads"}
MESSAGES = {
    ("recv", "forward"): "get_fwd_recv_ops",
    ("send", "forward"): "get_fwd_send_ops",
    ("recv", "backward"): "get_bwd_recv_ops",
    ("send", "backward"): "get_bwd_send_ops",
}
NEEDED = (
    *PREPARE.values(),
    *RETRIEVE.values(),
    *MESSAGES.values(),
    *("stage_index", "num_stages", "group", "device", "stage_index_to_group_rank"),
    *("args_recv_info", "act_send_info", "grad_recv_info"),
)
"""The attributes of a stage that are replaced or read."""
ALONE = "the pipeline has one stage: nothing is sent"
NO_EVENTS = "stages of a pipeline have no graph of their own"
UNSEEN = "errors of messages between pipeline stages are not sampled"


@publishing_refusal
@named_arguments
def compress_pipeline(
    stages: Any,
    policy: str | Path | Policy,
    *,
    profile: str | Path | Profile | None = None,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> CompressedPipeline:
    """Send codes between the stages of a pipeline, as the policy allows. Return the integration.

    Call ``compress_pipeline(stage, "tahquant")`` before the first step of a schedule. ``policy``,
    ``profile`` and ``dump`` are those of ``commpass.backend``.

    A site is one tensor that is sent between two stages, of kind ``send`` or ``recv``. Its
    direction is ``forward`` (an activation) or ``backward`` (its gradient). Its module is
    ``stages.I``, the stage that sends the activation.

    Args:
        stages: a stage of ``torch.distributed.pipelining`` (``PipelineStage``, or the result of
            ``build_stage``), or all those of this rank. Only these stages are changed, in place.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        profile: the links and kernels that the cost model assumes, as in ``commpass.backend``: a
            Profile, a name or a file. If None, COMMPASS_PROFILE, or else the network that is read
            from the system.
        dump: a folder for plans, for ``commpass explain``. If None, COMMPASS_DUMP.
        timeout: seconds that the ranks of two stages wait for each other's plans; if None the
            process group's own time-out.

    All ranks of the pipeline call it, for all of its stages. Raise PolicyError for an object that
    is not a stage, for a stage that is compressed already or has run, and for an unknown policy.
    The first step raises PlanMismatch if two stages planned differently.
    """
    if not hasattr(torch.ops._c10d_functional, "isend"):
        raise CommpassError(
            f"compress_pipeline: torch {torch.__version__} has no functional send and recv. Use"
            " torch 2.13 or newer"
        )
    every = list(stages) if isinstance(stages, (list, tuple)) else [stages]
    if not every:
        raise PolicyError("compress_pipeline([]): give the stages of this rank, at least one")
    for stage in every:
        _check(stage)
    if len({id(stage) for stage in every}) < len(every):
        raise PolicyError("compress_pipeline was given the same stage twice")
    shared = backend(policy, profile=profile, dump=dump, timeout=timeout)
    return CompressedPipeline([CompressedStage(stage, shared) for stage in every], shared)


def _check(stage: Any) -> None:
    """Raise PolicyError for an object that cannot be compressed."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    if not isinstance(stage, _PipelineStageBase):
        needed = "a PipelineStage of torch.distributed.pipelining, or what build_stage makes"
        raise PolicyError(wrong_argument("compress_pipeline", "stages", stage, needed))
    meta = () if hasattr(stage, "get_outputs_meta") else ("_stage_meta",)
    refuse_other_torch("compress_pipeline", stage, "the stage of a pipeline", (*NEEDED, *meta))
    name = f"stage {stage.stage_index}"
    refuse_if_exchanged(stage, name, "compress_pipeline", ("compress_pipeline",))
    if stage.args_recv_info:
        raise PolicyError(f"{name} has run already: call compress_pipeline before the first step")


def _group_of(stage: Any) -> dist.ProcessGroup:
    found = stage.group or dist.group.WORLD
    assert found is not None
    return found


_pipelines: Counter[tuple[str, str, int, int]] = Counter()
"""How often a stage of a number was compressed, by the run of this process, its group and the
number of stages. The other end counts the same, so that two pipelines of one group are not
confused."""


class CompressedPipeline(Integration):
    """The messages of this rank's stages under a policy; ``compress_pipeline`` creates it.

    ``bytes`` are those that this rank sent since the call or ``clear``.
    """

    call = "compress_pipeline"

    def __init__(self, stages: Sequence[CompressedStage], shared: Backend):
        super().__init__(policy=shared.policy)
        self.stages = tuple(stages)
        for each in self.stages:
            each.sent = self._sent
            self.acquire(each.stage, each.stage)

    @property
    def plans(self) -> list[Plan]:
        """The plan of each stage and direction."""
        return [plan for stage in self.stages for plan in stage.plans.values()]

    def _stop(self) -> None:
        for each in self.stages:
            each.restore()


class CompressedStage:
    """The state of a compressed stage in addition to torch's; its methods replace the stage's."""

    def __init__(self, stage: Any, shared: Backend):
        self.stage, self.backend = stage, shared
        self.group = _group_of(stage)
        publish_hello()
        self.has_other_ranks = endpoints.has_other_ranks()
        run, many = current_store().nonce if self.has_other_ranks else "", stage.num_stages
        count = (run, self.group.group_name, many, stage.stage_index)
        _pipelines[count] += 1
        self.number = f"{many}/{_pipelines[count]}"
        self.prepared: Counter[str] = Counter()
        self.plans: dict[str, Plan] = {}
        self.codings: dict[tuple[str, str], list[tuple[Message, PlannedSite, Coding | None]]] = {}
        self.uncompared: dict[tuple[str, str], list[tuple[endpoints.Edge, endpoints.EndPlan]]] = {}
        self.edges: dict[tuple[str, str], list[endpoints.Edge]] = {}
        self.budget = EdgeBudget(shared.policy)
        self.arriving: dict[tuple[str, int], list[tuple[Coding, Tensor, Tensor]]] = {}
        self.sent = Bytes()
        for direction in DIRECTIONS:
            self._replace(PREPARE[direction], self._prepare, direction)
            self._replace(RETRIEVE[direction], self._decode_arrived, direction)
        for what, name in MESSAGES.items():
            self._replace(name, self._messages, what)

    def _replace(self, name: str, method: Callable[..., Any], target: Any) -> None:
        setattr(self.stage, name, functools.partial(method, target, getattr(self.stage, name)))

    def restore(self) -> None:
        """Give the stage its own methods back."""
        for name in (*PREPARE.values(), *RETRIEVE.values(), *MESSAGES.values()):
            vars(self.stage).pop(name, None)

    # --- the methods ------------------------------------------------------------------------------

    def _prepare(
        self, direction: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare the stage as torch does; then plan its messages, which are known by now."""
        result = original(*args, **kwargs)
        self._plan(direction)
        return result

    def _messages(
        self, target: tuple[str, str], original: Callable[[int], list[Any]], microbatch: int
    ) -> list[Any]:
        """Return the messages of a microbatch as torch creates them, with codes where that was
        planned."""
        messages = original(microbatch)
        if not messages:
            return messages
        remedy = "make the stages anew, and call compress_pipeline on these"
        what, group = f"stage {self.stage.stage_index}", _group_of(self.stage)
        refuse_other_group("compress_pipeline", what, group, self.group, remedy)
        kind, direction = target
        timeout_s = self.backend.timeout or longest_timeout([self.group])
        for edge, plan in self.uncompared.pop(target, ()):
            endpoints.compare(edge, plan, timeout_s)
        coded = self.codings.get(target, [])
        coded_edges = {(message.source, message.target) for message, _, coding in coded if coding}
        edges = [e for e in self.edges.get(target, ()) if (e.source, e.target) in coded_edges]
        if edges and microbatch == 0 and self.budget.begin(target, edges, timeout_s):
            self._send_uncompressed(target)
            coded = self.codings[target]
        for _, site, _ in coded if kind == "send" else ():
            if site.bytes:
                self.sent.add(kind, site.bytes, site.wire_bytes)
        if len(messages) == len(coded) and all(coding is None for _, _, coding in coded):
            return messages
        self._check_messages(target, messages, coded)
        checks = self.budget.is_due(target, microbatch)
        for message, (_, site, coding) in zip(messages, coded, strict=True):
            if coding is None:
                continue
            if kind == "send":
                if checks:
                    self.budget.measure(target, site, coding.codec, message.tensor)
                message.tensor = coding.encode(message.tensor)
                continue
            wire, buffer = coding.empty_wire(), message.tensor
            self.arriving.setdefault((direction, microbatch), []).append((coding, wire, buffer))
            message.tensor = wire
        if checks:
            self.budget.publish(target, edges)
        return messages

    def _send_uncompressed(self, target: tuple[str, str]) -> None:
        """Send messages that are over their budget uncompressed from now on."""
        kind, direction = target
        before = self.plans[direction]
        plan = dataclasses.replace(before, sites=self.budget.apply(before.sites))
        now = {site.name: site for site in plan.sites if site.kind == kind}
        rows = self.codings[target]
        self.codings[target] = [
            (message, now[site.name], coding if now[site.name].compressed else None)
            for message, site, coding in rows
        ]
        for _, site, coding in rows:
            if coding is not None and not now[site.name].compressed and kind == "send":
                why = now[site.name].reason.removeprefix(UNCOMPRESSED)
                log.warning(OVER, label(site), f"{kind} {direction}", why, MORE)
        self.plans[direction] = plan
        profile = agreed_profile(self.backend.profile, self._location().device.type)
        self._record(PassResult(plan), profile, before)

    def _decode_arrived(
        self, direction: str, original: Callable[[int], Any], microbatch: int
    ) -> Any:
        """Decode what has arrived for a microbatch into the buffers from which torch reads it."""
        for coding, wire, buffer in self.arriving.pop((direction, microbatch), ()):
            coding.decode(wire, buffer)
        return original(microbatch)

    def _check_messages(
        self, target: tuple[str, str], messages: Sequence[Any], coded: Sequence[Any]
    ) -> None:
        """Raise CommpassError if torch sends other messages than were planned.

        With another number of messages, one would be mistaken for another.
        """
        location = self._location()
        expected = [
            (location.ranks[message.peer], message.shape, message.dtype) for message, _, _ in coded
        ]
        ranks = [dist.get_group_rank(self.group, each.peer) for each in messages]
        tensors = [each.tensor for each in messages]
        found = [
            (rank, tuple(tensor.shape), tensor.dtype)
            for rank, tensor in zip(ranks, tensors, strict=True)
        ]
        if expected != found:
            kind, direction = target
            raise CommpassError(
                f"stage {self.stage.stage_index} was planned to {kind} {_described(expected)}"
                f" {direction}"
                f" for each microbatch, but torch asks it to {kind} {_described(found)}. All"
                " microbatches must have the same shapes; use separate stages for other shapes"
            )

    # --- the plan ---------------------------------------------------------------------------------

    def _location(self) -> StageRanks:
        ranks = dict(self.stage.stage_index_to_group_rank)  # a schedule may change the original
        return StageRanks(self.group, ranks, torch.device(self.stage.device))

    def _plan(self, direction: str) -> None:
        """Plan all that the stage sends and receives in a direction, publish it, and compile the
        codecs."""
        location = self._location()
        profile = agreed_profile(self.backend.profile, location.device.type)
        messages = messages_of(self.stage, direction)
        sites, considered = decide_all(messages, location, self.backend.policy, profile)
        sites = self.budget.apply(sites)
        self.budget.restart(direction)
        rules = enumerate(self.backend.policy.rules)
        plan = Plan(
            graph=f"stage {self.stage.stage_index} of {self.stage.num_stages}",
            direction=direction,
            policy=self.backend.policy.name,
            profile=profile.name,
            sites=sites,
            fallback=ALONE if self.stage.num_stages == 1 else "",
            matched=tuple(n for n, rule in rules if any(map(rule.matches, sites))),
        )
        if self.plans.get(direction) != plan:
            self.plans[direction] = plan
            self._record(PassResult(plan, options=considered), profile)
        self.prepared[direction] += 1
        for kind in ("recv", "send"):
            rows = [
                (message, site, coding_of(message, site, location))
                for message, site in zip(messages, sites, strict=True)
                if message.kind == kind
            ]
            self.codings[kind, direction] = rows
            edges = self._publish_plans(rows, location) if self.has_other_ranks else []
            self.uncompared[kind, direction] = edges
            self.edges[kind, direction] = [edge for edge, _ in edges]
            for _, _, coding in rows:
                if coding is not None:
                    coding.prepare(encodes=kind == "send")

    def _publish_plans(
        self, rows: Sequence[tuple[Message, PlannedSite, Coding | None]], location: StageRanks
    ) -> list[tuple[endpoints.Edge, endpoints.EndPlan]]:
        """Publish the plans for edges to stages on other ranks. Return those edges and plans."""
        every = pairs.endpoints([site for _, site, _ in rows], self.group.rank())
        found = {}
        for message, _, _ in rows:
            if location.is_local(message.peer) or (message.source, message.target) in found:
                continue
            times = f"{self.number}/{message.direction}/{self.prepared[message.direction]}"
            key = f"pipeline/{self.group.group_name}/{message.source}-{message.target}/{times}"
            rank = dist.get_global_rank(self.group, location.ranks[message.peer])
            edge = endpoints.Edge(key, message.source, message.target, message.direction, rank)
            own_ends = tuple(end for end in every if edge.carries(end.name))
            plan = endpoints.EndPlan(self.backend.policy.name, own_ends)
            endpoints.publish(edge, plan)
            found[message.source, message.target] = (edge, plan)
        return list(found.values())

    def _record(
        self, outcome: PassResult, profile: Profile, instead_of: Plan | None = None
    ) -> None:
        record.record(outcome, instead_of)
        uncompressed = uncompressed_sites(outcome, self.backend.policy, profile)
        self.backend.summary.add(
            outcome.plan, trained=False, instead_of=instead_of, sites=uncompressed
        )
        self.backend.step_log.add(outcome.plan, UNSEEN, instead_of)
        if self.backend.dump is not None:
            policy, run = self.backend.policy, self.backend.run
            timeline = Timeline(note=NO_EVENTS)
            record.write_dump(self.backend.dump, run, outcome, timeline, policy, profile)


def _described(messages: Sequence[tuple[int, tuple[int, ...], torch.dtype]]) -> str:
    described = (
        f"{str(dtype).removeprefix('torch.')}{list(shape)} (rank {rank})"
        for rank, shape, dtype in messages
    )
    return ", ".join(described) or "nothing"
