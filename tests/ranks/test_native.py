"""Algorithm ``native`` on real ranks: values against a float64 reference, replicas, law 2, bytes,
gradients and graphs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from counting import counting_group
from rank_helpers import is_same_on_all_ranks
from refusals import refusals
from test_models import close, step, tensor_parallel
from tiers import crossed, rarely
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.collectives import Payload, Request, algorithm, read_stages
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
FORMS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1,), (3, 5), (257, 2), (64,)]
KINDS = ("all_reduce", "reduce_scatter")


def call(kind: str, x: torch.Tensor, codec: str = "bf16", op: str = "sum", **more) -> torch.Tensor:
    how = {"codec": codec, "algorithm": "native", **more}
    return getattr(commpass, kind)(x, op, **how)


def inputs(shape, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return the input of each rank, in one list."""
    shape = (shape[0] * size, *shape[1:])
    seeds = map(torch.Generator().manual_seed, range(size))
    return [torch.randn(shape, generator=seed).to(dtype) for seed in seeds]


def bound(form: torch.dtype, dtype: torch.dtype, given: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest error of the sum of each value.

    An addend is rounded; then at most as many partial sums as there are ranks less one, each by at
    most half a step; at last the result.
    """
    half, last = torch.finfo(form).eps / 2, torch.finfo(dtype).eps / 2
    size, addends = len(given), sum(x.double().abs() for x in given)
    smallest = size * torch.finfo(form).tiny
    return addends * (((1 + half) ** size) * (1 + last) * (1 + 1e-6) - 1) + smallest


def check_values(one_in: int) -> int:
    rank, size, count, bits = dist.get_rank(), dist.get_world_size(), 0, []
    for kind, codec, dtype, shape, op in crossed(
        KINDS, FORMS, DTYPES, SHAPES, ("sum", "avg"), one_in=one_in
    ):
        where, given = (kind, codec, dtype, shape, op), inputs(shape, dtype, size)
        share = size if op == "avg" else 1
        expected = sum(x.double() for x in given) / share
        most = bound(FORMS[codec], dtype, given) / share
        if kind == "reduce_scatter":
            expected, most = expected.chunk(size)[rank], most.chunk(size)[rank]
        result = call(kind, given[rank], codec, op)
        assert (result.dtype, result.shape) == (dtype, expected.shape), where
        assert ((result.double() - expected).abs() <= most).all(), where
        assert torch.equal(result, call(kind, given[rank], codec, op)), where
        if kind == "all_reduce":
            bits.append(result.view(torch.uint8).numpy().tobytes())
        count += 1
    assert is_same_on_all_ranks(b"".join(bits))
    return count


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("size", "one_in"), [(2, 4), (4, 4), rarely(3, 1), rarely(4, 1)])
def test_sums_are_within_the_bound_and_replicas_hold_the_same_bits(size, one_in, request):
    counts = request.getfixturevalue(f"ranks{size}").run(check_values, one_in)
    assert counts == [2 * 2 * 4 * 4 * 2 // one_in] * size


def check_error() -> dict[str, tuple[float, float]]:
    """Return for each form the predicted error and the measured one, and compare the latter with
    that of sums in float32."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    given = inputs((1 << 18,), torch.float32, size)
    expected = sum(x.double() for x in given)
    for codec in FORMS:
        by = {
            name: commpass.all_reduce(given[rank], codec=codec, algorithm=name).double()
            for name in ("native", "one_shot")
        }
        error = {name: ((x - expected).norm() / expected.norm()).item() for name, x in by.items()}
        predicted = algorithm("all_reduce", "native").error(commpass.codec(codec), size)
        found[codec] = predicted, error["native"], error["one_shot"]
    return found


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("size", [2, 4])
def test_predicted_error_counts_the_rounding_of_partial_sums(size, request):
    for found in request.getfixturevalue(f"ranks{size}").run(check_error)[0].values():
        predicted, native, wide = found
        assert predicted / 1.5 <= native <= predicted * 1.5
        assert native > 1.2 * wide  # partial sums are rounded: this is not law 4


def check_not_finite() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind, codec, bad in [
        (kind, codec, bad)
        for kind in KINDS
        for codec in FORMS
        for bad in (math.nan, math.inf, -math.inf)
    ]:
        x = torch.ones(size * 100)
        if rank == size - 1:
            x[5] = bad
        result, mine = call(kind, x, codec), kind == "all_reduce" or rank == 0
        expected = torch.full_like(result, size)
        if mine:
            expected[5] = bad
        assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0)), (kind, codec, bad)
    # A finite addend is clipped to the largest number; a sum above it is Inf.
    x = torch.zeros(size, 2)
    x[:, 0] = 1e6 if rank == 0 else 0.0
    x[:, 1] = 60000.0
    assert call("all_reduce", x, "fp16")[0].tolist() == [65504.0, math.inf]
    assert call("reduce_scatter", x, "fp16")[0].tolist() == [65504.0, math.inf]
    assert call("all_reduce", x, "bf16").isfinite().all()
    assert (call("all_reduce", torch.full((size,), 60000.0).half(), "bf16") == math.inf).all()
    assert call("all_reduce", torch.full((size,), 60000.0).half(), "bf16", "avg").isfinite().all()


def test_values_not_finite_stay_so_and_sums_overflow_as_the_librarys_do(ranks2):
    ranks2.run(check_not_finite)


def check_wire() -> None:
    """Law 9: the library gets 16-bit floats, with as many bytes as in the stages."""
    group, size = counting_group(), dist.get_world_size()
    for kind, codec, numel in [(k, c, n) for k in KINDS for c in FORMS for n in (1, 300, 4096)]:
        x = torch.ones(numel * size)
        group.seen.clear()
        call(kind, x, codec, group=group)
        (stage,) = read_stages(
            kind,
            "native",
            codec,
            Payload(x.numel(), 1, x.dtype),
            Request(group.group_name, size, dist.get_rank()),
        ).exchanges
        rows = 1 if kind == "all_reduce" else size
        nbytes = rows * math.ceil(2 * x.numel() / rows / 128) * 128
        assert group.seen == [(kind, FORMS[codec], nbytes)]
        assert (stage.kind, stage.nbytes, stage.leaving) == (kind, nbytes, nbytes)


def test_library_gets_16_bit_floats(ranks4):
    ranks4.run(check_wire)


def check_edges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in KINDS:
        assert call(kind, torch.empty(0, 3)).shape == (0, 3)
        assert (call(kind, torch.full((size, 3), -0.0)) == 0).all()
    assert call("all_reduce", torch.tensor(1.0)).item() == size
    # A tensor in flight is not the caller's, even if nothing is rounded.
    for kind, name in [*((kind, "native") for kind in KINDS), ("all_gather", "direct")]:
        x = torch.ones(size * 64, dtype=torch.bfloat16)
        handle = getattr(commpass, kind)(x, codec="bf16", algorithm=name, async_op=True)
        x.zero_()
        assert (handle.wait() == (1 if kind == "all_gather" else size)).all(), kind
    for kind in KINDS:
        x = torch.full((size, 4), 1.0 + rank, requires_grad=True)
        result = call(kind, x, op="avg")
        (result * (1.0 + rank)).sum().backward()
        if kind == "all_reduce":
            assert (x.grad == (size + 1) / 2).all()
        else:
            assert torch.equal(x.grad, torch.arange(1.0, size + 1)[:, None].expand(size, 4) / size)


def test_edges_handles_and_gradients(ranks2):
    ranks2.run(check_edges)


def check_refusals() -> list[str]:
    x = torch.ones(4)
    return refusals(
        lambda: commpass.all_reduce(x, codec="int8", algorithm="native"),
        lambda: commpass.all_reduce(x, codec="raw", algorithm="native"),
        lambda: commpass.all_reduce(x, codec="bf16", algorithm="native(chunks=2)"),
        lambda: commpass.all_gather(x, codec="bf16", algorithm="native"),
    )


def test_other_codecs_and_kinds_are_refused_with_what_to_write(ranks2):
    said = ranks2.run(check_refusals)[0]
    parts = ["write codec='bf16'", "what raw sends", "no parameter 'chunks'", "Known: direct"]
    for text, part in zip(said, parts, strict=True):
        assert part in text


# --- in graphs ------------------------------------------------------------------------------------


def named(**more) -> Policy:
    return Policy(rules=[Rule(codec="bf16", algorithm="native", force=True, **more)])


def check_graph(lowering: str) -> None:
    """Forward and backward of a compiled function have the bits of direct calls, with bf16 on the
    wire, as in the plan."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), counting_group()
    given = inputs((40, 3), torch.float32, size)

    def scaled(reduce, scatter):
        def run(x):
            y = reduce(x * 2) * torch.arange(1.0, 4.0)
            return scatter(y.sin() * (1.0 + rank)) * 3

        return run

    by_hand = scaled(
        lambda x: call("all_reduce", x, group=group),
        lambda x: call("reduce_scatter", x, group=group),
    )
    plain = scaled(
        lambda x: functional.all_reduce(x, "sum", group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
    )
    backend = commpass.backend(named(lowering=lowering), strict=True)
    results, seen = [], len(commpass.plans())
    for function in (by_hand, torch.compile(plain, backend=backend, fullgraph=True)):
        group.seen.clear()
        x = given[rank].clone().requires_grad_()
        out = function(x)
        out.sum().backward()
        results.append((out.detach(), x.grad, list(group.seen)))
    (expected, gradient, _), (out, grad, sent) = results
    forward, backward = commpass.plans()[seen:]
    sites = [*forward, *backward]
    assert [(site.kind, site.codec, site.algorithm, site.lowering) for site in forward] == [
        ("all_reduce", "bf16", "native", lowering),
        ("reduce_scatter", "bf16", "native", lowering),
    ]
    reductions = [site for site in sites if site.kind in KINDS]
    assert all(site.algorithm == "native" for site in reductions)
    assert [(kind, nbytes) for kind, dtype, nbytes in sent if dtype == torch.bfloat16] == [
        (site.kind, site.wire_bytes) for site in reductions
    ]
    assert close(out, expected, 1e-5)
    assert close(grad, gradient, 1e-5)
    exact, most = (part.chunk(size)[rank] for part in in_float64(given))
    assert ((out.double() - exact).abs() <= most).all()


def in_float64(given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of ``check_graph``, and the largest error of each value.

    A sine changes at most as much as its argument, and then a second sum is rounded.
    """
    factors, weights = torch.arange(1.0, 4.0), [1.0 + rank for rank in range(len(given))]
    doubled = [x * 2 for x in given]
    y = (sum(x.double() for x in doubled) * factors).sin()
    moved = bound(torch.bfloat16, torch.float32, doubled) * factors + 1e-6
    # What is sent may be off by this change: each sine in the second sum is at most 1, and is
    # rounded.
    rounded = bound(torch.bfloat16, torch.float32, [torch.full_like(y, w) for w in weights])
    return y * sum(weights) * 3, (moved * sum(weights) + rounded) * 3


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
@pytest.mark.parametrize("size", [rarely(2), rarely(4)])
def test_graph_has_the_bits_of_calls_by_hand_forward_and_backward(size, lowering, request):
    request.getfixturevalue(f"ranks{size}").run(check_graph, lowering, timeout=280)


def check_model() -> None:
    """A tensor-parallel model trains, with replicas that stay bit-equal."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel(mesh)
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    plain_out, plain_grads = step(model, x)
    seen = len(commpass.plans())
    compiled = torch.compile(model, backend=commpass.backend(named(), strict=True), fullgraph=True)
    out, grads = step(compiled, x)
    sites = [site for plan in commpass.plans()[seen:] for site in plan]
    assert [site.algorithm for site in sites] == ["native"] * 4
    assert not torch.equal(out, plain_out)  # it was really cast
    assert close(out, plain_out, 0.01)
    for got, expected in zip(grads, plain_grads, strict=True):
        assert close(got, expected, 0.03)
    assert is_same_on_all_ranks(out.numpy().tobytes())
    # It is never chosen unless it is named.
    seen = len(commpass.plans())
    for policy in (Policy(rules=[Rule(codec="bf16", force=True)]), PRESETS["balanced"]):
        torch._dynamo.reset()
        step(torch.compile(model, backend=commpass.backend(policy, inner="eager")), x)
    sites = [site for plan in commpass.plans()[seen:] for site in plan]
    assert len(sites) == 8
    assert "native" not in [site.algorithm for site in sites]


@pytest.mark.every
def test_model_trains_by_native_only_where_it_is_named(ranks4):
    ranks4.run(check_model, timeout=280)
