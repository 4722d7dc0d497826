"""What Inductor is told of the inputs that commpass adds to a graph: CUDA graphs
(``mode="reduce-overhead"`` and ``"max-autotune"``) need to know which of them stay in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Columns
from tiers import rarely
from torch._inductor import compile_fx, config
from torch._inductor.cudagraph_utils import check_for_mutation_ignore_cuda_graph_managed_tensor

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

SPARSE = Policy(rules=[Rule(codec="topk(density=0.1)", force=True)], max_error=1.0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return (Columns.apply(x) @ self.weight).relu()


def compiled(policy: Policy, monkeypatch, **how: Any) -> list[tuple[Any, list[int]]]:
    """Run two steps of a layer, whose gradient is summed over the ranks. Return each graph that
    Inductor gets, and its static inputs."""
    found = []

    def compile_graph(gm, example_inputs, **kwargs):
        assert len(gm.graph.find_nodes(op="placeholder")) == len(example_inputs)
        found.append((gm, list(kwargs["static_input_idxs"])))
        run = lambda inputs: gm(*inputs)  # noqa: E731  it takes an attribute
        run._boxed_call = True
        return run

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_graph)
    layer = torch.compile(Layer(), backend=commpass.backend(policy), **how)
    for _ in range(2):
        layer(torch.randn(64, 64, requires_grad=True)).sum().backward()
    return found


def mutated(gm: torch.fx.GraphModule) -> dict[int, str]:
    """Return the inputs that a graph changes in place, by number."""
    inputs = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    writes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {inputs[node.args[0]]: node.args[0].name for node in writes if node.args[0] in inputs}


@pytest.mark.parametrize("mode", ["reduce-overhead", rarely("max-autotune")])
def test_residual_is_a_static_input_that_a_cuda_graph_may_change(mode, fake_group, monkeypatch):
    fake_group(4)
    _, (gm, static) = compiled(SPARSE, monkeypatch, mode=mode)
    changed = mutated(gm)
    assert len(changed) == 1
    assert changed.keys() <= set(static)
    assert len(set(static)) == len(static)
    given = (set(changed.values()), set(changed))
    with config.patch({"triton.cudagraph_trees": True}):
        assert check_for_mutation_ignore_cuda_graph_managed_tensor(gm, *given, static) is None
        assert check_for_mutation_ignore_cuda_graph_managed_tensor(gm, *given, [0]) is not None


@pytest.mark.every
def test_static_inputs_stay_those_of_torch_without_state(fake_group, monkeypatch):
    fake_group(4)
    found = compiled(Policy(rules=[Rule(codec="int8", force=True)]), monkeypatch)
    plain = compiled(Policy(rules=[]), monkeypatch)
    assert [static for _, static in found] == [static for _, static in plain]
