"""Examples, run as a user runs them; where one does not end, what each of its processes did."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from processes import forked

import commpass

ROOT = Path(__file__).parents[1]
LONGEST_S = 240.0
"""Below the time-out of a test, so that the output of an example that hangs is seen."""


def output_of(script: str, ranks: int, *options: str, longest_s: float = LONGEST_S) -> str:
    """What an example prints, its ranks on this host. Raises AssertionError with all that it
    printed where it fails; where it does not end, with the stacks of its processes as well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", script, *options]
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            for pid in _descendants(process.pid):
                os.kill(pid, signal.SIGABRT)
            out, err = process.communicate()
            raise AssertionError(f"{script} did not end in {longest_s} s:\n{out}\n{err}") from None
    assert process.returncode == 0, out + err
    return out


def output_of_forked(
    script: str, ranks: int, folder: Path, *options: str, without_code: str
) -> str:
    """As ``output_of``, of ranks that have torch loaded when they begin, and that no torchrun
    starts; what they print goes into files of ``folder``. No code is generated under the policy of
    the name ``without_code``: torch 2.13 finds no graph of DTensors in Inductor's cache, and
    generates the same code again for seconds."""
    context = forked()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    printed = [folder / f"printed-{rank}" for rank in range(ranks)]
    members = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {**os.environ, **address, **{key: str(n) for key, n in numbers.items()}}
        given = (script, list(options), environment, printed[rank], without_code)
        members.append(context.Process(target=_as_rank, args=given, daemon=True))
        members[-1].start()
    deadline = time.monotonic() + LONGEST_S
    for member in members:
        member.join(max(deadline - time.monotonic(), 0.0))
    late = [member for member in members if member.exitcode is None]
    for member in late:
        os.kill(member.pid, signal.SIGABRT)
        member.join()
    told = "\n".join(path.read_text() for path in printed)
    assert not late, f"{script} did not end in {LONGEST_S} s:\n{told}"
    assert not any(member.exitcode for member in members), told
    return told


def _as_rank(
    script: str, options: list[str], environment: dict[str, str], printed: Path, without_code: str
) -> None:
    backend = commpass.backend

    def chosen(policy: Any, **how: Any) -> Any:
        name = getattr(policy, "name", policy)
        return backend(policy, inner="aot_eager" if name == without_code else "inductor", **how)

    os.environ.clear()
    os.environ.update(environment)
    with printed.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        faulthandler.enable(file)
        os.chdir(ROOT)
        commpass.backend = chosen
        sys.argv = [script, *options]
        sys.path[:0] = [str(ROOT / script.rpartition("/")[0])]
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()


def _descendants(pid: int) -> list[int]:
    """A process and all that it has started, the latter first."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += _descendants(int(child))
    return [*found, pid]
