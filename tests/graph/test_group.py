"""group: what is fused, similar graphs that must not be, and the plan's report."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from everywhere import everywhere, same
from graphs import code, collectives, ops, trace
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import CheckpointPolicy

import commpass
from commpass.codecs import codec
from commpass.costmodel import Link, Profile
from commpass.costmodel.kernels import CPU
from commpass.errors import PolicyError
from commpass.passes.fx.parse import parse
from commpass.plan import Plan, diff
from commpass.policy import Policy
from commpass.policy.paths import common
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS = 4
FAST = commpass.ethernet(10)
"""A link on which messages take time, and a few bytes hardly any."""


def ar(x, op="sum", group="0"):
    return ops.all_reduce(x, op, group)


def ag(x, group="0"):
    return ops.all_gather_into_tensor(x, RANKS, group)


def rs(x, op="sum", group="0"):
    return ops.reduce_scatter_tensor(x, op, RANKS, group)


def both(start, other=None):
    """Two collectives of small tensors, both started before the first is used."""

    def function(x, y):
        one, two = start(x.sin()), (other or start)(y.cos())
        return wait(one) + 1, wait(two) + 1

    return function


X, Y = torch.arange(96.0).reshape(8, 12), torch.arange(20.0).reshape(4, 5)


def grouped(function, *inputs, profile=FAST, inplace=None, **policy):
    """Return (graph, plan) of a function; ``inplace`` changes the graph before the passes."""
    gm = trace(function, *(inputs or (X, Y)))
    if inplace is not None:
        inplace(gm)
    return gm, commpass.rewrite(gm, [], Policy(**policy), profile=profile, strict=True)


def count(gm):
    return len(collectives(gm))


@pytest.fixture(autouse=True)
def world(fake_group):
    fake_group(RANKS)


# --- what is fused --------------------------------------------------------------------------------

FUSED = {
    "all_reduce": (both(ar), "all_reduce", (116,)),
    "all_reduce, mean": (both(lambda x: ar(x, "avg")), "all_reduce", (116,)),
    "all_reduce, largest": (both(lambda x: ar(x, "max")), "all_reduce", (116,)),
    "all_gather": (both(ag), "all_gather", (116,)),
    "reduce_scatter": (both(rs), "reduce_scatter", (116,)),
    "a number": (both(lambda x: ar(x.sum())), "all_reduce", (2,)),
    "of a turned input": (both(lambda x: ar(x.t())), "all_reduce", (116,)),
}


@pytest.mark.parametrize("name", FUSED)
def test_small_sites_that_do_the_same_are_one(name):
    function, kind, shape = FUSED[name]
    gm, plan = grouped(function)
    (site,), (fused,) = plan.sites, plan.grouped
    assert (count(gm), site.kind, site.shape, fused.into) == (1, kind, shape, site.name)
    assert len(fused.sites) == 2
    assert fused.numbers == (0, 1)
    assert fused.group == "0"
    itemsize = 4
    numel = 1 if "number" in name else None
    assert fused.bytes == ((numel or 96) * itemsize, (numel or 20) * itemsize)
    assert "instead of" in fused.reason
    results = [node.meta["val"].shape for node in gm.graph.output_node().args[0]]
    before = trace(function, X, Y).graph.output_node().args[0]
    assert results == [node.meta["val"].shape for node in before]


PROGRAMS = {
    "all_reduce": (both(ar), {}),
    "all_gather": (both(ag), {}),
    "reduce_scatter": (both(rs), {}),
    "outputs": (lambda x, y: tuple(map(wait, (ar(x.sin()), ar(y.cos())))), {}),
    "gathered outputs": (lambda x, y: tuple(map(wait, (ag(x.sin()), ag(y.cos())))), {}),
    "filled up": (both(rs), {"codecs": "int8", "max_error": 0.0}),
    "filled up gathers": (both(ag), {"codecs": "int8", "max_error": 0.0}),
}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_get_the_bits_that_they_got_before(name):
    function, policy = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(x.shape, generator=generator) for x in (X, Y)] for _ in range(RANKS)]
    ranks = everywhere(lambda rank: function, inputs, Policy(**policy), FAST)
    assert all(len(plan.grouped) == 1 for plan in ranks.plans)
    assert len({plan.digest() for plan in ranks.plans}) == 1
    assert same(ranks)


def test_fused_site_gives_the_bits_of_its_codec_on_each_member():
    """Blocks never hold values of two members, so each result is that of a separate exchange."""
    rule = [Rule(codec="int8", algorithm=("two_shot", "direct"), force=True)]
    generator = torch.Generator().manual_seed(1)
    for start in (ar, ag, rs):
        # 512 values per rank: a single member is split between ranks at block boundaries
        inputs = [
            [torch.randn(2048, generator=generator) * 10**power for power in (0, 3)]
            for _ in range(RANKS)
        ]
        policies = [Policy(rules=rule, group_bytes=n) for n in (1 << 14, 0)]
        fused, alone = (
            everywhere(lambda rank, start=start: both(start), inputs, policy, FAST)
            for policy in policies
        )
        assert [len(plan.compressed) for plan in fused.plans] == [1] * RANKS
        assert [len(plan.compressed) for plan in alone.plans] == [2] * RANKS
        for got, wanted in zip(fused.got, alone.got, strict=True):
            assert all(map(torch.equal, got, wanted))


def test_members_are_filled_up_only_where_a_codec_may_lose_something():
    for codecs, values in (
        ((), 116),
        ("exponent", 116),
        ("int8", 512),
        ("int4", 512),
        ("int8(block=512)", 1024),
        (("exponent", "int8(block=96)"), 2 * 768),
    ):
        _, plan = grouped(both(ar), codecs=codecs, max_error=0.0)
        assert plan.sites[0].shape == (values,), codecs
    whole = lambda x, y: tuple(map(wait, (ar(x * 2), ar(y * 2))))  # noqa: E731
    _, plan = grouped(whole, X.int(), Y.int(), codecs="int8")
    assert plan.sites[0].shape == (116,)  # no codec supports integers


def test_outputs_have_memory_of_their_own():
    gm, _ = grouped(lambda x, y: tuple(map(wait, (ar(x.sin()), ar(y.cos())))))
    one, two = (node.meta["val"] for node in gm.graph.output_node().args[0])
    one, two = FakeTensorProp(gm, one.fake_mode).propagate_dont_convert_inputs(
        *(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    )
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert one.untyped_storage().nbytes() == 96 * 4


def test_one_wait_stands_where_the_first_is_used_and_the_start_where_the_last_was():
    def function(x, y):
        one = ar(x.sin())
        between = x.exp()
        two = ar(y.cos())
        after = y.exp()
        return wait(two) + 1, wait(one) + 2, between, after

    gm, plan = grouped(function)
    names = [str(node.target).partition(".")[0] + "." for node in gm.graph.nodes]
    order = [str(node.target) for node in gm.graph.nodes]
    at = {
        name: order.index(f"{name}.default") for name in ("aten.cos", "_c10d_functional.all_reduce")
    }
    assert len(plan.grouped) == 1
    assert names
    assert at["aten.cos"] < at["_c10d_functional.all_reduce"]
    exps = [place for place, name in enumerate(order) if name == "aten.exp.default"]
    waits = order.index("_c10d_functional.wait_tensor.default")
    assert exps[0] < at["_c10d_functional.all_reduce"] < exps[1] < waits


def test_sets_of_several_kinds_and_chains_of_sets_are_fused_apart():
    def function(x, y):
        one, a, two, b = ar(x.sin()), ag(x.cos()), ar(y.sin()), ag(y.cos())
        three, four = ar(wait(one).exp()), ar(wait(two))
        return wait(a) + 1, wait(b) + 1, wait(three) + 1, wait(four) + 1

    gm, plan = grouped(function)
    assert [site.kind for site in plan] == ["all_reduce", "all_gather", "all_reduce"]
    assert [each.numbers for each in plan.grouped] == [(0, 2), (1, 3), (4, 5)]
    assert count(gm) == 3
    gm.graph.lint()


# --- what is not changed --------------------------------------------------------------------------


def dependent(x, y):
    return wait(ar(wait(ar(x.sin())) + 1)) + 1


def used_between(x, y):
    one = wait(ar(x.sin()))
    other = one + 1
    return other, wait(ar(y.cos())) + 1


def through_others(x, y):
    """The second uses the first through another collective."""
    one = wait(ar(x.sin()))
    return wait(ar(wait(ag(one)))) + 1


def never_waited_for(x, y):
    ar(x.sin())
    return wait(ar(y.cos())) + 1


def taken_twice(x, y):
    one = ar(x.sin())
    return wait(one) + 1, one + 1, wait(ar(y.cos())) + 1


def written_result(x, y):
    one, two = wait(ar(x.sin())), wait(ar(y.cos()))
    one.add_(1)
    return one * 2, two * 2


NOT = {
    "dependent": dependent,
    "used between": used_between,
    "through others": through_others,
    "never waited for": never_waited_for,
    "taken before its wait": taken_twice,
    "a result that is written to": written_result,
    "other op": both(ar, lambda x: ar(x, "avg")),
    "other kind": both(ag, rs),
    "other dtype": both(ar, lambda x: ar(x.bfloat16())),
    "in place": both(lambda x: ops.all_reduce_(x, "sum", "0")),
    "all_to_all": both(lambda x: ops.all_to_all_single(x, [1] * RANKS, [1] * RANKS, "0")),
    "one rank": both(lambda x: ar(x, group="alone")),
}


@pytest.mark.parametrize("name", NOT)
def test_other_collectives_are_not_grouped(name):
    inputs = (Y, Y) if name == "all_to_all" else (X, Y)
    if name == "one rank":
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "one"))
        group = mesh.get_group("one").group_name
        function = both(lambda x: ar(x, group=group))
    else:
        function = NOT[name]
    before = code(trace(function, *inputs))
    gm, plan = grouped(function, *inputs, skip=("simplify", "move"))
    assert plan.grouped == ()
    assert code(gm) == before


def test_groups_of_two_meshes_stay_apart():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))

    def function(x, y):
        starts = [ar(t, group=group) for t in (x.sin(), y.cos()) for group in (dp, tp)]
        return [wait(start) + 1 for start in starts]

    _, plan = grouped(function)
    assert [(each.group, each.numbers) for each in plan.grouped] == [(dp, (0, 1)), (tp, (0, 1))]
    _, plan = grouped(both(lambda x: ar(x, group=dp), lambda x: ar(x, group=tp)))
    assert plan.grouped == ()


def between(gm, make):
    """Insert the result of ``make`` for the first input of a collective between the two starts."""
    first, second = (node for node in gm.graph.nodes if parse(node) is not None)
    with gm.graph.inserting_before(second):
        node = make(gm.graph, first.args[0])
    node.meta["val"] = first.args[0].meta["val"]


def add_one(graph, node):
    return graph.call_function(torch.ops.aten.add_.Tensor, (node, 1))


def add_one_to_a_view(graph, node):
    view = graph.call_function(torch.ops.aten.view.default, (node, [-1]))
    view.meta["val"] = node.meta["val"].view(-1)
    return graph.call_function(torch.ops.aten.add_.Tensor, (view, 1))


def anything(graph, node):
    def opaque(x):
        return x

    return graph.call_function(opaque, (node,))


@pytest.mark.parametrize("make", [add_one, add_one_to_a_view, anything])
def test_input_that_is_written_to_before_the_fused_start_stays_where_it_is(make):
    _, plan = grouped(both(ar), inplace=lambda gm: between(gm, make))
    assert plan.grouped == ()

    def read(graph, node):
        return graph.call_function(torch.ops.aten.add.Tensor, (node, 1))

    _, plan = grouped(both(ar), inplace=lambda gm: between(gm, read))
    assert len(plan.grouped) == 1


@pytest.mark.parametrize("make", [add_one, add_one_to_a_view])
def test_group_leaves_views_of_written_tensors_alone(make):
    viewed = both(lambda x: ar(x.view(-1)))
    write = lambda graph, node: make(graph, node.args[0])  # noqa: E731
    assert len(grouped(viewed)[1].grouped) == 1
    _, plan = grouped(viewed, inplace=lambda gm: between(gm, write))
    assert plan.grouped == ()


def test_input_that_is_written_to_afterwards_may_be_fused():
    def function(x, y):
        one, two = ar(x), ar(y)
        done = wait(one) + 1, wait(two) + 1
        x.copy_(done[0])
        return done

    assert len(grouped(function)[1].grouped) == 1


@pytest.mark.slow
def test_terms_that_differ_are_not_mixed_and_kept_stays_kept():
    def labelled(gm):
        nodes = [node for node in gm.graph.nodes if parse(node)]
        for node, path in zip(nodes, ("blocks.0.norm", "blocks.1.norm"), strict=True):
            node.meta["nn_module_stack"] = {path: (path, torch.nn.Module)}

    for said in ({"keep": True}, {"codec": "int4", "max_error": 0.2}, {"force": True}):
        rules = [Rule(module="blocks.0", **said)]
        _, plan = grouped(both(ar), inplace=labelled, codecs="int8", rules=rules)
        assert plan.grouped == ()
        assert [site.module for site in plan] == [
            "blocks.0.norm",
            "blocks.1.norm",
        ]
    rules = [Rule(module="blocks", keep=True)]
    _, plan = grouped(both(ar), inplace=labelled, codecs="int8", rules=rules)
    (site,) = plan
    assert (len(plan.grouped), site.module, site.codec) == (1, "blocks", "none")
    assert "rule 1" in site.reason


@pytest.mark.parametrize("spec", ["topk", "equarx", "nvfp4", "mixed", "ecq", "outlier(width=64)"])
def test_codec_that_looks_at_more_than_a_block_keeps_sites_apart(spec):
    _, plan = grouped(both(ar), codecs=spec)
    assert plan.grouped == ()
    assert len(plan.sites) == 2
    assert codec(spec).state is not None or not codec(spec).has_independent_blocks


@pytest.mark.parametrize(("between", "fused"), [("int8", 1), ("nvfp4", 0), ("ecq", 0)])
def test_codec_between_hosts_that_looks_at_more_than_a_block_keeps_sites_apart(between, fused):
    way = (f"hierarchical(node=2, between={between})",)
    _, plan = grouped(both(ar), codecs="int8", rules=[Rule(codec="int8", algorithm=way)])
    assert len(plan.grouped) == fused
    assert len(plan.sites) == 2 - fused


def test_symbolic_sizes_are_left_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        gm = make_fx(both(ar), tracing_mode="symbolic")(X, Y)
    plan = commpass.rewrite(gm, [], Policy(), profile=FAST, strict=True)
    assert all(site.dynamic for site in plan)
    assert len(plan.sites) == 2
    assert plan.grouped == ()


def test_recomputed_sites_are_left_alone():
    def tagged(gm):
        for node in gm.graph.nodes:
            if parse(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    assert grouped(both(ar), inplace=tagged)[1].grouped == ()


def test_message_between_two_ranks_parts_what_stands_around_it():
    if not hasattr(ops, "isend"):
        pytest.skip("this torch has no functional send")

    def function(x, y):
        one = ar(x.sin())
        wait(ops.isend(y, 1, 0, "0"))
        two = ar(y.cos())
        return wait(one) + 1, wait(two) + 1

    assert grouped(function)[1].grouped == ()


def test_sums_are_left_where_their_order_may_not_change():
    for start, many in ((ar, 0), (rs, 0), (ag, 1)):
        assert len(grouped(both(start), reassociate=False)[1].grouped) == many
    assert grouped(both(ar), skip="group")[1].grouped == ()
    assert commpass.rewrite(trace(both(ar), X, Y), [], "off", profile=FAST).grouped == ()
    assert len(commpass.rewrite(trace(both(ar), X, Y), [], "lossless", profile=FAST).grouped) == 1


# --- what pays ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_site_may_be_as_large_as_the_policy_says_and_all_four_times_that():
    _, plan = grouped(both(ar), group_bytes=96 * 4)
    assert len(plan.grouped) == 1
    assert grouped(both(ar), group_bytes=96 * 4 - 1)[1].grouped == ()
    assert grouped(both(ar), group_bytes=0)[1].grouped == ()

    def many(x, y):
        starts = [ar(x * number) for number in range(10)]
        return [wait(start) + 1 for start in starts]

    _, plan = grouped(many, group_bytes=96 * 4)
    assert [len(each.sites) for each in plan.grouped] == [4, 4, 2]


def test_gain_below_the_margin_is_none():
    """2 (P - 1) = 6 messages of alpha are saved, and the copies cost the time of the kernels."""
    kernels = dataclasses.replace(CPU, launch_us=0.0, gbytes_per_s=1e9)
    link = Link(alpha_us=10.0, gbytes_per_s=1.0)
    size = 2 * (RANKS - 1) / RANKS * (96 + 20) * 4 / 1e3
    share = 60 / (120 + size)
    for margin, many in ((share - 1e-3, 1), (share + 1e-3, 0)):
        profile = Profile("test", link, kernels=kernels, margin=margin)
        _, plan = grouped(both(ar), profile=profile)
        assert len(plan.grouped) == many
    dear = dataclasses.replace(kernels, launch_us=25.0)  # one for both inputs, one for each result
    assert grouped(both(ar), profile=Profile("test", link, kernels=dear))[1].grouped == ()
    slow = dataclasses.replace(kernels, gbytes_per_s=0.01)  # (96 + 20) * 4 bytes in, as many out
    assert grouped(both(ar), profile=Profile("test", link, kernels=slow))[1].grouped == ()


def test_large_member_does_not_keep_small_ones_apart():
    def function(x, y):
        starts = [ar(y.sin()), ar(x.exp()), ar(y.cos())]
        return [wait(start) + 1 for start in starts]

    slow = commpass.ethernet(0.1)  # 128 KiB take fifteen times as long as the messages
    _, plan = grouped(function, torch.ones(256, 128), Y, profile=slow)
    assert [each.numbers for each in plan.grouped] == [(0, 2)]


def layers(depth):
    """The gradients of a stack of linears, as in backward: two matmuls per layer."""

    def function(x, y):
        starts = []
        for _ in range(depth):
            weight = x.t() @ x
            starts += [ar(weight), ar(x.sum(0))]
            x = x @ weight
        return [wait(start) for start in starts]

    return function


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("delay", "sizes"), [(0, [2] * 6), (1, [2] * 6), (2, [4] * 3), (99, [12])])
def test_start_is_delayed_by_so_many_matmuls_at_most(delay, sizes):
    _, plan = grouped(layers(6), torch.ones(8, 8), Y, group_delay=delay)
    assert [len(each.sites) for each in plan.grouped] == sizes


def test_group_keeps_results_needed_much_earlier_apart():
    """Two gathers start together, and one of them is used three matmuls later."""

    def used(later):
        def function(x, y):
            one, two = ag(x), ag(y)
            total = wait(one).sum()
            for _ in range(later):
                total = total + (x @ x.t()).sum()
            return total, wait(two) * total

        return function

    for later, many in ((2, 1), (3, 0)):
        assert len(grouped(used(later))[1].grouped) == many


# --- reports --------------------------------------------------------------------------------------


def test_plan_says_it_and_ranks_agree_on_it():
    _, plan = grouped(both(ar))
    _, plain = grouped(both(ar), group_bytes=0)
    assert plan.changed
    assert not plain.changed
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.of_group("0").grouped == plan.grouped
    assert plan.of_group("1").grouped == ()
    other = dataclasses.replace(plan.grouped[0], numbers=(0, 2))
    moved = dataclasses.replace(plan, grouped=(other,))
    assert moved.digest() != plan.digest()
    assert plain.digest() != plan.digest()
    (difference,) = diff(plan, moved)
    assert str(difference).startswith("(graph): grouped is 'sites 0, 1' in the first")


@pytest.mark.parametrize("name", ["group_bytes", "group_delay"])
def test_policy_says_what_is_wrong(name, tmp_path):
    for value, words in ((-1, rf"{name}=-1: must be"), ("x", rf"{name}='x'"), (True, name)):
        with pytest.raises(PolicyError, match=words):
            Policy(**{name: value})
    path = tmp_path / "policy.toml"
    path.write_text(f'preset = "balanced"\n{name} = -1\n')
    with pytest.raises(PolicyError, match=rf"policy.toml:2: {name}=-1: must be"):
        Policy.from_toml(path)
    path.write_text(f'preset = "balanced"\n{name} = 5\n')
    assert getattr(Policy.from_toml(path), name) == 5


def test_innermost_module_around_all():
    assert common(["a.b.c", "a.b.d"]) == "a.b"
    assert common(["a.b", "a.b.c"]) == "a.b"
    assert common(["a.bc", "a.bd"]) == "a"
    assert common(["a", ""]) == common(["a", "b"]) == ""
    assert common(["layers.*.mlp"] * 2) == "layers.*.mlp"
