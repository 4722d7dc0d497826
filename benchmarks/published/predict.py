"""Predict both times of a setup with the cost model of commpass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from commpass.costmodel import finished_us
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
    return stages_us(stages_of(setup), site_of(setup), setup.profile)


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


def stages_of(setup: Setup) -> Sequence[Stage]:
    """Return the stages of the compressed exchange."""
    if setup.kind != "all_reduce" and setup.algorithm == "two_shot":
        algorithm = "direct"
    else:
        algorithm = setup.algorithm
    found = read_stages(setup.kind, algorithm, setup.codec, *common_input(site_of(setup)))
    return found.stages


def _in_single_kernel_us(setup: Setup) -> float:
    """Return the time of a single kernel whose programs process one tile each."""
    of_group = prices_of(site_of(setup), setup.profile)
    stages = [dataclasses.replace(each, rounds=1) for each in stages_of(setup)]
    return finished_us([of_group.task(stage) for stage in stages])


def _copies_us(setup: Setup) -> float:
    """Return the time of a two-shot whose exchanges are copies to each other rank, each with a
    launch. Copies, and kernels that signal and wait, are in streams of their own."""
    of_group, kernels = prices_of(site_of(setup), setup.profile), setup.profile.kernels
    us, peers = 0.0, setup.ranks - 1
    for stage in stages_of(setup):
        if stage.role != "exchange":
            us += of_group.task(stage).us
            continue
        sent = stage.leaving * (peers if stage.kind == "all_gather" else 1)
        latency, on_link = of_group.link.parts_us(
            "all_to_all", sent, setup.ranks, peers, by_messages=True
        )
        us += latency + on_link + peers * kernels.launch_us
    return us


PIECE = 512 << 10
"""Bytes of a step's part from which on a ring of copies sends it in two pieces."""


def _copy_ring_us(setup: Setup, codec: str) -> float:
    """Return the time of a ring of copies.

    A step is a copy and three kernels that signal, wait and add. Of two pieces, one is sent while
    the other waits. With a codec, the second half is in codes.
    """
    of_group, kernels = prices_of(site_of(setup), setup.profile), setup.profile.kernels
    ranks, steps = setup.ranks, setup.ranks - 1
    part = setup.nbytes / ranks
    wire, coding_us = part, 0.0
    if codec:
        wire = _gathered_wire(setup)
        values = setup.nbytes / getattr(torch, setup.dtype).itemsize
        coding_us = kernels.time_us(codec, "encode", values / ranks)
        coding_us += kernels.time_us(codec, "decode", values)

    def hop_us(nbytes: float) -> float:
        latency, on_link = of_group.link.parts_us("send", nbytes, 2, 1, by_messages=True)
        return on_link + (latency + 4 * kernels.launch_us) / (2 if nbytes >= PIECE else 1)

    return steps * (hop_us(part) + hop_us(wire)) + coding_us


def _gathered_wire(setup: Setup) -> float:
    """Return the bytes of a rank's coded part."""
    stages = [stage for stage in stages_of(setup) if stage.kind == "all_gather"]
    return float(stages[0].leaving)
