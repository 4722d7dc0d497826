"""Start, watch and stop one process of a command in each host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from .apart import APART
from .lab import Lab
from .network import LabError

TIMED_OUT = 124  # the exit code of timeout(1)
KILL_S = 2.0


@dataclass(frozen=True)
class Course:
    """What happens while ranks run.

    ``late`` has the seconds from the start at which a host's rank starts, and ``drop`` those at
    which its link goes down. The others are the seconds that other ranks get once a rank has
    failed, and that all ranks get. With ``own_cores``, each host has one core that no other host
    uses.
    """

    late: tuple[tuple[int, float], ...] = ()
    drop: tuple[tuple[int, float], ...] = ()
    grace_s: float = 5.0
    timeout_s: float | None = None
    own_cores: bool = False


@dataclass(frozen=True)
class Outcome:
    code: int
    seconds: float
    why: str = ""


def run(lab: Lab, command: Sequence[str], course: Course) -> Outcome:
    """Return the exit code of the rank that failed first, 0 if none failed."""
    begun = time.monotonic()
    events = [(0.0, "start", host) for host in range(lab.network.hosts)]
    for host, seconds in course.late:
        events[host] = (seconds, "start", host)
    events = sorted(events + [(seconds, "drop", host) for host, seconds in course.drop])
    members: dict[int, subprocess.Popen] = {}
    readers: list[threading.Thread] = []
    code, why, deadline = 0, "", begun + (course.timeout_s or float("inf"))
    try:
        while True:
            now = time.monotonic()
            while events and events[0][0] <= now - begun:
                _, what, host = events.pop(0)
                if what == "drop":
                    lab.drop(host)
                elif not why:
                    members[host] = start(lab, host, command, own_core=course.own_cores)
                    readers += relay(host, members[host])
            ended = {host: one.poll() for host, one in members.items()}
            failed = next((host for host, found in ended.items() if found), None)
            if failed is not None and not why:
                code = ended[failed] if ended[failed] > 0 else 128 - ended[failed]
                why = f"rank {failed} failed with exit code {code}"
                deadline = min(deadline, now + course.grace_s)
            waiting = None in ended.values() or any(what == "start" for _, what, _ in events)
            if not waiting or (why and None not in ended.values()):
                break
            if now >= deadline:
                code, why = (code, why) if why else (TIMED_OUT, "time is up")
                break
            if lab.switch and lab.switch.poll() is not None:
                raise LabError("the switch that delays frames has ended")
            time.sleep(0.01)
    finally:
        seconds = time.monotonic() - begun
        end(list(members.values()))
        for reader in readers:
            reader.join(1)  # a leftover process of the rank may hold its output open
    return Outcome(code, seconds, why)


def start(
    lab: Lab, host: int, command: Sequence[str], *, own_core: bool = False
) -> subprocess.Popen:
    given = {name: value for name, value in os.environ.items() if name != APART}
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    only = ["taskset", "--cpu-list", str(cores_here()[host])] if own_core else []
    return subprocess.Popen(
        [*only, "ip", "netns", "exec", f"host{host}", *command],
        env=usual | given | lab.environment(host),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a rank ends with the processes that it started
    )


def cores_here() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def relay(rank: int, member: subprocess.Popen) -> list[threading.Thread]:
    """Pass on the output of a rank, each line with its number."""
    pipes = ((member.stdout, sys.stdout), (member.stderr, sys.stderr))
    threads = [threading.Thread(target=copy, args=(rank, *pair), daemon=True) for pair in pipes]
    for thread in threads:
        thread.start()
    return threads


def copy(rank: int, source: IO[bytes], target: IO[str]) -> None:
    for line in source:
        target.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
        target.flush()


def end(members: list[subprocess.Popen]) -> None:
    """Ask the running processes to end, and kill those that do not."""
    left = [one for one in members if one.poll() is None]
    for number, patience in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        for one in left:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, number)
        deadline = time.monotonic() + patience
        while left and time.monotonic() < deadline:
            left = [one for one in left if one.poll() is None]
            time.sleep(0.01)
