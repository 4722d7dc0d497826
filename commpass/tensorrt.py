"""torch-tensorrt as the inner compiler (``inner="tensorrt"``): engines for computation, Inductor
for exchanges.

A rewritten graph is cut at its exchanges. torch-tensorrt gets the pieces between them, which
contain no collective. Encodes, exchanges and decodes stay outside the engines. An engine may
compute with another precision on another rank, so the copies of a sum would differ in their bits.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from commpass.distributed.integration import Integration
from commpass.errors import PolicyError
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import is_collective, is_wait

ENGINE, OUTSIDE = "engine", "outside"


class Engines(Integration):
    """An inner compiler for ``commpass.backend``.

    Use ``inner="tensorrt"``, or ``inner=commpass.tensorrt.Engines(min_block_size=1)`` with settings
    of torch-tensorrt. Engines support inference only. They send nothing:
    ``commpass.plans()`` has the exchanges between them. Raises PolicyError if torch_tensorrt cannot
    be imported.
    """

    call = "tensorrt"
    inference_only = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings: Mapping[str, Any] = settings
        try:
            self.compiler = importlib.import_module("torch_tensorrt.dynamo.backend")
        except Exception as error:  # without TensorRT's libraries, its import raises Exception
            raise PolicyError(
                'inner="tensorrt" needs torch-tensorrt, which cannot be imported here'
                f" ({error}): pip install 'commpass[tensorrt]', with the release of this torch"
                f" ({torch.__version__}), on a machine with TensorRT and an NVIDIA GPU"
            ) from error

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile an AOTAutograd graph whose nodes all have fake values."""
        pieces = cut(gm)
        for name, piece in list(pieces.named_children()):
            assert isinstance(piece, fx.GraphModule)
            given = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
            compiler = self._engine if name.startswith(ENGINE) else _outside
            setattr(pieces, name, Piece(compiler(piece, given)))
        return pieces

    def _engine(self, piece: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = self.compiler.torch_tensorrt_backend(piece, inputs, options=dict(self.settings))
        return compiled


def _outside(piece: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx_inner

    compiled = compile_fx_inner(piece, list(inputs))
    return lambda *args: compiled(list(args))


class Piece(nn.Module):
    """A compiled piece of a graph, in the place of the original piece."""

    def __init__(self, compiled: Callable[..., Any]):
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self.compiled(*args)


def cut(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph as a sequence of calls of its pieces, named by engine or outside.

    Each piece takes results of earlier ones and returns a tuple.
    """
    levels, output = _levels(gm.graph), gm.graph.output_node()
    for node in sorted(levels, key=levels.__getitem__):
        output.prepend(node)
    pieces = split_module(gm, gm, levels.__getitem__, keep_original_order=True)
    for name, piece in list(pieces.named_children()):
        level = int(name.removeprefix("submod_"))
        new = f"{OUTSIDE if level % 2 else ENGINE}_{level // 2}"
        pieces.add_module(new, piece)
        for node in pieces.graph.find_nodes(op="call_module", target=name):
            node.target = new
            _return_tuple(piece, node)
        delattr(pieces, name)
    pieces.recompile()
    return pieces


def _return_tuple(piece: Any, call: fx.Node) -> None:
    """Let a piece with one result return a tuple of it: ``tuple_return``, which torch 2.11 has
    not."""
    output = piece.graph.output_node()
    if not isinstance(result := output.args[0], fx.Node):
        return
    output.args = ((result,),)
    piece.recompile()
    with call.graph.inserting_after(call):
        first = call.graph.call_function(operator.getitem, (call, 0))
    call.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the piece of each node: the first one after its inputs' pieces, with even numbers for
    engines.

    A node that writes into a tensor comes after all earlier nodes and before all later ones.
    """
    levels: dict[fx.Node, int] = {}
    floor = highest = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        writes = _writes(node)
        least = max([floor, *(levels[each] for each in node.all_input_nodes if each in levels)])
        if writes:
            least = max(least, highest)
        level = least + (least % 2 != (writes or _sends(node)))
        levels[node], highest = level, max(highest, level)
        floor = level if writes else floor
    return levels


def _sends(node: fx.Node) -> bool:
    """Whether a node is a collective, its wait, or an encode or decode of its data."""
    return MARK in node.meta or is_wait(node) or is_collective(node)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
