"""Row-wise operators after sums run on a part of the rows of each of two real ranks, under
Inductor.

Sums of two ranks have one order, so float32 numbers are those of the plain graph. Inductor rounds
to bfloat16 where its kernels end, which changes the codes of a few values.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from functional_ops import ar
from rank_helpers import gather_objects
from row_scales import scales_of_rows
from tiers import rarely

import commpass
from commpass.costmodel import Link, Profile

pytestmark = pytest.mark.xdist_group("ranks")
E4M3 = torch.float8_e4m3fn
SLOW = Profile("slow", Link(1.0, 1e-4))
ROWS, WIDTH = 32, 64


def float8(x):
    scale = 448.0 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3), scale.reciprocal()


def norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * weight


def model(x, r, w, up, down):
    """A float8 block, divided between the ranks, with a residual stream."""
    h = ar(x) + r
    codes, scale = float8(norm(h, w))
    hidden = torch._scaled_mm(codes, *up(scale), out_dtype=x.dtype)
    codes, scale = float8(torch.nn.functional.silu(hidden))
    h = h + ar(torch._scaled_mm(codes, *down(scale), out_dtype=x.dtype))
    codes, scale = float8(norm(h, w))
    return codes, scale, torch._scaled_mm(codes, *up(scale), out_dtype=x.dtype)


def compare(dtype: torch.dtype) -> list[str]:
    """Run the model plain and simplified. Return the applied rules."""
    with scales_of_rows():
        return _compare(dtype)


def _compare(dtype: torch.dtype) -> list[str]:
    own, same = (torch.Generator().manual_seed(seed) for seed in (dist.get_rank(), 7))
    x = torch.randn(ROWS, WIDTH, generator=own).pow(3).to(dtype)
    x[3, 5] = torch.nan if dist.get_rank() == 1 else 1.0
    r = torch.randn(ROWS, WIDTH, generator=same).to(dtype)
    w = torch.rand(WIDTH, generator=same).to(dtype)
    up, down = (torch.randn(WIDTH, WIDTH, generator=own).to(E4M3).t() for _ in range(2))
    ones = torch.ones(1, WIDTH)

    def layer(x, r, w, up, down):
        return model(x, r, w, lambda scale: (up, scale, ones), lambda scale: (down, scale, ones))

    results, policies = [], ("off", commpass.Policy(sequence_parallel=True))
    for policy in policies:
        torch._dynamo.reset()
        backend = commpass.backend(policy, profile=SLOW, strict=True)
        with torch.no_grad():
            results.append(torch.compile(layer, backend=backend, fullgraph=True)(x, r, w, up, down))
    for plain, simple in zip(*results, strict=True):
        assert (plain.dtype, plain.shape) == (simple.dtype, simple.shape)
        assert torch.equal(plain.isnan(), simple.isnan())
        a, b = (each.float().nan_to_num() for each in (plain, simple))
        if dtype == torch.float32:
            assert torch.equal(a, b)
        else:
            assert (a - b).norm() <= 0.02 * a.norm()
    codes = results[1][0].view(torch.uint8).tolist()
    assert all(each == codes for each in gather_objects(codes))
    plan = commpass.plans()[-1]
    kinds = [(site.kind, site.dtype) for site in plan.sites]
    assert kinds.count(("reduce_scatter", str(dtype).removeprefix("torch."))) == 2
    assert kinds.count(("all_gather", "uint8")) >= 2
    assert not any(kind == "all_reduce" for kind, _ in kinds)
    return [step.rule for step in plan.simplified]


@pytest.mark.parametrize("dtype", [torch.float32, rarely(torch.bfloat16)], ids=str)
def test_rows_of_sums_are_computed_by_one_rank_under_inductor(ranks2, dtype):
    first, second = ranks2.run(compare, dtype)
    assert first == second == ["sequence parallel"]
