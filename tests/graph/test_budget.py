"""max_error on real values: sites that exceed it are uncompressed after the first calls."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from functional_ops import ar
from tiers import rarely
from torch.utils._python_dispatch import TorchDispatchMode

import commpass
from commpass import Policy, Rule
from commpass.codecs import NAMES
from commpass.codecs.block.codec import BlockCodec
from commpass.distributed.budget import excess, keys_of, limits
from commpass.distributed.samples import CHECKED, SLICE_CPU, Reading, measure, reading_of
from commpass.errors import PolicyError

SLOW = commpass.ethernet(0.001)
BALANCED = Policy.from_preset("balanced")


def two_sums(x, w, y):
    return ar(x @ w), ar(y * 1.0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_counts() -> torch.Tensor:
    """Return fields with one count in each 256 values: the count sets the scale of its block."""
    x = normal(128, 256, seed=2)
    x[:, ::256] = 1e6
    return x


def codecs_of(backend) -> list[str]:
    return [site.codec for entry in backend.step_log.entries for site in entry.plan.sites]


def called(values, *, policy=BALANCED, calls: int = 3, inner: str = "eager", function=two_sums):
    """Return a backend whose function was called with these values, and the result of each call."""
    torch._dynamo.reset()
    backend = commpass.backend(policy, inner=inner, profile=SLOW, strict=True)
    compiled = torch.compile(function, backend=backend)
    return backend, [compiled(*values) for _ in range(calls)]


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "commpass")
    return lambda: [
        r.getMessage() for r in caplog.records if "stays uncompressed from now" in r.message
    ]


GOOD = normal(128, 128), normal(128, 256, seed=1)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "inductor", rarely("aot_eager")])
@pytest.mark.parametrize("spec", ["int8", rarely("rotated")])
def test_site_over_its_budget_is_left_alone_after_the_first_call(fake_group, warnings, inner, spec):
    fake_group(4)
    policy = Policy(codecs=(spec,), max_error=0.02)
    y = with_counts()
    backend, results = called((*GOOD, y), policy=policy, inner=inner)
    assert codecs_of(backend) == [spec, "none"]
    (entry,) = backend.step_log.entries
    assert "of its non-zero values are lost" in entry.plan.sites[1].reason
    assert entry.plan in commpass.plans()
    lost = (results[0][1] != y).float().mean()
    assert lost > 0.9  # the error of the first call, whose values were unknown
    assert torch.equal(results[1][1], y)  # the fake group returns each rank's own values
    (warning,) = warnings()
    assert "all_reduce_1" in warning
    assert "max_error" in warning


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "y",
    [
        normal(128, 256),
        torch.distributions.Laplace(0.0, 1.0).icdf(torch.rand(128, 256).clamp(1e-6, 1 - 1e-6)),
        torch.relu(normal(128, 256, seed=3)),
        torch.nn.functional.gelu(normal(128, 256, seed=4)),
        normal(128, 256) * torch.logspace(-3, 3, 128)[:, None],  # rows of different sizes
        torch.full((128, 256), 0.7),
    ],
    ids=["gauss", "laplace", "relu", "gelu", "rows", "constant"],
)
def test_sites_within_their_budget_stay_compressed(fake_group, warnings, y):
    fake_group(4)
    for spec in ("int8", "rotated"):
        policy = Policy(codecs=(spec,), max_error=0.02)
        backend, _ = called((*GOOD, y), policy=policy)
        assert codecs_of(backend) == [spec, spec]
    assert warnings() == []


def test_counts_that_come_in_as_floats_are_left_alone_after_the_first_call(fake_group, warnings):
    fake_group(4)
    counts = torch.randint(0, 200, (128, 256), generator=torch.Generator().manual_seed(0)).float()
    backend, results = called((*GOOD, counts))
    assert codecs_of(backend) == ["int8", "none"]
    (message,) = warnings()
    assert "its values are whole numbers" in message
    assert not torch.equal(results[0][1], counts)
    assert all(torch.equal(result[1], counts) for result in results[1:])


def test_check_goes_on_until_there_is_something_to_measure(fake_group, warnings):
    fake_group(4)
    torch._dynamo.reset()
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner="eager", profile=SLOW)
    compiled = torch.compile(two_sums, backend=backend)
    zeros, infinite = torch.zeros(128, 256), torch.full((128, 256), float("inf"))
    for y in (zeros, infinite, zeros, with_counts()):  # the fourth call is measured
        assert codecs_of(backend).count("none") == 0
        compiled(*GOOD, y)
    compiled(*GOOD, zeros)
    assert codecs_of(backend) == ["int8", "none"]
    assert len(warnings()) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_row_of_non_finite_values_does_not_end_the_check_of_the_others(fake_group, warnings, bad):
    fake_group(4)
    y = with_counts()
    y[3] = bad
    backend, results = called((*GOOD, y), policy=Policy(codecs=("int8",), max_error=0.02))
    assert codecs_of(backend) == ["int8", "none"]
    assert torch.allclose(results[1][1], y, rtol=0, atol=0, equal_nan=True)
    (warning,) = warnings()
    assert "non-zero values are lost" in warning
    y = normal(128, 256)
    y[3] = bad
    backend, _ = called((*GOOD, y), policy=Policy(codecs=("int8",), max_error=0.02))
    assert codecs_of(backend) == ["int8", "int8"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("y", [normal(128, 256), with_counts()], ids=["within", "over"])
def test_untouched_graph_is_released_after_the_check(fake_group, y):
    fake_group(4)
    graphs, module = [], importlib.import_module("commpass.backend.agree")
    run = module.run_passes

    def watched(road, *args, **kwargs):
        graphs.append(weakref.ref(road.gm))
        outcome = run(road, *args, **kwargs)
        graphs.extend(weakref.ref(each) for each in outcome.untouched.values())
        return outcome

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "run_passes", watched)
        backend, _ = called((*GOOD, y), calls=4, inner="inductor")
    gc.collect()
    assert len(graphs) >= 2
    assert [graph() for graph in graphs] == [None] * len(graphs)
    assert len(codecs_of(backend)) == 2


def test_site_over_its_budget_is_checked_anew_after_a_reset_of_dynamo(fake_group):
    fake_group(4)
    backend, _ = called((*GOOD, with_counts()), calls=2)
    assert codecs_of(backend) == ["int8", "none"]
    torch._dynamo.reset()
    torch.compile(two_sums, backend=backend)(*GOOD, normal(128, 256))
    assert codecs_of(backend)[-2:] == ["int8", "int8"]


@pytest.mark.slow
def test_site_over_its_budget_stays_so_when_compiled_for_other_sizes(fake_group):
    fake_group(4)
    torch._dynamo.reset()
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner="eager", profile=SLOW)
    compiled = torch.compile(two_sums, backend=backend, dynamic=False)
    for _ in range(2):
        compiled(*GOOD, with_counts())
    compiled(normal(64, 128), GOOD[1], with_counts()[:64])
    assert codecs_of(backend) == ["int8", "none"] * 2


def alternating(backend, calls: int = 4):
    """Call a function alternately with two sizes; the values of the smaller exceed its budget.

    The larger one has a separate graph, and first has nothing to measure.
    """
    torch._dynamo.reset()
    compiled = torch.compile(two_sums, backend=backend, dynamic=False)
    big = with_counts()
    codecs = []
    for call in range(calls):
        compiled(*GOOD, big * bool(call))
        compiled(normal(64, 128), GOOD[1], big[:64])
        codecs.append(codecs_of(backend))
    return codecs, compiled(*GOOD, big)[1]


@pytest.mark.slow
def test_site_found_over_its_budget_at_one_size_is_left_alone_at_the_others(fake_group):
    fake_group(4)
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner="eager", profile=SLOW, strict=True)
    codecs, result = alternating(backend)
    assert codecs[0] == ["int8"] * 4
    assert codecs[1:] == [["int8", "none"] * 2] * 3
    assert torch.equal(result, with_counts())
    assert not any(each.built for graphs in backend.checked.values() for each in graphs)


def test_site_found_over_its_budget_is_left_alone_at_a_size_that_comes_back_after_the_check(
    fake_group,
):
    fake_group(4)
    torch._dynamo.reset()
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner="eager", profile=SLOW, strict=True)
    compiled = torch.compile(two_sums, backend=backend, dynamic=False)
    big = with_counts()
    compiled(*GOOD, big * 0)
    for _ in range(6):
        compiled(normal(64, 128), GOOD[1], big[:64])
    (graphs,) = backend.checked.values()
    assert not any(each.is_checking for each in graphs)
    assert torch.equal(compiled(*GOOD, big)[1], big)
    assert codecs_of(backend) == ["int8", "none"] * 2


@pytest.mark.slow
def test_forced_sites_and_sites_without_a_budget_are_not_held_to_one(fake_group, warnings):
    fake_group(4)
    for policy in (
        Policy(codecs=("int8",)),
        Policy(rules=[Rule(codec="int8", force=True)], max_error=0.02),
        Policy(codecs=("int8",), max_error=0.02, check_calls=0),
    ):
        backend, _ = called((*GOOD, with_counts()), policy=policy)
        assert codecs_of(backend) == ["int8", "int8"]
    assert warnings() == []


@pytest.mark.slow
def test_nothing_is_in_the_graph_where_nothing_is_checked(fake_group):
    fake_group(4)
    graphs = []

    def inner(gm, inputs):
        graphs.append(gm)
        return gm.forward

    called((*GOOD, normal(128, 256)), inner=inner)
    targets = [str(node.target) for gm in graphs for node in gm.graph.nodes]
    assert not any("sample" in target for target in targets)


@pytest.mark.slow
def test_values_inside_of_a_kernel_are_checked_too(fake_group):
    fake_group(4)

    def function(x, w, y):
        return ar(torch.tanh(x)), ar(torch.nn.functional.relu(y) + 1)

    policy = Policy(codecs=("int8",), max_error=0.02, lowering="inline")
    values = (normal(128, 256), normal(1), with_counts())
    backend, results = called(values, policy=policy, inner="inductor", function=function)
    assert codecs_of(backend) == ["int8", "none"]
    assert torch.equal(results[-1][1], torch.relu(values[2]) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_gradients_are_those_of_the_graph_that_was_compiled_again(fake_group, inner):
    """A recompiled forward graph passes its backward graph what that expects."""
    fake_group(4)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ar(x)

        @staticmethod
        def backward(ctx, grad):
            return ar(grad)

    def function(x, y):
        return (Sum.apply(x * y).t().contiguous().relu() * Sum.apply(y).t()).sum()

    x, y = normal(128, 128).requires_grad_(), with_counts()[:, :128].clone().requires_grad_()
    function(x, y).backward()
    wanted = [x.grad.clone(), y.grad.clone()]
    torch._dynamo.reset()
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner=inner, profile=SLOW, strict=True)
    compiled = torch.compile(function, backend=backend)
    for _ in range(4):
        x.grad = y.grad = None
        compiled(x, y).backward()
    assert "none" in codecs_of(backend)
    left = {
        site.direction
        for e in backend.step_log.entries
        for site in e.plan.sites
        if site.codec == "none"
    }
    assert left == {"forward", "backward"}
    for found, exact in zip((x.grad, y.grad), wanted, strict=True):
        assert (found - exact).norm() < 0.05 * exact.norm()  # other sites are still compressed


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "when all was planned"])
def test_graph_that_could_not_be_compiled_again_is_compiled_with_the_next_call(
    fake_group, warnings, monkeypatch, late
):
    fake_group(4)
    torch._dynamo.reset()
    policy = Policy(codecs=("int8",), max_error=0.02)
    backend = commpass.backend(policy, inner="eager", profile=SLOW, strict=True)
    module = importlib.import_module("commpass.backend.build")
    build, failed, seen = module.build, [], len(commpass.plans())

    def no_room(*_):
        failed.append(True)
        raise MemoryError("no room to compile in")

    def fail_once(shared, job, before=None):
        if before is None or failed:
            return build(shared, job, before)
        broken = dataclasses.replace(job, compile_graph=no_room)
        return build(shared, broken, before) if late else no_room()

    monkeypatch.setattr(module, "build", fail_once)
    compiled, values = torch.compile(two_sums, backend=backend), (*GOOD, with_counts())
    compiled(*values)
    with pytest.raises(MemoryError):
        compiled(*values)
    results = [compiled(*values)[1] for _ in range(2)]
    assert codecs_of(backend) == ["int8", "none"]
    assert all(torch.equal(result, values[2]) for result in results)
    assert len(warnings()) == 1
    assert [[site.codec for site in plan.sites] for plan in commpass.plans()[seen:]] == [
        ["int8", "none"]
    ]


# --- what is measured -----------------------------------------------------------------------------


def test_readings_are_those_of_the_formulas():
    coder, x = commpass.codec("int8"), with_counts()
    decoded = coder.decode(coder.encode(x.flatten())).reshape(x.shape).double()
    lost, had, values, gone, worst, fractions, could = measure(coder, x).tolist()
    error = decoded - x.double()
    assert lost == pytest.approx(float(error.square().sum()), rel=1e-9)
    assert had == pytest.approx(float(x.double().square().sum()), rel=1e-9)
    assert values == x.count_nonzero()
    assert gone == (error.abs() >= x.double().abs()).sum()
    assert fractions == (x != x.round()).sum()
    assert could == ((x != 0) & (x.abs() < 2**23)).sum()
    by_block = error.square().sum(1) / x.double().square().sum(1)
    assert worst == pytest.approx(float(by_block.max().sqrt()), rel=1e-9)


def test_large_tensors_are_measured_in_part():
    x = normal(4 * CHECKED)
    coder = commpass.codec("int8")
    some, every = measure(coder, x, CHECKED).tolist(), measure(coder, x).tolist()
    assert some[2] == CHECKED
    assert some[0] / some[1] == pytest.approx(every[0] / every[1], rel=0.05)


@pytest.mark.parametrize("place", [0, -1])
def test_part_that_is_measured_has_the_first_and_the_last_values(place):
    x = torch.zeros(4 * CHECKED)
    x[place] = 1.0
    assert measure(commpass.codec("int8"), x, CHECKED)[2] == 1


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, CHECKED + 1])
@pytest.mark.parametrize("spec", ["int8", "rotated", "bf16", "exponent"])
def test_any_number_of_values_can_be_measured(numel, spec):
    found = measure(commpass.codec(spec), normal(numel), CHECKED)
    assert found.shape == (7,)
    assert found.isfinite().all()


BLOCKS = [
    each.spec
    for name in NAMES
    if name not in ("outlier", "difference")
    for each in [commpass.codec(name)]
    if not each.lossless and each.state is None
]
"""The codecs whose errors are measured, in their default settings."""


@pytest.mark.few(50)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", [*BLOCKS, "outlier(width=64)", "int8(static=0.1)"])
def test_row_of_non_finite_values_is_left_out_of_what_is_measured(spec, dtype, bad):
    coder, x, row = commpass.codec(spec), normal(64, 1024).to(dtype), torch.arange(64) == 3
    x[3] = bad
    found, without = measure(coder, x).tolist(), measure(coder, x[~row]).tolist()
    if coder.block < 1024 and spec not in ("ecq", "mixed", "outlier(width=64)"):
        assert found == pytest.approx(without, rel=1e-6)
    assert found[1:3] == pytest.approx(without[1:3], rel=1e-6)
    assert found[5:] == without[5:]
    # Blocks that share a scale, or bits, with the row are measured as if it were zeros.
    assert found[0] == pytest.approx(without[0], rel=0.1)
    assert found[3] == pytest.approx(without[3], rel=0.1)
    assert found[4] == pytest.approx(without[4], rel=0.1)


@pytest.mark.parametrize(
    ("spec", "left_out"), [("int8", 256), ("mxfp4", 32), ("bf16", 1), ("ecq", 256)]
)
def test_non_finite_value_is_left_out_with_its_block_alone(spec, left_out):
    x = normal(1024)
    x[300] = math.nan
    assert measure(commpass.codec(spec), x)[2] == 1024 - left_out


def test_block_at_the_end_is_left_out_as_far_as_there_are_values():
    x = normal(300)
    x[299] = -math.inf
    found = measure(commpass.codec("int8"), x).tolist()
    assert found == measure(commpass.codec("int8"), x[:256]).tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("spec", ["int8", "bf16", "ecq", "rotated", "equarx"])
def test_nothing_is_measured_if_no_value_is_finite(spec, bad):
    found = measure(commpass.codec(spec), torch.full((8, 256), bad)).tolist()
    assert found == [0.0] * 7
    assert reading_of(found, SimpleNamespace(codec=spec, error=0.01)) is None


class Passes(TorchDispatchMode):
    """Counts the operators that read more than one block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(isinstance(x, torch.Tensor) and x.numel() > 4096 for x in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 300, 1 << 18])
@pytest.mark.parametrize("spec", ["int8", "bf16"])
def test_finite_values_on_a_cpu_are_measured_without_masks(monkeypatch, spec, numel, dtype):
    """Masks would take half as long as the rest."""
    coder, x = commpass.codec(spec), normal(numel).to(dtype)
    inner = measure.__wrapped__  # ``measure`` disables modes
    with Passes() as without:
        found = inner(coder, x)
    monkeypatch.setattr("commpass.distributed.samples._is_known_finite", lambda values: False)
    with Passes() as with_masks:
        assert torch.equal(inner(coder, x), found)
    parts = -(-numel // SLICE_CPU)
    assert with_masks.count - without.count >= (5 * parts if numel > 4096 else 0)


def test_finite_values_whose_sum_is_not_finite_are_measured():
    x = torch.full((1024,), torch.finfo(torch.float32).max)
    found = measure(commpass.codec("bf16"), x / 2)
    assert found[2] == 1024
    assert found.isfinite().all()


@pytest.mark.parametrize(("finite", "counts"), [(7, False), (8, True)])
def test_call_of_few_finite_blocks_is_not_counted(finite, counts):
    """They may be padding beside a mask, which is unlike the other values."""
    x = normal(64, 256)
    x[finite:, 3] = -math.inf
    found = measure(commpass.codec("int8"), x).tolist()
    assert found[2] == finite * 256 * counts
    assert (reading_of(found, SimpleNamespace(codec="int8", error=0.01)) is not None) == counts


class Broken(BlockCodec):
    """Decode the values 256 to 511 to a non-finite value."""

    bad = math.inf

    def decode_rows(self, wire, numel, dtype):
        rows = super().decode_rows(wire, numel, dtype).clone()
        rows[:, 256:512] = self.bad
        return rows


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("others", [False, True], ids=["finite", "with a row of -inf"])
def test_finite_block_that_decodes_to_a_non_finite_value_is_an_error(monkeypatch, bad, others):
    monkeypatch.setattr(Broken, "bad", bad)
    coder, x = commpass.codec("int8"), normal(1024)
    coder = Broken(**{each.name: getattr(coder, each.name) for each in dataclasses.fields(coder)})
    x[768:] = -math.inf if others else x[768:]
    reading = reading_of(measure(coder, x).tolist(), SimpleNamespace(codec="int8", error=0.01))
    assert reading.error == reading.worst == math.inf
    assert reading.lost > (1 / 3 if others else 1 / 4)
    assert "its real error is inf" in excess(reading, 0.5)


def test_worst_block_is_compared_with_the_finite_blocks():
    """A block of almost zero may be lost. A mean with the blocks left out would be smaller."""
    coder, x = commpass.codec("int8"), normal(64, 256)
    x[0] *= 2**-10
    x[0, 0] = 0.12  # the others in this block become zeros
    some = measure(coder, x[:8])[4]
    x[8:] = math.nan
    assert measure(coder, x)[4] == some


def test_budget_is_exceeded_by_its_error_its_lost_values_or_its_worst_block():
    most = limits(0.02)
    assert (most.error, most.lost, most.worst) == (0.02, 0.08, 0.2)
    assert limits(0.001).lost == 0.05
    assert limits(0.5) == Reading(0.5, 0.5, 1.0)
    assert excess(most, 0.02) == ""
    assert "above max_error=0.02" in excess(Reading(0.03, 0, 0), 0.02)
    assert "non-zero values are lost" in excess(Reading(0, 0.1, 0), 0.02)
    assert "worst block" in excess(Reading(0, 0, 0.3), 0.02)
    assert "whole numbers" in excess(Reading(0.001, 0, 0, whole=True), 0.02)
    assert excess(Reading(0, 0, 0, whole=True), 0.02) == ""  # they arrive unchanged


def whole(x: torch.Tensor) -> bool:
    site = SimpleNamespace(codec="int8", error=0.01)
    return reading_of(measure(commpass.codec("int8"), x).tolist(), site).whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_whole_numbers_are_distinguished_from_values_without_room_for_a_fraction(dtype):
    counts = torch.randint(0, 100, (4096,), generator=torch.Generator().manual_seed(0))
    large = normal(4096) * 2.0 ** (4 if dtype == torch.float16 else 12)
    assert whole(counts.to(dtype))
    assert not whole((counts + 0.5).to(dtype))
    assert not whole(large.to(dtype))  # in bfloat16 most of these are whole numbers
    assert not whole(torch.ones(8, dtype=dtype))  # too few to decide


@pytest.mark.slow
def test_equal_sites_have_keys_of_their_own(fake_group):
    fake_group(4)
    backend, _ = called((*GOOD, normal(128, 256)), calls=1)
    (entry,) = backend.step_log.entries
    assert len(set(keys_of(entry.plan.sites, 0).values())) == 2


@pytest.mark.parametrize("wrong", [-1, 1.5, "two"])
def test_calls_that_are_no_number_are_refused(wrong):
    with pytest.raises(PolicyError, match="check_calls="):
        Policy(check_calls=wrong)
