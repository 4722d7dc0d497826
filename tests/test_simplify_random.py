"""Random small graphs with collectives, simplified against plain, run for all ranks of a simulated group in one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from graphs import ops
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import commpass
from commpass.passes.collective import parse
from commpass.passes.discover import discover
from commpass.passes.simplify import simplify
from commpass.passes.simplify.editor import Editor
from commpass.policy import Policy

aten = torch.ops.aten
ROWS, COLUMNS = 12, 5  # divisible by 2 and 3 ranks, twice


class Writer:
    """Writes a graph of aten operators with fake values, for one rank."""

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


def write(seed: int, rank: int, ranks: int, narrow: bool) -> fx.GraphModule:
    """The graph of one rank: the same program on all, but for the own part that it takes of gathered tensors."""
    pick = random.Random(seed)
    writer = Writer(FakeTensorMode(), torch.float32 if narrow else torch.float64)
    pool = [writer.input("a"), writer.input("b")]

    def some() -> fx.Node:  # what was made last is taken most: rules need neighbours
        return pool[-1 - min(int(pick.expovariate(0.6)), len(pool) - 1)]

    def like(node: fx.Node) -> fx.Node:
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        alike = [n for n in pool if n.meta["val"].shape == shape and n.meta["val"].dtype == dtype]
        return alike[-1 - min(int(pick.expovariate(0.6)), len(alike) - 1)]

    for _ in range(pick.randint(4, 14)):
        x = some()
        value = x.meta["val"]
        rows = value.shape[0]
        kinds = [
            "scale",
            "negate",
            "sine",
            "relu",
            "add",
            "add",
            "sub",
            "mul",
            "reduce",
            "reduce",
            "reduce",
            "max",
            "turn",
            "zero",
            "sums",
            "sums",
        ]
        kinds += ["gather", "own"] if rows * ranks <= ROWS * ranks else []
        kinds += ["scatter", "part", "part"] if rows % ranks == 0 else []
        kinds += ["widen", "narrow", "narrow"] if narrow else []
        kind = pick.choice(kinds)
        if kind == "scale":
            made = writer.call(aten.mul.Tensor, x, pick.choice([2.0, 0.5, -3.0]))
        elif kind == "negate":
            made = writer.call(aten.neg.default, x)
        elif kind == "sine":
            made = writer.call(aten.sin.default, x)
        elif kind == "relu":
            made = writer.call(aten.relu.default, x)
        elif kind in ("add", "sub", "mul"):
            target = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor}[kind]
            made = writer.call(target, x, like(x))
        elif kind == "reduce":
            made = writer.wait(ops.all_reduce.default, x, pick.choice(["sum", "sum", "avg"]), "0")
        elif kind == "sums":
            terms = [writer.wait(ops.all_reduce.default, addend, "sum", "0") for addend in (x, like(x))]
            if pick.random() < 0.5:
                terms[0] = writer.call(aten.mul.Tensor, terms[0], 0.5)
            made = writer.call(aten.add.Tensor, *terms)
        elif kind == "max":
            made = writer.wait(ops.all_reduce.default, x, "max", "0")
        elif kind == "turn":
            made = writer.call(aten.view.default, writer.call(aten.clone.default, x), list(value.shape))
        elif kind == "zero":
            zeros = writer.call(aten.full.default, list(value.shape), 0.0, dtype=value.dtype)
            made = writer.wait(ops.all_reduce.default, zeros, "sum", "0")
        elif kind == "gather":
            made = writer.wait(ops.all_gather_into_tensor.default, x, ranks, "0")
        elif kind == "own":
            whole = writer.wait(ops.all_gather_into_tensor.default, x, ranks, "0")
            made = writer.call(aten.slice.Tensor, whole, 0, rank * rows, (rank + 1) * rows)
        elif kind == "scatter":
            made = writer.wait(ops.reduce_scatter_tensor.default, x, pick.choice(["sum", "avg"]), ranks, "0")
        elif kind == "part":
            part = rows // ranks
            made = writer.call(aten.slice.Tensor, x, 0, rank * part, (rank + 1) * part)
        else:
            dtype = torch.bfloat16 if kind == "narrow" else torch.float32
            made = writer.call(torch.ops.prims.convert_element_type.default, x, dtype)
        if made.meta["val"].numel() <= ROWS * COLUMNS * ranks**2 and made.meta["val"].shape[0] > 0:
            pool.append(made)
    writer.graph.output(tuple(dict.fromkeys([pool[-1], *(some() for _ in range(pick.randint(0, 2)))])))
    return fx.GraphModule({}, writer.graph)


def exchange(node: fx.Node, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """A collective among simulated ranks, from its definition."""
    call = parse(node)
    assert call is not None
    if call.kind == "all_gather":
        return [torch.cat(values)] * len(values)
    stacked = torch.stack(values)
    total = stacked.amax(0) if call.reduce_op == "max" else stacked.sum(0)
    total = total / len(values) if call.reduce_op == "avg" else total
    return [total] * len(values) if call.kind == "all_reduce" else list(total.chunk(len(values)))


def run(graphs: list[fx.GraphModule], inputs: list[list[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Runs the graphs of all ranks in step: they are the same program."""
    orders = [list(gm.graph.nodes) for gm in graphs]
    assert len({tuple(str(node.target) for node in order) for order in orders}) == 1, "ranks rewrote their graphs differently"
    known: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    feeds = [iter(values) for values in inputs]
    for nodes in zip(*orders, strict=True):
        if nodes[0].op == "placeholder":
            results: list[Any] = [next(feed) for feed in feeds]
        elif nodes[0].op == "output":
            return [fx.map_arg(node.args[0], env.__getitem__) for node, env in zip(nodes, known, strict=True)]
        elif parse(nodes[0]) is not None:
            results = exchange(nodes[0], [env[node.args[0]] for node, env in zip(nodes, known, strict=True)])
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
    """One random graph: what simplify makes of it computes the same. Returns the rules that were applied."""
    policy = Policy(reassociate=not exact)
    plain = [write(seed, rank, ranks, narrow=exact) for rank in range(ranks)]
    changed = [fx.GraphModule({}, copy.deepcopy(gm.graph)) for gm in plain]
    applied = []
    for rank, gm in enumerate(changed):
        monkeypatch.setattr(Editor, "rank", lambda self, call, rank=rank: rank)
        applied.append([step.rule for step in simplify(gm, discover(gm), policy, PROFILE)])
    assert all(rules == applied[0] for rules in applied)
    if not applied[0]:
        return []
    dtype = torch.float32 if exact else torch.float64
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype) for _ in range(2)] for _ in range(ranks)]
    for rank, (got, expected) in enumerate(zip(run(changed, inputs), run(plain, inputs), strict=True)):
        for a, b in zip(got, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (seed, rank)
            same = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-9, atol=1e-9)
            assert same, f"seed {seed}, rank {rank}, rules {applied[0]}"
    return applied[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_random_graphs_compute_the_same(ranks, exact, fake_group, monkeypatch):
    fake_group(ranks)
    rules = [rule for seed in range(500) for rule in check(seed, ranks, exact, monkeypatch)]
    met = {rule: rules.count(rule) for rule in set(rules)}
    expected = {"same", "zero", "own part"} | ({"gather then narrow", "widen then gather"} if exact else set())
    if not exact:
        expected |= {"sum of sums", "scattered", "gather of scatter"}
    assert expected <= set(met), f"rules that no random graph met: {expected - set(met)}; met {met}"
