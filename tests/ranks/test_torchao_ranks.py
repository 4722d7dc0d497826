"""torchao's tensor parallelism and FSDP2 between real ranks, under commpass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import commpass
from commpass.parallel import compress_fsdp

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
SLOW = commpass.ethernet(0.001)
AS_BYTES = "as bytes"
NO_TORCHAO = "torchao is an optional requirement of the tests"


def gathered_as_bytes(dtype: torch.dtype) -> list[str]:
    """Gather, exchange and broadcast all 256 patterns of an 8-bit float. Return the rules."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    mine = torch.arange(256, dtype=torch.uint8).roll(rank).view(16, 16)

    def exchanges(x):
        x = x.view(dtype)
        calls = (
            ops.all_gather_into_tensor(x, size, group),
            ops.all_gather_into_tensor(x.t(), size, group),
            ops.broadcast(x, 1, group),
        )
        moved = funcol.all_to_all_single(x, [8, 8], [8, 8], group)
        return [ops.wait_tensor(each) for each in calls] + [moved]

    backend = commpass.backend("lossless", inner="eager", profile=SLOW, strict=True)
    with torch.no_grad():
        found = torch.compile(exchanges, backend=backend, fullgraph=True)(mine)
    both = [torch.arange(256, dtype=torch.uint8).roll(each).view(16, 16) for each in range(size)]
    halves = [each.chunk(2)[rank] for each in both]
    turned = torch.cat([each.t() for each in both])
    for got, expected in zip(
        found, (torch.cat(both), turned, both[1], torch.cat(halves)), strict=True
    ):
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), expected)
    plan = commpass.plans()[-1]
    assert {site.dtype for site in plan} == {"uint8"}
    assert all(f"({AS_BYTES})" in site.reason for site in plan)
    assert [step.saved_bytes for step in plan.simplified] == [0, 0, 0, 0]
    return [step.rule for step in plan.simplified]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, rarely(torch.float8_e5m2), rarely(torch.float8_e8m0fnu)]
)
def test_floats_of_8_bits_are_gathered_as_bytes_on_gloo(ranks2, dtype):
    for rules in ranks2.run(gathered_as_bytes, dtype):
        assert rules == [AS_BYTES] * 4


def float8_styles(policy: str | None) -> tuple[list[float], list[str], int]:
    """Train two layers with torchao's styles of tensor parallelism. Return the losses, the rules
    and the bytes of the forward graph's gathers.

    Without a policy, each rank has all tokens, since gloo cannot gather float8.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    )
    convert_to_float8_training(model)
    layout = Shard(1) if policy else Replicate()
    styles = {
        "0": PrepareFloat8ModuleInput(input_layouts=layout, desired_input_layouts=Replicate()),
        "0.0": Float8ColwiseParallel(),
        "0.2": Float8RowwiseParallel(output_layouts=layout),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, styles)
    run = model
    if policy:
        backend = commpass.backend(policy, inner="eager", profile=SLOW, strict=True)
        run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), list[float]()
    before = len(commpass.plans())
    for step in range(2):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step))
        if policy:
            x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        y = run(x)
        total = y.sum() / 512
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        summed = y.detach().double().square().sum()
        if policy:
            dist.all_reduce(summed)
        losses.append(summed.item())
    plans = commpass.plans()[before:]
    rules = [step.rule for plan in plans[:1] for step in plan.simplified]
    sent = sum(site.bytes for plan in plans[:1] for site in plan if site.kind == "all_gather")
    return losses, rules, sent


@pytest.mark.slow
def test_float8_styles_of_torchao_run_on_gloo(ranks2):
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    for (losses, rules, sent), (whole, _, _) in zip(
        ranks2.run(float8_styles, "lossless"), ranks2.run(float8_styles, None), strict=True
    ):
        assert rules == [AS_BYTES]
        assert sent == 2 * 4 * 32
        assert losses == pytest.approx(whole, rel=1e-6)


def gathered_codes(alone: bool) -> list[tuple[str, str]]:
    """Gather float8 layers of torchao beside a norm, or alone. Return (dtype, reason)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if alone:
        fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = compress_fsdp(model, "balanced", strict=True)
    model(torch.ones(16, 32)).sum().backward()
    sites = [site for plan in handle.plans for site in plan if site.kind == "all_gather"]
    return [(site.dtype, site.reason) for site in sites]


@pytest.mark.slow
def test_codes_beside_other_parameters_are_named(ranks2):
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    ((dtype, reason),) = ranks2.run(gathered_codes, False)[0]
    assert dtype == "uint8"
    assert "codes of WeightWithDynamicFloat8CastTensor" in reason
    assert "call fully_shard on their modules as well" in reason
    found = dict(ranks2.run(gathered_codes, True)[0])
    assert found["float8_e4m3fn"] == "its parameters are gathered as float8 codes"
    assert "codes of" not in found["float32"]
