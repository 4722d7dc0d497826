"""A decode, the addition of a residual and the norm after it are one kernel, which also writes the
residual stream and what backward needs."""

from __future__ import annotations

import pytest
import torch
from graphs import ops, trace
from torch.nn.functional import layer_norm

from commpass.costmodel import default_profile
from commpass.lowering import Generated, fused
from commpass.lowering.chain import Add, Cast, Decode, Normalize, Scale, Shift, Store, Sum
from commpass.passes import GraphInput, manager
from commpass.passes import lower as lower_pass
from commpass.passes.fx.marks import CODED, MARK
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS, H = 4, 256
SHAPE = (2, 32, H)
F32, BF16 = torch.float32, torch.bfloat16
NAMES = [step.name for step in manager.PASSES]
BEFORE_FUSE = manager.PASSES[: NAMES.index("fuse")]
BEFORE_LOWER = manager.PASSES[: NAMES.index("lower")]
CHAINS = (fused.FUSED, fused.FUSED_RESULTS)


def forced(codec: str = "int8", algorithm: str = "two_shot") -> Policy:
    return Policy(rules=[Rule(codec=codec, algorithm=algorithm, force=True, lowering="kernel")])


def run(function, *inputs, policy=None, passes=BEFORE_LOWER):
    gm = trace(function, *inputs)
    gm.graph.eliminate_dead_code()
    given = GraphInput(
        gm=gm,
        direction="forward",
        policy=policy or forced(),
        profile=default_profile("cpu"),
        stateless=None,
        kernels=True,
    )
    outcome = manager.run(given, "0", passes, strict=True)
    if outcome.error is not None:
        raise outcome.error
    return gm, outcome.plan


def roles(gm) -> list[str]:
    return [node.meta[MARK].role for node in gm.graph.nodes if node.target in CHAINS]


def steps(gm) -> list[type]:
    (*_, node) = (node for node in gm.graph.nodes if node.target in CHAINS)
    return [type(step) for step in fused.lookup(node.args[1]).steps]


def summed(x):
    return wait(ops.all_reduce(torch.relu(x), "sum", "0")).view(SHAPE)


def rms(h, w, cast=True):
    x = h.to(F32)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * y.to(h.dtype) if cast else (y * (1 + w.float())).to(h.dtype)


def inputs(dtype=F32):
    random = torch.Generator().manual_seed(0)
    shapes = ((64, H), SHAPE, (H,), (H,))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def llama(x, r, w, b):
    h = summed(x) + r
    return [h, rms(h, w)]


def llama_for_inference(x, r, w, b):
    return [rms(summed(x) + r, w)]


def gemma(x, r, w, b):
    h = summed(x) + r
    return [h, rms(h, w, cast=False)]


def gemma_2(x, r, w, b):
    h = rms(summed(x), w, cast=False) + r
    return [h, rms(h, b, cast=False)]


def gpt(x, r, w, b):
    h = summed(x) + r
    return [h, layer_norm(h, (H,), w, b)]


def saved(x, r, w, b):
    h = summed(x) + r
    y = h.to(F32)
    factor = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [h, w * (y * factor).to(h.dtype), factor]


def saved_by_layer_norm(x, r, w, b):
    h = summed(x) + r
    made = torch.ops.aten.native_layer_norm(h.to(F32), (H,), w.to(F32), b.to(F32), 1e-5)
    return [h, *made]


def without_addition(x, r, w, b):
    return [rms(summed(x), w)]


# --- what is fused --------------------------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("function", "role", "further"),
    [
        (llama, "decode+add+norm", 1),
        (llama_for_inference, "decode+add+norm", 0),
        (gemma, "decode+add+norm", 1),
        (gemma_2, "decode+norm+add+norm", 1),
        (gpt, "decode+add+norm", 1),
        (saved, "decode+add+norm", 2),
        (saved_by_layer_norm, "decode+add+norm", 3),
        (without_addition, "decode+norm", 0),
    ],
)
def test_decode_addition_and_norm_are_one_kernel(fake_group, function, role, further, dtype):
    fake_group(RANKS)
    gm, plan = run(function, *inputs(dtype))
    assert roles(gm)[-1] == role
    assert role in plan.sites[0].reason
    (*_, node) = (node for node in gm.graph.nodes if node.target in CHAINS)
    results = node.meta["val"]
    assert (len(results) - 1 if isinstance(results, list) else 0) == further
    left = {str(node.target) for node in gm.graph.nodes}
    assert not {name for name in left if "rsqrt" in name or "mean" in name or "pow" in name}


def test_steps_are_those_of_the_graph(fake_group):
    fake_group(RANKS)
    gm, _ = run(llama, *inputs(BF16), policy=forced(algorithm="one_shot"))
    assert steps(gm) == [Decode, Sum, Cast, Add, Store, Normalize, Cast, Scale]
    gm, _ = run(gpt, *inputs())
    assert steps(gm) == [Decode, Add, Store, Normalize, Scale, Shift]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "function", [llama, gemma, gemma_2, gpt, saved, saved_by_layer_norm, without_addition]
)
def test_numbers_are_those_of_the_operators(fake_group, function, dtype):
    """What comes before the first norm has the same bits; a norm sums in another order."""
    fake_group(2)
    given = inputs(dtype)
    plain, _ = run(function, *given, passes=BEFORE_FUSE)
    one, _ = run(function, *given)
    assert roles(one)
    for number, (a, b) in enumerate(zip(plain(*given), one(*given), strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if number == 0 and function not in (gemma_2, without_addition):
            assert torch.equal(a, b)
        close = {"rtol": 1e-5, "atol": 1e-5} if a.dtype == F32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(a, b, **close)


def test_kernel_is_generated_and_writes_all_results(fake_group, monkeypatch):
    fake_group(RANKS)
    made = []
    monkeypatch.setattr(lower_pass, "make", made.extend)
    gm, _ = run(saved, *inputs(), passes=manager.PASSES)
    assert all(isinstance(source, Generated) for source in made)
    assert [len(source.pieces) for source in made] == [1, 1, 3]
    call = [node for node in gm.graph.nodes if "kernel_" in str(node.target)][-1]
    assert sorted(buffer.meta["val"].numel() for buffer in call.kwargs["outputs"]) == [
        64,
        64 * H,
        64 * H,
    ]
    assert call.meta[MARK].role == call.kwargs["role"] == "decode+add+norm"
    work = call.meta[CODED]
    assert [each[1] for each in work] == ["decode", "bytes"]
    assert work[1][2] == 64 * H * 4 * 3 + 64 * 4


def test_bytes_that_a_kernel_moves_take_their_time():
    kernels = default_profile("cpu").kernels
    assert kernels.time_us("norm", "bytes", 1e6) == pytest.approx(1e3 / kernels.gbytes_per_s)


# --- what must not be -----------------------------------------------------------------------------


def with_a_sum_used_before_the_residual(x, r, w, b):
    """The residual depends on the decoded values, which no kernel can have before it runs."""
    h = rms(summed(x), w)
    return [h + torch.sin(h)]


def of_a_norm_and_its_input(x, r, w, b):
    h = summed(x) + r
    return [rms(h, w) + h]


def of_other_rows(x, r, w, b):
    h = summed(x).transpose(1, 2) + r.transpose(1, 2)
    return [h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)]


@pytest.mark.parametrize(
    ("function", "role"),
    [
        (with_a_sum_used_before_the_residual, "decode+norm"),
        (of_a_norm_and_its_input, "decode+add+norm"),
        (of_other_rows, "decode"),
    ],
)
def test_kernel_ends_before_what_needs_its_results(fake_group, function, role):
    fake_group(RANKS)
    given = inputs()
    gm, _ = run(function, *given)
    assert roles(gm)[-1] == role
    gm.graph.lint()
    plain, _ = run(function, *given, passes=BEFORE_FUSE)
    torch.testing.assert_close(gm(*given), plain(*given), rtol=1e-5, atol=1e-5)


def test_norm_that_no_unit_holds_stays_with_the_reason(fake_group):
    fake_group(RANKS)
    width = 65_536
    x = torch.empty(8, width)
    gm, plan = run(
        lambda x, r, w: [rms(wait(ops.all_reduce(torch.relu(x), "sum", "0")) + r, w)],
        *(x, torch.empty(8, width), torch.empty(width)),
    )
    assert roles(gm)[-1] == "decode+add"
    assert (
        "not fused: decode+add+norm: no 32768 values hold whole blocks and whole norms"
        in plan.sites[0].reason
    )


@pytest.mark.parametrize("width", [100, 256])
def test_norm_after_a_padded_block_stays_with_the_reason(fake_group, width):
    fake_group(RANKS)
    x, w = torch.empty(8, width), torch.empty(width)
    _, plan = run(
        lambda x, r, w: [rms(wait(ops.all_reduce(torch.relu(x), "sum", "0")) + r, w)], x, x, w
    )
    assert ("its last block is padded" in plan.sites[0].reason) == (width == 100)


def test_lossless_values_are_normalized_apart(fake_group):
    """The lossless policy leaves norms to the compiler, and so their bits."""
    fake_group(RANKS)
    gm, _ = run(llama, *inputs(BF16), policy=forced("exponent", "two_shot"))
    assert not any("norm" in role for role in roles(gm))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpu_graph_has_one_call_with_all_results(fake_group):
    pytest.importorskip("triton", reason="kernels are written in Triton")
    import fake_cuda
    from test_fuse import FUNCTIONAL
    from test_fuse import run as run_on_card

    fake_group(RANKS)
    gm, given, plan = run_on_card(saved, forced(), *inputs(BF16))
    assert "decode+add+norm" in plan.sites[0].reason
    calls = [node for node in gm.graph.nodes if node.target is FUNCTIONAL]
    assert [len(call.kwargs["tensors_to_clone"]) for call in calls] == [1, 1, 3]
    code = fake_cuda.code_of(gm, given)
    assert "def decode_add_norm(" in code
    assert "clone" not in code.split("def call")[-1]
