"""Lightning, transformers, Accelerate and DeepSpeed, the real ones: ``make stacks STACK=trainers``.

Each trains a small model on 2 ranks of gloo with its own launcher, plain and compressed. The
scripts of docs/trainers.md are run as printed. Exits with 0 only if gradients were compressed, the
losses are near the plain ones, and a restart continues to the bit. ``check_trainers.py accelerate``
checks one of the four.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "trainers.md"
BUILD = HERE.parents[1] / "build" / "stacks" / "trainers"
BIN = Path(sys.executable).parent
NEAR, LONGEST_S = 0.005, 600
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
DEEPSPEED = (str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29617")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "lightning": (sys.executable,),
    "transformers": TORCHRUN,
    "accelerate": TORCHRUN,
    "deepspeed": DEEPSPEED,
}
TOPK = 'name = "topk"\n[[rule]]\ncodec = "topk(density=0.05)"\nforce = true\n'
SCRIPT = re.compile(
    r"^## (\w+)\n.*?```python\n(.*?)```\n.*?```\n(.*?)\n```", re.DOTALL | re.MULTILINE
)
SENT = re.compile(r"([1-9]\d*) of \d+ exchanges compressed, ([\d,]+) instead of ([\d,]+) bytes")


@dataclass(frozen=True)
class Trained:
    """What the ranks of a run found, and its log."""

    ranks: tuple[dict[str, Any], ...]
    log: str

    @property
    def losses(self) -> list[float]:
        return [loss for rank in self.ranks for loss in rank["losses"]]

    @property
    def digests(self) -> list[float]:
        return [rank["digest"] for rank in self.ranks]


def execute(command: list[str], log: Path, **variables: str) -> tuple[int, str]:
    """Run a command with the programs of this environment. Return its exit status and output."""
    paths = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(HERE)}
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=BUILD,
            env=os.environ | paths | settings,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_S,
            check=False,
        )
    return done.returncode, log.read_text()


def train(library: str, name: str, *, fails: bool = False, **options: Any) -> Trained:
    """Run the script of a library; end with its log if it fails, or does not but should."""
    out = BUILD / library / name.replace(" ", "_")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    script = HERE / f"trainers_{library}.py"
    command = [*LAUNCHERS[library], str(script), json.dumps({**options, "out": str(out)})]
    start = time.monotonic()
    status, log = execute(command, out / "log.txt")
    if (status != 0) != fails:
        raise SystemExit(f"{library}, {name}: exit status {status}\n{log[-4000:]}")
    found = tuple(json.loads(file.read_text()) for file in sorted(out.glob("[01].json")))
    summary = found[0].get("summary", "") if found else ""
    took = time.monotonic() - start
    print(f"{library + ', ' + name:42} {took:4.0f} s {summary}", flush=True)
    return Trained(found, log)


def check(holds: bool, what: str) -> None:
    print(("ok:     " if holds else "FAILED: ") + what, flush=True)
    if not holds:
        raise SystemExit(1)


def compare(library: str, name: str, most: float, **options: Any) -> None:
    """Check a compressed training against a plain one. ``most`` is the largest share of bytes."""
    plain = train(library, f"{name} plain", **options)
    coded = train(library, f"{name} balanced", policy="balanced", **options)
    check(len(coded.losses) == len(plain.losses), "all steps ran")
    check(coded.losses != plain.losses, "gradients differ from plain ones")
    pairs = list(zip(coded.losses, plain.losses, strict=True))
    worst = max(abs(one / other - 1) for one, other in pairs)
    check(worst < NEAR, f"losses differ by {worst:.3%} at most; last {pairs[-1]}")
    held = zip(coded.ranks[0].get("held_out", []), plain.ranks[0].get("held_out", []), strict=True)
    check(all(abs(a / b - 1) < NEAR for a, b in held), "evaluations between are near")
    share = coded.ranks[0]["sent"] / coded.ranks[0]["plain"]
    check(share < most, f"{share:.1%} of the bytes are sent")
    if library == "deepspeed":  # the engine does not compare them, as DDP would not
        check(len(set(coded.digests)) == 1, "ranks have the same weights")


def check_restart(library: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that a restarted training with error feedback is one without a restart, to the bit."""
    policy = str(BUILD / "topk.toml")
    whole = train(library, "topk", policy=policy, epochs=2, **first)
    if "save" in second:
        saved = {**first, "save": second["save"]}
        train(library, "topk, saved", policy=policy, epochs=1, **saved)
        second = {"resume": second["save"], "epochs": second["epochs"]}
    again = train(library, "topk, restarted", policy=policy, **(first | second))
    check(whole.ranks[0]["codecs"] == ["topk(density=0.05)"], "gradients are sent by topk")
    check(again.digests == whole.digests, "a restart ends with the same weights, to the bit")
    for one, other in zip(again.ranks, whole.ranks, strict=True):
        count = len(whole.ranks[0]["losses"]) // 2
        check(one["losses"][-count:] == other["losses"][-count:], "its losses are the same")


def check_page(library: str) -> None:
    """Run the script of a library, and its command, as docs/trainers.md prints them."""
    scripts = {
        title.lower(): (text, shell) for title, text, shell in SCRIPT.findall(PAGE.read_text())
    }
    text, shell = scripts[library]
    (BUILD / "next_byte.py").write_text(text)
    status, log = execute(["sh", "-c", shell], BUILD / f"{library}.page.txt")
    print(f"{library}: {shell}", flush=True)
    found = SENT.search(log)
    check(status == 0, "the script of the page ends well")
    check(found is not None, f"it prints: {found[0] if found else log[-2000:]}")


def lightning() -> None:
    options = {"precision": "bf16-mixed", "accumulate": 2, "epochs": 2}
    compare("lightning", "DDP", 0.3, strategy="ddp", **options)
    compare("lightning", "FSDP2", 0.3, strategy="fsdp2", accumulate=2)
    unused = {"strategy": "ddp_find_unused_parameters_true"}
    saved = {"save": str(BUILD / "lightning.ckpt"), "epochs": 2}
    check_restart("lightning", unused, saved)
    failed = train(
        "lightning", "one rank fails", fails=True, strategy="ddp", policy="balanced", fails_at=6
    )
    check("rank 1 fails" in failed.log, "an exception on one rank ends both, and is shown")


def transformers() -> None:
    compare("transformers", "DDP", 0.3, accumulate=2, bf16=True, epochs=2)
    compare("transformers", "FSDP2", 0.3, fsdp=True, accumulate=2)
    folder = BUILD / "transformers" / "topk" / "checkpoints" / "checkpoint-16"
    check_restart("transformers", {"save_steps": 16}, {"resume": str(folder), "epochs": 2})
    failed = train("transformers", "one rank fails", fails=True, policy="balanced", fails_at=4)
    check("rank 1 fails" in failed.log, "an exception on one rank ends both, and is shown")


def accelerate() -> None:
    compare("accelerate", "DDP", 0.3, accumulate=2, precision="bf16", epochs=2)
    saved = {"save": str(BUILD / "accelerate.state"), "epochs": 1}
    check_restart("accelerate", {"find_unused": True}, saved)


def deepspeed() -> None:
    compare("deepspeed", "ZeRO 0", 0.3, stage=0)
    compare("deepspeed", "ZeRO 0, bf16", 0.55, stage=0, bf16=True)
    for stage in (1, 2):
        refused = train("deepspeed", f"ZeRO {stage}", stage=stage, engine_policy="balanced")
        message = refused.ranks[0]["refused"]
        check("DeepSpeed's engine" in message, f"refused: {message}")


CHECKS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (lightning, transformers, accelerate, deepspeed)
}


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "topk.toml").write_text(TOPK)
    for library in sys.argv[1:] or CHECKS:
        check_page(library)
        CHECKS[library]()


if __name__ == "__main__":
    main()
