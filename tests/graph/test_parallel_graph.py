"""replicate and shard on the fake process group: which collectives are in the graph, and which are
not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import commpass
from commpass import Policy, Rule
from commpass.errors import ParallelError
from commpass.parallel import accumulate, distributed_parameters, drop_accumulated

HOW = ("replicate", "shard")
BARE = Policy(skip=("group",))
"""Every collective separately."""


class Net(nn.Module):
    """Two linears with a norm between them, and unusual properties on demand."""

    def __init__(self, width: int = 32, inside: int = 48):
        super().__init__()
        self.up = nn.Linear(width, inside)
        self.norm = nn.LayerNorm(inside)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def mesh_of(*sizes: int, names=("dp",)):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def make(how: str, model: nn.Module, mesh, **more) -> nn.Module:
    return getattr(commpass.parallel, how)(model, mesh, **more)


def plans_of(model: nn.Module, *inputs, policy=BARE, backward: bool = True) -> list:
    """Return the plans of one step: forward, and backward if there is one."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    backend = commpass.backend(policy, inner="eager", strict=True)
    output = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    if backward:
        output.float().square().mean().backward()
    return commpass.plans()[seen:]


def sites(plans, direction: str) -> list:
    return [site for plan in plans for site in plan if site.direction == direction]


def facts(some) -> list[tuple]:
    return sorted((site.kind, site.module, site.dtype, site.bytes) for site in some)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 8, 1024])
def test_each_parameter_is_gathered_and_its_gradient_scattered(fake_group, size):
    fake_group(size)
    model = make("shard", Net(), mesh_of(size))
    plans = plans_of(model, torch.randn(4, 32))
    up, norm, down = 48 * 32 * 4, 48 * 4, 32 * 48 * 4

    def part(rows: int, nbytes: int) -> int:
        return nbytes // rows * -(-rows // size)

    assert facts(sites(plans, "forward")) == [
        ("all_gather", "down", "float32", part(32, down)),
        ("all_gather", "norm", "float32", part(48, norm)),
        ("all_gather", "norm", "float32", part(48, norm)),
        ("all_gather", "up", "float32", part(48, norm)),
        ("all_gather", "up", "float32", part(48, up)),
    ]
    sent = sites(plans, "backward")
    assert facts(sent) == [
        (
            "reduce_scatter",
            site.module,
            "float32",
            size * site.bytes,
        )
        for site in sorted(sites(plans, "forward"), key=lambda site: (site.module, site.bytes))
    ]
    assert {site.reduce_op for site in sent} == {"avg"}
    assert {site.group_label for site in sent} == {"dp"}
    assert {site.group_size for site in sent} == {size}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 1024])
def test_gradients_of_replicas_are_averaged_and_nothing_else_travels(fake_group, size):
    fake_group(size)
    model = make("replicate", Net(), mesh_of(size))
    plans = plans_of(model, torch.randn(4, 32))
    assert sites(plans, "forward") == []
    assert facts(sites(plans, "backward")) == [
        ("all_reduce", "down", "float32", 32 * 48 * 4),
        ("all_reduce", "norm", "float32", 48 * 4),
        ("all_reduce", "norm", "float32", 48 * 4),
        ("all_reduce", "up", "float32", 48 * 4),
        ("all_reduce", "up", "float32", 48 * 32 * 4),
    ]
    assert {site.group_label for site in sites(plans, "backward")} == {"dp"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_plain_model_and_inference_reduce_no_gradients(fake_group, how):
    fake_group(4)
    model = make(how, Net(), mesh_of(4))
    plain = Net()
    assert sites(plans_of(plain, torch.randn(4, 32)), "backward") == []
    with torch.no_grad():  # inference reduces nothing either
        plans = plans_of(model, torch.randn(4, 32), backward=False)
    assert {site.kind for plan in plans for site in plan} <= {"all_gather"}


@pytest.mark.slow
def test_collectives_of_parameters_match_rules_by_group_and_module(fake_group):
    fake_group(4)
    rules = [Rule(module="down", keep=True), Rule(group="dp", codec="int8", force=True)]
    policy = Policy(rules=rules, skip=("group",), max_error=0.1)
    plans = plans_of(make("shard", Net(512, 512), mesh_of(4)), torch.randn(4, 512), policy=policy)
    compressed = [site for plan in plans for site in plan.compressed]
    assert {(site.module, site.direction) for site in compressed} == {
        ("up", "forward"),
        ("up", "backward"),
        ("norm", "forward"),
        ("norm", "backward"),
    }
    kept = [site for site in sites(plans, "backward") if site.module == "down"]
    assert len(kept) == 1
    assert not kept[0].compressed
    other = Policy(rules=[Rule(group="tp", codec="int8", force=True)], max_error=0.1)
    plans = plans_of(make("shard", Net(), mesh_of(4)), torch.randn(4, 32), policy=other)
    assert not [site for plan in plans for site in plan.compressed]


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_parameters_travel_in_one_dtype_and_gradients_in_another(fake_group, how):
    fake_group(4)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = make(how, Net(), mesh_of(4), **dtypes)
    plans = plans_of(model, torch.randn(4, 32))
    assert {site.dtype for site in sites(plans, "forward")} <= {"bfloat16"}
    assert {site.dtype for site in sites(plans, "backward")} == {"float32"}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    model = make(how, Net(), mesh_of(4), param_dtype=torch.bfloat16)
    plans = plans_of(model, torch.randn(4, 32))
    assert {site.dtype for site in sites(plans, "backward")} == {"bfloat16"}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("group_bytes", [262_144, 0])
def test_small_gradients_go_in_buckets(fake_group, group_bytes):
    fake_group(4)
    model = make("replicate", Net(), mesh_of(4))
    plans = plans_of(model, torch.randn(4, 32), policy=Policy(group_bytes=group_bytes))
    sent = sites(plans, "backward")
    assert sum(site.bytes for site in sent) == 4 * sum(p.numel() for p in model.parameters())
    if group_bytes == 0:
        assert len(sent) == 5
    else:
        assert len(sent) <= 2
        assert sum(len(plan.grouped) for plan in plans) == len(sent)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("keep_gathered", [True, False])
def test_backward_gathers_again_only_where_asked(fake_group, keep_gathered):
    fake_group(4)
    model = make("shard", Net(), mesh_of(4), keep_gathered=keep_gathered)
    _, backward = plans_of(model, torch.randn(4, 32))
    again = [site.module for site in backward if site.kind == "all_gather"]
    # The weight of up is not needed: the input needs no gradient. Those of the norm are small.
    assert ("down" in again) is not keep_gathered
    assert keep_gathered == (again == [])
    assert all(site.direction == "forward" for site in backward if site.kind == "all_gather")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_frozen_parameters_are_not_reduced_and_unused_ones_are_left_out(fake_group, how):
    fake_group(4)
    model = Net()
    model.spare = nn.Linear(32, 32)
    model.up.weight.requires_grad_(False)
    make(how, model, mesh_of(4))
    plans = plans_of(model, torch.randn(4, 32))
    assert [site.bytes for site in sites(plans, "backward") if site.module == "up"] == [192]
    assert not [site for plan in plans for site in plan if site.module == "spare"]
    assert len([site for site in sites(plans, "forward") if site.module == "up"]) == (
        2 if how == "shard" else 0
    )
    assert model.up.weight.grad is None if how == "replicate" else True
    assert dict(model.named_parameters())["spare.weight"].grad is None
    assert not dict(model.named_parameters())["up.weight"].requires_grad


@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_tied_parameter_is_one(fake_group, how):
    fake_group(4)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            self.head = nn.Linear(32, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.tanh(self.embed(x)))

    model = make(how, Tied(), mesh_of(4))
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    assert model._modules["head"]._parameters["weight"] is model.embed._parameters["weight"]
    plans = plans_of(model, torch.arange(8))
    assert len(sites(plans, "forward")) == (1 if how == "shard" else 0)
    assert len(sites(plans, "backward")) == 1


@pytest.mark.slow
def test_parameters_that_rows_do_not_divide_are_replicated(fake_group):
    fake_group(8)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.few = nn.Parameter(torch.randn(3, 5))
            self.row = nn.Parameter(torch.randn(1, 5))
            self.empty = nn.Parameter(torch.zeros(0, 5))
            self.codes = nn.Parameter(torch.ones(16, dtype=torch.int8), requires_grad=False)
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x):
            return (
                ((x + self.row) @ self.few.t() * self.scale).sum()
                + self.codes.sum()
                + self.empty.sum()
            )

    model = make("shard", Odd(), mesh_of(8), param_dtype=torch.bfloat16)
    placed = {name: parameter.placements for name, parameter in model.named_parameters()}
    assert placed == {
        "scale": (Replicate(),),
        "few": (Shard(0),),
        "row": (Replicate(),),
        "empty": (Replicate(),),
        "codes": (Shard(0),),
    }
    assert not isinstance(model.seen, DTensor)
    assert model.seen.dtype == torch.float32
    plans = plans_of(model, torch.randn(2, 5))
    assert facts(sites(plans, "forward")) == [
        ("all_gather", "", "bfloat16", 5 * 2),
        ("all_gather", "", "int8", 2),
    ]
    assert facts(sites(plans, "backward")) == [
        ("all_reduce", "", "bfloat16", 2),
        ("all_reduce", "", "bfloat16", 5 * 2),
        ("reduce_scatter", "", "bfloat16", 8 * 5 * 2),
    ]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_group_of_one_rank_sends_nothing(fake_group, how):
    fake_group(1)
    model = make(how, Net(), mesh_of(1), param_dtype=torch.bfloat16)
    plans = plans_of(model, torch.randn(4, 32))
    assert not [site for plan in plans for site in plan]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.few(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), rarely(16, 8)])
def test_parallelism_around_tensor_parallelism(fake_group, how, dp, tp):
    fake_group(dp * tp)
    mesh = mesh_of(dp, tp, names=("dp", "tp"))
    model = Net(64, 128)
    model.norm = nn.Identity()
    model.last = nn.LayerNorm(64)
    model.forward = lambda x: model.last(model.down(torch.tanh(model.up(x))))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    make(how, model, mesh["dp"])
    first = Replicate() if how == "replicate" else Shard(0)
    strided = Replicate() if how == "replicate" else _StridedShard(0, split_factor=tp)
    placed = {name: parameter.placements for name, parameter in model.named_parameters()}
    assert placed["up.weight"] == (strided, Shard(0))
    assert placed["down.weight"] == (first, Shard(1))
    assert placed["last.weight"] == (first, Replicate())
    assert {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()} == {
        ("dp", "tp")
    }
    seen = model.up.weight
    assert isinstance(seen, DTensor)
    assert seen.device_mesh.mesh_dim_names == ("tp",)
    assert seen.placements == (Shard(0),)
    assert not isinstance(model.last.weight, DTensor)
    plans = plans_of(model, torch.randn(4, 64, requires_grad=True))
    backward = sites(plans, "backward")
    assert {site.group_label for site in backward} == {"dp", "tp"}
    weight = next(site for site in backward if site.group_label == "dp" and site.module == "up")
    assert weight.group_size == dp
    assert max(site.bytes for site in backward if site.group_label == "dp") == 64 * 128 * 4 // tp


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_gradients_do_not_travel_while_accumulating(fake_group, how):
    fake_group(4)
    model = make(how, Net(), mesh_of(4))
    with accumulate(model):
        plans = plans_of(model, torch.randn(4, 32))
    assert sites(plans, "backward") == []
    assert all(parameter.grad is None for parameter in model.parameters())
    plans = plans_of(model, torch.randn(4, 32))
    assert len(sites(plans, "backward")) == 5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_accumulated_gradients_are_dropped_on_demand_alone(fake_group):
    fake_group(1)
    model = make("shard", nn.Linear(3, 1, bias=False), mesh_of(1))
    ones = torch.ones(1, 3)

    def gradient():
        model(ones).sum().backward()
        found = dict(model.named_parameters())["weight"].grad.full_tensor().clone()
        model.zero_grad()
        return found.unique().tolist()

    for _ in range(2):
        with accumulate(model):
            model(ones).sum().backward()
    model.zero_grad()
    assert gradient() == [3.0]
    assert gradient() == [1.0]
    with accumulate(model):
        model(ones).sum().backward()
    drop_accumulated(model)
    assert gradient() == [1.0]


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_accumulated_gradients_are_sent_once(fake_group, backend):
    """A parameter that is read twice, two forwards before their backwards, and a gradient that is
    accumulated after the last forward (as in pipelines)."""
    fake_group(1)

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x @ self.weight.t()

    model = make("replicate", Twice(3, 1, bias=False), mesh_of(1))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ones = torch.ones(1, 3)
    with accumulate(model):
        early, late = compiled(ones).sum(), compiled(ones).sum()
    early.backward()
    last, other = compiled(ones).sum(), compiled(ones).sum()
    late.backward()
    last.backward()
    other.backward()
    weight = dict(model.named_parameters())["weight"]
    assert weight.grad.full_tensor().unique().tolist() == [4 * 2.0]
    other = compiled(ones).sum()
    other.backward()
    assert weight.grad.full_tensor().unique().tolist() == [5 * 2.0]


def test_names_and_copies(fake_group):
    fake_group(2)
    plain = Net()
    model = make("shard", copy.deepcopy(plain), mesh_of(2))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert isinstance(model.up, nn.Linear)
    with accumulate(model):
        model(torch.randn(4, 32)).sum().backward()
    other = copy.deepcopy(model)
    with accumulate(other):
        other(torch.randn(4, 32)).sum().backward()
    held = [one.up._commpass_exchanged["weight"] for one in (model, other)]
    assert held[0].pending is not held[1].pending
    assert held[1].pending.any()


@pytest.mark.slow
def test_model_without_values_is_filled_in_place(fake_group):
    fake_group(2)
    with torch.device("meta"):
        model = Net()
    make("shard", model, mesh_of(2))
    model.to_empty(device="cpu")
    with distributed_parameters(model):
        assert isinstance(model.up.weight, DTensor)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    assert not isinstance(model.up.weight, DTensor)
    local = dict(model.named_parameters())["up.weight"].to_local()
    assert local.unique().tolist() == [0.5]
    assert len(sites(plans_of(model, torch.randn(4, 32)), "backward")) == 5


def refused(words: str, function, *args, **more) -> None:
    with pytest.raises(ParallelError) as error:
        function(*args, **more)
    for word in words.split("|"):
        assert word in str(error.value), (word, str(error.value))


def test_impossible_layouts_are_refused_with_a_reason(fake_group):
    fake_group(4)
    mesh, flat = mesh_of(2, 2, names=("dp", "tp")), mesh_of(4)
    shard, replicate = commpass.parallel.shard, commpass.parallel.replicate
    refused("DeviceMesh|str", shard, Net(), "dp")
    refused("nn.Module|int", shard, 3, flat)
    refused("2 dimensions, dp, tp|dim='dp'", shard, Net(), mesh)
    refused("'dq'|did you mean 'dp'", shard, Net(), mesh, dim="dq")
    refused("param_dtype=torch.int8", shard, Net(), flat, param_dtype=torch.int8)
    refused("reduce_op='mean'|avg", replicate, Net(), flat, reduce_op="mean")
    refused("LSTM", shard, nn.Sequential(nn.LSTM(4, 4)), flat)
    ddp = nn.Sequential(nn.parallel.DistributedDataParallel(Net()))
    for call in (shard, replicate):
        refused("0 (DistributedDataParallel)|itself|compress_ddp", call, ddp, flat)
    refused("complex64", shard, nn.ParameterList([torch.zeros(3, dtype=torch.complex64)]), flat)
    once = make("shard", Net(), mesh, dim="dp")
    refused("up|Linear|already|tp", replicate, once, mesh["tp"])
    refused("Net|shard(model, mesh)", accumulate(Net()).__enter__)
    whole = nn.Linear(4, 4)
    whole.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh["dp"], [Shard(0)]))
    refused("already distributed over dp", shard, whole, mesh["dp"])
    assert isinstance(once, Net)
    once.up._parameters["weight"] = nn.Parameter(torch.zeros(48, 32))
    refused("weight of|replaced", once, torch.randn(4, 32))


@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_other_dtypes_afterwards_are_refused(fake_group, how):
    fake_group(2)
    model = make(how, nn.Linear(4, 4), mesh_of(2)).to(torch.bfloat16)
    x = torch.zeros(1, 4, dtype=torch.bfloat16)
    refused("weight of ParallelLinear became torch.bfloat16|torch.float32", model, x)
    assert model.float()(x.float()).shape == (1, 4)


@pytest.mark.parametrize("how", HOW)
def test_parameters_that_are_added_afterwards_are_refused(fake_group, how):
    fake_group(2)
    model = make(how, nn.Linear(4, 4), mesh_of(2))
    more = nn.Parameter(torch.ones(4))
    refused("gain of ParallelLinear|add it before", setattr, model, "gain", more)
    refused("gain of ParallelLinear|add it before", model.register_parameter, "gain", more)
    assert sorted(model.state_dict()) == ["bias", "weight"]
    model.load_state_dict(model.state_dict(), assign=True)  # replaces the existing ones
    assert copy.deepcopy(model)(torch.zeros(1, 4)).shape == (1, 4)


def test_refused_models_are_left_as_they_were(fake_group):
    fake_group(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    refused("LSTM", commpass.parallel.shard, model, mesh_of(4))
    assert type(model[0]) is nn.Linear
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_other_mesh_with_tensor_parallelism(fake_group):
    fake_group(4)
    model = parallelize_module(nn.Linear(4, 4), mesh_of(4, names=("tp",)), ColwiseParallel())
    refused("dp|tp|do not belong to one mesh", commpass.parallel.shard, model, mesh_of(4))
    assert dist.get_world_size() == 4


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_blocks_that_are_compiled_one_by_one_share_their_graphs(fake_group, how):
    fake_group(4)
    model = make(how, nn.Sequential(Net(), Net(), Net()), mesh_of(4))
    seen = len(commpass.plans())
    backend = commpass.backend(BARE, inner="eager", strict=True)
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    model(torch.randn(4, 32)).square().mean().backward()
    # The first block's input needs no gradient, which makes one more graph.
    assert len(commpass.plans()[seen:]) <= 4
    assert all(parameter.grad is not None for parameter in model.parameters())
