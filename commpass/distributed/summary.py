"""Log a summary of a model once its backend no longer compiles new graphs.

One line (INFO) describes the model. Warnings report rules that matched nothing and a policy that
compresses nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import nn

from commpass.distributed import record
from commpass.distributed.integration import integration_of
from commpass.distributed.uncompressed import UncompressedSite, asks_for_codecs, sentence
from commpass.errors import nearest
from commpass.groups import is_first_rank, ready
from commpass.passes.fx.erase import is_checked
from commpass.plan import Plan, PlannedSite
from commpass.plan.totals import totals
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule
from commpass.utils.globs import covers
from commpass.utils.printable import less, plural

log = logging.getLogger("commpass")


_warned_of_no_site: list[bool] = []
_summaries: list[Summary] = []
"""All that have a plan, in this process. Also those whose backend has ended: at the end of the
process backends end one after the other, and each reports what no other one has."""


class Summary:
    """What the graphs of one backend have in common.

    A *round* goes from one call of a forward graph to the next call of the same graph. No graph is
    compiled in between, and no backward of a graph that has one is still to come. It is a step, an
    evaluation, or a part of a batch. If all graphs are backward ones, a round goes from one call of
    any graph to its next.

    After one round a line describes all graphs. It is repeated after a round that follows later
    compilations (training after an evaluation, a second model). After two rounds that include a
    backward, each rule that matched nothing is reported once. So is a policy that compresses none
    of all sites; that is reported after ``SERVED`` rounds without a backward too. The rest is
    reported when the backend or the process ends.

    A policy may serve several backends: that of a model, and those of integrations, which send what
    its graphs do not have. A rule has matched nothing if it has matched nothing in all of them.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.plans: list[Plan] = []
        self.profiles: dict[str, None] = {}
        self.trained: set[str] = set()
        self.round: set[str] = set()
        self.rounds = 0
        self.logged_plans = 0
        self.warned: set[int] = set()
        self.left: dict[tuple[str, str], Sequence[UncompressedSite]] = {}
        self.warned_of_none_compressed = False
        self.reports = True

    def add(
        self,
        plan: Plan,
        *,
        trained: bool,
        profile: str = "",
        instead_of: Plan | None = None,
        sites: Sequence[UncompressedSite] = (),
    ) -> None:
        """Add the plan of a graph, or that of one which was compiled again.

        ``trained`` says whether the graph has a backward, which may be compiled only when it runs.
        ``sites`` are the sites that it leaves uncompressed. ``profile`` is that of its cost model,
        in words.
        """
        if profile and plan.sites:
            self.profiles[profile] = None
        self.left[plan.graph, plan.direction] = sites
        for place, each in enumerate(self.plans):
            if each is instead_of:
                self.plans[place] = plan
                return
        if self not in _summaries:
            _summaries.append(self)
        self.plans.append(plan)
        if trained:
            self.trained.add(plan.graph)
        self.round &= {f"{plan.graph}forward"} if plan.direction == "backward" else set()
        self.rounds = 0
        self.reports = is_first_rank()  # at the backend's end the process group may be gone

    def count_call(self, graph: str) -> None:
        """Count a call of a graph, before it runs; ``graph`` is its number and direction."""
        if self.rounds > 1 and (self.rounds >= SERVED or self._has_backward()):
            return  # all is reported until another graph is compiled
        if graph in self.round and self._begins_round(graph):
            self.round.clear()
            self.rounds += 1
            _without_raising(self._report_round)
        self.round.add(graph)

    def _report_round(self) -> None:
        self.log_line()
        if self.rounds > 1 and self._has_backward():
            self.warn_of_unmatched_rules()
            self.warn_of_no_site()
            self.warn_of_none_compressed()
        elif self.rounds >= SERVED:
            self.warn_of_none_compressed()

    def _begins_round(self, graph: str) -> bool:
        """Return whether a graph that is called again begins a round.

        If only backward graphs of hooks exist, as for DDP, each of them does.
        """
        if graph.endswith("forward"):
            return not self._backward_to_come()
        return all(plan.direction == "backward" for plan in self.plans)

    def _has_backward(self) -> bool:
        return any(plan.direction == "backward" for plan in self.plans)

    def _backward_to_come(self) -> bool:
        forward, backward = (
            {graph.removesuffix(end) for graph in self.round if graph.endswith(end)}
            for end in ("forward", "backward")
        )
        known = {plan.graph for plan in self.plans if plan.direction == "forward"}
        return backward <= known and bool(
            forward & self.trained - backward
        )  # compiled autograd's graph serves all forward graphs

    def report(self) -> None:
        """Report at the end what was not reported before."""
        _without_raising(self._report_end)
        self.left.clear()

    def _report_end(self) -> None:
        self.log_line()
        self.warn_of_unmatched_rules()
        self.warn_of_none_compressed(at_end=True)

    def log_line(self) -> None:
        if self.reports and len(self.plans) > self.logged_plans:
            self.logged_plans = len(self.plans)
            log.info("%s", self.line())

    def warn_of_unmatched_rules(self) -> None:
        if self.reports and self.plans:
            others = {number for each in self._with_equal_policies() for number in each.warned}
            for number, sentence in self.unmatched_rules().items():
                if number not in self.warned | (others - {WITHOUT_ROLE}):
                    self.warned.add(number)
                    log.warning("%s", sentence)

    def warn_of_no_site(self) -> None:
        """Warn once in a process that no graph has a collective although there are several ranks.

        The gradients then bypass torch.compile.
        """
        ranks = dist.get_world_size() if ready() else 1
        # Hooks of a module have no plans of graphs.
        has_hooks = any(isinstance(each, nn.Module) for each in integration_of)
        skip = _warned_of_no_site or not self.reports or self.policy.off or ranks == 1 or has_hooks
        if not skip and not any(plan.sites or plan.simplified for plan in record.plans()):
            _warned_of_no_site.append(True)
            log.warning(NO_SITE, len(self.plans), ranks)

    def warn_of_none_compressed(self, *, at_end: bool = False) -> None:
        """Warn once, with the reason, if nothing is compressed although the user requests it."""
        if self.warned_of_none_compressed or not self.reports:
            return
        if text := self.none_compressed(sizes=not at_end):
            self.warned_of_none_compressed = True
            log.warning("%s", text)

    def none_compressed(self, *, sizes: bool = True) -> str:
        """Return why no site of any graph is compressed.

        Return "" if one is, if compression is not requested, or if nothing is sent to other ranks.
        Also return "" if other warnings report it: rules that matched nothing, untouched graphs,
        errors above their budget. So too if the rules are for what other backends send. ``sizes``
        is that of ``uncompressed.sentence``.
        """
        sites = [site for plan in self.plans for site in plan.sites]
        if any(plan.compressed for plan in self.plans) or not asks_for_codecs(self.policy, sites):
            return ""
        known = {(plan.graph, plan.direction) for plan in self.plans}
        left = [each for graph, some in self.left.items() if graph in known for each in some]
        if all(each.is_reported for each in left):
            return ""
        by_others = any(plan.matched for each in self._with_equal_policies() for plan in each.plans)
        if all(each.is_unmatched for each in left) and (by_others or self.unmatched_rules()):
            return ""
        return sentence(self.policy, left, sizes=sizes)

    def line(self) -> str:
        of = totals(self.plans)
        unknown = f", {plural(of.unknown, 'site')} of unknown size not counted"
        profiles = f", profile {', '.join(self.profiles)}" if self.profiles else ""
        return (
            f"policy {self.policy.name!r}{profiles}: {plural(of.graphs, 'graph')},"
            f" {plural(of.sites, 'site')},"
            f" {of.compressed} compressed; each graph run once: {of.bytes:,} bytes ->"
            f" {of.wire_bytes:,}{less(of.wire_bytes, of.bytes)}, collectives predicted"
            f" {of.plain_us:,.0f} us -> {of.predicted_us:,.0f} us"
            f"{less(of.predicted_us, of.plain_us)}"
            + (unknown if of.unknown else "")
            + (f", {plural(of.fallbacks, 'graph')} untouched" if of.fallbacks else "")
        )

    def unmatched_rules(self) -> dict[int, str]:
        """Return a sentence for each rule, by number from 0, that matched no site of any graph, in
        all backends with this policy.

        Rules of a preset, which the user did not write, share one sentence under ``OF_PRESET``.
        What it has no role for here is under ``WITHOUT_ROLE``.
        """
        plans = [plan for each in (self, *self._with_equal_policies()) for plan in each.plans]
        sites = [site for plan in plans for site in plan.sites]
        matched = {number for plan in plans for number in plan.matched}
        preset = {
            n for n, rule in enumerate(self.policy.rules) if _without_groups(rule) in _PRESET_RULES
        }
        sentences = {
            number: (
                f"{rule} of {self.policy.label} matched no collective of the {len(plans)}"
                f" graphs so far{_existing_instead(rule, sites)}"
            )
            for number, rule in enumerate(self.policy.rules)
            if number not in matched | preset
        }
        rules = [self.policy.rules[number] for number in sorted(preset)]
        if rules and all(rule.groups is not None for rule in rules):
            if groups := self._groups_without_role(rules):
                sentences[WITHOUT_ROLE] = NO_ROLE.format(self.policy.label, ", ".join(groups))
        elif preset and not preset & matched:
            kinds = sorted({kind for rule in rules for kind in rule.kinds or ()})
            sentences[OF_PRESET] = (
                f"no rule of {self.policy.label} matched a collective of the {len(plans)} graphs"
                f" so far: it is for {' and '.join(kinds)}, in certain directions, and they have"
                f" {', '.join(sorted({site.kind for site in sites})) or 'none'}"
            )
        return sentences

    def _groups_without_role(self, rules: Sequence[Rule]) -> list[str]:
        """Return the names of groups that neither these rules of a preset are for, nor any other
        rule."""
        return sorted(
            {
                site.group_label or site.group
                for plan in self.plans
                for site in plan.sites
                if not any(rule.is_over(site) for rule in rules)
                and not any(rule.matches(site) for rule in self.policy.rules)
            }
        )

    def _with_equal_policies(self) -> list[Summary]:
        """Return those of other backends with an equal policy."""
        return [each for each in _summaries if each is not self and each.policy == self.policy]


def _without_raising(report: Callable[[], None]) -> None:
    """Make a report. If that fails, log a warning and continue.

    Only the first rank makes it: an error would end the step on that rank alone, and the others
    would wait for it. COMMPASS_CHECK=1 raises it all the same.
    """
    try:
        report()
    except Exception:
        if is_checked():
            raise
        log.warning("a report of commpass failed; the step continues", exc_info=True)


NO_SITE = (
    "no collective in any of the %d graphs, but there are %d ranks: what they send is not in the"
    " compiled graphs, and nothing is compressed. DistributedDataParallel and FSDP2's fully_shard"
    " send from hooks: call commpass.parallel.compress_ddp(model, policy) or"
    " commpass.parallel.compress_fsdp(model, policy) as well. For gradients in the graph itself use"
    " commpass.parallel.replicate(model, mesh). If the ranks send nothing, use policy='off'"
)
SERVED = 32
"""Rounds without a backward after which a model is assumed to be served, and not evaluated before
training."""
OF_PRESET, WITHOUT_ROLE = -1, -2
NO_ROLE = (
    "{} has no rule for what is sent over {}, which stays uncompressed. Where that is tensor, data"
    " or pipeline parallelism, say so: Policy.for_mesh(preset, tp=..., dp=..., pp=...)"
)


def _without_groups(rule: Rule) -> Rule:
    """Return a rule without its groups, which ``Policy.for_mesh`` replaces."""
    return dataclasses.replace(rule, group=None)


_PRESET_RULES = [_without_groups(rule) for policy in PRESETS.values() for rule in policy.rules]


def _existing_instead(rule: Rule, sites: list[PlannedSite]) -> str:
    """Return what exists instead of what a rule requires, for each condition that no site meets."""
    if not sites:
        return ": they have none."
    notes = []
    for name, wanted, met, known in _conditions(rule, sites):
        if wanted is not None and not any(map(met, sites)):
            hint = f"{nearest(wanted, known)}{_path_hint(name, known)}"
            notes.append(f" {name}={wanted!r}: there is none{hint}")
    if rule.min_bytes and not any(site.common_bytes >= rule.min_bytes for site in sites):
        notes.append(
            f" min_bytes={rule.min_bytes}: the largest has"
            f" {max(site.common_bytes for site in sites):,}."
        )
    return (
        ":" + "".join(notes)
        if notes
        else ": some sites meet each of its conditions, but no site meets all of them."
    )


def _conditions(
    rule: Rule, sites: list[PlannedSite]
) -> Iterable[tuple[str, str | None, Callable[[PlannedSite], bool], set[str]]]:
    """Yield (field, the rule's value or None, whether a site meets it, the values that exist)."""
    module = None if rule.module == "**" else rule.module
    yield (
        "module",
        module,
        lambda site: covers(rule.module, site.module),
        {site.module for site in sites},
    )
    kinds = rule.kinds
    yield (
        "kind",
        None if kinds is None else " or ".join(kinds),
        lambda site: kinds is None or site.kind in kinds,
        {site.kind for site in sites},
    )
    yield (
        "direction",
        rule.direction,
        lambda site: site.direction == rule.direction,
        {s.direction for s in sites},
    )
    groups = {
        label for site in sites for label in site.group_labels or (site.group_label or site.group,)
    }
    yield (
        "group",
        None if rule.groups is None else " or ".join(rule.groups),
        rule.is_over,
        groups,
    )


def _path_hint(name: str, known: set[str]) -> str:
    """Return a hint about module paths."""
    if name != "module":
        return ""
    shared = any("*" in path.split(".") for path in known)
    return (
        " A collective of the model itself, or of code outside of it, has the path ''."
        if "" in known
        else ""
    ) + (
        " Blocks that are compiled one by one share a graph, whose path has * for their numbers."
        if shared
        else ""
    )
