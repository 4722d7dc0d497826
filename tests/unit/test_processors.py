"""How many processor cores ranks have, and how a profile says so."""

from __future__ import annotations

import dataclasses
import os
import platform
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import commpass
from commpass.costmodel import Profile
from commpass.costmodel.kernels import CPU
from commpass.costmodel.links import Link, Region
from commpass.costmodel.networks import on_processors
from commpass.costmodel.profile import SLICE_US, ethernet, profile_named
from commpass.distributed import agreed_profile as module
from commpass.distributed import processors, speed
from commpass.distributed.agreed_network import AgreedNetwork, default_between_hosts, profile_over
from commpass.distributed.processors import (
    CORES,
    SPEED,
    Capacity,
    Processors,
    capacity_of,
    fewest_cores,
    processors_here,
    stated_cores,
)
from commpass.errors import PolicyError


def on(machine: str, *cpus: int, stated: float = 0.0) -> Processors:
    return Processors(machine, f"{sum(1 << cpu for cpu in cpus):x}", stated)


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([], 1.0),
        ([on("a", 0)], 1.0),
        ([on("a", 0, 1)], 2.0),
        ([on("a", 0), on("a", 1)], 1.0),
        ([on("a", 0, 1)] * 2, 1.0),
        ([on("a", *range(16))] * 4, 4.0),
        ([on("a", 0, 1)] * 4, 0.5),
        ([on("a", 0)] * 2 + [on("b", 0)], 0.5),
        ([on("a", 0), on("b", 0)], 1.0),
        ([on("a", 0), on("a", 0, 1, 2)], 0.5),
        ([on("a", 0, 70)] * 3 + [on("a", 5)], 2 / 3),
        ([on("a", 0, 1)] * 3 + [on("a", 0, 1, stated=0.25)], 0.25),
        ([on("a", 0, stated=1.0)] * 4, 1.0),
        ([on("a", 0, stated=0.5), on("a", 1)], 0.5),
    ],
)
def test_cores_of_a_rank_are_those_of_the_rank_with_the_fewest(ranks, cores):
    assert fewest_cores(ranks) == pytest.approx(cores)


def test_processors_of_this_process_are_those_it_may_use(monkeypatch):
    monkeypatch.delenv(CORES)
    here = processors_here()
    assert here.machine
    assert int(here.cpus, 16).bit_count() == len(os.sched_getaffinity(0))
    assert here.stated == 0


def test_all_processors_count_where_the_system_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setenv(CORES, "3")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert processors_here(tmp_path / "none") == Processors(platform.node(), "1f", 3.0)


@pytest.mark.parametrize("given", ["two", "-1", "nan", "inf", "0", "0.0", "1e-310", "1,5"])
def test_number_of_cores_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv(CORES, given)
    with pytest.raises(PolicyError, match=r"COMMPASS_CORES=.*must be a number of cores"):
        stated_cores()
    with pytest.raises(PolicyError, match="COMMPASS_CORES="):
        commpass.backend("balanced", inner="eager")


def test_any_mixture_of_ranks_has_the_cores_of_the_rule():
    """The rule, one rank and one processor after the other."""
    choose = random.Random(0)
    for _ in range(50):
        places = [
            (choose.choice("ab"), frozenset(choose.choices(range(70), k=choose.choice([1, 2, 30]))))
            for _ in range(choose.randint(1, 12))
        ]
        places += choose.choices(places, k=choose.randint(0, 6))
        right = min(
            sum(1 / sum(m == machine and cpu in other for m, other in places) for cpu in cpus)
            for machine, cpus in places
        )
        assert fewest_cores([on(machine, *cpus) for machine, cpus in places]) == pytest.approx(
            right
        )


def test_profile_on_half_a_core_has_twice_the_times_of_processors_and_a_time_slice_more():
    whole = ethernet(1)
    half = whole.on_cores(0.5)
    assert half.link.alpha_us == 2 * whole.link.alpha_us + SLICE_US
    assert half.link.overhead_us == 2 * whole.link.overhead_us
    assert half.link.gbytes_per_s == whole.link.gbytes_per_s
    for codec in ("int8", "rotated", "unknown"):
        for role in ("encode", "decode"):
            times = half.kernels.time_us(codec, role, 1e6) / CPU.time_us(codec, role, 1e6)
            assert times == pytest.approx(2)
    assert half.kernels.compute_us(1e9, 1e6) == pytest.approx(2 * CPU.compute_us(1e9, 1e6))
    for cores in (1.0, 4.0):
        assert whole.on_cores(cores) is whole


def test_all_links_and_measured_regions_of_a_profile_are_delayed():
    regions = {"all_gather": (Region(0, 100.0, 1.0),)}
    link = Link(60.0, 1.0, measured=regions)
    whole = Profile("two", link, links={"dp": link}, ranks_per_host=2, intra_host_link=link)
    half = whole.on_cores(0.5)
    for each in (half.link, half.links["dp"], half.intra_host_link):
        assert each.alpha_us == 120 + SLICE_US
        assert each.measured["all_gather"][0].alpha_us == 200 + SLICE_US
    assert whole.link.alpha_us == 60


def given_by(profile, cores: float, monkeypatch, device: str = "cpu", speed: float = 1.0):
    monkeypatch.setattr(module, "agreed_capacity", lambda gm, timeout_s: Capacity(cores, speed))
    return module.agreed_profile(profile, device)


def test_named_profile_is_one_of_ranks_with_so_many_cores(monkeypatch):
    found = given_by(profile_named("ethernet-1g"), 0.5, monkeypatch)
    assert found == ethernet(1).on_cores(0.5)
    assert found.description == (
        "ethernet-1g (nominal rate, not measured; ranks share processors, 0.5 cores each)"
    )
    assert given_by(profile_named("ethernet-1g"), 1.0, monkeypatch) == ethernet(1)


def test_named_profile_has_kernels_of_the_speed_of_the_processors(monkeypatch):
    whole, found = ethernet(1), given_by(profile_named("ethernet-1g"), 1.0, monkeypatch, speed=2.0)
    assert found.description == (
        "ethernet-1g (nominal rate, not measured; processors 2 times as fast as slow ones)"
    )
    assert found.link == whole.link
    assert found.kernels.compute_us(1e9, 1e6) == pytest.approx(CPU.compute_us(1e9, 1e6) / 2)
    times = found.kernels.time_us("int8", "encode", 1e6) / CPU.time_us("int8", "encode", 1e6)
    assert times == pytest.approx(1 / 2)
    slow = given_by(profile_named("ethernet-1g"), 0.5, monkeypatch, speed=2.0)
    assert slow.kernels.compute_us(1e9, 1e6) == pytest.approx(CPU.compute_us(1e9, 1e6))
    assert slow.link == whole.on_cores(0.5).link
    assert "2 times as fast as slow ones; ranks share processors, 0.5 cores" in slow.description


def test_slowest_rank_decides_the_speed_of_all():
    found = [dataclasses.replace(on("a", rank), speed=speed) for rank, speed in enumerate((2, 1.4))]
    assert capacity_of(found) == Capacity(1.0, 1.4)
    assert capacity_of([]) == Capacity(1.0, 1.0)


@pytest.mark.parametrize(
    ("gflops", "expected"), [(10, 1), (55, 1), (57, 2**0.5), (86, 2), (112, 2), (1000, 4)]
)
def test_measured_speed_is_a_power_of_the_root_of_two(gflops, expected, monkeypatch):
    monkeypatch.setattr(speed, "_least_seconds", lambda: 2 * speed.WIDTH**3 / gflops / 1e9)
    speed.speed_of_core.cache_clear()
    assert speed.speed_of_core() == pytest.approx(expected)
    speed.speed_of_core.cache_clear()


def test_speed_is_measured_with_real_tensors_also_in_a_trace():
    with FakeTensorMode(), torch.inference_mode():
        assert 1 <= speed.speed_of_core() <= speed.MOST


def test_speed_is_measured_on_one_thread(monkeypatch):
    used, multiply, before = set(), torch.mm, torch.get_num_threads()

    def watched(*args, **kwargs):
        used.add(torch.get_num_threads())
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    torch.set_num_threads(3)
    try:
        speed.speed_of_core.cache_clear()
        speed.speed_of_core()
        assert used == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        speed.speed_of_core.cache_clear()


def test_stated_speed_replaces_the_measured_one(monkeypatch):
    monkeypatch.setenv(SPEED, "1.5")
    assert processors_here().speed == 1.5
    monkeypatch.setenv(SPEED, "fast")
    with pytest.raises(PolicyError, match=r"COMMPASS_SPEED=fast: must be how many times as fast"):
        processors_here()
    monkeypatch.delenv(SPEED)
    monkeypatch.setattr(processors, "speed_of_core", lambda: 2.0)
    assert processors_here().speed == 2.0


@pytest.mark.parametrize("variable", [CORES, SPEED])
def test_stated_numbers_of_which_no_rate_would_be_finite_are_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "1e6")
    here = processors_here()
    profile = on_processors(ethernet(1), min(1.0, here.stated or 1.0), here.speed)
    assert profile.kernels.gflops < float("inf")
    for wrong in ("1e308", "1000001", "inf"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(PolicyError, match=rf"{variable}={wrong}: .* and at most 1,000,000$"):
            processors_here()


def test_profile_of_explicit_numbers_is_taken_as_it_is(monkeypatch):
    measured = dataclasses.replace(ethernet(1), source="measured on 2026-11-28")
    for given in (ethernet(1), measured):
        assert given_by(given, 0.5, monkeypatch) is given


def test_profiles_of_gpus_do_not_depend_on_cores(monkeypatch):
    named = profile_named("nvlink-4")
    assert given_by(named, 0.5, monkeypatch, "cuda") is named
    whole = AgreedNetwork(True, False)
    card = "NVIDIA H100 80GB HBM3"
    for capacity in (Capacity(cores=0.5), Capacity(speed=2.0)):
        network = dataclasses.replace(whole, capacity=capacity)
        assert profile_over(network, "cuda", card) == profile_over(whole, "cuda", card)
        assert profile_over(network, "cpu", "") != profile_over(whole, "cpu", "")


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_with_a_core_each_have_exactly_one(shared):
    """Floats would add up to less: six times 1 / 6 is 0.9999999999999999."""
    for size in range(1, 130):
        ranks = [on("a", *(range(size) if shared else [rank])) for rank in range(size)]
        assert fewest_cores(ranks) == 1.0
    assert sum([1 / 6] * 6) < 1


def test_ranks_on_several_hosts_share_nothing_with_this_one(monkeypatch):
    monkeypatch.delenv(CORES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert "share" not in default_between_hosts("cpu").description
