"""A collective in one kernel, on ranks that are processes.

Each process interprets the kernel over memory that all have mapped. They really run at once, and
really wait for each other's signals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanging import ALL, FORMS, exchange_of, mapped, part_of, plain
from plain_form import bits_of, plainly, sample
from processes import Ranks
from tiers import rarely

import commpass
from commpass.codecs import codec

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")
pytestmark = pytest.mark.xdist_group("ranks")

PROGRAMS = 2
SHORT = 40
"""The number of polls of the signals, reduced for ranks that never arrive."""


def _ranks(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size, {"TRITON_INTERPRET": "1"})
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="module")
def ranks4() -> Iterator[Ranks]:
    yield from _ranks(4)


# --- on a rank ------------------------------------------------------------------------------------


def values(numel: int, dtype: torch.dtype, rank: int, call: int) -> torch.Tensor:
    """Return the input of a rank in a call."""
    return sample(numel, dtype, 100 * call + rank)[call % 3].contiguous()


def several(folder: Path, text: str, name: str, numel: int, dtype, op: str, calls: int, after):
    """Run calls in a row, in each of which a different rank is late.

    Return the results, those of the library's own algorithm, and this rank's memory after each.
    ``after`` is the number of earlier calls.
    """
    from commpass.lowering.gpu.exchange import capacity_for, memory_of, run, unsupported_reason

    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = exchange_of(name, codec(text), dtype, numel, ranks, op, PROGRAMS)
    assert unsupported_reason(exchange, processors=PROGRAMS) == ""
    space = mapped(folder, capacity_for([exchange]))
    first = memory_of(space.capacity).counters
    space.memory[first : first + 4 * space.capacity.programs].view(torch.int32).fill_(after)
    made, wanted, held = [], [], []
    for call in range(calls):
        x = values(numel, dtype, rank, call)
        if rank == call % ranks:
            time.sleep(0.2)
        made.append(run(space, exchange, x))
        held.append(space.memory.clone())
    assert space.missing() == []
    for call in range(calls):
        x = values(numel, dtype, rank, call)
        with plainly():
            wanted.append(composed(name, x, op, codec(text)))
    return made, wanted, held


def composed(name: str, x: torch.Tensor, op: str, coder) -> torch.Tensor:
    """Return the result of the library's own algorithm."""
    if name == "all_gather":
        return commpass.all_gather(x, codec=coder, algorithm="direct")
    if name == "reduce_scatter":
        return commpass.reduce_scatter(x, op=op, codec=coder, algorithm="direct")
    return commpass.all_reduce(x, op=op, codec=coder, algorithm=name)


def one_after_another(folder: Path, calls: tuple[tuple[str, str, int], ...]):
    """Run calls, of which name, codec and number of values differ, in one memory. Return the
    results."""
    from commpass.lowering.gpu.exchange import capacity_for, run

    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    every = [
        exchange_of(name, codec(text), dtype, numel, ranks, "sum", PROGRAMS)
        for name, text, numel in calls
    ]
    space, made = mapped(folder, capacity_for(every)), []
    for call, exchange in enumerate(every):
        if rank == call % ranks:
            time.sleep(0.05)
        made.append(run(space, exchange, values(exchange.numel, dtype, rank, call)))
    assert space.missing() == []
    return made


def alone(folder: Path, name: str, gone: int):
    """Run calls in which one rank is missing, then one in which none is."""
    from commpass.lowering.gpu.exchange import capacity_for, run

    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = exchange_of(name, codec("int8"), torch.float32, 900, ranks, "sum", PROGRAMS)
    space = mapped(folder, capacity_for([exchange]), SHORT)
    x = values(900, torch.float32, rank, 0)
    made = [] if rank == gone else [run(space, exchange, x)]
    missing = space.missing()
    dist.barrier()
    made.append(run(space, exchange, x))
    made.append(run(space, exchange, x))
    return made, missing


# --- correct results ------------------------------------------------------------------------------


def agree(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether bits are equal; any two NaNs are equal."""
    nan = found.isnan()
    if not torch.equal(nan, want.isnan()):
        return False
    return torch.equal(bits_of(found.masked_fill(nan, 0)), bits_of(want.masked_fill(nan, 0)))


def check(ranks: Ranks, folder: Path, text, name, numel, dtype, op="sum", calls=3, after=0) -> None:
    from commpass.lowering.gpu.exchange_sizes import BUFFERS, capacity_for, memory_of

    if name == "reduce_scatter":
        numel = numel // ranks.size * ranks.size
    given = (text, name, numel, dtype, op)
    results = ranks.run(several, folder, *given, calls, after)
    exchange = exchange_of(name, codec(text), dtype, numel, ranks.size, op, PROGRAMS)
    at = memory_of(capacity_for([exchange]))
    for call in range(calls):
        brought = [values(numel, dtype, rank, call) for rank in range(ranks.size)]
        wires, coded, want = plain(codec(text), name, brought, op)
        for rank, (made, library, memory) in enumerate(results):
            if name != "reduce_scatter":
                assert torch.equal(bits_of(made[call]), bits_of(results[0][0][call])), "not law 1"
            assert agree(made[call], part_of(name, want, rank, ranks.size))
            assert agree(made[call], library[call])
            buffer = (after + call + 1) % BUFFERS  # calls are counted from 1
            first = at.wires + buffer * exchange.buffer_bytes
            lies = memory[call][first : first + exchange.buffer_bytes]
            wrote = [*wires[rank], *coded[rank : rank + 1]]
            assert torch.equal(lies, torch.cat([each.flatten() for each in wrote]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_calls_of_several_sizes_share_memory(ranks2, tmp_path, name):
    """Larger, smaller and equal calls follow each other; the layout of a wire differs."""
    check_calls(ranks2, tmp_path, tuple((name, "int8", numel) for numel in (900, 130, 800)))


def check_calls(ranks: Ranks, folder: Path, calls: tuple[tuple[str, str, int], ...]) -> None:
    results = ranks.run(one_after_another, folder, calls)
    for call, (name, text, numel) in enumerate(calls):
        brought = [values(numel, torch.bfloat16, rank, call) for rank in range(ranks.size)]
        want = plain(codec(text), name, brought, "sum")[2]
        for rank, made in enumerate(results):
            assert agree(made[call], part_of(name, want, rank, ranks.size))


KINDS = (
    *(("one_shot", "int8", 900), ("two_shot", "fp8", 3000), ("all_gather", "int6", 1040)),
    *(("reduce_scatter", "int8", 2600), ("one_shot", "rotated", 130), ("two_shot", "int8", 900)),
)


@pytest.mark.parametrize("first", [0, *map(rarely, range(1, len(KINDS)))])
def test_calls_of_all_kinds_share_memory(ranks2, tmp_path, first):
    check_calls(ranks2, tmp_path, (*KINDS[first:], *KINDS[:first]))


@pytest.mark.every
def test_calls_of_all_kinds_share_memory_of_four_ranks(ranks4, tmp_path):
    check_calls(ranks4, tmp_path, KINDS)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("text", "numel", "dtype"),
    [
        ("int8", 3000, torch.bfloat16),
        ("rotated", 2500, torch.float32),
        ("fp8", 1900, torch.float16),
        ("int6", 2100, torch.bfloat16),
    ],
)
def test_two_ranks(ranks2, tmp_path, text, name, numel, dtype):
    check(ranks2, tmp_path, text, name, numel, dtype)


@pytest.mark.every
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("text", "numel", "dtype"),
    [("int8", 2600, torch.bfloat16), rarely("rotated(bits=4)", 4100, torch.bfloat16)],
)
def test_four_ranks(ranks4, tmp_path, text, name, numel, dtype):
    check(ranks4, tmp_path, text, name, numel, dtype, calls=4)


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_mean(ranks2, tmp_path, name):
    check(ranks2, tmp_path, "fp8(form=e5m2)", name, 1300, torch.float32, op="avg")


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", ["int8(rounding=stochastic)", "sdp4bit", "tahquant(block=64)"])
def test_other_parts(ranks2, tmp_path, name, text):
    check(ranks2, tmp_path, text, name, 1500, torch.bfloat16, calls=2)


@pytest.mark.every
@pytest.mark.parametrize("name", ALL)
def test_fewer_values_than_a_block_and_ranks(ranks4, tmp_path, name):
    check(
        ranks4, tmp_path, "int8", name, 4 if name == "reduce_scatter" else 3, torch.float32, calls=2
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_numbers_of_calls_wrap_around(ranks2, tmp_path, name):
    check(ranks2, tmp_path, "int8", name, 900, torch.bfloat16, calls=4, after=2**31 - 2)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("size", "gone"), [(2, 1), rarely(4, 2)])
def test_rank_that_waits_in_vain_names_the_other_and_makes_no_numbers(
    request, tmp_path, size, gone, name
):
    """It never returns numbers again: the others have no wire of that rank, or not the right
    one."""
    if size == 4 and name == "two_shot":
        why = "rank 1 names rank 0, which gave up first, and not the rank that rank 0 waited for"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    results = request.getfixturevalue(f"ranks{size}").run(alone, tmp_path, name, gone)
    for rank, (made, missing) in enumerate(results):
        if rank != gone:
            assert gone in missing  # and those whose later programs saw that, and gave up
            assert all(bool(each.isnan().all()) for each in made)
    late, after = results[gone][0]
    assert bool(after.isnan().all())
    if name == "two_shot":
        assert bool(late.isnan().all())  # no rank has made the sums of the other shards
        return
    # The programs of the others that had begun have left their wires of the call that it missed: it
    # gets the right result, or NaN.
    brought = [values(900, torch.float32, rank, 0) for rank in range(size)]
    want = part_of(name, plain(codec("int8"), name, brought, "sum")[2], gone, size)
    got = late.isfinite()
    # The interpreter runs the programs of a rank in turn. In a reduce_scatter, one for the own
    # shard may give up before those for the late rank have begun.
    assert bool(got.any()) or name == "reduce_scatter"
    assert torch.equal(late[got], want[got])


def refused() -> str:
    from commpass.errors import CommpassError
    from commpass.lowering.gpu.exchange import all_reduce

    with pytest.raises(CommpassError) as told:
        all_reduce(torch.ones(300))
    return str(told.value)


@pytest.mark.slow
def test_all_ranks_say_what_stands_in_the_way(ranks2):
    for said in ranks2.run(refused):
        assert said == "no kernel: rank 0: tensors on cpu: ranks access the memory of GPUs"


def refused_for_its_shape(folder: Path) -> str:
    """Divide a tensor, and then another of as many values, which rank 1 cannot divide."""
    from unittest import mock

    from commpass.errors import CommpassError
    from commpass.lowering.gpu import exchange

    card = exchange.Card(f"GPU of rank {dist.get_rank()}", 8, 32)

    def create(wanted, group, device):
        return mapped(folder, wanted), ""

    with (
        mock.patch.object(exchange, "_card", return_value=(card, "")),
        mock.patch.object(exchange, "_create", create),
    ):
        assert exchange.reduce_scatter(torch.ones(4, 150)).shape == (2, 150)
        with pytest.raises(CommpassError) as told:
            exchange.reduce_scatter(torch.ones((2, 300) if dist.get_rank() == 0 else (3, 200)))
    return str(told.value)


@pytest.mark.slow
def test_shape_that_one_rank_cannot_divide_is_an_error_on_all(ranks2, tmp_path):
    for said in ranks2.run(refused_for_its_shape, tmp_path):
        assert "rank 1: reduce_scatter of 3 entries: they are no multiple of 2 ranks" in said


# --- in graphs ------------------------------------------------------------------------------------

VALUES = 3002


def planned_and_run(folder: Path, name: str):
    """Plan a graph of a GPU with a required single kernel, and run it on this CPU twice, in memory
    that the ranks have mapped. Return the results."""
    import fake_cuda
    from graphs import ops

    from commpass.costmodel import default_profile
    from commpass.lowering.exchange import PeerMemory, programs_of
    from commpass.lowering.gpu import exchange
    from commpass.passes import GraphInput, manager
    from commpass.passes.fx.marks import has_single_kernels
    from commpass.passes.single_kernel import exchange_for
    from commpass.policy import Policy
    from commpass.policy.rules import Rule

    group, memory = dist.group.WORLD, PeerMemory(programs=4, capability=(9, 0))

    kind, algorithm = FORMS[name]
    call = {
        "all_reduce": lambda x: ops.all_reduce(x, "sum", group.group_name),
        "all_gather": lambda x: ops.all_gather_into_tensor(x, 2, group.group_name),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", 2, group.group_name),
    }[kind]

    def summed(x):
        return [ops.wait_tensor(call(x * 1))]

    rule = Rule(codec="int8", algorithm=algorithm, lowering="single_kernel", force=True)
    with fake_cuda.a_card():
        gm, _ = fake_cuda.trace(summed, values(VALUES, torch.bfloat16, 0, 0))
        given = GraphInput(
            gm=gm,
            direction="forward",
            policy=Policy(rules=[rule], max_error=1.0, check_calls=0),
            profile=default_profile("cuda", "NVIDIA H100 80GB HBM3"),
            kernels=True,
            peer_memory=lambda name: memory,
        )
        outcome = manager.run(given, "0", strict=True)
    assert outcome.error is None, outcome.error
    assert has_single_kernels(gm)
    (site,) = outcome.plan
    found = exchange_for(site, site, memory)
    capacity = exchange.capacity_for([replace(found, programs=programs_of(found, memory))])
    exchange._workspaces[group] = {torch.device("cpu"): [mapped(folder, capacity)]}
    return [gm(values(VALUES, torch.bfloat16, dist.get_rank(), call))[0] for call in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_graph_with_a_single_kernel_has_the_bits_of_the_codec(ranks2, tmp_path, name):
    results = ranks2.run(planned_and_run, tmp_path, name)
    for call in range(2):
        brought = [values(VALUES, torch.bfloat16, rank, call) for rank in range(2)]
        want = plain(codec("int8"), name, brought, "sum")[2]
        for rank, made in enumerate(results):
            assert torch.equal(bits_of(made[call]), bits_of(part_of(name, want, rank, 2)))


def graph_without_memory() -> str:
    """Run the operator in a group that has no memory for it."""
    from commpass.errors import CommpassError
    from commpass.lowering.exchange import EXCHANGE
    from commpass.lowering.gpu import exchange

    exchange._workspaces.pop(dist.group.WORLD, None)
    name = dist.group.WORLD.group_name
    with pytest.raises(CommpassError) as told:
        EXCHANGE(torch.ones(300), name, "all_reduce", "int8", "one_shot", "sum", 2, 1, 32)
    return str(told.value)


@pytest.mark.slow
def test_operator_without_its_memory_raises(ranks2):
    for told in ranks2.run(graph_without_memory):
        assert "torch._dynamo.reset()" in told


def compiled(folder: Path, cards: tuple) -> tuple[list[str], str, list[torch.Tensor], int]:
    """Compile and run a function by the backend, as if this CPU were a GPU of a rank.

    ``cards`` are what the ranks publish. Memory that the ranks have mapped replaces symmetric
    memory. Return the lowerings of both sites, the reason of the first, the results, and how many
    times memory was created.
    """
    from unittest import mock

    from graphs import ops

    from commpass.distributed import peers
    from commpass.distributed.plan_store import open_store
    from commpass.lowering.gpu import exchange
    from commpass.passes import single_kernel

    rank, group, made = dist.get_rank(), dist.group.WORLD, []

    def summed(x):
        total = ops.wait_tensor(ops.all_reduce(x * 2, "sum", group.group_name)) + 1
        every = ops.wait_tensor(ops.all_gather_into_tensor(x[:900] * 3, 2, group.group_name))
        return total, every + 1

    def create(wanted, group, device):
        made.append(wanted)
        place = folder / str(len(made))
        place.mkdir(exist_ok=True)
        return mapped(place, wanted), ""

    torch._dynamo.reset()
    dist.barrier()
    open_store()
    dist.barrier()
    policy = commpass.Policy(
        codecs=["int8"],
        algorithms=["one_shot", "direct"],
        max_error=1.0,
        check_calls=0,
        lowering="single_kernel",
    )
    profile = commpass.Profile("far", commpass.Link(1000.0, 0.1))
    exchange._workspaces.pop(group, None)
    with (
        mock.patch.object(peers, "card_here", return_value=cards[rank]),
        mock.patch.object(exchange, "TRIAL_CALLS", 1),
        mock.patch.object(exchange, "TRIAL_VALUES", 256),
        mock.patch.object(peers, "_device", return_value=torch.device("cpu")),
        mock.patch.object(exchange, "_create", create),
        mock.patch.object(single_kernel, "_unsupported_reason", return_value=""),
    ):
        backend = commpass.backend(policy, profile=profile, strict=True)
        run = torch.compile(summed, backend=backend)
        x = values(VALUES, torch.float32, rank, 0)
        run(x)
        found = run(x)
    sites = commpass.plans()[-1].sites
    return [site.lowering for site in sites], sites[0].reason, list(found), len(made)


def cards_of(second: str = "") -> tuple:
    from commpass.lowering.exchange import PeerCard

    first = PeerCard("host", "0", 68, 32, (9, 0))
    return first, PeerCard("host", "1", 68, 32, (9, 0), second)


@pytest.mark.slow
def test_backend_creates_memory_once_and_runs_single_kernels(ranks2, tmp_path):
    results = ranks2.run(compiled, tmp_path, cards_of())
    brought = [2 * values(VALUES, torch.float32, rank, 0) for rank in range(2)]
    gathered = [3 * values(VALUES, torch.float32, rank, 0)[:900] for rank in range(2)]
    for lowerings, _, (total, every), created in results:
        assert lowerings == ["single_kernel"] * 2
        assert created == 1 + 1  # one in the trial
        assert torch.equal(total, plain(codec("int8"), "one_shot", brought, "sum")[2] + 1)
        assert torch.equal(every, plain(codec("int8"), "all_gather", gathered, "sum")[2] + 1)


def compiled_beside(folder: Path) -> tuple[str, list[str], tuple[torch.Tensor, ...]]:
    """Compile and run by the backend, as if this CPU were a GPU of a rank, a sum and matmuls that
    do not need it. Return the plan's reason, what ran in order, and the results."""
    from unittest import mock

    from graphs import ops

    from commpass.distributed import peers
    from commpass.distributed.plan_store import open_store
    from commpass.lowering.gpu import exchange, side_stream
    from commpass.passes import single_kernel

    rank, group, ran = dist.get_rank(), dist.group.WORLD, []

    def function(x, w):
        sent = ops.all_reduce(x * 2, "sum", group.group_name)
        square = w @ w
        return ops.wait_tensor(sent) + 1, square

    def create(wanted, group, device):
        return mapped(folder, wanted), ""

    def noted(name, real):
        def run(*given):
            ran.append(name)
            return real(*given)

        return run

    torch._dynamo.reset()
    dist.barrier()
    open_store()
    dist.barrier()
    exchange._workspaces.pop(group, None)
    rule = commpass.Rule(codec="int8", algorithm="one_shot", lowering="single_kernel", force=True)
    policy = commpass.Policy(rules=[rule], max_error=1.0, check_calls=0)
    with (
        mock.patch.object(peers, "card_here", return_value=cards_of()[rank]),
        mock.patch.object(exchange, "trial", return_value=""),
        mock.patch.object(peers, "_device", return_value=torch.device("cpu")),
        mock.patch.object(exchange, "_create", create),
        mock.patch.object(single_kernel, "_unsupported_reason", return_value=""),
        mock.patch.object(side_stream, "start", noted("start", side_stream.start)),
        mock.patch.object(side_stream, "wait", noted("wait", side_stream.wait)),
    ):
        profile = commpass.Profile("far", commpass.Link(1000.0, 0.1))
        run = torch.compile(
            function, backend=commpass.backend(policy, profile=profile, strict=True)
        )
        given = values(VALUES, torch.float32, rank, 0), torch.eye(256) * (rank + 2)
        run(*given)
        ran.clear()
        found = run(*given)
    assert not side_stream._started
    (site,) = commpass.plans()[-1].sites
    assert site.own_stream, site.reason
    return site.reason, ran, found


@pytest.mark.slow
def test_backend_runs_a_single_kernel_beside_a_matmul(ranks2, tmp_path):
    results = ranks2.run(compiled_beside, tmp_path)
    brought = [2 * values(VALUES, torch.float32, rank, 0) for rank in range(2)]
    want = plain(codec("int8"), "one_shot", brought, "sum")[2] + 1
    for rank, (reason, ran, (made, square)) in enumerate(results):
        assert reason == results[0][0]
        assert "in a separate stream" in reason
        assert ran == ["start", "wait"]
        assert torch.equal(made, want)
        assert torch.equal(square, torch.eye(256) * (rank + 2) ** 2)


@pytest.mark.slow
def test_backend_uses_the_library_on_all_ranks_if_one_has_no_memory(ranks2, tmp_path):
    results = ranks2.run(compiled, tmp_path, cards_of("this torch has no symmetric memory"))
    for lowerings, reason, made, created in results:
        assert ("single_kernel" in lowerings, created) == (False, 0)
        assert "no single kernel: rank 1: this torch has no symmetric memory" in reason
        assert all(map(torch.equal, made, results[0][2]))


def tried(folder: Path, fault: str) -> str:
    """Return what the trial of the group says, with a fault on rank 1."""
    from unittest import mock

    from commpass.lowering.gpu import exchange

    right, is_faulty = exchange.run, dist.get_rank() == 1

    def run(space, wanted, x):
        if fault == "absent" and is_faulty:
            return torch.zeros_like(x)
        return right(space, wanted, x) + (1.0 if fault == "wrong" and is_faulty else 0.0)

    def create(wanted, group, device):
        return mapped(folder, wanted), ""

    with (
        mock.patch.object(exchange, "_create", create),
        mock.patch.object(exchange, "run", run),
        mock.patch.object(exchange, "TRIAL_SPINS", SHORT if fault == "absent" else 1 << 26),
    ):
        return exchange.trial(dist.group.WORLD, torch.device("cpu"), 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("", ""),
        ("wrong", "rank 1: CommpassError: its kernel summed known values wrongly"),
        ("absent", "rank 0: CommpassError: its kernel did not see signals of ranks [1]"),
    ],
)
def test_trial_finds_that_exchanges_are_right(ranks2, tmp_path, fault, why):
    assert ranks2.run(tried, tmp_path, fault) == [why] * 2
