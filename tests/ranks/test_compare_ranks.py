"""``commpass compare`` on real ranks: an unchanged script under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import commpass

pytestmark = pytest.mark.xdist_group("ranks")
ROOT = Path(commpass.__file__).parent.parent
SCRIPT = """
import torch, torch.distributed as dist, commpass
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
layer = torch.nn.Linear(64, 64)

@torch.compile(backend=commpass.backend(
    commpass.Policy(name="mine", rules=[commpass.Rule(codec="int8", force=True)]), inner="eager"
))
def run(x):
    return ops.wait_tensor(ops.all_reduce(layer(x), "sum", group)).square().mean()

optimizer = torch.optim.AdamW(layer.parameters())
x = torch.randn(128, 64)
for step in range(12):
    loss = run(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}")
dist.destroy_process_group()
"""


def compare(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess:
    (tmp_path / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "commpass", "compare", "-o", str(tmp_path / "c.html")),
            *(*options, "--", *launcher, "--nproc-per-node", "2", str(tmp_path / "train.py")),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_script_under_torchrun_is_compared_unchanged(tmp_path: Path):
    keep = tmp_path / "kept"
    done = compare(tmp_path, SCRIPT, "--rounds", "1", "--json", "--keep", str(keep))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["clock"]) == (2, "optimizer 0")
    off, on = found["policies"]
    for each in (off, on):
        assert each["steps"] + each["left_out"] == 12
        assert each["left_out"] == 4  # the first step compiles
        assert each["median_ms"] > 0
    assert (off["traffic"]["sites"], off["traffic"]["compressed"]) == (2, 0)  # forward, backward
    assert off["traffic"]["wire_bytes"] == off["traffic"]["bytes"] == 2 * 128 * 64 * 4
    assert on["traffic"]["compressed"] == 2
    assert on["traffic"]["wire_bytes"] < off["traffic"]["bytes"] / 2
    assert len(found["losses"]) == 12
    assert 0 < on["loss_difference"] < 0.05
    assert (tmp_path / "c.html").exists()
    assert sorted(each.name for each in keep.iterdir()) == ["00-off", "01-on"]


@pytest.mark.every
def test_failing_rank_is_shown(tmp_path: Path):
    ill = "assert dist.get_rank() == 0, 'rank 1 is ill'\ndist.destroy"
    script = SCRIPT.replace("dist.destroy", ill)
    done = compare(tmp_path, script, "--rounds", "1")
    assert done.returncode == 2
    assert "AssertionError: rank 1 is ill" in done.stderr
    assert "policy 'off', round 1" in done.stderr.splitlines()[-1]
