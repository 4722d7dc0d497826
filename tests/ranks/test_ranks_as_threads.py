"""Ranks that are threads of one process, as in ``MultiThreadedTestCase`` of PyTorch's own tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import threading
import torch
import torch.distributed as dist
import commpass
from torch.testing._internal.distributed import multi_threaded_pg

torch._C._distributed_c10d._set_thread_isolation_mode(True)
multi_threaded_pg._install_threaded_pg()
store, rule = dist.HashStore(), commpass.Rule(codec="int8", force=True)


def total(x):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0"))


def rank_of_two(rank):
    dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
    backend = commpass.backend(commpass.Policy(rules=[rule]), inner="eager")
    found = torch.compile(total, backend=backend)(torch.full((4096,), rank + 1.0))
    torch.testing.assert_close(found, torch.full((4096,), 6.0), rtol=0, atol=0)
    dist.barrier()
    dist.destroy_process_group()


threads = [threading.Thread(target=rank_of_two, args=(rank,)) for rank in range(2)]
for each in threads:
    each.start()
for each in threads:
    each.join()
for plan in commpass.plans():
    for site in plan:
        print(site.codec, site.reason)
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"COMMPASS_POLICY": "balanced"}], ids=str)
def test_threads_as_ranks_stay_uncompressed_and_do_not_wait_for_each_other(environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    assert all(line.startswith("none ") for line in lines)
    assert "Start a process for each rank" in lines[0]
    assert "Exception in thread" not in done.stderr
    assert "publish" not in done.stderr  # a warning after a wait, which none could answer
