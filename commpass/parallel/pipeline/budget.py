"""The error budget of messages between pipeline stages, on real data.

The sending end measures the first microbatch of a step, and publishes what is over its budget
before the step ends. Both ends apply it from the first microbatch of the next step on. By then the
receiving end finds it in the store. A step in which a message has nothing to measure (all its
finite blocks are zero) does not count: then steps 4, 8, 16, ... are measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from commpass.codecs import Codec
from commpass.distributed.budget import excess, is_due
from commpass.distributed.samples import CHECKED, measure, reading_of
from commpass.parallel.pipeline import endpoints
from commpass.passes.sample import unsupported_reason
from commpass.plan import UNCOMPRESSED, PlannedSite, uncompressed
from commpass.policy import Policy

What = tuple[str, str]
"""``send`` or ``recv``, and the direction."""


class EdgeBudget:
    """The checks of one stage's messages.

    ``over`` has, by direction and site name, the reason why a site is left uncompressed.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.over: dict[tuple[str, str], str] = {}
        self.steps: Counter[What] = Counter()
        self.over_in_step: dict[What, dict[str, str]] = {}
        # the number of steps on which a site still has to be measured
        self.remaining: dict[What, dict[str, int]] = {}
        self.ended: set[str] = set()  # keys of edges about which nothing more is published

    def restart(self, direction: str) -> None:
        """Restart the counts of a direction: torch has prepared the stage anew, and both ends do
        the same."""
        for kind in ("send", "recv"):
            self.steps.pop((kind, direction), None)
            self.over_in_step.pop((kind, direction), None)
            self.remaining.pop((kind, direction), None)

    def apply(self, sites: Sequence[PlannedSite]) -> tuple[PlannedSite, ...]:
        """Return the sites of a plan, with those over their budget uncompressed."""
        return tuple(
            uncompressed(site, UNCOMPRESSED + why, site.plain_us)
            if (why := self.over.get((site.direction, site.name))) and site.compressed
            else site
            for site in sites
        )

    def begin(self, exchange: What, edges: Sequence[endpoints.Edge], timeout_s: float) -> bool:
        """Return, at the first microbatch of a step, whether the last step found anything over its
        budget.

        Raise Unanswered if the sending end does not publish that in time.
        """
        step = self.steps[exchange]
        self.steps[exchange] += 1
        if not step or not is_due(step, self.policy.check_calls):
            return False
        kind, direction = exchange
        over = dict(self.over_in_step.pop(exchange, {}))
        if kind == "recv":
            for edge in edges:
                if edge.key in self.ended:
                    continue
                found = endpoints.errors(edge, step, timeout_s)
                over |= found.over
                if not found.more:
                    self.ended.add(edge.key)
        self.over |= {(direction, name): why for name, why in over.items()}
        return bool(over)

    def max_error_of(self, site: PlannedSite) -> float | None:
        """Return the error budget of a site; None if it has none."""
        allowed = self.policy.allowed(site)[0]
        return None if allowed.force or unsupported_reason(site) else allowed.max_error

    def is_due(self, exchange: What, microbatch: int) -> bool:
        """Return whether the messages of this microbatch are measured."""
        if exchange[0] != "send" or microbatch or not self._more(exchange):
            return False
        return is_due(self.steps[exchange], self.policy.check_calls)

    def _more(self, exchange: What) -> bool:
        """Return whether any site still has to be measured."""
        return exchange not in self.remaining or any(self.remaining[exchange].values())

    def measure(self, exchange: What, site: PlannedSite, codec: Codec, x: Tensor) -> None:
        """Measure a message that is about to be encoded."""
        remaining = self.remaining.setdefault(exchange, {})
        bound = self.max_error_of(site)
        if bound is None:
            return
        remaining.setdefault(site.name, self.policy.check_calls)
        reading = reading_of(measure(codec, x, CHECKED).tolist(), site)
        if reading is None:
            return
        remaining[site.name] = max(remaining[site.name] - 1, 0)
        if why := excess(reading, bound):
            self.over_in_step.setdefault(exchange, {})[site.name] = why
            remaining[site.name] = 0  # it stays uncompressed

    def publish(self, exchange: What, edges: Sequence[endpoints.Edge]) -> None:
        """Publish the findings for the other end of each edge."""
        over = self.over_in_step.get(exchange, {})
        for edge in edges:
            of_edge = {site: why for site, why in over.items() if edge.carries(site)}
            found = endpoints.EdgeErrors(of_edge, self._more(exchange))
            endpoints.publish_errors(edge, self.steps[exchange], found)
