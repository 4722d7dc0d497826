"""Parse AMD assembly as Triton returns it: its metadata, and the widths of its accesses.

Instructions are not counted against pipes, because the throughput of a compute unit is not
documented as NVIDIA's is.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from commpass.errors import KernelError

WIDTHS = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
ACCESS = re.compile(
    r"^\s+(global|buffer|flat|scratch)_(load|store)_([a-z0-9]+)(?:_d16)?(?:_hi)?\b([^\n]*)", re.M
)
MATMUL = re.compile(r"^\s+(v_s?mfmac?_\w+)", re.M)


def resources(text: str) -> dict[str, Any]:
    """Return fields of ``Compiled``: ``registers`` are vector registers of a thread, including
    accumulators, and ``spills`` accesses of private memory."""

    def entry(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", text, re.M)
        if found is None:
            raise KernelError(f"no .{name} in the metadata of AMD's assembly")
        return int(found[1])

    found: dict[str, Counter[int]] = {"load": Counter(), "store": Counter(), "scratch": Counter()}
    for space, way, width, rest in ACCESS.findall(text):
        # An access whose only address is the wave's goes to private memory.
        private = space == "scratch" or (space == "buffer" and "off, s[0:3]" in rest)
        found["scratch" if private else way][WIDTHS.get(width, 4)] += 1
    return {
        "registers": entry("vgpr_count"),
        "scalars": entry("sgpr_count"),
        "spills": sum(width * number for width, number in found["scratch"].items()),
        "local": entry("private_segment_fixed_size"),
        "loads": dict(sorted(found["load"].items(), reverse=True)),
        "stores": dict(sorted(found["store"].items(), reverse=True)),
        "matmuls": dict(Counter(MATMUL.findall(text))),
    }
