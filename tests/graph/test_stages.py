"""Stages agree with the inserted graph: the same steps, bytes and dependencies."""

from __future__ import annotations

import pytest
import torch
from graphs import trace
from tiers import crossed, sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import commpass
from commpass import Policy, Rule
from commpass.collectives import (
    Payload,
    Request,
    algorithm,
    algorithms_of,
    read_stages,
    record_stages,
)
from commpass.passes import PASSES, GraphInput, run
from commpass.passes.fx.marks import MARK
from commpass.plan.stage import Stage

ops = torch.ops._c10d_functional
RANKS = 4
SITES = {
    "all_reduce": lambda x: ops.all_reduce(x, "sum", "0"),
    "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", RANKS, "0"),
    "all_gather": lambda x: ops.all_gather_into_tensor(x, RANKS, "0"),
    "all_to_all": lambda x: ops.all_to_all_single(x, [8] * RANKS, [8] * RANKS, "0"),
    "broadcast": lambda x: ops.broadcast(x, 0, "0"),
}
MORE = [
    ("all_reduce", "two_shot(stage=ag)"),
    ("all_reduce", "two_shot(shards=3)"),
    ("all_reduce", "hierarchical(node=2)"),
    ("reduce_scatter", "semi_ring(shards=2)"),
    ("all_gather", "direct(shards=2)"),
]
CASES = [
    (kind, each.spec)
    for kind in SITES
    for each in algorithms_of(kind)
    if each.name not in ("sparse", "hierarchical", "native")
] + MORE
NATIVE = [((kind, "native"), "bf16") for kind in ("all_reduce", "reduce_scatter")]
CODECS = ["int8", "rotated", "int4(block=64)", "exponent"]


def coded_graph(kind: str, spec: str, code: str, dtype: torch.dtype):
    """Return the plan of a graph with one site, and its graph with coded operators."""
    x = torch.ones(8 * RANKS, 48, dtype=dtype)
    gm = trace(lambda x: ops.wait_tensor(SITES[kind](x)), x, dynamic=True)
    policy = Policy(rules=[Rule(codec=code, algorithm=spec, force=True)])
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=commpass.ethernet(1))
    before_lower = PASSES[: [step.name for step in PASSES].index("lower")]
    outcome = run(road, "0", before_lower)
    assert outcome.error is None, outcome.error
    (site,) = outcome.plan.sites
    return site, gm


def stages_of_graph(gm) -> list[tuple]:
    """Return (role, after) of each step in a graph, from its nodes, and the bytes of exchanges.

    ``after`` are the steps that it depends on, through any number of nodes.
    """
    found: list[tuple] = []
    made_by: dict = {}
    for node in gm.graph.nodes:
        after = sorted({n for source in node.all_input_nodes for n in made_by.get(source, ())})
        mark = node.meta.get(MARK)
        role = mark.role if mark else ""
        if role in ("encode", "decode", "sum", "enter", "leave", "exchange"):
            value = node.all_input_nodes[0].meta["val"]
            nbytes = value.numel() * value.itemsize if role == "exchange" else 0
            found.append((role, nbytes, tuple(after)))
            after = [len(found) - 1]
        made_by[node] = tuple(after)
    return found


def all_before(steps, after) -> set[int]:
    """Return the steps that come before one, directly or through others."""
    return set(after).union(*(all_before(steps, steps[number][2]) for number in after))


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("case", "code"),
    sampled(
        [*crossed(CASES, CODECS), *NATIVE],
        [*crossed(CASES, [c for c in CODECS if c != "exponent"]), *NATIVE],
    ),
)
def test_stages_are_the_steps_of_the_spliced_graph(case, code, fake_group):
    fake_group(RANKS)
    site, gm = coded_graph(*case, code, torch.float32)
    coder = commpass.codec(code)
    said = [(stage.role, stage.nbytes, stage.after) for stage in site.stages]
    seen = stages_of_graph(gm)
    if coder.dynamic:  # bytes depend on values
        said, seen = (
            [(role, all_before(some, after)) for role, _, after in some] for some in (said, seen)
        )
    assert said == seen
    assert {stage.codec for stage in site.stages if stage.role == "encode"} == {coder.spec}


@pytest.mark.parametrize("code", ["topk", "dgc"])
def test_stages_of_a_codec_with_state(code):
    found = read_stages("all_reduce", "sparse", code, Payload(4096, 64, torch.float32), request(8))
    assert [(stage.role, stage.after) for stage in found] == [
        ("encode", ()),
        ("decode", (0,)),
        ("exchange", (0,)),
        ("decode", (2,)),
    ]


def request(ranks: int, **more) -> Request:
    return Request("0", ranks, **more)


SYMBOLIC = [case for case in CASES if case[0] != "all_to_all"]
"""The splits of an all-to-all are numbers, or separate symbols."""


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("case", "code"), [*crossed(SYMBOLIC, ["int8", "rotated"]), *NATIVE], ids=str
)
def test_sizes_may_be_symbolic(case, code):
    kind, spec = case
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.ones(64, 48), symbolic_context=sizes)
    found = record_stages(algorithm(kind, spec), commpass.codec(code), x, request(RANKS))
    for many in (64, 128):
        numbers = {x.shape[0].node.expr: many}
        fixed = read_stages(kind, spec, code, Payload(many * 48, 48, torch.float32), request(RANKS))
        assert [valued(stage, numbers) for stage in found] == [valued(s, {}) for s in fixed]
    assert any(isinstance(stage.nbytes, torch.SymInt) for stage in found)


def valued(stage: Stage, numbers: dict) -> tuple:
    def number(value):
        return int(value.node.expr.subs(numbers)) if isinstance(value, torch.SymInt) else value

    sizes = (stage.values, stage.nbytes, stage.leaving)
    return stage.role, stage.codec, stage.peers, stage.after, *map(number, sizes)


@pytest.mark.parametrize("first", ["static", "sizes"])
def test_bytes_that_depend_on_values_alone_are_dynamic(first):
    payload = Payload(1 << 16, 64, torch.bfloat16)
    spec = f"two_shot(first={first})"
    found = read_stages("all_reduce", spec, "exponent", payload, request(4)).exchanges
    assert [stage.dynamic for stage in found] == [False, True] * 2
    every = read_stages("all_reduce", spec, "exponent", payload, request(4)).stages
    first, second = [number for number, stage in enumerate(every) if stage.role == "exchange"][:2]
    assert first in every[second].after  # its sizes are read from what arrived
    plain = read_stages("all_reduce", "two_shot", "int8", payload, request(4))
    assert not any(stage.dynamic for stage in plain)
    assert found[1].nbytes > 0


@pytest.mark.parametrize("first", ["static", "sizes"])
def test_rows_that_are_too_short_to_be_coded_are_one_exchange(first):
    """Fewer than 128 values are not coded: no second exchange, and no sizes before it."""
    for numel, exchanges in ((1, 1), (127, 1), (128, 2)):
        payload, spec = Payload(numel, numel, torch.bfloat16), f"direct(first={first})"
        found = read_stages("all_gather", spec, "exponent", payload, request(4)).exchanges
        assert len(found) == exchanges
        assert [stage.dynamic for stage in found][1:] == [True] * (exchanges - 1)


@pytest.mark.parametrize("ranks", [8, 16])
def test_hops_inside_a_node_are_those_to_ranks_that_follow_one_another(ranks):
    payload = Payload(1 << 16, 64, torch.bfloat16)
    for spec in ("hierarchical(node=4)", "hierarchical(node=2)"):
        inner, outer, gather = read_stages(
            "all_reduce", spec, "int8", payload, request(ranks)
        ).exchanges
        assert [each.reach == "block" for each in (inner, outer, gather)] == [True, False, False]
        node = int(spec[-2])
        assert (inner.peers, outer.peers) == (node - 1, ranks // node - 1)
        assert inner.leaving == inner.nbytes // node * (node - 1)
    for spec in ("two_shot", "ring", "semi_ring", "one_shot"):
        found = read_stages("all_reduce", spec, "int8", payload, request(ranks)).exchanges
        assert not any(stage.reach == "block" for stage in found)


@pytest.mark.parametrize("ranks", [64, 1024])
def test_large_groups(ranks):
    payload = Payload(ranks * 4096, 4096, torch.bfloat16)
    scattered, gathered = read_stages(
        "all_reduce", "two_shot", "int8", payload, request(ranks)
    ).exchanges
    row = commpass.codec("int8").wire_bytes(4096, torch.bfloat16)
    assert (scattered.peers, scattered.leaving) == (ranks - 1, row * (ranks - 1))
    assert gathered.nbytes == row


def test_stage_needs_no_group_and_sends_nothing():
    """Plans are made before, and without, ranks."""
    assert not torch.distributed.is_initialized()
    found = read_stages("all_gather", "direct", "int8", Payload(512, 1, torch.float32), request(3))
    assert [stage.role for stage in found] == ["encode", "exchange", "decode"]


@pytest.mark.parametrize("splits", [(2, 2, 2), (2, 1, 3)])
def test_rank_whose_parts_are_even_exchanges_as_often_as_one_whose_parts_are_not(splits):
    """Only the latter cannot be sent in chunks."""
    request = Request("0", 3, sent=splits, received=splits)
    payload = Payload(6 * 600, 600, torch.float32)  # 600 values do not fill whole blocks
    found = read_stages("all_to_all", "direct(chunks=2)", "int8", payload, request)
    assert [stage.kind for stage in found.exchanges] == ["all_to_all"]
