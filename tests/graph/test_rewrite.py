"""rewrite and verify on traced graphs: what is inserted for any number of ranks, and what must not
be changed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from graphs import code, collectives, ops, trace
from tiers import crossed, rarely, sampled, thinned
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import commpass
from commpass.passes import manager, rewrite
from commpass.passes.failures import SiteFailure
from commpass.passes.fx.parse import is_wait
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
SLOW = commpass.ethernet(0.01)
"""A link so slow that every codec pays."""
STAGES = ("", "(stage=ag)", "(stage=rs)")
HOPS = ["ring", "semi_ring"]
CASES = {
    "all_reduce": (
        lambda ranks: lambda x: wait(ops.all_reduce(x * 2, "sum", "0")) + 1,
        [
            "one_shot",
            "one_shot(shards=3)",
            "two_shot(shards=2)",
            *(name + stage for name in ("two_shot", *HOPS) for stage in STAGES),
            "hierarchical(node=4)",
            "hierarchical(node=4, stage=ag)",
            "hierarchical(node=4, stage=rs)",
            "hierarchical(between=int4, node=4)",
        ],
    ),
    "all_gather": (
        lambda ranks: lambda x: wait(ops.all_gather_into_tensor(x * 2, ranks, "0")) + 1,
        ["direct", "direct(shards=2)"],
    ),
    "reduce_scatter": (
        lambda ranks: lambda x: wait(ops.reduce_scatter_tensor(x * 2, "avg", ranks, "0")) + 1,
        ["direct", *HOPS, "hierarchical(node=4)", "hierarchical(between=int4, node=4)"],
    ),
    "all_to_all": (
        lambda ranks: lambda x: exchange(x * 2, [3] * ranks, [3] * ranks) + 1,
        ["direct", "direct(shards=2)"],
    ),
    "broadcast": (
        lambda ranks: lambda x: wait(ops.broadcast(x * 2, 1, "0")) + 1,
        ["direct", "direct(shards=2)"],
    ),
}


def exchange(x, sent, received):
    return wait(ops.all_to_all_single(x, received, sent, "0"))


def forced(codec="int8", **more):
    return Policy(rules=[Rule(codec=codec, force=True, **more)])


def fits(algorithm, ranks):
    """Return whether the algorithm is supported: hierarchies need several nodes, and rings at most
    64 hops."""
    name = algorithm.partition("(")[0]
    return ranks > 4 if name == "hierarchical" else ranks <= 64 if name in HOPS else True


def hops_of(kind, algorithm, ranks):
    """Return the exchanges of a graph, in order."""
    name = algorithm.partition("(")[0]
    # with splits, entries of 40 values are sent in parts, which have no shards
    if kind == "all_to_all":
        return [kind]
    if "shards" in algorithm:  # side data, then each shard's codes
        shards = int(algorithm[-2])
        return [hop for hop in hops_of(kind, name, ranks) for _ in range(1 + shards)]
    if name == "direct":
        return ["all_to_all" if kind == "reduce_scatter" else kind]
    if name == "one_shot":
        return ["all_gather"]
    hops = {"two_shot": 1, "ring": ranks - 1, "semi_ring": ranks // 2, "hierarchical": 2}[name]
    return ["all_to_all"] * hops + ["all_gather"] * (kind == "all_reduce")


SIZES = [
    (kind, name, n)
    for kind, (_, names) in CASES.items()
    for name in names
    for n in (2, 8, 64, 1024)
    if fits(name, n)
]


def is_short(case) -> bool:
    """Return whether the graph is short: graphs of rings are as long as the ring."""
    _, name, n = case
    return n == 8 or (n == 1024 and "ring" not in name)


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "algorithm", "ranks"), sampled(SIZES, is_short))
def test_wire_dtype_and_bytes_are_the_plans_at_any_number_of_ranks(
    kind, algorithm, ranks, fake_group
):
    fake_group(ranks)
    gm = trace(CASES[kind][0](ranks), torch.ones(ranks * 3, 40))
    shape = value(gm)
    plan = commpass.rewrite(gm, [], forced(algorithm=algorithm), strict=True)
    (site,) = plan.sites
    assert (site.codec, site.algorithm) == ("int8", algorithm)
    sent = collectives(gm)
    assert {dtype for _, dtype, _ in sent} == {torch.uint8}
    assert sum(size for _, _, size in sent) == site.wire_bytes
    assert site.dynamic_bytes == 0
    assert [kind for kind, _, _ in sent] == hops_of(kind, algorithm, ranks)
    assert value(gm) == shape


def value(gm):
    """Return (shape, dtype) of a graph's result."""
    out = gm.graph.output_node().args[0].meta["val"]
    return tuple(out.shape), out.dtype


SPLITS = {
    "even": (lambda ranks: [3] * ranks, lambda ranks: [3] * ranks),
    "sent unevenly": (lambda ranks: [2, 4] * (ranks // 2), lambda ranks: [3] * ranks),
    "received unevenly": (
        lambda ranks: [3] * ranks,
        lambda ranks: [1 + rank % 5 for rank in range(ranks)],
    ),
    "less sent than received": (lambda ranks: [3] * ranks, lambda ranks: [4] * ranks),
    "nothing from some": (lambda ranks: [6, 0] * (ranks // 2), lambda ranks: [0, 5] * (ranks // 2)),
    "nothing received": (lambda ranks: [3] * ranks, lambda ranks: [0] * ranks),
}


# With uneven splits each rank's part is encoded separately if entries are short: 1024 of them take
# half a minute to trace.
@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("splits", "width", "ranks"), thinned(SPLITS, [None, 1, 40, 4096], [2, 16], one_in=2)
)
def test_wire_bytes_of_an_all_to_all_are_the_plans_whatever_its_splits(
    splits, width, ranks, fake_group
):
    fake_group(ranks)
    sent, received = (make(ranks) for make in SPLITS[splits])
    x = torch.ones(ranks * 3) if width is None else torch.ones(ranks * 3, width)
    gm = trace(lambda x: exchange(x * 2, sent, received) + 1, x)
    shape = value(gm)
    (site,) = commpass.rewrite(gm, [], forced(), strict=True).sites
    assert (site.codec, site.algorithm, site.splits) == (
        "int8",
        "direct",
        (tuple(sent), tuple(received)),
    )
    assert site.shape == tuple(x.shape)
    assert site.common_shape == tuple(x.shape[1:])
    hops = collectives(gm)
    assert [kind for kind, _, _ in hops] == ["all_to_all"]
    assert sum(size for _, _, size in hops) == site.wire_bytes
    assert value(gm) == shape == ((sum(received), *x.shape[1:]), torch.float32)


def test_long_entries_of_any_splits_are_rewritten_at_1024_ranks(fake_group):
    fake_group(1024)
    sent, received = [2, 4] * 512, [4, 2] * 512
    gm = trace(
        lambda x: exchange((x * 2).expand(3072, 4096), sent, received) + 1, torch.ones(3072, 1)
    )
    (site,) = commpass.rewrite(gm, [], forced(), strict=True).sites
    assert [size for _, _, size in collectives(gm)] == [site.wire_bytes] == [3072 * (4096 + 128)]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("algorithm", ["direct(shards=2)", "direct(shards=3)"])
def test_long_entries_go_in_micro_shards(algorithm, fake_group):
    fake_group(4)
    gm = trace(lambda x: exchange(x * 2, [1, 5, 0, 2], [3] * 4) + 1, torch.ones(8, 4096))
    (site,) = commpass.rewrite(gm, [], forced(algorithm=algorithm), strict=True).sites
    shards = int(algorithm[-2])
    codes = -(-4096 // shards // 256) * 256  # whole blocks, and up to 128 bytes of scales
    assert [(kind, size) for kind, _, size in collectives(gm)] == [
        ("all_to_all", 8 * shards * 128),
        *[("all_to_all", 8 * codes)] * shards,
    ]
    assert site.wire_bytes == 8 * shards * (codes + 128)


@pytest.mark.parametrize("algorithm", [name + stage for name in HOPS for stage in STAGES])
def test_ring_of_too_many_hops_leaves_the_graph_as_it_was(algorithm, fake_group):
    fake_group(1024)
    gm = trace(CASES["all_reduce"][0](1024), torch.ones(3072, 40))
    before = code(gm)
    (site,) = commpass.rewrite(gm, [], forced(algorithm=algorithm), strict=True).sites
    assert code(gm) == before
    assert site.codec == NONE
    assert f"{512 if 'semi' in algorithm else 1023} hops" in site.reason


def trace_with_sizes(function, x):
    """Like ``trace``, for codecs with sizes that depend on values."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        return make_fx(function, decomposition_table=select_decomp_table())(
            mode.from_tensor(x, static_shapes=True)
        )


SIZED = {
    "all_reduce": lambda x: wait(ops.all_reduce(x * 2, "sum", "0")),
    "all_gather": lambda x: wait(ops.all_gather_into_tensor(x * 2, 8, "0")),
    "reduce_scatter": lambda x: wait(ops.reduce_scatter_tensor(x * 2, "sum", 8, "0")),
    "all_to_all": lambda x: exchange(x * 2, [x.shape[0] // 8] * 8, [x.shape[0] // 8] * 8),
    "broadcast": lambda x: wait(ops.broadcast(x * 2, 1, "0")),
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dim", [0, rarely(1)])
@pytest.mark.parametrize("kind", SIZED)
def test_sizes_that_were_asked_of_a_result_stay_known_when_it_is_gone(kind, dim, fake_group):
    fake_group(8)
    gm = make_fx(SIZED[kind], decomposition_table=select_decomp_table(), tracing_mode="symbolic")(
        torch.ones(64, 41)
    )
    gone = next(node for node in gm.graph.nodes if is_wait(node)).args[0]
    with gm.graph.inserting_after(gone):  # as in AOTAutograd if a backward needs the size
        size = gm.graph.call_function(torch.ops.aten.sym_size.int, (gone, dim))
    size.meta["val"] = asked = gone.meta["val"].shape[dim]
    out = gm.graph.output_node()
    out.args = ((out.args[0], size),)
    gm.recompile()
    (site,) = commpass.rewrite(gm, [], forced(), strict=True).sites
    assert site.compressed
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt):
            args = torch.fx.map_arg(node.args, lambda arg: arg.meta["val"])
            assert node.target(*args) == node.meta["val"], node.format_node()
    assert gm.graph.output_node().args[0][1].meta["val"] == asked
    for rows in (8, 24):
        assert (
            gm(torch.ones(rows, 5))[1]
            == [rows * {"all_gather": 8}.get(kind, 1) // {"reduce_scatter": 8}.get(kind, 1), 5][dim]
        )


LOSSLESS = {
    "even": ([3, 3], [3, 3]),
    "received unevenly": ([3, 3], [2, 3]),
    "sent unevenly": ([1, 5], [3, 3]),
    "nothing to the first": ([0, 6], [3, 3]),
    "nothing to the last": ([6, 0], [3, 3]),
}


@pytest.mark.every
@pytest.mark.parametrize(
    ("splits", "first"),
    sampled(crossed(LOSSLESS, ["static", "sizes"]), [("received unevenly", "sizes")]),
)
def test_lossless_code_of_parts_is_two_exchanges_whatever_the_splits(splits, first, fake_group):
    fake_group(2)
    sent, received = LOSSLESS[splits]
    gm = trace_with_sizes(lambda x: exchange(x * 2, sent, received) + 1, torch.ones(6, 70))
    algorithm = "direct" if first == "static" else "direct(first=sizes)"
    (site,) = commpass.rewrite(gm, [], forced("exponent", algorithm=algorithm), strict=True).sites
    assert (site.codec, site.algorithm) == ("exponent", algorithm)
    fixed, depends = [size for _, _, size in collectives(gm)]
    static = sum(
        commpass.codec("exponent").parts(entries * 70, torch.float32)[0] for entries in sent
    )
    assert fixed == site.wire_bytes - site.dynamic_bytes == (static if first == "static" else 2 * 8)
    assert not isinstance(depends, int)
    assert value(gm) == ((sum(received), 70), torch.float32)


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "codec",
    [
        *("int8", "int4", "fp8", "fp8(form=e5m2)", "mxfp4", "nvfp4", "rotated", "rotated(bits=4)"),
        *("ecq(bits=4.5)", "ecq(bits=8)"),
    ],
)
def test_every_codec_is_traced_without_captured_tensors_and_shrinks_the_wire(codec, fake_group):
    fake_group(8)
    gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 1024))
    # The fastest may send more bytes: a codec with long computation gains by two_shot(stage=ag),
    # which codes half of the exchange.
    (site,) = commpass.rewrite(gm, [], forced(codec, algorithm="two_shot"), strict=True).sites
    bits = 4.6 if "4" in codec else 8.3
    parts, alignment = 8 + 1, 128  # of what a rank scatters and gathers; each is padded
    most = site.bytes / 4 * bits / 8 * (1 + 1 / 8) + parts * (alignment - 1)
    assert site.wire_bytes < most
    assert not gm.graph.find_nodes(op="get_attr")


def test_first_exchange_starts_where_the_collective_stood_and_the_rest_at_its_wait(
    fake_group,
):
    fake_group(8)

    def function(x, y):
        started = ops.all_reduce(x, "sum", "0")
        between = (y @ y).sin()
        return wait(started) + between

    gm = trace(function, torch.ones(64, 64), torch.ones(64, 64))
    commpass.rewrite(gm, [], forced(algorithm="two_shot"), strict=True)
    order = {node.name: index for index, node in enumerate(gm.graph.nodes)}
    start = next(order[node.name] for node in gm.graph.nodes if "all_to_all" in str(node.target))
    first_wait = next(order[node.name] for node in gm.graph.nodes if is_wait(node))
    assert start < order["mm"] < order["sin"] < first_wait


def test_metadata_is_carried_over_and_every_inserted_node_has_a_value_of_its_own(fake_group):
    fake_group(8)
    gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 64))
    collective = next(node for node in gm.graph.nodes if "all_reduce" in str(node.target))
    collective.meta |= {
        "stack_trace": "model.py",
        "nn_module_stack": {"a": ("L['self'].mlp", torch.nn.Linear)},
        "custom": {"x": 1},
    }
    (site,) = commpass.rewrite(gm, [], forced(), strict=True).sites
    assert site.module == "mlp"
    inserted = [node for node in gm.graph.nodes if "commpass" in node.meta]
    assert len(inserted) > 10
    for node in inserted:
        assert node.meta["commpass"].site == site.name
        assert node.meta["stack_trace"] == "model.py"
        assert node.meta["custom"] == {"x": 1}
        assert "val" in node.meta
    assert len({id(node.meta["val"]) for node in inserted}) == len(inserted)


def test_equal_sites_are_traced_once(fake_group, monkeypatch):
    fake_group(8)
    from commpass.passes import template as module

    traced = []
    real = module.trace
    monkeypatch.setattr(module, "trace", lambda *args: traced.append(1) or real(*args))

    def function(x):
        for _ in range(5):
            x = wait(ops.all_reduce(x * 2, "sum", "0"))
        return x

    gm = trace(function, torch.ones(64, 64))
    assert len(commpass.rewrite(gm, [], forced(), strict=True).compressed) == 5
    assert len(traced) == 1


def test_all_waits_of_a_collective_are_replaced(fake_group):
    fake_group(8)

    def function(x):
        started = ops.all_reduce(x * 2, "sum", "0")
        return wait(started) + 1, wait(wait(started)) * 2

    gm = trace(function, torch.ones(64, 64))
    commpass.rewrite(gm, [], forced(algorithm="two_shot"), strict=True)
    assert [kind for kind, _, _ in collectives(gm)] == ["all_to_all", "all_gather"]
    assert sum(is_wait(node) for node in gm.graph.nodes) == 2


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_chosen_parts_alone_are_taken_out_of_a_coalesced_collective(kept, fake_group):
    fake_group(8)

    def function(x):
        started = ops.all_reduce_coalesced([x, (x + 1).bfloat16(), x.repeat(2, 1)], "sum", "0")
        return [wait(y) * 2 for y in started]

    gm = trace(function, torch.ones(64, 64))
    small = [
        Rule(keep=True, module="**", min_bytes=size)
        for size in ([64 * 64 * 8, 0, 0][kept],)
        if kept == 0
    ]
    policies = {
        0: Policy(rules=[*small, Rule(codec="int8", force=True)]),  # the largest stays uncompressed
        1: Policy(rules=[Rule(codec="int8", force=True)]),  # none does
        2: Policy(rules=[Rule(codec="int8", force=True, min_bytes=64 * 64 * 8)]),  # two do
    }
    plan = commpass.rewrite(gm, [], policies[kept], strict=True)
    expected = {0: [True, True, False], 1: [True] * 3, 2: [False, False, True]}[kept]
    assert [site.compressed for site in plan] == expected
    left = [size for kind, dtype, size in collectives(gm) if dtype != torch.uint8]
    assert left == [site.bytes for site in plan if not site.compressed]
    shapes = [tuple(value.meta["val"].shape) for value in gm.graph.output_node().args[0]]
    assert shapes == [(64, 64), (64, 64), (128, 64)]


def test_rest_of_a_coalesced_collective_takes_its_own_results(fake_group):
    fake_group(8)

    def function(x):
        given = [x, x.repeat(2, 1), x.repeat(4, 1), x.repeat(3, 1)]
        started = ops.all_reduce_coalesced(given, "sum", "0")
        return [wait(y) * 2 for y in started]

    gm = trace(function, torch.ones(64, 64))
    policy = Policy(rules=[Rule(codec="int8", force=True, min_bytes=64 * 64 * 4 * 4)])
    plan = commpass.rewrite(gm, [], policy, strict=True)
    assert [site.compressed for site in plan] == [False, False, True, False]
    (left,) = (node for node in gm.graph.nodes if "coalesced" in str(node.target))
    taken = {item.args[1]: item.meta["val"].shape[0] for item in left.users}
    assert taken == {0: 64, 1: 128, 2: 192}
    assert [value.shape[0] for value in left.meta["val"]] == [64, 128, 192]
    assert [node.meta["val"].shape[0] for node in left.args[0]] == [64, 128, 192]


def test_waits_for_several_tensors_at_once_lose_only_the_parts_that_were_replaced(
    fake_group, wait_tensors
):
    fake_group(8)

    def function(x):
        started = ops.all_reduce_coalesced([x, x.repeat(2, 1)], "sum", "0")
        first, second = wait_tensors(started)
        return first * 2, second * 3

    gm = trace(function, torch.ones(64, 64))
    plan = commpass.rewrite(
        gm, [], Policy(rules=[Rule(codec="int8", force=True, min_bytes=64 * 64 * 8)]), strict=True
    )
    assert [site.compressed for site in plan] == [False, True]
    assert [size for _, dtype, size in collectives(gm) if dtype == torch.float32] == [64 * 64 * 4]


def test_forms_in_place_and_out_still_change_the_tensor_that_others_see(fake_group):
    fake_group(8)

    def function(x, out):
        y = x * 2
        wait(ops.all_reduce_(y, "sum", "0"))
        wait(ops.all_gather_into_tensor_out(x, 8, "0", out=out))
        return y + 1, out + 1

    gm = trace(function, torch.ones(64, 64), torch.ones(512, 64))
    plan = commpass.rewrite(gm, [], forced(), strict=True)
    assert [site.compressed for site in plan] == [True, True]
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}
    copied = [
        node.args[0].name for node in gm.graph.nodes if node.target is torch.ops.aten.copy_.default
    ]
    assert copied == ["mul", "out_1"]


MUST_NOT = {
    "max": lambda x: wait(ops.all_reduce(x * 2, "max", "0")),
    "product": lambda x: wait(ops.all_reduce(x * 2, "product", "0")),
    "integers": lambda x: wait(ops.all_reduce(x.int(), "sum", "0")),
    "bools": lambda x: wait(ops.all_gather_into_tensor(x > 0, 8, "0")),
    "complex": lambda x: wait(ops.all_reduce(x.to(torch.complex64), "sum", "0")),
    "not waited for": lambda x: ops.all_reduce(x * 2, "sum", "0"),
    "empty": lambda x: wait(ops.all_reduce(x[:0], "sum", "0")),
}


@pytest.mark.parametrize("name", MUST_NOT)
def test_graphs_that_must_not_be_rewritten(name, fake_group):
    fake_group(8)
    gm = trace(MUST_NOT[name], torch.ones(64, 64))
    before = code(gm)
    plan = commpass.rewrite(gm, [], forced(), strict=True)
    assert code(gm) == before
    assert [site.codec for site in plan] == [NONE]
    assert plan.sites[0].reason
    assert plan.sites[0].wire_bytes == plan.sites[0].bytes


def test_group_of_one_rank_sends_nothing_and_is_left_alone(fake_group):
    fake_group(1)
    gm = trace(CASES["all_reduce"][0](1), torch.ones(64, 64))
    before = code(gm)
    policy = Policy(rules=[Rule(codec="int8", force=True)], skip="simplify")
    (site,) = commpass.rewrite(gm, [], policy, strict=True).sites
    assert code(gm) == before
    assert "one rank" in site.reason


def test_off_and_lossless_leave_every_graph_exactly_as_it_was(fake_group):
    fake_group(8)
    for policy in ("off", "lossless"):
        gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 64))
        before = code(gm)
        plan = commpass.rewrite(gm, [], policy, profile=SLOW, strict=True)
        assert code(gm) == before
        assert policy in plan.sites[0].reason


def test_several_groups_of_a_mesh_take_the_rules_of_their_own(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    names = {name: mesh.get_group(name).group_name for name in ("dp", "tp")}

    def function(x):
        return wait(ops.all_reduce(x, "sum", names["dp"])) + wait(
            ops.all_reduce(x * 2, "sum", names["tp"])
        )

    gm = trace(function, torch.ones(64, 64))
    plan = commpass.rewrite(
        gm,
        [],
        Policy(rules=[Rule(group="tp", codec="fp8", algorithm="two_shot", force=True)]),
        strict=True,
    )
    assert [(site.group_label, site.codec) for site in plan] == [("dp", "none"), ("tp", "fp8")]
    groups = [node.args[-1] for node in gm.graph.nodes if "all_" in str(node.target)]
    assert groups == [names["dp"], names["tp"], names["tp"]]


def test_failing_pass_leaves_the_graph_as_it_was_and_says_why(fake_group, monkeypatch):
    fake_group(8)

    def fail(road):
        rewrite.run(road)
        raise RuntimeError("injected")

    passes = tuple(
        dataclasses.replace(p, run=fail) if p.name == "rewrite" else p for p in manager.PASSES
    )
    monkeypatch.setattr(manager, "PASSES", passes)
    gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 64))
    before = code(gm)
    plan = commpass.rewrite(gm, [], forced())
    assert code(gm) == before
    assert plan.fallback == "pass 'rewrite' failed: RuntimeError: injected"
    assert plan.compressed == ()
    with pytest.raises(RuntimeError, match="injected"):
        commpass.rewrite(gm, [], forced(), strict=True)
    assert code(gm) == before


@pytest.mark.parametrize("name", ["discover", "candidates", "choose", "rewrite", "lower", "verify"])
def test_every_pass_can_be_left_out_by_name(name, fake_group):
    fake_group(8)
    gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 64))
    before = code(gm)
    plan = commpass.rewrite(
        gm, [], Policy(rules=[Rule(codec="int8", force=True)], skip=name), strict=True
    )
    assert (code(gm) == before) == (name != "verify")
    assert (name in plan.fallback) == (name != "verify")


def test_verify_catches_a_graph_that_is_not_what_its_plan_says(fake_group):
    from commpass.passes.verify import verify

    fake_group(8)
    gm = trace(CASES["all_reduce"][0](8), torch.ones(64, 64))
    plan = commpass.rewrite(gm, [], forced(algorithm="two_shot"), strict=True)
    verify(gm, plan.sites)
    wrong = {
        "bytes on the wire": [dataclasses.replace(plan.sites[0], wire_bytes=1)],
        "uncompressed": [dataclasses.replace(plan.sites[0], codec=NONE)],
        "nothing was inserted": [*plan.sites, dataclasses.replace(plan.sites[0], name="other")],
    }
    for text, sites in wrong.items():
        with pytest.raises(SiteFailure, match=text):
            verify(gm, sites)
    start = next(node for node in gm.graph.nodes if "all_to_all" in str(node.target))
    start.args[0].meta["val"] = start.args[0].meta["val"].float()
    with pytest.raises(SiteFailure, match="float32, not bytes"):
        verify(gm, plan.sites)
    next(node for node in gm.graph.nodes if "commpass" in node.meta).meta.pop("val")
    with pytest.raises(SiteFailure, match="no fake value"):
        verify(gm, plan.sites)


def test_rewrite_gives_graphs_without_fake_values_their_own(fake_group):
    from torch import fx

    fake_group(8)

    class Plain(torch.nn.Module):
        def forward(self, x):
            return ops.wait_tensor.default(
                ops.all_reduce.default(torch.ops.aten.mul.Tensor(x, 2), "sum", "0")
            )

    gm = fx.symbolic_trace(Plain())
    (site,) = commpass.rewrite(gm, [torch.ones(64, 64)], forced(), strict=True).sites
    assert site.compressed
    assert site.shape == (64, 64)


@pytest.mark.slow
def test_codecs_tables_stand_once_in_a_graph(fake_group):
    fake_group(8)

    def function(x):
        for _ in range(6):
            x = wait(ops.all_reduce(x * 2, "sum", "0"))
        return x

    gm = trace(function, torch.ones(64, 64))
    assert len(commpass.rewrite(gm, [], forced("rotated"), strict=True).compressed) == 6
    tables = [
        (node.args, tuple(node.kwargs.items()))
        for node in gm.graph.nodes
        if "iota" in str(node.target)
    ]
    assert len(tables) == len(set(tables)) > 0


@pytest.mark.slow
def test_collective_of_a_collectives_result(fake_group):
    fake_group(8)

    def function(x):
        y = wait(ops.all_reduce(x, "sum", "0"))
        return wait(
            ops.reduce_scatter_tensor(wait(ops.all_gather_into_tensor(y, 8, "0")), "sum", 8, "0")
        )

    gm = trace(function, torch.ones(64, 64))
    assert len(commpass.rewrite(gm, [], forced(), strict=True).compressed) == 3
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}
