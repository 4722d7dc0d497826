"""all_gather_v and reduce_scatter_v on real ranks: parts of different lengths, some of them
empty."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from rank_helpers import gather_objects
from refusals import refusals
from values import bits

import commpass
from commpass.collectives import Payload, Request, read_stages

pytestmark = pytest.mark.xdist_group("ranks")

KINDS = ("all_gather_v", "reduce_scatter_v")
CODECS = ["int8", "int4", "rotated", "sdp4bit", "equarx", "nvfp4", "bf16", "raw", "exponent"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SPLITS = {
    "one rank without any": [5, 0, 3],
    "one rank with all": [0, 0, 9],
    "nobody has any": [0, 0, 0],
    "rows longer than a block": [1, 4, 2],
    "even": [4, 4, 4],
}
WIDTH = 130


def call(kind: str, x: torch.Tensor, parts: list[int], op: str = "sum", **how: Any) -> Any:
    if kind == "all_gather_v":
        return commpass.all_gather_v(x, parts, **how)
    return commpass.reduce_scatter_v(x, parts, op, **how)


def entries(kind: str, parts: list[int], rank: int) -> int:
    return parts[rank] if kind == "all_gather_v" else sum(parts)


def inputs(kind: str, parts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """The input of every rank, which all ranks can compute."""
    return [
        torch.randn(
            entries(kind, parts, rank),
            WIDTH,
            generator=torch.Generator().manual_seed(rank),
        ).to(dtype)
        for rank in range(len(parts))
    ]


def exact(kind: str, given: list[torch.Tensor], parts: list[int], op: str) -> torch.Tensor:
    """The result without rounding, in float64."""
    wide = [x.double() for x in given]
    if kind == "all_gather_v":
        return torch.cat(wide)
    total = sum(wide[1:], wide[0]) / (len(parts) if op == "avg" else 1)
    return total.split(parts)[dist.get_rank()]


def check_values() -> int:
    """Near the exact result; a gather has the same bits on every rank."""
    rank, checked = dist.get_rank(), 0
    gathered = []
    for kind, codec, dtype, parts in itertools.product(KINDS, CODECS, DTYPES, SPLITS.values()):
        given = inputs(kind, parts, dtype)
        for op in ("sum", "avg") if kind == "reduce_scatter_v" else ("sum",):
            where = (kind, codec, dtype, parts, op)
            result = call(kind, given[rank], parts, op, codec=codec)
            expected = exact(kind, given, parts, op)
            assert (result.dtype, result.shape) == (dtype, expected.shape), where
            step = {"int8": 0.03, "rotated": 0.06, "bf16": 0.02, "equarx": 0.06}.get(codec, 0.8)
            bound = 0.02 if codec in ("raw", "exponent") else step * (3 if op == "sum" else 1)
            bound *= 1 + expected.abs().max().item() / 4 if expected.numel() else 0
            assert not expected.numel() or (result.double() - expected).abs().max() <= bound, where
            if kind == "all_gather_v":
                gathered.append((where, bits(result)))
            checked += 1
    for everywhere in zip(*gather_objects(gathered), strict=True):
        assert len({found for _, found in everywhere}) == 1, f"{everywhere[0][0]} differs"
    return checked


@pytest.mark.slow
def test_results_are_near_the_exact_ones_and_gathers_equal_on_all_ranks(ranks3):
    cases = len(CODECS) * len(DTYPES) * len(SPLITS) * 3
    assert ranks3.run(check_values) == [cases] * 3


def check_order() -> None:
    """1e8 - 1e8 + 1 is 1 in rank order, and 0 in the opposite order."""
    rank, parts = dist.get_rank(), SPLITS["rows longer than a block"]
    for codec, dtype in itertools.product(("exponent", "raw"), (torch.float32, torch.bfloat16)):
        x = torch.full((sum(parts), WIDTH), (1e8, -1e8, 1.0)[rank], dtype=dtype)
        result = commpass.reduce_scatter_v(x, parts, codec=codec)
        assert torch.equal(result, torch.ones(parts[rank], WIDTH, dtype=dtype)), (codec, dtype)


def test_sums_are_made_in_rank_order(ranks3):
    ranks3.run(check_order)


def check_even() -> None:
    """Equal parts give the bits of the collectives that only take equal parts."""
    rank, parts = dist.get_rank(), SPLITS["even"]
    for codec in CODECS:
        x = inputs("all_gather_v", parts, torch.float32)[rank]
        one, other = (
            commpass.all_gather_v(x, parts, codec=codec),
            commpass.all_gather(x, codec=codec),
        )
        assert torch.equal(one, other), codec
        x = inputs("reduce_scatter_v", parts, torch.float32)[rank]
        for op in ("sum", "avg"):
            one = commpass.reduce_scatter_v(x, parts, op, codec=codec)
            assert torch.equal(one, commpass.reduce_scatter(x, op, codec=codec)), codec


@pytest.mark.slow
def test_equal_parts_are_exchanged_as_without_v(ranks3):
    ranks3.run(check_even)


def check_lossless() -> None:
    """Any bits arrive, in both orders of sizes and data: NaNs with payloads and -0.0 too."""
    rank = dist.get_rank()
    for parts, first in itertools.product(SPLITS.values(), ("static", "sizes")):
        given = [
            torch.randint(
                -(1 << 15),
                1 << 15,
                (size, 700),
                dtype=torch.int16,
                generator=torch.Generator().manual_seed(source),
            ).view(torch.bfloat16)
            for source, size in enumerate(parts)
        ]
        name = f"direct(first={first})"
        result = commpass.all_gather_v(given[rank], parts, codec="exponent", algorithm=name)
        assert bits(result) == bits(torch.cat(given)), (parts, first)


@pytest.mark.slow
def test_lossless_gathers_are_bit_exact(ranks3):
    ranks3.run(check_lossless)


def check_sums() -> None:
    """Law 4: sums in float32 in rank order, rounded once. Law 2: a NaN stays one, where it is."""
    rank, parts = dist.get_rank(), [2, 0, 1]
    # Codes that decode exactly: the peak of each block is 127 * 4**rank.
    codes = torch.randint(-127, 128, (3, 256), generator=torch.Generator().manual_seed(rank))
    codes[:, 0] = 127
    x = (codes * 4**rank).to(torch.bfloat16)
    others = gather_objects(x)
    result = commpass.reduce_scatter_v(x, parts, codec="int8")
    total = sum(each.float() for each in others).to(torch.bfloat16)
    assert torch.equal(result, total.split(parts)[rank])
    narrow = (others[0] + others[1] + others[2]).split(parts)[rank]
    assert not result.numel() or not torch.equal(result, narrow)
    x = torch.ones(3, 256)
    x[0, 5] = torch.nan if rank == 1 else 1.0  # in the part of rank 0
    for codec in ("int8", "rotated", "exponent", "bf16"):
        result = commpass.reduce_scatter_v(x, parts, codec=codec)
        assert result.isfinite().all() == (rank != 0), codec
        gathered = commpass.all_gather_v(x[: parts[rank]] / x[0, 5], parts, codec=codec)
        assert gathered.isfinite().all(), codec  # rank 1 has no part
        spoiled = x[: parts[rank]] if rank else x[:2].index_fill(1, torch.tensor([9]), torch.inf)
        assert not commpass.all_gather_v(spoiled, parts, codec=codec)[:2, 9].isfinite().any(), codec


def test_sums_are_float32_in_rank_order_and_nonfinite_values_stay_so(ranks3):
    ranks3.run(check_sums)


def check_own() -> None:
    """Law 1: a rank uses the decoded value of what it sent, not the original."""
    rank, parts = dist.get_rank(), [3, 0, 1]
    x = inputs("all_gather_v", parts, torch.float32)[rank]
    own = commpass.all_gather_v(x, parts, codec="int4").split(parts)[rank]
    coder = commpass.codec("int4")
    assert torch.equal(own.flatten(), coder.decode(coder.encode(x), x).flatten())
    assert not x.numel() or not torch.equal(own, x)


def test_rank_uses_what_the_others_decode(ranks3):
    ranks3.run(check_own)


def check_wire(parts: list[int]) -> list[int]:
    """Law 9: bytes of codes go to the process group, as many as the stages say. Return how many."""
    group, rank = counting_group(), dist.get_rank()
    handed = []
    for kind, codec, dtype in itertools.product(KINDS, ("int8", "rotated(bits=4)"), DTYPES):
        x = torch.ones(entries(kind, parts, rank), WIDTH, dtype=dtype)
        group.seen.clear()
        call(kind, x, parts, codec=codec, group=group)
        own = (parts[rank],) * len(parts)
        sent, received = (own, parts) if kind == "all_gather_v" else (parts, own)
        request = Request(
            group.group_name, len(parts), rank, sent=tuple(sent), received=tuple(received)
        )
        found = read_stages(kind, "direct", codec, Payload(x.numel(), WIDTH, dtype), request)
        coder = commpass.codec(codec)
        wide = coder.hop_dtype(dtype)
        # Sums are of whole blocks.
        block = coder.block if kind == "reduce_scatter_v" else 1
        rows = [-(-size * WIDTH // block) * block for size in sent]
        expected = sum(coder.wire_bytes(numel, wide) for numel in rows)
        assert group.seen == [("all_to_all", torch.uint8, expected)], (kind, codec, dtype)
        assert [stage.nbytes for stage in found.exchanges] == [expected], (kind, codec, dtype)
        handed.append(expected)
    return handed


def test_dtype_and_bytes_on_the_wire_are_as_stated(ranks3):
    one, none, other = ranks3.run(check_wire, [5, 0, 3])
    gathers = slice(0, len(one) // 2)
    rows = zip(one[gathers], other[gathers], none[gathers], strict=True)
    assert all(more > some > nothing == 0 for more, some, nothing in rows)
    assert one[len(one) // 2 :] == none[len(one) // 2 :]  # a sum has parts for other ranks


def check_gradients() -> None:
    """The gradient of each is the other, with the same lengths."""
    rank, size, parts = dist.get_rank(), dist.get_world_size(), [4, 0, 2]
    for kind, op in (
        ("all_gather_v", "sum"),
        ("reduce_scatter_v", "sum"),
        ("reduce_scatter_v", "avg"),
    ):
        x = inputs(kind, parts, torch.float32)[rank].requires_grad_()
        result = call(kind, x, parts, op, codec="int8")
        weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(9 + rank))
        (result * weight).sum().backward()
        weights = gather_objects(weight)
        expected = (
            sum(weights).split(parts)[rank]
            if kind == "all_gather_v"
            else torch.cat(weights) / (size if op == "avg" else 1)
        )
        assert x.grad.shape == x.shape
        assert not x.numel() or (x.grad - expected).abs().max() <= 0.1, (kind, op)


def test_gradients(ranks3):
    ranks3.run(check_gradients)


def check_compiled(backend: str, codecs: list[str]) -> None:
    """Eager and compiled calls give the same bits, in one graph, forward and backward."""
    rank = dist.get_rank()
    for kind, codec in itertools.product(KINDS, codecs):
        torch._dynamo.reset()
        parts = [5, 0, 3]

        def function(x, k=kind, c=codec, parts=parts):
            return call(k, x * 2, parts, codec=c)

        found = []
        for one in (function, torch.compile(function, fullgraph=True, backend=backend)):
            x = inputs(kind, parts, torch.float32)[rank].requires_grad_()
            result = one(x)
            result.square().sum().backward()
            found.append((bits(result.detach()), bits(x.grad)))
        assert found[0] == found[1], (kind, codec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "codecs"), [("aot_eager", ["rotated"]), ("inductor", ["int8"])]
)
def test_eager_and_compiled_calls_agree_bit_for_bit(backend, codecs, ranks3):
    ranks3.run(check_compiled, backend, codecs, timeout=280)


def check_handles() -> None:
    rank, parts = dist.get_rank(), [5, 0, 3]
    for kind, codec in itertools.product(KINDS, ("int8", "raw", "exponent")):
        x = inputs(kind, parts, torch.float32)[rank]
        expected = call(kind, x, parts, codec=codec)
        handle = call(kind, x, parts, codec=codec, async_op=True)
        x.zero_()  # it may be changed at once
        assert torch.equal(handle.wait(), expected), (kind, codec)


def test_handles_return_the_same_and_leave_the_input_free(ranks3):
    ranks3.run(check_handles)


def check_alone() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    x = torch.randn(3, WIDTH)
    for kind in KINDS:
        result = call(kind, x, [3], codec="raw", group=groups[dist.get_rank()])
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()


def test_group_of_one_rank(ranks2):
    ranks2.run(check_alone)


def check_bad_splits() -> list[str]:
    x = torch.ones(6, 2)
    return refusals(
        lambda: commpass.reduce_scatter_v(x, [3, 4]),
        lambda: commpass.all_gather_v(x, [7, 7]),
        lambda: commpass.reduce_scatter_v(x, [6]),
        lambda: commpass.all_gather_v(x, [7, -1]),
        lambda: commpass.reduce_scatter_v(torch.tensor(1.0), [1, 0]),
        lambda: commpass.reduce_scatter_v(x, [3, 3], "max"),
        lambda: commpass.reduce_scatter_v(x.long(), [3, 3]),
        lambda: commpass.all_gather_v(x, [6, 6], algorithm="ring"),
        lambda: commpass.reduce_scatter_v(x, [3, 3], algorithm="direct(chunks=2)"),
        lambda: commpass.reduce_scatter_v(x, [3, 3], codec="topk"),
        lambda: commpass.all_gather_v(x, torch.tensor([7, 7])),
        lambda: commpass.reduce_scatter_v(x, np.array([3, 4])),
        lambda: commpass.all_to_all(x, np.array([7, -1]), np.array([7, -1])),
        lambda: commpass.reduce_scatter_v(x, [3.0, 3.0]),
        lambda: commpass.all_gather_v(x, None),
        lambda: commpass.all_to_all(x, ["3", "3"], [3, 3]),
    )


def test_bad_splits_are_refused_before_anything_is_sent(ranks2):
    parts = [
        ["[3, 4] add up to 7", "is 6"],
        ["[7, 7] has 7 for rank 0", "is 6"],
        ["splits has 1 numbers for 2 ranks"],
        ["negative"],
        ["a scalar has no first dimension"],
        ["'max' cannot be compressed"],
        ["torch.int64 cannot be compressed"],
        ["Known: direct"],
        ["'chunks'"],
        ["error feedback"],
        ["[7, 7] has 7 for rank 0", "is 6"],
        ["[3, 4] add up to 7", "is 6"],
        ["[7, -1] has a negative number"],
        ["splits=[3.0, 3.0] must be a sequence of whole numbers"],
        ["splits=None must be a sequence of whole numbers"],
        ["output_split_sizes=['3', '3'] must be a sequence of whole numbers"],
    ]
    for text, expected in zip(ranks2.run(check_bad_splits)[0], parts, strict=True):
        for part in expected:
            assert part in text
