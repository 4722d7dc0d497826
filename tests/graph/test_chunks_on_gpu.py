"""Chunks of graphs of a GPU without an explicit count, planned on the fake process group."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from graphs import ops
from tiers import rarely

from commpass.costmodel import Link, Profile, profile_named
from commpass.costmodel.cards import GPU
from commpass.costmodel.profile import link_named
from commpass.passes import GraphInput, manager
from commpass.passes.fx.marks import MARK
from commpass.policy import Policy
from commpass.policy.rules import Rule

RANKS = 4
PROFILES = {
    "nvlink": profile_named("nvlink"),
    "infiniband-edr": profile_named("infiniband-edr"),
    "ethernet": Profile("ethernet", link_named("ethernet-10g"), kernels=GPU),
}
BEFORE = manager.PASSES[: [step.name for step in manager.PASSES].index("fuse")]


def summed(x):
    return [ops.wait_tensor(ops.all_reduce(torch.relu(x), "sum", "0"))]


def planned(mib: int, profile: Profile, algorithm: str = "two_shot", chunks: int | None = None):
    """Return the graph of an all_reduce of some MiB of bfloat16 on a GPU, and its planned site."""
    policy = Policy(rules=[Rule(codec="int8", algorithm=algorithm, force=True, chunks=chunks)])
    x = torch.empty(mib << 9, 1024, dtype=torch.bfloat16, device="meta")
    with fake_cuda.a_card():
        gm, _ = fake_cuda.trace(summed, x)
        road = GraphInput(
            gm=gm,
            direction="forward",
            policy=policy,
            profile=profile,
            stateless=None,
            kernels=True,
        )
        outcome = manager.run(road, "0", BEFORE, strict=True)
    if outcome.error is not None:
        raise outcome.error
    (site,) = outcome.plan
    return gm, site


def exchanges(gm) -> int:
    marks = [node.meta[MARK] for node in gm.graph.nodes if MARK in node.meta]
    return sum(mark.role == "exchange" for mark in marks)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("nvlink", 1),
        ("nvlink", 64),
        ("ethernet", 64),
        rarely("infiniband-edr", 16),
        rarely("nvlink", 1024),
        rarely("ethernet", 1),
    ],
)
def test_count_is_that_of_the_least_predicted_time(name, mib, fake_group):
    """The count is the first that is hardly slower than the best one, among all counts given
    explicitly.

    Chunks must gain more than the time of encoding the whole (5 us, and its rate per value), which
    a matmul may do.
    """
    fake_group(RANKS)
    profile = PROFILES[name]
    gm, site = planned(mib, profile)
    assert site.device == "cuda"
    counts = [1, *(c for c in (2, 4, 8) if 2 * c <= mib), *(c for c in (16, 32) if 16 * c <= mib)]
    times = {many: planned(mib, profile, chunks=many)[1].predicted_us for many in counts}
    least = times[1] - (5.0 + (mib << 19) * profile.kernels.rates["int8"].encode_ns / 1e3)
    times = {many: us for many, us in times.items() if many == 1 or us < least}
    best = min(times.values())
    assert site.chunks == min(many for many, us in times.items() if us <= 1.01 * best), times
    assert site.predicted_us == times[site.chunks]
    assert exchanges(gm) == 2 * site.chunks
    if mib == 1:
        assert site.chunks == 1


def test_slow_start_makes_fewer_chunks(fake_group):
    fake_group(RANKS)
    links = Link(15.0, 10.0), Link(2000.0, 10.0)
    soon, late = (planned(64, Profile("test", link, kernels=GPU))[1].chunks for link in links)
    assert soon > late == 1


def test_chunks_of_64_mib_are_as_many_as_the_tensor_has(fake_group):
    """TACO, section 3: 64 MB."""
    fake_group(RANKS)
    for mib, chunks in ((256, 4), (32, 1)):
        gm, site = planned(mib, PROFILES["nvlink"], "two_shot(chunk_bytes=67108864)")
        assert (site.algorithm, site.chunks) == ("two_shot", chunks)
        assert exchanges(gm) == 2 * chunks
