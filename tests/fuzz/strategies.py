"""Draw random cases with hypothesis, which minimizes those that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fuzz import quantised
from fuzz.program import (
    COLLECTIVES,
    WORLD,
    Case,
    Dim,
    Input,
    Mesh,
    Shapes,
    Step,
    Where,
    local,
    results,
    together,
)
from hypothesis import strategies as st

MESHED = ("rows", "columns", "again", "flat", "deep", "middle", "near")
FLOATS = ("float32", "bfloat16", "float16", "float64")
MODULES = ("", "layers.0.attn", "layers.0.mlp", "layers.1.mlp", "router")
OWN_NUMBER = "a rank's own number"
LARGEST = 1 << 13
"""The largest number of values of a tensor, so that a run of all ranks is quick."""


Value = list[torch.Tensor]
"""A value on each rank, without its numbers."""


def ragged(value: Value) -> bool:
    return len({tuple(x.shape) for x in value}) > 1


def is_float(value: Value) -> bool:
    return value[0].dtype.is_floating_point


def is_matrix(value: Value) -> bool:
    return value[0].dim() == 2


@dataclass(frozen=True)
class Counted:
    """The number of tokens from each rank to each, and the inputs that hold it."""

    inputs: tuple[int, int]
    group: str
    ranks: list[int]
    splits: list[list[int]]


class Drawer:
    """Draw a program step by step, and record the shapes of its values on all ranks."""

    def __init__(self, draw: Callable[[Any], Any]):
        self.draw = draw
        self.world = draw(st.sampled_from([2, 3, 4, 2, 3, 4, 4, 5, 6, 8]))
        self.meshes: list[Mesh] = []
        self.dims = self._dims()
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.dependent = ""
        self.unsized: set[int] = set()
        self.counted: Counted | None = None
        self.module, self.word, self.again = "", None, False
        self.backward = self.chance(2)
        self.has_own_numbers = self.chance(4)
        self.for_codes = self.chance(4)
        self.case = Case(self.world, self.dims, [], [], [])

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    # --- groups and inputs ---

    def _dims(self) -> dict[str, Dim]:
        world, everybody = self.world, list(range(self.world))
        dims = {WORLD: Dim(WORLD, [everybody])}
        inner = self.one_of([n for n in range(2, world) if world % n == 0] or [1])
        if inner > 1 and not self.chance(4):
            rows = [everybody[n : n + inner] for n in range(0, world, inner)]
            dims["rows"] = Dim("tp", rows)
            dims["columns"] = Dim("dp", [everybody[n::inner] for n in range(inner)])
            if not self.chance(6):
                self.meshes.append(Mesh(rows, ["columns", "rows"]))
            if self.chance(4):  # another mesh of the same ranks
                dims["again"] = Dim("ep", rows)
                self.meshes.append(Mesh(rows, ["columns", "again"]))
            if self.chance(6):
                dims["flat"] = Dim("dp_tp", [everybody])
                self.meshes.append(Mesh(everybody, ["flat"]))
        if world == 8 and self.chance(2):
            table = torch.arange(8).view(2, 2, 2)
            for dim, key in enumerate(("deep", "middle", "near")):
                dims[key] = Dim(key, table.movedim(dim, 2).reshape(-1, 2).tolist())
            self.meshes.append(Mesh(table.tolist(), ["deep", "middle", "near"]))
        if world > 2 and self.chance(2):
            dims["first pair"] = Dim(self.one_of(["", "pp"]), [[0, 1]])
            dims["second pair"] = Dim(self.one_of(["", "pp"]), [[1, 2]])
        if world > 2 and self.chance(4):
            dims["some"] = Dim("", [everybody[1:]])
        if self.chance(8):
            dims["alone"] = Dim("one", [[rank] for rank in everybody])
        return dims

    def input(self, dtype: str, shape: list[int], rows: list[int] | None = None) -> int:
        fill = self.one_of(["normal", "normal", "normal", "normal", "same", "ints", "zeros"])
        scale = self.one_of([1.0, 1.0, 1.0, 1.0, 1e-4, 1e3])
        planted = []
        if dtype in FLOATS and self.chance(10):
            what = self.one_of(["nan", "inf", "-inf", "-0.0"])
            planted = [
                (self.draw(st.integers(0, self.world - 1)), self.draw(st.integers(0, 99)), what)
            ]
        gradient = self.backward and self.chance(2)
        made = Input(dtype, shape, rows, fill, scale, len(self.inputs), planted, gradient)
        self.inputs.append(made)
        self.values.append(
            [
                torch.empty(made.shape_on(rank), dtype=getattr(torch, dtype), device="meta")
                for rank in range(self.world)
            ]
        )
        return len(self.values) - 1

    def draw_inputs(self) -> None:
        columns = self.one_of([1, 3, 4, 8, 17, 32, 64])
        dtype = self.one_of(["float32", "float32", "bfloat16", "float16", "float64"])
        length = (
            self.world * self.one_of([1, 2, 3, 4])
            if not self.chance(6)
            else self.one_of([0, 1, 5, 7])
        )
        for _ in range(self.draw(st.integers(1, 2))):
            self.input(dtype, [length, columns])
        if self.chance(2):  # each rank has its own number of samples
            lengths = st.sampled_from([0, 1, 2, 3, 5, 8, 33, 100])
            rows = self.draw(st.lists(lengths, min_size=self.world, max_size=self.world))
            self.input(dtype, [0, columns], rows)
            if self.chance(2):
                self.input(dtype, [0, self.one_of([1, 4, 8])], rows)
        if self.chance(3):
            self.input(self.one_of(["int64", "float32", "bfloat16"]), [length, columns])

        if self.chance(4):
            self.counted = self._counted(length)

    def _counted(self, length: int) -> Counted:
        group = self.group()
        dim = self.dims[group]
        splits = self.splits(group, [length] * self.world)
        for rows in (splits, [list(column) for column in zip(*splits, strict=True)]):
            numbers = [
                [rows[rank][to] for to in dim.of(rank) or range(dim.size)]
                for rank in range(self.world)
            ]
            made = Input("int64", [dim.size], seed=len(self.inputs), numbers=numbers)
            self.inputs.append(made)
            self.values.append([x.to("meta") for x in map(made.value, range(self.world))])
        last = len(self.inputs) - 1
        self.unsized |= {last - 1, last}  # values that are not used in computations
        return Counted((last - 1, last), group, dim.groups[0], splits)

    def splits(self, group: str, rows: Sequence[int]) -> list[list[int]]:
        """Return the entries from each rank to each: a rank's ``rows`` go to those of its group."""
        splits = [[0] * self.world for _ in range(self.world)]
        for ranks in self.dims[group].groups:
            for rank in ranks:
                cuts = sorted(self.draw(st.integers(0, rows[rank])) for _ in ranks[1:])
                for to, start, end in zip(ranks, [0, *cuts], [*cuts, rows[rank]], strict=True):
                    splits[rank][to] = end - start
            even = [len({n for to in ranks for n in (splits[r][to], splits[to][r])}) for r in ranks]
            if 1 in even and max(even) > 1:
                self.dependent = "splits that look even on a rank"
        return splits

    # --- values ---

    def pick(self, fits: Callable[[Value], bool] = lambda value: True) -> int | None:
        """Return the number of a value; recent ones are picked most often, because rules need
        neighbours."""
        numbers = [
            number
            for number, value in enumerate(self.values)
            if number not in self.unsized and fits(value)
        ]
        if not numbers:
            return None
        return numbers[-1 - self.draw(st.integers(0, min(len(numbers), 5) - 1))]

    def like(self, number: int) -> int | None:
        """Return another value of the same shape and dtype, or the same value."""
        mine = self.values[number]
        alike = lambda value: all(  # noqa: E731
            (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(value, mine, strict=True)
        )
        return self.pick(alike)

    def add(self, op: str, *of: int, **how: Any) -> int | None:
        """Add a step; return the number of its (first) value, or None if its result would be too
        large."""
        step = Step(op, list(of), how, self.module, self.word, self.again)
        given = [[self.values[number][rank] for number in of] for rank in range(self.world)]
        made: list[list[torch.Tensor]] = [[] for _ in range(results(step))]
        for rank in range(self.world):
            where, on = Where(self.case, rank), Shapes()
            if op not in COLLECTIVES:
                made[0].append(local(on, step, given[rank], where))
                continue
            for position, x in enumerate(given[rank]):
                made[position].append(together(on, step, x, where))
        if any(x.numel() > LARGEST for value in made for x in value):
            return None
        self.steps.append(step)
        self.values += made
        return len(self.values) - len(made)

    # --- steps ---

    def draw_step(self) -> None:
        if self.chance(3):
            self.module = self.one_of(MODULES)
        self.word, self.again = None, self.backward and self.chance(4)
        if self.chance(8):
            self.word = self.one_of([{"keep": True}, {"codec": "int8", "force": True}])
        scaled = self.has_own_numbers and not self.chance(3)
        steps = QUANTISED if self.for_codes else SCALED if scaled else STEPS
        kinds = self.draw(st.sampled_from(steps))
        kinds(self)

    def collective(
        self, kind: str, number: int | None, group: str, *more: int, **how: Any
    ) -> int | None:
        if number is None:
            return None
        value, size = self.values[number], self.dims[group].size
        if value[0].dim() == 0 or (kind != "all_to_all" and ragged(value)):
            return None
        rows = value[0].shape[0]
        if kind == "reduce_scatter" and (rows % size or rows == 0):
            return None
        if kind == "all_to_all" and how.get("splits") is None and (ragged(value) or rows % size):
            return None
        if self.chance(4):
            how["late"] = True
        if sum(map(len, self.dims[group].groups)) < self.world:
            self.dependent = self.dependent or "some ranks do something else"
        return self.add(kind, number, *more, group=group, **how)

    def reduce_op(self, value: Value) -> str:
        if not is_float(value):
            return self.one_of(["sum", "max"])
        return self.one_of(["sum", "sum", "sum", "avg", "avg", "max", "min"])

    def group(self) -> str:
        return self.one_of(list(self.dims))

    def number(self, choices: Sequence[float]) -> Any:
        """Return a number of the program, or a different number for each rank if the program has
        such."""
        if not self.has_own_numbers or self.chance(3):
            return self.one_of(choices)
        self.dependent = self.dependent or OWN_NUMBER
        if self.chance(3):
            return [self.one_of(choices) for _ in range(self.world)]
        return [0.5 + rank for rank in range(self.world)]

    def links(self, number: int | None, most: int = 3) -> int | None:
        """Add what may stand before or after a collective and can be moved past it.

        This is a chain of scales by one number, negations, views and copies.
        """
        if number is None or not is_float(self.values[number]):
            return number
        if not (self.has_own_numbers or self.chance(2)):
            return number
        for _ in range(self.draw(st.integers(1, most))):
            made = self._link(number)
            number = number if made is None else made
        return number

    def _link(self, number: int) -> int | None:
        kind = self.one_of(["scale", "scale", "divide", "neg", "view", "there and back", "clone"])
        shape = list(self.values[number][0].shape)
        if kind in ("scale", "divide"):
            by = self.number([2.0, 0.5, -3.0, 7.0, 1 / 4096])
            more = {"scalar": True} if self.chance(4) else {}
            return self.add(kind, number, by=by, **more)
        if kind == "neg":
            return self.add("neg", number)
        if kind == "clone":
            return self.add("clone", number, format="contiguous_format")
        if ragged(self.values[number]) or not shape:
            return None
        if kind == "there and back":
            flat = self.add("view", number, shape=[self.values[number][0].numel()])
            return None if flat is None else self.add("view", flat, shape=shape)
        return self.add("unsqueeze", number, dim=len(shape))

    def case_of(self, policy: dict[str, Any], gbit: float, alpha_us: float) -> Case:
        count = 1 if self.for_codes else self.draw(st.integers(1, 3))
        last = len(self.values) - 1
        outputs = list(dict.fromkeys([last, *(self.pick() for _ in range(count - 1))]))
        return Case(
            self.world,
            self.dims,
            self.inputs,
            self.steps,
            outputs,
            "backward" if self.backward else "forward",
            policy,
            gbit,
            alpha_us,
            self.dependent,
            self.meshes,
            self.chance(3),
            self.chance(4),
        )


# --- single steps ---------------------------------------------------------------------------------


def unary(d: Drawer) -> None:
    op = d.one_of(["neg", "relu", "tanh", "abs"])
    x = d.pick(is_float)
    if x is not None:
        d.add(op, x)


def scale(d: Drawer) -> None:
    x = d.pick(is_float)
    if x is None:
        return
    if d.chance(3):
        d.add("divide", x, by=d.number([2.0, 3.0, 7.0, 256.0]))
    else:
        d.add("scale", x, by=d.number([2.0, 0.5, -3.0, 0.1, 1 / 4096, 0.0]))


def binary(d: Drawer) -> None:
    x = d.pick()
    y = d.like(x)
    op = d.one_of(["add", "add", "sub", "mul"])
    how = (
        {"alpha": d.number([2, 0.5])}
        if op != "mul" and d.chance(6) and is_float(d.values[x])
        else {}
    )
    d.add(op, x, y, **how)


def matmul(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and is_matrix(v))
    if x is None:
        return
    rows, columns = ([t.shape[n] for t in d.values[x]] for n in (0, 1))
    same = lambda v: is_matrix(v) and v[0].dtype == d.values[x][0].dtype  # noqa: E731
    if d.chance(2):  # as the gradient of a weight
        y = d.pick(lambda v: same(v) and [t.shape[0] for t in v] == rows)
        if y is not None:
            d.add("turned mm", x, y)
    else:
        y = d.pick(lambda v: same(v) and [t.shape[0] for t in v] == columns)
        if y is not None:
            d.add("mm", x, y)


def cast(d: Drawer) -> None:
    x = d.pick()
    dtype = d.one_of(FLOATS)
    if str(d.values[x][0].dtype) != f"torch.{dtype}":
        d.add("cast", x, dtype=dtype)


def view(d: Drawer) -> None:
    x = d.pick(lambda v: not ragged(v))
    if x is None:
        return
    shape, dims = list(d.values[x][0].shape), d.values[x][0].dim()
    how = d.one_of(["flat", "split", "permute", "unsqueeze", "squeeze", "four"])
    if how == "flat":
        d.add("view", x, shape=[d.values[x][0].numel()])
    elif how == "split" and dims and shape[0] % 2 == 0 and shape[0]:
        d.add("view", x, shape=[2, shape[0] // 2, *shape[1:]])
    elif how == "permute" and dims > 1:
        d.add("permute", x, dims=d.draw(st.permutations(range(dims))))
    elif how == "unsqueeze" and dims < 4:
        d.add("unsqueeze", x, dim=d.draw(st.integers(0, dims)))
    elif how == "squeeze" and 1 in shape and dims > 1:
        d.add("squeeze", x, dim=shape.index(1))
    elif how == "four" and dims == 2 and shape[0]:
        d.add("view", x, shape=[shape[0], 1, 1, shape[1]])


def copy(d: Drawer) -> None:
    x = d.pick()
    formats = ["contiguous_format", "preserve_format"]
    if d.values[x][0].dim() == 4:
        formats.append("channels_last")
    d.add("clone", x, format=d.one_of(formats))


def sliced(d: Drawer, x: int, dim: int, start: int, end: int) -> int | None:
    length = d.values[x][0].shape[dim]
    if any(length == (end - start) * each.size for each in d.dims.values()):
        d.dependent = "a slice that is one rank's own part"
    return d.add("slice", x, dim=dim, start=start, end=end)


def part(d: Drawer) -> None:
    x = d.pick(lambda v: not ragged(v) and v[0].dim() > 0)
    if x is None:
        return
    shape = list(d.values[x][0].shape)
    along = d.draw(st.integers(0, len(shape) - 1))
    if d.chance(3) and shape[along] > 0:
        length = shape[along]
        start = d.draw(st.integers(0, length - 1))
        end = d.draw(st.integers(start + 1, length))
        sliced(d, x, along, start, end)
        return
    group = d.group()
    if shape[along] and shape[along] % d.dims[group].size == 0:
        d.add(d.one_of(["own", "own item"]), x, dim=along, group=group)


def join(d: Drawer) -> None:
    x = d.pick(lambda v: v[0].dim() > 0)
    if x is not None:
        d.add("cat", x, d.like(x), dim=0)


def total(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and v[0].dim() > 1)
    if x is not None:
        d.add("sum", x, dims=[0], keep=d.chance(2))


def constant(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and not ragged(v))
    if x is None:
        return
    made_as = d.one_of(["zeros_like", "ones_like", "full_like", None])
    by: Any = {"zeros_like": 0.0, "ones_like": 1.0}.get(made_as, 2.5)
    if made_as in ("full_like", None) and d.chance(2):
        by = [1.0 + rank for rank in range(d.world)]
    d.add("full", x, by=by, made_as=made_as)


def any_collective(d: Drawer) -> None:
    kind = d.one_of(COLLECTIVES)
    x, group = d.pick(), d.group()
    how: dict[str, Any] = {}
    if kind in ("all_reduce", "reduce_scatter"):
        how["reduce"] = d.reduce_op(d.values[x])
    if kind == "broadcast":
        how["root"] = d.draw(st.integers(0, d.dims[group].size - 1))
    if kind == "all_to_all":
        how["splits"] = None
    if kind == "all_reduce" and d.chance(10):
        how["form"] = "in-place"
    d.collective(kind, x, group, **how)


def coalesced(d: Drawer) -> None:
    kind = d.one_of(["all_reduce", "all_gather", "reduce_scatter"])
    x, group = d.pick(lambda v: not ragged(v) and v[0].dim() > 0 and is_float(v)), d.group()
    if x is None:
        return
    y = d.like(x)
    how = {"reduce": d.one_of(["sum", "avg"])} if kind != "all_gather" else {}
    d.collective(kind, x, group, y, form="coalesced", **how)


# --- patterns of rules ----------------------------------------------------------------------------


def sums(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() > 0)
    if x is None:
        return
    y, group, other = d.like(x), d.group(), d.group()
    kind = d.one_of(["all_reduce", "all_reduce", "reduce_scatter"])
    reduce = d.one_of(["sum", "avg"])
    d.module = d.one_of(MODULES)
    if d.chance(3):
        d.word = d.one_of([{"keep": True}, {"codec": "int8", "force": True}])
    a = d.collective(kind, x, group, reduce=reduce)
    d.word = None
    if a is None:
        return
    a = d.links(a)
    d.module = d.one_of(MODULES)
    b = d.links(d.collective(kind, y, other if d.chance(4) else group, reduce=reduce))
    if a is not None and b is not None and _same_shapes(d, a, b):
        how = {"alpha": d.number([2, 0.5])} if d.chance(6) else {}
        d.add(d.one_of(["add", "sub"]), a, b, **how)


def _same_shapes(d: Drawer, a: int, b: int) -> bool:
    return all(s.shape == t.shape for s, t in zip(d.values[a], d.values[b], strict=True))


def twice(d: Drawer) -> None:
    x, group = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() > 0), d.group()
    if x is None:
        return
    kind = d.one_of(["all_reduce", "all_gather"])
    how = {"reduce": "sum"} if kind == "all_reduce" else {}
    a, b = (d.collective(kind, x, group, **how) for _ in range(2))
    if a is not None and b is not None:
        d.add("mul", a, b)


def nested(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() > 0)
    if x is None:
        return
    groups = d.draw(st.permutations([key for key in d.dims if key in MESHED]))
    first, second = groups[:2] if groups and not d.chance(4) else (d.group(), d.group())
    reduce = ["sum", "sum", "avg", "max"]
    inner = d.links(d.collective("all_reduce", x, first, reduce=d.one_of(reduce)))
    if inner is not None:
        d.collective("all_reduce", inner, second, reduce=d.one_of(reduce))


def own_of(d: Drawer) -> None:
    """Add the slice of a gather or a sum that is the rank's own, after operators that may stand
    between."""
    x = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() == 2 and v[0].numel() > 0)
    if x is None:
        return
    group, kind = d.group(), d.one_of(["all_gather", "all_reduce"])
    how = {"reduce": d.one_of(["sum", "avg"])} if kind == "all_reduce" else {}
    y = d.collective(kind, x, group, **how)
    size = d.dims[group].size
    along = 0
    if y is not None and kind == "all_gather" and d.chance(3):
        y, along = d.add("joined", y, parts=size, dim=1), 1
    y = d.links(y)
    if y is not None and is_matrix(d.values[y]) and d.chance(3):
        y, along = d.add("permute", y, dims=[1, 0]), 1 - along
    if y is not None and (length := d.values[y][0].shape[along]) and length % size == 0:
        d.add(d.one_of(["own", "own item"]), y, dim=along, group=group)


def narrowed(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() > 0)
    if x is None:
        return
    how = (
        {"splits": None} if (kind := d.one_of(["all_gather", "all_to_all"])) == "all_to_all" else {}
    )
    y = d.collective(kind, x, d.group(), **how)
    copied = "contiguous_format"
    if y is not None and is_matrix(d.values[y]) and d.chance(4):
        rows, columns = d.values[y][0].shape
        if rows * columns and rows % 2 == 0:
            y, copied = d.add("view", y, shape=[2, rows // 2, 1, columns]), "channels_last"
    if y is not None and d.chance(3):
        y = d.add("clone", y, format=copied)
    y = d.links(y)
    if y is None:
        return
    if d.chance(3):
        d.add("through", y, narrow=d.one_of(["float8_e4m3fn", "float8_e5m2"]))
    else:
        d.add("cast", y, dtype=d.one_of(["bfloat16", "float16", "float32"]))


def _quantiser(d: Drawer, shape: Sequence[int], scales: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a quantiser, as ``codes`` takes them."""
    fits = [each for each in scales if each != "block" or shape[1] % quantised.BLOCK == 0]
    how: dict[str, Any] = {
        "dtype": d.one_of(["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "int8"]),
        "scale": d.one_of(fits),
        "wide": not d.chance(4),
    }
    if how["scale"] == "static":
        return {**how, "by": d.number([64.0, 0.3, 1000.0])}
    return {**how, "form": d.one_of(quantised.FORMS)}


def codes(d: Drawer) -> None:
    """Add a gather of a matrix, and what quantises it: alone, or for a product of codes; sometimes
    twice, or with other uses of the values."""
    fits = lambda v: is_float(v) and is_matrix(v) and not ragged(v) and v[0].numel() > 0  # noqa: E731
    x = d.pick(fits)
    if x is None:
        return
    kind = d.one_of(["all_gather", "all_gather", "all_gather", "all_to_all", "all_reduce"])
    how = {"all_to_all": {"splits": None}, "all_reduce": {"reduce": "sum"}}.get(kind, {})
    group = d.group()
    y = d.collective(kind, x, group, **how)
    if y is not None and kind == "all_gather" and d.chance(6):
        y = d.add("joined", y, parts=d.dims[group].size, dim=1)
    y = d.links(y)
    if y is not None and is_matrix(d.values[y]) and d.chance(4):
        y = d.add("permute", y, dims=[1, 0])
    if y is None or not fits(d.values[y]):
        return
    shape = d.values[y][0].shape
    for _ in range(2 if d.chance(4) else 1):
        other = d.pick(lambda v: fits(v) and v[0].shape[1] == shape[1])
        if other is not None and _fits_codes_mm(d.values[y], d.values[other]) and d.chance(2):
            how = _quantiser(d, shape, ["tensor", "row", "static"])
            d.add("codes mm", y, other, **how)
        else:
            d.add("quantised", y, **_quantiser(d, shape, quantised.SCALES))


def _fits_codes_mm(x: Value, y: Value) -> bool:
    """Whether products of codes support two matrices: sizes that are multiples of 16, 17 rows, and
    rows that are contiguous."""
    (rows, width), columns = x[0].shape, y[0].shape[0]
    return (
        x[0].is_contiguous()
        and y[0].is_contiguous()
        and rows > 16
        and width % 16 == 0
        and columns % 16 == 0
    )


def normed(d: Drawer) -> None:
    """Add a sum over ranks, the addition of a residual, a norm, and maybe a quantiser."""
    x = d.pick(lambda v: is_float(v) and is_matrix(v) and not ragged(v) and v[0].numel() > 0)
    y = None if x is None else d.collective("all_reduce", x, d.group(), reduce="sum")
    if x is None or y is None:
        return
    if d.chance(2):
        y = d.add("add", y, x)
    if y is not None:
        y = d.add("norm", y, centered=d.chance(2), eps=1e-5)
    if y is not None and d.chance(2):
        d.add("quantised", y, **_quantiser(d, d.values[y][0].shape, quantised.SCALES))


def widened(d: Drawer) -> None:
    x = d.pick(lambda v: is_float(v) and v[0].dim() > 0 and not ragged(v))
    if x is None:
        return
    x = d.add("cast", x, dtype=d.one_of(["bfloat16", "float16"]))
    x = d.add("cast", x, dtype=d.one_of(["float32", "float64"]))
    kind = d.one_of(["all_gather", "all_reduce", "reduce_scatter"])
    how = {"reduce": d.one_of(["sum", "avg"])} if kind != "all_gather" else {}
    d.collective(kind, d.links(x), d.group(), **how)


def expanded(d: Drawer) -> None:
    x = d.pick(lambda v: not ragged(v) and v[0].dim() == 2 and v[0].shape[0] > 0 and is_float(v))
    if x is None:
        return
    shape = list(d.values[x][0].shape)
    row = sliced(d, x, 0, 0, 1)
    if row is None:
        return
    y = d.add("expand", row, shape=[d.one_of([2, 6, d.world]), shape[1]])
    if y is None:
        return
    kind = d.one_of(["all_gather", "all_reduce"])
    d.collective(kind, d.links(y), d.group(), **({"reduce": "sum"} if kind == "all_reduce" else {}))


def gathered_scatter(d: Drawer) -> None:
    x, group = d.pick(lambda v: is_float(v) and not ragged(v) and v[0].dim() > 0), d.group()
    y = (
        None
        if x is None
        else d.collective("reduce_scatter", x, group, reduce=d.one_of(["sum", "avg"]))
    )
    if y is not None:
        d.collective("all_gather", d.links(y), group)


def between_links(d: Drawer) -> None:
    """Add a collective with scales before and after it, followed by patterns that rules match."""
    x = d.links(d.pick(lambda v: is_float(v) and v[0].dim() > 0))
    if x is None:
        return
    kind, group = d.one_of(COLLECTIVES), d.group()
    how: dict[str, Any] = {}
    if kind in ("all_reduce", "reduce_scatter"):
        how["reduce"] = d.reduce_op(d.values[x])
    if kind == "broadcast":
        how["root"] = 0
    if kind == "all_to_all":
        how["splits"] = None
    y = d.links(d.collective(kind, x, group, **how))
    if y is None:
        return
    after = d.one_of(["narrower", "narrower", "add", "again"])
    if after == "narrower":
        wide = d.values[y][0].dtype.itemsize
        narrower = [name for name in FLOATS if getattr(torch, name).itemsize < wide]
        if narrower:
            d.add("cast", y, dtype=d.one_of(narrower))
    elif after == "add":
        d.add("add", y, d.like(y))
    elif after == "again":
        d.links(d.collective("all_reduce", y, group, reduce="sum"))


def no_field(d: Drawer) -> None:
    """Add a collective of values that are no field of like values: counts, indices, masks,
    statistics, maybe several in one tensor."""
    y = _no_field(d)
    if y is not None and d.values[y][0].dim() > 0 and d.chance(3):
        other = d.like(y) if d.chance(2) else _no_field(d)
        mine = d.values[y][0]
        if other is not None and (d.values[other][0].dtype, d.values[other][0].dim()) == (
            mine.dtype,
            1,
        ):
            y = d.add("cat", d.add("view", y, shape=[mine.numel()]), other, dim=0)
    if y is None:
        return
    kind = d.one_of(["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    how: dict[str, Any] = {"splits": None} if kind == "all_to_all" else {}
    if kind in ("all_reduce", "reduce_scatter"):
        how["reduce"] = d.one_of(["sum", "avg", "max"])
    d.collective(kind, y, d.group(), **how)


def _no_field(d: Drawer) -> int | None:
    op = d.one_of(["index", "mask", "counts", "histogram", "positions", "statistics"])
    if op == "histogram":
        x = d.pick(lambda v: v[0].dtype is torch.int64)
        return None if x is None else d.add(op, x, dtype=d.one_of(FLOATS))
    x = d.pick(lambda v: is_float(v) and is_matrix(v) and v[0].shape[1] > 0 and not ragged(v))
    if x is None:
        return None
    how: dict[str, dict[str, Any]] = {
        "index": {"keep": d.chance(2)},
        "mask": {"above": d.one_of([0.0, 1.0])},
        "counts": {"above": [-1.0, 0.0, 1.0][: d.draw(st.integers(1, 3))]},
        "statistics": {"of": d.one_of(["mean", "sum"])},
    }
    return d.add(op, x, **how.get(op, {}))


def tokens(d: Drawer) -> None:
    """Send tokens to experts and back, with counts that each rank knows when it compiles."""
    x, group = d.pick(lambda v: v[0].dim() == 2), d.group()
    if x is None:
        return
    splits = d.splits(group, [y.shape[0] for y in d.values[x]])
    if d.chance(4):
        x = d.add("cast", x, dtype=d.one_of(["float32", "float64"]))
    sent = d.collective("all_to_all", x, group, splits=splits)
    if sent is None:
        return
    if is_float(d.values[sent]) and d.chance(2):
        sent = d.add("relu", sent)
    if d.chance(4):
        sent = d.add("cast", sent, dtype=d.one_of(["bfloat16", "float32"]))
    d.collective("all_to_all", sent, group, splits=_turned(splits))


def counted_tokens(d: Drawer) -> None:
    """As ``tokens``, but inputs hold the counts: they are only known when the graph runs."""
    if d.counted is None:
        return
    counted = d.counted
    rows = sum(counted.splits[counted.ranks[0]])
    x = d.pick(lambda v: v[0].dim() == 2 and is_float(v) and {t.shape[0] for t in v} == {rows})
    if x is None:
        return
    counts = list(counted.inputs)
    made = d.collective("all_to_all", x, counted.group, splits=counted.splits, counts=counts)
    for op, how in (("relu", {}), ("scale", {"by": 2.0}), ("cast", {"dtype": "float16"})):
        if made is not None and d.chance(3):
            d.unsized.add(made)
            made = d.add(op, made, **how)
    if made is None:
        return
    d.unsized.add(made)
    back, counts = _turned(counted.splits), counts[::-1]
    again = d.collective("all_to_all", made, counted.group, splits=back, counts=counts)
    if again is not None:
        d.unsized.add(again)
        d.add("sum", again, dims=[0], keep=False)


def _turned(splits: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*splits, strict=True)]


STEPS: tuple[Callable[[Drawer], None], ...] = (
    any_collective,
    any_collective,
    unary,
    scale,
    binary,
    matmul,
    cast,
    view,
    copy,
    part,
    join,
    total,
    constant,
    coalesced,
    sums,
    sums,
    twice,
    nested,
    nested,
    own_of,
    own_of,
    narrowed,
    widened,
    expanded,
    gathered_scatter,
    between_links,
    between_links,
    no_field,
    no_field,
    tokens,
    counted_tokens,
    codes,
    codes,
    codes,
    normed,
)


SCALED: tuple[Callable[[Drawer], None], ...] = (
    scale,
    sums,
    nested,
    own_of,
    narrowed,
    narrowed,
    widened,
    expanded,
    gathered_scatter,
    between_links,
    between_links,
    between_links,
    codes,
)
"""Steps with scales around collectives."""

QUANTISED: tuple[Callable[[Drawer], None], ...] = (codes, codes, codes, normed, scale, cast)
"""Steps of programs whose gathered values have few uses, on a link on which bytes take time."""


# --- policies -------------------------------------------------------------------------------------

LOSSY = ("int8", "int4", "fp8", "rotated", "rotated(bits=4)")


def _rule(d: Drawer) -> dict[str, Any]:
    rule: dict[str, Any] = {}
    if d.chance(2):
        rule["module"] = d.one_of(["layers.*", "layers.*.mlp", "router", "**"])
    if d.chance(3):
        rule["kind"] = d.one_of(COLLECTIVES)
    if d.chance(4):
        rule["group"] = d.one_of(["tp", "dp", "world"])
    if d.chance(4):
        rule["direction"] = d.one_of(["forward", "backward"])
    what = d.one_of(["keep", "keep", "codec", "forced", "forced"])
    if what == "keep":
        return {**rule, "keep": True}
    codec = d.one_of([*LOSSY, "raw"] if not d.chance(6) or not d.backward else ["topk"])
    if codec == "topk":
        return {
            **rule,
            "codec": codec,
            "force": True,
            "direction": "backward",
            "kind": "all_reduce",
        }
    return {**rule, "codec": codec, "force": what == "forced"}


def draw_policy(d: Drawer) -> dict[str, Any]:
    chosen = d.one_of(
        ["lossless"] * 5 + ["exact"] * 2 + ["off", "balanced", "aggressive"] + ["rules"] * 3
    )
    if d.chance(24):
        chosen = "zipccl"
    policy: dict[str, Any] = {
        "exact": {"reassociate": False},
        "rules": {"rules": []},
    }.get(chosen, {"preset": chosen})
    if chosen in ("rules", "balanced") or d.chance(6):
        policy["rules"] = [_rule(d) for _ in range(d.draw(st.integers(1, 3)))]
    if d.chance(12):
        policy["skip"] = d.one_of([["simplify"], ["verify"], ["group"]])
    if chosen == "rules" and d.chance(4):
        policy["reassociate"] = False
    if d.chance(8):
        policy["group_bytes"] = d.one_of([0, 64, 1024])
    return policy


@st.composite
def cases(draw: Callable[[Any], Any]) -> Case:
    d = Drawer(draw)
    policy = draw_policy(d)
    gbit, alpha = d.one_of([0.001, 0.1, 1.0, 10.0]), d.one_of([60.0, 5.0])
    d.draw_inputs()
    if d.for_codes:
        gbit = 0.001
    for _ in range(draw(st.integers(1, 2 if d.for_codes else 8))):
        d.draw_step()
    return d.case_of(policy, gbit, alpha)
