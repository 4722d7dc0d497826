"""Graphs with many outputs: a pass changes the arguments of the output node once."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ar
from graphs import trace

from commpass.costmodel import ethernet
from commpass.errors import CommpassError
from commpass.passes import manager
from commpass.passes.context import GraphInput
from commpass.passes.fx.outputs import held_output, outputs_apart
from commpass.policy import Policy
from commpass.policy.rules import Rule

SITES = 6


def gradients(x, *weights):
    found = []
    for weight in weights:
        x = torch.relu(x @ weight)
        found.append(ar(x.t() @ x))
    return found


def graph():
    return trace(gradients, torch.zeros(64, 64), *[torch.zeros(64, 64)] * SITES)


def compressed(gm):
    policy = Policy(rules=[Rule(codec="int8", force=True)], group_bytes=0)
    given = GraphInput(
        gm=gm, direction="backward", policy=policy, profile=ethernet(1), kernels=True
    )
    found = manager.run(given, "0", strict=True)
    assert len(found.plan.compressed) == SITES
    return found


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("commpass.passes.rewrite", "_replace"),
        ("commpass.passes.fuse", "_replace"),
        ("commpass.passes.lower", "outline"),
    ],
)
def test_a_pass_over_many_sites_leaves_the_output_node_as_it_is(
    module, name, monkeypatch, fake_group
):
    fake_group(8)
    gm = graph()
    seen, plain = [], getattr(__import__(module, fromlist=[name]), name)

    def watched(*given):
        result = plain(*given)
        seen.append(gm.graph.output_node().args)
        return result

    monkeypatch.setattr(f"{module}.{name}", watched)
    compressed(gm)
    assert len(seen) >= SITES
    assert all(args is seen[0] for args in seen)
    (output,) = gm.graph.find_nodes(op="output")
    assert len(output.all_input_nodes) == SITES
    assert all(node.target is not held_output for node in gm.graph.nodes)


def test_outputs_that_were_replaced_or_occur_twice_stay_in_their_places():
    def function(x, y):
        z = x + y
        return z, (y, z), None

    gm = trace(function, torch.zeros(4), torch.zeros(4))
    x, y, z, output = gm.graph.nodes
    names = [node.name for node in gm.graph.nodes]
    with outputs_apart(gm.graph):
        assert output not in z.users
        z.replace_all_uses_with(x)
    assert output.args == ((x, (y, x), None),)
    assert [node.name for node in gm.graph.nodes] == names
    gm.graph.lint()


def test_an_error_is_raised_as_it_is():
    gm = trace(lambda x: x + 1, torch.zeros(4))
    with pytest.raises(CommpassError, match="why"), outputs_apart(gm.graph):
        raise CommpassError("why")
