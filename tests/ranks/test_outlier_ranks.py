"""Codec ``outlier`` on real ranks: in graphs, by direct calls, and as the policy of a
calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from test_calibrate import batches, divided
from tiers import crossed, rarely
from torch import Tensor

import commpass
from commpass.calibration import Calibration
from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Running, calibrate

pytestmark = pytest.mark.xdist_group("ranks")
TOKENS, WIDTH = 32, 128


def activations(rank: int, seed: int = 0) -> Tensor:
    """Return activations with two channels of 30 times the range of the others; each rank has a
    different magnitude."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    size = torch.ones(WIDTH)
    size[torch.tensor([5, 70])] = 30.0
    return torch.randn(TOKENS, WIDTH, generator=generator) * size * (1 + rank)


def spec_of(ranks: int, *, shared: bool, seed: int = 1) -> str:
    seen = [Running.start(activations(rank, seed)) for rank in range(ranks)]
    return codec("outlier", statistics=calibrate(seen, shared=shared).to_text()).spec


def compiled_sum(x: Tensor, spec: str, how: str, inner: str) -> tuple[Tensor, list[str]]:
    """Return the sum with ``spec``, beside another site, which uses int8."""
    larger = commpass.Rule(codec="int8", force=True, min_bytes=2 * x.nbytes)
    rule = commpass.Rule(codec=spec, algorithm=how, force=True)
    policy = commpass.Policy(rules=[larger, rule])

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one = funcol.all_reduce(x * 1, "sum", dist.group.WORLD)
        other = funcol.all_reduce(y * 1, "sum", dist.group.WORLD)
        return funcol.wait_tensor(one), funcol.wait_tensor(other)

    before = len(commpass.plans())
    step = torch.compile(both, backend=commpass.backend(policy, inner=inner, strict=True))
    got, _ = step(x, torch.cat([x, x]))
    (plan,) = commpass.plans()[before:]
    assert not plan.fallback
    return got, sorted(site.codec for site in plan.sites)


def sums(shared: bool, hows: list[str], inner: str) -> list[tuple[Tensor, Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    spec, x, found = spec_of(ranks, shared=shared), activations(rank), []
    for how in hows:
        torch._dynamo.reset()
        got, codecs = compiled_sum(x, spec, how, inner)
        assert codecs == sorted([spec, "int8"])
        found.append((got, commpass.all_reduce(x, codec=spec, algorithm=how)))
        if not shared:
            own = codec(spec).at(rank)
            same = commpass.all_reduce(x, codec=own, algorithm=how)
            assert torch.equal(same, found[-1][1])
    return found


HOWS = ["one_shot", "two_shot", "ring", "semi_ring"]


def check(every: list[list[tuple[Tensor, Tensor]]], most: list[float]) -> None:
    ranks = len(every)
    exact = sum(activations(rank).double() for rank in range(ranks))
    for number, limit in enumerate(most):
        first, by_hand = every[0][number]
        assert all(torch.equal(found[number][0], first) for found in every)
        assert float((first.double() - exact).norm() / exact.norm()) < limit
        assert torch.allclose(first, by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_sums_of_two_ranks_in_graphs_are_those_by_hand(ranks2, inner):
    check(ranks2.run(sums, False, HOWS[:2], inner), [0.04, 0.06])


@pytest.mark.every
@pytest.mark.parametrize(
    ("how", "shared", "inner"),
    crossed(HOWS, [True, False], ["inductor", "eager", "aot_eager"], one_in=2),
)
def test_sums_of_four_ranks_in_graphs_are_those_by_hand(ranks4, how, shared, inner):
    most = dict(zip(HOWS, [0.04, 0.06, 0.09, 0.09], strict=True))[how]
    check(ranks4.run(sums, shared, [how], inner), [most])


def two_tables() -> list[Tensor]:
    """Graphs that differ only in the values of their constants, one after the other and again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for seed in (1, 2, 1):
        torch._dynamo.reset()
        spec = spec_of(ranks, shared=True, seed=seed)
        found.append(compiled_sum(activations(rank), spec, "one_shot", "inductor")[0])
    return found


@pytest.mark.every
def test_constants_are_not_mixed_up_by_inductors_cache(ranks2):
    for first, second, again in ranks2.run(two_tables):
        assert torch.equal(first, again)
        assert not torch.equal(first, second)


def as_the_paper_has_it(
    folder: str, share: float | str, **how: object
) -> tuple[str, float, list[tuple[str, str, str]]]:
    """Return the error of the output, and the plan, with ``lowbit_tp`` from a calibration."""
    torch._dynamo.reset()
    model, path = divided(), Path(folder) / f"{dist.get_rank()}.toml"
    found = commpass.calibrate(model, batches(), codecs=("rotated",), train=False)
    policy = commpass.Policy.lowbit_tp(found, share, **how)
    path.write_text(policy.to_toml())
    policy = commpass.Policy.from_toml(path)
    policy = replace(policy, rules=[replace(rule, force=True) for rule in policy.rules])
    before = len(commpass.plans())
    backend = commpass.backend(policy, inner="eager", strict=True)
    with torch.no_grad():
        plain = model(batches()[0][0])
        got = torch.compile(model, backend=backend)(batches()[0][0])
    error = float((got - plain).norm() / plain.norm())
    plans = commpass.plans()[before:]
    sites = [(s.codec, s.algorithm, s.reason) for plan in plans for s in plan.sites]
    return found.to_json(), error, sites


def places_of(text: str) -> list:
    return msgspec.json.decode(text, type=Calibration).places


def test_policy_of_the_paper_is_made_of_a_calibration(ranks2, tmp_path):
    for text, error, sites in ranks2.run(as_the_paper_has_it, str(tmp_path), 1 / 64):
        ((spec, how, why),) = sites
        assert how == "one_shot", why
        assert 0 < error < 0.1
        used, (place,) = codec(spec), places_of(text)
        assert len(used.channels.kept) == 2
        assert len(used.channels.ranges) == 2
        assert used.channels.sums
        assert place.statistics
