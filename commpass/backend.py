"""The torch.compile backend: runs the passes on AOTAutograd's forward and backward graphs and
compiles them.

Graphs are rewritten in ``inner_compile``, before Inductor's own compile, so that Inductor's graph
cache keys on the rewritten graph. On a hit, AOTAutograd's cache would skip that step. It is
therefore disabled, for compiles of this backend only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, get_origin

import msgspec
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._guards import CompileContext, TracingContext, tracing

from commpass import groups
from commpass.costmodel import Profile
from commpass.costmodel.files import digest as digest_of
from commpass.distributed import agreement, record, step_log
from commpass.distributed.budget import OVER, Check, Key, keys_of
from commpass.distributed.calls import (
    Raising,
    before_each_call,
    callable_of,
    constants_of,
    named,
    state_for,
    with_boxed_args,
    with_more,
)
from commpass.distributed.checked import Built, Checked, release
from commpass.distributed.environment import dump_here, policy_here
from commpass.distributed.hosts import with_hosts
from commpass.distributed.machine import default_here, profile_here
from commpass.distributed.origin import Origin, call_of, count_call, origin_of_graph
from commpass.distributed.owners import INFERENCE, Calls
from commpass.distributed.parts import can_compare
from commpass.distributed.plan_store import Round, greet
from commpass.distributed.samples import MORE, PLAIN, Sampled, Samples, label
from commpass.distributed.summary import Summary
from commpass.distributed.uncompressed import uncompressed_sites
from commpass.distributed.watch import Watch, Watched
from commpass.errors import (
    CommpassError,
    PlanMismatch,
    PolicyError,
    ScopeError,
    Unanswered,
    nearest,
)
from commpass.groups import is_first_rank, ready
from commpass.lowering.repairs import repaired
from commpass.passes import PASSES, GraphInput, PassContext
from commpass.passes import run as run_passes
from commpass.passes.fx import meta
from commpass.passes.fx.direction import keep_metadata
from commpass.passes.fx.marks import chunked
from commpass.passes.fx.parse import describe_group, graph_modules, parse
from commpass.passes.hidden import decided
from commpass.passes.sample import RECEIVED, UNSEEN
from commpass.passes.timeline import timeline, whole_us
from commpass.plan import Plan, Simplification
from commpass.policy import Policy
from commpass.policy.annotate import open_scopes
from commpass.policy.paths import Places
from commpass.tensorrt import Engines
from commpass.utils.ambient import without_ambient_state

INNER = ("inductor", "eager", "aot_eager", "tensorrt")
LOOKS = INNER[:3]
"""The inner compilers that know the operator that samples errors. Others need not know it."""
Compiler = Callable[..., Any]


def backend(
    policy: str | Path | Policy = "lossless",
    *,
    inner: str | Compiler = "inductor",
    profile: str | Path | Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> Backend:
    """Return a backend for ``torch.compile(model, backend=commpass.backend("balanced"))``.

    Args:
        policy: the name of a preset, the path of a TOML file, or a Policy. The environment
            variables COMMPASS_POLICY and COMMPASS=off override it.
        inner: the compiler of the rewritten graphs.
            ``"inductor"``: Inductor.
            ``"eager"``: runs the graphs that Inductor would get, operator by operator.
            ``"aot_eager"``: runs AOTAutograd's graphs, without Inductor's decompositions.
            ``"tensorrt"``: compiles AOTAutograd's graphs to torch-tensorrt engines, for inference.
            A function ``(graph_module, example_inputs) -> callable``: called with each of
            AOTAutograd's graphs.
        profile: the cost model's data on links and kernels: a Profile, a name (``"nvlink-4"``,
            ``"ethernet-25g"``), or the path of a .json or .toml file. If None, the environment
            variable COMMPASS_PROFILE, or else a default for the device.
        strict: if True, raise when a pass fails. Otherwise log a warning and compile the untouched
            graph.
        dump: a folder into which rank 0 writes plans and graphs, for ``commpass explain`` and
            related commands. If None, the environment variable COMMPASS_DUMP.
        timeout: seconds that ranks wait for each other's plans. If None, the time-out of the
            process groups. After 30 s a message names the ranks that are waited for.

    Raises PolicyError for an unknown name, with the nearest known one.
    """
    chosen = policy_here(policy)
    if not callable(inner) and inner not in INNER:
        raise PolicyError(
            f"unknown inner compiler {inner!r}{nearest(str(inner), INNER)} Or give a function."
        )
    seconds = isinstance(timeout, Real) and not isinstance(timeout, bool) and timeout > 0
    if timeout is not None and not seconds:
        expected = "seconds as a number above 0, e.g. timeout=30"
        raise PolicyError(f"timeout={timeout!r}: must be {expected}")
    if not isinstance(strict, bool):
        raise PolicyError(f"strict={strict!r}: must be strict=True or strict=False")
    if dump is not None and not isinstance(dump, (str, os.PathLike)):
        raise PolicyError(f'dump={dump!r}: must be the path of a folder, e.g. dump="dumps"')
    if inner == "tensorrt":
        inner = Engines()
    return Backend(chosen, inner, profile_here(profile), strict, dump_here(dump), timeout)


OPTIONS = ("policy", "inner", "profile", "strict", "dump", "timeout")
_by_options: list[tuple[dict[str, Any], Backend]] = []


def by_name(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile one Dynamo graph.

    Called for ``torch.compile(model, backend="commpass", options={"policy": "balanced"})``.

    ``options`` holds arguments of ``commpass.backend`` and options of Inductor. Equal arguments of
    ``commpass.backend`` share one Backend. Raises PolicyError for an unknown option.
    """
    own = {key: value for key, value in (options or {}).items() if key in OPTIONS}
    others = {key: value for key, value in (options or {}).items() if key not in OPTIONS}
    found = next((each for given, each in _by_options if given == own), None)
    if found is None:
        found = backend(**own)
        _by_options.append((own, found))
    return found(gm, example_inputs, mode=mode, options=others)


def _reset_by_name() -> None:
    for _, each in _by_options:
        each.reset()


by_name.reset = _reset_by_name  # type: ignore[attr-defined]


def _inductor_options(options: Mapping[str, Any], inner: str | Compiler) -> dict[str, Any]:
    """Return options by their names in Inductor's config. Raise PolicyError for options that the
    inner compiler does not have."""
    from torch._inductor import config

    known = list(config.get_config_copy()) if inner == "inductor" else []
    found = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in found.items():
        if name not in known:
            close = difflib.get_close_matches(name, [*OPTIONS, *known], 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            others = ", and the options of Inductor" if known else ""
            raise PolicyError(f"unknown option {name!r}{hint} Known: {', '.join(OPTIONS)}{others}.")
        wanted: Any = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(wanted) is None and not isinstance(value, wanted):
            raise PolicyError(f"option {name}={value!r}: must be a {wanted.__name__}")
    return found


class _Unanswered(Unanswered, ShortenTraceback):
    """An Unanswered that passes through Dynamo unchanged.

    Dynamo keeps nothing of the graph. The next call compiles it again, possibly with new process
    groups.
    """

    def __init__(self, error: Unanswered):
        super().__init__(str(error), first_useful_frame=None)


_Unanswered.__name__ = _Unanswered.__qualname__ = Unanswered.__name__


def _predicted_us(gm: fx.GraphModule, profile: Profile) -> float | None:
    """Return the predicted time of a graph with collectives, else None.

    The prediction is only reported, so a failure is only logged.
    """
    if all(parse(node) is None for node in gm.graph.nodes):
        return None
    try:
        return whole_us(gm, profile)
    except Exception as error:
        record.log.debug("nothing is predicted for this graph: %s", error)
        return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One graph to compile: the arguments of ``Backend.compile``, the profile, and torch's tracing
    context, which is needed to compile the graph again."""

    gm: fx.GraphModule
    number: str
    direction: str
    calls: Calls
    stateless: str | None
    compile_graph: Compiler
    decompositions: Callable[[], Any] | None
    obstacle: str | None
    profile: Profile
    origin: Origin
    context: TracingContext | None


class Backend:
    """A configured backend, called by torch.compile. Holds only what its graphs share."""

    def __init__(
        self,
        policy: Policy,
        inner: str | Compiler,
        profile: Profile | None,
        strict: bool,
        dump: Path | None,
        timeout: float | None,
    ):
        self.__name__ = "commpass"
        self.policy, self.inner, self.profile = policy, inner, profile
        self.strict, self.dump, self.timeout = strict, dump, timeout
        self.run = uuid.uuid4().hex[:8]
        self.graphs = self.resets = 0
        self.warned_of_reordering = False
        # As the ranks agreed, because a rank may compile alone.
        self.hidden: dict[tuple[Any, ...], bool] = {}
        self.densities: dict[tuple[Any, ...], float] = {}
        self.over: dict[tuple[Any, Key], str] = {}  # sites over their error budget
        self.checked: dict[tuple[Any, ...], weakref.WeakSet[Checked]] = {}
        self.step_log = step_log.opened(policy.name)
        self.summary, self.watch = Summary(policy), Watch(self.step_log.facts)
        weakref.finalize(self, self.summary.report)
        greet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Return itself, as torch's function backends do.

        A copy of a compiled module (averaged weights, for example) thus keeps the backend of the
        module.
        """
        return self

    def __repr__(self) -> str:
        inner = getattr(self.inner, "__name__", type(self.inner).__name__)
        said = [
            f"policy {self.policy.name!r}",
            f"inner {self.inner if isinstance(self.inner, str) else inner!r}",
            f"profile {self.profile.name!r}" if self.profile else "default profile",
            *(["strict"] if self.strict else []),
            *([f"dump {str(self.dump)!r}"] if self.dump else []),
            f"{self.graphs} graph{'s' * (self.graphs != 1)}",
        ]
        return f"<commpass.backend: {', '.join(said)}>"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile one Dynamo graph. ``mode`` and ``options`` of torch.compile are passed to
        Inductor."""
        greet()
        options = _inductor_options(options or {}, self.inner)
        number = str(self.graphs)
        self.graphs += 1
        places = Places()
        for _, module in graph_modules(gm):
            meta.place(module, places)
        calls = Calls(gm, example_inputs, _is_compiled_autograd())
        calls.last = _is_last_compile()
        if calls.autograd:
            keep_metadata(gm)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            if self.inner in ("inductor", "eager"):
                return calls.wrap(
                    self._with_inductor(gm, example_inputs, number, calls, mode, options)
                )
            return calls.wrap(self._with_aot(gm, example_inputs, number, calls))

    def of_hook(
        self,
        gm: fx.GraphModule,
        direction: str,
        calls: Calls,
        compile_graph: Compiler,
        obstacle: str | None = None,
    ) -> Callable[[list[Any]], Any]:
        """Run the passes on a graph that was not traced (the collective of a hook) and pass it to
        ``compile_graph``. Its nodes have fake values."""
        greet()
        number = str(self.graphs)
        self.graphs += 1
        stateless = calls.stateless(direction, False)
        return self.compile(gm, number, direction, calls, stateless, compile_graph, None, obstacle)

    def simplified(self, gm: fx.GraphModule, direction: str) -> tuple[Simplification, ...]:
        """Simplify a graph that will not be compiled, in place. Return the simplifications."""
        profile = self.profile or default_here(meta.device_of(gm))
        given = GraphInput(
            gm=gm, direction=direction, policy=self.policy, profile=profile, hook=True
        )
        passes = tuple(each for each in PASSES if each.name in ("discover", "simplify"))
        return run_passes(given, "", passes).plan.simplified

    def reset(self) -> None:
        """Forget agreed values, so that graphs are compiled and compared again.
        ``torch._dynamo.reset`` calls this."""
        self.resets += 1
        self.hidden.clear()
        self.densities.clear()
        self.over.clear()
        self.checked.clear()

    def _with_inductor(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        number: str,
        calls: Calls,
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> Any:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        from commpass.passes.post.order import ordered

        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}

        def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            def compile_graph(
                gm: fx.GraphModule, more: Sequence[Any], pinned: bool, changed: bool = False
            ) -> Any:
                if self.inner == "eager":
                    return with_boxed_args(gm.forward)
                with (
                    ordered() if pinned else nullcontext(),
                    repaired(),
                    torch._inductor.config.patch(patches),  # patched here too, for later recompiles
                    self._without_reordering() if pinned or changed else nullcontext(),
                ):
                    return compile_fx_inner(gm, [*example_inputs, *more], **kwargs)

            direction = "backward" if kwargs.get("is_backward") or calls.autograd else "forward"
            stateless = calls.stateless(direction, bool(kwargs.get("is_inference")))
            wrapped = kwargs.get("cpp_wrapper") or torch._inductor.config.cpp_wrapper
            obstacle = CPP_WRAPPER if wrapped and self.inner == "inductor" else None
            table = kwargs.get("get_decomp_fn")
            return self.compile(
                gm, number, direction, calls, stateless, compile_graph, table, obstacle
            )

        return compile_fx(
            gm, example_inputs, inner_compile=inner_compile, config_patches=patches or None
        )

    def _without_reordering(self) -> Any:
        """Return a config patch under which Inductor does not reorder exchanges per rank, for one
        compile. Warn once about the settings that it disables."""
        from commpass.passes.post.reordering import reordering_settings, switched_off

        names = reordering_settings()
        if names and not self.warned_of_reordering:
            self.warned_of_reordering = True
            record.log.warning(REORDERING_OFF, ", ".join(names))
        return switched_off(names)

    def _with_aot(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], number: str, calls: Calls
    ) -> Any:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def compiler(direction: str, inference: bool = False) -> Compiler:
            direction = "backward" if calls.autograd else direction

            def compile_aot(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
                if not inference and getattr(self.inner, "inference_only", False):
                    raise PolicyError(TRAINS)

                def run_inner(gm: fx.GraphModule, more: Sequence[Any], *_: bool) -> Any:
                    return with_boxed_args(
                        self.inner(gm, [*example_inputs, *more])
                        if callable(self.inner)
                        else gm.forward
                    )

                stateless = calls.stateless(direction, inference)
                return self.compile(gm, number, direction, calls, stateless, run_inner, None)

            return compile_aot

        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("forward", inference=True),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)

    def compile(
        self,
        gm: fx.GraphModule,
        number: str,
        direction: str,
        calls: Calls,
        stateless: str | None,
        compile_graph: Compiler,
        decompositions: Callable[[], Any] | None,
        obstacle: str | None = None,
    ) -> Any:
        """Run the passes on one forward or backward graph, let the ranks agree on its plan, and
        compile it.

        If ``obstacle`` is given, no collective is changed, and ``obstacle`` is the reason.
        """
        profile = self.profile or default_here(meta.device_of(gm))
        job = Job(
            gm=gm,
            number=number,
            direction=direction,
            calls=calls,
            stateless=stateless,
            compile_graph=compile_graph,
            decompositions=decompositions,
            obstacle=obstacle,
            profile=with_hosts(profile, self.policy, gm, self.timeout),
            origin=calls.origin if calls.origin.function else origin_of_graph(gm),
            context=TracingContext.try_get(),
        )
        same_code = self.checked.setdefault(_place_of(job), weakref.WeakSet())
        for other in list(same_code):
            other.leave()
        made = self._build(job)
        if isinstance(made, Raising):
            release(same_code)
            return made
        counted = functools.partial(count_call, job.origin, direction)
        first = counted if made.outcome.first else None
        members = groups.Members(made.outcome.plan.bound_groups)
        hook = functools.partial(self._check, number + direction, first, members)
        if made.check.done or not made.check.decides:
            release(same_code)
        if made.check.done:
            return before_each_call(made.compiled, hook, made.function)
        together = same_code if made.check.decides else weakref.WeakSet()
        checked = Checked(made, functools.partial(self._rebuild, job), together)
        together.add(checked)
        return before_each_call(made.compiled, hook, checked)

    def _build(self, job: Job, before: PassContext | None = None) -> Built | Raising:
        """Build a graph that is still unchanged. ``before`` is the result that it was compiled from
        so far."""
        instead_of = before.plan if before is not None else None
        gm, number, direction = job.gm, job.number, job.direction
        calls, profile = job.calls, job.profile
        policy = self.policy
        if self.inner not in LOOKS:
            policy = dataclasses.replace(policy, watch=0.0, check_calls=0)
        given = GraphInput(
            gm=gm,
            direction=direction,
            policy=policy,
            profile=profile,
            decompositions=job.decompositions,
            stateless=job.stateless,
            weights=calls.weights(gm, direction, job.stateless),
            obstacle=job.obstacle,
            kernels=self.inner == "inductor",
            operators=self.inner in LOOKS,
            adds_inputs=True,
            hook=calls.hook,
            hidden=self.hidden,
            densities=self.densities,
            hides=True,
            excluded=before.excluded if before is not None else {},
        )
        record.trace_graph(gm, f"{direction}_before")
        nodes: dict[str, Any] = {}

        def watch(step: str, context: PassContext) -> None:
            if step == "rewrite" and self._writes():
                nodes["after"] = record.nodes_now(context.gm, context.plan.sites)

        device = meta.device_of(gm)
        watched = is_first_rank() and device in ("cpu", "cuda") and self.inner == "inductor"
        plain_us = _predicted_us(gm, profile) if watched else None
        speaker = self._participant(profile, job.origin, direction)
        outcome, mismatch, round = self._planned(given, job, watch, speaker)
        if outcome.error is not None:
            record.log.warning(
                "%s graph %s compiled untouched: %s", direction, number, outcome.plan.fallback
            )
        if self._writes():
            nodes["before"] = record.nodes_before(outcome)
            nodes["lowered"] = record.nodes_now(gm, outcome.plan.sites)
            if outcome.plan.fallback:
                nodes["after"] = nodes["lowered"]
        if instead_of is None:
            self._record(outcome, job, None)
        record.trace_graph(gm, f"{direction}_after")
        if calls.last and outcome.plan.changed:
            calls.last = False
            record.log.warning(LAST, calls.code.name, torch._dynamo.config.recompile_limit)
        if self._writes():
            assert self.dump is not None
            times = timeline(gm, outcome, profile)
            record.write_dump(self.dump, self.run, outcome, times, self.policy, profile, nodes)
        if isinstance(mismatch, Unanswered):
            raise _Unanswered(mismatch)
        if mismatch is not None:
            return Raising(mismatch)
        if isinstance(outcome.error, PolicyError):
            return Raising(outcome.error)
        if outcome.error is not None and self.strict:
            raise outcome.error
        if direction == "backward":
            calls.keeps = bool(outcome.state)
        elif outcome.state:
            calls.refers = True
        more = [kept.fake for kept in outcome.state]
        more += [each.fake for each in outcome.constants]
        planned_us = _predicted_us(gm, profile) if plain_us is not None else None
        pinned = outcome.moved.pinned or chunked(gm)
        compiled = job.compile_graph(gm, more, pinned, outcome.plan.changed)
        if instead_of is not None:  # not earlier: a failed compile leaves the earlier plan in use
            self._record(outcome, job, instead_of)
        state = state_for(outcome.state, gm, calls, direction)
        graph = None
        if outcome.plan.sites and planned_us is not None and plain_us is not None:
            name, judged = f"{number} ({direction})", outcome.plan.changed and profile.measured
            graph = Watched(name, planned_us, plain_us, judged, device)
        samples = _samples(outcome, policy, self.inner in LOOKS)
        entry = step_log.Entry(outcome.plan, samples, graph)
        self.step_log.put(entry, instead_of)
        patience, compared = self._patience(outcome.plan), _is_compared(outcome.plan, round)
        check = Check(samples, round, policy.check_calls, patience, decides=compared)
        function = self._instrumented(callable_of(compiled), entry)
        function = with_more(function, functools.partial(constants_of, outcome.constants))
        function = with_more(function, state)
        strides = getattr(compiled, "output_strides", None)
        return Built(compiled, function, check, strides, outcome)

    def _record(self, outcome: PassContext, job: Job, instead_of: Plan | None) -> None:
        """Record a plan for reports. It replaces ``instead_of`` if there is one."""
        record.record(outcome, instead_of)
        self.summary.add(
            outcome.plan,
            trained=job.stateless != INFERENCE,
            instead_of=instead_of,
            sites=uncompressed_sites(outcome, self.policy, job.profile) if is_first_rank() else (),
        )

    def _rebuild(self, job: Job, built: Built, over: Mapping[Key, str]) -> Built | None:
        """Compile the graph again without the sites that are ``over`` their budget. Return None if
        it has no such site."""
        outcome = built.outcome
        self.over |= {(_place_of(job), key): why for key, why in over.items()}
        names = self._excluded(job, outcome.plan)
        if not names:
            return None
        plan, untouched = outcome.plan, outcome.copies()
        outcome.restore("it is compiled again")
        outcome.plan = plan
        try:
            with torch.inference_mode(False), without_ambient_state(), tracing(job.context):
                made = self._build(job, outcome)
            if isinstance(made, Raising):
                raise made.error
        except BaseException:
            outcome.untouched = untouched  # for the next call, which tries again
            raise
        if built.check.is_first:
            for site in plan.sites:
                if site.name in names:
                    why = names[site.name].removeprefix("left alone: ")
                    record.log.warning(OVER, label(site), site.kind, why, MORE)
        return made

    def _excluded(self, job: Job, plan: Plan) -> dict[str, str]:
        """Return the compressed sites of a plan that are known to be over their budget, with the
        reasons."""
        rank = dist.get_rank() if ready() else 0
        keys, place = keys_of(plan.sites, rank), _place_of(job)
        found = {site.name: (place, keys[site.name]) for site in plan.compressed}
        return {n: f"left alone: {self.over[key]}" for n, key in found.items() if key in self.over}

    def _patience(self, plan: Plan) -> float:
        """Return the seconds to wait for what other ranks publish."""
        some = (groups.group_named(name) for name in {site.group for site in plan.sites})
        known = [group for group in some if group is not None]
        return self.timeout or agreement.longest_timeout(known)

    def _instrumented(self, function: Compiler, entry: step_log.Entry) -> Compiler:
        """Wrap a compiled graph: sample its errors, time it, and name it for profilers, as its plan
        says."""
        plan, labels = entry.plan, tuple(map(label, entry.plan.sites))
        name = f"graph {plan.graph} {plan.direction}"
        if len(labels) == 1:
            name = f"{labels[0]}, {name}"
        if entry.watched is not None:
            function = self.watch.timed(function, entry.watched)
        return named(function, name, labels, entry.samples)

    def _planned(
        self,
        given: GraphInput,
        job: Job,
        watch: Callable[[str, PassContext], None],
        participant: agreement.Participant,
    ) -> tuple[PassContext, PlanMismatch | None, Round | None]:
        """Run the passes and compare the plan with the other ranks. Return the result, a mismatch
        if any, and the round of the comparison.

        If one rank cannot carry out the common plan, the result is the untouched graph (law 7).
        """
        number = job.number
        while True:
            outcome = run_passes(given, number, on_pass_end=watch, strict=self.strict)
            if not (over := self._excluded(job, outcome.plan)):
                break
            outcome.restore("a site is left alone")
            given = dataclasses.replace(given, excluded={**outcome.excluded, **over})
        plan = outcome.plan
        try:
            agreement.same_environment(self.timeout)
            ends = _ends(outcome)
            why, round = agreement.agree(plan, outcome.first, ends, participant, self.timeout)
        except PlanMismatch as mismatch:
            outcome.restore(f"the ranks planned differently: {mismatch}")
            return outcome, mismatch, None
        if why in (agreement.HIDDEN, agreement.OWN):
            record.log.info("graph %s is planned once more: %s", number, why)
            outcome.restore(why)
            less: dict[str, Any] = {"own": False}
            if why == agreement.HIDDEN:
                less = {"hides": False} if given.hides else {"hidden": None, "densities": None}
                less["excluded"] = outcome.excluded
            return self._planned(dataclasses.replace(given, **less), job, watch, participant)
        if why and not plan.fallback:
            outcome.restore(why)
            outcome.error = CommpassError(why)
        self.hidden |= decided(outcome.plan)
        self.densities |= outcome.thinned.densities
        for limit in outcome.limits:
            limit.install_guard()
        return outcome, None, round

    def _participant(
        self, profile: Profile, origin: Origin, direction: str
    ) -> agreement.Participant:
        """Return this rank's participant. It identifies policy and profile by their contents, not
        their names, and says what is compiled."""
        said = [{**msgspec.to_builtins(self.policy), "name": ""}, digest_of(profile)]
        digest = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]
        return agreement.Participant(
            digest,
            self.policy.name,
            f"{self.run}/{self.resets}",
            origin.function,
            call_of(origin, direction) if origin.code else "",
        )

    def _writes(self) -> bool:
        return self.dump is not None and is_first_rank()

    def _check(
        self, graph: str, counted: Callable[[], None] | None, members: groups.Members
    ) -> None:
        """Run before each call of a compiled graph."""
        members.check()
        if counted is not None:
            counted()
        if scopes := open_scopes():
            raise ScopeError(
                f"compress or keep ({scopes[-1]}) is open around a compiled call, from where it"
                " cannot reach the compiled graph. Write it inside the compiled code (on the"
                " module's class, or `with commpass.compress(...)` in its forward), or use"
                " commpass.apply_policy(model, {...}) before torch.compile; if a graph break"
                " separates the two, remove the break or move the word to the inner module."
            )
        self.summary.called(graph)


def _samples(outcome: PassContext, policy: Policy, known: bool) -> Samples:
    """Return the sites of a compiled graph as those whose errors may be measured.

    ``known`` says whether the inner compiler knows the sampling operator.
    """
    bounds: Sequence[float | None] = [each.allowed.max_error for each in outcome.found]
    forced = [each.allowed.force for each in outcome.found]
    if outcome.plan.fallback:
        bounds = [None] * len(outcome.plan.sites)
        forced = [False] * len(outcome.plan.sites)
    unseen = SKIPPED if "sample" in policy.skip else UNSEEN if known else UNKNOWN
    other = outcome.plan.fallback or unseen
    rows = zip(outcome.plan.sites, bounds, forced, strict=True)
    found = []
    for site, bound, force in rows:
        why = outcome.sampled.get(site.name, other if site.compressed else PLAIN)
        checked = bound is not None and not force and why in ("", RECEIVED)
        found.append(Sampled(site, bound, why, checked and site.compressed))
    return Samples(policy.watch, found)


def _is_compared(plan: Plan, round: Round | None) -> bool:
    """Whether the ranks of a plan's groups compared it, or no group could compare it."""
    return round is not None or not any(can_compare(site.group) for site in plan.sites)


def _place_of(job: Job) -> tuple[Any, ...]:
    """Return a key of the code that is recompiled for other inputs: code object and direction. Each
    hook has a graph and a key of its own."""
    return (job.calls.code, job.direction, job.number if job.calls.hook else "")


SKIPPED = "the policy skips pass 'sample'"
UNKNOWN = "what compiles the graph need not know the operator that samples: it is not looked into"
TRAINS = (
    'inner="tensorrt" is for inference alone, and this call wants gradients: make it under'
    ' torch.inference_mode() or torch.no_grad(), or train with inner="inductor"'
)


CPP_WRAPPER = "cpp_wrapper is on: torch's C++ wrapper cannot call the collectives that carry codes"
"""The reason for leaving a graph unchanged under ``torch._inductor.config.cpp_wrapper``.

There, torch 2.13 can call only all_reduce and its wait. An all_gather raises NotImplementedError
even without commpass.
"""


REORDERING_OFF = (
    "torch._inductor.config has %s on: Inductor would order exchanges by what this rank computes,"
    " and ranks that compute different things would wait for each other. It is off for graphs that"
    " commpass has changed; pass move hides their exchanges. Other graphs are compiled with it"
)


LAST = (
    "%s is compiled for the last time here (torch._dynamo.config.recompile_limit is %d). A call"
    " that needs another graph is then run as it was written, by this rank alone, while other ranks"
    " go on with the changed collectives: they wait for each other, or sum up what does not belong"
    " together. Mark sizes that change with torch._dynamo.mark_dynamic, raise the limit, or set"
    " torch._dynamo.config.fail_on_recompile_limit_hit, which makes it an error"
)


def _is_last_compile() -> bool:
    """Whether Dynamo stops recompiling this code after the current compile."""
    frame = CompileContext.current_compile_id()
    count = getattr(frame, "frame_compile_id", None)
    return count is not None and count + 1 >= torch._dynamo.config.recompile_limit


def _is_compiled_autograd() -> bool:
    """Whether Dynamo is compiling a backward pass of compiled autograd.

    False for a function that wants gradients: it is user code called from there, such as a
    checkpoint that recomputes its forward.
    """
    frame = CompileContext.current_compile_id()
    return (
        frame is not None and frame.compiled_autograd_id is not None and not torch.is_grad_enabled()
    )


def _ends(outcome: PassContext) -> set[tuple[str, int | None]]:
    """Return (group, peer) of a graph's collectives if a pass failed before sites were found, else
    nothing."""
    if outcome.first or not outcome.plan.fallback:
        return set()
    calls = (parse(node) for _, module in graph_modules(outcome.gm) for node in module.graph.nodes)
    return {
        (describe_group(call)[0], end.peer if end else None)
        for call in calls
        if call is not None
        for end in call.ends or (None,)
    }
