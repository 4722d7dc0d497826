"""What the command line shows: plans, their differences and the doctor's report, as rich
renderables."""

from __future__ import annotations

import math
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from commpass.dump import Dump
from commpass.plan import AGREED_FIELDS, Difference, Plan, PlannedSite, Simplification, diff

if TYPE_CHECKING:
    from commpass.survey import Measured

FORECASTS = ("wire_bytes", "plain_us", "predicted_us", "error", "reason")
"""What a diff shows besides the decisions: what the cost model thought of them."""

COLUMNS = (
    ("site", "module", "direction"),
    ("collective", "group", "tensor"),
    ("bytes", "on the wire", "ratio"),
    ("codec", "algorithm", "chunks"),
    ("plain us", "predicted us", "error"),
)
"""One table column each on a wide terminal; on a narrow one each group is a column of three
lines."""


def size(count: float) -> str:
    """Bytes for people; a negative count is one that nobody knows (a dynamic shape without a
    hint)."""
    if count < 0:
        return "?"
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log2(count) // 10))
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def micros(value: float, beside: float | None = None) -> str:
    """A time in the unit that fits it, or the number that it stands ``beside``."""
    return (
        f"{value:,.1f} us"
        if (value if beside is None else beside) < 10_000
        else f"{value / 1000:,.1f} ms"
    )


def ratio(after: float, before: float) -> str:
    return f"{100 * after / before:.0f}%" if before > 0 and after >= 0 else "-"


def explain(dumps: Sequence[Dump], console: Console) -> Iterator[RenderableType]:
    """The plans of one run, graph by graph, and what they come to."""
    for dump in dumps:
        plan = dump.plan
        yield Text(f"graph {dump.number}: {plan.direction} ({plan.graph})", style="bold")
        passes = f", passes took {sum(dump.passes_ms.values()):.1f} ms" if dump.passes_ms else ""
        yield Text(f"policy {plan.policy}, profile {plan.profile}{passes}")
        if plan.fallback:
            yield Panel(
                Text.assemble(
                    "The untouched graph was compiled, nothing below was carried out:\n",
                    plan.fallback,
                ),
                title="FALLBACK",
                style="bold red",
            )
        if plan.sites:
            table = sites_table(plan.sites, wide=True)
            needs = console.measure(table, options=console.options.update(max_width=10_000)).maximum
            yield table if needs <= console.width else sites_table(plan.sites, wide=False)
            yield Text()
            yield reasons(plan.sites)
            yield Text(totals([plan]), style="bold")
        elif plan.simplified:
            yield Text("no collective is left in this graph")
        else:
            yield Text(
                "no collective in this graph, so there was nothing to decide (backward graphs often"
                " have none)"
            )
        if plan.simplified:
            yield Text()
            yield simplified(plan.simplified)
        yield Text()
    if len(dumps) > 1:
        yield Text(
            f"all {len(dumps)} graphs: {totals([dump.plan for dump in dumps])}", style="bold"
        )
    last = dumps[-1]
    yield Text(
        f"run {last.run}, written {last.written} by rank {last.rank} of {last.world_size}, "
        f"commpass {last.commpass}, torch {last.torch}"
    )


def sites_table(sites: Sequence[PlannedSite], *, wide: bool) -> Table:
    table = plain_table("#")
    table.leading = 0 if wide else 1
    for group, columns in enumerate(COLUMNS):
        for header in columns if wide else ["\n".join(columns)]:
            table.add_column(
                header, justify="right" if group in (2, 4) else "left", overflow="fold"
            )
    for number, site in enumerate(sites, 1):
        groups = cells(site)
        texts = (
            [cell for group in groups for cell in group]
            if wide
            else ["\n".join(group) for group in groups]
        )
        table.add_row(*map(Text, (str(number), *texts)), style="green" if site.compressed else "")
    return table


def cells(site: PlannedSite) -> tuple[tuple[str, ...], ...]:
    """The texts of one site, in the shape of COLUMNS."""
    kind = site.kind + (f"({site.reduce_op})" if site.reduce_op else "")
    tensor = f"{site.dtype.removeprefix('torch.')}[{', '.join(map(str, site.shape))}]"
    algorithm = site.algorithm + (", fused" if site.fused else "")
    algorithm += ", kernel" if site.lowering == "kernel" else ""
    return (
        (site.name, site.module or "-", site.direction),
        (kind, f"{site.group_label or site.group}/{site.group_size}", tensor),
        (size(site.bytes), size(site.wire_bytes), ratio(site.wire_bytes, site.bytes)),
        (site.codec, algorithm, f"{site.chunks} chunks" if site.chunks > 1 else "-"),
        (f"{site.plain_us:,.1f}", f"{site.predicted_us:,.1f}", f"{100 * site.error:.3g}%"),
    )


def reasons(sites: Sequence[PlannedSite]) -> Table:
    """Every reason in full, below the table where it has room; sites that share one share a
    line."""
    numbers: dict[str, list[int]] = {}
    for number, site in enumerate(sites, 1):
        numbers.setdefault(site.reason or "(no reason was recorded)", []).append(number)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for reason, which in numbers.items():
        table.add_row(Text(spans(which)), Text(reason))
    return table


def simplified(steps: Sequence[Simplification]) -> Table:
    """What need not be sent, rule by rule."""
    saved = sum(step.saved_bytes for step in steps)
    table = plain_table(f"{len(steps)} simplified", "into", f"{size(saved)} less")
    for step in steps:
        table.add_row(
            Text(f"{step.site} ({step.rule})"), Text(step.into), Text(size(step.saved_bytes))
        )
    return table


def spans(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def totals(plans: Sequence[Plan]) -> str:
    """A graph that fell back sends and takes what it did before, whatever its plan says."""
    sites = [(site, not plan.fallback) for plan in plans for site in plan.sites]
    known = [
        (site, done)
        for site, done in sites
        if site.bytes >= 0 and (site.wire_bytes >= 0 or not done)
    ]
    before = sum(site.bytes for site, _ in known)
    after = sum(site.wire_bytes if done else site.bytes for site, done in known)
    plain = sum(site.plain_us for site, _ in sites)
    predicted = sum(site.predicted_us if done else site.plain_us for site, done in sites)
    unknown = (
        f" ({len(sites) - len(known)} of unknown size not counted)"
        if len(known) < len(sites)
        else ""
    )
    return (
        f"{len(sites)} site{'s' * (len(sites) != 1)}, {sum(len(plan.compressed) for plan in plans)}"
        f" compressed; {size(before)} -> {size(after)} ({ratio(after, before)}){unknown}; predicted"
        f" {micros(plain, plain)} -> {micros(predicted, plain)}"
    )


def named(dumps: Sequence[Dump]) -> dict[str, Dump]:
    """The graphs by place and direction ("forward 1"): what two runs of one model have in
    common."""
    seen = Counter[str]()
    found = {}
    for dump in dumps:
        seen[dump.plan.direction] += 1
        found[f"{dump.plan.direction} {seen[dump.plan.direction]}"] = dump
    return found


def differences(
    left: Sequence[Dump], right: Sequence[Dump]
) -> list[tuple[str, RenderableType, int]]:
    """For every graph that differs: its name, what to show, and how many differences that are."""
    found: list[tuple[str, RenderableType, int]] = []
    lefts, rights = named(left), named(right)
    for name in dict.fromkeys((*lefts, *rights)):
        a, b = lefts.get(name), rights.get(name)
        if a is None or b is None:
            found.append((name, Text(f"only in {'B' if a is None else 'A'}"), 1))
        elif rows := diff(a.plan, b.plan, (*AGREED_FIELDS, *FORECASTS)):
            found.append((name, diff_table(rows, a.plan, b.plan), len(rows)))
    return found


def diff_table(rows: Sequence[Difference], left: Plan, right: Plan) -> Table:
    modules = {site.name: site.module for plan in (right, left) for site in plan.sites}
    table = plain_table("site", "module", "field", "A", "B")
    for row in rows:
        texts = (
            row.site,
            modules.get(row.site) or "-",
            row.field,
            shown(row, row.left),
            shown(row, row.right),
        )
        table.add_row(*map(Text, texts))
    return table


def codecs(rows: Sequence[Measured]) -> Table:
    """Codecs on some data, one a line."""
    timed = any(row.encode_gbs is not None for row in rows)
    speed_headers = ("encode GB/s", "decode GB/s") if timed else ()
    table = plain_table("codec", "bits", "error", "cosine", "bound", "above", *speed_headers)
    table.caption = (
        "above: bits above 2^-b, the least for a Gaussian (lossless: above the entropy of the"
        " exponents)"
    )
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        speeds = [f"{speed:.2f}" for speed in (row.encode_gbs, row.decode_gbs) if speed is not None]
        error = "lossless" if row.lossless else f"{row.error:.3%}"
        bound = "" if row.lossless else f"{row.bound:.2f}"
        table.add_row(
            row.codec,
            f"{row.bits:.3f}",
            error,
            f"{row.cosine:.6f}",
            bound,
            f"{row.distance:.2f}",
            *speeds,
        )
    return table


def plain_table(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def shown(row: Difference, value: Any) -> str:
    if row.field == "site":
        return "(no such site)" if value is None else str(value)
    if row.field == "wire_bytes":
        return f"{value:,} ({size(value)})"
    return "-" if value in (None, "") else str(value)


@dataclass(frozen=True)
class Check:
    """One thing that an installation has or lacks. Without a ``needed`` one commpass cannot work at
    all."""

    what: str
    state: str
    ok: bool
    meaning: str
    needed: bool


def checks() -> list[Check]:
    """What this installation can do. A probe that fails is a finding, never a traceback."""
    found = []
    for what, probe, have, lack, needed in PROBES:
        try:
            state, ok = probe()
            found.append(Check(what, str(state), ok, have if ok else lack, needed))
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            found.append(Check(what, "no", False, f"{lack} ({why})", needed))
    return found


def torch_version() -> tuple[str, bool]:
    import torch

    major, minor = map(int, torch.__version__.split(".")[:2])
    return torch.__version__, (2, 11) <= (major, minor) < (2, 16)


def distributed(part: str = "") -> tuple[str, bool]:
    """Whether torch.distributed, or one backend of it, was built in."""
    import torch.distributed

    has = torch.distributed.is_available() and (
        not part or getattr(torch.distributed, f"is_{part}_available")()
    )
    return "yes" if has else "no", has


def gpus() -> tuple[str, bool]:
    import torch

    kinds: dict[str, int] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        fp8 = "" if torch.version.hip else ", fp8" if capability >= (8, 9) else ", no fp8"
        kind = (
            f"{torch.cuda.get_device_name(index)} (capability"
            f" {'.'.join(map(str, capability))}{fp8})"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none", bool(kinds)


def triton() -> tuple[str, bool]:
    import triton

    return triton.__version__, True


def compiler() -> tuple[str, bool]:
    from torch._inductor.cpp_builder import get_cpp_compiler

    found = get_cpp_compiler()
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return (found, True) if headers else (f"{found}, but no Python.h", False)


def graph_cache() -> tuple[str, bool]:
    from torch._inductor import config

    on = bool(config.fx_graph_cache and not config.force_disable_caches)
    return "on" if on else "off", on


def drawing() -> tuple[str, bool]:
    return (
        ", ".join(f"{name} {metadata.version(name)}" for name in ("networkx", "matplotlib")),
        True,
    )


def needed_torch() -> str:
    """The versions of torch that this package was made for, as its metadata say."""
    return next(
        line
        for line in metadata.requires("commpass") or ()
        if line.startswith(("torch<", "torch>"))
    )


PROBES = (
    ("python", lambda: (platform.python_version(), True), "", "", True),
    (
        "commpass",
        lambda: (metadata.version("commpass"), True),
        "",
        "not installed: pip install commpass",
        False,
    ),
    ("torch", torch_version, "supported", f"needed: pip install '{needed_torch()}'", True),
    (
        "distributed",
        distributed,
        "torch has collectives",
        "needed: install a torch that was built with it",
        True,
    ),
    (
        "gloo",
        lambda: distributed("gloo"),
        "collectives on the CPU",
        "no collectives on the CPU",
        False,
    ),
    (
        "NCCL",
        lambda: distributed("nccl"),
        "collectives on the GPU",
        "needed on a GPU: a torch for CUDA or ROCm",
        False,
    ),
    ("GPU", gpus, "", "only the CPU can be used; a GPU needs its driver and a torch for it", False),
    (
        "triton",
        triton,
        "Inductor compiles for the GPU",
        "needed on a GPU: pip install triton",
        False,
    ),
    (
        "C++ compiler",
        compiler,
        "Inductor compiles for the CPU",
        "needed on the CPU: g++ and Python headers",
        False,
    ),
    (
        "Inductor FX-graph cache",
        graph_cache,
        "a warm start compiles nothing",
        "every process compiles anew",
        False,
    ),
    ("graph --svg", drawing, "", "pip install 'commpass[graph]'", False),
)
"""What, how to find out, what it means to have it, what it means to lack it, and whether nothing
works without it."""


def doctor(found: Sequence[Check]) -> Table:
    table = plain_table("what", "state", "meaning")
    for check in found:
        style = "green" if check.ok else "bold red" if check.needed else "yellow"
        table.add_row(Text(check.what), Text(check.state, style=style), Text(check.meaning))
    return table
