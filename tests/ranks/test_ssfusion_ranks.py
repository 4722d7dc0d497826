"""SSFusion on real ranks.

What is sent and what is left add up to the gradients, replicas are equal, and state is carried over
to other numbers of ranks.
"""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import counting_group
from processes import Ranks, RanksFailed
from rank_helpers import gather_objects
from tiers import rarely
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.costmodel import Link, Profile
from commpass.distributed.processors import CORES, processors_each
from commpass.errors import CommpassError, PlanMismatch, PolicyError
from commpass.parallel import compress_ddp, ssfusion
from commpass.plan.dump import read_run
from commpass.plan.dump import runs as read_runs
from commpass.report.sent_bytes import of_plans

pytestmark = pytest.mark.xdist_group("ranks")

SLOW = Profile("slow", Link(10.0, 1e-5))
"""A link on which only bytes take time, so that plans do not depend on the speed of the tests."""
USUAL = {"profile": SLOW, "profile_steps": 1, "density": 0.05, "bound": 0.01}
FIXED = USUAL | {"fuse": False, "aware": False, "force": True}
"""What is selected does not depend on times."""
STEPS = 6


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 60), nn.Tanh(), nn.Linear(60, 5)
    ).to(dtype)


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 40, generator=generator, dtype=dtype)


def alike(*tensors) -> bool:
    """Return whether all ranks hold the same bits."""
    return len({t.detach().numpy().tobytes() for t in gather_objects(flat(tensors))}) == 1


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def gradients(model: nn.Module) -> torch.Tensor:
    return flat([p.grad for p in model.parameters()])


def residuals(handle, model: nn.Module) -> torch.Tensor:
    """Return the sum of all ranks' residuals, in the order of parameters."""
    driver = handle._hooks.driver
    numbers = {id(w.parameter): n for n, w in enumerate(driver.planner.weights)}
    own = flat([driver.memory(numbers[id(p)]).residual for p in model.parameters()])
    return sum(gather_objects(own))


def exact(model: nn.Module, step: int) -> torch.Tensor:
    """Return the sum of all ranks' gradients, computed separately."""
    mine = copy.deepcopy(model)
    for p in mine.parameters():
        p.grad = None
    mine(batch(step)).square().sum().backward()
    return sum(gather_objects(gradients(mine)))


# --- nothing is lost ------------------------------------------------------------------------------


def check_sum(ddp: bool, options: dict) -> None:
    model = net(seed=dist.get_rank())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02) if ddp else model
    handle = ssfusion(wrapped, **USUAL | options)
    assert repr(handle) == "<ssfusion: no step yet>"
    assert alike(*model.parameters())
    size, given, right = dist.get_world_size(), 0, 0
    for step in range(STEPS):
        right = right + exact(model, step)
        wrapped.zero_grad()
        wrapped(batch(step)).square().sum().backward()
        assert alike(gradients(model))  # law 1
        given = given + size * gradients(model)
    left = residuals(handle, model)
    scale = right.abs().max()
    assert (given + left - right).abs().max() <= 1e-12 * scale
    assert (given - right).abs().max() > 1e-3 * scale  # much is held back, or nothing was tested
    assert handle.steps == STEPS
    plan = handle.plan
    assert {handle.names[each.number] for each in plan.sparse} >= {"0.weight", "2.weight"}
    assert f"{len(plan.sparse)} of {len(handle.names)} gradients sparse" in repr(handle)
    offloaded = {each.offloaded for each in plan.sparse}
    assert options.get("offload", True) or offloaded == {False}
    kinds = {message.kind for message in plan.messages}
    assert kinds == {"all_gather"} if not options.get("interleave", True) else "all_gather" in kinds


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        rarely({"fuse": False, "interleave": False, "aware": False, "offload": False}),
        rarely({"selector": "topk"}),
        rarely({"selector": "dgc(values=bf16)"}),
        rarely({"clip": None, "warmup": 4}),
        rarely({"selector": "sidco"}),
        rarely({"selector": "randomk"}),
    ],
)
def test_sent_and_remaining_values_are_the_sum_of_all_gradients(ddp, options, ranks3):
    ranks3.run(check_sum, ddp, options)


def test_two_ranks_train_as_well(ranks2):
    ranks2.run(check_sum, False, {"interleave": False})


def check_reference(momentum: float) -> None:
    """Algorithm 4 of Deep Gradient Compression on all ranks, in float64, with exact top-k."""
    weight = nn.Parameter(torch.zeros(6, 10, dtype=torch.float64))
    model = nn.Module()
    model.weight = weight
    options = USUAL | {"density": 0.1, "selector": "topk", "momentum": momentum, "clip": 3.0}
    ssfusion(model, **options, force=True, aware=False)
    size, rank = dist.get_world_size(), dist.get_rank()
    u, v = ({r: torch.zeros(60, dtype=torch.float64) for r in range(size)} for _ in range(2))
    for step in range(10):
        weight.grad = None
        (weight * given(step, rank)).sum().backward()
        mean = torch.zeros(60, dtype=torch.float64)
        for r in range(size):
            g = given(step, r).flatten()
            u[r] = momentum * u[r] + g * min(1.0, 3.0 / size**0.5 / g.norm())
            v[r] = v[r] + u[r]
            whole = step < 1  # the measured step
            top = torch.arange(60) if whole else v[r].abs().topk(6).indices
            mean[top] += v[r][top] / size
            v[r][top] = 0
            if not whole:
                u[r][top] = 0
        torch.testing.assert_close(weight.grad.flatten(), mean, rtol=1e-12, atol=1e-14)


def given(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randn(6, 10, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.9, rarely(0.0)])
def test_momentum_correction_on_several_ranks_is_that_of_the_paper(momentum, ranks3):
    ranks3.run(check_reference, momentum)


# --- training -------------------------------------------------------------------------------------


def learned(steps: int, sparse: bool, options: dict) -> float:
    """Return the loss after some steps of a task with different data on every rank."""
    model = net(torch.float32)
    wrapped = model if sparse else DistributedDataParallel(model)
    if sparse:
        ssfusion(model, **USUAL | options)
    momentum = 0.0 if options.get("momentum") else 0.9
    learn = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    generator = torch.Generator().manual_seed(3)
    task = torch.randn(40, 5, generator=generator) / 6
    for step in range(steps):
        x = batch(step, dtype=torch.float32)
        learn.zero_grad()
        (wrapped(x) - x @ task).square().mean().backward()
        learn.step()
    assert alike(*model.parameters())
    x = batch(10_000, 0, torch.float32)
    with torch.no_grad():
        return (model(x) - x @ task).square().mean().item()


def check_learned(options: dict) -> None:
    before, dense = learned(0, False, {}), learned(50, False, {})
    sparse = learned(50, True, options)
    assert dense < 0.6 * before
    assert sparse < dense + 0.25 * (before - dense)


@pytest.mark.every
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "warmup": 10, "clip": 2.0},
        rarely({}),
        rarely({"dense": "bf16"}),
        rarely({"dense": "int8"}),
    ],
)
def test_fifty_steps_learn_nearly_as_much_as_dense_ones(options, ranks4):
    ranks4.run(check_learned, options)


# --- non-finite, unused and accumulated gradients -------------------------------------------------


def check_nan() -> None:
    model = net(torch.float32)
    ssfusion(model, **USUAL)
    for step in range(4):
        model.zero_grad()
        x = batch(step, dtype=torch.float32)
        loss = model(x).square().sum()
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("nan")
        loss.backward()
        assert alike(gradients(model))
        finite = gradients(model).isfinite()
        assert not finite.any() if step == 2 else finite.all()


@pytest.mark.slow
def test_nan_of_one_rank_reaches_all_and_does_not_come_back(ranks3):
    ranks3.run(check_nan)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(40, 40, dtype=torch.float64)
        self.some = nn.Linear(40, 30, dtype=torch.float64)
        self.never = nn.Linear(40, 20, dtype=torch.float64)
        self.frozen = nn.Linear(40, 10, dtype=torch.float64).requires_grad_(False)

    def forward(self, x, some: bool):
        x = self.always(x)
        loss = x.square().sum() + self.frozen(x).square().sum()
        return loss + self.some(x).square().sum() if some else loss


def check_unused(ddp: bool) -> None:
    torch.manual_seed(0)
    model = Parts()
    wrapped = model
    if ddp:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.01)
    handle = ssfusion(wrapped, **USUAL)
    rank, size = dist.get_rank(), dist.get_world_size()
    given, right = 0, 0
    for step in range(4):
        some = step != 2 and rank == 1  # one rank only, and in one step none
        mine = copy.deepcopy(model)
        mine.zero_grad()
        mine(batch(step), some).backward()
        grad = mine.some.weight.grad
        right = right + sum(gather_objects(torch.zeros(30, 40) if grad is None else grad)).double()
        wrapped.zero_grad()
        wrapped(batch(step), some).backward()
        assert model.never.weight.grad is None
        assert model.frozen.weight.grad is None
        if step == 2:
            assert model.some.weight.grad is None
        else:
            assert alike(model.some.weight.grad)
            given = given + size * model.some.weight.grad
    driver = handle._hooks.driver
    number = handle.names.index("some.weight")
    left = sum(gather_objects(driver.memory(number).residual))
    assert left.abs().max() > 0
    torch.testing.assert_close(given + left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ddp", [False, True])
def test_parameters_that_one_rank_or_none_uses(ddp, ranks3):
    ranks3.run(check_unused, ddp)


def check_accumulated(ddp: bool) -> None:
    model, other = net(), net()
    wrapped = DistributedDataParallel(model) if ddp else model
    handle = ssfusion(wrapped, **FIXED)
    second = ssfusion(other, **FIXED)
    for step in range(3):
        model.zero_grad(), other.zero_grad()
        for micro in range(3):
            with handle.no_sync() if micro < 2 else nullcontext():
                wrapped(batch(10 * step + micro)).square().sum().backward()
        sum(other(batch(10 * step + micro)).square().sum() for micro in range(3)).backward()
        assert handle.steps == second.steps == step + 1
        torch.testing.assert_close(gradients(model), gradients(other), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [False, rarely(True)])
def test_no_exchange_until_the_last_micro_batch(ddp, ranks2):
    ranks2.run(check_accumulated, ddp)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.blocks, self.reentrant = net(), reentrant

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.blocks[0](x).tanh()
        x = checkpoint(lambda x: self.blocks[2](x).tanh(), x, use_reentrant=self.reentrant)
        return checkpoint(self.blocks[4], x, use_reentrant=self.reentrant)


def check_checkpointed(reentrant: bool) -> None:
    model, other = Checkpointed(reentrant), net()
    handle = ssfusion(model, **FIXED)
    ssfusion(other, **FIXED)
    for step in range(3):
        model.zero_grad(), other.zero_grad()
        model(batch(step)).square().sum().backward()
        other(batch(step)).square().sum().backward()
        assert handle.steps == step + 1
        torch.testing.assert_close(gradients(model), gradients(other), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, rarely(False)])
def test_checkpointed_activations(reentrant, ranks2):
    ranks2.run(check_checkpointed, reentrant)


# --- the plan is accurate -------------------------------------------------------------------------


def check_bytes(options: dict) -> None:
    model = net(torch.float32)
    handle = ssfusion(model, **USUAL | options)
    group = counting_group()
    driver = handle._hooks.driver
    seen = len(commpass.plans())
    for step in range(3):
        model.zero_grad()
        model(batch(step, dtype=torch.float32)).square().sum().backward()
        driver.channel = group  # agreement and link measurement are not counted
        if step == 1:
            group.seen.clear()
    (*_, plan) = commpass.plans()[seen:]
    assert len(commpass.plans()) == seen + 2  # that of the measured step, and this one
    assert sum(size for *_, size in group.seen) == sum(site.wire_bytes for site in plan)
    sparse = [site for site in plan if site.algorithm == "sparse"]
    assert sparse
    assert {site.kind for site in plan} == {"all_reduce"}
    assert all(site.codec.startswith("dgc(density=") for site in sparse)
    assert sum(site.bytes for site in plan) == 4 * sum(p.numel() for p in model.parameters())
    gathered = [row for row in group.seen if row[0] == "all_gather"]
    assert {dtype for _, dtype, _ in gathered} == {torch.uint8}
    assert sum(site.wire_bytes for site in sparse) < sum(site.bytes for site in sparse) / 8
    assert all(site.reason for site in plan)
    fused = {name for each in plan.grouped for name in each.sites}
    alone = len(handle.plan.messages) == len(handle.names)
    assert alone or fused <= set(handle.names)
    assert gather_objects(plan.digest()) == [plan.digest()] * dist.get_world_size()


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    "options", [{}, {"interleave": False}, rarely({"dense": "bf16"}), rarely({"dense": "int8"})]
)
def test_values_sent_are_those_of_the_plan(options, ranks2):
    ranks2.run(check_bytes, options)


# --- state ----------------------------------------------------------------------------------------


def train(model: nn.Module, steps: range) -> torch.Tensor:
    total = 0
    for step in steps:
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        total = total + gradients(model)
    return total


def save(folder: str, momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over ranks of the residuals, and of the velocities."""
    model = net()
    handle = ssfusion(model, **USUAL | {"momentum": momentum})
    train(model, range(STEPS))
    state = handle.state_dict()
    assert state.keys() == commpass.state_dict(model).keys()
    assert len(state) == 6 * (2 if momentum else 1)
    dcp.save({"commpass": state}, checkpoint_id=folder)
    return means(handle)


def means(handle) -> tuple[torch.Tensor, torch.Tensor]:
    driver = handle._hooks.driver
    by_name = dict(zip(handle.names, range(len(handle.names)), strict=True))
    held = [driver.memory(by_name[name]) for name in sorted(by_name)]
    kinds = [[m.residual for m in held], [m.velocity for m in held if m.velocity is not None]]
    return tuple(sum(gather_objects(flat(x))) / dist.get_world_size() for x in kinds if x)


def load(folder: str, momentum: float, first: bool):
    """State that is loaded before the first step, or after some."""
    model = net()
    handle = ssfusion(model, **USUAL | {"momentum": momentum})
    if not first:
        train(model, range(3))
    state = commpass.state_dict(of=folder)
    dcp.load({"commpass": state}, checkpoint_id=folder)
    handle.load_state_dict(state)
    held = means(handle)
    train(model, range(3))
    assert alike(gradients(model))
    return held


@pytest.fixture(scope="module")
def ranks1():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "momentum", "first"),
    [(4, 0.9, True), rarely(4, 0.0, False), rarely(1, 0.9, False), (1, 0.0, True)],
)
def test_state_of_two_ranks_is_carried_over_to_others(
    size, momentum, first, ranks1, ranks2, ranks4, tmp_path
):
    folder = os.fspath(tmp_path)
    saved = ranks2.run(save, folder, momentum)[0]
    for found in {1: ranks1, 4: ranks4}[size].run(load, folder, momentum, first):
        for a, b in zip(found, saved, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(x.abs().max() > 0 for x in saved)


def check_foreign_state() -> None:
    model = net()
    handle = ssfusion(model, **USUAL)
    train(model, range(3))
    before = {name: tensor.clone() for name, tensor in handle.state_dict().items()}
    other = nn.Linear(40, 7, dtype=torch.float64)
    strange = ssfusion(other, **USUAL)
    train(other, range(2))
    with pytest.raises(PolicyError, match=r"another model.*weight.*this model has"):
        handle.load_state_dict(strange.state_dict())
    cut = {name: tensor[:1] for name, tensor in before.items()}
    with pytest.raises(PolicyError, match=r"the state is \[1\].* but here it is"):
        handle.load_state_dict(cut)
    for name, tensor in handle.state_dict().items():
        assert tensor.equal(before[name])


@pytest.mark.slow
def test_state_of_another_model_or_shape_is_refused_and_nothing_is_lost(ranks2):
    ranks2.run(check_foreign_state)


def state_with(momentum: float) -> dict[str, torch.Tensor]:
    """Return the state of a model that is trained with that momentum."""
    model = net()
    handle = ssfusion(model, **USUAL | {"momentum": momentum})
    for number in range(len(handle.names)):
        handle._hooks.driver.memory(number)
    state = handle.state_dict()
    assert any("velocity" in name for name in state) == bool(momentum)
    handle.close()
    return state


def check_other_momentum(saved: float, momentum: float, text: str) -> None:
    state, options = state_with(saved), USUAL | {"momentum": momentum}
    model = net()
    handle = ssfusion(model, **options)
    for load in (handle.load_state_dict, lambda state: commpass.load_state_dict(state, model)):
        with pytest.raises(PolicyError, match=text):
            load(state)
    assert handle.state_dict() == {}
    handle.load_state_dict(state_with(momentum))
    handle.load_state_dict({})
    handle.close()
    commpass.load_state_dict(state, model)  # for whoever exchanges its gradients next
    with pytest.raises(PolicyError, match=text):
        ssfusion(model, **options)
    ssfusion(model, **USUAL | {"momentum": saved}).close()
    commpass.load_state_dict(state, net())  # of a model that is gone
    ssfusion(net(), **options)


@pytest.mark.parametrize(
    ("saved", "momentum", "text"),
    [
        (0.9, 0.0, r"has velocities.* momentum=0\. Give momentum=.*leave the state out"),
        (0.0, 0.9, r"has no velocities.* momentum=0\.9\. Give momentum=0.*leave the state out"),
    ],
    ids=["without", "with"],
)
def test_state_of_another_momentum_is_refused(saved, momentum, text, ranks2):
    ranks2.run(check_other_momentum, saved, momentum, text)


def check_other_momentum_of_fewer_ranks(folder: str) -> int:
    """One rank gets all of the state, and the other nothing."""
    state = {name.replace("0of2", "0of1"): kept for name, kept in state_with(0.9).items()}
    if dist.get_rank() == 0:
        dcp.save({"commpass": state}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    found = commpass.state_dict(of=folder)
    dcp.load({"commpass": found}, checkpoint_id=folder)
    model = net()
    handle = ssfusion(model, **USUAL)
    with pytest.raises(PolicyError, match=r"has velocities.* momentum=0"):
        handle.load_state_dict(found)
    handle.close()
    commpass.load_state_dict(found, model)
    with pytest.raises(PolicyError, match=r"has velocities.* momentum=0"):
        ssfusion(model, **USUAL)
    commpass.reset_state(model)
    handle = ssfusion(model, **USUAL | {"momentum": 0.9})
    handle.load_state_dict(found)
    train(model, range(2))
    handle.close()
    return len(found)


def test_state_of_another_momentum_is_refused_by_ranks_that_get_none_of_it(ranks2, tmp_path):
    assert ranks2.run(check_other_momentum_of_fewer_ranks, os.fspath(tmp_path)) == [12, 0]


def check_momentum_ends() -> None:
    model = net()
    handle = ssfusion(model, **USUAL | {"momentum": 0.9})
    driver = handle._hooks.driver
    for number in range(len(handle.names)):
        driver.memory(number).residual.fill_(1.0)
    handle.close()
    state = ssfusion(model, **USUAL).state_dict()
    assert len(state) == len(handle.names)
    assert all("residual" in name and (kept == 1).all() for name, kept in state.items())


def test_call_without_momentum_drops_earlier_velocities(ranks2):
    ranks2.run(check_momentum_ends)


# --- unsupported uses -----------------------------------------------------------------------------


def check_refused() -> None:
    rank = dist.get_rank()
    model = net()
    handle = ssfusion(model, **USUAL)
    with pytest.raises(PolicyError, match="already"):
        ssfusion(model, **USUAL)
    handle.remove()
    ssfusion(model, **USUAL)
    with pytest.raises(PlanMismatch, match=r"density=0\.0[12].* and .*density=0\.0[12]"):
        ssfusion(net(), density=0.01 + 0.01 * rank)
    with pytest.raises(PlanMismatch, match=r"weight"):
        ssfusion(nn.Linear(3 + rank, 4))
    sparse = nn.Embedding(50, 4, sparse=True)
    ssfusion(sparse, **USUAL)
    with pytest.raises(PolicyError, match="weight has a gradient of layout"):
        sparse(torch.tensor([rank])).sum().backward()
    later = nn.Linear(4, 4)
    later.bias.requires_grad_(False)
    ssfusion(later, **USUAL)
    later.bias.requires_grad_(True)
    with pytest.raises(PolicyError, match="bias has a gradient that is not exchanged"):
        later(torch.ones(1, 4)).sum().backward()
    half = net()
    ssfusion(half, **USUAL)
    half[4].weight.register_hook(lambda gradient: 1 / 0)
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, CommpassError)):
            half(batch(0)).sum().backward()
    with pytest.raises(PolicyError, match="no parameter requires a gradient"):
        ssfusion(net().requires_grad_(False))
    hooked = DistributedDataParallel(net())
    commpass.parallel.compress_ddp(hooked, "off")
    with pytest.raises(PolicyError, match=r"exchanged by .*compress_ddp"):
        ssfusion(hooked)
    with pytest.raises(PolicyError, match="has its own"):
        ssfusion(DistributedDataParallel(net()), group=dist.group.WORLD)
    links = Profile("one", Link(10.0, 1e-5 * (1 + rank)))
    planned = net()
    ssfusion(planned, **USUAL | {"profile": links})
    planned(batch(0)).sum().backward()
    with pytest.raises(PlanMismatch, match="fusion plans"):
        planned(batch(1)).sum().backward()


def check_two_integrations() -> None:
    """The gradients of a parameter are exchanged once, and errors name both integrations."""
    held = DistributedDataParallel(net())
    compress_ddp(held, "off")
    for model in (held, held.module):
        with pytest.raises(PolicyError, match=r"^ssfusion: .*0\.weight.*compress_ddp of a Dist"):
            ssfusion(model, **USUAL)
    inner = net()
    ssfusion(inner, **USUAL)
    with pytest.raises(PolicyError, match=r"^compress_ddp: module\.0\.weight.*ssfusion of a Seq"):
        compress_ddp(DistributedDataParallel(inner), "off")
    with pytest.raises(PolicyError, match=r"^ssfusion: weight .*ssfusion of a Sequential already"):
        ssfusion(inner[0], **USUAL)
    by_hand = DistributedDataParallel(net())
    by_hand.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(PolicyError, match=r"^ssfusion: .* comm hook .*<lambda>"):
        ssfusion(by_hand, **USUAL)
    inner(batch(0)).sum().backward()


@pytest.mark.slow
def test_second_integration_of_any_kind_is_refused(ranks2):
    ranks2.run(check_two_integrations)


def check_replaced(ddp: bool) -> None:
    """Another group, or other parameters: this neither hangs nor trains each rank separately."""
    model = DistributedDataParallel(net()) if ddp else net()
    handle = ssfusion(model, **USUAL)
    train(model, range(3))
    if ddp:
        model._update_process_group(dist.new_group())
        with pytest.raises(PolicyError, match="was given another process group after ssfusion"):
            train(model, range(1))
        return
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(PolicyError, match=r"^0\.weight is not the parameter that ssfusion was"):
        train(model, range(1))
    handle.remove()
    ssfusion(model, **USUAL)
    train(model, range(3))
    assert alike(gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [False, True])
def test_another_group_and_other_parameters_are_refused(ddp, ranks2):
    ranks2.run(check_replaced, ddp)


def check_gone(ddp: bool) -> list[tuple[bool, int]]:
    found = []
    for _ in range(3):
        model = DistributedDataParallel(net()) if ddp else net()
        ssfusion(model, **USUAL)
        train(model, range(3))
        held = weakref.ref(next(model.parameters()))
        del model
        deadline = time.monotonic() + 60  # the threads may hold the last step for a moment
        while held() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        found.append((held() is None, len(dist.distributed_c10d._world.pg_map)))
    layer = net()
    ssfusion(nn.Sequential(layer), **USUAL)
    gc.collect()
    with pytest.raises(CommpassError, match="the model that was given to ssfusion was freed"):
        layer(batch(0)).sum().backward()
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("ddp", [False, True])
def test_model_that_is_gone_leaves_nothing_behind(ddp, ranks2):
    for found in ranks2.run(check_gone, ddp):
        assert all(gone for gone, _ in found)
        assert len({groups for _, groups in found[1:]}) == 1


@pytest.mark.slow
def test_impossible_settings_are_refused_on_all_ranks(ranks2):
    ranks2.run(check_refused)


def dies() -> None:
    model = net()
    ssfusion(model, **USUAL)
    train(model, range(2))
    if dist.get_rank() == 1:
        os._exit(3)
    train(model, range(1))


@pytest.mark.every
def test_rank_that_dies_is_an_error_on_the_others():
    ranks = Ranks(2)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(dies, timeout=60)
    assert "exit code 3" in str(caught.value)
    assert "no answer" not in str(caught.value)
    assert "RuntimeError" in str(caught.value)


def check_dense() -> None:
    """On a fast link nothing is sparse, and the record has the reason."""
    model = net()
    handle = ssfusion(model, profile=Profile("fast", Link(1.0, 100.0)), profile_steps=1)
    for step in range(2):
        model(batch(step)).square().sum().backward()
    sites = commpass.plans()[-1].sites
    assert handle.plan is not None
    assert all(site.codec == "none" for site in sites)
    assert all(site.reason.endswith(handle.plan.why) for site in sites)
    assert "us if sparse" in handle.plan.why
    assert handle.plan.why in repr(handle)


def test_tensors_sent_whole_say_why(ranks2):
    ranks2.run(check_dense)


def check_measured() -> None:
    """Without a profile the link is measured; all ranks make the same plan, whatever they
    measured."""
    model = net(torch.float32)
    handle = ssfusion(model, force=True, profile_steps=2, density=0.05)
    seen = len(commpass.plans())
    for step in range(4):
        model.zero_grad()
        model(batch(step, dtype=torch.float32)).square().sum().backward()
    assert handle.names[0].startswith("4.")  # backward begins at the end
    assert len(set(gather_objects(repr(handle.plan)))) == 1
    assert handle.overhead_s > 0
    first, then = commpass.plans()[seen:]
    assert {site.codec for site in first} == {"none"}
    assert [each.backward_us > 0 for each in handle._hooks.driver.planner.gradients()].count(
        True
    ) == 6
    assert then.digest() != first.digest() or not handle.plan.sparse


@pytest.mark.slow
def test_measurements_make_one_plan_for_all_ranks(ranks3):
    ranks3.run(check_measured)


def dumped(folder: str) -> None:
    """One plan for the first step, one for each stage of warm-up, one for the rest."""
    model = net()
    ssfusion(model, **(FIXED | {"density": 0.003, "bound": 0.001}), warmup=4, dump=folder)
    for step in range(6):
        model(batch(step)).square().sum().backward()
    dist.barrier()


@pytest.mark.slow
def test_each_plan_is_a_run_of_its_own_in_the_dump(ranks2, tmp_path):
    ranks2.run(dumped, str(tmp_path))
    runs = read_runs(tmp_path)
    assert len(runs) == len(set(runs.values())) == len(list(tmp_path.iterdir())) == 5
    (newest,) = read_run(tmp_path)
    assert {site.codec for site in newest.plan.sites} == {"dgc(density=0.003)"}
    assert newest.rank == 0
    assert newest.plan.profile == "slow"
    # An all_gather sends its input to the one other rank.
    before, after, unknown = of_plans([newest.plan])
    assert unknown == 0
    assert after == sum(site.wire_bytes for site in newest.plan.sites)
    assert before == sum(site.bytes for site in newest.plan.sites)
    result = CliRunner().invoke(app, ["graph", str(tmp_path)])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert "fusion buffers have no graph of their own" in result.output
    explained = CliRunner().invoke(app, ["explain", str(tmp_path)]).output
    assert "dgc(density=0.003)" in explained
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert "dgc(density=0.003)" in page.read_text()


def reported() -> None:
    """Only the plan in use is reported, as one call of a graph; earlier ones are not counted as
    unknown."""
    gc.collect()  # models of other tests
    before = commpass.report()
    model = net()
    handle = ssfusion(model, **(FIXED | {"density": 0.003, "bound": 0.001}), warmup=4)
    for step in range(6):
        model(batch(step)).square().sum().backward()
    found = commpass.report()
    assert found.elsewhere == before.elsewhere
    assert len(found.graphs) == len(before.graphs) + 1
    (graph,) = (each for each in found.graphs if each.policy == "ssfusion")
    plan = commpass.plans()[-1]
    assert sum(site.wire_bytes for site in graph.sites) == sum(s.wire_bytes for s in plan.sites)
    assert {site.unmeasured for site in graph.sites} == {
        "what one step leaves out, later ones send"
    }
    assert "dgc(density=0.003)" in str(found)
    del handle


@pytest.mark.slow
def test_report_has_ssfusion(ranks2):
    ranks2.run(reported)


def test_model_with_hooks_can_be_copied(ranks2):
    ranks2.run(check_copied)


def check_copied() -> None:
    model = net()
    handle = ssfusion(model, **USUAL)
    train(model, range(1))
    twin = copy.deepcopy(model)
    twin(batch(0)).sum().backward()
    assert handle.steps == 1
    handle.remove()
    model.zero_grad()
    model(batch(0)).sum().backward()
    assert handle.steps == 1


def shares() -> tuple[float, float, int]:
    """Return how many processors each rank has exclusively, before each is limited to one, and
    after."""
    allowed = os.sched_getaffinity(0)
    mine = sorted(allowed)[dist.get_rank() % len(allowed)]
    stated = os.environ.pop(CORES)
    try:
        before = processors_each(dist.group.WORLD)
        os.sched_setaffinity(0, {mine})
        return before, processors_each(dist.group.WORLD), len(allowed)
    finally:
        os.sched_setaffinity(0, allowed)
        os.environ[CORES] = stated


def test_ranks_of_one_machine_share_the_processors_that_each_may_use(ranks3):
    for before, held, cores in ranks3.run(shares):
        assert before == pytest.approx(cores / 3)
        assert held == (1.0 if cores >= 3 else 0.5 if cores == 2 else pytest.approx(1 / 3))
