"""densities on real ranks.

What is sent and what is left add up to the gradients, ranks with different batches agree, and
residuals are saved and loaded.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from counting import counting_group
from rank_helpers import forget_process, gather_objects
from tiers import rarely
from torch import nn

import commpass
from commpass.codecs import codec
from commpass.costmodel import KernelRate, Kernels, Link
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
WIDTH, DEPTH = 64, 4
POLICY = Policy(
    rules=[Rule(kind="all_reduce", direction="backward", codec="topk(density=0.05)")],
    max_error=1.0,
    check_calls=0,
    selective=True,
    skip_overlapped=False,
)
STEPS = 4


def profile(call_us: float = 1e3, gflops: float = 1e9) -> commpass.Profile:
    """A selection takes ``call_us``, and the exchange of four of them about 1 ms."""
    kernels = Kernels(0.0, KernelRate(0.0, 0.0), call_us=call_us, gflops=gflops, gbytes_per_s=1e9)
    return commpass.Profile("slow", Link(1.0, 2e-3), kernels=kernels)


class Mean(torch.autograd.Function):
    """A parameter whose gradient is the mean over the ranks."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        return ops.wait_tensor(ops.all_reduce(gradient.contiguous(), "avg", ctx.group)), None


class Replica(nn.Module):
    def __init__(self, group: str):
        super().__init__()
        self.group = group
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            weight, bias = (Mean.apply(p, self.group) for p in (layer.weight, layer.bias))
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x.square().sum()


def batch(step: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator)


def fresh(inner: str, known: commpass.Profile):
    """Return a model, its backend, and a counter of its messages, as in a new process."""
    forget_process()
    counting = counting_group()
    torch.manual_seed(0)
    model = Replica(counting.group_name)
    backend = commpass.backend(POLICY, inner=inner, profile=known, strict=True, timeout=60)
    return model, torch.compile(model, backend=backend, fullgraph=True, dynamic=False), counting


def step(model, compiled, x) -> list[torch.Tensor]:
    model.zero_grad()
    compiled(x).backward()
    return [p.grad.double() for p in model.parameters()]


def exact(model, x) -> list[torch.Tensor]:
    """Return the gradients of this rank, in float64, by eager torch."""
    weights = [p.detach().double().requires_grad_() for p in model.parameters()]
    x = x.double()
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        x = torch.tanh(nn.functional.linear(x, weight, bias))
    x.square().sum().backward()
    return [w.grad for w in weights]


def check_sum(inner: str) -> None:
    model, compiled, counting = fresh(inner, profile())
    names = [name for name, _ in model.named_parameters()]
    size = dist.get_world_size()
    given = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    right = [torch.zeros_like(each) for each in given]
    for number in range(STEPS):
        if number == 2:  # saved and loaded in between
            saved = {name: t.clone() for name, t in commpass.state_dict(model).items()}
            commpass.reset_state()
            commpass.load_state_dict(saved, model)
        counting.seen.clear()
        x = batch(number)
        given = [a + b for a, b in zip(given, step(model, compiled, x), strict=True)]
        right = [a + b / size for a, b in zip(right, exact(model, x), strict=True)]
    right = [sum(gather_objects(each)) for each in right]
    plan = commpass.plans()[-1]
    kinds = [kind for kind, *_ in counting.seen]
    sparse = [site for site in plan.sites if site.codec != NONE]
    assert sparse
    assert kinds.count("all_reduce") == len(plan.sites) - len(sparse) > 0
    (density,) = {codec(site.codec).density.ratio for site in sparse}
    assert 0.001 <= density < 0.05
    state = commpass.state_dict(model)
    left = {name: sum(gather_objects(t.double())) / size for name, t in state.items()}
    scale = max(each.abs().max() for each in right)
    held = 0
    for name, total, want in zip(names, given, right, strict=True):
        module = name.rpartition(".")[0]
        own = [t for key, t in left.items() if module in key and t.shape == want.shape]
        held += len(own)
        assert len(own) <= 1
        rest = own[0] if own else torch.zeros_like(want)
        assert (total + rest - want).abs().max() <= 1e-5 * scale, name
    assert held == len(state) == len(names) - _whole(plan)
    flat = torch.cat([t.flatten() for t in given])
    assert len({each.numpy().tobytes() for each in gather_objects(flat)}) == 1  # law 1


def _whole(plan) -> int:
    """Return how many gradients are sent whole."""
    members = {each.into: len(each.sites) for each in plan.grouped}
    return sum(members.get(site.name, 1) for site in plan.sites if site.codec == NONE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, rarely(4)])
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_sent_and_remaining_values_are_the_sum_of_all_gradients(size, inner, request):
    request.getfixturevalue(f"ranks{size}").run(check_sum, inner)


def disagree(rows: tuple[int, int], then: int) -> list[tuple[str, int]]:
    """Return the digest and the number of gradients sent whole, of a rank with some rows.

    Return them also after the last rank compiles for other rows, alone.
    """
    model, compiled, _ = fresh("aot_eager", profile(10.0, 2 * WIDTH**3 / 1e6))
    found = []
    rank = dist.get_rank()
    for number, many in enumerate((rows[rank], then if rank == 1 else rows[rank])):
        step(model, compiled, batch(number, many))
        plan = next(p for p in reversed(commpass.plans()) if p.direction == "backward")
        assert not plan.fallback
        found.append((plan.digest(), _whole(plan)))
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "then", "some"),
    [((8, 512), 512, False), ((512, 512), 8, True)],  # with 512 rows a matmul takes 8 ms
)
def test_ranks_with_other_batches_agree_and_one_may_compile_alone(rows, then, some, ranks2):
    """If they would decide differently, backward counts as nothing."""
    first, second = ranks2.run(disagree, rows, then)
    assert first == second
    assert len(set(first)) == 1
    assert (first[0][1] > 0) is some
