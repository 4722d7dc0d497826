"""Find the module instance that a call of a compiled graph belongs to, by the call's parameters.

Instances of a class share compiled code, and their parameters are inputs of it. So state of an
instance is looked up when a graph is called, not when it is compiled. A backward graph is not given
all parameters. It reads its owner from the autograd node that runs it: the forward call of that
very node has stored the owner there. This also holds for accumulation, checkpoints and several
models, in whatever order they run.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from commpass.distributed.origin import Origin, code_here, origin_of
from commpass.errors import PolicyError
from commpass.passes.references import BACKWARD, GATHERED_AGAIN, Weights
from commpass.plan import Plan
from commpass.policy import paths

log = logging.getLogger("commpass")

KEY = "commpass_owner"
"""Key of the owner in the metadata of an autograd node."""
MOST_SHORT_LIVED = 3
"""So many owners of a function's weights are freed after one step before a warning says that error
feedback is lost."""
INFERENCE = (
    "inference has no next step, in which error feedback could be sent: give the rule"
    " direction='backward', or this model a codec without state"
)
FORWARD = (
    "error feedback of a forward collective cannot be sent in the next step, which has other"
    " activations: give the rule direction='backward', or this site a codec without state"
)
NOT_TRAINED = (
    "inference changes no parameters, so there is no next difference: this gather stays"
    " uncompressed unless its codec has no state"
)
NO_OWNER = (
    "none of its graph's inputs is a parameter, so its state has no owner: compile a module, or a"
    " function that takes the parameters, or call commpass.all_reduce(..., residual=...)"
)
"""The reasons why no state is kept."""


class Owner:
    """The parameters that one instance gives to its graphs, and the state that is kept for it.

    It is dropped as soon as any of the parameters is.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        key = tuple(map(id, parameters))
        self.parameters = [TensorWeakRef(parameter) for parameter in parameters]
        self._finalizers = [
            weakref.ref(parameter, lambda _: _drop_owner(key)) for parameter in parameters
        ]
        self.state: dict[Any, tuple[Any, Tensor]] = {}
        self.references: dict[Any, tuple[Any, Tensor]] = {}
        self.of_function = not any(isinstance(each, nn.Parameter) for each in parameters)
        self.used = 0

    def name_in(self, names: dict[int, str]) -> str | None:
        """Return the name of the first of its parameters that is in ``names``, a mapping from
        id."""
        alive = (parameter() for parameter in self.parameters)
        return next((names[id(one)] for one in alive if one is not None and id(one) in names), None)


_owners: dict[tuple[int, ...], Owner] = {}
_short_lived = [0]


def state_owners() -> list[Owner]:
    """Return all owners whose parameters live, in the order in which they were first seen."""
    return list(_owners.values())


def owner_of(parameters: Sequence[Tensor]) -> Owner:
    """Return the owner of these parameters; make it if there is none."""
    key = tuple(map(id, parameters))
    if key not in _owners:
        _owners[key] = Owner(parameters)
    return _owners[key]


def part_of(owner: Owner, numbers: Sequence[int]) -> Owner:
    """Return the owner of the state that is kept for some of an owner's parameters.

    It is the same one whatever other parameters a graph takes.
    """
    alive = [owner.parameters[number]() for number in numbers]
    some = [parameter for parameter in alive if parameter is not None]
    return owner_of(some) if some else owner


def _drop_owner(key: tuple[int, ...]) -> None:
    """Drop the owner of a parameter that was freed: other tensors may get its ids.

    Warn if a function gets new weights in each step. Parameters of a module are freed with it.
    """
    owner = _owners.pop(key, None)
    if owner is not None and owner.of_function and owner.used == 1:
        _short_lived[0] += 1
        if _short_lived[0] == MOST_SHORT_LIVED:
            log.warning(
                "error feedback was dropped after one step, %d times: it belongs to a function's"
                " weights, and these are new tensors in each step. Change them in place, as"
                " torch.optim does",
                MOST_SHORT_LIVED,
            )


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter of a model by its id, without the prefixes of torch's
    wrappers.

    A tied parameter has its first name.
    """
    found: dict[int, str] = {}
    for path, module in paths.names(model):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), paths.join(path, name))
    return found


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, or another tensor itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def divided_over(parameter: Tensor) -> frozenset[str]:
    """Return the dimensions of a mesh over which a parameter is divided.

    It is a DTensor, or another tensor, which is divided over none. torch's DDP turns DTensors of
    tensor parallelism into local tensors, and keeps their layout in ``_st_info``.
    """
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
    elif (layout := getattr(parameter, "_st_info", None)) is not None:
        mesh, placements = layout.mesh, layout.placements
    else:
        return frozenset()
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    placed = zip(names, placements, strict=True)
    return frozenset(name for name, placement in placed if not placement.is_replicate())


@dataclass(frozen=True)
class Code:
    """The function that a graph was compiled from.

    Two compilations of a function with this name at this place are of the same function.
    """

    file: str
    line: int
    name: str


COMPILED_AUTOGRAD = Code("", 0, "compiled_autograd")


def _name_of(code: CodeType | None) -> Code:
    """Return the function that Dynamo is compiling; a placeholder if the backend was called
    directly."""
    if code is None:
        return Code("", 0, "graph")
    return Code(code.co_filename, code.co_firstlineno, code.co_qualname)


def _grad_of(recorded: Any) -> Any:
    """Return the input that an output is the gradient of, as AOTAutograd describes both; None if
    none."""
    while hasattr(recorded, "base"):  # a part of a tensor subclass
        recorded = recorded.base
    return getattr(recorded, "grad_of", None)


class Calls:
    """The calls of one Dynamo graph.

    ``autograd``: compiled autograd made it, so it is a backward graph.
    """

    hook = False
    """Whether a hook made the graph. A model has many equal graphs of hooks."""
    forward: Plan | None = None
    """The plan of its forward graph, as it is compiled now."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], autograd: bool):
        self.autograd = autograd
        code = None if autograd else code_here()
        self.code = COMPILED_AUTOGRAD if autograd else _name_of(code)
        self.origin = origin_of(code)
        self.keeps_state: bool | None = None
        """Whether its backward graph keeps state; None until that is compiled."""
        self.keeps_references = False
        """Whether its forward graph keeps references."""
        self.names = [name for name, _ in gm.named_parameters()]
        self.fixed = tuple(gm.parameters())
        inputs = _flat(example_inputs)
        self.positions = [i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
        if (
            not self.positions and not self.fixed
        ):  # a function: its weights are leaves that require gradients
            self.positions = [i for i, value in enumerate(inputs) if _is_weight(value)]
        self.is_last_compile = False
        """Whether Dynamo will not compile this code again."""
        self._now = threading.local()

    def parameters(self, outputs: fx.Node, reaches: Iterable[int]) -> tuple[int, ...]:
        """Return the parameters whose gradients the outputs ``reaches`` of the backward graph are.

        They are numbers among an owner's parameters; () if they cannot be determined. AOTAutograd
        records the parameter of each output. The position of an output does not identify it, since
        the gradient of a DTensor is several outputs.
        """
        descriptions = outputs.meta.get("desc")
        if self.autograd or descriptions is None:
            return ()
        numbers = {self._number(_grad_of(descriptions[output])) for output in reaches}
        return tuple(sorted(number for number in numbers if number is not None))

    def stateless(self, direction: str, inference: bool) -> str | None:
        """Return why no state can be kept for a site of this graph, or None."""
        if direction == "forward":
            return INFERENCE if inference else FORWARD
        return None if self.positions or self.fixed else NO_OWNER

    def weights(self, gm: fx.GraphModule, direction: str, stateless: str | None) -> Weights:
        """Return which inputs of an AOTAutograd graph are parameters, or shards of parameters.

        AOTAutograd records for each input which Dynamo input it is. ``stateless`` is the result of
        the method of that name for the graph.
        """
        if direction == "backward" or stateless == INFERENCE:
            return Weights(why=BACKWARD if direction == "backward" else NOT_TRAINED)
        numbers = {}
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            number = self._number(node.meta.get("desc"))
            if number is not None:
                numbers[position] = (number,)
        return Weights(numbers, why=None if numbers else NO_OWNER)

    def _number(self, recorded: Any) -> int | None:
        """Return the number of a parameter among an owner's, from AOTAutograd's description of
        it."""
        while hasattr(recorded, "base"):  # a part of a tensor subclass: the shard of a DTensor
            recorded = recorded.base
        target, index = getattr(recorded, "target", None), getattr(recorded, "idx", None)
        if target in self.names:
            return self.names.index(target)
        if index in self.positions:
            return len(self.fixed) + self.positions.index(index)
        return None

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph so that its forward and backward graphs find the owner of each
        call."""
        if not self.positions and not self.fixed:
            return compiled

        def run(*inputs: Any) -> Any:
            trains = self.autograd or torch.is_grad_enabled()
            if not self.keeps_references and (self.keeps_state is False or not trains):
                return compiled(*inputs)
            flat = _flat(inputs)
            owner = owner_of([*self.fixed, *(flat[position] for position in self.positions)])
            del flat
            if self.autograd:
                with self._calling(owner):
                    return compiled(*inputs)
            start = torch.autograd._get_sequence_nr()
            with self._calling(owner):
                outputs = compiled(*inputs)
            _store_owner(
                [*tree_leaves(outputs), *inputs],
                range(start, torch.autograd._get_sequence_nr()),
                owner,
            )
            return outputs

        return run

    def owner(self, direction: str) -> Owner:
        """Return the owner of the current call of a forward or backward graph.

        Raise PolicyError if it is unknown.
        """
        if self.autograd or direction == "forward":
            owner = getattr(self._now, "owner", None)
        else:
            node: Any = torch._C._current_autograd_node()
            owner = node.metadata.get(KEY) if node is not None else None
        if owner is None:
            raise PolicyError(
                f"state in the {direction} graph of {self.code.name} has no known owner, since the"
                " graph does not run for a call of that function. Use a codec without state here"
            )
        owner.used += 1
        return owner

    @contextmanager
    def _calling(self, owner: Owner) -> Iterator[None]:
        before = getattr(self._now, "owner", None)
        self._now.owner = owner
        try:
            yield
        finally:
            self._now.owner = before


class HookCalls(Calls):
    """The calls of a graph that a hook made for one collective: its owner and direction are fixed.

    With ``flat``, its tensor holds the gradients of the parameters one after another, and the state
    belongs to each of them. ``recomputed``: backward calls it again to gather what forward
    gathered.
    """

    hook = True

    def __init__(
        self,
        direction: str,
        name: str,
        parameters: Sequence[Tensor],
        flat: bool = False,
        recomputed: bool = False,
        origin: Origin | None = None,
    ):
        self.recomputed, self.flat = recomputed, flat
        self.parameters_of_flat: tuple[Tensor, ...] = ()
        self.autograd = direction == "backward"
        self.code, self.fixed, self.positions = Code("", 0, name), (), []
        self.origin = origin or Origin(name)
        self.keeps_state: bool | None = None
        self.keeps_references = self.is_last_compile = False
        self.fixed_owner: Owner | None = None
        self.set_parameters(parameters)

    def set_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Use these parameters from now on. The state of replaced parameters goes with them."""
        if not parameters:
            return
        self.fixed_owner = owner_of(parameters)
        if self.flat and not _are_same(self.parameters_of_flat, parameters):
            self.parameters_of_flat = tuple(parameters)

    def stateless(self, direction: str, inference: bool) -> str | None:
        if direction == "forward":
            return FORWARD
        return None if self.fixed_owner is not None else NO_OWNER

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return compiled

    def weights(self, gm: fx.GraphModule, direction: str, stateless: str | None) -> Weights:
        if direction == "backward" or self.fixed_owner is None:
            return Weights(why=BACKWARD if direction == "backward" else NO_OWNER)
        if self.recomputed:
            return Weights(why=GATHERED_AGAIN)
        return Weights({0: tuple(range(len(self.fixed_owner.parameters)))})

    def owner(self, direction: str) -> Owner:
        assert self.fixed_owner is not None
        return self.fixed_owner


def _are_same(some: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return whether these are the very same tensors."""
    return len(some) == len(tensors) and all(map(operator.is_, some, tensors))


def _flat(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph; those of compiled autograd begin with a list of tensors."""
    return [*inputs[0], *inputs[1:]] if inputs and isinstance(inputs[0], list) else list(inputs)


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


def _store_owner(values: Iterable[Any], outputs: range, owner: Owner) -> None:
    """Store the owner on the autograd nodes that a call made.

    Those are the nodes behind ``values`` whose sequence numbers are in ``outputs``.
    """
    nodes: list[Any] = [value.grad_fn for value in values if isinstance(value, Tensor)]
    while nodes:
        node = nodes.pop()
        if node is not None and node._sequence_nr() in outputs and KEY not in node.metadata:
            node.metadata[KEY] = owner
            nodes += [following for following, _ in node.next_functions]
