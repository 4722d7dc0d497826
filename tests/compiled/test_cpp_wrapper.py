"""Inductor's C++ wrapper cannot call the collectives that carry codes: every site stays
uncompressed, with that reason."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from tiers import rarely

import commpass

ops = torch.ops._c10d_functional
FORCED = commpass.Policy(rules=[commpass.Rule(codec="int8", force=True)])


def summed(x):
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)) + 1


def twice(x):
    """Two sums that algebra would merge."""
    return summed(x) + summed(x * 3)


def gathered(x):
    """A sum of which a quarter is used: algebra would make it a reduce_scatter."""
    return summed(x).narrow(0, 0, x.shape[0] // 4)


def planned(function, backend, caplog, **more):
    torch._dynamo.reset()
    seen = len(commpass.plans())
    with caplog.at_level(logging.WARNING, logger="commpass"):
        torch.compile(function, backend=backend, **more)(torch.randn(64, 64))
    assert not caplog.records
    return [site for plan in commpass.plans()[seen:] for site in (*plan, *plan.simplified)]


@pytest.mark.slow
@pytest.mark.parametrize("function", [summed, rarely(twice), rarely(gathered)])
def test_every_site_is_left_alone_with_the_reason(function, fake_group, caplog):
    """commpass compiles every graph that plain torch compiles, without an exception or a
    warning."""
    fake_group(4)
    backend = commpass.backend(FORCED, strict=True)
    for site in planned(function, backend, caplog, options={"cpp_wrapper": True}):
        assert site.codec == "none"
        assert "cpp_wrapper" in site.reason
    with torch._inductor.config.patch(cpp_wrapper=True):
        sites = planned(function, backend, caplog)
    assert sites
    assert all("cpp_wrapper" in site.reason for site in sites)
    assert planned(function, backend, caplog)[0].codec == "int8"  # without the wrapper


def test_graphs_that_inductor_does_not_compile_have_no_wrapper(fake_group, caplog):
    fake_group(4)
    backend = commpass.backend(FORCED, strict=True, inner="eager")
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert planned(summed, backend, caplog)[0].codec == "int8"


@pytest.mark.every
def test_backward_as_well(fake_group):
    fake_group(4)
    torch._dynamo.reset()
    seen = len(commpass.plans())

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return summed(gradient)

    x = torch.randn(64, 64, requires_grad=True)
    backend = commpass.backend(FORCED, strict=True)
    run = torch.compile(Sum.apply, backend=backend, options={"cpp_wrapper": True})
    run(x).sum().backward()
    (site,) = [site for plan in commpass.plans()[seen:] for site in plan]
    assert (site.direction, site.codec) == ("backward", "none")
    assert "cpp_wrapper" in site.reason
