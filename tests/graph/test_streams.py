"""Single kernels in a separate stream: which ones, the order of the graph, the generated code.

The process group and the GPU are fake. ``tests/unit/test_side_stream.py`` tests streams and events.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fake_cuda
import pytest
import torch
from graphs import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import fx
from torch._inductor import config
from typer.testing import CliRunner

import commpass
from commpass.backend import build
from commpass.cli import app
from commpass.costmodel import HOST, Task, default_profile, overlapped_kernel
from commpass.errors import VerifyError
from commpass.lowering.exchange import (
    EXCHANGE,
    START,
    WAIT,
    PeerCard,
    common_memory,
    sent_nbytes,
    share_of_processors,
)
from commpass.lowering.gpu import side_stream
from commpass.passes import GraphInput, discover, hidden, manager, single_kernel, streams
from commpass.passes.failures import SiteFailure
from commpass.passes.fx.marks import is_single_kernel, starts
from commpass.passes.fx.memory import memory as memory_of
from commpass.passes.fx.ops import is_matmul
from commpass.passes.post.order import ordered
from commpass.passes.timeline import timeline
from commpass.passes.verify import verify
from commpass.plan import SINGLE_KERNEL, Plan
from commpass.policy import Policy
from commpass.policy.rules import Rule
from commpass.report.site_text import done, form_of

pytest.importorskip("triton", reason="kernels are written in Triton")

from commpass.lowering.gpu import exchange

RANKS = 8
ROWS, WIDTH = 8, 4096
H100 = default_profile("cuda", "NVIDIA H100 80GB HBM3")
MEMORY = common_memory(
    [PeerCard("host", str(rank), 132, 32, (9, 0)) for rank in range(RANKS)],
)
RULE = Rule(kind="all_reduce", codec="int8", algorithm="one_shot", lowering=SINGLE_KERNEL)
POLICY = Policy(
    rules=[dataclasses.replace(RULE, force=True)],
    max_error=1.0,
    group_bytes=0,
    skip=("simplify", "group", "chunk"),
    check_calls=0,
    error_sample_rate=0.0,
)
"""Sums are single kernels, and other collectives stay as they are."""


def planned(function: Callable, *shapes: Sequence[int], policy: Policy = POLICY, **more: Any):
    """Return the graph of a function of bfloat16 tensors on 8 H100, its inputs, and the plan."""
    like = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    with fake_cuda.a_card():
        gm, inputs = fake_cuda.trace(function, *like)
        gm.graph.eliminate_dead_code()
        graph_input = GraphInput(
            gm=gm,
            direction="forward",
            policy=policy,
            profile=H100,
            kernels=True,
            operators=True,
            peer_memory=lambda group: MEMORY,
            **more,
        )
        outcome = manager.run(graph_input, "0", strict=True)
    if outcome.error is not None:
        raise outcome.error
    return gm, inputs, outcome.plan


SIZES = ((ROWS, WIDTH), (WIDTH, WIDTH))


def names(gm: fx.GraphModule) -> list[str]:
    """Return start, wait, kernel (a blocking one), mm and gather for the nodes that are such."""
    known = {
        START: "start",
        WAIT: "wait",
        EXCHANGE: "kernel",
        torch.ops.aten.mm.default: "mm",
        ops.all_gather_into_tensor.default: "gather",
    }
    return [known[node.target] for node in gm.graph.nodes if node.target in known]


def total(x):
    return ops.all_reduce(x, "sum", "0")


def overlapped(x, w):
    """A sum, and matmuls that neither need it nor are needed by it. The result of one is as large
    as the values of the sum."""
    sent = total(x * 2)
    square = w @ w
    return [ops.wait_tensor(sent) + 1, x @ square]


def read_at_once(x, w):
    return [(ops.wait_tensor(total(x * 2)) @ w) @ w]


def without_matmul(x, w):
    return [ops.wait_tensor(total(x * 2)) + 1, w * 2]


def several(x, w):
    """Independent exchanges, waited for in another order."""
    first, gathered = total(x * 1), ops.all_gather_into_tensor(x * 2, RANKS, "0")
    last = total(x * 3)
    square = w @ w
    return [*(ops.wait_tensor(each) for each in (last, gathered, first)), square @ w]


# --- which sites ----------------------------------------------------------------------------------


def test_kernel_beside_a_matmul_is_started_before_it_and_waited_for_after_it(fake_group):
    fake_group(RANKS)
    gm, _, plan = planned(overlapped, *SIZES)
    found = names(gm)
    assert found[:3] == ["start", "mm", "wait"]
    assert sorted(found) == ["mm", "mm", "start", "wait"]
    (start,) = gm.graph.find_nodes(op="call_function", target=START)
    (wait,) = gm.graph.find_nodes(op="call_function", target=WAIT)
    assert [*start.users] == [wait]
    assert start.args[0].target is torch.ops.aten.mul.Tensor
    assert wait.meta["val"].shape == (ROWS, WIDTH)
    (site,) = plan
    assert (site.own_stream, site.exposed_us) == (True, 0.0)
    assert site.wire_bytes == sent_nbytes(start)
    # 32 Ki values are 64 tiles of 512, each on one of 132 processors
    busy = 2.0 + 64 / 132 * site.predicted_us
    text = f"in a separate stream: {busy:,.1f} us instead of {site.predicted_us:,.1f} us"
    assert text in site.reason
    assert done(site) == "int8 by one_shot in a single kernel beside compute"
    assert form_of(site) == ", single kernel beside compute"
    assert Plan.from_json(plan.to_json()) == plan


def test_timeline_shows_the_kernel_in_a_lane_beside_computation(fake_group):
    fake_group(RANKS)
    gm, _, plan = planned(overlapped, *SIZES)
    found = timeline(gm, mock.Mock(plan=plan), H100)
    event, kernel, slower = (each for each in found.events if each.what == "exchange")
    assert (event.lane, event.us) == (HOST, 2.0)
    assert (slower.lane, slower.us) == (HOST, pytest.approx(64 / 132 * kernel.us))
    assert event.begin_us + 2.0 == kernel.begin_us == slower.begin_us
    (site,) = plan
    assert (kernel.lane, kernel.site, kernel.us) == ("single kernels", site.name, site.predicted_us)
    computed = [each for each in found.events if each.what == "compute" and "mm" in each.name]
    assert any(
        each.begin_us < kernel.begin_us + kernel.us and kernel.begin_us < each.begin_us + each.us
        for each in computed
    )
    assert found.exposed_of(site.name) == 0


@pytest.mark.parametrize(
    ("function", "policy", "why"),
    [
        (read_at_once, POLICY, streams.NOTHING_MEANWHILE),
        (without_matmul, POLICY, streams.NO_MATMUL),
        (overlapped, dataclasses.replace(POLICY, skip=(*POLICY.skip, "move")), streams.SKIPPED),
    ],
    ids=["read at once", "no matmul", "skip"],
)
def test_kernel_with_nothing_to_overlap_stays_in_the_stream_of_computation(
    function, policy, why, fake_group
):
    fake_group(RANKS)
    gm, _, plan = planned(function, *SIZES, policy=policy)
    assert "start" not in names(gm)
    assert "wait" not in names(gm)
    assert names(gm).count("kernel") == 1
    (site,) = plan
    assert not site.own_stream
    assert f"in the stream of computation: {why}" in site.reason
    assert done(site) == "int8 by one_shot in a single kernel"


def test_policy_can_skip_the_pass(fake_group):
    fake_group(RANKS)
    policy = dataclasses.replace(POLICY, skip=(*POLICY.skip, "streams"))
    gm, _, plan = planned(overlapped, *SIZES, policy=policy)
    assert "start" not in names(gm)
    assert names(gm).count("kernel") == 1
    assert not plan.sites[0].own_stream


def test_undone_split_leaves_the_operator_as_it_was(fake_group):
    fake_group(RANKS)
    skip = dataclasses.replace(POLICY, skip=(*POLICY.skip, "streams"))
    before, after = (planned(read_at_once, *SIZES, policy=each)[0] for each in (skip, POLICY))
    (was,), (now,) = (
        gm.graph.find_nodes(op="call_function", target=EXCHANGE) for gm in (before, after)
    )
    assert now.args[1:] == was.args[1:]
    assert now.meta.keys() == was.meta.keys()
    assert now.meta["val"].shape == was.meta["val"].shape
    assert len(now.meta["eager_input_vals"][0]) == len(now.args)


@pytest.mark.parametrize("cuts", [False, True])
def test_kernel_is_not_split_where_a_cuda_graph_may_be_cut(cuts, fake_group):
    """Each part must wait for all that it starts, and the pass does not know the parts."""
    fake_group(RANKS)

    def function(x, w):
        on_cpu = [torch.ones(3, device="cpu")] if cuts else []
        return [*overlapped(x, w), *on_cpu]

    with config.patch({"triton.cudagraphs": True}):
        gm, _, (site,) = planned(function, *SIZES)
    assert ("start" in names(gm)) == (not cuts) == site.own_stream
    assert ("its CUDA graph is cut in parts at" in site.reason) == cuts


def test_cost_is_two_events_and_the_processors_of_the_kernel():
    assert overlapped_kernel(100.0, 0.25) == Task("single kernels", 100.0, 2.0, (), 2.0, 25.0)
    assert overlapped_kernel(100.0, 0.25).resource != HOST


@pytest.mark.parametrize(("programs", "share"), [(33, 0.25), (68, 68 / 132), (500, 1.0)])
def test_share_counts_a_processor_for_each_program(programs, share):
    node = mock.Mock(args=(None, "0", "all_reduce", "int8", "one_shot", "sum", 8, programs, 32, 0))
    with mock.patch("commpass.lowering.exchange._exchange_at", return_value=mock.Mock(rows=1)):
        assert share_of_processors(node, MEMORY) == share


# --- the choice of the codec ----------------------------------------------------------------------

FREE = dataclasses.replace(POLICY, rules=[RULE])
"""The same, if that ends the graph earlier."""
ROUNDED = 1e-3
"""Predictions of sites are rounded to a nanosecond."""


def beside(x, w):
    """A sum, and a matmul that it can overlap."""
    sent = total(x * 2)
    square = w @ w
    return [ops.wait_tensor(sent) + 1, square]


@pytest.mark.parametrize(
    ("width", "skip", "own_stream"),
    [
        (512, (), True),
        (512, ("streams",), None),  # the kernel and the matmul take as long as plain
        (512, ("move",), None),
        (2048, (), None),  # the matmul overlaps the plain sum completely
        (64, (), False),  # too short a matmul
    ],
)
def test_codec_is_chosen_with_the_stream_in_which_its_kernel_will_run(
    width, skip, own_stream, fake_group
):
    """None for a sum that stays uncompressed, because its kernel would not end the graph
    earlier."""
    fake_group(RANKS)
    policy = dataclasses.replace(FREE, skip=(*POLICY.skip, *skip))
    shapes = (ROWS, WIDTH), (width, width)
    _, _, (site,) = planned(beside, *shapes, policy=policy, hidden={}, hides=True)
    if own_stream is None:
        assert (site.codec, site.hidden) == ("none", True)
    else:
        assert (site.lowering, site.own_stream) == (SINGLE_KERNEL, own_stream)


def schedule_of(function: Callable, *shapes: Sequence[int], cudagraphs: bool = False) -> Any:
    """Return the schedule by which sites are chosen, and the plan with single kernels."""
    like = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    skip = dataclasses.replace(POLICY, skip=(*POLICY.skip, "streams"))
    _, _, plan = planned(function, *shapes, policy=skip)
    with fake_cuda.a_card(), config.patch({"triton.cudagraphs": cudagraphs}):
        gm, _ = fake_cuda.trace(function, *like)
        gm.graph.eliminate_dead_code()
        found = hidden.initial_schedule(
            gm, discover.discover(gm, Policy()), POLICY, H100, lambda group: MEMORY
        )
    assert found is not None
    return found, plan.sites


def test_end_of_the_graph_has_the_kernel_in_the_better_stream(fake_group):
    fake_group(RANKS)
    schedule, (site,) = schedule_of(beside, (ROWS, WIDTH), (512, 512))
    predicted = schedule.as_predicted()
    alone = dataclasses.replace(predicted, peer_memory=None)
    computed = sum(task.us for task in predicted.work.tasks.values() if task.resource == HOST)
    assert alone.end_us([site]) == pytest.approx(computed + site.predicted_us, abs=ROUNDED)
    (first,) = (
        predicted.work.tasks[node].us
        for node in predicted.order
        if node.target is torch.ops.aten.mul.Tensor
    )
    (last,) = (
        predicted.work.tasks[node].us
        for node in predicted.order
        if node.target is torch.ops.aten.add.Tensor
    )
    arrives = first + 2 + site.predicted_us + 2
    busy = first + 2 + 64 / 132 * site.predicted_us + (computed - first - last)
    assert predicted.end_us([site]) == pytest.approx(max(arrives, busy) + last, abs=ROUNDED)
    assert predicted.end_us([site]) < alone.end_us([site])


def test_kernel_without_computation_beside_it_is_timed_in_the_stream_of_computation(fake_group):
    fake_group(RANKS)
    schedule, (site,) = schedule_of(read_at_once, *SIZES)
    computed = sum(task.us for task in schedule.work.tasks.values() if task.resource == HOST)
    assert schedule.end_us([site]) == pytest.approx(computed + site.predicted_us, abs=ROUNDED)


def test_cut_cuda_graph_has_no_separate_stream_in_its_schedule(fake_group):
    fake_group(RANKS)

    def function(x, w):
        return [*beside(x, w), torch.ones(3, device="cpu")]

    assert schedule_of(function, *SIZES)[0].peer_memory is not None
    assert schedule_of(function, *SIZES, cudagraphs=True)[0].peer_memory is None


# --- order ----------------------------------------------------------------------------------------


def started(gm: fx.GraphModule) -> list[str]:
    """Return what starts an exchange, in order, by the factor of its values."""
    nodes = [node for node in gm.graph.nodes if starts(node) or is_single_kernel(node)]
    return [str(node.args[0].args[1]) for node in nodes]


def test_starts_keep_the_order_of_the_program(fake_group):
    fake_group(RANKS)
    gm, _, plan = planned(several, *SIZES)
    assert names(gm).count("start") == 2
    assert started(gm) == ["1", "2", "3"]
    assert sum(site.own_stream for site in plan) == 2


@pytest.mark.parametrize("function", [overlapped, several])
def test_plans_and_orders_are_equal_on_all_ranks(function, fake_group):
    found = []
    for rank in (0, 5):
        fake_group(RANKS, rank=rank)
        gm, _, plan = planned(function, *SIZES)
        found.append((names(gm), plan.digest(), [site.reason for site in plan]))
    assert "start" in found[0][0]
    assert found[0] == found[1]


# A program of a random graph: a sum or gather of an earlier value, a wait for one, a matmul of an
# earlier value. Numbers choose among the earlier values.
STEPS = st.lists(
    st.tuples(st.sampled_from(["sum", "gather", "wait", "mm", "square", "add"]), st.integers(0, 9)),
    min_size=3,
    max_size=10,
)


def random_function(steps: Sequence[tuple[str, int]]) -> Callable:
    def function(x, w):
        values, squares, flying = [x * 1], [w], []
        for number, (what, choice) in enumerate(steps):
            value, square = values[choice % len(values)], squares[choice % len(squares)]
            if what == "sum":
                flying.append(total(value * (number + 2)))
            elif what == "gather":
                flying.append(ops.all_gather_into_tensor(value * (number + 2), RANKS, "0"))
            elif what == "wait" and flying:
                arrived = ops.wait_tensor(flying.pop(choice % len(flying)))
                values.append(arrived.narrow(0, 0, ROWS) + 1)
            elif what == "mm":
                values.append(value @ square)
            elif what == "square":
                squares.append(square @ w)
            elif what == "add":
                values.append(value + values[-1])
        return [*values, *squares[1:], *map(ops.wait_tensor, flying)]

    return function


@pytest.mark.slow
@settings(max_examples=examples(5, 40), deadline=None)
@given(STEPS)
def test_in_random_graphs_each_start_has_one_wait_before_all_readers(steps):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        policy = dataclasses.replace(POLICY, skip=(*POLICY.skip, "streams"))
        plain = planned(random_function(steps), *SIZES, policy=policy)[0]
        gm, _, plan = planned(random_function(steps), *SIZES)
    finally:
        torch.distributed.destroy_process_group()
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    begun = gm.graph.find_nodes(op="call_function", target=START)
    assert len(begun) == sum(site.own_stream for site in plan)
    assert len({start.args[-1] for start in begun}) == len(begun)
    for start in begun:
        (wait,) = start.users
        assert wait.target is WAIT
        assert wait.args[-1] == start.args[-1]
        assert place[start] < place[wait] < min([place[each] for each in wait.users])
        assert any(map(is_matmul, [*gm.graph.nodes][place[start] : place[wait]]))
    assert single_kernels(gm) == single_kernels(plain)
    if begun:  # the others may only be reordered among themselves
        assert started(gm) == started(plain)
    assert sorted(names(gm)) == sorted(
        [name for name in names(plain) if name != "kernel"]
        + ["kernel"] * (names(plain).count("kernel") - len(begun))
        + ["start", "wait"] * len(begun)
    )


def single_kernels(gm: fx.GraphModule) -> list[str]:
    return [str(node.args[0].args[1]) for node in gm.graph.nodes if is_single_kernel(node)]


# --- memory and checks ----------------------------------------------------------------------------


def test_memory_of_a_start_is_held_until_the_wait(fake_group):
    """Its input, and the result that it allocates."""
    fake_group(RANKS)
    gm, _, _ = planned(overlapped, *SIZES)
    known = memory_of(gm.graph)
    (start,) = gm.graph.find_nodes(op="call_function", target=START)
    (wait,) = start.users
    (sent,), (result,) = known.gives[start.args[0]], known.gives[wait]
    assert sent != result
    assert known.gives[start] == {sent}
    assert known.touches[start] == known.touches[wait] == {sent, result}


def test_verify_refuses_a_start_whose_result_is_read_without_a_wait(fake_group):
    fake_group(RANKS)
    gm, _, plan = planned(overlapped, *SIZES)
    (start,) = gm.graph.find_nodes(op="call_function", target=START)
    (wait,) = start.users
    verify(gm, plan.sites)
    wait.args = (start.args[0], *wait.args[1:])
    with pytest.raises((VerifyError, SiteFailure), match="has not exactly one wait"):
        verify(gm, plan.sites)


# --- generated code -------------------------------------------------------------------------------


def code_of(function: Callable) -> list[str]:
    """Return the lines that Inductor generates for the call of a function's graph."""
    gm, inputs, _ = planned(function, *SIZES)
    gm.graph.output_node().args = (tuple(gm.graph.output_node().args[0]),)
    gm.recompile()
    with ordered():
        code = fake_cuda.code_of(gm, inputs)
    return code[code.index("def call(") :].splitlines()


def line_of(lines: Sequence[str], text: str) -> int:
    (found,) = (number for number, line in enumerate(lines) if text in line)
    return found


@pytest.mark.slow
def test_inductor_keeps_start_matmul_wait_and_the_memory_of_the_input(fake_group):
    """The result of the matmul in between has the size of the input, whose memory Inductor would
    reuse if the wait did not hold it."""
    fake_group(RANKS)

    def function(x, w):
        sent = total(x * 2)
        return [ops.wait_tensor(sent) + 1, (x @ w) @ w, w @ w]

    lines = code_of(function)
    start, wait = (
        line_of(lines, f"single_kernel_exchange_{each}.default(") for each in ("start", "wait")
    )
    first, *_ = (n for n, line in enumerate(lines) if "extern_kernels.mm(" in line)
    assert start < first < wait
    (sent,) = re.findall(r"start\.default\((\w+),", lines[start])
    between = [line for line in lines[start + 1 : wait] if re.search(rf"\b{sent}\b", line)]
    assert between == []
    assert any(re.search(rf"del {sent}\b", line) for line in lines[wait:])
    (held,) = re.findall(r"wait\.default\((\w+),", lines[wait])
    assert held not in "".join(
        line
        for line in lines[start + 1 : wait]
        if "assert" not in line and not line.strip().startswith(f"{held} = buf")
    )
    assert any(f"({ROWS}, {WIDTH})" in line and "empty" in line for line in lines[start:wait])


@pytest.mark.slow
def test_inductor_keeps_kernels_of_both_streams_and_gathers_in_order(fake_group):
    fake_group(RANKS)
    called = re.compile(r"(exchange_start|exchange_wait|all_gather_into_tensor\w*)\.default\(")
    found = called.findall("\n".join(code_of(several)))
    assert [each for each in found if each != "exchange_wait"] == [
        "exchange_start",
        "all_gather_into_tensor_out"
        if "all_gather_into_tensor_out" in found
        else "all_gather_into_tensor",
        "exchange_start",
    ]
    assert found.count("exchange_wait") == 2


# --- the backend ----------------------------------------------------------------------------------


@contextmanager
def kernels_on_cpu(ran: list[str]) -> Iterator[None]:
    """Let the backend use single kernels on this CPU, which multiply by the number of ranks. Note
    what runs in ``ran``."""

    def prepare(workspace, wanted, x):
        output, sent = x.new_empty(x.shape), x

        def launch():
            ran.append("kernel")
            output.copy_(sent * RANKS)

        return output, launch

    def wait(device, number, real=side_stream.wait):
        ran.append("wait")
        return real(device, number)

    with (
        mock.patch.object(build, "peer_memory", return_value=MEMORY),
        mock.patch.object(single_kernel, "_unsupported_reason", return_value=""),
        mock.patch.object(build, "allocate"),
        mock.patch.object(exchange, "_workspace_of"),
        mock.patch.object(exchange, "_prepare", prepare),
        mock.patch.object(side_stream, "wait", wait),
    ):
        yield


@pytest.mark.slow
def test_backend_runs_a_kernel_beside_a_matmul_and_explains_it(fake_group, tmp_path):
    fake_group(RANKS)
    ran: list[str] = []

    def function(x, w):
        sent = total(x * 2)
        square = w @ w
        return ops.wait_tensor(sent) + 1, square

    far = commpass.Profile("far", commpass.Link(1000.0, 0.1))
    x, w = torch.randn(ROWS, 512), torch.eye(512) * 3
    with kernels_on_cpu(ran):
        backend = commpass.backend(POLICY, profile=far, strict=True, dump=tmp_path)
        run = torch.compile(function, backend=backend)
        for _ in range(2):
            made, square = run(x, w)
            torch.testing.assert_close(made, x * 2 * RANKS + 1, rtol=0, atol=0)
            assert torch.equal(square, torch.eye(512) * 9)
        assert ran == ["kernel", "wait"] * 2
        with (
            mock.patch.object(side_stream, "wait", side_effect=RuntimeError("no memory")),
            pytest.raises(RuntimeError, match="no memory"),
        ):
            run(x, w)
        assert not side_stream._started
        assert torch.equal(run(x, w)[1], square)
    (site,) = commpass.plans()[-1].sites
    assert site.own_stream
    command = ["explain", str(tmp_path), "--why", site.name]
    wide = {"COLUMNS": "200"}
    said = " ".join(CliRunner().invoke(app, command, env=wide).stdout.split())
    assert "single kernel beside compute" in said
    assert re.search(r"in a separate stream: [\d.]+ us instead of [\d.]+ us", said)
