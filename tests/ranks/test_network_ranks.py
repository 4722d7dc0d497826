"""The default profile on real ranks: the slowest network that any rank has read, on all of them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from rank_helpers import commpass_messages
from sys_trees import add_interface
from torch.fx.experimental.proxy_tensor import make_fx

import commpass
from commpass import ethernet
from commpass.costmodel.files import digest
from commpass.costmodel.profile import DEFAULT_CPU, profile_named
from commpass.distributed import agreed_network, network, plan_store
from commpass.distributed.agreed_network import agreed_default
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.plan_store import ROOT, PlanStore, current_store, open_store
from commpass.distributed.processors import processors_each
from commpass.errors import PolicyError

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
UNREADABLE = "none"


@contextmanager
def on_networks(speeds: Sequence[str], hosts: Sequence[int] | None = None) -> Iterator[None]:
    """Give this rank an interface of its speed in Mbit/s, on a host of its own or of a number."""
    rank = dist.get_rank()
    name, host = f"eth{rank}", (hosts or range(len(speeds)))[rank]
    with tempfile.TemporaryDirectory() as folder:
        add_interface(Path(folder), name, None if speeds[rank] == UNREADABLE else speeds[rank])
        variables = {"GROUP_RANK": str(host), "GLOO_SOCKET_IFNAME": name}
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(network, "SYS", Path(folder)),
        ):
            open_store()
            dist.barrier()  # no rank reads what another one published before
            yield


def described(speeds: Sequence[str], hosts: Sequence[int] | None = None) -> tuple[str, str]:
    with on_networks(speeds, hosts):
        profile = agreed_default("cpu")
        assert agreed_default("cpu") == profile
        return profile.description, digest(profile)


def test_slowest_rank_counts(ranks2):
    expected = "ethernet-1g (read from eth1 of rank 1, the slowest)"
    assert ranks2.run(described, ["10000", "1000"]) == [(expected, digest(ethernet(1)))] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speeds", "expected", "gbit_per_s"),
    [
        (["25000", "2500", "1000"], "ethernet-1g (read from eth2 of rank 2, the slowest)", 1),
        (["1000", UNREADABLE, "1000"], "ethernet-1g (read from eth0 of rank 0)", 1),
        (["5000", UNREADABLE, "1000"], "ethernet-1g (read from eth2 of rank 2, the slowest)", 1),
        (["-1", "25000", "25000"], "assumed: rank 0: eth0 does not state its rate", 10),
        (["100000", "25000", "40000"], "ethernet-25g (read from eth1 of rank 1, the slowest)", 25),
    ],
)
def test_rank_that_cannot_read_its_network_counts_as_one_with_the_default(
    speeds, expected, gbit_per_s, ranks3
):
    for description, found in ranks3.run(described, speeds):
        assert expected in description
        assert found == digest(ethernet(gbit_per_s))


@pytest.mark.slow
def test_ranks_of_one_host_keep_the_default(ranks3):
    expected = ("ethernet-10g (assumed: all ranks are on one host)", digest(DEFAULT_CPU))
    assert ranks3.run(described, ["1000"] * 3, [0, 0, 0]) == [expected] * 3


def of_gpus(names: Sequence[str]) -> str:
    """Return the default profile of GPUs of these names, one on each rank."""
    here = mock.patch.object(plan_store, "card_here", return_value=names[dist.get_rank()])
    local = mock.patch.object(agreed_network, "card_here", return_value=names[dist.get_rank()])
    with here, local, on_networks(["1000"] * len(names)):
        profile = agreed_default("cuda")
        return f"{profile.description} {digest(profile)}"


def test_ranks_with_different_gpus_have_the_same_profile(ranks2):
    (found,) = set(ranks2.run(of_gpus, ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]))
    assert found.startswith("a100 over infiniband-hdr")


def links(speeds: Sequence[str], hosts: Sequence[int]) -> list[float]:
    """Return the GB/s between ranks 0 and 1, and between ranks 0 and 2."""
    with on_networks(speeds, hosts):
        profile = agreed_default("cpu")
        return [profile.link_of(ranks=each).gbytes_per_s for each in ((0, 1), (0, 2))]


@pytest.mark.slow
def test_ranks_of_a_host_do_not_use_its_network(ranks4):
    fast = DEFAULT_CPU.link.gbytes_per_s
    assert ranks4.run(links, ["1000"] * 4, [0, 0, 1, 1]) == [[fast, 0.125]] * 4
    assert ranks4.run(links, ["1000"] * 4, [0, 0, 0, 1]) == [[0.125, 0.125]] * 4


def function(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", group)) + 1


@contextmanager
def at_level(level: int) -> Iterator[None]:
    logger = logging.getLogger("commpass")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def compiled(speeds: Sequence[str], profile: str | None = None) -> tuple[str, str, str, list[str]]:
    """Return the profile and codec of a plan under ``balanced``, the line of the report, and what
    is logged about the profile."""
    with on_networks(speeds), commpass_messages() as messages, at_level(logging.INFO):
        torch._dynamo.reset()
        backend = commpass.backend("balanced", inner="eager", profile=profile, strict=True)
        torch.compile(function, backend=backend)(torch.ones(1 << 19))
        (site,) = commpass.plans()[-1].sites
        (line,) = (line for line in str(commpass.report()).splitlines() if "profile:" in line)
        logged = [message for message in messages if message.startswith("profile ")]
        assert (current_store().network is None) == (profile is not None)
        return commpass.plans()[-1].profile, site.codec, line, logged


def test_plan_depends_on_the_network_and_is_the_same_on_all_ranks(ranks2):
    slow = ranks2.run(compiled, ["1000", "1000"])
    fast = ranks2.run(compiled, ["25000", "100000"])
    again = ranks2.run(compiled, ["1000", "1000"])
    assert [each[:2] for each in again] == [each[:2] for each in slow]
    assert [each[:2] for each in fast] == [("ethernet-25g", "none")] * 2
    assert [each[0] for each in slow] == ["ethernet-1g"] * 2
    assert slow[0][1] == slow[1][1] != "none"
    source = "ethernet-1g (read from eth0 of rank 0)"
    assert slow[0][3] == [f"profile {source}. Measure with `commpass probe`"]
    assert slow[1][3] == []
    assert all(source in line for _, _, line, _ in slow)


@pytest.mark.slow
def test_profile_that_is_given_counts(ranks2):
    for name, *_, logged in ranks2.run(compiled, ["1000", "1000"], "ethernet-40g"):
        assert (name, logged) == ("ethernet-40g", [])


def of_environment() -> str:
    with mock.patch.dict(os.environ, COMMPASS_PROFILE="ethernet-40g"):
        return compiled(["1000", "1000"], "ethernet-40g")[0]


@pytest.mark.slow
def test_profile_of_the_environment_counts(ranks2):
    assert ranks2.run(of_environment) == ["ethernet-40g"] * 2


def halves(speeds: Sequence[str]) -> tuple[str, str]:
    """Return the profile and codec of an exchange with one neighbour."""
    first = dist.new_group([0, 1])
    second = dist.new_group([2, 3])
    group = (first if dist.get_rank() < 2 else second).group_name

    def one(x: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", group)) + 1

    with on_networks(speeds):
        torch._dynamo.reset()
        torch.compile(one, backend=commpass.backend("balanced", inner="eager"))(torch.ones(1 << 19))
        (site,) = commpass.plans()[-1].sites
        return commpass.plans()[-1].profile, site.codec


@pytest.mark.slow
def test_subgroups_have_the_slowest_network_of_all_ranks(ranks4):
    found = ranks4.run(halves, ["25000", "25000", "25000", "1000"])
    assert {name for name, _ in found} == {"ethernet-1g"}
    assert len(set(found)) == 1


def without_need() -> bool:
    """Rank 1 has published nothing, and no graph depends on the network."""
    if dist.get_rank() == 1:
        current_store().torch_store.delete_key(f"{ROOT}/hello/1")
    dist.barrier()
    torch.compile(lambda x: x + 1, backend=commpass.backend(inner="eager"))(torch.ones(4))
    for profile in (None, "ethernet-1g"):
        off = commpass.backend("off", inner="eager", profile=profile)
        torch._dynamo.reset()
        torch.compile(function, backend=off)(torch.ones(4))
    named = commpass.backend(inner="eager", profile="ethernet-1g")
    torch.compile(lambda x: x + 2, backend=named)(torch.ones(4))
    return current_store().network is None and current_store().capacity is None


@pytest.mark.slow
def test_no_rank_is_awaited_without_collectives_or_under_off(ranks2):
    assert ranks2.run(without_need) == [True, True]


def with_missing(missing: int, speeds: Sequence[str]) -> tuple[str, list[str]]:
    """The missing rank publishes its hello record after the others have waited in vain."""
    with on_networks(speeds), commpass_messages() as messages:
        rank, store = dist.get_rank(), current_store()
        if rank == missing:
            store.torch_store.delete_key(f"{ROOT}/hello/{rank}")
        dist.barrier()
        found = "" if rank == missing else agreed_default("cpu", None, 0.2).description
        dist.barrier()
        if rank == missing:
            open_store()
            found = agreed_default("cpu", None, 60.0).description
        dist.barrier()
        return found, messages


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_rank_that_publishes_too_late_uses_the_result_of_the_others(missing, ranks3):
    found = ranks3.run(with_missing, missing, ["1000", "1000", "1000"])
    (description,) = {description for description, _ in found}
    assert description == (
        "ethernet-10g (assumed: 3 of 3 ranks did not publish theirs)"
        if missing == 0
        else "ethernet-1g (read from eth0 of rank 0)"
    )
    warning = "1 ranks did not publish their network within 0.2 s"
    warned = [any(warning in each for each in messages) for _, messages in found]
    assert any(warned)
    assert not warned[missing]


def failing_store() -> str:
    """The store of one process group cannot be reached."""
    with (
        on_networks(["1000", "1000"]),
        mock.patch.object(PlanStore, "networks", side_effect=RuntimeError("closed")),
    ):
        return agreed_default("cpu").description


def test_store_that_does_not_answer_leaves_the_default(ranks2):
    assert ranks2.run(failing_store) == ["ethernet-10g (assumed)"] * 2


def test_no_network_is_read_without_ranks(fake_group):
    refused = AssertionError("a simulation must not depend on this machine")
    with (
        mock.patch.object(network, "gloo_interface", side_effect=refused),
        mock.patch.object(agreed_network, "_agree", side_effect=refused),
    ):
        assert agreed_default("cpu") == DEFAULT_CPU
        fake_group(64)
        assert agreed_default("cpu") == DEFAULT_CPU
        commpass.backend("balanced", inner="eager")
        assert agreed_network.agreed_network() is None


def shared_core(profile: str | None, cpus: int) -> tuple[str, str]:
    """Return the profile of a compiled graph on ranks that may all use ``cpus`` processors, and
    that of its plan."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    open_store()
    dist.barrier()
    backend = commpass.backend("balanced", inner="eager", profile=profile, strict=True)
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(1 << 12))
    (line,) = (line for line in str(commpass.report()).splitlines() if "profile:" in line)
    return line, digest(agreed_profile(backend.profile, "cpu"))


@pytest.mark.parametrize("profile", [None, "ethernet-1g"])
def test_ranks_that_share_a_core_plan_for_half_a_core(profile):
    ranks = Ranks(2, environment={"COMMPASS_CORES": ""})
    try:
        found = ranks.run(shared_core, profile, 1)
    finally:
        ranks.stop()
    expected = (ethernet(1) if profile else DEFAULT_CPU).on_cores(0.5)
    assert [each for _, each in found] == [digest(expected)] * 2
    assert all("ranks share processors, 0.5 cores each" in line for line, _ in found)


def profile_at(speeds: tuple[str, ...], profile: str | None) -> tuple[str, str]:
    with mock.patch.dict(os.environ, COMMPASS_SPEED=speeds[dist.get_rank()]):
        open_store()
        return shared_core(profile, os.cpu_count() or 1)


@pytest.mark.parametrize("profile", [None, "ethernet-1g"])
def test_all_ranks_plan_for_the_speed_of_the_slowest(profile, ranks2):
    found = ranks2.run(profile_at, ("2", "4"), profile)
    expected = (ethernet(1) if profile else DEFAULT_CPU).with_speed(2)
    assert [each for _, each in found] == [digest(expected)] * 2
    assert all("processors 2 times as fast as slow ones" in line for line, _ in found)


def named_with_missing(missing: int) -> tuple[str, list[str]]:
    """The missing rank publishes its hello record after the others have waited in vain."""
    rank, named = dist.get_rank(), profile_named("ethernet-1g")
    with mock.patch.dict(os.environ, COMMPASS_CORES="0.5"), commpass_messages() as messages:
        open_store()
        if rank == missing:
            store = current_store()
            store.torch_store.delete_key(f"{ROOT}/hello/{rank}")
        dist.barrier()
        found = None if rank == missing else agreed_profile(named, "cpu", None, 0.2)
        dist.barrier()
        if rank == missing:
            open_store()
            found = agreed_profile(named, "cpu", None, 60.0)
        dist.barrier()
        assert found is not None
        return digest(found), messages


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_named_profile_has_the_cores_of_the_ranks_that_published_theirs_in_time(missing, ranks2):
    found = ranks2.run(named_with_missing, missing)
    expected = ethernet(1) if missing == 0 else ethernet(1).on_cores(0.5)
    assert [each for each, _ in found] == [digest(expected)] * 2
    warning = "1 ranks did not publish their processors within 0.2 s"
    warned = [any(warning in each for each in messages) for _, messages in found]
    assert warned[1 - missing]
    assert not warned[missing]


def rewritten(cores: str) -> str:
    """Return the codec of a graph that ``commpass.rewrite`` changes under a named profile."""
    with mock.patch.dict(os.environ, COMMPASS_CORES=cores):
        open_store()
        dist.barrier()
        gm = make_fx(function, tracing_mode="fake")(torch.ones(1 << 16))
        plan = commpass.rewrite(gm, [], "balanced", profile="ethernet-10g", strict=True)
        dist.barrier()
        return plan.sites[0].codec


@pytest.mark.slow
def test_rewritten_graphs_are_planned_for_the_cores_of_ranks_too(ranks2):
    assert ranks2.run(rewritten, "1") == ["none"] * 2
    assert ranks2.run(rewritten, "0.05") == ["bf16"] * 2


def with_wrong_cores(wrong: int) -> tuple[list[str], str]:
    """On one rank COMMPASS_CORES is wrong at first. Return the errors, and the profile at last."""
    is_wrong, errors = dist.get_rank() == wrong, []

    def collect(call: Callable[[], object]) -> None:
        try:
            call()
        except PolicyError as error:
            errors.append(str(error))

    with mock.patch.dict(os.environ, COMMPASS_CORES="abc" if is_wrong else "0.5"):
        collect(lambda: processors_each(dist.group.WORLD))
        if is_wrong:
            plan_store._stores.clear()  # as in a new process
            collect(lambda: commpass.backend("balanced", inner="eager"))
            collect(current_store)
            collect(current_store)
    dist.barrier()
    with mock.patch.dict(os.environ, COMMPASS_CORES="0.5"):
        open_store() if not is_wrong else current_store()
        dist.barrier()
        return errors, digest(agreed_profile(profile_named("ethernet-1g"), "cpu", None, 20.0))


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_number_of_cores_is_an_error_that_can_be_mended(wrong, ranks2):
    """What all ranks do together fails on all of them. What one rank does leaves no open store in
    which the others would miss its hello record."""
    found = ranks2.run(with_wrong_cores, wrong)
    error = (
        "COMMPASS_CORES=abc: must be a number of cores of a rank, such as 0.5, and at least 0.01"
    )
    both = f"rank {wrong}: {error}"
    assert found[1 - wrong][0] == [both]
    assert found[wrong][0] == [both, *[error] * 3]
    assert [each for _, each in found] == [digest(ethernet(1).on_cores(0.5))] * 2
