"""A program for several ranks as data, and its graph on one rank as it reaches the passes.

A case is a program with the policy and the profile under which it is compiled. It is written to
JSON and read back, so that a found case can be tried again at any time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import commpass
import msgspec
import torch
import torch.distributed as dist
from commpass.policy import PRESETS, Policy
from commpass.policy.annotate import KEY
from commpass.policy.rules import Annotation, Rule
from fuzz import quantised
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
ops = torch.ops._c10d_functional
convert = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Dim:
    """Disjoint groups of equal size, with the label of their mesh dimension. A rank may be in none
    of them."""

    label: str
    groups: list[list[int]]

    @property
    def size(self) -> int:
        return len(self.groups[0])

    def of(self, rank: int) -> list[int] | None:
        return next((group for group in self.groups if rank in group), None)

    def number(self, rank: int) -> int:
        """Return the rank's position in its group; 0 if it is in none."""
        group = self.of(rank)
        return group.index(rank) if group else 0


@dataclass(frozen=True)
class Mesh:
    """A device mesh: ``ranks`` as a nested list, and the names of those dimensions of the case that
    it has."""

    ranks: list[Any]
    dims: list[str]


@dataclass(frozen=True)
class Input:
    """A tensor that each rank gets.

    ``rows`` are the lengths of the first dimension by rank if they differ. ``fill`` is normal, same
    (on all ranks), ints or zeros; ``planted`` are [rank, place, value]. ``gradient``: it is a
    gradient, in a backward graph. ``numbers`` are its values by rank, if they are given.
    """

    dtype: str
    shape: list[int]
    rows: list[int] | None = None
    fill: str = "normal"
    scale: float = 1.0
    seed: int = 0
    planted: list[tuple[int, int, str]] = field(default_factory=list)
    gradient: bool = False
    numbers: list[list[int]] | None = None

    def shape_on(self, rank: int) -> list[int]:
        return self.shape if self.rows is None else [self.rows[rank], *self.shape[1:]]

    def value(self, rank: int) -> torch.Tensor:
        dtype, shape = getattr(torch, self.dtype), self.shape_on(rank)
        if self.numbers is not None:
            return torch.tensor(self.numbers[rank], dtype=dtype)
        generator = torch.Generator().manual_seed(
            self.seed * 64 + (0 if self.fill == "same" else rank)
        )
        if self.fill == "zeros":
            made = torch.zeros(shape)
        elif self.fill == "ints" or not dtype.is_floating_point:
            made = torch.randint(-8, 9, shape, generator=generator)
        else:
            made = torch.randn(shape, generator=generator, dtype=torch.float64) * self.scale
        made = made.to(dtype)
        for where, place, what in self.planted:
            if where == rank and made.numel():
                made.view(-1)[place % made.numel()] = float(what)
        return made


@dataclass(frozen=True)
class Step:
    """An operator ``op`` applied to earlier values, with settings ``how``.

    ``module`` and ``word`` are the module and the annotation in the metadata of its nodes.
    ``again``: the nodes are marked as recomputed from forward, in backward.
    """

    op: str
    of: list[int]
    how: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    word: dict[str, Any] | None = None
    again: bool = False


@dataclass(frozen=True)
class Case:
    """A program with its policy and profile.

    Values are numbered: first the inputs, then the results of each step. ``dependent`` is the
    reason why ranks may decide differently. ``rewritten``: whether algorithms are inserted into the
    graphs, which takes most of the time; if not, compressed sites are only executed eagerly.
    ``autocast``: the case is also planned, and its codecs run, under autocast.
    """

    world: int
    dims: dict[str, Dim]
    inputs: list[Input]
    steps: list[Step]
    outputs: list[int]
    direction: str = "forward"
    policy: dict[str, Any] = field(default_factory=dict)
    gbit: float = 1.0
    alpha_us: float = 60.0
    dependent: str = ""
    meshes: list[Mesh] = field(default_factory=list)
    rewritten: bool = True
    autocast: bool = False

    def to_json(self) -> str:
        """Return the case as JSON with one step per line."""
        facts = msgspec.to_builtins(self)
        lines = []
        for key, value in facts.items():
            rows = isinstance(value, list) and value and isinstance(value[0], dict)
            text = (
                "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
                if rows
                else json.dumps(value)
            )
            lines.append(f' "{key}": {text}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str | bytes) -> Case:
        return msgspec.json.decode(text, type=Case)

    def settings(self) -> tuple[Policy, commpass.Profile]:
        given = dict(self.policy)
        rules = [Rule(**rule) for rule in given.pop("rules", [])]
        base = PRESETS[given.pop("preset")] if "preset" in given else Policy()
        policy = dataclasses.replace(base, rules=(*rules, *base.rules), **given)
        return policy, commpass.ethernet(self.gbit, self.alpha_us)


# --- groups ---------------------------------------------------------------------------------------


WORLD = "world"
"""The dimension of all ranks: torch's default group, which is not created again."""


def group_names(case: Case) -> dict[str, tuple[str, list[int]]]:
    """Return the dimension and the ranks of each group by torch's group name: groups are created in
    order."""
    made = [(key, ranks) for key, dim in case.dims.items() if key != WORLD for ranks in dim.groups]
    everybody = list(range(case.world))
    return {"0": (WORLD, everybody)} | {str(n): group for n, group in enumerate(made, 1)}


@contextmanager
def as_rank(case: Case, rank: int) -> Iterator[None]:
    """Make this process one rank of the program, with its groups; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    hook = sys.excepthook  # torch inserts a rank before it, each time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
    sys.excepthook = hook
    try:
        mine: dict[str, dist.ProcessGroup] = {}
        for name, (key, ranks) in list(group_names(case).items())[1:]:
            label = case.dims[key].label
            group = dist.new_group(ranks, group_desc=f"mesh_{label}" if label else "undefined")
            if rank in ranks:
                assert group.group_name == name
                mine[key] = group
        meshes = [
            DeviceMesh.from_group(
                [mine[key] for key in mesh.dims],
                "cpu",
                mesh=torch.tensor(mesh.ranks, dtype=torch.int),
                mesh_dim_names=tuple(case.dims[key].label for key in mesh.dims),
            )
            for mesh in case.meshes
        ]
        yield
        del meshes  # they exist as long as their groups
    finally:
        dist.destroy_process_group()


# --- operators ------------------------------------------------------------------------------------

On = Any
"""Executes operators: ``on(target, *args, **kwargs)`` writes a graph, or computes."""


def _reshape(on: On, x: Any, shape: list[int]) -> Any:
    return on(aten.view.default if on.contiguous(x) else aten.reshape.default, x, shape)


def _cut(on: On, x: Any, dim: int, number: int, parts: int) -> Any:
    length = on.shape(x)[dim] // parts
    return on(aten.slice.Tensor, x, dim, number * length, (number + 1) * length)


def _own(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    dim = where.case.dims[how["group"]]
    return _cut(on, x, how["dim"], dim.number(where.rank), dim.size)


def _own_item(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    dim, along = where.case.dims[how["group"]], how["dim"]
    split = on(aten.split.Tensor, x, on.shape(x)[along] // dim.size, along)
    return on(operator.getitem, split, dim.number(where.rank))


def _joined(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Join equal parts of the first dimension along another one: a gather along that one."""
    split = on(aten.split.Tensor, x, on.shape(x)[0] // how["parts"])
    return on(
        aten.cat.default, [on(operator.getitem, split, n) for n in range(how["parts"])], how["dim"]
    )


def _number(number: Any, where: Where) -> Any:
    """Return a rank's number; a list has one number per rank."""
    return number[where.rank] if isinstance(number, list) else number


def has_own_number(step: Step) -> bool:
    """Return whether a step contains different numbers for different ranks."""
    return any(isinstance(step.how.get(key), list) for key in ("by", "alpha"))


def _scale(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    target = aten.mul.Scalar if how.get("scalar") else aten.mul.Tensor
    return on(target, x, _number(how["by"], where))


def _divide(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    target = aten.div.Scalar if how.get("scalar") else aten.div.Tensor
    return on(target, x, _number(how["by"], where))


def _plus(on: On, x: Any, y: Any, how: dict[str, Any], where: Where, target: Any) -> Any:
    return on(target, x, y, **{key: _number(value, where) for key, value in how.items()})


def _filled(on: On, shape: Sequence[int], number: Any, dtype: torch.dtype) -> Any:
    return on(aten.full.default, list(shape), number, dtype=dtype, device=torch.device("cpu"))


def _full(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    made = _filled(on, on.shape(x), _number(how["by"], where), on.dtype(x))
    on.note(
        made, "original_aten", getattr(aten, how["made_as"]).default if how["made_as"] else None
    )
    return made


def _clone(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    return on(aten.clone.default, x, memory_format=getattr(torch, how["format"]))


def _turned_mm(on: On, x: Any, y: Any, how: dict[str, Any], where: Where) -> Any:
    return on(aten.mm.default, on(aten.permute.default, x, [1, 0]), y)


def _sum(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    return on(aten.sum.dim_IntList, x, how["dims"], how["keep"])


def _through(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Convert to a dtype and back: few operators compute in narrow dtypes."""
    return on(convert, on(convert, x, getattr(torch, how["narrow"])), on.dtype(x))


def _expand(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    return on(aten.expand.default, x, how["shape"])


def _places(on: On, length: int) -> Any:
    return on(aten.arange.default, length, dtype=torch.int64, device=torch.device("cpu"))


def _index(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Return the position of the largest value of each row, as a float."""
    return on(convert, on(aten.argmax.default, x, -1, how["keep"]), on.dtype(x))


def _mask(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    return on(convert, on(aten.gt.Scalar, x, how["above"]), on.dtype(x))


def _counts(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Return how many values exceed each of some numbers: whole numbers, stored as floats."""
    masks = [on(convert, on(aten.gt.Scalar, x, above), on.dtype(x)) for above in how["above"]]
    every = list(range(len(on.shape(x))))
    return on(
        aten.cat.default, [_flat(on, on(aten.sum.dim_IntList, m, every, True)) for m in masks]
    )


def _histogram(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Return how often each of the integers from 0 to 7 occurs, as a float: a sum of one-hot
    rows."""
    hot = on(aten.eq.Tensor, on(aten.reshape.default, x, [-1, 1]), _places(on, 8))
    return on(aten.sum.dim_IntList, on(convert, hot, getattr(torch, how["dtype"])), [0], False)


def _positions(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Return the number of each row, as a float."""
    return on(convert, _places(on, on.shape(x)[0]), on.dtype(x))


def _flat(on: On, x: Any) -> Any:
    return on(aten.reshape.default, x, [-1])


def _statistics(on: On, x: Any, how: dict[str, Any], where: Where) -> Any:
    """Return the message of a normalization over ranks.

    For each column it has the mean and the variance, or the sum and the sum of squares, and the
    number of rows.
    """
    rows, total = on.shape(x)[0], lambda y: on(aten.sum.dim_IntList, y, [0], False)
    first, second = total(x), total(on(aten.mul.Tensor, x, x))
    if how["of"] == "mean":
        first, second = (on(aten.div.Tensor, y, max(rows, 1)) for y in (first, second))
        second = on(aten.sub.Tensor, second, on(aten.mul.Tensor, first, first))
    count = _filled(on, [1], float(rows), on.dtype(x))
    return on(aten.cat.default, [first, second, count])


LOCAL: dict[str, Callable[..., Any]] = {
    "scale": _scale,
    "divide": _divide,
    "index": _index,
    "mask": _mask,
    "counts": _counts,
    "histogram": _histogram,
    "positions": _positions,
    "statistics": _statistics,
    "neg": lambda on, x, how, where: on(aten.neg.default, x),
    "relu": lambda on, x, how, where: on(aten.relu.default, x),
    "tanh": lambda on, x, how, where: on(aten.tanh.default, x),
    "abs": lambda on, x, how, where: on(aten.abs.default, x),
    "add": functools.partial(_plus, target=aten.add.Tensor),
    "sub": functools.partial(_plus, target=aten.sub.Tensor),
    "mul": lambda on, x, y, how, where: on(aten.mul.Tensor, x, y),
    "mm": lambda on, x, y, how, where: on(aten.mm.default, x, y),
    "turned mm": _turned_mm,
    "cast": lambda on, x, how, where: on(convert, x, getattr(torch, how["dtype"])),
    "through": _through,
    "view": lambda on, x, how, where: _reshape(on, x, how["shape"]),
    "permute": lambda on, x, how, where: on(aten.permute.default, x, how["dims"]),
    "unsqueeze": lambda on, x, how, where: on(aten.unsqueeze.default, x, how["dim"]),
    "squeeze": lambda on, x, how, where: on(aten.squeeze.dim, x, how["dim"]),
    "expand": _expand,
    "slice": lambda on, x, how, where: on(
        aten.slice.Tensor, x, how["dim"], how["start"], how["end"]
    ),
    "own": _own,
    "own item": _own_item,
    "joined": _joined,
    "cat": lambda on, *xs, how, where: on(aten.cat.default, list(xs), how["dim"]),
    "clone": _clone,
    "sum": _sum,
    "full": _full,
    **quantised.OPERATORS,
}
"""Operators of one rank."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Operators of several ranks, with these settings in ``how``:

- group: a dimension; reduce: the op; root: a rank.
- splits: entries from each rank to each; None if even.
- counts: the inputs that hold the splits, if they are only known there.
- form: plain, in-place, or coalesced (one tensor or several).
- late: whether it is waited for when it is first used.
"""


@dataclass(frozen=True)
class Where:
    """The rank whose program is being written or computed."""

    case: Case
    rank: int


def local(on: On, step: Step, values: Sequence[Any], where: Where) -> Any:
    return LOCAL[step.op](on, *values, how=step.how, where=where)


def instead(on: On, step: Step, x: Any, where: Where) -> Any:
    """Return a replacement for a collective's result, of the same shape, on a rank that is in none
    of the groups."""
    ranks = where.case.dims[step.how["group"]].size
    if step.op == "all_gather":
        return on(aten.cat.default, [x] * ranks)
    if step.op == "reduce_scatter":
        return _cut(on, x, 0, 0, ranks)
    return x


def together(on: On, step: Step, x: torch.Tensor, where: Where) -> torch.Tensor:
    """Return a collective's result on a rank, without its values."""
    dim = where.case.dims[step.how["group"]]
    ranks = dim.of(where.rank)
    if ranks is None:
        return instead(on, step, x, where)
    shape = list(x.shape)
    if step.op == "all_gather":
        shape[0] *= dim.size
    elif step.op == "reduce_scatter":
        shape[0] //= dim.size
    elif step.op == "all_to_all" and step.how["splits"] is not None:
        shape[0] = sum(step.how["splits"][rank][where.rank] for rank in ranks)
    return x.new_empty(shape)


class Shapes:
    """Execute operators on tensors without values."""

    def contiguous(self, x: torch.Tensor) -> bool:
        return x.is_contiguous()

    def shape(self, x: torch.Tensor) -> Sequence[int]:
        return x.shape

    def dtype(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype

    def note(self, *args: Any) -> None:
        pass

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return target(*args, **kwargs)


def results(step: Step) -> int:
    """Return how many values a step gives."""
    return len(step.of) if step.op in COLLECTIVES else 1


# --- the graph of a rank --------------------------------------------------------------------------


class Uncompiled(fx.GraphModule):
    """A graph module that is only interpreted: generating code would take most of the time."""

    def recompile(self) -> None:
        pass


class Writer:
    """Write a graph with fake values.

    The values are computed on tensors without values, outside of the fake mode, which is ten times
    as fast.
    """

    def __init__(self, mode: FakeTensorMode):
        self.mode, self.graph, self.meta = mode, fx.Graph(), {}
        self.shapes: dict[fx.Node, Any] = {}
        self.read: dict[fx.Node, list[fx.Node]] = {}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        sources: list[fx.Node] = []
        fx.map_arg((args, kwargs), sources.append)
        if not all(source in self.shapes for source in sources):
            return self.symbolic(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), self.shapes.__getitem__)
        return self.node(target, args, kwargs, Shapes()(target, *values, **named))

    def symbolic(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Return a node whose size, or value, is only known when the graph runs."""
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode:
            node.meta = {**self.meta, "val": target(*values, **named)}
            # Each result has a node here, as in a trace, so that no later trace reports it as
            # missing.
            self.mode.shape_env.pending_fresh_unbacked_symbols.clear()
        made = node.meta["val"]
        if isinstance(made, torch.Tensor) and all(isinstance(n, int) for n in made.shape):
            self.shapes[node] = torch.empty(made.shape, dtype=made.dtype, device="meta")
        return node

    def numbers(self, x: fx.Node) -> list[fx.Node]:
        """Return the numbers in an input, read once."""
        if x not in self.read:
            rows = self(aten.unbind.int, x)
            places = range(self.shape(x)[0])
            scalars = [self(operator.getitem, rows, place) for place in places]
            read = aten._local_scalar_dense.default
            self.read[x] = [self.symbolic(read, (scalar,), {}) for scalar in scalars]
        return self.read[x]

    def wait(self, node: fx.Node) -> fx.Node:
        if node in self.shapes:
            return self.node(ops.wait_tensor.default, (node,), {}, self.shapes[node])
        return self.symbolic(ops.wait_tensor.default, (node,), {})

    def node(self, target: Any, args: Any, kwargs: Any, made: Any) -> fx.Node:
        """Add a node with a known result: one or several tensors without values."""
        node = self.graph.call_function(target, args, kwargs)
        self.shapes[node] = made
        node.meta = {**self.meta, "val": fx.node.map_aggregate(made, self._fake)}
        return node

    def _fake(self, x: torch.Tensor) -> FakeTensor:
        return FakeTensor(self.mode, x, torch.device("cpu"))

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(name)
        self.shapes[node] = torch.empty(list(shape), dtype=dtype, device="meta")
        node.meta["val"] = self._fake(self.shapes[node])
        return node

    def contiguous(self, x: fx.Node) -> bool:
        return x.meta["val"].is_contiguous()

    def shape(self, x: fx.Node) -> Sequence[int]:
        return x.meta["val"].shape

    def dtype(self, x: fx.Node) -> torch.dtype:
        return x.meta["val"].dtype

    def note(self, node: fx.Node, key: str, value: Any) -> None:
        node.meta[key] = value


OPERATORS = {
    "all_reduce": ops.all_reduce,
    "all_gather": ops.all_gather_into_tensor,
    "reduce_scatter": ops.reduce_scatter_tensor,
    "broadcast": ops.broadcast,
    "all_to_all": ops.all_to_all_single,
}
COALESCED = {
    "all_reduce": ops.all_reduce_coalesced,
    "all_gather": ops.all_gather_into_tensor_coalesced,
    "reduce_scatter": ops.reduce_scatter_tensor_coalesced,
}


STEP = "fuzz_step"
"""Key in the metadata of every node: the number of its step."""


def start(
    on: Writer,
    step: Step,
    values: Sequence[fx.Node],
    name: str,
    where: Where,
    counts: Sequence[fx.Node] = (),
) -> list[fx.Node]:
    """Return the nodes of a collective's results before they are waited for."""
    how, rank = step.how, where.rank
    ranks = where.case.dims[how["group"]].of(rank)
    assert ranks is not None
    size = len(ranks)
    if counts:
        sent, received = map(on.numbers, counts)
        return [on.symbolic(OPERATORS[step.op].default, (values[0], received, sent, name), {})]
    values = [
        v if on.contiguous(v) else on(aten.clone.default, v, memory_format=torch.contiguous_format)
        for v in values
    ]
    if step.op != "all_to_all":
        settings = {"all_gather": (size,), "reduce_scatter": (how.get("reduce"), size)}
        other = how["root"] if step.op == "broadcast" else how.get("reduce")
        given = (*settings.get(step.op, (other,)), name)
    elif how["splits"] is None:
        even = [on.shape(values[0])[0] // size] * size
        given = (even, even, name)
    else:
        splits = how["splits"]
        given = ([splits[r][rank] for r in ranks], [splits[rank][r] for r in ranks], name)
    form = how.get("form", "plain")
    made = [together(Shapes(), step, on.shapes[x], where) for x in values]
    if form == "coalesced":
        node = on.node(COALESCED[step.op].default, (values, *given), {}, made)
        return [on(operator.getitem, node, n) for n in range(len(values))]
    if form == "in-place":
        copied = on(aten.clone.default, values[0])
        return [on.node(ops.all_reduce_.default, (copied, *given), {}, on.shapes[copied])]
    return [on.node(OPERATORS[step.op].default, (values[0], *given), {}, made[0])]


def write(case: Case, rank: int, mode: FakeTensorMode) -> Uncompiled:
    """Write the graph of one rank, as AOTAutograd would pass it to the passes."""
    on, where = Writer(mode), Where(case, rank)
    names = {key: name for name, (key, ranks) in group_names(case).items() if rank in ranks}
    values = [
        on.input(
            f"{'tangents' if given.gradient else 'primals'}_{n}",
            given.shape_on(rank),
            getattr(torch, given.dtype),
        )
        for n, given in enumerate(case.inputs)
    ]
    started: dict[int, fx.Node] = {}

    def value(number: int) -> fx.Node:
        if number in started:
            on.meta = started[number].meta.copy()
            values[number] = on.wait(started.pop(number))
        return values[number]

    for index, step in enumerate(case.steps):
        taken = [value(number) for number in step.of]
        on.meta = {**_said(step), STEP: index}
        if step.op in COLLECTIVES:
            dim = case.dims[step.how["group"]]
            ranks = dim.of(rank)
            if ranks is None:
                values += [instead(on, step, x, where) for x in taken]
                continue
            counts = [value(number) for number in step.how.get("counts", ())]
            begun = start(on, step, taken, names[step.how["group"]], where, counts)
            started |= dict(enumerate(begun, len(values)))
            values += begun
            if not step.how.get("late"):
                for number in list(started)[-len(begun) :]:
                    value(number)
        else:
            values.append(local(on, step, taken, where))
    for number in list(started):
        value(number)
    on.graph.output(tuple(values[number] for number in case.outputs))
    return Uncompiled({}, on.graph)


def _said(step: Step) -> dict[str, Any]:
    """Return the metadata of a step's nodes."""
    said: dict[str, Any] = {}
    if step.module:
        said["nn_module_stack"] = {step.module: (f"L['self'].{step.module}", "Module")}
    if step.word is not None:
        said["custom"] = {KEY: Annotation(**step.word).to_json()}
    if step.again:
        said["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return said
