"""Check what must hold for every case, whatever it computes."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import commpass.passes.rewrite as rewriting
import pytest
import torch
from commpass import groups
from commpass.codecs import Codec, codec
from commpass.collectives import Request, algorithm
from commpass.passes import PASSES, GraphInput, PassContext, run
from commpass.passes.discover import discover
from commpass.passes.fx.parse import parse
from commpass.passes.simplify import RULES
from commpass.passes.template import Template
from commpass.plan import Plan, PlannedSite
from fabric import lockstep
from fuzz import bounds
from fuzz.program import (
    COLLECTIVES,
    STEP,
    Case,
    Step,
    Uncompiled,
    as_rank,
    group_names,
    has_own_number,
    results,
    write,
)
from lockstep import Collective, LockstepError, carry_out, run_in_lockstep
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

DECIDED = PASSES[: 1 + [step.name for step in PASSES].index("choose")]
"""The passes up to the plan: compressed sites are not rewritten yet."""
EXACT = {rule.name for rule in RULES if rule.exact} | {"quantised in 16 bits before gather"}
"""Rules after which an interpreted graph has the same bits."""
ANY_NAN = {"quantised before gather", "quantised in 16 bits before gather"}
"""Those of them after which a NaN may have another sign and payload (docs/codes.md)."""
GLOO = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
"""The dtypes that gloo supports."""


class Fault(AssertionError):
    """Something that must hold does not.

    ``kind`` is the violated property, and ``about`` distinguishes faults of one kind.
    """

    def __init__(self, kind: str, about: str, text: str):
        super().__init__(f"{kind} ({about}): {text}")
        self.kind, self.about = kind, about

    @property
    def signature(self) -> str:
        return f"{self.kind}: {self.about}"


def agree(plans: Sequence[Plan], members: dict[str, list[int]]) -> str:
    """Return "" if all ranks of each group make the same changes, else how they differ.

    If no rank changes anything, the ranks need not agree.
    """
    for name, ranks in members.items():
        parts = {rank: plans[rank].of_group(name) for rank in ranks}
        said = {rank: part.digest() if part.changed else "" for rank, part in parts.items()}
        if len(set(said.values())) > 1:
            other = next(rank for rank in ranks if said[rank] != said[ranks[0]])
            rows = [
                f"rank {rank} {[(s.kind, s.codec, s.algorithm) for s in part.sites]}"
                f" {part.rules() + part.groups()}"
                for rank, part in ((ranks[0], parts[ranks[0]]), (other, parts[other]))
            ]
            return f"group {name}: {', '.join(rows)}"
    return ""


@dataclass
class Tried:
    """Counts of what the tried cases covered: rules, codecs, outcomes."""

    graphs: int = 0
    met: Counter[str] = field(default_factory=Counter)


# --- the graphs of a case -------------------------------------------------------------------------


@dataclass
class Compiled:
    """The graphs of all ranks after some passes."""

    graphs: list[fx.GraphModule]
    outcomes: list[PassContext]

    @property
    def plans(self) -> list[Plan]:
        return [outcome.plan for outcome in self.outcomes]


_traced: dict[int | None, dict[Any, Template]] = {}


@functools.cache
def _mode() -> FakeTensorMode:
    """Return the fake mode of all graphs: a traced algorithm is inserted into several of them."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.allow_scalar_outputs = True
    return mode


class Remembered(rewriting.Templates):
    """Cache traced algorithms across graphs: tracing takes most of the time."""

    def of(self, found: Any, planned: PlannedSite, inputs: Sequence[fx.Node]) -> Template:
        rank = groups.rank_in(planned.group)
        self.traced = _traced.setdefault(rank, {})
        return super().of(found, planned, inputs)


@contextmanager
def remembered_templates() -> Iterator[None]:
    before, rewriting.Templates = rewriting.Templates, Remembered
    try:
        yield
    finally:
        rewriting.Templates = before


def written(case: Case) -> list[Uncompiled]:
    if sum(map(len, _traced.values())) > 1000:
        _traced.clear()
        _mode.cache_clear()
    mode, made = _mode(), []
    for rank in range(case.world):
        with as_rank(case, rank):
            made.append(write(case, rank, mode))
    return made


def compiled(case: Case, graphs: Sequence[fx.GraphModule], passes: Sequence[Any]) -> Compiled:
    """Run passes on copies of the graphs of all ranks. Raise Fault if a pass or a site fails."""
    policy, profile = case.settings()
    stateless = None if case.direction == "backward" else "there is no next step"
    copies, outcomes = [], []
    for rank, gm in enumerate(graphs):
        copies.append(Uncompiled({}, copy.deepcopy(gm.graph)))
        road = GraphInput(
            gm=copies[-1],
            direction=case.direction,
            policy=policy,
            profile=profile,
            stateless=stateless,
        )
        with as_rank(case, rank), remembered_templates():
            outcome = run(road, "0", tuple(passes))
        outcomes.append(outcome)
        if outcome.error is not None or outcome.plan.fallback or outcome.excluded:
            failed = "; ".join(outcome.excluded.values())
            why = outcome.plan.fallback or failed or repr(outcome.error)
            raise Fault("fallback", _outline(why), f"rank {rank}: {why}") from outcome.error
    return Compiled(copies, outcomes)


def _outline(text: str) -> str:
    """Return a message without its numbers and names, to distinguish faults."""
    return " ".join(word for word in text.split() if not any(c.isdigit() for c in word))[:100]


# --- checks ---------------------------------------------------------------------------------------


def check(case: Case, tried: Tried | None = None) -> None:
    """Raise Fault if something does not hold for a case, and LockstepError if the program itself is
    invalid."""
    tried = tried if tried is not None else Tried()
    tried.graphs += case.world
    inputs = [[x.value(rank) for x in case.inputs] for rank in range(case.world)]
    plain = written(case)
    simple = compiled(case, plain, DECIDED)
    members = {name: ranks for name, (_, ranks) in group_names(case).items()}
    difference = agree(simple.plans, members)
    if difference:
        if not case.dependent:
            raise Fault("agreement", _kinds(simple), difference)
        tried.met[f"disagreed: {case.dependent}"] += 1
        for outcome, gm, before in zip(simple.outcomes, simple.graphs, plain, strict=True):
            outcome.restore("the ranks differ")
            _same_text(gm, before)
        return
    expected = Expected(case, plain, inputs, members)
    rules = {step.rule for plan in simple.plans for step in plan.simplified}
    grouped = {kind for plan in simple.plans for kind in _grouped(plan)}
    tried.met.update(f"rule: {rule}" for rule in rules)
    tried.met.update(f"group: {kind}" for kind in grouped)
    _allowed(case, rules, grouped)
    if case.direction == "backward":
        _directions(case, plain)
    if rules or grouped:
        outputs = _run(case, simple.graphs, inputs, members)
        about = ", ".join(sorted(rules) + [f"group {kind}" for kind in sorted(grouped)])
        expected.compare(
            outputs,
            exact=rules <= EXACT,
            about=f"simplify: {about}",
            any_nan=bool(rules & ANY_NAN),
        )
    else:
        for gm, before in zip(simple.graphs, plain, strict=True):
            _same_text(gm, before)
    _carried(case, simple, plain)
    if case.autocast:
        under_autocast(case, plain, simple, DECIDED)
        tried.met["planned under autocast"] += 1
    if not any(plan.compressed for plan in simple.plans):
        return
    coded = Coded(case, simple.plans, tried)
    about = ", ".join(sorted({f"{s.kind} by {s.codec}" for s in coded.all_sites()}))
    if case.rewritten and not slow(simple.plans):
        tried.met["rewritten"] += 1
        _rewritten(case, plain, simple, coded, expected, about)
    else:
        outputs = _run(case, simple.graphs, inputs, members, coded.exchange)
        expected.replicas(outputs, about)
        expected.finite(outputs, about)
    if silent := silenced(case, plain):
        tried.met["silenced"] += 1
        check_silent(silent, tried)


def slow(plans: Sequence[Plan]) -> bool:
    """Return whether rewriting takes too long: the graph of a lossless codec has thousands of
    nodes, and a ring has many hops."""
    sites = [site for plan in plans for site in plan.compressed]
    dynamic = [site for site in sites if codec(site.codec).dynamic]
    rings = [site for site in sites if "ring" in site.algorithm and site.group_size > 4]
    few = len(dynamic) <= 2 and all(
        site.group_size == 2 and site.kind != "all_reduce" for site in dynamic
    )
    return bool(rings) or not few


def _kinds(simple: Compiled) -> str:
    rules = [Counter(step.rule for step in plan.simplified) for plan in simple.plans]
    odd = {
        rule for each in rules for rule in each if any(each[rule] != other[rule] for other in rules)
    }
    return ", ".join(sorted(odd)) or "decisions"


SIZES_ALONE = ("full", "positions")
"""Steps that use only the size of a value."""


def _directions(case: Case, plain: Sequence[fx.GraphModule]) -> None:
    """Check directions: what backward recomputes belongs to forward, unless a gradient reaches
    it."""
    reached = [given.gradient for given in case.inputs]
    forward = set()
    for index, step in enumerate(case.steps):
        gradient = step.op not in SIZES_ALONE and any(reached[number] for number in step.of)
        reached += [gradient] * results(step)
        if step.again and not gradient:
            forward.add(index)
    for rank, gm in enumerate(plain):
        with as_rank(case, rank):
            for found in discover(gm, case.direction):
                again = found.call.node.meta[STEP] in forward
                if (found.site.direction == "forward") != again:
                    raise Fault("direction", found.site.direction, found.site.name)


def _grouped(plan: Plan) -> list[str]:
    """Return the kind of each fusion."""
    kinds = {site.name: site.kind for site in plan.sites}
    return [kinds[each.into] for each in plan.grouped]


def _allowed(case: Case, rules: set[str], grouped: set[str]) -> None:
    policy, _ = case.settings()
    if grouped and (policy.off or "group" in policy.skip or not policy.group_bytes):
        raise Fault("policy", "grouped though it is off", str(grouped))
    if not policy.reassociate and grouped - {"all_gather"}:
        raise Fault("policy", "grouped sums though it may not", str(grouped))
    if rules and (policy.off or "simplify" in policy.skip):
        raise Fault("policy", "simplified though it is off", str(rules))
    inexact = rules - {rule.name for rule in RULES if rule.exact}
    if not policy.reassociate and inexact:
        raise Fault("policy", "reassociated though it may not", str(inexact))


def _same_text(gm: fx.GraphModule, before: fx.GraphModule) -> None:
    if str(gm.graph) != str(before.graph):
        raise Fault("untouched", "graph", f"nothing was done, but the graph became\n{gm.graph}")


def _carried(case: Case, after: Compiled, plain: Sequence[fx.GraphModule]) -> None:
    """Check that only dtypes are sent that the library supports, or that the program sends
    itself."""
    for gm, before in zip(after.graphs, plain, strict=True):
        new = {dtype for dtype in _sent(gm) if dtype not in GLOO} - set(_sent(before))
        if new:
            raise Fault("dtype", str(sorted(map(str, new))), "gloo does not carry it")


def _sent(gm: fx.GraphModule) -> list[torch.dtype]:
    calls = (parse(node) for node in gm.graph.nodes)
    return [
        source.meta["val"].dtype for call in calls if call is not None for source in call.inputs
    ]


def _run(
    case: Case, graphs: Any, inputs: Any, members: dict[str, list[int]], exchange: Any = None
) -> Any:
    given = [list(values) for values in inputs]
    try:
        return run_in_lockstep(graphs, given, members.__getitem__, exchange)
    except LockstepError as error:
        raise Fault("lockstep", _outline(str(error).partition("\n")[0]), str(error)) from error


class Expected:
    """The expected results: bit for bit those of the case's graphs, and within a bound those of the
    definitions."""

    def __init__(self, case: Case, plain: Any, inputs: Any, members: dict[str, list[int]]):
        self.case, self.inputs, self.members = case, inputs, members
        self.plain = run_in_lockstep(
            plain, [list(values) for values in inputs], members.__getitem__
        )
        self.bounded = bounds.computed(case, inputs)
        self.same = alike(case)
        self.compare(self.plain, exact=True, about="the program itself")

    def compare(
        self,
        outputs: Any,
        exact: bool,
        about: str,
        zeros: bool = False,
        any_nan: bool = False,
    ) -> None:
        """Compare results; ``exact``: bit for bit, ``zeros``: except for the sign of zeros,
        ``any_nan``: except for the sign and payload of a NaN."""
        same = same_but_nan if any_nan else same_bits
        for rank in range(self.case.world):
            rows = zip(outputs[rank], self.plain[rank], self.bounded[rank], strict=True)
            for number, (got, plain, bounded) in enumerate(rows):
                where = f"output {number} of rank {rank}"
                if (got.shape, got.dtype) != (plain.shape, plain.dtype):
                    raise Fault(
                        "form",
                        about,
                        f"{where}: {got.dtype}{list(got.shape)} instead of "
                        f"{plain.dtype}{list(plain.shape)}",
                    )
                if exact and not (bool((got == plain).all()) if zeros else same(got, plain)):
                    raise Fault("bits", about, f"{where}: {_worst(got, plain)}")
                _within(got, plain, bounded, about, where)
        self.replicas(outputs, about)

    def replicas(self, outputs: Any, about: str) -> None:
        """Check that values that are equal on several ranks by construction are equal."""
        for number, value in enumerate(self.case.outputs):
            first: dict[int, int] = {}
            for rank in range(self.case.world):
                other = first.setdefault(self.same[value][rank], rank)
                if not same_bits(outputs[rank][number], outputs[other][number]):
                    raise Fault(
                        "replicas", about, f"output {number} differs on ranks {other} and {rank}"
                    )

    def finite(self, outputs: Any, about: str) -> None:
        """Check that non-finite values stay non-finite (law 2)."""
        for rank in range(self.case.world):
            rows = zip(outputs[rank], self.bounded[rank], strict=True)
            for number, (got, bounded) in enumerate(rows):
                _not_finite(got, bounded, about, f"output {number} of rank {rank}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(as_bits), b.contiguous().view(as_bits))


def same_but_nan(a: Tensor, b: Tensor) -> bool:
    """As ``same_bits``, except that any NaN is equal to any other."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if not a.dtype.is_floating_point:
        return same_bits(a, b)
    if a.dtype.itemsize == 1:  # float8, exact in float32
        a, b = a.float(), b.float()
    nan = torch.isnan(a)
    if not torch.equal(nan, torch.isnan(b)):
        return False
    return same_bits(torch.where(nan, 0, a), torch.where(nan, 0, b))


def _worst(got: Tensor, expected: Tensor) -> str:
    off = (got.double() - expected.double()).abs()
    most = off.max() if off.numel() else 0
    return f"{int((off != 0).sum())} of {off.numel()} differ, by up to {most:g}"


def _not_finite(got: Tensor, bounded: bounds.Bounded, about: str, where: str) -> None:
    if not bounded.exact and bool((~bounded.value.isfinite() & got.isfinite()).any()):
        raise Fault("finite", about, f"{where}: NaN or infinity has become a number")


def _within(got: Tensor, plain: Tensor, bounded: bounds.Bounded, about: str, where: str) -> None:
    if bounded.exact:
        if not torch.equal(got, bounded.value.to(got.dtype)):
            raise Fault("integers", about, where)
        return
    _not_finite(got, bounded, about, where)
    certain = bounded.value.isfinite() & bounded.error.isfinite()
    off = (got.double() - bounded.value).abs()
    wrong = certain & ~(off <= bounded.error)
    if bool(wrong.any()):
        raise Fault(
            "bound",
            about,
            f"{where}: off by {off[wrong].max():g}, {bounded.error[wrong].max():g} allowed",
        )
    if got.dtype is torch.float16 and bool((plain.isfinite() != got.isfinite()).any()):
        raise Fault("range", about, f"{where}: another value is not finite in float16")


def alike(case: Case) -> list[list[int]]:
    """Return a number for each value and rank; equal numbers mean equal bits by construction."""
    known: dict[Any, int] = {}
    label = lambda key: known.setdefault(key, len(known))  # noqa: E731
    values = [
        [
            label(
                (
                    n,
                    "same"
                    if x.fill in ("same", "zeros") and not x.rows and not x.planted
                    else rank,
                )
            )
            for rank in range(case.world)
        ]
        for n, x in enumerate(case.inputs)
    ]
    for number, step in enumerate(case.steps):
        for position in range(results(step)):
            row = []
            for rank in range(case.world):
                dim = case.dims[step.how["group"]] if "group" in step.how else None
                ranks = dim.of(rank) if dim else None
                if step.op in COLLECTIVES and ranks is not None:
                    all_of_it = tuple(values[step.of[position]][each] for each in ranks)
                    mine = rank if step.op in ("reduce_scatter", "all_to_all") else None
                    row.append(label((number, position, tuple(ranks), all_of_it, mine)))
                else:
                    own = rank if "group" in step.how or has_own_number(step) else None
                    row.append(label((number, tuple(values[n][rank] for n in step.of), own)))
            values.append(row)
    return values


# --- what is compressed ---------------------------------------------------------------------------


@dataclass
class Coded:
    """Execute compressed sites eagerly, on all ranks at once, and check each of them."""

    case: Case
    plans: Sequence[Plan]
    tried: Tried
    states: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = [{site.name: site for site in plan.compressed} for plan in self.plans]

    def all_sites(self) -> Iterator[PlannedSite]:
        for sites in self.sites:
            yield from sites.values()

    def states_of(self, rank: int) -> list[Tensor]:
        """Return the state of a rank, in the order of its sites."""
        keys = [(rank, name) for name in self.sites[rank]]
        return [self.states[key] for key in keys if key in self.states]

    def exchange(self, together: Sequence[Collective]) -> list[list[Tensor]]:
        given = carry_out(together)
        many = len(together[0].sent) > 1
        for position in range(len(together[0].sent)):
            names = [f"{one.node}.{position}" if many else one.node for one in together]
            sites = [
                self.sites[one.rank].get(name) for one, name in zip(together, names, strict=True)
            ]
            if sites[0] is None:
                continue
            for place, result in enumerate(self._coded(together, position, names, sites)):
                given[place][position] = result
        return given

    def _coded(self, together: Any, position: int, names: Any, sites: Any) -> list[Tensor]:
        site, ranks = sites[0], len(together)
        coder, how = codec(site.codec), algorithm(site.kind, site.algorithm)
        values = [one.sent[position] for one in together]
        keys = [(one.rank, name) for one, name in zip(together, names, strict=True)]
        states = [
            self.states.get(key, torch.zeros(x.shape, dtype=_sums(x)))
            for key, x in zip(keys, values, strict=True)
        ]

        stateful = coder.state is not None

        def steps(number: int) -> Any:
            settings = together[number].settings
            request = Request(
                site.group,
                ranks,
                number,
                site.reduce_op or "sum",
                settings.get("src", 0),
                settings.get("input_split_sizes"),
                settings.get("output_split_sizes"),
                unknown=not all(isinstance(n, int) for row in site.splits or () for n in row),
            )
            more = [states[number]] if stateful else []
            return how.run(values[number], request, coder, *more)

        with pytest.MonkeyPatch.context() as patch:
            ended, _ = lockstep(steps, ranks, patch)
        if stateful:
            new = [state for _, state in ended]
            ended = [result for result, _ in ended]
            self.states |= dict(zip(keys, new, strict=True))
        # in the form that ``steps.finish`` returns
        ended = [result.contiguous() for result in ended]
        self.tried.met[f"codec: {coder.spec.partition('(')[0]} by {how.name} of {site.kind}"] += 1
        exact = self._exact(together, position)
        about = f"{site.kind} by {site.codec}, {site.algorithm}"
        if self.case.autocast and not stateful and values[0].numel():
            _coded_under_autocast(values[0], coder, site.codec)
        for number, (got, wanted) in enumerate(zip(ended, exact, strict=True)):
            if (got.shape, got.dtype) != (wanted.shape, values[number].dtype):
                raise Fault(
                    "form", about, f"{got.dtype}{list(got.shape)} instead of {list(wanted.shape)}"
                )
            if bool((~wanted.isfinite() & got.isfinite()).any()):
                raise Fault("finite", about, "NaN or infinity has become a number")
            if site.kind in ("all_reduce", "all_gather", "broadcast") and not same_bits(
                got, ended[0]
            ):
                raise Fault(
                    "replicas",
                    about,
                    f"ranks {together[0].rank} and {together[number].rank} differ",
                )
        if stateful:
            exact = [wanted + self._kept(states, new, site) for wanted in exact]
        self._near(ended, exact, values, site, about, stateful)
        return ended

    def _exact(self, together: Any, position: int) -> list[Tensor]:
        wide = [replace(one, sent=(one.sent[position].double(),)) for one in together]
        return [row[0] for row in carry_out(wide)]

    def _kept(self, before: Any, after: Any, site: PlannedSite) -> Tensor:
        kept = sum(a.double() - b.double() for a, b in zip(before, after, strict=True))
        return kept / len(before) if site.reduce_op == "avg" else kept

    def _near(
        self, ended: Any, exact: Any, values: Any, site: PlannedSite, about: str, kept: bool
    ) -> None:
        """Check that the error is within the codec's hard bound for each coding, and for
        Gaussian-like values within the plan's prediction."""
        coder = codec(site.codec)
        if not all(x.isfinite().all() for x in values) or not all(
            x.isfinite().all() for x in exact
        ):
            return
        dtype = values[0].dtype
        off = (
            sum(float((a.double() - b).square().sum()) for a, b in zip(ended, exact, strict=True))
            ** 0.5
        )
        norms = [float(x.double().norm()) for x in values]
        copies = len(values) if site.kind in ("all_reduce", "all_gather", "broadcast") else 1
        numel = max((x.numel() for x in (*ended, *values)), default=0)
        rounding = torch.finfo(dtype).eps * (len(values) + 2)
        hops = len(values) + 1
        bound = 0.0 if coder.lossless or kept else (1 + coder.bound) ** hops - 1
        size = sum(norms) * copies**0.5
        floor = (
            (coder.floor(dtype) * 4 + torch.finfo(dtype).smallest_normal)
            * hops
            * max(numel, 1) ** 0.5
            * copies
        )
        if not off <= (bound + rounding) * size + floor:
            raise Fault(
                "site", about, f"off by {off:g} of {size:g}; the codec's bound is {coder.bound:g}"
            )
        sharp = all(
            x.numel() >= 64 and float(x.abs().max()) <= 4 * float(x.double().square().mean()) ** 0.5
            for x in values
        )
        if sharp and not kept:
            whole = sum(norm**2 for norm in norms) ** 0.5 * copies**0.5
            whole /= len(values) if site.reduce_op == "avg" else 1
            if not off <= (4 * site.error + rounding * len(values)) * whole + floor:
                raise Fault(
                    "predicted",
                    about,
                    f"off by {off / whole:.3%}, but {site.error:.3%} was predicted",
                )


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def under_autocast(
    case: Case, plain: Sequence[fx.GraphModule], without: Compiled, passes: Sequence[Any]
) -> None:
    """Check that passes under autocast make the same plans and graphs: nodes, dtypes and all."""
    with torch.autocast("cpu", torch.bfloat16):
        within = compiled(case, plain, passes)
    pairs = zip(within.outcomes, without.outcomes, within.graphs, without.graphs, strict=True)
    for rank, (one, other, gm, before) in enumerate(pairs):
        if one.plan != other.plan:
            raise Fault("autocast", "plan", f"rank {rank} plans otherwise under autocast")
        if str(gm.graph) != str(before.graph) or _dtypes(gm) != _dtypes(before):
            raise Fault("autocast", "graph", f"rank {rank}: {gm.graph}")


def _dtypes(gm: fx.GraphModule) -> list[Any]:
    """Return the dtypes of the fake value of each node."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return fx.node.map_aggregate(values, lambda x: x.dtype if isinstance(x, Tensor) else None)


def _coded_under_autocast(x: Tensor, coder: Codec, about: str) -> None:
    """Check that a codec gives the same bits under autocast."""
    made = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            wire = coder.encode(x)
            made.append((wire.payload, coder.decode(wire)))
    if not all(same_bits(*pair) for pair in zip(*made, strict=True)):
        raise Fault("autocast", f"codec {about}", "other bits than without")


def _rewritten(
    case: Case,
    plain: Sequence[fx.GraphModule],
    simple: Compiled,
    coded: Coded,
    expected: Expected,
    about: str,
) -> None:
    """Check that the rewritten graphs compute the same as the simplified ones with eagerly executed
    compressed sites.

    If there is state, run them twice.
    """
    whole = compiled(case, plain, PASSES)
    for first, again in zip(simple.plans, whole.plans, strict=True):
        decided = replace(again, reordered=())  # what comes after the plan moves nodes
        if (first.digest(), first.grouped) != (decided.digest(), decided.grouped):
            raise Fault("determinism", "plan", "planned differently the second time")
    inputs, members = expected.inputs, expected.members
    if difference := agree(whole.plans, members):  # some ranks have moved their exchanges
        if not case.dependent:
            raise Fault("agreement", "order", difference)
        coded.tried.met[f"disagreed on the order: {case.dependent}"] += 1
        return
    _carried(case, whole, plain)
    if case.autocast:
        under_autocast(case, plain, whole, PASSES)
    kept = [[torch.zeros(k.shape, dtype=k.dtype) for k in end.state] for end in whole.outcomes]
    for _ in range(2 if any(kept) else 1):
        by_hand = _run(case, simple.graphs, inputs, members, coded.exchange)
        given = [[*values, *state] for values, state in zip(inputs, kept, strict=True)]
        outputs = _run(case, whole.graphs, given, members)
        for rank in range(case.world):
            rows = zip(outputs[rank], by_hand[rank], strict=True)
            for number, (got, wanted) in enumerate(rows):
                if not same_bits(got, wanted):
                    where = f"output {number} of rank {rank}"
                    raise Fault("rewrite", about, f"{where}: {_worst(got, wanted)}")
            for state, mine in zip(coded.states_of(rank), kept[rank], strict=True):
                if not same_bits(state, mine):
                    raise Fault("state", about, f"rank {rank}: {_worst(state, mine)}")
        expected.replicas(outputs, about)
        expected.finite(outputs, about)


# --- what may not be compressed -------------------------------------------------------------------


def silenced(case: Case, plain: Sequence[fx.GraphModule]) -> Case | None:
    """Return the same program with zeros sent wherever a codec is allowed, or None if nothing else
    is sent.

    What is still sent must arrive unchanged.
    """
    policy, _ = case.settings()
    coded, rest = set(), set()
    for rank, gm in enumerate(plain):
        with as_rank(case, rank):
            for found in discover(gm, case.direction):
                step = found.call.node.meta[STEP]
                (coded if policy.allowed(found.site)[0].codecs else rest).add(step)
    if not coded or not rest - coded:
        return None
    steps: list[Step] = []
    numbers = list(range(len(case.inputs)))
    count = len(numbers)
    for index, step in enumerate(case.steps):
        of = [numbers[number] for number in step.of]
        if index in coded:
            for position, number in enumerate(of):
                steps.append(Step("scale", [number], {"by": 0.0}))
                of[position] = count
                count += 1
        steps.append(replace(step, of=of))
        numbers += range(count, count + results(step))
        count += results(step)
    inputs = [replace(x, planted=[]) for x in case.inputs]
    outputs = [numbers[number] for number in case.outputs]
    return replace(case, inputs=inputs, steps=steps, outputs=outputs)


def check_silent(case: Case, tried: Tried) -> None:
    inputs = [[x.value(rank) for x in case.inputs] for rank in range(case.world)]
    members = {name: ranks for name, (_, ranks) in group_names(case).items()}
    plain = written(case)
    finite: list[bool] = []

    def watched(together: Sequence[Collective]) -> list[list[Tensor]]:
        finite.extend(bool(x.isfinite().all()) for one in together for x in one.sent)
        return carry_out(together)

    _run(case, plain, inputs, members, watched)
    if not all(finite):  # infinity times zero is not zero
        return
    simple = compiled(case, plain, DECIDED)
    if agree(simple.plans, members) and case.dependent:
        return
    tried.graphs += case.world
    outputs = _run(case, simple.graphs, inputs, members, Coded(case, simple.plans, tried).exchange)
    rules = {step.rule for plan in simple.plans for step in plan.simplified}
    about = "kept sites: " + ", ".join(sorted(rules))
    Expected(case, plain, inputs, members).compare(outputs, rules <= EXACT, about, zeros=True)
