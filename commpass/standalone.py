"""The passes without the torch.compile backend, for other compile stacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from commpass.costmodel import Profile
from commpass.distributed import record
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.environment import policy_here
from commpass.distributed.machine import profile_here
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import PolicyError
from commpass.passes import GraphInput
from commpass.passes import run as run_passes
from commpass.passes.fx import meta
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.utils.keywords import named_arguments


@publishing_refusal
@named_arguments
def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: str | Path | Policy = "lossless",
    *,
    profile: str | Path | Profile | None = None,
    direction: str = "forward",
    strict: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    inductor: bool = False,
) -> Plan:
    """Rewrite a graph of aten operators in place and return its plan.

    The ranks do not compare plans: call it identically on all of them. A site that cannot be
    compressed stays unchanged, with a reason in the plan.

    Args:
        gm: the graph, which is changed in place. For a ``torch.export`` program, pass its
            ``graph_module``.
        example_inputs: the graph's inputs. They provide fake values if its nodes have no
            ``meta["val"]``.
        policy: the name of a preset, the path of a TOML file, or a Policy.
        profile: the links and kernels that the cost model assumes, as in ``commpass.backend``: a
            Profile, a name or a file. If None, COMMPASS_PROFILE, or else the network that is read
            from the system.
        direction: ``forward`` or ``backward``, for rules and reports.
        strict: if True, raise when a pass fails. Otherwise the graph stays unchanged, and the
            plan's ``fallback`` has the reason.
        decompositions: by operator, functions that replace it in what is inserted, as in
            ``make_fx``; None for those of Inductor.
        inductor: whether Inductor compiles the graph, and runs it in processes that have imported
            commpass. Codec ``exponent`` is then an operator of commpass instead of some 2,000
            others.

    Raises PolicyError if ``gm`` is not a GraphModule or ``example_inputs`` is not a tuple or list.
    """
    _check(gm, example_inputs)
    # Other compile stacks need not know the operator that samples.
    chosen = dataclasses.replace(policy_here(policy), error_sample_rate=0.0, check_calls=0)
    if inductor:  # a shared kernel is compiled in one process, and caches serve another
        chosen = dataclasses.replace(chosen, lowering=chosen.lowering or "inline")
    _fake_values(gm, example_inputs)
    table = (lambda: dict(decompositions)) if decompositions is not None else None
    given = GraphInput(
        gm=gm,
        direction=direction,
        policy=chosen,
        profile=agreed_profile(profile_here(profile), meta.device_of(gm), gm),
        decompositions=table,
        operators=inductor,
        kernels=inductor,
    )
    names = [node.name for node in _results(gm)]
    outcome = run_passes(given, graph="0", strict=strict)
    _rename_results(gm, names)
    if outcome.error is not None and strict:
        raise outcome.error
    record.record(outcome)
    return outcome.plan


def _results(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that a graph returns, with repetitions."""
    return [
        arg for arg in pytree.tree_leaves(gm.graph.output_node().args) if isinstance(arg, fx.Node)
    ]


def _rename_results(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Give new results the names of the ones that they replace, because an exported program's
    signature refers to them."""
    by_name = {node.name: node for node in gm.graph.nodes}
    for node, name in zip(_results(gm), names, strict=True):
        if (other := by_name.get(name, node)) is not node:
            other.name, by_name[node.name] = node.name, other
        node.name, by_name[name] = name, node
    gm.recompile()


def _check(gm: Any, example_inputs: Any) -> None:
    if not isinstance(gm, fx.GraphModule):
        hint = ""
        if isinstance(gm, torch.export.ExportedProgram):
            hint = "; of an exported program give its graph_module, which is rewritten in place"
        raise PolicyError(f"rewrite: {type(gm).__name__} is no torch.fx.GraphModule{hint}")
    if isinstance(example_inputs, str) or not isinstance(example_inputs, Sequence):
        raise PolicyError(
            f"rewrite: example_inputs is a {type(example_inputs).__name__}, must be a tuple or"
            " list of the graph's inputs; the policy comes third, or as policy=..."
        )


def _fake_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Give every node a fake value if the graph has none, or if its values have different fake
    modes.

    ``make_fx`` leaves different modes if it traces with real values.
    """
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    has_values = all("val" in node.meta for node in given)
    values = (meta.tensor(node) for node in gm.graph.nodes)
    modes = {id(value.fake_mode) for value in values if isinstance(value, FakeTensor)}
    if has_values and len(modes) < 2:
        return
    from torch._dynamo.utils import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    inputs = [node.meta["val"] for node in given] if has_values else example_inputs
    mode = None if has_values else detect_fake_mode(example_inputs)
    mode = mode or FakeTensorMode(
        shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True
    )
    with mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if has_values and isinstance(x, Tensor)
            else x
            for x in inputs
        ]
    FakeTensorProp(gm, mode).propagate(*fakes)
