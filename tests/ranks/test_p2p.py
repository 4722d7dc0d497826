"""Messages between two ranks: sends and receives of graphs, alone and in batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from graphs import code, collectives, ops, trace
from processes import Ranks
from tiers import rarely

import commpass
from commpass.distributed.pairs import endpoints, mismatches
from commpass.errors import PlanMismatch
from commpass.passes.discover import discover
from commpass.plan import NONE, PlannedSite
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(
        not hasattr(ops, "batch_p2p_ops"), reason="this torch has no point-to-point operators"
    ),
]
wait = ops.wait_tensor
X = torch.ones(30, 40)


def forced(codec="int8", **more):
    return Policy(name=str(codec), rules=[Rule(codec=codec, force=True, **more)])


def sends(x):
    return wait(ops.isend(x * 2, 3, 7, "0")), x + 1


def receives(x):
    return wait(ops.irecv(torch.empty_like(x), 3, 7, "0")) + 1


def into_its_buffer(x):
    """The form of ``dist.irecv(buffer).wait()`` in a graph."""
    buffer = torch.empty_like(x)
    wait(wait(ops.irecv(buffer, 3, 7, "0")))
    return buffer + 1


def into_an_input(x):
    wait(ops.irecv(x, 3, 7, "0"))
    return x + 1


def batch(x):
    buffer, exact = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    started = ops.batch_p2p_ops(
        ["isend", "irecv", "isend", "irecv"],
        [1, 3, 1, 3],
        [5, 5, 6, 6],
        [x * 2, buffer, (x * 3).int(), exact],
        "0",
    )
    sent, received, other, whole = (wait(value) for value in started)
    return sent, received + 1, other, whole + 1, buffer - 1


def found(function, x=X):
    return [each.site for each in discover(trace(function, x))]


def test_ends_are_sites_with_peer_and_tag(fake_group):
    fake_group(4)
    (send,), (recv,) = found(sends), found(receives)
    assert [
        (s.kind, s.peer, s.tag, s.shape, s.dtype, s.unsupported_reason) for s in (send, recv)
    ] == [
        ("send", 3, 7, (30, 40), "float32", None),
        ("recv", 3, 7, (30, 40), "float32", None),
    ]
    assert [(s.kind, s.peer, s.tag, s.dtype) for s in found(batch)] == [
        ("send", 1, 5, "float32"),
        ("recv", 3, 5, "float32"),
        ("send", 1, 6, "int32"),
        ("recv", 3, 6, "int32"),
    ]


def values(gm):
    out = gm.graph.output_node().args[0]
    return [
        (tuple(n.meta["val"].shape), n.meta["val"].dtype)
        for n in (out if isinstance(out, (list, tuple)) else [out])
    ]


@pytest.mark.few(6)
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "rotated"])
@pytest.mark.parametrize("function", [sends, receives, into_its_buffer, into_an_input])
def test_wire_is_the_plans_and_results_keep_shape_and_dtype(function, codec, fake_group):
    fake_group(4)
    gm = trace(function, X)
    before = values(gm)
    (site,) = commpass.rewrite(gm, [], forced(codec), strict=True).sites
    assert (site.codec.partition("(")[0], site.algorithm) == (codec.partition("(")[0], "direct")
    assert collectives(gm) == [
        ("send" if function is sends else "recv", torch.uint8, site.wire_bytes)
    ]
    assert site.wire_bytes < site.bytes / 3
    assert values(gm) == before


def test_both_ends_of_a_message_are_decided_alike(fake_group):
    fake_group(4)
    for policy in (
        forced(),
        Policy(codecs=("int8", "int4"), max_error=0.2),
        "balanced",
        "aggressive",
    ):
        plans = [
            commpass.rewrite(trace(f, X), [], policy, profile=commpass.ethernet(0.01)).sites[0]
            for f in (sends, receives)
        ]
        assert (
            len({(p.codec, p.algorithm, p.wire_bytes, p.predicted_us, p.plain_us) for p in plans})
            == 1
        )
        assert plans[0].compressed


def test_positions_of_a_batch_are_compressed_within_it(fake_group):
    fake_group(4)
    gm = trace(batch, X)
    before = values(gm)
    plan = commpass.rewrite(gm, [], forced(), strict=True)
    assert [site.codec for site in plan] == ["int8", "int8", NONE, NONE]
    (node,) = (node for node in gm.graph.nodes if "p2p" in str(node.target))
    assert node.args[:3] == (["isend", "irecv", "isend", "irecv"], [1, 3, 1, 3], [5, 5, 6, 6])
    assert [(dtype, size) for _, dtype, size in collectives(gm)] == [
        (torch.uint8, plan.sites[0].wire_bytes),
        (torch.uint8, plan.sites[0].wire_bytes),
        (torch.int32, 4800),
        (torch.int32, 4800),
    ]
    assert values(gm) == before


@pytest.mark.parametrize("taken", [0, 1])
def test_end_that_is_waited_for_with_others_needs_nobody_who_takes_its_result(
    taken, fake_group, wait_tensors
):
    fake_group(4)

    def exchange(x):
        started = ops.batch_p2p_ops(
            ["isend", "irecv"], [1, 3], [5, 5], [x * 2, torch.empty_like(x)], "0"
        )
        return wait_tensors(started)[taken] * 1.0

    gm = trace(exchange, X)
    gm.graph.eliminate_dead_code()
    before = values(gm)
    plan = commpass.rewrite(gm, [], forced(), strict=True)
    assert [site.codec for site in plan] == ["int8", "int8"]
    assert [(dtype, size) for _, dtype, size in collectives(gm)] == [
        (torch.uint8, plan.sites[0].wire_bytes)
    ] * 2
    assert values(gm) == before


def test_equal_receives_have_buffers_of_their_own(fake_group):
    fake_group(4)
    gm = trace(lambda x: (receives(x), receives(x)), X)
    assert len(commpass.rewrite(gm, [], forced(), strict=True).compressed) == 2
    buffers = [node.args[0] for node in gm.graph.nodes if "irecv" in str(node.target)]
    assert len(set(buffers)) == 2


def late(x):
    started = ops.irecv(torch.empty_like(x), 3, 7, "0")
    early = started + 1
    return wait(started) + early


MUST_NOT = {
    "integers": (lambda x: sends(x.int()), "exactly"),
    "received integers": (lambda x: receives(x.int()), "exactly"),
    "a send nobody waits for": (lambda x: (ops.isend(x * 2, 3, 7, "0"), x)[1], "nobody waits"),
    "a receipt nobody waits for": (lambda x: (ops.irecv(x * 2, 3, 7, "0"), x)[1], "nobody waits"),
    "taken before the wait": (late, "before it is waited for"),
    "nothing": (lambda x: sends(x[:0]), "no elements"),
}


@pytest.mark.parametrize("name", MUST_NOT)
def test_graphs_that_must_not_be_rewritten(name, fake_group):
    fake_group(4)
    function, why = MUST_NOT[name]
    gm = trace(function, X)
    before = code(gm)
    (site,) = commpass.rewrite(gm, [], forced(), strict=True).sites
    assert code(gm) == before
    assert site.codec == NONE
    assert why in site.reason


@pytest.mark.parametrize(
    ("codec", "why"),
    [("exponent", "depends on the values"), ("topk", "which only algorithm 'sparse'")],
)
@pytest.mark.parametrize("function", [sends, receives])
def test_codecs_with_state_or_sizes_of_their_own_are_refused(function, codec, why, fake_group):
    fake_group(4)
    gm = trace(function, X)
    before = code(gm)
    (site,) = commpass.rewrite(gm, [], Policy(codecs=codec), strict=True).sites
    assert code(gm) == before
    assert why in site.reason


@pytest.mark.slow
def test_symbolic_sizes_are_left_alone(fake_group):
    fake_group(4)
    seen = len(commpass.plans())
    torch.compile(
        receives, backend=commpass.backend(forced(), inner="eager", timeout=1), dynamic=True
    )(X)
    (site,) = commpass.plans()[seen].sites
    assert site.codec == NONE
    assert "symbolic" in site.reason


@pytest.mark.parametrize("policy", ["off", "lossless"])
@pytest.mark.parametrize("function", [sends, receives, into_an_input, batch])
def test_plain_policies_leave_every_graph_exactly_as_it_was(function, policy, fake_group):
    fake_group(4)
    gm = trace(function, X)
    before = code(gm)
    commpass.rewrite(gm, [], policy, profile=commpass.ethernet(0.01), strict=True)
    assert code(gm) == before


def test_message_stays_and_is_waited_for_though_nobody_takes_the_waits_result(fake_group):
    fake_group(4)
    gm = trace(into_its_buffer, X)
    commpass.rewrite(gm, [], "lossless", strict=True)
    assert [node.name for node in gm.graph.nodes if node.op == "call_function"] == [
        "empty",
        "irecv",
        "wait_tensor",
        "add",
    ]


def test_messages_received_into_equal_buffers_are_not_taken_for_equal(fake_group):
    fake_group(4)

    def function(x):
        one, other = torch.zeros_like(x), torch.zeros_like(x)
        for peer, buffer in ((1, one), (2, other)):
            wait(ops.irecv(buffer, peer, 7, "0"))
        return wait(ops.all_gather_into_tensor(one, 4, "0")), wait(
            ops.all_gather_into_tensor(other, 4, "0")
        )

    gm = trace(function, X)
    commpass.rewrite(gm, [], commpass.Policy(skip="group"), strict=True)
    assert [kind for kind, _, _ in collectives(gm)] == ["recv", "recv", "all_gather", "all_gather"]


# --- agreement of two endpoints -------------------------------------------------------------------


def end(kind, rank, peer, codec="int8", **more):
    facts = {
        "name": kind,
        "kind": kind,
        "group": "0",
        "group_size": 4,
        "dtype": "float32",
        "shape": (30, 40),
        "bytes": 4800,
    }
    (made,) = endpoints(
        [PlannedSite(**facts | {"peer": peer, "codec": codec, "algorithm": "direct"} | more)], rank
    )
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (([end("send", 0, 1)], [end("recv", 1, 0)]), ()),
        (([end("send", 0, 1)], [end("recv", 1, 0, shape=(1200,))]), ()),
        (([end("send", 0, 1, NONE)], [end("recv", 1, 0, NONE, shape=(7,))]), ()),
        (([end("send", 0, 1, NONE)], []), ()),
        (([end("send", 0, 1)], []), ("rank 1 receives nothing",)),
        (([], [end("recv", 1, 0)]), ("rank 0 sends nothing",)),
        (([end("send", 0, 1)], [end("recv", 1, 0, tag=1)]), ("with tag 0", "with tag 1")),
        (
            ([end("send", 0, 1)], [end("recv", 1, 0, NONE, reason="rule 3")]),
            ("codec is 'int8' at the sender", "rule 3"),
        ),
        (([end("send", 0, 1)], [end("recv", 1, 0, shape=(30, 41))]), ("number of values is 1200",)),
        (([end("send", 0, 1)], [end("recv", 1, 0, dtype="bfloat16")]), ("dtype is 'float32'",)),
        (
            (
                [end("send", 0, 1), end("send", 0, 1, "int4")],
                [end("recv", 1, 0, "int4"), end("recv", 1, 0)],
            ),
            ("codec is",),
        ),
    ],
)
def test_ends_of_messages_that_do_not_match_are_reported(words, said):
    text = mismatches(words)
    assert bool(text) == bool(said)
    assert all(part in "\n".join(text) for part in said)


# --- real ranks -----------------------------------------------------------------------------------


def pipeline(x, group):
    """Rank 0 sends to rank 1: the ranks have different graphs."""
    if dist.get_rank() == 0:
        y = x * 2
        wait(ops.isend(y, 1, 7, group))
        return y
    return wait(ops.irecv(torch.empty_like(x), 0, 7, group)) * 1.0


def exchange(x, group):
    """Each rank sends to the next and receives from the one before."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    buffer, exact = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    peers = [(rank + 1) % ranks, (rank - 1) % ranks] * 2
    given = [x * 2, buffer, (x * 2).int(), exact]
    started = ops.batch_p2p_ops(["isend", "irecv"] * 2, peers, [3, 3, 4, 4], given, group)
    _, received, _, whole = (wait(value) for value in started)
    return received * 1.0, whole + 0


def torchs_own(x, group):
    """The functions of torch.distributed; results are read from their buffers."""
    rank, buffer = dist.get_rank(), torch.empty_like(x)
    given = [dist.P2POp(dist.isend, x * 2, 1 - rank), dist.P2POp(dist.irecv, buffer, 1 - rank)]
    for request in dist.batch_isend_irecv(given):
        request.wait()
    return buffer * 1.0


def inputs(rank):
    return torch.randn(30, 40, generator=torch.Generator().manual_seed(rank))


def close(got, expected):
    return bool((got - expected).norm() < 0.02 * expected.norm())


def run_all(inner):
    torch._dynamo.config.enable_p2p_compilation = True
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    other = 2 * inputs(1 - rank)
    rows = []
    for policy in ("lossless", forced()):
        for function in (pipeline, exchange, torchs_own):
            torch._dynamo.reset()
            compiled = torch.compile(
                function,
                backend=commpass.backend(policy, inner=inner, timeout=30, strict=True),
                fullgraph=True,
            )
            for _ in range(2):
                got = compiled(inputs(rank), group)
            codes = {site.codec for site in commpass.plans()[-1] if site.dtype == "float32"}
            first, *rest = got if isinstance(got, tuple) else (got,)
            expected = 2 * inputs(rank) if function is pipeline and rank == 0 else other
            exact = all(torch.equal(each, other.int()) for each in rest)
            rows.append((codes, torch.equal(first, expected), close(first, expected), exact))
    return rows


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", rarely("inductor")])
def test_values_on_real_ranks_are_exact_where_plain_and_near_where_compressed(inner, ranks2):
    for rank, rows in enumerate(ranks2.run(run_all, inner)):
        assert rows[:3] == [({NONE}, True, True, True)] * 3
        assert rows[3:] == [({"int8"}, rank == 0, True, True), *[({"int8"}, False, True, True)] * 2]


def run_exchange():
    torch._dynamo.reset()
    rank, x = dist.get_rank(), inputs(dist.get_rank())
    x[0, 0], x[7, 7] = float("nan"), float("inf")
    got, _ = torch.compile(exchange, backend=commpass.backend(forced(), timeout=30))(
        x, dist.group.WORLD.group_name
    )
    other = inputs(1 - rank) * 2
    return (
        bool(got[0, 0].isfinite()),
        bool(got[7, 7].isfinite()),
        close(got[got.isfinite()], other[got.isfinite()]),
    )


@pytest.mark.every
def test_values_that_are_not_finite_stay_so(ranks2):
    assert ranks2.run(run_exchange) == [(False, False, True)] * 2


def run_ring():
    torch._dynamo.reset()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    got, whole = torch.compile(exchange, backend=commpass.backend(forced(), timeout=30))(
        inputs(rank), dist.group.WORLD.group_name
    )
    other = 2 * inputs((rank - 1) % ranks)
    return close(got, other), torch.equal(whole, other.int())


@pytest.mark.every
def test_ring_of_three(ranks3):
    assert ranks3.run(run_ring) == [(True, True)] * 3


def run_counting():
    torch._dynamo.reset()
    group = counting_group()
    rows = []
    for function in (pipeline, exchange):
        torch._dynamo.reset()
        group.seen.clear()
        with torch.no_grad():
            torch.compile(function, backend=commpass.backend(forced(), timeout=30))(
                inputs(dist.get_rank()), group.group_name
            )
        plan = commpass.plans()[-1]
        rows.append(
            (group.seen[:], [(s.kind, s.wire_bytes) for s in plan], [s.compressed for s in plan])
        )
    return rows


@pytest.mark.slow
def test_bytes_that_reach_the_process_group_are_the_plans(ranks2):
    for alone, batched in ranks2.run(run_counting):
        for seen, planned, compressed in (alone, batched):
            assert [(kind, size) for kind, _, size in seen] == planned
            assert [dtype == torch.uint8 for _, dtype, _ in seen] == compressed
        assert sum(size for _, _, size in alone[0]) < 4800 / 3


def run_gradient():
    torch._dynamo.reset()
    x = inputs(dist.get_rank()).requires_grad_()
    group = dist.group.WORLD.group_name
    rows = []
    for policy in ("lossless", forced()):
        torch._dynamo.reset()
        got, _ = torch.compile(
            lambda x: (exchange(x, group)[0] + x, 0), backend=commpass.backend(policy, timeout=30)
        )(x)
        (grad,) = torch.autograd.grad(got.sum(), x)
        rows.append(bool((grad == 1).all()))
    return rows


@pytest.mark.slow
def test_gradients_do_not_go_through_messages_and_are_what_they_are_without_commpass(ranks2):
    assert ranks2.run(run_gradient) == [[True, True]] * 2


def run_mismatch(inner, function, policies):
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=commpass.backend(policies[dist.get_rank()], inner=inner, timeout=3600)
    )
    with pytest.raises(PlanMismatch) as error:  # without that wait
        compiled(inputs(0)[: 20 + len(inner)], dist.group.WORLD.group_name)
    return str(error.value)


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize("function", [pipeline, exchange])
@pytest.mark.parametrize("inner", ["eager", rarely("inductor"), "aot_eager"])
def test_ends_that_decide_differently_raise_on_both_ranks(function, inner, ranks2):
    for text in ranks2.run(run_mismatch, inner, function, (forced(), forced("int4"))):
        assert "from rank 0 to rank 1" in text
        assert "codec is 'int8' at the sender and 'int4' at the receiver" in text
        assert "rank 0 sends" in text
        assert "rank 1 receives" in text


def run_one_end(function, policies, own_rules):
    torch._dynamo.reset()
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    policy = (
        Policy(rules=[Rule(kind="send", codec="int8", force=True)]) if own_rules else policies[rank]
    )
    x = inputs(rank)[: 21 + own_rules]
    got = torch.compile(function, backend=commpass.backend(policy, inner="eager", timeout=120))(
        x, group
    )
    plan = commpass.plans()[-1]
    first = got[0] if isinstance(got, tuple) else got
    expected = (
        2 * inputs(rank if function is pipeline and rank == 0 else 1 - rank)[: 21 + own_rules]
    )
    return torch.equal(first, expected), plan.fallback, len(plan.compressed)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("function", [pipeline, exchange])
@pytest.mark.parametrize("other", ["off", "lossless"])
def test_message_that_one_end_leaves_alone_is_left_alone_at_both(function, other, ranks2):
    (one, why, _), (two, nothing, _) = ranks2.run(run_one_end, function, (forced(), other), False)
    assert (one, two, nothing) == (True, True, "")
    assert "rank 1 changes nothing of what is sent and received" in why
    assert f"its policy is {other!r}" in why


def test_rule_that_matches_at_one_end_alone_compresses_nothing(ranks2):
    rows = ranks2.run(run_one_end, pipeline, None, True)
    assert [(exact, compressed) for exact, _, compressed in rows] == [(True, 0)] * 2


def run_third():
    """Ranks 0 and 1 differ; rank 2 is connected with rank 1."""
    torch._dynamo.reset()
    policy = forced() if dist.get_rank() else forced("int4")
    with pytest.raises(PlanMismatch) as error:
        torch.compile(exchange, backend=commpass.backend(policy, inner="eager", timeout=120))(
            inputs(0)[:19], dist.group.WORLD.group_name
        )
    return str(error.value)


@pytest.mark.slow
def test_ranks_connected_with_ends_that_differ_raise_too(ranks3):
    assert len(set(ranks3.run(run_third))) == 1


def run_alone(policy):
    """Rank 1 is not compiled."""
    torch._dynamo.reset()
    group, rank = dist.group.WORLD.group_name, dist.get_rank()
    if rank == 1:
        return torch.equal(pipeline(inputs(1)[:18], group), 2 * inputs(0)[:18])
    compiled = torch.compile(pipeline, backend=commpass.backend(policy, inner="eager", timeout=1))
    return torch.equal(compiled(inputs(0)[:18], group), 2 * inputs(0)[:18])


def test_other_end_may_be_eager_where_nothing_is_compressed(ranks2):
    assert ranks2.run(run_alone, "lossless") == [True, True]


def breaks_on_one_rank():
    from commpass.passes import manager as passes
    from commpass.passes import rewrite

    def fail(road):
        rewrite.run(road)
        if dist.get_rank() == 1:
            raise RuntimeError("injected")

    torch._dynamo.reset()
    kept = passes.PASSES
    passes.PASSES = tuple(
        dataclasses.replace(p, run=fail) if p.name == "rewrite" else p for p in kept
    )
    try:
        x = inputs(dist.get_rank())[:17]
        got = torch.compile(
            pipeline, backend=commpass.backend(forced(), inner="eager", timeout=120)
        )(x, dist.group.WORLD.group_name)
        return torch.equal(got, 2 * inputs(0)[:17]), commpass.plans()[-1].fallback
    finally:
        passes.PASSES = kept


def test_failure_at_one_end_makes_both_compile_the_untouched_graph(ranks2):
    for exact, fallback in ranks2.run(breaks_on_one_rank):
        assert exact
        assert "injected" in fallback


def run_cached():
    from torch._dynamo.utils import counters

    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    rows = []
    for codec in ("int8", "int4", "int8"):
        torch._dynamo.reset()
        counters.clear()
        got, _ = torch.compile(exchange, backend=commpass.backend(forced(codec), timeout=30))(
            inputs(rank), group
        )
        error = (got - 2 * inputs(1 - rank)).norm() / inputs(1 - rank).norm() / 2
        rows.append((counters["inductor"]["fxgraph_cache_hit"], float(error)))
    return rows


@pytest.mark.every
def test_warm_cache_gives_each_policy_its_own_graph(tmp_path):
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    for warm in (False, True):
        ranks = Ranks(2, environment)
        try:
            for rows in ranks.run(run_cached):
                assert [hits for hits, _ in rows][0 if warm else 2 :] == [1] * (3 if warm else 1)
                errors = [error for _, error in rows]
                assert 0 < errors[0] == errors[2] < 0.02 < errors[1] < 0.2
        finally:
            ranks.stop()
