"""Compare the steps of some policies with those of the first one, and say what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import median, quantiles

from commpass.errors import DumpError
from commpass.plan import dump
from commpass.policy import PRESETS
from commpass.report.compare import losses
from commpass.report.compare.jobs import OFF, POLICY, SWITCH, Job
from commpass.report.numbers import percent
from commpass.report.run import Run
from commpass.utils.printable import plural

LEAST_STEPS = 4
"""The number of counted steps below which nothing is concluded."""


NO_LOSSES = (
    "No losses were found in the output: by default, lines with the word loss and a number behind"
    " it. --loss names another form, such as --loss 'ppl=([0-9.]+)'."
)
ADVICE = "Run more --rounds or more steps, or use an idle machine"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the plans of a policy say: bytes of one step and rank, handed to collectives, before and
    after. ``predicted_ms`` is the predicted time of all graphs, None if it is unknown. ``policies``
    are the names of the policies in the plans."""

    sites: int
    compressed: int
    bytes: int
    wire_bytes: int
    predicted_ms: float | None
    policies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The counted steps of all rounds of one policy.

    ``low_ms`` and ``high_ms`` bound the middle half of the step times. ``faster`` is how many times
    as fast the steps are as those of the base. Without counted steps, times are NaN.
    ``loss_difference`` is the largest relative difference from the losses of the base, None without
    common losses. ``not_finite`` is the first step whose loss is NaN or infinite though that of the
    base is finite, or the other way round; "" if there is none. ``verdict`` is a sentence.
    """

    policy: str
    rounds: int
    steps: int
    left_out: int
    median_ms: float
    low_ms: float
    high_ms: float
    faster: float | None
    traffic: Traffic | None
    loss_difference: float | None
    not_finite: str
    verdict: str

    @property
    def name(self) -> str:
        """The policy for display: of a file without its folder."""
        return label(self.policy)


def label(policy: str) -> str:
    """Return the name of a policy for display: of a file without its folder."""
    return Path(policy).name if policy.endswith(".toml") else policy


@dataclass(frozen=True, kw_only=True)
class Series:
    """The counted steps of one run of the command, in milliseconds."""

    policy: str
    round: int
    ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What ``commpass compare`` found. The first of the ``policies`` is the base."""

    command: tuple[str, ...]
    verdict: str
    ranks: int
    clock: str
    policies: tuple[PolicyResult, ...]
    losses: tuple[tuple[str, tuple[float | None, ...]], ...]
    runs: tuple[Series, ...]
    remarks: tuple[str, ...]


def traffic_of(job: Job) -> Traffic | None:
    """Return what the plans of a run say; None if it has written none."""
    try:
        found = Run(tuple(dump.read_run(job.folder / "dump", dump.ALL)))
    except DumpError:
        return None
    of, times = found.totals, found.predicted
    return Traffic(
        sites=of.sites,
        compressed=of.compressed,
        bytes=of.bytes,
        wire_bytes=of.wire_bytes,
        predicted_ms=times.us / 1e3 if times is not None else None,
        policies=tuple(dict.fromkeys(plan.policy for plan in found.plans)),
    )


def compare(
    command: Sequence[str], policies: Sequence[str], jobs: Sequence[Job], remarks: Sequence[str]
) -> Comparison:
    """Compare all runs with those of the first policy."""
    of = {policy: [job for job in jobs if job.policy == policy] for policy in policies}
    base = policies[0]
    results: list[PolicyResult] = []
    for policy in policies:
        results.append(_result(policy, of[policy], results[0] if results else None, of[base]))
    first = [some[0].losses if some else {} for some in of.values()]
    rows = losses.side_by_side(first, 400) if any(first) else []
    notes = [*remarks, *_round_remarks(of), *_loss_remarks(base, of[base])]
    return Comparison(
        command=tuple(command),
        verdict=_verdict(results),
        ranks=max((job.steps.ranks for job in jobs), default=0),
        clock=next((job.steps.clock for job in jobs if job.steps.clock), ""),
        policies=tuple(results),
        losses=tuple((name, tuple(values)) for name, values in rows),
        runs=tuple(Series(policy=j.policy, round=j.round, ms=j.steps.ms) for j in jobs),
        remarks=tuple(notes),
    )


def _result(
    policy: str, jobs: Sequence[Job], base: PolicyResult | None, base_jobs: Sequence[Job]
) -> PolicyResult:
    ms = [each for job in jobs for each in job.steps.ms]
    middle, low, high = middle_half(ms) if ms else (nan, nan, nan)
    faster = base.median_ms / middle if base is not None and base.steps and ms else None
    traffic = traffic_of(jobs[0]) if jobs else None
    pairs = list(zip(base_jobs, jobs, strict=False)) if base is not None else []
    apart = [losses.difference(a.losses, b.losses) for a, b in pairs]
    made = PolicyResult(
        policy=policy,
        rounds=len(jobs),
        steps=len(ms),
        left_out=sum(job.steps.left_out for job in jobs),
        median_ms=middle,
        low_ms=low,
        high_ms=high,
        faster=faster,
        traffic=traffic,
        loss_difference=max((each for each in apart if each is not None), default=None),
        not_finite=next(filter(None, (_not_finite(a, b) for a, b in pairs)), ""),
        verdict="",
    )
    if base is None:
        return made
    if not jobs:
        return replace(made, verdict=f"inconclusive: no run of {made.name} is complete")
    contrary, spread = _contrary_rounds(jobs, base_jobs), max(map(_spread, (jobs, base_jobs)))
    return replace(made, verdict=_sentence(made, base, contrary, spread))


def _not_finite(base: Job, job: Job) -> str:
    for one, other in ((job, base), (base, job)):
        if step := losses.first_not_finite(one.losses, other.losses):
            return (
                f"The loss of {label(one.policy)} at {step} is {one.losses[step]:g}, that of"
                f" {label(other.policy)} is {other.losses[step]:.6g}"
            )
    return ""


def _contrary_rounds(jobs: Sequence[Job], base_jobs: Sequence[Job]) -> int:
    """Return the number of rounds in which the medians are in the other order than in most
    rounds."""
    both = [(a.steps.ms, b.steps.ms) for a, b in zip(jobs, base_jobs, strict=False)]
    faster = [median(ms) < median(base) for ms, base in both if ms and base]
    return min(faster.count(True), faster.count(False))


def _spread(jobs: Sequence[Job]) -> float:
    """Return by how many milliseconds the medians of the rounds of one policy differ."""
    medians = [median(job.steps.ms) for job in jobs if job.steps.ms]
    return max(medians) - min(medians) if medians else 0.0


def middle_half(ms: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the bounds of the middle half."""
    if len(ms) < 2:
        return ms[0], ms[0], ms[0]
    low, _, high = quantiles(ms, n=4, method="inclusive")
    return median(ms), low, high


def times(value: float) -> str:
    """Format milliseconds with three or more digits; "-" for an unknown time."""
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _is_same(one: Traffic, base: Traffic | None) -> bool:
    return base is not None and replace(one, policies=()) == replace(base, policies=())


def _sentence(of: PolicyResult, base: PolicyResult, contrary: int, spread: float) -> str:
    if of.traffic is None:
        return f"inconclusive: commpass has compiled no graph under {of.name}, so nothing differs"
    if not of.traffic.compressed and _is_same(of.traffic, base.traffic):
        return (
            f"inconclusive: the collectives are the same under {of.name} and {base.name}, and none"
            " is compressed, so nothing differs"
        )
    for each in (of, base):
        if each.steps < LEAST_STEPS:
            return (
                f"inconclusive: {each.name} has {each.steps} counted steps, and a verdict needs"
                f" {LEAST_STEPS} of each policy. Run more steps, or more --rounds"
            )
    nothing = ""
    if of.traffic is not None and not of.traffic.compressed:
        nothing = f" ({of.name} compresses no collective of this program)"
    if of.low_ms <= base.high_ms and base.low_ms <= of.high_ms:
        return (
            f"inconclusive: the middle halves of {of.name} ({times(of.low_ms)} to"
            f" {times(of.high_ms)} ms) and {base.name} ({times(base.low_ms)} to"
            f" {times(base.high_ms)} ms) overlap{nothing}. {ADVICE}"
        )
    if contrary:
        return (
            f"inconclusive: {plural(contrary, 'round')} of {of.rounds} gave the opposite order of"
            f" {of.name} and {base.name}{nothing}. {ADVICE}"
        )
    if spread >= abs(of.median_ms - base.median_ms):
        return (
            f"inconclusive: {of.name} ({times(of.median_ms)} ms) and {base.name}"
            f" ({times(base.median_ms)} ms) differ by no more than rounds of one policy"
            f" ({times(spread)} ms){nothing}. {ADVICE}"
        )
    faster = base.median_ms / of.median_ms
    ratio = max(faster, 1 / faster)
    digits = 3 if ratio < 1.1 else 2
    what = "as fast" if faster > 1 else "as slow"
    return (
        f"{of.name} is {ratio:.{digits}f} times {what} as {base.name}: {times(of.median_ms)} ms"
        f" a step instead of {times(base.median_ms)} ms{nothing}{_ONCE if of.rounds < 2 else ''}"
    )


_ONCE = ", if the machine was equally fast in both runs (run more --rounds)"


def _verdict(results: Sequence[PolicyResult]) -> str:
    """Return one sentence: on the fastest policy that is faster than the base, or else on the first
    other policy with a clear result, or else that nothing is clear."""
    base, *others = results
    others = [each for each in others if each.steps] or others
    clear = [each for each in others if not each.verdict.startswith("inconclusive")]
    best = max(clear, key=lambda each: each.faster or 0, default=None)
    if best is None:
        return others[0].verdict
    text, nothing = best.verdict, ""
    if len(others) > 1 and best.median_ms == min(each.median_ms for each in results if each.steps):
        text += f". It is the fastest of {1 + len(others)} policies"
    elif len(others) > 1 and (best.faster or 0) < 1:
        nothing = f". No policy is clearly faster than {base.name}"
    return text + _loss_text(best, base) + nothing


def _loss_text(of: PolicyResult, base: PolicyResult) -> str:
    if of.loss_difference is None:
        return ""
    if of.not_finite:
        return f". {of.not_finite}"
    if not of.loss_difference:
        return f". Its printed losses are those of {base.name}"
    return f". Its printed losses differ by at most {percent(of.loss_difference, 2)}"


def _round_remarks(of: Mapping[str, Sequence[Job]]) -> list[str]:
    """Return remarks on runs that make the comparison doubtful."""
    made = []
    for policy, jobs in of.items():
        if stopped := sum(job.stopped for job in jobs):
            made.append(
                f"Processes of the program still ran after its end under {label(policy)}"
                f" ({stopped}). They were ended, since they would have slowed the next run."
            )
        traffic = traffic_of(jobs[0]) if jobs else None
        if traffic is None:
            continue
        others = [repr(name) for name in traffic.policies if name != policy]
        if policy in PRESETS and others and not (policy == OFF and not traffic.compressed):
            made.append(
                f"The program compiled under the policy {', '.join(others)} instead of {policy!r}:"
                f" it changes the environment variables {SWITCH} or {POLICY} itself. Remove that,"
                " or the runs do not differ as asked."
            )
    return made


def _loss_remarks(base: str, jobs: Sequence[Job]) -> list[str]:
    """Return a remark if the base's own rounds print different losses."""
    if not any(job.losses for job in jobs):
        return [NO_LOSSES]
    apart = [losses.difference(jobs[0].losses, other.losses) for other in jobs[1:]]
    most = max((each for each in apart if each is not None), default=0.0)
    if not most:
        return []
    return [
        f"The losses of {base} differ between its own rounds by up to"
        f" {losses.difference_text(most)}: the program is not deterministic."
    ]
