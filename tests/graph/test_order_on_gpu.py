"""The calls in the code that Inductor generates for a GPU, with exchanges that overlap."""

from __future__ import annotations

import re
from collections import Counter
from unittest.mock import patch

import fake_cuda
import pytest
import torch
from graphs import Columns, Rows, ops, trace
from tiers import rarely
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.library import wrap_triton

import commpass
from commpass.passes import manager
from commpass.passes.fx.ops import triton_calls
from commpass.passes.post.order import order, ordered
from commpass.policy.rules import Rule

triton = pytest.importorskip(
    "triton", reason="kernels are written in Triton: pip install commpass[kernels]"
)
tl = pytest.importorskip("triton.language")

NAMES = [each.name for each in manager.PASSES]
SCALAR = torch.ops.aten._local_scalar_dense.default
CALL = re.compile(
    r"_c10d_functional\.(?:all_\w+|(wait)_tensor)\.default\(|extern_kernels\.(mm)\(|(\w+)\.run\("
)


def layer(x, w, v, gradient):
    """Two matmuls of which each rank has a part, and their gradients."""
    given = [each.detach().requires_grad_() for each in (x, w, v)]
    hidden = torch.relu(Columns.apply(given[0]) @ given[1])
    y = Rows.apply(hidden @ given[2])
    return [y, *torch.autograd.grad(y, given, gradient)]


def code_of(function, codec: str, *like: torch.Tensor) -> tuple[str, int]:
    """Return the code of a graph with two chunks per exchange, and how many kernels it calls."""
    rule = Rule(codec=codec, algorithm="two_shot", force=True, chunks=2, lowering="kernel")
    outcome, inputs = fake_cuda.planned(function, rule, *like)
    gm = outcome.gm
    calls = sum(node.target in triton_calls() for node in gm.graph.nodes)
    with ordered():
        code = fake_cuda.code_of(gm, inputs)
    return code[code.index("def call(") :], calls


def letters(body: str) -> str:
    """Return the calls in order: starts, waits, matmuls, kernels of commpass, kernels of
    Inductor."""
    found = []
    for call in CALL.finditer(body):
        wait, matmul, kernel = call.groups()
        letter = "i" if kernel and kernel.startswith("triton_") else "k"
        found.append("w" if wait else "m" if matmul else letter if kernel else "s")
    return "".join(found)


def partial_sums(x, w):
    return [Rows.apply(x @ w).relu()]


X = torch.empty(1024, 1024, dtype=torch.bfloat16)


def test_kernels_between_exchanges_write_into_their_own_outputs(fake_group):
    """A pinned kernel in functional form would first copy its output, which nothing has written."""
    fake_group(4)
    body, kernels = code_of(partial_sums, "int8", X, X)
    assert kernels == 6
    assert letters(body) == "mkskswkswkswkwki"
    assert "clone" not in body


@pytest.mark.slow
def test_backend_makes_the_code_of_a_gpu_from_a_graph_of_dynamo(fake_group):
    """Not the passes alone: what ``torch.compile(backend=commpass.backend(...))`` calls."""
    fake_group(4)

    def function(x, w):
        return [ops.wait_tensor(ops.all_reduce(x @ w, "sum", "0")).relu()]

    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(function, X, X)
    rule = Rule(codec="int8", algorithm="two_shot", force=True, chunks=2, lowering="kernel")
    backend = commpass.backend(commpass.Policy(rules=(rule,)), strict=True)
    entered = []

    def pinned():
        entered.append(True)
        return ordered()

    with patch("commpass.passes.post.order.ordered", pinned):
        code = fake_cuda.code_by(backend, gm, inputs)
    body = code[code.index("def call(") :]
    (site,) = commpass.plans()[-1].sites
    assert (site.codec, site.algorithm, site.chunks, site.lowering) == (
        *("int8", "two_shot", 2),
        "kernel",
    )
    assert letters(body) == "mkskswkswkswkwki"
    assert "clone" not in body
    assert ".item()" not in body
    assert entered == [True]


def normed(x, w, residual, weight):
    """A partial matmul, the residual stream and the norm after it."""
    h = residual + Rows.apply(x @ w)
    y = h.float()
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(h.dtype)
    return [h, y * weight]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", rarely("rotated")])
@pytest.mark.parametrize("function", [partial_sums, normed])
def test_overlapped_exchanges_copy_no_output_and_wait_for_no_number(function, codec, fake_group):
    fake_group(4)
    like = [X, X] if function is partial_sums else [X, X, X, X[0].clone()]
    body, kernels = code_of(function, codec, *like)
    calls = letters(body)
    assert kernels == calls.count("k") == 6
    assert calls.count("s") == calls.count("w") == 4
    assert "ks" in calls.partition("w")[0].partition("s")[2]  # the second starts during the first
    assert "clone" not in body
    assert ".item()" not in body


@pytest.mark.parametrize("codec", [rarely("int8"), rarely("rotated"), rarely("mxfp8")])
def test_kernels_of_forward_and_backward_write_into_their_own_outputs(codec, fake_group):
    fake_group(4)
    traced = trace(layer, *[X] * 4)  # on the CPU: builds without CUDA have no gradients on a GPU
    body, kernels = code_of(traced, codec, *[X] * 4)
    assert kernels == 12
    assert letters(body).count("k") == 12
    assert letters(body).count("s") == letters(body).count("w") == 8
    assert "kk" not in letters(body)
    assert "clone" not in body


@triton.jit
def add_one(memory, SIZE: tl.constexpr):
    place = memory + tl.arange(0, SIZE)
    tl.store(place, tl.load(place) + 1)


def test_kernel_of_the_model_that_writes_an_input_is_not_pinned(fake_group):
    """A pin would keep Inductor from writing into the input: it would write into a copy, and then
    copy that into the input."""
    fake_group(4)

    def function(x, cache):
        first = ops.all_reduce(x, "sum", "0")
        wrap_triton(add_one)[(1,)](cache, 64)
        second = ops.all_reduce(x * 2, "sum", "0")
        return [ops.wait_tensor(first), ops.wait_tensor(second)]

    with fake_cuda.a_card():
        like = [torch.empty(64), torch.empty(64)]
        gm, _ = fake_cuda.trace(torch.func.functionalize(function), *like)
        order(gm.graph)
    kernels = [node for node in gm.graph.nodes if node.target in triton_calls()]
    assert [node.target for node in kernels] == [triton_calls()[0]]
    assert any(node.target is control_deps for node in gm.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["static", rarely("sizes")])
def test_lossless_exchange_waits_for_the_device_once(first, fake_group):
    """Its sizes are copied to the host together, not one for each rank that it sends to."""
    fake_group(8)
    name = f"two_shot(first={first})"
    rule = Rule(codec="exponent", algorithm=name, force=True, chunks=1)
    before = manager.PASSES[: NAMES.index("lower")]
    gm = fake_cuda.planned(partial_sums, rule, X, X, passes=before)[0].gm
    read = [node for node in gm.graph.nodes if node.target is SCALAR]
    assert len(read) == 2 * 8 + 1  # sizes to and from each rank, and the largest that is gathered
    assert {node.args[0].meta["val"].device.type for node in read} == {"cpu"}
    copies = [node for node in gm.graph.nodes if moves_to_host(node)]
    assert len(copies) == 2


OPERATOR = re.compile(r"torch\.ops\.(commpass|_c10d_functional)\.(\w+)\.default\(")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["static", rarely("sizes")])
def test_code_of_a_lossless_exchange_copies_sizes_to_the_host_once_for_each_hop(first, fake_group):
    fake_group(8)
    name = f"two_shot(first={first})"
    rule = Rule(codec="exponent", algorithm=name, force=True, chunks=1)
    outcome, inputs = fake_cuda.planned(partial_sums, rule, X, X)
    with ordered():
        code = fake_cuda.code_of(outcome.gm, inputs)
    body = code[code.index("def call(") :]
    calls = Counter(call for _, call in OPERATOR.findall(body))
    assert calls["exponent_encode"] == calls["exponent_decode"] == 2
    assert calls["all_to_all_single"] == calls["all_gather_into_tensor"] == 2  # sizes, and wires
    assert calls["wait_tensor"] == 4
    on_host = re.findall(r"(\w+) = empty_strided_cpu\(", body)
    assert len(on_host) == 2
    read = re.findall(r"(\w+), \(\), \(\), \d+\)\.item\(\)", body)
    assert len(read) == body.count(".item()") == 2 * 8 + 1
    assert {*read} == {*on_host}
    assert "clone" not in body


def moves_to_host(node: torch.fx.Node) -> bool:
    devices = [
        value.device.type
        for each in (node, *node.all_input_nodes)
        if isinstance(value := each.meta.get("val"), torch.Tensor)
    ]
    return devices[:2] == ["cpu", "cuda"]
