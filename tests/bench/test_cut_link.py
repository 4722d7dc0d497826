"""A link is cut while chunks are sent.

Every rank gets an error within the time-out of the process group, and the next run works. Needs
root.
"""

from __future__ import annotations

import re
import sys

import pytest
from test_netlab_hosts import WHY, lab

pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
TIMEOUT_S = 5
SCRIPT = f"""
import os, time, datetime, torch, commpass
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_S}))
ops = torch.ops._c10d_functional
rule = commpass.Rule(codec="int8", algorithm="two_shot", chunks=4, force=True)
policy = commpass.Policy(rules=[rule], more_memory=1.0)

def model(x, w):
    return ops.wait_tensor(ops.all_reduce(x * 1, "sum", "0")), w @ w

step = torch.compile(model, backend=commpass.backend(policy, inner="eager", strict=True))
x, w = torch.ones(1 << 18), torch.ones(64, 64)
seen = begun = time.monotonic()
while time.monotonic() - begun < float(os.environ["SECONDS_TO_RUN"]):
    try:
        y, _ = step(x, w)
    except RuntimeError as error:
        print(f"error {{time.monotonic() - seen:.1f}} s after the last step", flush=True)
        os._exit(7)
    assert abs(float(y[0]) - dist.get_world_size()) < 0.1
    seen = time.monotonic()
print("done", flush=True)
dist.barrier()
os._exit(0)
"""


def run(seconds: int, *arguments: str) -> tuple[int, list[str]]:
    found = lab(
        *("--no-check", "--hosts", "3", "--grace", "20", "--timeout", "50", *arguments, "--"),
        *("env", f"SECONDS_TO_RUN={seconds}", sys.executable, "-c", SCRIPT),
    )
    return found.returncode, sorted(re.findall(r"^\[\d\] (?:error|done).*", found.stdout, re.M))


@pytest.mark.every
def test_cut_link_is_an_error_on_every_rank_in_time_and_the_next_run_works():
    code, said = run(50, "--drop", "1@25")
    assert code == 7
    assert [line[:9] for line in said] == ["[0] error", "[1] error", "[2] error"]
    after = [float(re.search(r"([\d.]+) s", line)[1]) for line in said]
    assert max(after) < 2 * TIMEOUT_S + 5
    code, said = run(1)
    assert (code, said) == (0, ["[0] done", "[1] done", "[2] done"])
