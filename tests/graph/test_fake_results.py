"""Fake values of equal calls, which are computed once and copied."""

from __future__ import annotations

import pytest
import torch
from graphs import trace, trace_sizes
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from commpass.passes.fx.fake_results import FakeResults
from commpass.passes.fx.fakes import mode_of, storage
from commpass.passes.fx.meta import value

aten = torch.ops.aten


def layout(x: torch.Tensor) -> tuple[object, ...]:
    return x.dtype, x.device, x.shape, x.stride(), x.storage_offset()


def nodes(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def several(x, y):
    """Each operator twice, on inputs of equal layouts."""
    return [
        each
        for one in (x, y)
        for each in (
            aten.mm(one, one),
            aten.slice(one, 0, 2, 4),
            aten.view(one, [8, 2]),
            aten.t(one),
            aten.cat([one, one], 1),
            one.to(torch.bfloat16),
        )
    ]


def results(gm: fx.GraphModule) -> tuple[FakeResults, dict[fx.Node, torch.Tensor]]:
    known = FakeResults()
    with mode_of(gm.graph), torch.no_grad():
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        return known, {node: known.of(node) for node in calls}


def test_copies_are_what_a_fake_run_gives():
    gm = trace(several, torch.ones(4, 4), torch.ones(4, 4))
    known, found = results(gm)
    assert len(found) == 2 * len(known.known)
    for node, made in found.items():
        assert layout(made) == layout(value(node)), node.format_node()
        sources = [storage(value(each)) for each in node.all_input_nodes]
        assert (storage(made) in sources) == (storage(value(node)) in sources)
    fresh = [storage(each) for node, each in found.items() if node.target is aten.mm.default]
    assert len(set(fresh)) == 2


@pytest.mark.parametrize(
    "other",
    [torch.ones(4, 2), torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 4).t()],
    ids=["shape", "dtype", "strides"],
)
def test_other_layouts_are_other_calls(other):
    gm = trace(lambda x, y: (x.relu(), y.relu()), torch.ones(4, 4), other)
    _, found = results(gm)
    first, second = found.values()
    assert (layout(first), layout(second)) == (layout(torch.ones(4, 4)), layout(other))


def test_arguments_are_told_apart():
    gm = trace(lambda x: (aten.add(x, 1), aten.add(x, 1.5)), torch.ones(4, dtype=torch.int64))
    assert [each.dtype for each in results(gm)[1].values()] == [torch.int64, torch.float32]


def test_symbolic_sizes_are_not_kept():
    known, found = results(trace_sizes(lambda x: (x.relu(), x.relu() * 2), torch.ones(4, 4)))
    assert found
    assert not known.known


def test_writes_are_not_kept():
    gm = trace(aten.add_, torch.ones(4), torch.ones(4))
    known, found = results(gm)
    assert not known.known
    (node,) = nodes(gm, aten.add_.Tensor)
    assert found[node] is value(node.args[0])


def test_negatives_and_conjugates_of_memory_are_computed():
    """A copy would lose the mark that the memory has the other sign."""
    with FakeTensorMode() as mode, torch.no_grad():
        known, negative = FakeResults(), torch.empty(4, 4, dtype=torch.complex64).conj().imag
        assert negative.is_neg()
        node = fx.Graph().call_function(aten.t.default, ())
        node.args = (node.graph.placeholder("x"),)
        made = [known.of(node, lambda _: negative) for _ in range(2)]
    assert all(each.is_neg() and each.fake_mode is mode for each in made)
