"""A switch that holds each frame for a fixed time, for kernels without netem.

    python switch.py DELAY_US PORT PORT ...

Ports are network devices of this namespace. A packet socket on each receives the incoming frames,
and sends others out through the device's queue, so that the kernel still enforces its rate. Frames
stay as large as the sender's kernel made them, up to 64 KB, with the header that tells how they are
to be split (``PACKET_VNET_HDR``): a Python process keeps up with few large frames. Prints a line
once it forwards.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

ETH_P_ALL, SOL_PACKET = 3, 263
PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_TIMESTAMPNS = 32, 33, 35
VNET_HEADER = 10  # header before each frame: how to split it, and where its checksum goes
LARGEST = VNET_HEADER + 14 + (1 << 16)
QUEUE = 64 << 20  # bytes that may wait at a port
LOST = {
    errno.ENOBUFS,
    errno.EAGAIN,
    errno.ENETDOWN,
    errno.ENXIO,
}  # a full queue, a link that is down


def port(name: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE)
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE)
    made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    made.bind((name, ETH_P_ALL))
    return made


def arrivals(source: socket.socket):
    """Yield the frames that wait at a port, each with the second at which the kernel received
    it."""
    while True:
        try:
            frame, [(_, _, stamp), *_], _, _ = source.recvmsg(LARGEST, 64)
        except OSError as error:
            if error.errno not in LOST:
                raise
            return
        seconds, nanoseconds = struct.unpack("qq", stamp)
        yield seconds + nanoseconds * 1e-9, frame


def forward(delay: float, ports: list[socket.socket]) -> None:
    behind: dict[bytes, socket.socket] = {}  # the port at which a hardware address was last seen
    held: deque[tuple[float, bytes, socket.socket]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.time()) if held else None
        for source in select.select(ports, [], [], wait)[0]:
            for arrived, frame in arrivals(source):
                behind[frame[VNET_HEADER + 6 : VNET_HEADER + 12]] = source
                held.append((arrived + delay, frame, source))
        now = time.time()
        while held and held[0][0] <= now:
            _, frame, source = held.popleft()
            known = behind.get(frame[VNET_HEADER : VNET_HEADER + 6])
            for target in [known] if known else ports:
                if target is not source:
                    try:
                        target.send(frame)
                    except OSError as error:
                        if error.errno not in LOST:
                            raise


def main(delay_us: str, *names: str) -> None:
    with suppress(PermissionError):  # at a higher priority than the ranks, like a separate switch
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ports = [port(name) for name in names]
    print("ready", flush=True)
    forward(float(delay_us) * 1e-6, ports)


if __name__ == "__main__":
    main(*sys.argv[1:])
