"""All-to-all with splits (mixture of experts) if a rank sends or receives nothing.

It is compressed as on the other ranks, and never fails.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from graphs import collectives
from tiers import crossed, rarely, sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import commpass

CODECS = ["int8", "rotated", "fp8", "nvfp4", "exponent", "exponent(planes=3)", "raw"]
ops = torch.ops._c10d_functional
NOBODY, SOME = (0, 0, 0), (2, 0, 5)


def forced(codec: str) -> commpass.Policy:
    return commpass.Policy(rules=[commpass.Rule(codec=codec, force=True)])


def planned(codec: str, sent, received, width, dtype=torch.bfloat16):
    def function(x):
        return ops.wait_tensor(ops.all_to_all_single(x, list(received), list(sent), "0")) + 1

    mode = FakeTensorMode(shape_env=ShapeEnv())  # for sizes that depend on values
    x = mode.from_tensor(torch.zeros((sum(sent), *width), dtype=dtype), static_shapes=True)
    with mode:
        gm = make_fx(function)(x)
    plan = commpass.rewrite(gm, [], forced(codec), strict=True)
    return gm, plan.sites[0], plan


WIDTHS = crossed(CODECS, [(), (8,), (1024,)])
"""Those of a lossless codec take seconds each."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("codec", "width"),
    sampled(WIDTHS, [*zip(CODECS[:3], [(), (8,), (1024,)], strict=True), ("raw", ())]),
    ids=str,
)
def test_rank_without_entries_plans_as_the_others_do(codec, width, fake_group):
    fake_group(3)
    ways = [(SOME, SOME), (NOBODY, SOME), (SOME, NOBODY), (NOBODY, NOBODY)]
    plans = [planned(codec, sent, received, width) for sent, received in ways]
    assert [site.codec for _, site, _ in plans] == [codec] * 4
    assert len({plan.digest() for _, _, plan in plans}) == 1
    for (gm, site, _), (sent, _) in zip(plans, ways, strict=True):
        sizes = [size for _, _, size in collectives(gm) if isinstance(size, int)]
        assert sum(sizes) == site.wire_bytes - site.dynamic_bytes
        assert sum(sent) or site.wire_bytes == 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sent", [SOME, NOBODY])
def test_entries_of_no_values_are_left_alone(codec, sent, fake_group):
    fake_group(3)
    _, site, _ = planned(codec, sent, SOME, (4, 0))
    assert (site.codec, site.reason) == ("none", "it has no elements")


class Seen(Exception):
    """The graph has been planned: its results on a fake group do not matter."""


def dispatch(x, sizes):
    received, sent = sizes.tolist()
    for count in (*received, *sent):
        torch._check(count >= 0)
    return fixed(x, received, sent)


def fixed(x, received, sent):
    y = ops.all_to_all_single(x * 2, received, sent, dist.group.WORLD.group_name)
    return ops.wait_tensor(y) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "codec"), [(0, "int8"), (7, "int8"), rarely(0, "exponent"), rarely(7, "exponent")]
)
def test_splits_that_are_not_known_before_the_graph_runs(codec, entries, fake_group):
    fake_group(3)

    def inner(gm, inputs):
        raise Seen

    seen = len(commpass.plans())
    backend = commpass.backend(forced(codec), strict=True, inner=inner)
    x, sizes = torch.ones(entries, 1024), torch.tensor([SOME, (entries, 0, 0)])
    compiled = torch.compile(dispatch, backend=backend, fullgraph=True)
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, pytest.raises(Exception, match="Seen"):  # torch wraps it in its own exception
        compiled(x, sizes)
    (plan,) = commpass.plans()[seen:]
    assert (plan.fallback, plan.sites[0].codec) == ("", codec)


# --- on real ranks --------------------------------------------------------------------------------


def check_dispatch(codec: str, known: bool) -> int:
    """The rank without entries changes from call to call; at first it is rank 0."""
    rank, size, checked = dist.get_rank(), dist.get_world_size(), 0
    seen = len(commpass.plans())
    none_from_0 = [[0] * size, *[[3 + to for to in range(size)]] * (size - 1)]
    none_to_0 = [[0] + [2 + to for to in range(1, size)]] * size
    alone = [[0] * size, *[[0] + [4 + to for to in range(1, size)]] * (size - 1)]
    nobody = [[0] * size] * size
    backend = commpass.backend(forced(codec), strict=True, inner="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(dispatch, backend=backend, fullgraph=True)
        for matrix in (none_from_0, none_to_0, alone, nobody):
            received, sent = [row[rank] for row in matrix], list(matrix[rank])
            x = torch.randn(sum(sent), 300, generator=torch.Generator().manual_seed(rank))
            x = x.to(torch.bfloat16)
            if known:
                torch._dynamo.reset()
                run = torch.compile(lambda x, r=received, s=sent: fixed(x, r, s), backend=backend)
                result, expected = run(x), fixed(x, received, sent)
            else:
                sizes = torch.tensor([received, sent])
                result, expected = compiled(x, sizes), dispatch(x, sizes)
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
            if codec == "exponent":
                assert torch.equal(result, expected)
            elif expected.numel():
                assert (result - expected).abs().max() <= 0.02 * expected.abs().max() + 0.02
            checked += 1
    assert not any(plan.fallback for plan in commpass.plans()[seen:])
    return checked


CALLS = [rarely(2, "exponent", False), rarely(3, "int8", True), (3, "int8", False)]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("size", "codec", "known"), CALLS)
def test_ranks_without_entries_exchange_what_the_others_have(size, codec, known, request):
    ranks = request.getfixturevalue(f"ranks{size}")
    assert ranks.run(check_dispatch, codec, known, timeout=280) == [4] * size


def check_by_hand() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    nobody, none_from_0 = [[0] * size] * size, [[0] * size, *[[3] * size] * (size - 1)]
    none_to_0 = [[0, *[2] * (size - 1)]] * size
    dtypes, widths = [torch.float32, torch.bfloat16], [(), (5,), (0,), (3, 0)]
    for codec, width, dtype in itertools.product(CODECS, widths, dtypes):
        for matrix in (nobody, none_from_0, none_to_0):
            received, sent = [row[rank] for row in matrix], list(matrix[rank])
            x = torch.ones((sum(sent), *width), dtype=dtype)
            for wait in (False, True):
                result = commpass.all_to_all(x, received, sent, codec=codec, async_op=wait)
                result = result.wait() if wait else result
                where = (codec, width, matrix)
                assert (result.shape, result.dtype) == ((sum(received), *width), dtype), where
                assert (result - 1).abs().sum() <= 0.07 * result.numel(), where


@pytest.mark.every
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("size", [rarely(2), 3])
def test_calls_by_hand_exchange_what_the_others_have(size, request):
    request.getfixturevalue(f"ranks{size}").run(check_by_hand, timeout=280)
