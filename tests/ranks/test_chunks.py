"""Chunks and messages between pairs on real ranks: the same bits as without, and the bytes that the
algorithm predicts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from tiers import crossed, rarely

import commpass
from commpass.collectives import Payload, Request, algorithms_of, read_stages
from commpass.costmodel import KernelRate, Kernels, Link, Profile

ops = torch.ops._c10d_functional
pytestmark = pytest.mark.xdist_group("ranks")

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WHOLE = ("sparse", "native")  # split nothing
CASES = [(kind, a.name) for kind in KINDS for a in algorithms_of(kind) if a.name not in WHOLE]
CODECS = ["int8", "int4", "rotated", "bf16", "fp8", "taco", "exponent", "raw"]


def call(kind: str, name: str, x: torch.Tensor, codec: str, group: object = None) -> torch.Tensor:
    return getattr(commpass, kind)(x, group=group, codec=codec, algorithm=name)


def cases(size: int) -> list[tuple[str, str]]:
    nodes = {True: "hierarchical(node=2)", False: ""}[size == 4]
    named = [(kind, nodes if name == "hierarchical" else name) for kind, name in CASES]
    return [case for case in named if case[1]]


def in_chunks(name: str, chunks: int) -> str:
    return f"{name[:-1]}, chunks={chunks})" if name.endswith(")") else f"{name}(chunks={chunks})"


def check_bits(one_in: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for (kind, name), codec, dtype, numel, chunks in crossed(
        cases(size),
        CODECS,
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [0, 1, 700, 5000],
        [2, 5, 64],
        one_in=one_in,
    ):
        x = torch.randn(numel * size, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)
        one, many = (call(kind, each, x, codec) for each in (name, in_chunks(name, chunks)))
        assert one.shape == many.shape
        assert one.dtype == many.dtype
        assert torch.equal(one.view(torch.uint8), many.view(torch.uint8)), (
            *(kind, name, codec, dtype, numel, chunks),
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("one_in", [29, rarely(4)])
@pytest.mark.parametrize("size", [3, 4])
def test_chunks_give_the_same_bits(size, one_in, request):
    request.getfixturevalue(f"ranks{size}").run(check_bits, one_in, timeout=280)


def check_uneven() -> None:
    """Splits that differ between ranks, and a rank to which nothing is sent."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for width in (3, 1024):
        sent = [(rank + to) % size for to in range(size)]
        received = [(source + rank) % size for source in range(size)]
        x = torch.randn(sum(sent), width, generator=torch.Generator().manual_seed(rank))
        one, many = (
            commpass.all_to_all(x, received, sent, codec="int8", algorithm=name)
            for name in ("direct", "direct(chunks=3)")
        )
        assert torch.equal(one, many)
        assert one.shape == (sum(received), width)


def test_chunks_of_uneven_parts(ranks3):
    ranks3.run(check_uneven)


def check_messages(one_in: int) -> None:
    """What a rank sends leaves it once, as bytes, and arrives where it should: the result equals
    that of the library's exchanges."""
    size, rank = dist.get_world_size(), dist.get_rank()
    library, messages = counting_group(), counting_group(messages=True)
    for (kind, name), codec, numel, chunks in crossed(
        cases(size), ["int8", "rotated", "bf16"], [1, 300, 5000], [1, 3], one_in=one_in
    ):
        spec = in_chunks(name, chunks) if chunks > 1 else name
        x = torch.randn(numel * size, generator=torch.Generator().manual_seed(rank))
        library.seen.clear()
        messages.seen.clear()
        expected = call(kind, spec, x, codec, library)
        assert torch.equal(call(kind, spec, x, codec, messages), expected)
        assert not {kind for kind, _, _ in library.seen} & {"send", "recv"}
        assert {dtype for _, dtype, _ in messages.seen} == {torch.uint8}
        request = Request(messages.group_name, size, rank, by_messages=True)
        found = read_stages(kind, spec, codec, Payload(x.numel(), 1, x.dtype), request)
        assert all(stage.by_messages for stage in found.exchanges)
        sent = [nbytes for kind, _, nbytes in messages.seen if kind == "send"]
        everyone = [
            stage.leaving * (size - 1 if stage.kind == "all_gather" else 1)
            for stage in found.exchanges
        ]
        assert sum(sent) == sum(everyone), (kind, spec, codec, numel)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("one_in", [5, rarely(1)])
@pytest.mark.parametrize("size", [3, 4])
def test_messages_carry_what_the_librarys_exchanges_do(size, one_in, request):
    request.getfixturevalue(f"ranks{size}").run(check_messages, one_in)


def check_order() -> None:
    """Receives are posted before sends, of every exchange."""
    group = counting_group(messages=True)
    commpass.all_reduce(torch.ones(4000), group=group, codec="int8", algorithm="two_shot")
    kinds = [kind for kind, _, _ in group.seen]
    others = dist.get_world_size() - 1
    assert kinds == (["recv"] * others + ["send"] * others) * 2


def test_receives_are_posted_first(ranks3):
    ranks3.run(check_order)


def check_bytes_of_a_chunk() -> None:
    """A tensor of 48 KiB has six chunks of 8 KiB: six times the exchanges, and the same bits. One
    of 4 KiB has one chunk."""
    size, rank = dist.get_world_size(), dist.get_rank()
    library = counting_group()
    for kind, name in [("all_reduce", "two_shot"), ("all_gather", "direct")]:
        for numel, chunks in ((12 * 1024, 6), (1024, 1)):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
            seen = []
            results = []
            for spec in (name, f"{name}(chunk_bytes=8192)", in_chunks(name, 6)):
                library.seen.clear()
                results.append(call(kind, spec, x, "int8(block=64)", library))
                seen.append(len(library.seen))
            assert seen[1] == chunks * seen[0], (kind, numel, seen)
            assert seen[2] == 6 * seen[0]
            for other in results[1:]:
                assert torch.equal(other, results[0])
    assert size == 2


def test_chunks_of_so_many_bytes_are_exchanges_of_their_own(ranks2):
    ranks2.run(check_bytes_of_a_chunk)


def check_planned_shards() -> None:
    """By default, on gloo: what runs is what is planned, and the bits are those of the named
    algorithm."""
    rank = dist.get_rank()
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(rank))
    rate = KernelRate(0.1, 2.0)
    kernels = Kernels(launch_us=0.0, other=rate, gbytes_per_s=1000.0)
    profile = Profile("slow", Link(10.0, 0.5, overhead_us=1.0), kernels=kernels)
    policy = commpass.Policy(codecs="equarx(block=256)")

    def gathered(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, dist.get_world_size(), "0"))

    torch._dynamo.reset()
    before = len(commpass.plans())
    backend = commpass.backend(policy, profile=profile, strict=True, inner="eager")
    with torch.no_grad():
        found = torch.compile(gathered, backend=backend)(x)
    ((site,),) = commpass.plans()[before:]
    assert (site.codec, site.algorithm) == ("equarx(block=256)", "direct(shards=2)"), site.reason
    group = counting_group(messages=True)
    named = call("all_gather", site.algorithm, x * 2, site.codec, group)
    assert torch.equal(found, named)
    assert sum(nbytes for kind, _, nbytes in group.seen if kind == "send") == site.wire_bytes


@pytest.mark.slow
def test_planned_micro_shards_run_as_planned(ranks2):
    """What is passed to the collective is sent to one other rank."""
    ranks2.run(check_planned_shards)
