"""Outer steps of local-update methods under a policy, on real ranks: bits, bytes, state, errors."""

from __future__ import annotations

import datetime
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refusals import refusals
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commpass
from commpass.distributed import plan_store
from commpass.distributed.adopted import AdoptedWorld
from commpass.errors import ParallelError, PlanMismatch, PolicyError
from commpass.parallel import compress_ddp, compress_outer
from commpass.parallel.outer import means
from commpass.parallel.outer.residuals import Snapshot, drop, residuals_of

pytestmark = pytest.mark.xdist_group("ranks")


def forced(spec: str, **rule) -> commpass.Policy:
    return commpass.Policy(rules=[commpass.Rule(codec=spec, force=True, **rule)], max_error=1.0)


INT8 = forced("int8")
TOPK = forced("topk(density=0.1)")


class Net(nn.Module):
    """Convolutions with channels last, a norm, two dtypes, a frozen and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7 + dist.get_rank())  # different on each rank, until the call
        self.conv = nn.Conv2d(2, 16, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(16)
        self.narrow = nn.Linear(64, 32, dtype=torch.bfloat16)
        self.frozen = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)[:, :64]
        return self.last(torch.tanh(self.frozen(self.narrow(x.bfloat16()).float())))


def batch(step: int) -> torch.Tensor:
    number = 100 * step + dist.get_rank()
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(number))


def train_locally(model: nn.Module, steps: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def same_on_all(tensors) -> bool:
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)


def outer_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, 0.7, momentum=0.9, nesterov=True)


# --- numbers --------------------------------------------------------------------------------------


def by_hand(model: nn.Module, diloco: bool, steps: int) -> None:
    """Train by LocalSGD or DiLoCo with one plain all_reduce for each parameter."""
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = outer_optimizer(model)
    synced = [p.detach().clone() for p in trained]
    for step in range(steps):
        train_locally(model, 2, 2 * step)
        for parameter, before in zip(trained, synced, strict=True):
            difference = before - parameter.detach()
            dist.all_reduce(difference)
            difference /= dist.get_world_size()
            parameter.data.copy_(before if diloco else before - difference)
            parameter.grad = difference
        if diloco:
            optimizer.step()
        for parameter, before in zip(trained, synced, strict=True):
            before.copy_(parameter.detach())


def compared_with_by_hand(policy, diloco: bool, bucket_bytes: int, steps: int = 3):
    """Return the largest distance from plain outer steps, relative to all that was learned."""
    with mock.patch.object(means, "BUCKET_BYTES", bucket_bytes):
        plain, model = Net(), Net()
        before = [p.detach().clone() for p in model.parameters()]
        by_hand(plain, diloco, steps)
        with compress_outer(model, policy, inner="eager", strict=True) as outer:
            optimizer = outer_optimizer(model) if diloco else None
            before = [p.detach().clone() for p in model.parameters()]
            for step in range(steps):
                train_locally(model, 2, 2 * step)
                assert outer.step(optimizer)
            codecs = {site.codec for plan in outer.plans for site in plan}
            sent = outer.bytes
        learned = sum(
            float((a - b).double().square().sum())
            for a, b in zip(plain.parameters(), before, strict=True)
        )
        away = sum(
            float((a - b).detach().double().square().sum())
            for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
        return (away / learned) ** 0.5, same_on_all(model.parameters()), codecs, sent


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("diloco", [True, False])
def test_uncompressed_outer_steps_are_those_by_hand(diloco, ranks2):
    for away, same, codecs, _ in ranks2.run(compared_with_by_hand, "off", diloco, 2000):
        assert away == 0.0
        assert same
        assert codecs == {"none"}


@pytest.mark.slow
@pytest.mark.parametrize("diloco", [False, True])
@pytest.mark.parametrize("policy", ["lossless", INT8], ids=["lossless", "int8"])
def test_outer_steps_are_near_those_by_hand_and_alike_on_all_ranks(policy, diloco, ranks3):
    exact = policy == "lossless"
    for away, same, codecs, _ in ranks3.run(compared_with_by_hand, policy, diloco, 2**20):
        assert (away < 1e-3) if exact else (1e-4 < away < 0.05)
        assert same
        assert codecs == ({"none"} if exact else {"int8"})


def test_bytes_are_those_of_plans_by_bucket(ranks2):
    for _, same, codecs, sent in ranks2.run(compared_with_by_hand, INT8, True, 2**20, 1):
        plain = 4 * (16 * 2 * 9 + 16 + 32 + 32 * 8 + 8) + 2 * (64 * 32 + 32)
        assert sent["all_reduce"].calls == 2  # one for each dtype
        assert sent.plain == plain
        assert 0.25 * plain < sent.sent < 0.6 * plain
        assert same
        assert codecs == {"int8"}


# --- error feedback -------------------------------------------------------------------------------


def line() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def move(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Change the parameters as local steps would. Return the pseudo-gradients."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    changes = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), changes, strict=True):
            parameter.sub_(change)
    return changes


def summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = [tensor.detach().clone() for tensor in tensors]
    for tensor in found:
        dist.all_reduce(tensor)
    return found


def fed_back(steps: int = 3):
    """Return how far what was applied and what is left are from all pseudo-gradients."""
    model = line()
    outer = compress_outer(model, TOPK, inner="eager", strict=True)
    start = [p.detach().clone() for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(steps):
        for total, change in zip(wanted, summed(move(model, step)), strict=True):
            total.add_(change)
        outer.step()
    left = summed([next(residuals_of(p)) for p in model.parameters()])
    size = dist.get_world_size()
    away = [
        float((size * (before - p.detach()) + rest - total).abs().max())
        for before, p, rest, total in zip(start, model.parameters(), left, wanted, strict=True)
    ]
    return max(away), float(left[0].abs().max()), sorted(outer.state_dict())


def test_no_pseudo_gradient_is_lost_or_counted_twice(ranks2):
    for rank, (away, left, names) in enumerate(ranks2.run(fed_back)):
        assert away < 1e-4
        assert left > 0.1  # one in 10 was sent
        assert names[0] == f"commpass.v2/0.bias/outer/gradient/0/sum/world/{rank}of2"
        assert len(names) == 4


@pytest.mark.slow
def test_no_pseudo_gradient_is_lost_on_3_ranks(ranks3):
    assert all(away < 1e-4 for away, _, _ in ranks3.run(fed_back, 5))


def continued():
    """Return whether training from a checkpoint gives the bits of training on."""
    model = line()
    outer = compress_outer(model, TOPK, inner="eager", strict=True)
    for step in range(2):
        move(model, step)
        outer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in outer.state_dict().items()}
    move(model, 2)
    outer.step()
    other = line()
    other.load_state_dict(saved)
    with compress_outer(other, TOPK, inner="eager", strict=True) as again:
        again.load_state_dict(state)
        move(other, 2)
        again.step()
        same = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )
        # the same handle, after loading a checkpoint into its model
        other.load_state_dict(saved)
        again.restart()
        again.load_state_dict(state)
        move(other, 2)
        again.step()
    return same, all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.slow
def test_checkpoint_continues_with_the_same_bits(ranks2):
    assert ranks2.run(continued) == [(True, True)] * 2


def undone():
    """Return whether a snapshot gives the bits before a step, from nothing and from residuals."""
    model = line()
    outer = compress_outer(model, TOPK, inner="eager", strict=True)
    nothing = Snapshot(model.parameters())
    move(model, 0)
    outer.step()
    first = [next(residuals_of(p)).clone() for p in model.parameters()]
    some = Snapshot(model.parameters())
    move(model, 1)
    outer.step()
    changed = [next(residuals_of(p)).clone() for p in model.parameters()]
    some.restore()
    restored = [next(residuals_of(p)).clone() for p in model.parameters()]
    nothing.restore()
    zeros = [not next(residuals_of(p)).any() for p in model.parameters()]
    move(model, 2)
    outer.step()
    drop(model.parameters())
    dropped = [not next(residuals_of(p)).any() for p in model.parameters()]
    equal = [torch.equal(a, b) for a, b in zip(first, restored, strict=True)]
    other = [torch.equal(a, b) for a, b in zip(first, changed, strict=True)]
    return all(equal), any(other), all(zeros), all(dropped)


@pytest.mark.slow
def test_snapshot_undoes_a_step(ranks2):
    assert ranks2.run(undone) == [(True, False, True, True)] * 2


# --- groups and shards ----------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(30, 50), nn.Linear(50, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sharded(spec: str):
    """Return how far outer steps of FSDP2's shards are from those of whole parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()
    model, whole = Wide(), Wide()
    fully_shard(model, mesh=mesh["shard"])
    policy = spec if spec == "off" else forced(spec, group="replicate")
    outer = compress_outer(model, policy, group=replicas, inner="eager", strict=True)
    plain = compress_outer(whole, "off", group=replicas, inner="eager", strict=True)
    optimizers = outer_optimizer(model), outer_optimizer(whole)
    for step in range(2):
        x = torch.randn(
            8, 30, generator=torch.Generator().manual_seed(step + 10 * mesh.get_local_rank(0))
        )
        for each, inner in ((model, 0.1), (whole, 0.1)):
            local = torch.optim.SGD(each.parameters(), inner)
            each(x).square().mean().backward()
            local.step()
            local.zero_grad()
        outer.step(optimizers[0])
        plain.step(optimizers[1])
    away = max(
        float((a.full_tensor() - b).abs().max())
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )
    dtensors = all(isinstance(p, DTensor) for p in model.parameters())
    codecs = {site.codec for plan in outer.plans for site in plan}
    return away, dtensors, codecs, sorted(outer.state_dict())


@pytest.mark.parametrize("spec", ["off", pytest.param("int8", marks=pytest.mark.slow)])
def test_shards_of_replicas_are_averaged(spec, ranks4):
    for away, dtensors, codecs, _ in ranks4.run(sharded, spec):
        assert away < (1e-6 if spec == "off" else 1e-2)
        assert dtensors
        assert codecs == ({"none"} if spec == "off" else {"int8"})


@pytest.mark.slow
def test_residuals_of_shards_have_different_names(ranks4):
    names = [names for *_, names in ranks4.run(sharded, "topk(density=0.2)")]
    assert len({name for some in names for name in some}) == 4 * 4


def in_ddp():
    """Outer steps between two groups, each of which trains by DDP, both compressed."""
    ranks = dist.get_rank()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][ranks // 2]
    outer_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][ranks % 2]
    model = DistributedDataParallel(Wide(), process_group=inner)
    ddp = compress_ddp(model, INT8, inner="eager", strict=True)
    outer = compress_outer(model, INT8, group=outer_group, inner="eager", strict=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + ranks))
        model(x).square().mean().backward()
        optimizer.step()
        if step % 2:
            outer.step()
    return same_on_all(model.parameters()), len(ddp.plans), len(outer.plans)


@pytest.mark.slow
def test_outer_steps_of_a_ddp_model(ranks4):
    assert all(same and ddp and outer == 1 for same, ddp, outer in ranks4.run(in_ddp))


# --- groups of other libraries --------------------------------------------------------------------


def adopted():
    """Send outer steps in a group that torch.distributed does not know, in reverse order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base = dist.PrefixStore("another", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(base, size - 1 - rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    timeout = datetime.timedelta(seconds=20)
    gloo = dist.ProcessGroupGloo(base, size - 1 - rank, size, timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    default, store = dist.group.WORLD, plan_store.current_store()
    model = line()
    outer = compress_outer(model, TOPK, inner="eager", strict=True)
    names = []
    for number in range(2):
        world = AdoptedWorld(group, f"replicas-{number}", "replicate")
        with world.active():
            seen = dist.get_rank(), dist.get_world_size(), dist.get_rank(group)
            values = move(model, number)
            outer._means.clear()
            outer._means.average(group, list(model.parameters()), values, size)
            names.append(sorted(outer.state_dict()))
        world.close()
        assert seen == (size - 1 - rank, size, size - 1 - rank)
    restored = dist.group.WORLD is default and plan_store.current_store() is store
    known = group in dist.distributed_c10d._world.pg_map
    labels = {site.group_labels for plan in outer.plans for site in plan}
    outer._means.clear()
    outer.restart()
    move(model, 7)
    outer.step()  # in the group of all ranks
    return same_on_all(values), restored, known, labels, names


def test_a_group_of_another_library_is_used_as_if_it_was_a_job(ranks2):
    for same, restored, known, labels, names in ranks2.run(adopted):
        assert same
        assert restored
        assert not known
        assert labels == {("replicate", "world")}
        assert names[0][0].endswith("/world/0of1")  # it stays with its job, whatever its number


# --- errors ---------------------------------------------------------------------------------------


def not_finite():
    model = line()
    outer = compress_outer(model, INT8, inner="eager", strict=True)
    move(model, 0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight[3, 4] = float("nan")
    outer.step()
    return not bool(model[0].weight[3, 4].isfinite()), same_on_all(
        [torch.nan_to_num(p, 7.0) for p in model.parameters()]
    )


def test_values_that_are_not_finite_are_so_on_all_ranks(ranks2):
    assert ranks2.run(not_finite) == [(True, True)] * 2


def other_policy():
    model = line()
    outer = compress_outer(model, INT8 if dist.get_rank() else forced("int6"), inner="eager")
    move(model, 0)
    moved = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PlanMismatch) as error:
        outer.step()
    kept = all(torch.equal(a, b) for a, b in zip(moved, model.parameters(), strict=True))
    return str(error.value), kept


def test_different_policies_raise_on_all_ranks_and_change_nothing(ranks2):
    for text, kept in ranks2.run(other_policy):
        assert "int8" in text
        assert "int6" in text
        assert kept


def other_model():
    model = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(ParallelError) as error:
        compress_outer(model, INT8)
    return str(error.value)


def test_different_models_raise_on_all_ranks(ranks2):
    for text in ranks2.run(other_model):
        assert "weight: [4, 4]" in text
        assert "weight: [5, 4]" in text


def twice_and_closed():
    model = line()
    first = compress_outer(model, INT8, inner="eager")
    twice = refusals(lambda: compress_outer(model, "off"))
    first.close()
    closed = refusals(first.step)
    compress_outer(model, "off").close()
    return twice + closed


def test_second_call_and_closed_handles_are_refused(ranks2):
    for twice, closed in ranks2.run(twice_and_closed):
        assert "0.weight of this model is exchanged by commpass.parallel.compress_outer" in twice
        assert "close()" in twice
        assert "call compress_outer again" in closed


def with_inductor(policy: str):
    model, plain = nn.Linear(512, 512), nn.Linear(512, 512)
    outer = compress_outer(model, policy, profile="ethernet-1g", strict=True)
    plainly = compress_outer(plain, "off", inner="eager")
    plain.load_state_dict(model.state_dict())
    plainly.restart()
    for each in (model, plain):
        move(each, 1)
    outer.step()
    plainly.step()
    away = (model.weight - plain.weight).detach().norm() / 512
    codecs = {site.codec for plan in outer.plans for site in plan}
    return float(away), same_on_all(model.parameters()), codecs


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["balanced", rarely("aggressive")])
def test_presets_compress_with_inductor(policy, ranks2):
    for away, same, codecs in ranks2.run(with_inductor, policy):
        assert 0 < away < 0.2
        assert same
        assert "none" not in codecs


def test_policy_errors_come_from_the_call():
    with pytest.raises(PolicyError, match="init_process_group"):
        compress_outer(nn.Linear(2, 2), "off")
