"""Run one program on all ranks of a world in this process, untouched and simplified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphs import as_rank, trace
from lockstep import run_in_lockstep
from torch import Tensor, fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

import commpass
from commpass.policy import Policy

SLOW = commpass.ethernet(0.001)
"""A link on which bytes take time, and messages hardly any."""


@dataclass(frozen=True)
class Ranks:
    """Each rank's graph, the simplified graph, the results of both, and the ``plans``."""

    plain: list[fx.GraphModule]
    simple: list[fx.GraphModule]
    plans: list[commpass.Plan]
    expected: list[list[Tensor]]
    got: list[list[Tensor]]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(plain, simplified) of every result of every rank."""
        both = zip(self.expected, self.got, strict=True)
        return [pair for plain, simple in both for pair in zip(plain, simple, strict=True)]

    @property
    def rules(self) -> list[str]:
        """The applied rules, equal on all ranks."""
        applied = [[step.rule for step in plan.simplified] for plan in self.plans]
        assert all(rules == applied[0] for rules in applied), applied
        return applied[0]


def everywhere(
    program: Callable[[int], Callable[..., Any]],
    inputs: Sequence[Sequence[Tensor]],
    policy: Policy | None = None,
    profile: commpass.Profile = SLOW,
) -> Ranks:
    """Run ``program(rank)`` on ``inputs[rank]`` for each rank, over the group "0" of all ranks."""
    plain, simple, plans = [], [], []
    size = len(inputs)
    for rank, mine in enumerate(inputs):
        with as_rank(rank, size), preserve_node_meta():
            plain.append(trace(program(rank), *mine))
            simple.append(copy.deepcopy(plain[-1]))
            policy = policy or Policy()
            plans.append(commpass.rewrite(simple[-1], [], policy, profile=profile, strict=True))
    world = {"0": range(size)}
    results = [run_in_lockstep(graphs, inputs, world.__getitem__) for graphs in (plain, simple)]
    expected, got = ([tree_leaves(each) for each in result] for result in results)
    return Ranks(plain, simple, plans, expected, got)


def same(ranks: Ranks, exact: bool = True) -> bool:
    """Return whether both results are equal on all ranks: exactly, or except for the rounding of
    sums."""
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    close["equal_nan"] = True
    return all(a.dtype == b.dtype and torch.allclose(a, b, **close) for a, b in ranks.pairs)
