"""The entry for torch.compile: AOTAutograd's forward and backward graphs take the road of the passes, then are compiled.

Graphs are rewritten in ``inner_compile``, before Inductor's own compile: its graph cache then keys on what was really
rewritten. AOTAutograd's cache would skip that step on a hit and is off for our compiles (and for ours alone).
"""

from __future__ import annotations

import functools
import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext

from commpass.annotate import open_scopes
from commpass.costmodel import Profile, default_profile
from commpass.errors import CommpassError, PlanMismatch, PolicyError, ScopeError, nearest
from commpass.groups import is_first_rank
from commpass.passes import Outcome, Road, check_skip, meta
from commpass.passes import run as run_passes
from commpass.passes.collective import parse
from commpass.passes.discover import describe_group, graph_modules
from commpass.plan import Plan
from commpass.policy import Policy, policy_named
from commpass.runtime import agreement, record, state
from commpass.runtime.summary import Summary

INNER = ("inductor", "eager", "aot_eager")
Compiler = Callable[..., Any]


def backend(
    policy: str | Path | Policy = "lossless",
    *,
    inner: str | Compiler = "inductor",
    profile: Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
) -> Backend:
    """A backend for ``torch.compile(model, backend=commpass.backend("balanced"))``.

    policy: a preset by name, the path of a TOML file, or a Policy.
    inner: what compiles the rewritten graphs. ``"inductor"``; ``"eager"``, the very graphs that Inductor would get, run
        operator by operator; ``"aot_eager"``, AOTAutograd's graphs without Inductor's decompositions, likewise; or a
        function ``(graph_module, example_inputs) -> callable`` that is given each of the latter.
    profile: what the cost model knows about links and kernels; a default for the device if None.
    strict: raise when a pass fails, instead of compiling the untouched graph with a warning.
    dump: a folder into which rank 0 writes plan and graphs, for ``commpass explain`` and its kin; the environment variable
        COMMPASS_DUMP if None.
    timeout: seconds that ranks wait for each other's plans.

    Raises PolicyError for anything that is not known, with the nearest name that is.
    """
    chosen = policy_named(policy)
    check_skip(chosen)
    if not callable(inner) and inner not in INNER:
        raise PolicyError(f"unknown inner compiler {inner!r}{nearest(str(inner), INNER)} Or give a function.")
    if not timeout > 0:
        raise PolicyError(f"timeout={timeout!r}: must be a number of seconds above 0")
    folder = dump if dump is not None else os.environ.get("COMMPASS_DUMP")
    return Backend(chosen, inner, profile, strict, Path(folder) if folder else None, timeout)


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: str | Path | Policy = "lossless",
    *,
    profile: Profile | None = None,
    direction: str = "forward",
    strict: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Plan:
    """The passes alone, for other compile stacks: rewrites a graph of aten operators in place and returns its plan.

    ``example_inputs`` give the graph fake values where its nodes have none in ``meta["val"]``. No ranks are asked: call it on
    all of them alike. If a pass fails the graph is left as it was and the plan's ``fallback`` says why; ``strict`` raises.
    """
    chosen = policy_named(policy)
    check_skip(chosen)
    _fake_values(gm, example_inputs)
    table = (lambda: dict(decompositions)) if decompositions is not None else None
    road = Road(gm=gm, direction=direction, policy=chosen, profile=profile or default_profile(_device(gm)),
                decompositions=table)  # fmt: skip
    outcome = run_passes(road, graph="0")
    if outcome.error is not None and strict:
        raise outcome.error
    record.record(outcome)
    return outcome.plan


class Backend:
    """A configured backend: call it as torch.compile does. Holds what its graphs have in common, and nothing else."""

    def __init__(self, policy: Policy, inner: str | Compiler, profile: Profile | None, strict: bool, dump: Path | None,
                 timeout: float):  # fmt: skip
        self.__name__ = "commpass"
        self.policy, self.inner, self.profile = policy, inner, profile
        self.strict, self.dump, self.timeout = strict, dump, timeout
        self.run = uuid.uuid4().hex[:8]
        self.graphs = 0
        self.summary = Summary(policy)
        weakref.finalize(self, self.summary.report)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compiles one graph of Dynamo's. ``mode`` and ``options`` of torch.compile go to Inductor."""
        number = str(self.graphs)
        self.graphs += 1
        with torch._functorch.config.patch(enable_autograd_cache=False):
            if self.inner in ("inductor", "eager"):
                return self._with_inductor(gm, example_inputs, number, **kwargs)
            return self._with_aot(gm, example_inputs, number)

    def _with_inductor(self, gm: fx.GraphModule, example_inputs: Sequence[Any], number: str, mode: str | None = None,
                       options: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}

        def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            def compile_graph(gm: fx.GraphModule, more: Sequence[Any]) -> Any:
                if self.inner == "eager":
                    return _boxed(gm.forward)
                return compile_fx_inner(gm, [*example_inputs, *more], **kwargs)

            direction = "backward" if kwargs.get("is_backward") else "forward"
            inference = bool(kwargs.get("is_inference"))
            return self.compile(gm, number, direction, inference, compile_graph, kwargs.get("get_decomp_fn"))

        return compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches or None)

    def _with_aot(self, gm: fx.GraphModule, example_inputs: Sequence[Any], number: str) -> Any:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def compiler(direction: str, inference: bool = False) -> Compiler:
            def compile_aot(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
                def run_inner(gm: fx.GraphModule, more: Sequence[Any]) -> Any:
                    return _boxed(self.inner(gm, [*example_inputs, *more]) if callable(self.inner) else gm.forward)

                return self.compile(gm, number, direction, inference, run_inner, None)

            return compile_aot

        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("forward", inference=True),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)

    def compile(self, gm: fx.GraphModule, number: str, direction: str, inference: bool, compile_graph: Compiler,
                decompositions: Callable[[], Any] | None) -> Any:  # fmt: skip
        """Takes one forward or backward graph along the road, lets the ranks agree on it, and compiles it."""
        profile = self.profile or default_profile(_device(gm))
        frame = CompileContext.current_compile_id()
        stateless = INFERENCE if inference and (frame is None or frame.compiled_autograd_id is None) else None
        road = Road(gm=gm, direction=direction, policy=self.policy, profile=profile, decompositions=decompositions,
                    stateless=stateless)  # fmt: skip
        record.trace_graph(gm, f"{direction}_before")
        outcome = run_passes(road, number)
        mismatch = self._agree(gm, outcome)
        if outcome.error is not None:
            record.log.warning("%s graph %s compiled untouched: %s", direction, number, outcome.plan.fallback)
        before = record.nodes_before(outcome, gm) if self._writes() else ()
        record.record(outcome)
        record.trace_graph(gm, f"{direction}_after")
        self.summary.add(outcome.plan)
        if self._writes():
            assert self.dump is not None
            after = record.nodes_after(outcome, gm)
            record.write_dump(self.dump, self.run, outcome, before, after, self.policy, profile)
        if mismatch is not None:
            return _raises(mismatch)
        if isinstance(outcome.error, PolicyError):
            return _raises(outcome.error)
        if outcome.error is not None and self.strict:
            raise outcome.error
        try:
            owner = (id(self), number) if frame is None else (frame.compiled_autograd_id, frame.frame_id)
            residuals = [state.residual(kept, owner) for kept in outcome.kept]
        except PolicyError as error:
            return _raises(error)
        compiled = compile_graph(gm, [kept.fake for kept in outcome.kept])
        return _before_each_call(compiled, functools.partial(self._check, number + direction), residuals)

    def _agree(self, gm: fx.GraphModule, outcome: Outcome) -> PlanMismatch | None:
        """Compares the plan with the other ranks'. One rank's failure makes all compile the untouched graph (law 7)."""
        try:
            failures = agreement.agree(outcome.plan, _groups(gm, outcome.plan), self.timeout)
        except PlanMismatch as mismatch:
            outcome.restore(f"the ranks planned differently: {mismatch}")
            return mismatch
        if failures and outcome.error is None and not outcome.plan.fallback:
            said = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(failures.items()))
            outcome.restore(said)
            outcome.error = CommpassError(said)
        return None

    def _writes(self) -> bool:
        return self.dump is not None and is_first_rank()

    def _check(self, graph: str) -> None:
        """Before each call of a compiled graph."""
        if scopes := open_scopes():
            raise ScopeError(
                f"compress or keep ({scopes[-1]}) is open around a compiled call, from where it cannot reach the compiled "
                "graph. Write it inside the compiled code (on the module's class, or `with commpass.compress(...)` in its "
                "forward), or use commpass.apply_policy(model, {...}) before torch.compile; if a graph break separates the "
                "two, remove the break or move the word to the inner module."
            )
        self.summary.called(graph)


INFERENCE = "inference has no next step to make up in: give the rule direction='backward', or this model a codec without state"
"""Why no state is kept in a graph that will have no backward."""


def _groups(gm: fx.GraphModule, plan: Plan) -> set[str]:
    """The groups of a graph's collectives; read off the graph itself where a pass failed before there were sites."""
    if plan.sites or not plan.fallback:
        return {site.group for site in plan.sites} | {step.group for step in plan.simplified}
    calls = (parse(node) for _, module in graph_modules(gm) for node in module.graph.nodes)
    return {describe_group(call)[0] for call in calls if call is not None}


def _before_each_call(compiled: Any, hook: Callable[[], None], more: Sequence[Any]) -> Any:
    """The compiled function, with ``hook`` before each call and ``more`` last inputs. Inductor's object stays itself: torch
    asks for its type."""
    if getattr(compiled, "current_callable", None) is not None:
        compiled.current_callable = _hooked(compiled.current_callable, hook, more)
        return compiled
    return _hooked(compiled, hook, more)


def _hooked(function: Compiler, hook: Callable[[], None], more: Sequence[Any]) -> Compiler:
    def run(inputs: list[Any]) -> Any:
        hook()
        inputs.extend(more)
        return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def _boxed(function: Compiler) -> Compiler:
    """The calling convention of AOTAutograd: one list of arguments."""
    from functorch.compile import make_boxed_func

    return function if getattr(function, "_boxed_call", False) else make_boxed_func(function)


def _raises(error: Exception) -> Compiler:
    """A compiled function that raises: errors then reach the user as they are, from the call, and not out of a compiler."""

    def run(*args: Any) -> Any:
        raise error

    return run


def _device(gm: fx.GraphModule) -> str:
    """The device type that a graph computes on."""
    types = {value.device.type for node in gm.graph.nodes if (value := meta.tensor(node)) is not None}
    return next(iter(sorted(types - {"cpu", "meta"})), "cpu")


def _fake_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Gives every node a fake value, where the graph has none."""
    if all("val" in node.meta for node in gm.graph.nodes if node.op == "placeholder"):
        return
    from torch._dynamo.utils import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, detect_fake_mode(example_inputs)).propagate(*example_inputs)
