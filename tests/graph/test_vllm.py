"""The pass for vLLM's slot, on graphs of operators with vLLM's names and schemas."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import operator
import pickle
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from graphs import as_rank, collectives, trace
from serve_vllm import define_operators
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from commpass.costmodel import KernelRate, Kernels, Link, Profile
from commpass.errors import CommpassError, PlanMismatch, PolicyError
from commpass.parallel import comparison
from commpass.parallel.comparison import PLAN
from commpass.parallel.vllm import CollectivePass, collective_pass
from commpass.parallel.vllm.collective_pass import nearest_in
from commpass.parallel.vllm.operators import group_of_vllm
from commpass.policy import Policy
from commpass.policy.rules import Rule

INT8 = Policy(rules=[Rule(codec="int8", algorithm="one_shot", force=True)], skip=("chunk", "group"))
KEPT = Policy(rules=[Rule(keep=True)])


def world(name: str) -> dist.ProcessGroup:
    assert name == "tp:0"
    return dist.group.WORLD


@pytest.fixture
def four(fake_group):
    """Rank 0 of 4, with vLLM's operators."""
    fake_group(4)
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        define_operators(library)
        library.define("unified_attention(Tensor q, Tensor k, Tensor v, str layer_name) -> Tensor")
        library.impl("unified_attention", lambda q, k, v, name: torch.empty_like(q), "Meta")
        library.define(
            "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight,"
            " float epsilon) -> ()"
        )
        library.impl("fused_add_rms_norm", lambda *_: None, "Meta")
        yield


def layer(x, residual, weight, norm):
    """A layer of vLLM at the slot: attention, a row-parallel matmul, the sum, and an in-place norm,
    functionalised."""
    ops = torch.ops.vllm
    attended = ops.unified_attention(x, x, x, "model.layers.0.self_attn")
    summed = ops.all_reduce(attended @ weight, "tp:0")
    _, normed, residual = auto_functionalized(
        ops.fused_add_rms_norm.default, input=summed, residual=residual, weight=norm, epsilon=1e-6
    )
    return normed, residual


def layer_graph():
    x, residual = torch.randn(64, 256), torch.randn(64, 256)
    return trace(layer, x, residual, torch.randn(256, 256), torch.randn(256))


def form(graph) -> list:
    """Return the operators of a graph, independent of node names, and what is known of each
    value."""
    number = {node: at for at, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            *torch.fx.map_arg((node.args, node.kwargs), number.__getitem__),
            sorted(node.meta),
            id(node.meta.get("val")),
        )
        for node in graph.nodes
    ]


def without_comparison(graph) -> list:
    """Return the form of a graph without the comparison of plans, which is before an exchange."""
    [found] = [node for node in graph.nodes if str(node.target) == "commpass.compare_plans.default"]
    assert str(found.next.target) in ("vllm.all_reduce.default", "vllm.all_gather.default")
    assert found.args[0] is found.next.args[0]
    graph.erase_node(found)
    return form(graph)


def targets(gm) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_sum_of_vllms_is_compressed_and_the_rest_of_the_graph_stays(four):
    gm = layer_graph()
    graph = gm.graph
    CollectivePass(INT8, groups=world, strict=True)(graph)
    assert gm.graph is graph
    names = targets(gm)
    assert "vllm.all_reduce.default" not in names
    assert names[0] == "vllm.unified_attention.default"
    assert names.count("auto_functionalized") == 1
    [(_, dtype, size)] = collectives(gm)
    assert dtype == torch.uint8
    # one byte per value, and a scale of 4 bytes per block
    assert size == 64 * 256 + 4 * (64 * 256 // 256)
    graph.lint()


def test_kept_sites_stay_as_they_were(four):
    gm = layer_graph()
    before = form(gm.graph)
    CollectivePass(KEPT, groups=world, strict=True)(gm.graph)
    assert without_comparison(gm.graph) == before


def test_allowed_one_of_two_alone_is_compressed(four):
    def two(x, y):
        return torch.ops.vllm.all_reduce(x, "tp:0"), torch.ops.vllm.all_reduce(y, "tp:0")

    gm = trace(two, torch.randn(64, 256), torch.randint(9, (8, 8)))  # no codec supports integers
    CollectivePass(INT8, groups=world, strict=True)(gm.graph)
    [own] = [node for node in gm.graph.nodes if str(node.target) == "vllm.all_reduce.default"]
    assert own.meta["val"].shape == (8, 8)
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}


def test_sums_through_shared_memory_are_left_with_a_line(four, caplog):
    """vLLM's CPU ranks on one host, if the processor has AVX-512."""
    caplog.set_level(logging.INFO, "commpass")
    with torch.library._scoped_library("vllm_like", "DEF") as library:
        library.define("shm_allreduce(int handle, Tensor(a!) data) -> ()")
        library.impl("shm_allreduce", lambda *_: None, "Meta")
        operator = torch.ops.vllm_like.shm_allreduce.default
        gm = make_fx(lambda x: auto_functionalized(operator, handle=0, data=x)[1])(
            torch.empty(64, 64, device="meta")
        )
        before = targets(gm)
        CollectivePass(INT8, groups=world, strict=True)(gm.graph)
        assert targets(gm) == before
    assert "1 collective of vLLM's through the shared memory of this host" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathers_and_scatters_along_the_first_dimension_are_taken(four, dim, caplog):
    def around(x):
        part = torch.ops.vllm.reduce_scatter(x, dim, 4, "tp:0")
        return torch.ops.vllm.all_gather(part.sin(), dim, 4, "tp:0")

    gm = trace(around, torch.randn(64, 64))
    with caplog.at_level(logging.INFO, "commpass"):
        policy = Policy(rules=[Rule(codec="int8", force=True)], skip=("chunk", "group"))
        CollectivePass(policy, groups=world, strict=True)(gm.graph)
    left = [name for name in targets(gm) if name.startswith("vllm.")]
    if dim == 0:
        assert left == []
        assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}
    else:
        assert left == ["vllm.reduce_scatter.default", "vllm.all_gather.default"]
        assert f"along dimension {dim}" in caplog.text


def test_gather_and_a_scatter_that_are_kept_stay_as_they_were(four):
    def around(x):
        part = torch.ops.vllm.reduce_scatter(x, 0, 4, "tp:0")
        return torch.ops.vllm.all_gather(part.sin(), 0, 4, "tp:0")

    gm = trace(around, torch.randn(64, 64))
    before = form(gm.graph)
    CollectivePass(KEPT, groups=world, strict=True)(gm.graph)
    assert without_comparison(gm.graph) == before


def fails(*_):
    raise ValueError("on purpose")


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("how", ["a pass fails", "no such group", "a pass is left out"])
def test_graph_of_which_nothing_comes_is_left_as_it_was(four, how, monkeypatch, caplog):
    gm = layer_graph()
    graph = gm.graph
    before = form(graph)
    own = CollectivePass(INT8, groups=world)
    if how == "a pass fails":
        monkeypatch.setattr("commpass.passes.manager.PASSES", _failing())
        monkeypatch.setattr("commpass.passes.manager.run.__defaults__", (None, None))
    elif how == "no such group":
        own = CollectivePass(INT8, groups=fails)
    else:
        own = CollectivePass(Policy(skip="lower", rules=INT8.rules), groups=world)
    own(graph)
    assert gm.graph is graph
    graph.lint()
    after = form(graph) if how == "no such group" else without_comparison(graph)
    assert after == before
    assert "untouched" in caplog.text
    graph.lint()
    gm.recompile()


def _failing():
    import dataclasses

    from commpass.passes import manager

    return tuple(
        dataclasses.replace(step, run=fails) if step.name == "verify" else step
        for step in manager.PASSES
    )


def test_strict_raises_instead(four):
    with pytest.raises(ValueError, match="on purpose"):
        CollectivePass(INT8, groups=fails, strict=True)(layer_graph().graph)


def test_uuid_of_the_pass_depends_on_its_arguments():
    same = [CollectivePass("balanced", profile="ethernet-1g").uuid() for _ in range(2)]
    others = [
        CollectivePass("aggressive", profile="ethernet-1g"),
        CollectivePass("balanced", profile="ethernet-10g"),
        CollectivePass("balanced"),
        CollectivePass("balanced", profile="ethernet-1g", groups=world),
        CollectivePass("balanced", profile="ethernet-1g", strict=True),
        CollectivePass("balanced", profile="ethernet-1g", tokens=64),
        CollectivePass("balanced", profile="ethernet-1g", tokens=[8, 512]),
    ]
    assert same[0] == same[1]
    assert len({same[0], *(other.uuid() for other in others)}) == 1 + len(others)


def test_ranks_that_share_a_cache_do_not_take_each_others_code():
    own = CollectivePass("balanced", profile="ethernet-1g")
    names = []
    for rank, size in ((0, 2), (1, 2), (0, 4)):
        with as_rank(rank, size):
            names.append(own.uuid())
    assert len({*names, own.uuid()}) == 4


def test_pass_can_be_pickled():
    own = CollectivePass("balanced", profile="ethernet-1g", groups=world)
    back = pickle.loads(pickle.dumps(own))
    assert back.uuid() == own.uuid()
    assert back.groups is world


def test_policy_that_is_not_known():
    with pytest.raises(PolicyError, match="balanced"):
        CollectivePass("balancd")


def test_groups_are_found_in_vllms_registry(monkeypatch):
    class Coordinator:
        device_group = object()

    held = Coordinator()
    state = SimpleNamespace(_groups={"tp:0": weakref.ref(held)})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert group_of_vllm("tp:0") is held.device_group
    with pytest.raises(CommpassError, match=r"no group 'tp:1'.*It has: tp:0"):
        group_of_vllm("tp:1")
    del held
    with pytest.raises(CommpassError, match="no group 'tp:0'"):
        group_of_vllm("tp:0")


def test_error_without_vllm_says_what_to_give():
    with pytest.raises(CommpassError, match="CollectivePass\\(groups="):
        group_of_vllm("tp:0")


@pytest.mark.parametrize(
    "place", ["vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass"]
)
def test_it_is_one_of_vllms_own_passes_where_vllm_is(monkeypatch, place):
    class InductorPass(CustomGraphPass):
        def is_applicable_for_range(self, compile_range):
            return True

    *parents, _ = place.split(".")
    for number in range(1, len(parents) + 1):
        name = ".".join(parents[:number])
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    module = ModuleType(place)
    module.InductorPass = InductorPass
    monkeypatch.setitem(sys.modules, place, module)
    try:
        there = importlib.reload(collective_pass)
        own = there.CollectivePass("balanced")
        assert isinstance(own, InductorPass)
        assert own.is_applicable_for_range((1, 8192))
        assert own.uuid() != CollectivePass("aggressive").uuid()
    finally:
        monkeypatch.undo()
        importlib.reload(collective_pass)


@pytest.mark.parametrize(("tokens", "expected"), [(512, 512), (8, 8), (4096, 2048)])
def test_decisions_are_made_for_a_number_of_tokens(four, tokens, expected):
    """At most for that with which vLLM traced the graph, here 2,048."""
    gm = make_fx(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1, tracing_mode="symbolic")(
        torch.randn(2048, 256)
    )
    own = CollectivePass(INT8, groups=world, tokens=tokens, strict=True)
    own(gm.graph)
    [plan] = own.plans
    [site] = plan.sites
    assert site.bytes == 4 * 256 * expected
    [text] = [node.args[1] for node in gm.graph.nodes if "compare_plans" in str(node.target)]
    assert f"{expected * 256 * 4:,} bytes for {expected} tokens" in text
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}


FAR = Profile("far", Link(1000.0, 0.01), kernels=Kernels(10_000.0, KernelRate(0.1, 0.1)))
IF_IT_PAYS = Policy(codecs="int8", max_error=1.0, skip=("chunk", "group"))


def of_any_rows(function):
    """Trace a function of one input, whose number of rows alone is symbolic. Return the graph and
    its mode."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(600, 256), symbolic_context=sizes)
    return make_fx(function)(x), mode


def test_collective_of_a_single_graph_gets_a_branch_for_each_number_of_tokens(four):
    gm, mode = of_any_rows(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1)
    own = CollectivePass(IF_IT_PAYS, profile=FAR, groups=world, tokens=[1, 512], strict=True)
    with V.set_fake_mode(mode):
        own(gm.graph)
    assert [len(plan.compressed) for plan in own.plans] == [0, 1]
    [choice] = [node for node in gm.graph.nodes if node.target is torch.ops.higher_order.cond]
    is_few, few, many, _ = choice.args
    assert (is_few.target, is_few.args[1]) == (operator.le, 22)
    few, many = (getattr(gm, branch.target) for branch in (few, many))
    assert targets(few) == ["vllm.all_reduce.default"]
    assert {dtype for _, dtype, _ in collectives(many)} == {torch.uint8}
    assert "vllm.all_reduce.default" not in targets(gm)
    assert targets(gm).count("commpass.compare_plans.default") == 1


@pytest.mark.parametrize("tokens", [[400, 512], 512])
def test_equal_decisions_make_no_branches(four, tokens):
    gm, mode = of_any_rows(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1)
    own = CollectivePass(IF_IT_PAYS, profile=FAR, groups=world, tokens=tokens, strict=True)
    with V.set_fake_mode(mode):
        own(gm.graph)
    assert "cond" not in targets(gm)
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}


def test_collective_of_part_of_the_rows_gets_no_branches(four):
    """Inductor refuses a branch whose input has an expression as its number of rows."""

    def around(x):
        part = torch.ops.vllm.reduce_scatter(x * 2, 0, 4, "tp:0")
        return torch.ops.vllm.all_gather(part + 1, 0, 4, "tp:0")

    gm, _ = of_any_rows(around)
    own = CollectivePass(IF_IT_PAYS, profile=FAR, groups=world, tokens=[1, 512], strict=True)
    own(gm.graph)
    assert "cond" not in targets(gm)
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}


def test_collective_of_other_symbolic_sizes_gets_no_branches(four):
    """Of several numbers of tokens the largest counts then."""
    gm = make_fx(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1, tracing_mode="symbolic")(
        torch.randn(600, 256)
    )
    own = CollectivePass(IF_IT_PAYS, profile=FAR, groups=world, tokens=[1, 512], strict=True)
    own(gm.graph)
    assert "cond" not in targets(gm)
    assert {dtype for _, dtype, _ in collectives(gm)} == {torch.uint8}


@pytest.mark.parametrize("tokens", [0, [], [8, 0], "512", 8.0, True, [1, None]])
def test_numbers_of_tokens_are_one_or_more(tokens):
    with pytest.raises(PolicyError, match=r"tokens=.*such as 512, or a list of"):
        CollectivePass("balanced", tokens=tokens)


@pytest.mark.parametrize(
    ("counts", "tokens", "expected"),
    [
        (None, (1, 512), 512),
        ((1, 8192), (1, 512), 512),
        ((1, 22), (1, 512), 1),
        ((23, 8192), (1, 512), 512),
        ((23, 100), (1, 512), 100),  # 1 is 23 times as far, 512 only 5 times
        ((23, 128), (1, 512, 4096), 128),
        ((1000, 8192), (1, 512), 1000),
        ((4, 4), (1, 512), 4),
    ],
)
def test_number_of_tokens_of_a_graph_is_in_its_range(counts, tokens, expected):
    assert nearest_in(counts, tokens) == expected


def test_decisions_are_those_for_the_range_that_vllm_compiles(four, monkeypatch):
    gm = make_fx(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1, tracing_mode="symbolic")(
        torch.randn(2048, 256)
    )
    own, names = CollectivePass(INT8, groups=world, strict=True), []
    for counts in ((1, 22), (23, 2048)):
        context = SimpleNamespace(compile_range=SimpleNamespace(start=counts[0], end=counts[1]))
        module = SimpleNamespace(_pass_context=context)
        monkeypatch.setattr(collective_pass, "_passes_of_vllm", lambda module=module: module)
        own(copy.deepcopy(gm).graph)
        names.append(own.uuid())
    assert [plan.sites[0].bytes for plan in own.plans] == [4 * 256 * 1, 4 * 256 * 512]
    assert names[0] != names[1]


def test_ranks_with_other_ranges_of_token_counts_have_other_plans(four, monkeypatch):
    """Else one of them would compare a graph that the other does not run for this step."""
    gm = make_fx(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1, tracing_mode="symbolic")(
        torch.randn(2048, 256)
    )
    plans, texts = [], []
    for first, tokens in ((23, (1, 512)), (1, (512,)), (23, (1, 2, 512))):
        context = SimpleNamespace(compile_range=SimpleNamespace(start=first, end=2048))
        module = SimpleNamespace(_pass_context=context)
        monkeypatch.setattr(collective_pass, "_passes_of_vllm", lambda module=module: module)
        own, copied = CollectivePass(INT8, groups=world, tokens=tokens), copy.deepcopy(gm)
        own(copied.graph)
        plans += [plan.digest() for plan in own.plans]
        [text] = [node.args[1] for node in copied.graph.nodes if "compare_" in str(node.target)]
        texts.append(text.partition(PLAN)[2])
    assert len(set(plans)) == 1
    assert len(set(texts)) == 3


class Published:
    """A store in which rank 1 publishes another plan, and reads after some queries or never."""

    def __init__(self, queries_until_read: float):
        self.left, self.kept = queries_until_read, {}

    def publish(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def read_published(self, key: str, ranks) -> dict[int, bytes]:
        if not key.endswith("/read"):
            return {rank: self.kept[key].replace(b"0", b"%d" % rank) for rank in ranks}
        self.left -= 1
        return {rank: b"" for rank in ranks if rank == 0 or self.left <= 0}


@pytest.mark.parametrize(("queries", "left"), [(3, 0), (math.inf, math.inf)])
def test_rank_that_raises_first_lets_the_others_read_the_plans(queries, left, monkeypatch):
    """It may be the process that has the store: the others would lose their connection."""
    store = Published(queries)
    monkeypatch.setattr(comparison, "current_store", lambda: store)
    monkeypatch.setattr(comparison, "ranks_of", lambda group: (0, 1))
    monkeypatch.setattr(comparison, "FAREWELL_S", 0.3)
    with pytest.raises(PlanMismatch, match="rank 1: "):
        comparison.compare("policy; plan 0", "world", "vLLM")
    assert store.left == left


def test_exponent_stays_one_operator_for_encode_and_one_for_decode(four):
    """Its some 2,000 operators take Inductor minutes if sizes are symbolic."""
    gm = make_fx(lambda x: torch.ops.vllm.all_reduce(x * 2, "tp:0") + 1, tracing_mode="symbolic")(
        torch.randn(2048, 256)
    )
    policy = Policy(rules=[Rule(codec="exponent", algorithm="one_shot", force=True)])
    CollectivePass(policy, groups=world, strict=True)(gm.graph)
    names = targets(gm)
    assert names.count("commpass.exponent_encode.default") == 1
    assert "commpass.exponent_decode.default" in names
    assert len(names) < 300
