"""Report, sampling and the environment on real ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiers import rarely
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import commpass
from commpass.codecs import codec
from commpass.distributed import agreement, environment, plan_store
from commpass.errors import PlanMismatch
from commpass.parallel import compress_ddp, compress_fsdp, ssfusion
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional


def forced(spec: str = "int8", error_sample_rate: float = 0.0, **more) -> Policy:
    return Policy(
        name=spec, rules=[Rule(codec=spec, force=True, **more)], error_sample_rate=error_sample_rate
    )


def summed(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x @ x, "sum", dist.group.WORLD.group_name))


@contextlib.contextmanager
def started_with(*settings: dict[str, str]):
    """Make this rank appear to be started with these variables."""
    mine = settings[dist.get_rank()]
    with mock.patch.dict(os.environ, mine):
        environment._log.cache_clear()
        plan_store.open_store()
        yield


@contextlib.contextmanager
def said():
    """Collect what this rank logs: (level, text)."""
    found: list[tuple[str, str]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((record.levelname, record.getMessage()))

    log, keeper = logging.getLogger("commpass"), Keeper()
    before = log.level
    log.addHandler(keeper)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(keeper)
        log.setLevel(before)


# --- what is measured -----------------------------------------------------------------------------


def x_of(rank: int, step: int) -> torch.Tensor:
    seed = 10 * step + rank
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) * (1 + rank)


def sampled() -> tuple[list[bool], list[float], float]:
    results, errors, plan_error = [], [], 0.0
    for error_sample_rate in (0.0, 0.5):
        torch._dynamo.reset()
        backend = commpass.backend(
            forced("int4", error_sample_rate, algorithm="two_shot"), strict=True
        )
        function = torch.compile(summed, backend=backend)
        results.append([function(x_of(dist.get_rank(), step)) for step in range(4)])
    (entry,) = backend.step_log.entries
    (site,) = entry.samples.sites
    errors, plan_error = [site.total, float(site.count)], site.site.error
    return [torch.equal(*pair) for pair in zip(*results, strict=True)], errors, plan_error


@pytest.mark.slow
def test_each_rank_samples_its_own_values_and_no_result_changes(ranks2):
    coder = codec("int4")
    for rank, (same, (total, count), plan_error) in enumerate(ranks2.run(sampled)):
        assert same == [True] * 4
        wanted = 0.0
        for step in (0, 2):
            x = x_of(rank, step) @ x_of(rank, step)
            lost = coder.decode(coder.encode(x)).double() - x.double()
            factor = plan_error / coder.relative_error()
            wanted += float(lost.norm() / x.double().norm()) * factor
        assert count == 2
        assert total == pytest.approx(wanted, rel=1e-3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def through(
    integration: str, error_sample_rate: float
) -> tuple[list[torch.Tensor], str, float, int]:
    """Return gradients of some steps, the report on the integration afterwards, and the worst error
    and the number of its samples."""
    model = Net()
    if integration == "ddp":
        model = DDP(model)
        opened = compress_ddp(model, forced("int8", error_sample_rate))
    else:
        fully_shard(model)
        opened = compress_fsdp(model, forced("int8", error_sample_rate))
    found = []
    for step in range(3):
        model.zero_grad()
        model(x_of(dist.get_rank(), step)).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        found += [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]
    entries = opened.exchanges.backend.step_log.entries
    sites = [each for entry in entries for each in entry.samples.sites]
    worst = max(each.worst for each in sites)
    if worst:  # the metrics also cover the graphs of other tests
        assert commpass.metrics()["commpass/worst_error"] >= worst
    return found, str(commpass.report()), worst, sum(each.count for each in sites)


def integrations(integration: str):
    plain, _, _, none = through(integration, 0.0)
    watched, text, worst, many = through(integration, 1.0)
    return all(map(torch.equal, plain, watched)), none, many, text, worst


@pytest.mark.every
@pytest.mark.parametrize("integration", ["ddp", "fsdp"])
def test_exchanges_of_integrations_are_sampled_too(ranks2, integration):
    for same, none, many, text, worst in ranks2.run(integrations, integration):
        assert same
        assert none == 0
        assert many >= 2
        assert "int8/" in text
        assert 0 < worst < 0.1


# --- the environment ------------------------------------------------------------------------------


def differing(settings: tuple[dict[str, str], ...], inner: str) -> str:
    """The time-outs are longer than the test: none of these may wait."""
    patience = mock.patch.object(agreement, "SETTINGS_S", 3600.0)
    with started_with(*settings), patience:
        torch._dynamo.reset()
        function = torch.compile(
            summed, backend=commpass.backend(forced(), inner=inner, timeout=3600)
        )
        with pytest.raises(PlanMismatch) as error:
            function(torch.ones(64, 64))
        with pytest.raises(PlanMismatch):  # and it remains an error
            function(torch.ones(64, 64))
    return str(error.value)


OFF, ON = {"COMMPASS": "off"}, {"COMMPASS": "on"}
LOSSLESS = {"COMMPASS_POLICY": "lossless"}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("one", "other"),
    [(OFF, {}), ({}, OFF), rarely(ON, OFF), (OFF, LOSSLESS), rarely({}, LOSSLESS)],
    ids=str,
)
def test_another_environment_on_one_rank_is_an_error_on_both_that_names_both(ranks2, one, other):
    for text in ranks2.run(differing, (one, other), "eager"):
        for rank, settings in enumerate((one, other)):
            (word,) = [f"{k}={v}" for k, v in settings.items() if v != "on"] or ["neither COMMPASS"]
            assert f"rank {rank}: {word}" in text


def late(settings: tuple[dict[str, str], ...], who: int) -> str:
    with started_with(*settings):
        torch._dynamo.reset()
        if dist.get_rank() == who:
            time.sleep(3)
        function = torch.compile(summed, backend=commpass.backend(forced(), inner="eager"))
        with pytest.raises(PlanMismatch) as error:
            function(torch.ones(64, 64))
    return str(error.value)


@pytest.mark.every
@pytest.mark.parametrize("who", [0, rarely(1)])
def test_order_in_which_ranks_come_does_not_matter(ranks2, who):
    for text in ranks2.run(late, ({}, OFF), who):
        assert "rank 1: COMMPASS=off" in text


def one_never_comes() -> tuple[bool, list[tuple[str, str]]]:
    with started_with(OFF, {}), said() as words:
        torch._dynamo.reset()
        if dist.get_rank() == 0:
            with mock.patch.object(plan_store.PlanStore, "read_settings", return_value=False):
                backend = commpass.backend(forced(), inner="eager", timeout=1)
                got = torch.compile(lambda x: x @ x, backend=backend)(torch.ones(4, 4))
                return torch.equal(got, torch.full((4, 4), 4.0)), words
    return True, words


@pytest.mark.slow
def test_rank_that_says_nothing_is_waited_for_only_for_a_while(ranks2):
    (same, words), _ = ranks2.run(one_never_comes)
    assert same
    assert any("were started with COMMPASS=off" in text for _, text in words)


def switched_off() -> tuple[list[bool], list[tuple[str, str]], int]:
    with started_with(OFF, OFF), said() as words:
        torch._dynamo.reset()
        seen = len(commpass.plans())
        x = x_of(dist.get_rank(), 0)
        same = []
        for _ in range(2):  # it is logged once for all backends
            function = torch.compile(summed, backend=commpass.backend(forced("int4")))
            same.append(torch.equal(function(x), summed(x)))
            torch._dynamo.reset()
        model, alone = DDP(Net()), DDP(Net())
        compress_ddp(model, forced("int4"))
        sparse = Net()
        ssfusion(sparse, density=0.01, profile=commpass.ethernet(1))
        for each in (model, alone, sparse):
            for step in range(3):
                each.zero_grad()
                each(x_of(dist.get_rank(), step)).square().mean().backward()
        same += map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, alone)))
        same += [
            torch.allclose(a.grad, b.grad, rtol=1e-5)
            for a, b in zip(sparse.parameters(), alone.parameters(), strict=True)
        ]
        compressed = sum(len(plan.compressed) for plan in commpass.plans()[seen:])
    return same, words, compressed


@pytest.mark.slow
def test_switched_off_alike_all_is_sent_as_it_is(ranks2):
    for rank, (same, words, compressed) in enumerate(ranks2.run(switched_off)):
        assert all(same)
        assert compressed == 0
        once = [level for level, text in words if text.startswith("COMMPASS=off")]
        assert once == (["INFO"] if rank == 0 else [])


def replaced() -> tuple[list[str], list[tuple[str, str]]]:
    asked = {"COMMPASS_POLICY": "balanced"}
    with started_with(asked, asked), said() as words:
        torch._dynamo.reset()
        backend = commpass.backend(forced("int4"), inner="eager")
        torch.compile(summed, backend=backend)(torch.ones(64, 64))
        commpass.backend("balanced")
        return [backend.policy.name, commpass.plans()[-1].policy], words


def test_policy_of_the_environment_takes_the_place_of_the_programs_and_says_so(ranks2):
    for rank, (names, words) in enumerate(ranks2.run(replaced)):
        assert names == ["balanced"] * 2
        warned = [text for level, text in words if level == "WARNING" and "takes the place" in text]
        assert len(warned) == (rank == 0)
        assert all("COMMPASS_POLICY=balanced" in text and "'int4'" in text for text in warned)
