"""The exchange in a single kernel as a candidate of the plan, on the fake process group and GPU."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import fake_cuda
import pytest
import torch
from graphs import ops, trace

from commpass.costmodel import default_profile, profile_named
from commpass.errors import KernelError
from commpass.lowering.exchange import PeerCard, PeerMemory, common_memory
from commpass.passes import GraphInput, manager
from commpass.passes.chunk.gain import exchange_of
from commpass.passes.fx.marks import is_single_kernel
from commpass.passes.fx.memory import memory as memory_of
from commpass.passes.fx.parse import parse
from commpass.passes.fx.work import work_of
from commpass.passes.post.order import ordered
from commpass.passes.single_kernel import limit_peer_memory
from commpass.plan import SINGLE_KERNEL, Plan, diff
from commpass.policy import Policy
from commpass.policy.rules import Rule
from commpass.report import lower
from commpass.report.candidate_table import lost
from commpass.report.site_text import done, form_of

pytest.importorskip("triton", reason="kernels are written in Triton")

RANKS = 8
KIB_64, MIB, MIB_64 = 1 << 15, 1 << 19, 1 << 25
"""Numbers of bfloat16 values, by their bytes."""
H100 = default_profile("cuda", "NVIDIA H100 80GB HBM3")
CARD = PeerCard("host", "0", 132, 32, (9, 0))
CARDS = [dataclasses.replace(CARD, name=str(rank)) for rank in range(RANKS)]
MEMORY = common_memory(CARDS)
INT8 = Policy(codecs=["int8"], max_error=1.0)
CAPACITY = 132 - 64


def summed(x):
    return [ops.wait_tensor(ops.all_reduce(x * 1, "sum", "0"))]


def gathered(x):
    return [ops.wait_tensor(ops.all_gather_into_tensor(x * 1, RANKS, "0"))]


def scattered(x):
    return [ops.wait_tensor(ops.reduce_scatter_tensor(x * 1, "avg", RANKS, "0"))]


def broadcast(x):
    return [ops.wait_tensor(ops.broadcast(x * 1, 0, "0"))]


def planned(
    values: int = KIB_64,
    policy: Policy = INT8,
    *,
    memory: PeerMemory = MEMORY,
    dtype: torch.dtype = torch.bfloat16,
    function=summed,
    stateless: str | None = "no state here",
):
    """Return the graph of a function of some values on 8 H100, its inputs, and the result of the
    passes."""
    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(function, torch.empty(values, dtype=dtype, device="meta"))
        given = GraphInput(
            gm=gm,
            direction="forward",
            policy=dataclasses.replace(policy, check_calls=0, error_sample_rate=0.0),
            profile=H100,
            stateless=stateless,
            kernels=True,
            operators=True,
            peer_memory=lambda group: memory,
        )
        outcome = manager.run(given, "0", strict=True)
    if outcome.error is not None:
        raise outcome.error
    return gm, inputs, outcome


def calls(gm) -> tuple[int, int]:
    """Return the numbers of single kernels and of collectives in a graph."""
    nodes = list(gm.graph.nodes)
    return sum(map(is_single_kernel, nodes)), sum(parse(node) is not None for node in nodes)


def required(**more) -> Policy:
    """Return a policy that requires a single kernel."""
    rule = Rule(codec="int8", lowering=SINGLE_KERNEL, force=True, **more)
    return Policy(rules=[rule], max_error=1.0)


# --- chosen by cost -------------------------------------------------------------------------------


def test_small_all_reduce_of_8_gpus_is_a_single_kernel(fake_group):
    fake_group(RANKS)
    gm, _, outcome = planned()
    (site,) = outcome.plan
    assert calls(gm) == (1, 0)
    assert (site.lowering, site.codec, site.algorithm) == (SINGLE_KERNEL, "int8", "one_shot")
    wire = KIB_64 + KIB_64 // 256 * 4  # codes, and a float32 scale for each block of 256
    assert site.wire_bytes == wire
    # A launch, two tiles, a signal and a read of NVLink 4, the wires of 7 peers at 0.82 x 450, and
    # 64 Ki values that are encoded and 8 times as many decoded, at 1.01 and 0.98 of a copy.
    copy_us = KIB_64 * (2 + 1.02) / (0.88 * 3350e3)
    coding_us = copy_us / 1.01 + RANKS * copy_us / 0.98
    want = 5.0 + 2 * 1.5 + 3 * 0.6 + 7 * wire / 369e3 + coding_us
    assert site.predicted_us == pytest.approx(want, abs=0.01)
    assert site.predicted_us <= 12 < site.plain_us
    assert "int8 by one_shot in a single kernel" in site.reason
    assert done(site) == "int8 by one_shot in a single kernel"
    assert form_of(site) == ", single kernel"


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [
        (gathered, "all_gather", (RANKS * KIB_64,)),
        (scattered, "reduce_scatter", (KIB_64 // RANKS,)),
    ],
)
def test_small_gather_and_scatter_of_8_gpus_are_single_kernels(function, kind, shape, fake_group):
    fake_group(RANKS)
    gm, _, outcome = planned(function=function)
    (site,) = outcome.plan
    assert calls(gm) == (1, 0)
    assert (site.kind, site.lowering, site.algorithm) == (kind, SINGLE_KERNEL, "direct")
    (node,) = (node for node in gm.graph.nodes if is_single_kernel(node))
    assert node.meta["val"].shape == shape
    assert node.meta["val"].is_contiguous()
    assert node.args[5] == ("sum" if kind == "all_gather" else "avg")
    blocks, wires = KIB_64 // 256, 1 if kind == "all_gather" else RANKS
    assert site.wire_bytes == KIB_64 + wires * -(-blocks // wires * 4 // 128) * 128
    assert site.predicted_us < site.plain_us


@pytest.mark.slow
def test_large_all_reduce_of_8_gpus_is_not(fake_group):
    """Its 68 programs would process one tile after the other."""
    fake_group(RANKS)
    gm, _, outcome = planned(MIB_64)
    (site,) = outcome.plan
    assert calls(gm)[0] == 0
    assert site.lowering != SINGLE_KERNEL
    singles = [
        each for each in outcome.options[site.name].candidates if each.lowering == SINGLE_KERNEL
    ]
    tiles = {"one_shot": MIB_64 // 512, "two_shot": MIB_64 // 512 // RANKS}
    programs = {"one_shot": CAPACITY, "two_shot": CAPACITY // RANKS}
    for each in singles:
        rounds = -(-tiles[each.algorithm] // programs[each.algorithm])
        assert {stage.rounds for stage in each.stages} == {rounds}
        assert each.predicted_us > site.plain_us


def test_measured_alpha_counts_no_more_than_a_step(fake_group):
    """That of a measured link includes the start of a library's collective."""
    from commpass.costmodel import Link, prices
    from commpass.plan.stage import Stage

    exchange = Stage(role="exchange", kind="all_gather", rounds=2, after=(0,))
    for alpha, want in ((0.6, 3.0), (1.0, 5.0), (25.0, 5.0)):
        profile = dataclasses.replace(profile_named("nvlink-4"), link=Link(alpha, 360.0))
        assert prices(profile, RANKS, ()).task(exchange).us == pytest.approx(want)


# --- not a candidate ------------------------------------------------------------------------------


def changed(**fields) -> PeerMemory:
    """Return the common memory if one rank has another GPU."""
    return common_memory([*CARDS[:-1], dataclasses.replace(CARDS[-1], **fields)])


DGC = Policy(rules=[Rule(codec="dgc", algorithm="sparse", force=True)], max_error=1.0)
CASES = {
    "two hosts": ({"memory": changed(host="other")}, "no single kernel: its ranks are on 2 hosts"),
    "a rank without": (
        {"memory": changed(unsupported_reason="it has no GPU")},
        "no single kernel: rank 7: it has no GPU",
    ),
    "other kind": ({"memory": changed(capability=(8, 0))}, "GPUs of different kinds"),
    "few processors": ({"memory": changed(processors=64)}, "none remains"),
    "float64": ({"dtype": torch.float64}, "no single kernel: float64 values"),
    "cast": (
        {"policy": Policy(codecs=["fp16"], max_error=1.0), "dtype": torch.float32},
        "no single kernel: fp16 is no block codec",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_site_that_cannot_be_a_single_kernel_says_why(case, fake_group):
    fake_group(RANKS)
    fields, why = CASES[case]
    gm, _, outcome = planned(**fields)
    assert calls(gm)[0] == 0
    (options,) = outcome.options.values()
    refused = [each.refused for each in options.candidates if each.lowering == SINGLE_KERNEL]
    assert refused
    assert all(why in each for each in refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": dataclasses.replace(INT8, lowering="kernel")},
        {"policy": dataclasses.replace(INT8, lowering="inline")},
        pytest.param({"policy": DGC, "stateless": None}, marks=pytest.mark.slow),
        {"function": broadcast},
    ],
    ids=["kernel", "inline", "error feedback", "broadcast"],
)
def test_site_has_no_such_candidate_when_another_form_is_named_or_none_exists(fields, fake_group):
    fake_group(RANKS)
    gm, _, outcome = planned(**fields)
    assert calls(gm)[0] == 0
    (options,) = outcome.options.values()
    assert not any(each.lowering == SINGLE_KERNEL for each in options.candidates)


def test_size_that_is_not_fixed_stays_with_the_library(fake_group):
    from commpass.passes.candidates import candidates
    from commpass.policy.rules import Allowed

    fake_group(RANKS)
    _, _, outcome = planned()
    site = dataclasses.replace(outcome.found[0].site, shape=("s0",))
    allowed = Allowed(codecs=("int8",), max_error=1.0)
    options = candidates(site, allowed, H100, True, lambda group: MEMORY)
    singles = [each for each in options.candidates if each.lowering == SINGLE_KERNEL]
    assert {each.refused for each in singles} == {"no single kernel: its size is not fixed"}


def test_memory_of_a_group_is_asked_for_only_if_a_codec_can_use_it(fake_group):
    """The question makes a rank wait for the others."""
    fake_group(RANKS)
    asked = []
    with fake_cuda.a_card():
        gm, _ = fake_cuda.trace(summed, torch.empty(KIB_64, dtype=torch.bfloat16, device="meta"))
        given = GraphInput(
            gm=gm, direction="forward", policy=Policy(), profile=H100, peer_memory=asked.append
        )
        outcome = manager.run(given, "0", strict=True)
    assert outcome.error is None
    assert asked == []


# --- required by a rule ---------------------------------------------------------------------------


def graph_of(groups: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for number in range(groups):
        x = graph.call_function(ops.all_reduce.default, (x, "sum", f"group {number}"))
    graph.output(x)
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("groups", [3, 4])
def test_exchanges_of_many_groups_leave_no_room_for_single_kernels(groups):
    found = limit_peer_memory(lambda group: MEMORY, graph_of(groups))("group 0")
    assert found.unsupported_reason == (
        "" if groups == 3 else "exchanges of 4 groups may be in flight at once, at most 3 have room"
    )


@pytest.mark.parametrize("values", [MIB, 33_001, 3])
def test_rule_requires_a_single_kernel_of_any_size(values, fake_group):
    fake_group(RANKS)
    gm, _, outcome = planned(values, required(algorithm="two_shot"))
    (site,) = outcome.plan
    assert calls(gm) == (1, 0)
    assert (site.lowering, site.algorithm) == (SINGLE_KERNEL, "two_shot")
    blocks = -(-values // (RANKS * 256))
    wire = -(-blocks * 4 // 128) * 128 + blocks * 256  # scales are padded to 128 bytes
    assert site.wire_bytes == (RANKS + 1) * wire
    (options,) = outcome.options.values()
    others = [each.refused for each in options.candidates[1:] if each.lowering != SINGLE_KERNEL]
    assert others
    assert all("names lowering='single_kernel'" in each for each in others)


@pytest.mark.parametrize(("function", "blocks"), [(gathered, 131), (scattered, 8 * 17)])
def test_rule_requires_a_single_kernel_of_values_that_fill_no_block(function, blocks, fake_group):
    """A gather pads one wire; a scatter pads that of each shard."""
    fake_group(RANKS)
    gm, _, outcome = planned(8 * 4161, required(), function=function)
    (site,) = outcome.plan
    assert calls(gm) == (1, 0)
    wires = 1 if function is gathered else RANKS
    scales = -(-blocks // wires * 4 // 128) * 128
    assert site.wire_bytes == blocks * 256 + wires * scales


def test_kind_without_kernels_names_those_that_have_them(fake_group):
    fake_group(RANKS)
    _, _, outcome = planned(policy=required(), function=broadcast)
    (site,) = outcome.plan
    assert (site.compressed, site.lowering) == (True, "kernel")
    assert "no single kernel: only all_reduce by one_shot or two_shot, all_gather" in site.reason


def test_required_single_kernel_becomes_kernels_beside_the_library_without_memory(fake_group):
    fake_group(RANKS)
    memory = PeerMemory(unsupported_reason="its ranks are on 2 hosts")
    gm, _, outcome = planned(KIB_64, required(algorithm="one_shot"), memory=memory)
    (site,) = outcome.plan
    assert calls(gm) == (0, 1)
    assert (site.lowering, site.algorithm) == ("kernel", "one_shot")
    assert "no single kernel: its ranks are on 2 hosts" in site.reason


def test_required_single_kernel_of_a_cpu_is_left_with_the_reason(fake_group):
    fake_group(RANKS)
    gm = trace(summed, torch.empty(KIB_64, dtype=torch.bfloat16))
    given = GraphInput(
        gm=gm, direction="forward", policy=required(algorithm="one_shot"), profile=H100
    )
    (site,) = manager.run(given, "0", strict=True).plan
    assert (site.compressed, site.lowering) == (True, "inline")
    assert "no single kernel: cpu has no memory that other ranks access" in site.reason


# --- plans and reports ----------------------------------------------------------------------------


def test_plan_with_a_single_kernel_is_read_back_and_differs_from_one_without(fake_group):
    fake_group(RANKS)
    _, _, outcome = planned()
    plan = outcome.plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    (site,) = plan
    other = dataclasses.replace(plan, sites=(dataclasses.replace(site, lowering="kernel"),))
    assert other.digest() != plan.digest()
    assert [each.field for each in diff(plan, other)] == ["lowering"]


def test_reports_tell_a_single_kernel_from_the_same_codec_and_algorithm(fake_group):
    fake_group(RANKS)
    _, _, outcome = planned()
    (site,) = outcome.plan
    alike = [
        each
        for each in outcome.options[site.name].possible
        if (each.codec, each.algorithm) == (site.codec, site.algorithm)
    ]
    assert [lost(each, site) == "chosen" for each in alike] == [False, True]


def test_kernels_of_a_single_kernel_are_not_listed(fake_group, tmp_path):
    fake_group(RANKS)
    (site,) = planned()[2].plan
    with (
        mock.patch.object(lower, "site_of", return_value=site),
        pytest.raises(KernelError, match="is a single kernel with its exchange"),
    ):
        lower.of_site(tmp_path, None, site.name, "sm_90")


# --- order ----------------------------------------------------------------------------------------


def mixed(x):
    """Independent exchanges: a sum, a gather and a sum, each on values of its own."""
    first = ops.all_reduce(x * 1, "sum", "0")
    gathered = ops.all_gather_into_tensor(x * 2, RANKS, "0")
    last = ops.all_reduce(x * 3, "sum", "0")
    return [ops.wait_tensor(each) for each in (last, gathered, first)]


ONLY_SUMS = dataclasses.replace(required(kind="all_reduce"), group_bytes=0, skip=("simplify",))


def test_single_kernels_and_other_exchanges_keep_their_order(fake_group):
    """They depend on each other on no rank, but all ranks need one order."""
    fake_group(RANKS)
    gm, _, _ = planned(policy=ONLY_SUMS, function=mixed)
    work = work_of(gm.graph, memory_of(gm.graph), H100)
    nodes = [node for node in gm.graph.nodes if is_single_kernel(node) or parse(node) is not None]
    assert len(nodes) == 3
    for node, before in zip(nodes[1:], nodes, strict=False):
        assert before in work.before[node]


@pytest.mark.slow
def test_inductor_keeps_single_kernels_and_other_exchanges_in_order(fake_group):
    fake_group(RANKS)
    gm, inputs, _ = planned(policy=ONLY_SUMS, function=mixed)
    gm.graph.output_node().args = (tuple(gm.graph.output_node().args[0]),)
    gm.recompile()
    with ordered():
        code = fake_cuda.code_of(gm, inputs)
    called = re.compile(r"(single_kernel|all_gather)_\w+\.default\(")
    found = called.findall(code[code.index("def call(") :])
    assert found == ["single_kernel", "all_gather", "single_kernel"]


def test_single_kernel_occupies_the_rank(fake_group):
    """It is in the stream of the computation: nothing overlaps with it."""
    fake_group(RANKS)
    (site,) = planned()[2].plan
    task = exchange_of(site, H100)
    assert (task.us, task.latency_us, task.overhead_us) == (0.0, 0.0, site.predicted_us)


def test_memory_of_ranks_that_share_a_gpu_is_divided():
    sharing = [dataclasses.replace(CARD, name=str(rank // 2)) for rank in range(RANKS)]
    assert common_memory(CARDS).programs == CAPACITY
    assert common_memory(sharing).programs == CAPACITY // 2


# --- forms of the collective ----------------------------------------------------------------------


def in_place(x):
    y = x * 1
    ops.wait_tensor(ops.all_reduce_(y, "sum", "0"))
    return [y + 1]


def coalesced(x):
    made = ops.all_reduce_coalesced([x * 1, x * 2], "sum", "0")
    return [ops.wait_tensor(each) for each in made]


def gathered_by_2(x):
    return [ops.wait_tensor(ops.all_gather_into_tensor((x * 1).view(128, -1), RANKS, "0"))]


def scattered_by_2(x):
    y = (x * 1).view(-1, 128).t()
    return [ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", RANKS, "0"))]


def gathered_coalesced(x):
    made = ops.all_gather_into_tensor_coalesced([x * 1, x * 2], RANKS, "0")
    return [ops.wait_tensor(each) for each in made]


def transposed(x):
    return [ops.wait_tensor(ops.all_reduce((x * 1).view(128, -1).t(), "avg", "0"))]


@pytest.mark.parametrize(
    ("function", "kernels", "times"),
    [
        (in_place, 1, 1),
        (coalesced, 2, 1),
        (transposed, 1, 1),
        (gathered_by_2, 1, RANKS),
        (gathered_coalesced, 2, RANKS),
        (scattered_by_2, 1, 1 / RANKS),
    ],
)
def test_every_form_of_a_collective_can_be_a_single_kernel(function, kernels, times, fake_group):
    fake_group(RANKS)
    policy = dataclasses.replace(required(), skip=("simplify",), group_bytes=0)
    gm, _, outcome = planned(policy=policy, function=function)
    assert calls(gm) == (kernels, 0)
    assert {site.lowering for site in outcome.plan} == {SINGLE_KERNEL}
    nodes = [node for node in gm.graph.nodes if is_single_kernel(node)]
    for node in nodes:
        made, given = node.meta["val"], node.args[0].meta["val"]
        assert made.is_contiguous()
        first, *others = given.shape
        assert (made.shape, made.dtype) == ((first * times, *others), given.dtype)
