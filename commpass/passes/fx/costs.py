"""The cost of a graph's nodes: operations and bytes of computation, bytes of exchanges."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from commpass import groups
from commpass.costmodel import HOST, Prices, Profile, Task, overlapped_kernel, prices
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_alias
from commpass.passes.fx.fusion import Traffic, traffic
from commpass.passes.fx.marks import CODED, MARK, SHARE, US
from commpass.passes.fx.ops import ALLOCATORS, flops_formula, is_matmul
from commpass.passes.fx.parse import Call, describe_group
from commpass.plan.stage import ALL, Stage, all_to_all, plain_exchange


@dataclasses.dataclass(frozen=True)
class NodeTimes:
    """The times of the nodes of a graph. ``fused`` is the traffic of those that Inductor fuses on a
    GPU; empty on a CPU."""

    profile: Profile
    fused: Mapping[fx.Node, Traffic]

    @classmethod
    def of(cls, graph: fx.Graph, profile: Profile) -> NodeTimes:
        return cls(profile, traffic(graph) if profile.kernels.fuses else {})

    def us(self, node: fx.Node) -> float:
        """Return the microseconds of a node's computation."""
        return compute(node, self.profile, self.fused.get(node)).us

    def kernels(self, node: fx.Node) -> int:
        """Return the kernels that a node starts whose launches count."""
        return int(is_matmul(node)) or (self.fused[node].kernels if node in self.fused else 0)


def compute(node: fx.Node, profile: Profile, fused: Traffic | None = None) -> Task:
    """Return the cost of a node's computation. ``fused`` is its traffic if it is fused on a GPU.

    For encodes and decodes, their codec rates. Otherwise the longer of two times: that of its
    operations, and that of its memory traffic. A matmul, a convolution or attention reads its
    inputs and writes its result. On a GPU, a fused kernel reads its inputs and writes its results
    (``fusion``). On a CPU, its instructions take longer than its memory traffic: each of its nodes
    counts as if it wrote its result and read as much. Views and items of results cost nothing.
    Nodes beside an encode or decode, such as sums of decoded values, cost nothing either: they are
    part of those kernels and their rates.
    """
    if US in node.meta:
        return Task(HOST, node.meta[US])
    if CODED in node.meta:
        return Task(HOST, sum(profile.kernels.time_us(*work) for work in node.meta[CODED]))
    if (
        node.op != "call_function"
        or is_alias(node)
        or node.target is getitem
        or node.target in ALLOCATORS
        or MARK in node.meta
    ):
        return Task(HOST, 0.0)
    if fused is not None:
        launches_us = fused.kernels * profile.kernels.launch_us
        return Task(HOST, profile.kernels.compute_us(0.0, fused.nbytes) + launches_us)
    count = operations(node)
    written = meta.total_nbytes(node.meta.get("val"))
    read = meta.input_nbytes(node) if count else written
    return Task(HOST, profile.kernels.compute_us(count, read + written))


def in_separate_stream(node: fx.Node) -> Task:
    """Return the cost of a single kernel that is started in a separate stream."""
    return overlapped_kernel(node.meta[US], node.meta[SHARE])


def operations(node: fx.Node) -> int:
    """Return the operations of a matmul, a convolution or attention; 0 for other nodes."""
    formula = flops_formula(node.target)
    if formula is None:
        return 0
    held: Any = node.meta.get("val")
    takes_tensors = getattr(formula, "_get_raw", False)
    given: Any = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    args, kwargs = given
    if takes_tensors or kwargs or not all(meta.is_fixed(each) for each in (*args, held)):
        return meta.hint(formula(*args, **kwargs, out_val=held)) or 0
    return _counted(formula, tuple(each.shape for each in args), held.shape)


@functools.lru_cache(maxsize=4096)
def _counted(
    formula: Callable[..., int], shapes: tuple[torch.Size, ...], result: torch.Size
) -> int:
    """Return the operations for inputs and a result of fixed sizes. Layers repeat their sizes."""
    return int(formula(*shapes, out_val=result))


PricesOf = Callable[[str, int], Prices]
"""Returns the prices in a group, from its name and size."""


def exchange(call: Call, prices_of: PricesOf) -> Task:
    """Return the cost of an exchange on the link of its group."""
    name, size = describe_group(call)
    return prices_of(name, size).task(_stage(call, name, sent_nbytes(call)))


def sent_nbytes(call: Call) -> int:
    """Return the bytes that a rank hands to an exchange."""
    return meta.total_nbytes([each.meta.get("val") for each in call.inputs])


def _stage(call: Call, group: str, nbytes: int) -> Stage:
    """Return an exchange of a graph as a stage.

    In an exchange of the program, unlike in an algorithm, the destinations may differ between
    ranks. Its peers are therefore assumed to be any ranks.
    """
    splits = call.splits
    if splits is None or not all(isinstance(rows, int) for some in splits for rows in some):
        return plain_exchange(call.kind, nbytes, by_messages=call.by_messages)
    rank = groups.rank_in(group) or 0
    sent, received = splits
    found = all_to_all(nbytes, sent, received, rank, by_messages=call.by_messages)
    return found if MARK in call.node.meta else dataclasses.replace(found, reach=ALL)


def prices_of(profile: Profile) -> PricesOf:
    """Return a function for the prices of groups, with a cache."""

    @functools.cache
    def of(name: str, size: int) -> Prices:
        return prices(profile, size, groups.labels_of(name), groups.ranks_of(name))

    return of
