"""torchtitan, the real one, on CPUs: ``make stacks STACK=titan``.

Its trainer and its ``graph_trainer`` train small models on 2 and 4 ranks, plain and compressed.
Exits with 0 only if sites were compressed and the losses are near the plain ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from titan_small import BUILD, write_data

HERE = Path(__file__).parent
OVERRIDE = "commpass.parallel.torchtitan.compress"
STEPS, NEAR, LONGEST_S = 6, 0.002, 900
TP_FSDP = ("--parallelism.tensor_parallel_degree", "2")
PIPELINE = (
    *("--parallelism.pipeline_parallel_degree", "2"),
    *("--parallelism.pipeline_parallel_schedule", "1F1B", "--training.disable_cuda_graphs"),
)
EXPERTS = ("--parallelism.expert_parallel_degree", "2", "--training.disable_cuda_graphs")
SETUPS = {
    "llama, TP 2 x FSDP 2": (4, "llama", TP_FSDP),
    "llama, TP 2": (2, "llama", TP_FSDP),
    "llama, PP 2": (2, "llama", PIPELINE),
    "llama, FSDP 2, another checkpoint manager": (2, "llama_other_checkpoints", ()),
    "mixture, EP 2 in FSDP 4": (4, "mixture", EXPERTS),
    "graph_trainer, TP 2 x FSDP 2": (4, "graph_llama", TP_FSDP),
}
LOSS = re.compile(r"step: +(\d+) +loss: +([-\d.]+)")
SENT = re.compile(r"(?:commpass - INFO - )(<compress_[^>]+>|.*policy '.*bytes.*)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


COMPRESSED = re.compile(r"(\d+) (?:of \d+ (?:sites?|exchanges) )?compressed")
BYTES = re.compile(r"([\d,]+) bytes as ([\d,]+)")


@dataclass(frozen=True)
class Trained:
    """The loss of each step, and what commpass logged about bytes."""

    losses: dict[int, float]
    sent: list[str]
    log: str

    @property
    def has_codes(self) -> bool:
        """Whether a site is compressed, or an exchange sent fewer bytes than plain."""
        return any(is_compressed(line) for line in self.sent)


def is_compressed(line: str) -> bool:
    smaller = any(int(b.replace(",", "")) < int(a.replace(",", "")) for a, b in BYTES.findall(line))
    return smaller or any(int(number) > 0 for number in COMPRESSED.findall(line))


def train(
    name: str,
    setup: str,
    *options: str,
    policy: str = "",
    steps: int = STEPS,
    folder: Path = BUILD / "out",
) -> Trained:
    """Run torchtitan's trainer under torchrun; end with its log if it fails."""
    ranks, config, parallelism = SETUPS[setup]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "titan_on_cpu.py"), "--module", "titan_small", "--config", config]
    command += ["--training.steps", str(steps), "--compile.enable", *parallelism, *options]
    command += ["--dump_folder", str(folder)]
    if policy:
        given = json.dumps({"policy": policy, "profile": "ethernet-1g"})
        command += ["--override.imports", f"{OVERRIDE}={given}"]
    paths = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(
        command,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    log = COLOUR.sub("", done.stdout + done.stderr)
    (BUILD / f"{name}.log").write_text(log)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{log[-4000:]}")
    losses = {int(step): float(loss) for step, loss in LOSS.findall(log) if float(loss) >= 0}
    sent = list(dict.fromkeys(SENT.findall(log)))
    print(
        f"{name:45} {time.monotonic() - start:4.0f} s, losses {list(losses.values())}", flush=True
    )
    for line in sent:
        print("    " + line, flush=True)
    return Trained(losses, sent, log)


def check(holds: bool, what: str) -> None:
    print(("ok:     " if holds else "FAILED: ") + what, flush=True)
    if not holds:
        raise SystemExit(1)


def check_setup(setup: str) -> None:
    plain = train(f"{setup}, plain", setup)
    check("commpass" not in plain.log, "without the line nothing of commpass is used")
    coded = train(f"{setup}, balanced", setup, policy="balanced")
    check(coded.has_codes, "the ranks send codes")
    check(coded.losses.keys() == plain.losses.keys(), "all steps ran")
    worst = max(abs(coded.losses[step] / plain.losses[step] - 1) for step in plain.losses)
    check(worst < NEAR, f"losses differ by {worst:.3%} at most")


def check_restart(setup: str = "llama, TP 2") -> None:
    """Train on from a checkpoint, which has nothing of commpass's."""
    folder = BUILD / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    whole = train(f"{setup}, whole", setup, policy="balanced", steps=4)
    saved = ("--checkpoint.enable", "--checkpoint.interval", "2")
    halves: dict[int, float] = {}
    for steps in (2, 4):
        name = f"{setup}, from a checkpoint to step {steps}"
        half = train(name, setup, *saved, policy="balanced", steps=steps, folder=folder)
        check(not halves.keys() & half.losses.keys(), f"{len(half.losses)} steps ran")
        halves |= half.losses
    check(halves == whole.losses, "after a restart the losses are those of an uninterrupted run")


def main() -> None:
    write_data()
    for setup in SETUPS:
        check_setup(setup)
    check_restart()


if __name__ == "__main__":
    main()
