"""One line a model, and rules that matched nothing: said once, when a backend's graphs have all been seen."""

from __future__ import annotations

import logging
from collections import Counter

from commpass.errors import nearest
from commpass.groups import is_first_rank
from commpass.plan import Plan
from commpass.policy import Policy, unmatched

log = logging.getLogger("commpass")


class Summary:
    """What the graphs of one backend have in common. Reports when a graph runs a second time: then a whole step, forward
    and backward, has been compiled; at the latest when the backend goes."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.plans: list[Plan] = []
        self.calls: Counter[str] = Counter()
        self.reported = False
        self.speaks = True

    def add(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.speaks = is_first_rank()  # asked now: when the backend goes, the process group may have gone already

    def called(self, graph: str) -> None:
        if not self.reported:
            self.calls[graph] += 1
            if self.calls[graph] > 1:
                self.report()

    def report(self) -> None:
        if self.reported or not self.plans:
            return
        self.reported = True
        if not self.speaks:
            return
        log.info("%s", self.line())
        for warning in self.unmatched_rules():
            log.warning("%s", warning)

    def line(self) -> str:
        sites = [(plan, site) for plan in self.plans for site in plan.sites]
        before = sum(max(site.bytes, 0) for _, site in sites)
        after = sum(max(site.bytes if plan.fallback else site.wire_bytes, 0) for plan, site in sites)
        plain = sum(site.plain_us for _, site in sites)
        predicted = sum(site.plain_us if plan.fallback else site.predicted_us for plan, site in sites)
        compressed = sum(len(plan.compressed) for plan in self.plans)
        fallbacks = sum(bool(plan.fallback) for plan in self.plans)
        unknown = sum(site.bytes < 0 for _, site in sites)
        return (
            f"policy {self.policy.name!r}: {len(self.plans)} graphs, {len(sites)} sites, {compressed} compressed, "
            f"{before:,} bytes -> {after:,} a step, predicted {plain:,.0f} us -> {predicted:,.0f} us"
            + (f", {unknown} sites of unknown size not counted" if unknown else "")
            + (f", {fallbacks} graphs untouched" if fallbacks else "")
        )

    def unmatched_rules(self) -> list[str]:
        """A sentence for each rule that matched no site of any graph."""
        sites = [site for plan in self.plans for site in plan.sites]
        matched = {index for site in sites for index, rule in enumerate(self.policy.rules) if rule.matches(site)}
        modules = {site.module for site in sites if site.module}
        return [
            f"{rule} matched no collective of the whole model"
            + (nearest(rule.module, modules) if rule.module != "**" and modules else ".")
            for rule in unmatched(self.policy, matched)
        ]
