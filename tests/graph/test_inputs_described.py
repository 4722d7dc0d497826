"""The metadata of the inputs of inserted collectives, which Inductor's fusion of sums reads."""

from __future__ import annotations

import torch
from graphs import ops, trace
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from commpass.passes.fx.parse import parse
from commpass.passes.lower import describe_inputs


def sums(x: torch.Tensor) -> list[torch.Tensor]:
    """Sums of values that differ in shape, strides or dtype alone, and of two that are alike."""
    y = x @ x
    sent = (y, x @ y, y[:32], y.bfloat16(), y.t(), y.reshape(1, 64, 64, 1), y.view(32, 128))
    return [ops.wait_tensor(ops.all_reduce(each, "sum", "0")) for each in sent]


def test_each_input_has_the_metadata_of_its_own_value(fake_group) -> None:
    fake_group(4)
    gm = trace(sums, torch.ones(64, 64))
    calls = [node for node in gm.graph.nodes if parse(node) is not None]
    inputs = [each for node in calls for each in node.all_input_nodes]
    for each in inputs:
        del each.meta["tensor_meta"]
    describe_inputs(gm)
    found = [each.meta["tensor_meta"] for each in inputs]
    assert found == [_extract_tensor_metadata(each.meta["val"]) for each in inputs]
    assert found[0] == found[1]
    assert len({str(each) for each in found}) == len(inputs) - 1 == 6
