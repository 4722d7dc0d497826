"""The cost of a graph's nodes: operations and bytes of computation, bytes of exchanges."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from commpass import groups
from commpass.costmodel import HOST, Prices, Profile, Task, prices
from commpass.passes.fx import meta
from commpass.passes.fx.marks import CODED, MARK
from commpass.passes.fx.parse import Call, describe_group
from commpass.plan.kinds import KERNEL
from commpass.plan.stage import ALL, Stage, all_to_all

UNWRITTEN = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
"""Operators that allocate memory without writing to it."""
OUR_KERNEL = f"commpass::{KERNEL}"
ATTENTION = "aten::_scaled_dot_product"


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is worth overlapping with an exchange and stays a separate call when Inductor
    fuses.

    True for a matmul, a convolution, attention, a kernel of commpass, and a Triton kernel.
    """
    return is_matmul(node) or _name(node) == OUR_KERNEL or node.target in triton_calls()


@functools.cache
def triton_calls() -> tuple[Any, ...]:
    """Return the operators that call Triton kernels in a graph, before and after Inductor allocates
    their outputs.

    torch defines them on first access.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    return wrap.triton_kernel_wrapper_functional, wrap.triton_kernel_wrapper_mutation


def is_matmul(node: fx.Node) -> bool:
    """Whether a node is a matmul, a convolution or attention."""
    return node.op == "call_function" and _formula(node.target) is not None


def compute(node: fx.Node, profile: Profile) -> Task:
    """Return the cost of a node's computation.

    For encodes and decodes, their codec rates. Otherwise the longer of two times: that of its
    operations, and that of writing its result and reading as much. Views cost nothing. Nodes beside
    an encode or decode, such as sums of decoded values, cost nothing either: they are part of those
    kernels and their rates.
    """
    if CODED in node.meta:
        return Task(HOST, sum(profile.kernels.us(*work) for work in node.meta[CODED]))
    if (
        node.op != "call_function"
        or is_alias(node)
        or node.target in UNWRITTEN
        or MARK in node.meta
    ):
        return Task(HOST, 0.0)
    held = node.meta.get("val")
    moved = sum(max(meta.nbytes(fake), 0) for fake in tensors(held))
    formula = _formula(node.target)
    operations = 0
    if formula is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        operations = meta.hint(formula(*args, **kwargs, out_val=held)) or 0
    return Task(HOST, profile.kernels.compute_us(operations, 2 * moved))


PricesOf = Callable[[str, int], Prices]
"""Returns the prices in a group, from its name and size."""


def exchange(call: Call, prices_of: PricesOf) -> Task:
    """Return the cost of an exchange on the link of its group."""
    name, size = describe_group(call)
    fakes = [fake for each in call.inputs for fake in tensors(each.meta.get("val"))]
    nbytes = sum(max(meta.nbytes(fake), 0) for fake in fakes)
    return prices_of(name, size).task(_stage(call, name, nbytes))


def _stage(call: Call, group: str, nbytes: int) -> Stage:
    """Return an exchange of a graph as a stage.

    In an exchange of the program, unlike in an algorithm, the destinations may differ between
    ranks. Its peers are therefore assumed to be any ranks.
    """
    splits = call.splits
    if splits is None or not all(isinstance(rows, int) for some in splits for rows in some):
        return Stage(
            role="exchange",
            kind=call.kind,
            nbytes=nbytes,
            leaving=nbytes,
            by_messages=call.by_messages,
        )
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


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a fake value: one, or several in lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def is_alias(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of another tensor, without changing it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        given.alias_info is not None and not given.alias_info.is_write for given in schema.returns
    )


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


@functools.cache
def _formula(target: Any) -> Callable[..., Any] | None:
    """Return the function that counts the operations of an operator, or None if they are
    negligible."""
    packet = getattr(target, "overloadpacket", None)
    if packet in flop_registry:
        return flop_registry[packet]
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.name.startswith(ATTENTION):  # torch has no count for CPUs
        return _attention_backward if "backward" in schema.name else _attention
    return None


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Five products instead of two: the first one again, and two for the gradients of each
    product."""
    return sdpa_flop_count(query.shape, key.shape, value.shape) * 5 // 2
