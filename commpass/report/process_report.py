"""``commpass.report()``: what commpass did in this process on this rank: times, bytes and
errors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from commpass.distributed.record import plans
from commpass.distributed.samples import Sampled
from commpass.distributed.step_log import Entry, step_logs
from commpass.errors import CommpassError
from commpass.groups import is_first_rank
from commpass.plan import Plan, PlannedSite
from commpass.plan.totals import totals
from commpass.policy import PRESETS
from commpass.report import sent_bytes
from commpass.report.layer_patterns import Pattern, patterns
from commpass.report.numbers import percent
from commpass.utils.deprecated import renamed_fields
from commpass.utils.html_text import summary
from commpass.utils.keywords import named_arguments
from commpass.utils.printable import brief, clean, less, plural

NOTHING = (
    "commpass has compiled nothing in this process: compile with torch.compile(model,"
    " backend=commpass.backend(...)), or apply an integration (compress_ddp, compress_fsdp). Run a"
    " step, then ask again"
)
COMPARE = "is it faster? commpass compare -- COMMAND runs the job with and without it, in turns"
ELSEWHERE = (
    "not in this report: {} of commpass.rewrite, calls by hand and backends that are gone;"
    " commpass.plans() has them"
)


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """One site. ``title`` is what reports call it: the parameters of a bucket, or its module.

    Bytes are those of one call. ``bytes`` and ``wire_bytes`` are handed to the collectives without
    and with commpass. ``sent_plain`` and ``sent`` leave this rank (-1: unknown). ``error`` is the
    expected error. ``measured`` and ``worst`` are the mean and the largest of ``samples``
    measurements (None before the first). ``max_error`` is the bound, if there is one. ``unclear``
    counts measurements without a relative error, which had no finite block other than zeros.
    ``unmeasured`` is the reason if nothing is measured, and ``reason`` that of the plan.
    """

    name: str
    title: str
    module: str
    kind: str
    direction: str
    codec: str
    algorithm: str
    bytes: int
    wire_bytes: int
    sent_plain: int
    sent: int
    error: float
    max_error: float | None
    measured: float | None
    worst: float | None
    samples: int
    unclear: int
    unmeasured: str
    reason: str

    @property
    def above(self) -> bool:
        """Whether a measured error is above the bound."""
        worst, bound = self.worst, self.max_error
        return worst is not None and bound is not None and worst > bound


@renamed_fields({"watch": "error_sample_rate"})
@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """One graph.

    Times are microseconds of one call: predicted, predicted without commpass, and the median of
    measured ones (on rank 0, with Inductor). None if unknown. ``error_sample_rate`` is the share of
    calls on which errors are measured. ``fallback`` is the reason if it was compiled untouched.
    ``profile`` is the one of the cost model, with where its numbers are from; "" if unknown.
    """

    policy: str
    graph: str
    direction: str
    calls: int
    error_sample_rate: float
    predicted_us: float | None
    plain_us: float | None
    measured_us: float | None
    fallback: str
    sites: tuple[SiteReport, ...]
    profile: str = ""


@dataclass(frozen=True)
class Totals:
    """Sums over graphs, each called once.

    Times, in milliseconds, are those of measured graphs; None if there are none. Sites of unknown
    size do not count in the bytes.
    """

    graphs: int
    sites: int
    compressed: int
    fallbacks: int
    bytes_plain: int
    bytes: int
    sent_plain: int
    sent: int
    predicted_ms: float | None
    uncompressed_ms: float | None
    measured_ms: float | None
    worst_error: float | None
    above: int


@dataclass(frozen=True, repr=False)
class Report:
    """The result of ``commpass.report()``: print it, or use its data.

    ``elsewhere`` is the number of plans in this process whose exchanges it does not follow.
    """

    graphs: tuple[GraphReport, ...]
    plans: tuple[Plan, ...] = dataclasses.field(default=(), compare=False)
    elsewhere: int = dataclasses.field(default=0, compare=False)

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """The sites of all graphs."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def totals(self) -> Totals:
        timed = [each for each in self.graphs if each.measured_us is not None]
        of, sent = totals(self.plans), sent_bytes.of_plans(self.plans)
        errors = [site.worst for site in self.sites if site.worst is not None]
        return Totals(
            graphs=of.graphs,
            sites=of.sites,
            compressed=of.compressed,
            fallbacks=of.fallbacks,
            bytes_plain=of.bytes,
            bytes=of.wire_bytes,
            sent_plain=sent.before,
            sent=sent.after,
            predicted_ms=_ms(each.predicted_us for each in timed),
            uncompressed_ms=_ms(each.plain_us for each in timed),
            measured_ms=_ms(each.measured_us for each in timed),
            worst_error=max(errors, default=None),
            above=sum(site.above for site in self.sites),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        held = {"totals": self.totals, "graphs": self.graphs}
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(held))
        return found

    def metrics(self) -> dict[str, float]:
        """Return numbers under flat names: the totals, and the mean measured error of each site
        pattern.

        Unknown numbers are left out.
        """
        held = dataclasses.asdict(self.totals)
        found = {f"commpass/{name}": float(n) for name, n in held.items() if n is not None}
        alike: dict[str, list[SiteReport]] = {}  # of all sizes, and of all graphs
        for pattern, sites in self._patterns():
            where = pattern.title or pattern.first.name
            name = f"{where}/{pattern.first.kind}/{pattern.first.direction}"
            alike.setdefault(name, []).extend(sites)
        errors = {name: _mean(sites) for name, sites in alike.items()}
        return found | {f"commpass/error/{name}": e for name, e in errors.items() if e is not None}

    def __str__(self) -> str:
        elsewhere = [ELSEWHERE.format(plural(self.elsewhere, "plan"))] if self.elsewhere else []
        if not self.graphs:
            return "\n".join(elsewhere or [NOTHING])
        lines = [*self._head(), *_table(self._patterns()), *self._reasons()]
        return "\n".join(map(clean, [*lines, *elsewhere]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report with its table as HTML, for notebooks."""
        elsewhere = [ELSEWHERE.format(plural(self.elsewhere, "plan"))] if self.elsewhere else []
        if not self.graphs:
            return summary(elsewhere or [NOTHING])
        rows = [_row(*each) for each in self._patterns()]
        return summary(self._head(), HEAD, rows, [*self._reasons(), *elsewhere])

    def _head(self) -> Iterable[str]:
        all_of, policies = self.totals, dict.fromkeys(each.policy for each in self.graphs)
        names = ", ".join(map(repr, policies))
        untouched = f", {plural(all_of.fallbacks, 'graph')} untouched" if all_of.fallbacks else ""
        yield (
            f"commpass, policy {names}: {plural(all_of.graphs, 'graph')},"
            f" {plural(all_of.sites, 'site')}, {all_of.compressed} compressed{untouched}"
        )
        sending = [each for each in self.graphs if each.sites]
        if profiles := dict.fromkeys(each.profile for each in sending if each.profile):
            yield f"profile: {', '.join(profiles)}"
        if all_of.measured_ms is None:
            yield f"time: not measured{_why_untimed(self.graphs)}"
        else:
            yield (
                f"time: measured {all_of.measured_ms:.4g} ms; predicted {all_of.predicted_ms:.4g}"
                f" ms, and {all_of.uncompressed_ms:.4g} ms without commpass"
                f"{less(all_of.predicted_ms or 0, all_of.uncompressed_ms or 0)}"
            )
            if all_of.compressed:
                yield COMPARE
        yield (
            f"bytes: {all_of.bytes_plain:,} -> {all_of.bytes:,} handed to collectives"
            f"{less(all_of.bytes, all_of.bytes_plain)}, {all_of.sent_plain:,} -> {all_of.sent:,}"
            " sent by this rank (each graph called once)"
        )
        if steps := [step for plan in self.plans if not plan.fallback for step in plan.simplified]:
            rules = Counter(step.rule for step in steps).most_common()
            names = ", ".join(f"{rule} ({count})" for rule, count in rules)
            saved = sum(step.saved_bytes for step in steps)
            yield f"simplified: {names}; {saved:,} bytes less, not counted above"
        for each in self.graphs:
            if each.fallback:
                yield f"untouched: graph {each.graph} ({each.direction}): {each.fallback}"
        if all_of.above:
            first = next(site for site in self.sites if site.above)
            yield (
                f"error: {plural(all_of.above, 'site')} above max_error, such as"
                f" {first.title} ({first.worst:.3g} > {first.max_error:.3g})"
            )

    def _reasons(self) -> Iterable[str]:
        """Yield why sites are uncompressed, and why nothing was measured of others."""
        alone = [site for each in self.graphs if not each.fallback for site in each.sites]
        yield from _counted("uncompressed", [(s, s.reason) for s in alone if s.codec == "none"])
        coded = [site for site in alone if site.codec != "none"]
        if coded and not any(each.error_sample_rate for each in self.graphs):
            known = (
                "measured on first calls alone" if any(s.samples for s in coded) else "not measured"
            )
            sampling = self._with_error_sample_rate()
            yield f"errors: {known}; {sampling} measures them on one call in a hundred"
            return
        yield from _counted("not measured", [(s, s.unmeasured) for s in coded])
        unclear = [site for site in coded if site.unclear]
        yield from _counted("no relative error", [(s, UNCLEAR) for s in unclear])

    def _with_error_sample_rate(self) -> str:
        """Return the policy in use, with ``error_sample_rate``, as code."""
        names = {each.policy for each in self.graphs if each.sites}
        if len(names) == 1 and (name := names.pop()) in PRESETS:
            return f'Policy.from_preset("{name}", error_sample_rate=0.01)'
        return "error_sample_rate=0.01 in the policy"

    def _patterns(self) -> list[tuple[Pattern, list[SiteReport]]]:
        """Return the sites by pattern, with their reports."""
        return [
            (pattern, [self.graphs[graph].sites[number - 1] for graph, number in pattern.numbers])
            for pattern in patterns(self.plans)
        ]


def report() -> Report:
    """Return what commpass has compiled in this process, with what was measured since.

    It covers all backends and integrations, whose exchanges are graphs too. It does not wait for
    anything. If nothing was compiled yet, the report says so.
    """
    entries = [(book.policy, entry) for book in step_logs() for entry in book.entries]
    followed = {id(entry.plan) for _, entry in entries}
    followed |= {id(plan) for book in step_logs() for plan in book.past}
    return Report(
        tuple(_graph(policy, entry) for policy, entry in entries),
        tuple(entry.plan for _, entry in entries),
        sum(id(plan) not in followed for plan in plans()),
    )


def metrics() -> dict[str, float]:
    """Return ``commpass.report().metrics()``: numbers under flat names."""
    return report().metrics()


@named_arguments
def log_metrics(to: Any, step: int) -> None:
    """Write ``metrics()`` to a logger, under the number of a step.

    Args:
        to: a TensorBoard ``SummaryWriter`` (or an object with ``add_scalar(name, number, step)``),
            a run of Weights & Biases (``log(numbers, step=...)``), or a Lightning logger
            (``log_metrics(numbers, step=...)``).
        step: the number of the step.

    Raise CommpassError for anything else.
    """
    numbers = metrics()
    if hasattr(to, "add_scalar"):
        for name, number in numbers.items():
            to.add_scalar(name, number, step)
    elif hasattr(to, "log_metrics"):
        to.log_metrics(numbers, step=step)
    elif hasattr(to, "log") and not hasattr(to, "setLevel"):
        to.log(numbers, step=step)
    else:
        raise CommpassError(
            f"log_metrics(to={to!r}): must have add_scalar (TensorBoard's SummaryWriter),"
            " log_metrics (Lightning) or log(numbers, step=...) (Weights & Biases). Or write"
            " commpass.metrics() yourself: it is a dict"
        )


# --- from what is kept ----------------------------------------------------------------------------


def _graph(policy: str, entry: Entry) -> GraphReport:
    plan, timed = entry.plan, entry.timed
    entry.samples.read_measured()
    if timed is not None:
        timed.read_events()
    return GraphReport(
        policy=policy,
        graph=plan.graph,
        direction=plan.direction,
        calls=entry.samples.calls,
        error_sample_rate=entry.samples.share,
        predicted_us=timed.predicted_us if timed is not None else None,
        plain_us=timed.plain_us if timed is not None else None,
        measured_us=timed.measured_us if timed is not None and timed.times_us else None,
        fallback=plan.fallback,
        sites=tuple(map(_site, entry.samples.sites, plan.executed)),
        profile=entry.profile,
    )


def _site(sampled: Sampled, executed: PlannedSite) -> SiteReport:
    site = sampled.site
    return SiteReport(
        name=site.name,
        title=site.title,
        module=site.module,
        kind=site.kind,
        direction=site.direction,
        codec=site.codec,
        algorithm=site.algorithm,
        bytes=site.bytes,
        wire_bytes=executed.wire_bytes if executed.compressed else site.bytes,
        sent_plain=sent_bytes.plain(site),
        sent=sent_bytes.planned(executed),
        error=site.error,
        max_error=sampled.bound,
        measured=sampled.mean,
        worst=sampled.worst if sampled.count else None,
        samples=sampled.count,
        unclear=sampled.unclear,
        unmeasured=sampled.why,
        reason=site.reason,
    )


def _ms(times: Iterable[float | None]) -> float | None:
    known = [each for each in times if each is not None]
    return sum(known) / 1e3 if known else None


def _mean(sites: Sequence[SiteReport]) -> float | None:
    known = [site.measured for site in sites if site.measured is not None]
    return sum(known) / len(known) if known else None


UNCLEAR = "some samples had no finite block other than zeros"


def _why_untimed(graphs: Sequence[GraphReport]) -> str:
    if not is_first_rank():
        return ": that is done on rank 0 alone"
    if not any(each.sites for each in graphs):
        return ": no graph has a collective"
    return " yet: calls of graphs that Inductor compiles are, some calls after the first"


def _counted(noun: str, found: Sequence[tuple[SiteReport, str]]) -> Iterable[str]:
    """Yield a line for each reason, the most frequent first."""
    by_reason: dict[str, list[SiteReport]] = {}
    for site, why in found:
        if why:
            by_reason.setdefault(why, []).append(site)
    for why, sites in sorted(by_reason.items(), key=lambda each: -len(each[1]))[:REASONS]:
        first = sites[0].title
        yield f"{noun}: {plural(len(sites), 'site')}, such as {first}: {why}"


REASONS = 3
"""Reasons that are shown; ``commpass explain`` and ``SiteReport.reason`` have all."""

# --- as a table -----------------------------------------------------------------------------------

HEAD = ("sites", "kind", "codec", "bytes", "expected error", "measured", "worst", "max_error")


def _table(rows: Iterable[tuple[Pattern, list[SiteReport]]]) -> list[str]:
    """Return a line for each pattern."""
    cells = [_row(pattern, sites) for pattern, sites in rows]
    if not cells:
        return []
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEAD, *cells)
    ]


def _row(pattern: Pattern, sites: Sequence[SiteReport]) -> tuple[str, ...]:
    first = sites[0]
    coded = first.codec != "none"
    before, after = (sum(max(getattr(s, n), 0) for s in sites) for n in ("bytes", "wire_bytes"))
    worst = max((site.worst for site in sites if site.worst is not None), default=None)
    return (
        pattern.name(first.name),
        f"{first.kind} {first.direction}",
        f"{brief(first.codec)}/{first.algorithm}" if coded else "uncompressed",
        f"{before:,} -> {after:,}" if coded else f"{before:,}",
        percent(max(site.error for site in sites) if coded else None, 3),
        percent(_mean(sites), 3),
        percent(worst, 3),
        percent(first.max_error, 3),
    )
