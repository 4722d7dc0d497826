"""simplify neither lengthens the critical path nor raises peak memory: a timeline and a count of
live bytes.

The timeline has one link and one stream of compute. Collectives run on the link in the order of
their starts, each for the time of the cost model. Every computing operator takes the same time, and
a wait blocks the stream. This is written independently of the pass.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from test_simplify_random import on_rank, write
from tiers import rarely
from torch import fx

import commpass
from commpass.passes.discover import discover
from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.simplify import simplify
from commpass.passes.simplify.editor import RULE
from commpass.policy import Policy

FREE = {
    "view",
    "reshape",
    "_unsafe_view",
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "expand",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "alias",
    "detach",
    "full",
}
"""Operators without memory traffic, and constants."""


def name_of(node: fx.Node) -> str:
    return (
        ""
        if node.op != "call_function"
        else getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    )


def computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not (
        parse(node) or is_wait(node) or node.target is operator.getitem or name_of(node) in FREE
    )


def nbytes(value) -> int:
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


def finish_us(gm: fx.GraphModule, profile: commpass.Profile, compute_us: float) -> float:
    """Return the end of the last operator and the last exchange of a graph."""
    stream = link = 0.0
    arrival: dict[fx.Node, float] = {}
    for node in gm.graph.nodes:
        call = parse(node)
        if call is not None:
            ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(call.group))
            link = max(link, stream) + profile.link.time_us(
                call.kind, nbytes(call.inputs[0].meta["val"]), ranks
            )
            arrival[node] = link
        elif is_wait(node):
            stream = max(stream, arrival.get(node.args[0], 0.0))
        elif computes(node):
            stream += compute_us
    return max(stream, link)


def peak_bytes(gm: fx.GraphModule) -> int:
    """Return the most bytes of tensors alive at once; a view keeps its base alive."""
    # a node, and the tensors that must stay alive while it does
    memory: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        shows = (
            is_wait(node)
            or node.target is operator.getitem
            or (name_of(node) in FREE and name_of(node) != "full")
        )
        memory[node] = (
            set().union(*(memory[taken] for taken in node.all_input_nodes)) if shows else {node}
        )
        for taken in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(memory[taken], node))
    ends: dict[fx.Node, list[fx.Node]] = {}
    for tensor, node in last.items():
        ends.setdefault(node, []).append(tensor)
    alive = peak = 0
    for node in gm.graph.nodes:
        alive += nbytes(node.meta.get("val")) if memory[node] == {node} else 0
        peak = max(peak, alive)
        alive -= sum(nbytes(tensor.meta.get("val")) for tensor in ends.get(node, ()))
    return peak


def largest(gm: fx.GraphModule) -> int:
    """Return the bytes of the largest input or result of a graph's collectives."""
    return max(
        max(nbytes(node.meta["val"]), nbytes(node.args[0].meta["val"]))
        for node in gm.graph.nodes
        if parse(node)
    )


def of_link(gbit_per_s: float, alpha_us: float) -> commpass.Profile:
    return commpass.ethernet(gbit_per_s, alpha_us)


LINKS = {"slow": of_link(0.001, 60), "usual": of_link(10, 60), "fast": of_link(400, 5)}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("one_in", [3, rarely(1)])
@pytest.mark.parametrize("link", ["usual", rarely("slow"), rarely("fast")])
def test_random_graphs(link, one_in, fake_group):
    ranks, profile = 2, LINKS[link]
    fake_group(ranks)
    compute_us = profile.kernels.launch_us
    earlier = 0
    for seed in [
        *range(0, 250, one_in),
        *range(780, 800),
    ]:  # 789: rules that fill the memory together
        gm = write(seed, ranks, narrow=True)
        after = on_rank(gm)
        applied = simplify(after, discover(after), Policy(), profile)
        if not applied:
            continue
        before_us, after_us = (finish_us(graph, profile, compute_us) for graph in (gm, after))
        rules = [step.rule for step in applied]
        # What was a part of a result and is now an input needs a copy if it is an output.
        copies = sum(node.meta.get(RULE) == "separate outputs" for node in after.graph.nodes)
        assert after_us <= before_us + copies * compute_us + 1e-6, (
            seed,
            after_us - before_us,
            rules,
        )
        earlier += after_us < before_us
        assert peak_bytes(after) <= peak_bytes(gm) + largest(gm), (seed, rules)
    assert earlier > 50 // one_in


def graphs_of_llama(layers: int) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """Return (plain, simplified) of the forward and the backward of a tensor-parallel Llama, as the
    pass gets them."""
    from llama import build, step, tokens

    pairs = []

    def keep(gm, *arguments):
        plain = on_rank(gm)
        applied = simplify(gm, *arguments)
        pairs.append((plain, on_rank(gm)))
        return applied

    model = build("tensor", dist.get_world_size(), layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commpass.passes.simplify.simplify", keep)
        compiled = torch.compile(
            model, backend=commpass.backend("lossless", inner="eager", strict=True), fullgraph=True
        )
        step(compiled, model, tokens("tensor", 0))
    assert len(pairs) == 2
    return pairs


@pytest.mark.every
def test_llama(fake_group):
    fake_group(2)
    for plain, after in graphs_of_llama(2):
        for link, profile in LINKS.items():
            for compute_us in (0.0, 2.0, 50.0):
                before_us, after_us = (finish_us(gm, profile, compute_us) for gm in (plain, after))
                assert after_us <= before_us, (link, compute_us)
        assert peak_bytes(after) <= peak_bytes(plain) + largest(plain)
    plain, after = (
        sum(parse(node) is not None for node in gm.graph.nodes) for gm in (plain, after)
    )
    assert (plain, after) == (10, 4)
    assert after_us < before_us
