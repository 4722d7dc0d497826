"""FSDP2's float32 sums of bfloat16 gradients are sent as 16 bits, coded or not, and give exactly
those sums.

Gradients that hold more than 16 bits are sent as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from test_fsdp_ranks import Net, adam, batches, loss_of, opened, plain_steps, same, sharded, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from commpass import Policy, Rule
from commpass.costmodel import Link, Profile
from commpass.parallel.fsdp.exact_cast import cast_if_exact

pytestmark = pytest.mark.xdist_group("ranks")
SLOW = Profile("slow", Link(1.0, 1e-6))
FAST = Profile("fast", Link(0.0, 1e9))
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CODEC = "exponent(planes=3)"
CODED = Policy(rules=[Rule(kind="reduce_scatter", codec=CODEC)])
PLAIN = Policy()
"""Nothing is coded; simplification still applies, as with preset lossless."""


class Layer(nn.Module):
    """One unit of FSDP2, for slow traces. A rank's part of it has more than a line of 128 values on
    4 ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 128)

    def forward(self, x):
        return self.layer(x)


def model_on(group, policy: Policy) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    if policy is PLAIN:
        return sharded(Net(), mesh=mesh, mp_policy=MIXED)
    return fully_shard(Layer(), mesh=mesh, mp_policy=MIXED)


def watch_sums(integration) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Record the input and output of each reduce_scatter."""
    seen = []
    for unit in integration.units:
        comm = unit.group._reduce_scatter_comm

        def watched(output_tensor, input_tensor, comm=comm, **more):
            before = input_tensor.clone()
            done = comm(output_tensor, input_tensor, **more)
            seen.append((before, output_tensor.clone()))
            return done

        watched.allocate, watched.integration = comm.allocate, comm.integration
        unit.group._reduce_scatter_comm = watched
    return seen


def check_sums(seen, scale: float) -> None:
    """Check that each is the float32 sum in rank order, bit for bit, and near the float64 sum."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for given, got in seen:
        others = [torch.empty_like(given) for _ in range(ranks)]
        dist.all_gather(others, given)
        parts = [other.chunk(ranks)[rank] for other in others]
        total = parts[0] * scale
        for part in parts[1:]:
            total = total + part * scale
        assert torch.equal(got, total)
        exact = sum(part.double() for part in parts) * scale
        room = sum(part.double().abs() for part in parts) * scale * ranks * 2.0**-23
        assert ((got.double() - exact).abs() <= room + 1e-45).all()


def backward(model, steps: int = 1) -> None:
    """Compute gradients of some batches; all but the last are accumulated without being sent."""
    for number, (x, y) in enumerate(batches(steps)):
        model.set_requires_gradient_sync(number == steps - 1)
        loss_of(model, x, y).backward()


def bytes_of(group, kind: str, *dtypes: torch.dtype) -> int:
    return sum(size for name, dtype, size in group.seen if name == kind and dtype in dtypes)


def sent_in_16_bits(policy: Policy, factor: float | None = None) -> None:
    group = counting_group()
    policy = PLAIN if policy == PLAIN else policy
    model = model_on(group, policy)
    if factor is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / factor)
    integration = opened(model, policy, profile=SLOW)
    seen = watch_sums(integration)
    group.seen.clear()
    backward(model)
    values = sum(given.numel() for given, _ in seen)
    assert len(seen) == len(integration.units)
    check_sums(seen, 1 / group.size() if factor is None else factor)
    assert "reduce_scatter" not in {kind for kind, _, _ in group.seen}
    assert not bytes_of(group, "all_to_all", torch.float32)
    plain = bytes_of(group, "all_to_all", torch.bfloat16)
    coded = bytes_of(group, "all_to_all", torch.uint8)
    if policy is PLAIN:
        assert (plain, coded) == (2 * values, 0)
    else:  # of 16 bits per value the codec leaves at most 13
        assert plain == 0 < coded < values * 13 / 8
    assert bytes_of(group, "all_reduce", torch.int32) == 4 * len(seen)
    sites = [site for plan in integration.plans for site in plan if site.direction == "backward"]
    codec = "none" if policy is PLAIN else CODEC
    assert {(s.kind, s.dtype, s.codec) for s in sites} == {("all_to_all", "bfloat16", codec)}
    assert integration.bytes["reduce_scatter"].plain == 4 * values
    if policy is PLAIN:
        assert integration.bytes["reduce_scatter"].sent == 2 * values + 4 * len(seen)


@pytest.mark.slow
def test_bfloat16_gradients_are_summed_in_float32_from_16_bits(ranks2, ranks4):
    ranks2.run(sent_in_16_bits, PLAIN)
    ranks4.run(sent_in_16_bits, PLAIN)


@pytest.mark.slow
def test_gradients_with_a_factor_are_scaled_behind_the_exchange(ranks2):
    ranks2.run(sent_in_16_bits, PLAIN, 0.3)


@pytest.mark.every
def test_bfloat16_gradients_are_summed_in_float32_from_coded_16_bits(ranks2, ranks4):
    ranks2.run(sent_in_16_bits, CODED)
    ranks4.run(sent_in_16_bits, CODED)


def accumulated(policy: Policy) -> None:
    """The opposite case: a sum of two backward passes in float32 is not a bfloat16 value."""
    group = counting_group()
    policy = PLAIN if policy == PLAIN else policy
    model = model_on(group, policy)
    integration = opened(model, policy, profile=SLOW)
    seen = watch_sums(integration)
    group.seen.clear()
    backward(model, steps=2)
    assert len(seen) == len(integration.units) == integration.bytes["reduce_scatter"].calls
    assert any(bool((given != given.bfloat16()).any()) for given, _ in seen)
    check_sums(seen, 1 / group.size())
    values = sum(given.numel() for given, _ in seen)
    assert not bytes_of(group, "all_to_all", torch.bfloat16)
    assert bytes_of(group, "all_reduce", torch.int32) == 4 * len(seen)
    wide = [site for plan in integration.plans for site in plan if site.kind == "reduce_scatter"]
    assert {site.dtype for site in wide} == {"float32"}
    if policy is PLAIN:  # torch sends it through the backend, bypassing the counting group
        assert not bytes_of(group, "all_to_all", torch.uint8)
        assert integration.bytes["reduce_scatter"].sent == 4 * values + 4 * len(seen)
    assert (
        integration.bytes["reduce_scatter"].sent > 2 * values
    )  # more bits than narrow values have


@pytest.mark.slow
def test_accumulated_float32_gradients_are_sent_in_float32(ranks2):
    ranks2.run(accumulated, PLAIN)


@pytest.mark.every
def test_accumulated_float32_gradients_are_coded_in_float32(ranks2, ranks4):
    ranks2.run(accumulated, CODED)
    ranks4.run(accumulated, CODED)


def left_in_float32(policy: Policy, profile: Profile) -> list[str]:
    model = sharded(Net(), mp_policy=MIXED)
    integration = opened(model, policy, profile=profile)
    backward(model)
    sites = [site for plan in integration.plans for site in plan if site.direction == "backward"]
    return sorted({f"{site.kind} {site.dtype} {site.codec}" for site in sites})


KEPT = {
    "lossy": (Policy(codecs=("int8",), max_error=0.1), SLOW, "int8"),
    "order": (Policy(reassociate=False), SLOW, "none"),
    "fast": (PLAIN, FAST, "none"),
    "off": (Policy(off=True), SLOW, "none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_gradients_stay_float32_where_that_is_no_gain_or_not_allowed(ranks2, name):
    policy, profile, codec = KEPT[name]
    for found in ranks2.run(left_in_float32, policy, profile):
        assert found == [f"reduce_scatter float32 {codec}"]


def trained() -> None:
    """On two ranks a sum has one order: weights are those of plain FSDP2."""
    weights = []
    for on in (False, True):
        model = sharded(Net(), mp_policy=MIXED)
        integration = opened(model, PLAIN, profile=SLOW) if on else None
        plain_steps(model, adam(model), 3)
        weights.append(whole(model))
    assert same(*weights)
    kinds = {
        site.kind for plan in integration.plans for site in plan if site.direction == "backward"
    }
    assert kinds == {"all_to_all"}


@pytest.mark.slow
def test_two_ranks_train_bit_for_bit_as_without(ranks2):
    ranks2.run(trained)


VALUES = {
    "exact": lambda: torch.tensor([1.5, -0.0, 0.0, 1e-40, float("inf")]).bfloat16().float(),
    "one more bit": lambda: torch.tensor([1.0, 1.0 + 2.0**-8]),
    "subnormal": lambda: torch.tensor([2.0**-149]),
    "largest": lambda: torch.tensor([torch.finfo(torch.float32).max]),
    "nan": lambda: torch.tensor([float("nan")]),
    "empty": lambda: torch.empty(0),
}


def narrow_values() -> dict[str, tuple[bool, bool]]:
    """Return for each kind of values whether they are narrow on all ranks, also if only rank 1 has
    them."""
    found, group = {}, dist.group.WORLD
    for name, make in VALUES.items():
        everywhere = cast_if_exact(make(), torch.bfloat16, group)
        alone = make() if dist.get_rank() == 1 else torch.ones(3)
        only_there = cast_if_exact(alone, torch.bfloat16, group)
        found[name] = everywhere is not None, only_there is not None
        if everywhere is not None:
            back = everywhere.float()
            assert torch.equal(back.view(torch.int32), make().view(torch.int32))
    return found


def test_narrow_values_are_found_bit_for_bit_and_by_all_ranks_alike(ranks2):
    wanted = {name: (name in ("exact", "empty"),) * 2 for name in VALUES}
    assert ranks2.run(narrow_values) == [wanted] * 2


def steps_with_both() -> None:
    """A step with accumulation after one without: each is sent according to its values."""
    model = sharded(Net(), mp_policy=MIXED)
    integration = opened(model, PLAIN, profile=SLOW)
    seen, sent = watch_sums(integration), []
    runs: list[Callable[[], None]] = [lambda: backward(model), lambda: backward(model, 2)]
    for run in (*runs, *runs):
        integration.clear()
        run()
        sent.append(integration.bytes["reduce_scatter"].sent)
        model.zero_grad()
    check_sums(seen, 1 / dist.get_world_size())
    assert sent[:2] == sent[2:]
    assert sent[0] < sent[1]


@pytest.mark.slow
def test_each_step_is_sent_as_its_values_are(ranks2):
    ranks2.run(steps_with_both)
