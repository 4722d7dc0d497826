"""What a node computes, by its operator alone: names, arguments, and sets of operators.

Sets that answer similar questions differently stand side by side, each with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Size, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from commpass.passes.fx.fakes import fake_of
from commpass.plan.kinds import KERNEL
from commpass.utils.by_identity import cached_by_identity

aten, functional = torch.ops.aten, torch.ops._c10d_functional
convert = torch.ops.prims.convert_element_type.default
PLAIN = ("aten", "prims")
"""The namespaces of torch's own operators. Others may be random, read state, or send."""

# --- names and arguments --------------------------------------------------------------------------


def full_name(node: fx.Node) -> str:
    """Return the name of an operator with its namespace and without its overload; "" if it has
    none."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def name_of(node: fx.Node) -> str:
    """Return the name of an operator, without the suffix of in-place forms; "" for functions."""
    return opname(node).rstrip("_")


def opname(node: fx.Node) -> str:
    """Return the name of an operator without its namespace; "" for functions."""
    return str(getattr(node.target, "_opname", ""))


def arguments(node: fx.Node, overload: Any = None) -> dict[str, Any]:
    """Return the arguments of a call by name. ``overload`` is the operator, if the target is a
    packet."""
    return dict(zip(_names(overload or node.target), node.args, strict=False)) | node.kwargs


@cached_by_identity
def _names(overload: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload._schema.arguments)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the user of a node, if it has exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def reached(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return some nodes and all that repeated steps from them reach."""
    found = set(nodes)
    left = list(found)
    while left:
        new = [each for each in step(left.pop()) if each not in found]
        found.update(new)
        left += new
    return found


def frozen(value: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """Return an argument in hashable form, with ``of_node`` in the place of nodes. Numbers of
    different types differ, and so do 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return ("value", of_node(value))
    if isinstance(value, (list, tuple)):
        return tuple(frozen(each, of_node) for each in value)
    if isinstance(value, dict):
        return tuple((name, frozen(each, of_node)) for name, each in value.items())
    if isinstance(value, slice):
        return ("slice", frozen([value.start, value.stop, value.step], of_node))
    if isinstance(value, (bool, int, float, complex)):
        return (type(value).__name__, repr(value))
    return value


# --- views, casts, copies and buffers -------------------------------------------------------------

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""Operators that only change the shape."""
VIEWS = (
    *RESHAPES,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)
"""Operators that move values, and whose dimensions can be followed from the input to the result.
Others share memory too (``aliasing.is_alias``), such as slices."""
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
SEE_THROUGH = (
    *("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze"),
    *("expand", "slice", "select", "clone", "alias", "detach", "contiguous", "_to_copy", "to"),
    *("convert_element_type", "getitem", "split", "split_with_sizes"),
    *("wait_tensor", "wait_tensors"),
)
"""Names of operators that change no value except its dtype, in any form of graph."""
UNMIXED = (
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "clone", "alias"),
    *("detach", "_to_copy", "convert_element_type"),
)
"""Those of them that keep all values in order, perhaps repeated: no parts, and no permutation."""
CASTS = (convert, aten._to_copy.default)
PLAIN_LAYOUTS = (None, torch.contiguous_format, torch.preserve_format)
MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
SCALINGS = (*MULTIPLICATIONS, *DIVISIONS, aten.neg.default)
ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
EMPTY = aten.empty.memory_format
ALLOCATORS = (EMPTY, aten.empty_strided.default, aten.new_empty.default)
"""Operators that allocate memory without writing to it."""


def moves_values(node: fx.Node) -> bool:
    """Whether a node is one of ``VIEWS``, whether its result shares memory or not."""
    return node.target in VIEWS


def is_cast(node: fx.Node) -> bool:
    """Whether a node changes only the dtype of values, on one device."""
    return (
        node.target in CASTS
        and fake_of(node).device == fake_of(node.args[0]).device  # type: ignore[arg-type]
        and node.kwargs.get("memory_format") in PLAIN_LAYOUTS
    )


def is_float_cast(node: fx.Node) -> bool:
    """Whether a node casts to a float dtype, and names neither a device nor a layout. A kernel can
    compute such a cast on rows."""
    if node.target not in CASTS:
        return False
    given = {key for key, value in node.kwargs.items() if value is not None}
    return given <= {"dtype"} and fake_of(node).is_floating_point()


def is_copy(node: fx.Node) -> bool:
    """Whether a node is a clone in a layout that exists for any number of dimensions. Others, such
    as channels_last, are no links of chains."""
    return node.target is aten.clone.default and node.kwargs.get("memory_format") in PLAIN_LAYOUTS


# --- matmuls --------------------------------------------------------------------------------------

ROW_MATMULS = (aten.mm.default, aten.addmm.default)
"""The matmuls whose rows are the entries of the first dimension."""
MATMUL_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm", "_int_mm", "convolution"),
    *("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2"),
)
"""Names of all matmuls, whether torch has a formula for their operations or not. Reports and
decisions by rule use them, so they depend on no torch version."""


def is_matmul(node: fx.Node) -> bool:
    """Whether a node is a matmul, a convolution or attention, with a known number of operations."""
    return node.op == "call_function" and flops_formula(node.target) is not None


OWN_KERNELS = {
    f"commpass::{name}"
    for name in (
        *(KERNEL, "exponent_encode", "exponent_decode"),
        *("entropy_encode", "entropy_decode"),
    )
}
"""The operators of commpass that run kernels which encode or decode."""


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is worth overlapping with an exchange and stays a separate call when Inductor
    fuses.

    True for a matmul, a convolution, attention, a kernel of commpass, and a Triton kernel.
    """
    return is_matmul(node) or full_name(node) in OWN_KERNELS or node.target in triton_calls()


def may_compute_much(node: fx.Node) -> bool:
    """Whether a node is a matmul, a convolution or an attention by its name, or a sub-graph that
    may contain one. All ranks must find the same."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    name = opname(node)
    return name in MATMUL_NAMES or "convolution" in name or "attention" in name


@functools.cache
def triton_calls() -> tuple[Any, ...]:
    """Return the operators that call Triton kernels in a graph, before and after Inductor allocates
    their outputs.

    torch defines them on first access.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    return wrap.triton_kernel_wrapper_functional, wrap.triton_kernel_wrapper_mutation


@cached_by_identity
def flops_formula(target: Any) -> Callable[..., Any] | None:
    """Return the function that counts the operations of an operator, or None if they are
    negligible."""
    packet = getattr(target, "overloadpacket", None)
    if packet in flop_registry:
        return flop_registry[packet]
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    if schema.name in PRODUCTS:
        return _product
    if schema.name.startswith(ATTENTION):  # torch has no count for CPUs
        return _attention_backward if "backward" in schema.name else _attention
    return None


ATTENTION = "aten::_scaled_dot_product"
PRODUCTS = {
    f"aten::{name}"
    for name in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2")
}
"""Matmuls that torch has no count for."""


@shape_wrapper
def _product(a: Size, b: Size, *_: Any, **__: Any) -> int:
    """The operations of a matmul, or of a grouped one, for any offsets: as if the groups contained
    all rows of ``a [m, k]``, all columns of ``b [k, n]``, or all terms of the sums of both."""
    batches = b[0] if len(a) == len(b) == 3 else 1
    return 2 * batches * a[-2] * a[-1] * b[-1]


@shape_wrapper
def _attention(query: Size, key: Size, value: Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


@shape_wrapper
def _attention_backward(_: Size, query: Size, key: Size, value: Size, *__: Any, **___: Any) -> int:
    """Five products instead of two: the first one again, and two for the gradients of each
    product."""
    return sdpa_flop_count(query, key, value) * 5 // 2


# --- purity ---------------------------------------------------------------------------------------


def is_functional(target: Any) -> bool:
    """Whether a target is an operator that writes none of its arguments."""
    return isinstance(target, OpOverload) and not target._schema.is_mutable


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_pointwise(target: Any) -> bool:
    """Whether an operator computes each value from those at the same place of its inputs alone."""
    return (
        torch.Tag.pointwise in getattr(target, "tags", ())
        and not is_random(target)
        and not target._schema.is_mutable
    )


@cached_by_identity
def is_repeatable(target: Any) -> bool:
    """Whether an operator gives the same bits for the same inputs. Uninitialized values differ."""
    if not is_functional(target) or target.namespace not in PLAIN or "empty" in target._opname:
        return False
    bitwise = getattr(torch.Tag, "nondeterministic_bitwise", None)
    return not is_random(target) and bitwise not in target.tags


def computes_from_inputs(target: Any) -> bool:
    """Whether an operator's result depends on its inputs alone, perhaps with other bits each time.
    Operators of any namespace count, except torch's collectives."""
    return (
        is_functional(target) and not is_random(target) and not target.namespace.startswith("_c10d")
    )
