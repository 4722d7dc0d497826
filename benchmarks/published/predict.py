"""Predict both times of a setup with the cost model of commpass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import ceil

import torch

from benchmarks.published.setups import (
    BEST,
    COPIES,
    COPY_RING,
    KERNELS,
    LIBRARY,
    SINGLE_KERNEL,
    Setup,
)
from commpass.collectives import read_stages
from commpass.costmodel import Prices, finished_us
from commpass.passes.candidates import stages_us
from commpass.passes.payloads import common_input, prices_of
from commpass.plan import Site
from commpass.plan.kinds import KINDS
from commpass.plan.stage import Stage

RAW = "raw"


def predicted(setup: Setup) -> tuple[float | None, float | None]:
    """Return the microseconds of the plain and of the compressed exchange, None for one that the
    setup does not have."""
    plain = _plain_us(setup) if setup.plain else None
    if plain is not None and setup.copies:
        kernels = setup.profile.kernels
        plain += kernels.copies_us(1, 2 * setup.nbytes)
    return plain, _compressed_us(setup) if setup.compressed else None


def _plain_us(setup: Setup) -> float:
    if setup.plain == COPY_RING:
        return _copy_ring_us(setup, "")
    ways = {LIBRARY: [_library_us], SINGLE_KERNEL: [_raw_us], BEST: [_library_us, _raw_us]}
    return min(way(setup) for way in ways[setup.plain])


def _library_us(setup: Setup) -> float:
    return prices_of(site_of(setup), setup.profile).time_us(setup.kind, setup.nbytes)


def _raw_us(setup: Setup) -> float:
    return _in_single_kernel_us(dataclasses.replace(setup, codec=RAW))


def _compressed_us(setup: Setup) -> float:
    if setup.compressed == COPY_RING:
        return _copy_ring_us(setup, setup.codec)
    if setup.compressed == COPIES:
        return _copies_us(setup)
    if setup.compressed == SINGLE_KERNEL:
        return _in_single_kernel_us(setup)
    assert setup.compressed == KERNELS
    return stages_us(_stages(setup), site_of(setup), setup.profile)


def site_of(setup: Setup) -> Site:
    """Return a site of the setup, on GPUs but for a profile of Ethernet."""
    dtype: torch.dtype = getattr(torch, setup.dtype)
    return Site(
        name=setup.kind,
        kind=setup.kind,
        reduce_op="sum" if KINDS[setup.kind].sums else None,
        group="",
        group_size=setup.ranks,
        dtype=setup.dtype,
        shape=(setup.nbytes // dtype.itemsize,),
        bytes=setup.nbytes,
        device="cpu" if setup.profile.name.startswith("ethernet") else "cuda",
    )


def _stages(setup: Setup) -> Sequence[Stage]:
    if setup.kind != "all_reduce" and setup.algorithm == "two_shot":
        algorithm = "coded" if setup.kind == "all_gather" else "direct"
    else:
        algorithm = setup.algorithm
    found = read_stages(setup.kind, algorithm, setup.codec, *common_input(site_of(setup)))
    return found.stages


def _in_single_kernel_us(setup: Setup) -> float:
    """Return the time of a single kernel whose programs process one tile each."""
    of_group = prices_of(site_of(setup), setup.profile)
    stages = [dataclasses.replace(each, rounds=1) for each in _stages(setup)]
    return finished_us([of_group.task(stage) for stage in stages])


def _copies_us(setup: Setup) -> float:
    """Return the time of a two-shot whose exchanges are copies to each other rank, each of which
    also is a launch of a kernel before and after it."""
    of_group, kernels = prices_of(site_of(setup), setup.profile), setup.profile.kernels
    us = 0.0
    for stage in _stages(setup):
        if stage.role != "exchange":
            us += of_group.task(stage).us
            continue
        sent = stage.leaving * (setup.ranks - 1 if stage.kind == "all_gather" else 1)
        latency, on_link = of_group.link.parts_us(
            "all_to_all", sent, setup.ranks, setup.ranks - 1, by_messages=True
        )
        us += latency + on_link + 2 * (setup.ranks - 1) * kernels.launch_us
    return us


def _copy_ring_us(setup: Setup, codec: str) -> float:
    """Return the time of a ring of copies: each of its steps is a copy, and a kernel that waits and
    adds. Only the second half is in codes."""
    of_group, kernels = prices_of(site_of(setup), setup.profile), setup.profile.kernels
    ranks, steps = setup.ranks, setup.ranks - 1
    part = setup.nbytes / ranks
    if codec:
        wire = _ring_wire(setup)
        values = ceil(setup.nbytes / getattr(torch, setup.dtype).itemsize)
        coding = kernels.time_us(codec, "encode", values / ranks) + kernels.time_us(
            codec, "decode", values
        )
    else:
        wire, coding = part, 0.0
    us = steps * (2 * kernels.launch_us + _hop_us(of_group, part))
    us += steps * (2 * kernels.launch_us + _hop_us(of_group, wire))
    added = kernels.copies_us(0, 3 * setup.nbytes)
    return us + coding + added


def _hop_us(of_group: Prices, nbytes: float) -> float:
    latency, on_link = of_group.link.parts_us("send", nbytes, 2, 1, by_messages=True)
    return latency + on_link


def _ring_wire(setup: Setup) -> float:
    """Return the bytes of a rank's coded part."""
    gather = next(
        stage
        for stage in _stages(setup)
        if stage.role == "exchange" and stage.kind == "all_gather"
    )
    return float(gather.leaving)


