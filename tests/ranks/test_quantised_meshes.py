"""Codes are gathered over meshes, uneven shards and symbolic sizes on real ranks: the numbers of
the plain graph, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from processes import Ranks
from test_quantised_ranks import NAME, Float8Linear, sequence_parallel
from tiers import rarely
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
SLOW = commpass.ethernet(0.001)


def both(
    function, calls, inner="inductor", **how
) -> tuple[list[list[torch.Tensor]], commpass.Plan]:
    """Return the results of all calls, plain and simplified, and the plan of the latter."""
    results = []
    for policy in ("off", "lossless"):
        torch._dynamo.reset()
        backend = commpass.backend(policy, inner=inner, profile=SLOW, strict=True)
        compiled = torch.compile(function, backend=backend, fullgraph=True, **how)
        with torch.no_grad():
            results.append([each for call in calls for each in compiled(*call)])
    return results, commpass.plans()[-1]


def same(results) -> bool:
    plain, simple = ([each.view(torch.uint8) for each in some] for some in results)
    return all(torch.equal(a, b) for a, b in zip(plain, simple, strict=True))


def values(*shape: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).pow(3).to(dtype)


def on_a_mesh(rows: bool, dtype: torch.dtype, inner: str) -> list[tuple[str, int]]:
    """Weights are sharded over one dimension of a mesh, and tokens over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    x = values(24, 96, seed=dist.get_rank(), dtype=dtype)
    weight = values(64, 96, seed=7 + dist.get_rank(tp), dtype=dtype).chunk(2)[dist.get_rank(dp)]

    def layer(x, weight):
        tokens = funcol.all_gather_tensor(x, 0, tp)
        return [Float8Linear.apply(tokens, funcol.all_gather_tensor(weight, 0, dp), rows)]

    results, plan = both(layer, [(x, weight.clone())], inner)
    assert same(results)
    assert [step.rule for step in plan.simplified] == [NAME] * 2
    assert len({site.group for site in plan}) == 2
    return [(site.dtype, site.bytes) for site in plan if site.bytes > 1000]


@pytest.mark.every
@pytest.mark.parametrize(
    ("rows", "dtype", "inner"),
    [
        (False, torch.bfloat16, "aot_eager"),
        rarely(False, torch.bfloat16, "inductor"),
        rarely(True, torch.float32, "inductor"),
    ],
)
def test_codes_are_gathered_over_both_dimensions_of_a_mesh(ranks4, rows, dtype, inner):
    for sent in ranks4.run(on_a_mesh, rows, dtype, inner):
        assert sorted(sent) == [("uint8", 24 * 96), ("uint8", 32 * 96)]


def of_shards(entries: int, inner: str) -> tuple[list[str], list[str]]:
    """A DTensor's shards are gathered; the shorter ones are padded."""
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(values(entries, 96, seed=3), mesh, [Shard(0)])
    weight = values(64, 96, seed=7)

    def layer(x, weight):
        tokens = x.redistribute(mesh, [Replicate()]).to_local()
        return [Float8Linear.apply(tokens, weight, False)]

    results, plan = both(layer, [(x, weight)], inner)
    assert same(results)
    assert results[0][0].shape[0] == entries
    return [step.rule for step in plan.simplified], [site.dtype for site in plan]


@pytest.mark.every
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_equal_shards_of_three_ranks_are_gathered_as_codes_and_padded_ones_as_values(ranks3, inner):
    assert ranks3.run(of_shards, 48, inner) == [([NAME], ["uint8", "uint8"])] * 3
    for entries in (31, 2):  # in the second case a rank has none
        assert ranks3.run(of_shards, entries, inner) == [([], ["bfloat16"])] * 3


def of_any_size(dim) -> tuple[list[str], list[bool]]:
    gain, weight = values(96, seed=1), values(64, 96, seed=2)
    calls = [
        (values(rows, 96, seed=dist.get_rank() + rows), gain, weight, dim) for rows in (24, 32, 17)
    ]
    results, plan = both(sequence_parallel, calls, dynamic=True)
    assert same(results)
    return [step.rule for step in plan.simplified], [site.dynamic for site in plan]


@pytest.mark.every
@pytest.mark.parametrize("dim", [None, -1])
def test_sizes_that_torch_takes_for_symbols_are_gathered_as_codes(ranks2, dim):
    for steps, dynamic in ranks2.run(of_any_size, dim):
        assert steps == [NAME]
        assert dynamic[-1]


def after_a_restart(policies: tuple[str, ...]) -> list[tuple[list[float], list[str]]]:
    """Return the result of a float8 layer under each policy in turn, and the dtypes sent."""
    gain, weight = values(96, seed=1), values(64, 96, seed=2)
    x, found = values(24, 96, seed=dist.get_rank()), []
    for policy in policies:
        torch._dynamo.reset()
        backend = commpass.backend(policy, profile=SLOW, strict=True)
        with torch.no_grad():
            result, _ = torch.compile(sequence_parallel, backend=backend)(x, gain, weight, None)
        found.append((result.tolist(), [site.dtype for site in commpass.plans()[-1]]))
    return found


@pytest.mark.every
def test_restart_with_another_policy_and_a_warm_cache_sends_what_the_policy_says(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    runs = []
    for policies in (("off",), ("lossless", "off"), ("lossless",)):
        ranks = Ranks(2, cache)
        try:
            runs += ranks.run(after_a_restart, policies)[0]
        finally:
            ranks.stop()
    results, sent = zip(*runs, strict=True)
    assert all(result == results[0] for result in results)
    values_sent, codes_sent = ["bfloat16"], ["uint8", "uint8"]
    assert list(sent) == [values_sent, codes_sent, values_sent, codes_sent]
