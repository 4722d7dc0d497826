"""The memory traffic of fused kernels, counted by hand."""

from __future__ import annotations

import re
from operator import getitem

import fake_cuda
import pytest
import torch
import torch.nn.functional as F
from graphs import ops
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.costmodel import default_profile
from commpass.passes.fx import costs
from commpass.passes.fx.fusion import traffic

ROWS, WIDTH = 256, 512
X = ROWS * WIDTH * 4
"""The bytes of a tensor in float32."""


def graph_of(function, *inputs):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in inputs]
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes).graph


def counted(function, *inputs):
    """Return the bytes and the kernels of all fused kernels of a function."""
    found = traffic(graph_of(function, *inputs)).values()
    return sum(each.nbytes for each in found), sum(each.kernels for each in found)


def tensors(number: int) -> list[torch.Tensor]:
    return [torch.empty(ROWS, WIDTH) for _ in range(number)]


def test_chain_reads_its_inputs_and_writes_its_result():
    assert counted(lambda gate, up: F.silu(gate) * up, *tensors(2)) == (3 * X, 1)


def test_norm_after_a_residual_is_in_its_kernel():
    def function(x, y, scale):
        both = x + y
        return both, F.rms_norm(both, [WIDTH], scale)

    assert counted(function, *tensors(2), torch.empty(WIDTH)) == (4 * X + WIDTH * 4, 1)


def test_result_that_later_kernels_read_is_written():
    """The residual is read again after the matmul, in another kernel."""

    def function(x, y, weight):
        both = x + y
        return both + torch.relu(both) @ weight

    # reads x and y; writes the sum and its relu; then reads both, and writes the result
    assert counted(function, *tensors(2), torch.empty(WIDTH, WIDTH)) == (7 * X, 2)


def test_exchange_separates_kernels():
    def function(x):
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")) + 1

    assert counted(function, *tensors(1)) == (4 * X, 2)


def test_readers_of_one_value_are_one_kernel():
    def function(x):
        return x * 2, x * 3, x.t() * 4

    assert counted(function, *tensors(1)) == (4 * X, 1)


def test_reduction_writes_little():
    assert counted(lambda x: (x * x).sum(1), *tensors(1)) == (X + ROWS * 4, 1)


def test_lookup_reads_the_rows_that_it_takes():
    ids, table = torch.zeros(ROWS, dtype=torch.long), torch.empty(100_000, WIDTH)

    def function(ids, table):
        return F.embedding(ids, table)

    assert counted(function, ids, table) == (2 * X + ids.nbytes, 1)


def test_constants_are_not_read_and_join_no_kernels():
    def function(x, y):
        two = torch.full((ROWS, WIDTH), 2.0)
        return x + two, y + two

    assert counted(function, *tensors(2)) == (4 * X, 2)


def test_update_in_place_is_written():
    assert counted(lambda x, y: x.add_(y), *tensors(2)) == (3 * X, 1)


def test_unused_result_takes_no_time():
    def function(x):
        x.cos()
        return x * 2

    assert counted(function, *tensors(1)) == (2 * X, 1)
    graph = graph_of(function, *tensors(1))
    times = costs.NodeTimes.of(graph, default_profile("cuda", "NVIDIA H100 80GB HBM3"))
    (unused,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    assert times.us(unused) == 0.0


def rotated(x, cosine, sine):
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


def attended(x, scale, query, key, value, cosine, sine):
    """The norm, rotations and softmax of an attention."""
    y = F.rms_norm(x, [512], scale)
    q, k, v = ((y @ each).view(256, 4, 128).transpose(0, 1) for each in (query, key, value))
    q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
    scores = torch.softmax((q @ k.transpose(1, 2)).float() / 11.3, -1).bfloat16()
    return [scores @ v]


def gated(x, scale, gate, up, down):
    both = x * 2
    y = F.rms_norm(both, [512], scale)
    return [F.silu(y @ gate) * (y @ up) @ down, both]


def normed(x, scale, shift, weight):
    return [F.layer_norm(x @ weight, [512], scale, shift) + x]


def logits(x, weight):
    return [torch.log_softmax((x @ weight).float(), -1)]


W, ROW, TABLE = (512, 512), (512,), (256, 128)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (gated, [(256, 512), ROW, W, W, W]),
        (attended, [(256, 512), ROW, W, W, W, TABLE, TABLE]),
        (normed, [(256, 512), ROW, ROW, W]),
        (logits, [(256, 512), (512, 4096)]),
    ],
)
def test_kernels_are_those_of_inductor(function, shapes):
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    gm, inputs = fake_cuda.trace(function, *given)
    found = sum(each.kernels for each in traffic(gm.graph).values())
    code = fake_cuda.code_of(gm, inputs)
    assert len(re.findall(r"triton_\w+\.run\(", code[code.index("def call(") :])) == found


@pytest.mark.parametrize("rows", [4, 4096])
def test_nodes_of_a_gpu_take_the_time_of_their_kernel(rows):
    profile = default_profile("cuda", "NVIDIA H100 80GB HBM3")
    kernels = profile.kernels
    given = torch.empty(rows, 4096), torch.empty(rows, 4096)
    graph = graph_of(lambda gate, up: F.silu(gate) * up, *given)
    times = costs.NodeTimes.of(graph, profile)
    found = sum(map(times.us, graph.nodes))
    nbytes = 3 * rows * 4096 * 4
    assert found == pytest.approx(kernels.launch_us + nbytes / kernels.gbytes_per_s / 1e3)
    assert sum(map(times.kernels, graph.nodes)) == 1


def test_nodes_of_a_cpu_take_the_time_of_each():
    """Silu and its product are four nodes: neg, exp, add, div, and mul."""
    profile = default_profile("cpu")
    graph = graph_of(lambda gate, up: F.silu(gate) * up, *tensors(2))
    times = costs.NodeTimes.of(graph, profile)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    expected = len(nodes) * 2 * X / profile.kernels.gbytes_per_s / 1e3
    assert len(nodes) == 5
    assert sum(map(times.us, graph.nodes)) == pytest.approx(expected)


def test_items_of_results_cost_nothing():
    graph = graph_of(lambda x: torch.topk(x, 4)[0], *tensors(1))
    items = [node for node in graph.nodes if node.target is getitem]
    assert items
    assert [costs.compute(item, default_profile("cpu")).us for item in items] == [0.0] * len(items)
