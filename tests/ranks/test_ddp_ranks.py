"""DDP's gradients under a policy, on real ranks: all ways of training, errors, state, bytes."""

from __future__ import annotations

import copy
import datetime
import gc
import io
import logging
import os
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from counting import CountingGroup, counting_group
from processes import RanksFailed
from refusals import refusals
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import commpass
from commpass.distributed import owners
from commpass.errors import CommpassError, PlanMismatch, PolicyError, Unanswered
from commpass.parallel import compress_ddp

pytestmark = pytest.mark.xdist_group("ranks")


def forced(spec: str, **rule) -> commpass.Policy:
    return commpass.Policy(rules=[commpass.Rule(codec=spec, force=True, **rule)], max_error=1.0)


INT8 = forced("int8")
TOPK = forced("topk(density=0.1)")


class Net(nn.Module):
    """Three layers of different sizes, one that only some inputs use, and a checkpoint on
    demand."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3, again: bool = False):
        super().__init__()
        torch.manual_seed(7)
        sizes = [(16, 48), (48, 48), (48, 8)]
        self.layers = nn.ModuleList(
            nn.Linear(*size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        )
        self.seldom = nn.Linear(48, 48)
        self.again = again

    def forward(self, x: torch.Tensor, seldom: bool = True) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x.to(layer.weight.dtype)
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = torch.tanh(x) if number < 2 else x
            if number == 1 and seldom:
                x = x + self.seldom(x.float()).to(x.dtype)
        return x.float()


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pair(policy, build=Net, inner="eager", small=0.01, **options):
    """Return the same model twice: with the integration, and plain."""
    made = (
        DDP(build(), bucket_cap_mb=small, **options),
        DDP(build(), bucket_cap_mb=small, **options),
    )
    return *made, compress_ddp(made[0], policy, strict=True, inner=inner)


def same_on_all(tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)


# --- all ways to train with DDP -------------------------------------------------------------------


def plainly(model, step):
    model(batch(step)).square().mean().backward()


def seldom_used(model, step):
    model(batch(step), seldom=dist.get_rank() == 0 and step % 2 == 0).square().mean().backward()


def accumulated(model, step):
    with model.no_sync():
        model(batch(step)).square().mean().backward()
    model(batch(step + 50)).square().mean().backward()


def with_an_eval_before(model, step):
    model.eval()
    with torch.no_grad():
        model(batch(step))
    model.train()
    plainly(model, step)


def clipped(model, step):
    plainly(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def frozen():
    model = Net()
    model.layers[1].weight.requires_grad_(False)
    return model


def of_two_dtypes():
    return Net((torch.float32, torch.bfloat16, torch.bfloat16))


def checkpointed():
    return Net(again=True)


def with_channels_last():
    torch.manual_seed(7)
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 2)), nn.Flatten()
    )
    return model.to(memory_format=torch.channels_last)


WAYS = {
    "plain": ({}, Net, plainly),
    "unused": ({"find_unused_parameters": True}, Net, seldom_used),
    "static": ({"static_graph": True}, Net, plainly),
    "views": ({"gradient_as_bucket_view": True}, Net, plainly),
    "no_sync": ({}, Net, accumulated),
    "eval": ({}, Net, with_an_eval_before),
    "clipped": ({}, Net, clipped),
    "frozen": ({}, frozen, plainly),
    "dtypes": ({}, of_two_dtypes, plainly),
    "checkpoint": ({}, checkpointed, plainly),
    "static checkpoint": ({"static_graph": True}, checkpointed, plainly),
    "channels_last": ({}, with_channels_last, plainly),
}


def trained(way: str, policy, steps: int = 4):
    """Return for each step whether gradients are bit-equal to plain DDP's.

    Return also their largest distance from them, relative to their norm, and whether all ranks hold
    the same ones.
    """
    options, build, step = WAYS[way]
    model, plain, integration = pair(policy, build, **options)
    found = []
    for number in range(steps):
        for each in (model, plain):
            each.zero_grad()
            step(each, number)
        mine, theirs = gradients(model), gradients(plain)
        assert len(mine) == len(theirs) > 0
        equal = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        norm = sum(b.double().square().sum() for b in theirs).sqrt()
        away = sum(
            (a - b).double().square().sum() for a, b in zip(mine, theirs, strict=True)
        ).sqrt()
        found.append((equal, float(away / norm), same_on_all(mine)))
    return found, repr(integration), [site.codec for plan in integration.plans for site in plan]


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_without_a_codec_are_those_of_ddp_bit_by_bit(way, ranks2):
    for found, _, codecs in ranks2.run(trained, way, "lossless"):
        assert all(equal and same for equal, _, same in found)
        assert set(codecs) == {"none"}


@pytest.mark.parametrize("size", [3, rarely(4)])
@pytest.mark.parametrize("policy", ["off", rarely("lossless")])
def test_bits_are_those_of_ddp_on_more_ranks(policy, size, request):
    for found, _, _ in request.getfixturevalue(f"ranks{size}").run(trained, "plain", policy):
        assert all(equal for equal, _, _ in found)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_coded_gradients_are_near_and_alike_on_all_ranks(way, ranks2):
    for found, shown, codecs in ranks2.run(trained, way, INT8):
        assert all(same for _, _, same in found)
        assert 1e-4 < found[-1][1] < 0.03  # coded with 8 bits
        assert set(codecs) == {"int8"}, shown


def wide():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 512), *(nn.Linear(512, 512) for _ in range(3)))


def compiled_and_trained():
    model, plain, integration = pair(INT8, wide, small=1)  # buckets of 1 MiB: Dynamo's minimum
    both = torch.compile(model, backend="aot_eager"), torch.compile(plain, backend="aot_eager")
    for step in range(3):
        for each in both:
            each.zero_grad()
            each(batch(step)).square().mean().backward()
    norms = [
        (a - b).norm() / b.norm() for a, b in zip(*map(gradients, (model, plain)), strict=True)
    ]
    return max(norms).item(), same_on_all(gradients(model)), len(integration.plans)


@pytest.mark.every
def test_hook_works_with_a_compiled_model(ranks2):
    for away, same, plans in ranks2.run(compiled_and_trained):
        assert 0 < away < 0.05
        assert same
        assert plans > 1


def uneven_inputs():
    found = []
    for policy in ("lossless", INT8):
        model, plain, _ = pair(policy)
        inputs = [batch(step) for step in range(3 + 2 * dist.get_rank())]
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            with each.join():
                for x in inputs:
                    optimizer.zero_grad()
                    each(x).square().mean().backward()
                    optimizer.step()
        weights = [p.detach() for p in model.parameters()]
        away = max(
            (a - b).abs().max().item() for a, b in zip(weights, plain.parameters(), strict=True)
        )
        found.append((away, same_on_all(weights)))
    return found


@pytest.mark.slow
def test_uneven_inputs_in_join(ranks2):
    for (exact, alike), (near, same) in ranks2.run(uneven_inputs):
        assert exact == 0
        assert alike
        assert 0 < near < 0.01
        assert same


def join_that_divides_by_who_is_left():
    model, _, _ = pair(INT8)
    with (
        pytest.raises(PolicyError, match="leave it True"),
        model.join(divide_by_initial_world_size=False),
    ):
        plainly(model, 0)
    return True


def test_join_with_another_divisor_is_refused(ranks2):
    assert all(ranks2.run(join_that_divides_by_who_is_left))


# --- codecs ---------------------------------------------------------------------------------------


def losses(spec: str | None, steps: int) -> tuple[float, float]:
    """Return the first and the last loss of a student that learns from a teacher."""
    torch.manual_seed(3)
    teacher = Net()
    for p in teacher.parameters():
        p.data = torch.randn_like(p) * 0.2
    model = DDP(Net(), bucket_cap_mb=0.01)
    if spec is not None:
        compress_ddp(model, forced(spec), inner="eager", strict=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(batch(step)) - teacher(batch(step)).detach()).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found[0], sum(found[-5:]) / 5


FAMILIES = [
    *("int8", "rotated", "topk(density=0.1)", rarely("bf16"), rarely("exponent")),
    *(rarely(spec) for spec in ("int4", "fp8", "rotated(bits=4)", "taco", "sdp4bit", "tahquant")),
    *(rarely(spec) for spec in ("dgc(density=0.1)", "gaussiank(density=0.1)", "equarx")),
    *(rarely(spec) for spec in ("redsync(density=0.1)", "sidco(density=0.1)")),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("spec", FAMILIES)
def test_loss_after_50_steps_is_that_without(spec, ranks2):
    ((first, wanted), *_) = ranks2.run(losses, None, 50)
    for _, found in ranks2.run(losses, spec, 50):
        assert wanted < 0.7 * first
        assert abs(found - wanted) < 0.1 * (first - wanted)


# --- bytes ----------------------------------------------------------------------------------------


def counted(spec: str):
    group = counting_group()
    model = DDP(Net(), process_group=group, bucket_cap_mb=0.01)
    integration = compress_ddp(
        model, forced(spec) if spec else "lossless", inner="eager", strict=True
    )
    assert isinstance(integration.group, CountingGroup)
    assert integration.group is not group
    found = []
    for step in range(3):
        integration.group.seen.clear()
        plainly(model, step)
        found.append(list(integration.group.seen))
    return (
        found,
        integration.bytes,
        [
            tuple(site)
            for plan in integration.plans
            for site in [(s.codec, s.bytes, s.wire_bytes) for s in plan]
        ],
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["", "int8", "topk(density=0.1)"])
def test_bytes_that_are_sent_are_those_of_the_plans(spec, ranks2):
    for found, bytes, sites in ranks2.run(counted, spec):
        plain = 4 * sum(p.numel() for p in Net().parameters())
        assert [sum(n for _, _, n in step) for step in found] == [plain, *(2 * [bytes.sent])]
        assert bytes.plain == plain == sum(site[1] for site in sites)
        assert bytes.sent == sum(site[2] for site in sites)
        assert {dtype for _, dtype, _ in found[-1]} == {torch.uint8 if spec else torch.float32}
        assert (bytes.sent < plain / 2) == bool(spec)


def words_and_rules():
    model = Net()
    commpass.apply_policy(model, {"layers.0": commpass.keep()})
    policy = commpass.Policy(
        rules=[
            commpass.Rule(module="layers.2", codec="bf16", force=True),
            commpass.Rule(group="dp", codec="int8", algorithm="two_shot", force=True),
        ],
        max_error=1.0,
    )
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(model, process_group=mesh.get_group("dp"))
    integration = compress_ddp(model, policy, inner="eager", strict=True)
    for step in range(2):
        plainly(model, step)
    return sorted(
        (s.module, s.codec, s.algorithm, s.group_labels) for p in integration.plans for s in p
    )


@pytest.mark.slow
def test_rules_and_annotations_hold_for_each_parameter_of_a_bucket(ranks2):
    for found in ranks2.run(words_and_rules):
        assert [(module, codec, how) for module, codec, how, _ in found] == [
            ("", "int8", "two_shot"),
            ("layers.0", "none", "none"),
            ("layers.2", "bf16", found[2][2]),
        ]
        assert all("dp" in names and "world" in names for *_, names in found)


# --- error feedback -------------------------------------------------------------------------------


def exact_mean(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Return the mean of all ranks' gradients, in float64, without DDP."""
    total = None
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        mine = [p.grad.double() / dist.get_world_size() for p in model.parameters()]
        total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
    model.zero_grad()
    return total


def nothing_is_lost(options):
    model = DDP(Net(), bucket_cap_mb=0.01, **options)
    compress_ddp(model, TOPK, inner="eager", strict=True)
    applied, wanted = None, None
    for step in range(8):
        model.zero_grad()
        plainly(model, step)
        mine, exact = [g.double() for g in gradients(model)], exact_mean(model.module, step)
        applied = mine if applied is None else [a + b for a, b in zip(applied, mine, strict=True)]
        wanted = exact if wanted is None else [a + b for a, b in zip(wanted, exact, strict=True)]
    state = commpass.state_dict(model)
    found = []
    for (name, parameter), a, b in zip(
        model.module.named_parameters(), applied, wanted, strict=True
    ):
        (residual,) = (state[key] for key in state if key.split("/")[1] == name)
        assert residual.shape == parameter.shape
        left = residual.double()
        dist.all_reduce(left)
        found.append((((a + left - b).norm() / b.norm()).item(), (left.norm() / b.norm()).item()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, rarely({"static_graph": True})])
def test_applied_and_remaining_values_are_the_gradients(options, ranks2):
    for found in ranks2.run(nothing_is_lost, options):
        assert max(off for off, _ in found) < 1e-5
        assert max(left for _, left in found) > 0.1  # there was something to keep


class Seldom(nn.Module):
    """Two layers in float64; the use of the second is optional."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.always = nn.Linear(16, 16, dtype=torch.float64)
        self.seldom = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.always(x.double())
        return x + self.seldom(x) if seldom else x


def dropped(view):
    """``seldom`` is used by one rank, or by none: DDP then ignores the returned gradients."""
    net = Seldom()
    model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=view)
    compress_ddp(model, TOPK, inner="eager", strict=True)
    weights = list(net.seldom.parameters())
    lost = [torch.zeros_like(weight) for weight in weights]
    for step in range(6):
        model.zero_grad()
        somebody = step % 3 == 0
        model(batch(step), somebody and dist.get_rank() == 0).square().mean().backward()
        assert all((weight.grad is not None) == somebody for weight in weights)
        if somebody:
            exact = torch.autograd.grad(net(batch(step, 0), True).square().mean(), weights)
            for total, weight, mine in zip(lost, weights, exact, strict=True):
                total.add_(mine / dist.get_world_size() - weight.grad)
    state = commpass.state_dict(model)
    for total, name in zip(lost, ("seldom.weight", "seldom.bias"), strict=True):
        (left,) = (state[key].clone() for key in state if key.split("/")[1] == name)
        dist.all_reduce(left)
        total.sub_(left)
    return max(float(total.abs().max()) for total in lost)


@pytest.mark.parametrize("view", [False, rarely(True)])
def test_residual_of_an_unused_parameter_is_not_lost(view, ranks2):
    assert max(ranks2.run(dropped, view)) < 1e-12


def trained_and_saved(folder):
    commpass.reset_state()
    model = DDP(Net(), bucket_cap_mb=0.01)
    compress_ddp(model, TOPK, inner="eager", strict=True)
    for step in range(4):
        plainly(model, step)
    state = commpass.state_dict(model)
    dist.checkpoint.save({"commpass": state}, checkpoint_id=folder)
    total = [tensor.double() for _, tensor in sorted(state.items())]
    for tensor in total:
        dist.all_reduce(tensor)
    return [tensor.numpy() for tensor in total]


def resumed(folder):
    commpass.reset_state()
    owners._owners.clear()
    model = DDP(Net(), bucket_cap_mb=1)  # other buckets
    compress_ddp(model, TOPK, inner="eager", strict=True)
    state = commpass.state_dict(of=folder)
    dist.checkpoint.load({"commpass": state}, checkpoint_id=folder)
    commpass.load_state_dict(state, model)
    for p in model.parameters():  # nothing new: all that was sent is the residual
        p.register_hook(torch.zeros_like)
    sent = None
    for step in range(3):
        model.zero_grad()
        plainly(model, step)
        mine = [g.double() for g in gradients(model)]
        sent = mine if sent is None else [a + b for a, b in zip(sent, mine, strict=True)]
    left = commpass.state_dict(model)
    names = [name for name, _ in model.module.named_parameters()]
    by_name = dict(zip(names, sent, strict=True))
    total = []
    for key, tensor in sorted(left.items()):
        rest = tensor.double()
        dist.all_reduce(rest)
        total.append((rest + by_name[key.split("/")[1]]).numpy())
    return total


@pytest.mark.every
def test_saved_with_2_ranks_and_resumed_with_4_in_other_buckets(ranks2, ranks4, tmp_path):
    ((saved), *_) = ranks2.run(trained_and_saved, str(tmp_path))
    for found in ranks4.run(resumed, str(tmp_path)):
        for a, b in zip(found, saved, strict=True):
            assert abs(a - b).max() < 1e-6
    assert sum(abs(b).max() > 0 for b in saved) > len(saved) / 2  # a small one may be sent whole


# --- errors ---------------------------------------------------------------------------------------


def not_finite():
    found = []
    for policy in (INT8, TOPK, forced("rotated")):
        model = DDP(Net(), bucket_cap_mb=0.01)
        compress_ddp(model, policy, inner="eager", strict=True)
        plainly(model, 0)
        model.zero_grad()
        x = batch(1)
        if dist.get_rank() == 1:
            x[0, 0] = float("nan")
        model(x).square().mean().backward()
        found.append(bool(torch.stack([g.isfinite().all() for g in gradients(model)]).all()))
    return found


@pytest.mark.every
def test_values_not_finite_on_one_rank_are_so_on_all(ranks2):
    assert ranks2.run(not_finite) == [[False] * 3] * 2


def refused():
    made = DDP(Net())
    compress_ddp(made, "lossless")
    by_hand = DDP(Net())
    by_hand.register_comm_hook(None, lambda state, bucket: None)
    built_in = DDP(Net())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    sparse = DDP(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    with mock.patch.object(torch, "Stream"):  # a build for CUDA makes none without a GPU
        low = DDP(Net(), mixed_precision=nn.parallel.distributed._MixedPrecision(torch.bfloat16))
    sharded = nn.Sequential(fully_shard(Net()))
    models = (
        *(made, by_hand, built_in, low, sparse, DDP(Complex())),
        *(Net(), 3, nn.Sequential(DDP(Net())), sharded),
    )
    return refusals(*(lambda model=model: compress_ddp(model, "lossless") for model in models))


def test_refusals_say_what_to_do(ranks2):
    twice, by_hand, built_in, low, sparse, imaginary, *wrong = ranks2.run(refused)[0]
    plain, number, inside, sharded = wrong
    assert "commpass.parallel.compress_ddp" in twice
    assert "already has the comm hook" in twice
    assert "<lambda>" in by_hand
    assert "commpass.parallel.compress_ddp cannot be added" in by_hand
    assert "gain is torch.complex64" in imaginary
    assert "fp16" in built_in.lower()
    assert "mixed_precision=" in low
    assert "module.0 has sparse=True" not in sparse
    assert "0 has sparse=True" in sparse
    assert "DistributedDataParallel(model)" in plain
    assert "compress_fsdp" in plain
    assert "int" in number
    assert "'0' in it is one: give that one" in inside
    assert "DistributedDataParallel(model)" not in inside + sharded
    assert "fully_shard: call commpass.parallel.compress_fsdp" in sharded


def optimized_in_backward():
    """Both orders, an optimizer that torch calls fused, and parameters that DDP no longer has."""
    before, late, fused, replaced, delayed = (Net() for _ in range(5))
    _apply_optimizer_in_backward(torch.optim.SGD, before.parameters(), {"lr": 0.1})
    overlapped, assigned = DDP(fused), DDP(replaced)
    overlapped._register_fused_optim(torch.optim.SGD, 0.1)
    replaced.load_state_dict({k: v.clone() for k, v in replaced.state_dict().items()}, assign=True)
    said = refusals(
        *(
            lambda model=model: compress_ddp(model, "off")
            for model in (DDP(before), overlapped, assigned)
        )
    )
    model = DDP(late)
    compress_ddp(model, "off")
    for step in range(2):
        plainly(model, step)
    _apply_optimizer_in_backward(torch.optim.SGD, [late.seldom.weight], {"lr": 0.1})
    with mock.patch.object(logging.getLogger("commpass"), "warning") as warning:
        names = [("layers.0.weight", delayed.layers[0].weight)]
        options = {"delay_all_reduce_named_params": names}
        hooked = DDP(delayed, param_to_hook_all_reduce=delayed.layers[2].weight, **options)
        compress_ddp(hooked, "off")
    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return [*said, *refusals(lambda: plainly(model, 2)), *warned]


def test_optimizers_that_run_in_backward_and_replaced_parameters_are_refused(ranks2):
    before, fused, replaced, late, delayed = ranks2.run(optimized_in_backward)[0]
    assert "_apply_optimizer_in_backward" in before
    assert "already has the comm hook" in fused
    assert "wrap the model in DistributedDataParallel once more" in replaced
    assert "_apply_optimizer_in_backward" in late
    assert "names 1 parameters, whose gradients DDP sends itself" in delayed


def misspelt_on_one():
    """Return the error on rank 0 if the other rank's call is rejected."""
    group = dist.new_group()  # a separate group, because its ranks then have different call counts
    model = DDP(Net(), process_group=group)
    if dist.get_rank():
        return refusals(lambda: compress_ddp(model, "balancd"))[0]
    patience = mock.patch("commpass.groups.timeout_of", return_value=3.0)
    with patience, pytest.raises(Unanswered) as error:
        compress_ddp(model, "balanced")
    return str(error.value)


@pytest.mark.every
def test_rank_that_waits_for_a_refused_one_gets_an_error(ranks2):
    waited, refused = ranks2.run(misspelt_on_one)
    assert "did you mean 'balanced'" in refused
    assert "rank 1 takes no part, since its call failed: unknown policy 'balancd'" in waited
    assert "Correct this on rank 1" in waited


def copied():
    model = DDP(Net(), bucket_cap_mb=0.01)
    compress_ddp(model, TOPK, inner="eager", strict=True)
    plainly(model, 0)
    twin = copy.deepcopy(model)
    read = io.BytesIO()
    torch.save(model, read)
    read.seek(0)
    twins = twin, torch.load(read, weights_only=False)
    found = []
    for each in twins:
        integration = compress_ddp(each, INT8, inner="eager", strict=True)
        for step in range(2):
            each.zero_grad()
            plainly(each, step)
        found.append(
            (integration.bytes.sent < integration.bytes.plain, same_on_all(gradients(each)))
        )
    plainly(model, 1)
    return found


@pytest.mark.every
def test_model_with_an_integration_can_be_copied_and_saved_and_the_copy_given_an_integration(
    ranks2,
):
    assert ranks2.run(copied) == [[(True, True)] * 2] * 2


def opened_and_gone():
    found = []
    for _ in range(3):
        model = DDP(Net(), bucket_cap_mb=0.01)
        held = weakref.ref(compress_ddp(model, INT8, inner="eager", strict=True))
        for step in range(2):
            plainly(model, step)
        del model
        gc.collect()
        found.append((held(), len(dist.distributed_c10d._world.pg_map)))
    return found


@pytest.mark.every
def test_integration_that_is_gone_leaves_no_groups_behind(ranks2):
    for (first, _), *others in ranks2.run(opened_and_gone):
        assert first is None
        assert len({*others}) == 1


def of_another_shape():
    """State that was loaded before the first step is rejected at once, and the integration goes
    on."""
    first, model = (DDP(Net(), bucket_cap_mb=0.01) for _ in range(2))
    for each in (first, model):
        compress_ddp(each, TOPK, inner="eager", strict=True)
    for step in range(2):
        plainly(first, step)
    cut = {name: tensor[:1] for name, tensor in commpass.state_dict(first).items()}
    with pytest.raises(PolicyError, match=r"the state is \[1\], but here .* \[8\]"):
        commpass.load_state_dict(cut, model)
    for step in range(2):
        plainly(model, step)
    assert all(tensor.shape[0] > 1 for tensor in commpass.state_dict(model).values())


@pytest.mark.every
def test_state_of_another_shape_is_refused_before_the_first_step(ranks2):
    ranks2.run(of_another_shape)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def one_dies():
    model = DDP(Net(), bucket_cap_mb=0.01)
    compress_ddp(model, INT8, inner="eager", strict=True)
    for step in range(2):
        plainly(model, step)
    if dist.get_rank() == 1:
        os._exit(7)
    said = []
    for step in range(2):  # the next step neither hangs nor reports something else
        with pytest.raises(RuntimeError) as error:
            plainly(model, step)
        said.append(str(error.value))
    raise CommpassError(f"told alike: {said[0] == said[1]}")


@pytest.mark.slow
def test_rank_that_dies_is_an_error_on_the_others_in_time(ranks3):
    with pytest.raises(RanksFailed) as caught:
        ranks3.run(one_dies)
    assert str(caught.value).count("CommpassError: told alike: True") == 2, str(caught.value)


def one_fails():
    """Nothing is compiled if one rank has a different policy; an exchange fails in a thread of one
    rank."""
    found = []
    model = DDP(Net(), bucket_cap_mb=0.01)
    compress_ddp(model, forced("int8" if dist.get_rank() else "fp8"), inner="eager", timeout=30)
    plainly(model, 0)
    for step in range(2):
        with pytest.raises(PlanMismatch, match="fp8"):
            plainly(model, step)
    found.append(True)
    model = DDP(Net(), bucket_cap_mb=0.01)
    integration = compress_ddp(model, INT8, inner="eager")
    for step in range(2):
        plainly(model, step)
    if dist.get_rank() == 1:
        integration.worker.submit(lambda: {}["gone"], None)
    with pytest.raises(RuntimeError if dist.get_rank() == 0 else KeyError):
        plainly(model, 2)
    return [*found, (dist.barrier(), True)[1]]


@pytest.mark.slow
def test_error_on_one_rank_is_one_on_all_in_time_and_as_itself(ranks2):
    assert ranks2.run(one_fails) == [[True] * 2] * 2


# --- another group --------------------------------------------------------------------------------


def in_fewer_and_more_ranks(policy, options):
    """Rank 2 is left out, and comes back.

    Return for each step the number of ranks in the plans, the graphs in the report, and the
    distance of the gradients from plain DDP's.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    fewer, again = (dist.new_group(range(n), timeout=SHORT) for n in (size - 1, size))
    first = dist.new_group(timeout=SHORT)

    options = {"process_group": first, "bucket_cap_mb": 0.01, **options}
    model, plain = DDP(Net(), **options), DDP(Net(), **options)
    integration, found = compress_ddp(model, policy, inner="eager", strict=True), []
    for group in (first, fewer, again):
        if group is not first:
            for each in (model, plain):
                each._update_process_group(group)
        for step in range(4) if rank in dist.get_process_group_ranks(group) else ():
            for each in (model, plain):
                each.zero_grad()
                plainly(each, step)
            norms = zip(*map(gradients, (model, plain)), strict=True)
            away = max(((a - b).norm() / b.norm()).item() for a, b in norms)
            sizes = {site.group_size for plan in integration.plans for site in plan}
            codecs = {site.codec for plan in integration.plans for site in plan}
            found.append((sizes, codecs, len(integration.exchanges.backend.step_log.entries), away))
        dist.barrier()
    return found


SHORT = datetime.timedelta(seconds=60)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, rarely({"static_graph": True})])
@pytest.mark.parametrize("policy", ["off", INT8])
def test_gradients_follow_ddp_into_another_group(policy, options, ranks3):
    zero, one, two = ranks3.run(in_fewer_and_more_ranks, policy, options)
    codec = "none" if policy == "off" else "int8"
    for found in (zero, one):
        assert [sizes for sizes, *_ in found[3::4]] == [{3}, {2}, {3}]
        assert len({graphs for _, _, graphs, _ in found[3::4]}) == 1  # the earlier ones are gone
    assert [sizes for sizes, *_ in two[3::4]] == [{3}, {3}]
    for found in (zero, one, two):
        assert all(codecs <= {codec} for _, codecs, _, _ in found)
        assert all(away < (1e-9 if policy == "off" else 0.05) for *_, away in found)
        assert all(away > 1e-4 for *_, away in found[3::4]) == (policy != "off")


def after_a_failure():
    """An exchange fails on one rank, and the others go on without that rank, with their residuals.

    Return the difference between everything that they had to send and the sum of what they apply
    and what they keep.
    """
    group = dist.new_group(timeout=SHORT)
    model = DDP(Net(), process_group=group, bucket_cap_mb=0.01)
    integration = compress_ddp(model, TOPK, inner="eager", strict=True)
    for step in range(2):
        plainly(model, step)
    if dist.get_rank() == 2:
        integration.worker.submit(lambda: {}["gone"], None)
    with pytest.raises(KeyError if dist.get_rank() == 2 else RuntimeError):
        plainly(model, 2)
    fewer = dist.new_group([0, 1], timeout=SHORT)
    if dist.get_rank() == 2:
        return None
    model._update_process_group(fewer)

    def left() -> torch.Tensor:
        """Return the sum of the ranks' residuals, in the order of parameters."""
        state = {name.split("/")[1]: t for name, t in commpass.state_dict(model).items()}
        assert len(state) == len(commpass.state_dict(model))  # none of another group
        names = [name for name, _ in model.module.named_parameters()]
        flat = torch.cat([state[name].flatten() for name in names])
        dist.all_reduce(flat, group=fewer)
        return flat

    before = left()
    for step in (3, 4):  # the first is sent uncompressed
        model.zero_grad()
        plainly(model, step)
    applied, after = torch.cat([g.flatten() for g in gradients(model)]), left()
    model.zero_grad()
    for rank in (0, 1):
        model.module(batch(4, rank)).square().mean().backward()
    wanted = torch.cat([g.flatten() for g in gradients(model)]) / 2 + before
    return ((applied + after - wanted).norm() / wanted.norm()).item(), before.norm().item()


@pytest.mark.slow
def test_remaining_ranks_continue_in_new_group_after_failure(ranks3):
    first, second, _ = ranks3.run(after_a_failure)
    for away, kept in (first, second):
        assert away < 1e-5
        assert kept > 0.01


# --- several integrations -------------------------------------------------------------------------


def others_beside_it():
    """Two models with an integration each, one of them on a subset of the ranks.

    The user's own exchanges run in between, in a different order than the integration's.
    """
    size = dist.get_world_size()
    if dist.get_rank() == 0:  # ranks have different numbers of groups
        _more = dist.new_group([0], use_local_synchronization=True)
    group, alone = (
        dist.new_group(),
        dist.new_group([dist.get_rank()], use_local_synchronization=True),
    )
    model, plain, _ = pair("lossless")
    other = DDP(Net(), process_group=group, bucket_cap_mb=0.01)
    integration = compress_ddp(other, INT8, inner="eager", strict=True)
    single = DDP(Net(), process_group=alone)
    lonely = compress_ddp(single, INT8, inner="eager", strict=True)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.new_ones(1)))
    for step in range(3):
        for each in (model, plain, other, single):
            each.zero_grad()
        (model(batch(step)).square().mean() + other(batch(step)).square().mean()).backward()
        plainly(plain, step)
        plainly(single, step)
    equal = all(map(torch.equal, gradients(model), gradients(plain)))
    own = Net()
    own(batch(2)).square().mean().backward()
    mine = all(map(torch.equal, gradients(single), gradients(own)))
    reasons = {site.reason for plan in lonely.plans for site in plan}
    return equal, same_on_all(gradients(other)), len(integration.plans) > 1, mine, reasons, size


@pytest.mark.slow
def test_two_integrations_a_group_of_one_and_other_exchanges_in_between(ranks2):
    for equal, same, several, mine, reasons, _ in ranks2.run(others_beside_it):
        assert equal
        assert same
        assert several
        assert mine
        assert reasons == set()  # nothing is sent, and no site is left


def reported_titles() -> list[str]:
    model, _, integration = pair(INT8)
    for step in range(3):
        plainly(model, step)
    return [site.title for plan in integration.plans for site in plan]


def test_report_names_buckets_by_their_parameters(ranks2):
    for titles in ranks2.run(reported_titles):
        assert titles
        names = {name for name, _ in Net().named_parameters()}
        for title in titles:
            first, _, rest = title.partition(" to ")
            assert first in names
            assert not rest or rest.partition(", ")[0] in names


class Block(nn.Module):
    def __init__(self, width: int = 100) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 30 * self.down(nn.functional.gelu(self.up(self.norm(x))))


def beside_tensor_parallelism(codec: str) -> None:
    """Parameters that tensor parallelism does not divide stay equal on its ranks, bit for bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], styles)
    _pre_dp_module_transform(model)
    ddp = DDP(model, process_group=mesh["dp"].get_group())
    integration = compress_ddp(ddp, forced(codec), profile="ethernet-0.1g")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    g = torch.Generator().manual_seed(1 + mesh.get_local_rank("dp"))
    for _ in range(4):
        x = torch.randn(32, 100, generator=g)
        (ddp(x) - x.sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sites = [site for plan in integration.plans for site in plan.sites]
    assert [site.codec for site in sites] == [codec, codec]
    for block in model:
        for parameter in block.norm.parameters():
            both = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(both, parameter.detach(), group=mesh.get_group("tp"))
            assert torch.equal(*both)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["rotated", "rotated(bits=4)", "equarx"])
def test_replicas_of_tensor_parallelism_stay_equal_with_ddp(ranks4, codec):
    ranks4.run(beside_tensor_parallelism, codec)
