"""Alpha and beta from measured times, against times written from the formula."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass.costmodel import Link, Region
from commpass.costmodel.fit import CLOSE, MOST_REGIONS, Point, regions
from commpass.errors import PolicyError, ProfileError

SIZES = [1 << power for power in range(10, 27, 2)]
tried = settings(max_examples=examples(20, 60), deadline=None)


def line(alpha: float, gbytes_per_s: float, messages: int = 1, sizes=SIZES) -> list[Point]:
    """Return the times of a link with these parameters, from the formula."""
    return [Point(messages, n, alpha * messages + n / (gbytes_per_s * 1000)) for n in sizes]


@tried
@given(
    st.floats(1, 1e4), st.floats(0.01, 400), st.integers(1, 64), st.permutations(range(len(SIZES)))
)
def test_one_link_is_one_region_whatever_the_order(alpha, rate, messages, order):
    points = line(alpha, rate, messages)
    (found,) = regions([points[number] for number in order])
    assert found.from_bytes == 0
    assert found.alpha_us == pytest.approx(alpha, rel=1e-6, abs=1e-3)
    assert found.gbytes_per_s == pytest.approx(rate, rel=1e-6)


def test_region_begins_where_the_rate_changes():
    small, large = line(50, 1.0, sizes=SIZES[:5]), line(400, 0.1, sizes=SIZES[5:])
    first, second = regions([*small, *large])
    assert (first.alpha_us, first.gbytes_per_s) == pytest.approx((50, 1.0))
    assert (second.alpha_us, second.gbytes_per_s) == pytest.approx((400, 0.1))
    assert second.from_bytes == SIZES[4] + 1  # the slower of both lines, between the points


PROBED = {
    "all_reduce at 0.1 Gbit/s": (774, 457, 394, 5185, 21274, 84590, 338851),
    "all_gather at 0.1 Gbit/s": (700, 397, 320, 6450, 29682, 125015, 506450),
    "message at 0.1 Gbit/s": (3111, 4052, 409, 5206, 21391, 87424, 341926),
    "all_reduce at 1 Gbit/s": (646, 401, 381, 399, 1936, 8549, 34754, 138422),
    "all_to_all at 1 Gbit/s": (2958, 293, 238, 394, 3441, 16198, 67187, 270838),
}
"""Microseconds of 1 KiB, 4 KiB, 16 KiB and so on, on two emulated hosts. Small exchanges take the
time of any start; from 64 or 256 KiB on the link limits them."""


@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_sizes_between_a_flat_and_a_growing_region_are_not_predicted_as_flat(name, share):
    points = [Point(1, 1024 << 2 * at, us) for at, us in enumerate(PROBED[name])]
    link = Link(0, 1, measured={"all_reduce": regions(points)})
    for low, high in pairwise(points[3:]):
        sent = low.sent + share * (high.sent - low.sent)
        between = low.us + share * (high.us - low.us)
        region = link.region("all_reduce", sent)
        assert 0.8 * between < region.time_us(1, sent) < 2.5 * between


@pytest.mark.parametrize(
    ("nbytes", "latency", "on_link"),
    [(1000, 392.0, 8.0), (16_000, 272.0, 128.0), (64_000, 0.0, 400.0), (125_000, 20.0, 1000.0)],
)
def test_exchanges_whose_time_does_not_grow_keep_the_link_busy(nbytes, latency, on_link):
    """A single one takes the 400 us that were measured. Of those, the link is busy for as long as
    larger exchanges take for these bytes, at 125 bytes/us."""
    flat = Region(0, 400.0, 1e6)
    link = Link(0, 1, measured={"message": (flat, Region(100_000, 20.0, 0.125))})
    parts = link.parts_us("all_to_all", nbytes, 2, 1, by_messages=True)
    assert parts == pytest.approx((latency, on_link), abs=0.2)
    assert link.parts_us("all_to_all", 0, 2, 1, by_messages=True) == (400.0, 0.0)


@tried
@given(st.integers(0, 10**6), st.floats(1, 1e3), st.floats(0.05, 50), st.floats(0, 0.3))
def test_noise_makes_few_regions_and_never_a_time_that_cannot_be(seed, alpha, rate, noise):
    rng = random.Random(seed)
    points = [Point(1, p.sent, p.us * (1 + noise * rng.uniform(-1, 1))) for p in line(alpha, rate)]
    found = regions(points)
    assert 1 <= len(found) <= MOST_REGIONS
    assert found[0].from_bytes == 0
    assert [each.from_bytes for each in found] == sorted({each.from_bytes for each in found})
    for each in found:
        assert 0 <= each.alpha_us < math.inf
        assert 0 < each.gbytes_per_s < math.inf
    link = Link(alpha, rate, measured={"all_reduce": found})
    for point in points:
        predicted = link.region("all_reduce", point.sent).time_us(1, point.sent)
        assert predicted == pytest.approx(point.us, rel=max(2.5 * noise, CLOSE) + 1e-6)


@tried
@given(st.integers(0, len(SIZES) - 1), st.floats(1.5, 20), st.floats(5, 1e3), st.floats(0.05, 50))
def test_one_busy_size_does_not_change_the_others(busy, times, alpha, rate):
    """A size that took longer may raise those up to the next larger one that is as slow. All
    others are predicted within 5 %. The smallest alone tells alpha: if it is the busy one, the next
    may be off by a third."""
    points = line(alpha, rate)
    slow = Point(1, points[busy].sent, points[busy].us * times)
    changed = [*points[:busy], slow, *points[busy + 1 :]]
    found = regions(changed)
    link = Link(alpha, rate, measured={"all_reduce": found})
    for point in points:
        if point.us >= points[busy].us and point.us < slow.us:
            continue
        predicted = link.region("all_reduce", point.sent).time_us(1, point.sent)
        assert predicted == pytest.approx(point.us, rel=0.05 if busy else 0.4)


def test_no_region_lies_between_two_points():
    noisy = [1.0, 1.3, 1.0, 1.4, 0.8, 1.5, 1.0, 1.3, 0.9]
    points = [Point(1, p.sent, p.us * n) for p, n in zip(line(60, 0.1), noisy, strict=True)]
    starts = [each.from_bytes for each in regions(points)] + [math.inf]
    for begin, end in pairwise(starts):
        assert sum(begin <= point.sent < end for point in points) >= 3


def test_times_that_fall_have_the_median_of_all_that_are_slower_than_something_larger():
    """The lower one of the last two is below the first, which then belongs to them."""
    (found,) = regions([Point(1, n, us) for n, us in ((1024, 20), (4096, 30), (16384, 2))])
    assert found.alpha_us == pytest.approx(20)


def test_times_that_fall_with_size_give_no_negative_rate():
    points = [Point(1, n, us) for n, us in zip(SIZES, [500, 400, 300, 300, 200], strict=False)]
    (found,) = regions(points)
    assert found.alpha_us == pytest.approx(300)
    assert found.time_us(1, SIZES[4]) == pytest.approx(300, rel=1e-3)


def test_negative_alpha_is_none():
    points = [Point(1, 1000.0, 1.0), Point(1, 2000.0, 4.0)]
    (found,) = regions(points)
    assert found.alpha_us == 0


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "at least 2 sizes, not 0"),
        (line(1, 1)[:1], "at least 2 sizes, not 1"),
        ([Point(1, 8.0, 1.0)] * 3, "at least 2 sizes, not 1"),
        ([Point(1, 8.0, 1.0), Point(1, 16.0, 0.0)], "no time that can be"),
        ([Point(1, 8.0, 1.0), Point(1, 16.0, math.nan)], "no time that can be"),
        ([Point(1, 8.0, 1.0), Point(1, math.inf, 2.0)], "no time that can be"),
    ],
)
def test_points_that_cannot_be_are_refused(points, said):
    with pytest.raises(ProfileError, match=said):
        regions(points)


def test_measurements_replace_the_formula():
    measured = {
        "all_reduce": (Region(0, 10, 1.0), Region(1e6, 100, 2.0)),
        "message": (Region(0, 7, 4.0),),
    }
    link = Link(60, 0.5, {"all_reduce": 3.0}, measured=measured, contention_bytes=1e6)
    # 4 ranks: 6 messages, 1.5 of the bytes
    assert link.time_us("all_reduce", 1000, 4) == pytest.approx(6 * 10 + 1500 / 1000)
    assert link.time_us("all_reduce", 1e6, 4) == pytest.approx(6 * 100 + 1.5e6 / 2000)
    assert link.time_us("all_gather", 1000, 4) == pytest.approx(3 * 60 + 3000 / 500)
    alone = link.parts_us("all_to_all", 1000, 4, 1, by_messages=True)
    assert alone == pytest.approx((7, 1000 / 4000))
    # several peers: the time measured for one applies if nothing else was measured
    assert link.parts_us("all_to_all", 3000, 4, 3, by_messages=True) == pytest.approx((7, 0.75))
    assert link.parts_us("all_reduce", 1000, 1) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("peers", "nbytes", "again"), [(1, 4000, 0), (3, 4000, 1000), (3, 1e8, 1e6)]
)
def test_messages_to_several_ranks_crowd_each_other_out(peers, nbytes, again):
    """A quarter of a small message is sent again, and ``contention_bytes`` of a large one; with one
    peer, nothing is."""
    link = Link(60, 0.5, contention_bytes=1e6)
    found = link.parts_us("all_to_all", nbytes, 4, peers, by_messages=True)
    assert found == pytest.approx((60, (nbytes + again) / 500))


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"all_reduced": (Region(0, 1, 1),)}, "did you mean 'all_reduce'"),
        ({"all_reduce": ()}, "must begin at 0"),
        ({"all_reduce": (Region(1, 1, 1),)}, "must begin at 0"),
        ({"all_reduce": (Region(0, 1, 1), Region(0, 2, 2))}, "begin at 0 and grow"),
        ([], "must map kinds"),
    ],
)
def test_regions_that_cannot_be_are_refused(measured, said):
    with pytest.raises(PolicyError, match=said):
        Link(1, 1, measured=measured)


@pytest.mark.parametrize("bad", [(-1, 1, 1), (0, -1, 1), (0, 1, 0), (0, math.nan, 1)])
def test_region_of_impossible_numbers_is_refused(bad):
    with pytest.raises(PolicyError, match="must be a number"):
        Region(*bad)


@tried
@given(
    st.integers(0, 10**6),
    st.floats(20, 300),
    st.floats(0.3, 8),
    st.sampled_from(SIZES[2:7]),
    st.floats(0.3, 3),
    st.floats(0, 0.3),
)
def test_more_bytes_never_take_less_time_between_the_points_either(
    seed, alpha, rate, change, slower, noise
):
    """A line ends between two points, and the next one may be lower there.

    A constant time counts as 10^6 GB/s, which is 0.1 us for 64 MiB.
    """
    rng = random.Random(seed)
    points = [
        Point(
            1,
            n,
            (alpha + n / rate / 1e3 * (slower if n > change else 1)) * rng.uniform(1, 1 + noise),
        )
        for n in SIZES
    ]
    link = Link(alpha, rate, measured={"all_reduce": regions(points)})
    sizes = [2 ** (each / 8) for each in range(80, 217)]
    times = [link.region("all_reduce", each).time_us(1, each) for each in sizes]
    assert all(after >= before - 0.1 for before, after in pairwise(times))


def test_size_that_takes_longer_once_changes_no_other():
    points = line(7, 33)
    points[1] = Point(1, points[1].sent, 5 * points[1].us)
    link = Link(7, 33, measured={"all_reduce": regions(points)})
    for point in line(7, 33):
        predicted = link.region("all_reduce", point.sent).time_us(1, point.sent)
        assert predicted == pytest.approx(point.us, rel=0.05)


def test_largest_size_that_takes_far_longer_is_a_region_of_its_own():
    """On two busy cores, gloo gathered 4 MiB in 13 ms, and 16 MiB in 256 ms."""
    points = line(900, 0.33)
    points[-1] = Point(1, points[-1].sent, 5 * points[-1].us)
    (first, last) = regions(points)
    assert (first.alpha_us, first.gbytes_per_s) == pytest.approx((900, 0.33))
    assert last.from_bytes == SIZES[-1]
    assert last.time_us(1, SIZES[-1]) == pytest.approx(points[-1].us)
    points[-1] = Point(1, points[-1].sent, 1.5 * points[-1].us / 5)
    assert len(regions(points)) == 1
