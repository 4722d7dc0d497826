"""The exchange that averages the gradients of a layer, by the cost model alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from commpass.costmodel import Profile, profile_named
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import NONE, PlannedSite, Site
from commpass.policy import Policy, policy_named

from .cases import Case

BACKWARD = 2 / 3
"""The share of backward in a layer's time: it has two matmuls for each of forward."""


@dataclass(frozen=True)
class Average:
    """The averages of a layer's gradients under one policy, one after the other."""

    ms: float
    compressed: int
    sites: int


def weights_of(case: Case) -> dict[tuple[str, ...], list[int]]:
    """Return the values of each large weight of a rank, by the mesh dimensions over which its
    gradient is averaged."""
    model, sizes = case.model, case.sizes
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    heads, kv_heads = model.heads // tp, max(model.kv_heads // tp, 1)
    attention = [
        model.width * (heads + 2 * kv_heads) * model.head_width,
        model.width * heads * model.head_width,
    ]
    experts = max(model.experts // ep, 1)
    mlp = [experts * model.width * 2 * model.ffn // tp, experts * model.width * model.ffn // tp]
    if ep == 1:
        return {("dp",): attention + mlp}
    return {("dp", "ep"): attention, ("dp",): mlp}


def group_of(case: Case, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks of rank 0's group over some mesh dimensions."""
    strides, sizes = {}, list(case.sizes.values())
    for number, name in enumerate(case.sizes):
        strides[name] = prod(sizes[number + 1 :])
    steps = [range(0, strides[name] * case.sizes[name], strides[name]) for name in names]
    return tuple(map(sum, product(*steps)))


def average(case: Case, policy: str) -> Average:
    """Return the time of all averages of a layer, as one rank's choices under a policy have it."""
    chosen, profile = policy_named(policy), profile_named(case.machine)
    found = [
        _of_weight(site_of(values, group_of(case, names)), chosen, profile)
        for names, weights in weights_of(case).items()
        for values in weights
        if len(group_of(case, names)) > 1
    ]
    ms = sum(each.predicted_us for each in found) / 1e3
    return Average(ms, sum(each.codec != NONE for each in found), len(found))


def site_of(values: int, ranks: tuple[int, ...]) -> Site:
    """Return the all_reduce of a float32 gradient."""
    return Site(
        name="gradient",
        kind="all_reduce",
        reduce_op="avg",
        group="dp",
        group_label="dp",
        group_size=len(ranks),
        members=ranks,
        dtype="float32",
        shape=(values,),
        bytes=4 * values,
        device="cuda",
        direction="backward",
    )


def _of_weight(site: Site, policy: Policy, profile: Profile) -> PlannedSite:
    allowed = policy.allowed(site)[0]
    options = candidates(site, allowed, profile, policy.reassociate)
    return choose([site], [options], [allowed], profile)[0]


def exposed_ms(layers: int, backward_ms: float, average_ms: float) -> float:
    """Return the milliseconds by which the averages of all layers extend the last backward.

    The average of a layer is in flight while backward of the layers below runs. Those of the first
    layer overlap with nothing.
    """
    return average_ms + (layers - 1) * max(average_ms - backward_ms, 0.0)
