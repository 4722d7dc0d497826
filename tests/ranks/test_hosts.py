"""The number of ranks per host, if the profile does not give it: all ranks agree, and SDP4Bit uses
4 bits between hosts."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commpass import Policy, Rule
from commpass.costmodel import Link, Profile
from commpass.distributed import hosts
from commpass.distributed.plan_store import current_store, open_store
from commpass.parallel import compress_ddp

pytestmark = pytest.mark.xdist_group("ranks")
SLOW = Profile("slow", Link(1.0, 1e-6))
WIDTH = 64
HIERARCHICAL = "hierarchical(between=sdp4bit, node=2)"


def on_hosts(numbers: tuple[int, ...]) -> mock._patch_dict:
    """Make this rank appear to run on the host with its number, as torchrun would."""
    return mock.patch.dict(os.environ, GROUP_RANK=str(numbers[dist.get_rank()]))


def averaged(
    numbers: tuple[int, ...], policy: str | Policy, profile: Profile
) -> tuple[str, float, list[float]]:
    """Return the algorithm of the gradients of a DDP model on such hosts, their relative error in
    float64, and some of them."""
    with on_hosts(numbers):
        open_store()
    dist.barrier()
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = DDP(layer)
    integration = compress_ddp(model, policy, profile=profile, strict=True, inner="eager")
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator)
        model.zero_grad()
        model(x).square().sum().backward()
    own = 2 * (x.double() @ layer.weight.detach().double().T).T @ x.double()
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    exact = sum(others) / len(others)
    error = float((layer.weight.grad.double() - exact).norm() / exact.norm())
    (site,) = integration.plans[-1].sites
    return site.algorithm, error, layer.weight.grad.flatten()[::97].tolist()


def check(found, algorithm: str, most: float) -> None:
    """Check that all ranks have the same algorithm and the same bits, near the exact ones."""
    assert [each[0] for each in found] == [algorithm] * len(found)
    assert all(each[2] == found[0][2] for each in found)
    assert all(0 < each[1] < most for each in found)


@pytest.mark.slow
def test_sdp4bit_has_4_bits_between_hosts_that_no_profile_names(ranks4):
    check(ranks4.run(averaged, (0, 0, 1, 1), "sdp4bit", SLOW), HIERARCHICAL, 0.2)


@pytest.mark.slow
def test_sdp4bit_stays_in_8_bits_where_ranks_have_no_hosts_of_one_size(ranks4):
    for numbers in ((0, 0, 0, 1), (0, 1, 0, 1)):
        check(ranks4.run(averaged, numbers, "sdp4bit", SLOW), "two_shot", 0.02)


@pytest.mark.slow
def test_hosts_of_a_profile_count_before_those_that_are_found(ranks4):
    said = Profile("said", SLOW.link, ranks_per_host=4)
    check(ranks4.run(averaged, (0, 0, 1, 1), "sdp4bit", said), "two_shot", 0.02)


def asked(numbers: tuple[int, ...], policy: Policy) -> int | None:
    """Return what a rank knows of hosts after a step under a policy."""
    averaged(numbers, policy, SLOW)
    return current_store().ranks_per_host


@pytest.mark.slow
def test_hosts_are_not_awaited_if_no_rule_needs_them(ranks4):
    policy = Policy(rules=[Rule(codec="int8", algorithm="hierarchical(node=2)")], max_error=0.1)
    assert ranks4.run(asked, (0, 0, 1, 1), policy) == [None] * 4
    policy = Policy(rules=[Rule(codec="int8", algorithm="hierarchical")], max_error=0.1)
    assert ranks4.run(asked, (0, 0, 1, 1), policy) == [2] * 4


def some_never_say() -> tuple[int, int]:
    """Rank 3 does not use commpass; rank 2 waits longer than the others, and finds their
    entries."""
    patience = 1.0 if dist.get_rank() == 2 else 0.05
    found = 0
    if dist.get_rank() != 3:
        ranks = range(3)
        here = current_store()
        with mock.patch.object(type(here), "host_ids", _places_of(ranks)):
            found = hosts._agree(here, patience)
    dist.barrier()
    return found, dist.get_rank()


def _places_of(ranks):
    def places(self, _):
        return dict.fromkeys(ranks, "here")

    return places


@pytest.mark.slow
def test_ranks_agree_on_no_hosts_where_one_does_not_answer(ranks4):
    assert [found for found, _ in ranks4.run(some_never_say)] == [0] * 4


@pytest.mark.parametrize(
    ("places", "node"),
    [
        (["a", "a", "b", "b"], 2),
        (["a", "a", "a", "a"], 4),
        (["a", "b", "c"], 1),
        (["a", "a", "b"], 0),
        (["a", "b", "a", "b"], 0),
        (["a", "b", "b", "a"], 0),
        ([], 0),
    ],
)
def test_ranks_on_each_host(places, node):
    assert hosts.on_each_host(places) == node
