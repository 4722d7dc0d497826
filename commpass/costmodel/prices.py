"""The times of the stages of an algorithm and of plain collectives, on the links and kernels of a
profile.

They are used by the choice of codec and algorithm, the timeline, overlap, chunks, groups and
simplifications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commpass.costmodel.links import ONE, SEVERAL, Link, sharing_of
from commpass.costmodel.profile import INTRA_HOST, Profile
from commpass.costmodel.timeline import HOST, Task
from commpass.plan.stage import ALL, BLOCK, Stage, plain_exchange

LONGEST_STEP_US = 1.0
"""The most microseconds that a signal between GPUs of one host is assumed to take, as on PCIe. A
measured alpha includes the start of a library's collective."""
SIDE_STREAM = "single kernels"
"""The resource of single kernels in a separate stream."""
EVENT_US = 2.0
"""The microseconds from the record of an event in one stream to the work of another stream that
waits for it. An assumption: nothing has measured it."""


@dataclass(frozen=True)
class Prices:
    """The costs in one group of ``ranks`` ranks, with one profile.

    ``port`` names the link of its exchanges, which groups of the same port share; ``link`` is its
    speed. ``on_host`` ranks of the group are on each of its hosts (0: unknown).
    """

    profile: Profile
    ranks: int
    port: str
    link: Link
    on_host: int

    def task(self, stage: Stage) -> Task:
        """Return a stage as a task with its time."""
        if stage.rounds:
            return Task(HOST, self._in_single_kernel_us(stage), after=stage.after)
        if stage.role == "exchange":
            return self._exchange(stage)
        coded = stage.role in ("encode", "decode")
        kernels = self.profile.kernels
        us = kernels.time_us(stage.codec, stage.role, stage.values) if coded else 0.0
        return Task(HOST, us, after=stage.after)

    def time_us(self, kind: str, nbytes: float) -> float:
        """Return the microseconds of a plain collective to which each rank passes ``nbytes``."""
        task = self.task(plain_exchange(kind, nbytes))
        return task.us + task.latency_us

    def _in_single_kernel_us(self, stage: Stage) -> float:
        """Return the microseconds of a stage of a single kernel, which its first stage launches.

        An exchange is a signal, a read of a peer's memory (to it and back), and the transfer. An
        encode or decode is the access of a tile, and as long as a kernel of its own needs for the
        values. If each program processes several tiles, it does all of that in each round, and the
        rounds may take longer than the values. In the stream of the computation, the rank computes
        nothing else meanwhile; ``overlapped_kernel`` is for a separate stream.
        """
        kernels = self.profile.kernels
        launch_us = 0.0 if stage.after else kernels.launch_us
        if stage.role == "exchange":
            _, on_link_us = self.link.parts_us(
                stage.kind, stage.leaving, self.ranks, stage.peers, by_messages=True
            )
            step_us = min(self.link.alpha_us, LONGEST_STEP_US)
            return launch_us + step_us + max(2 * step_us + on_link_us, 2 * step_us * stage.rounds)
        if stage.role not in ("encode", "decode"):
            return launch_us
        values_us = kernels.in_exchange_us(stage.codec, stage.role, stage.values)
        return launch_us + max(values_us, kernels.tile_us * stage.rounds)

    def _exchange(self, stage: Stage) -> Task:
        port, link, sharing = self.port, self.link, None
        peers, ports = stage.peers or 0, self.profile.ports
        if stage.reach == BLOCK and self._is_on_one_host(peers + 1):
            assert self.profile.intra_host_link is not None
            port, link = INTRA_HOST, self.profile.intra_host_link
        elif stage.reach != ALL and self.on_host and (ports or link.protocols):
            per_port = self.profile.ranks_per_host / ports if ports else 1.0
            sharing = sharing_of(stage.reach, peers, self.ranks, self.on_host, per_port)
        latency, on_link_us = link.parts_us(
            stage.kind,
            stage.leaving,
            self.ranks,
            stage.peers,
            by_messages=stage.by_messages,
            sharing=sharing,
        )
        if not stage.by_messages:
            return Task(port, on_link_us, latency, stage.after)
        messages = self.ranks - 1 if stage.peers is None else stage.peers
        overhead_us = link.overhead_us * messages
        if link.region(ONE if messages == 1 else SEVERAL, stage.leaving) is not None:
            overhead_us = min(overhead_us, latency)  # a measured alpha includes it
            latency -= overhead_us
        return Task(port, on_link_us, latency, stage.after, overhead_us)

    def _is_on_one_host(self, ranks: int) -> bool:
        """Whether ``intra_host_link`` carries exchanges among each ``ranks`` consecutive ranks of
        the group. If the profile does not know hosts, the algorithm decides."""
        if self.profile.intra_host_link is None:
            return False
        return not self.profile.ranks_per_host or self.on_host % ranks == 0 < self.on_host


def overlapped_kernel(us: float, share: float) -> Task:
    """Return a single kernel of ``us`` microseconds in a separate stream.

    The kernel occupies at most a ``share`` of the processors, and computation has the others. So it
    computes for ``share * us`` microseconds less meanwhile. An event is recorded before the kernel
    and one after it, at ``EVENT_US`` each; computation stops for the first.
    """
    return Task(SIDE_STREAM, us, EVENT_US, overhead_us=EVENT_US, slowdown_us=share * us)


def prices(
    profile: Profile, ranks: int, labels: Sequence[str], members: Sequence[int] = ()
) -> Prices:
    """Return the prices of a group of ``ranks`` ranks with these labels; ``members`` are their
    global numbers (0, 1, ... if unknown)."""
    labels, members = labels or ("",), members or range(ranks)
    return Prices(
        profile,
        ranks,
        profile.port_of(*labels, ranks=members),
        profile.link_of(*labels, ranks=members),
        profile.on_each_host(members),
    )
