"""Graphs of ``torch.export`` are rewritten in place, and unsupported ones are rejected."""

from __future__ import annotations

import pytest
import torch
from graphs import as_rank, ops

import commpass
from commpass.errors import PolicyError
from commpass.standalone import _rename_results

FORCED = commpass.Policy(rules=[commpass.Rule(codec="int8", force=True)])


class Summed(torch.nn.Module):
    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")).relu()


class ByHand(torch.nn.Module):
    def forward(self, x):
        return commpass.all_reduce(x * 2, codec="int8").relu()


def exported(model):
    return torch.export.export(model, (torch.randn(64, 256),))


def test_graph_of_an_exported_program_is_rewritten_in_place():
    with as_rank(0, 2):
        program = exported(Summed())
        plan = commpass.rewrite(program.graph_module, (torch.randn(64, 256),), FORCED)
        assert [site.codec for site in plan.compressed] == ["int8"]
        targets = {str(node.target) for node in program.graph.nodes}
        assert "_c10d_functional.all_gather_into_tensor.default" in targets
        assert "_c10d_functional.all_reduce.default" not in targets
        assert program.module()(torch.randn(64, 256)).shape == (64, 256)


class OnlySummed(torch.nn.Module):
    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0"))


def test_rewritten_program_can_be_saved_though_it_returns_what_a_collective_gave(tmp_path):
    with as_rank(0, 2):
        program = exported(OnlySummed())
        names = [node.name for node in program.graph.output_node().args[0]]
        commpass.rewrite(program.graph_module, (torch.randn(64, 256),), FORCED)
        assert [node.name for node in program.graph.output_node().args[0]] == names
        every = [node.name for node in program.graph.nodes]
        assert len(set(every)) == len(every)
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2")
        assert loaded.module()(torch.randn(64, 256)).shape == (64, 256)


class Several(torch.nn.Module):
    def forward(self, x):
        return tuple(ops.wait_tensor(ops.all_reduce(x * k, "sum", "0")) for k in (2, 3, 4))


@pytest.mark.slow
def test_each_of_several_results_keeps_its_own_name():
    with as_rank(0, 2):
        program = exported(Several())
        names = [node.name for node in program.graph.output_node().args[0]]
        commpass.rewrite(program.graph_module, (torch.randn(64, 256),), FORCED)
        assert [node.name for node in program.graph.output_node().args[0]] == names
        every = [node.name for node in program.graph.nodes]
        assert len(set(every)) == len(every)
        program.graph_module.graph.lint()


def test_name_that_another_node_has_is_exchanged():
    graph = torch.fx.Graph()
    first = graph.call_function(torch.neg, (graph.placeholder("x"),))
    second = graph.call_function(torch.abs, (first,))
    names = first.name, second.name
    graph.output((second,))
    module = torch.fx.GraphModule({}, graph)
    _rename_results(module, [first.name])
    assert (second.name, first.name) == names
    assert torch.equal(module(torch.tensor(2.0))[0], torch.tensor(2.0))


class Twice(torch.nn.Module):
    def forward(self, x):
        summed = ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0"))
        return summed, summed


def test_result_that_is_returned_twice_keeps_its_name():
    with as_rank(0, 2):
        module = exported(Twice()).graph_module
        names = [node.name for node in module.graph.output_node().args[0]]
        assert names[0] == names[1]
        commpass.rewrite(module, (torch.randn(64, 256),), FORCED)
        assert [node.name for node in module.graph.output_node().args[0]] == names


def test_rewritten_graph_has_no_operator_that_samples():
    """Other compile stacks do not know it."""
    with as_rank(0, 2):
        module = exported(Summed()).graph_module
        commpass.rewrite(module, (torch.randn(64, 256),), FORCED)
        assert not [node for node in module.graph.nodes if "sample" in str(node.target)]


def test_collective_called_by_hand_is_one_operator_of_an_exported_program():
    with as_rank(0, 2):
        program = exported(ByHand())
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("commpass.collective.default") == 1
        assert program.module()(torch.randn(64, 256)).shape == (64, 256)


def test_exported_program_itself_is_refused():
    with as_rank(0, 2), pytest.raises(PolicyError, match="give its graph_module"):
        commpass.rewrite(exported(Summed()), (torch.randn(64, 256),), FORCED)


@pytest.mark.parametrize("given", [FORCED, "balanced", None])
def test_policy_in_the_place_of_the_inputs_is_refused(given):
    """The policy was taken for unused inputs, and the default policy was applied."""
    with as_rank(0, 2):
        module = exported(Summed()).graph_module
        with pytest.raises(PolicyError, match="the policy comes third"):
            commpass.rewrite(module, given)
