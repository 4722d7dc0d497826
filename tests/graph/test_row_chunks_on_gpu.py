"""Collectives of a GPU graph in chunks of rows, by the cost model, without a GPU."""

from __future__ import annotations

import dataclasses
import re

import fake_cuda
import pytest
import torch
from graphs import ops
from test_order_on_gpu import letters
from tiers import rarely

from commpass.costmodel import Profile, profile_named
from commpass.passes import GraphInput, manager
from commpass.passes.fx.ops import triton_calls
from commpass.passes.post.order import ordered
from commpass.passes.timeline import whole_us
from commpass.policy import Policy, policy_named
from commpass.policy.rules import Rule

BF16 = torch.bfloat16
RANKS, HIDDEN = 8, 8192
H100 = profile_named("nvlink-4")


def block(x, w, residual, weight, w2):
    """The end of one half of a tensor-parallel layer, and the beginning of the next."""
    h = residual + ops.wait_tensor(ops.all_reduce(x @ w, "sum", "0"))
    y = h.float()
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(BF16)
    return [h, (y * weight) @ w2]


def planned(tokens: int, profile: Profile, policy: Policy, hidden: int = HIDDEN):
    """Return the graph of a block for some tokens, its plan, its predicted time and its inputs."""
    shapes = [
        *((tokens, hidden // RANKS), (hidden // RANKS, hidden), (tokens, hidden), (hidden,)),
        (hidden, 28672 // RANKS),
    ]
    like = [torch.empty(shape, dtype=BF16, device="meta") for shape in shapes]
    policy = dataclasses.replace(policy, more_memory=10.0)
    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(block, *like)
        gm.graph.eliminate_dead_code()
        given = GraphInput(
            gm=gm,
            direction="forward",
            policy=policy,
            profile=profile,
            stateless=None,
            kernels=True,
        )
        result = manager.run(given, "0", strict=True)
    if result.error is not None:
        raise result.error
    return gm, result.plan, whole_us(gm, profile), inputs


def without_chunks(policy: Policy) -> Policy:
    return dataclasses.replace(policy, skip=(*policy.skip, "chunk"))


LOSSLESS, BALANCED = policy_named("lossless"), policy_named("balanced")


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(RANKS)


@pytest.mark.parametrize(
    ("tokens", "profile", "policy"),
    [
        (4096, H100, LOSSLESS),
        rarely(8192, H100, BALANCED),
        rarely(2048, profile_named("infiniband-edr"), BALANCED),
        rarely(16384, profile_named("infiniband-edr"), LOSSLESS),
    ],
)
def test_cost_model_splits_where_the_whole_graph_gains(tokens, profile, policy):
    _, plan, split_us, _ = planned(tokens, profile, policy)
    _, whole, us, _ = planned(tokens, profile, without_chunks(policy))
    (split,) = plan.split
    assert len(plan) == len(split.rows) in (2, 4)
    assert sum(split.rows) == tokens
    assert not whole.split
    assert split_us < (1 - profile.margin) * us


@pytest.mark.parametrize("tokens", [512, 1024])
def test_small_matmuls_are_not_split(tokens):
    """A chunk of rows would leave most multiprocessors without a tile: it takes as long as all."""
    _, plan, _, _ = planned(tokens, H100, LOSSLESS)
    assert not plan.split


def test_matmuls_that_take_longer_than_the_exchange_gains_are_not_split():
    _, plan, _, _ = planned(2048, profile_named("nvlink"), LOSSLESS)
    assert not plan.split


CALL = re.compile(r"_c10d_functional\.(?:all_\w+|(wait)_tensor)\.default\(|extern_kernels\.(mm)\(")


@pytest.mark.every
def test_exchange_of_a_chunk_starts_before_the_next_matmul():
    gm, plan, _, inputs = planned(4096, H100, LOSSLESS)
    many = len(plan.split[0].rows)
    with ordered():
        code = fake_cuda.code_of(gm, inputs)
    body = code[code.index("def call(") :]
    calls = ["w" if wait else "m" if mm else "s" for wait, mm in CALL.findall(body)]
    story = "".join(calls)
    assert story.startswith("ms" * many)
    assert story.count("w") == many
    assert story.index("w") > story.rindex("s")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", rarely("rotated")])
def test_kernels_of_chunks_of_rows_write_into_their_own_outputs(codec):
    """Two hops for each chunk, and three kernels, one after a matmul and one with the next norm."""
    rule = Rule(codec=codec, algorithm="two_shot", force=True, lowering="kernel")
    policy = Policy(rules=[rule], error_sample_rate=0.0)
    gm, plan, _, inputs = planned(2048, profile_named("infiniband-edr"), policy)
    kernels = [node for node in gm.graph.nodes if node.target in triton_calls()]
    many = sum(site.chunks for site in plan)
    assert len(plan) == len(plan.split[0].rows) == 4
    assert len(kernels) == 3 * many
    with ordered():
        code = fake_cuda.code_of(gm, inputs)
    body = code[code.index("def call(") :]
    calls = letters(body)
    assert calls.count("k") == 3 * many
    assert calls.count("s") == calls.count("w") == 2 * many
    assert "w" not in calls[: calls.index("s", calls.index("s") + 1)]
    assert "clone" not in body
    assert ".item()" not in body
