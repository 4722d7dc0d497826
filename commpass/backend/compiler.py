"""The Backend: what torch.compile calls, and how it calls the inner compiler."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext

from commpass import groups
from commpass.backend import agree, build
from commpass.backend.calls import check_call
from commpass.backend.compile_once import compiled_once
from commpass.backend.object_inputs import bypass_objects
from commpass.backend.options import (
    Compiler,
    autotune_seconds,
    in_cuda_graphs,
    inductor_options,
)
from commpass.backend.shared import Job, Shared, TracedGraph
from commpass.costmodel import Profile
from commpass.distributed import record
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.calls import Raising, before_each_call, callable_of, with_boxed_args
from commpass.distributed.checked import Checked, release
from commpass.distributed.hosts import with_hosts
from commpass.distributed.machine import default_here
from commpass.distributed.origin import count_call, origin_of_graph
from commpass.distributed.owners import Calls
from commpass.distributed.plan_store import publish_hello
from commpass.errors import PolicyError
from commpass.lowering import cpu
from commpass.lowering.repairs import without_loop_splitting
from commpass.passes import PASSES, GraphInput
from commpass.passes import run as run_passes
from commpass.passes.fx import meta
from commpass.passes.fx.direction import gradients, keep_metadata
from commpass.passes.fx.parse import graph_modules
from commpass.plan import Simplification
from commpass.policy.paths import ModulePaths
from commpass.utils.frames import roomy

TRAINS = (
    'inner="tensorrt" supports inference only, but this call requires gradients: run it under'
    ' torch.inference_mode() or torch.no_grad(), or train with inner="inductor"'
)


CPP_WRAPPER = "cpp_wrapper is on: torch's C++ wrapper cannot call the collectives that carry codes"
"""The reason for leaving a graph unchanged under ``torch._inductor.config.cpp_wrapper``.

There, torch 2.13 can call only all_reduce and its wait. An all_gather raises NotImplementedError
even without commpass.
"""


REORDERING_OFF = (
    "torch._inductor.config has %s on: Inductor would order collectives by the compute of this"
    " rank, and ranks with different compute would wait for each other. It is off for graphs that"
    " commpass has changed; pass move overlaps their exchanges. Other graphs are compiled with it"
)


def with_static(
    kwargs: Mapping[str, Any], more: Sequence[Any], inputs: Sequence[Any]
) -> dict[str, Any]:
    """Return the arguments of Inductor's compile, in which also the last inputs are static:
    ``more``, the state and the constants that a graph keeps.

    A CUDA graph reads static inputs where they are, without a copy, and may change them: without
    this, torch would capture no graph that keeps state.
    """
    if not more:
        return dict(kwargs)
    static = [*(kwargs.get("static_input_idxs") or ()), *range(len(inputs))[-len(more) :]]
    return {**kwargs, "static_input_idxs": static}


def compiled_by(
    inner: Compiler, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compile a graph without the inputs that Inductor's cache could not find again."""
    bypass = bypass_objects(gm, inputs)
    if static := kwargs.get("static_input_idxs"):
        kwargs["static_input_idxs"] = bypass.renumbered(static)
    others = bypass.remaining(inputs)
    with compiled_once(gm, others):
        compiled = inner(gm, others, **kwargs)
    if not bypass.outputs:
        return compiled
    function = bypass.wrapped(callable_of(compiled))
    return before_each_call(compiled, lambda: None, function)


class Backend(Shared):
    """A configured backend, called by torch.compile."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Return itself, as torch's function backends do.

        A copy of a compiled module (averaged weights, for example) thus keeps the backend of the
        module.
        """
        return self

    def __repr__(self) -> str:
        inner = getattr(self.inner, "__name__", type(self.inner).__name__)
        parts = [
            f"policy {self.policy.name!r}",
            f"inner {self.inner if isinstance(self.inner, str) else inner!r}",
            f"profile {self.profile.name!r}" if self.profile else "default profile",
            *(["strict"] if self.strict else []),
            *([f"dump {str(self.dump)!r}"] if self.dump else []),
            f"{self.graphs} graph{'s' * (self.graphs != 1)}",
        ]
        return f"<commpass.backend: {', '.join(parts)}>"

    @roomy
    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile one Dynamo graph. ``mode`` and ``options`` of torch.compile are passed to
        Inductor."""
        publish_hello()
        options = inductor_options(options or {}, self.inner)
        number = str(self.graphs)
        self.graphs += 1
        paths = ModulePaths()
        for _, module in graph_modules(gm):
            meta.record_module_paths(module, paths)
        calls = Calls(gm, example_inputs, _is_compiled_autograd())
        calls.is_last_compile = _is_last_compile()
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
        unsupported_reason: str | None = None,
    ) -> Callable[[list[Any]], Any]:
        """Run the passes on a graph that was not traced (the collective of a hook) and pass it to
        ``compile_graph``. Its nodes have fake values."""
        publish_hello()
        number = str(self.graphs)
        self.graphs += 1
        return self.compile(
            TracedGraph(
                gm=gm,
                number=number,
                direction=direction,
                calls=calls,
                stateless=calls.stateless(direction, False),
                compile_graph=compile_graph,
                unsupported_reason=unsupported_reason,
                autotune_s=autotune_seconds(self.autotune, self.inner),
            )
        )

    def simplified(self, gm: fx.GraphModule, direction: str) -> tuple[Simplification, ...]:
        """Simplify a graph that will not be compiled, in place. Return the simplifications."""
        profile = self._profile_of(gm)
        given = GraphInput(
            gm=gm, direction=direction, policy=self.policy, profile=profile, hook=True
        )
        passes = tuple(each for each in PASSES if each.name in ("discover", "simplify"))
        return run_passes(given, "", passes).plan.simplified

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

        from commpass.passes.joint import with_joint
        from commpass.passes.post.order import ordered

        if self.inner == "inductor" and meta.device_of(gm) == "cpu":
            cpu.precompile_headers()
        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}

        def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            def compile_graph(
                gm: fx.GraphModule, more: Sequence[Any], pinned: bool, changed: bool = False
            ) -> Any:
                if self.inner == "eager":
                    return with_boxed_args(gm.forward)
                with (
                    ordered() if pinned else nullcontext(),
                    without_loop_splitting(),
                    torch._inductor.config.patch(patches),  # patched here too, for later recompiles
                    self._without_reordering() if pinned or changed else nullcontext(),
                ):
                    inputs = [*example_inputs, *more]
                    arguments = with_static(kwargs, more, inputs)
                    return compiled_by(compile_fx_inner, gm, inputs, arguments)

            direction = "backward" if kwargs.get("is_backward") or calls.autograd else "forward"
            wrapped = kwargs.get("cpp_wrapper") or torch._inductor.config.cpp_wrapper
            unsupported = CPP_WRAPPER if wrapped and self.inner == "inductor" else None
            return self.compile(
                TracedGraph(
                    gm=gm,
                    number=number,
                    direction=direction,
                    calls=calls,
                    stateless=calls.stateless(direction, bool(kwargs.get("is_inference"))),
                    compile_graph=compile_graph,
                    decompositions=kwargs.get("get_decomp_fn"),
                    unsupported_reason=unsupported,
                    autotune_s=autotune_seconds(self.autotune, self.inner),
                )
            )

        own = with_joint(patches, self._mark_saved) if self._simplifies else patches
        return compile_fx(
            gm, example_inputs, inner_compile=inner_compile, config_patches=own or None
        )

    def _profile_of(self, gm: fx.GraphModule) -> Profile:
        device = meta.device_of(gm)
        if self.policy.off:  # nothing depends on it, so other ranks are not awaited
            return self.profile or default_here(device)
        with build.passing_unanswered():
            found = agreed_profile(self.profile, device, gm, self.timeout)
        return in_cuda_graphs(found) if device == "cuda" else found

    @property
    def _simplifies(self) -> bool:
        return not self.policy.off and "simplify" not in self.policy.skip

    def _mark_saved(self, gm: fx.GraphModule) -> None:
        """Mark what a joint graph saves for backward."""
        from commpass.passes.joint import mark_saved

        if gradients(gm.graph):  # Inductor runs joint passes on inference graphs too
            profile = self._profile_of(gm)
            mark_saved(gm, profile, strict=self.strict)

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

                return self.compile(
                    TracedGraph(
                        gm=gm,
                        number=number,
                        direction=direction,
                        calls=calls,
                        stateless=calls.stateless(direction, inference),
                        compile_graph=run_inner,
                    )
                )

            return compile_aot

        def partition(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if self._simplifies:
                self._mark_saved(gm)
            return min_cut_rematerialization_partition(gm, *args, **kwargs)

        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("forward", inference=True),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)

    @roomy
    def compile(self, graph: TracedGraph) -> Any:
        """Run the passes on a graph, let the ranks agree on its plan, and compile it."""
        gm, calls = graph.gm, graph.calls
        profile = self._profile_of(gm)
        with build.passing_unanswered():
            profile = with_hosts(profile, self.policy, gm, self.timeout)
        job = Job(
            **vars(graph),
            profile=profile,
            origin=calls.origin if calls.origin.function else origin_of_graph(gm),
            context=TracingContext.try_get(),
        )
        same_code = self.checked.setdefault(job.place, weakref.WeakSet())
        for other in list(same_code):
            other.end_check()
        made = build.build(self, job)
        if isinstance(made, Raising):
            release(same_code)
            return made
        counted = functools.partial(count_call, job.origin, job.direction)
        first = counted if made.outcome.first else None
        members = groups.Members(made.outcome.plan.bound_groups)
        hook = functools.partial(check_call, self, job.number + job.direction, first, members)
        forward: Collection[Checked] = ()
        if agree.recomputed_sites(job, made.outcome.plan):
            forward = self.checked.get((calls.code, "forward", ""), ())
        is_checked = not made.check.done or any(each.is_checking for each in forward)
        if not is_checked or not made.check.decides:
            release(same_code)
        if not is_checked:
            return before_each_call(made.compiled, hook, made.function)
        together = same_code if made.check.decides else weakref.WeakSet()
        rebuild = functools.partial(build.rebuild, self, job)
        is_behind = functools.partial(build.is_behind, self, job)
        checked = Checked(made, rebuild, together, forward, is_behind)
        together.add(checked)
        return before_each_call(made.compiled, hook, checked)


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
