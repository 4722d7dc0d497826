"""Runs: sequences of a graph's nodes that one kernel can compute, as the steps of a chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from commpass.codecs import operators
from commpass.lowering.chain import (
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Step,
    Sum,
)
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_view
from commpass.passes.fx.ops import DIVISIONS, RESHAPES, is_float_cast, is_functional, only_user

ops = operators.ops
BEFORE_ENCODE = (Cast, Enter, Divide)
AFTER_DECODE = (Sum, Leave, *BEFORE_ENCODE, Encode)


@dataclass(frozen=True)
class Run:
    """Nodes of a graph and their steps; the last node is the result.

    ``others`` are additional inputs of later steps. ``further`` are the nodes whose values are the
    chain's further results, in order. No other value inside is used outside.
    """

    nodes: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    others: tuple[fx.Node, ...] = ()
    further: tuple[fx.Node, ...] = ()

    @property
    def source(self) -> fx.Node:
        """The input of the first node."""
        return self.nodes[0].all_input_nodes[0]

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.source.meta["val"].dtype, self.steps)

    @property
    def coded(self) -> fx.Node:
        """The first codec operator."""
        return next(n for n in self.nodes if n.target in operators.IMPLEMENTATIONS)

    @property
    def numel(self) -> Any:
        """The number of values in a row."""
        return _numel(self.coded)

    @property
    def place(self) -> fx.Node:
        """The node before which the kernel is inserted: the last one, or if other nodes may use
        further results earlier, the first one before which all inputs exist."""
        if not self.further:
            return self.nodes[-1]
        return max((self.source, *self.others)).next

    def is_computable(self) -> bool:
        """Whether all inputs can exist before the kernel, and all users of further results come
        after it."""
        inside, place = {*self.nodes}, self.place
        if any(other in inside for other in self.others):
            return False
        users = (user for node in self.further for user in node.users if user not in inside)
        return not any(user < place for user in users)


def runs(nodes: Sequence[fx.Node]) -> Iterator[Run]:
    """Yield the maximal runs of a site's nodes, in graph order.

    A run starts at a decode, or ends at an encode that is in no such run.
    """
    own, used = set(nodes), set[fx.Node]()
    for node in nodes:
        if node in used or node.target not in (ops.decode.default, ops.encode.default):
            continue
        run = deque([node])
        if node.target is ops.encode.default:
            while (source := run[0].all_input_nodes[0]) in own and only_user(source) is run[0]:
                if not isinstance(step_of(source), BEFORE_ENCODE):
                    break
                run.appendleft(source)
        while run[-1].target is not ops.encode.default:
            user = only_user(run[-1])
            if user is None or user not in own or not isinstance(step_of(user), AFTER_DECODE):
                break
            run.append(user)
        used.update(run)
        steps = (step for each in run if (step := step_of(each)) is not None)
        yield Run(tuple(run), tuple(steps))


def step_of(node: fx.Node) -> Step | None:
    """Return a codec operator or a conversion beside one as a step of a chain, or None."""
    if node.target is ops.decode.default:
        return Decode(operators.lookup(str(node.args[1])), node.args[3])  # type: ignore[arg-type]
    if node.target is ops.encode.default:
        salt: Any = node.args[2] if len(node.args) > 2 else ()
        return Encode(operators.lookup(str(node.args[1])).salted(*salt))
    if node.target is ops.sum_rows.default:
        rows = node.all_input_nodes[0].meta["val"].shape[0]
        return Sum(rows) if isinstance(rows, int) else None
    if node.target is ops.enter.default:
        return Enter(operators.lookup(str(node.args[1])))
    if node.target is ops.leave.default:
        return Leave(operators.lookup(str(node.args[1])))
    if node.target in DIVISIONS and isinstance(node.args[1], (int, float)):
        return Divide(float(node.args[1]))
    if is_float_cast(node):
        return Cast(node.meta["val"].dtype)
    return None


def is_reshape(node: fx.Node) -> bool:
    """Whether a node reshapes another without changing the order of its values. Operators in
    place give the memory of their input too."""
    if not is_functional(node.target) or not (is_view(node) or node.target in RESHAPES):
        return False
    if not meta.is_fixed(node.meta["val"]):
        return False
    own, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return bool(own.is_contiguous() and source.is_contiguous() and own.numel() == source.numel())


def _numel(node: fx.Node) -> Any:
    """Return the number of values in a row of a codec operator's input or output."""
    if node.target is ops.decode.default:
        return node.args[2]
    return node.all_input_nodes[0].meta["val"].shape[1]
