"""torchft, the real one, on CPUs: ``make stacks STACK=ft``.

Its lighthouse connects two replicas, which torchrun starts and restarts. The program of the page
runs plain and compressed. Then replicas die before an outer step and in one, and come back.
Exits with 0 only if codes were sent, the losses are near the plain ones, and replicas stay equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/torchft.md"
BUILD = HERE.parents[1] / "build/ft"
NEAR, LONGEST_S = 0.01, 240
TOPK = ("--policy", "force:topk(density=0.1)", "--inner", "eager")
LINE = re.compile(r"^(\d+) (\d+) ([\d.]+)$", re.MULTILINE)
SENT = re.compile(r"([\d,]+) instead of ([\d,]+) bytes")
Lines = list[dict[str, Any]]


def check(holds: bool, what: str) -> None:
    print(("ok:     " if holds else "FAILED: ") + what, flush=True)
    if not holds:
        raise SystemExit(1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def lighthouse(replicas: int) -> Iterator[str]:
    """Run torchft's lighthouse. Yield its address."""
    port, program = free_port(), Path(sys.executable).parent / "torchft_lighthouse"
    options = {"bind": f"127.0.0.1:{port}", "min_replicas": replicas, "join_timeout_ms": 10000}
    options |= {"heartbeat_timeout_ms": 2000, "quorum_tick_ms": 100}
    command = [str(program)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with (BUILD / "lighthouse.log").open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            started.kill()
            started.wait()


def run(
    name: str,
    least: int,
    command: Sequence[str],
    dies: str = "",
    ranks: int = 1,
    fails: bool = False,
) -> list[str]:
    """Run two replicas of a program until both end. Return what they printed.

    ``least`` replicas are enough for a quorum; ``dies`` is when replica 1 dies. With ``fails`` both
    must fail.
    """
    start = time.monotonic()
    outputs = [BUILD / f"{name}-{replica}.log" for replica in range(2)]
    started = []
    with lighthouse(least) as address:
        for replica, output in enumerate(outputs):
            settings = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(replica)}
            settings |= {"OMP_NUM_THREADS": "1", "DIE_AT": dies if replica else ""}
            agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            agent += ["--max-restarts", "0" if fails else "2", "--monitor-interval", "0.5"]
            agent += ["--master-port", str(free_port()), *command]
            with output.open("w") as log:
                started.append(
                    subprocess.Popen(
                        agent,
                        stdout=log,
                        stderr=log,
                        env=os.environ | settings,
                        start_new_session=True,
                    )
                )
        try:
            codes = [each.wait(max(1.0, LONGEST_S + start - time.monotonic())) for each in started]
        finally:
            for each in started:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)
    texts = [output.read_text() for output in outputs]
    print(f"{name:35} {time.monotonic() - start:4.0f} s", flush=True)
    if fails:
        check(all(codes), "both replicas end with an error")
    elif any(codes):
        raise SystemExit(f"{name} failed: {codes}\n" + texts[codes.index(max(codes))][-3000:])
    return texts


# --- the program of the page ----------------------------------------------------------------------


def page_program(compressed: bool) -> Path:
    """Write the program of the page to a file, with or without its line for commpass."""
    program = re.search(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert program is not None
    text = program[1]
    if not compressed:
        text, lines = re.subn(
            r"^handle = .*\n|^print\(handle\)\n|^import commpass\n", "", text, flags=re.M
        )
        assert lines == 3
    path = BUILD / ("train.py" if compressed else "train_plain.py")
    path.write_text(text)
    return path


def losses_of(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, _, loss in LINE.findall(text)}


def check_page() -> None:
    plain = [losses_of(text) for text in run("plain", 2, [str(page_program(False))])]
    texts = run("balanced", 2, [str(page_program(True))])
    coded = [losses_of(text) for text in texts]
    print("    plain:   ", plain, "\n    balanced:", coded, flush=True)
    check([list(each) for each in coded] == [list(range(1, 11))] * 2, "all outer steps were made")
    worst = max(abs(a[step] / b[step] - 1) for a, b in zip(coded, plain, strict=True) for step in b)
    check(worst < NEAR, f"losses differ by {worst:.3%} at most")
    for text in texts:
        sent, full = (int(each.replace(",", "")) for each in SENT.findall(text)[-1])
        check(full == 10 * 4 * 344_576, f"plain, each replica would send {full:,} bytes")
        check(0.25 * full < sent < 0.27 * full, f"it sends {sent:,} bytes ({sent / full:.1%})")


# --- replicas that die ----------------------------------------------------------------------------


def lines_of(texts: Sequence[str]) -> list[Lines]:
    return [
        [json.loads(line) for line in text.splitlines() if line.startswith('{"replica"')]
        for text in texts
    ]


def check_equal(lines: list[Lines]) -> None:
    """Check that both replicas have the same parameters after each outer step that both made."""
    made = [
        {
            line["step"]: line["digest"]
            for line in some
            if line["committed"] and line["replicas"] == 2
        }
        for some in lines
    ]
    common = made[0].keys() & made[1].keys()
    check(len(common) >= 4, f"the replicas made {len(common)} outer steps together")
    check(all(made[0][n] == made[1][n] for n in common), "they have equal parameters after each")
    coded = {codec for some in lines for line in some for codec in line["codecs"]}
    check("topk(density=0.1)" in coded, "codes were sent")


def check_death_in_a_step(method: str, *options: str, discarded: int = 1) -> None:
    """Check a death after the first of three buckets.

    With an asynchronous quorum, ``discarded`` is 2: a replica that gets the state of another one
    does not take part in that step, so too few replicas do.
    """
    command = [str(HERE / "ft_replica.py"), method, *TOPK, "--buckets", "400000", *options]
    texts = run(f"{method}, death in a step", 2, command, "3.1")
    lines = lines_of(texts)
    failed = [n for n, line in enumerate(lines[0]) if not line["committed"]]
    check(len(failed) == discarded, f"the survivor discarded {discarded} outer steps")
    before, after = lines[0][failed[0] - 1], lines[0][failed[-1]]
    check(before["residual"] == after["residual"] > 0, "its residuals are those before that step")
    check("the outer step is discarded" in texts[0], "a warning says so")
    check(lines[1][-1]["restarts"] == 1, "the other replica was restarted")
    again = next(line for line in lines[1] if line["restarts"] and line["step"] > 3)
    check(again["step"] == 4, "it continues with the step that was discarded")
    check(again["before"] == [0.0] and again["residual"] > 0, "it began without residuals")
    check_equal(lines)


def check_death_between_steps(method: str, *options: str) -> None:
    command = [str(HERE / "ft_replica.py"), method, *TOPK, "--outer-steps", "16", *options]
    command += ["--min-replicas", "1"]
    lines = lines_of(run(f"{method}, a replica alone", 1, command, "3"))
    alone = [line for line in lines[0] if line["replicas"] == 1 and line["step"] > 3]
    check(len(alone) > 0, f"the survivor made {len(alone)} outer steps alone")
    check(len({line["residual"] for line in alone}) == 1, "its residuals stayed as they were")
    check(alone[0]["residual"] > 0, "it has some")
    later = [line for line in lines[0] if line["step"] > alone[-1]["step"]]
    check(later[0]["residual"] != alone[-1]["residual"], "they were sent with the next codes")
    check(all(line["committed"] for line in lines[0]), "no outer step was discarded")
    check_equal(lines)


def check_policies() -> None:
    """Check that replicas with different policies do not train, nor try for ever."""
    command = [str(HERE / "ft_replica.py"), "diloco", *TOPK, "--policy-of-1", "force:int8"]
    texts = run("diloco, two policies", 2, command, fails=True)
    said = [re.search(r"PlanMismatch: .*", text) for text in texts]
    check(all(said), "both say that their plans differ")


def check_shards() -> None:
    """Check replicas of two ranks each, which shard the model by FSDP2, compressed as well."""
    command = [str(HERE / "ft_replica.py"), "diloco", *TOPK, "--shard", "--outer-steps", "4"]
    texts = run("diloco, replicas of FSDP2", 2, command, ranks=2)
    for rank in range(2):
        print(f"rank {rank} of both replicas:", flush=True)
        check_equal([[line for line in some if line["rank"] == rank] for some in lines_of(texts)])
    names = re.findall(r"names: (.*)", texts[0])
    check("/outer-0/" in "".join(names) and "/outer-1/" in "".join(names), "shards have own names")


def check_frozen() -> None:
    """Check that a replica gets another one's frozen parameters, if it began with its own."""
    command = [str(HERE / "ft_replica.py"), "localsgd", *TOPK, "--freeze", "--async-quorum"]
    lines = lines_of(run("localsgd, frozen parameters", 2, command))
    check_equal(lines)


def check_checkpoints() -> None:
    """Check that replicas continue with their own residuals if the Manager numbers them anew."""
    command = [str(HERE / "ft_replica.py"), "own", *TOPK, "--folder", str(BUILD)]
    ended = lines_of(run("own, saved", 2, command))
    command += ["--load", "--swap", "--outer-steps", "14"]
    lines = lines_of(run("own, continued with other numbers", 2, command))
    left = [some[-1]["residual"] for some in ended]
    print(f"    residuals: {left}", flush=True)
    kept = [some[0]["residual"] for some in lines]
    check(all(each > 0.5 * min(left) for each in kept), f"they were continued: {kept}")
    check_equal(lines)


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    check_page()
    check_death_in_a_step("diloco")
    check_death_in_a_step("localsgd", "--async-quorum", discarded=2)
    check_death_in_a_step("own")
    check_death_between_steps("diloco")
    check_death_between_steps("localsgd")
    check_shards()
    check_policies()
    check_frozen()
    check_checkpoints()


if __name__ == "__main__":
    main()
