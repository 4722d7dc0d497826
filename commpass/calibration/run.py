"""``calibrate``: measure on all ranks how sensitive a model is to errors of each collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from commpass.calibration.all_ranks import Ranks, all_ranks
from commpass.calibration.data import Calibration
from commpass.calibration.first_run import (
    RankResults,
    channels_of,
    clusters,
    outlier_codecs,
    seen_by,
    sites_of,
)
from commpass.calibration.measured_sites import (
    NO_EFFECT,
    Address,
    CountedSite,
    ErrorLevel,
    MeasuredSites,
)
from commpass.calibration.probes import Probes, Probing, Squares
from commpass.calibration.step import Loss, Step, fingerprints, replicas, step_of
from commpass.codecs import Codec, codec
from commpass.costmodel import Profile
from commpass.distributed.machine import profile_here
from commpass.distributed.samples import Reading, largest
from commpass.errors import CalibrationError, CommpassError, check_number
from commpass.policy import Policy, policy_named
from commpass.utils.keywords import named_arguments

CODECS = (*(f"rotated(bits={bits})" for bits in range(2, 8)), "rotated", "bf16", "exponent")
"""The codecs that are measured at each place by default."""
PROBES = ("rotated(bits=6)", "rotated(bits=4)", "rotated(bits=2)")
"""The codecs whose errors represent all others'. 2.4 % is small enough that twice the error changes
the output twice as much, and far above the rounding of float32. 9.5 % and 37 % are not that small:
coarse codecs shrink what they code, and gradients are not linear."""
TIMEOUT_S = 120.0
SHOWN = 100
"""So many characters of a value are shown if it differs between ranks."""
Progress = Callable[[int, int], None]


@dataclass
class Sizes:
    """How many values were sent at a place, and the bytes that codecs needed for them, by name.

    Both are sums over ranks and batches.
    """

    count: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)

    def bits(self) -> dict[str, float]:
        """Return the bits of a value by codec, rounded up to a hundredth; none if nothing was
        measured."""
        measured = {spec: each for spec, each in self.bytes.items() if each}
        return {spec: math.ceil(800 * each / self.count) / 100 for spec, each in measured.items()}


@dataclass
class _Sums:
    """Squares of relative numbers, and sizes, added up over batches."""

    errors: list[dict[str, float]]
    sizes: list[Sizes]
    changes: list[list[float]]
    loss: list[float]


@named_arguments
def calibrate(
    model: Callable[..., Any],
    batches: Iterable[Sequence[Any]],
    policy: str | Path | Policy = "lossless",
    *,
    loss: Loss | None = None,
    parameters: Iterable[torch.Tensor] | None = None,
    train: bool = True,
    codecs: Sequence[str] = CODECS,
    outliers: bool = True,
    probes: Sequence[str] = PROBES,
    profile: str | Path | Profile | None = None,
    timeout: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> Calibration:
    """Measure how sensitive a model is to errors of each of its collectives.

    Every rank calls it, with its part of the model and of each batch. All get the same result.

    The model runs twice on each batch, and once more for each place and probe if any of ``codecs``
    is lossy. Gradients, buffers and random numbers are restored afterwards.

    Args:
        model: the model, or this rank's part of it.
        batches: tuples of the model's inputs: this rank's part of each batch.
        policy: the policy that configures simplify.
        loss: ``loss(output, *batch)`` returns the loss of the model's output. If None, the output
            must be the loss. Any other output is summed up, with a remark: gradients of a sum do
            not show what errors of the output change.
        parameters: the parameters whose gradients are measured; None for the model's.
        train: whether the measured output is the gradients; otherwise it is the model's output.
        codecs: the codecs whose errors are measured at each place; for lossless ones, the bits of a
            value.
        outliers: whether to measure codec ``outlier`` too, with the channels of widest range there.
        probes: the codecs whose errors are made at one place at a time.
        profile: the links and kernels by which simplify decides, as in ``commpass.backend``.
        timeout: seconds that a rank waits for others, in its own collectives as well.
        progress: called with the number of finished runs of the model and their total; None for no
            calls.

    Raise CalibrationError without a process group of several ranks, without a collective, for
    values that are not finite, if no error changes anything, and on every rank if one fails.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise CalibrationError(
            "there is nothing to calibrate: it needs a process group of several ranks. Start it on"
            " every rank, as torchrun does"
        )
    with all_ranks(_patience(timeout)) as ranks:  # an argument may be wrong on one rank alone
        check_number("timeout", timeout, above=True)
        given = [codec(each) for each in codecs]
        sized = [codec(each.wire_spec) for each in given if each.lossless and each.dynamic]
        sized = list(dict.fromkeys(sized))
        named = tuple(dict.fromkeys(each.spec for each in given if each not in sized))
        disturbing = sorted(
            map(codec, dict.fromkeys(probes)), key=lambda each: each.relative_error()
        )
        if not disturbing or not disturbing[0].relative_error():
            raise CalibrationError(
                f"probes={probes!r}: give one codec or several that lose something"
            )
        if sized and not named:  # lossless codecs need no errors
            disturbing, outliers = [], False
        wanted = (*named, *(each.spec for each in sized)) or (disturbing[0].spec,)
        inserted = Probes(wanted, policy_named(policy), profile_here(profile))
        _check_arguments(
            ranks,
            codecs=list(wanted),
            probes=[each.spec for each in disturbing],
            outliers=outliers,
            train=train,
            policy=inserted.policy,
            profile=inserted.profile,
        )
        rows = [tuple(batch) if _is_tuple(batch) else (batch,) for batch in batches]
        counts = ranks.exchange(len(rows), int)
        if set(counts) != {len(rows)} or not rows:
            raise CalibrationError(f"batches of each rank: {counts}; all need as many, and some")
        torch._dynamo.reset()
        try:
            compiled = torch.compile(model, backend=Probing(inserted))
            step = step_of(model, compiled, parameters, loss, train)
            own = fingerprints(step.parameters) if train else {}
            step.weights = replicas(own, ranks.exchange(own, dict[str, str]))
            measured = named, sized, disturbing, outliers
            return _measured(ranks, inserted, step, rows, *measured, progress)
        finally:
            torch._dynamo.reset()


def _patience(timeout: float) -> float:
    """Return how long this rank waits for others: the default for a time-out that is refused."""
    try:
        check_number("timeout", timeout, above=True)
    except CommpassError:
        return TIMEOUT_S
    return float(timeout)


def _check_arguments(ranks: Ranks, **arguments: Any) -> None:
    """Raise CalibrationError on all ranks if arguments differ between ranks."""
    own = {name: str(msgspec.to_builtins(value)) for name, value in arguments.items()}
    found = ranks.exchange(own, dict[str, str])
    for name in arguments:
        values = [each[name] for each in found]
        if other := next((rank for rank, value in enumerate(values) if value != values[0]), None):
            raise CalibrationError(
                f"ranks have different arguments: {name} is {_start(values[0])} on rank 0, and"
                f" {_start(values[other])} on rank {other}"
            )


def _start(text: str) -> str:
    """Return the start of a text; that of a policy or profile is its name."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _is_tuple(batch: Any) -> bool:
    return isinstance(batch, (tuple, list))


def _measured(
    ranks: Ranks,
    probes: Probes,
    step: Step,
    rows: Sequence[tuple[Any, ...]],
    named: tuple[str, ...],
    sized: Sequence[Codec],
    disturbing: Sequence[Codec],
    outliers: bool,
    progress: Progress | None,
) -> Calibration:
    probes.measure = True
    for batch in rows:
        step.run(batch)
    seen = ranks.exchange(seen_by(probes, len(rows)), RankResults)
    groups = clusters(seen)
    if not groups:
        why = f" ({'; '.join(seen[0].remarks)})" if seen[0].remarks else ""
        raise CalibrationError(f"no collective was found that a codec could make smaller{why}")
    channels = [channels_of(group, seen) if outliers else None for group in groups]
    probes.sizes_of = list(sized)
    choices = [sorted({*named, *outlier_codecs(each)}) for each in channels]
    probe_specs = [each.spec for each in disturbing]
    for group, specs in zip(groups, choices, strict=True):
        for where in group:
            probes.errors_of[where] = [codec(spec) for spec in sorted({*specs, *probe_specs})]
    sums = _Sums(
        [dict.fromkeys(sorted({*specs, *probe_specs}), 0.0) for specs in choices],
        [Sizes() for _ in groups],
        [[0.0] * len(disturbing) for _ in groups],
        [0.0] * len(groups),
    )
    losses = []
    runs = 1 + len(groups) * len(disturbing)
    for number, batch in enumerate(rows):

        def on_progress(done: int, number: int = number) -> None:
            if progress is not None:
                progress(number * runs + done, len(rows) * runs)

        losses.append(
            _one_batch(ranks, probes, step, batch, number, groups, sums, disturbing, on_progress)
        )
    if disturbing:
        _check_effect(step, sums, probe_specs)
    peaks = ranks.exchange(list(probes.peaks.items()), list[tuple[Address, dict[str, Reading]]])
    many, sites = len(rows), [sites_of(group, seen) for group in groups]
    places = tuple(
        MeasuredSites(
            where=group,
            sites=sites[at],
            errors={spec: _rms(sums.errors[at][spec], many) for spec in choices[at]}
            | dict.fromkeys(_measured_codecs(sites[at], sums.sizes[at]), 0.0),
            levels=tuple(
                ErrorLevel(
                    codec=spec,
                    error=_rms(sums.errors[at][spec], many),
                    sensitivity=_rms(change, many),
                )
                for spec, change in zip(probe_specs, sums.changes[at], strict=True)
            ),
            loss=_rms(sums.loss[at], many) if step.train else None,
            statistics="" if (known := channels[at]) is None else known.to_text(),
            peaks=_peaks(group, peaks),
        )
        for at, group in enumerate(groups)
    )
    remarks = [remark for each in seen for remark in each.remarks]
    remarks += [SUMMED] if any(ranks.exchange(step.summed, bool)) else []
    of = "gradients" if step.train else "outputs"
    remarks += [place.no_effect_remark(of) for place in places if place.without_effect]
    now = ranks.exchange(datetime.now(UTC).isoformat(timespec="seconds"), str)[0]
    return Calibration(
        commpass=version("commpass"),
        torch=str(torch.__version__),
        written=now,
        world_size=ranks.size,
        batches=many,
        of=of,
        probes=tuple(probe_specs),
        loss=math.fsum(each for each in losses if each is not None) / many if step.train else None,
        places=places,
        remarks=tuple(dict.fromkeys(remarks)),
    )


SUMMED = (
    "there is no loss, so the sum of the model's output was used as one. Its gradients do not show"
    " what errors of the output change: give the loss, the third value that build(mesh) returns"
    " (in Python: loss=)"
)


def _check_effect(step: Step, sums: _Sums, probes: Sequence[str]) -> None:
    """Raise CalibrationError if no error at any place has changed anything."""
    for errors, changes in zip(sums.errors, sums.changes, strict=True):
        for spec, change in zip(probes, changes, strict=True):
            if errors[spec] * change > NO_EFFECT**2:  # both are squares
                return
    places = f"the {len(sums.changes)} places" if len(sums.changes) > 1 else "the one place"
    if step.train:
        what = "the gradients of the parameters"
        advice = SUMMED if step.summed else "calibrate the parameters and the loss of the training"
        advice += ". Or calibrate inference (--inference, train=False)"
    else:
        what, advice = "the outputs", "all values that are sent may be 0: give a trained model"
    raise CalibrationError(
        f"no error at {places} changes {what}, so the budget limits nothing: {advice}"
    )


def _peaks(
    group: tuple[Address, ...], seen: Sequence[list[tuple[Address, dict[str, Reading]]]]
) -> dict[str, Reading]:
    """Return by codec the largest readings at a place, over all ranks."""
    found = [known for rank in seen for where, known in rank if where in group]
    specs = sorted({spec for known in found for spec in known})
    return {spec: largest([known[spec] for known in found if spec in known]) for spec in specs}


def _measured_codecs(sites: Sequence[CountedSite], sizes: Sizes) -> list[str]:
    """Return the lossless codecs, with the bits that were measured at a place.

    Return none if values of several dtypes are sent there.
    """
    if len({each.site.dtype for each in sites}) != 1:
        return []
    return [codec(spec).measured(bits).spec for spec, bits in sizes.bits().items()]


def _rms(total: float, count: int) -> float:
    return math.sqrt(total / count)


def _one_batch(
    ranks: Ranks,
    probes: Probes,
    step: Step,
    batch: tuple[Any, ...],
    number: int,
    groups: Sequence[tuple[Address, ...]],
    sums: _Sums,
    disturbing: Sequence[Codec],
    report: Callable[[int], None],
) -> float | None:
    """Run one batch untouched, then with each error in each place. Return the mean loss over
    ranks."""
    probes.forget()
    probes.measure, probes.disturb = True, None
    loss, reference = step.run(batch)
    total, lost = ranks.all_sums([step.squares(reference), loss or 0.0])
    loss_is = lost / ranks.size
    what = "gradients" if step.train else "outputs"
    if not math.isfinite(loss_is):
        raise CalibrationError(f"batch {number}: the loss is {loss_is}")
    if not math.isfinite(total):
        raise CalibrationError(f"batch {number}: the {what} are not finite")
    if not total:
        raise CalibrationError(f"batch {number}: the {what} are all 0")
    own_errors = [
        _relative(ranks, probes, group, list(sums.errors[at])) for at, group in enumerate(groups)
    ]
    for at, group in enumerate(groups if probes.sizes_of else ()):
        _add_sizes(ranks, probes, group, sums.sizes[at])
    report(1)
    probes.measure = False
    for at, group in enumerate(groups):
        for spec, value in own_errors[at].items():
            if not math.isfinite(value):
                raise CalibrationError(f"batch {number}: what {group[0]} sends is not finite")
            sums.errors[at][spec] += value**2
        for level, each in enumerate(disturbing):
            probes.disturb = frozenset(group), each
            disturbed, output = step.run(batch)
            off, moved = ranks.all_sums(
                [step.squares(output, reference), (disturbed or 0.0) - (loss or 0.0)]
            )
            if error := own_errors[at][each.spec]:
                sums.changes[at][level] += off / total / error**2
                sums.loss[at] += (moved / lost / error) ** 2 if lost and not level else 0.0
            report(at * len(disturbing) + level + 2)
    probes.disturb = None
    return loss_is if step.train else None


def _relative(
    ranks: Ranks, probes: Probes, group: tuple[Address, ...], specs: list[str]
) -> dict[str, float]:
    """Return the relative error of each codec at a place, over all ranks."""
    mine = [probes.squares[where] for where in group if where in probes.squares] or [Squares()]
    values = [sum(each.values for each in mine)]
    errors = [sum(each.errors.get(spec, 0.0) for each in mine) for spec in specs]
    total, *parts = ranks.all_sums([float(each) for each in (*values, *errors)])
    return {
        spec: math.sqrt(part / total) if total > 0 else (0.0 if total == 0 else math.nan)
        for spec, part in zip(specs, parts, strict=True)
    }


def _add_sizes(ranks: Ranks, probes: Probes, group: tuple[Address, ...], sizes: Sizes) -> None:
    """Add what all ranks have sent at a place in a batch, and what codecs need for it."""
    specs = [each.spec for each in probes.sizes_of]
    mine = [probes.squares[where] for where in group if where in probes.squares]
    needed = [sum(each.bytes.get(spec, 0) for each in mine) for spec in specs]
    count, *found = ranks.all_sums([float(sum(each.count for each in mine)), *map(float, needed)])
    sizes.count += count
    for spec, many in zip(specs, found, strict=True):
        sizes.bytes[spec] = sizes.bytes.get(spec, 0.0) + many
