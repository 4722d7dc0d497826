"""A backward whose gradients of parameters nobody takes is no step: it leaves residuals alone.

AOTAutograd computes the gradients of inputs and parameters in one call.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_helpers import forget_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.parallel import replicate

pytestmark = pytest.mark.xdist_group("ranks")
WIDTH, STEPS = 64, 3
POLICY = commpass.Policy(rules=[commpass.Rule(codec="dgc(density=0.05)", force=True)])


def batch(step: int) -> torch.Tensor:
    seed = 1000 * step + dist.get_rank()
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(loss_of, parameters, step: int) -> None:
    loss_of(batch(step)).backward()


def adversarial(loss_of, parameters, step: int) -> None:
    """Make an adversarial example of other data first."""
    x = batch(step + STEPS)
    torch.autograd.grad(loss_of(x), x)
    plain(loss_of, parameters, step)


def inputs_first(loss_of, parameters, step: int) -> None:
    """Compute the gradient of the input, and then all, as gradient penalties do."""
    x = batch(step)
    loss = loss_of(x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def asked_for(loss_of, parameters, step: int) -> None:
    """Ask for the gradients of parameters by ``torch.autograd.grad``: this is a step."""
    gradients = torch.autograd.grad(loss_of(batch(step)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def into_parameters(loss_of, parameters, step: int) -> None:
    """Give ``backward`` the parameters: this is a step."""
    loss_of(batch(step)).backward(inputs=parameters)


def trained(way) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights and residuals after some steps."""
    forget_process()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, 8))
    replicate(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    function = torch.compile(
        model, backend=commpass.backend(POLICY, inner="eager", strict=True), fullgraph=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = list(model.parameters())
    for step in range(STEPS):
        way(lambda x: function(x).square().mean(), parameters, step)
        optimizer.step()
        optimizer.zero_grad()
    residuals = list(commpass.state_dict(model).values())
    assert residuals
    assert all(float(each.abs().max()) > 0 for each in residuals)
    return [each.detach().clone() for each in parameters], [each.clone() for each in residuals]


def check(ways) -> None:
    wanted = trained(plain)
    for way in ways:
        for some, others in zip(trained(way), wanted, strict=True):
            for found, expected in zip(some, others, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param((adversarial, inputs_first), id="dropped"),
        pytest.param((asked_for, into_parameters), id="taken", marks=pytest.mark.slow),
    ],
)
def test_residuals_change_with_the_gradients_that_are_taken(ways, ranks2):
    ranks2.run(check, ways)
