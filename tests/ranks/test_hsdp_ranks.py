"""HSDP: the all_reduce over the replicas of a shard follows the policy, like FSDP2's other
exchanges."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from rank_helpers import gather_objects, is_same_on_all_ranks
from test_fsdp_ranks import (
    EXACT,
    Net,
    adam,
    batches,
    forced,
    loss_of,
    opened,
    plain_steps,
    same,
    sharded,
    whole,
)
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commpass
from commpass.errors import CommpassError
from commpass.parallel import compress_fsdp
from commpass.parallel.fsdp.replicas import ReplicaGroup

pytestmark = pytest.mark.xdist_group("ranks")


def mesh_of(replicas: int = 2) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "fsdp"))


def raw(*tensors: torch.Tensor) -> bytes:
    return b"".join(each.numpy().tobytes() for each in tensors)


def sites_of(integration):
    return [site for plan in integration.plans for site in plan.sites]


def exact(policy, steps: int, **how) -> None:
    """Weights are those of FSDP2 alone, bit for bit."""
    weights, mesh = [], mesh_of()
    for on in (False, True):
        model = sharded(Net(), mesh=mesh, **how)
        integration = opened(model, policy) if on else None
        plain_steps(model, adam(model), steps)
        weights.append(whole(model))
    assert same(*weights)
    found = {(site.kind, site.group_size) for site in sites_of(integration)}
    assert found == {("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 2)}


MIXED = {
    "bf16, summed in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "float16": MixedPrecisionPolicy(torch.float16, torch.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", rarely("lossless"), EXACT], ids=str)
def test_lossless_sums_over_replicas_are_exact(ranks4, policy):
    ranks4.run(exact, policy, 3)


def low(name: str) -> None:
    exact(EXACT, 2, mp_policy=MIXED[name])


@pytest.mark.every
@pytest.mark.parametrize("name", MIXED)
def test_sums_of_other_dtypes_are_exact(ranks4, name):
    ranks4.run(low, name)


def mean_of_gradients() -> None:
    """One step of int8 against the mean over all ranks in float64, within the stated bound."""
    codec = commpass.codec("int8")
    model, reference = sharded(Net(), mesh=mesh_of()), Net()
    integration = opened(model, forced("int8", kind="all_reduce"))
    x, y = next(iter(batches(1)))
    loss_of(model, x, y).backward()
    loss_of(reference, x, y).backward()
    for (name, sharded_one), plain in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        mean = plain.grad.double()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        found = sharded_one.grad.full_tensor().double()
        # Blocks hold values of several parameters, so the bound is of the largest of all.
        size = max(float(each.grad.abs().max()) for each in reference.parameters())
        largest = max(gather_objects(size))
        assert (found - mean).abs().max() <= 4 * codec.bound * largest, name
        assert is_same_on_all_ranks(raw(found)), name
    kinds = {site.kind: site.codec for site in sites_of(integration)}
    assert kinds == {"all_gather": "none", "reduce_scatter": "none", "all_reduce": "int8"}
    sent = integration.bytes["all_reduce"]
    assert 0 < sent.sent < 0.4 * sent.plain


def test_coded_mean_is_within_the_bound_and_equal_on_all_ranks(ranks4):
    ranks4.run(mean_of_gradients)


def replicas_alone() -> None:
    """Four replicas of one shard each."""
    model = sharded(Net(), mesh=mesh_of(4))
    integration = opened(model, forced("int8"))
    plain_steps(model, adam(model), 2)
    assert {(site.kind, site.group_size, site.codec) for site in sites_of(integration)} == {
        ("all_reduce", 4, "int8")
    }
    assert is_same_on_all_ranks(raw(*whole(model).values()))


@pytest.mark.slow
def test_four_replicas_of_one_shard(ranks4):
    ranks4.run(replicas_alone)


def accumulated() -> None:
    """Microbatches are summed over the shards, and only the last one over the replicas."""
    weights, calls = [], []
    mesh = mesh_of()
    for on in (False, True):
        model = sharded(Net(), mesh=mesh)
        integration = opened(model, EXACT) if on else None
        optimizer = adam(model)
        for number, (x, y) in enumerate(batches(4)):
            last = number % 2 == 1
            model.set_requires_all_reduce(last)
            loss_of(model, x, y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                calls.append(integration.bytes["all_reduce"].calls if on else 0)
        weights.append(whole(model))
    assert same(*weights)
    assert calls[2:] == [4, 8]  # of four units


@pytest.mark.slow
def test_gradients_are_accumulated_before_the_sum_over_replicas(ranks4):
    ranks4.run(accumulated)


def with_feedback() -> list[str]:
    model = sharded(Net(), mesh=mesh_of())
    integration = opened(model, forced("topk(density=0.1)", kind="all_reduce"))
    losses = plain_steps(model, adam(model), 6)
    codecs = {site.codec for site in sites_of(integration) if site.kind == "all_reduce"}
    assert codecs == {"topk(density=0.1)"}
    assert losses[-1] < losses[0]
    assert is_same_on_all_ranks(raw(*whole(model).values()))
    return sorted(commpass.state_dict(model))


@pytest.mark.slow
def test_sparse_sums_over_replicas_keep_residuals(ranks4):
    for keys in ranks4.run(with_feedback):
        assert any("layers.1" in key for key in keys)


def removed() -> None:
    """After remove(), FSDP2 has its own groups again, and another integration may follow."""
    mesh = mesh_of()
    model, alone = sharded(Net(), mesh=mesh), sharded(Net(), mesh=mesh)
    optimizers = adam(model), adam(alone)
    integration = opened(model, "off")
    infos = [unit.group.mesh_info for unit in integration.units]
    assert all(isinstance(info.replicate_process_group, ReplicaGroup) for info in infos)
    with pytest.raises(CommpassError, match="compress_fsdp"):
        compress_fsdp(model, "off")
    integration.remove()
    for unit in integration.units:
        assert unit.group.mesh_info.replicate_process_group is mesh.get_group("dp")
        assert unit.gathers_again
    plain_steps(model, optimizers[0], 2)
    plain_steps(alone, optimizers[1], 2)
    assert same(whole(model), whole(alone))


@pytest.mark.slow
def test_removed_integration_leaves_the_groups_of_torch(ranks4):
    ranks4.run(removed)


def freed() -> None:
    """Nothing of torch or of this library keeps a model."""
    model = sharded(Net(), mesh=mesh_of())
    opened(model, forced("int8"))
    plain_steps(model, adam(model), 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_model_is_freed(ranks4):
    ranks4.run(freed)


def different_policies() -> None:
    codec = "int8" if dist.get_rank() < 2 else "int4"
    model = sharded(Net(), mesh=mesh_of())
    integration = compress_fsdp(model, forced(codec, kind="all_reduce"), timeout=60)
    with pytest.raises(CommpassError, match=r"policy 'int[48]' on rank"):
        plain_steps(model, adam(model), 1)
    integration.remove()
    assert not any(isinstance(each, ReplicaGroup) for each in dist.distributed_c10d._world.pg_map)


@pytest.mark.slow
def test_replicas_with_different_policies_all_raise(ranks4):
    ranks4.run(different_policies)


def one_replica() -> None:
    """Must not rewrite: FSDP2 sends no all_reduce over one replica, and keeps its group."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "fsdp"))
    model = sharded(Net(), mesh=mesh)
    integration = opened(model, forced("int8"))
    plain_steps(model, adam(model), 1)
    for unit in integration.units:
        assert unit.group.mesh_info.replicate_process_group is mesh.get_group("dp")
    kinds = {site.kind for site in sites_of(integration)}
    assert kinds == {"all_gather", "reduce_scatter"}


def hooked() -> list[int]:
    """A hook of the user runs after the sum, on the sum."""
    model = nn.Linear(8, 4)
    fully_shard(model, mesh=mesh_of())
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda x: seen.append(x.clone()))
    opened(model, forced("int8"))
    model(torch.ones(2, 8)).sum().backward()
    assert len(seen) == 1
    return gather_objects(tuple(seen[0].tolist()))


@pytest.mark.slow
def test_hook_of_the_user_gets_the_sum(ranks4):
    everywhere = ranks4.run(hooked)[0]
    assert everywhere[0] == everywhere[2]
    assert everywhere[1] == everywhere[3]


@pytest.mark.slow
def test_one_replica_has_no_sum(ranks2):
    ranks2.run(one_replica)


def not_finite() -> None:
    """A NaN on one rank reaches all replicas of its shard."""
    model = sharded(Net(), mesh=mesh_of())
    opened(model, forced("int8", kind="all_reduce"))
    x = torch.randn(4, 8)
    if dist.get_rank() == 3:
        x[0, 0] = torch.nan
    model(x).sum().backward()
    grads = [each.grad.full_tensor() for each in model.parameters()]
    assert all(each.isnan().any() for each in grads)
    assert is_same_on_all_ranks(raw(*(each.isnan() for each in grads)))


def restarted() -> None:
    """With its residuals, a restarted training goes on as if it had not stopped."""

    def steps(model: nn.Module, numbers: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for number in numbers:
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            x = torch.randn(8, 8, generator=generator) ** 5  # few large values
            model(x).tanh().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    policy = forced("topk(density=0.05)", kind="all_reduce")
    model, again = sharded(Net(), mesh=mesh_of()), sharded(Net(), mesh=mesh_of())
    integration = opened(model, policy)
    steps(model, range(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    residuals = {key: value.clone() for key, value in commpass.state_dict(model).items()}
    assert any(bool(value.any()) for value in residuals.values())
    steps(model, range(3, 6))
    integration.remove()
    opened(again, policy)
    again.load_state_dict(weights)
    commpass.load_state_dict(residuals, again)
    steps(again, range(3, 6))
    assert same(whole(model), whole(again))


@pytest.mark.every
@pytest.mark.parametrize("attack", [not_finite, restarted])
def test_sum_over_replicas_withstands(ranks4, attack):
    ranks4.run(attack)
