"""Times of plain collectives on every named machine and link, for groups inside and between hosts.

They are finite, and no smaller for more bytes or more hosts. What only one group would notice is
tested by numbers from the formulas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from deciding import decide

from commpass.costmodel import Link, Profile, prices, profile_named
from commpass.costmodel.links import START_US
from commpass.costmodel.profile import NAMES
from commpass.costmodel.protocols import Protocol
from commpass.errors import PolicyError
from commpass.plan import NONE, Site
from commpass.plan.kinds import KINDS
from commpass.policy import PRESETS

KIB, MIB = 1 << 10, 1 << 20
SIZES = [0, *(int(2 ** (each / 2)) for each in range(20, 65, 3))]


def us(profile: Profile, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
    return prices(profile, len(ranks), (), ranks).time_us(kind, nbytes)


def groups(profile: Profile) -> list[Sequence[int]]:
    """Return groups inside hosts and between them, even and uneven ones."""
    host = profile.ranks_per_host or 8
    return [
        [3],
        [0, 1],
        [0, host // 2],
        range(host),
        range(2 * host),
        range(0, 16 * host, host),
        range(host // 2 + 1),
        range(host + 1),
        [0, 1, host, 2 * host, 2 * host + 1],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_more_bytes_never_take_less_time(name):
    profile = profile_named(name)
    for ranks in groups(profile):
        for kind in KINDS:
            times = [us(profile, kind, nbytes, ranks) for nbytes in SIZES]
            assert all(map(math.isfinite, times))
            assert all(after >= before * (1 - 1e-12) for before, after in pairwise(times))
            assert (times[0] == 0) == (len(ranks) == 1)


@pytest.mark.parametrize("name", NAMES)
def test_more_hosts_never_take_less_time(name):
    """Except for bytes that pass a bridge between islands: in a host alone, more of them do."""
    profile = profile_named(name)
    host = profile.ranks_per_host or 8
    has_islands = profile.intra_host_link is not None and profile.intra_host_link.island > 0
    hosts = (2, 3, 4, 16) if has_islands or profile.link.peer_gbytes_per_s else (1, 2, 3, 4, 16)
    for kind in KINDS:
        for nbytes in SIZES[::3]:
            times = [us(profile, kind, nbytes, range(host * each)) for each in hosts]
            assert all(after >= before * (1 - 1e-9) for before, after in pairwise(times))


def test_group_of_100000_ranks_has_a_time():
    profile, ranks = profile_named("dgx-h100"), range(100_000)
    assert 100 < us(profile, "all_reduce", MIB, ranks) < 1000
    assert us(profile, "all_to_all", MIB, ranks) == pytest.approx(100_000 * START_US, rel=0.01)


def test_message_to_one_rank_has_one_connection():
    """64 GB/s times 0.7 to each other GPU, whatever the size of the group."""
    profile = profile_named("mi300x-8")
    for ranks in (2, 4, 8):
        for kind in ("send", "recv"):
            assert us(profile, kind, 1 << 30, range(ranks)) == pytest.approx(
                (1 << 30) / 44.8e3, rel=0.01
            )


def test_all_to_all_between_hosts_sends_the_bytes_that_leave_a_host():
    """8 of 15 other ranks are on the other host, and 7 are reached by NVLink meanwhile."""
    profile = profile_named("dgx-h100")
    expected = (1 << 30) * 15 / 16 * 8 / 15 / 40e3
    assert us(profile, "all_to_all", 1 << 30, range(16)) == pytest.approx(expected, rel=0.01)
    slow = dataclasses.replace(
        profile, intra_host_link=dataclasses.replace(profile.intra_host_link, gbytes_per_s=20.0)
    )
    inside = (1 << 30) * 15 / 16 * 7 / 15 / 20e3
    assert us(slow, "all_to_all", 1 << 30, range(16)) == pytest.approx(inside, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "share"),
    [((0, 4), 1 / 4), ((0, 1, 4, 5), 1 / 2), (range(8), 1.0), ((0, 1, 2, 3, 4), 1.0)],
)
def test_groups_share_the_bridge_between_islands(ranks, share):
    """(0, 4) is one of four such groups: flashinfer 4870 measured 9.7 GB/s for each of them."""
    profile = profile_named("l40s-pcie")
    link = profile.link_of(ranks=ranks)
    assert link.bridge_gbytes_per_s == pytest.approx(38.8 * share)


def test_island_of_every_host_counts_by_itself():
    link = Link(1.0, 25.0, island=4, bridge_gbytes_per_s=40.0)
    profile = Profile("hosts", link, ranks_per_host=8)
    assert profile.link_of(ranks=range(16)).island == 4
    assert profile.link_of(ranks=range(8)) == link


def test_messages_inside_a_host_take_the_time_of_its_link():
    """LL128 needs NVLink, and Simple takes 5.7 us on PCIe."""
    link = profile_named("l40s-pcie").link_of(ranks=range(16))
    assert {each.name: each.near_step_us for each in link.protocols} == {"LL": 1.0, "Simple": 5.7}
    link = profile_named("dgx-h100").link_of(ranks=range(16))
    assert [each.near_step_us for each in link.protocols] == [0.6, 1.9, 3.4]


def test_most_bandwidth_of_a_protocol_is_that_of_all_ports():
    """A ring of two hosts uses eight ports of 40 GB/s, and LL reaches 45 GB/s of these."""
    profile = profile_named("dgx-h100")
    (low,) = [each for each in profile.link.protocols if each.name == "LL"]
    only = dataclasses.replace(profile, link=dataclasses.replace(profile.link, protocols=(low,)))
    grown = us(only, "all_gather", 2 << 20, range(16)) - us(only, "all_gather", 1 << 20, range(16))
    assert grown == pytest.approx(15 * MIB / 45e3)


def test_least_time_of_a_library_holds_between_hosts():
    assert us(profile_named("mi300x-8"), "send", 0, range(16)) == 16.5


@pytest.mark.parametrize("name", ["dgx-h100", "l40s-pcie", "mi300x-8", "gb200-nvl72"])
@pytest.mark.parametrize("ranks", [8, 16, 64, 1024])
def test_small_message_between_gpus_is_left_alone(name, ranks):
    """An exchange with all ranks has fewer messages than a ring, also without a codec."""
    profile = profile_named(name)
    for kind in ("all_reduce", "reduce_scatter", "all_to_all"):
        for nbytes in (2 * KIB, 4 * KIB):
            site = Site(
                name="s",
                kind=kind,
                reduce_op="sum" if KINDS[kind].sums else None,
                group="0",
                group_size=ranks,
                dtype="bfloat16",
                shape=(nbytes // 2,),
                bytes=nbytes,
                device="cuda",
            )
            (found,) = decide([site], PRESETS["balanced"], profile)
            assert found.codec == NONE


SUMS = Protocol("NVLS", 40.0, 0.0, 0.5, switch_sums=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"protocols": None}, "must be a tuple of Protocol"),
        ({"protocols": 3}, "must be a tuple of Protocol"),
        ({"protocols": [Protocol("LL", 1.0, 1.0, 0.5)]}, "must be a tuple of Protocol"),
        ({"protocols": ("LL",)}, "must be a tuple of Protocol"),
        ({"protocols": (SUMS,)}, "needs one without switch_sums"),
        ({"measured": {"all_reduce": None}}, "must be a tuple of Region"),
        ({"measured": {"all_reduce": (1.0,)}}, "must be a tuple of Region"),
    ],
)
def test_link_refuses_what_is_no_protocol_or_region(fields, said):
    with pytest.raises(PolicyError, match=said):
        Link(1.0, 1.0, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"share": 1.5}, r"share=1.5\): must be a number above 0 and at most 1"),
        ({"switch_sums": "yes"}, "must be True or False"),
        ({"step_us": math.nan}, "step_us=nan"),
    ],
)
def test_protocol_refuses_invalid_numbers(fields, said):
    with pytest.raises(PolicyError, match=said):
        dataclasses.replace(SUMS, **fields)
