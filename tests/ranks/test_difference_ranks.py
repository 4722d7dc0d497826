"""Gathered parameters as differences to what all ranks hold.

The tests run on real ranks and compare the reference that graphs keep with a closed loop of the
formula in float64.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from rank_helpers import forget_process, is_same_on_all_ranks
from refusals import refusals
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import commpass
from commpass.codecs import ALIGNMENT
from commpass.distributed import owners, references
from commpass.parallel.exchange import Exchange, Exchanges

pytestmark = pytest.mark.xdist_group("ranks")

ops = torch.ops._c10d_functional
CODEC = "difference"  # 4 bits in groups of 2048
POLICY = commpass.Policy(rules=[commpass.Rule(kind="all_gather", codec=CODEC, force=True)])
OFFERED = commpass.Policy(rules=[commpass.Rule(kind="all_gather", codec=CODEC)])
ROWS, COLUMNS = 20, 130  # of one rank: more than a group, and not a multiple of one


class Gathered(torch.autograd.Function):
    """The shards of all ranks, whose gradient is summed and scattered, as for a parameter in
    sharded data parallelism."""

    @staticmethod
    def forward(ctx, shard, group, ranks):
        ctx.group, ctx.ranks = group, ranks
        return ops.wait_tensor(ops.all_gather_into_tensor(shard, ranks, group))

    @staticmethod
    def backward(ctx, gradient):
        scattered = ops.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.ranks, ctx.group)
        return ops.wait_tensor(scattered), None, None


class Layer(nn.Module):
    """A sharded weight that returns what was gathered; in ``dtype`` if it is sent so."""

    def __init__(self, group=None, dtype=torch.float32, seed=0):
        super().__init__()
        self.group = (group or dist.group.WORLD).group_name
        self.ranks, self.dtype = dist.get_world_size(), dtype
        self.weight = nn.Parameter(shard(weights(0, seed)))

    def forward(self, x):
        whole = Gathered.apply(self.weight.to(self.dtype), self.group, self.ranks)
        return (x.to(self.dtype) @ whole).square().sum(), whole


def weights(step: int, seed: int = 0) -> torch.Tensor:
    """Return the whole weight after some steps: it changes by a hundredth of its size in each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * dist.get_world_size(), COLUMNS)
    start, ways = (
        torch.randn(shape, generator=generator),
        torch.randn(3, *shape, generator=generator),
    )
    phases = torch.tensor([0.011, 0.013, 0.007]) * step
    return start + (ways * torch.sin(phases)[:, None, None]).sum(0)


def shard(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def compiled(model: nn.Module, policy=POLICY, inner: str = "eager"):
    return torch.compile(
        model, backend=commpass.backend(policy, inner=inner, strict=True), fullgraph=True
    )


def x_of(model: nn.Module) -> torch.Tensor:
    return torch.ones(3, ROWS * model.ranks)


def call(function, model: nn.Module, new: torch.Tensor | None = None) -> torch.Tensor:
    """Run one step: set the weight to the rank's part of ``new``, and return what all ranks hold of
    it."""
    if new is not None:
        with torch.no_grad():
            model.weight.copy_(shard(new))
    loss, whole = function(x_of(model))
    loss.backward()
    model.weight.grad = None
    return whole.detach().clone()


def one_bits(x: torch.Tensor) -> bool:
    """Return whether all ranks hold the same bits."""
    return is_same_on_all_ranks(x.view(torch.uint8).numpy().tobytes())


def closed_loop(held: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is held after one more step, by the formula in float64, and the scale of each
    value.

    Each rank's shard is coded in groups of 2048: s = max|d| / 7 of the difference d, and s *
    round(d/s) is added.
    """
    ranks, group = dist.get_world_size(), 2048
    differences = (new.double() - held.double()).reshape(ranks, -1)
    pad = -differences.shape[1] % group
    groups = nn.functional.pad(differences, (0, pad)).reshape(ranks, -1, group)
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    codes = torch.where(scale > 0, (groups / scale).round(), 0)

    def cut(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(ranks, -1)[:, : differences.shape[1]].reshape(held.shape)

    return held.double() + cut(codes * scale), cut(scale.expand_as(groups))


def gathered_again() -> list[str]:
    """Return the warnings about a checkpoint around a compiled function."""
    forget_process()
    references._warned_of_checkpoint.clear()
    model, found = Layer(), []
    function = compiled(model)
    with mock.patch.object(references.log, "warning", lambda text, *_: found.append(text)):
        call(function, model)
        assert not found
        for step in (1, 2):
            call(lambda x: checkpoint(function, x, use_reentrant=False), model, weights(step))
    return found


def test_checkpoint_around_a_compiled_function_is_warned_of_once(ranks2):
    assert ranks2.run(gathered_again) == [[references.GATHERED_AGAIN]] * 2


def check_closed_loop(inner: str, steps: int, dtype: torch.dtype) -> None:
    forget_process()
    model = Layer(dtype=dtype)
    function = compiled(model, inner=inner)
    held = call(function, model)
    assert torch.equal(held, weights(0).to(dtype))  # it starts with the weights themselves
    losses = []
    ties = 0.01 if dtype == torch.float32 else 0.2  # differences of few last places
    for step in range(1, steps):
        new = weights(step).to(dtype)
        wanted, scale = closed_loop(held, new)
        before, held = held, call(function, model, weights(step))
        assert held.dtype == dtype
        assert one_bits(held)
        rounding = torch.finfo(dtype).eps * new.double().abs().clamp(min=1)
        off = (held.double() - wanted).abs()
        # A value halfway between two codes may go to either: it is then off by one scale.
        assert bool((off <= rounding + scale * (1 + 1e-3)).all())
        assert float((off > rounding).double().mean()) < ties
        assert bool(((held.double() - new.double()).abs() <= scale * 0.501 + rounding).all())
        change = float((new.double() - before.double()).norm())
        losses.append(float((held.double() - new.double()).norm()) / change)
    assert max(losses[-5:]) < 1.3 * max(losses[:5]) + 1e-3  # no error is added to the next
    (site,) = commpass.plans()[-2].sites
    assert (site.codec, site.algorithm) == (CODEC, "direct"), site.reason


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "inner", "steps", "dtype"),
    [
        (2, "eager", 50, torch.float32),
        (3, "eager", 12, torch.bfloat16),
        (2, "inductor", 12, torch.float32),
        rarely(4, "inductor", 12, torch.float32),
        rarely(3, "inductor", 50, torch.bfloat16),
        rarely(4, "aot_eager", 50, torch.float16),
    ],
    ids=str,
)
def test_all_ranks_hold_what_the_closed_loop_gives(ranks, inner, steps, dtype, request):
    request.getfixturevalue(f"ranks{ranks}").run(check_closed_loop, inner, steps, dtype)


def check_bytes() -> None:
    forget_process()
    group = counting_group()
    model = Layer(group)
    function = compiled(model)
    call(function, model)
    numel = ROWS * COLUMNS
    gathers = [row for row in group.seen if row[0] == "all_gather"]
    assert gathers[0] == ("all_gather", torch.float32, 4 * numel)  # the first reference
    group.seen.clear()
    call(function, model, weights(1))
    (plan,) = [plan for plan in commpass.plans()[-2:] if plan.direction == "forward"]
    (site,) = plan.sites
    padded = -(-numel // 2048) * 2048
    assert site.wire_bytes == padded // 2 + ALIGNMENT  # codes, and two scales
    sent = [row for row in group.seen if row[0] == "all_gather"]
    assert sent == [("all_gather", torch.uint8, site.wire_bytes)]


def test_bytes_that_travel_are_those_of_the_plan(ranks2):
    ranks2.run(check_bytes)
    ranks2.stop()  # other tests look up groups by name


def check_hostile() -> None:
    forget_process()
    model = Layer()
    function = compiled(model)
    call(function, model)
    bad = weights(1)
    bad[1, 2], bad[ROWS + 3, 4] = torch.nan, torch.inf
    held = call(function, model, bad)
    assert one_bits(held)
    assert not held[1, 2].isfinite()
    assert not held[ROWS + 3, 4].isfinite()
    healed = call(function, model, weights(2))
    assert one_bits(healed)
    off = (healed - weights(2)).abs().max()
    # as if it had never existed
    assert off <= 0.5 * (weights(2) - weights(0)).abs().max() / 7 * 1.01
    huge = weights(3).sign() * 3e38
    for new in (huge, -huge, torch.zeros_like(huge), torch.full_like(huge, -0.0)):
        assert bool(call(function, model, new).isfinite().all())
    for _ in range(48):  # a fourteenth of the error each time
        held = call(function, model)
    assert float(held.abs().max()) < 1e-3
    tiny = weights(4) * 1e-40
    assert tiny.any()
    assert bool(call(function, model, tiny).isfinite().all())


@pytest.mark.every
def test_reference_keeps_nothing_that_is_not_finite(ranks2):
    ranks2.run(check_hostile)


def check_bad_from_the_start() -> None:
    forget_process()
    model = Layer()
    function = compiled(model)
    bad = weights(0)
    bad[0, 0] = torch.nan
    assert not call(function, model, bad)[0, 0].isfinite()
    assert bool(call(function, model, weights(0)).isfinite().all())


def test_reference_that_begins_with_a_nan_is_finite(ranks2):
    ranks2.run(check_bad_from_the_start)


def check_restart() -> None:
    forget_process()
    model = Layer()
    function = compiled(model)
    for step in range(3):
        held = call(function, model, weights(step))
    assert not torch.equal(held, weights(2))
    assert commpass.state_dict() == {}  # a reference is gathered again, and so not saved
    for again in (commpass.reset_state, lambda: commpass.reset_state(model),
                  lambda: commpass.load_state_dict({})):  # fmt: skip
        again()
        assert torch.equal(call(function, model), weights(2))
        assert not torch.equal(call(function, model, weights(5)), weights(5))
        call(function, model, weights(2))
    # Other weights are loaded without a call of ours: the error is large for some steps, and the
    # same on all ranks.
    off = []
    for _ in range(4):
        held = call(function, model, weights(0, seed=7))
        assert one_bits(held)
        off.append(float((held - weights(0, seed=7)).abs().max()))
    assert off[0] > 0.1
    assert off[3] < off[0] / 1000


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_reset_gathers_anew_on_any_number_of_ranks(ranks, request):
    request.getfixturevalue(f"ranks{ranks}").run(check_restart)


def check_twins() -> list[str]:
    """Return the reasons for which no reference may be kept."""
    said = []

    def reason(function, *args, grad=True) -> None:
        forget_process()
        seen = len(commpass.plans())
        with torch.set_grad_enabled(grad):
            result = compiled(function, OFFERED)(*args)
        if grad:
            result.sum().backward()
        for plan in commpass.plans()[seen:]:
            for site in plan.sites:
                assert not site.compressed
                said.extend([site.reason] if site.kind == "all_gather" else [])

    model, name, ranks = Layer(), dist.group.WORLD.group_name, dist.get_world_size()
    x = torch.ones(4, ROWS, requires_grad=True)
    reason(lambda x: Gathered.apply(x * model.weight[0, 0], name, ranks), x)
    reason(lambda x: model(x)[0], x_of(model), grad=False)
    reason(
        lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)[0], x_of(model)
    )
    refused = refusals(
        lambda: compiled(lambda x: Gathered.apply(x * model.weight[0, 0], name, ranks))(x)
    )
    return said + refused


@pytest.mark.slow
def test_no_reference_is_kept_where_none_would_be_right(ranks2):
    activation, inference, again, backward, forced = ranks2.run(check_twins)[0]
    assert "not computed from parameters alone" in activation
    assert "inference changes no parameters" in inference
    assert "reshard_after_forward=False" in again
    # both are uncompressed, and give the same bits
    assert "reshard_after_forward=False" in backward
    assert "forces a codec" in forced
    assert "not computed from parameters alone" in forced


def check_accumulation(inner: str) -> None:
    """Two forwards, then two backwards: what backward needs of the first is not overwritten."""
    forget_process()
    model = Layer()
    function = compiled(model, inner=inner)
    call(function, model)
    with torch.no_grad():
        model.weight.copy_(shard(weights(1)))
    found = []
    for _ in range(2):
        x = x_of(model).requires_grad_()
        loss, whole = function(x)
        found.append((x, loss, whole.detach().clone()))
    # the second compensates for the error of the first
    assert not torch.equal(found[0][2], found[1][2])
    for x, loss, whole in reversed(found):
        loss.backward()
        wanted = 2 * (x.detach().double() @ whole.double()) @ whole.double().t()
        assert float((x.grad - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_two_forwards_before_a_backward_each_have_their_own_weights(inner, ranks2):
    ranks2.run(check_accumulation, inner)


def check_instances() -> None:
    """Instances of a class share code, and keep separate references."""
    forget_process()
    models = [Layer(seed=seed) for seed in range(3)]
    backend = commpass.backend(POLICY, inner="eager", strict=True)
    functions = [torch.compile(model, backend=backend) for model in models]
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        for number in order:
            held = call(functions[number], models[number])
            assert torch.equal(held, weights(0, number))
    assert len([one for one in owners.state_owners() if one.references]) == 3
    models.pop(), functions.pop(), torch._dynamo.reset()
    assert len([one for one in owners.state_owners() if one.references]) == 2


@pytest.mark.slow
def test_instances_keep_references_of_their_own_and_take_them_along(ranks2):
    ranks2.run(check_instances)


class Sharded(nn.Module):
    """A weight as in SimpleFSDP: a DTensor, gathered where it is used; the ranks cannot share its
    rows evenly."""

    def __init__(self, mesh, rows: int):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(rows, 64), mesh, [Shard(0)]))

    def forward(self, x):
        gathered = self.weight.redistribute(
            placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
        )
        whole = gathered.to_local(grad_placements=[Partial()])
        return (x.bfloat16() @ whole).float().square().mean(), whole


def check_sharded() -> None:
    forget_process()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for rows in (64, 50):  # on 4 ranks 50 are padded: torch then gathers the padded shards
        model = Sharded(mesh, rows)
        function = compiled(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = None
        for step in range(6):
            exact = model.weight.full_tensor().detach().bfloat16()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss, whole = function(torch.randn(8, rows, generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert one_bits(whole.detach())
            off = float((whole - exact).float().norm())
            if before is not None:
                change = float((exact - before).float().norm())
                assert 0 < off < 0.3 * change
            before = exact
        plans = [plan for plan in commpass.plans()[-2:] if plan.direction == "forward"]
        assert [(s.kind, s.codec, s.dtype) for s in plans[0].sites] == [
            ("all_gather", CODEC, "bfloat16")
        ]
        forget_process()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_parameter_travels_as_its_difference(ranks, request):
    request.getfixturevalue(f"ranks{ranks}").run(check_sharded)


def check_exchange() -> None:
    """A hook's gather of two parameters in one buffer."""
    forget_process()
    size, rank = dist.get_world_size(), dist.get_rank()
    backend = commpass.backend(POLICY, inner="eager", strict=True)
    exchanges = Exchanges(backend)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    group = dist.group.WORLD.group_name
    what = Exchange("all_gather", group, size, "layers.0", "forward", "test")
    out, seen = torch.empty(size * 3000), []
    for step in range(5):
        generator = torch.Generator().manual_seed(rank)
        start, way = torch.randn(2, 3000, generator=generator)
        x = start + 0.01 * step * way
        exchanges.run(what, x, out, of=parameters)
        assert one_bits(out)
        everybody = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(everybody, x)
        seen.append(float((out - torch.cat(everybody)).norm()))
    assert seen[0] == 0
    assert seen[1] > 0
    assert max(seen[1:]) < 1.2 * seen[1]
    (plan,) = exchanges.plans
    assert [site.codec for site in plan.sites] == [CODEC]
    assert plan.sites[0].wire_bytes == 4096 // 2 + ALIGNMENT
    (said,) = refusals(lambda: exchanges.run(what, x, out))
    assert "forces a codec" in said


@pytest.mark.slow
def test_hook_keeps_a_reference_for_the_parameters_that_it_names(ranks3):
    ranks3.run(check_exchange)


def check_public() -> str:
    return refusals(lambda: commpass.all_gather(torch.ones(4), codec="difference"))[0]


def test_gather_by_hand_says_who_keeps_references(ranks2):
    assert "against(reference)" in ranks2.run(check_public)[0]
