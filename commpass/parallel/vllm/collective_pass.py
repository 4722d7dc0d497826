"""The pass for the slot of user passes in vLLM.

vLLM compiles its models with Inductor, and adds its own passes at Inductor's post-grad slot.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from commpass.costmodel import Profile
from commpass.costmodel.files import digest as digest_of
from commpass.distributed.agreed_network import agreed_network
from commpass.distributed.environment import policy_here
from commpass.distributed.integration import Integration
from commpass.distributed.machine import profile_here
from commpass.distributed.plan_store import publish_hello
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import CommpassError, PolicyError
from commpass.groups import ready
from commpass.parallel.comparison import (
    compare_before_sending,
    described,
    log_on_first_rank,
    summary,
)
from commpass.parallel.vllm import branches
from commpass.parallel.vllm.branches import Branch
from commpass.parallel.vllm.operators import (
    Groups,
    collectives_in_shared_memory,
    group_of_vllm,
    to_functional,
    to_vllm,
)
from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase
from commpass.passes.fx.parse import parse
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.standalone import rewrite
from commpass.utils.printable import plural

log = logging.getLogger("commpass")

TOKENS = (1, 512)
"""The numbers of tokens for which decisions are made, unless the caller says otherwise: a step that
decodes for one request, and a prompt."""


@functools.cache
def _passes_of_vllm() -> ModuleType | None:
    for place in ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError:
            continue
    return None


def _base() -> Any:
    """Return vLLM's base class of passes, which it requires; torch's if there is no vLLM."""
    found = _passes_of_vllm()
    return found.InductorPass if found is not None else CustomGraphPass


class CollectivePass(Integration, _base()):  # type: ignore[misc]
    """A pass for vLLM's slot (``SLOT``) that compresses the collectives of each graph.

    policy, profile, strict: those of ``commpass.backend``. With ``strict`` a pass raises if a graph
    would otherwise be compiled untouched with a warning. groups: the process group, or its name in
    torch, for a vLLM group name such as ``"tp:0"``. If it is None, vLLM's own registry is used. It
    must be importable if vLLM starts processes. tokens: the numbers of tokens for which decisions
    are made. vLLM compiles a graph for each of its ranges of token counts. Of the numbers in the
    range the largest counts, and the nearest if there is none. The decisions hold for the range. If
    vLLM compiles a single graph, its collectives have a branch for each number whose decisions
    differ.

    Policy and profile are part of the pass's name in Inductor's cache and vLLM's. The ranks compare
    what they will send when a graph runs for the first time, whether it was compiled or comes from
    a cache; it raises PlanMismatch if they differ. Raise PolicyError for an unknown policy, or
    fewer tokens than one.
    """

    call = "CollectivePass"
    policy: Policy

    @publishing_refusal
    def __init__(
        self,
        policy: str | Path | Policy = "lossless",
        *,
        profile: str | Path | Profile | None = None,
        groups: Groups | None = None,
        tokens: int | Sequence[int] = TOKENS,
        strict: bool = False,
    ):
        numbers = _numbers(tokens)
        super().__init__(policy=policy_here(policy))
        self.tokens = numbers
        self.profile, self._plans = profile_here(profile), list[Plan]()
        self.groups, self.strict = groups or group_of_vllm, strict
        publish_hello()

    @property
    def plans(self) -> list[Plan]:
        """The plans of the graphs that vLLM compiled in this process, in order."""
        return list(self._plans)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place. If that fails it is unchanged."""
        log_as_vllm_does()
        before, has_branches = copy.deepcopy(graph), False
        plan, sizes, why = None, {}, None
        try:
            to_functional(graph, self.groups)
            has_branches = self._has_branches(graph)
            if not has_branches:
                sizes = sizes_for(graph, nearest_in(range_of_vllm(), self.tokens))
                plan = self._rewritten(graph, sizes)
                self._plans.append(plan)
                why = plan.fallback
        except Exception as error:
            if self.strict:
                raise
            has_branches, why = False, f"{type(error).__name__}: {error}"
        if why:
            log.warning("a graph of vLLM's compiled untouched: %s", why)
            _refill(graph, before)
            with contextlib.suppress(Exception):
                to_functional(graph, self.groups)
        if self.policy.name != "off":
            _log_shared_memory(graph)
            if not has_branches:
                self._compare(graph, plan, why, sizes)
        to_vllm(graph)
        graph.lint()

    def _has_branches(self, graph: fx.Graph) -> bool:
        """Where vLLM compiles a single graph, give its collectives a branch for each number of
        tokens, if the decisions differ. Return whether they have branches now."""
        if range_of_vllm() is not None or len(self.tokens) == 1 or self.policy.name == "off":
            return False
        starts = branches.starts_of(graph) or []
        sizes = {tokens: sizes_for(graph, tokens) for tokens in self.tokens}
        found = [[self._branch(start, *each) for each in sizes.items()] for start in starts]
        if all(len(branches.distinct(its)) == 1 for its in found):
            return False
        if any(each.plan.fallback for its in found for each in its):
            return False
        plans = [branches.joint_plan(its) for its in zip(*found, strict=True)]
        words = (summary(*each) for each in zip(plans, repeat(self.policy), sizes.values()))
        limits = f" for tokens={list(self.tokens)}"
        compare_before_sending(graph, described(plans, "; ".join(words), limits))
        for start, its in zip(starts, found, strict=True):
            branches.insert(graph, start, branches.distinct(its))
        self._plans += plans
        return True

    def _branch(self, start: fx.Node, tokens: int, sizes: Mapping[Any, int]) -> Branch:
        """Return a collective as a graph of its own, with the decisions for a number of tokens."""
        module = branches.graph_of(start)
        plan = self._rewritten(module.graph, sizes)
        to_vllm(module.graph)
        return Branch(tokens, module, plan)

    def _compare(
        self, graph: fx.Graph, plan: Plan | None, why: str | None, sizes: Mapping[Any, int]
    ) -> None:
        """Let the ranks compare what they send in a graph, also if this one sends no codes."""
        graphs = self._graphs()
        if plan is None:
            words = f"policy {self.policy.name!r}: untouched, {why}"
            compare_before_sending(graph, described([], words, graphs))
        elif plan.sites:
            words = summary(plan, self.policy, sizes)
            if not compare_before_sending(graph, described([plan], words, graphs)):
                log_on_first_rank(words)

    def _graphs(self) -> str:
        """Return for which steps the graph is that vLLM compiles now; "" if it compiles one.

        Ranks with other ranges would run other graphs for a step, one of which they have compared.
        """
        counts = range_of_vllm()
        if counts is None:
            return ""
        return f" for steps of {counts[0]} tokens or more, of tokens={list(self.tokens)}"

    def _rewritten(self, graph: fx.Graph, sizes: Mapping[Any, int]) -> Plan:
        module = graph.owning_module
        if module is None:
            raise CommpassError("a graph without a module cannot be rewritten")
        try:
            with meta.assuming(sizes):
                return rewrite(
                    module,
                    (),
                    self.policy,
                    profile=self.profile,
                    strict=self.strict,
                    inductor=True,
                )
        finally:
            if module.graph is not graph:  # a copy, if a pass failed; vLLM keeps using this one
                module.graph = graph

    def uuid(self) -> str:
        """Return a key of all that determines the resulting graph.

        The rank is part of it: ranks may share caches, and have the same graph before the pass but
        not after it.
        """
        profile = digest_of(self.profile) if self.profile is not None else agreed_network()
        groups = f"{self.groups.__module__}.{self.groups.__qualname__}"
        rank = (dist.get_rank(), dist.get_world_size()) if ready() else None
        tokens = [*self.tokens, nearest_in(range_of_vllm(), self.tokens)]
        options = [msgspec.to_builtins(self.policy), profile, groups, tokens, self.strict]
        return msgspec.json.encode([*options, rank, _sources()]).hex()


@functools.cache
def _sources() -> str:
    root = Path(__file__).parent.parent.parent
    return get_hash_for_files(tuple(map(str, sorted(root.rglob("*.py"))))).hex()


def log_as_vllm_does() -> None:
    """Print what commpass logs where vLLM prints its own lines, unless the program has set that
    up."""
    theirs = logging.getLogger("vllm")
    if not log.handlers and theirs.handlers:
        log.handlers, log.propagate = list(theirs.handlers), False
        if log.level == logging.NOTSET:
            log.setLevel(theirs.level)


def _numbers(tokens: int | Sequence[int]) -> tuple[int, ...]:
    """Return numbers of tokens in ascending order; raise PolicyError if they are none."""
    numbers = [tokens] if isinstance(tokens, int) else tokens
    good = isinstance(numbers, Sequence) and all(type(each) is int and each > 0 for each in numbers)
    if not good or not numbers:
        raise PolicyError(
            f"tokens={tokens!r}: must be a number of tokens, such as {TOKENS[-1]}, or a list of"
            f" such numbers, such as {list(TOKENS)}"
        )
    return tuple(sorted(set(numbers)))


def range_of_vllm() -> tuple[int, int] | None:
    """Return the first and the last token count of the graph that vLLM compiles now; None if it
    compiles none."""
    found = getattr(_passes_of_vllm(), "_pass_context", None)
    return (found.compile_range.start, found.compile_range.end) if found is not None else None


def nearest_in(counts: tuple[int, int] | None, tokens: Sequence[int]) -> int:
    """Return the number of tokens in a range of counts that is nearest to one of ``tokens``, by
    their ratio; the largest of those in the range."""
    first, last = counts or (1, max(tokens))

    def moved(number: int) -> int:
        return min(max(number, first), last)

    return moved(min(sorted(tokens, reverse=True), key=lambda n: abs(math.log(moved(n) / n))))


def sizes_for(graph: fx.Graph, tokens: int) -> dict[Any, int]:
    """Return the symbol for the number of tokens, and the number for which decisions are made.

    It is the symbolic first dimension of what is exchanged, if there is exactly one. The number is
    at most that with which vLLM traced the graph.
    """
    traced: dict[Any, int] = {}
    for node in graph.nodes:
        call = parse(node)
        values = [meta.tensor(each) for each in node.all_input_nodes] if call is not None else []
        for rows in (value.shape[0] for value in values if value is not None and value.dim()):
            if isinstance(rows, torch.SymInt) and rows.node.expr.is_Symbol:
                traced[rows.node.expr] = meta.hint(rows) or tokens
    return (
        {symbol: min(tokens, most) for symbol, most in traced.items()} if len(traced) == 1 else {}
    )


def _log_shared_memory(graph: fx.Graph) -> None:
    if inside := collectives_in_shared_memory(graph):
        are = "it is" if inside == 1 else "they are"
        log_on_first_rank(
            f"{plural(inside, 'collective')} of vLLM's through the shared memory of this host:"
            f" left as {are}, since nothing is sent over a network"
        )


def _refill(graph: fx.Graph, source: fx.Graph) -> None:
    """Give a graph the nodes of another, since other objects refer to the graph itself."""
    for node in reversed(list(graph.nodes)):
        erase(node)
    *_, output = source.nodes
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(source, copies)
    graph.output(result).meta = dict(output.meta)
