"""Codes are gathered between real ranks under Inductor: the numbers of the plain graph, to the
bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
wait = ops.wait_tensor
E4M3 = torch.float8_e4m3fn
NAME = "quantised before gather"


def quantised(x, dim):
    """Codes and inverse scales of float8 training: tensorwise if ``dim`` is None, else rowwise."""
    top = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (448.0 / top.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3), scale.reciprocal()


def sequence_parallel(x, gain, weight, dim):
    """A norm on a rank's tokens, their gather, and a float8 linear layer."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    tokens = (wide * gain.float()).bfloat16()
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    gathered = wait(ops.all_gather_into_tensor(tokens, size, group))
    codes, scale = quantised(gathered, dim)
    other, other_scale = quantised(weight, None)
    columns = torch.ones(1, weight.shape[0]) * other_scale
    scales = (scale, columns) if dim is not None else (scale, other_scale)
    result = torch._scaled_mm(codes, other.t(), *scales, out_dtype=torch.bfloat16)
    return result, codes


def compare(dim) -> list[str]:
    """Run the layer on ordinary and on hostile tokens, plain and simplified."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(24, 96, generator=generator).pow(5).bfloat16()
    hostile = x.clone()
    hostile[0] = 0.0
    hostile[1] = -0.0
    hostile[2, 5] = torch.nan if rank == 0 else 1.0
    hostile[3, 6] = torch.inf
    same = torch.Generator().manual_seed(7)
    gain = torch.randn(96, generator=same).bfloat16()
    weight = torch.randn(64, 96, generator=same).bfloat16()
    results = []
    for policy in ("off", "lossless"):
        torch._dynamo.reset()
        backend = commpass.backend(policy, profile=commpass.ethernet(0.001), strict=True)
        layer = torch.compile(sequence_parallel, backend=backend, fullgraph=True)
        with torch.no_grad():
            results.append([*layer(x, gain, weight, dim), *layer(hostile, gain, weight, dim)])
    for plain, simple in zip(*results, strict=True):
        assert (plain.dtype, plain.shape) == (simple.dtype, simple.shape)
        assert torch.equal(plain.isnan(), simple.isnan())  # torch specifies no sign of a NaN
        assert torch.equal(plain.float().nan_to_num(), simple.float().nan_to_num())
    plan = commpass.plans()[-1]
    sent = sorted((site.dtype, site.bytes) for site in plan.sites)
    assert sent[-1] == ("uint8", 24 * 96)
    assert sum(size for _, size in sent) <= 0.55 * x.nbytes
    return [step.rule for step in plan.simplified]


@pytest.mark.parametrize("dim", [None, -1])
def test_float8_tokens_are_gathered_with_the_same_bits_under_inductor(ranks2, dim):
    first, second = ranks2.run(compare, dim)
    assert first == second == [NAME]
