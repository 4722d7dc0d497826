"""Random small graphs with collectives, simplified and plain, run for all ranks of a simulated
group in one process."""

from __future__ import annotations

import copy
import operator
import random
from typing import Any

import pytest
import torch
from graphs import ops
from tiers import rarely
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import commpass
from commpass.passes.discover import discover
from commpass.passes.fx.parse import parse
from commpass.passes.simplify import simplify
from commpass.passes.simplify.editor import Editor
from commpass.policy import Policy

aten = torch.ops.aten
ROWS, COLUMNS = 12, 6  # divisible by 2 and 3 ranks
convert = torch.ops.prims.convert_element_type.default
OWN = "own"
"""Key in the metadata of values that differ between ranks: ("slice", length) or ("item",) for the
rank's own part."""


class Writer:
    """Write a graph of aten operators with fake values, for rank 0."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype):
        self.mode, self.graph, self.dtype = mode, fx.Graph(), dtype

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(ROWS, COLUMNS, dtype=self.dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def wait(self, target: Any, *args: Any) -> fx.Node:
        return self.call(ops.wait_tensor.default, self.call(target, *args))

    def reduce(self, x: fx.Node, op: str = "sum") -> fx.Node:
        return self.wait(ops.all_reduce.default, x, op, "0")

    def gather(self, x: fx.Node, ranks: int) -> fx.Node:
        return self.wait(ops.all_gather_into_tensor.default, x, ranks, "0")

    def full(self, x: fx.Node, number: float, made_as: Any) -> fx.Node:
        node = self.call(
            aten.full.default, list(x.meta["val"].shape), number, dtype=x.meta["val"].dtype
        )
        node.meta["original_aten"] = made_as
        return node

    def part(self, x: fx.Node, dim: int, ranks: int) -> fx.Node:
        """Return the rank's own part, by a slice."""
        length = x.meta["val"].shape[dim] // ranks
        node = self.call(aten.slice.Tensor, x, dim, 0, length)
        node.meta[OWN] = ("slice", length)
        return node

    def item(self, x: fx.Node, dim: int, ranks: int) -> fx.Node:
        """Return the rank's own part, by a split."""
        split = self.call(aten.split.Tensor, x, x.meta["val"].shape[dim] // ranks, dim)
        node = self.call(operator.getitem, split, 0)
        node.meta[OWN] = ("item",)
        return node


ANY = [
    "scale",
    "negate",
    "sine",
    "relu",
    "add",
    "add",
    "sub",
    "mul",
    "max",
    "turn",
    "sums",
    "sums",
    "equal",
    "zero",
    "one",
]
ANY += ["reduce"] * 3
GATHERED = ["gather", "own", "own item", "turned own", "joined own", "expanded"]
DIVIDED = ["scatter", "part", "part", "part of sum", "item of sum", "scattered sums"]
NARROW = ["widen", "narrow", "narrow behind", "widen before"]


def write(seed: int, ranks: int, narrow: bool) -> fx.GraphModule:
    """Write the graph of rank 0. All ranks have the same program, except for their own parts of
    some tensors."""
    pick = random.Random(seed)
    writer = Writer(FakeTensorMode(), torch.float32 if narrow else torch.float64)
    call = writer.call
    pool = [writer.input("a"), writer.input("b")]

    def some() -> fx.Node:  # recent values are picked most often: rules need neighbours
        return pool[-1 - min(int(pick.expovariate(0.6)), len(pool) - 1)]

    def like(node: fx.Node) -> fx.Node:
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        alike = [n for n in pool if n.meta["val"].shape == shape and n.meta["val"].dtype == dtype]
        return alike[-1 - min(int(pick.expovariate(0.6)), len(alike) - 1)]

    for _ in range(pick.randint(4, 12)):
        x = some()
        value = x.meta["val"]
        rows, columns = value.shape
        kinds = ANY + (GATHERED if rows <= ROWS else []) + (DIVIDED if rows % ranks == 0 else [])
        kind = pick.choice(kinds + (NARROW if narrow else []))
        if kind == "scale":
            made = call(aten.mul.Tensor, x, pick.choice([2.0, 0.5, -3.0]))
        elif kind == "negate":
            made = call(aten.neg.default, x)
        elif kind == "sine":
            made = call(aten.sin.default, x)
        elif kind == "relu":
            made = call(aten.relu.default, x)
        elif kind in ("add", "sub", "mul"):
            made = call(
                {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor}[kind],
                x,
                like(x),
            )
        elif kind == "reduce":
            made = writer.reduce(x, pick.choice(["sum", "sum", "avg"]))
        elif kind == "sums":
            terms = [writer.reduce(addend) for addend in (x, like(x))]
            if pick.random() < 0.5:
                terms[0] = call(aten.mul.Tensor, terms[0], 0.5)
            made = call(aten.add.Tensor, *terms)
        elif kind == "equal":  # computed twice
            made = call(
                aten.mul.Tensor, *(writer.reduce(call(aten.cos.default, x)) for _ in range(2))
            )
        elif kind == "max":
            made = writer.reduce(x, "max")
        elif kind == "turn":
            made = call(aten.view.default, call(aten.clone.default, x), [rows, columns])
        elif kind == "zero":
            made = writer.reduce(writer.full(x, 0.0, None))
        elif kind == "one":
            made = writer.reduce(
                writer.full(x, 1.0, aten.ones_like.default), pick.choice(["sum", "avg", "max"])
            )
        elif kind == "gather":
            made = writer.gather(x, ranks)
        elif kind == "own":
            made = writer.part(writer.gather(x, ranks), 0, ranks)
        elif kind == "own item":
            made = writer.item(call(aten.mul.Tensor, writer.gather(x, ranks), 3.0), 0, ranks)
        elif kind == "turned own":
            apart = call(aten.view.default, writer.gather(x, ranks), [ranks, rows, columns])
            turned = call(aten.clone.default, call(aten.permute.default, apart, [1, 0, 2]))
            made = writer.part(
                call(aten.reshape.default, turned, [rows, ranks * columns]), 1, ranks
            )
        elif kind == "joined own":
            split = call(aten.split.Tensor, writer.gather(x, ranks), rows)
            joined = call(
                aten.cat.default, [call(operator.getitem, split, rank) for rank in range(ranks)], 1
            )
            made = writer.part(joined, 1, ranks)
        elif kind == "expanded":
            row = call(aten.slice.Tensor, x, 0, 0, 1)
            made = writer.gather(call(aten.expand.default, row, [rows, columns]), ranks)
        elif kind == "scatter":
            made = writer.wait(
                ops.reduce_scatter_tensor.default, x, pick.choice(["sum", "avg"]), ranks, "0"
            )
        elif kind == "scattered sums":
            flat = (
                [1 if rows == ranks else 2, -1]
                if rows // ranks % 2 == 0 or rows == ranks
                else [rows // ranks, -1]
            )
            terms = [
                writer.wait(ops.reduce_scatter_tensor.default, addend, "sum", ranks, "0")
                for addend in (x, like(x))
            ]
            made = call(
                aten.add.Tensor, *(call(aten.reshape.default, term, flat) for term in terms)
            )
        elif kind == "part":
            made = writer.part(x, 0, ranks)
        elif kind == "part of sum":
            whole = call(
                aten.permute.default, writer.reduce(x, pick.choice(["sum", "avg"])), [1, 0]
            )
            dim = pick.choice([0, 1]) if columns % ranks == 0 else 1
            made = call(aten.clone.default, writer.part(whole, dim, ranks))
        elif kind == "item of sum":
            whole = call(aten.mul.Tensor, writer.reduce(x), 2.0)
            made = writer.item(whole, 1 if columns % ranks == 0 else 0, ranks)
        elif kind == "narrow behind":
            made = call(aten.mul.Tensor, writer.gather(x, ranks), 2.0)
            made = call(
                convert, call(aten.reshape.default, made, [ranks * rows, columns]), torch.bfloat16
            )
        elif kind == "widen before":
            wide = call(convert, call(convert, x, torch.bfloat16), torch.float32)
            made = writer.gather(call(aten.reshape.default, wide, [rows * columns, 1]), ranks)
            made = call(aten.reshape.default, made, [ranks * rows, columns])
        else:
            made = call(convert, x, torch.bfloat16 if kind == "narrow" else torch.float32)
        if made.meta["val"].numel() <= ROWS * COLUMNS * ranks**2 and made.meta["val"].shape[0] > 0:
            pool.append(made)
    writer.graph.output(
        tuple(dict.fromkeys([pool[-1], *(some() for _ in range(pick.randint(0, 2)))]))
    )
    return Uncompiled({}, writer.graph)


class Uncompiled(fx.GraphModule):
    """A graph module that is only interpreted: generating code would take most of the time."""

    def recompile(self) -> None:
        pass


def on_rank(gm: fx.GraphModule, rank: int = 0) -> fx.GraphModule:
    """Return a copy of a graph for another rank, which uses its own parts."""
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        how, *length = node.meta.get(OWN, ("",))
        if how == "slice":
            node.args = (*node.args[:2], rank * length[0], (rank + 1) * length[0])
        elif how == "item":
            node.args = (node.args[0], rank)
    return Uncompiled({}, graph)


def exchange(node: fx.Node, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Execute a collective among simulated ranks, from its definition."""
    call = parse(node)
    assert call is not None
    if call.kind == "all_gather":
        return [torch.cat(values)] * len(values)
    stacked = torch.stack(values)
    total = stacked.amax(0) if call.reduce_op == "max" else stacked.sum(0)
    total = total / len(values) if call.reduce_op == "avg" else total
    return [total] * len(values) if call.kind == "all_reduce" else list(total.chunk(len(values)))


def run(
    graphs: list[fx.GraphModule], inputs: list[list[torch.Tensor]]
) -> list[tuple[torch.Tensor, ...]]:
    """Run the graphs of all ranks in lockstep: they are the same program."""
    orders = [list(gm.graph.nodes) for gm in graphs]
    assert len({tuple(str(node.target) for node in order) for order in orders}) == 1, (
        "ranks rewrote their graphs differently"
    )
    known: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    feeds = [iter(values) for values in inputs]
    for nodes in zip(*orders, strict=True):
        if nodes[0].op == "placeholder":
            results: list[Any] = [next(feed) for feed in feeds]
        elif nodes[0].op == "output":
            return [
                fx.map_arg(node.args[0], env.__getitem__)
                for node, env in zip(nodes, known, strict=True)
            ]
        elif parse(nodes[0]) is not None:
            results = exchange(
                nodes[0], [env[node.args[0]] for node, env in zip(nodes, known, strict=True)]
            )
        elif nodes[0].target is ops.wait_tensor.default:
            results = [env[node.args[0]] for node, env in zip(nodes, known, strict=True)]
        else:
            results = [
                node.target(*fx.map_arg(node.args, env.__getitem__), **node.kwargs)
                for node, env in zip(nodes, known, strict=True)
            ]
        for node, env, result in zip(nodes, known, results, strict=True):
            env[node] = result
    raise AssertionError("no output")


PROFILE = commpass.ethernet(0.001)


def check(seed: int, ranks: int, exact: bool, monkeypatch) -> list[str]:
    """Check that a random graph computes the same after simplify. Return the rules that were
    applied."""
    policy = Policy(reassociate=not exact)
    first = write(seed, ranks, narrow=exact)
    plain = [on_rank(first, rank) for rank in range(ranks)]
    changed = [on_rank(first, rank) for rank in range(ranks)]
    applied = []
    for rank, gm in enumerate(changed):
        monkeypatch.setattr(Editor, "rank", lambda self, call, rank=rank: rank)
        applied.append([step.rule for step in simplify(gm, discover(gm), policy, PROFILE)])
    assert all(rules == applied[0] for rules in applied)
    if not applied[0]:
        return []
    dtype = torch.float32 if exact else torch.float64
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        [torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype) for _ in range(2)]
        for _ in range(ranks)
    ]
    for rank, (got, expected) in enumerate(
        zip(run(changed, inputs), run(plain, inputs), strict=True)
    ):
        for a, b in zip(got, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (seed, rank)
            same = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-9, atol=1e-9)
            assert same, f"seed {seed}, rank {rank}, rules {applied[0]}"
    return applied[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("seeds", [30, rarely(500)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_random_graphs_compute_the_same(ranks, exact, seeds, fake_group, monkeypatch):
    fake_group(ranks)
    rules = [rule for seed in range(seeds) for rule in check(seed, ranks, exact, monkeypatch)]
    met = {rule: rules.count(rule) for rule in set(rules)}
    expected = {"same", "constant", "own part", "gather of expand"} | (
        {"gather then narrow", "widen then gather"} if exact else set()
    )
    if not exact:
        expected |= {"sum of sums", "scattered", "gather of scatter"}
    assert expected <= set(met), f"rules that no random graph met: {expected - set(met)}; met {met}"
