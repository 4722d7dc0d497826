"""Run all ranks' graphs in one process, with a simulated network between them.

Each graph runs until it must wait; collectives are executed between the runs. This replaces process
groups by an implementation with their true ranks, written from the definitions of the collectives.
What would hang or be undefined on real ranks is an error that names the place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx


class LockstepError(AssertionError):
    """Ranks wait for each other forever, or start collectives that do not match."""


@dataclass(frozen=True)
class Collective:
    """What one rank started on a group.

    It has the operator without its form, copies of its tensors at that time, and its settings by
    name of argument.
    """

    rank: int
    node: str
    name: str
    form: str
    sent: tuple[Tensor, ...]
    settings: dict[str, Any]
    into: tuple[Tensor, ...]

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in self.sent)
        said = {key: value for key, value in self.settings.items() if key != "group_name"}
        return f"rank {self.rank}: {self.name} of {shapes} {said or ''} ({self.node})"


@dataclass(frozen=True)
class Started:
    """Result ``position`` of the ``number``-th collective that a rank started on a group."""

    ranks: tuple[int, ...]
    group: str
    number: int
    position: int


@dataclass
class Network:
    """What was started on each group, by number and rank, and its results.

    ``exchange`` executes a collective.
    """

    exchange: Callable[[Sequence[Collective]], list[list[Tensor]]]
    started: dict[tuple[str, int], dict[int, Collective]] = field(default_factory=dict)
    arrived: dict[tuple[str, int], dict[int, list[Tensor]]] = field(default_factory=dict)
    count: dict[tuple[str, int], int] = field(default_factory=dict)

    def start(self, group: str, ranks: tuple[int, ...], collective: Collective) -> list[Started]:
        """Start a collective. The last rank to start it executes it."""
        rank = collective.rank
        if rank not in ranks:
            raise LockstepError(f"{collective}: group {group} has the ranks {list(ranks)}")
        number = self.count.get((group, rank), 0)
        self.count[group, rank] = number + 1
        together = self.started.setdefault((group, number), {})
        together[rank] = collective
        if len(together) == len(ranks):
            in_order = [together[each] for each in ranks]
            results = self.exchange(in_order)
            self.arrived[group, number] = dict(zip(ranks, results, strict=True))
            for one, result in zip(in_order, results, strict=True):
                for place, value in zip(one.into, result, strict=False):
                    place.copy_(value)
        return [Started(ranks, group, number, position) for position in range(len(collective.sent))]

    def missing(self, waited: Started) -> list[int]:
        together = self.started[waited.group, waited.number]
        return [rank for rank in waited.ranks if rank not in together]

    def of(self, waited: Started, rank: int) -> Tensor:
        return self.arrived[waited.group, waited.number][rank][waited.position]


def run_in_lockstep(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Tensor]],
    ranks_of: Callable[[str], Sequence[int]],
    exchange: Callable[[Sequence[Collective]], list[list[Tensor]]] | None = None,
) -> list[Any]:
    """Run each rank's graph on its inputs and return the results.

    ``graphs[r]`` and ``inputs[r]`` are those of global rank r. ``ranks_of(group name)`` are the
    global ranks of a group, in its order. Starting a collective does not block a rank; waiting
    does. ``exchange`` replaces ``carry_out``, which returns for each rank the results of one
    collective.

    Raise LockstepError if ranks would wait forever, or if a result is used before it was waited
    for. Raise it too if the ranks of a group start different kinds, reduce ops, dtypes or shapes in
    one turn.
    """
    network = Network(exchange or carry_out)
    running = {r: _steps(r, gm, inputs[r], network, ranks_of) for r, gm in enumerate(graphs)}
    waiting: dict[int, Started] = {}
    results: list[Any] = [None] * len(graphs)
    while running:
        ready = [r for r in running if r not in waiting or not network.missing(waiting[r])]
        if not ready:
            stuck = [_stuck(network, waiting[rank], rank) for rank in running]
            raise LockstepError("\n".join(["no rank can go on:", *stuck]))
        for rank in ready:
            try:
                waiting[rank] = next(running[rank])
            except StopIteration as end:
                results[rank] = end.value
                del running[rank]
    open_ends = [turn for turn, together in network.started.items() if turn not in network.arrived]
    if open_ends:
        some = [str(each) for turn in open_ends for each in network.started[turn].values()]
        raise LockstepError("started, but never by all ranks of the group:\n" + "\n".join(some))
    return results


def _stuck(network: Network, waited: Started, rank: int) -> str:
    mine = network.started[waited.group, waited.number][rank]
    missing = f"waits for ranks {network.missing(waited)} in turn {waited.number}"
    return f"  {mine} on group {waited.group} {missing}"


def _steps(
    rank: int,
    gm: fx.GraphModule,
    inputs: Sequence[Tensor],
    network: Network,
    ranks_of: Callable[[str], Sequence[int]],
) -> Generator[Started, None, Any]:
    """Run one rank: yield what it waits for each time that it must, and return the graph's
    result."""
    known: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(feed)
        elif node.op == "get_attr":
            known[node] = functools.reduce(getattr, node.target.split("."), gm)
        elif node.op == "output":
            return _taken(node, known)[0][0]
        elif node.op != "call_function":
            raise LockstepError(f"rank {rank}: {node.format_node()}: only operators are run")
        elif (parts := _collective(node.target)) is not None:
            known[node] = _start(rank, node, *parts, known, network, ranks_of)
        elif _name(node.target) in ("wait_tensor", "wait_tensors"):
            waited = fx.map_arg(node.args[0], known.__getitem__)
            several = isinstance(waited, list)
            values = []
            for each in waited if several else [waited]:
                if isinstance(each, Started) and network.missing(each):
                    yield each
                values.append(network.of(each, rank) if isinstance(each, Started) else each)
            known[node] = values if several else values[0]
        elif node.target is operator.getitem:
            known[node] = known[node.args[0]][node.args[1]]
        elif _name(node.target) == "sym_size" and isinstance(known[node.args[0]], Started):
            if network.missing(known[node.args[0]]):
                yield known[node.args[0]]
            known[node] = network.of(known[node.args[0]], rank).shape[node.args[1]]
        else:
            args, kwargs = _taken(node, known)
            known[node] = node.target(*args, **kwargs)
    raise LockstepError(f"rank {rank}: the graph has no output")


def _taken(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return a node's arguments as values."""

    def value(source: fx.Node) -> Any:
        if isinstance(known[source], Started):
            raise LockstepError(f"{node.name} takes {source.name}, which was not waited for")
        return known[source]

    return fx.map_arg((node.args, node.kwargs), value)


def _schema(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return getattr(target, "_schema", None)


def _name(target: Any) -> str:
    schema = _schema(target)
    return schema.name.partition("::")[2] if schema is not None else ""


COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
FORMS = ("_coalesced_", "_coalesced", "_out", "_", "")


def _collective(target: Any) -> tuple[str, str] | None:
    """Return an operator's name without its form, and its form, if it is a functional
    collective."""
    schema = _schema(target)
    if schema is None or schema.name.partition("::")[0] not in ("_c10d_functional", "_dtensor"):
        return None
    name = _name(target)
    found = ((base, form) for base in COLLECTIVES for form in FORMS if name == base + form)
    known = next(found, None)
    if known is None and not name.startswith("wait_tensor"):
        raise LockstepError(f"{schema.name} is not known here")
    return known


def _start(
    rank: int,
    node: fx.Node,
    name: str,
    form: str,
    known: dict[fx.Node, Any],
    network: Network,
    ranks_of: Callable[[str], Sequence[int]],
) -> Any:
    names = [argument.name for argument in _schema(node.target).arguments]
    args, kwargs = _taken(node, known)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first, out = given.pop(names[0]), given.pop("out", None)
    tensors = tuple(first) if isinstance(first, (list, tuple)) else (first,)
    group = given["group_name"]
    group = group if isinstance(group, str) else group.group_name
    into = tensors if form in ("_", "_coalesced_") else () if out is None else (out,)
    # Later writes must not change what was sent; results are contiguous.
    sent = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
    begun = Collective(rank, node.name, name, form, sent, given, into)
    started = network.start(group, tuple(ranks_of(group)), begun)
    return started if "coalesced" in form else started[0]


DIFFERENT = "ranks start different collectives in one turn"


def carry_out(together: Sequence[Collective]) -> list[list[Tensor]]:
    """Return for each rank of a group, in order, the results of one collective, one for each
    tensor."""
    like = together[0]
    for one in together:
        same = (one.name, one.form, len(one.sent)) == (like.name, like.form, len(like.sent))
        if not same or any(a.dtype != b.dtype for a, b in zip(one.sent, like.sent, strict=True)):
            raise LockstepError(f"{DIFFERENT}:\n  {like}\n  {one}")
    columns = [[one.sent[position] for one in together] for position in range(len(like.sent))]
    by_position = [_results(together, values) for values in columns]
    return [list(results) for results in zip(*by_position, strict=True)]


def _results(together: Sequence[Collective], values: list[Tensor]) -> list[Tensor]:
    like, ranks = together[0], len(together)
    if like.name == "all_to_all_single":
        sent = [one.settings["input_split_sizes"] for one in together]
        received = [one.settings["output_split_sizes"] for one in together]
        rests = [value.shape[1:] for value in values]
        for to, wanted in enumerate(received):
            coming = [sizes[to] for sizes in sent]
            numels = [n * rest.numel() for n, rest in zip(coming, rests, strict=True)]
            if [n * rests[to].numel() for n in wanted] != numels:
                said = f"waits for {list(wanted)} entries and is sent {coming}"
                raise LockstepError(f"{together[to]} {said}")
        # Entries may have no bytes on one rank, and not exist on another.
        parts = [value.split(list(sizes)) for value, sizes in zip(values, sent, strict=True)]
        flat = [torch.cat([part[to].flatten() for part in parts]) for to in range(ranks)]
        return [
            x.reshape(sum(wanted), *rest)
            for x, wanted, rest in zip(flat, received, rests, strict=True)
        ]
    for one, value in zip(together, values, strict=True):
        if value.shape != values[0].shape or _agreed(one) != _agreed(like):
            raise LockstepError(f"{DIFFERENT}:\n  {like}\n  {one}")
    if like.name == "all_gather_into_tensor":
        return [torch.cat(values) for _ in values]
    if like.name == "broadcast":
        return [values[like.settings["src"]].clone() for _ in values]
    total = _reduced(like.settings["reduce_op"], values)
    if like.name == "all_reduce":
        return [total.clone() for _ in values]
    if total.shape[0] % ranks:
        raise LockstepError(f"{like}: {total.shape[0]} rows do not divide among {ranks} ranks")
    return [part.clone() for part in total.tensor_split(ranks)]


def _agreed(one: Collective) -> list[Any]:
    return [one.settings.get(key) for key in ("reduce_op", "src", "group_size")]


def _reduced(op: str, values: list[Tensor]) -> Tensor:
    """Reduce in the order of the ranks, in the dtype of the values."""
    pairwise = {"sum": torch.add, "avg": torch.add, "product": torch.mul}
    pairwise |= {"max": torch.maximum, "min": torch.minimum}
    total = functools.reduce(pairwise[op.lower()], values)
    return total / len(values) if op.lower() == "avg" else total
