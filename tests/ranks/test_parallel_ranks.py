"""replicate and shard on real ranks, against one process that sees all batches in float64."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import counting_group
from processes import RanksFailed
from rank_helpers import gather_objects, is_same_on_all_ranks
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpass
from commpass import Policy, Rule
from commpass.parallel import accumulate

pytestmark = pytest.mark.xdist_group("ranks")

WIDTH, BATCH, STEPS, RATE = 20, 6, 4, 0.05
EXACT = "lossless"
INT8 = Policy(rules=[Rule(group="dp", codec="int8", force=True)], max_error=0.1)
ROTATED = Policy(rules=[Rule(group="dp", codec="rotated", force=True)], max_error=0.1)


class Odd(nn.Module):
    """A model with unusual parameters: tied, frozen, unused, without a dimension, with one row,
    with fewer rows than ranks, used in some steps only; and a buffer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, WIDTH)
        self.again = nn.Linear(32, WIDTH, bias=False)
        self.again.weight = self.down.weight
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.spare = nn.Linear(3, 3)
        self.few = nn.Linear(WIDTH, 1)
        self.two = nn.Parameter(torch.ones(2, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.norm(self.up(x + self.shift.to(x.dtype))))
        return self.fixed(self.down(y)) * self.scale + self.again(y) + self.few(x * self.two.sum(0))


def seeded(kind=Odd) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def loss_of(model, x) -> torch.Tensor:
    return (
        model(x).float().square().mean() if x.dtype != torch.float64 else model(x).square().mean()
    )


def reference(ranks: int, micro: int = 1, clip: float | None = None, kind=Odd):
    """Return losses by rank and gradients of each step, in float64, on the batches of all ranks;
    and the parameters after it."""
    model = seeded(kind).double()
    learn = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE, momentum=0.9)
    found = []
    for step in range(STEPS):
        learn.zero_grad()
        batches = [
            batch(micro * step + i, rank).double() for rank in range(ranks) for i in range(micro)
        ]
        losses = [loss_of(model, x) for x in batches]
        (sum(losses) / len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
        found.append(([float(loss) for loss in losses], gradients(model), norm))
        learn.step()
    return found, {name: whole(value) for name, value in model.named_parameters()}


def digest(tensors) -> str:
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(tensor.detach().contiguous().numpy().tobytes())
    return text.hexdigest()


def check_alike(tensors) -> None:
    """Check that all ranks have the same bits."""
    assert is_same_on_all_ranks(digest(tensors))


def close(
    got: torch.Tensor, want: torch.Tensor, bound: float, what: str = "", least: float = 1e-6
) -> None:
    """Compare relative to the expected values, or to ``least`` per value if that is larger."""
    error = (got - want).norm() / want.norm().clamp(min=least * want.numel() ** 0.5)
    assert error <= bound, f"{what}: {error}"


def train(
    how: str,
    policy,
    bound: float,
    inner: str = "eager",
    micro: int = 1,
    clip: float | None = None,
    plan: dict | None = None,
    **more,
) -> None:
    """Train and compare with the reference.

    ``bound`` is relative to each gradient. Coded small values share blocks with larger ones, which
    determine their error.
    """
    ranks = dist.get_world_size()
    if plan:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        kind, dp = Block, mesh["dp"]
    else:
        kind, dp = Odd, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    rank, replicas = dp.get_local_rank(), dp.size()
    want, parameters = reference(replicas, micro, clip, kind)
    model = seeded(kind)
    if plan:
        parallelize_module(model, mesh["tp"], plan)
    getattr(commpass.parallel, how)(model, dp, **more)
    compiled = torch.compile(
        model, backend=commpass.backend(policy, inner=inner, strict=True), fullgraph=True
    )
    learn = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE, momentum=0.9)
    for step, (losses, grads, norm) in enumerate(want):
        learn.zero_grad()
        for i in range(micro - 1):
            with accumulate(model):
                (loss_of(compiled, batch(micro * step + i, rank)) / micro).backward()
        loss = loss_of(compiled, batch(micro * step + micro - 1, rank))
        (loss / micro).backward()
        if clip:
            got = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            close(whole(got), norm.double(), bound, "norm")
        assert abs(float(loss) / losses[micro * rank + micro - 1] - 1) <= max(bound, 1e-5)
        found = gradients(model)
        assert sorted(found) == sorted(grads)
        everything = torch.cat([gradient.flatten() for gradient in grads.values()])
        least = float(everything.square().mean().sqrt()) if bound > 1e-3 else 1e-6
        for name, gradient in found.items():
            close(gradient, grads[name], bound, f"{how} {step} {name}", least)
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        learn.step()
    got = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, value in got.items():
        close(value, parameters[name], max(bound, 1e-5), name)
    check_alike(got.values())
    if how == "replicate" and not plan:
        check_alike(parameter.to_local() for parameter in model.parameters())


CASES = [
    ("replicate", EXACT, 2e-5),
    ("shard", EXACT, 2e-5),
    rarely("replicate", INT8, 0.1),
    ("shard", INT8, 0.1),
    ("replicate", ROTATED, 0.1),
    rarely("shard", ROTATED, 0.1),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("how", "policy", "bound"), CASES)
def test_two_ranks(ranks2, how, policy, bound):
    ranks2.run(train, how, policy, bound)


@pytest.mark.every
@pytest.mark.parametrize(
    ("how", "policy", "bound"), [("shard", EXACT, 2e-5), *(rarely(*c) for c in CASES[:1])]
)
def test_three_ranks_have_unequal_parts(ranks3, how, policy, bound):
    ranks3.run(train, how, policy, bound)


@pytest.mark.every
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_four_ranks_under_inductor(ranks4, how):
    ranks4.run(train, how, EXACT, 2e-5, "inductor")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.down(torch.tanh(self.up(self.norm(x)))))


@pytest.mark.every
@pytest.mark.parametrize("how", ["shard", rarely("replicate")])
def test_parallelism_around_tensor_parallelism_with_clipping_and_accumulation(ranks4, how):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ranks4.run(train, how, EXACT, 2e-5, "eager", 2, 0.1, plan)


@pytest.mark.every
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_accumulated_and_clipped(ranks2, how):
    ranks2.run(train, how, EXACT, 2e-5, "eager", 3, 0.05)


def mixed_precision(how: str) -> None:
    train(how, EXACT, 0.05, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.every
@pytest.mark.parametrize("how", ["shard", rarely("replicate")])
def test_mixed_precision(ranks2, how):
    ranks2.run(mixed_precision, how)


# --- bytes sent -----------------------------------------------------------------------------------


def counted(how: str, policy) -> tuple[list, list]:
    """Return (what the process group gets in one step, what the plans state) as sorted (kind,
    dtype, bytes).

    Then return what it gets while gradients are accumulated.
    """
    group = counting_group()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = getattr(commpass.parallel, how)(
        seeded(Block), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    seen = len(commpass.plans())
    compiled = torch.compile(
        model, backend=commpass.backend(policy, inner="eager", strict=True), fullgraph=True
    )
    loss_of(compiled, batch(0, 0)).backward()
    plans = commpass.plans()[seen:]
    group.seen.clear()
    loss_of(compiled, batch(1, 0)).backward()
    sent = [(kind, str(dtype)[6:], size) for kind, dtype, size in group.seen]
    planned = [
        (stage.kind, stage.nbytes)
        for plan in plans
        for site in plan
        for stage in site.stages
        if stage.role == "exchange"
    ]
    with accumulate(model):
        loss_of(compiled, batch(1, 0)).backward()
        group.seen.clear()
        loss_of(compiled, batch(2, 0)).backward()
    kept = [kind for kind, _, _ in group.seen]
    return sent, planned, kept


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "policy"),
    [("shard", EXACT), ("replicate", EXACT), ("shard", INT8), ("replicate", INT8)],
)
def test_bytes_are_those_of_the_plan(ranks2, how, policy):
    sent, planned, kept = ranks2.run(counted, how, policy)[0]
    assert sorted((kind, size) for kind, _, size in sent) == sorted(planned)
    parameters = sum(parameter.numel() for parameter in Block().parameters())
    if policy == EXACT:
        narrow = [size for _, dtype, size in sent if dtype == "bfloat16"]
        wide = [size for _, dtype, size in sent if dtype == "float32"]
        # Shards: 2 bytes of half of them to gather. Replicated parameters send bf16 gradients
        # unchanged, and are added here as float32.
        assert sum(narrow) == (parameters if how == "shard" else 2 * parameters)
        assert sum(wide) == (4 * parameters if how == "shard" else 0)
        assert how == "shard" or len(narrow) <= 2  # of eight gradients
    else:
        assert {dtype for _, dtype, _ in sent} == {"uint8"}
    assert set(kept) == (
        {kind for kind, _ in planned if "gather" in kind} if how == "shard" else set()
    )


# --- error feedback -------------------------------------------------------------------------------


def fed_back() -> list[str]:
    """What was applied plus the residual under a parameter's name is the mean of all its gradients.

    This holds over several steps, and if another parameter of its shape is trained later.
    """
    commpass.reset_state()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    plain = seeded(Block)
    model = commpass.parallel.replicate(copy.deepcopy(plain), mesh)
    plain = plain.double()
    policy = Policy(
        rules=[Rule(direction="backward", codec="topk(density=0.1)", force=True)], max_error=1.0
    )
    backend = commpass.backend(policy, inner="eager", strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    given: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        for each in (model, plain):
            dict(each.named_parameters())["norm.weight"].requires_grad_(step >= STEPS // 2)
        model.zero_grad()
        loss_of(compiled, batch(step, rank)).backward()
        for name, gradient in gradients(model).items():
            given[name] = given.get(name, 0) + gradient
        for other in range(ranks):
            (loss_of(plain, batch(step, other).double()) / ranks).backward()
    state = commpass.state_dict(model)
    everybodys = gather_objects(state)
    for name, parameter in plain.named_parameters():
        some = [
            value
            for one in everybodys
            for key, value in one.items()
            if key.split("/")[1] == name and isinstance(value, torch.Tensor)
        ]
        kept = sum(value.double() for value in some) / ranks
        close(given[name] + kept, parameter.grad, 1e-5, name)
        assert kept.abs().max() > 0
    return sorted({key.split("/")[1] for key in state})


@pytest.mark.every
def test_error_feedback_belongs_to_the_parameters(ranks2):
    names = ranks2.run(fed_back)[0]
    assert names == sorted(name for name, _ in Block().named_parameters())


# --- checkpoints ----------------------------------------------------------------------------------


def made(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(seed)
    return commpass.parallel.shard(Odd(), mesh)


def save(folder: str, seed: int) -> None:
    dcp.save(made(seed).state_dict(), checkpoint_id=folder)


def load(folder: str, seed: int) -> None:
    model = made(seed + 1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    torch.manual_seed(seed)
    want = Odd()
    for name, value in want.state_dict().items():
        got = model.state_dict()[name]
        assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, value), name
    x = batch(0, 0)
    close(model(x).detach().double(), want(x).detach().double(), 1e-6)


@pytest.mark.slow
def test_checkpoint_goes_to_other_numbers_of_ranks(ranks2, ranks4, tmp_path):
    ranks2.run(save, str(tmp_path / "two"), 5)
    ranks4.run(load, str(tmp_path / "two"), 5)
    ranks4.run(save, str(tmp_path / "four"), 7)
    ranks2.run(load, str(tmp_path / "four"), 7)


# --- ranks that start differently -----------------------------------------------------------------


def begun_differently() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(dist.get_rank())
    model = commpass.parallel.replicate(Block(), mesh)
    check_alike(parameter.to_local() for parameter in model.parameters())
    torch.manual_seed(0)
    assert torch.equal(whole(next(iter(model.parameters()))), Block().norm.weight.double())


def other_models() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    commpass.parallel.shard(nn.Linear(4, 5 + dist.get_rank()), mesh)


def test_ranks_begin_with_the_values_of_the_first(ranks2):
    ranks2.run(begun_differently)
    with pytest.raises(
        RanksFailed, match=r"rank 0 of it has weight: \[5, 4\].*rank 1 has.*\[6, 4\]"
    ):
        ranks2.run(other_models)


# --- DistributedDataParallel in the graph ---------------------------------------------------------


def ddp(policy) -> tuple[list, list]:
    from torch.nn.parallel import DistributedDataParallel

    group = counting_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    want, _ = reference(ranks, kind=Block)
    backend = commpass.backend(policy, inner="eager", strict=True)
    seen = len(commpass.plans())
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = seeded(Block)
        compiled = torch.compile(
            DistributedDataParallel(model, process_group=group), backend=backend
        )
        learn = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            for step, (_, grads, _) in enumerate(want):
                learn.zero_grad()
                group.seen.clear()
                loss_of(compiled, batch(step, rank)).backward()
                for name, gradient in gradients(model).items():
                    close(gradient, grads[name], 1e-5 if policy == EXACT else 0.1, name)
                check_alike(parameter.grad for parameter in model.parameters())
                learn.step()
    sites = [site for plan in commpass.plans()[seen:] for site in plan]
    planned = [stage for site in sites for stage in site.stages if stage.role == "exchange"]
    sent = [(kind, size) for kind, _, size in group.seen]
    return [site.kind for site in sites], sent, [(stage.kind, stage.nbytes) for stage in planned]


ANY_INT8 = Policy(rules=[Rule(codec="int8", force=True)], max_error=0.1)


@pytest.mark.every
@pytest.mark.parametrize("policy", [rarely(EXACT), ANY_INT8])
def test_reducer_of_ddp_in_python(ranks2, policy):
    kinds, sent, planned = ranks2.run(ddp, policy)[0]
    ranks2.stop()  # DDP leaves hooks in the process group
    assert set(kinds) == {"all_reduce"}
    assert len(kinds) <= 2  # of eight gradients
    assert sorted(sent) == sorted(planned)
    sizes = [parameter.numel() for parameter in Block().parameters()]
    if policy == EXACT:
        assert sum(size for _, size in sent) == 4 * sum(sizes)
    else:  # one byte for each, padded to blocks of 256, and the scales
        blocks = sum(-(-size // 256) for size in sizes)
        assert 256 * blocks < sum(size for _, size in sent) < 1.1 * 256 * blocks
