"""The operations of matmuls, convolutions and attention, by hand-written formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.costmodel import default_profile
from commpass.passes.fx import costs
from commpass.passes.fx.memory import memory
from commpass.passes.fx.ops import may_compute_much
from commpass.passes.fx.schedule import timed
from commpass.passes.fx.work import work_of


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


G, M, K, N = 3, 32, 16, 48


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        ((M, K), (G, K, N), 2 * M * K * N),  # rows of a for each group
        ((G, M, K), (K, N), 2 * M * K * N),  # columns of b
        ((M, K), (K, N), 2 * M * K * N),  # terms of the sums
        ((G, M, K), (G, K, N), 2 * G * M * K * N),
    ],
)
def test_grouped_matmuls_count_all_rows_of_all_groups(a, b, count):
    ends = G if 2 in (len(a), len(b)) else 0

    def function(a, b):
        offsets = torch.ones(ends, dtype=torch.int32) if ends else None
        return torch._grouped_mm(a.bfloat16(), b.bfloat16(), offsets)

    assert operations(function, a, b) == [count]


def test_time_of_a_grouped_matmul_is_that_of_one_of_all_rows():
    a, b = torch.randn(M, K).bfloat16(), torch.randn(G, K, N).bfloat16()
    offsets = torch.tensor([8, 8, 32], dtype=torch.int32)
    profile = default_profile("cuda")
    profile = replace(profile, kernels=replace(profile.kernels, gflops=1e-6))
    times = []
    with FakeTensorMode() as mode:
        a, b, offsets = map(mode.from_tensor, (a, b, offsets))
        for function, given in ((torch._grouped_mm, (a, b, offsets)), (torch.mm, (a, b[0]))):
            graph = make_fx(function, tracing_mode="real")(*given).graph
            work = work_of(graph, memory(graph), profile)
            (node,) = work.heavy
            assert may_compute_much(node)
            times.append(timed(work, graph.nodes).now)
    assert times[0] == times[1] > 2 * M * K * N


H200 = replace(default_profile("cuda").kernels, gflops=700e3, gbytes_per_s=4000.0, launch_us=0.0)


@pytest.mark.parametrize(
    ("rows", "expected_us"),
    [
        (8, 2 * (8 * 4096 + 4096 * 14336 + 8 * 14336) / 4000.0e3),  # the weight is read
        (4096, 2 * 4096 * 4096 * 14336 / 700.0e6),
    ],
)
def test_matmul_takes_the_time_of_its_operations_or_of_its_memory(rows, expected_us):
    profile = replace(default_profile("cuda"), kernels=H200)
    with FakeTensorMode():
        x, weight = torch.empty(rows, 4096).bfloat16(), torch.empty(4096, 14336).bfloat16()
        graph = make_fx(torch.mm, tracing_mode="real")(x, weight).graph
    (matmul,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert costs.compute(matmul, profile).us == pytest.approx(expected_us)


def test_attention_to_a_cache_takes_the_time_of_its_reads():
    """One query for each sequence, as in a decode step."""
    profile = replace(default_profile("cuda"), kernels=H200)
    with FakeTensorMode():
        query = torch.empty(64, 8, 1, 128).bfloat16()
        keys, values = (torch.empty(64, 8, 8192, 128).bfloat16() for _ in range(2))
        graph = make_fx(F.scaled_dot_product_attention)(query, keys, values).graph
    us = sum(costs.compute(node, profile).us for node in graph.nodes)
    cached, written = 64 * 8 * 8192 * 128, 64 * 8 * 128
    assert us == pytest.approx(2 * (2 * cached + 2 * written) / 4000.0e3, rel=0.01)


def test_nodes_without_operations_read_as_much_as_they_write():
    profile = replace(default_profile("cuda"), kernels=H200)
    with FakeTensorMode():
        x = torch.empty(1024, 1024)
        graph = make_fx(torch.relu)(x).graph
    us = sum(costs.compute(node, profile).us for node in graph.nodes)
    assert us == pytest.approx(2 * 4 * 1024 * 1024 / 4000.0e3)


def test_other_nodes_have_no_operations():
    assert operations(lambda x: torch.relu(x) + 1, (3, 5)) == []
