"""max_error on real values, on real ranks: a site that exceeds it on one rank is uncompressed on
all."""

from __future__ import annotations

import copy
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import commpass_messages
from tiers import rarely, runs_again
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import commpass
from commpass.backend.agree import _excluded_in_forward
from commpass.distributed import budget
from commpass.errors import Unanswered
from commpass.parallel import compress_ddp
from commpass.plan import UNCOMPRESSED
from commpass.policy import Policy

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
SLOW = commpass.ethernet(0.001)
INT8 = Policy(codecs=("int8",), max_error=0.02)


def reduced(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))


def two_sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return reduced(x @ x), reduced(y * 1.0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_counts(rank: int) -> torch.Tensor:
    y = normal(64, 256, seed=rank)
    y[:, ::256] = 1e6
    return y


def codecs_of(backend) -> list[str]:
    return [site.codec for entry in backend.step_log.entries for site in entry.plan.sites]


def _one_rank_over(inner: str) -> tuple[list[list[str]], list[str], list[torch.Tensor], list[str]]:
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner=inner, profile=SLOW, timeout=60)
    compiled = torch.compile(two_sums, backend=backend)
    x, y = normal(64, 64, seed=rank), with_counts(rank) if rank == 1 else normal(64, 256)
    codecs, results = [], []
    with commpass_messages(logging.WARNING) as messages:
        for _ in range(4):
            results.append(compiled(x, y)[1])
            codecs.append(codecs_of(backend))
    reasons = [site.reason for site in backend.step_log.entries[0].plan.sites]
    return codecs, reasons, results, [m for m in messages if "stays uncompressed from now on" in m]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
def test_site_that_is_over_its_budget_on_one_rank_is_left_alone_on_all(ranks2, inner):
    found = ranks2.run(_one_rank_over, inner)
    wanted = with_counts(1) + normal(64, 256)
    for codecs, reasons, results, _ in found:
        assert codecs == [["int8", "int8"], *[["int8", "none"]] * 3]
        assert "(rank 1)" in reasons[1]
        assert all(torch.equal(result, wanted) for result in results[1:])
    assert found[0][1] == found[1][1]
    assert [len(messages) for *_, messages in found] == [1, 0]  # one warning, from the first rank


def _row_of_infinity(bad: float, rank_with: int) -> tuple[list[list[str]], list[torch.Tensor]]:
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=60)
    compiled = torch.compile(two_sums, backend=backend)
    y = with_counts(rank)
    if rank_with in (rank, 2):
        y[3] = bad
    codecs, results = [], []
    for _ in range(3):
        results.append(compiled(normal(64, 64, seed=rank), y)[1])
        codecs.append(codecs_of(backend))
    return codecs, results


@pytest.mark.few(2)
@pytest.mark.parametrize("rank_with", [2, 0, 1], ids=["both", "rank 0", "rank 1"])
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
def test_mask_in_every_call_does_not_keep_the_other_rows_from_the_check(ranks2, bad, rank_with):
    wanted = with_counts(0) + with_counts(1)
    wanted[3] = bad
    for codecs, results in ranks2.run(_row_of_infinity, bad, rank_with):
        assert codecs == [["int8", "int8"], *[["int8", "none"]] * 2]
        assert all(torch.allclose(y, wanted, rtol=0, atol=0, equal_nan=True) for y in results[1:])


def _two_sizes() -> tuple[list[list[str]], torch.Tensor]:
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=60)
    compiled = torch.compile(two_sums, backend=backend, dynamic=False)
    big, x, codecs = with_counts(rank), normal(64, 64, seed=rank), []
    for call in range(4):
        compiled(x, big * bool(call))
        compiled(x, big[:32] if rank == 1 else normal(32, 256))
        codecs.append(codecs_of(backend))
    return codecs, compiled(x, big)[1]


@pytest.mark.every
def test_site_found_over_its_budget_at_one_size_is_left_alone_at_the_others(ranks2):
    found = ranks2.run(_two_sizes)
    for codecs, result in found:
        assert codecs[0] == ["int8"] * 4
        assert codecs[1:] == [["int8", "none"] * 2] * 3
        assert torch.equal(result, with_counts(0) + with_counts(1))


def _ddp() -> tuple[list[list[str]], torch.Tensor]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    integration = compress_ddp(model, INT8, profile=SLOW)
    rank, codecs = dist.get_rank(), []
    x, shown = normal(32, 64, seed=rank), []
    if rank == 0:
        x[:, 0] = 1e7  # only its weights' gradients are significant in their blocks
    for _ in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
        codecs.append([site.codec for plan in integration.exchanges.plans for site in plan.sites])
        shown.append([site.codec for plan in integration.plans for site in plan.sites])
        assert (integration.bytes.sent < integration.bytes.plain) == ("int8" in shown[-1])
    assert shown == codecs
    return codecs, torch.cat([each.grad.flatten() for each in model.parameters()])


def test_buckets_of_ddp_are_checked(ranks2):
    (codecs, grads), (others, other_grads) = ranks2.run(_ddp)
    assert codecs == others
    assert codecs[0] == []  # DDP makes its final buckets after the first step
    assert codecs[1] == ["int8"]
    assert codecs[-1] == ["none"]
    assert torch.equal(grads, other_grads)


def _one_compiles_again() -> list[str]:
    """Rank 1 recompiles for another size, alone, while both are still checking."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=30)

    def function(x, y):
        return reduced(x @ x), y * 2

    compiled = torch.compile(function, backend=backend, dynamic=False)
    x = normal(64, 64, seed=rank)
    for step in range(5):
        rows = 3 if rank == 1 and step in (1, 3) else 2
        compiled(x, normal(rows, 4))
    return codecs_of(backend)


@pytest.mark.slow
def test_rank_that_compiles_again_alone_keeps_nobody_waiting(ranks2):
    found = ranks2.run(_one_compiles_again, timeout=60)
    assert {codec for codecs in found for codec in codecs} == {"int8"}
    assert [len(codecs) for codecs in found] == [1, 2]


def _one_compiles_again_late(zeros: int, over_from: int) -> list[str]:
    """Rank 1 recompiles for another size, alone.

    It does so after ``zeros`` calls with nothing to measure, or before a call whose values exceed
    their budget.
    """
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=15)

    def function(x, y):
        return reduced(x * 1.0), y * 2

    compiled = torch.compile(function, backend=backend, dynamic=False)
    for step in range(8):
        x = with_counts(rank) if step >= over_from else normal(64, 256, seed=rank)
        rows = 3 if rank == 1 and step >= max(zeros, 1) else 2
        compiled(x if step >= zeros else torch.zeros_like(x), normal(rows, 4))
    return codecs_of(backend)


@pytest.mark.slow
@pytest.mark.parametrize(("zeros", "over_from"), [(2, 8), (0, 1)])
def test_rank_that_compiles_again_alone_ends_the_check_of_all(ranks2, zeros, over_from):
    found = ranks2.run(_one_compiles_again_late, zeros, over_from, timeout=60)
    assert found == [["int8"], ["int8", "int8"]]  # one rank alone would change nothing


def _one_compiles_again_over_its_budget() -> tuple[list[str], list[str], torch.Tensor]:
    """Rank 1 recompiles for another size, alone, when both have checked the first one."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=15)

    def function(x, y):
        return reduced(x * 1.0), y * 2

    compiled = torch.compile(function, backend=backend, dynamic=False)
    with commpass_messages(logging.WARNING) as messages:
        for step in range(7):
            late = rank == 1 and step >= 3
            x = with_counts(rank) if late else normal(64, 256, seed=rank)
            result, _ = compiled(x, normal(3 if late else 2, 4))
    return codecs_of(backend), messages, result


def test_rank_that_compiles_again_alone_warns_of_a_site_over_its_budget(ranks2):
    (codecs, messages, result), (others, warned, same) = ranks2.run(
        _one_compiles_again_over_its_budget, timeout=60
    )
    assert (codecs, messages) == (["int8"], [])
    assert others == ["int8", "int8"]
    (message,) = warned
    assert "stays compressed" in message
    assert "of its non-zero values are lost" in message
    assert torch.equal(result, same)  # both still send what they agreed on


def _silent() -> tuple[str, float, list[str]]:
    torch._dynamo.reset()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=120)
    backend.patience = lambda plan: 1.5  # for the compiled code, not the compilation
    compiled = torch.compile(two_sums, backend=backend)
    x, y = normal(64, 64), normal(64, 256)
    compiled(x, y)
    dist.barrier()
    start, error, messages = time.monotonic(), "", []
    if dist.get_rank() == 0:
        with commpass_messages(logging.WARNING) as messages:
            try:
                compiled(x, y)
            except Unanswered as raised:
                error = str(raised)
    took = time.monotonic() - start
    dist.barrier()
    return error, took, messages


@pytest.mark.slow
def test_rank_that_publishes_nothing_ends_the_wait_of_others(ranks2, monkeypatch):
    found = ranks2.run(_without_publishing)
    (error, took, (warning,)), _ = found
    assert "rank 1 did not publish the real errors of call 1" in error
    assert took > 1.5
    assert "of at most 1.5 s, for rank 1 to publish the real errors of call 1" in warning


def _without_publishing() -> tuple[str, float, list[str]]:
    publish, patience = budget.Check._publish, budget.PATIENCE_S
    budget.PATIENCE_S = 0.5
    if dist.get_rank() == 1:
        budget.Check._publish = lambda *_: None
    try:
        return _silent()
    finally:
        budget.Check._publish, budget.PATIENCE_S = publish, patience


class Weighted(nn.Module):
    """Two parameters whose gradients are the inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(64, 256)) for _ in range(2))

    def forward(self, one, other):
        return (self.first * one).sum() + (self.second * other).sum()


def _equal_buckets() -> list[list[str]]:
    """Two buckets of one plan: the values of the second exceed its budget."""
    model, rank, codecs = DDP(Weighted(), bucket_cap_mb=0.01), dist.get_rank(), []
    integration = compress_ddp(model, INT8, profile=SLOW)
    for _ in range(5):
        model.zero_grad()
        model(with_counts(rank), normal(64, 256, seed=rank)).backward()
        codecs.append([site.codec for plan in integration.exchanges.plans for site in plan.sites])
    return codecs


def test_equal_plans_of_two_graphs_are_both_checked(ranks2):
    found = ranks2.run(_equal_buckets)
    assert found[0] == found[1]
    assert found[0][1] == ["int8", "int8"]
    assert found[0][-1] == ["int8", "none"]


class Scaled(nn.Module):
    """Has a weight, so that a copy is a different module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y):
        return reduced(y * self.scale.detach())


def _copied_within_the_check() -> tuple[list[list[str]], list[bool]]:
    torch._dynamo.reset()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=60)
    compiled, y = torch.compile(Scaled(), backend=backend), with_counts(dist.get_rank())
    compiled(y)
    other = copy.deepcopy(compiled)
    assert other.scale is not compiled.scale
    codecs, exact = [codecs_of(backend)], []
    for _ in range(3):
        results = other(y), compiled(y)
        exact.append(all(torch.equal(x, with_counts(0) + with_counts(1)) for x in results))
    return [*codecs, codecs_of(backend)], exact


@pytest.mark.slow
def test_compiled_module_can_be_copied_while_it_is_checked(ranks2):
    for codecs, exact in ranks2.run(_copied_within_the_check):
        assert codecs[0] == ["int8"]
        assert set(codecs[1]) == {"none"}
        assert exact[-1]


def _late_for_the_second_plan() -> tuple[list[str], list[str], bool]:
    """Rank 1 is absent when the graph is recompiled, until rank 0 has given up."""
    torch._dynamo.reset()
    rank, said = dist.get_rank(), []
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=120)
    compiled = torch.compile(two_sums, backend=backend)
    x, y = normal(64, 64, seed=rank), with_counts(rank) if rank else normal(64, 256)
    for call in range(4):
        dist.barrier()
        backend.timeout = 0.5 if call == 1 and rank == 0 else 120
        if rank and call == 1:
            dist.barrier()
        try:
            result = compiled(x, y)[1]
            said.append("done")
        except Unanswered:
            said.append("unanswered")
        if rank == 0 and call == 1:
            dist.barrier()
    return said, codecs_of(backend), torch.equal(result, with_counts(1) + normal(64, 256))


@pytest.mark.slow
def test_ranks_that_missed_one_another_when_compiling_again_do_so_with_the_next_call(ranks2):
    wanted = ["done", "unanswered", "done", "done"], ["int8", "none"], True
    assert ranks2.run(_late_for_the_second_plan) == [wanted] * 2


class Sum(torch.autograd.Function):
    """An all_reduce whose gradient is that of one rank's part."""

    @staticmethod
    def forward(ctx, x):
        return reduced(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0


class Recomputed(nn.Module):
    """A block with few large channels, which int8 sends at the cost of all others."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(normal(256, 256, seed=3))
        channels = torch.full((256,), 1e-3)
        channels[::64] = 1e3
        self.register_buffer("channels", channels)

    def block(self, x):
        return torch.tanh(Sum.apply(x @ self.weight * self.channels)) + x

    def forward(self, x):
        if self.how == "cond":
            return torch.cond(x.sum() > -1e9, self.block, lambda x: x * 2, (x,))
        return checkpoint(self.block, x, use_reentrant=self.how == "reentrant")


def _recomputed(how: str) -> tuple[list[list[str]], list[float], list[str]]:
    """Return the codecs after each step, the errors of the gradients, and the warnings."""
    torch._dynamo.reset()
    model, exact = Recomputed(how), Recomputed("reentrant").double()
    backend = commpass.backend(INT8, inner="eager", profile=SLOW, timeout=60)
    compiled, codecs, errors = torch.compile(model, backend=backend), [], []
    with commpass_messages(logging.WARNING) as messages:
        for step in range(3):
            x = normal(64, 256, seed=step).requires_grad_()
            for each, given in ((compiled, x), (exact.block, x.detach().double())):
                each(given).square().mean().backward()
            assert model.weight.grad is not None
            assert exact.weight.grad is not None
            difference = model.weight.grad.double() - exact.weight.grad
            errors.append(float(difference.norm() / exact.weight.grad.norm()))
            model.weight.grad = exact.weight.grad = None
            codecs.append(codecs_of(backend))
    return codecs, errors, [message for message in messages if "stays" in message]


@runs_again
@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "cond"])
def test_backward_recomputes_what_forward_sends_by_now(ranks2, how):
    for codecs, errors, warnings in ranks2.run(_recomputed, how):
        assert codecs == [["int8", "int8"], ["none", "none"], ["none", "none"]]
        assert errors[0] > 0.01
        assert max(errors[1:]) < 1e-4
        assert len(warnings) <= 1  # of the first rank alone


def test_site_of_a_branch_is_left_alone_if_any_that_it_may_be_is():
    """Backward has its branches in another order: its second may be the first of forward."""

    def site(name: str, codec: str, reason: str = "") -> SimpleNamespace:
        return SimpleNamespace(name=name, codec=codec, reason=reason)

    why = UNCOMPRESSED + "over its budget"
    sites = [
        site("true_graph_0.all_reduce", "none", why),
        site("true_graph_1.all_reduce", "int8"),
        site("false_graph_0.all_reduce", "none", "too small"),
        site("all_reduce_1", "none", why),
    ]
    job: Any = SimpleNamespace(calls=SimpleNamespace(forward=SimpleNamespace(sites=sites)))
    both = [f"true_graph_{number}.all_reduce" for number in range(2)]
    names = [*both, "false_graph_0.all_reduce", "all_reduce", "all_reduce_1"]
    found = _excluded_in_forward(job, names)
    assert found == dict.fromkeys([*both, "all_reduce_1"], why)
