"""Starts a program again in network, mount and process namespaces of its own, so that whatever it
makes is gone with it.

The program is the first process of its namespace: when it ends, in whatever way, the kernel kills
all others there, and network devices and mounts go with the last of them. It is killed when the
process that started it dies.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .network import LabError

APART = "COMMPASS_NETLAB"
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stand_apart() -> None:
    """Returns in a process that stands apart, this program's second start. The first one waits for
    it, hands on signals and leaves with its exit code. Raises ``LabError`` where it cannot be."""
    if APART in os.environ:
        for number in ENDING[1:]:  # the first process of a namespace ignores them otherwise
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        return
    check_machine()
    libc = ctypes.CDLL(None, use_errno=True)
    called(libc.unshare(CLONE_NEWPID), "a namespace of its own")  # of the children, not of this

    def settle() -> None:
        called(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
        called(libc.unshare(CLONE_NEWNS | CLONE_NEWNET), "unshare")
        called(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount /")
        called(libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
        called(libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None), "mount /run")  # for ip netns

    try:
        begun = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, APART: "1"},
            preexec_fn=settle,  # noqa: PLW1509 - a program begins with this: it has no threads
            start_new_session=True,  # a terminal's Ctrl-C comes once, through this process
        )
    except subprocess.SubprocessError as error:
        raise LabError(
            "namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, which are missing"
        ) from error
    for number in ENDING:
        signal.signal(number, lambda number, _: begun.send_signal(number))
    code = begun.wait()
    raise SystemExit(code if code >= 0 else 128 - code)


def check_machine() -> None:
    """What a lab needs, before anything is made."""
    if not sys.platform.startswith("linux"):
        raise LabError("a lab is made of network namespaces, which only Linux has")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LabError("a lab needs root: run it with sudo")


def called(result: int, what: str) -> None:
    if result:
        why = os.strerror(ctypes.get_errno())
        raise LabError(f"{what}: {why} (in a container, start that with --privileged)")


@contextmanager
def inside(host: str) -> Iterator[None]:
    """Moves this thread into a host for a while; a socket stays where it was made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{host}") as there:
        called(libc.setns(there.fileno(), CLONE_NEWNET), f"no way into {host}")
        try:
            yield
        finally:
            called(libc.setns(home.fileno(), CLONE_NEWNET), f"no way back from {host}")
