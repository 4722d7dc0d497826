"""Batched and grouped matmuls, and pointwise operations after matmuls, are fused with the encode of
their result; what a kernel cannot compute stays separate, with the reason in the plan.

The graphs are a GPU's, and nothing runs on one.
"""

from __future__ import annotations

import dataclasses

import fake_cuda
import pytest
import torch
import torch.nn.functional as F
from graphs import ops
from test_fuse import RANKS, before, forced, roles_of, run
from torch.fx.experimental.proxy_tensor import make_fx

from commpass.codecs import codec
from commpass.costmodel import default_profile
from commpass.lowering import matmul
from commpass.lowering.pointwise import BATCH, COLUMN, VALUE
from commpass.passes import GraphInput, manager
from commpass.passes.fx.marks import CODED

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

aten, wait = torch.ops.aten, ops.wait_tensor
BF16 = torch.bfloat16
E, T, K, N = 4, 512, 128, 1024
A, B = torch.empty(E, T, K, dtype=BF16), torch.empty(E, K, N, dtype=BF16)
ROWS, WEIGHT = torch.empty(E * T, K, dtype=BF16), torch.empty(K, N, dtype=BF16)
BIASES = torch.empty(E, 1, N, dtype=BF16)
RESIDUAL = torch.empty(E * T, N, dtype=BF16)
OFFSETS = torch.empty(E, dtype=torch.int32)


def sent(x):
    return [wait(ops.all_reduce(x, "sum", "0")) * 2]


def product_of(gm) -> matmul.Product:
    node = next(n for n in gm.graph.nodes if n.target is matmul.MATMUL)
    return matmul.lookup(str(node.args[1]))


def batched(a, b):
    return sent(torch.bmm(a, b))


def biased(a, b, c):
    return sent(torch.baddbmm(c, a, b))


def experts(a, b):
    return sent(torch.einsum("etk,ekn->etn", a, b))


def shared_weight(a, b):
    return sent(torch.bmm(a, b.narrow(0, 0, 1).expand(E, K, N)))


def by_columns(a, b):
    return sent(torch.bmm(a.transpose(1, 2), b.transpose(1, 2)))


def grouped(a, b, offsets):
    return sent(torch._grouped_mm(a, b, offsets))


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.rest_slow(2)
@pytest.mark.parametrize(
    ("function", "inputs", "role"),
    [
        (batched, (A, B), "batched matmul+encode"),
        (grouped, (ROWS, B, OFFSETS), "grouped matmul+encode"),
        (biased, (A, B, BIASES), "batched matmul+encode"),
        (experts, (A, B), "batched matmul+encode"),
        (shared_weight, (A, B), "batched matmul+encode"),
        (by_columns, (A.transpose(1, 2).contiguous(), B.transpose(1, 2).contiguous()), "batched"),
        (grouped, (ROWS, B.transpose(1, 2).contiguous().transpose(1, 2), OFFSETS), "grouped"),
    ],
)
def test_matmul_of_several_matrices_encodes_its_own_result(fake_group, function, inputs, role):
    fake_group(RANKS)
    gm, _, plan = run(function, forced("int8", chunks=1), *inputs, passes=before("lower"))
    assert roles_of(gm)[0].startswith(role)
    assert f"in one kernel each: {role}" in plan.sites[0].reason
    assert not {n.target for n in gm.graph.nodes} & {aten.bmm.default, aten._grouped_mm.default}
    assert product_of(gm).bias == (function is biased)
    assert product_of(gm).rows == RANKS


@pytest.mark.slow
@pytest.mark.parametrize("function", [batched, grouped])
def test_code_of_inductor_calls_the_kernel(fake_group, function):
    fake_group(RANKS)
    given = (A, B) if function is batched else (ROWS, B, OFFSETS)
    gm, inputs, _ = run(function, forced("int8", chunks=1), *given)
    work = next(n.meta[CODED] for n in gm.graph.nodes if n.meta.get(CODED))
    wire = RANKS * codec("int8").wire_bytes(E * T * N // RANKS, BF16)
    moved = sum(each.nbytes for each in given) + wire
    assert work == (
        ("int8", "matmul", 2 * E * T * K * N, moved),
        ("int8", "in matmul", E * T * N, 0),
    )
    assert not any(n.target is aten.copy_.default for n in gm.graph.nodes)  # of an input
    code = fake_cuda.code_of(gm, inputs)
    assert "def matmul_encode(" in code
    assert "extern_kernels.bmm" not in code
    assert "_grouped_mm" not in code


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(batched, (A, B)), (biased, (A, B, BIASES)), (grouped, (ROWS, B, OFFSETS))],
)
def test_cpu_says_why_not(fake_group, function, inputs):
    """On a CPU the matmul stays separate."""
    fake_group(RANKS)
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    given = GraphInput(
        gm=gm,
        direction="forward",
        policy=forced("int8", chunks=1, lowering="kernel"),
        profile=default_profile("cpu"),
        stateless=None,
        kernels=True,
    )
    outcome = manager.run(given, "0", before("lower"), strict=True)
    assert outcome.error is None
    assert "matmul+encode: cpu has no kernel for it" in outcome.plan.sites[0].reason
    assert not any(n.target is matmul.MATMUL for n in gm.graph.nodes)


def few_rows(a, b):
    return sent(torch.bmm(a.narrow(1, 0, 36), b))


def tokens_first(a, b):
    return sent(torch.bmm(a, b).transpose(0, 1).contiguous())


def scaled_bias(a, b, c):
    return sent(torch.baddbmm(c, a, b, alpha=2))


def bias_of_values(a, b, c):
    return sent(torch.baddbmm(c.expand(E, T, N).contiguous(), a, b))


def all_columns(a, b):
    return sent(torch._grouped_mm(a, b))


def other_sums(a, b, offsets):
    return sent(torch._grouped_mm(a.t(), b.view(E * K, N), offsets))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (few_rows, (A, B), "parts of both have 36, and tiles 64 or more"),
        (batched, (A, B[:, :, :1000].contiguous()), "blocks cross rows"),
        (batched, (A.float(), B.float()), "float32 operands"),
        (tokens_first, (A, B), ""),
        (scaled_bias, (A, B, BIASES), "its terms are scaled"),
        (bias_of_values, (A, B, BIASES), "its bias is no row"),
        (all_columns, (A, B), "no rows and a matrix for each group"),
        (other_sums, (torch.empty(E * K, T, dtype=BF16), B, OFFSETS), "no rows and a matrix"),
    ],
)
def test_matmul_of_several_matrices_stays_apart_where_it_must(fake_group, function, inputs, said):
    fake_group(RANKS)
    gm, _, plan = run(function, forced("int8", chunks=1), *inputs, passes=before("lower"))
    assert not any(n.target is matmul.MATMUL for n in gm.graph.nodes)
    assert any("mm" in str(n.target) for n in gm.graph.nodes)
    assert said in plan.sites[0].reason
    assert bool(said) == ("not fused: matmul+encode: " in plan.sites[0].reason)


def test_operations_of_all_batches_count(fake_group):
    """The time of the fused matmul and of its encode includes all batches."""
    fake_group(RANKS)
    profile = default_profile("cuda")
    kernels = dataclasses.replace(profile.kernels, in_matmul=1000.0, gflops=1000.0)
    slow = dataclasses.replace(profile, kernels=kernels)
    policy = forced("int8", chunks=1)
    gm, _, plan = run(batched, policy, A, B, passes=before("lower"), profile=slow)
    assert roles_of(gm)[0] == "encode"
    alone = 2 * E * T * K * N / 1000.0 / 1e3 + kernels.launch_us
    encode = E * T * N * kernels.rates["int8"].encode_ns
    assert f"together {alone + encode:,.0f} us" in plan.sites[0].reason


# --- epilogues ------------------------------------------------------------------------------------


def silu(x, w):
    return sent(F.silu(x @ w))


def gelu(x, w):
    return sent(F.gelu(x @ w))


def gelu_by_tanh(x, w):
    return sent(F.gelu(x @ w, approximate="tanh"))


def with_residual(x, w, r):
    return sent(r + x @ w)


def gated(x, w, r):
    return sent(F.silu(x @ w) * r)


def two_products(x, w, v):
    return sent(F.silu(x @ v) * (x @ w))


def scaled(x, w):
    return sent((x @ w) * 3)


def in_three_dimensions(x, w, r):
    return sent((x @ w).view(E, T, N) + r.view(E, T, N))


def with_row(x, w, r):
    return sent(F.gelu(x @ w + r.narrow(0, 0, 1)))


def with_rows_of_batches(a, b, c):
    return sent(torch.bmm(a, b) + c)


@pytest.mark.rest_slow(3)
@pytest.mark.parametrize(
    ("function", "inputs", "role", "operands"),
    [
        (silu, (ROWS, WEIGHT), "matmul+exp+div+encode", []),
        (gelu, (ROWS, WEIGHT), "matmul+erf+mul+encode", []),
        (with_residual, (ROWS, WEIGHT, RESIDUAL), "matmul+add+encode", [VALUE]),
        (gelu_by_tanh, (ROWS, WEIGHT), "matmul+mul+mul+add+tanh+mul+encode", []),
        (gated, (ROWS, WEIGHT, RESIDUAL), "matmul+exp+div+mul+encode", [VALUE]),
        (two_products, (ROWS, WEIGHT, WEIGHT), "matmul+mul+encode", [VALUE]),
        (scaled, (ROWS, WEIGHT), "matmul+encode", []),
        (in_three_dimensions, (ROWS, WEIGHT, RESIDUAL), "matmul+add+encode", [VALUE]),
        (with_row, (ROWS, WEIGHT, RESIDUAL), "matmul+add+erf+mul+encode", [COLUMN]),
        (with_rows_of_batches, (A, B, BIASES), "batched matmul+add+encode", [BATCH]),
    ],
)
def test_operations_after_a_matmul_are_in_its_kernel(fake_group, function, inputs, role, operands):
    fake_group(RANKS)
    gm, _, plan = run(function, forced("int8", chunks=1), *inputs, passes=before("lower"))
    assert roles_of(gm)[0] == role
    assert f"in one kernel each: {role}" in plan.sites[0].reason
    assert [each.per for each in product_of(gm).epilogue.operands] == operands
    wire = next(n for n in gm.graph.nodes if n.target is matmul.MATMUL)
    (user,) = (n for n in gm.graph.nodes if wire in n.all_input_nodes)
    assert user.target not in (aten.mul.Tensor, aten.add.Tensor)


FUNCTIONS = [
    (silu, (ROWS, WEIGHT)),
    (gelu, (ROWS, WEIGHT)),
    (gelu_by_tanh, (ROWS, WEIGHT)),
    (gated, (ROWS, WEIGHT, RESIDUAL)),
    (two_products, (ROWS, WEIGHT, WEIGHT)),
    (scaled, (ROWS, WEIGHT)),
    (with_row, (ROWS, WEIGHT, RESIDUAL)),
    (with_rows_of_batches, (A, B, BIASES)),
    (biased, (A, B, BIASES)),
]


def evaluated(gm, inputs, end) -> dict:
    """Return the values of the nodes of a graph before a node."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in gm.graph.nodes:
        if node is end:
            break
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("function", "inputs"), FUNCTIONS)
def test_matched_operations_compute_what_the_graph_did(fake_group, function, inputs):
    """The product that the pass makes of a graph has the bits of the graph's values."""
    fake_group(RANKS)
    random = torch.Generator().manual_seed(0)
    given = [torch.randint(-9, 10, x.shape, generator=random).to(x.dtype) / 8 for x in inputs]
    with fake_cuda.a_card():
        plain, _ = fake_cuda.trace(function, *inputs)
    target = torch.ops._c10d_functional.all_reduce.default
    start = next(n for n in plain.graph.nodes if n.target is target)
    want = evaluated(plain, given, start)[start.args[0]]
    gm, _, _ = run(function, forced("int8", chunks=1), *inputs, passes=before("lower"))
    node = next(n for n in gm.graph.nodes if n.target is matmul.MATMUL)
    values = evaluated(gm, given, node)
    found = matmul.values([values[each] for each in node.args[0]], product_of(gm))
    assert torch.equal(found.to(BF16), want.reshape(found.shape))


def saved(x, w):
    y = x @ w
    return [*sent(F.gelu(y)), y + 1]


def saved_inside(x, w):
    y = F.gelu(x @ w)
    return [*sent(torch.relu(y)), y + 1]


def with_power(x, w):
    return sent((x @ w) ** 3)


def with_double(x, w):
    return sent((x @ w).double().mul(2).to(BF16))


def with_factor(x, w, r):
    return sent(torch.add(x @ w, r, alpha=2))


def with_columns(x, w, r):
    return sent(x @ w + r.narrow(1, 0, 1))


def with_transposed(x, w, r):
    return sent(x @ w + r.view(N, E * T).t())


def with_position(x, w, offsets):
    return sent((x @ w) * offsets.narrow(0, 0, 1))


def with_written_residual(x, w, r):
    y = x @ w + r
    r.mul_(2)
    return sent(y * 2)


def with_written_view(x, w, r):
    y = x @ w + r
    r.view(-1).mul_(2)
    return sent(y * 2)


def with_written_weight(x, w):
    y = x @ w
    w.add_(1)
    return sent(torch.sigmoid(y))


def with_doubled_residual(x, w, r):
    y = x @ w
    return sent(y + r.mul_(2))


def with_sum_in_place(x, w):
    y = x @ w
    return sent(y.add_(1))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (saved, (ROWS, WEIGHT), "others take the matmul's result too"),
        (saved_inside, (ROWS, WEIGHT), "others take the matmul's result too"),
        (with_power, (ROWS, WEIGHT), "no kernel computes pow before an encode"),
        (with_double, (ROWS, WEIGHT), "a dtype that kernels do not compute"),
        (with_factor, (ROWS, WEIGHT, RESIDUAL), "add: its terms are scaled"),
        (with_columns, (ROWS, WEIGHT, RESIDUAL), "add: of a tensor of another shape"),
        (with_transposed, (ROWS, WEIGHT, RESIDUAL), "add: of a tensor of another shape"),
        (with_position, (ROWS, WEIGHT, OFFSETS), "mul: of a tensor of another shape"),
        (with_written_residual, (ROWS, WEIGHT, RESIDUAL), "an input is written in place before"),
        (with_written_view, (ROWS, WEIGHT, RESIDUAL), "an input is written in place before"),
        (with_written_weight, (ROWS, WEIGHT), "an input is written in place before"),
    ],
)
def test_operations_that_no_kernel_computes_stay(fake_group, function, inputs, said):
    fake_group(RANKS)
    gm, _, plan = run(function, forced("int8", chunks=1), *inputs, passes=before("lower"))
    assert not any(n.target is matmul.MATMUL for n in gm.graph.nodes)
    assert any(n.target is aten.mm.default for n in gm.graph.nodes)
    assert "not fused: matmul+encode: " in plan.sites[0].reason
    assert said in plan.sites[0].reason


def test_memory_of_the_values_is_saved_too(fake_group):
    """A matmul that encodes is slower here than both apart. The residual takes a kernel more."""
    fake_group(RANKS)
    profile = default_profile("cuda")
    values, launch = E * T * N, profile.kernels.launch_us
    encode = profile.kernels.time_us("int8", "encode", values)
    ratio = (encode + launch / 2) / profile.kernels.values_us("int8", "encode", values)
    kernels = dataclasses.replace(profile.kernels, in_matmul=ratio)
    slow = dataclasses.replace(profile, kernels=kernels)
    how = {"passes": before("lower"), "profile": slow}
    gm, _, _ = run(lambda x, w: sent(x @ w), forced("int8", chunks=1), ROWS, WEIGHT, **how)
    assert roles_of(gm)[0] == "encode"
    gm, _, _ = run(with_residual, forced("int8", chunks=1), ROWS, WEIGHT, RESIDUAL, **how)
    assert roles_of(gm)[0] == "matmul+add+encode"


def test_operand_that_was_written_before_it_is_read_is_taken(fake_group):
    fake_group(RANKS)
    given = (ROWS, WEIGHT, RESIDUAL)
    gm, _, _ = run(with_doubled_residual, forced("int8", chunks=1), *given, passes=before("lower"))
    written = next(n for n in gm.graph.nodes if n.target is aten.mul_.Tensor)
    (node,) = written.users
    assert node.target is matmul.MATMUL
    assert node.args[0][2] is written


def test_operator_in_place_is_no_reshape(fake_group):
    """Its fake result has the memory of its input too."""
    fake_group(RANKS)
    given = (ROWS, WEIGHT)
    gm, _, _ = run(with_sum_in_place, forced("int8", chunks=1), *given, passes=before("lower"))
    written = next(n for n in gm.graph.nodes if n.target is aten.add_.Tensor)
    assert written.args[0].target is aten.mm.default
    assert roles_of(gm)[0] == "encode"
