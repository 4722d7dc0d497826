"""torchtitan: one line of a job's configuration compresses what its ranks send.

    --compile.enable
    --override.imports 'commpass.parallel.torchtitan.compress={"policy": "balanced"}'

``compress`` is an override in torchtitan's sense. It replaces the configuration of the checkpoint
manager of any kind, the one component that torchtitan hands the trainer to. The trainer's model is
parallel by then, and nothing has run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch.distributed as dist
from torch import fx
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config.override import override

from commpass.backend import backend
from commpass.distributed.environment import policy_here
from commpass.distributed.integration import Integration
from commpass.errors import PolicyError, nearest
from commpass.parallel.comparison import compare, described, summary
from commpass.parallel.fsdp import compress_fsdp
from commpass.parallel.pipeline import compress_pipeline
from commpass.standalone import rewrite

log = logging.getLogger("commpass")

OPTIONS = ("policy", "profile", "strict")
COMPILING = (
    "annotate_flex_attention_for_regional_inductor_pass",
    "regional_inductor_pass",
    "full_inductor_compilation_pass",
)
"""The passes of ``graph_trainer`` that compile the graph."""
OTHER_COMPILERS = (
    "the blocks are compiled by %r, not by Inductor: their collectives stay uncompressed"
)
NOT_COMPILED = (
    "the model is not compiled (--compile.enable): collectives of tensor, context and expert"
    " parallelism stay uncompressed"
)
GRAPHS_OF_STAGES = (
    "graph_trainer compiles the stages of a pipeline by itself: their collectives stay"
    " uncompressed, except the messages between stages"
)
COMPILED_BEFORE = (
    "graph_trainer uses a graph that was compiled before (--compile.precompile_artifact_dir): its"
    " collectives stay uncompressed"
)


@override(target=BaseCheckpointManager.Config, description="commpass: compress what ranks send")
def compress(config: BaseCheckpointManager.Config, **options: Any) -> BaseCheckpointManager.Config:
    """Return the configuration of a checkpoint manager that compresses the trainer's collectives.

    Args:
        options: ``policy``, ``profile`` and ``strict`` of ``commpass.backend``.

    Raise PolicyError for an unknown option, policy or profile.
    """
    for name in options:
        if name not in OPTIONS:
            raise PolicyError(
                f"commpass.parallel.torchtitan.compress has no option {name!r}"
                f"{nearest(name, OPTIONS)}"
            )
    backend(**options)  # raises for what is unknown, before a model is built
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return _manager(cast(Hashable, type(config))).Config(**values, commpass=options)


@functools.cache
def _manager(configuration: Hashable) -> Any:
    """Return the checkpoint manager of a class of configurations, with compression."""
    base: Any = configuration
    plain: Any = base._owner

    class Compressing(plain):
        @dataclass(kw_only=True, slots=True)
        class Config(base):
            commpass: dict[str, Any]

        def __init__(self, config: Any, *, states: Mapping[str, Any], **more: Any):
            self.compressed = list(_compress(states["train_state"], config.commpass))
            super().__init__(config, states=states, **more)

        def close(self) -> None:
            compressed, self.compressed = getattr(self, "compressed", []), []
            if compressed and dist.get_rank() == 0:  # torchtitan calls this more than once
                for each in compressed:
                    log.info("%s", each)
            super().close()

    return Compressing


def _compress(trainer: Any, options: dict[str, Any]) -> Iterator[Integration]:
    """Compress the collectives of a trainer. Yield the integrations."""
    _compile(trainer, options)
    for model in trainer.model_parts:
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            yield compress_fsdp(model, **options)
    schedule = getattr(trainer, "pp_schedule", None)
    if schedule is not None:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        yield compress_pipeline(stages, **_without_strict(options))


def _without_strict(options: dict[str, Any]) -> dict[str, Any]:
    named = {"policy": "lossless", **options}
    return {name: named[name] for name in named if name != "strict"}


def _compile(trainer: Any, options: dict[str, Any]) -> None:
    """Let commpass compile the blocks that Inductor would, or be a pass of ``graph_trainer``."""
    compile_config = trainer.config.compile
    if not compile_config.enable or "model" not in compile_config.components:
        log.warning(NOT_COMPILED)
    elif getattr(compile_config, "mode", None) == "aot_fx_trace":
        if hasattr(trainer, "pp_schedule"):
            log.warning(GRAPHS_OF_STAGES)
        else:
            _add_pass(compile_config, options)
    elif compile_config.backend != "inductor":
        log.warning(OTHER_COMPILERS, compile_config.backend)
    else:
        compiler = backend(**options)
        for model in trainer.model_parts:
            for module in model.modules():
                if module._compiled_call_impl is not None:
                    module.compile(backend=compiler, fullgraph=True)


def _add_pass(compile_config: Any, options: dict[str, Any]) -> None:
    """Give this trainer a pipeline of ``graph_trainer`` with one pass more: before it compiles."""
    from torchtitan.experiments.graph_trainer import passes, registry

    pipelines, name = registry.PASS_PIPELINE_REGISTRY, compile_config.pass_pipeline
    pipeline = pipelines.get(name, passes.construct_default_graph_passes)

    def with_compression(*args: Any, **more: Any) -> list[Callable[..., Any]]:
        found = list(pipeline(*args, **more))
        compiling = [number for number, each in enumerate(found) if _name(each) in COMPILING]
        if not compiling:
            log.warning(COMPILED_BEFORE)
            return found
        return [*found[: compiling[0]], compress_collectives, *found[compiling[0] :]]

    def compress_collectives(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        full = compile_config.inductor_compilation == "full"
        plan = rewrite(gm, list(example_inputs), **options, inductor=full)
        group = dist.group.WORLD
        assert group is not None
        words = summary(plan, policy_here(options.get("policy", "lossless")), {})
        compare(described([plan], words), group.group_name, "torchtitan")
        return gm

    compile_config.pass_pipeline = (
        f"{name}, compressed {len(pipelines)}"  # other trainers keep theirs
    )
    pipelines[compile_config.pass_pipeline] = with_compression
    for hooks in (registry.POST_INIT_HOOKS, registry.PRE_TRAIN_STEP_HOOKS):
        if name in hooks:
            hooks[compile_config.pass_pipeline] = hooks[name]


def _name(graph_pass: Any) -> str:
    return str(getattr(graph_pass, "func", graph_pass).__name__)
