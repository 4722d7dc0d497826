"""What ``commpass doctor --gpu`` tests between ranks, on ranks without GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")
pytestmark = pytest.mark.xdist_group("ranks")

SIZES = (4096, 65536)
KERNELS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How many ways by one kernel are timed, by kind."""


def found_here() -> tuple[list, list]:
    from commpass.probe.gpu import exchange

    exchange.SIZES, exchange.RUNS, exchange.CALLS = SIZES, 2, 2
    cpu = torch.device("cpu")
    return (
        list(exchange.findings(dist.group.WORLD, cpu)),
        exchange.times(dist.group.WORLD, cpu),
    )


@pytest.mark.every
def test_exchange_that_is_not_possible_is_a_finding_and_has_no_time(ranks2):
    for findings, times in ranks2.run(found_here):
        assert [each.works for each in findings] == [False] * 4
        for each in findings:
            assert "rank 0: tensors on cpu" in each.state
        expected = [(kind, nbytes) for kind in KERNELS for nbytes in SIZES]
        assert [(each.kind, each.nbytes) for each in times] == expected
        for each in times:
            library, ours, *kernels = each.us.values()
            assert library > 0
            assert ours > 0
            assert kernels == [None] * KERNELS[each.kind]
