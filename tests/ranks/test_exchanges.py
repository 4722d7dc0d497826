"""All-to-all with any splits, wires whose size depends on the data, and collectives in flight, on
real ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from rank_helpers import gather_objects
from refusals import refusals
from tiers import crossed, rarely

import commpass
from commpass.collectives import Payload, Request, algorithm, read_stages
from commpass.errors import PolicyError

pytestmark = pytest.mark.xdist_group("ranks")

ops = torch.ops._c10d_functional
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def splits(matrix) -> tuple[list[int], list[int]]:
    """Return what this rank receives from and sends to each, from ``matrix[from][to]``."""
    rank = dist.get_rank()
    return [row[rank] for row in matrix], list(matrix[rank])


def matrices(size: int) -> dict[str, list[list[int]]]:
    return {
        "even": [[4] * size] * size,
        "uneven": [[(3 * rank + 5 * to) % 7 for to in range(size)] for rank in range(size)],
        "all the load on one rank": [[0] * (size - 1) + [11 + rank] for rank in range(size)],
        "one rank without data": (
            [[0] * size] + [[0] + [5 + to for to in range(1, size)]] * (size - 1)
        ),
        "nobody has any": [[0] * size] * size,
        "long": [[40 + 300 * (rank == to) for to in range(size)] for rank in range(size)],
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else torch.zeros(0, dtype=torch.uint8)


def any_bits(shape, dtype, seed: int) -> torch.Tensor:
    """Return random bit patterns, including NaNs with payloads, infinities, subnormals and -0.0."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(whole)
    return torch.randint(
        limits.min, limits.max, shape, dtype=whole, generator=torch.Generator().manual_seed(seed)
    ).view(dtype)


def some(shape, dtype, kind: str) -> torch.Tensor:
    rank = dist.get_rank()
    if kind == "any bits":  # nothing of it is compressible: the dynamic part has its maximal size
        return any_bits(shape, dtype, rank)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return (
        normal if kind == "normal" or rank else any_bits(shape, dtype, rank)
    )  # else: only one rank's dynamic part is large


def check_uneven() -> int:
    rank, size, checked = dist.get_rank(), dist.get_world_size(), 0
    for (name, matrix), width in itertools.product(
        matrices(size).items(), [(), (3,), (2, 130), (1024,)]
    ):
        received, sent = splits(matrix)
        for codec, dtype in itertools.product(
            ["int8", "rotated(bits=4)", "raw", "exponent"], DTYPES[:2]
        ):
            x = torch.randn((sum(sent), *width), generator=torch.Generator().manual_seed(rank)).to(
                dtype
            )
            result = commpass.all_to_all(x, received, sent, codec=codec)
            parts = [
                theirs.split(matrix[number])[rank]
                for number, theirs in enumerate(gather_objects(x))
            ]
            expected = torch.cat(parts)
            where = (name, width, codec, dtype)
            assert (result.shape, result.dtype) == (expected.shape, dtype), where
            if codec in ("raw", "exponent"):
                assert torch.equal(bits(result), bits(expected)), where
            elif expected.numel():
                step = 1 / 127 if codec == "int8" else 1 / 3
                assert (
                    result.double() - expected.double()
                ).abs().max() <= step * expected.double().abs().max() + 1e-2, where
            checked += 1
    return checked


@pytest.mark.every
@pytest.mark.parametrize("size", [rarely(2), 3])
def test_all_to_all_with_any_splits(size, request):
    assert request.getfixturevalue(f"ranks{size}").run(check_uneven) == [6 * 4 * 8] * size


LOSSLESS = [
    ("all_gather", "direct"),
    ("all_gather", "direct(first=sizes)"),
    ("all_to_all", "direct"),
    ("all_to_all", "direct(first=sizes)"),
]


def move(kind: str, how: str, x: torch.Tensor, codec: str = "exponent", group=None) -> torch.Tensor:
    if kind == "all_gather":
        return commpass.all_gather(x, group, codec=codec, algorithm=how)
    return commpass.all_to_all(x, group=group, codec=codec, algorithm=how)


def moved(kind: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat(
        inputs if kind == "all_gather" else [x.chunk(len(inputs))[rank] for x in inputs]
    )


def check_lossless(one_in: int) -> None:
    """Law 3, for any bits. The dynamic part never overflows, since there is room for the worst
    case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kinds = ("normal", "any bits", "one of them")
    for (kind, how), dtype, what in crossed(LOSSLESS, DTYPES, kinds, one_in=one_in):
        for rows in (1, 700, 3001):
            x = some((size * rows,), dtype, what)
            expected = moved(kind, gather_objects(x), rank)
            for codec in ("exponent", "exponent(planes=3)", "raw"):
                result = move(kind, how, x, codec)
                assert torch.equal(bits(result), bits(expected)), (
                    kind,
                    how,
                    dtype,
                    what,
                    rows,
                    codec,
                )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "one_in"), [(3, 4), rarely(2, 1), rarely(3, 1)])
def test_lossless_moves_are_bit_exact_whatever_the_bits_are(size, one_in, request):
    request.getfixturevalue(f"ranks{size}").run(check_lossless, one_in, timeout=280)


def check_lossless_sums() -> None:
    """A lossless all_reduce is the float32 sum in rank order, rounded once."""
    rank = dist.get_rank()
    for dtype, how in itertools.product(
        DTYPES[:3], ["one_shot", "two_shot", "two_shot(first=sizes)"]
    ):
        x = torch.randn(2500, generator=torch.Generator().manual_seed(rank)).to(dtype)
        inputs = [t.float() for t in gather_objects(x)]
        expected = sum(inputs[1:], inputs[0]).to(dtype)
        assert torch.equal(commpass.all_reduce(x, codec="exponent", algorithm=how), expected), (
            dtype,
            how,
        )
        y = commpass.reduce_scatter(x[:2400], codec="exponent")
        assert torch.equal(y, expected[:2400].chunk(dist.get_world_size())[rank])


@pytest.mark.slow
def test_lossless_sums(ranks3):
    ranks3.run(check_lossless_sums)


def check_lossless_bytes() -> None:
    """Law 9 for wires whose size depends on the data: what is sent is what the values need, and no
    more."""
    group, size, rank = counting_group(), dist.get_world_size(), dist.get_rank()
    coder = commpass.codec("exponent")
    for (kind, how), dtype, what in itertools.product(LOSSLESS, DTYPES[:3], ("normal", "any bits")):
        x = some((size * 16384,), dtype, what)
        group.seen.clear()
        move(kind, how, x, group=group)
        rows = x.reshape(1 if kind == "all_gather" else size, -1)
        numel = rows.shape[1]
        used = coder.used_bytes(coder.encode_rows(rows), numel, dtype)
        static = coder.parts(numel, dtype)[0]
        tails = (
            used - static
            if kind == "all_to_all"
            else max(t.max() for t in gather_objects(used)) - static
        )
        sent = [size for _, _, size in group.seen]
        assert {found for found, _, _ in group.seen} == {kind}
        assert {found for _, found, _ in group.seen} == {torch.uint8}
        if "sizes" in how:
            assert sent == [8 * len(rows), int((tails + static).sum())], (kind, how, dtype, what)
        else:
            assert sent == [static * len(rows), int(tails.sum())], (kind, how, dtype, what)
        found = read_stages(
            kind, how, coder.spec, Payload(x.numel(), 1, dtype), Request("0", size, rank)
        )
        assert found.wire_bytes - found.dynamic_bytes <= sum(sent)
        if what == "normal":  # the plan's size for values like these
            assert abs(found.wire_bytes - sum(sent)) <= 0.02 * sum(sent), (kind, how, dtype)
            assert sum(sent) < x.numel() * dtype.itemsize
        else:
            assert sum(sent) > found.wire_bytes


@pytest.mark.every
def test_lossless_wires_carry_only_what_the_values_need(ranks2):
    ranks2.run(check_lossless_bytes)


def check_late_rank() -> None:
    """One rank is late: all wait for it, and no rank gets wrong values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    names = ["two_shot", "ring", "semi_ring", "one_shot", "two_shot(shards=4)"]
    for late, name, codec in crossed(range(size), names, ["int8", "exponent"], one_in=2):
        x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
        dist.barrier()
        if rank == late:
            time.sleep(0.1)
            store.set(f"{late} {name} {codec} begins", "")
        result = commpass.all_reduce(x, codec=codec, algorithm=name)
        # The result contains the late rank's values: no rank can have it earlier.
        assert store.check([f"{late} {name} {codec} begins"])
        total = sum(t.double() for t in gather_objects(x))
        assert (result.double() - total).abs().max() <= 0.1


@pytest.mark.every
def test_rank_that_is_late(ranks3):
    ranks3.run(check_late_rank)


def check_handles() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(size * 700, generator=torch.Generator().manual_seed(rank))
    calls = {
        "all_reduce": lambda **more: commpass.all_reduce(x, **more),
        "ring": lambda **more: commpass.all_reduce(x, algorithm="ring", **more),
        "all_gather": lambda **more: commpass.all_gather(x, **more),
        "reduce_scatter": lambda **more: commpass.reduce_scatter(x, **more),
        "all_to_all": lambda **more: commpass.all_to_all(x, **more),
        "lossless": lambda **more: commpass.all_to_all(x, codec="exponent", **more),
    }
    handles = {name: call(async_op=True) for name, call in calls.items()}  # all in flight at once
    for name, handle in handles.items():
        assert isinstance(handle, commpass.Handle)
        result = handle.wait()
        assert torch.equal(result, calls[name]()), name
        assert handle.wait() is result
    with pytest.raises(PolicyError, match=r"x\.detach\(\)"):
        commpass.all_reduce(x.clone().requires_grad_(), async_op=True)


def test_handles(ranks3):
    ranks3.run(check_handles)


def check_bad_splits() -> list[str]:
    x = torch.ones(6, 2)
    return refusals(
        lambda: commpass.all_to_all(x, [3, 3], [3, 4]),
        lambda: commpass.all_to_all(x, [3, 3], [6]),
        lambda: commpass.all_to_all(x, [3, 3]),
        lambda: commpass.all_to_all(x, [3, 3], [7, -1]),
        lambda: commpass.all_to_all(torch.ones(5)),
        lambda: commpass.all_to_all(x, algorithm="ring"),
        lambda: commpass.all_to_all(x, algorithm="direct(first=siezs)"),
        lambda: commpass.all_reduce(x, algorithm="hierarchical"),
        lambda: commpass.all_reduce(x, algorithm="hierarchical(node=2)"),
        lambda: commpass.all_reduce(x, algorithm="ring(stage=rs, shard=2)"),
    )


def test_bad_splits_and_algorithms_are_refused_before_anything_is_sent(ranks2):
    parts = [
        ["[3, 4] add up to 7", "is 6"],
        ["input_split_sizes has 1 numbers for 2 ranks"],
        ["give both"],
        ["negative"],
        ["no multiple of 2 ranks"],
        ["Known: direct"],
        ["'sizes'"],
        ["hierarchical(node=8)"],
        ["2 ranks are not several nodes of 2"],
        ["'shards'"],
    ]
    for text, expected in zip(ranks2.run(check_bad_splits)[0], parts, strict=True):
        for part in expected:
            assert part in text


# --- the forms of EQuARX's figure 7 ---------------------------------------------------------------

FLAVOURS = [
    f"{loop}{stage}" for loop in ("ring", "semi_ring") for stage in ("", "(stage=rs)", "(stage=ag)")
]


def errors() -> dict[str, float]:
    x = torch.randn(
        1 << 16, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64
    ).float()
    total = sum(t.double() for t in gather_objects(x))
    return {
        name: (
            (
                (commpass.all_reduce(x, codec="int8", algorithm=name).double() - total)
                .square()
                .mean()
            ).item()
        )
        for name in FLAVOURS
    }


@pytest.mark.parametrize("size", [3, 4])
def test_errors_of_ring_and_semi_ring_come_in_the_published_order(size, request):
    """Semi-loop has a smaller error than full loop, and coding only the all-gather the smallest
    (EQuARX, figure 7); as the plan predicts."""
    found = request.getfixturevalue(f"ranks{size}").run(errors)[0]
    assert found["semi_ring"] < found["ring"]
    assert found["semi_ring(stage=rs)"] < found["ring(stage=rs)"]
    for loop in ("ring", "semi_ring"):
        assert found[f"{loop}(stage=ag)"] < found[loop]
        assert found[f"{loop}(stage=rs)"] < found[loop]
    coder = commpass.codec("int8")
    for name, error in found.items():
        predicted = (
            algorithm("all_reduce", name).error(coder, size) ** 2 * size
        )  # the variance of a sum of unit Gaussians
        assert abs(error - predicted) <= 0.1 * predicted, (name, error, predicted)


# --- in graphs ------------------------------------------------------------------------------------


def check_graphs(inner: str) -> list[tuple]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    matrix = [[10, 54], [30, 34]]
    received, sent = splits(matrix)
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(rank)).bfloat16()
    calls = {
        "all_to_all, uneven": lambda x: (
            ops.wait_tensor(ops.all_to_all_single(x * 2, received, sent, group)) + 1
        ),
        "all_to_all": lambda x: (
            ops.wait_tensor(ops.all_to_all_single(x * 2, [32, 32], [32, 32], group)) + 1
        ),
        "all_to_all, short": lambda x: (
            ops.wait_tensor(ops.all_to_all_single((x * 2)[:, :16].clone(), received, sent, group))
            + 1
        ),
        "all_gather": lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x * 2, size, group)) + 1,
        "broadcast": lambda x: ops.wait_tensor(ops.broadcast(x * 2, 1, group)) + 1,
    }
    rows = []
    for (name, function), codec in itertools.product(calls.items(), ["exponent", "int8"]):
        torch._dynamo.reset()
        policy = commpass.Policy(rules=[commpass.Rule(codec=codec, force=True)])
        backend = commpass.backend(policy, strict=True, inner=inner)
        result, expected = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
        site = commpass.plans()[-1].sites[0]
        assert site.codec == codec, (name, site.reason)
        assert (site.dynamic_bytes > 0) == (codec == "exponent"), name
        if codec == "exponent":
            assert torch.equal(result, expected), name
        else:
            assert (
                result.double() - expected.double()
            ).abs().max() <= 0.02 * expected.double().abs().max(), name
        rows.append((name, codec, site.bytes, site.wire_bytes))
    return rows


@pytest.mark.parametrize("inner", [rarely("aot_eager"), rarely("inductor")])
def test_graphs_with_uneven_splits_and_lossless_wires(inner, ranks2):
    rows = ranks2.run(check_graphs, inner, timeout=280)[0]
    for name, codec, size, wire in rows:
        if "short" not in name:
            assert wire < size * (0.72 if codec == "exponent" else 0.55), (name, codec)


def check_unknown_splits(inner: str) -> None:
    """Mixture of experts: one compiled graph, with lengths that are only known at run time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name

    def dispatch(x, sizes):
        received, sent = sizes.tolist()
        for count in (*received, *sent):
            torch._check(count >= 0)
        return ops.wait_tensor(ops.all_to_all_single(x * 2, received, sent, group)) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for codec in ("int8", "exponent"):
            torch._dynamo.reset()
            policy = commpass.Policy(rules=[commpass.Rule(codec=codec, force=True)])
            backend = commpass.backend(
                policy, strict=True, inner="eager" if codec == "exponent" else inner
            )
            seen = len(commpass.plans())
            compiled = torch.compile(dispatch, backend=backend, fullgraph=True)
            for matrix in ([[10, 54], [30, 34]], [[0, 64], [64, 0]], [[64, 0], [1, 63]]):
                received, sent = splits(matrix)
                x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(rank))
                sizes = torch.tensor([received, sent])
                expected = dispatch(x, sizes)
                result = compiled(x, sizes)
                assert result.shape == expected.shape
                if codec == "exponent":
                    assert torch.equal(result, expected)
                elif expected.numel():
                    assert (result - expected).abs().max() <= 0.02 * expected.abs().max()
            (plan,) = commpass.plans()[seen:]
            assert plan.sites[0].codec == codec
            assert size == 2


@pytest.mark.every
@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
def test_splits_that_are_only_known_when_the_graph_runs(inner, ranks2):
    ranks2.run(check_unknown_splits, inner, timeout=280)


def check_compiled_bits() -> None:
    """NaN payloads survive Inductor, which computes on 16-bit floats as float32 where possible."""
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32):
        x = any_bits((3001,), dtype, rank)
        compiled = torch.compile(lambda x: commpass.all_gather(x, codec="raw"), fullgraph=True)
        expected = torch.cat([bits(t) for t in gather_objects(x)])
        assert torch.equal(bits(compiled(x)), expected), dtype


def test_compiled_moves_of_raw_values_are_bit_exact(ranks2):
    ranks2.run(check_compiled_bits)


def check_autograd_forms(inner: str) -> None:
    """The differentiable forms, in training: forward and backward, with splits known at run time,
    are compressed."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    rank = dist.get_rank()

    def dispatch(x, sizes):
        received, sent = sizes.tolist()
        for count in (*received, *sent):
            torch._check(count >= 0)
        torch._check(sum(sent) == x.shape[0])
        y = wait_tensor(all_to_all_single_autograd(x * 2, received, sent, dist.group.WORLD))
        return (y[torch.arange(sum(received))] ** 2).sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for codec in ("int8", "exponent"):
            torch._dynamo.reset()
            policy = commpass.Policy(
                rules=[commpass.Rule(kind="all_to_all", codec=codec, force=True)]
            )
            backend = commpass.backend(
                policy, strict=True, inner="eager" if codec == "exponent" else inner
            )
            seen = len(commpass.plans())
            compiled = torch.compile(dispatch, backend=backend, fullgraph=True)
            for matrix in ([[10, 54], [30, 34]], [[64, 0], [1, 63]]):
                received, sent = splits(matrix)
                sizes = torch.tensor([received, sent])
                x = torch.randn(
                    64, 256, generator=torch.Generator().manual_seed(rank), requires_grad=True
                )
                plain = x.detach().clone().requires_grad_()
                loss, expected = compiled(x, sizes), dispatch(plain, sizes)
                loss.backward()
                expected.backward()
                exact = codec == "exponent"
                assert abs(loss - expected) <= (1e-5 if exact else 0.02) * expected
                assert (x.grad - plain.grad).abs().max() <= (
                    1e-5 if exact else 0.03
                ) * plain.grad.abs().max()
            found = [
                (plan.direction, site.codec) for plan in commpass.plans()[seen:] for site in plan
            ]
            assert found == [("forward", codec), ("backward", codec)], found


@pytest.mark.parametrize("inner", [rarely("aot_eager"), rarely("inductor")])
def test_differentiable_exchanges_of_experts_are_compressed_both_ways(inner, ranks2):
    ranks2.run(check_autograd_forms, inner, timeout=280)
