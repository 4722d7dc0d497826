"""A call fails on one rank: the others fail soon, and say why."""

from __future__ import annotations

import dataclasses
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import ops
from rank_helpers import forget_process

import commpass
from commpass.distributed import refusal
from commpass.distributed.plan_store import open_store
from commpass.errors import PolicyError, Unanswered

pytestmark = pytest.mark.xdist_group("ranks")


def summed(x: torch.Tensor) -> torch.Tensor:
    return ops.wait_tensor(ops.all_reduce(x, "sum", "0"))


def compiled(profile: object = None) -> torch.Tensor:
    torch._dynamo.reset()
    backend = commpass.backend("balanced", inner="eager", profile=profile)
    return torch.compile(summed, backend=backend)(torch.ones(1 << 12))


def with_one_wrong(wrong: int, variable: str, measured: bool) -> tuple[str, float, float]:
    """On one rank a variable is wrong at first. Return the error of this rank, the seconds until
    it, and a value of the sum once the variable is right."""
    forget_process()
    open_store()
    profile = dataclasses.replace(commpass.ethernet(10), source="measured") if measured else None
    dist.barrier()
    is_wrong = dist.get_rank() == wrong
    start, error = time.monotonic(), ""
    with mock.patch.object(refusal, "GRACE_S", 0.3):
        with mock.patch.dict(os.environ, {variable: "banana"} if is_wrong else {}):
            try:
                compiled(profile)
            except (PolicyError, Unanswered) as raised:
                error = f"{type(raised).__name__}: {raised}"
        waited = time.monotonic() - start
        dist.barrier()
        commpass.backend("balanced")  # withdraws the refusal
        dist.barrier()
        return error, waited, float(compiled(profile)[0])


@pytest.mark.parametrize(
    ("wrong", "variable", "measured"),
    [
        (0, "COMMPASS_CORES", False),
        pytest.param(1, "COMMPASS_POLICY", True, marks=pytest.mark.slow),
        pytest.param(1, "COMMPASS_PROFILE", False, marks=pytest.mark.slow),
        pytest.param(0, "COMMPASS", True, marks=pytest.mark.slow),
    ],
)
def test_wrong_variable_on_one_rank_is_an_error_on_all(wrong, variable, measured, ranks2):
    found = ranks2.run(with_one_wrong, wrong, variable, measured)
    error, _, _ = found[wrong]
    kind, _, text = error.partition(": ")
    assert kind in ("PolicyError", "ProfileError")
    assert text.startswith(f"{variable}=banana: ")
    other, _, _ = found[1 - wrong]
    expected = f"Unanswered: rank {wrong} takes no part, since its call failed: "
    assert other.startswith(expected + text.removesuffix("."))
    assert [value for _, _, value in found] == [2.0, 2.0]


def unknown_policy() -> str:
    """Ask for a backend of an unknown policy, and return the error."""
    forget_process()
    open_store()
    dist.barrier()
    with pytest.raises(PolicyError) as raised:
        commpass.backend("balance")
    return str(raised.value)


def with_another_backend() -> tuple[str, float]:
    """All ranks ask for an unknown policy, and use a known one then."""
    error = unknown_policy()
    if dist.get_rank() == 1:
        time.sleep(0.5)  # its refusal stands meanwhile
    return error, float(compiled()[0])


@pytest.mark.slow
def test_refusal_is_no_error_if_the_rank_makes_another_backend(ranks2):
    for error, value in ranks2.run(with_another_backend):
        assert error.startswith("unknown policy 'balance'")
        assert value == 2.0


def with_ddp_instead() -> tuple[str, bool]:
    """All ranks ask for an unknown policy of a backend, and compress DDP's gradients instead."""
    error = unknown_policy()
    dist.barrier()
    with mock.patch.object(refusal, "GRACE_S", 0.3):
        refusal.check_refusals()  # as a rank does that waits for the other
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        commpass.parallel.compress_ddp(model, "balanced", profile=commpass.ethernet(1))
        for _ in range(2):
            model(torch.ones(8, 64)).sum().backward()
    gradient = next(model.parameters()).grad
    commpass.backend("balanced")  # withdraws the refusal
    assert gradient is not None
    return error, bool(gradient.isfinite().all())


@pytest.mark.slow
def test_ranks_that_all_failed_may_use_something_else(ranks2):
    for error, is_finite in ranks2.run(with_ddp_instead):
        assert error.startswith("unknown policy 'balance'")
        assert is_finite


def plain() -> torch.nn.Module:
    return torch.nn.Linear(64, 64)


def replicated() -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(plain())


CALLS = {
    "compress_ddp": lambda: commpass.parallel.compress_ddp(replicated(), "balanced"),
    "ssfusion": lambda: commpass.parallel.ssfusion(plain()),
    "compress_outer": lambda: commpass.parallel.compress_outer(plain(), "balanced"),
}


def called_with_one_wrong(wrong: int, call: str) -> tuple[str, float]:
    """On one rank a variable is wrong at first. Return the error of this rank, and the seconds
    until it; make the same call again without the variable."""
    forget_process()
    open_store()
    dist.barrier()
    start, error = time.monotonic(), ""
    variables = {"COMMPASS_PROFILE": "banana"} if dist.get_rank() == wrong else {}
    with mock.patch.object(refusal, "GRACE_S", 0.3), mock.patch.dict(os.environ, variables):
        try:
            CALLS[call]()
        except (PolicyError, Unanswered) as raised:
            error = f"{type(raised).__name__}: {raised}"
    waited = time.monotonic() - start
    dist.barrier()
    CALLS[call]().close()
    dist.barrier()
    return error, waited


@pytest.mark.parametrize("call", ["compress_ddp", "ssfusion", "compress_outer"])
def test_wrong_variable_on_one_rank_of_an_integration_is_an_error_on_all(call, ranks2):
    found = ranks2.run(called_with_one_wrong, 1, call)
    kind, _, text = found[1][0].partition(": ")
    assert kind == "ProfileError"
    assert text.startswith("COMMPASS_PROFILE=banana: ")
    error = found[0][0]
    assert error.startswith("Unanswered: rank 1 takes no part, since its call failed: " + text[:60])


def with_two_wrong() -> str:
    """Ranks 1 and 2 fail, one after the other. Return the error of this rank."""
    forget_process()
    open_store()
    rank = dist.get_rank()
    dist.barrier()
    error = ""
    with mock.patch.object(refusal, "GRACE_S", 0.3):
        for turn in range(dist.get_world_size()):
            if turn == rank > 0:
                with pytest.raises(PolicyError):
                    commpass.backend(f"policy{rank}")
            dist.barrier()
        if rank == 0:
            with pytest.raises(Unanswered) as raised:
                refusal.check_refusals()
            error = str(raised.value)
        dist.barrier()
        if rank == 2:
            commpass.backend("balanced")  # rank 1 still has none
        dist.barrier()
        if rank == 0:
            with pytest.raises(Unanswered) as raised:
                refusal.check_refusals()
            error += "\n" + str(raised.value)
        dist.barrier()
        commpass.backend("balanced")
        dist.barrier()
        refusal.check_refusals()
    return error


@pytest.mark.slow
def test_all_ranks_that_failed_are_named(ranks3):
    both, one = ranks3.run(with_two_wrong)[0].splitlines()
    assert both.startswith("rank 1 takes no part, since its call failed: unknown policy 'policy1'")
    assert "; rank 2 failed too: unknown policy 'policy2'" in both
    assert one.startswith("rank 1 takes no part")
    assert "rank 2" not in one


def without_the_call() -> str:
    """Rank 1 does not call ``compress_outer``. Return the error of rank 0."""
    forget_process()
    open_store()
    dist.barrier()
    error = ""
    if dist.get_rank() == 0:
        patience = mock.patch("commpass.parallel.meeting.timeout_of", return_value=0.5)
        with patience, pytest.raises(Unanswered) as raised:
            commpass.parallel.compress_outer(plain(), "balanced")
        error = str(raised.value)
    dist.barrier()
    return error


def test_ranks_that_do_not_make_the_call_are_named(ranks2):
    expected = "1 rank (1) did not call compress_outer within 0.5 s. All ranks of "
    assert ranks2.run(without_the_call)[0].startswith(expected)


@refusal.publishing_refusal
def slow_call() -> None:
    time.sleep(1)


def with_a_slow_call() -> None:
    """A call of rank 1 fails, and its next one takes longer than rank 0 waits."""
    forget_process()
    open_store()
    if dist.get_rank() == 1:
        with pytest.raises(PolicyError):
            commpass.backend("balance")
    dist.barrier()
    if dist.get_rank() == 1:
        slow_call()
    else:
        time.sleep(0.3)
        with mock.patch.object(refusal, "GRACE_S", 0.2):
            refusal.check_refusals()
    dist.barrier()


def test_refusal_is_withdrawn_when_the_next_call_begins(ranks2):
    ranks2.run(with_a_slow_call)
