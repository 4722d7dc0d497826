"""Check the error budget on real data in the first calls of each graph, with one result for all
ranks.

A plan's error is that of Gaussian values. So on its first calls a graph measures what each lossy
site with a ``max_error`` does to its real values (``samples``). After such a call each rank
publishes its readings in the store. Before its next call it reads those of all ranks that compared
this plan. A site that is over its budget on any rank is over it for all: all leave it uncompressed
from that call on.

Blocks with a value that is not finite are left out. A call without anything to measure (no other
block has a value other than zero) does not count. The check then continues after twice as many
calls.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from commpass.distributed.agreement import PATIENCE_S
from commpass.distributed.pairs import channel_of
from commpass.distributed.plan_store import Round, current_store, spans
from commpass.distributed.samples import MORE, Reading, Sampled, Samples, label
from commpass.errors import Unanswered
from commpass.plan import PlannedSite

log = logging.getLogger("commpass")

LOST = 0.05
"""Share of non-zero values that may be lost under the smallest budgets. Of heavy-tailed values
(Laplace, Student's t with 3 degrees) an 8-bit codec loses 1 to 4 %. Of counts and statistics that
share blocks with activations, it loses 15 to 100 %."""
PER_ERROR = 4.0
"""Share that may be lost for each unit of ``max_error``: a uniform quantiser turns 1.4 times its
relative error of Gaussian values into 0."""
MOST_LOST = 0.5
WORST = 10.0
"""How many times ``max_error`` the error of a block may be."""
LONGEST_PAUSE_S = 0.05
OVER = "%s (%s) stays uncompressed from now on, on all ranks: %s. %s"
"""Site, kind, what is over the budget, and what to do."""
STAYS = (
    "%s (%s) stays compressed: %s. This rank compiled the graph with a plan that was agreed on for"
    " other inputs, and cannot change the site by itself. %s"
)
"""The same, for a graph that was not compared with other ranks'."""

WAITS = (
    "this rank has waited %.0f s, of at most %g s, for rank %s to publish the real errors of %s: it"
    " may have stopped"
)


def limits(bound: float) -> Reading:
    """Return the largest readings within a budget of ``max_error``."""
    lost = min(max(LOST, PER_ERROR * bound), MOST_LOST)
    return Reading(error=bound, lost=lost, worst=min(WORST * bound, 1.0))


def excess(reading: Reading, bound: float) -> str:
    """Return what of a reading is over a budget, as text; "" if nothing is."""
    most = limits(bound)
    found = []
    if reading.error > most.error:
        found.append(f"its real error is {reading.error:.3g}, above max_error={bound:.3g}")
    if reading.lost > most.lost:
        found.append(
            f"{reading.lost:.1%} of its non-zero values are lost (they became 0 or are off by"
            f" their own size), above {most.lost:.1%}"
        )
    if reading.worst > most.worst:
        found.append(f"its worst block is off by {reading.worst:.3g}, above {most.worst:.3g}")
    if reading.whole and reading.error:
        found.append("its values are whole numbers, as counts and ids are, and codes change that")
    return "; ".join(found)


def is_due(call: int, calls: int) -> bool:
    """Return whether the call of that number, from 1, is measured while the check goes on.

    The first ones are, and ever fewer later ones if there was nothing to measure.
    """
    return 0 < call <= calls or (calls > 0 and call & (call - 1) == 0)


Key = str
"""The identifier of a site of one graph on all ranks, and in each compilation of it."""


def keys_of(sites: Sequence[PlannedSite], rank: int) -> dict[str, Key]:
    """Return a key for each site of this rank's graph, by its name.

    The key is the same on ranks of other groups of the same dimension, at the other end of a
    message, and at other sizes.
    """
    counts: dict[tuple[object, ...], int] = {}
    found = {}
    for site in sites:
        facts: tuple[object, ...]
        if site.pairwise:
            facts = (site.group, *channel_of(site, site.global_ranks.index(rank)))
        else:
            facts = (site.kind, site.reduce_op, site.group_label, site.module, site.direction)
        counts[facts] = number = counts.get(facts, 0) + 1
        raw = msgspec.json.encode([*facts, number])
        found[site.name] = hashlib.sha256(raw).hexdigest()[:16]
    return found


@dataclass(frozen=True)
class Published:
    """What a rank publishes of one call: the keys of the sites that it ``measured``, and those
    ``over`` their budget with the reasons."""

    measured: tuple[Key, ...] = ()
    over: dict[Key, str] = field(default_factory=dict)


LEFT = "left"
"""The key, in place of a call's number, under which a rank publishes that it has ended the check.
"""


class Check:
    """The check of one graph on this rank.

    ``round`` is None if no ranks compare plans. Each site is measured on ``calls`` calls, and the
    check is ``done`` once all were. ``made`` is the number of calls so far. ``pending`` says that
    the ranks have not yet compared what they published of the latest call. A check without
    ``decides`` only warns: other ranks keep the plan that this one adopted. The sites in ``skip``
    are checked by another graph.
    """

    def __init__(
        self,
        samples: Samples,
        round: Round | None,
        calls: int,
        timeout_s: float,
        *,
        decides: bool = True,
        skip: Collection[str] = (),
    ):
        self.samples, self.round, self.calls, self.timeout_s = samples, round, calls, timeout_s
        self.decides = decides
        self.store = current_store() if round is not None else None
        rank = self.store.rank if self.store is not None else 0
        self.peers = [each for each in round.ranks if each != rank] if round is not None else []
        keys = keys_of([each.site for each in samples.sites], rank)
        checked = (each for each in samples.sites if each.checked and each.site.name not in skip)
        sites = {keys[each.site.name]: each for each in checked}
        self.sites: dict[Key, Sampled] = sites
        self.counts = dict.fromkeys(sites, 0)
        self.made = 0
        self.pending = False
        self.done = not calls or not sites

    def __str__(self) -> str:
        names = ", ".join(label(each.site) for each in self.sites.values())
        return f"call {self.made} of the graph with {names}"

    @property
    def is_first(self) -> bool:
        """Whether this rank reports the result for all."""
        return self.round is None or self.store is None or self.store.rank == self.round.ranks[0]

    def begin(self) -> None:
        """Decide before a call whether it is measured."""
        self.made += 1
        self.samples.checking = not self.done and is_due(self.made, self.calls)
        for each in self.sites.values():
            each.reading = None

    def end(self) -> None:
        """Publish after a call what was measured."""
        if not self.samples.checking:
            return
        self.samples.read_measured(wait=True)
        self.samples.checking = False
        self.pending = True
        if self.peers:
            self._publish(self.made, self._own_reading())

    def _own_reading(self) -> Published:
        found = {key: each.reading for key, each in self.sites.items()}
        measured = {key: reading for key, reading in found.items() if reading is not None}
        why = {key: excess(r, self.sites[key].bound or 0.0) for key, r in measured.items()}
        return Published(tuple(measured), {key: text for key, text in why.items() if text})

    def _publish(self, call: int | str, published: Published) -> None:
        assert self.store is not None
        assert self.round is not None
        text = msgspec.json.encode(published)
        try:
            self.store.publish_errors(self.round.name, call, text)
        except RuntimeError as error:  # the others report whom they wait for
            log.debug("commpass could not reach the store: %s", error)

    def end_early(self) -> None:
        """End the check: the others do not wait for this rank, and end theirs as well."""
        if not self.done and self.peers:
            self._publish(LEFT, Published())
        self.done = True

    def collect(self) -> dict[Key, str]:
        """Wait for what all ranks publish of the latest call, if it was measured.

        Return the sites that are over their budget on any rank, with the reason. They include sites
        that this rank's graph does not have. Raise Unanswered if a rank does not publish in time.
        """
        if not self.pending:
            return {}
        self.pending = False
        if self.store is not None and self.store is not current_store():
            self.done = True  # the process groups were made anew, and the round is void
            return {}
        others = self._peer_readings()
        if others is None:
            self.done = True  # all ranks must apply a result, and one will not get it
            return {}
        everyone = {self.store.rank if self.store is not None else 0: self._own_reading(), **others}
        over: dict[Key, str] = {}
        for rank, published in sorted(everyone.items()):
            for key, why in published.over.items():
                over.setdefault(key, f"{why} (rank {rank})")
        for key in {key for its in everyone.values() for key in its.measured} & self.counts.keys():
            self.counts[key] += 1
        self.done = all(count >= self.calls for count in self.counts.values())
        return over if self.decides else self._warn(over)

    def _warn(self, over: dict[Key, str]) -> dict[Key, str]:
        """Warn once for each site that is over its budget. Return an empty dict: no site is
        dropped."""
        for key, why in over.items():
            sampled = self.sites[key]
            if not sampled.warned:
                sampled.warned = True
                log.warning(STAYS, label(sampled.site), sampled.site.kind, why, MORE)
        return {}

    def _peer_readings(self) -> dict[int, Published] | None:
        """Return what the others published of the latest call; None if one ended the check before
        it."""
        start, warned, pause = time.monotonic(), False, 0.0005
        found: dict[int, Published] = {}
        while missing := [rank for rank in self.peers if rank not in found]:
            assert self.store is not None
            assert self.round is not None
            try:
                # First: a rank that has ended its check published all its calls before that.
                ended = self.store.errors(missing, self.round.name, LEFT)
                raw = self.store.errors(missing, self.round.name, self.made)
            except RuntimeError as error:
                raise Unanswered(
                    "the ranks could not compare the real errors of a graph: the store of"
                    f" torch.distributed does not answer ({str(error).splitlines()[0]})"
                ) from error
            found |= {rank: msgspec.json.decode(text, type=Published) for rank, text in raw.items()}
            if ended.keys() - raw.keys():
                return None
            if len(found) == len(self.peers):
                break
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                raise Unanswered(
                    f"rank {spans(missing)} did not publish the real errors of {self} within"
                    f" {self.timeout_s:g} s: it may have stopped, or does not call this graph as"
                    " often as this rank"
                )
            if waited > PATIENCE_S and not warned:
                warned = True
                log.warning(WAITS, waited, self.timeout_s, spans(missing), self)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return found
