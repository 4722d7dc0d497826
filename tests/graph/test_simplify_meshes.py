"""Test every rule of simplify against the ranks of the groups: random programs on random meshes,
run for all ranks in lockstep, plain and simplified.

Each rank creates the groups and traces the program separately, as rank r of n. It simplifies its
graph without communication. All ranks must make the same changes, and compute what the plain graphs
compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import as_rank, ops, trace
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lockstep import run_in_lockstep
from tiers import rarely
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

import commpass
from commpass.groups.mesh_unions import partitions
from commpass.passes.discover import discover
from commpass.passes.simplify import simplify
from commpass.policy import Policy

wait = ops.wait_tensor
SLOW = commpass.ethernet(0.001)


@dataclass(frozen=True)
class Axis:
    """One way to divide all ranks into groups.

    torch numbers the ranks of a group as they are numbered in the world, whatever the order in a
    mesh.
    """

    blocks: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> tuple[int, ...]:
        return next(tuple(sorted(block)) for block in self.blocks if rank in block)

    @property
    def even(self) -> bool:
        """Return whether all groups divide the rows of a value evenly."""
        lengths = {len(block) for block in self.blocks}
        return len(lengths) == 1 and not ROWS % lengths.pop()


@dataclass(frozen=True)
class World:
    """The meshes that each rank creates, with flattened dimensions, and explicitly created
    groups."""

    size: int
    meshes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    flattened: tuple[tuple[int, int], ...]
    by_hand: tuple[tuple[tuple[int, ...], ...], ...]

    def tables(self) -> list[Tensor]:
        return [torch.tensor(ranks).view(shape) for shape, ranks in self.meshes]

    def axes(self) -> list[Axis]:
        """Return the axes in the order of ``names``: all ranks, then the dimensions of each mesh,
        and so on."""
        found = [Axis((tuple(range(self.size)),))]
        for table in self.tables():
            found += [rows(table, (dim,)) for dim in range(table.dim())]
        found += [rows(self.tables()[which], (dim, dim + 1)) for which, dim in self.flattened]
        return found + [Axis(blocks) for blocks in self.by_hand]

    def names(self, rank: int) -> tuple[list[str], list[DeviceMesh]]:
        """Return the name of this rank's group of each axis. Every rank creates all groups, in one
        order."""
        names, made = [dist.group.WORLD.group_name], []
        for table in self.tables():
            dims = tuple(f"m{len(made)}d{dim}" for dim in range(table.dim()))
            made.append(DeviceMesh("cpu", table, mesh_dim_names=dims))
            names += [made[-1].get_group(dim).group_name for dim in range(table.dim())]
        for which, dim in self.flattened:
            part = made[which].mesh_dim_names[dim : dim + 2]
            names.append(made[which][part]._flatten().get_group().group_name)
        for blocks in self.by_hand:
            groups = [dist.new_group(list(block)) for block in blocks]
            mine = next(number for number, block in enumerate(blocks) if rank in block)
            names.append(groups[mine].group_name)
        return names, made


def rows(table: Tensor, dims: tuple[int, ...]) -> Axis:
    """Return the sets of ranks that differ only in these dimensions of a table."""
    last = table.movedim(dims, tuple(range(-len(dims), 0)))
    length = last.shape[-len(dims) :].numel()
    return Axis(tuple(map(tuple, last.reshape(-1, length).tolist())))


SHAPES = [
    (2,),
    (3,),
    (4,),
    (2, 2),
    (4, 1),
    (2, 3),
    (3, 2),
    (2, 4),
    (4, 2),
    (3, 3),
    (2, 2, 2),
    (2, 1, 3),
    (2, 2, 3),
    (4, 4),
    (2, 2, 4),
]
ROWS, COLUMNS = 48, 2
"""A number of rows that 2, 3, 4, 6, 8, 12 and 16 ranks can divide."""


@st.composite
def worlds(draw) -> World:
    shape = draw(st.sampled_from(SHAPES))
    size = torch.Size(shape).numel()
    order = st.one_of(st.just(tuple(range(size))), st.permutations(range(size)).map(tuple))
    meshes = [(shape, draw(order))]
    alike = [other for other in SHAPES if torch.Size(other).numel() == size]
    if draw(st.booleans()):
        meshes.append((draw(st.sampled_from(alike)), draw(order)))
    flattened = [
        (which, dim)
        for which, (dims, _) in enumerate(meshes)
        for dim in range(len(dims) - 1)
        if draw(st.booleans()) and torch.Size(dims).numel() > 1
    ]
    by_hand = []
    if draw(st.booleans()):
        ranks = draw(st.permutations(range(size)))
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
        blocks = [tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        by_hand.append(tuple(blocks))
    return World(size, tuple(meshes), tuple(flattened), tuple(by_hand))


@dataclass(frozen=True)
class Step:
    """One line of a program: an operation, the earlier values that it uses, and its axes."""

    name: str
    left: int
    right: int
    axis: int
    other: int
    op: str
    scale: float


NAMES = [
    "reduce",
    "nested",
    "nested",
    "sums",
    "scattered",
    "gather of scatter",
    "own part",
    "equal",
]
NAMES += ["narrow", "widen", "expand", "zeros", "sine", "scale", "add", "turn", "gather twice"]


@st.composite
def programs(draw) -> tuple[World, tuple[Step, ...]]:
    world = draw(worlds())
    axes = st.integers(0, len(world.axes()) - 1)
    step = st.builds(
        Step,
        st.sampled_from(NAMES),
        st.integers(0, 3),
        st.integers(0, 3),
        axes,
        axes,
        st.sampled_from(["sum", "sum", "avg", "max"]),
        st.sampled_from([2.0, 0.5, -3.0]),
    )
    return world, tuple(draw(st.lists(step, min_size=1, max_size=5)))


Program = Callable[[Tensor], Any]


def program(world: World, steps: tuple[Step, ...], rank: int, names: list[str]) -> Program:
    """The program of a rank. Every value has ROWS rows on all ranks."""
    axes = world.axes()

    def reduce(x: Tensor, axis: int, op: str = "sum") -> Tensor:
        return wait(ops.all_reduce(x, op, names[axis]))

    def gather(x: Tensor, axis: int) -> Tensor:
        return wait(ops.all_gather_into_tensor(x, len(axes[axis].of(rank)), names[axis]))

    def scatter(x: Tensor, axis: int) -> Tensor:
        return wait(ops.reduce_scatter_tensor(x, "sum", len(axes[axis].of(rank)), names[axis]))

    def part(x: Tensor, axis: int, dim: int = 0) -> Tensor:
        block = axes[axis].of(rank)
        length = x.shape[dim] // len(block)
        return x.narrow(dim, block.index(rank) * length, length)

    def made(step: Step, x: Tensor, y: Tensor) -> Tensor:
        axis, even = step.axis, axes[step.axis].even
        if step.name == "reduce":
            return reduce(x, axis, step.op)
        if step.name == "nested":  # the second op equals the first, except for a mean of a sum
            inner = reduce(x, axis, step.op)
            between = inner.view(-1).view(ROWS, COLUMNS) * step.scale if step.left % 2 else inner
            mixed = step.op == "avg" and step.right == 0
            return reduce(between, step.other, "sum" if mixed else step.op)
        if step.name == "sums":
            return step.scale * reduce(x.sin(), axis) + reduce(y.cos(), axis)
        if step.name == "zeros":
            return reduce(torch.zeros_like(x), axis) + x
        if step.name == "expand":
            return reduce(x[:1].sin().expand(ROWS, COLUMNS), axis)
        if step.name == "equal":
            return reduce(x.cos(), axis) * reduce(x.cos(), axis)
        if step.name in ("sine", "scale", "add", "turn") or not even:
            plain = {"sine": x.sin(), "scale": x * step.scale, "turn": x.flip(0)}
            return plain.get(step.name, x + y)
        if step.name == "scattered":
            return gather(part(reduce(x, axis), axis).exp().clamp(max=10), axis)
        if step.name == "gather of scatter":
            return gather(scatter(x, axis), axis)
        if step.name == "own part":
            return part(gather(x, axis) * step.scale, axis)
        if step.name == "gather twice":
            return part(gather(x.sin(), axis).cos() + gather(x.sin(), axis), axis)
        if step.name == "narrow":
            narrow = (gather(x, axis) * step.scale).view(-1, COLUMNS).float()
            return part(narrow.sin(), axis).double()
        wide = scatter(x.float().double(), axis)
        return gather(wide, axis).sin()

    def run(x: Tensor) -> Any:
        values = [x, x.tanh()]
        for step in steps:
            x, y = (values[-1 - min(which, len(values) - 1)] for which in (step.left, step.right))
            values.append(made(step, x, y))
        return values[2:]

    return run


def prove(world: World, steps: tuple[Step, ...]) -> list[str]:
    """Return the rules that were applied; check that all ranks applied the same, and that results
    are unchanged."""
    plain: list[fx.GraphModule] = []
    simple: list[fx.GraphModule] = []
    applied: list[dict[str, list[tuple[Any, ...]]]] = []
    ranks: dict[str, tuple[int, ...]] = {}
    for rank in range(world.size):
        with as_rank(rank, world.size):
            names, kept = world.names(rank)
            for name, axis in zip(names, world.axes(), strict=True):
                assert ranks.setdefault(name, axis.of(rank)) == axis.of(rank)
            like = torch.empty(ROWS, COLUMNS).double()
            plain.append(trace(program(world, steps, rank, names), like))
            simple.append(copy.deepcopy(plain[-1]))
            done = simplify(simple[-1], discover(simple[-1]), Policy(), SLOW)
            applied.append({name: [] for name in names})
            for step in done:
                applied[-1][step.group].append((step.rule, step.numbers, *step.moved))
            del kept
    for group, members in ranks.items():
        rules = {rank: applied[rank][group] for rank in members}
        assert all(each == rules[members[0]] for each in rules.values()), (group, rules)
    generator = torch.Generator().manual_seed(world.size)
    inputs = [[torch.randn(ROWS, COLUMNS, generator=generator).double()] for _ in range(world.size)]
    expected = run_in_lockstep(plain, inputs, ranks.__getitem__)
    for rank, got in enumerate(run_in_lockstep(simple, inputs, ranks.__getitem__)):
        for number, (a, b) in enumerate(zip(got, expected[rank], strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            narrow = any(step.name in ("narrow", "widen") for step in steps)
            bound = (1e-5 if narrow else 1e-10) * max(1.0, float(b.abs().max()))
            assert (a - b).abs().max() <= bound, (rank, number, applied[0])
    return [rule for rules in applied[0].values() for rule, *_ in rules]


PHASES = tuple(phase for phase in Phase if phase is not Phase.explain)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [2, rarely(25)])
def test_random_programs_on_random_meshes(examples):
    @settings(max_examples=examples, deadline=None, phases=PHASES)
    @given(programs())
    def proved(drawn):
        prove(*drawn)

    proved()


ORDER = tuple(range(8))
CUBE = World(8, (((2, 2, 2), ORDER),), ((0, 0), (0, 1)), ())
"""Axes: 0 all, 1 to 3 the dimensions, 4 the first two flattened, 5 the last two."""
TWO = World(8, (((2, 4), ORDER), ((4, 2), ORDER)), (), ())
"""Axes: 1 and 2 of a mesh 2 x 4, 3 and 4 of a mesh 4 x 2."""
TURNED = World(8, (((2, 4), ORDER), ((4, 2), (0, 4, 1, 5, 2, 6, 3, 7))), (), ())
"""The second mesh is the first, transposed: axis 4 is axis 1, axis 3 is axis 2."""
CROOKED = World(8, (((4, 2), ORDER), ((2, 4), (0, 2, 4, 5, 1, 3, 6, 7))), (), ())
"""Axis 2 has the rows {0,1} {2,3} .., axis 4 {0,2,4,5} {1,3,6,7}: on some ranks they share one
rank."""
UNEVEN = World(6, (((2, 3), tuple(range(6))),), (), (((0, 3), (1, 2, 4, 5)),))


def nested(axis: int, other: int, op: str = "sum") -> tuple[Step, ...]:
    return (Step("nested", 0, 1, axis, other, op, 2.0),)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "axis", "other", "op"),
    [
        (CUBE, 3, 4, "sum"),
        (CUBE, 4, 3, "avg"),
        (CUBE, 1, 5, "max"),
        rarely(CUBE, 5, 1, "sum"),
        rarely(CUBE, 2, 3, "avg"),
        rarely(CUBE, 1, 2, "max"),
        (TWO, 1, 2, "avg"),
        rarely(TWO, 4, 3, "sum"),
        rarely(TURNED, 1, 2, "sum"),
        (TURNED, 4, 2, "avg"),
        rarely(TURNED, 1, 3, "max"),
    ],
)
def test_sums_over_groups_that_meet_in_one_rank_each_become_one(world, axis, other, op):
    assert prove(world, nested(axis, other, op)) == ["nested groups"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "axis", "other"),
    [
        (CUBE, 4, 2),  # a flattened dimension, then one that it contains
        rarely(CUBE, 2, 4),
        (CUBE, 4, 5),  # two flattened ones that share a dimension
        (CUBE, 1, 3),  # four ranks for which there is no group
        rarely(CUBE, 0, 1),
        rarely(CUBE, 1, 1),
        rarely(TWO, 2, 4),  # {0,1,2,3} contains {0,1}
        rarely(TWO, 1, 3),  # {0,4}, then {0,2,4,6}
        (TURNED, 1, 4),  # the same ranks under two names
        (CROOKED, 2, 4),  # right on some ranks, wrong on others
        rarely(CROOKED, 4, 2),
        (UNEVEN, 1, 3),
        rarely(UNEVEN, 2, 3),
    ],
)
def test_others_stay_as_they_are(world, axis, other):
    assert prove(world, nested(axis, other)) == []


@pytest.mark.slow
def test_two_meshes_with_the_same_ranks_in_a_group():
    """tp = {0,1} of one mesh and ep = {0,1} of another, over four ranks."""
    world = World(4, (((2, 2), (0, 1, 2, 3)), ((2, 2), (0, 1, 2, 3))), (), ())
    assert prove(world, nested(2, 4)) == []
    assert prove(world, nested(2, 3)) == ["nested groups"]  # both are completely known


def test_rank_outside_a_mesh_and_a_mesh_of_a_group_that_is_gone():
    """Nothing is known of either: the mesh has no entry for this rank, or for these groups."""
    with as_rank(0, 4):
        elsewhere = DeviceMesh("cpu", torch.tensor([[2], [3]]), mesh_dim_names=("a", "b"))
        whole = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
        known = partitions()
        names = [whole.get_group(dim).group_name for dim in range(2)]
        assert set(names) <= set(known)
        assert not any({2, 3} in blocks for blocks in known.values() if len(blocks) < 2)
        assert elsewhere.get_coordinate() is None
    with as_rank(0, 4):  # the names are reused, for groups of the same ranks here
        for blocks in ([0, 2], [1, 3]), ([0, 1], [2, 3]):
            for ranks in blocks:
                dist.new_group(ranks)
        assert not set(names) & set(partitions())
    assert whole.ndim == 2  # it exists all the time


def test_groups_made_by_hand_are_not_known_whole():
    blocks = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert prove(World(4, (), (), blocks), nested(1, 2)) == []


@pytest.mark.every
def test_every_rule_is_met():
    """Run the same proof for systematic programs, so that it is known which rules have been
    proved."""
    steps = {
        "sum of sums": Step("sums", 0, 1, 2, 0, "sum", -3.0),
        "scattered": Step("scattered", 0, 0, 2, 0, "sum", 1.0),
        "gather of scatter": Step("gather of scatter", 0, 0, 5, 0, "sum", 1.0),
        "own part": Step("own part", 0, 0, 1, 0, "sum", 2.0),
        "same": Step("equal", 0, 0, 4, 0, "max", 1.0),
        "gather then narrow": Step("narrow", 0, 0, 3, 0, "sum", 2.0),
        "widen then reduce": Step("widen", 0, 0, 3, 0, "sum", 1.0),
        "expand": Step("expand", 0, 0, 0, 0, "sum", 1.0),
        "constant": Step("zeros", 0, 0, 2, 0, "sum", 1.0),
        "nested groups": nested(3, 4)[0],
    }
    met = {rule.partition(",")[0] for step in steps.values() for rule in prove(CUBE, (step,))}
    assert set(steps) <= met, set(steps) - met
