"""``commpass lower``: compile the kernels of a codec or a planned site for any GPU architecture, or
show their C++ for CPUs.

The architecture need not be present on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from commpass.codecs import codec
from commpass.errors import CommpassError, KernelError, PolicyError, nearest, unwritable
from commpass.lowering.inspect.architectures import architecture
from commpass.plan import SINGLE_KERNEL, PlannedSite, dump
from commpass.report.codecs import DTYPES, dtype_of
from commpass.report.tables import console_for, plain_table, print_json

if TYPE_CHECKING:
    import torch

    from commpass.lowering.chain import Chain
    from commpass.lowering.inspect.compiled import Compiled
    from commpass.lowering.inspect.lowerable import Lowerable, Lowered
    from commpass.lowering.inspect.roofline import Prediction

TEXTS = ("triton", "ptx", "sass", "cpp")
"""The text forms of a kernel."""


@dataclass(frozen=True)
class Row:
    """One kernel, or why there is none. ``times`` is the number of places where a site has it."""

    name: str
    found: Lowered | None = None
    why: str = ""
    times: int = 1


@dataclass(frozen=True)
class KernelQuery:
    """The requested kernels: of a codec by ``kernel`` (None: all), or of the sites of a dump."""

    codec: str | None = None
    kernel: str | None = None
    dtype: str = "bfloat16"
    ranks: int = 8
    folder: Path | None = None
    site: str | None = None
    run: str | None = None


def run(
    query: KernelQuery,
    arch: str,
    *,
    text: str = "",
    json: bool = False,
    output: Path | None = None,
) -> None:
    """Compile, and print a table, the text of the kernels, or JSON. Text goes into the file
    ``output`` if there is one.

    The JSON is an object if one kernel was named, else a list.
    """
    needs_triton()
    if architecture(arch).backend == "hip" and text == "sass":
        raise KernelError(f"{arch} has no SASS: --ptx shows its assembly")
    title, rows = rows_of(query, arch)
    one = query.kernel is not None and len(rows) == 1
    if one and rows[0].found is None:
        raise KernelError(rows[0].why)
    if json:
        made = as_jsons(rows)
        print_json(made[0] if one else made)
    elif text:
        mark = MARKS[text]
        shown = [
            text_of(row.found.compiled, text) if row.found else f"{mark} {row.why}" for row in rows
        ]
        titles = [""] if one else [f"{mark} {row.name}\n" for row in rows]
        write([title + each for title, each in zip(titles, shown, strict=True)], output)
    else:
        show(title, rows, arch)


MARKS = {"triton": "#", "ptx": "//", "sass": "//"}
"""The comment mark of each text form."""


def write(texts: Sequence[str], output: Path | None) -> None:
    """Write texts to a file, or print them if there is none. Raise CommpassError if the file cannot
    be written."""
    text = "\n".join(texts)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommpassError(unwritable(output, error)) from error
    typer.echo(f"wrote {output}")


def needs_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise CommpassError(
            "kernels need Triton: pip install 'commpass[kernels]' (no GPU is needed)"
        ) from error


def check_query(query: KernelQuery) -> None:
    """Raise PolicyError unless either a codec or the site of a dump is requested."""
    if query.codec is None and query.folder is None:
        raise PolicyError("give --codec SPEC, or --dump DIR with --site NAME")
    if query.codec is not None and query.folder is not None:
        raise PolicyError("--codec and --dump: a site has its own codec; give one of them")
    if query.folder is not None:
        if query.kernel is not None:
            raise PolicyError("--kernel and --dump: a site has its own kernels; give one of them")
        if query.site is None:
            raise PolicyError("--dump needs --site NAME")
    elif query.site is not None:
        raise PolicyError("--site needs --dump DIR")


def rows_of(query: KernelQuery, arch: str) -> tuple[str, list[Row]]:
    """Return what the kernels belong to, as text, and the kernels."""
    check_query(query)
    if query.folder is not None and query.site is not None:
        return of_site(query.folder, query.run, query.site, arch)
    return of_codec(query, arch)


def of_codec(query: KernelQuery, arch: str) -> tuple[str, list[Row]]:
    from commpass.lowering.inspect.kernels import KERNELS, NAMES, kernels_named

    coder = codec(query.codec or "")
    dtype = dtype_of(query.dtype)
    if query.kernel is not None and query.kernel not in NAMES:
        raise KernelError(f"no kernel {query.kernel!r}{nearest(query.kernel, NAMES)}")
    rows: list[Row] = []
    for name in KERNELS if query.kernel is None else (query.kernel,):
        rows += rows_for(name, partial(kernels_named, name, coder, dtype, query.ranks, arch), arch)
    return f"{coder.spec} of {query.dtype}, {query.ranks} ranks", rows


def of_site(folder: Path, run: str | None, name: str, arch: str) -> tuple[str, list[Row]]:
    """Return the kernels of a planned site: a chain for each computation between two exchanges."""
    from commpass.lowering.fused import role_of
    from commpass.lowering.inspect.chains import of_stages
    from commpass.lowering.inspect.kernels import of_site_chain

    site, dtype = _coded_site(folder, run, name)
    rows: list[Row] = []
    for place in of_stages(site.stages, dtype, site.group_size):
        made = partial(of_site_chain, place, arch)
        rows += rows_for(role_of(place.chain), made, arch, place.times)
    values = site.dtype.removeprefix("torch.")
    where = f"{site.codec} by {site.algorithm}, {values}, {site.group_size} ranks"
    return f"{site.name}: {where}", rows


def _coded_site(folder: Path, run: str | None, name: str) -> tuple[PlannedSite, torch.dtype]:
    """Return a compressed site with kernels between its exchanges, and the dtype of its values."""
    site = site_of(folder, run, name)
    dtype = site.dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise KernelError(f"site {name!r} holds {dtype}: no codec takes it")
    if site.lowering == SINGLE_KERNEL:
        raise KernelError(
            f"site {name!r} is a single kernel with its exchange (docs/exchange.md); this command"
            " shows kernels between two exchanges"
        )
    return site, DTYPES[dtype]


def site_of(folder: Path, run: str | None, name: str) -> PlannedSite:
    """Return a compressed site by name, of the newest run or of a named one."""
    sites = [site for one in dump.read_run(folder, run) for site in one.plan.sites]
    found = [site for site in sites if site.name == name]
    if not found:
        raise KernelError(f"{folder}: no site {name!r}{nearest(name, [s.name for s in sites])}")
    compressed = [site for site in found if site.compressed]
    if not compressed:
        raise KernelError(f"site {name!r} is uncompressed ({found[0].reason}): it has no kernels")
    return compressed[0]


def rows_for(
    name: str, make: Callable[[], Sequence[Lowerable]], arch: str, times: int = 1
) -> list[Row]:
    """Return compiled kernels, or why they cannot be compiled."""
    from commpass.lowering.inspect.lowerable import lower

    try:
        return [Row(each.name, lower(each, arch), times=times) for each in make()]
    except KernelError as error:
        return [Row(name, why=str(error), times=times)]


# --- for CPUs -------------------------------------------------------------------------------------


def show_cpp(query: KernelQuery, output: Path | None = None) -> None:
    """Print the C++ of the kernels, or write it to a file, each below a comment with its name and
    who generated it.

    Raise KernelError if there is none at all.
    """
    from commpass.lowering.inspect.cpp import cpp_of

    check_query(query)
    missing, texts = list[str](), list[str]()
    for name, chain in _chains(query):
        try:
            made = cpp_of(name, chain)
        except KernelError as error:
            missing.append(str(error))
            continue
        why = f" ({made.why})" if made.why else ""
        texts.append(f"// {made.name}, generated by {made.by}{why}\n{made.source}\n")
    if not texts:
        raise KernelError("; ".join(dict.fromkeys(missing)))
    write(texts, output)
    for why in dict.fromkeys(missing):
        typer.echo(why, err=True)


def _chains(query: KernelQuery) -> list[tuple[str, Chain]]:
    """Return the chains of the requested kernels, by name."""
    from commpass.lowering.fused import role_of
    from commpass.lowering.inspect.chains import CHAINS, of_stages

    if query.folder is not None and query.site is not None:
        site, dtype = _coded_site(query.folder, query.run, query.site)
        places = of_stages(site.stages, dtype, site.group_size)
        return [(role_of(place.chain), place.chain) for place in places]
    coder, dtype = codec(query.codec or ""), dtype_of(query.dtype)
    if query.kernel is not None and query.kernel not in CHAINS:
        raise KernelError(f"no kernel {query.kernel!r} for CPUs{nearest(query.kernel, CHAINS)}")
    names = CHAINS if query.kernel is None else (query.kernel,)
    return [(name, CHAINS[name](coder, dtype, query.ranks)) for name in names]


# --- as text --------------------------------------------------------------------------------------


def text_of(found: Compiled, name: str) -> str:
    return {"triton": found.source, "ptx": found.assembly, "sass": found.sass}[name].rstrip()


def show(title: str, rows: Sequence[Row], arch: str) -> None:
    made = table_of(rows)
    console = console_for(made)
    console.print(Text(f"{title}, {arch}", style="bold"))
    if any(row.found for row in rows):
        console.print(made)
    for one in rows:
        if one.found is None:
            console.print(Text(f"{one.name}: {one.why}", style="yellow"))
    for line in notes(rows, arch):
        console.print(Text(line, style="dim"))


def notes(rows: Sequence[Row], arch: str) -> list[str]:
    """Return notes that are needed to read the table."""
    from commpass.lowering.inspect.roofline import MEMORY

    found = [one.found for one in rows if one.found is not None]
    said = [matrices(each.kernel) for each in found if each.kernel.multiplies]
    if any(each.predictions and each.kernel.of == MEMORY for each in found):
        said.append(
            "Upper bounds: the share of the bandwidth of a copy, and the limiting resource. In"
            " parentheses: the share if programs wait together."
        )
    said += together_lines(rows)
    if any(each.predictions and each.kernel.of != MEMORY for each in found):
        said.append("Of a matmul: an upper bound of the share of the tensor cores' peak.")
    said += [
        f"{each.kernel.name}: {each.exposed:.2f} times as long as its products"
        + (" with the end of a tile." if each.kernel.parts else " if nothing overlaps.")
        for each in found
        if each.exposed is not None
    ]
    if any(not each.compiled.loads for each in found):
        said.append("Loads by tensor descriptors (TMA) are not counted.")
    if any(each.counts is None for each in found):
        said.append(f"{arch}: instructions are not counted, so nothing is predicted.")
    if any(each.kernel.moved is None for each in found):
        said.append("Nothing is predicted for kernels whose work depends on the values.")
    if any(each.predictions and each.kernel.whole for each in found):
        said.append("Work that depends on the values is that of normal numbers.")
    counts = [each.counts for each in found if each.counts is not None]
    if any(each.predictions and each.counts and each.counts.loops for each in found):
        said.append("Some loops are counted as if they ran once.")
    if unknown := sorted({name for each in counts for name in each.unknown}):
        said.append(f"Instructions of unknown kinds, of which only issue slots count: {unknown}.")
    return said


def directions(rows: Sequence[Row]) -> dict[str, list[Lowered]]:
    """Return the kernels of each direction that consists of several (``encode``), in order."""
    found: dict[str, list[Lowered]] = {}
    for row in rows:
        if row.found is not None and row.found.kernel.whole is not None:
            found.setdefault(row.name.partition(":")[0], []).append(row.found)
    return found


def together_lines(rows: Sequence[Row]) -> list[str]:
    from commpass.lowering.inspect.lowerable import together

    lines = []
    for name, kernels in directions(rows).items():
        shares = [f"{each.share:.2f} ({each.low:.2f}) {each.card}" for each in together(kernels)]
        if shares:
            lines.append(f"{name}, its {len(kernels)} kernels together: {', '.join(shares)}.")
    return lines


def matrices(kernel: Lowerable) -> str:
    """Return the matrices and the tile of a compiled matmul as a line of text."""
    made = kernel.multiplies
    assert made is not None
    rows, columns, step = made.tile
    left, right = f"[{made.m}, {made.k}]", f"[{made.k}, {made.n}]"
    if made.batches > 1:
        left += f" in {made.batches} parts of equal height"
        right += " each"
    return (
        f"{kernel.name}: {left} @ {right}; a tile has {rows} x {columns} results,"
        f" and each step {step} values along k."
    )


def table_of(rows: Sequence[Row]) -> Table:
    found = [one.found for one in rows if one.found is not None]
    cards = next(([each.card for each in one.predictions] for one in found if one.predictions), [])
    several = any(one.times > 1 for one in rows)
    headers = ["kernel", *(["places"] if several else []), *COLUMNS, *cards]
    table = plain_table(*headers)
    for one in rows:
        if one.found is None:
            continue
        cells = [one.name, *([str(one.times)] if several else []), *cells_of(one.found, len(cards))]
        bad = one.found.compiled.spills > 0 or not one.found.compiled.residence.programs
        table.add_row(*map(Text, cells), style="red" if bad else "")
    return table


COLUMNS = ("registers", "spills", "shared", "warps", "occupancy", "loads", "stores", "tensor")


def cells_of(found: Lowered, cards: int) -> list[str]:
    one = found.compiled
    registers = f"{one.registers} + {one.scalars} scalar" if one.scalars else str(one.registers)
    at = one.residence
    fits = f"{at.occupancy:.0%} ({at.limit})" if at.programs else f"does not fit ({at.limit})"
    return [
        registers,
        f"{one.spills} B" if one.spills else "0",
        f"{one.shared:,}",
        str(one.num_warps),
        fits,
        widths(one.loads),
        widths(one.stores),
        ", ".join(one.matmuls) or "-",
        *([share_of(each) for each in found.predictions] or ["-"] * cards),
    ]


def share_of(one: Prediction) -> str:
    low = f" ({one.low:.2f})" if one.low is not None else ""
    return f"{one.share:.2f}{low} {one.limit}"


def widths(accesses: Any) -> str:
    """Return accesses by bits, widest first: ``4 x 128, 2 x 32``."""
    return ", ".join(f"{number:g} x {8 * width}" for width, number in accesses.items()) or "-"


# --- as data --------------------------------------------------------------------------------------


def as_jsons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return kernels as plain data. Each of several kernels of a direction has the shares that they
    reach ``together``."""
    from commpass.lowering.inspect.lowerable import together

    shares = {
        name: [dataclasses.asdict(each) for each in together(kernels)]
        for name, kernels in directions(rows).items()
    }
    made = [as_json(row) for row in rows]
    for row, data in zip(rows, made, strict=True):
        if found := shares.get(row.name.partition(":")[0]):
            data["together"] = found
    return made


def as_json(one: Row) -> dict[str, Any]:
    """Return one kernel as plain data; its name and the reason if it cannot be compiled."""
    if one.found is None:
        return {"kernel": one.name, "why": one.why}
    found, made = one.found.compiled, one.found.kernel
    predictions = one.found.predictions
    data = {
        "kernel": one.name,
        "places": one.times,
        "arch": found.arch,
        "registers": found.registers,
        "scalars": found.scalars,
        "spills": found.spills,
        "local": found.local,
        "shared": found.shared,
        "warps": found.num_warps,
        "threads": found.threads,
        "programs": found.residence.programs,
        "occupancy": found.occupancy,
        "occupancy_limit": found.residence.limit,
        "loads": {str(8 * width): number for width, number in found.loads.items()},
        "stores": {str(8 * width): number for width, number in found.stores.items()},
        "tensor": dict(found.matmuls),
        "bytes": made.moved,
        "predicted_share": predictions[0].share if predictions else None,
        "limit": predictions[0].limit if predictions else None,
        "cards": [
            {
                "card": each.card,
                "share": each.share,
                "low": each.low,
                "limit": each.limit,
                "ns": dict(each.ns),
            }
            for each in predictions
        ],
    }
    if made.multiplies is not None:
        data["matmul"] = dataclasses.asdict(made.multiplies)
        data["exposed"] = one.found.exposed
    if made.whole is not None:
        data["launched"] = made.launched
        data["direction_bytes"] = made.whole
    counts = one.found.counts
    if counts is not None:
        data["instructions"] = {"all": counts.total, **counts.kinds()}
    return data
