"""What runs during an exchange: the order of nodes that the pass ``move`` makes."""

from __future__ import annotations

import random

import pytest
import torch
from functional_ops import ar
from graphs import as_rank, code, ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, thinned

import commpass
from commpass.costmodel import ethernet
from commpass.errors import PolicyError
from commpass.passes.context import GraphInput
from commpass.passes.fx import costs
from commpass.passes.fx.marks import CODED
from commpass.passes.fx.memory import memory, peak
from commpass.passes.fx.parse import is_wait, parse
from commpass.passes.manager import run
from commpass.passes.move import NEEDED, move
from commpass.policy import Policy
from commpass.policy.rules import Rule

N = 64
LINK = ethernet(1)
ENOUGH = 10.0
wait = ops.wait_tensor


def backward(g, x, w, w2, y):
    """Two layers, each sharded by the columns of its weight.

    The gradient of the weight comes first, as in autograd, and then that of the input, which is
    summed.
    """
    dw2 = g.t() @ y
    dy = ar(g @ w2)
    dw = dy.t() @ x
    dx = ar(dy @ w)
    return dw2, dw, dx * 2


def traced(function, many=5, n=N):
    return trace(function, *[torch.ones(n, n) for _ in range(many)])


def drive(gm, **policy):
    road = GraphInput(gm=gm, direction="backward", policy=Policy(**policy), profile=LINK)
    return run(road, "0", strict=True).plan


def story(gm) -> str:
    """Return the order in short: s starts an exchange, w waits, m is a matmul."""
    letters = []
    for node in gm.graph.nodes:
        if parse(node) is not None:
            letters.append("s")
        elif is_wait(node):
            letters.append("w")
        elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            letters.append("m")
    return "".join(letters)


def held(gm) -> int:
    """Return the bytes at the peak of a graph."""
    return peak(list(gm.graph.nodes), memory(gm.graph, in_place=True))


def names(gm) -> list[str]:
    return [node.name for node in gm.graph.nodes]


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(4)


# --- what is moved --------------------------------------------------------------------------------


def test_weight_gradients_are_computed_while_the_input_gradient_travels():
    gm = traced(backward)
    assert story(gm) == "mmswmmsw"
    moved = move(gm, LINK, ENOUGH)
    assert story(gm) == "msmwmsmw"
    assert moved.pinned
    assert not moved.reordered
    assert sum(moved.exposed_us.values()) < sum(moved.original_us.values())


def test_one_matmul_behind_each_hop_of_a_compressed_site():
    def function(g, x, w, y):
        a, b = g.t() @ x, g.t() @ y
        return a, b, ar(g @ w)

    gm = traced(function, 4, 512)
    rule = Rule(codec="int8", algorithm="two_shot", force=True, chunks=1)
    plan = drive(gm, rules=(rule,), more_memory=ENOUGH)
    assert story(gm) == "msmwsmw"
    (site,) = plan
    assert site.exposed_us < site.unmoved_us


def test_wait_goes_to_where_its_result_is_used():
    def function(x, w):
        y = ar(x)
        return (x @ w) @ w, y * 2

    gm = traced(function, 2)
    move(gm, LINK, ENOUGH)
    assert story(gm) == "smmw"


def test_start_goes_to_where_its_input_is_there():
    def function(x, w):
        a = x + 1
        b = (x @ w) @ w
        return ar(a), b

    gm = traced(function, 2)
    assert story(gm) == "mmsw"
    move(gm, LINK, ENOUGH)
    assert story(gm) == "smmw"


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
def test_buckets_of_gradients_follow_one_another(lowering):
    """The second hop of one is sent before the first hop of the next but one."""

    def function(*layers):
        return [ar(x @ x) for x in layers]

    gm = traced(function, 3, 256)
    rule = Rule(codec="int8", algorithm="two_shot", force=True, chunks=1, lowering=lowering)
    plan = drive(gm, rules=(rule,), more_memory=ENOUGH)
    first, second, third = (site.name for site in plan)
    assert plan.reordered == (first, second, first, third, second, third)


def test_moving_is_reported():
    gm = traced(backward)
    plan = drive(gm, more_memory=ENOUGH)
    assert plan.order == ""
    assert all(site.exposed_us < site.unmoved_us for site in plan)
    assert commpass.Plan.from_json(plan.to_json()) == plan


# --- what is not changed --------------------------------------------------------------------------


def test_matmul_that_needs_the_result_is_not_moved():
    def function(x, w):
        return ar(x @ w) @ w @ w

    gm = traced(function, 2)
    before = code(gm)
    moved = move(gm, LINK, ENOUGH)
    assert code(gm) == before
    assert moved.why == "no other order would be faster"
    assert list(moved.missed.values()) == [NEEDED]
    assert not moved.pinned


def test_order_stays_if_another_needs_more_memory_than_the_policy_allows():
    """There is no room for the product during the sum."""

    def function(x, w):
        y = ar(x * 2).sum()
        return y, x @ w

    gm = traced(function, 2)
    before = code(gm)
    plan = drive(gm, more_memory=0.0)
    assert code(gm) == before
    assert plan.order == "any other order would need more memory than 0% above the peak"
    assert all(site.missed == plan.order for site in plan)
    drive(gm, more_memory=0.5)
    assert code(gm) != before


def chain(g, *layers):
    """The backward of a stack of layers, each with the gradient of its weight before that of its
    input."""
    found = []
    for x, w in zip(layers[::2], layers[1::2], strict=True):
        found.append(g.t() @ x)
        g = ar(g @ w)
    return g * 2, *found


def test_less_memory_hides_less_and_none_hides_what_costs_none():
    """Delaying and advancing operators is limited by memory."""
    exposed = []
    for more in (0.0, 0.1, ENOUGH):
        gm = trace(chain, *[torch.ones(256, 256) for _ in range(17)])
        was = held(gm)
        moved = move(gm, ethernet(10), more)
        assert held(gm) <= (1 + more) * was
        exposed.append(sum(moved.exposed_us.values()))
    assert exposed[0] < sum(moved.original_us.values())
    assert exposed == sorted(exposed, reverse=True)


def test_missed_overlap_has_its_reason():
    """There is room for one of two matmuls during the first sum."""

    def function(g, x, w, b):
        second = ar(b * 2).sum()
        dw = g.t() @ x
        first = ar(g @ w) * 1
        return dw, first, second, b @ w

    plan = drive(traced(function, 4, 512), more_memory=0.2)
    second, first = plan.sites
    assert first.missed.endswith(" us less if more_memory=0.2 allowed more memory")
    assert first.exposed_us > 0
    assert (second.exposed_us, second.missed) == (0, "")
    roomy = drive(traced(function, 4, 512), more_memory=ENOUGH)
    assert roomy.sites[1].exposed_us < first.exposed_us


@pytest.mark.parametrize("more", [0.1, 0.5, ENOUGH])
@pytest.mark.parametrize("rows", [16, 256, 4096])
def test_exchanges_that_could_start_at_once_keep_their_order(rows, more):
    """Gathers of weights depend on no computation.

    Their order must not depend on the memory of a rank's own batch: gathering all first holds all
    weights whole.
    """

    def gathered(w):
        return ops.wait_tensor(ops.all_gather_into_tensor(w, 2, "0"))

    def scattered(g):
        return ops.wait_tensor(ops.reduce_scatter_tensor(g, "sum", 2, "0"))

    def function(g, x, a, b, c):
        grads = []
        for w in (a, b, c):
            grads.append(scattered(g.t() @ x))
            g = g @ gathered(w)
        return g, *grads

    fake = [torch.empty(rows, 256), torch.empty(rows, 256), *[torch.empty(128, 256)] * 3]
    gm = trace(function, *fake)
    expected = [node.name for node in gm.graph.nodes if parse(node) is not None]
    plan = drive(gm, more_memory=more, skip=("simplify", "group", "chunk"))
    assert [node.name for node in gm.graph.nodes if parse(node) is not None] == expected
    assert plan.reordered == ()


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("algorithm", "chunks", "lowering", "codec"),
    thinned(
        [("two_shot", 1), ("ring", 1), ("one_shot", 2)],
        ["inline", "kernel"],
        ["int8", "rotated", "bf16"],
        one_in=2,
    ),
)
def test_coding_takes_what_the_choice_counted(algorithm, chunks, lowering, codec):
    """Inline, it is many nodes, of which Inductor makes few kernels."""
    gm = traced(lambda x: ar(x * 2) + 1, 1, 512)
    rule = Rule(codec=codec, algorithm=algorithm, force=True, chunks=chunks, lowering=lowering)
    (site,) = drive(gm, rules=(rule,))
    coding = [stage for stage in site.stages if stage.role in ("encode", "decode")]
    expected = sum(LINK.kernels.time_us(each.codec, each.role, each.values) for each in coding)
    found = [costs.compute(node, LINK).us for node in gm.graph.nodes if CODED in node.meta]
    assert sum(found) == pytest.approx(expected)
    assert len(found) > len(coding) or lowering == "kernel"


def test_order_stays_under_a_policy_that_is_off_or_skips_move():
    for policy in ({"off": True}, {"skip": ("move",)}):
        gm = traced(backward)
        before = code(gm)
        plan = drive(gm, more_memory=ENOUGH, **policy)
        assert code(gm) == before
        assert not any(site.unmoved_us for site in plan)


def test_matmul_is_not_moved_over_a_write_into_the_input_of_an_exchange():
    """The input is changed after the wait for the sum, and read again after that."""

    def function(x, w):
        y = ar(x)
        x.mul_(2)
        return y @ w, x @ w

    gm = traced(function, 2)
    order = [node.target for node in gm.graph.nodes]
    assert torch.ops.aten.mul_.Tensor in order
    move(gm, LINK, ENOUGH)
    found = names(gm)
    assert found.index("wait_tensor") < found.index("mul_")
    assert all(found.index("mul_") < found.index(name) for name in ("mm_1",))


def test_matmul_is_not_moved_over_a_write_through_a_view():
    def function(x, w):
        y = ar(x + 1)
        row = y[0]
        row.add_(1)
        return (w @ w) @ w, y * 3

    gm = traced(function, 2)
    move(gm, LINK, ENOUGH)
    found = names(gm)
    assert found.index("wait_tensor") < found.index("add_") < found.index("mul")


@pytest.mark.parametrize("first", ["wait", "write"])
def test_buffers_that_travel_are_not_written_in_place_by_inductor(first):
    """A cache is sent and gets new rows, before or after that.

    Inductor makes an index_put_ of the index_put, and may write to the cache at once.
    """

    def after(x, w, cache, rows):
        sent = wait(ops.all_gather_into_tensor(cache, 4, "0"))
        y = x @ w
        return sent * 2, y, torch.index_put(cache, [rows], y)

    def before(x, w, cache, rows):
        new = torch.index_put(cache, [rows], x @ w)
        sent = wait(ops.all_gather_into_tensor(cache, 4, "0"))
        return sent * 2, w @ w, new

    function = {"wait": after, "write": before}[first]
    n = 512
    gm = trace(function, *[torch.ones(n, n)] * 2, torch.ones(4 * n, n), torch.arange(n))
    move(gm, LINK, ENOUGH)
    found = names(gm)
    sent = found.index("all_gather_into_tensor"), found.index("wait_tensor")
    assert "m" in story(gm)[story(gm).index("s") : story(gm).index("w")]  # it was moved
    assert not sent[0] < found.index("index_put") < sent[1]


def test_unused_results_come_before_the_output():
    def function(x, w):
        y = x @ w
        ar(y)[0].sin()
        return y * 2

    gm = traced(function, 2)
    before = list(gm.graph.nodes)
    move(gm, LINK, ENOUGH)
    gm.graph.lint()
    assert list(gm.graph.nodes)[-1] is before[-1]
    assert set(gm.graph.nodes) == set(before)


def test_random_numbers_are_drawn_in_the_same_order():
    def function(x, w):
        y = ar(x @ w) + torch.rand_like(x)
        return y @ w, (w @ w) + torch.rand_like(w)

    gm = traced(function, 2)
    before = [name for name in names(gm) if "rand" in name]
    move(gm, LINK, ENOUGH)
    assert [name for name in names(gm) if "rand" in name] == before


def test_graph_with_exchanges_inside_of_operators_keeps_its_order():
    def branch(x):
        return ar(x)

    def function(flag, x, w):
        y = torch.cond(flag.sum() > 0, branch, lambda x: x.clone(), (x,))
        return y @ w

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(torch.ones(4, 4)) for _ in range(3)]
    with mode:
        gm = make_fx(function)(*fakes)
    moved = move(gm, LINK, ENOUGH)
    assert moved.why.startswith("an operator of the graph has exchanges of its own")


@pytest.mark.skipif(not hasattr(ops, "isend"), reason="torch 2.11 has no messages")
def test_graph_with_messages_between_two_ranks_keeps_its_order():
    def function(x, w):
        sent = ops.wait_tensor(ops.isend(x, 1, 0, "0"))
        return x @ w, sent

    moved = move(traced(function, 2), LINK, ENOUGH)
    assert moved.why.startswith("messages between two ranks keep their place")


def test_more_memory_must_be_a_share():
    for wrong in (-0.1, 11, "much", float("nan")):
        with pytest.raises(PolicyError, match="more_memory"):
            Policy(more_memory=wrong)


@pytest.mark.parametrize(("n", "expected"), [(64, "smmwsw"), (256, "ssmmww")])
def test_small_exchanges_of_gloo_stay_alone(n, expected, monkeypatch):
    """gloo corrupts memory with several small ones in flight; large ones may be in flight at
    once."""
    monkeypatch.setattr(commpass.groups, "sends_messages", lambda name, device: True)

    def function(x, y, w):
        return ar(x) * 2, ar(y) * 2, x @ w, y @ w

    gm = traced(function, 3, n)
    moved = move(gm, LINK, ENOUGH)
    assert story(gm) == expected
    assert moved.pinned


def test_all_gathers_of_gloo_stay_alone(monkeypatch):
    """gloo corrupts memory with two of them in flight, whatever their size."""
    monkeypatch.setattr(commpass.groups, "sends_messages", lambda name, device: True)

    def gathered(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x, 2, "0"))

    def function(x, y, w):
        return gathered(x) * 2, gathered(y) * 2, x @ w, y @ w

    gm = traced(function, 3, 256)
    assert move(gm, LINK, ENOUGH).pinned
    assert story(gm) == "smmwsw"


# --- random graphs --------------------------------------------------------------------------------


def program(seed: int):
    """A random program over matrices: matmuls, sums over ranks, in-place writes, and late uses of
    results."""

    def function(*inputs):
        draw = random.Random(seed)
        live, travelling = list(inputs), []
        for _ in range(draw.randint(4, 14)):
            does = draw.choice(("mm", "mm", "start", "start", "wait", "add", "write"))
            x = draw.choice(live)
            if does == "mm":
                live.append(x @ draw.choice(live) / N)
            elif does == "start":
                travelling.append(ops.all_reduce(x, "sum", "0"))
            elif does == "wait" and travelling:
                live.append(wait(travelling.pop(draw.randrange(len(travelling)))))
            elif does == "add":
                live.append(x + draw.choice(live))
            elif does == "write":
                own = x * 1
                own.add_(draw.choice(live))
                live.append(own)
        return [*live[len(inputs) :], *map(wait, travelling)]

    return function


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from((0.0, 0.1, ENOUGH)))
@settings(max_examples=examples(10, 60), deadline=None)
def test_any_graph_computes_the_same_in_the_new_order(seed, more):
    with as_rank(0, 4):
        gm = traced(program(seed), 3, 16)
        inputs = [torch.randn(16, 16) for _ in range(3)]
        expected = gm(*[x.clone() for x in inputs])
        was, before = held(gm), list(gm.graph.nodes)
        placeholders = [node.name for node in before if node.op == "placeholder"]
        move(gm, ethernet(10), more)
        gm.graph.lint()
        found = gm(*[x.clone() for x in inputs])
    assert all(map(torch.equal, expected, found))
    assert set(gm.graph.nodes) == set(before)
    assert [n.name for n in gm.graph.nodes if n.op == "placeholder"] == placeholders
    assert held(gm) <= (1 + more) * was


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from((0.01, 1.0, 100.0)))
@settings(max_examples=examples(3, 15), deadline=None)
def test_all_ranks_start_their_exchanges_in_the_same_order(seed, gbit):
    """This holds for any links in the ranks' profiles, and any sizes of their computations."""

    def function(*inputs):
        outputs = program(seed)(*(x.t() @ x for x in inputs))  # like gradients: the sizes are gone
        return outputs

    found = []
    for rank, (rows, speed) in enumerate(((8, 1.0), (64, gbit))):
        with as_rank(rank, 4):
            gm = trace(function, *[torch.ones(rows, 16) for _ in range(3)])
            policy = Policy(
                rules=[Rule(codec="int8", algorithm="two_shot", force=True)], more_memory=ENOUGH
            )
            road = GraphInput(gm=gm, direction="forward", policy=policy, profile=ethernet(speed))
            plan = run(road, "0", strict=True).plan
            marks = [node for node in gm.graph.nodes if parse(node) is not None]
            found.append(([node.meta["commpass"].site for node in marks], plan.digest()))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 4096])
def test_exchanges_with_splits_of_their_own_stay_alone_whatever_this_rank_sends(rows, monkeypatch):
    """Another rank may send few bytes, and all must start theirs in the same order."""
    monkeypatch.setattr(commpass.groups, "sends_messages", lambda name, device: True)

    def function(x, y, w):
        a, b = (wait(ops.all_to_all_single(each, [rows] * 4, [rows] * 4, "0")) for each in (x, y))
        return a * 2, b * 2, w @ w, w @ w @ w

    gm = trace(function, torch.ones(4 * rows, 8), torch.ones(4 * rows, 8), torch.ones(N, N))
    move(gm, LINK, ENOUGH)
    assert "ss" not in story(gm)


def test_waiting_for_a_coalesced_call_counts_for_its_first_tensor_alone():
    def function(x):
        started = ops.all_reduce_coalesced([x, x * 2, x * 3], "sum", "0")
        return [wait(each) for each in started]

    plan = drive(traced(function, 1), skip_overlapped=False)
    first, *others = plan
    assert first.exposed_us == first.unmoved_us > 0
    assert [(site.exposed_us, site.unmoved_us) for site in others] == [(0.0, 0.0)] * 2
