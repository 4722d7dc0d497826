"""Choose a codec for each place from measurements, under one error budget, and build a policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from commpass.calibration.measured_sites import Address, MeasuredSites
from commpass.codecs import codec
from commpass.collectives import DEFAULTS, find_algorithm
from commpass.costmodel import Profile
from commpass.costmodel.budget import Option, cheapest
from commpass.costmodel.links import sent_by
from commpass.distributed.budget import excess
from commpass.distributed.machine import default_here
from commpass.errors import CalibrationError, check_number, nearest
from commpass.passes.candidates import candidates
from commpass.passes.choose import rank
from commpass.passes.results import Options
from commpass.plan import NONE, Candidate
from commpass.policy import Policy
from commpass.policy.rules import Allowed, Rule

CHEAPEST = ("bytes", "time")


@dataclass(frozen=True, kw_only=True)
class CodecOption:
    """A candidate at a place: a codec (``none``: uncompressed) with one algorithm for each of its
    sites.

    ``error`` is the relative error of the place's result, and ``share`` its contribution to the
    squared error of the model. ``sent_bytes`` leave one rank in a step; a plan counts the bytes
    that it hands to collectives instead. ``us`` is the predicted time of all sites together.
    """

    codec: str
    algorithms: tuple[str, ...]
    error: float
    share: float
    sent_bytes: float
    us: float


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The chosen candidate of each place, all that were considered, and the budget that is kept.

    ``kept`` are the numbers of places that the base policy keeps. A place without a measured effect
    (``MeasuredSites.without_effect``) has a lossless codec, or none.
    """

    max_error: float
    places: tuple[MeasuredSites, ...]
    considered: tuple[tuple[CodecOption, ...], ...]
    chosen: tuple[CodecOption, ...]
    kept: frozenset[int] = frozenset()

    @property
    def error(self) -> float:
        """The predicted relative error of the gradients, or outputs.

        Shares add up, since errors of different places are independent.
        """
        return math.sqrt(math.fsum(each.share for each in self.chosen))

    @property
    def sent_bytes(self) -> float:
        return math.fsum(each.sent_bytes for each in self.chosen)

    @property
    def us(self) -> float:
        return math.fsum(each.us for each in self.chosen)

    @property
    def plain_bytes(self) -> float:
        """Bytes that leave one rank if everything is uncompressed."""
        return math.fsum(some[0].sent_bytes for some in self.considered)

    def uniform(self, name: str) -> tuple[float, float] | None:
        """Return bytes and predicted error if all places had the same codec; None if one cannot
        have it."""
        wanted = codec(name)  # measured bits do not distinguish codecs
        coded = [[each for each in some if each.codec != NONE] for some in self.considered]
        rows = [[each for each in some if codec(each.codec) == wanted] for some in coded]
        if not all(rows):
            return None
        found = [row[0] for row in rows]
        error = math.sqrt(math.fsum(each.share for each in found))
        return math.fsum(each.sent_bytes for each in found), error


def solve(
    places: Iterable[MeasuredSites],
    max_error: float,
    base: Policy,
    profile: Profile | None,
    by: str = "bytes",
) -> Solution:
    """Return the cheapest mix.

    Places are sorted first, so that the same ones give the same mix in any order.
    """
    try:
        check_number("max_error", max_error)
    except ValueError as error:
        raise CalibrationError(f"{error}, such as 0.02") from None
    if by not in CHEAPEST:
        raise CalibrationError(f"cheapest={by!r}{nearest(str(by), CHEAPEST)}")
    ordered = tuple(sorted(places, key=lambda each: each.where))
    known = [considered(each, base, profile, by) for each in ordered]
    excluded = frozenset(number for number, each in enumerate(ordered) if _is_excluded(each, base))
    open_to = [
        some[:1] if number in excluded else _open(place, some)
        for number, (place, some) in enumerate(zip(ordered, known, strict=True))
    ]
    options = [
        [Option(each.us if by == "time" else each.sent_bytes, each.share) for each in some]
        for some in open_to
    ]
    mix = cheapest(options, max_error**2)
    assert mix is not None  # leaving everything uncompressed loses nothing
    chosen = tuple(some[number] for some, number in zip(open_to, mix.chosen, strict=True))
    return Solution(
        max_error=max_error, places=ordered, considered=tuple(known), chosen=chosen, kept=excluded
    )


def _open(place: MeasuredSites, some: Sequence[CodecOption]) -> tuple[CodecOption, ...]:
    """Return the candidates that may be chosen: only lossless ones where the budget limits
    nothing, and none that the error check of compiled graphs refuses on the measured values."""
    if not place.without_effect:
        return tuple(each for each in some if each.codec == NONE or not _refused(place, each))
    return tuple(each for each in some if each.codec == NONE or codec(each.codec).lossless)


def _refused(place: MeasuredSites, option: CodecOption) -> bool:
    """Return whether the error check refuses a candidate on the values that were measured."""
    peak = place.peaks.get(option.codec)
    if peak is None:
        return False
    alone = codec(option.codec).relative_error() or 1.0
    expected = max(_expected(place, option.codec, option.algorithms))
    reading = dataclasses.replace(peak, error=peak.error * expected / alone)
    return bool(excess(reading, min(1.0, _limit(place, option.codec, option.algorithms))))


def _is_excluded(place: MeasuredSites, base: Policy) -> bool:
    """Return whether a rule of the policy keeps a place, or the policy is off."""
    if base.off:
        return True
    return any(
        next((rule.keep for rule in base.rules if rule.matches(each.site)), False)
        for each in place.sites
    )


def considered(
    place: MeasuredSites, base: Policy, profile: Profile | None, by: str = "bytes"
) -> tuple[CodecOption, ...]:
    """Return all candidates at a place, the uncompressed one first.

    Each codec has its best algorithm: the one that sends least and then loses least, or the
    fastest.
    """
    wanted = Allowed(codecs=tuple(sorted(place.errors)), algorithms=base.algorithms)
    found = [
        candidates(each.site, wanted, profile or default_here(each.site.device), True)
        for each in place.sites
    ]
    alone = [each.uncompressed for each in found]
    made = (_by_codec(place, spec, found, by) for spec in sorted(place.errors))
    return (
        _at_all(place, alone, 0.0),
        *(each for each in made if each is not None),
    )


def _by_codec(
    place: MeasuredSites, spec: str, options: Sequence[Options], by: str
) -> CodecOption | None:
    """Return one codec at all sites of a place; None if one of them cannot have it."""
    best: list[Candidate] = []
    for carried, each in zip(place.sites, options, strict=True):
        fitting = [
            one
            for one in each.possible
            if one.codec == spec and one.wire_bytes >= 0 and one.error <= 1
        ]
        if not fitting:
            return None
        ranks = carried.site.group_size
        best.append(
            min(fitting, key=rank)
            if by == "time"
            else min(fitting, key=lambda one: (sent(one, ranks), one.error, rank(one)))
        )
    return _at_all(place, best, max(result_error(place, one.codec, one.error) for one in best))


def _at_all(place: MeasuredSites, choice: Sequence[Candidate], error: float) -> CodecOption:
    rows = list(zip(place.sites, choice, strict=True))
    return CodecOption(
        codec=choice[0].codec,
        algorithms=tuple(sorted({one.algorithm for one in choice} - {NONE})),
        error=error,
        share=place.change(error) ** 2,
        sent_bytes=math.fsum(each.calls * sent(one, each.site.group_size) for each, one in rows),
        us=math.fsum(each.calls * one.predicted_us for each, one in rows),
    )


def sent(candidate: Candidate, ranks: int) -> float:
    """Return the bytes that leave one rank."""
    return math.fsum(
        sent_by(stage, ranks)
        for stage in candidate.stages
        if stage.role == "exchange" and stage.leaving > 0
    )


def result_error(place: MeasuredSites, spec: str, expected: float) -> float:
    """Return the relative error of a place's result.

    It is the measured error of one encode and decode there, times the factor by which an algorithm
    increases that of Gaussian data (from ``expected``).
    """
    alone = codec(spec).relative_error()
    return place.errors[spec] * (expected / alone if alone else 1.0)


# --- the policy -----------------------------------------------------------------------------------


def rules_of(found: Solution, base: Policy, name: str, *, exactly: bool = False) -> Policy:
    """Return the policy of a mix. Deeper modules come first, since a rule covers all that is
    inside."""
    made: list[tuple[Address, Rule]] = []
    rows = zip(found.places, found.considered, found.chosen, strict=True)
    for number, (place, some, chosen) in enumerate(rows):
        fields = _rule_fields(place, some, chosen, number in found.kept, exactly)
        made += [(where, _rule(where, fields)) for where in place.where]
    made.sort(key=lambda each: (-_depth(each[0].module), each[0]))
    rules = tuple(rule for _, rule in made)
    return dataclasses.replace(base, name=name, rules=(*rules, *base.rules))


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _rule(address: Address, entries: dict[str, object]) -> Rule:
    fields = {"module": address.module, "kind": address.kind, "direction": address.direction}
    return Rule(**fields, group=address.group, **entries)  # type: ignore[arg-type]


def _rule_fields(
    place: MeasuredSites,
    some: Sequence[CodecOption],
    choice: CodecOption,
    excluded: bool,
    exactly: bool,
) -> dict[str, object]:
    """Return the fields of a place's rule."""
    if excluded or choice.codec == NONE:
        return {"keep": True}
    names, algorithms = [choice.codec], list(choice.algorithms)
    if not exactly:
        names += [
            each.codec
            for each in _open(place, some)[1:]
            if each is not choice and _error(place, each.codec, algorithms) <= choice.error
        ]
        kinds = {each.site.kind for each in place.sites}
        algorithms += [
            algorithm
            for algorithm in DEFAULTS
            if algorithm not in algorithms
            and algorithm != "hierarchical"  # its error depends on the hosts
            and any(find_algorithm(kind, algorithm) for kind in kinds)
            and all(_error(place, name, [algorithm]) <= choice.error for name in names)
        ]
    most = max(_limit(place, name, algorithms) for name in names)
    fields: dict[str, object] = {
        "codec": tuple(names),
        "algorithm": tuple(algorithms),
        "max_error": min(1.0, math.ceil(most * 1e5 + 1) / 1e5),
    }
    return {**fields, "force": True} if exactly else fields


def _error(place: MeasuredSites, spec: str, ways: Sequence[str]) -> float:
    """Return the largest error of a codec by some algorithms."""
    return max(result_error(place, spec, each) for each in _expected(place, spec, ways))


HEADROOM = 1.25
"""How many times the largest measured error the limit is: other batches have somewhat larger
ones."""


def _limit(place: MeasuredSites, spec: str, ways: Sequence[str]) -> float:
    """Return the ``max_error`` that a rule needs for a codec by some algorithms.

    Candidates compare their error on Gaussian data with it. The error check compares real errors,
    which may be larger.
    """
    peak, alone = place.peaks.get(spec), codec(spec).relative_error()
    share = HEADROOM * peak.error / alone if peak is not None and alone else 1.0
    return max(each * max(share, 1.0) for each in _expected(place, spec, ways))


def _expected(place: MeasuredSites, spec: str, ways: Sequence[str]) -> Iterator[float]:
    """Yield the expected errors of Gaussian data, by each algorithm at each site that has it."""
    for each in place.sites:
        for way in ways:
            if (known := find_algorithm(each.site.kind, way)) is not None:
                yield known.error(codec(spec), each.site.group_size)
