"""Graphs of hooks, compiled once for all that are alike.

The layers of a model send alike: their exchanges have plans and state of their own, but one
rewritten graph, and so one compiled code. These graphs are flat and functional from the start, so
they go to Inductor without AOTAutograd.
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

from commpass.lowering.repairs import repaired

Compiled = Callable[[list[Any]], Any]


def with_fakes(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Gives every node a fake value, of inputs that are like these and do not overlap."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # for sizes that data has
    with mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
        ]
    FakeTensorProp(gm, mode).propagate(*fakes)


@dataclass
class Shared:
    """What Inductor made of each graph, by the graph's text."""

    made: dict[str, Compiled] = field(default_factory=dict)

    def compiled(self, gm: fx.GraphModule, pinned: bool) -> Compiled:
        """The compiled graph, which takes a list; ``pinned`` keeps its collectives in their
        order."""
        text = _text(gm)
        if text is None:
            return _inductor(gm, pinned)
        if text not in self.made:
            self.made[text] = _inductor(gm, pinned)
        return self.made[text]


def _text(gm: fx.GraphModule) -> str | None:
    """All that the compiled code depends on; None if that is more than can be written down."""
    numbers = {node: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return None
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append(f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}")
        else:
            args = fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
            target = node.target if node.op == "output" else f"{node.target!r} {id(node.target)}"
            lines.append(f"{target} {args}")
    return "\n".join(lines)


def _inductor(gm: fx.GraphModule, pinned: bool) -> Compiled:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    from commpass.passes.post.order import ordered

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = values[0].fake_mode
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        ordered() if pinned else nullcontext(),
        repaired(),
    ):
        compiled: Any = compile_fx_inner(gm, values)

    def run(inputs: list[Any]) -> Any:
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
