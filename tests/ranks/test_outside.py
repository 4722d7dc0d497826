"""External faults: a rank that is killed, that raises in the user's code, a full disk.

The other ranks get an error in time, and the next run works.
"""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch
import torch.distributed as dist
from processes import Ranks, RanksFailed
from rank_helpers import commpass_messages
from tiers import sampled

import commpass
from commpass.distributed.agreement_round import AgreementRound
from commpass.errors import PlanMismatch
from commpass.passes import manager
from commpass.plan import dump
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
INT8 = Policy(name="int8", rules=[Rule(codec="int8", force=True)])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def model(x):
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)) + 1


def compiled(timeout: float = 100.0, **more):
    torch._dynamo.reset()
    return torch.compile(
        model, backend=commpass.backend(INT8, inner="eager", timeout=timeout, **more)
    )


def killed(where: str) -> str:
    """Rank 1 is killed there; rank 0 returns its error."""
    never_comes = where in ("compile", "agreement")
    function, x = compiled(timeout=2 if never_comes else 100), torch.ones(300)
    doomed = dist.get_rank() == 1
    if doomed and where == "compile":
        manager.PASSES = tuple(
            dataclasses.replace(p, run=lambda road: die()) for p in manager.PASSES
        )
    if doomed and where == "agreement":
        AgreementRound.publish = lambda self: die()
    if doomed and where == "agreement, after publishing":
        AgreementRound.is_decided = lambda self: die()
    if where == "exchange":
        function(x)
        if doomed:
            die()
    try:
        function(x)
    except PlanMismatch as error:
        return f"PlanMismatch: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "nothing"


WHERE = {
    "compile": ("PlanMismatch", "rank 1 of group"),
    "agreement": ("PlanMismatch", "rank 1 of group"),
    "agreement, after publishing": ("RuntimeError", ""),
    "exchange": ("RuntimeError", ""),
}


def works() -> str:
    got = compiled()(torch.ones(300))
    assert torch.allclose(got, torch.full((300,), 5.0), atol=0.05)
    return commpass.plans()[-1].sites[0].codec


def says_what_it_is_told(where: str) -> None:
    raise AssertionError(killed(where))


@pytest.mark.slow
@pytest.mark.parametrize("where", sampled(WHERE, ["exchange"]))
def test_rank_that_is_killed_gives_the_other_an_error_in_time_and_the_next_run_works(where):
    ranks = Ranks(2)
    try:
        with pytest.raises(RanksFailed) as failed:
            ranks.run(says_what_it_is_told, where, timeout=120)
        kind, part = WHERE[where]
        assert "rank 1: the process died with exit code -9" in str(failed.value)
        assert f"AssertionError: {kind}: " in str(failed.value)
        assert part in str(failed.value)
        assert ranks.run(works, timeout=120) == ["int8", "int8"]  # new ranks in their places
    finally:
        ranks.stop()


def raises_between_graphs() -> str:
    """Rank 1 fails in user code between two graphs, reports it, and goes on."""
    function, other = (
        compiled(),
        torch.compile(
            lambda x: model(x.sin()), backend=commpass.backend(INT8, inner="eager", timeout=2)
        ),
    )
    x = torch.ones(310)
    function(x)
    if dist.get_rank() == 1:
        return "a failure of its own"
    with pytest.raises(PlanMismatch) as error:
        other(x[1:])  # a site that is not known from the first graph
    return str(error.value)


@pytest.mark.slow
def test_rank_that_fails_between_two_graphs_is_named(ranks2):
    said, own = ranks2.run(raises_between_graphs)
    assert own == "a failure of its own"
    assert "rank 1 of group" in said
    assert "within 2 s" in said
    assert ranks2.run(works) == ["int8", "int8"]


def full_disk(folder: str) -> tuple[str, list[str]]:
    def no_room(*_):
        raise OSError(28, "No space left on device")

    kept, dump.write = dump.write, no_room
    try:
        with commpass_messages() as lines:
            got = compiled(dump=folder)(torch.ones(320))
    finally:
        dump.write = kept
    assert torch.allclose(got, torch.full((320,), 5.0), atol=0.05)
    return commpass.plans()[-1].sites[0].codec, [line for line in lines if "dump" in line]


def test_full_disk_loses_the_dump_and_nothing_else(ranks2, tmp_path):
    (codec, lines), (other, none) = ranks2.run(full_disk, str(tmp_path))
    assert (codec, other) == ("int8", "int8")
    assert "No space left on device" in lines[0]
    assert none == []
