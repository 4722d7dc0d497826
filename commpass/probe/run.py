"""``probe``: measure links and kernels, and create a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist

from commpass.costmodel import Link
from commpass.costmodel.files import Measured, ProfileFile
from commpass.costmodel.fit import Point, regions
from commpass.distributed.hosts import on_each_host
from commpass.distributed.machine import default_here, device_of, host_id, this_machine
from commpass.errors import ProfileError
from commpass.probe.kernels import CODECS, SERIAL
from commpass.probe.kernels import measure as kernel_times
from commpass.probe.links import Times, kinds, measure, overhead_us
from commpass.utils.version import own_version

Progress = Callable[[int, int, str], None]
"""Called with the number of measured kinds of exchanges and codecs, their total, and the next
one."""


def probe(
    seconds: float = 40.0,
    *,
    name: str = "measured",
    kernels: bool = False,
    progress: Progress | None = None,
) -> ProfileFile:
    """Measure the links of the default process group for about ``seconds`` seconds, and optionally
    kernels.

    Every rank calls it, and all get the result of rank 0. Raise ProfileError without a process
    group of several ranks, and if a CPU has no C++ compiler for the kernels.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ProfileError("there is nothing to measure: a probe needs a group of several ranks")
    world = dist.group.WORLD
    assert world is not None
    device = device_of(world)
    if kernels and device.type == "cpu":
        _check_compilers()
    places = _gathered(host_id())
    ranks_per_host = on_each_host(places)
    levels: dict[str, Any] = {"link": world}
    if 1 < ranks_per_host < world.size():
        levels = {
            "link": _one_of_each_host(ranks_per_host, world.size()),
            "intra_host_link": dist.new_group(list(range(ranks_per_host))),
        }
    by_messages = device.type == "cpu"
    busy = round(overhead_us(world, device), 1) if by_messages else 0.0
    many = len(levels) * len(kinds(world, by_messages=by_messages)) + kernels * len(CODECS + SERIAL)
    done = 0

    def report(message: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, many, message)
        done += 1

    found = {
        level: measure(group, device, seconds / len(levels), by_messages=by_messages, report=report)
        if isinstance(group, dist.ProcessGroup)
        else []
        for level, group in levels.items()
    }
    found = _gathered(found)[0]  # rank 0 is in all of them
    links = {level: _link(times, busy) for level, times in found.items()}
    default = default_here(device.type)
    profile = dataclasses.replace(
        default,
        kernels=kernel_times(world, device, default.kernels, report)
        if kernels
        else default.kernels,
        name=name,
        link=links["link"],
        intra_host_link=links.get("intra_host_link"),
        ranks_per_host=ranks_per_host if "intra_host_link" in links else 0,
        source="",
    )
    file = ProfileFile(
        commpass=own_version(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(places),
        profile=profile,
        points=tuple(_points(found, links)),
    )
    return _gathered(file)[0]


def _check_compilers() -> None:
    """Raise ProfileError on all ranks if one has no C++ compiler, before the links are measured."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
        found = True
    except InvalidCxxCompiler:
        found = False
    if without := [rank for rank, has_one in enumerate(_gathered(found)) if not has_one]:
        raise ProfileError(
            f"kernels are compiled, but rank {without[0]} has no C++ compiler: install one, or"
            " measure only links, without --kernels"
        )


def _one_of_each_host(ranks_per_host: int, ranks: int) -> Any:
    return dist.new_group(list(range(0, ranks, ranks_per_host)))


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _link(times: Sequence[Times], busy: float) -> Link:
    """Return a level's link: its measured regions, and overall numbers."""
    known_kinds = dict.fromkeys(each.kind for each in times)
    measured = {
        kind: regions([Point(t.messages, t.sent, t.us) for t in times if t.kind == kind])
        for kind in known_kinds
        if len({t.sent for t in times if t.kind == kind}) > 1
    }
    if "all_reduce" not in measured:
        raise ProfileError("the time was too short for two sizes of an all_reduce: give more")
    known = measured["all_reduce"]
    return Link(known[0].alpha_us, known[-1].gbytes_per_s, overhead_us=busy, measured=measured)


def _points(found: dict[str, list[Times]], links: dict[str, Link]) -> list[Measured]:
    points = []
    for level, times in found.items():
        for each in times:
            region = links[level].region(each.kind, each.sent)
            fit = region.time_us(each.messages, each.sent) if region else float("nan")
            points.append(
                Measured(
                    group=level,
                    kind=each.kind,
                    ranks=each.ranks,
                    nbytes=each.nbytes,
                    sent=int(each.sent),
                    us=round(each.us, 1),
                    low_us=round(each.low_us, 1),
                    high_us=round(each.high_us, 1),
                    fit_us=round(fit, 1),
                )
            )
    return points
