"""The FSDP2 integration: what ``fully_shard`` sends follows a policy, and training works as without
it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import counting_group
from processes import Ranks, RanksFailed
from rank_helpers import commpass_messages
from refusals import refusals
from tiers import rarely
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import commpass
from commpass import Policy, Rule
from commpass.costmodel import Link, Profile
from commpass.errors import CommpassError
from commpass.parallel import compress_fsdp
from commpass.parallel.exchange import Exchange

pytestmark = pytest.mark.xdist_group("ranks")

WIDTH, LAYERS = 24, 3
UNEVEN = 26  # rows that 3 and 4 ranks cannot share evenly
EXACT = Policy(name="exact", rules=[Rule(codec="raw", force=True)])


def forced(codec: str, **more) -> Policy:
    return Policy(name=codec, rules=[Rule(codec=codec, force=True, **more)], max_error=1.0)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def sharded(model: nn.Module, **more) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **more)
    return fully_shard(model, **more)


def opened(model: nn.Module, policy, inner: str = "eager", **more):
    """Return the integration; its graphs run operator by operator unless the compiler is tested."""
    integration = compress_fsdp(model, policy, strict=True, timeout=60, **more)
    integration.exchanges.backend.inner = inner
    return integration


def batches(steps: int, rank: int | None = None):
    g = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    for _ in range(steps):
        x = torch.randn(8, 8, generator=g)
        yield x, x[:, :4].argmax(1)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).float(), y)


def plain_steps(model, optimizer, steps: int) -> list[float]:
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def whole(model) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- codecs --------------------------------------------------------------------------------------


def trained(codec: str, steps: int) -> tuple[list[float], list[float], set[str]]:
    losses = []
    for on in (False, True):
        model = sharded(Net())
        integration = opened(model, forced(codec)) if on else None
        losses.append(plain_steps(model, adam(model), steps))
    codecs = {site.codec for plan in integration.plans for site in plan.sites}
    return *losses, codecs


@pytest.mark.every
@pytest.mark.parametrize(
    ("codec", "near"),
    [
        ("int8", 0.05),
        rarely("rotated(bits=4)", 0.15),
        rarely("bf16", 0.02),
        rarely("fp8", 0.1),
        rarely("taco", 0.1),
        rarely("table(bits=5)", 0.1),
        rarely("outlier(width=64, inner=int4)", 0.15),
    ],
)
def test_lossy_codec_trains_nearly_as_without_it(ranks2, codec, near):
    for plain, got, codecs in ranks2.run(trained, codec, 50):
        assert plain[-1] < 0.7 * plain[0]
        assert abs(sum(got[-10:]) - sum(plain[-10:])) / 10 < near
        assert got != plain
        assert "none" not in codecs


def exact(policy, steps: int, compressed: bool) -> None:
    weights = []
    for on in (False, True):
        model = sharded(Net())
        integration = opened(model, policy) if on else None
        plain_steps(model, adam(model), steps)
        weights.append(whole(model))
    assert same(*weights)
    assert compressed == any(plan.compressed for plan in integration.plans)


@pytest.mark.every
@pytest.mark.parametrize(
    ("policy", "compressed"), [("off", False), (EXACT, True), rarely(forced("exponent"), True)]
)
def test_lossless_ones_train_bit_for_bit_as_without(ranks2, policy, compressed):
    ranks2.run(exact, policy, 50, compressed)


@pytest.mark.every
def test_preset_lossless_and_three_ranks(ranks3):
    """Gathers are exact on three ranks. A sum of three may be rounded in another order."""
    ranks3.run(exact, "lossless", 4, False)
    gathers = Policy(name="g", rules=[Rule(codec="raw", direction="forward", force=True)])
    ranks3.run(exact, gathers, 4, True)


# --- FSDP2's features with a lossless codec: bit for bit as without ------------------------------


def accumulation(model, optimizer):
    for number, (x, y) in enumerate(batches(4)):
        model.set_requires_gradient_sync(number % 2 == 1)
        model.set_is_last_backward(number % 2 == 1)
        loss_of(model, x, y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipped(model, optimizer):
    for x, y in batches(3):
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def evaluated(model, optimizer):
    for x, y in batches(3):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.unshard(async_op=True).wait()
        model.reshard()


def steps(model, optimizer):
    plain_steps(model, optimizer, 3)


def mixed():
    return sharded(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def half():
    return sharded(Net(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))


def offloaded():
    return sharded(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def frozen():
    model = Net()
    model.layers[0].requires_grad_(False)
    model.layers[1].up.weight.requires_grad_(False)
    return sharded(model)


class Partly(Net):
    def forward(self, x):
        x = self.first(x)
        x = self.layers[0](x)
        return self.last(x + self.layers[2].down(self.layers[2].up(x)).sum() * 0 + x)


def unused():
    model = Partly()
    fully_shard(model.layers[0])
    return fully_shard(model)


def several():
    model = Net()
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard([model.first, model.last])
    return fully_shard(model)


def nested():
    model = Net()
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer)
    return fully_shard(model)


def checkpointed():
    model = Net()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return sharded(model)


def summed():
    model = sharded(Net())
    model.set_force_sum_reduction_for_comms(True)
    return model


def allocated():
    model = sharded(Net())
    model.set_allocate_memory_from_process_group_for_comm(True)
    return model


def resharded():
    return sharded(Net(), reshard_after_forward=False)


def uneven():
    return sharded(Net(UNEVEN + 1))


FEATURES: dict[str, tuple[Callable, Callable]] = {
    "accumulation": (lambda: sharded(Net()), accumulation),
    "clip": (lambda: sharded(Net()), clipped),
    "eval": (lambda: sharded(Net()), evaluated),
    **{
        make.__name__: (make, steps)
        for make in (
            *(mixed, half, offloaded, frozen, unused, several, nested, checkpointed),
            *(summed, allocated, resharded, uneven),
        )
    },
}


def feature(name: str) -> list[str]:
    make, train = FEATURES[name]
    weights = []
    for on in (False, True):
        model = make()
        integration = opened(model, EXACT) if on else None
        train(model, adam(model))
        weights.append(whole(model))
    assert same(*weights), name
    assert all(plan.compressed for plan in integration.plans), [
        plan.sites for plan in integration.plans
    ]
    assert integration.bytes.keys() == {"all_gather", "reduce_scatter"}
    return sorted({site.module for plan in integration.plans for site in plan.sites})


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", FEATURES)
def test_features_train_bit_for_bit_as_without(ranks2, name):
    units = ranks2.run(feature, name)[0]
    if name == "several":
        assert units == ["", "first+last", "layers.0+layers.1"]


# --- laws ----------------------------------------------------------------------------------------


def gathered(codec: str) -> None:
    """Every rank holds the same bits, which are not exact; the shards stay exact; backward gathers
    the same bits again."""
    model = sharded(Net())
    integration = opened(model, forced(codec))
    before = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    seen: dict[str, list[torch.Tensor]] = {}
    for unit in integration.units:
        comm = unit.group._all_gather_comm

        def watched(output_tensor, *rest, comm=comm, name=unit.name, **more):
            done = comm(output_tensor, *rest, **more)
            seen.setdefault(name, []).append(output_tensor.clone())
            return done

        watched.allocate, watched.integration = comm.allocate, comm.integration
        unit.group._all_gather_comm = watched
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name]), name
    for name in ("layers.0", "layers.1", "layers.2"):
        forward, backward = seen[name]
        assert torch.equal(forward, backward), name
        others = [torch.empty_like(forward) for _ in range(dist.get_world_size())]
        dist.all_gather(others, forward)
        assert all(torch.equal(other, forward) for other in others), name
        own = forward.chunk(dist.get_world_size())[dist.get_rank()]
        unit = next(unit for unit in integration.units if unit.name == name)
        exact = torch.cat([p.sharded_param.to_local().flatten() for p in unit.group.fsdp_params])
        assert not torch.equal(own, exact), name  # its own shard went through the codec as well
        assert (own - exact).norm() < 0.05 * exact.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", rarely("taco"), rarely("int8(rounding=stochastic)")])
def test_all_ranks_hold_the_same_decoded_bits_in_forward_and_backward(ranks3, codec):
    ranks3.run(gathered, codec)


def reduced(codec: str, size: int) -> None:
    """Gradients are the mean over the ranks, within the codec's error, in float64."""
    model, alone = sharded(Net(UNEVEN)), Net(UNEVEN)
    opened(model, forced(codec, direction="backward"))
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    total: dict[str, torch.Tensor] = {}
    for rank in range(size):
        x, y = next(batches(1, rank))
        loss_of(alone, x, y).backward()
        for name, p in alone.named_parameters():
            total[name] = total.get(name, 0) + p.grad.double() / size
            p.grad = None
    error = sum(
        (p.grad.full_tensor().double() - total[name]).norm() ** 2
        for name, p in model.named_parameters()
    )
    assert 0 < error**0.5 < 0.02 * sum(each.norm() ** 2 for each in total.values()) ** 0.5


@pytest.mark.slow
def test_gradients_are_the_mean_over_the_ranks(ranks3, ranks4):
    ranks3.run(reduced, "int8", 3)
    ranks4.run(reduced, "int8", 4)


def counted() -> None:
    """Dtype and bytes that are sent are those in the plans and the integration's report."""
    group = counting_group()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = sharded(Net(), mesh=mesh)
    policy = Policy(
        rules=[
            Rule(codec="int8", module="layers.*", group="dp", force=True),
            Rule(codec="fp8", module="", direction="backward", force=True),
        ],
        max_error=1.0,
    )
    integration = opened(model, policy)
    optimizer = adam(model)
    plain_steps(model, optimizer, 1)
    group.seen.clear()
    integration.clear()
    plain_steps(model, optimizer, 1)
    assert {kind for kind, _, _ in group.seen} <= {"all_gather", "all_to_all", "reduce_scatter"}
    seen = sum(size for _, _, size in group.seen)
    root_gather = next(
        p.sites[0]
        for p in integration.plans
        if p.sites[0].module == "" and p.direction == "forward"
    )
    assert root_gather.codec == "none"
    by_torch = root_gather.bytes  # torch calls gloo for it, and not the counting group
    assert seen + by_torch == sum(s.sent for s in integration.bytes.values()), (
        group.seen,
        integration.bytes,
    )
    of_layers = 2 * LAYERS  # in forward, and again in backward
    gathers = [dtype for kind, dtype, _ in group.seen if kind == "all_gather"]
    assert gathers.count(torch.uint8) + gathers.count(torch.int8) >= of_layers
    sent = integration.bytes
    assert sent["all_gather"].calls == of_layers + 1
    assert sent["reduce_scatter"].sent < 0.4 * sent["reduce_scatter"].plain
    assert "all_gather" in repr(integration)
    assert all(plan in commpass.plans() for plan in integration.plans)


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_plans(ranks2):
    ranks2.run(counted)


def not_finite() -> None:
    model = sharded(Net())
    opened(model, forced("int8"))
    x, y = next(batches(1))
    loss = loss_of(model, x, y) * (float("nan") if dist.get_rank() == 0 else 1.0)
    loss.backward()
    for name, p in model.named_parameters():
        assert not p.grad.to_local().isfinite().any(), name


@pytest.mark.slow
def test_gradients_that_are_not_finite_stay_so_on_all_ranks(ranks2):
    ranks2.run(not_finite)


def dies() -> None:
    model = sharded(Net())
    opened(model, forced("int8"))
    plain_steps(model, adam(model), 1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        plain_steps(model, adam(model), 1)
    except RuntimeError as error:
        raise AssertionError(f"said: {error}") from None


@pytest.mark.slow
def test_rank_that_dies_in_an_exchange_gives_the_others_an_error():
    ranks = Ranks(2)
    try:
        with pytest.raises(RanksFailed) as failed:
            ranks.run(dies, timeout=120)
        assert "AssertionError: said: " in str(failed.value)
    finally:
        ranks.stop()


# --- one compiled code ---------------------------------------------------------------------------


def shared() -> None:
    """Equal layers share one compiled code for each kind, and the compiler changes no value."""
    weights = []
    for inner in ("eager", "inductor"):
        model = sharded(Net())
        rules = [Rule(codec="int8", module="layers.*", force=True)]
        integration = opened(model, Policy(rules=rules, max_error=1.0), inner)
        plain_steps(model, adam(model), 2)
        weights.append(whole(model))
    assert len(integration.exchanges.shared.made) <= 2
    assert len(integration.plans) == 2 * (LAYERS + 1)
    assert len({plan.sites[0].module for plan in integration.plans}) == LAYERS + 1
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=2e-3), name


@pytest.mark.every
def test_units_that_are_alike_share_compiled_code(ranks2):
    ranks2.run(shared)


def blocks_compiled(inner: str) -> None:
    weights = []
    for on in (False, True):
        model = Net()
        for number, layer in enumerate(model.layers):
            fully_shard(layer)
            layer.compile(backend=commpass.backend(EXACT if on else "off", inner=inner))
            assert model.layers[number] is layer
        fully_shard(model)
        integration = opened(model, EXACT) if on else None
        plain_steps(model, adam(model), 2)
        weights.append(whole(model))
    assert same(*weights)
    assert all(plan.compressed for plan in integration.plans)


@pytest.mark.every
def test_compiled_blocks_and_the_integration_compose(ranks2):
    ranks2.run(blocks_compiled, "eager")


# --- checkpoints ---------------------------------------------------------------------------------


def saved(folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    model = sharded(Net())
    opened(model, forced("int8"))
    plain_steps(model, adam(model), 2)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    return sorted(model.state_dict()), whole(model)


def loaded(folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = sharded(Net())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opened(model, forced("int8"))
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    found = whole(model)
    assert plain_steps(model, adam(model), 1)
    return sorted(model.state_dict()), found


@pytest.mark.every
def test_two_ranks_save_what_four_load(ranks2, ranks4, tmp_path):
    keys, before = ranks2.run(saved, str(tmp_path))[0]
    assert keys == sorted(Net().state_dict())
    for found, after in ranks4.run(loaded, str(tmp_path)):
        assert found == keys
        assert same(before, after)


# --- meshes --------------------------------------------------------------------------------------


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said: list[str] = []

    def emit(self, record):
        self.said.append(record.getMessage())


@contextlib.contextmanager
def listening():
    handler = Said()
    logging.getLogger("commpass").addHandler(handler)
    try:
        yield handler.said
    finally:
        logging.getLogger("commpass").removeHandler(handler)


def fewer() -> None:
    """Backward's gather over two of four ranks starts from rounded weights, and is not
    compressed."""
    model = sharded(Net(), reshard_after_forward=2)
    integration = opened(model, forced("int8"))
    plain_steps(model, adam(model), 2)
    sites = [site for plan in integration.plans for site in plan.sites if site.kind == "all_gather"]
    left = [site for site in sites if site.codec == "none"]
    assert {site.group_size for site in left} == {2}
    assert all("reshard_after_forward" in site.reason for site in left)
    assert {site.group_size for site in sites if site.compressed} == {4}


@pytest.mark.every
def test_shards_of_fewer_ranks_after_forward(ranks4):
    ranks4.run(fewer)


def both_dimensions(misspelt: bool) -> list[str]:
    """Return the warnings about one policy for a tensor-parallel model and for its shards."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    rules = [Rule(group=name, codec="int8", force=True) for name in ("tp", "dp")]
    policy = Policy(
        name="both dimensions", rules=[*rules, *[Rule(group="ddp", keep=True)] * misspelt]
    )
    model.compile(backend=commpass.backend(policy, inner="eager"))
    fully_shard(model, mesh=mesh["dp"])
    with commpass_messages(logging.WARNING) as messages:
        integration = compress_fsdp(model, policy)
        for _ in range(4):
            model(torch.randn(8, 16)).square().mean().backward()
        integration.close()
    found = {site.group_label for plan in commpass.plans()[seen:] for site in plan.compressed}
    assert found == {"dp", "tp"}
    return messages


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("misspelt", [True, False])
def test_one_policy_for_a_model_and_its_shards_is_warned_of_what_neither_sends(ranks4, misspelt):
    first, *others = ranks4.run(both_dimensions, misspelt)
    assert others == [[]] * 3
    assert len(first) == misspelt
    assert all("did you mean 'dp'? Known: dp, tp." in text for text in first)


def tensor_parallel(codec: str, again: bool) -> None:
    """Parameters that tensor parallelism does not divide stay equal on its ranks, bit for bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(width=50)  # so that parameters do not end at the blocks of codecs
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=again)
    fully_shard(model, mesh=mesh["dp"])
    integration = opened(model, forced(codec))
    optimizer = adam(model)
    for x, y in batches(3, rank=mesh.get_local_rank("dp")):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sites = {site.codec for plan in integration.plans for site in plan.sites}
    assert len(sites - {"none"}) == 1
    kept = {
        name: p.to_local()
        for name, p in model.named_parameters()
        if p.device_mesh["dp"] == p.device_mesh or p.placements[1].is_replicate()
    }
    assert len(kept) == 4 + 3 * LAYERS
    parts = dict.fromkeys(kept)
    for name, part in kept.items():
        both = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(both, part.detach().contiguous(), group=mesh.get_group("tp"))
        parts[name] = torch.equal(*both)
    assert all(parts.values()), [name for name, equal in parts.items() if not equal]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("codec", "again"),
    [
        ("int8", True),
        ("difference(inner=int8)", False),
        ("rotated(bits=4)", True),
        ("equarx", True),
    ],
)
def test_replicas_of_tensor_parallelism_stay_equal(ranks4, codec, again):
    ranks4.run(tensor_parallel, codec, again)


def in_parts() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    parts = (((0, 3), (7, 8)), ((3, 7), (8, 10)))
    row = torch.arange(10.0) * 10**rank
    rows = torch.stack([row, row + 1])
    for kind, sent, result in (
        ("all_reduce", row, row),
        ("all_gather", row, rows.flatten()),
        ("reduce_scatter", rows.flatten(), row),
    ):
        results = []
        for given in ((), parts):
            exchange = Exchange(kind, group, 2, "", "backward", "fsdp", op="avg", parts=given)
            x, out = sent.clone(), torch.empty_like(result)
            inplace = kind == "all_reduce"
            exchange.graph(inplace)(*([x] if inplace else [x, out]))
            results.append(x if inplace else out)
        assert torch.equal(*results)
        assert results[0].count_nonzero() > 8


def test_exchange_in_parts_has_the_results_of_a_whole_one(ranks2):
    ranks2.run(in_parts)


def unused_beside_divided() -> list[str]:
    """Return the reasons of gradients of a unit where a parameter has no gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model.unused = nn.Linear(16, 16)
    model.forward = lambda x: model[1](model[0](x))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh["dp"])
    integration = opened(model, forced("int8"))
    model(torch.randn(8, 16)).square().mean().backward()
    sites = [site for plan in integration.plans for site in plan.sites]
    assert {site.codec for site in sites if site.kind == "all_gather"} == {"int8"}
    return [site.reason for site in sites if site.kind == "reduce_scatter"]


@pytest.mark.slow
def test_gradients_whose_places_are_unknown_stay_uncompressed(ranks4):
    for (reason,) in ranks4.run(unused_beside_divided):
        assert "some of its parameters have no gradient" in reason


def alone() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "one"))["one"]
    model = sharded(Net(), mesh=mesh)
    integration = opened(model, forced("int8"))
    plain_steps(model, adam(model), 1)
    assert integration.plans == []
    assert "nothing sent yet" in repr(integration)


# --- uncompressed collectives, and errors --------------------------------------------------------


def reasons() -> None:
    def reasons_of(model, codec: str) -> list[str]:
        integration = opened(model, Policy(rules=[Rule(codec=codec)], max_error=1.0))
        plain_steps(model, adam(model), 1)
        sites = [site for plan in integration.plans for site in plan.sites]
        assert all(site.codec == "none" for site in sites if site.kind != "all_gather" or mixed)
        return [f"{site.kind} {site.dtype}: {site.reason}" for site in sites]

    mixed = False
    found = reasons_of(sharded(Net()), "topk(density=0.1)")
    assert all("reduce_scatter" in each for each in found if each.startswith("reduce_scatter"))
    model = Net()
    model.last.requires_grad_(False).to(torch.float64)
    model.last.forward = lambda x: nn.Linear.forward(model.last, x.double())
    mixed = True
    found = reasons_of(fully_shard(model), "int8")
    assert any("several dtypes" in each for each in found if each.startswith("all_gather"))


def differences() -> None:
    """Each gather updates the reference, so a gather in backward must not be a second one."""
    slow = Profile("slow", Link(1.0, 1e-6))
    rules = [Rule(kind="all_gather", codec="difference(inner=int8)")]
    for again in (True, False):
        model = Net()
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=again)
        seen: list[torch.Tensor] = []

        def see(layer, *_, seen=seen):
            seen.append(next(layer.parameters()).detach().clone())

        model.layers[1].register_forward_hook(see)
        model.layers[1].register_full_backward_pre_hook(see)
        integration = opened(model, Policy(rules=rules, max_error=1.0), profile=slow)
        plain_steps(model, adam(model), 3)
        for forward, backward in zip(seen[::2], seen[1::2], strict=True):
            assert torch.equal(forward, backward)
        sites = [site for plan in integration.plans for site in plan if site.kind == "all_gather"]
        assert {site.codec.startswith("difference") for site in sites} == {not again}
        assert all("backward gathers it again" in site.reason for site in sites if again)


def test_differences_where_backward_does_not_gather_again_alone(ranks2):
    ranks2.run(differences)


def refused(codecs, says: str) -> None:
    model = sharded(Net(), reshard_after_forward=True)
    integration = compress_fsdp(
        model, forced(codecs[dist.get_rank()], kind="all_gather"), timeout=60
    )
    integration.exchanges.backend.inner = "eager"
    with pytest.raises(CommpassError, match=says):
        plain_steps(model, adam(model), 1)


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        (("int8", "int4"), r"codec is 'int[48]' in rank(.|\n)*policy 'int[48]' on rank"),
        (("difference(inner=int8)",) * 2, "forces a codec .* backward gathers it again"),
    ],
)
def test_plan_that_is_refused_raises_and_sends_nothing(ranks2, codecs, says):
    ranks2.run(refused, codecs, says)


def words(after: bool = False) -> None:
    said = {"layers.0": commpass.keep(), "layers.1": commpass.compress(codec="fp8", force=True)}
    model = sharded(Net())
    if not after:
        commpass.apply_policy(model, said)
    integration = opened(model, forced("int8"))
    if after:
        commpass.apply_policy(model, said)
    plain_steps(model, adam(model), 1)
    chosen = {site.module: site.codec for plan in integration.plans for site in plan.sites}
    assert chosen["layers.0"] == "none"
    assert chosen["layers.2"] == "int8"
    assert chosen["layers.1"].startswith("fp8")


def taken() -> list[str]:
    model = sharded(Net())
    integration = opened(model, "off")
    other = sharded(Net())
    other.layers[1].set_custom_all_gather(Mine())
    wrapped = nn.parallel.DistributedDataParallel(Net())
    said = refusals(
        lambda: compress_fsdp(model, "off"),
        lambda: compress_fsdp(other, "off"),
        lambda: compress_fsdp(Net(), "off"),
        lambda: compress_fsdp(wrapped, "off"),
        lambda: compress_fsdp(model.state_dict(), "off"),
    )
    integration.remove()
    again = opened(model, "off")  # the model can be acquired again
    try:
        model.set_allocate_memory_from_process_group_for_comm(True)
    except AssertionError as error:
        said.append(str(error))
    both = [opened(sharded(Net()), forced("int8")) for _ in range(2)]
    assert again.units
    assert both[0].units[0].group is not both[1].units[0].group
    return said


class Mine:
    """A user-defined gather."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)


@pytest.mark.every
def test_reasons_annotations_and_groups_of_one_rank(ranks2):
    ranks2.run(reasons)
    ranks2.run(words)
    ranks2.run(words, True)
    ranks2.run(alone)


def over_its_budget() -> list[tuple[int, float]]:
    """Return for each step how many plans compress, and how much smaller the gathers are.

    The weights of one layer exceed their budget: a few set the scale of all others.
    """
    model = Net(32)
    with torch.no_grad():
        model.layers[1].up.weight[:, 0] = 1e7
    model = sharded(model)
    policy = Policy(codecs=("int8",), max_error=0.02, check_calls=1)
    integration = opened(model, policy, profile=commpass.ethernet(0.001))
    found = []
    for x, y in batches(4):
        integration.clear()
        loss_of(model, x, y).backward()
        model.zero_grad()
        sent = integration.bytes["all_gather"]
        found.append((sum(plan.changed for plan in integration.plans), sent.plain / sent.sent))
    return found


@pytest.mark.slow
def test_block_over_its_budget_is_left_alone_and_counted_so_in_that_step(ranks2):
    steps, others = ranks2.run(over_its_budget)
    assert steps == others
    (plans, smaller), *later = steps
    assert len(set(later)) == 1  # the step that plans anew counts like those after it
    assert plans > later[0][0] > 0
    assert smaller > later[0][1] > 1


def weights_of_a_block_over_its_budget() -> list[tuple[bool, bool]]:
    """Return for each step whether backward has forward's weights, and whether these are exact, for
    a layer that exceeds its budget."""
    model = Net(32)
    with torch.no_grad():
        model.layers[1].up.weight[:, 0] = 1e7
    model = sharded(model)
    policy = Policy(codecs=("int8",), max_error=0.02)
    opened(model, policy, profile=commpass.ethernet(0.001))
    up, found = model.layers[1].up, []

    def keep(module, *_):
        forward.append(module.weight.detach().clone())

    up.register_forward_hook(keep)
    up.register_full_backward_pre_hook(lambda module, _: backward.append(module.weight.clone()))
    for x, y in batches(4):
        exact, forward, backward = up.weight.full_tensor(), [], []
        loss_of(model, x, y).backward()
        model.zero_grad()
        found.append((torch.equal(forward[0], backward[0]), torch.equal(forward[0], exact)))
    return found


@pytest.mark.slow
def test_backward_has_the_weights_of_forward_where_their_block_turns_out_over_its_budget(ranks2):
    wanted = [(True, False), (True, True), (True, True), (True, True)]
    assert ranks2.run(weights_of_a_block_over_its_budget) == [wanted] * 2


def replaced_parameters(codec: str) -> tuple[list[int], list[int], bool, bool]:
    """Return the number of graphs of an integration, and of those in its report, by step.

    Each step begins with new parameters of the same values.

    Return also whether the weights stay those of plain FSDP2 (like a difference whose reference was
    just gathered), and whether the state belongs to existing parameters.
    """
    weights, plans, listed = [], [], []
    for on in (True, False):
        model = sharded(Net(), reshard_after_forward=False)
        integration = opened(model, forced(codec, kind="all_gather")) if on else None
        for _ in range(3):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(saved, assign=True)
            plain_steps(model, torch.optim.SGD(model.parameters(), 0.1), 1)
            if integration is not None:
                plans.append(len(integration.plans))
                listed.append(len(integration.exchanges.backend.step_log.entries))
        weights.append(whole(model))
        if integration is not None:
            alive = {id(parameter) for parameter in model.parameters()}
            whose = [one.calls.fixed_owner for one in integration.exchanges.compiled.values()]
            lives = all({id(one()) for one in each.parameters} <= alive for each in whose)
    return plans, listed, same(*weights), lives


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["raw", "difference(inner=int8)"])
def test_other_parameters_of_the_same_names_compile_nothing_anew(ranks2, codec):
    for plans, listed, equal, lives in ranks2.run(replaced_parameters, codec):
        assert plans == listed == [2 * (LAYERS + 1)] * 3
        assert equal
        assert lives


def calls_replaced() -> str:
    model = sharded(Net())
    opened(model, "off")
    plain_steps(model, adam(model), 1)
    model.layers[1].set_custom_all_gather(Mine())
    return refusals(lambda: plain_steps(model, adam(model), 1))[0]


def test_calls_that_are_set_behind_the_integration_are_refused(ranks2):
    said = ranks2.run(calls_replaced)[0]
    assert "layers.1 was given Mine after compress_fsdp" in said
    assert "remove()" in said


def opened_too_early(late: bool) -> tuple[int, list[str]]:
    """Return the units of an integration, and the log of two steps, if the root is sharded after
    the call."""
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    if not late:
        fully_shard(model)
    integration = opened(model, "off")
    if late:
        fully_shard(model)
    with mock.patch.object(logging.getLogger("commpass"), "warning") as warning:
        plain_steps(model, adam(model), 2)
    return len(integration.units), [call.args[0] % call.args[1:] for call in warning.call_args_list]


@pytest.mark.slow
def test_blocks_sharded_later_are_reported_once(ranks2):
    units, said = ranks2.run(opened_too_early, True)[0]
    # other objects are deleted meanwhile
    said = [each for each in said if each.startswith("compress_fsdp")]
    assert len(said) == 1
    assert "afterwards on the root module" in said[0]
    more, said = ranks2.run(opened_too_early, False)[0]
    assert more == units + 1
    assert not any(each.startswith("compress_fsdp") for each in said)


def test_refusals_name_both_sides(ranks2):
    integration, comm, nothing, ddp, no_module, torchs = ranks2.run(taken)[0]
    assert "is exchanged by commpass.parallel.compress_fsdp of a FSDPNet already" in integration
    assert "under policy 'off'" in integration
    assert "close()" in integration
    assert "layers.1" in comm
    assert "Mine" in comm
    assert "fully_shard" in nothing
    assert "parallel.shard" in nothing
    assert "compress_ddp" in ddp
    assert "parallel.shard" not in ddp
    assert "must be a module" in no_module
    assert "CompressedAllGather" in torchs


def float8_gathered(codes: bool) -> tuple[float, list[tuple[str, int, str, str]]]:
    """Differentiate float8 layers of torchao, whose weights are gathered as codes or in float32.

    Return the loss, and (dtype, bytes, codec, reason) of the gathers.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=codes, emulate=True)
    convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    handle = compress_fsdp(
        model, forced("int8", kind="all_gather") if codes else "off", strict=True
    )
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    sites = [site for plan in handle.plans for site in plan if site.kind == "all_gather"]
    return loss.item(), [(site.dtype, site.bytes, site.codec, site.reason) for site in sites]


@pytest.mark.every
def test_float8_codes_of_torchao_travel_as_they_are(ranks2):
    pytest.importorskip("torchao", reason="torchao is an optional requirement of the tests")
    for (loss, sites), (plain, _) in zip(
        ranks2.run(float8_gathered, True), ranks2.run(float8_gathered, False), strict=True
    ):
        assert loss == plain
        reason = "its parameters are gathered as float8 codes"
        assert {*sites} == {("float8_e4m3fn", 32 * 64 // 2, "none", reason)}
