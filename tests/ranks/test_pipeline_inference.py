"""A pipeline stage first runs on unwritten memory, to learn the shapes of its results.

That call of a compiled stage is no step: nothing of it may be left in state, and its errors say
nothing about those of real values.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiers import has_messages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, _utils

import commpass
from commpass.parallel import replicate
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = [pytest.mark.xdist_group("ranks"), has_messages]
WIDTH, ROWS, STEPS = 64, 32, 3
POLICIES = {
    "residuals": Policy(rules=[Rule(codec="dgc(density=0.05)", force=True)]),
    "error budget": Policy(rules=[Rule(codec="int8", max_error=0.1)]),
}


def heavy_tailed(found, device):
    """Return what unwritten memory may be: values whose sizes differ by many orders."""
    made = torch.empty_strided(found.shape, found.stride, dtype=found.dtype, device=device)
    return made.copy_(torch.randn(made.shape).cauchy_() ** 5)


def trained(policy_name: str, inferred: bool) -> tuple[list[torch.Tensor], set[str]]:
    """Return the weights after some steps, and the codecs of all sites at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    number, before = mesh["pp"].get_local_rank(), len(commpass.plans())
    torch.manual_seed(number)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    replicate(part, mesh["dp"])
    backend = commpass.backend(
        POLICIES[policy_name], inner="eager", strict=True, profile=commpass.ethernet(0.01)
    )
    x, target = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    shapes = {} if inferred else {"input_args": (x[:1],), "output_args": (x[:1],)}
    if not inferred:
        shapes = {name: x[: ROWS // 2].requires_grad_() for name in shapes}
    stage = PipelineStage(
        torch.compile(part, backend=backend),
        number,
        2,
        torch.device("cpu"),
        group=mesh["pp"].get_group(),
        **shapes,
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    learn = torch.optim.SGD(part.parameters(), lr=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "_make_tensor_from_meta", heavy_tailed)
        for _ in range(STEPS):
            schedule.step(
                *([x] if stage.is_first else []), **({} if stage.is_first else {"target": target})
            )
            learn.step()
            learn.zero_grad()
    dist.barrier()
    codecs = {site.codec for plan in commpass.plans()[before:] for site in plan}
    return [weight.detach().clone() for weight in part.parameters()], codecs


@pytest.mark.parametrize("name", POLICIES)
def test_inference_of_shapes_changes_no_step(ranks4, name):
    stated = ranks4.run(trained, name, False)
    inferred = ranks4.run(trained, name, True)
    for (wanted, codecs), (found, same) in zip(stated, inferred, strict=True):
        assert same == codecs != {"none"}
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
