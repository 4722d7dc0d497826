"""One rank cannot make a backend: the others fail soon, and say why."""

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
    expected = f"Unanswered: rank {wrong} could not make a backend, so it compares no plans: "
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
