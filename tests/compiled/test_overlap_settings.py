"""Inductor's settings that order exchanges by what a rank computes.

Ranks that compute different things still start the exchanges of a changed graph in the same order.
"""

from __future__ import annotations

import logging
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import as_rank, ops
from tiers import rarely
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

import commpass
from commpass.distributed.calls import with_boxed_args
from commpass.policy import Policy
from commpass.policy.rules import Rule

RANKS = 2
START = re.compile(r"torch\.ops\._c10d_functional\.((?:all|reduce)_\w+)\.default\((\w+)")
PEAK = "reorder_communication_preserving_peak_memory"
SETTINGS = {
    "by peak memory": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [PEAK, "sink_waits_iterative", PEAK],
    },
    "overlap scheduling": {"aten_distributed_optimizations.enable_overlap_scheduling": True},
}
NAMES = {
    "by peak memory": "reorder_for_compute_comm_overlap",
    "overlap scheduling": "aten_distributed_optimizations.enable_overlap_scheduling",
}


def model(x, weights, more):
    """Independent exchanges of equal sizes on all ranks; rank 1 has ``more`` to compute, and a
    larger batch."""
    group, outputs = dist.group.WORLD.group_name, []
    for w in weights:
        gradient = ops.wait_tensor(ops.all_reduce(x.t() @ torch.tanh(x @ w), "sum", group))
        if more is not None:
            more = torch.tanh(more @ more)
            gradient = gradient + more[:1, :1]
        x = torch.tanh(x @ w)
        part = ops.wait_tensor(ops.reduce_scatter_tensor(w * 2, "sum", RANKS, group))
        rows = ops.wait_tensor(ops.all_gather_into_tensor(w[:64] * 3, RANKS, group))
        outputs += [torch.relu(gradient) @ w, part @ w, rows @ w]
    rows = ops.wait_tensor(ops.all_to_all_single(weights[0] * 5, [128, 128], [128, 128], group))
    return [*outputs, rows @ weights[1]]


def starts(rank, backend, patches):
    """Return the kinds of exchanges in the order in which Inductor's code starts them; its kernels
    are not compiled."""
    with as_rank(rank, RANKS):
        torch._dynamo.reset()
        torch.manual_seed(0)
        weights = [torch.randn(256, 256) for _ in range(3)]
        x = torch.randn(2048 if rank else 8, 256)
        more = torch.randn(1024, 1024) if rank else None
        with (
            torch.no_grad(),
            config.patch({"force_disable_caches": True, **patches}),
            mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=mock.Mock()),
        ):
            _, sources = run_and_get_code(torch.compile(model, backend=backend), x, weights, more)
    source = sources[-1]
    return [kind for kind, _ in START.findall(source[source.index("def call(") :])]


def policy(kind: str | None, skip: Any) -> Policy:
    rule = Rule(codec="int8", force=True, lowering="inline", kind=kind)
    return Policy(rules=[rule], skip=skip)


@pytest.mark.parametrize(
    ("setting", "kind", "skip"),
    [
        ("by peak memory", "all_gather", "move"),
        rarely("by peak memory", None, ()),
        rarely("overlap scheduling", "all_gather", "move"),
        rarely("overlap scheduling", None, ()),
    ],
)
def test_ranks_that_compute_different_things_start_exchanges_alike(setting, kind, skip, caplog):
    """Without commpass, the same setting orders them by rank, or (on a CPU) does not compile."""
    found = []
    with caplog.at_level(logging.WARNING, logger="commpass"):
        for rank in range(RANKS):
            backend = commpass.backend(policy(kind, skip), timeout=20)
            found.append(starts(rank, backend, SETTINGS[setting]))
            assert len(commpass.plans()[-1].compressed) == (3 if kind else 10)
    assert len(found[0]) == 10
    assert found[0] == found[1]
    said = [each.getMessage() for each in caplog.records]
    assert sum(f"{NAMES[setting]} on" in each for each in said) == RANKS, said


@pytest.mark.every
def test_setting_orders_them_by_rank_without_commpass():
    first, second = (starts(rank, "inductor", SETTINGS["by peak memory"]) for rank in range(RANKS))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(NAMES.values()))
def test_graph_that_is_not_changed_keeps_the_setting(name, caplog):
    """Checked on the settings that Inductor gets."""
    seen = []

    def compiled(gm, inputs, **_):
        holder, _, last = name.rpartition(".")
        seen.append(getattr(getattr(config, holder) if holder else config, last))
        return with_boxed_args(gm.forward)

    with (
        as_rank(0, RANKS),
        config.patch({name: True}),
        caplog.at_level(logging.WARNING, logger="commpass"),
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", compiled),
    ):
        for codec in ("off", "int8"):
            torch._dynamo.reset()
            given = "off" if codec == "off" else policy(None, ())
            one = torch.compile(
                lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", "0")),
                backend=commpass.backend(given, timeout=20),
            )
            with torch.no_grad():
                one(torch.ones(4096))
    assert seen == [True, False]
    assert len(caplog.records) == 1
