"""The algorithms on real ranks: results against exact sums, and laws 1, 2, 4 and 9 on results and
bytes."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from rank_helpers import gather_objects
from refusals import refusals
from tiers import crossed, rarely, sampled

import commpass
from commpass.collectives import Payload, Request, algorithms_of, read_stages

pytestmark = pytest.mark.xdist_group("ranks")

CODECS = [
    "int8",
    "int4",
    "fp8",
    "fp8(form=e5m2)",
    "rotated",
    "rotated(bits=4)",
    "rotated(form=e4m3, block=64)",
    "mxfp4",
    "nvfp4",
    "ecq",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1,), (3, 5), (257,), (2, 3, 129), (1030,)]
LARGEST_ERROR = {"int8": 1 / 254, "fp8": 1 / 16, "mxfp4": 2 / 8 / 2.5, "ecq": 1 / 7}
"""Of one encode, as a share of the peak; ``check_values`` allows 2.5 times as much."""


def call(
    kind: str, name: str, x: torch.Tensor, codec: str, op: str = "sum", group: object = None, **more
) -> torch.Tensor:
    how = {"codec": codec, "algorithm": name, **more}
    if kind == "all_reduce":
        return commpass.all_reduce(x, op, group, **how)
    if kind == "reduce_scatter":
        return commpass.reduce_scatter(x, op, group, **how)
    return {"all_gather": commpass.all_gather, "all_to_all": commpass.all_to_all}[kind](
        x, group=group, **how
    )


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CASES = [
    (kind, a.spec)
    for kind in KINDS
    for a in algorithms_of(kind)
    if a.name not in ("hierarchical", "sparse", "native")
]
STAGES = [
    ("all_reduce", f"{name}(stage={stage})")
    for name in ("two_shot", "ring", "semi_ring")
    for stage in ("rs", "ag")
]
SHARDS = [(kind, f"{name}(shards=3)") for kind, name in CASES]
NODES = [
    (kind, f"hierarchical({given})")
    for kind in ("all_reduce", "reduce_scatter")
    for given in ("node=2", "node=2, between=int4", "node=2, shards=2")
]
NODES += [("all_reduce", f"hierarchical(node=2, stage={stage})") for stage in ("rs", "ag")]
ALL = [*CASES, *STAGES, *SHARDS]


def exact(kind: str, inputs: list[torch.Tensor], rank: int, op: str) -> torch.Tensor:
    """Return the result of the collective without rounding, in float64, from every rank's input."""
    wide = [x.double() for x in inputs]
    if kind == "all_gather":
        return torch.cat(wide)
    if kind == "all_to_all":
        return torch.cat([x.chunk(len(wide))[rank] for x in wide])
    total = sum(wide[1:], wide[0]) / (len(wide) if op == "avg" else 1)
    return total if kind == "all_reduce" else total.chunk(len(wide))[rank]


def check_values(one_in: int) -> int:
    """Every kind x algorithm x codec x dtype x odd shape is near the exact result, and has the same
    bits on every rank."""
    rank, size, digests = dist.get_rank(), dist.get_world_size(), []
    cases = [*crossed(CASES, CODECS, DTYPES, SHAPES, one_in=one_in)] if size == 3 else []
    more = STAGES + SHARDS + (NODES if size == 4 else []) + (CASES if size != 3 else [])
    cases += crossed(more, ["rotated(bits=4)"], DTYPES[:2], SHAPES, one_in=one_in)
    cases += crossed(more, ["int8"], DTYPES, SHAPES, one_in=one_in)
    for (kind, name), codec, dtype, shape in cases:
        full = (shape[0] * size, *shape[1:]) if kind in ("reduce_scatter", "all_to_all") else shape
        inputs = [
            torch.randn(full, generator=torch.Generator().manual_seed(each)).to(dtype)
            for each in range(size)
        ]
        for op in ("sum", "avg"):
            result = call(kind, name, inputs[rank], codec, op)
            where = f"{kind} {name} {codec} {dtype} {full} {op}"
            expected = exact(kind, inputs, rank, op)
            assert result.dtype == dtype, where
            assert result.shape == expected.shape, where
            # Largest error of a code of the smallest grid used here, for each encode. It is int4:
            # half a step of 1/7 of the peak. Rotated blocks add up to sqrt(block) of them in the
            # worst case, but 4 standard deviations in practice. The scale of mxfp4 is the power of
            # two below the peak: of a peak of nearly 8 steps, 6 are left.
            step = (1 / 7 if "int4" in name else 0) + LARGEST_ERROR.get(codec, 1 / 14) * (
                2 if "rotated" in codec else 1
            )
            peak = max(t.abs().max().item() for t in inputs)
            addends = (
                size * (2 if "ring" in name or "hier" in name else 1)
                if kind in ("all_reduce", "reduce_scatter") and op == "sum"
                else 1
            )
            bound = step * peak * addends * 2.5 + 0.01 * expected.abs().max().item()
            worst = (result.double() - expected).abs().max().item()
            assert worst <= bound, f"{where}: error {worst} above {bound}"
            bits = result.contiguous().view(torch.uint8).numpy().tobytes()
            alike = kind in ("all_reduce", "all_gather")
            digests.append((where, hashlib.sha256(bits).hexdigest() if alike else ""))
    for everywhere in zip(*gather_objects(digests), strict=True):
        assert len(set(everywhere)) == 1, f"{everywhere[0][0]}: replicas differ"
    return len(digests)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "one_in"), [(2, 20), (3, 10), (4, 20), rarely(2, 1), rarely(3, 1), rarely(4, 1)]
)
def test_every_algorithm_is_near_the_exact_result_and_replicas_hold_the_same_bits(
    size, one_in, request
):
    ranks = request.getfixturevalue(f"ranks{size}")
    checked = ranks.run(check_values, one_in, timeout=280)
    assert checked == [checked[0]] * size
    assert checked[0] >= len(STAGES + SHARDS) * 2 * 2 * len(SHAPES) * 2 // one_in


def check_not_finite(one_in: int) -> None:
    """Law 2: a non-finite element of one rank is non-finite at every receiver, and affects its
    block only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for (kind, name), codec, bad in crossed(
        ALL, CODECS, [float("nan"), float("inf"), -float("inf")], one_in=one_in
    ):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size * 301, generator=torch.Generator().manual_seed(rank)).to(dtype)
            place = size * 300 + 1
            if rank == size - 1:
                x[place] = bad
            result = call(kind, name, x, codec)
            if kind == "all_gather":
                assert not result[(size - 1) * x.numel() + place].isfinite(), (kind, codec, bad)
                assert result[: (size - 1) * x.numel()].isfinite().all(), (kind, codec, bad)
            elif kind == "all_reduce":
                assert not result[place].isfinite(), (kind, name, codec, bad)
            elif kind == "all_to_all" and rank == size - 1:
                assert not result[(size - 1) * 301 + place - rank * 301].isfinite(), (
                    kind,
                    codec,
                    bad,
                )
                assert result[: (size - 1) * 301].isfinite().all(), (kind, codec, bad)
            elif rank == size - 1:
                assert not result[place - rank * 301].isfinite(), (kind, codec, bad)
            else:
                assert result.isfinite().all(), (kind, codec, bad)


@pytest.mark.every
@pytest.mark.parametrize("one_in", [3, rarely(1)])
def test_values_that_are_not_finite_stay_so(one_in, ranks2):
    ranks2.run(check_not_finite, one_in)


def check_edges() -> None:
    """Zeros, subnormals, -0.0, the largest finite numbers, one element and none."""
    size = dist.get_world_size()
    for (kind, name), codec in itertools.product(CASES, CODECS):
        assert (call(kind, name, torch.zeros(size * 300), codec) == 0).all()
        assert (call(kind, name, torch.full((size * 300,), -0.0), codec) == 0).all()
        assert call(kind, name, torch.full((size * 3,), 1e-42), codec).abs().max() <= 1e-37
        assert call(kind, name, torch.empty(0), codec).numel() == 0
        assert call(kind, name, torch.ones(size, 1), codec).isfinite().all()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            largest = torch.full((size * 300,), torch.finfo(dtype).max, dtype=dtype)
            if kind in ("all_gather", "all_to_all"):
                assert call(kind, name, largest, codec).isfinite().all(), (codec, dtype)
            else:
                assert call(kind, name, largest, codec, "avg").dtype == dtype


@pytest.mark.slow
def test_zeros_extremes_and_empty_inputs_give_the_right_results(ranks2):
    ranks2.run(check_edges)


def check_order() -> None:
    """Law 4: sums are computed in float32 in rank order, with one rounding at the end; two runs
    give the same bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Codes that decode exactly (the peak of each block is 127 * 4**rank), so that only the sum's
    # rounding is left.
    codes = torch.randint(-127, 128, (512,), generator=torch.Generator().manual_seed(rank))
    codes[::256] = 127
    x = (codes * 4**rank).to(torch.bfloat16)
    result = commpass.all_reduce(x, codec="int8", algorithm="one_shot")
    total = sum((t.double() for t in gather_objects(x)), torch.zeros(512, dtype=torch.float64))
    assert torch.equal(result, total.to(torch.float32).to(torch.bfloat16))
    if size > 2:  # adding in bfloat16 would have rounded twice somewhere
        low = gather_objects(x)
        assert not torch.equal(result, sum(low[1:], low[0]))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    for codec in CODECS:
        assert torch.equal(
            commpass.all_reduce(values, codec=codec), commpass.all_reduce(values, codec=codec)
        )


def test_sums_are_float32_in_rank_order_and_deterministic(ranks3):
    ranks3.run(check_order)


def check_wire(one_in: int) -> None:
    """Law 9: dtype and bytes passed to the process group are those that the algorithm predicts."""
    group = counting_group()
    size = dist.get_world_size()
    codecs, dtypes = (CODECS, DTYPES) if size < 4 else (["int8", "rotated(bits=4)"], DTYPES[:2])
    cases = ALL + (NODES if size == 4 else [])
    for (kind, name), codec, dtype, numel in crossed(
        cases, codecs, dtypes, [1, 300, 5000], one_in=one_in
    ):
        x = torch.ones(numel * size, dtype=dtype)
        group.seen.clear()
        call(kind, name, x, codec, group=group)
        request = Request(group.group_name, size, dist.get_rank())
        found = read_stages(kind, name, codec, Payload(x.numel(), 1, dtype), request)
        where = (kind, name, codec, dtype, numel)
        assert [(kind, sent) for kind, _, sent in group.seen] == [
            (stage.kind, stage.nbytes) for stage in found.exchanges
        ], where
        assert {dtype for _, dtype, _ in group.seen} == {torch.uint8}, where


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("one_in", [7, rarely(1)])
@pytest.mark.parametrize("size", [3, 4])
def test_dtype_and_bytes_on_the_wire_are_as_stated(size, one_in, request):
    request.getfixturevalue(f"ranks{size}").run(check_wire, one_in)


def check_gradients() -> None:
    """Gradients are those of the exact collective, up to the codec's error in the backward
    exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for (kind, name), op in itertools.product(ALL, ("sum", "avg")):
        x = torch.randn(
            size * 40, 3, generator=torch.Generator().manual_seed(rank), requires_grad=True
        )
        result = call(kind, name, x, "int8", op)
        weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(100 + rank))
        (result * weight).sum().backward()
        weights = [w.double() for w in gather_objects(weight)]
        share = size if op == "avg" and kind in ("all_reduce", "reduce_scatter") else 1
        if kind == "all_reduce":
            expected = sum(weights[1:], weights[0]) / share
        elif kind == "all_gather":
            expected = sum(weights[1:], weights[0]).chunk(size)[rank]
        elif kind == "all_to_all":
            expected = torch.cat([w.chunk(size)[rank] for w in weights])
        else:
            expected = torch.cat(weights) / share
        assert (x.grad.double() - expected).abs().max() < 0.06, (kind, name, op)


@pytest.mark.slow
def test_gradients(ranks2):
    ranks2.run(check_gradients)


COMPILED = [(*case, "int8") for case in CASES] + [
    ("all_reduce", name, "rotated") for name in ("two_shot", "ring")
]
COMPILED += [(kind, "native", "bf16") for kind in ("all_reduce", "reduce_scatter")]


def check_compiled(cases: list[tuple[str, str, str]], backend: str) -> None:
    """Eager and compiled calls give the same bits, even if one graph serves several sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind, name, codec in cases:
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, k=kind, a=name, c=codec: call(k, a, x * 2, c),
            fullgraph=True,
            dynamic=True,
            backend=backend,
        )
        for rows in (200, 256, 300):
            x = torch.randn(size * rows, 3, generator=torch.Generator().manual_seed(rank))
            assert torch.equal(compiled(x), call(kind, name, x * 2, codec)), (
                kind,
                name,
                codec,
                rows,
            )


WAYS = [(case, backend) for backend in ("aot_eager", "inductor") for case in COMPILED]
TWO_SHOT, RING = ("all_reduce", "two_shot", "int8"), ("all_reduce", "ring", "rotated")
NATIVE = ("reduce_scatter", "native", "bf16")
QUICK = [(each, "aot_eager") for each in (TWO_SHOT, RING, NATIVE)]


@pytest.mark.every
@pytest.mark.parametrize(("case", "backend"), sampled(WAYS, QUICK), ids=str)
def test_eager_and_compiled_calls_agree_bit_for_bit(case, backend, ranks2):
    ranks2.run(check_compiled, [case], backend, timeout=280)


def check_bad_input() -> list[str]:
    return refusals(
        lambda: commpass.all_reduce(torch.ones(3), codec="int9"),
        lambda: commpass.all_reduce(torch.ones(3), algorithm="two-shot"),
        lambda: commpass.all_reduce(torch.ones(3), "max"),
        lambda: commpass.all_reduce(torch.ones(3, dtype=torch.int32)),
        lambda: commpass.reduce_scatter(torch.ones(3)),
        lambda: commpass.all_gather(torch.tensor(1.0)),
    )


def test_bad_input_is_refused_before_anything_is_sent(ranks2):
    said = ranks2.run(check_bad_input)[0]
    for text, part in zip(
        said, ["'int8'", "'two_shot'", "sum", "int32", "multiple of 2", "reshape(1)"], strict=True
    ):
        assert part in text


SOME_TAILS = [
    (("all_reduce", "two_shot"), "int8"),
    (("all_gather", "direct"), "rotated(bits=6)"),
]
ALL_TAILS = [
    *crossed(CASES, ["int8", "rotated(bits=6)"]),
    *((case, "int8") for case in SHARDS[1:3]),
]


def check_compiled_tails(cases: list[tuple[tuple[str, str], str]]) -> None:
    """Compiled, followed by an elementwise operator, at sizes that end within a block: Inductor
    must not lose the tail."""

    def all_of_them(x):
        return [call(kind, name, x, codec) * 2 + 1 for (kind, name), codec in cases]

    x = torch.randn((6, 227), generator=torch.Generator().manual_seed(dist.get_rank())).to(
        torch.bfloat16
    )
    made = torch.compile(all_of_them, dynamic=False)(
        x
    )  # one graph: starting the compiler takes most of the time
    for case, eager, compiled in zip(cases, all_of_them(x), made, strict=True):
        assert torch.equal(eager, compiled), (case, (eager != compiled).sum())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [rarely(SOME_TAILS), rarely(ALL_TAILS)], ids=["some", "all"])
def test_compiled_results_are_whole_at_sizes_that_end_within_a_block(cases, ranks2):
    ranks2.run(check_compiled_tails, cases, timeout=580)


def check_decoded() -> None:
    """If values are coded once, the result is the rounded float64 sum of the values that the ranks
    decode."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for codec, dtype, numel in itertools.product(
        ["int8", "int4", "fp8", "sdp4bit", "raw"], DTYPES, [1, 257, 1030]
    ):
        coder = commpass.codec(codec)
        x = torch.randn(numel * size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        others = gather_objects(x)
        whole = [
            coder.decode_rows(coder.encode_rows(t.reshape(1, -1)), t.numel(), dtype)
            .double()
            .flatten()
            for t in others
        ]
        parts = [
            coder.decode_rows(coder.encode_rows(t.reshape(size, -1)), numel, dtype).double()
            for t in others
        ]  # one row per rank
        expected = {
            ("all_reduce", "one_shot"): sum(whole),
            ("reduce_scatter", "direct"): sum(part[rank] for part in parts),
            ("all_gather", "direct"): torch.cat(whole),
            ("all_to_all", "direct"): torch.cat([part[rank] for part in parts]),
        }
        for (kind, name), total in expected.items():
            result = call(kind, name, x, codec)
            bound = 4 * torch.finfo(dtype).eps * total.abs() + 1e-6 * total.abs().max()
            assert ((result.double() - total).abs() <= bound).all(), (kind, codec, dtype, numel)


def test_results_are_sums_of_what_the_ranks_decode(ranks3):
    ranks3.run(check_decoded)


def check_alone() -> None:
    """A group of one rank: nothing is sent, and the result is the decoded value."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    x = torch.randn(700, generator=torch.Generator().manual_seed(dist.get_rank()))
    for kind, name in CASES:
        for codec in ("int8", "raw", "exponent"):
            result = call(kind, name, x, codec, group=group)
            assert result.shape == x.shape
            worst = (result - x).abs().max().item()
            assert worst <= (0.05 if codec == "int8" else 0), (kind, name, codec, worst)


def test_group_of_one_rank(ranks2):
    ranks2.run(check_alone)


def check_uneven_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = [[(2 * a + 3 * b) % 5 for b in range(size)] for a in range(size)]
    sent, received = matrix[rank], [row[rank] for row in matrix]
    x = torch.randn(
        sum(sent), 130, generator=torch.Generator().manual_seed(rank), requires_grad=True
    )
    result = commpass.all_to_all(x, received, sent, codec="int8")
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(100 + rank))
    (result * weight).sum().backward()
    weights = gather_objects(weight)
    starts = [
        [sum(matrix[a][to] for a in range(rank)) for to in range(size)] for rank in range(size + 1)
    ]
    expected = torch.cat(
        [weights[to][starts[rank][to] : starts[rank + 1][to]] for to in range(size)]
    )
    assert (x.grad - expected).abs().max() <= 0.05


def test_gradients_of_uneven_all_to_all(ranks3):
    ranks3.run(check_uneven_gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_error_without_ranks_says_what_to_call_first(kind):
    assert not dist.is_initialized()
    (said,) = refusals(lambda: call(kind, None, torch.ones(4), "int8"))
    assert f"commpass.{kind}: there is no process group yet" in said
    assert "Write torch.distributed.init_process_group() before it" in said
    assert "torchrun --nproc-per-node" in said
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"Write torch.distributed.init_process_group\(\) before"):
        torch.compile(lambda x: call(kind, None, x, "int8"), backend="eager")(torch.ones(4))


def test_group_that_is_none_is_refused_with_what_to_give(fake_group):
    fake_group(8)
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    x, others = torch.ones(8), dist.new_group([1, 2])
    parts = {
        "tp": "give the group itself, e.g. mesh.get_group('tp')",
        "9": "group='9': no process group has this name",
        5: "group=5 is no process group: give a group, a mesh of one dimension",
        mesh: "(mesh, number of the dimension)",
        (mesh, 7): "is no process group",
        others: "this rank is not in it",
    }
    for group, part in parts.items():
        (said,) = refusals(lambda group=group: commpass.all_reduce(x, group=group))
        assert part in said
    for group in (mesh["tp"], (mesh, 1), mesh.get_group("tp"), mesh.get_group("tp").group_name):
        assert commpass.all_gather(x, group=group).shape == (32,)


def test_group_may_be_named_in_compiled_code(fake_group):
    fake_group(4)
    function = torch.compile(
        lambda x: commpass.all_gather(x, group="0"), fullgraph=True, backend="eager"
    )
    assert function(torch.ones(8)).shape == (32,)
