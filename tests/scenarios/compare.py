"""Compare one scenario under one policy on one rank with plain torch, and report deviations beyond
the tolerance."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

import commpass
from commpass.plan import Plan
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule
from scenarios import everything
from scenarios.scenario import Job, Results, Scenario

TOPK = Rule(codec="topk(density=0.5)", direction="backward", force=True)
POLICIES = {
    "off": PRESETS["off"],
    "lossless": PRESETS["lossless"],
    "balanced": PRESETS["balanced"],
    "int8": Policy(name="int8", rules=[Rule(codec="int8", force=True)]),
    "topk": Policy(name="topk", rules=[TOPK]),
}
OTHERS = {name: preset for name, preset in PRESETS.items() if name not in POLICIES}
"""The presets of scenarios that are marked with ``presets``."""
SLOW = commpass.ethernet(0.001)
"""A link on which compressing pays."""
LR = {"topk": 0.0}
"""Learning rates. With topk the weights stay constant, so that the gradients add up."""


@dataclass(frozen=True)
class Outcome:
    """The result of one rank: errors, the number of sites compressed by lossy codecs, digests."""

    wrong: list[str]
    compressed: int
    digests: dict[str, str]


def outcome(name: str, policy: str, inner: str) -> Outcome:
    scenario, lr = everything.BY_NAME[name], LR.get(policy, 0.2)
    plain = _plain(name, inner, lr)
    chosen = (POLICIES | OTHERS)[policy]
    chosen = replace(chosen, rules=(*scenario.rules, *chosen.rules))
    seen = len(commpass.plans())
    found = _run(scenario, commpass.backend(chosen, inner=inner, profile=SLOW), lr)
    plans = commpass.plans()[seen:]
    shared = [key for key in found if scenario.replicated and key.startswith(scenario.replicated)]
    wrong = [*_untold(scenario, plans), *_differences(scenario, policy, plain, found, plans)]
    compressed = sum(site.error > 0 for plan in plans for site in plan.compressed)
    return Outcome(wrong, compressed, {key: _digest(found[key]) for key in shared})


@cache
def _plain(name: str, inner: str, lr: float) -> Results:
    found = _run(everything.BY_NAME[name], inner, lr)
    return {key: value for key, value in found.items() if key != "residual"}


def _run(scenario: Scenario, backend: object, lr: float) -> Results:
    torch._dynamo.reset()
    gc.collect()
    commpass.reset_state()
    torch.manual_seed(0)
    return scenario.run(Job(backend, lr))


def _untold(scenario: Scenario, plans: list[Plan]) -> Iterator[str]:
    """Yield passes that failed."""
    for plan in plans:
        if plan.fallback and not scenario.differ:
            yield f"{plan.direction} graph {plan.graph} was left untouched: {plan.fallback}"
        for site in (each for each in plan.sites if each.failed):
            yield f"{plan.direction} graph {plan.graph}: {site.name} is {site.reason}"


def _differences(
    scenario: Scenario,
    policy: str,
    plain: Results,
    found: Results,
    plans: list[Plan],
) -> Iterator[str]:
    if plain.keys() != found.keys() - {"residual"}:
        yield f"other results: {sorted(plain.keys() ^ found.keys())}"
        return
    changed = [plan for plan in plans if plan.changed]
    errors = (site.error for plan in changed for site in plan.compressed)
    error = max(errors, default=0.0)
    codecs = scenario.growth * error
    for key, expected in plain.items():
        kind = key.partition("/")[0]
        if policy == "topk" and scenario.conserved and kind == "grad":
            continue
        lossy = kind != "exact" and (policy != "topk" or kind == "grad")
        if policy == "topk" and lossy:
            codecs = _held_back(key, error, plain)
        bound = scenario.rounding + (codecs if lossy else 0.0)
        bound = 0.0 if policy == "off" or not changed else bound
        if (apart := distance(found[key], expected)) > bound:
            yield f"{key} is {apart:.3g} apart, at most {bound:.3g}"
    if policy == "topk" and scenario.conserved:
        yield from _lost(plain, found)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return 0 for the same bits, else the 2-norm of the difference, relative to the expected
    tensor."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return float("inf")
    if _digest(found) == _digest(expected):
        return 0.0
    apart = (found.double() - expected.double()).norm().item()
    share = apart / max(expected.double().norm().item(), 1e-30)
    return share if share == share else float("inf")


def _held_back(key: str, error: float, plain: Results) -> float:
    """Return by how much error feedback may change a step's gradient, as a share of it.

    It holds back at most ``error / (1 - error)`` of the largest gradient so far (a geometric
    series), before the step and after it.
    """
    name = key.partition("/")[2].partition("/")[2]
    norms = [
        value.double().norm().item() for other, value in plain.items() if _is_grad(other, name)
    ]
    own = max(plain[key].double().norm().item(), 1e-30)
    return 2 * error / (1 - error) * max(norms) / own


def _is_grad(key: str, name: str) -> bool:
    return key.startswith("grad/") and key.partition("/")[2].partition("/")[2] == name


def _lost(plain: Results, found: Results) -> Iterator[str]:
    """Check that what was sent and what is held back add up to the gradients, by the norm of the
    difference."""
    kept: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(kept, found.get("residual", torch.zeros(1, dtype=torch.float64)))
    missing: dict[str, torch.Tensor] = {}
    for key, expected in plain.items():
        kind, _, rest = key.partition("/")
        if kind == "grad":
            name = rest.partition("/")[2]
            missing[name] = missing.get(name, 0) + expected.double() - found[key].double()
    whole = _norm(value for key, value in plain.items() if key.startswith("grad"))
    lacks = _norm(missing.values())
    held = torch.stack(kept).sum(0).norm().item()
    if held < 0.01 * whole:
        yield f"error feedback holds back {held:.3g} of {whole:.3g}: nothing was tried"
    if abs(lacks - held) > 1e-4 * whole:
        yield f"gradients lack {lacks:.6g}, error feedback holds {held:.6g}"


def _norm(parts: Iterable[torch.Tensor]) -> float:
    return torch.cat([part.double().reshape(-1) for part in parts]).norm().item()


def _digest(x: torch.Tensor) -> str:
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
