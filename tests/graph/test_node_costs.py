"""The operations of matmuls, convolutions and attention, by hand-written formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.passes.fx import costs


def operations(function, *sizes) -> list[float]:
    """Return the operations of the nodes that have any."""
    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="real")(*(torch.randn(size) for size in sizes))
    return [found for node in gm.graph.nodes if (found := costs.operations(node))]


@pytest.mark.parametrize("repeats", [1, 2])
def test_matmuls_count_two_operations_a_product(repeats):
    a, b = (3, 5), (5, 7)
    for _ in range(repeats):  # the second time, the numbers are known
        assert operations(torch.mm, a, b) == [2 * 3 * 5 * 7]
        assert operations(torch.addmm, (7,), a, b) == [2 * 3 * 5 * 7]
        assert operations(torch.bmm, (4, 3, 5), (4, 5, 7)) == [4 * 2 * 3 * 5 * 7]
        assert operations(torch.mm, (5, 3), (3, 7)) == [2 * 5 * 3 * 7]


def test_sizes_that_have_the_same_number_of_values_are_not_mixed_up():
    assert operations(torch.mm, (4, 8), (8, 2)) == [2 * 4 * 8 * 2]
    assert operations(torch.mm, (8, 4), (4, 4)) == [2 * 8 * 4 * 4]


def test_convolution_counts_its_window():
    image, weight = (2, 3, 10, 10), (6, 3, 3, 3)
    assert operations(F.conv2d, image, weight) == [2 * 2 * 6 * 8 * 8 * 3 * 3 * 3]
    halved = operations(lambda x, w: F.conv2d(x, w, stride=2), image, weight)
    assert halved == [2 * 2 * 6 * 4 * 4 * 3 * 3 * 3]


def test_attention_counts_two_products():
    size = (2, 4, 16, 8)
    found = operations(F.scaled_dot_product_attention, size, size, size)
    assert found == [2 * (2 * 2 * 4 * 16 * 16 * 8)]


def test_backward_of_attention_counts_five_products():
    size, product = (2, 4, 16, 8), 2 * 2 * 4 * 16 * 16 * 8

    def step(query, key, value):
        inputs = [each.detach().requires_grad_() for each in (query, key, value)]
        out = F.scaled_dot_product_attention(*inputs)
        return torch.autograd.grad(out.sum(), inputs)

    assert operations(step, size, size, size) == [2 * product, 5 * product]


def test_sizes_that_vary_are_counted_with_their_values_at_trace_time():
    for rows in (3, 11):
        gm = make_fx(torch.mm, tracing_mode="symbolic")(torch.randn(rows, 5), torch.randn(5, 7))
        found = [each for node in gm.graph.nodes if (each := costs.operations(node))]
        assert found == [2 * rows * 5 * 7]


def test_other_nodes_have_no_operations():
    assert operations(lambda x: torch.relu(x) + 1, (3, 5)) == []
