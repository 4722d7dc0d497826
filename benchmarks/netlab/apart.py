"""Start a program again in new network, mount and process namespaces, so that whatever it creates
is removed with it.

The program is the first process of its namespace. When it ends, for whatever reason, the kernel
kills all other processes of the namespace. Network devices and mounts are removed with the last
one. The program is killed when the process that started it dies.
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
    """Start this program again in new namespaces, and return only in that second process.

    The first process waits for it, passes on signals and exits with its exit code. Raise
    ``LabError`` if namespaces cannot be created.
    """
    if APART in os.environ:
        for number in ENDING[1:]:  # otherwise the first process of a namespace ignores them
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        return
    check_machine()
    libc = ctypes.CDLL(None, use_errno=True)
    # of the children, not of this process
    called(libc.unshare(CLONE_NEWPID), "a namespace of its own")

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
            # so that a terminal's Ctrl-C arrives once, through this process
            start_new_session=True,
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
    """Check what a lab needs, before anything is created."""
    if not sys.platform.startswith("linux"):
        raise LabError("a lab is made of network namespaces, which only Linux has")
    lacks = [f"the command {name}" for name in ("ip", "tc") if shutil.which(name) is None]
    hints = ["install iproute2"] if lacks else []
    if os.geteuid() != 0:
        lacks.append("root")
        hints.append("run it with sudo")
    if lacks:
        raise LabError(f"a lab needs {' and '.join(lacks)}: {' and '.join(hints)}")


def called(result: int, what: str) -> None:
    if result:
        why = os.strerror(ctypes.get_errno())
        raise LabError(f"{what}: {why} (in a container, start that with --privileged)")


@contextmanager
def inside(host: str) -> Iterator[None]:
    """Move this thread into a host for a while; a socket stays where it was created."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{host}") as there:
        called(libc.setns(there.fileno(), CLONE_NEWNET), f"no way into {host}")
        try:
            yield
        finally:
            called(libc.setns(home.fileno(), CLONE_NEWNET), f"no way back from {host}")
