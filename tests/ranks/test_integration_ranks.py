"""Each integration says what it sent, and after its end all is sent as without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiers import has_messages
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as DDP

import commpass
from commpass.distributed.integration import integration_of
from commpass.errors import PolicyError
from commpass.parallel import compress_ddp, compress_fsdp, compress_pipeline, ssfusion
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
INT8 = Policy(rules=[Rule(codec="int8", force=True)])
DENSE = {"force": True, "density": 0.1, "profile": commpass.ethernet(0.1), "profile_steps": 1}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 32, generator=generator)


def mean_gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """The gradients of a step, which are means over the ranks."""
    model.zero_grad()
    model(batch(step)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def by_hand(step: int) -> list[torch.Tensor]:
    found = mean_gradients(net(), step)
    for each in found:
        dist.all_reduce(each.div_(dist.get_world_size()))
    return found


def sharded() -> nn.Module:
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def fsdp(model: nn.Module) -> commpass.parallel.Integration:
    handle = compress_fsdp(model, INT8, strict=True)
    handle.exchanges.backend.inner = "eager"
    return handle


CASES = {
    "ddp": (lambda: DDP(net()), lambda model: compress_ddp(model, INT8, inner="eager")),
    "fsdp": (sharded, fsdp),
    "ssfusion of DDP": (lambda: DDP(net()), lambda model: ssfusion(model, **DENSE)),
    "ssfusion": (net, lambda model: ssfusion(model, **DENSE)),
}


def used_and_closed(name: str) -> None:
    make, integrate = CASES[name]
    model = make()
    with integrate(model) as handle:
        assert handle.model is model
        assert handle.plans == []
        assert handle.bytes == {}
        for step in range(4):
            found = mean_gradients(model, step)
        assert not all(map(torch.allclose, found, by_hand(3)))  # codes were sent
        assert any(site.compressed for plan in handle.plans for site in plan)
        assert 0 < handle.bytes.sent < handle.bytes.plain
        assert repr(handle).startswith(f"<{handle.call}")
        state = handle.state_dict()
        assert bool(state) == name.startswith("ssfusion")
        handle.load_state_dict(state)
        assert integration_of
        if "ssfusion" in name and "DDP" not in name:
            handle.close()  # then gradients stay on their rank
            for one, other in zip(mean_gradients(model, 5), mean_gradients(net(), 5), strict=True):
                torch.testing.assert_close(one, other)
    handle.close()
    assert handle.closed
    assert model not in integration_of
    if name != "ssfusion":
        for one, other in zip(mean_gradients(model, 6), by_hand(6), strict=True):
            torch.testing.assert_close(one, other)
    dist.barrier()


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", CASES)
def test_after_its_end_gradients_are_those_of_torch_alone(ranks2, name):
    ranks2.run(used_and_closed, name)


def hooked(first: str, second: str) -> None:
    """Two integrations of one DDP model after each other; between and after them, DDP's bits."""
    model, plain = CASES[first][0](), DDP(net())
    for number, name in enumerate((first, second)):
        with CASES[name][1](model) as handle:
            for each in ("ddp", "ssfusion of DDP"):
                with pytest.raises(PolicyError, match=f"commpass.parallel.{handle.call}"):
                    CASES[each][1](model)
            for step in range(4):
                found = mean_gradients(model, step)
            assert not all(map(torch.equal, found, mean_gradients(plain, 3)))  # codes were sent
            assert any(site.compressed for plan in handle.plans for site in plan)
            sent = handle.bytes.sent
        for step in range(2):
            found = mean_gradients(model, 10 * number + step)
            assert all(map(torch.equal, found, mean_gradients(plain, 10 * number + step)))
        assert handle.bytes.sent == sent
    assert len(model._comm_hooks) == 1
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("second", ["ddp", "ssfusion of DDP"])
@pytest.mark.parametrize("first", ["ddp", "ssfusion of DDP"])
def test_closed_integration_of_ddp_leaves_its_hook_to_the_next(first, second, ranks2):
    ranks2.run(hooked, first, second)


def stages() -> None:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    own = net()
    stage = PipelineStage(own, rank, 2, cpu)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)

    def step() -> torch.Tensor:
        own.zero_grad()
        x = torch.ones(32, 32)
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
        return own[0].weight.grad.clone()

    with compress_pipeline(stage, INT8) as handle:
        assert handle.bytes == {}
        coded = step()
        assert [plan.direction for plan in handle.plans] == ["forward", "backward"]
        (sent,) = handle.bytes.values()
        assert sent.calls == 2  # one for each microbatch: activations, or their gradients
        assert sent.plain == 32 * 32 * 4
        assert sent.sent < sent.plain / 2
        assert "2 of 2 exchanges compressed" in repr(handle)
        assert handle.state_dict() == {}
        handle.clear()
        assert handle.bytes == {}
    assert "get_fwd_send_ops" not in vars(stage)
    assert not torch.equal(coded, step())
    assert handle.bytes == {}
    dist.barrier()


@has_messages
def test_closed_stages_send_values(ranks2):
    ranks2.run(stages)
