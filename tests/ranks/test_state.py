"""Error feedback on real ranks: nothing is lost between steps, between runs, or if the number of
ranks changes."""

from __future__ import annotations

import dataclasses
import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_helpers import commpass_messages, forget_process, gather_objects
from refusals import refusals
from tiers import crossed, rarely, sampled
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpass
from commpass.codecs import codec
from commpass.distributed.integration import Integration
from commpass.distributed.owners import Code, local_part, owner_of, state_owners
from commpass.distributed.state import unused
from commpass.distributed.state.loaded import loads
from commpass.distributed.state.names import Name, parse
from commpass.distributed.state.redistribute import redistributed
from commpass.distributed.state.residuals import residual
from commpass.errors import PolicyError
from commpass.passes.results import StateInput

pytestmark = pytest.mark.xdist_group("ranks")

ops = torch.ops._c10d_functional
POLICY = commpass.Policy(
    rules=[commpass.Rule(codec="topk(density=0.1)", direction="backward", force=True)]
)
STEPS = 6
CPU = torch.device("cpu")
held: list[torch.Tensor] = []
"""The weight that was trained last, which keeps its residuals alive."""


def sum_gradients(gradient, op):
    return ops.wait_tensor(ops.all_reduce(gradient, op, dist.group.WORLD.group_name))


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks, as for a parameter in data
    parallelism."""

    @staticmethod
    def forward(ctx, x, op):
        ctx.op = op
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return sum_gradients(gradient, ctx.op), None


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(steps: range, op: str = "sum", scale: float = 1.0, inner: str = "inductor"):
    """Return (sum of the applied gradients, sum of the exact gradients of all ranks) in float64."""
    weight = torch.ones(64, 32, requires_grad=True)
    held[:] = [weight]
    step = torch.compile(
        lambda w, x: (x @ Summed.apply(w, op)).square().sum() * scale,
        fullgraph=True,
        backend=commpass.backend(POLICY, inner=inner, strict=True),
    )
    given, own = torch.zeros(64, 32, dtype=torch.float64), torch.zeros(64, 32, dtype=torch.float64)
    for number in steps:
        x = batch(dist.get_rank(), number)
        weight.grad = None
        step(weight, x).backward()
        given += weight.grad.double()
        own += (2 * x.double().t() @ (x.double() @ torch.ones(64, 32, dtype=torch.float64))) * scale
    assert commpass.plans()[-1].sites[0].algorithm == "sparse"
    return given, sum(gather_objects(own)) / (dist.get_world_size() if op == "avg" else 1)


def all_residuals() -> torch.Tensor:
    return sum(
        sum(t.double() for t in theirs.values()) for theirs in gather_objects(commpass.state_dict())
    )


def check_sum(op: str, inner: str) -> None:
    forget_process()
    given, exact = train(range(STEPS), op, inner=inner)
    (kept,) = commpass.state_dict().values()
    assert (kept.shape, kept.dtype) == ((64, 32), torch.float32)
    assert (
        kept.abs().max() > 0.1 * exact.abs().max() / dist.get_world_size()
    )  # much is held back, or nothing would be tested
    left = all_residuals() / (dist.get_world_size() if op == "avg" else 1)
    assert (given + left - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (given - exact).abs().max() > 0.01 * exact.abs().max()
    assert len({t.numpy().tobytes() for t in gather_objects(given)}) == 1  # law 1


@pytest.mark.parametrize(
    ("op", "inner"), [("sum", "aot_eager"), rarely("sum", "inductor"), rarely("avg", "inductor")]
)
def test_sent_values_and_residuals_are_the_sum_of_all_gradients(op, inner, ranks3):
    ranks3.run(check_sum, op, inner)


def save(folder: str, op: str, inner: str):
    forget_process()
    given, exact = train(range(STEPS), op, inner=inner)
    dcp.save(
        {"commpass": commpass.state_dict(), "other": {"x": torch.ones(2)}}, checkpoint_id=folder
    )
    return given, exact, all_residuals() / (dist.get_world_size() if op == "avg" else 1)


def resume(folder: str, op: str, inner: str, compiled_first: bool):
    forget_process()
    if compiled_first:  # then the state replaces an existing one
        train(range(1), op, 3.0, inner)
    saved = commpass.state_dict(of=folder)
    dcp.load({"commpass": saved}, checkpoint_id=folder)
    commpass.load_state_dict(saved)
    carried = all_residuals() / (dist.get_world_size() if op == "avg" else 1)
    torch._dynamo.reset()
    if compiled_first:
        return carried, None, None, None
    given, exact = train(range(STEPS), op, inner=inner)
    return carried, given, exact, all_residuals() / (dist.get_world_size() if op == "avg" else 1)


CHECKPOINTS = crossed(
    [(2, 4), (4, 2), (3, 3), (2, 3), (3, 2)], ["sum", "avg"], ["aot_eager", "inductor"], one_in=2
)
QUICK = [((3, 2), "sum", "aot_eager"), ((2, 3), "avg", "aot_eager")]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("sizes", "op", "inner"), sampled(CHECKPOINTS, QUICK), ids=str)
def test_checkpoint_of_some_ranks_is_carried_on_by_others(sizes, op, inner, tmp_path, request):
    before, after = sizes
    folder = str(tmp_path / "checkpoint")
    _, _, left = request.getfixturevalue(f"ranks{before}").run(save, folder, op, inner)[0]
    ranks = request.getfixturevalue(f"ranks{after}")
    for _, given, exact, still in ranks.run(resume, folder, op, inner, False):
        assert (given + still - exact - left).abs().max() <= 1e-5 * exact.abs().max()
    for carried, *_ in ranks.run(resume, folder, op, inner, True):
        assert (carried - left).abs().max() <= 1e-5 * left.abs().max()


def check_recompiled(inner: str) -> None:
    """Another batch size recompiles: the residual of the gradient, whose shape is the same, is
    kept."""
    forget_process()
    weight = torch.ones(64, 32, requires_grad=True)
    step = torch.compile(
        lambda w, x: (x @ Summed.apply(w, "sum")).square().sum(),
        dynamic=False,
        backend=commpass.backend(POLICY, inner=inner, strict=True),
    )
    seen = len(commpass.plans())
    for rows in (8, 5, 8):
        step(weight, batch(dist.get_rank(), 0)[:rows]).backward()
    assert len([plan for plan in commpass.plans()[seen:] if plan.direction == "backward"]) == 2
    assert len(commpass.state_dict()) == 1
    commpass.load_state_dict({})
    assert all((kept == 0).all() for kept in commpass.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_function_that_is_compiled_again_keeps_its_residuals(inner, ranks2):
    ranks2.run(check_recompiled, inner)


def check_two_functions() -> None:
    """Two functions whose sites have the same place and shape keep separate residuals."""
    weight = torch.ones(64, 32, requires_grad=True)

    def one(w, x):
        return (x @ Summed.apply(w, "sum")).square().sum()

    def two(w, x):
        return one(w, x) * 2

    kept = []
    for order in ((one, two, one), (two, one, one)):
        forget_process()
        backend = commpass.backend(POLICY, inner="eager", strict=True)
        compiled = {function: torch.compile(function, backend=backend) for function in (one, two)}
        for function in order:
            compiled[function](weight, batch(dist.get_rank(), 0)).backward()
        kept.append(commpass.state_dict())
    first, second = kept
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    of_one, of_two = (next(n for n in first if f".{name}/root/" in n) for name in ("one", "two"))
    assert not torch.equal(first[of_one], first[of_two])


def check_namesakes() -> str:
    """Two functions of one name: a loaded residual could not be assigned to either."""
    forget_process()
    weight = torch.ones(64, 32, requires_grad=True)
    backend = commpass.backend(POLICY, inner="eager", strict=True)
    one = torch.compile(lambda w, x: (x @ Summed.apply(w, "sum")).sum(), backend=backend)
    two = torch.compile(lambda w, x: (x @ Summed.apply(w, "sum")).sum() * 2, backend=backend)
    for function in (one, two):
        function(weight, batch(dist.get_rank(), 0)).backward()
    return refusals(commpass.state_dict)[0]


@pytest.mark.slow
def test_residuals_that_could_not_be_distinguished_are_not_saved(ranks2):
    assert "several" in ranks2.run(check_namesakes)[0]


@pytest.mark.slow
def test_two_functions_keep_residuals_of_their_own(ranks2):
    ranks2.run(check_two_functions)


@pytest.mark.slow
def test_residuals_by_hand(ranks3):
    ranks3.run(check_by_hand)


def check_by_hand() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for spec in (
        "topk(density=0.05)",
        "dgc",
        "randomk(density=0.3)",
        "topk(density=0.2, values=int8)",
        "topk(density=0.9)",
    ):
        for dtype in (torch.float32, torch.bfloat16):
            residual = torch.zeros(500, 3, dtype=torch.float32)
            sent, given = (
                torch.zeros(500, 3, dtype=torch.float64),
                torch.zeros(500, 3, dtype=torch.float64),
            )
            for step in range(5):
                x = torch.randn(
                    500, 3, generator=torch.Generator().manual_seed(10 * rank + step)
                ).to(dtype)
                result = commpass.all_reduce(x, codec=spec, residual=residual)
                assert (result.dtype, result.shape) == (dtype, x.shape)
                sent, given = sent + result.double(), given + x.double()
            total, left = sum(gather_objects(given)), sum(gather_objects(residual.double()))
            rounding = 5 * size * 2**-8 if dtype == torch.bfloat16 else 1e-5
            assert (sent + left - total).abs().max() <= rounding * total.abs().max(), (spec, dtype)
            assert residual.abs().max() > 0, (spec, dtype)
    bad = torch.full((64,), 1.0)
    bad[3] = float("nan") if rank == 0 else 1.0
    residual = torch.zeros(64)
    assert not commpass.all_reduce(bad, codec="topk(density=0.1)", residual=residual)[3].isfinite()
    assert residual.isfinite().all()  # otherwise every later step would be lost as well


def check_compiled_by_hand(backend: str) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(dist.get_rank()))
    left, other = torch.zeros(300), torch.zeros(300)
    function = torch.compile(
        lambda x, r: commpass.all_reduce(x, codec="topk(density=0.1)", residual=r),
        fullgraph=True,
        backend=backend,
    )
    for _ in range(3):
        assert torch.equal(
            function(x, left), commpass.all_reduce(x, codec="topk(density=0.1)", residual=other)
        )
        assert torch.equal(left, other)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", rarely("inductor")])
def test_residuals_by_hand_compiled(backend, ranks2):
    ranks2.run(check_compiled_by_hand, backend)


def check_refused() -> list[str]:
    x = torch.ones(6, 2)
    return refusals(
        lambda: commpass.all_reduce(x, codec="topk"),
        lambda: commpass.all_reduce(x.bfloat16(), codec="topk"),
        lambda: commpass.all_reduce(x, codec="topk", residual=torch.zeros(6)),
        lambda: commpass.all_reduce(
            x, codec="topk", residual=torch.zeros(6, 2, dtype=torch.bfloat16)
        ),
        lambda: commpass.all_reduce(x, codec="int8", residual=torch.zeros(6, 2)),
        lambda: commpass.all_reduce(
            x, codec="topk", algorithm="two_shot", residual=torch.zeros(6, 2)
        ),
        lambda: commpass.all_gather(x, codec="topk"),
    )


def test_impossible_calls_by_hand_are_refused(ranks2):
    said = ranks2.run(check_refused)[0]
    parts = [
        "residual=torch.zeros_like(x), and",
        "residual=torch.zeros(x.shape, dtype=torch.float32, device=x.device)",
        "[6] of torch.float32",
        "torch.bfloat16",
        "selects no indices",
        "'sparse'",
        "'sparse'",
    ]
    for text, part in zip(said, parts, strict=True):
        assert part in text


def check_inference() -> list[str]:
    forget_process()
    said = []
    for force in (False, True):
        policy = commpass.Policy(rules=[commpass.Rule(codec="topk", force=force)])
        function = torch.compile(
            lambda x: sum_gradients(x * 2, "sum"), backend=commpass.backend(policy)
        )
        x = torch.randn(64, 64)
        with torch.no_grad():
            if not force:
                assert torch.equal(function(x), sum_gradients(x * 2, "sum"))
                said.append(commpass.plans()[-1].sites[0].reason)
                continue
            with commpass_messages() as logged, pytest.raises(PolicyError) as error:
                function(x)
            assert not any("untouched" in each for each in logged), logged  # it raised
            said.append(str(error.value))
    return said


def test_inference_keeps_no_state(ranks2):
    left_alone, refused = ranks2.run(check_inference)[0]
    assert "topk needs error feedback, but inference has no next step" in left_alone
    assert "forces a codec on all_reduce" in refused
    assert "direction='backward'" in refused


# --- names and errors, without ranks --------------------------------------------------------------


@pytest.fixture
def kept(fake_group):
    fake_group(2)
    forget_process()
    name = Name("-", "f", "layers.0.mlp/backward/all_reduce/float32[4]/0", "sum", "world", 0, 2)
    weight = torch.nn.Parameter(torch.ones(1))
    owner_of([weight]).state[0, name] = name, torch.arange(4.0)
    yield name
    forget_process()


def test_name_of_a_residual_is_its_key_in_a_checkpoint(kept):
    assert parse(str(kept)) == kept
    (key,) = commpass.state_dict()
    assert key == "commpass.v2/-/f/layers.0.mlp/backward/all_reduce/float32[4]/0/sum/world/0of2"


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (5, 2), (3, 3), (1, 3)])
def test_residuals_of_lost_ranks_are_shared_out_whole(before, after, op):
    """Each residual goes to one rank; those of a mean are scaled by the ratio of the numbers of
    ranks."""

    def of(rank: int, ranks: int) -> Name:
        return Name("-", "f", "root/backward/all_reduce/float32[4]/0", op, "world", rank, ranks)

    given = {of(rank, before): torch.full((4,), 2.0**rank) for rank in range(before)}
    shared = [redistributed(of(rank, after), torch.zeros(4), given) for rank in range(after)]
    factor = after / before if op == "avg" else 1.0
    assert torch.allclose(sum(shared), sum(given.values()) * factor)


PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""The first rank of each of two groups, and the ranks in it."""


def test_residuals_of_another_group_are_not_taken():
    """Each of two groups of a mesh has its own residual of the same site."""

    def of(first: int, rank: int) -> Name:
        return Name("-", "f", "root/backward/all_reduce/float32[4]/0", "sum", str(first), rank, 2)

    given = {of(first, rank): torch.full((4,), 10.0 * first + rank) for first, rank in PLACES}
    for name, value in given.items():
        assert torch.equal(redistributed(name, torch.zeros(4), given), value)


def test_reset_drops_residuals_and_references(kept):
    (owner,) = state_owners()
    owner.references["site", "0"] = object(), torch.ones(4)
    commpass.reset_state()
    assert not commpass.state_dict()
    assert not owner.references


def other(name: Name, **changes) -> str:
    import dataclasses

    return str(dataclasses.replace(name, **changes))


FOREIGN = {
    "no state of ours": (lambda n: {"weight": torch.ones(4)}, ["'weight'", "commpass.v2/"]),
    "newer": (
        lambda n: {str(n).replace("v2", "v3"): torch.ones(4)},
        ["version 3", "up to 2", "update commpass"],
    ),
    "older": (
        lambda n: {
            "commpass.v1/a/backward/all_reduce/float32[4]/0#2/sum/world/0of2": torch.ones(4)
        },
        ["version 1", "order in which code was compiled", "Leave it out"],
    ),
    "no tensor": (lambda n: {str(n): 3}, ["int", "tensors"]),
    "another model": (
        lambda n: {other(n, site="layers.0.mpl/backward/all_reduce/float32[4]/0"): torch.ones(4)},
        ["another model", "layers.0.mlp", "layers.0.mpl", "did you mean", "leave the state out"],
    ),
    "another shape": (
        lambda n: {str(n): torch.ones(5), other(n, rank=1): torch.ones(5)},
        ["[5]", "[4]", "layers.0.mlp"],
    ),
    "another dtype": (lambda n: {str(n): torch.ones(4).double()}, ["float64", "float32"]),
    "another op": (lambda n: {other(n, op="avg"): torch.ones(4)}, ["avg", "sum"]),
    "a rank is missing": (lambda n: {other(n, ranks=4): torch.ones(4)}, ["rank 2"]),
    "one site too many": (
        lambda n: {str(n): torch.ones(4), other(n, site="b"): torch.ones(4)},
        ["another model", "b"],
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_state_is_refused_and_nothing_is_changed(what, kept):
    make, parts = FOREIGN[what]
    with pytest.raises(PolicyError) as error:
        commpass.load_state_dict(make(kept))
    for part in parts:
        assert part in str(error.value)
    (still,) = commpass.state_dict().values()
    assert torch.equal(still, torch.arange(4.0))
    assert not loads()


def stored(state: dict[str, torch.Tensor], folder) -> dict[str, torch.Tensor]:
    """Return a state that was saved in a folder, as far as this rank continues with it."""
    dcp.save({"commpass": state}, checkpoint_id=folder, no_dist=True)
    found = commpass.state_dict(of=folder)
    dcp.load({"commpass": found}, checkpoint_id=folder, no_dist=True)
    return found


SITE = "layers.0.mlp/backward/all_reduce/float32[4]/0"
OF_ONE_RANK = Name("-", "f", SITE, "sum", "world", 0, 1)


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({other(OF_ONE_RANK, site="layers.0.mpl"): torch.ones(4)}, "another model"),
        ({str(OF_ONE_RANK): torch.ones(5)}, r"\[5\] .* \[4\]"),
        ({str(OF_ONE_RANK): torch.ones(4).double()}, "float64.*float32"),
        ({other(OF_ONE_RANK, op="avg"): torch.ones(4)}, "avg.*sum"),
        ({other(OF_ONE_RANK, site=site): torch.ones(4) for site in (SITE, "b")}, "another model"),
    ],
    ids=["model", "shape", "dtype", "op", "site"],
)
def test_state_is_refused_also_by_a_rank_that_gets_none_of_it(state, part, fake_group, tmp_path):
    """Otherwise it would wait in the next step for the ranks that have refused it."""
    fake_group(2, rank=1)
    forget_process()
    name = dataclasses.replace(OF_ONE_RANK, rank=1, ranks=2)
    weight = torch.nn.Parameter(torch.ones(1))
    owner_of([weight]).state[0, name] = name, torch.arange(4.0)
    found = stored(state, tmp_path)
    assert found == {}
    with pytest.raises(PolicyError, match=part):
        commpass.load_state_dict(found)
    (still,) = commpass.state_dict().values()
    assert torch.equal(still, torch.arange(4.0))
    forget_process()


def test_rank_that_gets_nothing_of_a_state_begins_with_zeros(fake_group, tmp_path):
    fake_group(2, rank=1)
    forget_process()
    model = make_model()
    state = {key.replace("0of2", "0of1"): kept for key, kept in state_of(model[0]).items()}
    commpass.load_state_dict(stored(state, tmp_path), model[0])
    assert commpass.state_dict(model[0]) == commpass.state_dict() == {}
    assert take_all(model[0]) == 0
    begun = commpass.state_dict(model[0])
    assert list(begun) == [key.replace("0of1", "1of2") for key in state]
    forget_process()


def test_state_of_another_model_is_refused_by_a_rank_that_gets_none_of_it(fake_group, tmp_path):
    fake_group(2, rank=1)
    forget_process()
    model = make_model()
    state = {key.replace("0of2", "0of1"): kept for key, kept in state_of(model).items()}
    found = stored(state, tmp_path)
    wide = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    keeps_none = Integration()
    said = refusals(
        lambda: commpass.load_state_dict(found, model[0]),
        lambda: commpass.load_state_dict(found, wide),
        lambda: keeps_none.load_state_dict(found),
    )
    for text, part in zip(said, ["another model", "[3, 3]", "given 4 tensors"], strict=True):
        assert part in text
    part = {key: kept for key, kept in state.items() if "v2/0." in key}
    commpass.load_state_dict(stored(part, tmp_path / "part"), model)
    assert take_all(model) == 0
    forget_process()


@pytest.mark.parametrize("began", [False, True], ids=["before the first step", "after it"])
def test_parameter_without_saved_state_begins_with_zeros(began, no_state):
    """Its exchange was not coded when the state was saved, with another policy or network."""
    model = make_model()
    state = state_of(model)
    saved = {key: kept for key, kept in state.items() if "v2/0." in key}
    if began:
        take_all(model)
    commpass.load_state_dict(saved, model)
    assert take_all(model[1]) == 0
    assert take_all(model[0]) == sum(each.numel() for each in model[0].parameters())
    assert commpass.state_dict(model).keys() == state.keys()


def test_other_site_of_a_parameter_with_saved_state_is_refused(no_state):
    model = make_model()
    moved = {key.replace("/ddp/", "/ddp-2/"): kept for key, kept in state_of(model[0]).items()}
    commpass.load_state_dict(moved, model[0])
    assert "another model" in refusals(lambda: take_all(model[0]))[0]


@pytest.mark.parametrize(
    ("rank", "change", "part"),
    [
        (0, lambda key, kept: (key, kept.double()), "of torch.float64, but here it is of"),
        (0, lambda key, kept: (key, kept.int()), "of torch.int32, but here it is of"),
        (1, lambda key, kept: (key, kept), "lacks rank 1 of the group"),
        (0, lambda key, kept: (key, kept.to("meta")), "lacks rank 0 of the group"),
        (0, lambda key, kept: (key.replace("0of2", "1of4"), kept), "lacks rank 0, 2 of the"),
    ],
    ids=["float64", "integers", "of another rank", "not read", "of some of the ranks"],
)
def test_state_is_refused_before_the_step_that_would_take_it(rank, change, part, fake_group):
    """In that step other ranks would wait for this one in vain."""
    fake_group(2, rank=rank)
    forget_process()
    model = make_model()
    state = dict(change(key, kept) for key, kept in state_of(model).items())
    assert part in refusals(lambda: commpass.load_state_dict(state, model))[0]
    assert not commpass.state_dict()
    forget_process()


def test_state_in_float32_is_also_for_parameters_in_other_dtypes(no_state):
    for dtype in (torch.bfloat16, torch.float64):
        model = make_model().to(dtype)
        state = {key: kept.float() for key, kept in state_of(model).items()}
        commpass.load_state_dict(state, model)
        commpass.reset_state()
    wide = make_model().double()
    commpass.load_state_dict(state_of(wide), wide)


def test_state_can_be_loaded_before_the_number_of_ranks_is_known(fake_group):
    forget_process()
    model = make_model()
    state = {key.replace("0of2", "1of2"): kept for key, kept in state_of(model).items()}
    commpass.load_state_dict(state, model)
    assert commpass.state_dict(model) == state
    fake_group(2, rank=1)
    assert take_all(model) == sum(each.numel() for each in model.parameters())
    forget_process()


@pytest.mark.parametrize("began", [False, True], ids=["before the first step", "after it"])
def test_state_in_parameters_is_loaded_as_tensors(began, no_state):
    model = make_model()
    state = {key: torch.nn.Parameter(3 * kept) for key, kept in state_of(model).items()}
    if began:
        take_all(model)
    commpass.load_state_dict(state, model)
    assert take_all(model) == 72
    assert not any(kept.requires_grad for kept in commpass.state_dict(model).values())


def test_state_that_nobody_asked_for_yet_is_saved_again(fake_group):
    fake_group(2)
    forget_process()
    given = {
        str(Name("-", "f", "b/backward/all_reduce/float32[4]/0", "sum", "world", 0, 2)): torch.ones(
            4
        )
    }
    commpass.load_state_dict(given)
    assert list(commpass.state_dict()) == list(given)
    forget_process()


@pytest.mark.parametrize("wrong", [[1], None, 3, {1: torch.ones(4)}, "state"], ids=repr)
def test_what_is_no_state_is_refused_with_what_one_is(wrong, kept):
    model = torch.nn.Linear(2, 2)
    handle, keeps_none = Integration(model), Integration()
    said = refusals(
        lambda: commpass.load_state_dict(wrong),
        lambda: commpass.load_state_dict(wrong, model),
        lambda: handle.load_state_dict(wrong),
        lambda: keeps_none.load_state_dict(wrong),
    )
    assert all("must be tensors by name, as commpass.state_dict(model)" in text for text in said)
    assert len(commpass.state_dict()) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "text"])
def test_damaged_checkpoint_is_named(damage, kept, tmp_path):
    """Torch alone reads the file, and commpass only says which file it is."""
    dcp.save({"commpass": commpass.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    assert set(commpass.state_dict(of=tmp_path)) == {str(kept)}
    whole = file.read_bytes()
    other = b"\x80\x04N."  # None, by the same format
    file.write_bytes({"cut": whole[:40], "empty": b"", "other": other, "text": b"hello"}[damage])
    with pytest.raises(PolicyError) as error:
        commpass.state_dict(of=tmp_path)
    assert str(error.value).startswith(f"{file}: damaged, or not written by torch.distributed")
    assert "an earlier one" in str(error.value)


def test_folder_that_is_no_path_is_refused():
    assert "must be the path of a folder" in refusals(lambda: commpass.state_dict(of=3))[0]


def test_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="no checkpoint"):
        commpass.state_dict(of=os.fspath(tmp_path))


# --- wrappers of a model --------------------------------------------------------------------------


@pytest.fixture
def no_state(fake_group):
    fake_group(2)
    forget_process()
    yield
    forget_process()


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "compile": torch.compile,
    "compile of DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "DDP of compile": lambda model: DistributedDataParallel(torch.compile(model)),
    "DataParallel": torch.nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "FSDP": lambda model: FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    "a module that holds it": lambda model: torch.nn.ModuleDict({"inner": model}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_loaded_for_a_module_is_saved_through_its_wrapper(wrapper, no_state):
    model = make_model()
    given = state_of(model)
    commpass.load_state_dict(given, model)
    wrapped = WRAPPERS[wrapper](model)
    held = "inner." if isinstance(wrapped, torch.nn.ModuleDict) else ""
    expected = {key.replace("v2/", f"v2/{held}"): tensor for key, tensor in given.items()}
    assert commpass.state_dict(wrapped).keys() == expected.keys()
    assert all(commpass.state_dict(wrapped)[key] is expected[key] for key in expected)
    assert commpass.state_dict(model).keys() == given.keys()
    commpass.reset_state(wrapped)
    assert not commpass.state_dict()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_loaded_for_a_wrapper_is_saved_through_its_module(wrapper, no_state):
    model = make_model()
    wrapped = WRAPPERS[wrapper](model)
    held = "inner." if isinstance(wrapped, torch.nn.ModuleDict) else ""
    given = state_of(model)
    commpass.load_state_dict(
        {key.replace("v2/", f"v2/{held}"): tensor for key, tensor in given.items()}, wrapped
    )
    assert commpass.state_dict(model).keys() == given.keys()
    assert commpass.state_dict(wrapped).keys() == {
        key.replace("v2/", f"v2/{held}") for key in given
    }
    if not held:  # what is loaded for a wrapper belongs to its module
        del wrapped
        gc.collect()
        assert commpass.state_dict(model).keys() == given.keys()


def take_all(model: torch.nn.Module) -> float:
    """Return the sum of the residuals that exchanges of a model's gradients begin with."""
    return float(sum(taken_by_ddp(parameter).sum() for parameter in model.parameters()))


def test_state_loaded_for_a_wrapper_replaces_that_of_its_module(no_state):
    model = make_model()
    wrappers = [DistributedDataParallel(model), torch.compile(model)]
    for each in (model, *wrappers):
        commpass.load_state_dict(state_of(model), each)
    assert take_all(model) == sum(each.numel() for each in model.parameters())


def test_state_loaded_for_a_part_of_a_model_replaces_that_of_the_part_alone(no_state):
    model = make_model()
    commpass.load_state_dict(state_of(model), model)
    assert commpass.state_dict(model[1]).keys() == state_of(model[1]).keys()
    commpass.load_state_dict({key: 3 * kept for key, kept in state_of(model[1]).items()}, model[1])
    assert {key: kept.mean() for key, kept in commpass.state_dict(model).items()} == {
        key: 3 if "v2/1." in key else 1 for key in state_of(model)
    }
    assert (take_all(model[0]), take_all(model[1])) == (12, 36)


def test_state_of_a_part_that_was_reset_begins_with_zeros(no_state):
    model = make_model()
    commpass.load_state_dict(state_of(model), model)
    commpass.reset_state(model[1])
    assert all("v2/0." in key for key in commpass.state_dict(model))
    assert (take_all(model[0]), take_all(model[1])) == (12, 0)


def test_state_of_two_models_with_the_same_names_is_kept_apart(no_state):
    one, two = make_model(), make_model()
    for model in (one, two, two, one):
        commpass.load_state_dict(state_of(model), model)
    assert "several instances" in refusals(commpass.state_dict)[0]
    commpass.reset_state(two)
    assert not commpass.state_dict(two)
    assert commpass.state_dict().keys() == commpass.state_dict(one).keys() == state_of(one).keys()


def test_state_loaded_for_a_model_replaces_what_was_loaded_for_any(no_state):
    model = make_model()
    commpass.load_state_dict(state_of(model))
    commpass.load_state_dict(state_of(model), model)
    assert take_all(model) == sum(each.numel() for each in model.parameters())


def make_layer() -> torch.nn.Module:
    return torch.nn.Linear(3, 3, bias=False)


@pytest.mark.parametrize("parameter", ["weight", "-"])
def test_state_loaded_for_any_model_is_saved_with_one_that_may_take_it(parameter, no_state):
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(3, 3))})
    other = torch.nn.ParameterDict({"bias": torch.nn.Parameter(torch.ones(3, 3))})
    given = {
        key.replace("v2/weight/", f"v2/{parameter}/"): kept for key, kept in state_of(model).items()
    }
    commpass.load_state_dict(given)
    assert commpass.state_dict(model) == given
    assert bool(commpass.state_dict(other)) == (parameter == "-")
    assert take_all(model) == 9
    assert commpass.state_dict(model).keys() == state_of(model).keys()
    assert not commpass.state_dict(other)


@pytest.mark.parametrize("by", ["reset", "empty state", "reset of a wrapper"])
def test_model_that_was_reset_takes_nothing_that_was_loaded_for_any(by, no_state):
    """Another model still takes it."""
    model, other = make_layer(), make_layer()
    given = state_of(model)
    commpass.load_state_dict(given)
    if by == "empty state":
        commpass.load_state_dict({}, model)
    else:
        commpass.reset_state(DistributedDataParallel(model) if "wrapper" in by else model)
    assert not commpass.state_dict(model)
    assert commpass.state_dict(other) == given
    assert take_all(model) == 0
    assert take_all(other) == 9


# --- loaded residuals that nobody takes -----------------------------------------------------------


@pytest.fixture
def reports(fake_group, caplog, monkeypatch):
    """Return a function that saves a model's state, and returns the warnings of that."""
    fake_group(2)
    forget_process()
    monkeypatch.setattr(unused, "_warned", [])

    def saved(model: torch.nn.Module | None) -> list[str]:
        caplog.clear()
        commpass.state_dict(model)
        return caplog.messages

    yield saved
    forget_process()


def state_of(model: torch.nn.Module, function: str = "ddp") -> dict[str, torch.Tensor]:
    return {
        str(Name(name, function, "gradient/0", "sum", "world", 0, 2)): torch.ones_like(
            local_part(parameter)
        )
        for name, parameter in model.named_parameters()
    }


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()


def run_sgd(model: torch.nn.Module, steps: int = unused.MOST_CHANGES + 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def test_loaded_residuals_that_training_does_not_send_are_reported_once(reports):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    run_sgd(model, 50)  # before the load
    commpass.load_state_dict(state_of(model), model)
    assert not reports(model)
    with torch.no_grad():
        model(torch.ones(1, 3))
    model.load_state_dict(model.state_dict())
    assert not reports(model)
    run_sgd(model)
    (said,) = reports(model)
    assert "4 loaded residuals not sent" in said
    assert "0.weight/ddp/gradient/0" in said
    assert "and 1 more" in said
    assert "commpass.reset_state(model)" in said
    assert "sparse codec" in said
    assert not reports(model)


def test_loaded_residuals_are_not_reported_before_many_steps(reports):
    """The first steps of DDP send no codes, and gradients may be accumulated over more of them."""
    model = torch.nn.Linear(3, 3)
    commpass.load_state_dict(state_of(model), model)
    run_sgd(model, unused.MOST_CHANGES)
    for _ in range(100):
        backward(model)
    assert not reports(model)
    run_sgd(model, 1)
    assert reports(model)


def freeze(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    model[0](torch.ones(1, 3, requires_grad=True)).sum().backward()


def taken_by_ddp(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the residual that the exchange of a parameter's gradient begins with."""
    kept = StateInput(
        "gradient", 0, (), "sum", "0", tuple(parameter.shape), torch.float32, CPU, parameter
    )
    kept = dataclasses.replace(kept, group=dist.group.WORLD.group_name)
    return residual(kept, 0, Code("", 0, "ddp"), owner_of([parameter]))


def take(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert taken_by_ddp(parameter).sum() == parameter.numel()
    run_sgd(model)


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("outer", run_sgd),  # the next outer step takes it, after many steps
        ("ddp", freeze),
        ("ddp", take),
    ],
)
def test_loaded_residuals_that_can_still_be_sent_are_not_reported(function, use, reports):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    commpass.load_state_dict(state_of(model, function), model)
    use(model)
    assert not reports(model)


def test_loaded_residuals_are_reported_by_the_first_rank_only(reports, monkeypatch):
    model = torch.nn.Linear(3, 3)
    commpass.load_state_dict(state_of(model), model)
    run_sgd(model)
    with monkeypatch.context() as patched:
        patched.setattr(unused, "is_first_rank", lambda: False)
        assert not reports(model)
    assert reports(model)


def test_selectors_need_what_sparse_keeps():
    assert codec("topk").state == "error feedback"
