"""The passes alone, for other compile stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from commpass.costmodel import Profile, default_profile, profile_named
from commpass.passes import Road, check_skip
from commpass.passes import run as run_passes
from commpass.passes.graph import meta
from commpass.plan import Plan
from commpass.policy import Policy, policy_named
from commpass.runtime import record


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: str | Path | Policy = "lossless",
    *,
    profile: str | Profile | None = None,
    direction: str = "forward",
    strict: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Plan:
    """The passes alone, for other compile stacks: rewrites a graph of aten operators in place and
    returns its plan.

    ``example_inputs`` give the graph fake values where its nodes have none in ``meta["val"]``. No
    ranks are asked: call it on all of them alike. If a pass fails the graph is left as it was and
    the plan's ``fallback`` says why; ``strict`` raises.
    """
    chosen = policy_named(policy)
    check_skip(chosen)
    _fake_values(gm, example_inputs)
    table = (lambda: dict(decompositions)) if decompositions is not None else None
    road = Road(
        gm=gm,
        direction=direction,
        policy=chosen,
        profile=profile_named(profile) or default_profile(meta.device_of(gm)),
        decompositions=table,
    )
    outcome = run_passes(road, graph="0", strict=strict)
    if outcome.error is not None and strict:
        raise outcome.error
    record.record(outcome)
    return outcome.plan


def _fake_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Gives every node a fake value, where the graph has none."""
    if all("val" in node.meta for node in gm.graph.nodes if node.op == "placeholder"):
        return
    from torch._dynamo.utils import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, detect_fake_mode(example_inputs)).propagate(*example_inputs)
