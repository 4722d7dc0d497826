"""Write the first table of ``docs/performance.md``: limit, best peer and commpass, in milliseconds.

    python -m benchmarks.overview

All numbers are those of files in ``benchmarks/results/``; nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- overview: begin -->", "<!-- overview: end -->"
BYTES = 64 << 20
"""Bytes of the tensors that codecs are measured with."""


@dataclass(frozen=True)
class Row:
    """A row of the table. Times are in milliseconds; ``limit_ms`` is None if none is known."""

    what: str
    limit: str
    limit_ms: float | None
    peer: str
    peer_ms: float
    ours: str
    ours_ms: float
    file: str

    def cells(self) -> list[str]:
        """Return the cells, with the share of the limit and how many times faster than the peer."""
        return [
            self.what,
            f"{shown(self.limit_ms)} ({self.limit})" if self.limit_ms is not None else "-",
            f"{shown(self.peer_ms)} ({self.peer})",
            f"{shown(self.ours_ms)} ({self.ours})",
            f"{self.limit_ms / self.ours_ms:.2f}" if self.limit_ms is not None else "-",
            f"{self.peer_ms / self.ours_ms:.2f}",
            f"`{self.file}`",
        ]


TITLES = (
    "what",
    "limit, ms",
    "without commpass, ms",
    "with commpass, ms",
    "share of the limit",
    "times as fast",
    "file",
)


def shown(ms: float) -> str:
    """Return milliseconds with three digits or more."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def one(rows: list[dict[str, Any]], **where: Any) -> dict[str, Any]:
    """Return the only row with these values."""
    (found,) = (row for row in rows if where.items() <= row.items())
    return found


def reduces(file: str, ranks: int, gbit: float, sizes: dict[int, str]) -> Iterator[Row]:
    rows = read(file)["rows"]["reduces"]
    for kib, size in sizes.items():
        of = {"ranks": ranks, "gbit": gbit, "KiB": kib}
        ours, peer = one(rows, **of, name="int8"), one(rows, **of, name="plain bf16")
        what = f"all_reduce of {size}, {ranks} hosts, {gbit:g} Gbit/s"
        times = ("its bytes on the link", ours["ideal_ms"], "gloo, bf16", peer["ms"][1])
        yield Row(what, *times, "`int8`", ours["ms"][1], file)


def steps(file: str, ranks: int, gbit: float, policy: str) -> Row:
    rows = read(file)["rows"]["steps"]
    of = {"model": "llama", "ranks": ranks, "gbit": gbit}
    ours, plain = one(rows, **of, policy=policy), one(rows, **of, policy="plain")
    what = f"step of a tensor-parallel Llama, {ranks} hosts, {gbit:g} Gbit/s"
    compute = plain["ms"][1] - plain["exposed_ms"]
    times = ("no waits", compute, "Inductor", plain["ms"][1])
    return Row(what, *times, f"`{policy}`", ours["ms"][1], file)


def data_parallel(file: str, gbit: float, peer: str, title: str, way: str) -> Row:
    rows = read(file)["rows"]["data_parallel"]
    ours, base, alone = (one(rows, way=each)["ms"][1] for each in (way, peer, "compute"))
    what = f"data-parallel step, 4 hosts, {gbit:g} Gbit/s"
    return Row(what, "no exchange", alone, title, base, f"`{way}`", ours, file)


def serving(policy: str) -> Row:
    file = "vllm.json"
    off, ours = (one(read(file)["rows"], gbit=0.1, policy=each) for each in ("off", policy))
    what = "vLLM: first token of 512, 2 hosts, 0.1 Gbit/s"
    times = (off["ttft_ms"][1], f"`{policy}`", ours["ttft_ms"][1])
    return Row(what, "", None, "vLLM", *times, file)


def compiling(codec: str) -> Row:
    file = "compile_time.json"
    rows = next(
        run["rows"] for run in reversed(read(file)["runs"]) if run["rows"][0]["layers"] == 8
    )
    ours, plain = (one(rows, codec=each)["compile_s"] * 1e3 for each in (codec, "plain"))
    return Row("compile of 8 layers", "", None, "Inductor", plain, f"`{codec}`", ours, file)


def cpu_codec(codec: str, way: str, peer: str = "") -> Row:
    """Compare a kernel with Inductor's code of the codec, or with another library (``peer``)."""
    file = "codecs_cpu_avx512.json"
    (part,) = read(file)["parts"]
    row, other = one(part["rows"], codec=codec), one(part["rows"], codec=peer or codec)
    ours, theirs = (BYTES / gbs / 1e6 for gbs in (row[f"kernel_{way}_gbs"], other[f"{way}_gbs"]))
    copy = ours * row[f"kernel_{way}_of_copy"]
    what = f"`{codec}`, {way} of 64 MiB, one core"
    return Row(what, "a copy", copy, peer or "Inductor's code", theirs, "kernel", ours, file)


def gpu_codec(codec: str, way: str) -> Row:
    file = "gpu_nvidia_h200.json"
    rows = read(file)["timings"]
    ours = one(rows, job="time block codecs", name=codec, what=f"{way} 64 MiB")
    peer = one(rows, job="rivals", name=f"{codec} against torch.compile", what=way)
    copy = ours["us"] * ours["of_copy"] / 1e3
    what = f"`{codec}`, {way} of 64 MiB, H200"
    theirs = peer["rival_us"] / 1e3
    return Row(what, "a copy", copy, "torch.compile", theirs, "kernel", ours["us"] / 1e3, file)


def rows() -> Iterator[Row]:
    sizes = {4096: "4 MiB", 16384: "16 MiB", 65536: "64 MiB"}
    yield from reduces("network_reduces_2_ranks.json", 2, 1.0, sizes)
    yield from reduces(
        "network_reduces_100m.json", 4, 0.1, {256: "256 KiB", 4096: "4 MiB", 16384: "16 MiB"}
    )
    for gbit in (1.0, 0.1):
        for policy in ("lossless", "balanced"):
            yield steps("network_steps_2_ranks.json", 2, gbit, policy)
    yield steps("network_steps_4_ranks.json", 4, 1.0, "balanced")
    yield data_parallel("data_parallel_1g.json", 1.0, "fp16", "DDP, fp16 hook", "int8")
    for way in ("int8", "aggressive"):
        yield data_parallel("data_parallel_100m.json", 0.1, "fp16", "DDP, fp16 hook", way)
    for policy in ("balanced", "aggressive"):
        yield serving(policy)
    for codec in ("int8", "rotated"):
        yield compiling(codec)
    for codec, peer in (("int8", ""), ("rotated", ""), ("exponent", "ZipNN")):
        for way in ("encode", "decode"):
            yield cpu_codec(codec, way, peer)
    for codec in ("int8", "rotated"):
        for way in ("encode", "decode"):
            yield gpu_codec(codec, way)


def table() -> str:
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in rows())])


def written(page: str) -> str:
    """Return the page with the table as the files have it now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
