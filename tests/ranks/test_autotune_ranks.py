"""All ranks of a group use the tile sizes that its first rank has timed.

The ranks are processes on gloo. Each traces a graph of a simulated GPU, and has times of its own.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from rank_helpers import commpass_messages

from commpass.backend import tune
from commpass.distributed import agreed_tiles
from commpass.distributed.plan_store import Round
from commpass.errors import CommpassError, Unanswered
from commpass.lowering.timed import Timed
from commpass.passes import manager
from commpass.passes.fx.ops import triton_calls
from commpass.passes.retile import tunable_nodes
from commpass.policy.rules import Rule

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")
pytestmark = pytest.mark.xdist_group("ranks")

NAMES = [step.name for step in manager.PASSES]
X = torch.empty(64, 1024, dtype=torch.bfloat16)


def summed(x):
    ops = torch.ops._c10d_functional
    return [ops.wait_tensor(ops.all_reduce(torch.relu(x), "sum", "0"))]


def outcome_here():
    """Return the results of the passes for a graph of a GPU."""
    rule = Rule(codec="int8", algorithm="one_shot", force=True, lowering="kernel")
    return fake_cuda.planned(summed, rule, X)[0]


def sizes_after(
    fastest: tuple[int, ...], *, strict: bool = False, case: str = ""
) -> tuple[list[int], str, list[str], int]:
    """Set the tile sizes of a graph, of which each rank finds another number of the choices to be
    the fastest. Return the blocks of each kernel, the reason of the site, what was logged, and the
    number of kernels that this rank has timed.

    In case "fails", the timing of rank 0 raises an error. In case "silent", rank 0 sets its sizes
    only after rank 1 has waited in vain. In case "other GPU", rank 1 has no choices but the static
    one.
    """
    from commpass.lowering.gpu import autotune, timing
    from commpass.lowering.gpu.tunable import TunableChain

    choices_of = TunableChain.choices.func
    rank, ran = dist.get_rank(), []

    def run(self, choice, inputs):
        ran.append((self, choice))
        return [torch.zeros(1)]

    def time_us(call, device) -> float:
        before = len(ran)
        call()
        kernel, choice = ran[before]
        return 10.0 if kernel.choices.index(choice) == fastest[rank] else 50.0

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel runs any more")

    outcome = outcome_here()
    shared = SimpleNamespace(
        strict=strict, timeout=0.5 if case == "silent" else None, tile_sizes={}
    )
    job = SimpleNamespace(autotune_s=10.0, direction="forward", number="0", decompositions=None)
    round = Round(f"tests/{case}/{strict}", (0, 1))
    with (
        fake_cuda.a_card(),
        patch.object(TunableChain, "run", run),
        patch.object(TunableChain, "examples", lambda self: []),
        patch.object(timing, "time_us", time_us),
        patch.object(autotune, "tune", fail if case == "fails" and not rank else autotune.tune),
        patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=tempfile.mkdtemp()),
        commpass_messages(logging.INFO) as messages,
    ):
        if case == "other GPU" and rank:
            static = property(lambda self: choices_of(self)[:1])
            stack = patch.object(TunableChain, "choices", static)
        else:
            stack = nullcontext()
        if case == "silent" and not rank:
            dist.barrier()
        with stack:
            tune.set_tile_sizes(shared, job, outcome, round)
        if case == "silent" and rank:
            dist.barrier()
    blocks = [
        node.kwargs["kwargs"]["BLOCKS"]
        for node in outcome.gm.graph.nodes
        if node.target in triton_calls()
    ]
    return blocks, outcome.plan.sites[0].reason, messages, len({call for call, _ in ran})


def error_of(*args: Any, **more: Any) -> str:
    try:
        sizes_after(*args, **more)
    except CommpassError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_all_ranks_use_what_the_first_has_timed(ranks2):
    first, second = ranks2.run(sizes_after, (1, 2))
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert "tile sizes: encode 50.0 us -> 10.0 us; decode+sum 50.0 us -> 10.0 us" in first[1]
    assert (first[3], second[3]) == (2, 0)
    others, _ = ranks2.run(sizes_after, (2, 1))
    assert others[0] != first[0]


@pytest.mark.slow
def test_failure_of_the_first_rank_is_an_error_on_all_if_strict(ranks2):
    error = "tile sizes of kernels were not timed: RuntimeError: no kernel runs any more"
    assert ranks2.run(strictly_failing) == [f"CommpassError: {error}"] * 2


def strictly_failing() -> str:
    return error_of((1, 1), strict=True, case="fails")


def failing():
    return sizes_after((1, 1), case="fails")


def silent():
    return sizes_after((1, 1), case="silent")


def other_gpu():
    return sizes_after((1, 1), case="other GPU")


@pytest.mark.slow
def test_failure_of_the_first_rank_leaves_all_with_static_choices(ranks2):
    first, second = ranks2.run(failing)
    static = ranks2.run(sizes_after, (0, 0))[0]
    assert first[0] == second[0] == static[0]
    assert first[1] == second[1]
    assert "not timed: RuntimeError: no kernel runs any more" in first[1]
    assert all("no kernel runs any more" in messages[-1] for _, _, messages, _ in (first, second))


@pytest.mark.slow
def test_rank_that_waits_in_vain_decides_for_all(ranks2):
    """The first rank is late, and then uses static choices too."""
    first, second = ranks2.run(silent)
    static = ranks2.run(sizes_after, (0, 0))[0]
    assert first[0] == second[0] == static[0]
    assert first[1] == second[1]
    assert "not timed: rank 0 published no tile sizes within 0.5 s" in first[1]


@pytest.mark.slow
def test_rank_with_another_gpu_keeps_the_static_choice_and_the_same_plan(ranks2):
    first, second = ranks2.run(other_gpu)
    static = ranks2.run(sizes_after, (0, 0))[0]
    assert first[0] != second[0] == static[0]
    assert first[1] == second[1]
    assert any("does not have the tile sizes of encode" in each for each in second[2])


def alone() -> list[str]:
    """Return the reasons of a site that a rank plans alone: without and with agreed results."""
    outcomes = [outcome_here() for _ in range(3)]
    shared = SimpleNamespace(strict=False, timeout=None, tile_sizes={})
    job = SimpleNamespace(autotune_s=10.0, direction="forward", number="0", decompositions=None)
    with fake_cuda.a_card(), patch.object(tune, "_timed", None):  # nothing is timed
        tune.set_tile_sizes(shared, job, outcomes[0], None)
        tune.set_tile_sizes(shared, job, outcomes[1], Round("tests/reuse", (0, 1), has_reuse=True))
        calls = {each.call for each in tunable_nodes(outcomes[2].gm)}
        shared.tile_sizes |= {call.identity: Timed(None, 8.0, 8.0) for call in calls}
        tune.set_tile_sizes(shared, job, outcomes[2], None)
    return [outcome.plan.sites[0].reason for outcome in outcomes]


@pytest.mark.slow
def test_rank_that_compiles_alone_uses_only_agreed_results(ranks2):
    for first, second, third in ranks2.run(alone):
        assert f"encode {tune.ALONE}" in first
        assert f"encode {tune.ALONE}" in second
        assert "encode 8.0 us; decode+sum 8.0 us" in third


def store_is_gone() -> str:
    def gone(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    outcome = outcome_here()
    shared = SimpleNamespace(strict=False, timeout=None, tile_sizes={})
    job = SimpleNamespace(autotune_s=10.0, direction="forward", number="0", decompositions=None)
    with (
        fake_cuda.a_card(),
        patch.object(agreed_tiles, "publish", gone),
        patch.object(tune, "_timed", lambda *_: agreed_tiles.TileSizes()),
    ):
        try:
            tune.set_tile_sizes(shared, job, outcome, Round("tests/gone", (0, 1)))
        except Unanswered as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_store_that_does_not_answer_is_named(ranks2):
    for text in ranks2.run(store_is_gone):
        assert "the store of torch.distributed does not answer (Connection reset by peer)" in text


# --- owners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "pairwise", "owner"),
    [((1, 3), False, 1), ((3,), False, 3), ((1, 3, 9), False, 3), ((0, 1), False, 3)],
)
def test_first_rank_of_a_group_times_its_kernels(members, pairwise, owner):
    """Rank 3 itself does, if its group is not whole in the round."""
    site: Any = SimpleNamespace(pairwise=pairwise, global_ranks=members)
    assert tune._owner(site, Round("r", (0, 1, 2, 3)), 3) == owner


def test_each_end_of_a_message_times_its_own_kernels():
    site: Any = SimpleNamespace(pairwise=True, global_ranks=(1, 3))
    assert tune._owner(site, Round("r", (0, 1, 2, 3)), 3) == 3


def test_one_bound_of_time_holds_for_all_ranks_that_do_not_answer(monkeypatch):
    waited, clock = [], [0.0]

    def receive(_store, _round, owner, patience_s, start):
        left_s = start + patience_s - clock[0]
        waited.append((owner, left_s))
        clock[0] += left_s
        return agreed_tiles.TileSizes(failure="no answer")

    monkeypatch.setattr(agreed_tiles, "receive", receive)
    monkeypatch.setattr(agreed_tiles, "publish", lambda _store, _round, sizes: sizes)
    monkeypatch.setattr(tune, "current_store", lambda: SimpleNamespace(rank=2))
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    members = {"first": (0, 2), "second": (1, 2)}
    sites = [SimpleNamespace(name=n, pairwise=False, global_ranks=m) for n, m in members.items()]
    nodes = [
        SimpleNamespace(mark=SimpleNamespace(site=name), call=SimpleNamespace(identity=name))
        for name in members
    ]
    shared = SimpleNamespace(strict=False, timeout=None, tile_sizes={})
    outcome = SimpleNamespace(plan=SimpleNamespace(sites=sites))
    job, round = SimpleNamespace(autotune_s=10.0), Round("tests/bound", (0, 1, 2))
    found = tune._agreed(shared, job, outcome, round, nodes)
    assert waited == [(0, 10.0 + tune.PATIENCE_S), (1, 0.0)]
    assert {timed.note for timed in found.values()} == {"not timed: no answer"}
