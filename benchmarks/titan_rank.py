"""One rank of torchtitan for ``benchmarks/titan.py``, which starts it on each host.

titan_rank.py RESULT SETUP STEPS [POLICY PROFILE]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "stacks"))
import titan_on_cpu  # noqa: E402, F401 - names the device
import torch  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.train import main  # noqa: E402

SETUPS = {
    "FSDP2": ("llama", ()),
    "tensor parallelism": ("llama", ("--parallelism.tensor_parallel_degree", "2")),
    "pipeline, 1F1B": (
        "llama",
        (
            *("--parallelism.pipeline_parallel_degree", "2"),
            *("--parallelism.pipeline_parallel_schedule", "1F1B"),
            "--training.disable_cuda_graphs",
        ),
    ),
    "graph_trainer, FSDP": ("graph_llama", ()),
    "graph_trainer, TP": ("graph_llama", ("--parallelism.tensor_parallel_degree", "2")),
}
OVERRIDE = "commpass.parallel.torchtitan.compress"


def record(into: list[dict[str, Any]]) -> None:
    """Let torchtitan's metrics, which it logs after each step, also give the time and the loss."""
    log = MetricsProcessor.log

    def recorded(self: MetricsProcessor, step: int, loss: float, *rest: Any, **more: Any) -> None:
        into.append({"step": step, "at": time.perf_counter(), "loss": loss})
        log(self, step, loss, *rest, **more)

    MetricsProcessor.log = recorded


def run() -> None:
    result, setup, steps, *coded = sys.argv[1:]
    config, options = SETUPS[setup]
    given = ["--module", "titan_small", "--config", config, "--training.steps", steps]
    given += ["--compile.enable", "--metrics.log_freq", "1", *options]
    given += ["--dump_folder", str(ROOT / "build" / "stacks" / "titan" / "out")]
    if coded:
        policy, profile = coded
        override = json.dumps({"policy": policy, "profile": profile})
        given += ["--override.imports", f"{OVERRIDE}={override}"]
    found: list[dict[str, Any]] = []
    record(found)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    sys.argv[1:] = given
    torch.set_num_threads(1)
    main()
    rank = os.environ["RANK"]
    Path(f"{result}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    run()
