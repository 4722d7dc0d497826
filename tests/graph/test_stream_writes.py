"""Nothing writes the memory that a single kernel in a separate stream still reads.

The kernel runs as late as it may: at its wait. The process group is fake, and the graph runs on a
CPU.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from graphs import ops
from test_streams import POLICY, RANKS, ROWS, kernels_on_cpu
from tiers import rarely

import commpass
from commpass.lowering.gpu import side_stream

pytestmark = pytest.mark.slow
FAR = commpass.Profile("far", commpass.Link(1000.0, 0.1))


def sent(x):
    return ops.all_reduce(x, "sum", "0")


def input_is_written(x, w, received):
    total = sent(x)
    x.add_(1)
    square = w @ w
    return received(total) + 1, square


def value_is_written(x, w, received):
    y = x * 2
    total = sent(y.t())
    square = w @ w
    y.mul_(5)
    return received(total) + 1, square, y


def part_is_written(x, w, received):
    y = x * 2
    total = sent(y[:4])
    y[:4] = 0
    product = y @ w
    return received(total) + 1, product


def copy_with_a_new_part(x, w, received):
    """Inductor writes the part into the memory of ``y`` if nothing reads it later."""
    y = x * 2
    total = sent(y)
    product = torch.slice_scatter(y, torch.zeros(2, y.shape[1]), 0, 0, 2) @ w
    return received(total) + 1, product


def two_sums(x, w, received):
    y = x * 2
    first = sent(y)
    y.zero_()
    square = w @ w
    second = sent(y + x)
    y.fill_(3)
    return received(first) + 1, received(second), y, square @ w


@pytest.mark.parametrize(
    "function",
    [
        copy_with_a_new_part,
        *map(rarely, (input_is_written, value_is_written, part_is_written, two_sums)),
    ],
)
def test_kernel_at_its_wait_reads_what_was_sent(fake_group, function):
    fake_group(RANKS)
    started = {}

    def start(device, number, launch, output):
        started[number] = launch, output

    def wait(device, number):
        launch, output = started.pop(number)
        launch()
        return output

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 512, generator=generator)
    w = torch.randn(512, 512, generator=generator) * 0.05
    x_compiled, x_eager, seen = x.clone(), x.clone(), len(commpass.plans())
    with (
        kernels_on_cpu([]),
        mock.patch.object(side_stream, "start", start),
        mock.patch.object(side_stream, "wait", wait),
    ):
        backend = commpass.backend(POLICY, profile=FAR, strict=True)
        run = torch.compile(lambda x, w: function(x, w, ops.wait_tensor), backend=backend)
        made = run(x_compiled, w)
    with mock.patch(f"{__name__}.sent", lambda x: x * RANKS):
        expected = function(x_eager, w, lambda x: x)
    sites = [site for plan in commpass.plans()[seen:] for site in plan.sites]
    assert sites
    assert all(site.own_stream for site in sites)
    assert not started
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(x_compiled, x_eager, rtol=0, atol=0)
