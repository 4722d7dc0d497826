"""Coded operators are fused into one kernel where possible, and otherwise stay separate, with the
reason in the plan.

The graphs are a GPU's, and nothing runs on one.
"""

from __future__ import annotations

import dataclasses
import types
from unittest.mock import patch

import fake_cuda
import pytest
import torch
from graphs import ops

from commpass import lowering
from commpass.codecs import codec as codec_named
from commpass.codecs import operators
from commpass.costmodel import default_profile
from commpass.errors import VerifyError
from commpass.lowering import fused, generated, matmul
from commpass.lowering.pointwise import Epilogue, Operation
from commpass.passes import GraphInput, manager
from commpass.passes.fuse import fuse
from commpass.passes.fx.marks import CODED, MARK, Mark
from commpass.passes.fx.ops import is_heavy
from commpass.passes.lower import lower
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

from commpass.lowering.gpu import graph

wait = ops.wait_tensor
FUNCTIONAL = torch.ops.higher_order.triton_kernel_wrapper_functional
RANKS = 4
NAMES = [step.name for step in manager.PASSES]
X = torch.empty(64, 256, dtype=torch.bfloat16)


def forced(codec: str, algorithm: str = "two_shot", **more) -> Policy:
    return Policy(rules=[Rule(codec=codec, algorithm=algorithm, force=True, **more)])


def run(function, policy, *inputs, passes=manager.PASSES, profile="cuda"):
    """Return a graph of a GPU after some passes, its fake inputs and its plan."""
    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(function, *inputs)
        road = GraphInput(
            gm=gm,
            direction="forward",
            policy=policy,
            profile=default_profile(profile) if isinstance(profile, str) else profile,
            stateless=None,
            kernels=True,
        )
        outcome = manager.run(road, "0", passes, strict=True)
    if outcome.error is not None:
        raise outcome.error
    return gm, inputs, outcome.plan


def fused_roles(gm) -> list[str]:
    return [n.meta[MARK].role for n in gm.graph.nodes if n.target is fused.FUSED]


def before(name: str):
    return manager.PASSES[: NAMES.index(name)]


def summed(x):
    return [wait(ops.all_reduce(torch.relu(x), "sum", "0")) * 2]


def with_residual(x, r):
    return [wait(ops.all_reduce(torch.relu(x), "sum", "0")) + r]


# --- what is fused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "algorithm", "roles"),
    [
        ("int8", "two_shot", ["encode", "decode+sum+encode", "decode"]),
        ("rotated", "two_shot", ["enter+encode", "decode+sum+encode", "decode+leave"]),
        ("fp8", "one_shot", ["encode", "decode+sum"]),
        ("rotated", "one_shot", ["enter+encode", "decode+sum+leave"]),
        ("nvfp4", "one_shot", ["encode", "decode+sum"]),
        ("mxfp4", "two_shot", ["encode", "decode+sum+encode", "decode"]),
        ("int4", "two_shot(chunks=2)", ["encode", "decode+sum+encode", "decode"] * 2),
    ],
)
def test_all_between_two_exchanges_is_one_kernel(fake_group, codec, algorithm, roles):
    fake_group(RANKS)
    gm, _, plan = run(summed, forced(codec, algorithm), X, passes=before("lower"))
    assert sorted(fused_roles(gm)) == sorted(roles)
    left = [n for n in gm.graph.nodes if n.target in operators.IMPLEMENTATIONS]
    assert {n.target for n in left} <= {fused.FUSED, ops_join()}
    assert plan.sites[0].fused
    assert plan.sites[0].lowering == "kernel"
    assert "not fused" not in plan.sites[0].reason
    for role in set(roles):
        assert role in plan.sites[0].reason


def ops_join():
    return torch.ops.commpass.join.default


def test_sum_is_not_encoded_by_its_kernel_if_the_peak_of_a_row_comes_first(fake_group):
    fake_group(RANKS)
    gm, _, plan = run(summed, forced("nvfp4", "two_shot"), X, passes=before("lower"))
    assert sorted(fused_roles(gm)) == ["decode", "encode"]
    assert "decode+sum+encode: nvfp4: the peak of a row must be known" in plan.sites[0].reason


@pytest.mark.slow
def test_peaks_of_rows_are_computed_in_the_graph_and_given_to_the_kernel(fake_group):
    fake_group(RANKS)
    gm, inputs, _ = run(with_residual, forced("nvfp4", "one_shot"), X, X)
    calls = [n for n in gm.graph.nodes if n.target is FUNCTIONAL]
    assert [n.kwargs["tensors_to_clone"] for n in calls] == [["output"]] * 2
    peaks = calls[0].kwargs["kwargs"]["row_peaks"].meta["val"]
    assert (tuple(peaks.shape), peaks.dtype) == ((1,), torch.float32)
    assert "row_peaks" in fake_cuda.code_of(gm, inputs)


def test_mean_and_a_residual_are_part_of_the_kernel(fake_group):
    fake_group(RANKS)

    def mean(x, r):
        return [wait(ops.all_reduce(torch.relu(x), "avg", "0")) + r]

    gm, _, _ = run(mean, forced("int8", "one_shot"), X, X, passes=before("lower"))
    node = next(n for n in gm.graph.nodes if n.meta.get(MARK) and "sum" in n.meta[MARK].role)
    words = [type(step).__name__ for step in fused.lookup(node.args[1]).steps]
    assert words == ["Decode", "Sum", "Divide", "Cast", "Add"]
    assert not any(n.target is torch.ops.aten.add.Tensor for n in gm.graph.nodes)


@pytest.mark.slow
def test_inductor_gets_calls_that_it_sees(fake_group):
    fake_group(RANKS)
    gm, inputs, plan = run(with_residual, forced("rotated"), X, X)
    calls = [n for n in gm.graph.nodes if n.target is FUNCTIONAL]
    assert [n.kwargs["tensors_to_clone"] for n in calls] == [["output"]] * 3
    assert not any(n.target in operators.IMPLEMENTATIONS for n in gm.graph.nodes)
    assert sum(len(n.meta.get(CODED, ())) for n in gm.graph.nodes) == 4  # 2 encodes, 2 decodes
    code = fake_cuda.code_of(gm, inputs)
    for name in ("enter_encode", "decode_sum_encode", "decode_leave_add"):
        assert f"def {name}(" in code
        assert f"{name}_" in code.split("def call")[-1]
    assert "clone" not in code.split("def call")[-1]
    assert plan.sites[0].fused


@pytest.mark.slow
def test_equal_kernel_is_defined_once(fake_group):
    fake_group(RANKS)

    def twice(x):
        y = wait(ops.all_reduce(torch.relu(x), "sum", "0")) * 2
        return [wait(ops.all_reduce(torch.sin(y), "sum", "0")) * 2]

    gm, inputs, _ = run(twice, forced("int8"), X)
    assert sum(n.target is FUNCTIONAL for n in gm.graph.nodes) == 6
    code = fake_cuda.code_of(gm, inputs)
    assert code.count("def decode_sum_encode(") == 1


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("codec", ["int8", "rotated", "int4(stored=bf16)", "taco"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "two_shot(chunks=2)"])
def test_numbers_are_those_of_the_operators(fake_group, codec, algorithm):
    """The fused operators compute the same as those that they replace, run on a CPU."""
    fake_group(2)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=random).to(torch.bfloat16)

    def graph(passes, any_device):
        from graphs import trace

        gm = trace(summed, x)
        profile = default_profile("cpu")
        kernels = forced(codec, algorithm, lowering="kernel")
        road = GraphInput(
            gm=gm, direction="forward", policy=kernels, profile=profile, stateless=None
        )
        with patch.object(lowering, "unsupported_reason", any_device):
            outcome = manager.run(road, "0", passes)
        assert outcome.error is None
        return gm

    plain = graph(before("fuse"), lowering.unsupported_reason)
    one = graph(before("lower"), lambda chain, numel, device: "")
    assert fused_roles(one)
    assert not fused_roles(plain)
    for a, b in zip(plain(x), one(x), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


# --- what must not be -----------------------------------------------------------------------------


def test_results_that_several_take_are_not_fused_with_one_of_them(fake_group):
    fake_group(RANKS)

    def shared(x, r):
        y = wait(ops.all_reduce(torch.relu(x), "sum", "0"))
        return [y + r, y * 2]

    gm, _, plan = run(shared, forced("int8"), X, X, passes=before("lower"))
    assert "decode+add" not in fused_roles(gm)
    assert "others take its values too" in plan.sites[0].reason


@pytest.mark.parametrize(
    ("other", "of"),
    [
        (torch.empty(64, 1, dtype=torch.bfloat16), "another shape"),
        (torch.empty(64, 256), "dtype"),
        (torch.empty(256, 64, dtype=torch.bfloat16).t(), "layout"),
    ],
)
def test_addition_of_something_else_stays(fake_group, other, of):
    fake_group(RANKS)
    gm, _, plan = run(with_residual, forced("int8"), X, other, passes=before("lower"))
    assert fused_roles(gm)[-1] == "decode"
    assert of in plan.sites[0].reason


@pytest.mark.parametrize("first", [True, False])
def test_addition_with_a_factor_stays(fake_group, first):
    def function(x, r):
        reduced = wait(ops.all_reduce(torch.relu(x), "sum", "0"))
        pair = (reduced, r) if first else (r, reduced)
        return [torch.add(*pair, alpha=2)]

    fake_group(RANKS)
    gm, _, plan = run(function, forced("int8"), X, X, passes=before("lower"))
    (added,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert added.kwargs == {"alpha": 2}
    assert fused_roles(gm)[-1] == "decode"
    assert "of a number" in plan.sites[0].reason


def test_micro_shards_travel_in_parts(fake_group):
    fake_group(RANKS)
    gm, _, plan = run(summed, forced("int8", "two_shot(shards=2)"), X, passes=before("lower"))
    assert fused_roles(gm) == []
    assert "its wire travels in parts" in plan.sites[0].reason
    assert not plan.sites[0].fused


@pytest.mark.parametrize(
    ("policy", "x", "said"),
    [
        (forced("int8", lowering="kernel"), torch.empty(64, 256, dtype=torch.float64), "float64"),
        (forced("int8(block=24)", lowering="kernel"), X, "blocks of 24 values"),
    ],
)
def test_plain_form_takes_over_with_the_reason(fake_group, policy, x, said):
    fake_group(RANKS)
    gm, _, plan = run(summed, policy, x, passes=before("lower"))
    assert fused_roles(gm) == []
    assert said in plan.sites[0].reason


def test_selection_is_one_operator_with_nothing_to_fuse(fake_group):
    fake_group(RANKS)
    gm, _, plan = run(
        summed, forced("topk", "sparse", lowering="kernel"), X, passes=before("lower")
    )
    assert fused_roles(gm) == []
    assert "fused" not in plan.sites[0].reason


@pytest.mark.slow
def test_nothing_is_generated_without_triton(fake_group):
    fake_group(RANKS)
    with patch.object(generated, "find_spec", lambda name: None):
        gm, _, plan = run(summed, forced("int8", lowering="kernel"), X, passes=before("lower"))
        assert fused_roles(gm) == []
        assert "Triton is not installed" in plan.sites[0].reason
        _, _, plan = run(summed, forced("int8"), X)
        assert plan.sites[0].lowering == "inline"


@pytest.mark.slow
def test_inline_sites_are_left_to_inductor(fake_group):
    fake_group(RANKS)
    gm, inputs, plan = run(summed, forced("int8", lowering="inline"), X)
    assert not any(n.target is FUNCTIONAL for n in gm.graph.nodes)
    assert not plan.sites[0].fused
    assert "def decode" not in fake_cuda.code_of(gm, inputs)


def test_tensor_of_more_than_2_gib_has_kernels(fake_group):
    """Kernels count values and bytes of wires to 2^31, not bytes of values."""
    fake_group(RANKS)
    large = torch.empty(1 << 20, 1200, dtype=torch.bfloat16, device="meta")
    _, _, plan = run(summed, forced("int8", chunks=1), large, passes=before("rewrite"))
    assert plan.sites[0].bytes > 2**31
    assert plan.sites[0].lowering == "kernel"


def test_nothing_is_done_to_graphs_without_kernels(fake_group):
    fake_group(RANKS)
    gm, _, plan = run(summed, forced("int8", lowering="inline"), X, passes=before("fuse"))
    nodes = list(gm.graph.nodes)
    assert fuse(gm, plan.sites, default_profile("cuda")) == plan.sites
    assert list(gm.graph.nodes) == nodes


# --- with a matmul before the encode --------------------------------------------------------------

A = torch.empty(2048, 512, dtype=torch.bfloat16)
B = torch.empty(512, 1024, dtype=torch.bfloat16)


def multiplied(x, w):
    return [wait(ops.all_reduce(x @ w, "sum", "0")) * 2]


def roles_of(gm) -> list[str]:
    return [n.meta[MARK].role for n in gm.graph.nodes if n.target in operators.IMPLEMENTATIONS]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["int8", "rotated", "fp8", "int4"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_matmul_encodes_its_own_result(fake_group, codec, algorithm):
    fake_group(RANKS)
    policy = forced(codec, algorithm, chunks=1)
    gm, _, plan = run(multiplied, policy, A, B, passes=before("lower"))
    assert roles_of(gm)[0] == "matmul+encode"
    assert not any(n.target is torch.ops.aten.mm.default for n in gm.graph.nodes)
    assert "matmul+encode" in plan.sites[0].reason
    gm, inputs, _ = run(multiplied, policy, A, B)
    code = fake_cuda.code_of(gm, inputs)
    assert "def matmul_encode(" in code
    assert "extern_kernels.mm(" not in code


def test_views_bias_and_relu_may_lie_between(fake_group):
    fake_group(RANKS)

    def linear(x, w, b):
        y = torch.relu(torch.nn.functional.linear(x, w, b))
        return [wait(ops.all_reduce(y.view(4, 512, 1024), "sum", "0")) * 2]

    bias = torch.empty(1024, dtype=torch.bfloat16)
    gm, _, _ = run(linear, forced("int8"), A, B.t().contiguous(), bias, passes=before("lower"))
    assert roles_of(gm)[0] == "matmul+relu+encode"
    node = next(n for n in gm.graph.nodes if n.target in operators.IMPLEMENTATIONS)
    product = matmul.lookup(node.args[1])
    assert product.bias
    assert product.epilogue.functions == ["relu"]


def with_cosine(x, w):
    return [wait(ops.all_reduce(torch.cos(x @ w), "sum", "0")) * 2]


def taken_twice(x, w):
    y = x @ w
    return [wait(ops.all_reduce(y, "sum", "0")) * 2, y + 1]


def mixed_rows(x, w):
    return [wait(ops.all_reduce((x @ w).t(), "sum", "0")) * 2]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("function", "policy", "inputs", "said"),
    [
        (taken_twice, forced("int8"), (A, B), "others take the matmul's result too"),
        (multiplied, forced("int8"), (A, B[:, :1000].contiguous()), "blocks cross rows"),
        (multiplied, forced("int8"), (A[:2046], B), "shards begin inside a row"),
        (multiplied, forced("int8(block=512)"), (A, B), "wider than a tile"),
        (multiplied, forced("int8"), (A.float(), B.float()), "float32 operands"),
        (with_cosine, forced("int8"), (A, B), "no kernel computes cos before an encode"),
        (mixed_rows, forced("int8"), (A, B), ""),
    ],
)
def test_matmul_stays_apart_where_it_must(fake_group, function, policy, inputs, said):
    fake_group(RANKS)
    gm, _, plan = run(function, policy, *inputs, passes=before("lower"))
    assert "matmul+encode" not in roles_of(gm)
    assert any(n.target is torch.ops.aten.mm.default for n in gm.graph.nodes)
    assert said in plan.sites[0].reason
    assert bool(said) == ("not fused" in plan.sites[0].reason)


def test_cost_model_keeps_them_apart_where_that_is_quicker(fake_group):
    fake_group(RANKS)
    profile = default_profile("cuda")
    slow = dataclasses.replace(profile.kernels, in_matmul=1000.0)
    costly = dataclasses.replace(profile, kernels=slow)
    gm, _, plan = run(multiplied, forced("int8"), A, B, passes=before("lower"), profile=costly)
    assert roles_of(gm)[0] == "encode"
    assert "apart take" in plan.sites[0].reason


def test_matmul_that_encodes_computes_what_both_did(fake_group):
    fake_group(2)
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 32, generator=random), torch.randn(32, 512, generator=random)
    bias = torch.randn(512, generator=random)
    coder = codec_named("rotated")
    relu = Epilogue((), (Operation("relu", ("v0",), torch.float32),))
    product = matmul.Product(coder, 2, bias=True, epilogue=relu)
    wire = matmul.MATMUL([a, b, bias], matmul.name_of(product))
    want = coder.encode_rows(torch.relu(torch.addmm(bias, a, b)).reshape(2, -1))
    assert torch.equal(wire, want)


# --- lossless -------------------------------------------------------------------------------------


def test_lossless_encode_and_decode_call_kernels():
    """In the graph, where torch can analyze the kernels; elsewhere by operators of commpass."""
    coder, numel = codec_named("exponent"), 2050

    def there_and_back(x):
        with operators.as_operators():
            wire = operators.encode(coder, x)
            static, room = coder.parts(numel, x.dtype)
            parts = wire.narrow(1, 0, static), wire.narrow(1, static, room)
            return [operators.decode_parts(coder, parts, numel, x.dtype)]

    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(there_and_back, torch.empty(4, numel, dtype=torch.bfloat16))
        site = types.SimpleNamespace(name="site", lowering="kernel")
        for node in gm.graph.nodes:
            if node.target in operators.IMPLEMENTATIONS:
                node.meta[MARK] = Mark("site", 0, operators.ROLES[node.target])
        lower(gm, [site])
    if graph.FOLLOWS_ALL_PATHS:
        own = torch.ops.commpass
        targets = (own.exponent_encode.default, own.exponent_decode.default)
        called = [node for node in gm.graph.nodes if node.target in targets]
        assert all(node.args[-1] is True and is_heavy(node) for node in called)
        assert len(called) == 2
    else:
        assert sum(node.target is FUNCTIONAL for node in gm.graph.nodes) == 4
        code = fake_cuda.code_of(gm, inputs)
        names = ["exponent_split", "exponent_place", "exponent_count", "exponent_join"]
        assert [name for name in names if f"def {name}(" not in code] == []


def test_kernel_that_triton_does_not_compile_leaves_the_graph_as_it_was(fake_group):
    fake_group(RANKS)
    from commpass.lowering.gpu import source

    def spoiled(text):
        return source.Source(text.entry, text.text.replace("peak = peak_of(x)", "peak = nothing"))

    whole = source.load.__wrapped__
    with (
        patch("commpass.lowering.gpu.launch.load", lambda text: whole(spoiled(text))),
        pytest.raises(VerifyError, match="Triton does not compile its kernel"),
    ):
        run(summed, forced("int8(block=32)"), X)
