"""Plan what is sent of each gradient, in which buffers, by which collective: SSFusion, section IV.

These are pure functions of numbers: equal numbers give equal plans on every rank. Times are
microseconds of one step. Gradients are numbered in the order in which backward produces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from commpass.costmodel import Link
from commpass.costmodel.buffers import (
    BOUND,
    FINEST,
    Gradient,
    Problem,
    cut_off,
    excluded,
    fused,
    idle,
    offloaded,
    slack,
    sparsified,
)
from commpass.errors import PolicyError, check_number

BUCKET_BYTES = 25 << 20
"""The size of dense buffers before times are measured: DDP's default."""


@dataclass(frozen=True)
class Settings:
    """The settings of a plan.

    - ``density``: the share of all entries that is sent; ``bound``: the least share of one
      gradient.
    - ``fuse``: if False, each gradient is a buffer.
    - ``aware``: density-aware: large gradients compensate for those that are sent dense.
    - ``interleave``: all_reduce for dense gradients.
    - ``offload``: selection by the CPU.
    - ``force``: sparse even if dense is predicted to be as fast. Otherwise the gain must be more
      than the share ``margin`` of what dense exchange adds to backward.
    """

    density: float = 0.01
    bound: float = BOUND
    fuse: bool = True
    aware: bool = True
    interleave: bool = True
    offload: bool = True
    force: bool = False
    margin: float = 0.1

    def __post_init__(self) -> None:
        check_number("density", self.density, 1 / FINEST, maximum=1.0)
        check_number("bound", self.bound, 1 / FINEST, maximum=1.0)
        check_number("margin", self.margin, maximum=1.0)
        if self.bound > self.density:
            raise PolicyError(
                f"bound={self.bound}: is the least density of one gradient, and so must be at most"
                f" density={self.density}"
            )


@dataclass(frozen=True)
class Sent:
    """What is sent of gradient ``number``: the share ``density`` of it, 1 for all.

    ``offloaded``: a CPU thread selects. ``why`` is the reason as text.
    """

    number: int
    density: float = 1.0
    offloaded: bool = False
    why: str = ""

    @property
    def dense(self) -> bool:
        return self.density == 1.0


@dataclass(frozen=True)
class Message:
    """One collective: ``all_reduce`` of dense gradients, or ``all_gather`` of all others."""

    kind: str
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class Buffer:
    """Gradients that follow one another in backward.

    Dense ones among the first ``reduced`` are sent by all_reduce as soon as they arrive; all others
    by one all_gather.
    """

    sent: tuple[Sent, ...]
    reduced: int = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        reduce = tuple(each for each in self.sent[: self.reduced] if each.dense)
        gather = tuple(each for each in self.sent if each not in reduce)
        made = (Message("all_reduce", reduce), Message("all_gather", gather))
        return tuple(message for message in made if message.sent)


@dataclass(frozen=True)
class FusionPlan:
    """The buffers in the order of their exchange.

    ``end_us`` is the predicted end of the last one, from the start of backward. ``dense_us`` is
    that of dense all_reduces in the best buffers. ``why`` is the reason if nothing is sparse.
    """

    buffers: tuple[Buffer, ...]
    end_us: float = 0.0
    dense_us: float = 0.0
    why: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for buffer in self.buffers for message in buffer.messages)

    @property
    def sparse(self) -> tuple[Sent, ...]:
        return tuple(each for buffer in self.buffers for each in buffer.sent if not each.dense)


def make(
    gradients: Sequence[Gradient],
    ranks: int,
    link: Link,
    row_bytes: Callable[[int, float], int],
    settings: Settings,
    overhead_us: Callable[[str, float], float] = idle,
) -> FusionPlan:
    """Return the plan of a step.

    ``row_bytes(entries, density)`` are the bytes of a sparse row; ``overhead_us`` is that of
    ``Problem``.
    """
    problem = Problem(gradients, ranks, link, row_bytes, overhead_us=overhead_us)
    whole = _all_dense(problem, settings)
    if ranks == 1:
        return replace(whole, why="one rank: nothing is sent")
    found = _selected(problem, settings)
    found = replace(found, dense_us=whole.end_us)
    gain = whole.end_us - found.end_us
    added = whole.end_us - sum(each.backward_us for each in gradients)
    if settings.force or gain > settings.margin * added:
        return found
    why = f"sent whole: {found.end_us:.0f} us if sparse, {whole.end_us:.0f} us dense"
    return replace(whole, why=why)


def unmeasured(gradients: Sequence[Gradient]) -> FusionPlan:
    """Return a plan that sends all dense in buffers of a fixed size, until times are known."""
    buffers: list[list[Sent]] = []
    room = 0
    for number, each in enumerate(gradients):
        if not buffers or each.nbytes > room:
            buffers.append([])
            room = BUCKET_BYTES
        buffers[-1].append(Sent(number, why="sent whole: times are being measured"))
        room -= each.nbytes
    return FusionPlan(tuple(Buffer(tuple(sent), len(sent)) for sent in buffers))


def _all_dense(problem: Problem, settings: Settings) -> FusionPlan:
    """Return a plan that sends all dense by all_reduce, in the best buffers."""
    everything = frozenset(range(len(problem.gradients)))
    runs = fused(problem, everything, "all_reduce") if settings.fuse else _each(problem)
    sent = [tuple(Sent(number, why="sent whole") for number in run) for run in runs]
    buffers = tuple(Buffer(some, len(some)) for some in sent)
    end = problem.end_us(buffers)
    return FusionPlan(buffers, end, end)


def _selected(problem: Problem, settings: Settings) -> FusionPlan:
    """Decide on buffers, selection, densities, offload and separation in the order of the paper."""
    why = {
        number: "sent whole: its codes would be no smaller"
        for number, each in enumerate(problem.gradients)
        if problem.row_bytes(each.entries, settings.density) >= each.nbytes
    }
    problem = replace(problem, density=settings.density)
    runs = fused(problem, frozenset(why), "all_gather") if settings.fuse else _each(problem)
    if settings.fuse:
        room = slack(problem.gradients, why, settings.density, settings.bound)
        for number in excluded(problem, runs, frozenset(why), room):
            why[number] = "sent whole: its selection would outlast the exchange before (equation 2)"
    density = settings.density
    if settings.aware:
        density = sparsified(problem.gradients, why, settings.density, settings.bound)
    problem = replace(problem, density=density)
    buffers = []
    for run in runs:
        offload = offloaded(problem, run, frozenset(why)) if settings.offload else frozenset()
        sent = tuple(
            Sent(number, why=why[number])
            if number in why
            else Sent(number, density, number in offload, f"{density:.4g} of its entries")
            for number in run
        )
        buffers.append(Buffer(sent, cut_off(problem, sent) if settings.interleave else 0))
    made = tuple(buffers)
    return FusionPlan(made, problem.end_us(made))


def _each(problem: Problem) -> list[range]:
    return [range(number, number + 1) for number in range(len(problem.gradients))]
