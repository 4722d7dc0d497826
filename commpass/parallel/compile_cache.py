"""Compile equal graphs of hooks once.

The layers of a model have equal exchanges: these have separate plans and state, but one rewritten
graph, and so one compiled code. These graphs are flat and functional from the start, so they go to
Inductor without AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from commpass.backend.compile_once import compiled_once
from commpass.lowering.repairs import without_loop_splitting

Compiled = Callable[[list[Any]], Any]
Key = tuple[tuple[Any, str], ...]


def with_fakes(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Give every node a fake value, from inputs like these that do not overlap."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # for sizes that depend on data
    with mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
        ]
    FakeTensorProp(gm, mode).propagate(*fakes)


@dataclass
class CompileCache:
    """Inductor's result for each graph, by all that it depends on."""

    made: dict[Key, Compiled] = field(default_factory=dict)

    def compiled(self, gm: fx.GraphModule, pinned: bool) -> Compiled:
        """Return the compiled graph, which takes a list; ``pinned`` keeps its collectives in
        order."""
        key = _key(gm)
        if key is None:
            return _inductor(gm, pinned)
        if key not in self.made:
            self.made[key] = _inductor(gm, pinned)
        return self.made[key]

    def drop_single_kernels(self) -> None:
        """Drop graphs that use symmetric memory: it belongs to a group, others only to its name."""
        for key in [each for each in self.made if "single_kernel" in str(each)]:
            del self.made[key]


def _key(gm: fx.GraphModule) -> Key | None:
    """Return all that the compiled code depends on: the called functions and the other text, by
    node.

    Return None if it cannot be written down.
    """
    numbers = {node: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return None
        if node.op == "placeholder":
            value = node.meta["val"]
            form = f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
            lines.append((node.op, form))
        else:
            args = fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
            lines.append((node.target, str(args)))
    return tuple(lines)


def _inductor(gm: fx.GraphModule, pinned: bool) -> Compiled:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    from commpass.passes.post.order import ordered
    from commpass.passes.post.reordering import reordering_settings, switched_off

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = values[0].fake_mode
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        ordered() if pinned else nullcontext(),
        without_loop_splitting(),
        switched_off(reordering_settings()),
        compiled_once(gm, values),
    ):
        compiled: Any = compile_fx_inner(gm, values)

    def run(inputs: list[Any]) -> Any:
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
